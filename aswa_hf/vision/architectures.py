"""The networks of the SWA paper for 32×32 images, registered with timm: VGG, pre-activation and wide ResNets.

Shapes follow the paper's public code. Three things do not. There, the last BatchNorm of the wide ResNet keeps 90 % of
each new batch in its statistics; here it keeps 10 %, like all others. There, the convolutions of the wide ResNet are
initialized by PyTorch's default; here by He's method, like all others. And there, images are normalized for VGG by the
mean and deviation of ImageNet, for the ResNets by the mean of CIFAR-10 and a deviation of about 0.2; here by the mean
and deviation of all pixels of CIFAR-10 or CIFAR-100.

Self-contained: it is shipped with every model of these on the Hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import ClassifierHead, SelectAdaptivePool2d
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from torch import Tensor, nn

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
VGG_WIDTHS = (64, 128, 256, 512, 512)
VGG_CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
RESNET_WIDTHS = (16, 32, 64)

Convolution = tuple[int, int, int]  # width, kernel size, stride


def _cfg(first_conv: str, classifier: str, pool_size: int) -> dict[str, Any]:
    return {
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "pool_size": (pool_size, pool_size),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": CIFAR10_MEAN,
        "std": CIFAR10_STD,
        "first_conv": first_conv,
        "classifier": classifier,
    }


_VGG = _cfg("features.0", "head", 1)
_RESNET = _cfg("stem", "head.fc", 8)
default_cfgs = generate_default_cfgs(
    dict.fromkeys(("vgg16_cifar", "vgg16_bn_cifar", "vgg19_cifar", "vgg19_bn_cifar"), _VGG)
    | dict.fromkeys(("preresnet20_cifar", "preresnet110_cifar", "preresnet164_cifar", "wrn28_10_cifar"), _RESNET)
)


class CifarVGG(nn.Module):
    """Five groups of 3×3 convolutions, each halved by max pooling; then two layers with dropout and the classifier."""

    def __init__(
        self,
        depth: int,
        batch_norm: bool = False,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.5,
        global_pool: str = "avg",
    ):
        super().__init__()
        self.in_chans, self.drop_rate = in_chans, drop_rate
        self.num_features = self.head_hidden_size = VGG_WIDTHS[-1]
        self.feature_info: list[dict[str, Any]] = []
        layers: list[nn.Module] = []
        channels = in_chans
        for group, (width, convolutions) in enumerate(zip(VGG_WIDTHS, VGG_CONVOLUTIONS[depth], strict=True)):
            for _ in range(convolutions):
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU(inplace=True))
                channels = width
            name = f"features.{len(layers) - 1}"
            self.feature_info.append({"num_chs": width, "reduction": 2**group, "module": name})
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden: list[nn.Module] = []
        for _ in range(2):
            hidden += [nn.Dropout(drop_rate), nn.Linear(channels, channels), nn.ReLU(inplace=True)]
        self.pre_logits = nn.Sequential(*hidden)
        self.reset_classifier(num_classes, global_pool)
        _he_initialize(self)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool not in (None, "avg", "max"):
            raise ValueError(
                f"global_pool is {global_pool!r}. Expected avg or max: the layers after it need one pixel."
            )
        if global_pool is not None:  # of a 32×32 image one pixel is left anyway
            self.global_pool = SelectAdaptivePool2d(pool_type=global_pool, flatten=True)
        self.num_classes = num_classes
        like = next(self.pre_logits.parameters())
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(like.device, like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise ValueError("The VGG models have no gradient checkpointing. Use smaller batches instead.")

    def forward_features(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        return features

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pre_logits(self.global_pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class PreActBlock(nn.Module):
    """A shortcut beside BatchNorm, ReLU and convolution, repeated; a 1×1 convolution where the shape changes."""

    def __init__(self, channels: int, convolutions: Sequence[Convolution], bias: bool):
        super().__init__()
        layers: list[nn.Module] = []
        before, total_stride = channels, 1
        for width, kernel, stride in convolutions:
            layers += [nn.BatchNorm2d(before), nn.ReLU(inplace=True)]
            layers.append(nn.Conv2d(before, width, kernel, stride, padding=kernel // 2, bias=bias))
            before, total_stride = width, total_stride * stride
        self.residual = nn.Sequential(*layers)
        changes = total_stride > 1 or before != channels
        self.shortcut = nn.Conv2d(channels, before, 1, total_stride, bias=bias) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.residual(x)
        return residual.add_(self.shortcut(x))


class PreActResNet(nn.Module):
    """A convolution, three stages of blocks (the second and third halve the image), BatchNorm, ReLU, classifier."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential

    def __init__(
        self,
        block: str,
        blocks: int,
        widening: int = 1,
        bias: bool = False,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ):
        super().__init__()
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False
        channels = RESNET_WIDTHS[0]
        self.stem = nn.Conv2d(in_chans, channels, 3, padding=1, bias=bias)
        self.feature_info = [{"num_chs": channels, "reduction": 1, "module": "stem"}]
        for stage, width in enumerate(RESNET_WIDTHS):
            layers = []
            for number in range(blocks):
                convolutions = _block(block, width * widening, stride=2 if stage and not number else 1)
                layers.append(PreActBlock(channels, convolutions, bias))
                channels = convolutions[-1][0]
            name = f"layer{stage + 1}"
            self.add_module(name, nn.Sequential(*layers))
            self.feature_info.append({"num_chs": channels, "reduction": 2**stage, "module": name})
        self.norm, self.act = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.feature_info[-1]["module"] = "act"
        self.num_features = self.head_hidden_size = channels
        self.head = ClassifierHead(channels, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        _he_initialize(self)

    def get_classifier(self) -> nn.Module:
        classifier: nn.Module = self.head.fc
        return classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)
        self.head.to(self.stem.weight.device, self.stem.weight.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Blocks are computed again in the backward pass; BatchNorm then counts every training batch twice."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in (self.layer1, self.layer2, self.layer3):
            x = checkpoint_seq(stage, x) if self.grad_checkpointing and torch.is_grad_enabled() else stage(x)
        features: Tensor = self.act(self.norm(x))
        return features

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        out: Tensor = self.head(x, pre_logits=pre_logits)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _block(kind: str, width: int, stride: int) -> list[Convolution]:
    return {
        "basic": [(width, 3, stride), (width, 3, 1)],
        "bottleneck": [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)],
        "wide": [(width, 3, 1), (width, 3, stride)],
    }[kind]


