"""The result of averaging, and its folder, which is created atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aswa_hf._utils.files import make_folder
from aswa_hf.checkpoint import library_versions
from aswa_hf.checkpoints.streaming import WeightedMean
from aswa_hf.experiments.evaluation import Evaluation
from aswa_hf.run_folder import TRAJECTORY, commit_run
from aswa_hf.trajectory import Trajectory, encode_number, save_trajectories


@dataclass(frozen=True)
class AveragedCheckpoints:
    """The result of averaging: the weights (`state_dict()`, `folder`), and how they were chosen."""

    strategy: str
    checkpoints: list[str]
    """The names of the checkpoints in the order of `trajectory` and `alphas`."""
    alphas: list[float]
    trajectory: Trajectory
    score: float | None
    metric: str
    evaluations: int
    folder: Path | None
    results: dict[str, dict[str, float]]
    """Metrics of the result by split, for runs whose data are known."""
    mean: WeightedMean = field(repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, in the dtypes of the checkpoints."""
        return self.mean.state_dict()

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        rows = zip(self.checkpoints, self.alphas, self.trajectory, strict=True)
        found: dict[str, Any] = encode_number(
            {
                "strategy": self.strategy,
                "metric": self.metric,
                "score": self.score,
                "folder": None if self.folder is None else str(self.folder),
                "evaluations": self.evaluations,
                "results": self.results,
                "checkpoints": [{"name": name, "alpha": alpha, **r.to_json()} for name, alpha, r in rows],
            }
        )
        return found


def refuse_used(output: Path) -> None:
    """Raises ValueError unless the folder for the result is new or empty."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} already exists and is not an empty folder. Choose another one for the result.")


def finish(
    result: AveragedCheckpoints, temporary: Path, output: Path, greater_is_better: bool, known: Evaluation | None
) -> None:
    """Writes the trajectory to the finished folder and moves it to `output` atomically."""
    run: dict[str, Any] = {"versions": library_versions()}
    if known is not None:
        run |= known.about | {"strategies": {result.strategy: result.results}}
    save_trajectories(
        temporary / TRAJECTORY,
        {result.strategy: result.trajectory},
        alphas={result.strategy: result.alphas},
        metric=result.metric,
        greater_is_better=greater_is_better,
        applied=result.strategy,
        checkpoints=result.checkpoints,
        evaluations=result.evaluations,
        run=encode_number(run),
    )
    commit_run(temporary)
    refuse_used(output)
    temporary.replace(output)


@contextmanager
def scratch_folder(output: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A temporary folder on the same disk as the result."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="aswa-") as folder:
            yield Path(folder)
        return
    parent = Path(output).absolute().parent
    make_folder(parent)
    folder = tempfile.mkdtemp(prefix=f".{Path(output).name}.", suffix=".tmp", dir=parent)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
