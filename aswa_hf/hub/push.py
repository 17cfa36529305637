"""Pushes a run, or a model, to a repository on the Hub in one commit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

from aswa_hf._utils.files import write_text
from aswa_hf.hub.repository import (
    WEIGHT_FILES,
    check_repo_id,
    check_run,
    last_checkpoint,
    save_run,
    write_repository,
)
from aswa_hf.run_folder import ADAPTER_CONFIG, CARD
from aswa_hf.strategies import Strategy

RUNNING_BRANCH = "running"
RUNNING_CARD = """\
---
tags:
- aswa
---

# The running model

The weights of {name} at the end of training. The averaged weights, and the card that describes how they were chosen,
are on the branch `main`.
"""


class HubError(OSError):
    """Raised if a push fails; says at which step and why, and that the push can be repeated."""


def push_to_hub(
    run_or_model: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    tag: str | None = None,
    running: bool = False,
    commit_message: str = "Add ASWA checkpoint",
    endpoint: str | None = None,
    strategies: Strategy | Mapping[str, Strategy] | None = None,
    metric: str = "score",
    processor: Any = None,
    about: Mapping[str, Any] | None = None,
    **card: Any,
) -> str:
    """Pushes a run folder, or a model, as one commit and returns the repository's URL; can be repeated.

    A model needs its `strategies`, the first of them applied to it, and the name of the `metric` that decided;
    `processor` and `about` are those of `save_run`.
    `private=None` leaves the visibility of a new repository to the account's settings. `tag` marks the commit,
    `running=True` puts the running model's last weights on the branch "running". `card` is text and metadata:
    `license=`, `notes=`, `language=`, `base_model=`, `datasets=`, `more_tags=`.
    """
    if not isinstance(run_or_model, (str, Path)):
        if not strategies:
            raise ValueError(
                "A model is pushed with the history of its weights: push_to_hub(model, repo_id, strategies=aswa, "
                "metric=…). A run folder has it already."
            )
        if running:
            raise ValueError("running=True needs a run folder: a model has no checkpoints of the running weights.")
        with tempfile.TemporaryDirectory() as temporary:
            folder = save_run(run_or_model, temporary, strategies, metric=metric, processor=processor, **(about or {}))
            options: dict[str, Any] = {
                "revision": revision,
                "tag": tag,
                "commit_message": commit_message,
                "endpoint": endpoint,
            }
            return push_to_hub(folder, repo_id, private=private, token=token, **options, **card)
    run = Path(run_or_model)
    check_repo_id(repo_id)
    check_run(run)
    token = token or get_token()
    if not token:
        raise HubError("There is no token to push with. Log in with `hf auth login`, or set HF_TOKEN.")
    checkpoint = last_checkpoint(run) if running else None
    api = HfApi(endpoint=endpoint, token=token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_repository(run, Path(temporary) / "repository", repo_id, **card)
        with _step("create the repository", repo_id, token):
            url = str(api.create_repo(repo_id, private=private, exist_ok=True))
            if private and not api.model_info(repo_id).private:
                raise ValueError("it already exists and is public: change that in its settings, or push to another")
        with _step("upload the files and commit them", repo_id, token):
            commit = _commit(api, repo_id, folder, revision, commit_message)
        if tag is not None:
            with _step(f"create the tag {tag}", repo_id, token):
                _tag(api, repo_id, tag, commit)
        if checkpoint is not None:
            with _step(f"push the running weights to the branch {RUNNING_BRANCH}", repo_id, token):
                api.create_branch(repo_id, branch=RUNNING_BRANCH, exist_ok=True)
                for file in (file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
                    file.unlink()
                for file in (file for pattern in WEIGHT_FILES for file in checkpoint.glob(pattern)):
                    shutil.copyfile(file, folder / file.name)
                write_text(folder / CARD, RUNNING_CARD.format(name=repo_id))
                _commit(api, repo_id, folder, RUNNING_BRANCH, "Running model's last weights")
    return url


def _commit(api: HfApi, repo_id: str, folder: Path, revision: str | None, message: str) -> str:
    """Commits these files to a branch, unless it already has them, and returns its last commit."""
    head = api.model_info(repo_id, revision=revision)
    files = {file.name: CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())}
    # Weight files of an earlier push with other names: a loader might load them instead of the new ones.
    old = {file.rfilename for file in head.siblings or []} - set(files)
    stale = [
        name for name in sorted(old) if any(fnmatch(name, pattern) for pattern in (*WEIGHT_FILES, ADAPTER_CONFIG))
    ]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*files.values()]
    operations += [CommitOperationDelete(name) for name in stale if "/" not in name]
    # Not upload_folder, which may split a folder into several commits. Unchanged files are not sent again, so the
    # parent is fixed: no other commit may come in between, and a commit whose response was lost is not made twice.
    return api.create_commit(
        repo_id, operations, commit_message=message, revision=revision, parent_commit=head.sha
    ).oid


def _tag(api: HfApi, repo_id: str, tag: str, commit: str) -> None:
    if tag in {ref.name for ref in api.list_repo_refs(repo_id).tags}:
        marked = api.model_info(repo_id, revision=tag).sha
        if marked != commit:
            raise ValueError(f"it already marks another commit, {str(marked)[:8]}: choose a new name")
        return
    api.create_tag(repo_id, tag=tag, revision=commit)


@contextmanager
def _step(what: str, repo_id: str, token: str) -> Iterator[None]:
    """Turns an error of the Hub or the network into one line that names the step and never the token."""
    try:
        yield
    except Exception as error:  # HTTP errors have no base class common to all library versions
        reason = " ".join(str(error).split()).replace(token, "***") or type(error).__name__
        raise HubError(
            f"Pushing to {repo_id} failed at the step: {what} ({reason}). Nothing on this machine has changed; fix "
            "the cause and push again."
        ) from None
