"""`aswa-hf demo`: one run on embedded data, five strategies in it, and the result of each."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aswa_hf._utils.files import make_folder, read_object
from aswa_hf.cli.options import AsJson, loading

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import Trainer

    from aswa_hf.strategies import Strategy
    from aswa_hf.trainer import ASWACallback

KGE_EPOCHS = 150
COMPARED = ("last", "best", "swa", "ema", "aswa")
DESCRIPTIONS = {
    "last": "the last epoch",
    "best": "the best epoch (early stopping)",
    "swa": "plain mean of the last quarter",
    "ema": "exponential moving average",
    "aswa": "adaptive mean, nothing to tune",
}


def demo(
    output_dir: Annotated[
        Path, typer.Option(metavar="PATH", help="Folder for the models, the trajectory, its picture and the results.")
    ] = Path("aswa-demo"),
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="How long to train.")] = 30,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Any timm model that works on 32×32 pixels.")
    ] = "test_convnext",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the data split, the weights and the batches.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small timm model on handwritten digits and compare five ways to choose the final weights.

    One training run on 200 images, soon overfitted, is followed by all strategies at once; 700 images are for
    validation, 897 for testing. Then a link predictor learns where the world's countries lie and answers three
    questions. Takes about a minute on two cores and needs no network.

    Example:

    `aswa-hf demo --epochs 20 --output-dir my-demo`
    """
    from rich.console import Console

    make_folder(output_dir)
    console = Console(stderr=as_json, emoji=False)
    try:
        digits = _digits(console, output_dir, epochs, model, seed)
    except BaseException:
        with suppress(OSError):  # a refused run leaves no empty folder
            output_dir.rmdir()
        raise
    countries = _countries(console, output_dir / "countries", seed)
    if as_json:
        typer.echo(json.dumps({"digits": digits, "countries": countries}, allow_nan=False))


def _digits(console: Console, output_dir: Path, epochs: int, model: str, seed: int) -> dict[str, Any]:
    """Trains an image classifier, shows what each strategy ends with, and returns what results.json contains."""
    import time

    with loading("the libraries"):
        from aswa_hf.experiments.progress import decision_summary, decisions_shown
        from aswa_hf.experiments.running import write_results
        from aswa_hf.run_folder import PICTURE, RESULTS

        trainer, callback, test_set = _prepare(model, epochs, seed, output_dir)
    console.print(f"Training [bold]{model}[/bold] on handwritten digits, {epochs} epochs:")
    start = time.perf_counter()
    with decisions_shown(trainer, callback, console):
        trainer.train()
    seconds = {"train": time.perf_counter() - start}
    trainer.model.save_pretrained(output_dir)

    strategies, scores = callback.strategies, {}
    for name in COMPARED:
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
    more = f"aswa-hf report {shlex.quote(str(output_dir))}"
    console.print(f"Written: {output_dir / PICTURE}; more: {more}", soft_wrap=True, markup=False)
    return read_object(output_dir / RESULTS)


def _prepare(model: str, epochs: int, seed: int, output_dir: Path) -> tuple[Trainer, ASWACallback, Any]:
    """The trainer, its callback, and the test set."""
    from transformers import Trainer, TrainingArguments, set_seed

    from aswa_hf.trainer import ASWACallback
    from aswa_hf.vision import ImageTensors, as_it_is, load_digits
    from aswa_hf.vision.classifier import check_timm_name, timm_classifier
    from aswa_hf.vision.training import accuracy

    splits = load_digits(train=200, validation=700, seed=seed)
    digits = {name: ImageTensors(split, size=32) for name, split in splits.items()}
    first = digits["train"]
    check_timm_name(model)
    set_seed(seed)
    looks: dict[str, Any] = {"channels": first.channels, "size": first.size, "mean": first.mean, "std": first.std}
    try:
        classifier = timm_classifier(model, first.class_names, **looks)
        classifier.eval()(first[0]["pixel_values"][None])
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
            remove_unused_columns=False,
            seed=seed,
        ),
        data_collator=as_it_is,
        train_dataset=first,
        eval_dataset=digits["validation"],
        compute_metrics=accuracy,
    )
    callback = ASWACallback(trainer, metric="accuracy", strategies=COMPARED)
    callback.writes_history = False  # it is written with the results
    trainer.add_callback(callback)
    return trainer, callback, digits["test"]


