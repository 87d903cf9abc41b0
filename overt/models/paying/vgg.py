"""VGG for small images: plain, with class activation maps, and with learned attention.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
section 4 and appendix A.2. What the paper leaves open is as in its code: batch norm with eps 1e-3,
where dropout stands, and what a weighted sum passes on its way to the classifier. Departures: He's
initialisation but for u, one mean and one deviation for all pixels, and images of any size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, grid
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.cnn import Cells
from overt.models.network import Network
from overt.models.output import Output
from overt.models.paying.attention import (
    DECISIONS,
    SCORES,
    AttentionClassifier,
    Decision,
    Levels,
    Parametrised,
    Score,
    carry,
    concat,
    parametrised,
    prepared,
    shape_of,
)

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
Pools = tuple[int, int, int, int]  # how much the grid shrinks between one stage and the next


@dataclass(frozen=True)
class Dropout:
    """How much is dropped: after the first convolution, inside stages, before linear layers."""

    first: float = 0.3
    inside: float = 0.4
    linear: float = 0.5


AS_PUBLISHED = Dropout()
HEAD_ONLY = Dropout(0.0, 0.0)  # for short schedules, which dropout between convolutions harms


def scaled(channels: int, width: float) -> int:
    """A number of channels in a network of this width."""
    return max(4, round(channels * width))


def pixels(images: Shaped[Tensor, "i 3 y x"], kind: torch.dtype) -> Float[Tensor, "i 3 y x"]:
    """Images as numbers, in the memory order in which the features of a cell lie together.

    Bytes are brought to about [-1.6, 2.1], as in `cnn.Backbone`; numbers are left alone.
    """
    values = images.to(kind)
    if not images.is_floating_point():
        values = (values - 110) / 70
    return values.contiguous(memory_format=torch.channels_last)


def images_of(batch: Batch) -> Shaped[Tensor, "i 3 y x"]:
    """The images of a batch, or a sentence where there are none."""
    if batch.images is None:
        raise ValueError("an image classifier needs a batch with images")
    return batch.images


def cells_of(features: Float[Tensor, "i d y x"], batch: Batch) -> Cells:
    """The cells of each sample's image, without a copy where every sample has its own image."""
    if batch.image_of is not None:
        features = features[batch.image_of]
    height, width = features.shape[-2:]
    layout = grid(height, width, geometry=batch.sample_geometry)
    return Cells(rearrange(features, "b d y x -> b (y x) d"), layout)


def pool(x: Float[Tensor, "i d y x"], by: int) -> Float[Tensor, "i d _ _"]:
    """The largest value of each square of this side; a last one that is cut off counts too."""
    return x if by == 1 else nn.functional.max_pool2d(x, by, ceil_mode=True)


