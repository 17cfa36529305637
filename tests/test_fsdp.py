"""Models sharded with `fully_shard` over 2, 3 and 4 real processes: the same decisions and weights as in one."""

from __future__ import annotations

import json

import fsdp_jobs
import pytest
import torch
from fsdp_run import TOKENS, Processes, in_bfloat16, make_net, plain_walk, snapshot, strategies, walk
from launching import run_example
from safetensors.torch import load_file
from torch import nn

from aswa_hf import ASWA, EMA, BestCheckpoint
from aswa_hf.checkpoint import load_state, save_state

STRATEGIES = ("aswa", "dense-aswa", "swa", "ema", "best", "last")
TRAINABLE = ["embed.weight", "block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias", "block.3.weight"]
TRAINABLE += ["block.3.bias", "wide.weight", "head.bias"]


@pytest.fixture(scope="module")
def processes():
    started = Processes()
    yield started
    started.close()


def assert_same_weights(folder, of, computed=("swa",)):
    """The same weights bit for bit; of strategies whose numbers are rounded, up to that."""
    for name, strategy in of.items():
        strategy.apply()
        sharded = load_file(folder / f"{name}.safetensors")
        plain = strategy.model.state_dict()
        assert sharded.keys() == plain.keys()
        for key in plain:
            if name in computed:
                torch.testing.assert_close(sharded[key], plain[key], msg=f"{name} {key}")
            else:
                assert torch.equal(sharded[key], plain[key]), (name, key)


def assert_same_outputs(found, expected, compute=torch.float32):
    """Equal up to the roundings of a few sums, which wherever the weights lie in memory may come in another order."""
    found, expected = torch.tensor(found), torch.tensor(expected)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 16 * torch.finfo(compute).eps * expected.abs().max()


