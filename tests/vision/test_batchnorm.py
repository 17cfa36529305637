"""BatchNorm in a real network, PreResNet-20 on digits: averaged weights are judged with statistics of their own.

As a script it is one of two processes that train together: torchrun … test_batchnorm.py POLICY FOLDER
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


def digit_batches() -> Batches:
    """Training batches of 16×16 pixels."""
    train = ImageTensors(load_digits(train=320)["train"], size=16)
    return [train.__getitems__(list(range(start, start + 40))) for start in range(0, 320, 40)]


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


def statistics_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if "running_" in name}


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


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 19  # two numbers for each of PreResNet-20's layers
    for name in ours:
        torch.testing.assert_close(ours[name].double(), theirs[name], rtol=1e-3, atol=1e-4, msg=name)


def snapshot(number: int) -> dict[str, torch.Tensor]:
    """Weights as a run may pass through, in steps of 2⁻¹⁰ so that means are exact, and statistics set by hand."""
    torch.manual_seed(number)
    weights = weights_of(timm.create_model("preresnet20_cifar", num_classes=10, in_chans=1))
    for name, tensor in weights.items():
        if name.endswith("running_mean"):
            tensor.fill_(4.0 * number)
        elif name.endswith("running_var"):
            tensor.fill_(16.0 * number)
        elif tensor.is_floating_point():
            tensor.copy_((tensor * 1024).round() / 1024)
    return weights


@pytest.fixture(scope="module")
def run() -> tuple[list[dict[str, torch.Tensor]], Batches]:
    """The weights at two decision points, and the training batches."""
    return [snapshot(1), snapshot(2)], digit_batches()


def judged_statistics(policy, run, scores) -> tuple[ASWA, list[dict[str, torch.Tensor]]]:
    """ASWA at both points, and the statistics in the model at each evaluation."""
    snapshots, train = run
    model, seen, scores = network(), [], iter(scores)
    aswa = ASWA(model, batchnorm=policy, train_batches=inputs(train))

    def evaluate() -> float:
        seen.append(statistics_of(weights_of(model)))
        return next(scores)

    for weights in snapshots:
        model.load_state_dict(weights)
        aswa.update(evaluate)
        assert_same_tensors(weights_of(model), weights)
    return aswa, seen


def test_the_lookahead_is_judged_with_statistics_computed_on_the_training_batches(run):
    snapshots, train = run
    aswa, seen = judged_statistics("recalibrate", run, [0.5, 0.4, 0.6])
    assert aswa.trajectory.decisions == [Decision.INIT, Decision.SOFT]
    first, second, lookahead = seen
    assert_same_tensors(first, statistics_of(snapshots[0]))
    assert_same_tensors(second, statistics_of(snapshots[1]))
    assert_close(lookahead, by_hand(mean_of(snapshots), inputs(train)))
    # And those it was judged with are those it is used with.
    with aswa.swapped():
        assert_same_tensors(statistics_of(weights_of(aswa.model)), lookahead)


def test_average_takes_the_mean_of_the_statistics_and_copy_the_running_models(run):
    _, averaged = judged_statistics("average", run, [0.5, 0.4, 0.6])
    assert {t.unique().item() for name, t in averaged[-1].items() if name.endswith("mean")} == {6.0}
    assert {t.unique().item() for name, t in averaged[-1].items() if name.endswith("var")} == {24.0}
    _, copied = judged_statistics("copy", run, [0.5, 0.4, 0.6])
    assert_same_tensors(copied[-1], statistics_of(run[0][1]))


def brightness_classifier() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 2))


def shifted(bias: float) -> dict[str, torch.Tensor]:
    """Weights that tell dark images (−1) from bright ones (+1): BatchNorm takes away what the bias before it adds."""
    model = brightness_classifier()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(bias)
        model[1].running_mean.fill_(bias)
        model[3].weight.copy_(torch.tensor([[-1.0], [1.0]]))
        model[3].bias.zero_()
    return weights_of(model)


def test_averaged_weights_with_stale_statistics_are_far_worse():
    labels = torch.arange(8) % 2
    batch = {"pixel_values": (2.0 * labels - 1).view(8, 1, 1, 1), "labels": labels}
    snapshots = [shifted(-4.0), shifted(4.0)]
    found = {}
    for policy in ("recalibrate", "copy"):
        model = brightness_classifier()
        swa = SWA(model, batchnorm=policy, train_batches=inputs([batch]))
        for weights in snapshots:
            model.load_state_dict(weights)
            assert accuracy(model, [batch]) == 1
            swa.update(lambda model=model: accuracy(model, [batch]))
        with swa.swapped():
            found[policy] = accuracy(model, [batch])
            assert found[policy] == swa.score
    # The mean of the weights adds no bias: with a mean of 4 taken away, all images are dark.
    assert found == {"recalibrate": 1, "copy": 0.5}


# Two processes


def test_two_processes_agree_on_statistics_of_all_their_batches(tmp_path):
    (tensors, about), (others, other_about) = launch("recalibrate", tmp_path, script=__file__)
    assert about == other_about
    assert about["world_size"] == 2
    assert about["decisions"] == ["init", "soft", "soft"]

    def part(of: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(f"{name}/"): tensor for key, tensor in of.items() if key.startswith(f"{name}/")}

    # Each rank has half of the batches; their own statistics differ before, the ensemble's do not.
    own, of_rank_1 = (statistics_of(part(of, "2")) for of in (tensors, others))
    assert not any(torch.equal(own[name], of_rank_1[name]) for name in own)
    ensemble = part(tensors, "ensemble")
    assert_same_tensors(ensemble, part(others, "ensemble"))
    mean = mean_of([part(tensors, str(epoch)) for epoch in range(3)])
    for name, _ in network().named_parameters():
        torch.testing.assert_close(ensemble[name], mean[name], rtol=1e-5, atol=1e-6)
    assert_close(statistics_of(ensemble), by_hand(ensemble, inputs(digit_batches())))


def main() -> None:
    policy, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = digit_batches()[rank::2]
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
