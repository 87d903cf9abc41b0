"""An HTML page of scenes with their questions, captions and ground truth.

The page is a single file without scripts, and its content security policy forbids loading
anything.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.caption_pairs import NEGATIVE
from overt.data.scenes.captions import CaptionPhrase, make_captions
from overt.data.scenes.classification import (
    TEXTURED,
    dominant_class,
    dominant_scene,
    dominant_thing,
)
from overt.data.scenes.phrase_relations import make_phrase_pair
from overt.data.scenes.questions import SceneQuestion
from overt.data.scenes.referring_expressions import make_expressions
from overt.data.scenes.render import RenderedScene, render
from overt.data.scenes.sentences import CLASSES, make_sentence
from overt.data.scenes.view_dataset import check_settings
from overt.data.scenes.world import Scene, Thing, hard_negative, scene_rng
from overt.errors import require_package
from overt.io import write_text

SAMPLES = 6  # of each dataset without scenes of its own

# Distinct on light and dark backgrounds; each use also has the number of the thing.
INKS = "#d55e00 #0072b2 #009e73 #cc79a7 #b58900 #56b4e9 #8e6bbf #7f7f7f".split()


def write_gallery(path: Path, split: str, seed: int, count: int, size: int = 128) -> None:
    """Write a page with the first `count` scenes of a split, and samples of the other datasets.

    Args:
        path: The HTML file.
        split: Train, val or test.
        seed: The seed of the scenes.
        count: The number of scenes.
        size: The side of the images in pixels.

    Raises:
        UserError: The split is unknown, or the seed or count is out of range.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_gallery(Path(folder) / "scenes.html", "train", seed=0, count=1, size=32)
        ...     (Path(folder) / "scenes.html").is_file()
        True
    """
    require_package("jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    check_settings(split, seed, count)
    environment = Environment(
        loader=PackageLoader("overt.data.scenes", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("browse_page.html.jinja").render(
        title=f"Scenes: {split}, seed {seed}",
        size=size,
        inks=INKS,
        phrased=phrased,
        scenes=[scene_data(*generate_scene(split, seed, index), size) for index in range(count)],
        dominant=[dominant_data(split, seed, index, size) for index in range(SAMPLES)],
        sentences=[sentence_data(split, seed, index) for index in range(SAMPLES)],
        pairs=[make_phrase_pair(split, seed, index) for index in range(SAMPLES)],
    )
    write_text(path, page)


def scene_data(scene: Scene, questions: Sequence[SceneQuestion], size: int) -> dict[str, Any]:
    """Return what the page shows of a scene: its drawings, its hard negative and all its texts."""
    name = f"{scene.split}-{scene.seed}-{scene.index:06d}"
    rng = scene_rng(scene.split, scene.seed, scene.index, NEGATIVE)
    other, which, attribute = hard_negative(scene, rng)
    drawn, change = render(scene, size), render(other, size)
    again = Markup('<use href="#{}"/>').format(name)
    return {
        "name": name,
        "about": describe_scene(scene),
        "image": embedded(drawn.image, name),
        "outlined": again + outlines(drawn, range(len(scene.things))),
        "negative": embedded(change.image) + outlines(change, [which]),
        "changed": which,
        "old": getattr(scene.things[which], attribute),
        "new": getattr(other.things[which], attribute),
        "things": [describe_thing(thing) for thing in scene.things],
        "questions": [(one, again + outlines(drawn, sorted(one.evidence))) for one in questions],
        "captions": make_captions(scene),
        "expressions": make_expressions(scene),
    }


def dominant_data(split: str, seed: int, index: int, size: int) -> dict[str, Any]:
    """Return a scene whose class is that of the outlined largest thing."""
    scene = dominant_scene(split, seed, index, TEXTURED)
    label, drawn = dominant_class(scene, TEXTURED), render(scene, size)
    assert label is not None
    shown = embedded(drawn.image) + outlines(drawn, [dominant_thing(scene.things)])
    return {"image": shown, "about": describe_scene(scene), "label": TEXTURED[label]}


def sentence_data(split: str, seed: int, index: int) -> tuple[Markup, str]:
    """Return a sentence with its deciding words marked, and its class."""
    one = make_sentence(split, seed, index)
    at, marked = 0, Markup()
    for place in one.deciding:
        start, end = one.spans[place]
        word = Markup('<span class="w" style="--c:{}">{}</span>').format(
            INKS[1], one.text[start:end]
        )
        marked += escape(one.text[at:start]) + word
        at = end
    return marked + escape(one.text[at:]), CLASSES[one.label]


def describe_scene(scene: Scene) -> str:
    """Return a scene in words, as alternative text."""
    parts = [f"{describe_thing(thing)} {describe_position(thing)}" for thing in scene.things]
    return f"{len(parts)} things: {'; '.join(parts)}."


def describe_thing(thing: Thing) -> str:
    """Return a thing in words."""
    return f"{thing.size} {thing.texture} {thing.color} {thing.shape}"


def describe_position(thing: Thing) -> str:
    """Return which ninth of the image a thing is in."""
    down = ("at the top", "in the middle", "at the bottom")[min(2, int(thing.y * 3))]
    across = ("left", "centre", "right")[min(2, int(thing.x * 3))]
    return f"{down} {across}"


def phrased(
    text: str, spans: Sequence[tuple[int, int]], phrases: Sequence[CaptionPhrase]
) -> Markup:
    """Return a text with underlined phrases, each followed by the numbers of its things."""
    out, at = Markup(), 0
    for phrase in sorted(phrases, key=lambda phrase: phrase.start_word):
        start, end = spans[phrase.start_word][0], spans[phrase.end_word - 1][1]
        ink = f' style="--c:{INKS[phrase.things[0]]}"' if len(phrase.things) == 1 else ""
        things = ", ".join(str(i + 1) for i in phrase.things) or "background"
        marked = Markup(f'<span class="p"{ink}>{{}}</span><sup> {{}}</sup>')
        out += escape(text[at:start]) + marked.format(text[start:end], things)
        at = end
    return out + escape(text[at:])


def embedded(image: NDArray[np.uint8], name: str = "") -> Markup:
    """Return an image as data URL; with a name it can be reused."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    named = f' id="{escape(name)}"' if name else ""
    side = image.shape[0]
    return Markup(
        f'<image{named} href="data:image/png;base64,{data}" width="{side}" height="{side}"/>'
    )


