"""Files outside of a folder are not read or shipped with it, neither by a name in its index nor by a link."""

import json
import shutil

import pytest
from hub_client import kge_run
from safetensors.torch import load_file, save_file

from aswa_hf._utils.paths import check_inside
from aswa_hf.checkpoints import average_checkpoints
from aswa_hf.hub import write_repository
from aswa_hf.kge import LinkPredictor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return kge_run(tmp_path_factory.mktemp("kge") / "run")


def uses(folder, out):
    """What reads a folder: the commands push, predict and average call these."""
    return {
        "push": lambda: write_repository(folder, out, "user/model"),
        "predict": lambda: LinkPredictor.from_pretrained(folder),
        "average": lambda: average_checkpoints([folder, folder], strategy="uniform", output=out),
    }


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", "..", "a/b.safetensors", 7, None])
def test_an_index_that_names_a_file_elsewhere_is_refused_by_every_use(name, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*", "aswa"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "secret.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)})
    )
    for call in uses(folder, tmp_path / "out").values():
        with pytest.raises(
            ValueError,
            match=r"index\.json: ('.*' is in .*\. Expected the name of a file in the same|.*, expected a string)",
        ):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "entities.json"])
def test_a_link_out_of_the_folder_is_refused_by_every_use(name, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*", "aswa"))
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(f"../{name}")
    for call in uses(folder, tmp_path / "out").values():
        with pytest.raises(ValueError, match=rf"{name} is a symbolic link out of its folder, to "):
            call()
    assert not (tmp_path / "out").exists()


def test_links_inside_a_folder_and_into_the_hubs_cache_are_followed(run, tmp_path):
    folder = tmp_path / "models--user--model" / "snapshots" / "0123"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*", "aswa"))
    blobs = tmp_path / "models--user--model" / "blobs"
    blobs.mkdir()
    shutil.move(folder / "model.safetensors", blobs / "abc")
    (folder / "model.safetensors").symlink_to("../../blobs/abc")
    (folder / "same.json").symlink_to("config.json")
    check_inside(folder)
    assert LinkPredictor.from_pretrained(folder).model is not None
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    check_inside(tmp_path / "link")
