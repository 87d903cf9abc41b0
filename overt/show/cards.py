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
from overt.show.sample import Sample
from overt.show.table import number, titled
from overt.show.text import words_html

PHOTO_BYTES = 2_200_000  # of all photos together, before base64 adds a third
HEAT_BYTES = 1_000_000
_PHOTO_SIDES = (320, 256, 192, 128, 96, 64)
_HEAT_SIDES = (96, 64, 40)


@dataclass(frozen=True)
class Level:
    """One of several maps of a view, drawn small: what it is called, its heat, where it looks."""

    name: str
    heat: str
    alt: str


@dataclass(frozen=True)
class View:
    """What one run made of a sample: its answer, its heat, its words, and how they scored.

    `alt` says in words where it looked; `note` why there is no heat; `inside` is how far it agrees
    with the evidence, from 0 to 1, if that was measured.
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
    inside: float | None
    levels: tuple[Level, ...] = ()


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
            "heat": any(view.heat for view in views),
            "outline": any(view.outline for view in views),
            "words": any(view.words for view in views),
            "inside": any(view.inside is not None for view in views),
            "right": any(view.right is not None for view in views),
            "levels": any(view.levels for view in views),
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
    cards = [
        _card(name, by_run, photo, heats)
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


def _card(
    name: str, by_run: Mapping[int, Sample], photo: int | None, heats: Mapping[int, bytes]
) -> Card:
    first = next(iter(by_run.values()))
    seen = next((one for one in by_run.values() if one.image is not None), None)
    height, width = (1, 1) if seen is None or seen.image is None else seen.image.shape[:2]
    views = [_view(run, sample, heats[id(sample)]) for run, sample in by_run.items()]
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
    )


def _view(run: int, sample: Sample, drawn: bytes) -> View:
    has_image = sample.image is not None
    words = Markup()
    if sample.word_weights is not None and sample.spans is not None and sample.text:
        words = words_html(sample.text, sample.spans, sample.word_weights)
    alt, note, top = "", "", ""
    if sample.cells is None:
        note = "no attention over the image" if has_image else ""
    elif not np.isfinite(sample.cells).all():
        note = "the attention holds numbers that are not finite"
    elif has_image:
        alt = _told(sample, sample.cells)
        top = f"{highest(sample.cells):.3g}"
    shape = ""
    if has_image and sample.truth_cells is not None and sample.truth_cells.max(initial=0) > 0:
        shape = path(outline(sample.truth_cells, _geometry(sample)))
    return View(
        run=run,
        prediction=sample.prediction,
        right=sample.right,
        confidence="" if math.isnan(sample.confidence) else f"{sample.confidence:.0%}",
        heat=data_uri(drawn, "png") if drawn else "",
        top=top,
        outline=shape,
        alt=alt,
        note=note,
        words=words,
        scores=tuple(
            (titled(name), number(value, 2))
            for name, value in sample.scores.items()
            if math.isfinite(value)
        ),
        inside=agreement(sample.scores),
        levels=tuple(_levels(sample)) if has_image else (),
    )


def _levels(sample: Sample) -> Iterator[Level]:
    """The maps of a sample that can be drawn, in their order."""
    for name, cells in sample.levels.items():
        drawn = _heat(replace(sample, cells=cells, truth_cells=None), _HEAT_SIDES[-1])
        if drawn:
            yield Level(name, data_uri(drawn, "png"), f"{name}. {_told(sample, cells)}")


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


def _grid(cells: Float[np.ndarray, "r c"]) -> str:
    return f"{cells.shape[0]} × {cells.shape[1]}"
