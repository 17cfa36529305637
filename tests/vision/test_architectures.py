"""The CIFAR architectures as timm models: sizes, features, heads, saving, learning."""

from __future__ import annotations

from itertools import pairwise

import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models import save_for_hf
from torch import nn

import aswa_hf.vision  # noqa: F401  registers them

NAMES = (
    "preresnet110_cifar",
    "preresnet164_cifar",
    "preresnet20_cifar",
    "vgg16_bn_cifar",
    "vgg16_cifar",
    "vgg19_bn_cifar",
    "vgg19_cifar",
    "wrn28_10_cifar",
)
SMALL = ("preresnet20_cifar", "vgg16_bn_cifar")


def on_meta(name: str, **options) -> nn.Module:
    """A model with shapes but no weights."""
    with torch.device("meta"):
        return timm.create_model(name, **options)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def convolution(before: int, after: int, kernel: int, bias: bool = False) -> int:
    return before * after * kernel**2 + bias * after


def norm(channels: int) -> int:
    return 2 * channels


def images(count: int = 2, *, channels: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_timm_lists_them():
    assert set(timm.list_models("*_cifar")) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("vgg16_bn_cifar", 15_253_578),
        ("vgg16_cifar", 15_245_130),
        ("vgg19_bn_cifar", 20_565_834),
        ("vgg19_cifar", 20_554_826),
        ("preresnet164_cifar", 1_703_258),
        ("preresnet110_cifar", 1_146_842),
        ("preresnet20_cifar", 272_282),
        ("wrn28_10_cifar", 36_489_290),
    ],
)
def test_models_have_as_many_parameters_as_those_of_the_swa_paper(name, published):
    assert parameters(on_meta(name, num_classes=10)) == published


def test_vgg16_has_13_convolutions_and_3_linear_layers():
    widths = [3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6]
    by_hand = sum(convolution(*pair, 3, bias=True) for pair in pairwise(widths))
    by_hand += 2 * (512 * 512 + 512) + 512 * 100 + 100
    assert parameters(on_meta("vgg16_cifar", num_classes=100)) == by_hand
    assert parameters(on_meta("vgg16_bn_cifar", num_classes=100)) == by_hand + sum(map(norm, widths[1:]))


@pytest.mark.parametrize(("name", "blocks"), [("preresnet110_cifar", 12), ("preresnet164_cifar", 18)])
def test_the_deep_preresnets_are_made_of_bottlenecks(name, blocks):
    by_hand, before = convolution(3, 16, 3), 16
    for width in (16, 32, 64):
        by_hand += convolution(before, 4 * width, 1)  # the shortcut of the first block
        for _ in range(blocks):
            by_hand += norm(before) + convolution(before, width, 1)
            by_hand += norm(width) + convolution(width, width, 3)
            by_hand += norm(width) + convolution(width, 4 * width, 1)
            before = 4 * width
    by_hand += norm(256) + 256 * 100 + 100
    assert parameters(on_meta(name, num_classes=100)) == by_hand


@pytest.mark.parametrize(
    ("name", "blocks", "widths", "bias"),
    [("preresnet20_cifar", 3, (16, 32, 64), False), ("wrn28_10_cifar", 4, (160, 320, 640), True)],
)
def test_preresnet20_and_the_wide_resnet_are_made_of_pairs_of_convolutions(name, blocks, widths, bias):
    by_hand, before = convolution(3, 16, 3, bias), 16
    for width in widths:
        by_hand += convolution(before, width, 1, bias) if before != width else 0
        for _ in range(blocks):
            by_hand += norm(before) + convolution(before, width, 3, bias)
            by_hand += norm(width) + convolution(width, width, 3, bias)
            before = width
    by_hand += norm(before) + before * 100 + 100
    assert parameters(on_meta(name, num_classes=100)) == by_hand


@pytest.mark.parametrize("name", NAMES)
def test_images_give_one_logit_per_class_and_the_features_are_those_before_the_classifier(name):
    model = on_meta(name, num_classes=7)
    features = model.forward_features(torch.empty(2, 3, 32, 32, device="meta"))
    side = 1 if name.startswith("vgg") else 8
    assert features.shape == (2, model.num_features, side, side)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_that_of_cifar_and_names_layers_that_exist(name):
    model = on_meta(name)
    cfg = model.pretrained_cfg
    assert (cfg["input_size"], cfg["num_classes"], model.num_classes) == ((3, 32, 32), 10, 10)
    assert cfg["mean"] == (0.4914, 0.4822, 0.4465)
    assert cfg["std"] == (0.2470, 0.2435, 0.2616)
    assert isinstance(model.get_submodule(cfg["first_conv"]), nn.Conv2d)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert resolve_data_config(model=model)["input_size"] == (3, 32, 32)


