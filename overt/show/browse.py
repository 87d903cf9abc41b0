"""A page to look around in: choose layer, head and query, and see where they look.

The page is one file that asks nobody for anything. It holds the weights themselves, in sixteen bits
each; what would make it too large is left out, and it says so.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from overt.attention import Layout, Span
from overt.geometry import PixelGeometry, RegionGeometry
from overt.show.cards import data_uri, scale_css, under_css
from overt.show.look import marked, white_scale
from overt.show.overlay import PLAIN, colour_table, opacities
from overt.show.page import POLICY
from overt.show.panel import (
    Choice,
    Panel,
    boxed,
    geometry,
    grids,
    is_hard,
    others,
    positions,
    texts,
)
from overt.show.text import pieces

MOST_WEIGHTS = 6_000_000  # of one panel, two bytes each: 12 layers and heads of 200 tokens
SIDE = 900  # pixels of the longer side of a photo


def page(
    panels: Sequence[Panel],
    choices: Sequence[Choice],
    title: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The page about these panels as text, opened at the choices."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("overt.show", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    photos = Photos()
    data = told(panels, choices, photos)
    text = environment.get_template("look.html.jinja").render(
        policy=POLICY,
        title=title or (panels[0].title if panels else "Nothing to see"),
        notes=list(notes),
        data=data,
        photos=photos.addresses,
        scale=scale_css(),
        under=under_css(),
    )
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is not text


def told(
    panels: Sequence[Panel],
    choices: Sequence[Choice],
    photos: "Photos",
    most: int = MOST_WEIGHTS,
) -> dict[str, Any]:
    """Panels as plain values, for the script that draws them; photos go into `photos`."""
    pairs = zip(panels, choices, strict=True)
    shown = [described(*fitted(one, choice, most), photos) for one, choice in pairs]
    return {"panels": shown, "heat": _heat(), "white": _bytes(white_scale())}


class Photos:
    """The photos of a page, each once, as addresses that need no network.

    Large ones are made smaller. `lossless` keeps every pixel of the others as it is.
    """

    def __init__(self, lossless: bool = False) -> None:
        self.addresses: list[str] = []
        self.kind = "png" if lossless else "jpeg"
        self._known: dict[bytes, int] = {}

    def number(self, photo: UInt8[np.ndarray, "y x 3"]) -> int:
        """The place of a photo in the list."""
        key = photo.tobytes()
        if key not in self._known:
            picture = Image.fromarray(photo)
            picture.thumbnail((SIDE, SIDE))
            stream = io.BytesIO()
            picture.save(stream, format=self.kind.upper(), quality=88)
            self._known[key] = len(self.addresses)
            self.addresses.append(data_uri(stream.getvalue(), self.kind))
        return self._known[key]


def fitted(shown: Panel, choice: Choice, most: int = MOST_WEIGHTS) -> tuple[Panel, Choice]:
    """A panel with at most so many weights: heads fused first, then one layer."""
    size = shown.attention.values[0].numel()
    if size <= most:
        return shown, choice
    told = f"The weights of all heads would be {size:,} numbers"
    shown = replace(
        shown,
        attention=shown.attention.over_heads(),
        about=f"{shown.about} {told}: this page has the mean of the heads.".strip(),
    )
    choice = replace(choice, head=None)
    if shown.attention.values[0].numel() > most:
        shown = replace(
            shown,
            attention=shown.attention.layer(choice.layer),
            layers=(shown.layers[choice.layer],),
            about=f"{shown.about} Of the layers it has {shown.layers[choice.layer]} alone.",
        )
        choice = replace(choice, layer=0)
    return shown, choice


def described(shown: Panel, choice: Choice, photos: Photos) -> dict[str, Any]:
    """A panel as plain values, for the page's script."""
    weights = shown.attention.weights[0].float().numpy()
    return {
        "title": shown.title,
        "about": shown.about,
        "layers": list(shown.layers),
        "heads": shown.heads,
        "same": shown.same,
        "hard": is_hard(shown.attention),
        "rows": shown.attention.rows[0].tolist(),
        "queries": _axis(shown, shown.attention.queries, shown.queries, photos),
        "keys": _axis(shown, shown.attention.keys, shown.keys, photos),
        "start": {"layer": choice.layer, "head": choice.head, "query": choice.query},
        "weights": _bytes(weights.clip(0, 65504).astype("<f2")),
    }