def largest(x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
    """The largest value over all that is left of an image."""
    return x.amax(dim=(-2, -1))


def block(before: int, after: int, dropout: float = 0.0) -> list[nn.Module]:
    """Convolution of 3 x 3, batch norm, ReLU, and dropout if any."""
    convolution = nn.Conv2d(before, after, 3, padding=1)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    made = [convolution, nn.BatchNorm2d(after, eps=1e-3), nn.ReLU(inplace=True)]
    return [*made, nn.Dropout(dropout)] if dropout else made


class Blocks(nn.Sequential):
    """Layers one after the other, where each convolution has its batch norm right behind it.

    Batch norm takes the mean out of a batch, and so the bias of the convolution. While training the
    bias is therefore not added: what comes out, what is learned and the running mean are the same
    but for rounding, and adding it would be a seventh of all that VGG-att2 has to do on a GPU. The
    bias gets no gradient, where it would get one of zero.
    """

    def forward(self, x: Float[Tensor, "i _ _ _"]) -> Float[Tensor, "i _ _ _"]:
        """What comes out of the last layer."""
        layers = iter(self)
        for layer in layers:
            x = convolved(layer, next(layers), x) if isinstance(layer, nn.Conv2d) else layer(x)
        return x


def convolved(
    convolution: nn.Conv2d, norm: nn.Module, x: Float[Tensor, "i _ y x"]
) -> Float[Tensor, "i _ _ _"]:
    """A convolution and its batch norm, without the bias where it would be taken out again."""
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    if not norm.training:
        return norm(convolution(x))
    x = norm(nn.functional.conv2d(x, convolution.weight, padding=convolution.padding))
    assert convolution.bias is not None and norm.momentum is not None
    # By way of `data`, since autograd must not see it, as little as what the norm does to its mean.
    norm.running_mean.data.add_(convolution.bias.data, alpha=norm.momentum)
    return x


class Trunk(nn.Module):
    """The 13 convolutions of VGG in five stages, with max-pooling between them by `pools`."""

    def __init__(self, pools: Pools, width: float = 1.0, dropout: Dropout = AS_PUBLISHED) -> None:
        super().__init__()
        self.pools = pools
        self.channels = [scaled(stage[-1], width) for stage in STAGES]
        before = 3
        stages = []
        for number, stage in enumerate(STAGES):
            layers: list[nn.Module] = []
            for place, channels in enumerate(stage):
                last = place == len(stage) - 1
                rate = 0.0 if last else dropout.inside if number else dropout.first
                layers += block(before, scaled(channels, width), rate)
                before = scaled(channels, width)
            stages.append(Blocks(*layers))
        self.stages = nn.ModuleList(stages)

    def forward(
        self, x: Float[Tensor, "i _ y x"], first: int = 0, last: int = 5
    ) -> list[Float[Tensor, "i _ _ _"]]:
        """What comes out of each stage from `first` up to `last`, before any pooling after it."""
        found = []
        for number in range(first, last):
            x = self.stages[number](pool(x, self.pools[number - 1]) if number else x)
            found.append(x)
        return found


class Global(nn.Module):
    """The query g: pool, convolve, pool, convolve, pool, and a linear layer (layers 14 to 16)."""

    def __init__(self, channels: int, first: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.first = first
        self.one = Blocks(*block(channels, channels))
        self.two = Blocks(*block(channels, channels))
        self.linear = nn.Sequential(nn.Dropout(dropout), nn.Linear(channels, channels))

    def forward(self, x: Float[Tensor, "i d y x"]) -> Float[Tensor, "i d"]:
        """One vector an image, whatever its size."""
        x = self.one(pool(x, self.first))
        return self.linear(largest(self.two(pool(x, 2))))


@dataclass(frozen=True)
class Sizes:
    """What all VGGs have in common.

    `first_pool` is the side of the first pooling: 2 for images of 32 x 32 pixels, and 5 for birds
    of 80 x 80, so that what follows has the same grids.
    """

    classes: int
    width: float = 1.0
    dropout: Dropout = AS_PUBLISHED
    first_pool: int = 2

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Sizes":
        """The sizes that `asdict` gave."""
        return Sizes(**{**config, "dropout": Dropout(**config["dropout"])})


class VGG(Network[Cells]):
    """VGG with 13 convolutions and two linear layers: the paper's baseline without attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.trunk = Trunk((sizes.first_pool, 2, 2, 2), sizes.width, sizes.dropout)
        channels, dropout = self.trunk.channels[-1], sizes.dropout.linear
        self.hidden = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(channels, channels), *prepared(channels, dropout)
        )
        self.decision = nn.Linear(channels, sizes.classes)

    def encode(self, batch: Batch) -> Cells:
        """The cells of the last stage."""
        x = pixels(images_of(batch), self.decision.weight.dtype)
        return cells_of(self.trunk(x)[-1], batch)

    def descriptor(self, features: Cells) -> Float[Tensor, "b s"]:
        """What the last layer decides from."""
        return self.hidden(features.values.amax(dim=1))

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the largest value of each feature."""
        left = Cells(features.masked(mask), features.layout)
        return Output(self.decision(self.descriptor(left)))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGG":
        """The network that `config` describes, with fresh weights."""
        return cls(Sizes.of(config["sizes"]))


class VGGGap(Network[Cells]):
    """VGG that averages the cells of its last stage, so that each cell's share in a class is known.

    Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016. Only the first
    two poolings are left: 8 x 8 cells for 32 x 32 pixels.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.trunk = Trunk((sizes.first_pool, 2, 1, 1), sizes.width, sizes.dropout)
        self.decision = nn.Linear(self.trunk.channels[-1], sizes.classes)

    def encode(self, batch: Batch) -> Cells:
        """The cells of the last stage."""
        x = pixels(images_of(batch), self.decision.weight.dtype)
        return cells_of(self.trunk(x)[-1], batch)

    def descriptor(self, features: Cells) -> Float[Tensor, "b s"]:
        """What the last layer decides from."""
        return features.values.mean(dim=1)

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the mean of the cells."""
        return Output(self.decision(features.masked(mask).mean(dim=1)))

    def class_activation(self, features: Cells, classes: Int[Tensor, " b"]) -> AttentionMap:
        """What each cell says for one class a sample; the mean, and the bias, are its logit."""
        weights = self.decision.weight[classes]
        values = einsum(features.values, weights, "b k d, b d -> b k")
        return AttentionMap(
            rearrange(values, "b k -> b 1 1 1 k"), features.layout, kind=Kind.SIGNED
        )

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGGGap":
        """The network that `config` describes, with fresh weights."""
        return cls(Sizes.of(config["sizes"]))


class Attentive(Network[Levels]):
    """A trunk that is attended to at the last one to three levels, and decides by what is found.

    `ask` makes the query from the last level, where the score has one.
    """

    def __init__(
        self,
        trunk: nn.Module,
        channels: Sequence[int],
        classes: int,
        levels: int,
        score: Score,
        decision: Decision,
        dropout: float,
        ask: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        if levels not in (1, 2, 3):
            raise ValueError(f"attention stands at 1, 2 or 3 levels, not {levels}")
        self.levels, self.score, self.decide_by = levels, score, decision
        self.trunk = trunk
        self.classify = AttentionClassifier(
            classes, channels[-levels:], channels[-1], score, decision, dropout
        )
        self.query = ask(channels[-1]) if self.classify.asks else None

    def encode(self, batch: Batch) -> Levels:
        """The cells of every level, and the query."""
        first = next(self.parameters())
        found = self.trunk(pixels(images_of(batch), first.dtype))
        query = None
        if self.query is not None and self.classify.wants_query:
            query = self.query(found[-1])
            query = query if batch.image_of is None else query[batch.image_of]
        return Levels(tuple(cells_of(x, batch) for x in found[-self.levels :]), query)

    def descriptor(self, features: Levels) -> Float[Tensor, "b s"]:
        """What the classifier decides from: the summaries of all levels, one after the other."""
        summaries, _ = self.classify.look(features)
        return torch.cat(summaries, dim=1)

    def decide(self, features: Levels, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes, and one map a level, the lowest first.

        A mask over the grid of one level acts on all: what it removes is removed at every scale.
        """
        return self.classify(features, mask)

    def config(self) -> dict[str, Any]:
        """How it attends and decides; what the trunk is made of is added by each kind."""
        return {
            "levels": self.levels,
            "score": name_in(SCORES, self.score, "score"),
            "decision": name_in(DECISIONS, self.decide_by, "decision"),
        }


class VGGAttention(Attentive):
    """VGG that classifies by what it attends to at one to three levels (VGG-att, att2, att3).

    The levels are the convolutions 13, 10 and 7, before the pooling that follows them: 8 x 8, 16 x
    16 and 32 x 32 cells for 32 x 32 pixels. With `score=uniform` it is the control: the same trunk
    and the same classifier with average pooling, and no query, as nothing would ask for one. The
    descriptor has 512, 1024 or 1280 numbers at full width.
    """

    def __init__(
        self,
        sizes: Sizes,
        levels: int = 2,
        score: Score = parametrised,
        decision: Decision = concat,
    ) -> None:
        dropout = sizes.dropout.linear
        trunk = Trunk((1, 1, sizes.first_pool, 2), sizes.width, sizes.dropout)
        ask = partial(Global, dropout=dropout)
        super().__init__(
            trunk, trunk.channels, sizes.classes, levels, score, decision, dropout, ask
        )
        self.sizes = sizes

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes), **super().config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGGAttention":
        """The network that `config` describes, with fresh weights."""
        score, decision = SCORES[config["score"]], DECISIONS[config["decision"]]
        return cls(Sizes.of(config["sizes"]), config["levels"], score, decision)


def vgg_attention(
    classes: int,
    levels: int = 2,
    score: Score = parametrised,
    decision: Decision = concat,
    width: float = 1.0,
) -> VGGAttention:
    """VGG with attention for images of 32 x 32 pixels, with dropout as published."""
    return VGGAttention(Sizes(classes, width), levels, score, decision)


@dataclass(frozen=True, eq=False)
class Progressed:
    """The cells behind the gate of a progressive network, their query, and the gate itself.

    There is no query while the network trains: behind the gate it makes no difference.
    """

    cells: Cells
    query: Float[Tensor, "b d"] | None
    gate: AttentionMap


class VGGProgressive(Network[Progressed]):
    """VGG with progressive attention: cells are weakened on the way, and attended to at the end.

    Seo et al., "Hierarchical Attention Networks", 2016, as the paper has it (appendix A.2). After
    convolution 10 each cell is multiplied by the sigmoid of its score against a query of its own.
    Nothing is summed up there, so that query does count. Convolution 13 is attended to as in
    VGG-att. A mask acts on the cells of the last stage.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.trunk = Trunk((1, 1, sizes.first_pool, 2), sizes.width, sizes.dropout)
        channels, dropout = self.trunk.channels[-1], sizes.dropout.linear
        self.early = Global(channels, first=4, dropout=dropout)
        self.gate = Parametrised(channels)
        self.query = Global(channels, dropout=dropout)
        self.classify = AttentionClassifier(
            sizes.classes, [channels], channels, parametrised, concat, dropout
        )

    def encode(self, batch: Batch) -> Progressed:
        """The cells of the last stage behind the gate, their query, and the gate."""
        first = next(self.parameters())
        middle = self.trunk(pixels(images_of(batch), first.dtype), last=4)[-1]
        open_by = self.opened(middle, self.early(middle))
        last = self.trunk(middle * open_by.to(middle.dtype), first=4)[-1]
        query = self.query(last) if self.classify.wants_query else None
        if batch.image_of is not None:
            query = None if query is None else query[batch.image_of]
            open_by = open_by[batch.image_of]
        height, width = open_by.shape[-2:]
        layout = grid(height, width, geometry=batch.sample_geometry)
        gate = AttentionMap.from_cells(open_by.flatten(1), layout)
        return Progressed(cells_of(last, batch), query, gate)

    def opened(
        self, cells: Float[Tensor, "i d y x"], query: Float[Tensor, "i d"]
    ) -> Float[Tensor, "i 1 y x"]:
        """How far the gate lets each cell through, from 0 to 1."""
        scores = self.gate(rearrange(cells, "i d y x -> i (y x) d"), query)
        return rearrange(scores.sigmoid(), "i (y x) -> i 1 y x", y=cells.shape[-2])

    def descriptor(self, features: Progressed) -> Float[Tensor, "b s"]:
        """What the classifier decides from."""
        summaries, _ = self.classify.look(Levels((features.cells,), features.query))
        return summaries[0]

    def decide(self, features: Progressed, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes, and two maps: the gate, which is no distribution, and the attention behind it.

        A mask may be over either grid.
        """
        if mask is not None and "image" in mask:
            shapes = [shape_of(features.gate.keys), shape_of(features.cells.layout)]
            mask = {"image": carry(mask["image"].to(features.gate.values), shapes)[-1]}
        output = self.classify(Levels((features.cells,), features.query), mask)
        return Output(output.prediction, (features.gate, *output.attention))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VGGProgressive":
        """The network that `config` describes, with fresh weights."""
        return cls(Sizes.of(config["sizes"]))


Named = TypeVar("Named")


def name_in(known: Mapping[str, Named], wanted: Named, what: str) -> str:
    """The name under which a strategy is saved."""
    for name, one in known.items():
        if one is wanted:
            return name
    raise BadInput(f"only a {what} of {', '.join(known)} can be saved, not one of your own")
