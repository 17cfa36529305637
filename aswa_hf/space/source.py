"""What an application shows: a run folder, an averaged checkpoint or a repository, opened without its model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from aswa_hf._utils.files import read_object, refuse_mistyped
from aswa_hf._utils.paths import check_inside
from aswa_hf.hub.card import LABELS, read_card_data, render
from aswa_hf.hub.repository import SHIPPED, complete_history
from aswa_hf.interactive import ADAPTIVE, main_trajectory
from aswa_hf.run_folder import ADAPTER_CONFIG, CARD, CONFIG, PICTURE, RESULTS, SETTINGS, TRAJECTORY, read_config
from aswa_hf.trajectory import Trajectory, decode_numbers, load_trajectories

GRAPH, EXAMPLES = "graph.safetensors", "examples"
LINKS, IMAGES, TEXT, OTHER = "links", "images", "text", "other"
UNNAMED = "# Model Card for Model ID\n"  # the title of the libraries' empty forms
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A run that an application shows."""

    folder: Path
    name: str
    kind: str
    """What can be asked: "links", "images", "text", or "other" for a run of which only the history is shown."""
    trajectories: dict[str, Trajectory] = field(repr=False)
    metric: str
    greater_is_better: bool
    applied: str | None
    results: dict[str, dict[str, Any]] = field(repr=False)
    """Metrics by strategy and split."""
    about: dict[str, Any] = field(repr=False)

    @property
    def title(self) -> str:
        """What was trained on what."""
        model = self.about.get("model")
        if self.kind == LINKS and model:  # the name of its class, as its card has it
            model = (read_config(self.folder / CONFIG).get("architectures") or [model])[0]
        parts = [str(part) for part in (model, self.about.get("dataset")) if part]
        return " on ".join(parts) or self.name

    @property
    def main(self) -> str | None:
        """The strategy whose decisions are shown: the shipped one if it is a kind of ASWA, or else ASWA."""
        if self.applied in ADAPTIVE and self.applied in self.trajectories:
            return self.applied
        return main_trajectory(self.trajectories) if self.trajectories else None

    def card(self) -> str:
        """Returns the text of the model card, without its metadata."""
        path = self.folder / CARD
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (not text or UNNAMED in text) and self.trajectories:  # peft writes a form that nobody has filled in
            text = _rendered(self.folder, self.name)
        if not text:
            return "This model has no card."
        if text.startswith("---\n"):
            text = text.partition("\n---\n")[2]
        # The picture is drawn by the application itself, and a path in a card is not one of its files.
        return "\n".join(line for line in text.splitlines() if f"]({PICTURE})" not in line)


def open_source(run: str | Path) -> Source:
    """Opens a folder, or downloads a repository; raises an error that says what is missing."""
    refuse_mistyped(run)
    folder = Path(run)
    if folder.is_dir():
        check_inside(folder)
        name = folder.resolve().name
    else:
        folder, name = _downloaded(str(run)), str(run)
    history = folder / TRAJECTORY
    if not history.is_file() and not any((folder / config).is_file() for config in (CONFIG, ADAPTER_CONFIG)):
        raise FileNotFoundError(
            f"{run} has neither {TRAJECTORY} nor {CONFIG}. Expected a run folder as `aswa-hf train` writes it, a "
            "saved model, or a repository on the Hub."
        )
    trajectories, content = load_trajectories(history) if history.is_file() else ({}, {})
    about = decode_numbers(content.get("run") or {})
    if not about and (folder / RESULTS).is_file():
        about = decode_numbers(read_object(folder / RESULTS))
    results = about.get("strategies") or {}
    if not results:
        metric = content.get("metric", "score")
        results = {name: {"validation": {metric: t[-1].score}} for name, t in trajectories.items() if t}
    return Source(
        folder=folder,
        name=name,
        kind=_kind(folder),
        trajectories={name: t for name, t in trajectories.items() if t},
        metric=content.get("metric", "score"),
        greater_is_better=content.get("greater_is_better", True),
        applied=content.get("applied"),
        results=results,
        about=about,
    )


def label_of(strategy: str) -> str:
    """Returns the name of a strategy in words."""
    return LABELS.get(strategy, strategy)


def _kind(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = read_object(folder / ADAPTER_CONFIG)
        return TEXT if adapter.get("task_type") in ("CAUSAL_LM", None) else OTHER
    if not (folder / CONFIG).is_file():
        return OTHER
    config = read_config(folder / CONFIG)
    if config.get("model_type") == "kge":
        return LINKS
    classes = [str(name) for name in config.get("architectures") or []]
    if config.get("architecture") or any(name.endswith("ForImageClassification") for name in classes):
        return IMAGES
    return OTHER


def _downloaded(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    from aswa_hf.hub_requests import bounded_requests

    patterns = [*SHIPPED, TRAJECTORY, RESULTS, CARD, GRAPH, f"{EXAMPLES}/*.png"]
    try:
        with bounded_requests():
            return Path(snapshot_download(repo, allow_patterns=patterns))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise FileNotFoundError(
            f"{repo!r} is neither a folder nor a repository on the Hub that can be read ({error})."
        ) from None


def _rendered(folder: Path, name: str) -> str:
    """The card as a push would write it."""
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / TRAJECTORY).write_text(json.dumps(complete_history(folder)), encoding="utf-8")
        for config in (CONFIG, ADAPTER_CONFIG):
            if (folder / config).is_file():
                (place / config).write_bytes((folder / config).read_bytes())
        return str(render(read_card_data(place, name if "/" in name else f"me/{name}")))


class Reloading(Generic[T]):
    """A value that is loaded from files when it is first needed, and again when they have changed.

    While a model is being replaced its files may not belong together: the old value stays until the new one loads.
    """

    def __init__(self, load: Callable[[], T], files: Iterable[Path]):
        self._load, self._files = load, list(files)
        self._lock = threading.Lock()
        self._seen: object = None
        self._value: T | None = None

    def get(self) -> T:
        """Returns the value of the newest files that could be loaded."""
        seen = [_stamp(file) for file in self._files]
        if self._value is not None and seen == self._seen:
            return self._value
        with self._lock:
            if self._value is not None and seen == self._seen:
                return self._value
            try:
                with _without_bars():
                    self._value, self._seen = self._load(), seen
            except Exception:
                if self._value is None:
                    raise
            return self._value


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keeps the bars of transformers for the files that it reads out of an application's log."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def in_memory(model: Any) -> Any:
    """Returns the model with its weights copied into memory: their file may be overwritten."""
    tied: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = tensor.data_ptr()
        tied.setdefault(place, tensor.data.clone())
        tensor.data = tied[place]
    return model


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def run_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a run of `aswa-hf train`, or nothing."""
    return read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
