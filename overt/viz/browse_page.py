"""Interactive page of panels: choose layer, head and query, and see the weights.

The page is one file without network requests. It embeds the weights in half precision; panels above
the size limit are reduced, and the page states how.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from overt.attention import Layout, Span
from overt.geometry import PixelGeometry, RegionGeometry
from overt.viz.gallery import colour_scale_css, dimmed_photo_css
from overt.viz.panel import (
    Choice,
    Panel,
    grid_spans,
    is_hard_attention,
    other_positions,
    pixel_geometry,
    region_spans,
    span_positions,
    text_spans,
    text_weights,
)
from overt.viz.photo_overlay import DEFAULT_STYLE, colour_table, opacities, white_colour_table
from overt.viz.templates import base64_text, data_uri, encode_image, render_template
from overt.viz.text_heatmap import weighted_pieces
from overt.viz.video_strip import is_frame

MAX_WEIGHTS = 6_000_000  # per panel, two bytes each: 12 layers of 12 heads and 200 tokens
MAX_SIDE = 900  # pixels


def render_page(
    panels: Sequence[Panel],
    choices: Sequence[Choice],
    title: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Render the page of these panels, opened at the choices."""
    photos = EmbeddedPhotos()
    data = page_data(panels, choices, photos)
    return render_template(
        "look.html.jinja",
        title=title or (panels[0].title if panels else "No attention"),
        notes=list(notes),
        data=data,
        photos=photos.addresses,
        scale=colour_scale_css(),
        under=dimmed_photo_css(),
    )


def page_data(
    panels: Sequence[Panel],
    choices: Sequence[Choice],
    photos: "EmbeddedPhotos",
    most: int = MAX_WEIGHTS,
) -> dict[str, Any]:
    """Return the panels as JSON values for the script of the page; photos are added to `photos`."""
    pairs = zip(panels, choices, strict=True)
    shown = [panel_data(*limit_weights(one, choice, most), photos) for one, choice in pairs]
    return {"panels": shown, "heat": _heat_colours(), "white": base64_text(white_colour_table())}


class EmbeddedPhotos:
    """Photos of a page as data URIs, each embedded once.

    Large photos are shrunk. With `lossless` the others keep every pixel.
    """

    def __init__(self, lossless: bool = False) -> None:
        self.addresses: list[str] = []
        self.kind = "png" if lossless else "jpeg"
        self._known: dict[bytes, int] = {}

    def add(self, photo: UInt8[np.ndarray, "y x 3"]) -> int:
        """Add a photo unless it is there, and return its index."""
        key = photo.tobytes()
        if key not in self._known:
            picture = Image.fromarray(photo)
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            self._known[key] = len(self.addresses)
            data = encode_image(picture, self.kind, quality=88)
            self.addresses.append(data_uri(data, self.kind))
        return self._known[key]


def limit_weights(shown: Panel, choice: Choice, most: int = MAX_WEIGHTS) -> tuple[Panel, Choice]:
    """Reduce a panel to at most `most` weights: average the heads, then keep one layer."""
    size = shown.attention.values[0].numel()
    if size <= most:
        return shown, choice
    note = f"The weights of all heads would be {size:,} numbers"
    shown = replace(
        shown,
        attention=shown.attention.over_heads(),
        about=f"{shown.about} {note}: this page shows the mean over heads.".strip(),
    )
    choice = replace(choice, head=None)
    if shown.attention.values[0].numel() > most:
        shown = replace(
            shown,
            attention=shown.attention.layer(choice.layer),
            layers=(shown.layers[choice.layer],),
            sinks=shown.sinks[choice.layer : choice.layer + 1],
            about=f"{shown.about} It shows only {shown.layers[choice.layer]}.",
        )
        choice = replace(choice, layer=0)
    return shown, choice


