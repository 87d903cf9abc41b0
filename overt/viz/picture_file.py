"""Write the picture of a map in one call: over its photo, over its text, or as a page."""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from overt import io
from overt.attention import AttentionMap
from overt.viz.attention_figure import save_panels
from overt.viz.notebook import NotebookView, view
from overt.viz.panel import (
    choose,
    grid_spans,
    make_panel,
    text_spans,
    text_weights,
    weight_row,
)
from overt.viz.photo_overlay import (
    check_unsigned,
    image_cells,
    overlay,
    save_png,
    warn_if_stretched,
)
from overt.viz.text_heatmap import text_heatmap_svg

CELL = 32  # pixels of a cell drawn without a photo


def save_picture(
    path: Path | str,
    attention: AttentionMap,
    photo: UInt8[np.ndarray, "y x 3"] | Image.Image | None = None,
    layer: int | None = None,
    head: int | None = None,
    query: str | int | None = None,
) -> Path:
    """Write one sample of a map: `.png` over its photo, `.svg` over its text, `.html` as a page.

    A `.png` or `.svg` of a map without an image or a text is a figure with the matrix of the map
    and all of its layers and heads.

    Args:
        path: file to write; the suffix chooses the format.
        attention: map of one sample.
        photo: photo of the sample; None draws the cells on white.
        layer: layer to draw; None: the last. The page has all.
        head: head to draw; None: the mean of all.
        query: query to draw, by token, name or index; None: the class token, else the mean.

    Returns:
        The path.

    Raises:
        ValueError: if the format is not supported, the map has several samples or signed weights,
            or a `.png` has a photo and no image among the keys.
        UserError: if the layer, head or query does not exist.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> from overt.attention import grid
        >>> heat = AttentionMap.from_cells(torch.rand(1, 6), grid(2, 3))
        >>> with TemporaryDirectory() as folder:
        ...     Image.open(save_picture(f"{folder}/heat.png", heat)).size  # width, height
        (288, 192)
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".png", ".svg", ".html"):
        raise ValueError(f"Unsupported format {path.suffix!r} of {path}: use .png, .svg or .html.")
    if kind == ".html":
        _view(attention, photo, layer, head, query).save(path)
    elif kind == ".svg" and len(text_spans(attention.keys)) == 1:
        io.write_text(path, _text_svg(attention, layer, head, query))
    elif kind == ".svg" or (photo is None and not grid_spans(attention.keys)):
        check_unsigned(attention)
        shown = _view(attention, photo, layer, head, query)
        save_panels(path, [shown.panel], [shown.choice])
    else:
        cells, geometry = image_cells(attention, layer, head, query)
        if photo is None:  # cells that a crop made oblong are drawn as squares
            rows, columns = cells.shape
            photo = np.full((rows * CELL, columns * CELL, 3), 255, np.uint8)
            geometry = None
        elif geometry is None:
            warn_if_stretched((cells.shape[0], cells.shape[1]), photo)
        save_png(path, overlay(photo, cells, geometry))
    return path


def _view(
    attention: AttentionMap,
    photo: UInt8[np.ndarray, "y x 3"] | Image.Image | None,
    layer: int | None,
    head: int | None,
    query: str | int | None,
) -> NotebookView:
    """Return the panel and choice of a map of one sample."""
    if len(attention) != 1:
        raise ValueError(
            f"expected a map of one sample, got {len(attention)}: select one with "
            "attention.sample(0)"
        )
    return view(attention, photo, layer=layer, head=head, query=query)


def _text_svg(
    attention: AttentionMap, layer: int | None, head: int | None, query: str | int | None
) -> str:
    check_unsigned(attention)
    spans = text_spans(attention.keys)
    shown = make_panel(attention)
    weights = weight_row(shown, choose(shown, layer, head, query))
    return text_heatmap_svg(*text_weights(spans[0], weights))
