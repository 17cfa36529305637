"""Runs an `aswa-hf` command that writes a line to a file descriptor after the first step of training.

python announced_command.py DESCRIPTOR ARGUMENT…
"""

import os
import sys

from moments import at

from aswa_hf.cli import main

if __name__ == "__main__":
    descriptor = int(sys.argv.pop(1))
    at("on_step_end", lambda args, state: os.write(descriptor, b"training\n") if state.global_step == 1 else None)
    main()
