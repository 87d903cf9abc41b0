"""From a picture, a text and boxes to the batch that a network of ours takes."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.asking import Box, Given
from overt.recipes.opening import Subject
from overt.recipes.spoken import Backbone, Canvas, Sees, Spoken

if TYPE_CHECKING:
    from torch import Tensor

    from overt.data.batch import Batch
    from overt.data.vocabulary import Reader
    from overt.models.photos.frozen import Frozen

SIDE = 4  # boxes of a picture's side, where a person draws none
BETWEEN = (" / ", "\n")  # stand between two captions; the first of them in galleries
PAIRED = "VLBert"  # reads one caption or two, between marks


def batch_of(subject: Subject, given: Given) -> "Batch":
    """What is given as a batch of one, refused in a sentence where the network cannot take it."""
    import torch

    from overt.data.batch import Batch

    known = subject.spoken
    assert known is not None
    _check(subject.name, known, given)
    parts: dict[str, Any] = {}
    if known.pixels is not None:
        parts |= _seen(known, given)
    if known.reads and given.text is not None:
        parts |= _read(known, given.text)
    device = next(subject.model.parameters(), torch.zeros(())).device
    return Batch(("asked",), **parts).to(device)


def _check(name: str, known: Spoken, given: Given) -> None:
    wants = (
        ("picture", known.pixels is not None, known.pixels is not None, given.photo is not None),
        ("text", known.reads, known.reads and not known.writes, given.text is not None),
    )
    for what, takes, needs, there in wants:
        if needs and not there:
            raise BadInput(f"{name} wants a {what}; give it one.")
        if there and not takes:
            raise BadInput(f"{name} takes no {what}; leave it out.")
    if given.boxes and not known.boxed:
        raise BadInput(f"{name} looks at no boxes; leave them out.")


# --- pictures


def _seen(known: Spoken, given: Given) -> dict[str, Any]:
    """The picture as the network sees it: pixels, features of a frozen CNN, boxes."""
    import torch

    from overt.data.images import crop, prepare, stretch

    assert known.pixels is not None
    how = stretch if known.canvas is Canvas.STRETCH else crop
    pixels, geometry = prepare(given.photo, known.pixels, how)
    images = pixels[None]
    found: dict[str, Any] = {"geometry": geometry}
    if known.boxed:
        height, width = given.photo.shape[:2]
        shares = torch.tensor(given.boxes or tuple(tiles(SIDE)))
        boxes = (shares * torch.tensor([width, height, width, height]))[None].float()
        found |= {"boxes": boxes, "region_mask": torch.ones(boxes.shape[:2], dtype=torch.bool)}
    match known.sees:
        case Sees.PIXELS | Sees.BOXES:
            return {**found, "images": images}
        case Sees.CELLS:
            return {**found, "features": _backbone(known).cells(images).float()}
        case Sees.REGIONS:
            return {**found, "features": _under(_backbone(known), images, geometry, found["boxes"])}
        case Sees.CROPS:
            from overt.models.vlbert.regions import on_canvas
            from overt.recipes.a2.data import crops

            size = torch.tensor([*images.shape[:1:-1]] * 2)
            return {**found, "features": crops(images, on_canvas(found["boxes"], geometry) * size)}


def tiles(side: int) -> list[Box]:
    """A picture cut into `side` x `side` boxes, as shares of its width and height.

    >>> tiles(2)[1]
    (0.5, 0.0, 1.0, 0.5)
    """
    steps = [number / side for number in range(side + 1)]
    return [
        (left, top, right, bottom)
        for top, bottom in pairwise(steps)
        for left, right in pairwise(steps)
    ]


def _under(net: "Frozen", images: "Tensor", geometry: Any, boxes: "Tensor") -> "Tensor":
    """The mean of a frozen CNN's cells under each box."""
    from overt.models.vlbert.regions import box_means

    cells = net.cells(images).float()
    side = round(cells.shape[1] ** 0.5)
    return box_means(cells.mT.unflatten(2, (side, side)), boxes, geometry)


def _backbone(known: Spoken) -> "Frozen":
    """The frozen CNN that a network was trained on, refused where another goes by its name."""
    assert known.backbone is not None
    found = _opened(known.backbone)
    if found.weights != known.backbone.weights:
        raise BadInput(
            f"this network was trained on what {known.backbone.name} makes of pictures, and the "
            f"{known.backbone.name} that is here has other weights."
        )
    return found


@lru_cache(maxsize=2)
def _opened(backbone: Backbone) -> "Frozen":
    from overt.recipes.han.features import frozen

    return frozen(backbone.name)


# --- texts


def reader_of(known: Spoken) -> "Reader":
    """What reads for a network: its own words, or the tokenizer of a pretrained model."""
    import json

    from overt.data.vocabulary import HubTokenizer, Vocabulary

    if known.words is not None:
        return Vocabulary(known.words)
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_str(json.dumps(known.tokenizer))
    return HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


def _read(known: Spoken, text: str) -> dict[str, Any]:
    from overt.data.vocabulary import pad
    from overt.geometry import TextGeometry

    reader = reader_of(known)
    if known.network == PAIRED:
        ids, spans = _captions(reader, text)
    else:
        ids, spans = reader.read(text)
    if not any(end > start for start, end in spans):
        raise BadInput("the text has no words; there is nothing in it to read.")
    tokens, present, ranges = pad([ids], [spans], reader.padding)
    return {"tokens": tokens, "token_mask": present, "text": TextGeometry((text,), ranges)}


def _captions(reader: "Reader", text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """One caption or two between their marks, with the characters of every token in the whole."""
    from overt.data.vocabulary import ABSENT, BEGIN, END, Vocabulary

    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for number, (start, caption) in enumerate(divided(text)):
        found, where = reader.read(caption)
        if isinstance(reader, Vocabulary):  # the tokenizers of others set their own marks
            found, where = [BEGIN, *found, END], [ABSENT, *where, ABSENT]
        skip = 1 if number else 0  # the beginning is said once
        ids += found[skip:]
        moved = [(a + start, b + start) if a >= 0 else ABSENT for a, b in where]
        spans += moved[skip:]
    return ids, spans


def divided(text: str) -> Sequence[tuple[int, str]]:
    """One caption, or two that stand in two lines or have ' / ' between them: where each begins.

    >>> divided("a dog / a cat")
    [(0, 'a dog'), (8, 'a cat')]
    """
    cuts = sorted((text.find(sign), len(sign)) for sign in BETWEEN if sign in text.strip())
    if not cuts:
        return [(0, text)]
    at, wide = cuts[0]
    first, second = text[:at], text[at + wide :]
    if any(sign in second.strip() for sign in BETWEEN):
        raise BadInput("there are more than two captions; give one, or two of them, a line each.")
    if not first.strip() or not second.strip():
        return [(0, text)]
    return [(0, first), (at + wide, second)]
