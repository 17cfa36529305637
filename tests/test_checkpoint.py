"""Saved state: bit-exact and readable, and the old one or the new one whatever happens while it is written."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import warm
from bad_inputs import damages
from places import HELPERS
from safetensors.torch import load_file, save_file
from torch import nn

from aswa_hf import ASWA, EMA, SWA, BestCheckpoint, DenseASWA, LastCheckpoint
from aswa_hf.checkpoint import AVERAGE_FILE, STATE_FILE, load_state, save_state


class Net(nn.Module):
    """Half precision, convolutions in channels-last layout, BatchNorm, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.embed.bfloat16()


def strategies(model: nn.Module, **options) -> dict:
    options = {"batchnorm": "copy", **options}
    return {
        "aswa": ASWA(model, **options),
        "swa": SWA(model, start=1, **options),
        "ema": EMA(model, decay=0.9, dtype=torch.float64, **options),
        "mean": EMA(model, **{**options, "batchnorm": "average"}),  # a name of one's own
        "best": BestCheckpoint(model, **options),
        "last": LastCheckpoint(model, **options),
    }


def train(model: nn.Module, of: dict, points: int) -> None:
    for point in range(points):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.randn(tensor.shape).to(tensor.dtype) if tensor.is_floating_point() else 1)
        for strategy in of.values():
            strategy.step()
            strategy.update(lambda point=point: (0.3, 0.5, 0.4)[point % 3], running_score=(0.2, 0.7, 0.1)[point % 3])


