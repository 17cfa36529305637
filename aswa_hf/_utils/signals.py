"""Ctrl-C in the middle of an operation that must be completed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays an interrupt until the end of the block, so that the block is done completely."""
    # Python delivers signals to the main thread only, and only it may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[-1])
