"""Attention-Aligned Transformer for Image Captioning: its fusions, its stages, and their placebos.

Fei, AAAI 2022. A Transformer describes pictures. Beside each of its cross-attentions a small
network learns which regions must not be disturbed; what it finds is fused into the attention, in
training and in use. A first stage learns from captions of people, a second, the critic, from a
reward for captions of its own.

What masks are worth is said by what stands beside them: `random` and `shuffled` masks cost the same
and have the content gone, `constant` masks are one number, which changes nothing, and `free` masks
have the same size and parameters and learn from captions alone, without any disturbance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from overt.recipes.a2.figures import figures
from overt.recipes.recipe import NO_FIGURES, Context, Figure, Train

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


class Files(StrEnum):
    """Photos with captions of people."""

    FLICKR8K = "flickr8k"
    FLICKR30K = "flickr30k_captions"
    COCO = "coco_captions"


class Fuse(Enum):
    """How masks come into attention (eq. 6 to 10); `none` is the plain Transformer."""

    NONE = "none"
    MAX = "max"
    MOVING_AVERAGE = "moving-average"
    DECAY = "decay"
    GATE = "gate"


class Preset(Enum):
    """What is left open: our choices, those of the paper as printed, or of Lu et al.'s code."""

    OURS = "ours"
    PAPER = "paper"
    LU2021 = "lu2021"


class Masks(Enum):
    """Where masks come from: `learned` by disturbance as in the paper; the others are placebos."""

    LEARNED = "learned"
    RANDOM = "random"
    SHUFFLED = "shuffled"
    CONSTANT = "constant"
    FREE = "free"


class Baseline(Enum):
    """What a drawn caption is held against: the `greedy` one, the mean of `others` or of `all`."""

    GREEDY = "greedy"
    OTHERS = "others"
    ALL = "all"


class Written(Enum):
    """How the captions that are rewarded come about: by `chance`, or as the best `beams`."""

    CHANCE = "chance"
    BEAMS = "beams"


class Schedule(Enum):
    """How the rate goes: warm-up and a `cosine`, or `noam`, that of "Attention is all you need"."""

    COSINE = "cosine"
    NOAM = "noam"


@dataclass(frozen=True)
class Scenes:
    """Scenes with five captions each; which regions each word speaks of is known.

    `world` is the seed of all, `regions` how many a detector might have proposed. `train`, `val`
    and `test` are how many scenes each split has, `limit` caps all three, and `size` is the pixels
    of a side.
    """

    limit: int | None = None
    world: int = 1
    train: int = 6000
    val: int = 500
    test: int = 1000
    size: int = 64
    regions: int = field(default=16, metadata={"low": 8, "high": 100})


@dataclass(frozen=True)
class Photos:
    """Photos with captions; `limit` caps the photos of every split.

    `backbone` makes a grid of cells of photos on a canvas of `size`, once; `features` names a
    folder instead: a cache of such cells, or bottom-up features in the official files. Words that
    train has less than `minimum` times are unknown; captions are cut after `longest` words.
    """

    name: Files
    limit: int | None = None
    size: int = field(default=224, metadata={"low": 32, "high": 1024})
    backbone: str = "efficientnet-lite0"
    features: str | None = None
    minimum: int = field(default=5, metadata={"low": 1})
    longest: int = field(default=20, metadata={"low": 1})


@dataclass(frozen=True)
class Model:
    """The Transformer; at a `width` of 1 it is 512 wide with feed-forward layers of 2048.

    `layers` is how many layers words have, and `encoder` how many regions tell each other in, by
    default as many. Every layer has so many `heads`; `dropout` is a share, 0 to 1.
    """

    width: float = 1.0
    layers: int = field(default=6, metadata={"low": 1})
    encoder: int | None = field(default=None, metadata={"low": 0, "high": 100})
    heads: int = 8
    dropout: float = 0.1


