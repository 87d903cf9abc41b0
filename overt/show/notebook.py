"""A view to look around in, inside a notebook: the page of `overt look` in a frame of its own.

A map by itself shows a plain heat map in a notebook. With its photo and its words it is more:
`view(map, photo)` as the last line of a cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from overt import files
from overt.attention import AttentionMap
from overt.show.browse import page
from overt.show.overlay import check_photo
from overt.show.panel import Choice, Panel, choose, grids, panel


@dataclass(frozen=True, eq=False)
class View:
    """A panel and what is drawn large of it; a notebook shows it, `save` writes the page."""

    panel: Panel
    choice: Choice
    height: int = 720

    def html(self) -> str:
        """The whole page."""
        return page([self.panel], [self.choice])

    def save(self, path: Path | str) -> Path:
        """Write the page as a file."""
        files.write_text(Path(path), self.html())
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame: its styles and scripts stay inside, and it may ask nobody."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.html())}" '
            f'style="width:100%;height:{self.height}px;border:0" '
            f'title="{escape(self.panel.title)}"></iframe>'
        )


def view(
    attention: AttentionMap,
    photo: UInt8[np.ndarray, "y x 3"] | None = None,
    tokens: Sequence[str] | None = None,
    row: int = 0,
    layer: int | None = None,
    head: int | None = None,
    query: str | None = None,
    title: str = "Attention",
) -> View:
    """One sample's map, ready to be looked at in a notebook.

    `photo` lies under every grid of cells, at the place that the geometry of the layout says.
    `tokens` name the positions; of both axes, where both are the same. What is not chosen is left
    to the view.
    """
    if photo is not None:
        check_photo(photo)
    one = attention.select(torch.tensor([row], device=attention.values.device))
    same = len(one.queries) == len(one.keys)
    spans = [*grids(one.queries), *grids(one.keys)] if photo is not None else []
    shown = panel(
        one,
        title,
        queries=tokens if same else None,
        keys=tokens,
        photos={span.name: photo for span in spans if photo is not None},
    )
    return View(shown, choose(shown, layer, head, query))