def same(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    return repr(ours) == repr(theirs)  # NaN equals NaN here


def states(of: dict) -> dict:
    return {name: strategy.state_dict() for name, strategy in of.items()}


def strictly(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("points", [0, 1, 4])
def test_a_state_comes_back_bit_for_bit(tmp_path, points):
    torch.manual_seed(0)
    model = Net()
    before = strategies(model)
    train(model, before, points)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_state(tmp_path / "checkpoint-3" / "aswa", before, metric="accuracy", epoch=3)
    assert same(dict(model.state_dict()), weights)

    after = strategies(Net())
    rest = load_state(tmp_path / "checkpoint-3" / "aswa", after)
    assert same(states(after), states(before))
    assert (rest["metric"], rest["epoch"]) == ("accuracy", 3)
    assert [file.name for file in sorted((tmp_path / "checkpoint-3" / "aswa").iterdir())] == [AVERAGE_FILE, STATE_FILE]
    if points:
        assert all(strategy.members for strategy in after.values() if points > 1 or strategy.name != "swa")
        with after["aswa"].swapped():
            assert after["aswa"].model.head.weight is after["aswa"].model.embed.weight


def test_a_resumed_run_continues_as_the_saved_one(tmp_path):
    torch.manual_seed(0)
    model = Net()
    whole = strategies(model)
    train(model, whole, 2)
    save_state(tmp_path, whole)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    train(model, whole, 3)

    resumed_model = Net()
    resumed_model.load_state_dict(weights)
    resumed = strategies(resumed_model)
    load_state(tmp_path, resumed)
    torch.manual_seed(1)
    train(resumed_model, resumed, 3)
    assert same(states(resumed), states(whole))


def test_the_json_file_shows_scores_history_and_versions(tmp_path):
    model = nn.Linear(2, 2)
    of = {"aswa": ASWA(model)}
    scores = iter([0.5, 0.4, 0.6])
    of["aswa"].update(scores.__next__)
    of["aswa"].update(scores.__next__)
    save_state(tmp_path, of, metric="mrr")
    content = strictly((tmp_path / STATE_FILE).read_text())
    state = content["strategies"]["aswa"]
    assert (state["score"], state["members"], content["metric"]) == (0.6, 2, "mrr")
    assert [r["decision"] for r in state["records"]] == ["init", "soft"]
    assert content["versions"]["torch"] == version("torch")
    assert set(load_file(tmp_path / AVERAGE_FILE)) == {"aswa/averaged/weight", "aswa/averaged/bias"}


def test_scores_that_are_not_finite_are_strict_json_and_come_back(tmp_path):
    model = nn.Linear(2, 2)
    of = {"last": LastCheckpoint(model), "swa": SWA(model)}
    for score in (math.inf, -math.inf, math.nan):
        for strategy in of.values():
            with pytest.warns(UserWarning, match="worse than any number"):
                strategy.update(lambda score=score: score)
    save_state(tmp_path, of)
    assert strictly((tmp_path / STATE_FILE).read_text())["strategies"]["last"]["score"] == "nan"
    fresh = {"last": LastCheckpoint(nn.Linear(2, 2)), "swa": SWA(nn.Linear(2, 2))}
    load_state(tmp_path, fresh)
    assert same(states(fresh), states(of))
    assert math.isnan(fresh["last"].score)


# Saves that go wrong


def fail_to_save(scenario: str, folder: Path) -> dict:
    run = warm.run(HELPERS / "failing_saves.py", scenario, folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX limits")
def test_a_file_that_cannot_be_written_leaves_the_previous_state_and_the_running_weights(tmp_path):
    report = fail_to_save("too-large", tmp_path)
    assert "could not be saved" in report["error"]
    assert "File too large" in report["error"]
    assert report["same files"]
    assert report["loaded"] == 1
    assert report["running weights"] == [7.0]
    assert report["score"] == 2.0
    assert report["loaded with room"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_process_killed_while_saving_leaves_the_old_state_or_the_new_one(tmp_path):
    report = fail_to_save("killed", tmp_path)
    *kills, through = report["moments"]
    assert (report["status"], through) == (0, "")  # the last process was not killed
    assert {"open", "half written", "os.rename"} <= set(kills)
    # The second rename, that of the tensors, makes the new state count.
    second = [number for number, moment in enumerate(kills) if moment == "os.rename"][1]
    old, new = report["values"][1 : second + 2], report["values"][second + 2 :]
    assert set(old) == {0}
    assert new == list(range(second + 2, len(kills) + 2))
    assert report["in_the_middle"] > 0  # kills that left a file behind which does not count


def test_a_state_is_replaced_in_one_move(tmp_path):
    path = saved(tmp_path)
    content = path.read_bytes()
    with path.open("rb") as reader, (tmp_path / STATE_FILE).open() as text_reader:
        text = (tmp_path / STATE_FILE).read_text()
        saved(tmp_path)
        assert path.read_bytes() != content
        assert reader.read() == content  # whoever has the old file open never sees half of a new one
        assert text_reader.read() == text


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mount = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mount.returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_leaves_the_previous_state(small_disk):
    model = nn.Linear(300, 300)
    of = {"best": BestCheckpoint(model)}
    of["best"].update(lambda: 0.1)
    save_state(small_disk / "aswa", of, value=1)
    first = states(of)
    model.weight.data.fill_(2.0)
    of["best"].update(lambda: 0.2)
    (small_disk / "other").write_bytes(bytes(400_000))
    with pytest.raises(OSError, match=r"could not be saved to .*No space left on device.*free some space") as caught:
        save_state(small_disk / "aswa", of, value=2)
    assert isinstance(caught.value.__cause__, Exception)
    assert sorted(file.name for file in (small_disk / "aswa").iterdir()) == [AVERAGE_FILE, STATE_FILE]
    assert strictly((small_disk / "aswa" / STATE_FILE).read_text())["value"] == 1
    fresh = {"best": BestCheckpoint(nn.Linear(300, 300))}
    assert load_state(small_disk / "aswa", fresh)["value"] == 1
    assert same(states(fresh), first)


def test_a_json_file_that_cannot_be_replaced_leaves_the_previous_tensors(tmp_path):
    of = {"last": LastCheckpoint(nn.Linear(2, 2))}
    of["last"].update()
    save_state(tmp_path, of, value=1)
    (tmp_path / STATE_FILE).unlink()
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(OSError, match="could not be saved"):
        save_state(tmp_path, of, value=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == [AVERAGE_FILE, STATE_FILE]
    assert load_state(tmp_path, of)["value"] == 1


def test_a_value_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    of = {"last": LastCheckpoint(nn.Linear(2, 2))}
    of["last"].update()
    with pytest.raises(ValueError, match="JSON"):
        save_state(tmp_path / "aswa", of, score=math.nan)
    assert not (tmp_path / "aswa").exists()


# Files that are not a complete state of this run


def saved(folder: Path) -> Path:
    of = {"aswa": ASWA(nn.Linear(3, 2))}
    of["aswa"].update(lambda: 0.5)
    save_state(folder, of)
    return folder / AVERAGE_FILE


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "cut in the header":
        path.write_bytes(path.read_bytes()[:100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not tensors, but long enough to be read as if")
    elif how == "another model's weights":
        save_file({"weight": torch.zeros(2)}, path)
    else:
        save_file({"weight": torch.zeros(2)}, path, metadata={"aswa-state": "{not json"})


@pytest.mark.parametrize(
    "how", ["truncated", "cut in the header", "empty", "text", "another model's weights", "header that is not JSON"]
)
def test_a_truncated_or_foreign_file_is_a_clear_error_and_changes_nothing(tmp_path, how):
    path = saved(tmp_path)
    damage(path, how)
    fresh = {"aswa": ASWA(nn.Linear(3, 2))}
    with pytest.raises(ValueError, match=r"average\.safetensors is not a complete averaging state of aswa-hf"):
        load_state(tmp_path, fresh)
    assert fresh["aswa"].members == 0


def test_a_missing_file_another_version_other_strategies_and_another_model_are_named(tmp_path):
    path = saved(tmp_path)
    model = nn.Linear(3, 2)
    with pytest.raises(FileNotFoundError, match=r"There is no averaging state at .*nowhere"):
        load_state(tmp_path / "nowhere", {"aswa": ASWA(model)})
    with pytest.raises(
        ValueError, match=r"holds the strategies aswa, but this run has aswa, swa\. Resume with the same"
    ):
        load_state(tmp_path, {"aswa": ASWA(model), "swa": SWA(model)})
    with pytest.raises(ValueError, match=r"'weight' is \(2, 3\) in the saved state but \(4, 3\) in the model"):
        load_state(tmp_path, {"aswa": ASWA(nn.Linear(3, 4))})
    content = json.loads((tmp_path / STATE_FILE).read_text()) | {"version": 99}
    save_file(load_file(path), path, metadata={"aswa-state": json.dumps(content)})
    with pytest.raises(ValueError, match="has version 99, this aswa-hf reads version 1"):
        load_state(tmp_path, {"aswa": ASWA(model)})


def changed_state(change):
    """A damage of the state in a file's header."""

    def damage(content, chance):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"]["aswa-state"] = change(header["__metadata__"]["aswa-state"].encode(), chance).decode()
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return damage


def test_every_damage_of_the_file_is_one_line_and_changes_nothing(tmp_path):
    def followed(*scores):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        strategies = {"aswa": ASWA(model), "dense-aswa": DenseASWA(model), "ema": EMA(model)}
        for score in scores:
            for strategy in strategies.values():
                strategy.step()
                strategy.update(lambda score=score: score)
        return strategies

    folder = tmp_path / "checkpoint-2" / "aswa"
    save_state(folder, followed(0.25, 0.5), metric="accuracy")
    path = folder / AVERAGE_FILE
    whole = path.read_bytes()
    texts = {name: damage for name, damage in damages(Path("x.json")).items() if name not in ("garbage", "not UTF-8")}
    found = damages(path) | {f"state: {name}": changed_state(damage) for name, damage in texts.items()}
    # Without this note, or with another one, it is the same state.
    harmless = {"state: a field less", "state: another type", "state: a huge number"}
    before = {name: strategy.state_dict() for name, strategy in followed(0.125).items()}
    for name, damage in found.items():
        for seed in range(12 if name in harmless else 3):
            path.write_bytes(damage(whole, random.Random(seed)))
            strategies = followed(0.125)
            told = ""
            try:
                load_state(folder, strategies, _Metric)
            except ValueError as error:
                told = str(error)
            assert told or name in harmless, name
            if told:
                assert str(folder.parent) in told, name
                assert "\n" not in told, name
                after = {name: strategy.state_dict() for name, strategy in strategies.items()}
                assert repr(after) == repr(before), name


@dataclass
class _Metric:
    metric: str


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", ".."])
def test_a_state_that_names_files_elsewhere_is_refused(tmp_path, name):
    path = saved(tmp_path)
    content = json.loads((tmp_path / STATE_FILE).read_text()) | {"shards": [name]}
    save_file(load_file(path), path, metadata={"aswa-state": json.dumps(content)})
    with pytest.raises(ValueError, match="expected the name of one beside it"):
        load_state(tmp_path, {"aswa": ASWA(nn.Linear(3, 2))})