def outlines(drawn: RenderedScene, things: Iterable[int]) -> Markup:
    """Return the outline of each thing in its colour on a white line, and its number."""
    return Markup("".join(_outlined(drawn.masks[i], drawn.boxes[i], i) for i in things))


def _outlined(mask: NDArray[np.bool_], box: NDArray[np.float32], i: int) -> str:
    line, size = outline(mask), len(mask)
    x, y = float(box[0] + box[2]) / 2, float(box[1] + box[3]) / 2
    letter = (
        f'font-size="{size / 14:.1f}" font-family="sans-serif" font-weight="700" '
        'text-anchor="middle" dominant-baseline="central"'
    )
    return (
        f'<path d="{line}" stroke="#fff" stroke-width="{size / 64:.2f}"/>'
        f'<path d="{line}" stroke="{INKS[i]}" stroke-width="{size / 128:.2f}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size / 20:.1f}" fill="#fff" stroke="{INKS[i]}"/>'
        f'<text x="{x:.1f}" y="{y:.1f}" fill="#111" {letter}>{i + 1}</text>'
    )


def outline(mask: NDArray[np.bool_]) -> str:
    """Return the border of a mask as an SVG path of straight lines."""
    return " ".join(
        [
            *(f"M{start} {at}h{end - start}" for at, start, end in _edges(mask)),
            *(f"M{at} {start}v{end - start}" for at, start, end in _edges(mask.T)),
        ]
    )


def _edges(mask: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Return where neighbouring rows differ: (row below, first column, end column)."""
    differ = np.diff(np.pad(mask, ((1, 1), (0, 0))).astype(np.int8), axis=0)
    found = []
    for sign in (1, -1):  # entering and leaving are two lines where they meet at a corner
        turns = np.diff(np.pad(differ == sign, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        starts, ends = np.argwhere(turns == 1), np.argwhere(turns == -1)
        found += [
            (int(at), int(start), int(end))
            for (at, start), (_, end) in zip(starts, ends, strict=True)
        ]
    return found
