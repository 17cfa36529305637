"""Link prediction in an Accelerate loop, on any number of processes; ends with the ASWA ensemble in the model.

    python examples/kge_accelerate.py
    accelerate launch examples/kge_accelerate.py
    accelerate launch --config_file examples/configs/ddp_8gpu.yaml examples/kge_accelerate.py --dataset PATH

The default data is embedded (the world's countries). A run that was stopped or killed is resumed by the same command;
to start another one, choose another --output_dir.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from aswa_hf import closing_process_group
from aswa_hf.kge import Keci, load_kg
from aswa_hf.kge.ranking import rank_triples
from aswa_hf.kge.training import training_examples
from aswa_hf.loop import fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="countries", help="countries, or a folder with train, valid and test")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=512, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/kge_accelerate"))
    options = parser.parse_args()

    # The same batches in the same order, whether one process or eight share them.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=loading)
    set_seed(0)
    kg = load_kg(options.dataset)
    model = Keci(kg.config(dim=options.dim))
    # With FSDP2 accelerate would shard the table of entities apart from the model, which uses it as a whole.
    model.get_input_embeddings = lambda: None
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    # All true tails of a query in one example (KvsAll); the dataset makes whole batches.
    examples = training_examples(kg, "kvsall", inverses=True)
    # A last, smaller batch would be filled up with repetitions for several processes, and not for one.
    loader = DataLoader(examples, options.batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # Each process ranks its share of the triples; the filter is made of all splits.
    for split in ("validation", "test"):
        kg[f"own {split}"] = kg[split].shard(accelerator.num_processes, accelerator.process_index)

    def metrics(split: str) -> dict[str, float]:
        module = accelerator.unwrap_model(model)
        if accelerator.is_fsdp2:
            module.unshard()  # ranking needs all entities
        own = rank_triples(module, kg, f"own {split}").tolist()
        # Sorted, so that a sum does not depend on who had which triple.
        ranks = torch.tensor(sorted(accelerator.gather_for_metrics(own, use_gather_object=True)), dtype=torch.float64)
        return {"mrr": (1 / ranks).mean().item(), "hits@10": (ranks <= 10).double().mean().item()}

    run = fit(
        accelerator,
        model,
        optimizer,
        loader,
        lambda: metrics("validation"),
        epochs=options.epochs,
        metric="mrr",
        strategies=("aswa", "swa", "ema", "best", "last"),
        checkpoint_dir=options.output_dir / "checkpoints",
        save_every=10,
    )

    # The model holds the ensemble now, and LinkPredictor.from_pretrained(output_dir) answers with it.
    accelerator.unwrap_model(model).save_pretrained(
        options.output_dir, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    if accelerator.is_main_process:
        kg.vocab.save_pretrained(options.output_dir)
    for name, strategy in run.strategies.items():
        with strategy.swapped():
            found = metrics("test")
        accelerator.print(f"{name:5s} test MRR {found['mrr']:.4f}   Hits@10 {found['hits@10']:.4f}")


if __name__ == "__main__":
    with closing_process_group():
        main()
