"""Gallery of a report: the same samples of several runs side by side, embedded in one page.

Each photo is embedded once. Heat is a separate palette image over it, which the browser
interpolates.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz.clickable_text import WordMap, changed_words, clickable_words, word_spans
from overt.viz.gallery_sample import GallerySample
from overt.viz.packed_maps import (
    difference_png,
    grid_edges,
    hard_mask_png,
    is_hard_map,
    pack_map,
    packed_size,
    palette_png,
    shrink_geometry,
)
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    OverlayStyle,
    Point,
    cell_outline,
    colour_limit,
    colour_table,
    heat_levels,
    opacities,
)
from overt.viz.results_table import format_number, metric_title
from overt.viz.templates import data_uri, encode_image

PHOTO_BYTES = 1_500_000  # of all photos, before base64 adds a third
HEAT_BYTES = 700_000
CELL_BYTES = 700_000  # of all packed weights, as text
_PHOTO_SIDES = (320, 256, 192, 128, 96, 64)
_HEAT_SIDES = (96, 64, 40)
EMPTY = Markup("")
# faithfulness metrics, preferred first
_FAITHFUL = ("deletion", "comprehensiveness", "flips", "tau_removal")


@dataclass(frozen=True)
class LevelMap:
    """One of several maps of a sample, drawn small: name, heat, weights and description."""

    name: str
    heat: str
    alt: str
    cells: str = ""
    columns: str = ""
    rows: str = ""


@dataclass(frozen=True)
class MapChange:
    """Difference between the map of a run and that of the first run, as an image and in words."""

    heat: str
    alt: str
    most: str


@dataclass(frozen=True)
class SampleView:
    """Result of one run on a sample: prediction, heat, words and scores.

    `alt` describes the map in words and `note` says why there is none. `inside` is the agreement
    with the evidence from 0 to 1. `faithful` is how much more the answer depends on the attended
    part than on a random part of the same size. `cells` are the packed weights, `columns` and
    `rows` the positions of the cells. `kept` states how many cells hard attention kept. `answer` is
    the prediction as words with their own maps. `summary` is a line with the two main scores.
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
    summary: str
    inside: float | None
    levels: tuple[LevelMap, ...] = ()
    faithful: float | None = None
    cells: str = ""
    columns: str = ""
    rows: str = ""
    answer: Markup = EMPTY
    kept: str = ""
    change: MapChange | None = None
    changed_words: Markup = EMPTY


@dataclass(frozen=True)
class GalleryCard:
    """One sample of the page; `photo` is the index of its photo in `Gallery.photos`."""

    id: str
    text: str
    group: str
    truth: str
    photo: int | None
    width: int
    height: int
    outline: str
    views: tuple[SampleView, ...]
    boxes: tuple[tuple[float, float, float, float], ...] = ()


@dataclass(frozen=True)
class Gallery:
    """All cards, their photos as data URIs, and the number of samples found."""

    cards: tuple[GalleryCard, ...]
    photos: tuple[str, ...]
    found: int

    @property
    def groups(self) -> list[str]:
        """Names of the groups, sorted."""
        return sorted({card.group for card in self.cards if card.group})

    @property
    def has(self) -> dict[str, bool]:
        """Which elements any of the views has; only these are explained and offered as filters."""
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


def build_gallery(galleries: Sequence[Sequence[GallerySample]], max_samples: int = 64) -> Gallery:
    """Build cards of the samples by id, those that most runs share first."""
    by_id: dict[str, dict[int, GallerySample]] = {}
    for run, samples in enumerate(galleries):
        for sample in samples:
            by_id.setdefault(sample.id, {}).setdefault(run, sample)
    chosen = sorted(by_id.items(), key=lambda item: -len(item[1]))[:max_samples]
    pool: dict[tuple[tuple[int, ...], bytes], int] = {}
    numbers = [_photo_number(pool, by_run) for _, by_run in chosen]
    images = [np.frombuffer(data, np.uint8).reshape(shape) for shape, data in pool]
    photos = _photos(images)
    maps = [sample for _, by_run in chosen for sample in by_run.values()]
    heats = dict(zip(map(id, maps), _heats(maps), strict=True))
    made = _Embedded(heats, *_bits(maps))
    cards = [
        _card(name, by_run, photo, made)
        for (name, by_run), photo in zip(chosen, numbers, strict=True)
    ]
    return Gallery(tuple(cards), tuple(photos), len(by_id))


