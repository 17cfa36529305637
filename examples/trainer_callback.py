"""Image classification with `Trainer` and `ASWACallback`.

    python examples/trainer_callback.py
    python examples/trainer_callback.py --num_train_epochs 20 --strategies aswa ema last --every 2
    python examples/trainer_callback.py --max_train_images 64 --num_train_epochs 2       # a quick look

The data is embedded (scikit-learn's handwritten digits), every argument of `TrainingArguments` works, and a run that
was stopped is resumed with `--resume_from_checkpoint runs/trainer_callback/checkpoint-…`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

from aswa_hf import ASWACallback, closing_process_group
from aswa_hf.vision import ImageTensors, as_it_is, load_digits, timm_classifier
from aswa_hf.vision.training import accuracy


@dataclass
class ExampleArguments:
    """What to train, and how to average."""

    model: str = field(default="test_resnet", metadata={"help": "A timm model that works on 32×32 pixels."})
    max_train_images: int = field(default=500, metadata={"help": "How many digits to train on."})
    metric: str = field(default="accuracy", metadata={"help": "The metric that decides: accuracy or loss."})
    strategies: list[str] = field(
        default_factory=lambda: ["aswa", "last"], metadata={"help": "Any of aswa, swa, ema, best, last."}
    )
    every: str = field(default="epoch", metadata={"help": "When to decide: epoch, evaluation, or a number of epochs."})


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's arguments, with defaults that suit this example."""

    output_dir: str = "runs/trainer_callback"
    num_train_epochs: float = 10
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 250
    learning_rate: float = 2e-3
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = 2
    logging_strategy: str = "epoch"
    dataloader_pin_memory: bool = False
    remove_unused_columns: bool = False  # ImageTensors makes whole batches
    report_to: str = "none"


def main() -> None:
    example, args = HfArgumentParser((ExampleArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    digits = load_digits(train=example.max_train_images, seed=args.seed)
    images = {split: ImageTensors(dataset, size=32) for split, dataset in digits.items()}
    train = images["train"]
    looks = {"channels": train.channels, "size": train.size, "mean": train.mean, "std": train.std}

    trainer = Trainer(
        timm_classifier(example.model, train.class_names, **looks),
        args,
        data_collator=as_it_is,
        train_dataset=train,
        eval_dataset=images["validation"],
        compute_metrics=accuracy,
    )
    callback = ASWACallback(
        trainer,
        metric=example.metric,
        strategies=example.strategies,
        apply=example.strategies[0],
        every=int(example.every) if example.every.isdigit() else example.every,
    )
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    # The model holds the ensemble now, and this is what `save_model` and `push_to_hub` ship.
    trainer.save_model()
    for name, strategy in callback.strategies.items():
        with strategy.swapped():
            result = trainer.evaluate(images["test"], metric_key_prefix="test")["test_accuracy"]
        print(f"{name:5s} validation {example.metric} {strategy.score:.4f}   test accuracy {result:.4f}")


if __name__ == "__main__":
    with closing_process_group():
        main()
