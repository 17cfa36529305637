"""Exact moments of a run: what a test does there needs no clock and no look at files."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback


def at(moment: str, action: Callable[[Any, Any], None]) -> None:
    """Calls `action(args, state)` at a moment ("on_save", …) of every `Trainer` here, after all other callbacks."""
    train = Trainer.train

    def act(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        action(args, state)

    @functools.wraps(train)
    def train_with_hook(trainer: Trainer, *args: Any, **more: Any) -> Any:
        trainer.add_callback(type("Hook", (TrainerCallback,), {moment: act}))
        return train(trainer, *args, **more)

    Trainer.train = train_with_hook  # type: ignore[method-assign]


def die() -> None:
    """Ends this process as SIGKILL does: without any clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
