"""What averaging existing checkpoints costs in time and memory, beside reading their files once and a naive average.

    python benchmarks/average_checkpoints.py
    python benchmarks/average_checkpoints.py --megabytes 800 --checkpoints 4 --json average_checkpoints.json

Every row runs in a process of its own on the same safetensors files of float32, so that its peak of resident memory is
its own; that of a process that only imports the same libraries is subtracted. "read once" is the limit: every byte of
every file into one buffer. "naive" loads all checkpoints, takes their mean and saves it. "aswa" also scores every
checkpoint and every look-ahead, here by a function that does nothing, so that each is in memory once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MEGABYTE = 1 << 20


def read_once(files: list[Path], output: Path) -> None:
    buffer = bytearray(4 * MEGABYTE)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def naive(files: list[Path], output: Path) -> None:
    states = [load_file(path) for path in files]
    mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
    output.mkdir()
    save_file(mean, output / "model.safetensors")


def uniform(files: list[Path], output: Path) -> None:
    from aswa_hf import average_checkpoints

    average_checkpoints(files, strategy="uniform", output=output)


def aswa(files: list[Path], output: Path) -> None:
    from aswa_hf import average_checkpoints

    scores = iter(range(10**6))
    average_checkpoints(files, lambda state: next(scores), "aswa", output=output, hard_updates=False)


def nothing(files: list[Path], output: Path) -> None:
    import aswa_hf.checkpoints  # noqa: F401


ROWS = {function.__name__: function for function in (nothing, read_once, naive, uniform, aswa)}


def peak_memory() -> int:
    """The most resident memory this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measured(name: str, folder: Path, repeats: int) -> dict[str, float]:
    """The fastest of several processes, and the memory that none of them exceeded."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [sys.executable, __file__, "--row", name, "--folder", str(folder), "--output", scratch + "/out"]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return {"seconds": min(run["seconds"] for run in runs), "bytes": max(run["bytes"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of a checkpoint")
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        files = sorted(given.folder.glob("*.safetensors"))
        nothing(files, given.output)
        start = time.perf_counter()
        ROWS[given.row](files, given.output)
        print(json.dumps({"seconds": time.perf_counter() - start, "bytes": peak_memory()}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows, width = given.megabytes * MEGABYTE // 4 // 1024 // 8, 1024
        for number in range(given.checkpoints):
            torch.manual_seed(number)
            save_file({f"layers.{i}": torch.randn(rows, width) for i in range(8)}, folder / f"{number}.safetensors")
        found = {name: measured(name, folder, given.repeats) for name in ROWS}
    size = 8 * rows * width * 4
    print(f"{given.checkpoints} checkpoints of {size / MEGABYTE:.0f} MB, {torch.get_num_threads()} threads")
    print(f"{'':10s} {'seconds':>8s} {'× read':>7s} {'MB more':>8s} {'copies':>7s}")
    for name, row in found.items():
        more = row["bytes"] - found["nothing"]["bytes"]
        row |= {"times_read": row["seconds"] / found["read_once"]["seconds"], "copies": more / size}
        if name != "nothing":
            print(
                f"{name:10s} {row['seconds']:8.2f} {row['times_read']:7.1f} {more / MEGABYTE:8.0f} {more / size:7.2f}"
            )
    if given.json:
        given.json.write_text(
            json.dumps({"bytes_each": size, "checkpoints": given.checkpoints, "rows": found}, indent=2)
        )


if __name__ == "__main__":
    main()