@pytest.mark.parametrize(("world", "hybrid"), [(2, False), (3, False), (4, True)])
def test_a_sharded_run_evaluates_decides_and_ends_as_one_process(processes, tmp_path, world, hybrid):
    ranks = processes.run("fsdp_jobs.follow", world, tmp_path, hybrid=hybrid)
    expected, of = plain_walk()
    decisions = [record["decision"] for record in expected["histories"]["aswa"]]
    assert decisions == ["init", "soft", "hard", "soft", "reject"]
    for number, rank in enumerate(ranks):
        assert_same_outputs(rank["outputs"], expected["outputs"])
        assert rank["histories"] == expected["histories"]
        assert rank["restored"]
        assert rank["tied"]
        assert rank["elements"] == elements(world // 2 if hybrid else world, number % 2 if hybrid else number)
    assert_same_weights(tmp_path, of)


def elements(world, rank):
    """How many elements of each trainable weight a rank averages, by hand: whole rows, single ones on rank 0."""
    of_5, of_7, of_4 = {
        2: [(3, 4, 2), (2, 3, 2)],
        3: [(2, 3, 2), (2, 3, 2), (1, 1, 0)],
    }[world][rank]
    one = int(rank == 0)
    return dict(zip(TRAINABLE, (of_5 * 4, of_7 * 4, of_7, of_7, of_7, one * 7, one, of_4, of_5), strict=True))


def test_the_model_computes_with_the_look_ahead_inside_and_with_the_running_weights_after_it(processes, tmp_path):
    first, second = snapshot(1), snapshot(2)
    mean = {
        name: torch.lerp(first[name], second[name], 0.25) if name in TRAINABLE or name == "head.weight" else tensor
        for name, tensor in second.items()
    }

    def output(weights):
        net = make_net().eval()
        net.load_state_dict(weights)
        with torch.no_grad():
            return net(TOKENS).tolist()

    # What is not trained stays as it is in the model; buffers are the ensemble's own.
    ensemble = {**first, "wide.bias": second["wide.bias"]}
    expected = {"look-ahead": mean, "ensemble": ensemble, "applied": ensemble}
    expected |= dict.fromkeys(("running", "after the look-ahead", "after the ensemble", "after an error"), second)
    for rank in processes.run("fsdp_jobs.look_ahead", 2, tmp_path):
        assert rank.pop("restored")
        assert rank.keys() == expected.keys()
        for moment, weights in expected.items():
            assert_same_outputs(rank[moment], output(weights))
    for other in (mean, ensemble):
        with pytest.raises(AssertionError):
            assert_same_outputs(output(other), output(second))


@pytest.mark.parametrize(("dtype", "world"), [("bfloat16", 2), ("float32", 3)])
def test_short_formats_are_averaged_in_float32(processes, tmp_path, dtype, world):
    ranks = processes.run("fsdp_jobs.follow", world, tmp_path, dtype=dtype, compute="bfloat16")
    expected, of = plain_walk(dtype=fsdp_jobs.DTYPES[dtype], run=in_bfloat16, buffers=torch.bfloat16)
    for rank in ranks:
        assert rank["dtypes"] == ["torch.float32"]
        assert_same_outputs(rank["outputs"], expected["outputs"], compute=torch.bfloat16)
        assert rank["histories"] == expected["histories"]
        assert rank["restored"]
    assert_same_weights(tmp_path, of)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_pays_its_share_of_the_weights_for_the_average_and_once_more_while_swapped(processes, tmp_path, world):
    share = 4 * (24 * 36 + 36 * 18) // world
    for report in processes.run("fsdp_jobs.memory", world, tmp_path):
        assert report == {"kept": share, "swapped": 2 * share}


def test_a_sharded_training_run_ends_as_that_of_one_process(processes, tmp_path):
    (expected,) = processes.run("fsdp_jobs.train", 1, tmp_path)
    reports = processes.run("fsdp_jobs.train", 2, tmp_path)
    assert set(expected["decisions"]) == {"init", "hard", "soft", "reject"}
    for report in reports:
        assert report["decisions"] == expected["decisions"]
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name, weights in expected["final"].items():
        found, weights = (torch.tensor(of, dtype=torch.float64) for of in (reports[0]["final"][name], weights))
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("batchnorm", ["recalibrate", "average"])
def test_batchnorm_statistics_follow_the_look_ahead_on_shards(processes, tmp_path, batchnorm):
    # The ranks have different numbers of batches to recalibrate on: they stop together.
    ranks = processes.run("fsdp_jobs.follow", 2, tmp_path, batchnorm=batchnorm)
    expected, of = plain_walk(batchnorm=batchnorm, train_batches=[TOKENS[:6], TOKENS[4:]])
    for rank in ranks:
        assert_same_outputs(rank["outputs"], expected["outputs"])
        assert rank["histories"] == expected["histories"]
        assert rank["restored"]
    assert_same_weights(tmp_path, of, computed=("aswa", "dense-aswa", "swa", "ema"))


# Saving


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (4, 2)])
def test_a_run_resumes_with_another_number_of_processes(processes, tmp_path, before, after):
    processes.run("fsdp_jobs.follow", before, tmp_path, last=3, save=True, hybrid=before == 4)
    assert_complete(tmp_path / "state", before)
    (tmp_path / "after").mkdir()
    (tmp_path / "state").rename(tmp_path / "after" / "state")
    ranks = processes.run("fsdp_jobs.follow", after, tmp_path / "after", first=3, resume=True)
    expected, of = plain_walk()
    assert all(rank["histories"] == expected["histories"] for rank in ranks)
    assert_same_weights(tmp_path / "after", of)


