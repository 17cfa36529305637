"""Runs a script with FSDP2 on CPUs, as the launcher's settings say; accelerate by itself would leave it out there.

accelerate launch --config_file CONFIG --num_processes 2 sharded_on_cpu.py SCRIPT …
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState


def shard_on_cpu(accelerator: accelerate.Accelerator, **settings: Any) -> None:
    """Makes an accelerator on CPUs do what it does on GPUs with `fsdp_version: 2`."""
    plugin = FullyShardedDataParallelPlugin(**settings)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2


class ShardingAccelerator(accelerate.Accelerator):
    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        shard_on_cpu(self)


if __name__ == "__main__":
    accelerate.Accelerator = ShardingAccelerator  # type: ignore[misc]
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
