"""Two processes that start a process group and leave in one of several ways, through the end of the interpreter.

    python leaving.py 'JSON list of jobs'

A job is a list: what to do ("ddp", "sharded" or "command"), how to leave, a folder, and the environment. Prints for
each process of each job its exit status, whether there still was a group at its end, and the threads of groups that
were still alive. The processes are forked, since importing the libraries takes longest.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # sharding needs it
import torch.distributed as dist
from moments import at
from torch import nn
from torch.distributed.fsdp import fully_shard

import aswa_hf.experiments.kge  # noqa: F401  here and not in every process
from aswa_hf import closing_process_group
from aswa_hf._utils.process_group import keep_group
from aswa_hf.cli import main as aswa_hf_main


def leave(way: str) -> None:
    if way == "error" or (way == "error of one" and dist.get_rank() == 1):
        raise OSError("no way")
    if way == "Ctrl-C":
        raise KeyboardInterrupt
    if way == "exit":
        sys.exit(3)


def train(model: nn.Module, way: str) -> None:
    """Leaves in the middle of a forward pass: the traceback then holds the model."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.register_forward_pre_hook(lambda *args: leave(way))
    model(torch.randn(4, 8))
    dist.barrier()
    if way in ("end_training", "no block"):
        keep_group()  # as `fit` does
        dist.destroy_process_group()


def ddp(way: str) -> None:
    dist.init_process_group("gloo")
    train(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), way)


def sharded(way: str) -> None:
    dist.init_process_group("gloo")
    train(fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), way)


def command(way: str) -> None:
    """A training command, which leaves after its second step."""
    at("on_step_end", lambda args, state: leave(way) if state.global_step == 2 else None)
    sys.argv = ["aswa-hf", "train", "kge", "--dataset", "countries", "--dim", "4", "--epochs", "2"]
    sys.argv += ["--output-dir", os.environ["FOLDER"]]
    aswa_hf_main()


def report(path: Path) -> None:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(task.read_text().strip())
    path.write_text(json.dumps({"group": dist.is_initialized(), "threads": [n for n in names if "gloo" in n]}))


def work(rank: int, what: str, way: str, folder: str, environment: dict[str, str]) -> None:
    """One process; what it raises goes through the functions that it was forked in."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), FOLDER=f"{folder}/run")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    atexit.register(report, Path(folder, f"rank{rank}"))  # the first to be registered is the last to be called
    if what == "command":
        command(way)
    with nullcontext() if way == "no block" else closing_process_group():
        (ddp if what == "ddp" else sharded)(way)
    sys.exit()


def in_own_processes(what: str, way: str, folder: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            work(rank, what, way, folder, environment)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    found = [json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(2)]
    return [{"status": status, **left} for status, left in zip(statuses, found, strict=True)]


if __name__ == "__main__":
    gc.freeze()  # what was imported is nobody's garbage, and to look at it takes seconds in every process
    print(json.dumps([in_own_processes(*job) for job in json.loads(sys.argv[1])]))
