"""Runs one Trainer job several times, each in a process of its own that may be killed with SIGKILL after an epoch.

    python killed_runs.py KIND FOLDER SAVE_STRATEGY KILL_AFTER…

`KILL_AFTER` is 0 for a run that is let through, or the epoch after whose checkpoint the process is killed and started
again. Every finished run leaves its weights and history in FOLDER/<KILL_AFTER>/result.safetensors and result.json.
The processes are forked, since importing the libraries takes longer than training.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import warm
from safetensors.torch import load_file, save_file
from training import assert_same_tensors, make_trainer, weights_of, with_aswa
from transformers import Trainer, TrainerCallback

from aswa_hf import ASWACallback


class Kill(TrainerCallback):
    """Ends the process, without any clean-up, once the checkpoint of an epoch has been written."""

    def __init__(self, epoch: int):
        self.epoch = epoch

    def on_save(self, args, state, control, **kwargs):
        if state.epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, folder: Path, save_strategy: str, kill_after: int, resume: bool) -> None:
    # Six steps an epoch: a checkpoint by steps falls on the last step of every epoch, before its end. The Trainer's
    # own evaluation at that end draws random numbers which a resumed run does not draw, so it is off there.
    evaluation = "epoch" if save_strategy == "epoch" else "no"
    trainer = make_trainer(kind, folder, save_strategy=save_strategy, save_steps=6, eval_strategy=evaluation)
    callback = with_aswa(trainer, strategies=("aswa", "dense-aswa", "swa", "ema", "best", "last"))
    if kill_after and not resume:
        trainer.add_callback(Kill(kill_after))
    trainer.train(resume_from_checkpoint=resume or None)
    write_result(trainer, callback, folder)


def write_result(trainer: Trainer, callback: ASWACallback, folder: Path) -> None:
    """Leaves weights and history of a finished run in its folder."""
    result = {f"ensemble/{name}": tensor for name, tensor in weights_of(trainer.model).items()}
    for name, strategy in callback.strategies.items():
        result |= {f"{name}/{key}": tensor.clone() for key, tensor in strategy.average.averaged.items()}
    last_checkpoint = folder / f"checkpoint-{trainer.state.global_step}"
    for file in last_checkpoint.glob("*model.safetensors"):
        result |= {f"running/{name}": tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, folder / "result.safetensors")
    history = {
        name: {"records": strategy.trajectory.to_json(), "alphas": strategy.alphas}
        for name, strategy in callback.strategies.items()
    }
    (folder / "result.json").write_text(json.dumps(history))


def in_own_process(*job) -> int:
    """The exit status of `train(*job)` as a process; the number of the signal, negative, if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            train(*job)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def assert_bit_identical(kind: str, folder: Path, save_strategy: str, kills: list[int]) -> None:
    """Runs the job straight through and once with each kill, and compares all weights and histories."""
    run = warm.run(__file__, kind, folder, save_strategy, 0, *kills)
    assert run.returncode == 0, run.stderr[-3000:]

    straight = load_file(folder / "0" / "result.safetensors")
    history = json.loads((folder / "0" / "result.json").read_text())
    assert len(history["aswa"]["records"]) == 6
    assert any(name.startswith("running/") for name in straight)
    assert len({record["decision"] for record in history["aswa"]["records"]}) >= 2
    for kill_after in kills:
        assert_same_tensors(straight, load_file(folder / str(kill_after) / "result.safetensors"))
        assert json.loads((folder / str(kill_after) / "result.json").read_text()) == history


def main() -> None:
    kind, root, save_strategy, *kills = sys.argv[1:]
    torch.set_num_threads(1)
    for kill_after in map(int, kills):
        folder = Path(root) / str(kill_after)
        if kill_after:
            status = in_own_process(kind, folder, save_strategy, kill_after, False)
            assert status == -signal.SIGKILL, f"expected the process to be killed, it ended with {status}"
            assert not (folder / "result.json").exists()
        status = in_own_process(kind, folder, save_strategy, kill_after, kill_after > 0)
        assert status == 0, f"the run ended with {status}"


if __name__ == "__main__":
    main()
