"""Settings for all tests: no network, one thread (two processes often share two cores)."""

import gc
import os
import signal

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

# For the processes that tests start too: what two threads add up depends on how busy the machine is.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

# Some virtual machines announce AMX but stop a process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import sys

import pytest
import torch

torch.set_num_threads(1)

# Flushing to the disk is for power failures, of which there are none here; it takes longer than many a test.
os.fsync = lambda descriptor: None

# A shell starts programs in the background with Ctrl-C ignored, and tests send it to themselves and to others.
signal.signal(signal.SIGINT, signal.default_int_handler)

FROZEN = pytest.StashKey[int]()  # how many modules the garbage collector passes over
LONG = ("cli", "ddp", "examples", "fsdp", "hub", "loop", "process", "resume")


def pytest_collection_modifyitems(items):
    """Files that start processes come first: at the end they would leave a core idle."""
    items.sort(key=lambda item: not any(word in item.path.stem for word in LONG))


def pytest_runtest_setup(item):
    """What was imported is nobody's garbage: a Trainer ends its run with a search, which took most of its time."""
    if len(sys.modules) > item.config.stash.get(FROZEN, 0) + 50:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN] = len(sys.modules)


def pytest_unconfigure():
    gc.unfreeze()  # some libraries report what is left when the interpreter exits


def pytest_terminal_summary(terminalreporter):
    """What tests counted with `record_property`, summed by name."""
    sums = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                for name, number in report.user_properties:
                    sums[name] = sums.get(name, 0) + number
    for name, number in sums.items():
        terminalreporter.write_line(f"{name}: {number:,}")


@pytest.fixture(autouse=True)
def no_pictures(request):
    """The picture at the end of a Trainer's run takes longer than most runs here; `pictures` marks who looks at it."""
    # A patch of its own: with the tests' one, that one would be undone after all other fixtures.
    with pytest.MonkeyPatch.context() as patch:
        if "pictures" not in request.keywords and (callback := sys.modules.get("aswa_hf.trainer.callback")):
            patch.setattr(callback, "plot_trajectories", lambda *args, **options: None)
        yield
