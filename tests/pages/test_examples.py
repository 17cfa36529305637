"""Every example runs with one command; here in its fast mode, and resumed."""

import os
import subprocess
import sys

import pytest
import timm
import torch
import warm
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from hub_client import TOKEN, assert_nothing_pickled, files
from hub_server import HubServer
from launching import EXAMPLES, run_example
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from training import assert_accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer

from aswa_hf.ensembles import PredictionEnsemble
from aswa_hf.space.text import running_adapter
from aswa_hf.vision import ImageTensors, as_it_is, load_digits


def test_trainer_callback_trains_saves_and_resumes(tmp_path):
    fast = ["--max_train_images", "64", "--disable_tqdm", "true"]
    output = run_example("trainer_callback.py", *fast, "--num_train_epochs", "2", cwd=tmp_path)
    folder = tmp_path / "runs" / "trainer_callback"
    assert (folder / "model.safetensors").exists()
    assert (folder / "checkpoint-4" / "aswa" / "average.safetensors").exists()
    assert [line.split()[0] for line in output.splitlines() if " test accuracy " in line] == ["aswa", "last"]

    resume = ["--num_train_epochs", "3", "--resume_from_checkpoint", str(folder / "checkpoint-4")]
    run_example("trainer_callback.py", *fast, *resume, cwd=tmp_path)
    assert (folder / "checkpoint-6" / "aswa" / "average.safetensors").exists()


def test_finetune_lora_compares_strategies_and_saves_an_ordinary_adapter(tmp_path):
    pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    output = run_example("finetune_lora.py", "--fast", cwd=tmp_path)
    rows = [line.split()[0] for line in output.splitlines() if " held-out loss " in line]
    assert rows == ["aswa", "dense-aswa", "swa", "ema", "bema", "best", "last"]
    folder = tmp_path / "runs" / "finetune_lora"
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert "<answer>" in AutoTokenizer.from_pretrained(folder).chat_template
    assert running_adapter(folder) is not None  # for an application that shows it beside the average


@pytest.mark.slow
def test_finetune_lora_pushes_the_adapter_with_its_card(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    with HubServer(token=TOKEN) as hub:
        example = EXAMPLES / "finetune_lora.py"
        run = warm.run(example, "--fast", "--push", "user/adapter", cwd=tmp_path, env=hub.environment(), bare=True)
        assert run.returncode == 0, run.stderr[-3000:]
        assert f"Pushed to {hub.endpoint}/user/adapter" in run.stdout
        pushed = files(hub, "user/adapter")
    assert pushed.keys() >= {"adapter_config.json", "adapter_model.safetensors", "README.md", "aswa_trajectory.json"}
    assert pushed.keys() >= {"tokenizer.json", "chat_template.jinja", "trajectory.png"}
    assert not any(name.startswith(("base/", "checkpoint-")) for name in pushed)
    assert_nothing_pickled(pushed)
    card = pushed["README.md"].decode()
    assert "library_name: peft" in card
    assert "PeftModel.from_pretrained" in card


def test_image_classification_compares_strategies_fge_and_both_runs(tmp_path):
    output = run_example(
        "image_classification.py", "--train_size", "300", "--epochs", "2", "--model", "test_resnet", cwd=tmp_path
    )
    rows = [line.split(" test accuracy ") for line in output.splitlines() if " test accuracy " in line]
    kinds = ("aswa", "swa", "ema", "best", "last", "fge")
    assert [row[0].strip() for row in rows] == [f"seed {s}, {kind}" for s in (0, 1) for kind in kinds] + ["both runs"]
    # What is printed is what the saved weights predict, alone and together.
    test = ImageTensors(load_digits(train=300)["test"], size=16)
    batches = DataLoader(test, batch_size=250, collate_fn=as_it_is)
    folders = [tmp_path / "runs" / "image_classification" / f"seed-{seed}" for seed in (0, 1)]
    models = [timm.create_model(f"local-dir:{folder}", pretrained=True) for folder in folders]
    scores = {row[0].strip(): float(row[1]) for row in rows}
    for name, members in (("seed 0, aswa", models[:1]), ("seed 1, aswa", models[1:]), ("both runs", models)):
        ensemble = PredictionEnsemble(None, members, forward=lambda model, batch: model(batch["pixel_values"]))
        assert_accuracy(scores[name], ensemble.predict(batches), test.labels, digits=4)
    for folder in folders:
        assert len(list((folder / "fge").glob("snapshot-*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("example", "fast", "one_turned"),
    [
        # An image of 1097 that is as likely of two classes, or a triple of 48 ranked first or second: with batches of
        # another size the kernels round otherwise.
        pytest.param(
            "image_accelerate.py",
            ["--train_size", "200", "--model", "test_resnet", "--epochs", "3"],
            1 / 1097,
            marks=pytest.mark.slow,
        ),
        ("kge_accelerate.py", ["--dim", "8", "--batch_size", "200", "--epochs", "6"], 0.5 / 48),
        ("kge_sharded.py", ["--dim", "8", "--batch_size", "200", "--epochs", "6"], 0.5 / 48),
    ],
    ids=["image", "kge", "sharded"],
)
def test_two_processes_run_an_accelerate_example_and_one_finds_the_same_results(example, fast, one_turned, tmp_path):
    def results(output):
        return {line.split()[0]: float(line.split()[3]) for line in output.splitlines() if " test " in line}

    two = results(run_example(example, *fast, "--output_dir", "run", cwd=tmp_path, launcher="ddp"))
    assert list(two) == ["aswa", "swa", "ema", "best", "last"]
    assert all(0 < result <= 1 for result in two.values())
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "aswa_trajectory.json").exists()
    ranks = next(folder.glob("checkpoint-*/aswa")).glob("rank-*")
    assert sorted(path.name for path in ranks) == ["rank-0.safetensors", "rank-1.safetensors"]

    # The run is at its end: only the test split is evaluated, by one process instead of two.
    weights = load_file(tmp_path / "run" / "model.safetensors")
    one = results(run_example(example, *fast, "--output_dir", "run", cwd=tmp_path))
    assert one == pytest.approx(two, abs=one_turned + 1e-4)
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.fixture(scope="module")
def busy_machine():
    """One process per core that does nothing but keep it busy, until its input ends."""
    code = "import os, sys, threading; threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()\n"
    code += "while True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(os.cpu_count())]
    yield
    for process in spinning:
        process.communicate()


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("start", range(50))
@pytest.mark.parametrize("launcher", ["ddp", "fsdp2"])
def test_a_launched_example_exits_with_0_every_time(launcher, start, tmp_path):
    run_example("kge_accelerate.py", "--epochs", "2", "--output_dir", "run", cwd=tmp_path, launcher=launcher)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_the_configs(path):
    config = load_config_from_file(str(path))
    given = yaml.safe_load(path.read_text())
    assert config.num_processes == given["num_processes"] == 8 * config.num_machines or "cpu" in path.stem
    assert config.distributed_type.value == given["distributed_type"]
    if "fsdp" in path.stem:
        assert config.fsdp_config["fsdp_version"] == 2
