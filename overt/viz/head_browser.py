"""Interactive view of every layer and head, in a notebook or as a page, also for large models.

Thumbnails show all heads; the open head is drawn as lines between tokens and as a heat map. A page
embeds complete heads up to its size budget, the open one first, and thumbnails of the others.
`live()` computes heads on demand in the notebook kernel.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from overt import io
from overt.attention import AttentionMap
from overt.capture.trace import AttentionTrace
from overt.errors import UserError
from overt.viz.block_grid import AxisPart, HeadBlocks
from overt.viz.panel import parse_integer, plain_token
from overt.viz.photo_overlay import white_colour_table
from overt.viz.templates import base64_text, render_template, sandboxed_frame

BUDGET_MB = 4.0  # weights in a page
MAX_THUMBNAIL = 40  # pixels
MIN_THUMBNAIL = 6
BYTES_PER_WEIGHT = 2 * 4 / 3  # half precision in base64


@dataclass(frozen=True, eq=False)
class HeadView:
    """A block of every head with one head open; notebooks display it, `save` writes the page.

    `budget` is in megabytes. `live()` returns a widget that computes heads on demand.
    """

    blocks: HeadBlocks
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layer: int
    head: int
    query: int | None
    title: str
    budget: float = BUDGET_MB
    height: int = 820

    @property
    def side(self) -> int:
        """Thumbnail size in pixels: all thumbnails take at most a quarter of the budget."""
        room = self.budget * 1e6 / 4 / (4 / 3) / (self.blocks.layers * self.blocks.heads)
        return int(np.clip(room**0.5, MIN_THUMBNAIL, MAX_THUMBNAIL))

    @cached_property
    def complete_heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) pairs that a page embeds in full: those next to the open one."""
        q, k = self.blocks.shape
        room = self.budget * 1e6 * 3 / 4
        most = int(room // (q * k * BYTES_PER_WEIGHT)) if q * k else 0
        order = sorted(
            np.ndindex(self.blocks.layers, self.blocks.heads),
            key=lambda at: (abs(at[0] - self.layer), abs(at[1] - self.head), at),
        )
        return tuple((int(l), int(h)) for l, h in order[:most])

    @property
    def about(self) -> str:
        """Note on what a page leaves out; empty if it is complete."""
        q, k = self.blocks.shape
        count = self.blocks.layers * self.blocks.heads
        notes = []
        if not self.complete_heads:
            down, across = self._steps()
            notes.append(
                f"A head has {q:,} x {k:,} weights, more than the {self.budget:g} MB of this page: "
                f"layer {self.layer}, head {self.head} is reduced, each point the largest of "
                f"{down} x {across} weights; the other heads have only thumbnails."
            )
        elif len(self.complete_heads) < count:
            notes.append(
                f"This page has {len(self.complete_heads)} of {count} heads in full, in "
                f"{self.budget:g} MB; the others have only thumbnails."
            )
        if q > self.side and count > 1:
            notes.append(f"Thumbnails show one query in {-(-q // self.side)}.")
        return " ".join(notes)

    # --- data of the page

    def initial_data(self) -> dict[str, Any]:
        """Return names, sizes and the open head, without weights."""
        return {
            "title": self.title,
            "about": "",
            "layers": list(self.blocks.layer_names),
            "heads": self.blocks.heads,
            "queries": list(self.queries),
            "keys": list(self.keys),
            "same": self.queries == self.keys,
            "start": {"layer": self.layer, "head": self.head, "query": self.query},
            "colours": base64_text(white_colour_table()),
            "small": [None] * self.blocks.layers,
            "blocks": {},
        }

    def page_data(self) -> dict[str, Any]:
        """Return everything that a page embeds."""
        found = self.initial_data()
        found["about"] = self.about
        found["small"] = [self.thumbnails(layer) for layer in range(self.blocks.layers)]
        found["blocks"] = dict(self._blocks())
        return found

    def thumbnails(self, layer: int) -> dict[str, Any]:
        """Return the thumbnails of one layer, each head on its own colour scale."""
        drawn = [self.blocks.thumbnail(layer, head, self.side) for head in range(self.blocks.heads)]
        tops = [float(one.max(initial=0.0)) for one in drawn]
        bright = [
            np.rint(255 * (one.clip(0) / top if top > 0 else one.clip(0))).astype(np.uint8)
            for one, top in zip(drawn, tops, strict=True)
        ]
        return {
            "shape": list(drawn[0].shape),
            "tops": tops,
            "pixels": base64_text(np.stack(bright)),
        }

    def block(self, layer: int, head: int) -> dict[str, Any]:
        """Return a head in full, or max-pooled to fit the budget."""
        down, across = self._steps()
        weights = self.blocks.matrix(layer, head, down, across)
        return {
            "shape": list(weights.shape),
            "step": [down, across],
            "weights": base64_text(weights.clip(0, 65504).astype("<f2")),  # largest float16
        }

    def respond(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a widget message: the thumbnails of a layer, a head, or an error."""
        layer, head = message.get("layer"), message.get("head")
        for what, number, count in (
            ("layer", layer, self.blocks.layers),
            ("head", 0 if head is None else head, self.blocks.heads),
        ):
            if not isinstance(number, int) or not 0 <= number < count:
                return {**message, "wrong": f"unknown {what} {number!r}"}
        assert isinstance(layer, int)
        try:
            if head is None:
                return {**message, "small": self.thumbnails(layer)}
            return {**message, "block": self.block(layer, head)}
        except (ValueError, RuntimeError) as problem:
            return {**message, "wrong": str(problem)}

    def _blocks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for layer, head in self.complete_heads or ((self.layer, self.head),):
            yield f"{layer} {head}", self.block(layer, head)

    def _steps(self) -> tuple[int, int]:
        """Return how many queries and keys share a point, so that one head fits the budget."""
        q, k = self.blocks.shape
        points = max(1, int(self.budget * 1e6 * 3 / 4 / BYTES_PER_WEIGHT))
        down = across = 1
        while -(-q // down) * -(-k // across) > points:
            if -(-q // down) >= -(-k // across):
                down += 1
            else:
                across += 1
        return down, across

    # --- output

    def html(self) -> str:
        """Render the page: one file without network requests."""
        return render_template("headview.html.jinja", title=self.title, data=self.page_data())

    def save(self, path: Path | str) -> Path:
        """Write the page to an .html file and return its path."""
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise UserError(f"Unsupported format {Path(path).suffix!r} of {path}: use .html.")
        io.write_text(Path(path), self.html())
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed iframe."""
        return sandboxed_frame(self.html(), self.title, self.height)

    def live(self) -> Any:
        """Return a widget that computes and sends a head when it is opened.

        Needs `pip install anywidget` and works in Jupyter, VS Code and Colab. A saved notebook does
        not contain its weights.
        """
        try:
            import anywidget
            import traitlets
        except ImportError as problem:
            raise ImportError(
                "live() needs a widget library: pip install anywidget; without it, "
                "viz.head_view(...) and .save(path) show what their budget allows"
            ) from problem
        here = Path(__file__).parent
        script = (here / "headview.js").read_text(encoding="utf-8")
        styles = (here / "headview.css").read_text(encoding="utf-8")

        class HeadWidget(anywidget.AnyWidget):
            """The view with its kernel."""

            _esm = f"{script}\nexport default {{ render: drawLive }};\n"
            _css = styles
            data = traitlets.Dict().tag(sync=True)

        made = HeadWidget(data=self.initial_data())
        made.on_msg(lambda widget, message, buffers: widget.send(self.respond(message)))
        return made


def head_view(
    source: AttentionMap | AttentionTrace,
    query: AxisPart = None,
    key: AxisPart = None,
    layer: int = -1,
    head: int = 0,
    token: str | None = None,
    row: int = 0,
    tokens: Sequence[str] | None = None,
    title: str = "Every layer and head",
    budget: float = BUDGET_MB,
) -> HeadView:
    """Return an interactive view of every layer and head of one sample.

    Args:
        source: attention map or trace.
        query: rows of the block: the name of a span, a range of positions, or None for all.
        key: columns of the block, in the same way.
        layer: layer that is open first.
        head: head that is open first.
        token: draw only the lines of this query first, given as its text or its index.
        row: index of the sample.
        tokens: names of the positions.
        title: title of the page.
        budget: megabytes of weights that a page may embed.

    Returns:
        A view; notebooks display it, `save(path)` writes a page, `live()` returns a widget.

    Raises:
        ValueError: if a layer, head or token does not exist, or the budget is not positive.

    Example:
        >>> import torch
        >>> from overt.attention import words
        >>> attention = AttentionMap(torch.full((1, 2, 4, 3, 3), 1 / 3), words(3), words(3))
        >>> shown = head_view(attention, layer=1, head=2)  # the last line of a notebook cell
        >>> shown.layer, shown.head, len(shown.complete_heads)
        (1, 2, 8)
    """
    blocks = HeadBlocks(source, query, key, row)
    for what, number, count in (("layer", layer, blocks.layers), ("head", head, blocks.heads)):
        if not -count <= number < count:
            raise ValueError(f"{what} {number} is out of range: {what}s are 0 to {count - 1}")
    if budget <= 0:
        raise ValueError(f"budget must be positive, got {budget:g} MB")
    queries, keys = blocks.names(tokens)
    at = None if token is None else _token_index(queries, token)
    return HeadView(
        blocks, queries, keys, layer % blocks.layers, head % blocks.heads, at, title, float(budget)
    )


def _token_index(names: Sequence[str], token: str) -> int:
    plain = [plain_token(name.strip()) for name in names]
    wanted = plain_token(token.strip())
    if wanted in plain:
        return plain.index(wanted)
    number = parse_integer(token)
    if number is not None and 0 <= number < len(names):
        return number
    raise ValueError(f"unknown token {token!r}; choose one of {', '.join(plain[:24])}")
