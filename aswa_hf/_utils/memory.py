"""The peak memory of this process, on Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def reset_peak_memory() -> None:
    """Resets the peak to what the process uses now; a no-op where the system does not allow it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int | None:
    """The largest resident memory of this process in bytes; None on other systems."""
    # Not getrusage, which starts from the peak of the parent process.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return None
