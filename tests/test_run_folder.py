"""A finished run is read as it was written: any other content of its files is noticed, whatever reads them."""

import json
import re

import pytest

from aswa_hf.run_folder import check_unchanged, commit_marker, commit_run, reopen_run


@pytest.fixture
def run(tmp_path):
    (tmp_path / "aswa").mkdir()
    for name in ("config.json", "model.safetensors", "train.log", "README.md", "aswa/average.safetensors"):
        (tmp_path / name).write_text(f"content of {name}")
    commit_run(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "aswa/average.safetensors"])
def test_another_content_is_noticed_where_it_matters(run, name):
    check_unchanged(run, "*.json", "*.safetensors", "aswa/*")
    (run / name).write_text(f"content 0f {name}")
    check_unchanged(run, "results.json")  # not this one
    with pytest.raises(
        ValueError, match=f"{re.escape(run.name)} has changed since it was written: .*{name} has changed"
    ):
        check_unchanged(run, "*.json", "*.safetensors", "aswa/*")


def test_notes_may_change_and_files_that_came_later_are_not_checked(run):
    for name in ("train.log", "README.md", "queries.json"):
        (run / name).write_text("something else")
    check_unchanged(run, "*")


def test_a_run_that_is_resumed_has_no_mark_until_it_ends_again(run):
    reopen_run(run)
    (run / "config.json").write_text("of the longer run")
    check_unchanged(run, "*")
    commit_run(run)
    assert set(json.loads(commit_marker(run).read_text())["files"]) == {
        "config.json", "model.safetensors", "aswa/average.safetensors"
    }  # fmt: skip
