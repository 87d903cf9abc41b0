"""The gallery of a page: the same samples side by side, one view a run, small enough to embed.

Each photo is embedded once however many views look at it; the heat is a layer of its own over it,
a palette picture whose smoothness is left to the browser.
"""

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show.layers import change_layer, edges, is_hard, kept_layer, packed, packed_size
from overt.show.overlay import (
    PLAIN,
    Point,
    Style,
    colour_table,
    heat,
    highest,
    opacities,
    outline,
    resized,
)
from overt.show.pressing import Mapped, changed_words, spans_of, words_to_press
from overt.show.sample import Sample
from overt.show.table import number, titled

PHOTO_BYTES = 1_500_000  # of all photos together, before base64 adds a third
HEAT_BYTES = 700_000
CELL_BYTES = 700_000  # of all numbers that can be read off, as text
_PHOTO_SIDES = (320, 256, 192, 128, 96, 64)
_HEAT_SIDES = (96, 64, 40)
NOTHING = Markup("")
# what says how far a map tells what drives the answer, the best known first
_FAITHFUL = ("deletion", "comprehensiveness", "flips", "tau_removal")


@dataclass(frozen=True)
class Level:
    """One of several maps of a view, drawn small: its name, heat, numbers, and where it looks."""

    name: str
    heat: str
    alt: str
    cells: str = ""
    columns: str = ""
    rows: str = ""


@dataclass(frozen=True)
class Change:
    """What one run looks at more or less than the first: a picture over the photo, in words too."""

    heat: str
    alt: str
    most: str


@dataclass(frozen=True)
class View:
    """What one run made of a sample: its answer, its heat, its words, and how they scored.

    `alt` says in words where it looked; `note` why there is no heat; `inside` is how far it agrees
    with the evidence, from 0 to 1, and `faithful` how much more the answer depends on what it
    attends to than on as much at random, where these were measured. `cells` are the numbers of the
    map, and `columns` and `rows` where its cells lie. `kept` says how many cells a map kept that
    drops the others. `answer` is the prediction in words that show
    their own maps, where they have such.
    """

    run: int
    prediction: str
    right: bool | None
    confidence: str
    heat: str
    top: str
    outline: str
    alt: str
    note: str
    words: Markup
    scores: tuple[tuple[str, str], ...]
    told: str
    inside: float | None
    levels: tuple[Level, ...] = ()
    faithful: float | None = None
    cells: str = ""
    columns: str = ""
    rows: str = ""
    answer: Markup = NOTHING
    kept: str = ""
    change: Change | None = None
    changed_words: Markup = NOTHING


@dataclass(frozen=True)
class Card:
    """One sample as a page shows it. `photo` is the number of its photo among `Gallery.photos`."""

    id: str
    text: str
    group: str
    truth: str
    photo: int | None
    width: int
    height: int
    outline: str
    views: tuple[View, ...]
    boxes: tuple[tuple[float, float, float, float], ...] = ()


@dataclass(frozen=True)
class Gallery:
    """All cards, the photos they share as data URIs, and how many samples were found."""

    cards: tuple[Card, ...]
    photos: tuple[str, ...]
    found: int

    @property
    def groups(self) -> list[str]:
        """The groups there are, in order of the alphabet."""
        return sorted({card.group for card in self.cards if card.group})

    @property
    def has(self) -> dict[str, bool]:
        """What any of the views shows, so that nothing else is explained or offered."""
        views = [view for card in self.cards for view in card.views]
        return {
            "heat": any(view.heat and not view.kept for view in views),
            "kept": any(view.kept for view in views),
            "outline": any(view.outline for view in views),
            "words": any(view.words for view in views),
            "inside": any(view.inside is not None for view in views),
            "right": any(view.right is not None for view in views),
            "levels": any(view.levels for view in views),
            "faithful": any(view.faithful is not None for view in views),
            "cells": any(view.cells for view in views),
            "word maps": any("data-cells" in view.words + view.answer for view in views),
            "change": any(view.change for view in views),
            "changed words": any(view.changed_words for view in views),
            "boxes": any(card.boxes for card in self.cards),
            "several": any(len(card.views) > 1 for card in self.cards),
        }


