"""`average_checkpoints`: the arithmetic of every strategy, every kind of input, and whole results or none."""

import itertools
import json
import math
import re
import signal
import sys

import pytest
import torch
import warm
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from torch import nn
from training import text_model

import aswa_hf.checkpoint
from aswa_hf import ASWA, average_checkpoints
from aswa_hf.batchnorm import Recalibration
from aswa_hf.run_folder import commit_checkpoint
from aswa_hf.trajectory import load_trajectories


def save_values(folder, values, **more):
    """A safetensors file for each value: `w` is (value, 10 · value), `count` an integer."""
    files = []
    for number, value in enumerate(values):
        files.append(folder / f"{number}.safetensors")
        save_file({"w": torch.tensor([value, 10 * value]), "count": torch.tensor(number), **more}, files[-1])
    return files


def near(target):
    """A score: how near the first weight is to `target`."""
    return lambda state: -abs(state["w"][0].item() - target)


def save_run(folder, states, finished=True, **files):
    """A folder as the Trainer leaves it, with a checkpoint every ten steps."""
    for number, state in enumerate(states, start=1):
        checkpoint = folder / f"checkpoint-{10 * number}"
        checkpoint.mkdir(parents=True)
        save_file(state, checkpoint / "model.safetensors")
        for name, text in files.items():
            (checkpoint / name.replace("__", ".")).write_text(text)
        if finished:
            (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 10 * number, "epoch": number}))
    return folder


# Strategies

S = 0.5**0.5