def colour_scale_css(style: OverlayStyle = DEFAULT_STYLE) -> str:
    """Return the heat colours from zero to the largest weight as a CSS gradient."""
    stops = []
    for level in range(0, 256, 15):
        red, green, blue = colour_table(style.colours)[level]
        stops.append(f"rgb({red:.0f} {green:.0f} {blue:.0f} / {opacities(style)[level]:.2f})")
    return f"linear-gradient(to right, {', '.join(stops)})"


def heat_palette(style: OverlayStyle = DEFAULT_STYLE) -> str:
    """Return the 256 heat colours with opacity, eight hexadecimal digits each."""
    colours = np.rint(colour_table(style.colours)).astype(np.uint8)
    alpha = np.rint(255 * opacities(style)).astype(np.uint8)
    return np.concatenate([colours, alpha[:, None]], axis=1).tobytes().hex()


def dimmed_photo_css(style: OverlayStyle = DEFAULT_STYLE) -> str:
    """Return the CSS filter that dims a photo under heat as `overlay` does."""
    return f"grayscale({style.fade:g}) brightness({1 - style.dim:g})"


def peak_location(cells: Float[np.ndarray, "r c"], geometry: PixelGeometry) -> str:
    """Return the location of the largest weight in words, such as "at the top left"."""
    x0, y0, x1, y1 = geometry.cells(cells.shape)[0, int(np.argmax(cells))].tolist()
    height, width = geometry.size[0].tolist()
    down = min(2, int(3 * (y0 + y1) / 2 / height))
    across = min(2, int(3 * (x0 + x1) / 2 / width))
    if (down, across) == (1, 1):
        return "in the centre"
    names = [("top", "", "bottom")[down], ("left", "", "right")[across]]
    return "at the " + " ".join(name for name in names if name)


def _photo_number(
    pool: dict[tuple[tuple[int, ...], bytes], int], by_run: Mapping[int, GallerySample]
) -> int | None:
    for sample in by_run.values():
        if sample.image is not None:
            return pool.setdefault((sample.image.shape, sample.image.tobytes()), len(pool))
    return None


def _photos(images: Sequence[UInt8[np.ndarray, "y x 3"]]) -> list[str]:
    """Encode all photos at the largest size that stays within `PHOTO_BYTES`."""
    for side in _PHOTO_SIDES:
        made = [_photo(image, side) for image in images]
        if sum(len(data) for data, _ in made) <= PHOTO_BYTES or side == _PHOTO_SIDES[-1]:
            break
    return [data_uri(data, kind) for data, kind in made]


def _photo(image: UInt8[np.ndarray, "y x 3"], side: int) -> tuple[bytes, str]:
    """Encode a small photo losslessly, and a large one shrunk and lossy."""
    picture = Image.fromarray(image)
    lossless = max(picture.size) <= 128
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    if lossless:
        return encode_image(picture, "png", optimize=True), "png"
    return encode_image(picture, "webp", quality=82, method=4), "webp"


def _heats(samples: Sequence[GallerySample]) -> list[bytes]:
    """Encode the heat of each sample within `HEAT_BYTES`; empty if it cannot be drawn."""
    for side in _HEAT_SIDES:
        made = [_heat(sample, side) for sample in samples]
        if sum(map(len, made)) <= HEAT_BYTES:
            break
    return made


def _heat(sample: GallerySample, side: int, style: OverlayStyle = DEFAULT_STYLE) -> bytes:
    if sample.image is None or sample.cells is None or not np.isfinite(sample.cells).all():
        return b""
    if is_hard_map(sample.cells):
        return hard_mask_png(sample.cells, _geometry(sample), side)
    levels = heat_levels(sample.cells, shrink_geometry(_geometry(sample), side), style)
    return palette_png(
        levels,
        np.rint(colour_table(style.colours)).astype(np.uint8),
        np.rint(255 * opacities(style)).astype(np.uint8),
    )


