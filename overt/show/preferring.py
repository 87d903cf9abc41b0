"""A page on which people say which of two captions of a picture they prefer, and what they said.

Which caption is whose is in a file apart, the key, and not on the page: left and right are drawn
for every pair. The page is one file without any request to a host; a judge opens it, answers, and
saves the answers as a file, which `read_judgements` reads with the key.
"""

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from overt.errors import BadInput, Damaged
from overt.files import read_json, write_json, write_text
from overt.show.cards import data_uri
from overt.show.page import POLICY
from overt.show.sample import Sample

FORMAT = "overt judgements 1"
ASPECTS = {  # of Table 4, with what they ask
    "naturalness": "Which is better English?",
    "relevance": "Which fits the picture better?",
    "richness": "Which tells more of what matters?",
}
LEFT, NEITHER, RIGHT = "left", "neither", "right"
SIDE = 420  # pixels of a photo's longer side


@dataclass(frozen=True, eq=False)
class Pair:
    """A picture, and what two captioners say of it."""

    id: str
    image: UInt8[np.ndarray, "y x 3"]
    first: str
    second: str


def pairs_of(first: Sequence[Sample], second: Sequence[Sample]) -> list[Pair]:
    """Pairs from the galleries of two runs: the pictures that both describe.

    `load_gallery(run)` reads one.
    """
    others = {one.id: one for one in second}
    return [
        Pair(one.id, one.image, one.prediction, others[one.id].prediction)
        for one in first
        if one.image is not None and one.id in others
    ]


def preference_page(
    page: Path,
    key: Path,
    pairs: Sequence[Pair],
    aspects: Mapping[str, str] = ASPECTS,
    seed: int = 0,
) -> None:
    """Write the page for judges, and the key that says on which side the first captioner stands.

    Pairs that say the same are left out: there is nothing to prefer. Pairs come in an order drawn
    by `seed`, as sides are.
    """
    if len({pair.id for pair in pairs}) != len(pairs):
        raise BadInput("Every pair needs an id of its own.")
    kept = [pair for pair in pairs if pair.first.strip() != pair.second.strip()]
    if not kept:
        raise BadInput("No two captions differ, so there is nothing to prefer.")
    if not aspects:
        raise BadInput("There is no question to ask about the pairs.")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(kept), generator=generator).tolist()
    turned = (torch.rand(len(kept), generator=generator) < 0.5).tolist()
    cards = "\n".join(_card(kept[at], turned[at], aspects) for at in order)
    write_text(page, _PAGE.format(policy=POLICY, style=_STYLE, cards=cards, script=_SCRIPT))
    sides = {kept[at].id: RIGHT if turned[at] else LEFT for at in order}
    write_json(key, {"format": FORMAT, "aspects": list(aspects), "first": sides})


def read_judgements(key: Path, answers: Sequence[Path]) -> dict[str, Float[Tensor, "n j"]]:
    """What judges said, by aspect: 1 where the second is preferred, -1 the first, 0 neither.

    Rows are the pairs of the key, columns the judges; NaN where a judge left a question out. For
    `overt.measure.preferred`.
    """
    known = _checked(key, "first")
    sides, aspects = known["first"], known["aspects"]
    found = {name: torch.full((len(sides), len(answers)), torch.nan) for name in aspects}
    places = {name: at for at, name in enumerate(sides)}
    for judge, path in enumerate(answers):
        for entry in _checked(path, "answers")["answers"]:
            match entry:
                case {"pair": str(pair), "aspect": str(aspect), "answer": str(answer)} if (
                    pair in places and aspect in found and answer in (LEFT, NEITHER, RIGHT)
                ):
                    number = 0.0 if answer == NEITHER else (-1.0 if answer == sides[pair] else 1.0)
                    found[aspect][places[pair], judge] = number
                case _:
                    raise BadInput(f"{path} answers what {key} does not ask: {entry!r:.80}.")
    return found


def _checked(path: Path, name: str) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT or name not in value:
        raise Damaged(f"{path} holds no {'key' if name == 'first' else 'answers'} ({FORMAT!r}).")
    return value


def _card(pair: Pair, turned: bool, aspects: Mapping[str, str]) -> str:
    left, right = (pair.second, pair.first) if turned else (pair.first, pair.second)
    name = html.escape(pair.id, quote=True)
    asked = "\n".join(
        f"<fieldset><legend>{html.escape(question)}</legend>"
        + "".join(
            f'<label><input type="radio" name="{html.escape(f"{aspect} {pair.id}", quote=True)}" '
            f'data-pair="{name}" data-aspect="{html.escape(aspect, quote=True)}" '
            f'value="{answer}">{answer}</label>'
            for answer in (LEFT, NEITHER, RIGHT)
        )
        + "</fieldset>"
        for aspect, question in aspects.items()
    )
    return (
        f'<section><img alt="the picture" src="{_photo(pair.image)}">'
        f'<div class="said"><p><b>left</b> {html.escape(left)}</p>'
        f"<p><b>right</b> {html.escape(right)}</p></div>{asked}</section>"
    )


def _photo(image: UInt8[np.ndarray, "y x 3"]) -> str:
    picture = Image.fromarray(image)
    picture.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", quality=80)
    return data_uri(stream.getvalue(), "jpeg")


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; color: #1d1d1f }
section { border-top: 1px solid #ccc; padding: 1.5rem 0 }
img { max-width: 100%; border-radius: 4px }
.said { display: flex; gap: 2rem } .said p { flex: 1; margin: .5rem 0 }
.said b { display: block; color: #6e6e74; font-weight: 600 }
fieldset { border: 0; padding: .25rem 0; display: flex; gap: 1.25rem; flex-wrap: wrap }
legend { float: left; min-width: 18rem } label { cursor: pointer }
button { font: inherit; padding: .5rem 1rem } #done { position: sticky; top: 0; background: #fff }
"""

_SCRIPT = """
const chosen = () => [...document.querySelectorAll("input:checked")];
const rest = document.querySelector("#rest");
const count = () => {
  const asked = new Set([...document.querySelectorAll("input")].map((one) => one.name)).size;
  rest.textContent = `${chosen().length} of ${asked} answered`;
};
document.addEventListener("change", count);
count();
document.querySelector("#save").addEventListener("click", () => {
  const answers = chosen().map((one) => ({
    pair: one.dataset.pair, aspect: one.dataset.aspect, answer: one.value,
  }));
  const text = JSON.stringify({ format: FORMAT, answers });
  const link = document.createElement("a");
  link.href = "data:application/json;charset=utf-8," + encodeURIComponent(text);
  link.download = "answers.json";
  link.click();
});
""".replace("FORMAT", json.dumps(FORMAT))

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Which caption is better?</title><style>{style}</style></head>
<body><h1>Which caption is better?</h1>
<p>Look at each picture and at the two captions below it, and say which is better, or neither. Leave
out what you cannot judge. Answers stay in this page until you save them.</p>
<p id="done"><button id="save">Save the answers</button> <span id="rest"></span></p>
{cards}
<script>{script}</script></body></html>
"""
