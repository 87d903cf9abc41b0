"""Learn to Pay Attention: VGG, plain, with class activation maps, and with learned attention.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
section 4 and appendix A.2. What the paper leaves open follows its code: batch norm with eps 1e-3,
where dropout is applied, and the layers between a weighted sum and the classifier. Departures: He's
initialization except for u, one mean and one deviation for all pixels, and images of any size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, grid
from overt.data.batch import Batch
from overt.experiments.recipe import scale_width
from overt.nn.cnn import ImageFeatures
from overt.nn.learned_attention.attention import (
    CLASSIFIERS,
    SCORES,
    AttentionClassifier,
    MakeClassifier,
    MakeCompatibility,
    MultiLevelFeatures,
    ParametrisedCompatibility,
    concat_levels,
    grid_shape,
    norm_relu_dropout,
    parametrised_score,
    registered_name,
    require_images,
    resize_mask,
    scale_gradient,
)
from overt.nn.network import Features, Network
from overt.nn.output import Output

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
Pools = tuple[int, int, int, int]  # pooling between one stage and the next


@dataclass(frozen=True)
class VGGDropout:
    """Dropout rates: after the first convolution, inside stages, before linear layers."""

    first: float = 0.3
    inside: float = 0.4
    linear: float = 0.5


AS_PUBLISHED = VGGDropout()
HEAD_ONLY = VGGDropout(0.0, 0.0)  # for short schedules, where dropout between convolutions hurts


def normalize_pixels(
    images: Shaped[Tensor, "i 3 y x"], kind: torch.dtype
) -> Float[Tensor, "i 3 y x"]:
    """Convert images to floating point in channels-last memory format.

    Bytes are scaled to about [-1.6, 2.1]; floating-point images are unchanged.
    """
    values = images.to(kind)
    if not images.is_floating_point():
        values = (values - 110) / 70
    return values.contiguous(memory_format=torch.channels_last)


def to_cells(features: Float[Tensor, "i d y x"], batch: Batch) -> ImageFeatures:
    """Return the cells of each sample's image, without a copy if every sample has its own image."""
    if batch.image_of is not None:
        features = features[batch.image_of]
    height, width = features.shape[-2:]
    layout = grid(height, width, geometry=batch.sample_geometry)
    return ImageFeatures(rearrange(features, "b d y x -> b (y x) d"), layout)


def max_pool(x: Float[Tensor, "i d y x"], by: int) -> Float[Tensor, "i d _ _"]:
    """Max-pool over squares of this side; a last, partial one counts too."""
    return x if by == 1 else nn.functional.max_pool2d(x, by, ceil_mode=True)


