"""One Trainer job on several processes: each rank writes what it ended with to FOLDER/rank<r>.safetensors and .json.

python forked_ranks.py ddp_run.py KIND FOLDER [--stop | --resume [--ended] | --disagree | --clocks] [--zero=STAGE] …
"""

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from gathered import all_gathered
from safetensors.torch import load_file, save_file
from training import make_trainer, weights_of, with_aswa
from transformers import Trainer, TrainerCallback

from aswa_hf import ASWACallback
from aswa_hf.schedule import EvaluationBudget

RANKS = Path(__file__).with_name("forked_ranks.py")

calls = itertools.count(step=10)


class StopAfterThree(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = state.epoch >= 3


def launch(
    kind: str, folder: Path, *flags: str, script: str = __file__, bare: bool = False, ranks: int = 2
) -> list[tuple[dict, dict]]:
    """Runs the job on gloo processes; returns each rank's tensors and history."""
    run = started(kind, folder, *flags, script=script, bare=bare, ranks=ranks)
    assert run.returncode == 0, run.stderr[-3000:]
    found = []
    for rank in range(ranks):
        tensors = load_file(folder / f"rank{rank}.safetensors")
        found.append((tensors, json.loads((folder / f"rank{rank}.json").read_text())))
    return found


def started(
    kind: str, folder: Path, *flags: str, script: str = __file__, bare: bool = False, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Runs the job on gloo processes to whatever end."""
    return warm.run(RANKS, script, kind, folder, *flags, bare=bare, env=os.environ | {"RANKS": str(ranks)})


def count_time(monkeypatch: pytest.MonkeyPatch, seconds: float = 2) -> None:
    """For `max_eval_share` a step takes `seconds` and a decision takes one, however long they really take."""

    def spend(budget: EvaluationBudget) -> Iterator[None]:
        budget._expected = 1.0
        budget.spent += 1.0
        yield

    def step_ended(callback: ASWACallback, args, state, control) -> None:
        budget = callback._budget
        monkeypatch.setattr(EvaluationBudget, "seconds", seconds * state.global_step + budget.spent)
        really_ended(callback, args, state, control)

    really_ended = ASWACallback.step_ended
    monkeypatch.setattr(EvaluationBudget, "seconds", 0.0)
    monkeypatch.setattr(EvaluationBudget, "spending", contextmanager(spend))
    monkeypatch.setattr(ASWACallback, "step_ended", step_ended)


def recorded_queries(trainer: Trainer) -> list[list[int]]:
    """A list that will hold every query the model is trained on: epoch, head, relation and the true tails."""
    seen: list[list[int]] = []

    def record(module, args, batch):
        if module.training:
            offsets = batch["label_offsets"].tolist()
            for i, query in enumerate(zip(batch["heads"].tolist(), batch["relations"].tolist(), strict=True)):
                seen.append([int(trainer.state.epoch), *query, *batch["labels"][offsets[i] : offsets[i + 1]].tolist()])

    trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    return seen


def zero(stage: int, *, bf16: bool) -> dict:
    """Training arguments for DeepSpeed."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, accelerate silently trains with DDP
    return {
        "bf16": bf16,
        "deepspeed": {
            "zero_optimization": {"stage": stage},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
        },
    }


def master(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The complete float32 copy that DeepSpeed trains."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter).clone()


def use_from_outside(model: torch.nn.Module) -> None:
    """Makes the model use the weight of a module inside of it, as losses of TRL do with that of the output layer."""
    forward = model.forward

    @functools.wraps(forward)
    def using(*args, **options):
        assert model.classifier.weight.numel()
        return forward(*args, **options)

    model.forward = using


def adapter_trainer(folder: str, *, callbacks: list | None, **arguments) -> Trainer:
    """TRL's `SFTTrainer` with an adapter beside frozen weights."""
    from language import make_trl, rows
    from peft import LoraConfig

    if "deepspeed" in arguments:
        arguments["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    made = {"callbacks": callbacks, "train_dataset": rows("SFT", 48, 0), "peft_config": LoraConfig(r=2)}
    options = {"num_train_epochs": 4, "save_strategy": "epoch", "lr_scheduler_type": "constant"}
    return make_trl("SFT", Path(folder), trainer=made, **options | arguments)


def main() -> None:
    kind, folder, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    # On several CPUs, older versions of transformers load optimizers to "cpu:0", which torch does not know.
    torch.serialization.register_package(
        99, lambda storage: None, lambda storage, to: storage if to == "cpu:0" else None
    )
    resume = "--resume" in flags
    stage = next((int(flag[-1]) for flag in flags if flag.startswith("--zero=")), None)
    arguments = {} if stage is None else zero(stage, bf16="--bf16" in flags)
    if "--sgd" in flags:
        # Adam divides by the size of gradients, also of those that are nothing but rounding errors.
        arguments |= {"optim": "sgd", "learning_rate": 0.1}
    options = {}
    if "--universal" in flags:
        arguments["deepspeed"]["checkpoint"] = {"load_universal": True}
    if "--ended" in flags:
        # Where --stop stopped, with as many steps as two processes have.
        arguments |= {"num_train_epochs": 3, "per_device_train_batch_size": 16}
        options["apply"] = None
    stops = [StopAfterThree()] if "--stop" in flags else None
    if kind == "sft":
        trainer = adapter_trainer(folder, callbacks=stops, **arguments)
        options["every"] = "2 steps"
    else:
        trainer = make_trainer(kind, folder, examples=96, callbacks=stops, **arguments)
    if "--outside" in flags:
        use_from_outside(trainer.model)
    if "--disagree" in flags:
        # Each rank scores for itself, and the running model's statistics stay its own.
        trainer.compute_metrics = lambda predictions: {"luck": random.Random(dist.get_rank() + next(calls)).random()}
        options = {"metric": "luck", "batchnorm": "copy"}
    if "--clocks" in flags:
        # On rank 1 training takes so long that nothing would be skipped.
        count_time(pytest.MonkeyPatch(), seconds=0.5 if dist.get_rank() == 0 else 1000)
        options = {"every": "4 steps", "max_eval_share": 0.25}
    callback = with_aswa(trainer, strategies=("aswa", "dense-aswa", "swa", "ema", "best", "last"), **options)
    seen = recorded_queries(trainer) if kind == "kvsall" else []
    trainer.train(resume_from_checkpoint=resume or None)
    if kind == "sft":
        trainer.save_model()

    with all_gathered(trainer.model, stage):
        result = {f"model/{name}": tensor for name, tensor in weights_of(trainer.model).items()}
    shapes = {name: tensor.shape for name, tensor in result.items()}
    for name, strategy in callback.strategies.items():
        averaged, copied = strategy.average.whole()
        for key, tensor in averaged.items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
            result[f"{name}/{key}"] = full.reshape(shapes[f"model/{key}"])
        result |= {f"{name}/{key}": tensor.clone() for key, tensor in copied.items()}
    if stage is not None:
        assert trainer.accelerator.state.deepspeed_plugin.zero_stage == stage
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        result |= {f"masters/{name}": master(p) for name, p in trained.items()}
    rank = dist.get_rank()
    save_file(result, Path(folder) / f"rank{rank}.safetensors")
    about = {
        "world_size": dist.get_world_size(),
        "steps": trainer.state.global_step,
        "histories": {name: s.trajectory.to_json() for name, s in callback.strategies.items()},
        "alphas": {name: s.alphas for name, s in callback.strategies.items()},
    }
    if stage is not None:
        about["elements"] = [sum(t.numel() for t in s.average.averaged.values()) for s in callback.strategies.values()]
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(about))
    (Path(folder) / f"rank{rank}.seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
