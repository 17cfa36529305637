"""One Trainer job under `torchrun`: each rank writes what it ended with to FOLDER/rank<r>.safetensors and .json.

ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 ddp_run.py KIND FOLDER [--stop | --resume | --disagree]
"""

import itertools
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training import make_trainer, weights_of, with_aswa
from transformers import TrainerCallback

calls = itertools.count(step=10)


class StopAfterThree(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = state.epoch >= 3


def main() -> None:
    kind, folder, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    resume = "--resume" in flags
    trainer = make_trainer(kind, folder, examples=96, callbacks=[StopAfterThree()] if "--stop" in flags else None)
    options = {}
    if "--disagree" in flags:
        # Each rank scores for itself, and the running model's statistics stay its own.
        trainer.compute_metrics = lambda predictions: {"luck": random.Random(dist.get_rank() + next(calls)).random()}
        options = {"metric": "luck", "batchnorm": "copy"}
    callback = with_aswa(trainer, strategies=("aswa", "swa", "ema", "best", "last"), **options)
    trainer.train(resume_from_checkpoint=resume or None)

    result = {f"model/{name}": tensor for name, tensor in weights_of(trainer.model).items()}
    for name, strategy in callback.strategies.items():
        for key, tensor in (strategy.average.averaged | strategy.average.copied).items():
            result[f"{name}/{key}"] = tensor.clone()
    rank = dist.get_rank()
    save_file(result, Path(folder) / f"rank{rank}.safetensors")
    about = {
        "world_size": dist.get_world_size(),
        "steps": trainer.state.global_step,
        "histories": {name: s.trajectory.to_json() for name, s in callback.strategies.items()},
        "alphas": {name: s.alphas for name, s in callback.strategies.items()},
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