def gallery(galleries: Sequence[Sequence[Sample]], most: int = 64) -> Gallery:
    """The cards of samples that the runs share by id, those of most runs first, at most `most`."""
    by_id: dict[str, dict[int, Sample]] = {}
    for run, samples in enumerate(galleries):
        for sample in samples:
            by_id.setdefault(sample.id, {}).setdefault(run, sample)
    chosen = sorted(by_id.items(), key=lambda item: -len(item[1]))[:most]
    pool: dict[tuple[tuple[int, ...], bytes], int] = {}
    numbers = [_number_of(pool, by_run) for _, by_run in chosen]
    images = [np.frombuffer(data, np.uint8).reshape(shape) for shape, data in pool]
    photos = _photos(images)
    maps = [sample for _, by_run in chosen for sample in by_run.values()]
    heats = dict(zip(map(id, maps), _heats(maps), strict=True))
    made = _Made(heats, *_bits(maps))
    cards = [
        _card(name, by_run, photo, made)
        for (name, by_run), photo in zip(chosen, numbers, strict=True)
    ]
    return Gallery(tuple(cards), tuple(photos), len(by_id))


def scale_css(style: Style = PLAIN) -> str:
    """The colours from none to the largest weight as a CSS gradient."""
    stops = []
    for level in range(0, 256, 15):
        red, green, blue = colour_table(style.colours)[level]
        stops.append(f"rgb({red:.0f} {green:.0f} {blue:.0f} / {opacities(style)[level]:.2f})")
    return f"linear-gradient(to right, {', '.join(stops)})"


def palette(style: Style = PLAIN) -> str:
    """The 256 colours of heat with their opacity, eight hexadecimal digits each."""
    colours = np.rint(colour_table(style.colours)).astype(np.uint8)
    alpha = np.rint(255 * opacities(style)).astype(np.uint8)
    return np.concatenate([colours, alpha[:, None]], axis=1).tobytes().hex()


def under_css(style: Style = PLAIN) -> str:
    """The CSS filter that does to a photo under heat what an overlay does to it."""
    return f"grayscale({style.fade:g}) brightness({1 - style.dim:g})"


def where(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry) -> str:
    """In words, the part of the photo with the largest weight: "top left", "the centre" ..."""
    x0, y0, x1, y1 = geometry.cells(cells.shape)[0, int(np.argmax(cells))].tolist()
    height, width = geometry.size[0].tolist()
    down = min(2, int(3 * (y0 + y1) / 2 / height))
    across = min(2, int(3 * (x0 + x1) / 2 / width))
    if (down, across) == (1, 1):
        return "in the centre"
    names = [("top", "", "bottom")[down], ("left", "", "right")[across]]
    return "at the " + " ".join(name for name in names if name)


