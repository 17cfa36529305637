"""DeepSpeed's conversion of a checkpoint for any number of processes."""

import subprocess
import sys
from pathlib import Path


def convert(own: Path) -> None:
    """Converts a folder of DeepSpeed's own files; the result lies beside it."""
    folders = ["--input_folder", own, "--output_folder", f"{own}_universal"]
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *options], check=True)