def _geometry(sample: GallerySample) -> PixelGeometry:
    assert sample.image is not None
    height, width = sample.image.shape[:2]
    return sample.geometry or PixelGeometry.identity(1, (height, width))


@dataclass(frozen=True)
class _Embedded:
    """Encoded parts of all samples, within their share of the page.

    `heats` is keyed by `id(sample)`. `bits` and `word_bits` are the bits per weight of maps and of
    word maps; 0 if they do not fit.
    """

    heats: Mapping[int, bytes]
    bits: int
    word_bits: int


def _bits(samples: Sequence[GallerySample]) -> tuple[int, int]:
    """Return the bits per weight of maps and of word maps that fit into `CELL_BYTES`."""
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


def _card(
    name: str, by_run: Mapping[int, GallerySample], photo: int | None, made: _Embedded
) -> GalleryCard:
    first = next(iter(by_run.values()))
    seen = next((one for one in by_run.values() if one.image is not None), None)
    height, width = (1, 1) if seen is None or seen.image is None else seen.image.shape[:2]
    views = [_view(run, sample, made) for run, sample in by_run.items()]
    views = [
        view if sample is first else _with_change(view, sample, first)
        for view, sample in zip(views, by_run.values(), strict=True)
    ]
    boxes = next((one.boxes for one in by_run.values() if one.boxes is not None), None)
    return GalleryCard(
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
    """Return a box as SVG left, top, width and height."""
    x0, y0, x1, y1 = (round(float(one), 1) for one in box)
    return x0, y0, round(max(0.0, x1 - x0), 1), round(max(0.0, y1 - y0), 1)


def _with_change(view: SampleView, sample: GallerySample, first: GallerySample) -> SampleView:
    """Add the change from the first run to a view."""
    both = (first, sample)
    change, words = None, EMPTY
    if all(one.image is not None and _drawable(one.cells) for one in both):
        assert first.cells is not None and sample.cells is not None
        layer, most = difference_png(
            first.cells, sample.cells, _geometry(first), _geometry(sample), _HEAT_SIDES[-1]
        )
        alt = f"Change from the first run: at most {most:.2g} times a uniform map."
        change = MapChange(data_uri(layer, "png"), alt, f"{most:.2g}")
    spans = sample.spans
    if spans is not None and first.text == sample.text and sample.text:
        before, after = first.word_weights, sample.word_weights
        if before is not None and after is not None and len(before) == len(after):
            words = changed_words(sample.text, spans, before, after)
    return replace(view, change=change, changed_words=words)


def _drawable(cells: np.ndarray | None) -> bool:
    return cells is not None and bool(np.isfinite(cells).all())


def _view(run: int, sample: GallerySample, made: _Embedded) -> SampleView:
    has_image = sample.image is not None
    drawn = made.heats[id(sample)]
    words, answer = EMPTY, EMPTY
    maps = _word_maps(sample, sample.word_cells, made.word_bits)
    has_weights = sample.word_weights is not None and len(sample.word_weights) > 0
    if sample.spans is not None and sample.text and (has_weights or maps):
        weights = sample.word_weights if has_weights else None
        words = clickable_words(sample.text, sample.spans, weights, maps)
    answer_maps = _word_maps(sample, sample.answer_cells, made.word_bits)
    if answer_maps:
        answer = clickable_words(
            sample.prediction, word_spans(sample.prediction), None, answer_maps
        )
    alt, note, top, kept = "", "", "", ""
    cells, columns, rows = "", "", ""
    if sample.cells is None:
        note = "no attention over the image" if has_image and not (maps or answer_maps) else ""
    elif not _drawable(sample.cells):
        note = "the attention has weights that are not finite"
    elif has_image:
        alt = _describe_map(sample, sample.cells)
        top = f"{colour_limit(sample.cells):.3g}"
        if is_hard_map(sample.cells):
            kept = f"kept {int((sample.cells > 0).sum())} of {sample.cells.size} cells"
            alt = f"Hard attention: {kept} of a grid of {_grid_size(sample.cells)}."
        cells = pack_map(sample.cells, made.bits) if made.bits else ""
    if has_image and made.bits:
        shape = next((one.shape for one in _grids(sample)), None)
        columns, rows = ("", "") if shape is None else grid_edges(_geometry(sample), shape)
    shape_of_truth = ""
    if has_image and sample.truth_cells is not None and sample.truth_cells.max(initial=0) > 0:
        shape_of_truth = svg_path(cell_outline(sample.truth_cells, _geometry(sample)))
    return SampleView(
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
            (metric_title(name), format_number(value, 2))
            for name, value in sample.scores.items()
            if math.isfinite(value)
        ),
        summary=_score_summary(sample.scores),
        inside=evidence_agreement(sample.scores),
        levels=tuple(_levels(sample, made.bits)) if has_image else (),
        faithful=faithfulness(sample.scores),
        cells=cells,
        columns=columns,
        rows=rows,
        answer=answer,
        kept=kept,
    )


