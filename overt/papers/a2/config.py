"""Attention-Aligned Transformer for Image Captioning: recipes, settings and ablations.

Fei, AAAI 2022. A Transformer captions images. Beside each of its cross-attentions a small network
learns which regions must not be perturbed. The resulting mask is fused into the attention, in
training and at inference. The first stage trains with cross-entropy on human captions; the second,
the critic, with a reward for sampled captions.

The placebos measure what the masks contribute: `random` and `shuffled` masks have the same cost and
no content, `constant` masks are a single number, which changes nothing, and `free` masks have the
same size and parameters but learn from the captions alone, without any perturbation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from overt.experiments.recipe import (
    NO_PUBLISHED_VALUES,
    GeneratedScenes,
    PublishedValue,
    TrainConfig,
    check_data_name,
)
from overt.papers.a2.published import figures


class A2Dataset(StrEnum):
    """Datasets of photos with human captions."""

    FLICKR8K = "flickr8k"
    FLICKR30K = "flickr30k_captions"
    COCO = "coco_captions"


class A2Fusion(Enum):
    """How masks are fused into the attention (eq. 6 to 10); `none` is the plain Transformer."""

    NONE = "none"
    MAX = "max"
    MOVING_AVERAGE = "moving-average"
    DECAY = "decay"
    GATE = "gate"


class A2Preset(Enum):
    """Choices the paper leaves open: `ours`, the `paper` as printed, or the code of Lu et al.

    `enhanced-first` is ours, but the enhanced weights are normalized before the fusion and not
    after it: only then does max pooling differ from the enhanced weights (F5).
    """

    OURS = "ours"
    ENHANCED_FIRST = "enhanced-first"
    PAPER = "paper"
    LU2021 = "lu2021"


class A2MaskSource(Enum):
    """Where masks come from: `learned` by perturbation as in the paper; the others are placebos."""

    LEARNED = "learned"
    RANDOM = "random"
    SHUFFLED = "shuffled"
    CONSTANT = "constant"
    FREE = "free"


class A2Baseline(Enum):
    """Reward baseline: the `greedy` caption, or the mean reward of the `others` or of `all`."""

    GREEDY = "greedy"
    OTHERS = "others"
    ALL = "all"


class A2Sampling(Enum):
    """How rewarded captions are generated: sampled by `chance`, or the best `beams`."""

    CHANCE = "chance"
    BEAMS = "beams"


class A2Schedule(Enum):
    """Learning rate: warm-up and a `cosine`, or `noam` of "Attention is all you need"."""

    COSINE = "cosine"
    NOAM = "noam"


@dataclass(frozen=True)
class A2Scenes(GeneratedScenes):
    """Synthetic scenes with five captions each; the regions of each word are known.

    `world` is the seed of the dataset and `regions` the number of proposed regions per scene.
    `train`, `val` and `test` are the numbers of scenes per split, `limit` caps all three, and
    `size` is the side of an image in pixels.
    """

    train: int = 6000
    val: int = 500
    test: int = 1000
    regions: int = field(default=16, metadata={"low": 8, "high": 100})


@dataclass(frozen=True)
class A2Photos:
    """Photos with captions; `limit` caps the photos of every split.

    `backbone` encodes each photo, resized to `size` pixels, into a grid of cells, once.
    `features` is a folder to use instead: a cache of such cells, or bottom-up features in the
    official files. Words with fewer than `minimum` occurrences in the training split are
    unknown; captions are cut after `longest` words.
    """

    name: A2Dataset
    limit: int | None = None
    size: int = field(default=224, metadata={"low": 32, "high": 1024})
    backbone: str = "efficientnet-lite0"
    features: str | None = None
    minimum: int = field(default=5, metadata={"low": 1})
    longest: int = field(default=20, metadata={"low": 1})


@dataclass(frozen=True)
class A2Model:
    """The Transformer; with `width` 1 it has 512 features and feed-forward layers of 2048.

    `layers` is the number of decoder layers and `encoder` that of encoder layers over the
    regions, the same number by default. Every layer has `heads` heads; `dropout` is a rate from
    0 to 1.
    """

    width: float = 1.0
    layers: int = field(default=6, metadata={"low": 1})
    encoder: int | None = field(default=None, metadata={"low": 0, "high": 100})
    heads: int = 8
    dropout: float = 0.1


@dataclass(frozen=True)
class A2Align:
    """How the attention is aligned.

    `penalty` is lambda of eq. 4, applied to the mean of squares with our preset. Larger values
    leave every mask at 1; `overt table a2-fig4` shows which do. `rate` is the learning rate of
    the mask networks.
    """

    fuse: A2Fusion = A2Fusion.GATE
    preset: A2Preset = A2Preset.OURS
    masks: A2MaskSource = A2MaskSource.LEARNED
    penalty: float = 0.001
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.fuse is A2Fusion.NONE and self.masks is not A2MaskSource.LEARNED:
            raise ValueError("align.fuse=none has no masks: align.masks must be learned")
        if self.preset is A2Preset.LU2021 and self.fuse not in (A2Fusion.GATE, A2Fusion.NONE):
            raise ValueError("align.preset=lu2021 needs align.fuse=gate")

    @property
    def perturbs(self) -> bool:
        """Return whether masks learn by perturbing attention: a second decoder pass per step."""
        return self.fuse is not A2Fusion.NONE and self.masks in (
            A2MaskSource.LEARNED,
            A2MaskSource.SHUFFLED,
        )


@dataclass(frozen=True)
class A2Learn:
    """Cross-entropy training; `warmup` is the number of steps for `noam`, which then sets the rate.

    `smoothing` is the label smoothing: the share of the target spread evenly over all words.
    """

    schedule: A2Schedule = A2Schedule.COSINE
    warmup: int = field(default=10_000, metadata={"low": 1, "high": 10_000_000})
    smoothing: float = field(default=0.0, metadata={"low": 0, "high": 0.9})


@dataclass(frozen=True)
class A2Critic:
    """Self-critical training for `epochs` passes over the training images, none by default.

    `steps` ends it earlier, a step takes `batch` images, and `rate` is its constant learning
    rate. `draws` captions per image are generated and rewarded by CIDEr-D: sampled at random,
    as in Rennie et al., or the best beams, as in Cornia et al. with `baseline=all`. The paper
    does not say which.
    """

    epochs: int = field(default=0, metadata={"low": 0})
    steps: int | None = None
    batch: int = 64
    draws: int = field(default=5, metadata={"low": 1})
    rate: float = 5e-6
    baseline: A2Baseline = A2Baseline.GREEDY
    written: A2Sampling = A2Sampling.CHANCE

    def __post_init__(self) -> None:
        if self.draws < 2 and self.baseline is not A2Baseline.GREEDY:
            raise ValueError(
                "critic.draws=1 needs critic.baseline=greedy: there are no other draws"
            )


ONCE = TrainConfig()


@dataclass(frozen=True)
class A2Recipe:
    """Captioning with aligned attention: cross-entropy, then the critic for `critic.epochs`."""

    name: str
    about: str
    data: A2Scenes | A2Photos
    model: A2Model = A2Model()
    align: A2Align = A2Align()
    learn: A2Learn = A2Learn()
    train: TrainConfig = ONCE
    critic: A2Critic = A2Critic()

    def __post_init__(self) -> None:
        check_data_name(self.name, self.data, NAMES)

    @property
    def paper(self) -> Mapping[str, PublishedValue]:
        """Return the published numbers for this row."""
        if not isinstance(self.data, A2Photos) or self.align.masks is not A2MaskSource.LEARNED:
            return NO_PUBLISHED_VALUES
        return figures(str(self.data.name), self.align.fuse.value, self.critic.epochs > 0)


NAMES = {
    "a2-flickr8k": A2Dataset.FLICKR8K,
    "a2-flickr30k": A2Dataset.FLICKR30K,
    "a2-coco": A2Dataset.COCO,
}

# --- rows of the tables

FUSIONS = ("none", "moving-average", "max", "decay", "gate")  # worst to best, in the paper
PLACEBOS = ("random", "shuffled", "constant", "free")
PRESETS = {"paper": 0.035, "lu2021": 0.03}  # lambda as published, for norms instead of means
BEAM_CRITIC = ("critic.written=beams", "critic.baseline=all")  # the critic of Cornia et al.
PENALTIES = (0.001, 0.003, 0.01, 0.035, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of figure 4


def table_rows() -> dict[str, tuple[str, ...]]:
    """Return the setting changes of each cross-entropy row, by label."""
    return {
        **{name: (f"align.fuse={name}",) for name in FUSIONS},
        "max-enhanced": ("align.fuse=max", "align.preset=enhanced-first"),
        **{f"gate-{name}": ("align.fuse=gate", f"align.masks={name}") for name in PLACEBOS},
        **{
            f"gate-{name}": ("align.fuse=gate", f"align.preset={name}", f"align.penalty={weight}")
            for name, weight in PRESETS.items()
        },
    }


def with_critic(label: str, epochs: int) -> tuple[str, ...]:
    """Return the changes of a row, followed by that many epochs of self-critical training."""
    return (*table_rows()[label], f"critic.epochs={epochs}")


# --- recipes


def a2_scenes() -> A2Recipe:
    """Captions of scenes, where the regions of every word are known. No published number.

    Regions do not attend to each other (`model.encoder` is 0), so a word has to attend to its
    own region. `overt table a2-scenes` has every fusion and its placebos.
    """
    return A2Recipe(
        "a2-scenes",
        "captions of scenes, attention aligned by perturbation and compared with the ground truth",
        A2Scenes(),
        A2Model(width=0.25, layers=3, encoder=0),
        A2Align(penalty=0.01),
        A2Learn(),
        TrainConfig(30, batch=64, rate=1e-3, decay=1e-4, patience=30, save_every=2000, graph=True),
        A2Critic(rate=1e-4),
    )


def a2_flickr8k() -> A2Recipe:
    """Captions of Flickr8k from the 7 x 7 cells of a frozen EfficientNet-Lite. No published number.

    The paper uses COCO. Show, Attend and Tell reaches BLEU-4 19.5 with soft attention on
    Flickr8k. The dataset has a twentieth of COCO's photos: half the width, half the layers,
    three times the dropout. `overt table a2-flickr8k` has every fusion and its placebos.
    """
    return A2Recipe(
        "a2-flickr8k",
        "captions of Flickr8k, attention aligned by perturbation",
        A2Photos(A2Dataset.FLICKR8K),
        A2Model(width=0.5, layers=3, dropout=0.3),
        A2Align(penalty=0.003),
        A2Learn(smoothing=0.1),
        TrainConfig(14, batch=64, rate=1e-3, decay=1e-2, patience=14, save_every=2000, graph=True),
        A2Critic(rate=1e-4),
    )


def a2_flickr30k() -> A2Recipe:
    """Captions of Flickr30k, Karpathy's splits, with the settings of Flickr8k. No published number.

    It has five times the photos and two thirds of the dropout. Not run yet; `data.limit` makes
    it small.
    """
    small = a2_flickr8k()
    return replace(
        small,
        name="a2-flickr30k",
        about="captions of Flickr30k, attention aligned by perturbation",
        data=A2Photos(A2Dataset.FLICKR30K),
        model=replace(small.model, dropout=0.2),
    )


def a2_coco() -> A2Recipe:
    """Captions of COCO in Karpathy's splits, as in the paper, by default with the gate.

    The paper (Attention-Aligned Transformer for Image Captioning, Table 1) reports a BLEU-1 of
    78.60 % and a CIDEr of 1.250 with cross-entropy; 81.50 % and 1.339 with self-critical
    training, whose length it does not state: `critic.epochs=20` is our choice. It uses
    bottom-up features in the official files (`data.features`); without them the cells of a
    backbone are used. Batches of 10 photos are 50 captions, as in the paper. A warm-up of
    "10,00" steps is read as 10,000.
    """
    return A2Recipe(
        "a2-coco",
        "captions of COCO, attention aligned by perturbation",
        A2Photos(A2Dataset.COCO),
        A2Model(),
        A2Align(),
        A2Learn(A2Schedule.NOAM),
        TrainConfig(
            epochs=15, batch=10, rate=1.0, decay=0.0, clip=None, patience=5, save_every=5000
        ),
        A2Critic(batch=50),
    )


RECIPES = (a2_scenes, a2_flickr8k, a2_flickr30k, a2_coco)