@pytest.mark.parametrize(
    ("strategy", "options", "alphas"),
    [
        ("uniform", {}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("uniform soup", {}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("swa", {}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("swa", {"start": 1}, [0, 1 / 3, 1 / 3, 1 / 3]),
        ("swa", {"start": 0.5}, [0, 0, 1 / 2, 1 / 2]),
        ("ema", {"decay": 0.5}, [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
        ("ema", {"decay": 0}, [0, 0, 0, 1]),
        ("last", {}, [0, 0, 0, 1]),
        ("lawa", {}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("lawa(k=3)", {}, [0, 1 / 3, 1 / 3, 1 / 3]),
        # The update before each checkpoint counts 3/4, 1/2 and 1/4, as under a linear decay of the learning rate.
        ("wsm", {}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("wsm(schedule=linear)", {"start": 2}, [0, 0, 1 / 2, 1 / 2]),
        ("wsm(schedule=cosine)", {}, [1 / 2 - S / 2, S / 2, S / 2, 1 / 2 - S / 2]),
        ("wsm(schedule=1-sqrt)", {}, [1 / 2, S - 1 / 2, 0.75**0.5 - S, 1 - 0.75**0.5]),
    ],
)
def test_weights_by_order(strategy, options, alphas, tmp_path):
    values = [1.0, 2.0, 4.0, 16.0]
    result = average_checkpoints(save_values(tmp_path, values), strategy=strategy, **options)
    expected = sum(alpha * value for alpha, value in zip(alphas, values, strict=True))
    assert result.alphas == pytest.approx(alphas)
    state = result.state_dict()
    torch.testing.assert_close(state["w"], torch.tensor([expected, 10 * expected]))
    assert state["count"] == 3
    assert (result.score, result.evaluations) == (None, 0)


def test_an_average_by_order_is_scored_once_if_it_can_be(tmp_path):
    result = average_checkpoints(save_values(tmp_path, [1.0, 2.0, 6.0]), near(5), strategy="uniform")
    assert (result.score, result.evaluations, result.trajectory[-1].score) == (-2, 1, -2)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "1-sqrt"])
def test_wsm_is_the_run_with_its_updates_decayed(schedule, tmp_path):
    decay = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "1-sqrt": None}[schedule]
    decay = decay or (lambda x: 1 - math.sqrt(x))
    values = [3.0, 4.0, 2.0, 7.0, 5.0]
    decayed = values[0] + sum(decay(i / 5) * (values[i] - values[i - 1]) for i in range(1, 5))
    result = average_checkpoints(save_values(tmp_path, values), strategy=f"wsm(schedule={schedule})")
    assert result.state_dict()["w"][0].item() == pytest.approx(decayed, rel=1e-6)


def test_swad_is_the_mean_of_the_valley(tmp_path):
    # Near 10 is best: the scores rise to -1 at the third, stay, and fall for good after the fifth.
    values = [4.0, 7.0, 9.0, 8.9, 8.8, 1.0, 0.0, 0.5]
    folder = save_values(tmp_path, values)
    rule = "swad(n_converge=2,n_tolerance=2,tolerance_ratio=0.3)"
    result = average_checkpoints(folder, near(10), rule)
    assert result.strategy == "swad"
    assert result.alphas == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0])
    assert result.state_dict()["w"][0].item() == pytest.approx(8.9)
    assert result.score == pytest.approx(-1.1)
    assert result.evaluations == 9
    assert [record.running_score for record in result.trajectory] == pytest.approx([-abs(v - 10) for v in values])
    early = average_checkpoints(folder, near(10), "swad(n_converge=9)")
    assert early.alphas == [0] * 7 + [1]  # no valley yet


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("lawa(k=0)", "k must be a whole number of at least 1, got 0"),
        ("lawa(n=3)", "The strategy 'lawa' has no option 'n'. Its options: k."),
        ("wsm(schedule=cosin)", "schedule must be one of linear, cosine, 1-sqrt, got 'cosin'. Did you mean 'cosine'?"),
        ("swad(tolerance_ratio=-1)", "tolerance_ratio must be a number of at least 0, got -1"),
        ("swad(n_tolerence=2)", "has no option 'n_tolerence'. Did you mean 'n_tolerance'?"),
        ("uniform(k=3)", "The strategy 'uniform' has no option 'k'. It has none."),
    ],
)
def test_an_option_that_is_unknown_or_out_of_range_is_refused(strategy, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        average_checkpoints(save_values(tmp_path, [1.0, 2.0]), near(1), strategy)


@pytest.mark.parametrize("hard_updates", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_aswa_decides_as_it_does_while_training(seed, hard_updates, tmp_path):
    torch.manual_seed(seed)
    snapshots = [torch.randn(6) * 0.97**i for i in range(12)]
    files = []
    for number, weights in enumerate(snapshots):
        files.append(tmp_path / f"{number}.safetensors")
        save_file({"weight": weights}, files[-1])
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(6))
    reference = ASWA(model, hard_updates=hard_updates, greater_is_better=False, dtype=torch.float64)
    for weights in snapshots:
        model.weight.data.copy_(weights)
        reference.update(lambda: model.weight.norm().item())
    reference.apply()

    result = average_checkpoints(
        files, lambda state: state["weight"].norm(), greater_is_better=False, hard_updates=hard_updates
    )
    assert result.trajectory.decisions == reference.trajectory.decisions
    assert result.alphas == pytest.approx(reference.alphas)
    assert [r.members for r in result.trajectory] == [r.members for r in reference.trajectory]
    torch.testing.assert_close(result.state_dict()["weight"], model.weight.data)
    assert result.score == pytest.approx(reference.score, rel=1e-6)
    assert result.score == result.state_dict()["weight"].norm().item()
    # The first point needs no look-ahead; without hard updates no other needs the running score.
    assert result.evaluations == (23 if hard_updates else 12)


def test_a_greedy_soup_goes_from_the_best_to_the_worst_and_takes_what_does_not_harm(tmp_path):
    # Own scores for the target 3: 0, −2, −4, −1. Order: 3, then 2 (mean 2.5), then 5 (mean 4), then 7.
    files = save_values(tmp_path, [3.0, 5.0, 7.0, 2.0])
    seen = []

    def evaluate(state):
        seen.append(state["w"][0].item())
        return -abs(round(seen[-1]) - 3)

    result = average_checkpoints(files, evaluate, "greedy")
    # 2.5 is rounded to 2: worse. (3 + 5) / 2 = 4: worse. (3 + 7) / 2 = 5: worse.
    assert result.alphas == [1, 0, 0, 0]
    assert seen == [3, 5, 7, 2, 2.5, 4, 5]
    assert result.checkpoints == ["0", "3", "1", "2"]
    # 3.5 is rounded to 4, as 4 itself: the average is not worse, so it is taken.
    more = tmp_path / "more"
    more.mkdir()
    result = average_checkpoints(
        save_values(more, [4.0, 3.0, 8.0]), lambda s: -abs(round(s["w"][0].item()) - 4), "greedy"
    )
    assert (result.checkpoints, result.alphas) == (["0", "1", "2"], [1 / 2, 1 / 2, 0])
    assert [d.value for d in result.trajectory.decisions] == ["init", "soft", "reject"]


@pytest.mark.parametrize(("greater", "chosen"), [(True, 2.0), (False, 9.0)])
def test_best_is_the_best_single_checkpoint(greater, chosen, tmp_path):
    result = average_checkpoints(save_values(tmp_path, [4.0, 2.0, 9.0]), near(1), "best", greater_is_better=greater)
    assert result.state_dict()["w"][0] == chosen
    assert result.evaluations == 3


def test_a_score_that_is_not_a_number_is_worse_than_any(tmp_path):
    files = save_values(tmp_path, [math.nan, 2.0, 4.0, math.inf])
    for strategy in ("aswa", "greedy", "best"):
        with pytest.warns(UserWarning, match="counts as worse than any number"):
            result = average_checkpoints(files, near(3), strategy)
        assert result.state_dict()["w"][0] == (2 if strategy == "best" else 3)
    with (
        pytest.warns(UserWarning, match="worse than any number"),
        pytest.raises(ValueError, match="None of 4 checkpoints has a finite score"),
    ):
        average_checkpoints(files, lambda state: math.nan)


# Arithmetic


def test_sums_are_taken_in_float64_and_the_dtypes_are_kept(tmp_path):
    torch.manual_seed(0)
    states = [
        {"a": torch.randn(300_000, dtype=torch.bfloat16), "b": torch.randn(3, 5).half(), "c": torch.randn(7).double()}
        for _ in range(7)
    ]
    frozen = torch.randn(1000)
    files = []
    for number, state in enumerate(states):
        files.append(tmp_path / f"{number}.safetensors")
        save_file(state | {"frozen": frozen, "empty": torch.zeros(0, 4), "one": torch.tensor(1.5)}, files[-1])
    found = average_checkpoints(files, strategy="uniform").state_dict()
    for name in "abc":
        expected = torch.stack([state[name].double() for state in states]).sum(0) / 7
        assert found[name].dtype == states[0][name].dtype
        torch.testing.assert_close(
            found[name], expected.to(found[name].dtype), rtol=1e-15 if name == "c" else 0, atol=0
        )
    assert torch.equal(found["frozen"], frozen)
    assert found["empty"].shape == (0, 4)
    assert found["one"].shape == ()


# Inputs


def test_a_trainers_folder_is_read_in_the_order_of_steps(tmp_path):
    states = [{"w": torch.tensor([float(i)])} for i in range(1, 13)]
    run = save_run(tmp_path / "run", states, config__json="{}", optimizer__pt="")
    result = average_checkpoints(run, near(11.4), output=tmp_path / "out")
    assert result.checkpoints == [f"checkpoint-{10 * i}" for i in range(1, 13)]
    # Every step comes nearer, till 11 is so near that 12 makes 11.5.
    assert result.alphas == [0] * 10 + [0.5, 0.5]
    trajectories, about = load_trajectories(tmp_path / "out" / "aswa_trajectory.json")
    assert [(r.step, r.epoch) for r in trajectories["aswa"]] == [(10 * i, i) for i in range(1, 13)]
    assert (about["applied"], about["evaluations"], about["checkpoints"]) == ("aswa", 23, result.checkpoints)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"] == 11.5
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "aswa", "aswa_trajectory.json", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "out" / "aswa").iterdir()] == ["commit.json"]