def _grids(sample: GallerySample) -> Iterator[np.ndarray]:
    """Yield all maps of a sample, the main one first."""
    if sample.cells is not None:
        yield sample.cells
    for many in (sample.word_cells, sample.answer_cells):
        yield from () if many is None else many


def _word_maps(sample: GallerySample, maps: np.ndarray | None, bits: int) -> dict[int, WordMap]:
    """Return the word maps that can be drawn, by index."""
    if maps is None or sample.image is None or not bits:
        return {}
    return {
        at: WordMap(pack_map(cells, bits), _describe_map(sample, cells))
        for at, cells in enumerate(maps)
        if _drawable(cells)
    }


def _levels(sample: GallerySample, bits: int) -> Iterator[LevelMap]:
    """Yield the level maps that can be drawn."""
    for name, cells in sample.levels.items():
        drawn = _heat(replace(sample, cells=cells, truth_cells=None), _HEAT_SIDES[-1])
        if drawn:
            alt = f"{name}. {_describe_map(sample, cells)}"
            numbers = pack_map(cells, bits) if bits else ""
            columns, rows = grid_edges(_geometry(sample), cells.shape) if bits else ("", "")
            yield LevelMap(name, data_uri(drawn, "png"), alt, numbers, columns, rows)


def _describe_map(sample: GallerySample, cells: Float[np.ndarray, "r c"]) -> str:
    """Return a sentence on where a map has its largest weight."""
    place, peak = peak_location(cells, _geometry(sample)), float(cells.max(initial=0))
    return f"Attention: most {place}, {peak:.3g} in one cell of {_grid_size(cells)}."


def svg_path(loops: Sequence[Sequence[Point]]) -> str:
    """Return closed lines as the `d` attribute of an SVG path."""
    return "".join("M" + "L".join(f"{x:.4g},{y:.4g}" for x, y in loop[:-1]) + "Z" for loop in loops)


def evidence_agreement(scores: Mapping[str, float]) -> float | None:
    """Return the agreement of attention and evidence: mass inside, else pointing, else None."""
    for start in ("mass", "pointing"):
        for name, value in scores.items():
            if start in name.lower() and math.isfinite(value):
                return float(value)
    return None


def faithfulness(scores: Mapping[str, float]) -> float | None:
    """Return the first available faithfulness score, or None."""
    for name in _FAITHFUL:
        value = scores.get(name)
        if value is not None and math.isfinite(value):
            return float(value)
    return None


def _score_summary(scores: Mapping[str, float]) -> str:
    """Return the two main scores of a sample in words."""
    inside, faithful = evidence_agreement(scores), faithfulness(scores)
    found = [] if inside is None else [f"on the evidence {format_number(inside, 2)}"]
    found += [] if faithful is None else [f"faithful {format_number(faithful, 2)}"]
    return ", ".join(found) or "scores"


def _grid_size(cells: Float[np.ndarray, "r c"]) -> str:
    return f"{cells.shape[0]} × {cells.shape[1]}"