@dataclass(frozen=True)
class Align:
    """How attention is aligned.

    `penalty` is lambda of eq. 4, on the mean of squares where the preset is ours: larger ones leave
    every mask at 1, and `overt table a2-fig4` tells which do. `rate` is that of the mask networks.
    """

    fuse: Fuse = Fuse.GATE
    preset: Preset = Preset.OURS
    masks: Masks = Masks.LEARNED
    penalty: float = 0.001
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.fuse is Fuse.NONE and self.masks is not Masks.LEARNED:
            raise ValueError("align.fuse=none has no masks: leave align.masks alone")
        if self.preset is Preset.LU2021 and self.fuse not in (Fuse.GATE, Fuse.NONE):
            raise ValueError("align.preset=lu2021 has a gate: say align.fuse=gate")

    @property
    def disturbs(self) -> bool:
        """Whether masks learn by disturbing attention: a second pass of the decoder a step."""
        return self.fuse is not Fuse.NONE and self.masks in (Masks.LEARNED, Masks.SHUFFLED)


@dataclass(frozen=True)
class Learn:
    """How cross-entropy is minimised: `warmup` steps are for `noam`, which then sets the rate.

    `smoothing` is the share of what is wanted that is spread evenly over all words, 0 for none.
    """

    schedule: Schedule = Schedule.COSINE
    warmup: int = field(default=10_000, metadata={"low": 1, "high": 10_000_000})
    smoothing: float = field(default=0.0, metadata={"low": 0, "high": 0.9})


@dataclass(frozen=True)
class Critic:
    """The self-critical stage: `epochs` of it, none by default, each of all training pictures.

    `steps` ends it earlier, a step takes `batch` pictures, and `rate` is its learning rate, which
    stays as it is.
    `draws` captions are written a picture and rewarded by CIDEr-D: by chance, as Rennie et al. do,
    or the best beams, as Cornia et al. do with `baseline=all`. The paper does not say which.
    """

    epochs: int = field(default=0, metadata={"low": 0})
    steps: int | None = None
    batch: int = 64
    draws: int = field(default=5, metadata={"low": 1})
    rate: float = 5e-6
    baseline: Baseline = Baseline.GREEDY
    written: Written = Written.CHANCE

    def __post_init__(self) -> None:
        if self.draws < 2 and self.baseline is not Baseline.GREEDY:
            raise ValueError("one draw has no others: say critic.baseline=greedy")


ONCE = Train()


@dataclass(frozen=True)
class A2Recipe:
    """Captions with aligned attention: cross-entropy, then the critic where it is asked for."""

    name: str
    about: str
    data: Scenes | Photos
    model: Model = Model()
    align: Align = Align()
    learn: Learn = Learn()
    train: Train = ONCE
    critic: Critic = Critic()

    def __post_init__(self) -> None:
        own = NAMES.get(self.name)
        if own is not None and getattr(self.data, "name", None) is not own:
            raise ValueError(f"{self.name} is about {own}")

    @property
    def paper(self) -> Mapping[str, Figure]:
        """What is stated for this row."""
        if not isinstance(self.data, Photos) or self.align.masks is not Masks.LEARNED:
            return NO_FIGURES
        return figures(str(self.data.name), self.align.fuse.value, self.critic.epochs > 0)

    def build(self, context: Context) -> "Experiment":
        """The data, the captioner and its stages."""
        from overt.recipes.a2 import building

        return building.build(self, context)


NAMES = {
    "a2-flickr8k": Files.FLICKR8K,
    "a2-flickr30k": Files.FLICKR30K,
    "a2-coco": Files.COCO,
}

# --- the rows

