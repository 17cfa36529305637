"""`aswa-hf average`: one set of weights from checkpoints that already exist."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aswa_hf.cli.options import AsJson, loading, named_as_flags

if TYPE_CHECKING:
    from aswa_hf.checkpoints import AveragedCheckpoints, Progress


def average(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT",
            help="A Trainer's output folder, several checkpoint folders or files, or repo@rev1,rev2.",
        ),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", metavar="PATH", help="Folder for the result, new or empty.")
    ],
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="aswa, greedy, best, swad (by validation); swa, lawa, wsm(schedule=cosine), ema, uniform, last.",
        ),
    ] = "aswa",
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="Function that returns the score of a model; not needed for runs of train."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Data of a run of train, if moved; graph of a link predictor."),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", metavar="", help="The score is a loss: lower is better.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the score (default: the function's).")
    ] = None,
    soft_only: Annotated[
        bool, typer.Option("--soft-only", metavar="", help="aswa: never restart from a single checkpoint.")
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(metavar="N|X", help="swa, wsm: the first checkpoint, counted from 0 (default), or a fraction."),
    ] = None,
    decay: Annotated[
        float | None,
        typer.Option(metavar="X", help="ema: the weight of the previous average at each checkpoint (default: 0.7)."),
    ] = None,
    batchnorm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="recalibrate (if training data are known), average or copy."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Average checkpoints that already exist, and write the result as an ordinary checkpoint with its trajectory.

    Reads one checkpoint at a time. The function of `--evaluate` gets the model of a checkpoint (its state dict, if
    transformers does not know the model) and returns one number.

    Example:

    `aswa-hf average trainer-output --evaluate my_eval:accuracy -o averaged`

    `aswa-hf average me/model@step-100,main --strategy uniform -o averaged`
    """
    with loading("the libraries"):
        from aswa_hf.checkpoints import average_checkpoints

    score = None if evaluate is None else _function(evaluate)
    with (
        _quiet_libraries(),
        _bar() as progress,
        named_as_flags("strategy", "start", "decay", "batchnorm", hard_updates="--soft-only"),
    ):
        result = average_checkpoints(
            checkpoints[0] if len(checkpoints) == 1 else checkpoints,
            score,
            strategy,
            output=output_dir,
            dataset=dataset,
            greater_is_better=not lower_is_better,
            metric=metric,
            hard_updates=not soft_only,
            start=None if start is None else _start(start),
            decay=decay,
            batchnorm=batchnorm,
            progress=progress,
        )
    typer.echo(json.dumps(result.to_json(), allow_nan=False) if as_json else _summary(result))


def _function(name: str) -> Callable[[Any], Any]:
    """The function that `module:function` names; the current folder is searched for the module too."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"--evaluate takes module:function, like my_eval:accuracy, got {name!r}.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name.removesuffix(".py"))
    except Exception as error:
        raise ValueError(f"--evaluate: {module_name} cannot be imported ({type(error).__name__}: {error}).") from error
    function: Callable[[Any], Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--evaluate: the module {module_name} has no function {function_name!r}.")
    return function


def _start(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--start takes a number of checkpoints or a fraction, got {text!r}.") from None


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silences the output of transformers for every model that is loaded."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar over evaluations, on standard error."""
    from rich.console import Console

    from aswa_hf.experiments.progress import progress_bar

    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("reading headers", total=None)

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total or None)

        yield show


def _summary(result: AveragedCheckpoints) -> str:
    """One line per checkpoint, and the result."""
    lines = []
    width = max(len(name) for name in result.checkpoints)
    for name, alpha, record in zip(result.checkpoints, result.alphas, result.trajectory, strict=True):
        scores = [
            f"{label} {score:.4f}"
            for label, score in (
                ("own", record.running_score),
                ("look-ahead", record.lookahead_score),
                ("ensemble", record.score),
            )
            if score is not None
        ]
        lines.append(f"{name:{width}s}  α {alpha:.3f}  {record.decision.value:6s}  {'   '.join(scores)}".rstrip())
    members = sum(alpha > 0 for alpha in result.alphas)
    lines.append(f"{result.strategy}: {members} of {len(result.alphas)} checkpoints are in the result.")
    if result.score is not None:
        count = "1 evaluation" if result.evaluations == 1 else f"{result.evaluations} evaluations"
        lines[-1] += f" {result.metric} {result.score:.4f}, after {count}."
    for split, metrics in result.results.items():
        lines.append(f"{split:10s} " + "   ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    lines.append(f"Written to {result.folder}")
    return "\n".join(lines)