def test_half_written_and_damaged_checkpoints_are_named_and_skipped(tmp_path):
    run = save_run(tmp_path, [{"w": torch.full((2,), float(number))} for number in range(5)])
    commit_checkpoint(run / "checkpoint-20")
    content = bytearray((run / "checkpoint-20" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "checkpoint-20" / "model.safetensors").write_bytes(content)
    (run / "checkpoint-30" / "trainer_state.json").unlink()
    told = r"checkpoint-20 \(the content of model.safetensors has changed\), checkpoint-30 \(it has no readable"
    with pytest.warns(UserWarning, match=rf"Skipped damaged checkpoints in .*: {told}"):
        result = average_checkpoints(run, strategy="uniform")
    assert result.checkpoints == ["checkpoint-10", "checkpoint-40", "checkpoint-50"]
    empty = save_run(tmp_path / "empty", [{"w": torch.ones(2)}])
    (empty / "checkpoint-10" / "trainer_state.json").write_text("")
    with pytest.raises(ValueError, match=r"No checkpoint in .* is valid: checkpoint-10 \(it has no readable"):
        average_checkpoints(empty, strategy="uniform")
    # By name, and where no state was ever written, incomplete ones are taken as they are; changed ones never.
    named = [run / f"checkpoint-{step}" for step in (10, 30, 40)]
    assert average_checkpoints(named, strategy="uniform").alphas == [1 / 3] * 3
    with pytest.raises(ValueError, match=r"checkpoint-20 has changed since it was written: the content of model.safe"):
        average_checkpoints([*named, run / "checkpoint-20"], strategy="uniform")
    bare = save_run(tmp_path / "bare", [{"w": torch.ones(2)}] * 2, finished=False)
    assert [r.step for r in average_checkpoints(bare, strategy="swa").trajectory] == [10, 20]


def test_shards_stay_shards(tmp_path):
    folders = []
    for number in (1.0, 3.0):
        folders.append(tmp_path / str(number))
        model = text_model()
        for parameter in model.parameters():
            nn.init.constant_(parameter, number)
        model.save_pretrained(folders[-1], max_shard_size="4KB")
    assert len(list(folders[0].glob("*.safetensors"))) > 1
    seen = []

    def evaluate(model):
        seen.append((type(model).__name__, model.training, model.classifier.weight.mean().item()))
        return 1 - abs(seen[-1][2] - 2)

    average_checkpoints(folders, evaluate, output=tmp_path / "out")
    name = "BertForSequenceClassification"
    assert seen == [(name, False, 1), (name, False, 3), (name, False, 2)]
    shards = sorted(p.name for p in folders[0].glob("*.safetensors"))
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == shards
    loaded = type(text_model()).from_pretrained(tmp_path / "out")
    assert all((parameter == 2).all() for parameter in loaded.parameters())

    (folders[1] / shards[0]).unlink()
    with pytest.raises(ValueError, match=f"{shards[0]} is missing"):
        average_checkpoints(folders, strategy="uniform")


def test_load_replaces_how_checkpoints_are_loaded(tmp_path):
    run = save_run(tmp_path, [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
    seen = []
    average_checkpoints(run, lambda folder: seen.append(folder.name) or len(seen), load=lambda folder: folder)
    assert seen == ["checkpoint-10", "checkpoint-20", "look-ahead"]


HUB_CODE = """
import sys, json
from aswa_hf import average_checkpoints
for argument in sys.argv[1:]:
    try:
        result = average_checkpoints(argument, strategy="uniform")
        print(json.dumps([result.checkpoints, result.state_dict()["w"].tolist()]))
    except (ValueError, OSError) as error:
        print(json.dumps(str(error)))
result = average_checkpoints("user/model", lambda state: -state["w"].item(), revisions=["v3", "v1"], output="out")
print(json.dumps([result.checkpoints, result.alphas]))
"""


def test_revisions_of_a_hub_repository(tmp_path):
    def content(value):
        save_file({"w": torch.tensor([value])}, tmp_path / "file")
        return (tmp_path / "file").read_bytes()

    with HubServer() as hub:
        repo = hub.add_repo("user/model", {"model.safetensors": content(1.0), "optimizer.pt": b"?"})
        repo.tags["v1"] = repo.branches["main"]
        for tag, value in (("v2", 2.0), ("v3", 6.0)):
            files = {"model.safetensors": content(value), "optimizer.pt": b"?"}
            repo.tags[tag] = repo.record("main", "next", "", "user", files, frozenset(files)).oid
        hub.add_repo("user/run", {f"checkpoint-{i}/model.safetensors": content(float(i)) for i in (5, 10)})
        hub.add_repo("user/old", {"pytorch_model.bin": b"?"})
        asked = ["user/model@v1,v2,main", "user/run", "user/model@v9,v1", "user/old@main", "user/none", "user/model"]
        lines = [json.loads(line) for line in hub.run(HUB_CODE, *asked).splitlines()]
        fetched = {request.path.rpartition("/")[2] for request in hub.log if "resolve" in request.path}
        folder = hub.folder / "out"
        assert load_file(folder / "model.safetensors")["w"] == 1
        assert (folder / "aswa_trajectory.json").is_file()
    assert lines[0] == [["user/model@v1", "user/model@v2", "user/model@main"], [3.0]]
    assert lines[1] == [["checkpoint-5", "checkpoint-10"], [7.5]]
    assert lines[2].startswith("Could not download user/model@v9 from the Hub: ")
    assert lines[3].startswith("user/old@main/pytorch_model.bin is a pickle")
    assert lines[4].startswith("Could not download user/none from the Hub: ")
    assert lines[5].startswith("user/model has no folders checkpoint-N on the Hub. Name the revisions")
    assert lines[6] == [["user/model@v3", "user/model@v1"], [0, 1]]
    assert "optimizer.pt" not in fetched


# What cannot be averaged


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_do_not_get_into_the_result(tmp_path, value, is_written):
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(files):
        save_file({"w": torch.tensor([0.0, value if number == 1 else 1.0])}, file)
    with pytest.raises(ValueError, match=r"1\.safetensors: the tensor 'w' has NaN or infinite numbers"):
        average_checkpoints(files, strategy="uniform", output=tmp_path / "out" if is_written else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name for file in files]


@pytest.mark.parametrize("is_written", [True, False])
def test_numbers_that_are_not_used_may_be_anything(tmp_path, is_written):
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        statistics = {
            "n.running_mean": torch.tensor([math.nan if number == 0 else 1.0]),
            "n.running_var": torch.ones(1),
        }
        save_file({"w": torch.ones(2)} | statistics, file)
    output = tmp_path / "out" if is_written else None
    result = average_checkpoints(files, strategy="uniform", batchnorm="copy", output=output)
    assert result.state_dict()["n.running_mean"] == 1
    with pytest.raises(ValueError, match=r"0\.safetensors: the tensor 'n\.running_mean' has NaN"):
        average_checkpoints(files[::-1], strategy="uniform", batchnorm="copy")


def test_a_sum_beyond_float64_is_refused(tmp_path):
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for file in files:
        save_file({"w": torch.tensor([1.0, 1.5e308], dtype=torch.float64)}, file)
    with pytest.raises(ValueError, match="The mean of the tensors 'w' has NaN or infinite numbers"):
        average_checkpoints(files, strategy="uniform", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def damaged(kind, path):
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-4])
    elif kind == "cut in its header":
        path.write_bytes(content[:20])
    elif kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif kind == "longer":
        path.write_bytes(content + b"1234")
    elif kind == "text":
        path.write_text("these are not weights at all, but a text of some length")
    else:
        state = load_file(path)
        state |= {
            "shape": {"w": torch.ones(3)},
            "dtype": {"w": torch.ones(2).half()},
            "new": {"x": torch.ones(1)},
        }.get(kind, {})
        if kind == "missing":
            del state["w"]
        if kind == "quantized":
            state["w"] = torch.ones(2).to(torch.float8_e4m3fn)
        save_file(state, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"2.safetensors: the tensor 'w' has shape \[3\], but \[2\] in .*0.safetensors"),
        ("dtype", "2.safetensors: the tensor 'w' has dtype F16, but F32 in .*0.safetensors"),
        ("missing", "2.safetensors has no tensor 'w', which .*0.safetensors has"),
        ("new", "0.safetensors has no tensor 'x', which .*2.safetensors has"),
        ("quantized", "2.safetensors: the tensor 'w' has dtype F8_E4M3, which is not supported"),
        ("truncated", "2.safetensors is truncated: it has .* bytes, but the tensor 'w' ends at byte"),
        ("cut in its header", "2.safetensors is truncated: it ends after 20 bytes"),
        ("longer", "2.safetensors is damaged: 4 bytes follow"),
        ("pointer", "2.safetensors is a Git LFS pointer"),
        ("text", "2.safetensors is not a safetensors file"),
    ],
)
def test_files_that_do_not_fit_are_named_before_any_evaluation(kind, message, tmp_path):
    files = save_values(tmp_path, [1.0, 2.0, 3.0], v=torch.ones(1))
    damaged(kind, files[2])
    with pytest.raises(ValueError, match=message):
        average_checkpoints(files, lambda state: pytest.fail("too late"), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pickles_and_quantized_models_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(1)}, tmp_path / name / "pytorch_model.bin")
    pickle = r"a/pytorch_model.bin is a pickle.*save_pretrained"
    with pytest.raises(ValueError, match=pickle):
        average_checkpoints([tmp_path / "a", tmp_path / "b"], strategy="uniform")
    with pytest.raises(ValueError, match=pickle):
        average_checkpoints([tmp_path / n / "pytorch_model.bin" for n in "ab"], strategy="uniform")
    states = [{"w": torch.ones(1)}] * 2
    run = save_run(tmp_path / "run", states, config__json='{"quantization_config": {"bits": 4}}')
    with pytest.raises(ValueError, match="checkpoint-10 contains a quantized model"):
        average_checkpoints(run, strategy="uniform")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda files: average_checkpoints(files, strategy="mean"), "strategy must be one of aswa, .*got 'mean'"),
        (lambda files: average_checkpoints(files), "'aswa' needs validation scores"),
        (lambda files: average_checkpoints(files, 3.0), "evaluate must be a function of the model, got float"),
        (lambda files: average_checkpoints(files, lambda s: "good"), "must return one number.*'good'"),
        (lambda files: average_checkpoints(files, lambda s: s["x"]), r"evaluate failed on 0: KeyError: 'x' \(test_av"),
        (lambda files: average_checkpoints(files, strategy="swa", start=3), "start=3 leaves none of 3"),
        (lambda files: average_checkpoints(files, strategy="swa", start=1.5), "start must be a number"),
        (lambda files: average_checkpoints(files, strategy="ema", decay=1), r"decay must be in \[0, 1\), got 1"),
        (lambda files: average_checkpoints(files, strategy="ema(decay=0.5)"), "an argument of its own, .* --decay"),
        (lambda files: average_checkpoints(files, strategy="lawa", start=3), "start=3 has no effect on .* lawa"),
        (lambda files: average_checkpoints(files, strategy="swa", decay=0.5), "decay=0.5 has no effect .* choose ema"),
        (lambda files: average_checkpoints(files, strategy="swa", hard_updates=False), "hard_updates=False has no"),
        (lambda files: average_checkpoints(files, strategy="ema", batchnorm="no"), "batchnorm must be one of"),
        (lambda files: average_checkpoints([], strategy="swa"), "no checkpoints to average"),
        (lambda files: average_checkpoints(files[0], strategy="swa"), "only one checkpoint"),
        (lambda files: average_checkpoints("nowhere/at/all", strategy="swa"), "no folder or file nowhere/at/all"),
        (lambda files: average_checkpoints("empty/run", strategy="swa"), "no 'run' in the folder empty"),
        (lambda files: average_checkpoints(files[0].parent / "empty", strategy="swa"), "empty contains no checkpoint"),
        (lambda files: average_checkpoints("me/model@a,,b", strategy="swa"), "names of revisions after @"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        call(save_values(tmp_path, [1.0, 2.0, 3.0]))


# BatchNorm


class Normed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1)
        nn.init.constant_(self.layer.weight, weight)

    def forward(self, x):
        return self.norm(self.layer(x))