def _he_initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _vgg(name: str, pretrained: bool, **options: Any) -> nn.Module:
    features = {"flatten_sequential": True, "out_indices": tuple(range(len(VGG_WIDTHS)))}
    model: nn.Module = build_model_with_cfg(CifarVGG, name, pretrained, feature_cfg=features, **options)
    return model


def _resnet(name: str, pretrained: bool, **options: Any) -> nn.Module:
    features = {"out_indices": tuple(range(1 + len(RESNET_WIDTHS)))}
    model: nn.Module = build_model_with_cfg(PreActResNet, name, pretrained, feature_cfg=features, **options)
    return model


@register_model
def vgg16_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """VGG16 without BatchNorm."""
    return _vgg("vgg16_cifar", pretrained, depth=16, **options)


@register_model
def vgg16_bn_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """VGG16 with BatchNorm."""
    return _vgg("vgg16_bn_cifar", pretrained, depth=16, batch_norm=True, **options)


@register_model
def vgg19_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """VGG19 without BatchNorm."""
    return _vgg("vgg19_cifar", pretrained, depth=19, **options)


@register_model
def vgg19_bn_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """VGG19 with BatchNorm."""
    return _vgg("vgg19_bn_cifar", pretrained, depth=19, batch_norm=True, **options)


@register_model
def preresnet20_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """Pre-activation ResNet-20: 3 × 3 blocks of two convolutions."""
    return _resnet("preresnet20_cifar", pretrained, block="basic", blocks=3, **options)


@register_model
def preresnet110_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """Pre-activation ResNet-110: 3 × 12 bottlenecks of three convolutions."""
    return _resnet("preresnet110_cifar", pretrained, block="bottleneck", blocks=12, **options)


@register_model
def preresnet164_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """Pre-activation ResNet-164: 3 × 18 bottlenecks of three convolutions."""
    return _resnet("preresnet164_cifar", pretrained, block="bottleneck", blocks=18, **options)


@register_model
def wrn28_10_cifar(pretrained: bool = False, **options: Any) -> nn.Module:
    """Wide ResNet-28-10: 3 × 4 blocks of two convolutions, ten times as wide, with biases."""
    return _resnet("wrn28_10_cifar", pretrained, block="wide", blocks=4, widening=10, bias=True, **options)
