"""Sharded models of transformers: a `Trainer` run, and an ensemble saved as an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gathered import whole_weights
from torch.distributed.fsdp import fully_shard
from training import make_trainer, scripted, text_model, with_aswa
from transformers import BertForSequenceClassification, set_seed
from transformers.distributed import DistributedConfig

from aswa_hf import ASWA
from aswa_hf._utils.sharding import is_sharded


def train(folder: Path) -> dict[str, Any]:
    """Three epochs; writes checkpoints to `run<processes>` and the ensemble to `final<processes>`.

    With several processes transformers itself shards the model, since accelerate does not on the CPU. In double
    precision their number changes only digits that do not count.
    """
    world = dist.get_world_size()
    options = {}
    if world == 1:
        set_seed(0)
        text_model(torch.float64).save_pretrained(folder / "start")
    else:
        options["distributed_config"] = DistributedConfig(fsdp_size=world)
    # Without dropout, what is drawn on how many processes does not matter.
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification.from_pretrained(folder / "start", **dropout, **options)
    trainer = make_trainer(
        "text",
        folder / f"run{world}",
        model=model,
        num_train_epochs=3,
        learning_rate=1e-3,
        per_device_train_batch_size=8 // world,
        save_only_model=True,
        average_tokens_across_devices=False,  # a mean over examples would be multiplied by the processes
    )
    # Of the running model, the look-ahead and the EMA: decisions do not depend on how many processes add up a loss.
    trainer.compute_metrics = scripted(*(0.5, 0.3), *(0.9, 0.2, 0.3), *(0.4, 0.95, 0.3))
    callback = with_aswa(trainer, metric="accuracy", strategies=("aswa", "ema", "best"))
    trainer.train()
    trainer.save_model(str(folder / f"final{world}"))
    return {
        "sharded": is_sharded(trainer.model),
        "processes": trainer.accelerator.num_processes,
        "decisions": {name: [r.decision.value for r in s.trajectory] for name, s in callback.strategies.items()},
        "scores": {name: [r.score for r in s.trajectory] for name, s in callback.strategies.items()},
        "loss": [log["eval_aswa_loss"] for log in trainer.state.log_history if "eval_aswa_loss" in log][-1],
        "elements": sum(tensor.numel() for tensor in callback.strategies["aswa"].average.averaged.values()),
    }


def save_ensemble(folder: Path) -> bool:
    """The mean of all zeros and all ones, as a checkpoint in `folder`."""
    model = text_model()
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    aswa = ASWA(model)
    for value, score in ((0.0, 0.1), (1.0, 0.2)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        aswa.update(lambda score=score: score, running_score=0.0)
    aswa.apply()
    state_dict = whole_weights(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state_dict)
    return is_sharded(model)