def panel_data(shown: Panel, choice: Choice, photos: EmbeddedPhotos) -> dict[str, Any]:
    """Return one panel as JSON values for the script of the page."""
    weights = shown.attention.weights[0].float().numpy()
    return {
        "title": shown.title,
        "about": shown.about,
        "layers": list(shown.layers),
        "heads": shown.heads,
        "same": shown.same,
        "hard": is_hard_attention(shown.attention),
        "rows": shown.attention.rows[0].tolist(),
        "sinks": [list(layer) for layer in shown.sinks],
        "chances": list(shown.chances),
        "before": list(shown.before),
        "deletion": None if shown.deletion is None else asdict(shown.deletion),
        "queries": _axis(shown, shown.attention.queries, shown.queries, photos),
        "keys": _axis(shown, shown.attention.keys, shown.keys, photos),
        "start": {"layer": choice.layer, "head": choice.head, "query": choice.query},
        "weights": base64_text(weights.clip(0, 65504).astype("<f2")),
    }


def _axis(
    shown: Panel, layout: Layout, names: Sequence[str], photos: EmbeddedPhotos
) -> dict[str, Any]:
    """Return the blocks along an axis: image grids, boxes, texts, and other tokens."""
    blocks: list[dict[str, Any]] = []
    for span in grid_spans(layout):
        block: dict[str, Any] = {"kind": "grid", "name": span.name, "shape": list(span.shape)}
        block["at"] = span_positions(span)
        if is_frame(span):
            block["frame"] = True
        photo = shown.photos.get(span.name)
        if photo is not None:
            block["photo"] = photos.add(photo)
            block["size"] = [photo.shape[1], photo.shape[0]]
            block.update(grid_placement(pixel_geometry(span), photo.shape[:2]))
        blocks.append(block)
    blocks += [_boxes(shown, span, photos) for span in region_spans(layout)]
    blocks += [{"kind": "text", "name": s.name, "parts": _parts(s)} for s in text_spans(layout)]
    rest = other_positions(layout)
    if rest:
        blocks.append({"kind": "rest", "at": rest})
    return {"names": list(names), "blocks": blocks}


def _boxes(shown: Panel, span: Span, photos: EmbeddedPhotos) -> dict[str, Any]:
    """Return the boxes of a span as fractions of their photo, or of their extent."""
    assert isinstance(span.geometry, RegionGeometry)
    boxes = span.geometry.boxes[0].double().numpy()
    photo = shown.photos.get(span.name)
    if photo is None:
        width, height = float(boxes[:, 2].max()), float(boxes[:, 3].max())
    else:
        height, width = (float(side) for side in photo.shape[:2])
    shares = (boxes / [width, height, width, height]).clip(0, 1).round(5)
    block = {
        "kind": "boxes",
        "name": span.name,
        "at": span_positions(span),
        "boxes": shares.tolist(),
    }
    if photo is not None:
        block["photo"] = photos.add(photo)
    return {**block, "size": [width, height]}


def _parts(span: Span) -> list[list[Any]]:
    """Split the text into pieces with their positions along the axis; -1 between tokens."""
    at = span_positions(span)
    count = float(max(at, default=0) + 1)
    text, spans, _ = text_weights(span, np.zeros(int(count)))
    numbered = np.arange(1, len(at) + 1, dtype=np.float64)  # the weight of a piece is its number
    return [
        [piece, -1 if number is None else at[int(number) - 1]]
        for piece, number, _ in weighted_pieces(text, spans, numbered)
    ]


def grid_placement(where: PixelGeometry | None, size: tuple[int, ...]) -> dict[str, Any]:
    """Return where the grid lies on the photo and which part of the photo it covers, as fractions.

    `place` and `kept` are left, top, width and height; the grid may extend beyond the photo. `flip`
    means that the photo was mirrored.
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


def _heat_colours() -> str:
    """Return the 256 heat colours with their opacities, as base64."""
    colours = np.concatenate(
        [colour_table(DEFAULT_STYLE.colours), 255 * opacities(DEFAULT_STYLE)[:, None]], axis=1
    )
    return base64_text(np.rint(colours).astype(np.uint8))
