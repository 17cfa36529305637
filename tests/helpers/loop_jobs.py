"""Runs of `aswa_hf.loop.fit` in processes of their own, alone or in pairs, which may be sent a signal in the middle.

    python loop_jobs.py 'JSON list of jobs'  # in forked processes, since importing takes longer than training

A job is a dict of the arguments of `train`, with `processes` beside them, and `fails` if it is to. Every process that
comes to its end leaves its weights and histories in FOLDER/rank<r>.safetensors and .json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed
from gathered import all_gathered, whole_weights
from meeting import meeting_place
from safetensors.torch import load_file, save_file
from sharded_on_cpu import shard_on_cpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training import ConvNet, image_data, weights_of

from aswa_hf import checkpoint, loop
from aswa_hf._utils import process_group
from aswa_hf._utils.sharding import is_sharded
from aswa_hf.averaging import unwrap
from aswa_hf.loop import checkpoints, checks

STRATEGIES = ("aswa", "dense-aswa", "swa", "ema", "best", "last")


class Noisy(Dataset[dict[str, Tensor]]):
    """Images with noise that is drawn whenever a batch is made, from the global generator."""

    def __init__(self, examples: int, seed: int, noise: float):
        data = image_data(examples, seed)
        self.images = torch.stack([row["pixel_values"] for row in data])
        self.labels = torch.stack([row["labels"] for row in data])
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> dict[str, Tensor]:
        images = self.images[rows]
        if self.noise:
            images = images + self.noise * torch.randn_like(images)
        return {"pixel_values": images, "labels": self.labels[rows]}


def as_it_is(batch: Any) -> Any:
    return batch


class Plain(nn.Module):
    """No chance and no statistics, in double precision: how the batch is shared out changes only the last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(pixel_values.to(self.layers[1].weight.dtype))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def train(
    kind: str,
    folder: str,
    *,
    send: int = 0,
    after: int = 0,
    to: int = 0,
    seedable: bool = True,
    split: bool = False,
    workers: int = 0,
    accumulate: int = 2,
    while_saving: int = 0,
    disagree: bool = False,
    silent: bool = False,
    full: bool = False,
    sharded: bool = False,
    zero: int | None = None,
    universal: bool = False,
    constant: bool = False,
    **options: Any,
) -> None:
    """One run; rank `to` sends itself the signal `send` while it trains on its batch number `after`, or while the
    checkpoint of step `while_saving` is half written, or finds its disk `full`. With `disagree` each rank has scores
    of a script of its own; with `constant` every batch has the loss 1. `zero` is a stage of DeepSpeed, which loads
    converted files if `universal`."""
    torch.set_num_threads(1)
    checks.SECONDS_BETWEEN_CHECKS = 0.0
    loading = DataLoaderConfiguration(use_seedable_sampler=seedable, split_batches=split)
    if zero is None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loading)
    else:
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, accelerate silently trains with DDP
        PartialState(cpu=True)  # as the Trainer does; an Accelerator would look for no other processes on CPUs
        plugin = DeepSpeedPlugin(zero_stage=zero, gradient_clipping=1.0)
        plugin.deepspeed_config["checkpoint"] = {"load_universal": universal}
        accelerator = Accelerator(
            deepspeed_plugin=plugin, gradient_accumulation_steps=accumulate, dataloader_config=loading
        )
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1"))
    if sharded:
        # Each layer is a unit.
        shard_on_cpu(accelerator, fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20)
    set_seed(7)
    if kind == "kvsall":
        # Not needed by the others, and slow to import.
        from aswa_hf.kge import Keci, evaluate_link_prediction, load_kg
        from aswa_hf.kge.training import training_examples

        kg = load_kg("countries")
        model: nn.Module = Keci(kg.config(dim=16, p=1, q=2, input_dropout=0.1, query_dropout=0.1))
        examples: Any = training_examples(kg, "kvsall", inverses=True)
        batch_size = 160
    else:
        model = {"conv": ConvNet, "plain": Plain, "single": lambda: Plain().float()}[kind]()
        examples = Noisy(88, seed=1, noise=0.1 if kind == "conv" else 0.0)
        batch_size = 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if kind == "kvsall" else 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    train_loader = DataLoader(examples, batch_size, shuffle=True, collate_fn=as_it_is, num_workers=workers)
    # In a new order every time, as far as it is up to the loader.
    valid_loader = DataLoader(Noisy(60, seed=2, noise=0.0), 16, shuffle=True, collate_fn=as_it_is)
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, valid_loader, scheduler
    )
    torch.manual_seed(100 + accelerator.process_index)  # dropout is of each rank's own making

    def evaluate() -> dict[str, float] | None:
        if kind == "kvsall":
            return {"mrr": evaluate_link_prediction(unwrap(model), kg, "validation")["mrr"]}
        outputs = [
            accelerator.gather_for_metrics((model(batch["pixel_values"])["logits"], batch["labels"]))
            for batch in valid_loader
        ]
        logits, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        assert len(labels) == 60
        buffers = [buffer.clone() for buffer in model.buffers()]
        # All of them first: no process may leave the others waiting when it has seen a difference.
        firsts = [accelerator.gather(buffer[None])[0] for buffer in buffers]
        agreed.append(all(map(torch.equal, buffers, firsts)))
        if silent and not accelerator.is_main_process:
            return None
        step = scheduler.scheduler.last_epoch
        asked[step] += 1
        # With these seeds all four decisions are taken.
        luck = random.Random(1300 * step + 10 * asked[step] + accelerator.process_index).random()
        measured = nn.functional.cross_entropy(logits, labels).item()
        return {"loss": luck if disagree else measured, "measured": measured}

    def die() -> None:
        if accelerator.process_index == to:
            signal.raise_signal(send)

    def save_state(*args: Any, **more: Any) -> None:
        checkpoint.save_state(*args, **more)
        if more["step"] == while_saving:
            die()

    def save_no_file(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    if full and accelerator.process_index == to:
        checkpoints.save_file = save_no_file
    checkpoints.save_state = save_state
    agreed: list[bool] = []
    asked: Counter[int] = Counter()
    seen = 0

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal seen
        seen += module.training
        if seen == after:
            die()
        value = module(**batch)["loss"]
        return 0 * value + 1 if constant else value

    metric = "mrr" if kind == "kvsall" else "loss"
    options = {"epochs": 5, "strategies": STRATEGIES, "max_grad_norm": 1.0, "progress": False} | options
    run = loop.fit(
        accelerator, model, optimizer, train_loader, evaluate,
        scheduler=scheduler, loss=loss, metric=metric, checkpoint_dir=folder, **options,
    )  # fmt: skip

    with all_gathered(unwrap(model), zero):
        weights = whole_weights(unwrap(model)) if sharded else weights_of(unwrap(model))
    result = {f"model/{name}": tensor for name, tensor in weights.items()}
    for name, strategy in run.strategies.items():
        with strategy.swapped(), all_gathered(strategy.model, zero):
            found = strategy.average.averaged | strategy.average.copied
            if sharded or zero == 3:
                found = whole_weights(strategy.model) if sharded else weights_of(strategy.model)
            result |= {f"{name}/{key}": tensor.clone() for key, tensor in found.items()}
    rank = accelerator.process_index
    save_file(result, Path(folder) / f"rank{rank}.safetensors")
    about = {
        "processes": accelerator.num_processes,
        "agreed": all(agreed),
        "sharded": is_sharded(unwrap(model)),
        "kept": [group is dist.group.WORLD for group in process_group._kept],
        "history": run.history,
        "records": {name: trajectory.to_json() for name, trajectory in run.trajectories.items()},
        "optimizer": [] if sharded else [float(s["exp_avg_sq"].double().sum()) for s in optimizer.state.values()],
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(about))
    accelerator.end_training()


def in_own_processes(job: dict[str, Any]) -> list[int]:
    """The exit statuses of the processes of a job; the number of a signal, negative, if that ended one."""
    processes = job.pop("processes", 1)
    job.pop("fails", None)
    if job.get("sharded"):
        import_module("torch._dynamo")  # sharding needs it; it takes seconds, here and not in every process
    children = []
    with meeting_place(processes) as addresses:
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                if processes > 1 or job.get("zero"):  # DeepSpeed asks for them
                    os.environ |= addresses | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                end(job)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def end(job: dict[str, Any]) -> None:
    """Runs a job and ends the process as Python would."""
    status = 1
    try:
        train(**job)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        Path(job["folder"], f"rank{os.environ.get('RANK', 0)}.error").write_text(str(error))
    os._exit(status)


def run_jobs(*jobs: dict[str, Any]) -> list[list[int]]:
    """Runs jobs one after the other; gives the exit statuses of their processes."""
    run = warm.run(__file__, json.dumps(jobs, default=str))
    assert run.returncode == 0, run.stderr[-3000:]
    statuses = json.loads(run.stdout.splitlines()[-1])
    for job, found in zip(jobs, statuses, strict=True):
        assert job.keys() & {"send", "full", "fails"} or not any(found), (job, found, run.stderr[-3000:])
    return statuses


def results(folder: Path, processes: int = 1) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """What each process of a job ended with."""
    return [
        (load_file(folder / f"rank{rank}.safetensors"), json.loads((folder / f"rank{rank}.json").read_text()))
        for rank in range(processes)
    ]


if __name__ == "__main__":
    print(json.dumps([in_own_processes(job) for job in json.loads(sys.argv[1])]))
