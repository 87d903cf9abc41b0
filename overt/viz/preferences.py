"""Preference study: a page on which people choose between two captions per image.

The page is one file without network requests. Which caption is whose is only in a separate key
file: left and right are random per pair. Judges save their answers as a file, which
`read_judgements` reads with the key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from overt.errors import CorruptFileError, UserError
from overt.io import read_json, write_json, write_text
from overt.viz.gallery_sample import GallerySample
from overt.viz.templates import data_uri, encode_image, render_template

FORMAT = "overt judgements 1"
ASPECTS = {  # of Table 4, with their questions
    "naturalness": "Which is better English?",
    "relevance": "Which fits the picture better?",
    "richness": "Which tells more of what matters?",
}
LEFT, NEITHER, RIGHT = "left", "neither", "right"
MAX_SIDE = 420  # pixels


@dataclass(frozen=True, eq=False)
class CaptionPair:
    """An image with the captions of two models.

    Args:
        id: identifier of the pair.
        image: photo.
        first: caption of the first model.
        second: caption of the second model.

    Example:
        >>> photo = np.zeros((8, 8, 3), np.uint8)
        >>> CaptionPair("img-1", photo, first="a dog", second="a brown dog").second
        'a brown dog'
    """

    id: str
    image: UInt8[np.ndarray, "y x 3"]
    first: str
    second: str


def caption_pairs(
    first: Sequence[GallerySample], second: Sequence[GallerySample]
) -> list[CaptionPair]:
    """Pair the captions of two galleries, for the images that both have.

    Args:
        first: gallery of the first model, as `load_gallery` reads it.
        second: gallery of the second model.

    Returns:
        One pair per shared image.

    Example:
        >>> photo = np.zeros((8, 8, 3), np.uint8)
        >>> first = [GallerySample(id="img-1", image=photo, prediction="a dog")]
        >>> second = [GallerySample(id="img-1", image=photo, prediction="a brown dog")]
        >>> [(pair.first, pair.second) for pair in caption_pairs(first, second)]
        [('a dog', 'a brown dog')]
    """
    others = {one.id: one for one in second}
    return [
        CaptionPair(one.id, one.image, one.prediction, others[one.id].prediction)
        for one in first
        if one.image is not None and one.id in others
    ]


def write_preference_page(
    page: Path,
    key: Path,
    pairs: Sequence[CaptionPair],
    aspects: Mapping[str, str] = ASPECTS,
    seed: int = 0,
) -> None:
    """Write the page for judges, and the key with the side of the first model in each pair.

    Pairs with equal captions are left out. Order and sides are random.

    Args:
        page: .html file to write.
        key: .json file to write; keep it from the judges.
        pairs: captions to compare.
        aspects: question of each aspect, by name.
        seed: seed of order and sides.

    Raises:
        UserError: if ids repeat, no captions differ, or there is no question.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> pair = CaptionPair("img-1", np.zeros((8, 8, 3), np.uint8), "a dog", "a brown dog")
        >>> with TemporaryDirectory() as folder:
        ...     page, key = Path(folder, "page.html"), Path(folder, "key.json")
        ...     write_preference_page(page, key, [pair])
        ...     sorted(file.name for file in Path(folder).iterdir())
        ['key.json', 'page.html']
    """
    if len({pair.id for pair in pairs}) != len(pairs):
        raise UserError("Pairs need unique ids.")
    kept = [pair for pair in pairs if pair.first.strip() != pair.second.strip()]
    if not kept:
        raise UserError("No pair has different captions: there is nothing to compare.")
    if not aspects:
        raise UserError("aspects is empty: give at least one question.")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(kept), generator=generator).tolist()
    turned = (torch.rand(len(kept), generator=generator) < 0.5).tolist()
    cards = [_card(kept[at], turned[at]) for at in order]
    questions = {_escaped(name): _escaped(question) for name, question in aspects.items()}
    answers = (LEFT, NEITHER, RIGHT)
    write_text(
        page,
        render_template(
            "preferences.html.jinja", cards=cards, aspects=questions, answers=answers, format=FORMAT
        ),
    )
    sides = {kept[at].id: RIGHT if turned[at] else LEFT for at in order}
    write_json(key, {"format": FORMAT, "aspects": list(aspects), "first": sides})


def read_judgements(key: Path, answers: Sequence[Path]) -> dict[str, Float[Tensor, "n j"]]:
    """Read the answers of judges, as preferences for the second model.

    Args:
        key: key file of the page.
        answers: answer file of each judge.

    Returns:
        For each aspect a tensor (pairs, judges): 1 prefers the second model, -1 the first, 0
        neither, NaN is unanswered. `overt.metrics.preferred` takes it.

    Raises:
        UserError: if an answer does not belong to the key.
        CorruptFileError: if a file has another format.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> pair = CaptionPair("img-1", np.zeros((8, 8, 3), np.uint8), "a dog", "a brown dog")
        >>> answer = {"pair": "img-1", "aspect": "richness", "answer": "neither"}
        >>> with TemporaryDirectory() as folder:
        ...     key, judge = Path(folder, "key.json"), Path(folder, "judge.json")
        ...     write_preference_page(Path(folder, "page.html"), key, [pair])
        ...     write_json(judge, {"format": FORMAT, "answers": [answer]})
        ...     read_judgements(key, [judge])
        {'naturalness': tensor([[nan]]), 'relevance': tensor([[nan]]), 'richness': tensor([[0.]])}
    """
    known = _read_file(key, "first")
    sides, aspects = known["first"], known["aspects"]
    found = {name: torch.full((len(sides), len(answers)), torch.nan) for name in aspects}
    places = {name: at for at, name in enumerate(sides)}
    for judge, path in enumerate(answers):
        for entry in _read_file(path, "answers")["answers"]:
            match entry:
                case {"pair": str(pair), "aspect": str(aspect), "answer": str(answer)} if (
                    pair in places and aspect in found and answer in (LEFT, NEITHER, RIGHT)
                ):
                    number = 0.0 if answer == NEITHER else (-1.0 if answer == sides[pair] else 1.0)
                    found[aspect][places[pair], judge] = number
                case _:
                    raise UserError(
                        f"{path} has an answer that does not belong to {key}: {entry!r:.80}."
                    )
    return found


def _read_file(path: Path, name: str) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT or name not in value:
        raise CorruptFileError(
            f"{path} is not a file of {'keys' if name == 'first' else 'answers'} ({FORMAT!r})."
        )
    return value


def _card(pair: CaptionPair, turned: bool) -> dict[str, str]:
    left, right = (pair.second, pair.first) if turned else (pair.first, pair.second)
    picture = Image.fromarray(pair.image)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    photo = data_uri(encode_image(picture, "jpeg", quality=80), "jpeg")
    texts = {"id": pair.id, "left": left, "right": right}
    return {"photo": photo, **{name: _escaped(text) for name, text in texts.items()}}


def _escaped(text: str) -> Markup:
    return Markup(escape(text))