def assert_complete(folder, world):
    """One file per rank beside the index, and none of an earlier save."""
    content = json.loads((folder / "state.json").read_text())
    assert len(content["shards"]) == world
    names = {file.name for file in folder.iterdir()}
    assert names == {"average.safetensors", "state.json", *content["shards"]}
    # Every row is in one file: of 5, 7 and 4 rows and single ones.
    rows = [load_file(folder / name) for name in content["shards"]]
    assert sum(len(part.get("aswa/averaged/embed.weight", ())) for part in rows) == 5
    assert sum(len(part.get("ema/averaged/block.0.bias", ())) for part in rows) == 7
    assert not any(key.startswith("aswa/buffers") for part in rows for key in part)
    assert set(load_file(folder / "average.safetensors")) == {
        f"{name}/buffers/block.1.{buffer}"
        for name in ("aswa", "dense-aswa", "swa", "ema", "best", "last")
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_one_process_without_shards_resumes_from_three_and_three_from_it(processes, tmp_path):
    processes.run("fsdp_jobs.follow", 3, tmp_path, last=2, save=True)
    of = strategies(make_net(), batchnorm="copy")
    assert load_state(tmp_path / "state", of)["point"] == 2
    walk(of["aswa"].model, of, range(2, 4))
    save_state(tmp_path / "state", of, point=4)
    assert sorted(file.name for file in (tmp_path / "state").iterdir()) == ["average.safetensors", "state.json"]
    ranks = processes.run("fsdp_jobs.follow", 3, tmp_path, first=4, resume=True)
    expected, plain = plain_walk()
    assert all(rank["histories"] == expected["histories"] for rank in ranks)
    assert_same_weights(tmp_path, plain)


@pytest.mark.parametrize(
    ("rank", "moment", "value"),
    [
        (0, "in its file", 1.0),
        (1, "in its file", 1.0),
        (1, "after its file", 1.0),
        (0, "before the index counts", 1.0),
        (0, "when the index counts", 2.0),
    ],
)
def test_a_rank_killed_while_saving_leaves_the_old_state_or_the_new_one(processes, tmp_path, rank, moment, value):
    ended = processes.run("fsdp_jobs.lose_a_rank", 2, tmp_path, rank=rank, moment=moment, fails=True)
    assert ended[rank] == ["signal", 9]
    assert ended[1 - rank][0] == "error"
    assert fsdp_jobs.value_in(tmp_path / "state") == value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_leaves_the_old_state(processes, tmp_path, rank):
    reports = processes.run("fsdp_jobs.run_out_of_space", 2, tmp_path, rank=rank)
    for report in reports:
        assert "could not be saved" in report["error"]
        assert report["unchanged"]
        assert (report["loaded"], report["then"]) == (1.0, 3.0)
    assert "File too large" in reports[rank]["error"]
    assert f"on rank {rank}: " in reports[1 - rank]["error"]
    assert "File too large" in reports[1 - rank]["error"]


def test_a_missing_shard_is_named(processes, tmp_path):
    processes.run("fsdp_jobs.follow", 2, tmp_path, last=2, save=True)
    content = json.loads((tmp_path / "state" / "state.json").read_text())
    (tmp_path / "state" / content["shards"][1]).unlink()
    of = strategies(make_net(), batchnorm="copy")
    with pytest.raises(FileNotFoundError, match=rf"{content['shards'][1]} of one of them is missing.*processes share"):
        load_state(tmp_path / "state", of)
    assert of["aswa"].members == 0


def test_a_state_dict_holds_dtensors_and_whole_tensors_are_taken_too(processes, tmp_path):
    for report in processes.run("fsdp_jobs.states", 2, tmp_path):
        error = report.pop("error")
        assert report.pop("shape") == [5, 4]
        assert all(report.values()), report
        assert "'embed.weight' is (3, 4) in the saved state but (5, 4) in the model" in error


# transformers


def test_an_ensemble_is_saved_as_an_ordinary_checkpoint(processes, tmp_path):
    from transformers import BertForSequenceClassification

    assert processes.run("fsdp_trainer_jobs.save_ensemble", 3, tmp_path) == [True] * 3
    model, info = BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.unique().item() for parameter in model.parameters()} == {0.5}