def global_max_pool(x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
    """Return the largest value of each feature over the image."""
    return x.amax(dim=(-2, -1))


def conv_block(before: int, after: int, dropout: float = 0.0) -> list[nn.Module]:
    """Return a 3 x 3 convolution, batch norm, ReLU, and dropout if any."""
    convolution = nn.Conv2d(before, after, 3, padding=1)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    made = [convolution, nn.BatchNorm2d(after, eps=1e-3), nn.ReLU(inplace=True)]
    return [*made, nn.Dropout(dropout)] if dropout else made


class ConvBlocks(nn.Sequential):
    """A sequence of layers in which every convolution is followed by its batch norm.

    Batch norm subtracts the batch mean, and with it the bias of the convolution. In training the
    bias is therefore not added: outputs, gradients and the running mean are the same except for
    rounding, and adding it would take a seventh of the GPU time of VGG-att2. The bias then gets no
    gradient, instead of a gradient of zero.
    """

    def forward(self, x: Float[Tensor, "i _ _ _"]) -> Float[Tensor, "i _ _ _"]:
        """Return the output of the last layer."""
        layers = iter(self)
        for layer in layers:
            x = conv_norm(layer, next(layers), x) if isinstance(layer, nn.Conv2d) else layer(x)
        return x


def conv_norm(
    convolution: nn.Conv2d, norm: nn.Module, x: Float[Tensor, "i _ y x"]
) -> Float[Tensor, "i _ _ _"]:
    """Apply a convolution and its batch norm, without the bias where the norm removes it."""
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    if not norm.training:
        return norm(convolution(x))
    x = norm(nn.functional.conv2d(x, convolution.weight, padding=convolution.padding))
    assert convolution.bias is not None and norm.momentum is not None
    # Through `data`: autograd must not track it, like the running mean update of the norm itself.
    norm.running_mean.data.add_(convolution.bias.data, alpha=norm.momentum)
    return x


class VGGTrunk(nn.Module):
    """The 13 convolutions of VGG in five stages, with max-pooling between them by `pools`."""

    def __init__(
        self, pools: Pools, width: float = 1.0, dropout: VGGDropout = AS_PUBLISHED
    ) -> None:
        super().__init__()
        self.pools = pools
        self.channels = [scale_width(stage[-1], width) for stage in STAGES]
        before = 3
        stages = []
        for number, stage in enumerate(STAGES):
            layers: list[nn.Module] = []
            for place, channels in enumerate(stage):
                last = place == len(stage) - 1
                # As in the paper's code, there is no dropout after the last convolution of a stage.
                rate = 0.0 if last else dropout.inside if number else dropout.first
                layers += conv_block(before, scale_width(channels, width), rate)
                before = scale_width(channels, width)
            stages.append(ConvBlocks(*layers))
        self.stages = nn.ModuleList(stages)
        # Factor on the gradient of the output of a stage, see `average_gradients`.
        self.gradient_factors: dict[int, float] = {}

    def forward(
        self, x: Float[Tensor, "i _ y x"], first: int = 0, last: int = 5
    ) -> list[Float[Tensor, "i _ _ _"]]:
        """Return the output of the stages `first` to `last`, each before its pooling."""
        found = []
        for number in range(first, last):
            # The pooling comes before the next stage instead of after this one: attention is
            # applied before it.
            x = self.stages[number](max_pool(x, self.pools[number - 1]) if number else x)
            x = scale_gradient(x, self.gradient_factors.get(number, 1.0))
            found.append(x)
        return found


class VGGQuery(nn.Module):
    """The query g: pool, convolve, pool, convolve, pool, and a linear layer (layers 14 to 16)."""

    def __init__(self, channels: int, first: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = first
        self.one = ConvBlocks(*conv_block(channels, channels))
        self.two = ConvBlocks(*conv_block(channels, channels))
        self.linear = nn.Sequential(nn.Dropout(dropout), nn.Linear(channels, channels))

    def forward(self, x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
        """Return one vector per image, whatever its size."""
        x = self.one(max_pool(x, self.first))
        return self.linear(global_max_pool(self.two(max_pool(x, 2))))


@dataclass(frozen=True)
class VGGSizes:
    """Sizes common to all VGGs.

    `first_pool` is the side of the first pooling: 2 for images of 32 x 32 pixels, and 5 for CUB
    images of 80 x 80, so that the later grids are the same.
    """

    classes: int
    width: float = 1.0
    dropout: VGGDropout = AS_PUBLISHED
    first_pool: int = 2

    @staticmethod
    def of(config: Mapping[str, Any]) -> "VGGSizes":
        """Build the sizes from the values that `asdict` returned."""
        return VGGSizes(**{**config, "dropout": VGGDropout(**config["dropout"])})


class VGGNetwork(Network[Features]):
    """Base of the networks on a `VGGTrunk` that are built from their sizes alone."""

    def __init__(self, sizes: VGGSizes, pools: Pools) -> None:
        super().__init__()
        self.sizes = sizes
        self.trunk = VGGTrunk(pools, sizes.width, sizes.dropout)

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        return {"sizes": asdict(self.sizes)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGGNetwork[Any]":
        """Build the network of a config, with fresh weights."""
        return cls(VGGSizes.of(config["sizes"]))  # type: ignore[call-arg]


# --- networks without attention


class VGGClassifier(VGGNetwork[ImageFeatures]):
    """Base of the networks whose features are the cells of the last stage."""

    decision: nn.Linear

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return the cells of the last stage."""
        x = normalize_pixels(require_images(batch), self.decision.weight.dtype)
        return to_cells(self.trunk(x)[-1], batch)


class VGG(VGGClassifier):
    """VGG with 13 convolutions and two linear layers: the paper's baseline without attention."""

    def __init__(self, sizes: VGGSizes) -> None:
        super().__init__(sizes, (sizes.first_pool, 2, 2, 2))
        channels, dropout = self.trunk.channels[-1], sizes.dropout.linear
        self.hidden = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            *norm_relu_dropout(channels, dropout),
        )
        self.decision = nn.Linear(channels, sizes.classes)

    def descriptor(self, features: ImageFeatures) -> Float[Tensor, "b s"]:
        """Return the input of the last layer."""
        # The last pooling of VGG, over all cells that are left: 2 x 2 for 32 x 32 pixels.
        return self.hidden(features.values.amax(dim=1))

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return classes from the largest value of each feature."""
        left = ImageFeatures(features.masked(mask), features.layout)
        return Output(self.decision(self.descriptor(left)))


class VGGGap(VGGClassifier):
    """VGG with global average pooling of its last stage, and so with class activation maps.

    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016. Only the first
    two poolings are kept: 8 x 8 cells for 32 x 32 pixels.
    """

    def __init__(self, sizes: VGGSizes) -> None:
        super().__init__(sizes, (sizes.first_pool, 2, 1, 1))
        self.decision = nn.Linear(self.trunk.channels[-1], sizes.classes)

    def descriptor(self, features: ImageFeatures) -> Float[Tensor, "b s"]:
        """Return the input of the last layer."""
        return features.values.mean(dim=1)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return classes from the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def class_activation(self, features: ImageFeatures, classes: Int[Tensor, " b"]) -> AttentionMap:
        """Return the class activation map of one class per sample (mean + bias = logit)."""
        weights = self.decision.weight[classes]
        values = einsum(features.values, weights, "b k d, b d -> b k")
        return AttentionMap(
            rearrange(values, "b k -> b 1 1 1 k"), features.layout, kind=Kind.SIGNED
        )


# --- learned attention


class AttentionNetwork(Network[MultiLevelFeatures]):
    """A trunk with attention at its last one to three levels, and a classifier of the results.

    `ask` builds the query from the last level, if the score uses one.
    """

    def __init__(
        self,
        trunk: nn.Module,
        channels: Sequence[int],
        classes: int,
        levels: int,
        score: MakeCompatibility,
        decision: MakeClassifier,
        dropout: float,
        ask: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        if levels not in (1, 2, 3):
            raise ValueError(f"levels must be 1, 2 or 3, got {levels}")
        self.levels, self.score, self.decide_by = levels, score, decision
        self.trunk = trunk
        self.classify = AttentionClassifier(
            classes, channels[-levels:], channels[-1], score, decision, dropout
        )
        self.query = ask(channels[-1]) if self.classify.takes_query else None
        self.query_gradient = 1.0  # factor on its gradient, see `average_gradients`

    def encode(self, batch: Batch) -> MultiLevelFeatures:
        """Return the cells of every level, and the query."""
        first = next(self.parameters())
        found = self.trunk(normalize_pixels(require_images(batch), first.dtype))
        query = None
        # With softmax, <u, l + g> = <u, l> + <u, g> does not depend on g: the second term is the
        # same for every cell. Such a query is only computed in eval mode, for the analyses.
        if self.query is not None and self.classify.wants_query:
            query = scale_gradient(self.query(found[-1]), self.query_gradient)
            query = query if batch.image_of is None else query[batch.image_of]
        return MultiLevelFeatures(tuple(to_cells(x, batch) for x in found[-self.levels :]), query)

    def descriptor(self, features: MultiLevelFeatures) -> Float[Tensor, "b s"]:
        """Return the input of the classifier: the summaries of all levels, concatenated."""
        summaries, _ = self.classify.attend_levels(features)
        return torch.cat(summaries, dim=1)

    def decide(
        self, features: MultiLevelFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Output:
        """Return classes, and one map per level, the lowest first.

        A mask over the grid of one level applies to all: what it removes is removed at every scale.
        """
        return self.classify(features, mask)

    def config(self) -> dict[str, Any]:
        """Return the attention settings; subclasses add those of the trunk."""
        return {
            "levels": self.levels,
            "score": registered_name(SCORES, self.score, "score"),
            "decision": registered_name(CLASSIFIERS, self.decide_by, "decision"),
        }


class VGGAttention(AttentionNetwork):
    """VGG with attention at one to three levels (VGG-att, att2, att3).

    The levels are the convolutions 13, 10 and 7, before the pooling that follows them: 8 x 8, 16 x
    16 and 32 x 32 cells for 32 x 32 pixels. With `score=uniform` it is the control: the same trunk
    and the same classifier with average pooling, and no query, as nothing would use it. The
    descriptor has 512, 1024 or 1280 features at full width. With `mean_gradient`, gradients are
    averaged where branches meet, as in the paper's code, see `average_gradients`.
    """

    def __init__(
        self,
        sizes: VGGSizes,
        levels: int = 2,
        score: MakeCompatibility = parametrised_score,
        decision: MakeClassifier = concat_levels,
        mean_gradient: bool = False,
    ) -> None:
        dropout = sizes.dropout.linear
        trunk = VGGTrunk((1, 1, sizes.first_pool, 2), sizes.width, sizes.dropout)
        ask = partial(VGGQuery, dropout=dropout)
        super().__init__(
            trunk, trunk.channels, sizes.classes, levels, score, decision, dropout, ask
        )
        self.sizes, self.mean_gradient = sizes, mean_gradient
        if mean_gradient:
            average_gradients(self)

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        # Networks that were saved before there was this setting have no such entry.
        mean = {"mean_gradient": True} if self.mean_gradient else {}
        return {"sizes": asdict(self.sizes), **super().config(), **mean}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGGAttention":
        """Build the network of a config, with fresh weights."""
        score, decision = SCORES[config["score"]], CLASSIFIERS[config["decision"]]
        mean = config.get("mean_gradient", False)
        return cls(VGGSizes.of(config["sizes"]), config["levels"], score, decision, mean)


def average_gradients(net: VGGAttention) -> None:
    """Average the gradients of a network where branches meet, as the paper's code does.

    There, the gradient of a level is the mean of that of its attention and that of the layers above
    it, and the gradient of the query is the mean over the levels. The text does not mention it, and
    it is not the gradient of the loss.

    Args:
        net: network to change; only its gradients change.

    Example:
        >>> net = VGGAttention(VGGSizes(10, width=0.1), levels=2)
        >>> average_gradients(net)
        >>> net.trunk.gradient_factors, net.query_gradient
        ({3: 0.5, 4: 0.5}, 0.5)
    """
    assert isinstance(net.trunk, VGGTrunk)
    last = len(net.trunk.stages) - 1
    # Each level has two consumers: its attention, and the next stage, or the query for the last.
    levels = range(last - net.levels + 1, last + (net.query is not None))
    net.trunk.gradient_factors = dict.fromkeys(levels, 0.5)
    net.query_gradient = 1 / net.levels


def vgg_attention(
    classes: int,
    levels: int = 2,
    score: MakeCompatibility = parametrised_score,
    decision: MakeClassifier = concat_levels,
    width: float = 1.0,
) -> VGGAttention:
    """Build VGG with attention for images of 32 x 32 pixels, with dropout as published."""
    return VGGAttention(VGGSizes(classes, width), levels, score, decision)


# --- progressive attention


@dataclass(frozen=True, eq=False)
class ProgressiveFeatures:
    """The cells after the gate of a progressive network, their query, and the gate.

    There is no query in training: after the gate it makes no difference.
    """

    cells: ImageFeatures
    query: Float[Tensor, "b d"] | None
    gate: AttentionMap


class VGGProgressive(VGGNetwork[ProgressiveFeatures]):
    """VGG with progressive attention: cells are gated on the way, and attended to at the end.

    Seo et al., "Hierarchical Attention Networks", 2016, as described in the paper (appendix A.2).
    After convolution 10 each cell is multiplied by the sigmoid of its score with a query of its
    own. There is no softmax at the gate, so this query does matter. Convolution 13 is attended to
    as in VGG-att. A mask applies to the cells of the last stage.
    """

    def __init__(self, sizes: VGGSizes) -> None:
        super().__init__(sizes, (1, 1, sizes.first_pool, 2))
        channels, dropout = self.trunk.channels[-1], sizes.dropout.linear
        # The gate's level has twice the side of the last one, so its query pools by 4 first.
        self.early = VGGQuery(channels, first=4, dropout=dropout)
        self.gate = ParametrisedCompatibility(channels)
        self.query = VGGQuery(channels, dropout=dropout)
        self.classify = AttentionClassifier(
            sizes.classes, [channels], channels, parametrised_score, concat_levels, dropout
        )

    def encode(self, batch: Batch) -> ProgressiveFeatures:
        """Return the gated cells of the last stage, their query, and the gate."""
        first = next(self.parameters())
        # Four stages, the gate after convolution 10, then the last stage on the gated cells.
        middle = self.trunk(normalize_pixels(require_images(batch), first.dtype), last=4)[-1]
        gates = self.gate_values(middle, self.early(middle))
        last = self.trunk(middle * gates.to(middle.dtype), first=4)[-1]
        query = self.query(last) if self.classify.wants_query else None
        if batch.image_of is not None:
            query = None if query is None else query[batch.image_of]
            gates = gates[batch.image_of]
        height, width = gates.shape[-2:]
        layout = grid(height, width, geometry=batch.sample_geometry)
        gate = AttentionMap.from_cells(gates.flatten(1), layout)
        return ProgressiveFeatures(to_cells(last, batch), query, gate)

    def gate_values(
        self, cells: Float[Tensor, "i d y x"], query: Float[Tensor, "i d"]
    ) -> Float[Tensor, "i 1 y x"]:
        """Return the gate of each cell, from 0 to 1."""
        scores = self.gate(rearrange(cells, "i d y x -> i (y x) d"), query)
        return rearrange(scores.sigmoid(), "i (y x) -> i 1 y x", y=cells.shape[-2])

    def descriptor(self, features: ProgressiveFeatures) -> Float[Tensor, "b s"]:
        """Return the input of the classifier."""
        summaries, _ = self.classify.attend_levels(
            MultiLevelFeatures((features.cells,), features.query)
        )
        return summaries[0]

    def decide(
        self, features: ProgressiveFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Output:
        """Return classes, and two maps: the gate, which is not a distribution, and the attention.

        A mask may be over either grid.
        """
        if mask is not None and "image" in mask:
            shapes = [grid_shape(features.gate.keys), grid_shape(features.cells.layout)]
            mask = {"image": resize_mask(mask["image"].to(features.gate.values), shapes)[-1]}
        output = self.classify(MultiLevelFeatures((features.cells,), features.query), mask)
        return Output(output.prediction, (features.gate, *output.attention))
