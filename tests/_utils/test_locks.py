"""The lock on a folder: one run at a time, ended by any end of the process, passed over where there are no locks."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys

import pytest

from aswa_hf._utils.locks import locked

HOLD = """
import os, sys
from pathlib import Path
from aswa_hf._utils.locks import locked
with locked(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork():  # then only the child speaks, which has let go of the lock by then
        os.read(0, 1)
    print(os.getpid(), flush=True)
    os.read(0, 1)
"""


def holding(folder, *forks):
    """Another process that has the lock until it is killed, and the id of the last of its processes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *forks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline()


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path):
    other, _ = holding(tmp_path)
    with other:
        with pytest.raises(BlockingIOError, match="another run is using it"), locked(tmp_path):
            pass
        other.kill()
    with locked(tmp_path), pytest.raises(BlockingIOError, match="another run is using it"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_the_killed_one_has_forked_does_not_keep_the_lock(tmp_path):
    other, child = holding(tmp_path, "fork")
    with other:
        other.kill()
        other.wait(60)
        os.kill(int(child), 0)  # which is alive, and reads what nobody writes
        with locked(tmp_path):
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_passed_over(number, tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    logging.getLogger("aswa_hf").propagate = True
    caplog.set_level(logging.INFO, "aswa_hf")
    with locked(tmp_path), locked(tmp_path):
        pass
    assert caplog.messages == [f"{tmp_path} cannot be locked: [Errno {number}] {os.strerror(number)}"] * 2


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path / "missing"):
        pass