FUSIONS = ("none", "moving-average", "max", "decay", "gate")  # worst to best, in the paper
PLACEBOS = ("random", "shuffled", "constant", "free")
PRESETS = {"paper": 0.035, "lu2021": 0.03}  # with lambda as stated, for norms and not for means
OF_BEAMS = ("critic.written=beams", "critic.baseline=all")  # a critic as Cornia et al. have it
PENALTIES = (0.001, 0.003, 0.01, 0.035, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of figure 4


def rows() -> dict[str, tuple[str, ...]]:
    """What makes a recipe each row of cross-entropy, as `--set` would, by label."""
    return {
        **{name: (f"align.fuse={name}",) for name in FUSIONS},
        **{f"gate-{name}": ("align.fuse=gate", f"align.masks={name}") for name in PLACEBOS},
        **{
            f"gate-{name}": ("align.fuse=gate", f"align.preset={name}", f"align.penalty={weight}")
            for name, weight in PRESETS.items()
        },
    }


def critical(label: str, epochs: int) -> tuple[str, ...]:
    """The changes of a row, and so many epochs of self-critical training after them."""
    return (*rows()[label], f"critic.epochs={epochs}")


# --- the recipes


def a2_scenes() -> A2Recipe:
    """Captions of scenes, where the regions of every word are known. No paper's number.

    Regions tell each other nothing (`model.encoder`), so that a word has to look at what it speaks
    of. `overt table a2-scenes` has every fusion and its placebos.
    """
    return A2Recipe(
        "a2-scenes",
        "captions of scenes, attention aligned by disturbing it and held against the truth",
        Scenes(),
        Model(width=0.25, layers=3, encoder=0),
        Align(penalty=0.01),
        Learn(),
        Train(30, batch=64, rate=1e-3, decay=1e-4, patience=30, save_every=2000, graph=True),
        Critic(rate=1e-4),
    )


def a2_flickr8k() -> A2Recipe:
    """Captions of Flickr8k, cells of a frozen EfficientNet-Lite, 7 x 7. No paper's number.

    The paper is about COCO. Show, Attend and Tell reaches BLEU-4 19.5 with soft attention on
    Flickr8k. The set has a twentieth of COCO's photos: half the width, half the layers, three times
    the dropout. `overt table a2-flickr8k` has every fusion and its placebos.
    """
    return A2Recipe(
        "a2-flickr8k",
        "captions of Flickr8k, attention aligned by disturbing it",
        Photos(Files.FLICKR8K),
        Model(width=0.5, layers=3, dropout=0.3),
        Align(penalty=0.003),
        Learn(smoothing=0.1),
        Train(14, batch=64, rate=1e-3, decay=1e-2, patience=14, save_every=2000, graph=True),
        Critic(rate=1e-4),
    )


def a2_flickr30k() -> A2Recipe:
    """Captions of Flickr30k in Karpathy's splits, with the settings of Flickr8k. No paper's number.

    It has five times the photos: two thirds of the dropout. Not tried; `data.limit` makes it small.
    """
    small = a2_flickr8k()
    return replace(
        small,
        name="a2-flickr30k",
        about="captions of Flickr30k, attention aligned by disturbing it",
        data=Photos(Files.FLICKR30K),
        model=replace(small.model, dropout=0.2),
    )


def a2_coco() -> A2Recipe:
    """Captions of COCO in Karpathy's splits, as in the paper, by default with the gate.

    The paper (Attention-Aligned Transformer for Image Captioning, Table 1) reaches a BLEU-1 of
    78.60 % and a CIDEr of 1.250 with cross-entropy; 81.50 % and 1.339 with self-critical training,
    whose length it does not state: `critic.epochs=20` is our choice. It needs bottom-up features in
    the official files (`data.features`); without them cells of a backbone do. Batches of 10 photos
    are 50 captions, the paper's. A warm-up of "10,00" steps is read as 10,000.
    """
    return A2Recipe(
        "a2-coco",
        "captions of COCO, attention aligned by disturbing it",
        Photos(Files.COCO),
        Model(),
        Align(),
        Learn(Schedule.NOAM),
        Train(epochs=15, batch=10, rate=1.0, decay=0.0, clip=None, patience=5, save_every=5000),
        Critic(batch=50),
    )
