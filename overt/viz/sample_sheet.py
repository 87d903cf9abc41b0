"""Sheet of samples as one PNG: a row per sample, a column per run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from overt.errors import UserError, require_package
from overt.geometry import PixelGeometry
from overt.viz.gallery_sample import GallerySample
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    DrawFunction,
    OverlayStyle,
    cell_outline,
    colour_bar,
    draw_outline,
    enlarge_photo,
    overlay,
    resize_geometry,
    save_png,
    spotlight,
)
from overt.viz.text_heatmap import MIN_OPACITY, weighted_pieces

TILE, GAP, MARGIN = 320, 32, 44
INK, SOFT, RIGHT, WRONG = (29, 29, 31), (110, 110, 116), (20, 113, 63), (176, 55, 46)
MARK = (247, 185, 85)


def save_sample_sheet(
    samples_by_run: Mapping[str, Sequence[GallerySample]],
    path: Path | str,
    style: OverlayStyle = DEFAULT_STYLE,
    draw: DrawFunction = overlay,
) -> None:
    """Draw the samples that all runs share and write them as PNG.

    Each row has the text and the truth, then the photo, then per run the heat on the photo with
    outlined evidence, the prediction marked right or wrong, and the words marked by weight.

    Args:
        samples_by_run: gallery samples of each run, by its title.
        path: PNG file to write.
        style: colours and size.
        draw: function that draws a map on its photo; `spotlight` is for hard attention.

    Raises:
        UserError: if there is no run, or the runs share no sample.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> photo = np.zeros((32, 32, 3), np.uint8)
        >>> sample = GallerySample(id="q0", image=photo, cells=np.eye(4), prediction="yes")
        >>> with TemporaryDirectory() as folder:
        ...     save_sample_sheet({"soft": [sample], "hard": [sample]}, f"{folder}/sheet.png")
        ...     Image.open(f"{folder}/sheet.png").width  # the photo and two runs
        1112
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


def _rows(samples_by_run: Mapping[str, Sequence[GallerySample]]) -> list[list[GallerySample]]:
    by_run = [{sample.id: sample for sample in samples} for samples in samples_by_run.values()]
    if not by_run:
        raise UserError("Give the samples of at least one run.")
    shared = [name for name in by_run[0] if all(name in one for one in by_run)]
    if not shared:
        raise UserError("The runs share no sample ids: there is nothing to compare.")
    return [[one[name] for one in by_run] for name in shared]


def _draw_row(
    canvas: "_Canvas", row: Sequence[GallerySample], style: OverlayStyle, draw: DrawFunction
) -> None:
    first = row[0]
    head = first.text or f"sample {first.id}"
    canvas.paragraph(MARGIN, head, canvas.width - 2 * MARGIN, bold=True)
    if first.truth:
        canvas.text(MARGIN, canvas.y, f"truth: {first.truth}", SOFT)
        canvas.y += 34
    canvas.y += 4
    tiles = [_photo(first), *(_attended_photo(sample, style, draw) for sample in row)]
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


def _draw_words(canvas: "_Canvas", left: int, sample: GallerySample) -> None:
    """Draw the words of the text within a column, each marked by its weight."""
    if sample.spans is None or sample.word_weights is None or not sample.text:
        return
    x = float(left)
    for piece, weight, level in weighted_pieces(sample.text, sample.spans, sample.word_weights):
        wide = canvas.small.getlength(piece)
        if x > left and x + canvas.small.getlength(piece.rstrip()) > left + TILE:
            x, canvas.y = float(left), canvas.y + 30
            canvas.make_room(canvas.y)
            if not piece.strip():
                continue
        if weight is not None:
            canvas.draw.rounded_rectangle(
                (x - 2, canvas.y, x + wide + 2, canvas.y + 27), 5, _on_white(MARK, level)
            )
        faint = 1.0 if weight is None else MIN_OPACITY + (1 - MIN_OPACITY) * level
        canvas.draw.text((x, canvas.y + 1), piece, _on_white(INK, faint), canvas.small)
        x += wide
    canvas.y += 32


def _draw_key(canvas: "_Canvas", style: OverlayStyle, draw: DrawFunction) -> None:
    y = canvas.y
    if draw is spotlight:
        canvas.text(MARGIN, y, "dark cells were dropped", SOFT)
    else:
        canvas.text(MARGIN, y, "least attention", SOFT)
        canvas.paste(MARGIN + 186, y + 6, colour_bar(160, 18, style, under=138))
        canvas.text(MARGIN + 360, y, "most", SOFT)
    x = MARGIN + 470
    canvas.draw.rectangle((x, y + 3, x + 28, y + 25), (170, 170, 170), INK, 6)
    canvas.draw.rectangle((x + 2, y + 5, x + 26, y + 23), None, style.outline, 3)
    canvas.text(x + 42, y, "evidence", SOFT)
    canvas.y = y + 30


def _photo(sample: GallerySample) -> UInt8[np.ndarray, "y x 3"] | None:
    return None if sample.image is None else _fit_column(enlarge_photo(sample.image, TILE))


def _attended_photo(
    sample: GallerySample, style: OverlayStyle, draw: DrawFunction
) -> UInt8[np.ndarray, "y x 3"] | None:
    """Return the photo with heat and outline, or only the outline without a map."""
    if sample.image is None:
        return None
    if sample.cells is not None:
        return _fit_column(
            draw(sample.image, sample.cells, sample.geometry, style, sample.truth_cells)
        )
    photo = enlarge_photo(sample.image, TILE)
    if sample.truth_cells is not None:
        geometry = sample.geometry or PixelGeometry.identity(1, sample.image.shape[:2])
        lines = cell_outline(sample.truth_cells, resize_geometry(geometry, photo.shape[:2]))
        photo = draw_outline(photo, lines, style)
    return _fit_column(photo)


def _fit_column(picture: UInt8[np.ndarray, "y x 3"]) -> UInt8[np.ndarray, "Y X 3"]:
    """Resize an image to the width of a column."""
    height, width = picture.shape[:2]
    size = (TILE, max(1, round(height * TILE / width)))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


def _left(column: int) -> int:
    return MARGIN + column * (TILE + GAP)


def _on_white(colour: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    """Return a colour at this opacity on white."""
    red, green, blue = (round(255 + (value - 255) * share) for value in colour)
    return red, green, blue


class _Canvas:
    """A white sheet that grows downward; `y` is the position of the next element."""

    def __init__(self, width: int) -> None:
        require_package("matplotlib")
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
        """Draw one line of text with its top at `y`."""
        self.make_room(y)
        self.draw.text((x, y), text, colour, self.bold if bold else self.plain)

    def paragraph(
        self, x: int, text: str, width: int, colour: tuple[int, int, int] = INK, bold: bool = False
    ) -> None:
        """Draw wrapped text and move `y` below it."""
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
        """Paste an image with its upper left corner at (x, y)."""
        self.make_room(y + picture.shape[0])
        self.sheet.paste(Image.fromarray(picture), (x, y))

    def make_room(self, bottom: int) -> None:
        """Extend the sheet well below `bottom`."""
        if bottom + 400 > self.sheet.height:
            taller = Image.new("RGB", (self.width, 2 * bottom + 400), "white")
            taller.paste(self.sheet)
            self.sheet, self.draw = taller, ImageDraw.Draw(taller)

    def pixels(self) -> UInt8[np.ndarray, "y x 3"]:
        """Return the sheet cropped below the last element."""
        return np.asarray(self.sheet.crop((0, 0, self.width, self.y + MARGIN)))
