"""A few samples side by side as one PNG, for a README: a row a sample, a column a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.show.overlay import (
    PLAIN,
    Style,
    enlarge,
    outline,
    outlined,
    overlay,
    resized,
    save_png,
    scale_bar,
    spotlight,
)
from overt.show.sample import Sample
from overt.show.text import FAINTEST, pieces

TILE, GAP, MARGIN = 320, 32, 44
INK, SOFT, RIGHT, WRONG = (29, 29, 31), (110, 110, 116), (20, 113, 63), (176, 55, 46)
MARK = (247, 185, 85)


Draw = Callable[..., UInt8[np.ndarray, "y x 3"]]


def picture(
    samples_by_run: Mapping[str, Sequence[Sample]],
    path: Path | str,
    style: Style = PLAIN,
    draw: Draw = overlay,
) -> None:
    """Draw the samples that every run has, in the order of the first run, and write them as PNG.

    Each row is headed by its text and truth, begins with the photo, and has a column a run: the
    heat on the photo, the evidence outlined, the answer marked right or wrong, the words marked.
    With `draw=spotlight` the cells that hard attention kept stand out instead: a row a question.
    """
    rows = _rows(samples_by_run)
    width = 2 * MARGIN + (1 + len(samples_by_run)) * (TILE + GAP) - GAP
    canvas = _Canvas(width)
    for column, name in enumerate(["photo", *samples_by_run]):
        canvas.text(_left(column), canvas.y, name, SOFT if column == 0 else INK, bold=column > 0)
    canvas.y += 44
    for row in rows:
        _draw_row(canvas, row, style, draw)
    _draw_key(canvas, style, draw)
    save_png(path, canvas.pixels())


def _rows(samples_by_run: Mapping[str, Sequence[Sample]]) -> list[list[Sample]]:
    by_run = [{sample.id: sample for sample in samples} for samples in samples_by_run.values()]
    if not by_run:
        raise BadInput("a picture needs the samples of at least one run.")
    shared = [name for name in by_run[0] if all(name in one for one in by_run)]
    if not shared:
        raise BadInput("the runs share no sample, so there is nothing to put side by side.")
    return [[one[name] for one in by_run] for name in shared]


def _draw_row(canvas: "_Canvas", row: Sequence[Sample], style: Style, draw: Draw) -> None:
    first = row[0]
    head = first.text or f"sample {first.id}"
    canvas.paragraph(MARGIN, head, canvas.width - 2 * MARGIN, bold=True)
    if first.truth:
        canvas.text(MARGIN, canvas.y, f"truth: {first.truth}", SOFT)
        canvas.y += 34
    canvas.y += 4
    tiles = [_photo(first), *(_seen(sample, style, draw) for sample in row)]
    tall = max((tile.shape[0] for tile in tiles if tile is not None), default=0)
    for column, tile in enumerate(tiles):
        if tile is not None:
            canvas.paste(_left(column), canvas.y, tile)
    below = canvas.y + tall + (10 if tall else 0)
    ends = [below]
    for column, sample in enumerate(row, start=1):
        canvas.y = below
        mark, colour = {True: ("✓ ", RIGHT), False: ("✗ ", WRONG), None: ("", INK)}[sample.right]
        sure = "" if math.isnan(sample.confidence) else f"  {sample.confidence:.0%}"
        answer = f"{mark}{sample.prediction or '–'}{sure}"
        canvas.paragraph(_left(column), answer, TILE, colour)
        _draw_words(canvas, _left(column), sample)
        ends.append(canvas.y)
    canvas.y = max(ends) + 30


def _draw_words(canvas: "_Canvas", left: int, sample: Sample) -> None:
    """The words of the text within a column, each marked by its weight."""
    if sample.spans is None or sample.word_weights is None or not sample.text:
        return
    x = float(left)
    for piece, weight, level in pieces(sample.text, sample.spans, sample.word_weights):
        wide = canvas.small.getlength(piece)
        if x > left and x + canvas.small.getlength(piece.rstrip()) > left + TILE:
            x, canvas.y = float(left), canvas.y + 30
            canvas.make_room(canvas.y)
            if not piece.strip():
                continue
        if weight is not None:
            canvas.draw.rounded_rectangle(
                (x - 2, canvas.y, x + wide + 2, canvas.y + 27), 5, _mixed(MARK, level)
            )
        faint = 1.0 if weight is None else FAINTEST + (1 - FAINTEST) * level
        canvas.draw.text((x, canvas.y + 1), piece, _mixed(INK, faint), canvas.small)
        x += wide
    canvas.y += 32


def _draw_key(canvas: "_Canvas", style: Style, draw: Draw) -> None:
    y = canvas.y
    if draw is spotlight:
        canvas.text(MARGIN, y, "what is dark was not looked at", SOFT)
    else:
        canvas.text(MARGIN, y, "least attention", SOFT)
        canvas.paste(MARGIN + 186, y + 6, scale_bar(160, 18, style, under=138))
        canvas.text(MARGIN + 360, y, "most", SOFT)
    x = MARGIN + 470
    canvas.draw.rectangle((x, y + 3, x + 28, y + 25), (170, 170, 170), INK, 6)
    canvas.draw.rectangle((x + 2, y + 5, x + 26, y + 23), None, style.outline, 3)
    canvas.text(x + 42, y, "evidence", SOFT)
    canvas.y = y + 30


def _photo(sample: Sample) -> UInt8[np.ndarray, "y x 3"] | None:
    return None if sample.image is None else _fitted(enlarge(sample.image, TILE))


def _seen(sample: Sample, style: Style, draw: Draw) -> UInt8[np.ndarray, "y x 3"] | None:
    """The photo with heat and outline; with the outline alone where the model has no map."""
    if sample.image is None:
        return None
    if sample.cells is not None:
        return _fitted(draw(sample.image, sample.cells, sample.geometry, style, sample.truth_cells))
    photo = enlarge(sample.image, TILE)
    if sample.truth_cells is not None:
        height, width = sample.image.shape[:2]
        geometry = sample.geometry or PixelGeometry.identity(1, (height, width))
        lines = outline(sample.truth_cells, resized(geometry, photo.shape[:2]))
        photo = outlined(photo, lines, style)
    return _fitted(photo)


def _fitted(picture: UInt8[np.ndarray, "y x 3"]) -> UInt8[np.ndarray, "Y X 3"]:
    """A picture as wide as a column."""
    height, width = picture.shape[:2]
    size = (TILE, max(1, round(height * TILE / width)))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def _left(column: int) -> int:
    return MARGIN + column * (TILE + GAP)


def _mixed(colour: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    """A colour as it looks on white with this opacity."""
    red, green, blue = (round(255 + (value - 255) * share) for value in colour)
    return red, green, blue


class _Canvas:
    """A white sheet that grows downward; `y` is where the next thing goes."""

    def __init__(self, width: int) -> None:
        from matplotlib import get_data_path

        fonts = Path(get_data_path()) / "fonts" / "ttf"  # has ✓ and ✗, and is always there
        self.plain = ImageFont.truetype(fonts / "DejaVuSans.ttf", 23)
        self.bold = ImageFont.truetype(fonts / "DejaVuSans-Bold.ttf", 23)
        self.small = ImageFont.truetype(fonts / "DejaVuSans.ttf", 21)
        self.width = width
        self.y = MARGIN
        self.sheet = Image.new("RGB", (width, 1024), "white")
        self.draw = ImageDraw.Draw(self.sheet)

    def text(
        self, x: int, y: int, text: str, colour: tuple[int, int, int], bold: bool = False
    ) -> None:
        """One line of text, its top at `y`."""
        self.make_room(y)
        self.draw.text((x, y), text, colour, self.bold if bold else self.plain)

    def paragraph(
        self, x: int, text: str, width: int, colour: tuple[int, int, int] = INK, bold: bool = False
    ) -> None:
        """Text in as many lines as it takes, and `y` below them."""
        font = self.bold if bold else self.plain
        line = ""
        for word in text.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > width:
                self.text(x, self.y, line, colour, bold)
                self.y += 34
                longer = word
            line = longer
        self.text(x, self.y, line, colour, bold)
        self.y += 34

    def paste(self, x: int, y: int, picture: UInt8[np.ndarray, "y x 3"]) -> None:
        """A picture, its upper left corner at (x, y)."""
        self.make_room(y + picture.shape[0])
        self.sheet.paste(Image.fromarray(picture), (x, y))

    def make_room(self, bottom: int) -> None:
        """See that the sheet reaches well below `bottom`."""
        if bottom + 400 > self.sheet.height:
            taller = Image.new("RGB", (self.width, 2 * bottom + 400), "white")
            taller.paste(self.sheet)
            self.sheet, self.draw = taller, ImageDraw.Draw(taller)

    def pixels(self) -> UInt8[np.ndarray, "y x 3"]:
        """The sheet, cut below the last thing on it."""
        return np.asarray(self.sheet.crop((0, 0, self.width, self.y + MARGIN)))
