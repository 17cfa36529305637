"""The peak memory of this process, on Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def forget_peak_memory() -> None:
    """Makes the peak begin at what the process uses now; without effect where the system does not allow it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int | None:
    """The largest resident memory of this process in bytes; None on other systems."""
    # Not getrusage: what it returns begins with the peak of the parent process.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return None
