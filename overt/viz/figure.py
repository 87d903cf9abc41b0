"""Matplotlib figures in the width of a paper: text, axes, colour bars and saving.

Amounts use perceptually uniform colours with a colour bar. Categories use the colours of Okabe and
Ito, which colour-blind readers can distinguish.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup

from overt import io as overt_io
from overt.errors import UserError, require_package
from overt.viz.photo_overlay import white_colour_table
from overt.viz.templates import render_template

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT = "#1d1d1f", "#66666c"
PAGE_WIDTH = 7.0  # inches, text width of most papers
FONT_SIZE = 8.0  # points
DPI = 300
CATEGORICAL_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MONOSPACE_WIDTH = 0.602  # of a character, in font sizes


def save_figure(path: Path | str, figure: "Figure", title: str = "attention") -> Path:
    """Write a matplotlib figure as .png, .svg or .html.

    The write is atomic, and equal figures give equal bytes. SVG text stays text, and the page makes
    no network requests.

    Args:
        path: file to write; the suffix chooses the format.
        figure: matplotlib figure.
        title: text alternative of the figure.

    Returns:
        The path.

    Raises:
        UserError: if the suffix is not .png, .svg or .html.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> figure = new_figure(width=2.0, height=1.0)
        >>> add_text(figure, 0.1, 0.5, "attention")
        >>> with TemporaryDirectory() as folder:
        ...     path = save_figure(f"{folder}/figure.svg", figure)
        ...     "attention" in path.read_text()  # text stays text
        True
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg", ".html"):
        raise UserError(f"Unsupported format {path.suffix!r} of {path}: use .png, .svg or .html.")
    with reproducible_output():
        if kind == ".png":
            with overt_io.atomic_file(path) as temporary:
                # no version or date in the file, so that equal figures have equal bytes
                figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
            return path
        out = io.StringIO()
        figure.savefig(out, format="svg", dpi=DPI, metadata={"Date": None, "Title": title})
    drawn = out.getvalue()
    if kind == ".html":
        drawn = render_template(
            "figure.html.jinja", title=Markup(escape(title)), svg=drawn[drawn.index("<svg") :]
        )
    overt_io.write_text(path, drawn)
    return path


@contextmanager
def reproducible_output() -> Iterator[None]:
    """Keep text as text in SVG files, and make equal figures equal bytes.

    Glyphs that the font lacks become boxes in a PNG; matplotlib's warning about each is silenced.
    """
    require_package("matplotlib")
    import matplotlib

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "overt"}):
            yield


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty white figure of this size in inches."""
    require_package("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def add_axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Add axes without frame at a position in inches from the upper left corner."""
    across, down = figure.get_size_inches()
    axes = figure.add_axes(
        (left / across, 1 - (top + height) / down, width / across, height / down)
    )
    axes.set_axis_off()
    return axes


def add_text(figure: "Figure", x: float, y: float, text: str, **style: Any) -> None:
    """Add a line of text centred `y` inches below the top, without mathtext."""
    across, down = figure.get_size_inches()
    plain: dict[str, Any] = {"size": FONT_SIZE, "color": INK, "va": "center", "parse_math": False}
    figure.text(x / across, 1 - y / down, text, **{**plain, **style})


def show_image(axes: "Axes", picture: UInt8[np.ndarray, "y x 3"]) -> None:
    """Show an image that fills its axes, without interpolation."""
    axes.imshow(picture, aspect="auto", interpolation="nearest", interpolation_stage="rgba")


def colour_weights(weights: Float[np.ndarray, "r c"], top: float) -> UInt8[np.ndarray, "r c 3"]:
    """Map weights to colours on white: zero is white, `top` and above the last colour."""
    share = (np.maximum(weights, 0) / top).clip(0, 1) if top > 0 else np.zeros_like(weights)
    return white_colour_table()[np.rint(255 * share).astype(np.uint8)]


def add_colour_bar(
    figure: "Figure",
    box: tuple[float, float, float, float],
    colours: UInt8[np.ndarray, "n 3"],
    ends: tuple[str, str],
    title: str,
) -> None:
    """Add a colour bar with labels at both ends, in a box of inches."""
    left, top, width, height = box
    add_text(figure, left, top - 0.09, title, color=SOFT, size=FONT_SIZE - 1)
    axes = add_axes(figure, left, top, width, height)
    show_image(axes, colours[None])
    axes.add_patch(_bar_frame(len(colours)))
    for x, text, side in ((left, ends[0], "left"), (left + width, ends[1], "right")):
        add_text(figure, x, top + height + 0.09, text, color=SOFT, size=FONT_SIZE - 1, ha=side)


def _bar_frame(count: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((-0.5, -0.5), count, 1, fill=False, edgecolor=SOFT, lw=0.5, clip_on=False)
