"""Programs in processes of their own, forked from one that has imported the libraries: that takes most of the time.

    warm.run(SCRIPT, ARGUMENT…)      # as `python SCRIPT ARGUMENT…`
    warm.run("-m", MODULE, …)        # as `python -m MODULE …`
    warm.run("-c", CODE, …)          # as `python -c CODE …`

What a program reads from its environment while libraries are imported (HF_ENDPOINT, OMP_NUM_THREADS) it finds as it
was for the first call. With `bare=True` nothing is imported that reads settings of Hugging Face, and not this package.
The server is this file: one request a line on its input, one answer a line on its output.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
LIBRARIES = (
    "accelerate", "datasets", "matplotlib.pyplot", "numpy", "sklearn.datasets", "timm", "transformers",
    "aswa_hf.cli", "aswa_hf.experiments.image", "aswa_hf.experiments.kge", "aswa_hf.loop",
    "aswa_hf.trainer.callback", "training",
)  # fmt: skip
BARE = (
    "PIL.Image", "fsspec", "jinja2", "matplotlib.figure", "numpy", "pandas", "pyarrow.csv", "pyarrow.parquet",
    "pydantic", "rich.progress", "sklearn.datasets", "torch", "tqdm.auto", "yaml",
)  # fmt: skip


def run(
    *command: Any,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 540,
    bare: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, and ends what it leaves behind: a worker whose parent was killed may stay forever."""
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        server = _server(bare)
        request = {
            "command": [str(part) for part in command],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "output": [str(path) for path in written],
            "timeout": timeout,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        status = json.loads(server.stdout.readline())
        out, err = (path.read_text() for path in written)
    if status is None:
        raise subprocess.TimeoutExpired(request["command"], timeout, out, err)
    return subprocess.CompletedProcess(request["command"], status, out, err)


@functools.cache
def _server(bare: bool) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__, *(["--bare"] if bare else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # which closes its input, its end
    return server


def main() -> None:
    for library in BARE if "--bare" in sys.argv else LIBRARIES:
        importlib.import_module(library)
    os.fsync = lambda descriptor: None  # as in conftest.py
    gc.collect()
    gc.freeze()  # what was imported is nobody's garbage, and to look at it takes seconds in every process
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            return
        print(json.dumps(wait(child, request["timeout"])), flush=True)


def wait(child: int, timeout: float) -> int | None:
    """The exit status of a program, or None if it took too long; what belongs to it has ended too."""

    def too_late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        status = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return status
    if status is None:
        os.waitpid(child, 0)
    return status


def become(request: dict[str, Any]) -> None:
    """This process is the program from here on: it ends as the interpreter ends it."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    inputs = [os.open(os.devnull, os.O_RDONLY)]
    outputs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in request["output"]]
    for descriptor, opened in enumerate(inputs + outputs):
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    sys.modules["numpy"].random.seed()
    command = request["command"]
    if command[0] == "-c":
        sys.path[0] = ""  # instead of the folder of this file
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.path.insert(0, str(HELPERS))
    if command[0] == "-m":
        sys.argv = command[1:]
        end_quietly(command[1])
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


def end_quietly(module: str) -> None:
    """Runs a module and ends as the interpreter would, without what libraries write when they are unloaded."""
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