def save_normed(folder):
    files = []
    for number, weight in enumerate((1.0, 3.0)):
        model = Normed(weight)
        model.norm.running_mean.fill_(weight)
        model.norm.num_batches_tracked.fill_(number)
        files.append(folder / f"{number}.safetensors")
        save_file(model.state_dict(), files[-1])
    return files


def load_normed(file):
    model = Normed(0)
    model.load_state_dict(load_file(file))
    return model.eval()


BATCHES = [torch.tensor([[1.0], [5.0]]), torch.tensor([[2.0], [8.0]])]


@pytest.mark.parametrize("strategy", ["aswa", "uniform"])
def test_batchnorm_statistics_are_those_of_the_averaged_weights(strategy, tmp_path):
    seen = []

    def evaluate(model):
        seen.append(model.norm.running_mean.item())
        return len(seen)

    options = {"train_batches": BATCHES, "load": load_normed, "hard_updates": strategy != "aswa"}
    result = average_checkpoints(save_normed(tmp_path), evaluate, strategy, output=tmp_path / "out", **options)
    state = load_file(tmp_path / "out" / "model.safetensors")
    model = load_normed(tmp_path / "out" / "model.safetensors")
    Recalibration(model, BATCHES)()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert torch.equal(tensor, result.state_dict()[name]), name
    # The inputs' mean is 4, their weight 2.
    assert state["norm.running_mean"] == pytest.approx(8 + state["layer.bias"].item())
    assert seen[-1] == state["norm.running_mean"]
    assert state["norm.num_batches_tracked"] == 1


