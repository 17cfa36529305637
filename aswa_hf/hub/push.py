"""Pushes a run, or a model, to a repository on the Hub in one commit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from aswa_hf._utils.files import write_text
from aswa_hf.hub.repository import (
    WEIGHT_FILES,
    check_repo_id,
    check_run,
    check_tag_name,
    last_checkpoint,
    save_run,
    write_repository,
)
from aswa_hf.hub_requests import TIMEOUT, HubError, Step, bounded_requests, check_timeout, is_transient, status_of
from aswa_hf.run_folder import ADAPTER_CONFIG, CARD
from aswa_hf.strategies import Strategy

MAIN_BRANCH, RUNNING_BRANCH = "main", "running"
# Files of an earlier push, removed unless this one has them: weights with other names, which a loader might load
# instead of the new ones, and the arguments that the Trainer pickles.
REPLACED = (*WEIGHT_FILES, ADAPTER_CONFIG, "training_args.bin")
LOOK_TIMEOUT = 5.0  # seconds to look for a commit whose response was lost, after the timeout
RUNNING_CARD = """\
---
tags:
- aswa
---

# The running model

The weights of {name} at the end of training. The averaged weights, and the card that describes how they were chosen,
are on the branch `main`.
"""


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
    timeout: float = TIMEOUT,
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
    `running=True` puts the running model's last weights on the branch "running". A request without an answer for
    `timeout` seconds ends the push. `card` is text and metadata: `license=`, `notes=`, `language=`, `base_model=`,
    `datasets=`, `more_tags=`.
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
                "timeout": timeout,
            }
            return push_to_hub(folder, repo_id, private=private, token=token, **options, **card)
    run = Path(run_or_model)
    check_repo_id(repo_id)
    check_timeout(timeout)
    check_tag_name(tag)
    check_run(run)
    token = push_token(token)
    checkpoint = last_checkpoint(run) if running else None
    with tempfile.TemporaryDirectory() as temporary, bounded_requests(timeout):
        folder = write_repository(run, Path(temporary) / "repository", repo_id, **card)
        branch = Branch(HfApi(endpoint=endpoint, token=token), repo_id, revision or MAIN_BRANCH)
        with pushing("create the repository", repo_id, token) as step:
            url = branch.create_repository(step, private)
        if tag is not None:
            with pushing(f"create the tag {tag}", repo_id, token) as step:
                step.attempt(lambda: _check_tag(branch, tag, folder))
        with pushing("upload the files and commit them", repo_id, token) as step:
            commit = branch.commit(folder, commit_message, step)
        if tag is not None:
            with pushing(f"create the tag {tag}", repo_id, token) as step:
                step.attempt(lambda: _tag(branch.api, repo_id, tag, commit))
        if checkpoint is not None:
            with pushing(f"push the running weights to the branch {RUNNING_BRANCH}", repo_id, token) as step:
                step.attempt(lambda: branch.api.create_branch(repo_id, branch=RUNNING_BRANCH, exist_ok=True))
                for file in (file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
                    file.unlink()
                for file in (file for pattern in WEIGHT_FILES for file in checkpoint.glob(pattern)):
                    shutil.copyfile(file, folder / file.name)
                write_text(folder / CARD, RUNNING_CARD.format(name=repo_id))
                running_branch = Branch(branch.api, repo_id, RUNNING_BRANCH)
                running_branch.commit(folder, "Running model's last weights", step)
    return url


def push_token(token: str | None) -> str:
    """Returns the given token or that of the login; raises HubError if there is neither."""
    found = token or get_token()
    if not found:
        raise HubError("There is no token to push with. Log in with `hf auth login`, or set HF_TOKEN.")
    return found


@dataclass(frozen=True)
class Branch:
    """A branch of a repository on the Hub, which takes the files of a folder in one commit.

    `replaced` are patterns of files of an earlier push, removed unless this one has them.
    """

    api: HfApi
    repo_id: str
    name: str
    repo_type: str = "model"
    replaced: tuple[str, ...] = REPLACED

    def create_repository(self, step: Step, private: bool | None, **options: Any) -> str:
        """Creates the repository unless it exists, and returns its URL; refuses a public one if `private`."""
        name, kind = self.repo_id, self.repo_type
        create = partial(self.api.create_repo, name, repo_type=kind, private=private, exist_ok=True, **options)
        url = str(step.attempt(create))
        if private and not step.attempt(lambda: self.api.repo_info(name, repo_type=kind)).private:
            raise ValueError("it already exists and is public: change that in its settings, or push to another")
        return url

    def commit(self, folder: Path, message: str, step: Step) -> str:
        """Commits these files, unless the branch already has them, and returns its last commit."""
        head = step.attempt(self._info)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, file) for name, file in _files(folder).items()
        ]
        operations += [CommitOperationDelete(name) for name in self._stale(head, folder)]

        def send() -> str:
            try:
                # Not upload_folder, which may split a folder into several commits. Unchanged files are not sent again,
                # so the parent is fixed: no other commit may come in between.
                return self.api.create_commit(
                    self.repo_id,
                    operations,
                    repo_type=self.repo_type,
                    commit_message=message,
                    revision=self.name,
                    parent_commit=head.sha,
                ).oid
            except Exception as error:
                # A refusal is certain. After all other errors the commit may exist, and only its answer was lost.
                refused = 400 <= (status_of(error) or 500) < 500 and status_of(error) != 412
                if not refused or is_transient(error):
                    with suppress(Exception):
                        if made := self.commit_with(folder, LOOK_TIMEOUT):
                            return made
                if status_of(error) == 412:
                    raise ValueError(
                        f"another user has committed to {self.name} since this push began, and nothing was added: "
                        f"look at the new commit, then push again. The Hub: {step.reason(error)}"
                    ) from None
                raise

        return step.attempt(send)

    def commit_with(self, folder: Path, timeout: float | None = None) -> str | None:
        """Returns the last commit if it has exactly the content of these files, else None."""
        head = self._info(files_metadata=True, timeout=timeout)
        found = {file.rfilename: file for file in head.siblings or []}
        for name, path in _files(folder).items():
            file = found.get(name)
            if file is None or (file.lfs.sha256 != _sha256(path) if file.lfs else file.blob_id != _git_hash(path)):
                return None
        return None if self._stale(head, folder) else str(head.sha)

    def _info(self, **options: Any) -> Any:
        return self.api.repo_info(self.repo_id, repo_type=self.repo_type, revision=self.name, **options)

    def _stale(self, head: Any, folder: Path) -> list[str]:
        """Returns the files of an earlier push that must not stay beside those of this one."""
        old = {file.rfilename for file in head.siblings or []} - set(_files(folder))
        return [name for name in sorted(old) if any(_matches(name, pattern) for pattern in self.replaced)]


def _files(folder: Path) -> dict[str, Path]:
    """Returns the files in and below a folder by their names in a repository."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a pattern fits a file; one without a folder means files at the root only."""
    return fnmatch(name, pattern) and ("/" in pattern or "/" not in name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def _git_hash(path: Path) -> str:
    return git_hash(path.read_bytes())


def _check_tag(branch: Branch, tag: str, folder: Path) -> None:
    """Raises ValueError, before the branch changes, if the tag exists and this push would have to move it."""
    marked = _tags(branch.api, branch.repo_id).get(tag)
    if marked is not None and marked != branch.commit_with(folder):
        raise ValueError(
            f"it already marks another commit, {marked[:8]}: choose a new name. {branch.name} has not changed"
        )


def _tag(api: HfApi, repo_id: str, tag: str, commit: str) -> None:
    marked = _tags(api, repo_id).get(tag)
    if marked is None:
        api.create_tag(repo_id, tag=tag, revision=commit)
        marked = _tags(api, repo_id).get(tag)
    if marked is None:
        raise ValueError("the Hub reports success, but there is no such tag")
    if marked != commit:
        raise ValueError(f"it already marks another commit, {marked[:8]}: choose a new name")


def _tags(api: HfApi, repo_id: str) -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}


@contextmanager
def pushing(what: str, repo_id: str, token: str) -> Iterator[Step]:
    """Turns an error of the Hub or the network into one line that names the step and never the token."""
    step = Step(what, token)
    try:
        yield step
    except Exception as error:  # HTTP errors have no base class common to all library versions
        raise HubError(
            f"Pushing to {repo_id} failed at the step: {what} ({step.reason(error)}). Nothing on "
            "this machine has changed; fix the cause and push again."
        ) from None
