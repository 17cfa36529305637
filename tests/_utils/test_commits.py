"""The marker of a complete folder notices every change to the files it lists, and no others."""

import random

import pytest
import torch
from safetensors.torch import save_file

from aswa_hf._utils.commits import commit, damage


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint-6"
    (folder / "aswa").mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    torch.save({"exp_avg": torch.randn(100)}, folder / "optimizer.pt")
    save_file({"weight": torch.randn(100)}, folder / "model.safetensors")
    save_file({"aswa/averaged/weight": torch.randn(100)}, folder / "aswa" / "average.safetensors")
    return folder


def damaged(folder):
    return damage(folder, folder / "aswa" / "commit.json", "trainer_state.json")


def test_a_committed_folder_is_valid_also_with_files_that_were_added_later(folder):
    commit(folder, folder / "aswa" / "commit.json")
    (folder / "added.txt").write_text("by another callback")
    assert damaged(folder) is None


def test_every_flipped_bit_is_found(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    commit(folder, folder / "aswa" / "commit.json")
    chance = random.Random(0)
    for path in files:
        content = path.read_bytes()
        for _ in range(20):
            changed = bytearray(content)
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            assert damaged(folder) == f"the content of {path.relative_to(folder)} has changed"
        path.write_bytes(content)
        assert damaged(folder) is None


def test_truncated_missing_and_unreadable_files_are_named(folder):
    marker = folder / "aswa" / "commit.json"
    commit(folder, marker)
    size = (folder / "optimizer.pt").stat().st_size
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:100])
    assert damaged(folder) == f"optimizer.pt has 100 bytes instead of {size}"
    (folder / "optimizer.pt").unlink()
    assert damaged(folder) == "optimizer.pt is missing"
    for content in ("", "[]", '{"files": 3}', '{"files": {"optimizer.pt": {}}}'):
        marker.write_text(content)
        assert damaged(folder) == "commit.json cannot be read"


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "model.safetensors", "trainer_state.json", "aswa/average.safetensors"]
)
@pytest.mark.parametrize("size", [0, 1, 9, 200])
def test_without_a_marker_a_truncated_file_is_found_by_its_format(folder, name, size):
    assert damaged(folder) is None
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: min(size, len(content) - 1)])
    assert damaged(folder).startswith(f"{name} cannot be read: ")


def test_without_a_marker_the_last_file_must_be_there(folder):
    (folder / "trainer_state.json").unlink()
    assert damaged(folder) == "it has no trainer_state.json"


@pytest.mark.parametrize(
    "files", ["{}", '{"../other": {"size": 0, "crc32": 0}}', '{"/dev/null": {"size": 0, "crc32": 0}}']
)
def test_a_marker_that_lists_nothing_or_files_elsewhere_makes_no_folder_valid(folder, files):
    (folder.parent / "other").write_bytes(b"")
    (folder / "aswa" / "commit.json").write_text(f'{{"files": {files}}}')
    assert damaged(folder) == "commit.json does not list the files of this folder"


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity", "true", '"1"', "9" * 5000, "1" + "0" * 400, "null"])
def test_a_marker_with_a_number_that_is_none_is_damaged(folder, number):
    (folder / "aswa" / "commit.json").write_text(f'{{"files": {{"optimizer.pt": {{"size": {number}, "crc32": 1}}}}}}')
    assert damaged(folder) == "commit.json cannot be read"
