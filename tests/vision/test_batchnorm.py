"""BatchNorm in a real network, PreResNet-20 on digits: averaged weights are judged with statistics of their own.

As a script it is one of two processes that train together: torchrun … test_vision_batchnorm.py POLICY FOLDER
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from ddp_run import launch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from training import assert_same_tensors, weights_of

from aswa_hf import ASWA, SWA, Decision
from aswa_hf.vision import ImageTensors, load_digits

Batches = list[dict[str, torch.Tensor]]


def digit_batches() -> tuple[Batches, Batches]:
    """Training and validation batches of 16×16 pixels."""
    splits = load_digits(train=320, validation=300)
    train, validation = (ImageTensors(splits[name], size=16) for name in ("train", "validation"))
    return (
        [train.__getitems__(list(range(start, start + 40))) for start in range(0, 320, 40)],
        [validation.__getitems__(list(range(300)))],
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("preresnet20_cifar", num_classes=10, in_chans=1)


def inputs(batches: Batches) -> list[torch.Tensor]:
    return [batch["pixel_values"] for batch in batches]


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    model.eval()
    right = [(model(batch["pixel_values"]).argmax(-1) == batch["labels"]).float().mean() for batch in batches]
    return float(torch.stack(right).mean())


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "running_" in name}


def by_hand(weights: dict[str, torch.Tensor], batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mean over batches of each layer's batch mean and unbiased batch variance, from what goes into the layers."""
    model = network()
    model.load_state_dict(weights)
    model.train()
    sums: dict[str, torch.Tensor] = {}

    def look(name):
        def hook(layer, args):
            channels = args[0].double().transpose(0, 1).flatten(1)
            for key, value in (("running_mean", channels.mean(1)), ("running_var", channels.var(1))):
                sums[f"{name}.{key}"] = sums.get(f"{name}.{key}", 0) + value / len(batches)

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(look(name))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return sums


def mean_of(snapshots: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([s[name].double() for s in snapshots]).mean(0).to(snapshots[0][name].dtype)
        for name in snapshots[0]
    }


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-3) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 19  # two numbers for each of PreResNet-20's layers
    for name in ours:
        torch.testing.assert_close(ours[name].double(), theirs[name].double(), rtol=tolerance, atol=1e-4, msg=name)


def differ(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of two statistics relative to their size."""
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in ours)


@pytest.fixture(scope="module")
def run() -> tuple[list[dict[str, torch.Tensor]], Batches, Batches]:
    """The weights after each of five epochs of a real run, and its batches."""
    train, validation = digit_batches()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=3e-4)
    snapshots = []
    for _ in range(5):
        train_one_epoch(model, optimizer, train)
        snapshots.append(weights_of(model))
    return snapshots, train, validation


def judged_statistics(policy, run, scores) -> tuple[ASWA, list[dict[str, torch.Tensor]]]:
    """ASWA after the first two epochs, and the statistics in the model at each evaluation."""
    snapshots, train, _ = run
    model, seen, scores = network(), [], iter(scores)
    aswa = ASWA(model, batchnorm=policy, train_batches=inputs(train))

    def evaluate() -> float:
        seen.append(statistics(model))
        return next(scores)

    for snapshot in snapshots[:2]:
        model.load_state_dict(snapshot)
        aswa.update(evaluate)
        assert_same_tensors(weights_of(model), snapshot)
    return aswa, seen


def test_the_lookahead_is_judged_with_statistics_computed_on_the_training_batches(run):
    snapshots, train, _ = run
    aswa, seen = judged_statistics("recalibrate", run, [0.5, 0.4, 0.6])
    assert aswa.trajectory.decisions == [Decision.INIT, Decision.SOFT]
    first, second, lookahead = seen
    assert differ(first, statistics_of(snapshots[0])) == 0
    assert differ(second, statistics_of(snapshots[1])) == 0
    expected = by_hand(mean_of(snapshots[:2]), inputs(train))
    assert_close(lookahead, expected)
    # The running model's statistics are nothing like them.
    assert differ(second, lookahead) > 0.2
    # And those it was judged with are those it is used with.
    with aswa.swapped():
        assert_same_tensors(statistics(aswa.model), lookahead)


def statistics_of(snapshot: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in snapshot.items() if "running_" in name}


def test_average_takes_the_mean_of_the_statistics_and_copy_the_running_models(run):
    snapshots, _, _ = run
    _, averaged = judged_statistics("average", run, [0.5, 0.4, 0.6])
    assert_close(averaged[-1], statistics_of(mean_of(snapshots[:2])), tolerance=1e-6)
    _, copied = judged_statistics("copy", run, [0.5, 0.4, 0.6])
    assert_same_tensors(copied[-1], statistics_of(snapshots[1]))
    assert differ(averaged[-1], copied[-1]) > 0.05


def test_averaged_weights_with_stale_statistics_are_far_worse(run):
    snapshots, train, validation = run
    found = {}
    for policy in ("recalibrate", "copy"):
        model = network()
        swa = SWA(model, batchnorm=policy, train_batches=inputs(train))
        for snapshot in snapshots:
            model.load_state_dict(snapshot)
            swa.update(lambda model=model: accuracy(model, validation))
        with swa.swapped():
            found[policy] = accuracy(model, validation)
            assert found[policy] == swa.score
    assert found["recalibrate"] > 0.8
    assert found["copy"] < found["recalibrate"] - 0.3


# Two processes


def test_two_processes_agree_on_statistics_of_all_their_batches(tmp_path):
    (tensors, about), (others, other_about) = launch("recalibrate", tmp_path, script=__file__)
    assert about == other_about
    assert about["world_size"] == 2
    assert about["decisions"] == ["init", "soft", "soft"]
    train, _ = digit_batches()
    # Each rank has half of the batches; their own statistics differ before, the ensemble's do not.
    snapshots = [{k.removeprefix(f"{i}/"): t for k, t in tensors.items() if k.startswith(f"{i}/")} for i in range(3)]
    rank_1 = {k.removeprefix("2/"): t for k, t in others.items() if k.startswith("2/")}
    assert differ(statistics_of(rank_1), statistics_of(snapshots[2])) > 0.01
    ensembles = [{k: t for k, t in found.items() if k.startswith("ensemble/")} for found in (tensors, others)]
    assert_same_tensors(*ensembles)
    ensemble = {k.removeprefix("ensemble/"): t for k, t in ensembles[0].items()}
    assert_close(statistics_of(ensemble), by_hand(mean_of(snapshots), inputs(train)))


def main() -> None:
    policy, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, _ = digit_batches()
    mine = train[rank::2]
    model = network()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    aswa = ASWA(parallel, batchnorm=policy, train_batches=inputs(mine))
    tensors = {}
    for epoch in range(3):
        train_one_epoch(parallel, optimizer, mine)
        tensors |= {f"{epoch}/{name}": tensor for name, tensor in copy.deepcopy(model.state_dict()).items()}
        # Each rank has another opinion on the running model; rank 0's counts.
        aswa.update(lambda epoch=epoch: epoch + 1, running_score=epoch + 0.5 - rank)
    aswa.apply()
    tensors |= {f"ensemble/{name}": tensor for name, tensor in weights_of(model).items()}
    save_file(tensors, Path(folder) / f"rank{rank}.safetensors")
    about = {"world_size": dist.get_world_size(), "decisions": [d.value for d in aswa.trajectory.decisions]}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(about))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
