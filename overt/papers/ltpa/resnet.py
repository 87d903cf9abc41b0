"""Learn to Pay Attention: a residual network of 164 layers, plain and with learned attention.

He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016,
https://arxiv.org/abs/1603.05027: pre-activation bottlenecks. Attention as in Jetley et al., "Learn
To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391, appendix A.2.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.experiments.recipe import scale_width
from overt.nn.cnn import ImageFeatures
from overt.nn.learned_attention.attention import (
    CLASSIFIERS,
    SCORES,
    MakeClassifier,
    MakeCompatibility,
    concat_levels,
    parametrised_score,
    require_images,
)
from overt.nn.network import Network
from overt.nn.output import Output
from overt.papers.ltpa.vgg import (
    AttentionNetwork,
    global_max_pool,
    max_pool,
    normalize_pixels,
    to_cells,
)

STEM, PLANES, EXPANSION = 16, (16, 32, 64), 4


@dataclass(frozen=True)
class ResNetSizes:
    """Sizes of a residual network: `9 * blocks + 2` layers, 164 with 18 blocks per stage."""

    classes: int
    width: float = 1.0
    blocks: int = 18


def conv(before: int, after: int, side: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, in He's initialization."""
    made = nn.Conv2d(before, after, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def norm_relu(channels: int) -> nn.Sequential:
    """Return batch norm and ReLU."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    """Pre-activation bottleneck block.

    Where the shape changes, the shortcut is a 1 x 1 convolution after the norm.
    """

    def __init__(self, before: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        after = EXPANSION * planes
        self.norm = norm_relu(before)
        self.residual = nn.Sequential(
            conv(before, planes, 1),
            norm_relu(planes),
            conv(planes, planes, 3, stride),
            norm_relu(planes),
            conv(planes, after, 1),
        )
        same = before == after and stride == 1
        self.shortcut = None if same else conv(before, after, 1, stride)

    def forward(self, x: Float[Tensor, "i c y x"]) -> Float[Tensor, "i d _ _"]:
        """Return the features of the block."""
        ready = self.norm(x)
        around = x if self.shortcut is None else self.shortcut(ready)
        return around + self.residual(ready)


class ResidualTrunk(nn.Module):
    """A convolution and three stages of bottlenecks; the grid is halved before the last two."""

    def __init__(self, width: float, blocks: int) -> None:
        super().__init__()
        before = scale_width(STEM, width)
        self.stem = conv(3, before, 3)
        stages = []
        for number, planes in enumerate(PLANES):
            narrow = scale_width(planes, width)
            layers = []
            for place in range(blocks):
                # The first block of the last two stages halves the grid.
                layers.append(Bottleneck(before, narrow, 2 if number and not place else 1))
                before = EXPANSION * narrow
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.channels = [EXPANSION * scale_width(planes, width) for planes in PLANES]

    def forward(self, x: Float[Tensor, "i 3 y x"]) -> list[Float[Tensor, "i _ _ _"]]:
        """Return the output of each stage, before any norm."""
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class ResNet(Network[ImageFeatures]):
    """The residual network with average pooling of its last stage: the paper's RN-164."""

    def __init__(self, depth: ResNetSizes) -> None:
        super().__init__()
        self.depth = depth
        self.trunk = ResidualTrunk(depth.width, depth.blocks)
        self.norm = norm_relu(self.trunk.channels[-1])
        self.decision = nn.Linear(self.trunk.channels[-1], depth.classes)

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return the cells of the last stage."""
        x = normalize_pixels(require_images(batch), self.decision.weight.dtype)
        # Pre-activation blocks end with a sum, so the last one needs a norm and ReLU of its own.
        return to_cells(self.norm(self.trunk(x)[-1]), batch)

    def descriptor(self, features: ImageFeatures) -> Float[Tensor, "b s"]:
        """Return the input of the last layer."""
        return features.values.mean(dim=1)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return classes from the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        return {"depth": asdict(self.depth)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ResNet":
        """Build the network of a config, with fresh weights."""
        return cls(ResNetSizes(**config["depth"]))


class ResNetQuery(nn.Module):
    """The query g: norm, pool, convolve, norm, dropout, pool, and a linear layer."""

    def __init__(self, channels: int, dropout: float = 0.4) -> None:
        super().__init__()
        self.before = norm_relu(channels)
        self.convolve = nn.Sequential(
            conv(channels, channels, 3), norm_relu(channels), nn.Dropout(dropout)
        )
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
        """Return one vector per image, whatever its size."""
        return self.linear(global_max_pool(self.convolve(max_pool(self.before(x), 2))))


class ResNetAttention(AttentionNetwork):
    """The residual network with attention at one to three levels (RN-164-att, att2, att3).

    The levels are the sums that leave the last stages, before any norm: 8 x 8, 16 x 16 and 32 x 32
    cells for 32 x 32 pixels. The descriptor has 384 features for two levels at full width.
    """

    def __init__(
        self,
        depth: ResNetSizes,
        levels: int = 2,
        score: MakeCompatibility = parametrised_score,
        decision: MakeClassifier = concat_levels,
        dropout: float = 0.3,
    ) -> None:
        trunk = ResidualTrunk(depth.width, depth.blocks)
        super().__init__(
            trunk, trunk.channels, depth.classes, levels, score, decision, dropout, ResNetQuery
        )
        self.depth, self.dropout = depth, dropout

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        return {"depth": asdict(self.depth), **super().config(), "dropout": self.dropout}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ResNetAttention":
        """Build the network of a config, with fresh weights."""
        score, decision = SCORES[config["score"]], CLASSIFIERS[config["decision"]]
        depth = ResNetSizes(**config["depth"])
        return cls(depth, config["levels"], score, decision, config["dropout"])
