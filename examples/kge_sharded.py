"""Link prediction with the entity table spread over the processes: for graphs whose table does not fit one of them.

    python examples/kge_sharded.py
    ACCELERATE_USE_CPU=true accelerate launch --config_file examples/configs/ddp_2cpu.yaml examples/kge_sharded.py
    accelerate launch --config_file examples/configs/ddp_8gpu.yaml examples/kge_sharded.py --dataset PATH

Each process holds some rows of the table, of their optimizer state and of their averages. All of them work on the same
batches, and the result does not depend on their number. The default data is embedded (the world's countries). A run
that was stopped or killed is resumed by the same command, also on another number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from aswa_hf import closing_process_group
from aswa_hf.kge import evaluate_link_prediction, load_kg
from aswa_hf.kge.optimizers import RowwiseAdagrad
from aswa_hf.kge.sharded import build_sharded
from aswa_hf.kge.training import training_examples
from aswa_hf.loop import fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="countries", help="countries, or a folder with train, valid and test")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=512, help="queries, on all processes the same")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/kge_sharded"))
    options = parser.parse_args()

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    kg = load_kg(options.dataset)
    # No process ever holds the whole table. Its content depends on the seed, and not on the number of processes.
    model = build_sharded(
        kg.config(scorer="complex", dim=options.dim, loss="softmax"), seed=0, device=accelerator.device
    )
    optimizer = RowwiseAdagrad(model.parameters(), lr=options.lr)
    examples = training_examples(kg, "kvsall", inverses=True)
    loader = DataLoader(examples, options.batch_size, shuffle=True, collate_fn=lambda batch: batch)

    run = fit(
        accelerator,
        model,
        optimizer,
        loader,
        lambda: evaluate_link_prediction(model, kg, "validation"),
        epochs=options.epochs,
        metric="mrr",
        strategies=("aswa", "swa", "ema", "best", "last"),
        checkpoint_dir=options.output_dir / "checkpoints",
        save_every=10,
    )

    # An ordinary model with the ensemble: LinkPredictor.from_pretrained(output_dir) answers with it.
    model.save_pretrained(options.output_dir)
    if accelerator.is_main_process:
        kg.vocab.save_pretrained(options.output_dir)
    for name, strategy in run.strategies.items():
        with strategy.swapped():
            found = evaluate_link_prediction(model, kg, "test")
        accelerator.print(f"{name:5s} test MRR {found['mrr']:.4f}   Hits@10 {found['hits@10']:.4f}")


if __name__ == "__main__":
    with closing_process_group():
        main()
