"""Runs that are killed at any moment and resumed: a hundred of them, and no differing bit."""

import json
import subprocess
import sys

import pytest
from places import HELPERS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["trainer", "fit", "kge", "image"])
def test_killed_at_moments_drawn_at_random_and_resumed_no_bit_differs(kind, tmp_path, record_property):
    command = [sys.executable, str(HELPERS / "kills.py"), kind, str(tmp_path), "0", "26"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    record_property("kills", len(found["kills"]))
    record_property("kills: runs with a differing bit", sum(bool(kill["differ"]) for kill in found["kills"]))
    assert len(found["kills"]) == 26
    assert [kill for kill in found["kills"] if kill["differ"]] == []
