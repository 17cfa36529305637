"""`aswa-hf demo`: one run on embedded data, shadowed by five strategies, and what each would have ended with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import Trainer

    from aswa_hf.strategies import Strategy
    from aswa_hf.trainer import ASWACallback

STRATEGIES = ("last", "best", "swa", "ema", "aswa")
DESCRIPTIONS = {
    "last": "the last epoch",
    "best": "the best epoch (early stopping)",
    "swa": "plain mean of the last quarter",
    "ema": "exponential moving average",
    "aswa": "adaptive mean, nothing to tune",
}


def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for the trajectory, its picture and the results.")] = Path(
        "aswa-demo"
    ),
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="How long to train.")] = 30,
    model: Annotated[str, typer.Option(help="Any timm model that works on 32×32 pixels.")] = "test_convnext",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the data split, the weights and the batches.")
    ] = 0,
) -> None:
    """Train a small timm model on handwritten digits and compare five ways to choose the final weights.

    One training run on 200 images, soon overfitted, is shadowed by all strategies at once; 700 images are for
    validation, 897 for testing. Then a link predictor learns where the world's countries lie and answers three
    questions. Takes about a minute on two cores and needs no network.

    Example: `aswa-hf demo --epochs 20 --output-dir my-demo`
    """
    import time

    from rich.console import Console

    from aswa_hf.cli.demo_kge import demo_kge
    from aswa_hf.experiments.progress import decision_summary, decisions_shown
    from aswa_hf.experiments.running import write_results
    from aswa_hf.run_folder import PICTURE

    console = Console()
    trainer, callback, test_set = _prepare(model, epochs, seed, output_dir)
    console.print(f"Training [bold]{model}[/bold] on handwritten digits, {epochs} epochs:")
    start = time.perf_counter()
    with decisions_shown(trainer, callback, console):
        trainer.train()
    seconds = {"train": time.perf_counter() - start}

    strategies, scores = callback.strategies, {}
    for name in STRATEGIES:
        with strategies[name].swapped():
            scores[name] = trainer.evaluate(test_set, metric_key_prefix="test")["test_accuracy"]
    console.print(_table(strategies, scores))

    results = {
        name: {"validation": {"accuracy": strategies[name].score}, "test": {"accuracy": test}}
        for name, test in scores.items()
    }
    about: dict[str, Any] = {
        "task": "image-classification",
        "dataset": "digits",
        "model": model,
        "seed": seed,
        "epochs": epochs,
    }
    write_results(output_dir, callback, results, seconds, **about)
    console.print(decision_summary(strategies["aswa"]))
    console.print(f"Written: {output_dir / PICTURE}; more: aswa-hf report {output_dir}", soft_wrap=True)
    demo_kge(console, output_dir, seed)


def _prepare(model: str, epochs: int, seed: int, output_dir: Path) -> tuple[Trainer, ASWACallback, Any]:
    """The trainer, its callback, and the test set."""
    from transformers import Trainer, TrainingArguments, set_seed

    from aswa_hf.trainer import ASWACallback
    from aswa_hf.vision.classifier import check_timm_name
    from aswa_hf.vision.data import TensorImages, load_digits
    from aswa_hf.vision.training import ImageClassifier, accuracy

    check_timm_name(model)
    output_dir.mkdir(parents=True, exist_ok=True)
    splits = load_digits(train=200, validation=700, seed=seed)
    digits = {name: TensorImages(split, size=32) for name, split in splits.items()}
    set_seed(seed)
    classifier = ImageClassifier(model, num_classes=10, in_chans=1)
    try:
        classifier.eval()(digits["test"].pixel_values[:1])
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"{model} does not work on 32×32 pixels: {error}. Choose another --model.") from None
    trainer = Trainer(
        classifier,
        TrainingArguments(
            output_dir=str(output_dir),
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=250,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=seed,
        ),
        train_dataset=digits["train"],
        eval_dataset=digits["validation"],
        compute_metrics=accuracy,
    )
    callback = ASWACallback(trainer, metric="accuracy", strategies=STRATEGIES)
    trainer.add_callback(callback)
    return trainer, callback, digits["test"]


def _table(strategies: dict[str, Strategy], test: dict[str, float]) -> Any:
    from rich.table import Table

    table = Table(title="Accuracy (%) of the weights each strategy ends with")
    for column in ("strategy", "validation", "test", "snapshots"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    best = max(test.values())
    for name in STRATEGIES:
        strategy = strategies[name]
        in_test = f"{100 * test[name]:.2f}"
        table.add_row(
            f"{name:4s}  [dim]{DESCRIPTIONS[name]}[/dim]",
            f"{100 * (strategy.score or 0):.2f}",
            f"[bold]{in_test}[/bold]" if test[name] == best else in_test,
            str(strategy.members),
        )
    return table