def data_uri(data: bytes, kind: str) -> str:
    """Bytes as an address that needs no network."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _number_of(
    pool: dict[tuple[tuple[int, ...], bytes], int], by_run: Mapping[int, Sample]
) -> int | None:
    for sample in by_run.values():
        if sample.image is not None:
            return pool.setdefault((sample.image.shape, sample.image.tobytes()), len(pool))
    return None


def _photos(images: Sequence[UInt8[np.ndarray, "y x 3"]]) -> list[str]:
    """All photos, at the largest size at which they stay within their share of the page."""
    for side in _PHOTO_SIDES:
        made = [_photo(image, side) for image in images]
        if sum(len(data) for data, _ in made) <= PHOTO_BYTES or side == _PHOTO_SIDES[-1]:
            break
    return [data_uri(data, kind) for data, kind in made]


def _photo(image: UInt8[np.ndarray, "y x 3"], side: int) -> tuple[bytes, str]:
    """A small photo exactly, a large one made smaller and lossy."""
    picture = Image.fromarray(image)
    lossless = max(picture.size) <= 128
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    if lossless:
        picture.save(out, format="PNG", optimize=True)
        return out.getvalue(), "png"
    picture.save(out, format="WEBP", quality=82, method=4)
    return out.getvalue(), "webp"


def _heats(samples: Sequence[Sample]) -> list[bytes]:
    """The heat of each sample, empty where it has none that can be drawn, within their share."""
    for side in _HEAT_SIDES:
        made = [_heat(sample, side) for sample in samples]
        if sum(map(len, made)) <= HEAT_BYTES:
            break
    return made


def _heat(sample: Sample, side: int, style: Style = PLAIN) -> bytes:
    if sample.image is None or sample.cells is None or not np.isfinite(sample.cells).all():
        return b""
    if is_hard(sample.cells):
        return kept_layer(sample.cells, _geometry(sample), side)
    height, width = sample.image.shape[:2]
    ratio = side / max(height, width)
    shape = (max(1, round(height * ratio)), max(1, round(width * ratio)))
    levels = heat(sample.cells, resized(_geometry(sample), shape), style)
    picture = Image.fromarray(levels)
    picture.putpalette(np.rint(colour_table(style.colours)).astype(np.uint8).tobytes())
    alpha = np.rint(255 * opacities(style)).astype(np.uint8).tobytes()
    out = io.BytesIO()
    picture.save(out, format="PNG", optimize=True, transparency=alpha)
    return out.getvalue()


def _geometry(sample: Sample) -> PixelGeometry:
    assert sample.image is not None
    height, width = sample.image.shape[:2]
    return sample.geometry or PixelGeometry.identity(1, (height, width))


@dataclass(frozen=True)
class _Made:
    """What was made of all samples together, within their share of the page.

    `heats` go by the `id()` of samples. The numbers of maps, and those of single words, travel as
    so many bits; 0 where they would not fit.
    """

    heats: Mapping[int, bytes]
    bits: int
    word_bits: int


def _bits(samples: Sequence[Sample]) -> tuple[int, int]:
    """As how many bits the numbers of maps and those of single words fit into the page."""
    maps = [
        one
        for sample in samples
        for one in (*([] if sample.cells is None else [sample.cells]), *sample.levels.values())
    ]
    words = [
        one
        for sample in samples
        for many in (sample.word_cells, sample.answer_cells)
        for one in (() if many is None else many)
    ]
    for bits, word_bits in ((16, 16), (16, 8), (8, 8), (16, 0), (8, 0)):
        used = sum(packed_size(one, bits) for one in maps)
        used += sum(packed_size(one, word_bits) for one in words) if word_bits else 0
        if used <= CELL_BYTES:
            return bits, word_bits
    return 0, 0


def _card(name: str, by_run: Mapping[int, Sample], photo: int | None, made: _Made) -> Card:
    first = next(iter(by_run.values()))
    seen = next((one for one in by_run.values() if one.image is not None), None)
    height, width = (1, 1) if seen is None or seen.image is None else seen.image.shape[:2]
    views = [_view(run, sample, made) for run, sample in by_run.items()]
    views = [
        view if sample is first else _compared(view, sample, first)
        for view, sample in zip(views, by_run.values(), strict=True)
    ]
    boxes = next((one.boxes for one in by_run.values() if one.boxes is not None), None)
    return Card(
        id=name,
        text=first.text,
        group=first.group,
        truth=first.truth,
        photo=photo,
        width=width,
        height=height,
        outline=next((view.outline for view in views if view.outline), ""),
        views=tuple(views),
        boxes=() if boxes is None or photo is None else tuple(map(_corner, boxes.tolist())),
    )


def _corner(box: Sequence[float]) -> tuple[float, float, float, float]:
    """A box as SVG wants it: left, top, width, height."""
    x0, y0, x1, y1 = (round(float(one), 1) for one in box)
    return x0, y0, round(max(0.0, x1 - x0), 1), round(max(0.0, y1 - y0), 1)


def _compared(view: View, sample: Sample, first: Sample) -> View:
    """The view with what it looks at more or less than that of the first run."""
    both = (first, sample)
    change, words = None, NOTHING
    if all(one.image is not None and _drawable(one.cells) for one in both):
        assert first.cells is not None and sample.cells is not None
        layer, most = change_layer(
            first.cells, sample.cells, _geometry(first), _geometry(sample), _HEAT_SIDES[-1]
        )
        told = f"Compared with the first run: at most {most:.2g} times an even map more or less."
        change = Change(data_uri(layer, "png"), told, f"{most:.2g}")
    spans = sample.spans
    if spans is not None and first.text == sample.text and sample.text:
        before, after = first.word_weights, sample.word_weights
        if before is not None and after is not None and len(before) == len(after):
            words = changed_words(sample.text, spans, before, after)
    return replace(view, change=change, changed_words=words)


def _drawable(cells: np.ndarray | None) -> bool:
    return cells is not None and bool(np.isfinite(cells).all())


def _view(run: int, sample: Sample, made: _Made) -> View:
    has_image = sample.image is not None
    drawn = made.heats[id(sample)]
    words, answer = NOTHING, NOTHING
    maps = _mapped(sample, sample.word_cells, made.word_bits)
    has_weights = sample.word_weights is not None and len(sample.word_weights) > 0
    if sample.spans is not None and sample.text and (has_weights or maps):
        weights = sample.word_weights if has_weights else None
        words = words_to_press(sample.text, sample.spans, weights, maps)
    said = _mapped(sample, sample.answer_cells, made.word_bits)
    if said:
        answer = words_to_press(sample.prediction, spans_of(sample.prediction), None, said)
    alt, note, top, kept = "", "", "", ""
    cells, columns, rows = "", "", ""
    if sample.cells is None:
        note = "no attention over the image" if has_image and not (maps or said) else ""
    elif not _drawable(sample.cells):
        note = "the attention holds numbers that are not finite"
    elif has_image:
        alt = _told(sample, sample.cells)
        top = f"{highest(sample.cells):.3g}"
        if is_hard(sample.cells):
            kept = f"kept {int((sample.cells > 0).sum())} of {sample.cells.size} cells"
            alt = f"Hard attention: {kept} of a grid of {_grid(sample.cells)}."
        cells = packed(sample.cells, made.bits) if made.bits else ""
    if has_image and made.bits:
        shape = next((one.shape for one in _grids(sample)), None)
        columns, rows = ("", "") if shape is None else edges(_geometry(sample), shape)
    shape_of_truth = ""
    if has_image and sample.truth_cells is not None and sample.truth_cells.max(initial=0) > 0:
        shape_of_truth = path(outline(sample.truth_cells, _geometry(sample)))
    return View(
        run=run,
        prediction=sample.prediction,
        right=sample.right,
        confidence="" if math.isnan(sample.confidence) else f"{sample.confidence:.0%}",
        heat=data_uri(drawn, "png") if drawn else "",
        top=top,
        outline=shape_of_truth,
        alt=alt,
        note=note,
        words=words,
        scores=tuple(
            (titled(name), number(value, 2))
            for name, value in sample.scores.items()
            if math.isfinite(value)
        ),
        told=_in_short(sample.scores),
        inside=agreement(sample.scores),
        levels=tuple(_levels(sample, made.bits)) if has_image else (),
        faithful=faithfulness(sample.scores),
        cells=cells,
        columns=columns,
        rows=rows,
        answer=answer,
        kept=kept,
    )


def _grids(sample: Sample) -> Iterator[np.ndarray]:
    """All maps of a sample, the main one first."""
    if sample.cells is not None:
        yield sample.cells
    for many in (sample.word_cells, sample.answer_cells):
        yield from () if many is None else many


def _mapped(sample: Sample, maps: np.ndarray | None, bits: int) -> dict[int, Mapped]:
    """The maps of words by their number; those that cannot be drawn are left out."""
    if maps is None or sample.image is None or not bits:
        return {}
    return {
        at: Mapped(packed(cells, bits), _told(sample, cells))
        for at, cells in enumerate(maps)
        if _drawable(cells)
    }


def _levels(sample: Sample, bits: int) -> Iterator[Level]:
    """The maps of a sample that can be drawn, in their order."""
    for name, cells in sample.levels.items():
        drawn = _heat(replace(sample, cells=cells, truth_cells=None), _HEAT_SIDES[-1])
        if drawn:
            told = f"{name}. {_told(sample, cells)}"
            numbers = packed(cells, bits) if bits else ""
            columns, rows = edges(_geometry(sample), cells.shape) if bits else ("", "")
            yield Level(name, data_uri(drawn, "png"), told, numbers, columns, rows)


def _told(sample: Sample, cells: Float[np.ndarray, "r c"]) -> str:
    """Where a map looks, in a sentence."""
    place, peak = where(cells, _geometry(sample)), float(cells.max(initial=0))
    return f"Attention: most {place}, {peak:.3g} in one cell of {_grid(cells)}."


def path(loops: Sequence[Sequence[Point]]) -> str:
    """Closed lines as the `d` of an SVG path."""
    return "".join("M" + "L".join(f"{x:.4g},{y:.4g}" for x, y in loop[:-1]) + "Z" for loop in loops)


def agreement(scores: Mapping[str, float]) -> float | None:
    """How far a sample's attention agrees with the evidence: the mass inside, else pointing."""
    for start in ("mass", "pointing"):
        for name, value in scores.items():
            if start in name.lower() and math.isfinite(value):
                return float(value)
    return None


def faithfulness(scores: Mapping[str, float]) -> float | None:
    """How much more the answer depends on what is attended to than on as much at random."""
    for wanted in _FAITHFUL:
        value = scores.get(wanted)
        if value is not None and math.isfinite(value):
            return float(value)
    return None


def _in_short(scores: Mapping[str, float]) -> str:
    """The two scores of a sample that say most, in words."""
    inside, faithful = agreement(scores), faithfulness(scores)
    found = [] if inside is None else [f"on the evidence {number(inside, 2)}"]
    found += [] if faithful is None else [f"faithful {number(faithful, 2)}"]
    return ", ".join(found) or "scores"


def _grid(cells: Float[np.ndarray, "r c"]) -> str:
    return f"{cells.shape[0]} × {cells.shape[1]}"
