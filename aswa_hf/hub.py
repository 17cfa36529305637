"""Pushing to the Hub: the folder a repository holds, and one commit that puts it there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from aswa_hf.card import CONFIG, PICTURE, RESULTS, TRAJECTORY, read_card_data, render
from aswa_hf.files import write_text
from aswa_hf.trajectory import load_trajectories, plot_trajectories

WEIGHTS, CARD = "model.safetensors", "README.md"
# Besides the weights: configuration and its code, vocabulary, preprocessing. Nothing pickled, no checkpoints, no logs.
SHIPPED = (
    CONFIG,
    WEIGHTS,
    "model.safetensors.index.json",
    "model-*.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "entities.json",
    "relations.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
RUNNING_BRANCH = "running"


class HubError(OSError):
    """A push that failed: at which step, why, and that it may be repeated."""


def write_repository(run: str | Path, folder: str | Path, repo_id: str, **card: Any) -> Path:
    """Writes the exact files of a repository for a run folder: weights, config, trajectory, picture, card."""
    run, folder = Path(run), Path(folder)
    check_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder, so that nothing is mixed up with it.")
    for pattern in SHIPPED:
        for file in run.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    content = json.loads((run / TRAJECTORY).read_text(encoding="utf-8"))
    if "run" not in content and (run / RESULTS).exists():
        content["run"] = json.loads((run / RESULTS).read_text(encoding="utf-8"))
    write_text(folder / TRAJECTORY, json.dumps(content, indent=2, allow_nan=False) + "\n")
    if (run / PICTURE).exists():
        shutil.copyfile(run / PICTURE, folder / PICTURE)
    else:
        trajectories, about = load_trajectories(folder / TRAJECTORY)
        plot_trajectories(trajectories, folder / PICTURE, metric=about["metric"])
    write_text(folder / CARD, str(render(read_card_data(folder, repo_id, **card))))
    return folder


def check_run(run: Path) -> None:
    """Refuses a folder that is no finished run, before anything is copied or sent."""
    if not run.is_dir():
        raise ValueError(f"There is no folder {run}. Expected a run folder, as `aswa-hf train` writes it.")
    weights = [run / WEIGHTS, run / "model.safetensors.index.json", run / "adapter_model.safetensors"]
    missing = [name for name in (TRAJECTORY,) if not (run / name).exists()]
    missing += [] if any(path.exists() for path in weights) else [WEIGHTS]
    if missing:
        raise ValueError(
            f"{run} has no {' and no '.join(missing)}: it is not a finished run. Expected a folder as `aswa-hf train` "
            "writes it, or as Trainer.save_model() does with an ASWACallback."
        )
    load_trajectories(run / TRAJECTORY)


def push_to_hub(
    run: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    tag: str | None = None,
    running: bool = False,
    commit_message: str = "Add ASWA checkpoint",
    endpoint: str | None = None,
    **card: Any,
) -> str:
    """Pushes a run folder as one commit and gives the repository's address; may be repeated without harm.

    `private=None` leaves the visibility of a new repository to the account's settings. `tag` marks the commit,
    `running=True` puts the running model's last weights on the branch "running". `card` is what the user has to say:
    `license=`, `notes=`.
    """
    run = Path(run)
    check_run(run)
    token = token or get_token()
    if not token:
        raise HubError("There is no token to push with. Log in with `hf auth login`, or set HF_TOKEN.")
    checkpoint = last_checkpoint(run) if running else None
    api = HfApi(endpoint=endpoint, token=token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_repository(run, Path(temporary) / "repository", repo_id, **card)
        with _step("create the repository", repo_id, run, token):
            url = str(api.create_repo(repo_id, private=private, exist_ok=True))
        # Files that are there already are not sent again, and without any change there is no second commit.
        with _step("upload the files and commit them", repo_id, run, token):
            _commit(api, repo_id, folder, revision, commit_message)
        if tag is not None:
            with _step(f"create the tag {tag}", repo_id, run, token):
                api.create_tag(repo_id, tag=tag, revision=revision, exist_ok=True)
        if checkpoint is not None:
            with _step(f"push the running weights to the branch {RUNNING_BRANCH}", repo_id, run, token):
                api.create_branch(repo_id, branch=RUNNING_BRANCH, exist_ok=True)
                shutil.copyfile(checkpoint / WEIGHTS, folder / WEIGHTS)
                (folder / CARD).unlink()
                _commit(api, repo_id, folder, RUNNING_BRANCH, "Running model's last weights")
    return url


def _commit(api: HfApi, repo_id: str, folder: Path, revision: str | None, message: str) -> None:
    # Not upload_folder, which may make several commits of one folder.
    files = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
    api.create_commit(repo_id, files, commit_message=message, revision=revision)


def last_checkpoint(run: Path) -> Path:
    """The checkpoint with the running model's last weights."""
    found = sorted(run.glob(f"checkpoint-*/{WEIGHTS}"), key=lambda path: int(path.parent.name.rpartition("-")[2]))
    if not found:
        raise ValueError(f"{run} has no checkpoint with the running model's weights. Push without running=True.")
    return found[-1].parent


@contextmanager
def _step(what: str, repo_id: str, run: Path, token: str) -> Iterator[None]:
    """Turns an error of the Hub or the network into one line that names the step and never the token."""
    try:
        yield
    except Exception as error:  # those of the HTTP library have no base that all its versions share
        reason = " ".join(str(error).split()).replace(token, "***") or type(error).__name__
        raise HubError(
            f"Pushing to {repo_id} failed at the step: {what} ({reason}). Nothing in {run} has changed; repeat the "
            "push when the cause is gone."
        ) from None