def test_the_trainer_averages_a_model_that_transformers_has_sharded(processes, tmp_path):
    from training import assert_same_tensors, text_data, text_model
    from transformers import BertForSequenceClassification

    (alone,) = processes.run("fsdp_trainer_jobs.train", 1, tmp_path)
    together = processes.run("fsdp_trainer_jobs.train", 2, tmp_path)
    assert not alone["sharded"]
    for rank in together:
        assert rank["sharded"]
        assert rank["processes"] == 2
        assert rank["decisions"] == alone["decisions"]
        assert rank["scores"] == alone["scores"]
    assert alone["decisions"]["aswa"] == ["init", "hard", "soft"]
    assert sum(rank["elements"] for rank in together) == alone["elements"]

    # The state beside the last checkpoint, read by one process, is what the run ended with.
    model = text_model(torch.float64)
    of = {"aswa": ASWA(model), "ema": EMA(model, warmup=True), "best": BestCheckpoint(model)}
    load_state(tmp_path / "run2" / "checkpoint-18" / "aswa", of)
    of["aswa"].apply()
    whole, saved = (BertForSequenceClassification.from_pretrained(tmp_path / f"final{n}").eval() for n in (1, 2))
    assert_same_tensors(dict(model.state_dict()), dict(saved.state_dict()))
    for name, weights in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weights, rtol=1e-6, atol=1e-8)
    # And the loss of the ensemble, found with shards of the data and of the weights, is that of these weights.
    batch = {key: torch.stack([row[key] for row in text_data(64, seed=2)]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        assert saved(**batch).loss.item() == pytest.approx(together[0]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("example", "flags"),
    [
        ("kge", ["--epochs", "2"]),
        pytest.param("image", ["--epochs", "1", "--train_size", "64"], marks=pytest.mark.slow),
    ],
)
def test_the_examples_run_with_the_configuration_for_sharded_models(example, flags, tmp_path):
    flags = [*flags, "--output_dir", str(tmp_path)]
    output = run_example(f"{example}_accelerate.py", *flags, cwd=tmp_path, launcher="fsdp2")
    assert [line.split()[0] for line in output.splitlines() if " test " in line] == [
        name for name in STRATEGIES if name != "dense-aswa"
    ]
    # What one process loads is the ensemble of whole weights.
    saved = load_file(tmp_path / "model.safetensors")
    (checkpoint,) = (tmp_path / "checkpoints").glob("checkpoint-*")
    shards = [load_file(file) for file in sorted((checkpoint / "aswa").glob("average-*.safetensors"))]
    averaged = {
        key.removeprefix("aswa/averaged/").removeprefix("timm_model."): torch.cat(
            [shard[key] for shard in shards if key in shard]
        )
        for key in shards[0]
        if key.startswith("aswa/averaged/")
    }
    assert len(shards) == 2
    assert len(averaged) > 1
    for name, tensor in averaged.items():
        assert torch.equal(saved[name], tensor), name


# What is not supported


def test_other_ways_to_split_weights_are_refused(processes, tmp_path):
    for errors in processes.run("fsdp_jobs.refuse", 2, tmp_path):
        assert "FSDP1" in errors["FSDP1"]
        assert "fully_shard" in errors["FSDP1"]
        assert "Shard(dim=1)" in errors["tensor parallel"]
        assert "has not been called on" in errors["tensor parallel"]
        assert "Shard(dim=1)" in errors["columns"]
        assert "other shard dimensions are not supported" in errors["columns"]


def test_modules_of_deepspeed_and_weights_it_has_split_without_an_engine_are_refused():
    engine = type("PipelineEngine", (nn.Module,), {"__module__": "deepspeed.runtime.pipe.engine"})()
    engine.module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"DeepSpeed's PipelineEngine.*Use FSDP2 .*fully_shard.* or DDP"):
        ASWA(engine)
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0
    with pytest.raises(ValueError, match=r"split by DeepSpeed ZeRO-3, but has no engine.*after deepspeed\.initialize"):
        ASWA(model)