def _axis(shown: Panel, layout: Layout, names: Sequence[str], photos: Photos) -> dict[str, Any]:
    """What stands along an axis: pictures with their cells, texts with their pieces, the rest."""
    blocks: list[dict[str, Any]] = []
    for span in grids(layout):
        block: dict[str, Any] = {"kind": "grid", "name": span.name, "shape": list(span.shape)}
        block["at"] = positions(span)
        photo = shown.photos.get(span.name)
        if photo is not None:
            block["photo"] = photos.number(photo)
            block["size"] = [photo.shape[1], photo.shape[0]]
            block.update(placed(geometry(span), photo.shape[:2]))
        blocks.append(block)
    blocks += [_boxes(shown, span, photos) for span in boxed(layout)]
    blocks += [{"kind": "text", "name": s.name, "parts": _parts(s)} for s in texts(layout)]
    rest = others(layout)
    if rest:
        blocks.append({"kind": "rest", "at": rest})
    return {"names": list(names), "blocks": blocks}


def _boxes(shown: Panel, span: Span, photos: Photos) -> dict[str, Any]:
    """The boxes of a span, as shares of their photo; without one, of what they reach over."""
    assert isinstance(span.geometry, RegionGeometry)
    boxes = span.geometry.boxes[0].double().numpy()
    photo = shown.photos.get(span.name)
    if photo is None:
        width, height = float(boxes[:, 2].max()), float(boxes[:, 3].max())
    else:
        height, width = (float(side) for side in photo.shape[:2])
    shares = (boxes / [width, height, width, height]).clip(0, 1).round(5)
    block = {"kind": "boxes", "name": span.name, "at": positions(span), "boxes": shares.tolist()}
    if photo is not None:
        block["photo"] = photos.number(photo)
    return {**block, "size": [width, height]}


def _parts(span: Span) -> list[list[Any]]:
    """The text in pieces, each with its position along the axis; -1 for what lies between."""
    at = positions(span)
    count = float(max(at, default=0) + 1)
    text, spans, _ = marked(span, np.zeros(int(count)))
    numbered = np.arange(1, len(at) + 1, dtype=np.float64)  # a piece's weight says which one it is
    return [
        [piece, -1 if number is None else at[int(number) - 1]]
        for piece, number, _ in pieces(text, spans, numbered)
    ]


def placed(where: PixelGeometry | None, size: tuple[int, ...]) -> dict[str, Any]:
    """Where the whole grid lies on a photo, and the part of the photo that was seen, in shares.

    `place` and `kept` are left, top, width and height; the grid may reach beyond the photo.
    `flip` says that the photo was mirrored.
    """
    where = where or PixelGeometry.identity(1, (int(size[0]), int(size[1])))
    height, width = (float(n) for n in where.size[0])
    ends = []
    for axis, length in ((1, width), (0, height)):
        scale, offset = float(where.scale[0, axis]), float(where.offset[0, axis])
        first, last = -offset / scale, (where.canvas[axis] - offset) / scale
        ends.append((min(first, last) / length, abs(last - first) / length, scale < 0))
    (left, wide, flip), (top, tall, _) = ends
    kept = where.kept[0].tolist() if where.kept is not None else [0.0, 0.0, width, height]
    x0, y0, x1, y1 = kept
    return {
        "place": [left, top, wide, tall],
        "kept": [x0 / width, y0 / height, (x1 - x0) / width, (y1 - y0) / height],
        "flip": flip,
    }


def _heat() -> str:
    """The 256 colours of heat with their opacities, as bytes."""
    colours = np.concatenate([colour_table(PLAIN.colours), 255 * opacities(PLAIN)[:, None]], axis=1)
    return _bytes(np.rint(colours).astype(np.uint8))


def _bytes(values: Float[np.ndarray, "..."] | UInt8[np.ndarray, "..."]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