def _table(strategies: dict[str, Strategy], test: dict[str, float]) -> Any:
    from rich.table import Table

    table = Table(title="Accuracy (%) of the weights each strategy ends with")
    for column in ("strategy", "validation", "test", "snapshots"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    best = max(test.values())
    for name in COMPARED:
        strategy = strategies[name]
        in_test = f"{100 * test[name]:.2f}"
        table.add_row(
            f"{name:4s}  [dim]{DESCRIPTIONS[name]}[/dim]",
            f"{100 * (strategy.score or 0):.2f}",
            f"[bold]{in_test}[/bold]" if test[name] == best else in_test,
            str(strategy.members),
        )
    return table


def _countries(console: Console, output_dir: Path, seed: int) -> dict[str, Any]:
    """Trains a link predictor on the world's countries and asks it three questions whose answers were held out.

    Returns the test metrics of each strategy, and the answers.
    """
    from transformers import set_seed

    from aswa_hf.experiments.progress import decision_summary, decisions_shown
    from aswa_hf.kge import ComplEx, KGETrainer, LinkPredictor, load_kg, paper_arguments
    from aswa_hf.trainer import ASWACallback

    kg = load_kg("countries")
    set_seed(seed)
    arguments = paper_arguments(
        str(output_dir),
        num_train_epochs=KGE_EPOCHS,
        learning_rate=0.02,
        seed=seed,
        disable_tqdm=True,
    )
    trainer = KGETrainer(ComplEx(kg.config(dim=32)), arguments, kg)
    callback = ASWACallback(trainer, metric="mrr", strategies=("aswa", "best", "last"))
    trainer.add_callback(callback)
    console.print(f"\nTraining [bold]ComplEx[/bold] on {kg.num_entities} countries and regions, {KGE_EPOCHS} epochs …")
    with decisions_shown(trainer, callback, console, show="none"):
        trainer.train()
    trainer.save_model()
    console.print(decision_summary(callback.strategies["aswa"]))

    results: dict[str, Any] = {}
    for name in ("last", "best", "aswa"):
        with callback.strategies[name].swapped():
            found = trainer.evaluate("test", metric_key_prefix="test")
        results[name] = {"test": {"mrr": found["test_mrr"], "hits@1": found["test_hits@1"]}}
        console.print(f"  {name:5s} test MRR {found['test_mrr']:.3f}   Hits@1 {found['test_hits@1']:.3f}")
    predictor = LinkPredictor(trainer.model, kg.vocab)
    console.print("Three questions whose answers are not in its training data:")
    questions: list[dict[str, Any]] = []
    for head, relation, tail in kg.triples("test")[:3]:
        country, region = kg.vocab.entities[head], kg.vocab.entities[tail]
        answers = predictor.predict(country, kg.vocab.relations[relation], k=3)["tail"].tolist()
        questions.append(
            {"head": country, "relation": kg.vocab.relations[relation], "tail": region, "answers": answers}
        )
        mark = "[green]right[/]" if answers[0] == region else f"[red]wrong[/], it is {region}"
        console.print(f"  {country} is located in … {answers[0]} ({mark}); then {', '.join(answers[1:])}")
    ask = f"aswa-hf predict {shlex.quote(str(output_dir))} --head france --relation neighbor"
    console.print(f"Written: {output_dir}; ask it more: {ask}", soft_wrap=True, markup=False)
    return {"strategies": results, "questions": questions}
