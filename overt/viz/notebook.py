"""Interactive view of an attention map in a notebook: the page of `overt look` in an iframe.

`view(attention, photo)` as the last line of a cell shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from overt import io
from overt.attention import AttentionMap
from overt.viz.browse_page import render_page
from overt.viz.panel import Choice, Panel, choose, grid_spans, make_panel
from overt.viz.photo_overlay import as_photo, warn_if_stretched
from overt.viz.templates import sandboxed_frame


@dataclass(frozen=True, eq=False)
class NotebookView:
    """A panel and its choice; notebooks display it, `save` writes the page."""

    panel: Panel
    choice: Choice
    height: int = 720

    def html(self) -> str:
        """Render the page."""
        return render_page([self.panel], [self.choice])

    def save(self, path: Path | str) -> Path:
        """Write the page and return its path."""
        io.write_text(Path(path), self.html())
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed iframe."""
        return sandboxed_frame(self.html(), self.panel.title, self.height)


def view(
    attention: AttentionMap,
    photo: UInt8[np.ndarray, "y x 3"] | Image.Image | None = None,
    tokens: Sequence[str] | None = None,
    row: int = 0,
    layer: int | None = None,
    head: int | None = None,
    query: str | int | None = None,
    title: str = "Attention",
) -> NotebookView:
    """Return an interactive view of one sample for a notebook.

    Args:
        attention: attention map of any number of samples.
        photo: photo under every image grid, as an array or a PIL image, placed by the geometry of
            the layout.
        tokens: names of the keys, and of the queries if both axes have the same length.
        row: index of the sample.
        layer: layer to show first; default: the last.
        head: head to show first; default: the mean of all.
        query: query to show first, by token, name or index; default: class token or mean.
        title: title of the page.

    Returns:
        A view; notebooks display it, `save(path)` writes a page.

    Raises:
        ValueError: if the photo is not an 8-bit RGB image.
        UserError: if a layer, head or query does not exist.

    Example:
        >>> from overt.attention import words
        >>> attention = AttentionMap(torch.full((1, 2, 4, 3, 3), 1 / 3), words(3), words(3))
        >>> shown = view(attention, tokens=["a", "red", "ring"], layer=0)  # the last line of a cell
        >>> "ring" in shown.html()
        True
    """
    picture = None if photo is None else as_photo(photo)
    one = attention.select(torch.tensor([row], device=attention.values.device))
    same = len(one.queries) == len(one.keys)
    spans = [*grid_spans(one.queries), *grid_spans(one.keys)] if picture is not None else []
    for span in {one.name: one for one in spans}.values():  # an axis of each may have it
        if picture is not None and span.geometry is None:
            warn_if_stretched((span.shape[0], span.shape[1]), picture)
    shown = make_panel(
        one,
        title,
        queries=tokens if same else None,
        keys=tokens,
        photos={span.name: picture for span in spans if picture is not None},
    )
    return NotebookView(shown, choose(shown, layer, head, query))