def test_without_training_batches_statistics_are_averaged_with_a_warning_or_as_asked(tmp_path):
    files = save_normed(tmp_path)
    with pytest.warns(UserWarning, match="BatchNorm") as said:
        result = average_checkpoints(files, strategy="uniform")
    assert len(said) == 1
    assert result.state_dict()["norm.running_mean"] == 2
    assert average_checkpoints(files, strategy="uniform", batchnorm="average").state_dict()["norm.running_mean"] == 2
    copied = average_checkpoints(files, strategy="uniform", batchnorm="copy").state_dict()
    assert (copied["norm.running_mean"], copied["layer.weight"]) == (3, 2)
    with pytest.raises(ValueError, match="needs train_batches"):
        average_checkpoints(files, strategy="uniform", batchnorm="recalibrate")


# The result


def test_a_used_folder_is_refused_at_once_and_an_empty_one_taken(tmp_path):
    files = save_values(tmp_path, [1.0, 2.0])
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="used already exists"):
        average_checkpoints(files, lambda state: pytest.fail("too late"), output=used)
    assert [p.name for p in used.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    result = average_checkpoints(files, strategy="uniform", output=tmp_path / "empty")
    assert load_file(result.folder / "model.safetensors")["w"][0] == 1.5


def test_a_failing_evaluation_leaves_nothing(tmp_path):
    files = save_values(tmp_path, [1.0, 2.0, 3.0])
    calls = itertools.count()

    def evaluate(state):
        if next(calls) == 4:
            raise RuntimeError("out of luck")
        return 0.0

    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"evaluate failed on the average: RuntimeError: out of luck"):
        average_checkpoints(files, evaluate, output=tmp_path / "deep" / "out")
    (tmp_path / "deep").rmdir()
    assert sorted(tmp_path.iterdir()) == before


