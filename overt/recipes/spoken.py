"""Networks of ours that people can ask: how they read, what their answers are called.

A run writes `spoken.json` beside the weights of its network. With it, `overt look` and
`overt serve` can give the network any picture and any text, and say its answer in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import files
from overt.errors import BadInput, Damaged

if TYPE_CHECKING:
    from torch import nn

    from overt.data.batch import Batch
    from overt.data.vocabulary import Reader

FILE, FORMAT = "spoken.json", "overt spoken 1"


@dataclass(frozen=True)
class Spoken:
    """What it takes to ask a network: which one it is, its answers, its words, its pixels.

    `words` is None for one that does not read, `pixels` (height, width) for one that does not look.
    """

    network: str
    answers: tuple[str, ...]
    words: tuple[str, ...] | None = None
    pixels: tuple[int, int] | None = None


def spoken(
    model: "nn.Module",
    answers: Sequence[str],
    reader: "Reader | None",
    example: Callable[[], "Batch"],
) -> Spoken | None:
    """How this network is asked; None where it sees something that people cannot hand to it."""
    from overt.data.vocabulary import Vocabulary

    if type(model).__name__ not in networks():
        return None
    batch = example()
    words = reader.words if isinstance(reader, Vocabulary) else None
    if batch.features is not None or (batch.tokens is not None and words is None):
        return None
    pixels = None
    if batch.images is not None:
        pixels = (int(batch.images.shape[-2]), int(batch.images.shape[-1]))
    return Spoken(type(model).__name__, tuple(answers), words, pixels)


def networks() -> dict[str, Any]:
    """The networks of ours that can be asked, by name."""
    from overt import models

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
    )
    return {kind.__name__: kind for kind in known}


def beside(known: Spoken | None) -> dict[str, dict[str, Any]]:
    """The file to write beside a network's weights, by name; none where it cannot be asked."""
    return {} if known is None else {FILE: {"format": FORMAT, **asdict(known)}}


def read(folder: Path) -> Spoken:
    """What a folder says of how its network is asked; anything else is `Damaged`."""
    path = folder / FILE
    value = files.read_json(path)
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise Damaged(f"{path} is not of the format {FORMAT!r}; run the recipe again.")
    try:
        network, answers = value.pop("network"), _names(value.pop("answers"))
        words, pixels = value.pop("words", None), value.pop("pixels", None)
        found = Spoken(
            str(network),
            answers,
            None if words is None else _names(words),
            None if pixels is None else (int(pixels[0]), int(pixels[1])),
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