@pytest.mark.parametrize("name", NAMES)
def test_features_only_returns_maps_of_the_announced_shapes(name):
    model = on_meta(name, features_only=True)
    found = model(torch.empty(1, 3, 32, 32, device="meta"))
    assert [map_.shape[1] for map_ in found] == model.feature_info.channels()
    assert [32 // map_.shape[2] for map_ in found] == model.feature_info.reduction()
    assert len(found) == (5 if name.startswith("vgg") else 4)
    chosen = on_meta(name, features_only=True, out_indices=(1, 2))
    assert [map_.shape for map_ in chosen(torch.empty(1, 3, 32, 32, device="meta"))] == [m.shape for m in found[1:3]]


@pytest.mark.parametrize("name", SMALL)
def test_the_last_features_are_what_the_head_is_given(name):
    model = timm.create_model(name).eval()
    features = timm.create_model(name, features_only=True).eval()
    own = dict(features.named_parameters()) | dict(features.named_buffers())
    with torch.no_grad():
        for key, value in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
            flat = key if key in own else key.replace("features.", "features_")  # timm's names for nested layers
            if flat in own:
                own[flat].copy_(value)
        last = features(images())[-1]
        expected = model.forward_features(images())
    assert torch.equal(last if name.startswith("pre") else nn.functional.max_pool2d(last, 2), expected)


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_model_is_the_same_when_loaded_by_timm(name, tmp_path):
    model = timm.create_model(name, num_classes=4, in_chans=1).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    save_for_hf(model, tmp_path, model_args={"in_chans": 1}, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert (loaded.num_classes, loaded.in_chans) == (4, 1)
    with torch.no_grad():
        assert torch.equal(loaded(images(channels=1)), model(images(channels=1)))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=6)
    assert other.get_classifier().out_features == 6
    first = model.pretrained_cfg["first_conv"]
    assert torch.equal(other.get_submodule(first).weight, model.get_submodule(first).weight)


@pytest.mark.parametrize("name", SMALL)
def test_the_classifier_can_be_replaced_and_removed(name):
    model = timm.create_model(name).to(torch.float64).eval()
    model.reset_classifier(3, global_pool="max")
    assert (model.num_classes, model(images().double()).shape) == (3, (2, 3))
    model.reset_classifier(0)
    assert model(images().double()).shape == (2, model.num_features)
    assert timm.create_model(name, num_classes=0)(images()).shape == (2, model.num_features)


@pytest.mark.parametrize("name", SMALL)
def test_gray_and_larger_images_work(name):
    assert timm.create_model(name, in_chans=1)(images(channels=1)).shape == (2, 10)
    assert timm.create_model(name)(images(size=64)).shape == (2, 10)


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_has_the_same_logits(name):
    model, batch = timm.create_model(name).double().eval(), images().double()
    expected = model(batch)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(batch.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("name", ["vgg16_cifar", *SMALL])
def test_a_step_against_the_gradient_lowers_the_loss_as_the_gradient_says(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=2, drop_rate=0.0).double()
    batch, labels = images(8).double(), torch.arange(8) % 2

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), labels)

    before = loss()
    before.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert [key for key, gradient in gradients.items() if not gradient.any()] == []
    square = sum(gradient.square().sum() for gradient in gradients.values())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter -= 1e-6 / square * gradients[key]  # short enough for the loss to be a straight line
        assert (before - loss()).item() == pytest.approx(1e-6, rel=0.01)


def test_convolutions_start_with_the_deviation_of_he():
    torch.manual_seed(0)
    for name in ("vgg16_cifar", "preresnet20_cifar"):
        for module in timm.create_model(name).modules():
            if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
                expected = (2 / (module.out_channels * module.kernel_size[0] ** 2)) ** 0.5
                assert module.weight.std().item() == pytest.approx(expected, rel=0.06)
                assert module.bias is None or not module.bias.any()


def test_dropout_is_in_the_vgg_head_at_one_half_unless_said_otherwise():
    def rates(model):
        return [module.p for module in model.modules() if isinstance(module, nn.Dropout)]

    assert rates(on_meta("vgg16_cifar")) == [0.5, 0.5]
    assert rates(on_meta("vgg16_cifar", drop_rate=0.1)) == [0.1, 0.1]
    assert rates(on_meta("preresnet20_cifar")) == [0.0]
    assert rates(on_meta("preresnet20_cifar", drop_rate=0.3)) == [0.3]


def test_gradients_are_the_same_with_gradient_checkpointing():
    model = timm.create_model("preresnet20_cifar")
    gradients = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        model(images()).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_vgg_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match=r"global_pool is 'catavgmax'\. Expected avg or max"):
        on_meta("vgg16_cifar", global_pool="catavgmax")
    with pytest.raises(ValueError, match="no gradient checkpointing"):
        on_meta("vgg16_cifar").set_grad_checkpointing()
    on_meta("vgg16_cifar").set_grad_checkpointing(False)


def test_pretrained_weights_that_do_not_exist_are_an_error():
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model("preresnet20_cifar", pretrained=True)
