"""A residual network of 164 layers for small images, plain and with learned attention.

He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016,
https://arxiv.org/abs/1603.05027: bottlenecks that normalise first. Attention as in Jetley et al.,
"Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391, appendix A.2.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.models.cnn import Cells
from overt.models.network import Network
from overt.models.output import Output
from overt.models.paying.attention import (
    DECISIONS,
    SCORES,
    Decision,
    Score,
    concat,
    parametrised,
)
from overt.models.paying.vgg import Attentive, cells_of, images_of, largest, pixels, pool, scaled

STEM, PLANES, EXPANSION = 16, (16, 32, 64), 4


@dataclass(frozen=True)
class Depth:
    """How large a residual network is: `9 * blocks + 2` layers, 164 with 18 blocks a stage."""

    classes: int
    width: float = 1.0
    blocks: int = 18


def convolution(before: int, after: int, side: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, in He's initialisation."""
    made = nn.Conv2d(before, after, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def normalised(channels: int) -> nn.Sequential:
    """Batch norm and ReLU."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    """Narrow, convolve, widen, and add what came in; each convolution normalises first.

    Where the shape changes, what came in passes a convolution of 1 x 1, after the norm.
    """

    def __init__(self, before: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        after = EXPANSION * planes
        self.norm = normalised(before)
        self.residual = nn.Sequential(
            convolution(before, planes, 1),
            normalised(planes),
            convolution(planes, planes, 3, stride),
            normalised(planes),
            convolution(planes, after, 1),
        )
        same = before == after and stride == 1
        self.shortcut = None if same else convolution(before, after, 1, stride)

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d _ _"]:
        """The block's features."""
        ready = self.norm(x)
        around = x if self.shortcut is None else self.shortcut(ready)
        return around + self.residual(ready)


class ResidualTrunk(nn.Module):
    """A convolution and three stages of bottlenecks; the grid is halved before the last two."""

    def __init__(self, width: float, blocks: int) -> None:
        super().__init__()
        before = scaled(STEM, width)
        self.stem = convolution(3, before, 3)
        stages = []
        for number, planes in enumerate(PLANES):
            narrow = scaled(planes, width)
            layers = []
            for place in range(blocks):
                layers.append(Bottleneck(before, narrow, 2 if number and not place else 1))
                before = EXPANSION * narrow
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.channels = [EXPANSION * scaled(planes, width) for planes in PLANES]

    def forward(self, x: Float[Tensor, "i 3 y x"]) -> list[Float[Tensor, "i _ _ _"]]:
        """What comes out of each stage, before any norm."""
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class ResNet(Network[Cells]):
    """The residual network that averages the cells of its last stage: the paper's RN-164."""

    def __init__(self, depth: Depth) -> None:
        super().__init__()
        self.depth = depth
        self.trunk = ResidualTrunk(depth.width, depth.blocks)
        self.norm = normalised(self.trunk.channels[-1])
        self.decision = nn.Linear(self.trunk.channels[-1], depth.classes)

    def encode(self, batch: Batch) -> Cells:
        """The cells of the last stage."""
        x = pixels(images_of(batch), self.decision.weight.dtype)
        return cells_of(self.norm(self.trunk(x)[-1]), batch)

    def descriptor(self, features: Cells) -> Float[Tensor, "b s"]:
        """What the last layer decides from."""
        return features.values.mean(dim=1)

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"depth": asdict(self.depth)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ResNet":
        """The network that `config` describes, with fresh weights."""
        return cls(Depth(**config["depth"]))


class Whole(nn.Module):
    """The query g: norm, pool, convolve, norm, dropout, pool, and a linear layer."""

    def __init__(self, channels: int, dropout: float = 0.4) -> None:
        super().__init__()
        self.before = normalised(channels)
        self.convolve = nn.Sequential(
            convolution(channels, channels, 3), normalised(channels), nn.Dropout(dropout)
        )
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
        """One vector an image, whatever its size."""
        return self.linear(largest(self.convolve(pool(self.before(x), 2))))


class ResNetAttention(Attentive):
    """The residual network that classifies by what it attends to (RN-164-att, att2, att3).

    The levels are the sums that leave the last stages, before any norm: 8 x 8, 16 x 16 and 32 x 32
    cells for 32 x 32 pixels. The descriptor has 384 numbers for two levels at full width.
    """

    def __init__(
        self,
        depth: Depth,
        levels: int = 2,
        score: Score = parametrised,
        decision: Decision = concat,
        dropout: float = 0.3,
    ) -> None:
        trunk = ResidualTrunk(depth.width, depth.blocks)
        super().__init__(
            trunk, trunk.channels, depth.classes, levels, score, decision, dropout, Whole
        )
        self.depth, self.dropout = depth, dropout

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"depth": asdict(self.depth), **super().config(), "dropout": self.dropout}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ResNetAttention":
        """The network that `config` describes, with fresh weights."""
        score, decision = SCORES[config["score"]], DECISIONS[config["decision"]]
        depth = Depth(**config["depth"])
        return cls(depth, config["levels"], score, decision, config["dropout"])
