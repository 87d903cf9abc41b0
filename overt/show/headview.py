"""Every layer and head to look around in, in a notebook and as a file, also of large models.

Small pictures of all heads; the one that is open is drawn as lines between tokens and as a heat
map. A file cannot ask a model for more, so it holds as many heads in full as its budget allows, the
open one first; of the others it has the small picture, and says so. With a kernel behind it
(`live`), nothing is computed before it is on the screen.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from overt import files
from overt.attention import AttentionMap
from overt.capture.seen import Seen
from overt.errors import BadInput
from overt.show.blocks import Blocks, Part
from overt.show.look import white_scale
from overt.show.page import POLICY
from overt.show.panel import plainly

BUDGET = 4.0  # megabytes of weights in a page
SIDE = 40  # pixels along a small picture, at most
SMALLEST = 6  # and at least
BYTES = 2 * 4 / 3  # of a weight: sixteen bits, written in letters


@dataclass(frozen=True, eq=False)
class HeadView:
    """A block of every head and what of it is open; a notebook shows it, `save` writes the page.

    `budget` is in megabytes. `live()` is the same with the kernel behind it.
    """

    blocks: Blocks
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layer: int
    head: int
    query: int | None
    title: str
    budget: float = BUDGET
    height: int = 820

    @property
    def side(self) -> int:
        """Pixels along a small picture: all of them take a quarter of the budget at most."""
        room = self.budget * 1e6 / 4 / (4 / 3) / (self.blocks.layers * self.blocks.heads)
        return int(np.clip(room**0.5, SMALLEST, SIDE))

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """The layers and heads that a file has in full: those next to the open one."""
        q, k = self.blocks.shape
        room = self.budget * 1e6 * 3 / 4
        most = int(room // (q * k * BYTES)) if q * k else 0
        order = sorted(
            np.ndindex(self.blocks.layers, self.blocks.heads),
            key=lambda at: (abs(at[0] - self.layer), abs(at[1] - self.head), at),
        )
        return tuple((int(l), int(h)) for l, h in order[:most])

    @property
    def about(self) -> str:
        """What a file leaves out, in a sentence or two; empty when it has everything."""
        q, k = self.blocks.shape
        count = self.blocks.layers * self.blocks.heads
        said = []
        if not self.held:
            down, across = self._steps()
            said.append(
                f"A head has {q:,} x {k:,} weights, more than the {self.budget:g} MB of this page "
                f"hold: layer {self.layer}, head {self.head} is here coarse, each point the "
                f"largest of {down} x {across} weights, and of the others there is the small "
                "picture."
            )
        elif len(self.held) < count:
            said.append(
                f"This page holds {len(self.held)} of {count} heads in full, in "
                f"{self.budget:g} MB; of the others it has the small picture."
            )
        if q > self.side and count > 1:
            said.append(f"Small pictures show one query in {-(-q // self.side)}.")
        return " ".join(said)

    # --- what the script is given

    def begun(self) -> dict[str, Any]:
        """What is known without a single weight: names, sizes, what is open."""
        return {
            "title": self.title,
            "about": "",
            "layers": list(self.blocks.layer_names),
            "heads": self.blocks.heads,
            "queries": list(self.queries),
            "keys": list(self.keys),
            "same": self.queries == self.keys,
            "start": {"layer": self.layer, "head": self.head, "query": self.query},
            "colours": _letters(white_scale()),
            "small": [None] * self.blocks.layers,
            "blocks": {},
        }

    def told(self) -> dict[str, Any]:
        """All that a file holds."""
        found = self.begun()
        found["about"] = self.about
        found["small"] = [self.small(layer) for layer in range(self.blocks.layers)]
        found["blocks"] = dict(self._blocks())
        return found

    def small(self, layer: int) -> dict[str, Any]:
        """The small pictures of one layer, each head on its own scale."""
        drawn = [self.blocks.sample(layer, head, self.side) for head in range(self.blocks.heads)]
        tops = [float(one.max(initial=0.0)) for one in drawn]
        bright = [
            np.rint(255 * (one.clip(0) / top if top > 0 else one.clip(0))).astype(np.uint8)
            for one, top in zip(drawn, tops, strict=True)
        ]
        return {
            "shape": list(drawn[0].shape),
            "tops": tops,
            "pixels": _letters(np.stack(bright)),
        }

    def block(self, layer: int, head: int) -> dict[str, Any]:
        """A head in full, or as fine as the budget allows."""
        down, across = self._steps()
        weights = self.blocks.whole(layer, head, down, across)
        return {
            "shape": list(weights.shape),
            "step": [down, across],
            "weights": _letters(weights.clip(0, 65504).astype("<f2")),
        }

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What the script asks of a kernel: a layer's small pictures, a head, or a sentence."""
        layer, head = asked.get("layer"), asked.get("head")
        for what, number, count in (
            ("layer", layer, self.blocks.layers),
            ("head", 0 if head is None else head, self.blocks.heads),
        ):
            if not isinstance(number, int) or not 0 <= number < count:
                return {**asked, "wrong": f"there is no {what} {number!r}"}
        assert isinstance(layer, int)
        try:
            if head is None:
                return {**asked, "small": self.small(layer)}
            return {**asked, "block": self.block(layer, head)}
        except (ValueError, RuntimeError) as problem:
            return {**asked, "wrong": str(problem)}

    def _blocks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for layer, head in self.held or ((self.layer, self.head),):
            yield f"{layer} {head}", self.block(layer, head)

    def _steps(self) -> tuple[int, int]:
        """How many queries and keys share a point, so that one head fits three quarters of it."""
        q, k = self.blocks.shape
        points = max(1, int(self.budget * 1e6 * 3 / 4 / BYTES))
        down = across = 1
        while -(-q // down) * -(-k // across) > points:
            if -(-q // down) >= -(-k // across):
                down += 1
            else:
                across += 1
        return down, across

    # --- where it is shown

    def html(self) -> str:
        """The whole page: one file that asks nobody for anything."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("overt.show", "."), autoescape=True, undefined=StrictUndefined
        )
        text = environment.get_template("headview.html.jinja").render(
            policy=POLICY, title=self.title, data=self.told()
        )
        return text.encode("utf-8", "replace").decode()  # half a surrogate pair is not text

    def save(self, path: Path | str) -> Path:
        """Write the page as a file, whose name ends in .html."""
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise BadInput(f"{path} is to hold a page: give it a name that ends in .html.")
        files.write_text(Path(path), self.html())
        return Path(path)

    def _repr_html_(self) -> str:
        """The page in a frame: its styles and scripts stay inside, and it may ask nobody."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.html())}" '
            f'style="width:100%;height:{self.height}px;border:0" '
            f'title="{escape(self.title)}"></iframe>'
        )

    def live(self) -> Any:
        """A widget that asks the kernel: a head is computed and sent when it is opened.

        Needs `pip install anywidget`, and works wherever widgets do: Jupyter, VS Code, Colab. A
        notebook that is saved keeps no weights of it.
        """
        try:
            import anywidget
            import traitlets
        except ImportError as problem:
            raise ImportError(
                "a live view is a widget: pip install anywidget; without it, show.head_view(...) "
                "and .save(path) hold what their budget allows"
            ) from problem
        here = Path(__file__).parent
        script = (here / "headview.js").read_text(encoding="utf-8")
        styles = (here / "headview.css").read_text(encoding="utf-8")

        class HeadWidget(anywidget.AnyWidget):
            """The view, with its kernel."""

            _esm = f"{script}\nexport default {{ render: drawLive }};\n"
            _css = styles
            data = traitlets.Dict().tag(sync=True)

        made = HeadWidget(data=self.begun())
        made.on_msg(lambda widget, asked, buffers: widget.send(self.answer(asked)))
        return made


def head_view(
    source: AttentionMap | Seen,
    query: Part = None,
    key: Part = None,
    layer: int = -1,
    head: int = 0,
    token: str | None = None,
    row: int = 0,
    tokens: Sequence[str] | None = None,
    title: str = "Every layer and head",
    budget: float = BUDGET,
) -> HeadView:
    """Every layer and head of one sample, one of them open, to look around in.

    `query` and `key` choose a block: the name of a span, a range of positions, or all. `tokens`
    name the positions. `token` is the query whose lines alone are drawn at first, by its word or
    its number. A page has at most `budget` megabytes of weights, and says what it left out.
    """
    blocks = Blocks(source, query, key, row)
    for what, number, count in (("layer", layer, blocks.layers), ("head", head, blocks.heads)):
        if not -count <= number < count:
            raise ValueError(f"there are {what}s 0 to {count - 1}, not {number}")
    if budget <= 0:
        raise ValueError(f"a budget of {budget:g} MB holds nothing")
    queries, keys = blocks.names(tokens)
    at = None if token is None else _place(queries, token)
    return HeadView(
        blocks, queries, keys, layer % blocks.layers, head % blocks.heads, at, title, float(budget)
    )


def _place(names: Sequence[str], token: str) -> int:
    plain = [plainly(name.strip()) for name in names]
    wanted = plainly(token.strip())
    if wanted in plain:
        return plain.index(wanted)
    if token.isdigit() and int(token) < len(names):
        return int(token)
    raise ValueError(f"no token {token!r}; there are {', '.join(plain[:24])}")


def _letters(values: Float[np.ndarray, "..."] | np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
