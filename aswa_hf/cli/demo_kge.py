"""The second half of `aswa-hf demo`: in which region does a country lie, if nobody says so?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from transformers import set_seed

from aswa_hf.experiments.progress import decision_summary, decisions_shown
from aswa_hf.kge import ComplEx, KGETrainer, LinkPredictor, load_kg, paper_arguments
from aswa_hf.trainer import ASWACallback

EPOCHS, DIM, LEARNING_RATE = 150, 32, 0.02


def demo_kge(console: Console, output_dir: Path, seed: int) -> None:
    """Trains a link predictor on the world's countries and asks it three questions whose answers were held back."""
    kg = load_kg("countries")
    set_seed(seed)
    arguments = paper_arguments(
        str(output_dir / "countries"),
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        seed=seed,
        disable_tqdm=True,
    )
    trainer = KGETrainer(ComplEx(kg.config(dim=DIM)), arguments, kg)
    callback = ASWACallback(trainer, metric="mrr", strategies=("aswa", "best", "last"))
    trainer.add_callback(callback)
    console.print(f"\nTraining [bold]ComplEx[/bold] on {kg.num_entities} countries and regions, {EPOCHS} epochs …")
    with decisions_shown(trainer, callback, console, show="none"):
        trainer.train()
    trainer.save_model()
    console.print(decision_summary(callback.strategies["aswa"]))

    for name in ("last", "best", "aswa"):
        with callback.strategies[name].swapped():
            found = trainer.evaluate("test", metric_key_prefix="test")
        console.print(f"  {name:5s} test MRR {found['test_mrr']:.3f}   Hits@1 {found['test_hits@1']:.3f}")
    predictor = LinkPredictor(trainer.model, kg.vocab)
    console.print("Three questions whose answers it was never told:")
    for head, relation, tail in kg.triples("test")[:3]:
        country, region = kg.vocab.entities[head], kg.vocab.entities[tail]
        answers = predictor.predict(country, kg.vocab.relations[relation], k=3)["tail"].tolist()
        mark = "[green]right[/]" if answers[0] == region else f"[red]wrong[/], it is {region}"
        console.print(f"  {country} is located in … {answers[0]} ({mark}); then {', '.join(answers[1:])}")
    ask = f"aswa-hf predict {output_dir / 'countries'} --head france --relation neighbor"
    console.print(f"Written: {output_dir / 'countries'}; ask it more: {ask}", soft_wrap=True)
