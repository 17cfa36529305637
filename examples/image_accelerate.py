"""Image classification in an Accelerate loop, on any number of processes; ends with the ASWA ensemble in the model.

    python examples/image_accelerate.py
    accelerate launch examples/image_accelerate.py
    accelerate launch --config_file examples/configs/ddp_8gpu.yaml examples/image_accelerate.py

The data is embedded (scikit-learn's handwritten digits). A run that was stopped or killed is resumed by the same
command; to start another one, choose another --output_dir.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from aswa_hf import closing_process_group
from aswa_hf.loop import fit
from aswa_hf.vision import ImageTensors, as_it_is, load_digits
from aswa_hf.vision.classifier import timm_classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preresnet20_cifar", help="any timm model")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--train_size", type=int, default=600)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/image_accelerate"))
    options = parser.parse_args()

    # The same batches in the same order, whether one process or eight share them; BatchNorm sees its process's part.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=loading)
    set_seed(0)
    images = {name: ImageTensors(rows, size=16) for name, rows in load_digits(train=options.train_size).items()}
    first = images["train"]
    looks = {"channels": first.channels, "size": first.size, "mean": first.mean, "std": first.std}
    model = timm_classifier(options.model, first.class_names, **looks)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=3e-4)
    loaders = {
        name: DataLoader(
            part, options.batch_size, shuffle=name == "train", drop_last=name == "train", collate_fn=as_it_is
        )
        for name, part in images.items()
    }
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loaders["train"]))
    model, optimizer, scheduler, *prepared = accelerator.prepare(model, optimizer, scheduler, *loaders.values())
    loaders = dict(zip(loaders, prepared, strict=True))

    def accuracy(split: str) -> float:
        right = [
            accelerator.gather_for_metrics(model(batch["pixel_values"]).logits.argmax(-1) == batch["labels"])
            for batch in loaders[split]
        ]
        return torch.cat(right).double().mean().item()

    run = fit(
        accelerator,
        model,
        optimizer,
        loaders["train"],
        lambda: accuracy("validation"),
        epochs=options.epochs,
        scheduler=scheduler,
        metric="accuracy",
        strategies=("aswa", "swa", "ema", "best", "last"),
        checkpoint_dir=options.output_dir / "checkpoints",
    )

    # The model holds the ensemble now; timm and transformers both load what is saved.
    accelerator.unwrap_model(model).save_pretrained(
        options.output_dir, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    for name, strategy in run.strategies.items():
        with strategy.swapped(), torch.no_grad():
            accelerator.print(f"{name:5s} test accuracy {accuracy('test'):.4f}")


if __name__ == "__main__":
    with closing_process_group():
        main()
