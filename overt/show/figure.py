"""Figures for papers and pages: one size of letters, colours that everybody can tell apart.

A drawing function returns a matplotlib figure; `save_figure` writes it as PNG, SVG or HTML. Colours
that mean an amount come from perceptually uniform maps with a scale beside them; colours that tell
things apart are those of Okabe and Ito, which the colour-blind can tell apart, too.
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

from overt import files
from overt.errors import BadInput
from overt.show.look import INK, SOFT, white_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = 7.0  # inches: the width of the text of most papers
SIZE = 8.0  # of letters, in points
DPI = 300
APART = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WIDE = 0.602  # the width of a letter of a monospaced face, in sizes

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: #1d1d1f; background: #fff }}
figure {{ margin: 0 }} svg {{ width: 100%; height: auto; background: #fff }}
figcaption {{ color: #66666c; margin-top: .5rem }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #eee; background: #161618 }} figcaption {{ color: #aaa }}
}}
</style></head>
<body><figure role="img" aria-label="{title}">{svg}<figcaption>{title}</figcaption></figure></body>
</html>
"""


def save_figure(path: Path | str, figure: "Figure", title: str = "attention") -> Path:
    """Write a figure as .png, .svg or .html, whole or not at all; the same one is the same bytes.

    `title` says in words what is to be seen. Letters stay letters in an SVG, and a page asks for
    nothing from elsewhere.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg", ".html"):
        raise BadInput(f"{path} is no kind of picture: its name ends in .png, .svg or .html.")
    with _settings():
        if kind == ".png":
            with files.replacing(path) as temporary:
                figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
            return path
        out = io.StringIO()
        figure.savefig(out, format="svg", dpi=DPI, metadata={"Date": None, "Title": title})
    drawn = out.getvalue()
    if kind == ".html":
        drawn = _PAGE.format(title=escape(title), svg=drawn[drawn.index("<svg") :])
    files.write_text(path, drawn)
    return path


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "overt"}):
            yield


def blank(width: float, height: float) -> "Figure":
    """An empty white figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def place(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Axes without lines at a place in inches from the upper left corner."""
    across, down = figure.get_size_inches()
    axes = figure.add_axes(
        (left / across, 1 - (top + height) / down, width / across, height / down)
    )
    axes.set_axis_off()
    return axes


def say(figure: "Figure", x: float, y: float, text: str, **style: Any) -> None:
    """A line of text, its middle `y` inches below the top; no sign in it means anything."""
    across, down = figure.get_size_inches()
    plain: dict[str, Any] = {"size": SIZE, "color": INK, "va": "center", "parse_math": False}
    figure.text(x / across, 1 - y / down, text, **{**plain, **style})


def show(axes: "Axes", picture: UInt8[np.ndarray, "y x 3"]) -> None:
    """A picture that fills its axes, pixel by pixel."""
    axes.imshow(picture, aspect="auto", interpolation="nearest", interpolation_stage="rgba")


def shaded(weights: Float[np.ndarray, "r c"], top: float) -> UInt8[np.ndarray, "r c 3"]:
    """Weights as colours on white: none is white, `top` and more the last colour."""
    share = (np.maximum(weights, 0) / top).clip(0, 1) if top > 0 else np.zeros_like(weights)
    return white_scale()[np.rint(255 * share).astype(np.uint8)]


def scale(
    figure: "Figure",
    box: tuple[float, float, float, float],
    colours: UInt8[np.ndarray, "n 3"],
    ends: tuple[str, str],
    title: str,
) -> None:
    """The colours from the least to the most, with words for both ends, in a box of inches."""
    left, top, width, height = box
    say(figure, left, top - 0.09, title, color=SOFT, size=SIZE - 1)
    axes = place(figure, left, top, width, height)
    show(axes, colours[None])
    axes.add_patch(_edge(len(colours)))
    for x, text, side in ((left, ends[0], "left"), (left + width, ends[1], "right")):
        say(figure, x, top + height + 0.09, text, color=SOFT, size=SIZE - 1, ha=side)


def _edge(count: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((-0.5, -0.5), count, 1, fill=False, edgecolor=SOFT, lw=0.5, clip_on=False)


def finite(values: Float[np.ndarray, "..."]) -> None:
    """Refuse numbers that cannot be drawn."""
    wrong = int((~np.isfinite(values)).sum())
    if wrong:
        raise ValueError(f"{wrong} weights of the map are not finite")
