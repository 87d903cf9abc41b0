"""Networks of ours that people can ask: what they read and see, what their answers are called.

A run writes `spoken.json` beside the weights of its network. With it, `overt look` and
`overt serve` can give the network any picture and any text, and say its answer in words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import files
from overt.errors import BadInput, Damaged

if TYPE_CHECKING:
    from torch import nn

    from overt.data.batch import Batch
    from overt.data.vocabulary import Reader

FILE, FORMAT = "spoken.json", "overt spoken 1"


class Sees(StrEnum):
    """What a network is given of a picture."""

    PIXELS = "pixels"  # all of it
    CELLS = "cells"  # what a frozen CNN makes of it, cell by cell
    BOXES = "boxes"  # all of it, and boxes that words may mean
    REGIONS = "regions"  # what a frozen CNN makes of it, under boxes
    CROPS = "crops"  # boxes that were cut out of it, a few pixels each


class Canvas(StrEnum):
    """How a picture is brought to the size that a network sees."""

    CROP = "crop"
    STRETCH = "stretch"


@dataclass(frozen=True)
class Backbone:
    """A frozen CNN that makes what a network sees: its name in recipes, a hash of its weights."""

    name: str
    weights: str


@dataclass(frozen=True)
class Spoken:
    """What it takes to ask a network: which one it is, its answers, its words, its pixels.

    `words` is None for one that does not read words of our own; it may have the `tokenizer` of a
    pretrained model instead, as the library tokenizers writes it. `pixels` (height, width) is None
    for one that does not look. `longest` is how many tokens a captioner writes at most.
    """

    network: str
    answers: tuple[str, ...]
    words: tuple[str, ...] | None = None
    pixels: tuple[int, int] | None = None
    sees: Sees = Sees.PIXELS
    canvas: Canvas = Canvas.CROP
    backbone: Backbone | None = None
    tokenizer: Mapping[str, Any] | None = None
    longest: int | None = None

    @property
    def reads(self) -> bool:
        """Whether it takes a text."""
        return self.words is not None or self.tokenizer is not None

    @property
    def writes(self) -> bool:
        """Whether it describes pictures, so that a text is its answer and need not be given."""
        return self.longest is not None

    @property
    def boxed(self) -> bool:
        """Whether it looks at boxes of a picture."""
        return self.sees in (Sees.BOXES, Sees.REGIONS, Sees.CROPS)


@dataclass(frozen=True)
class Mute:
    """That a network cannot be asked, and why, in the second half of a sentence."""

    why: str


def spoken(
    model: "nn.Module",
    answers: Sequence[str],
    reader: "Reader | None",
    example: Callable[[], "Batch"],
    sees: Sees = Sees.PIXELS,
    canvas: Canvas = Canvas.CROP,
    backbone: Backbone | None = None,
    pixels: tuple[int, int] | None = None,
    longest: int | None = None,
) -> Spoken | Mute | None:
    """How this network is asked; `Mute` where it sees something that people cannot hand to it.

    None is a network that is no network of ours: its folder has to speak for itself. `pixels` is
    needed where the batches have features and no pictures.
    """
    from overt.data.vocabulary import HubTokenizer, Vocabulary

    if type(model).__name__ not in networks():
        return None
    batch = example()
    words = reader.words if isinstance(reader, Vocabulary) else None
    tokenizer = None
    if isinstance(reader, HubTokenizer):
        tokenizer = _plain(reader)
    if batch.features is not None and sees is Sees.PIXELS:
        return Mute("it looks at features that were made elsewhere, by a network that is not here")
    if batch.tokens is not None and words is None and tokenizer is None:
        return Mute("nothing is known of how it reads")
    if batch.images is not None and pixels is None:
        pixels = (int(batch.images.shape[-2]), int(batch.images.shape[-1]))
    if batch.images is None and batch.features is None:
        pixels = None
    return Spoken(
        type(model).__name__,
        tuple(answers),
        words,
        pixels,
        sees,
        canvas,
        backbone,
        tokenizer,
        longest,
    )


def _plain(reader: Any) -> dict[str, Any]:
    """A tokenizer as plain values: what `tokenizer.json` holds."""
    import json

    found: dict[str, Any] = json.loads(reader.tokenizer.backend_tokenizer.to_str())
    return {**found, "padding": None, "truncation": None}


def networks() -> dict[str, Any]:
    """The networks of ours that can be asked, by name."""
    from overt import models
    from overt.recipes.a2.networks import AlignedCaptioner

    known = (
        models.VQA,
        models.ShowAskAttend,
        models.StackedAttention,
        models.HAN,
        models.SmallCNN,
        models.AttentiveCNN,
        models.TextClassifier,
        models.StructuredClassifier,
        models.VGG,
        models.VGGGap,
        models.VGGAttention,
        models.VGGProgressive,
        models.ResNet,
        models.ResNetAttention,
        models.VLBert,
        models.Captioner,
        AlignedCaptioner,
    )
    return {kind.__name__: kind for kind in known}


def beside(known: Spoken | Mute | None) -> dict[str, dict[str, Any]]:
    """The file to write beside a network's weights, by name; none where it speaks for itself."""
    match known:
        case Mute(why=why):
            return {FILE: {"format": FORMAT, "mute": why}}
        case Spoken():
            kept = {n: v for n, v in asdict(known).items() if v is not None}
            return {FILE: {"format": FORMAT, **kept}}
    return {}


def said(folder: Path) -> dict[str, Any]:
    """The values of a folder's file; anything else is `Damaged`, and `Mute` is `BadInput`."""
    path = folder / FILE
    value = files.read_json(path)
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise Damaged(f"{path} is not of the format {FORMAT!r}; run the recipe again.")
    if "mute" in value:
        raise BadInput(
            f"the network in {folder} cannot be asked: {str(value['mute'])[:300]}; `overt report` "
            "shows what its run has seen."
        )
    return value


def read(folder: Path) -> Spoken:
    """What a folder says of how its network is asked; anything else is `Damaged`."""
    path, value = folder / FILE, said(folder)
    try:
        network, answers = value.pop("network"), _names(value.pop("answers"))
        words, pixels = value.pop("words", None), value.pop("pixels", None)
        backbone, tokenizer = value.pop("backbone", None), value.pop("tokenizer", None)
        longest = value.pop("longest", None)
        found = Spoken(
            str(network),
            answers,
            None if words is None else _names(words),
            None if pixels is None else (int(pixels[0]), int(pixels[1])),
            Sees(value.pop("sees", Sees.PIXELS)),
            Canvas(value.pop("canvas", Canvas.CROP)),
            None if backbone is None else Backbone(str(backbone["name"]), str(backbone["weights"])),
            None if tokenizer is None else dict(tokenizer),
            None if longest is None else int(longest),
        )
        if value:
            raise ValueError(f"it says {', '.join(value)} as well")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Damaged(f"{path} cannot be read ({error}); run the recipe again.") from error
    if found.network not in networks():
        raise BadInput(f"{path}: this version of overt has no network {found.network[:60]!r}.")
    return found


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError("names that are no list of texts")
    return tuple(value)