def test_a_killed_process_leaves_no_result(tmp_path):
    save_values(tmp_path, [1.0, 2.0, 3.0])
    code = (
        "import os, signal, sys; from aswa_hf import average_checkpoints; calls = []\n"
        "def evaluate(state):\n"
        "    calls.append(state)\n"
        "    if len(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return len(calls)\n"
        "average_checkpoints([f'{i}.safetensors' for i in range(3)], evaluate, output='out')"
    )
    run = warm.run("-c", code, cwd=tmp_path)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not (tmp_path / "out").exists()
    # The same command given again is not in its own way.
    result = average_checkpoints(sorted(tmp_path.glob("*.safetensors")), strategy="uniform", output=tmp_path / "out")
    assert result.folder.is_dir()


MEMORY_CODE = """
import sys
from pathlib import Path
import torch
from aswa_hf import average_checkpoints
torch.zeros(10).add_(1)
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
before = peak()
scores = iter(range(100))
files = [f"{i}.safetensors" for i in range(4)]
evaluate = None if sys.argv[1] == "uniform" else lambda state: next(scores)
average_checkpoints(files, evaluate, sys.argv[1], output=sys.argv[1], hard_updates=evaluate is None)
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("strategy", "copies"), [("uniform", 0.6), ("aswa", 2.0)])
def test_memory_does_not_grow_with_the_number_of_checkpoints(strategy, copies, tmp_path):
    size = 64 << 20
    for number in range(4):
        save_file({"a": torch.full((size // 8,), float(number)), "b": torch.zeros(size // 8)},
            tmp_path / f"{number}.safetensors")  # fmt: skip
    run = warm.run("-c", MEMORY_CODE, strategy, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < copies * size
    assert load_file(tmp_path / strategy / "model.safetensors")["a"][-1] == 1.5


def test_it_is_found_where_checkpoints_are():
    assert aswa_hf.checkpoint.average_checkpoints is average_checkpoints
    with pytest.raises(AttributeError, match="no attribute 'average_checkpoint'"):
        aswa_hf.checkpoint.average_checkpoint  # noqa: B018
