"""One page on which a person can look at the world: scenes, what is asked and said, and the truth.

The page is a single file without scripts, and its policy forbids it to load anything, so it can be
opened from a disk, mailed, or kept beside a result.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overt.data.scenes.captions import Caption, Phrase, captions
from overt.data.scenes.classify import TEXTURED, class_of, dominant, dominant_scene
from overt.data.scenes.pairs import NEGATIVE
from overt.data.scenes.posing import pose
from overt.data.scenes.questions import Question
from overt.data.scenes.referring import Expression, expressions
from overt.data.scenes.relations import phrase_pair
from overt.data.scenes.render import Rendered, render
from overt.data.scenes.sentences import CLASSES, sentence
from overt.data.scenes.views import check
from overt.data.scenes.world import Scene, Thing, hard_negative, key
from overt.files import write_text

SAMPLES = 6  # of each view without a scene of its own

# Told apart on light and on dark ground; each use also carries the number of the thing.
INKS = "#d55e00 #0072b2 #009e73 #cc79a7 #b58900 #56b4e9 #8e6bbf #7f7f7f".split()

STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --card: #fff; --ink: #1c1b1a; --dim: #5f5b57;
  --line: #dcd8d2; }
@media (prefers-color-scheme: dark) { :root { --ground: #161514; --card: #201f1d; --ink: #ece9e4;
  --dim: #a9a39b; --line: #3a3834; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.1rem; margin: 0 0 .75rem; }
h3 { font-size: .8rem; margin: 1rem 0 .25rem; color: var(--dim); text-transform: uppercase;
  letter-spacing: .06em; }
p { max-width: 46rem; } ul { list-style: none; margin: 0; padding: 0; }
li { margin: .3rem 0; overflow-wrap: anywhere; }
article { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1rem; margin: 1rem 0; }
.columns { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); }
.q { display: flex; gap: .75rem; align-items: center; } .q svg { flex: 0 0 6rem; width: 6rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--dim); }
svg { display: block; width: 100%; max-width: 22rem; height: auto; border-radius: .3rem; }
svg image { image-rendering: pixelated; } path { fill: none; }
.n { display: inline-block; min-width: 1.4em; padding: 0 .3em; border: 2px solid var(--c);
  border-radius: .7em; font-size: .75rem; line-height: 1.3; text-align: center; }
.p { border-bottom: 3px solid var(--c, var(--dim)); } sup { font-size: .65rem; color: var(--dim); }
.w { font-weight: 700; border-bottom: 3px solid var(--c); } b { font-weight: 600; }
small { color: var(--dim); }
"""


def gallery(path: Path, split: str, seed: int, count: int, size: int = 128) -> None:
    """Write a page with the first `count` scenes of a split, and samples of the other views."""
    check(split, seed, count)
    body = [scene_card(*pose(split, seed, index), size) for index in range(count)]
    body += [dominant_card(split, seed, size), text_card(split, seed)]
    write_text(path, page(f"Scenes: {split}, seed {seed}", body))


def page(title: str, body: Iterable[str]) -> str:
    """A whole page that loads nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>Each thing has a number, drawn with the outline of its visible pixels. Beside every question are
outlined the things on which its answer depends, found by intervention. Underlined words are
phrases, with the numbers of the things they speak of.</p>
</header>
<main>
{"".join(body)}</main>
</body>
</html>
"""


# --- one scene ------------------------------------------------------------------------------------


def scene_card(scene: Scene, questions: Sequence[Question], size: int) -> str:
    """A scene as it is, outlined and with one attribute changed, and all that is said about it."""
    name = f"{scene.split}-{scene.seed}-{scene.index:06d}"
    rng = key(scene.split, scene.seed, scene.index, NEGATIVE)
    other, which, attribute = hard_negative(scene, rng)
    old, new = (getattr(s.things[which], attribute) for s in (scene, other))
    drawn, change = render(scene, size), render(other, size)
    again = f'<use href="#{name}"/>'
    every = again + outlines(drawn, range(len(scene.things)))
    altered = embedded(change.image) + outlines(change, [which])
    alt = f"The same scene, but thing {which + 1} is {new} instead of {old}."
    things = "".join(f"<li>{number(i)} {told(t)}</li>" for i, t in enumerate(scene.things))
    asked = "".join(
        question_line(question, again + outlines(drawn, sorted(question.evidence)), size)
        for question in questions
    )
    return f"""<article>
<h2>Scene {escape(name)}</h2>
<div class="pictures">
{figure(embedded(drawn.image, name), size, overview(scene), "The image")}
{figure(every, size, f"Outlines of {len(scene.things)} things.", "Visible pixels")}
{figure(altered, size, alt, f"Hard negative: {number(which)} {old} → {new}")}
</div>
<div class="columns">
<section><h3>Things</h3><ul>{things}</ul></section>
<section><h3>Questions, with what decides the answer</h3><ul>{asked}</ul></section>
<section><h3>Captions</h3><ul>{"".join(map(caption_line, captions(scene)))}</ul></section>
<section><h3>Referring expressions</h3><ul>{"".join(map(expression_line, expressions(scene)))}</ul>
</section>
</div>
</article>
"""


def overview(scene: Scene) -> str:
    """A scene in words, for who cannot see it."""
    parts = [f"{told(thing)} {where(thing)}" for thing in scene.things]
    return f"{len(parts)} things: {'; '.join(parts)}."


def told(thing: Thing) -> str:
    """A thing in words."""
    return f"{thing.size} {thing.texture} {thing.color} {thing.shape}"


def where(thing: Thing) -> str:
    """Which ninth of the image a thing lies in."""
    down = ("at the top", "in the middle", "at the bottom")[min(2, int(thing.y * 3))]
    across = ("left", "centre", "right")[min(2, int(thing.x * 3))]
    return f"{down} {across}"


def question_line(question: Question, shown: str, size: int) -> str:
    """A question, its answer, and the things behind it, outlined and by number."""
    evidence = numbers(question.evidence) or "no single thing"
    read = numbers(question.target) or "none"
    names = ", ".join(str(i + 1) for i in sorted(question.evidence)) or "none"
    return (
        f'<li class="q">{drawing(shown, size, f"Outlined: {names}.")}<div>'
        f"{escape(' '.join(question.words))}? <b>{escape(question.answer)}</b><br>"
        f"<small>{escape(question.family)}; read from {read}; depends on {evidence}</small>"
        "</div></li>"
    )


def caption_line(caption: Caption) -> str:
    """A caption with its phrases marked."""
    said = phrased(caption.text, caption.spans, caption.phrases)
    return f"<li>{said} <small>{caption.construction.value}</small></li>"


def expression_line(expression: Expression) -> str:
    """A referring expression and the thing it means."""
    said = phrased(expression.text, expression.spans, expression.phrases)
    return f"<li>{number(expression.thing)} {said}</li>"


def phrased(text: str, spans: Sequence[tuple[int, int]], phrases: Sequence[Phrase]) -> str:
    """A text with a line under every phrase and the numbers of its things after it."""
    out, at = [], 0
    for phrase in sorted(phrases, key=lambda phrase: phrase.start_word):
        start, end = spans[phrase.start_word][0], spans[phrase.end_word - 1][1]
        ink = f' style="--c:{INKS[phrase.things[0]]}"' if len(phrase.things) == 1 else ""
        things = ", ".join(str(i + 1) for i in phrase.things) or "background"
        out += [escape(text[at:start]), f'<span class="p"{ink}>{escape(text[start:end])}</span>']
        out.append(f"<sup> {things}</sup>")
        at = end
    return "".join([*out, escape(text[at:])])


def number(i: int) -> str:
    """The mark of a thing."""
    return f'<span class="n" style="--c:{INKS[i]}">{i + 1}</span>'


def numbers(things: Iterable[int]) -> str:
    """The marks of several things."""
    return " ".join(number(i) for i in sorted(things))


# --- pictures -------------------------------------------------------------------------------------


def figure(inside: str, size: int, alt: str, caption: str) -> str:
    """A drawing with a caption, which may hold marks."""
    return f"""<figure>
{drawing(inside, size, alt)}
<figcaption>{caption}</figcaption>
</figure>"""


def drawing(inside: str, size: int, alt: str) -> str:
    """What is drawn, and what is read out instead of it."""
    return f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{escape(alt)}">{inside}</svg>'


def embedded(image: NDArray[np.uint8], name: str = "") -> str:
    """An image inside the page; under a name, it can be shown again."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    named = f' id="{escape(name)}"' if name else ""
    side = image.shape[0]
    return f'<image{named} href="data:image/png;base64,{data}" width="{side}" height="{side}"/>'


def outlines(drawn: Rendered, things: Iterable[int]) -> str:
    """The outline of each thing in its ink on a white line, and its number on top."""
    return "".join(_outlined(drawn.masks[i], drawn.boxes[i], i) for i in things)


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
    """The border between the pixels of a mask and all others, as a path of straight lines."""
    return " ".join(
        [
            *(f"M{start} {at}h{end - start}" for at, start, end in _edges(mask)),
            *(f"M{at} {start}v{end - start}" for at, start, end in _edges(mask.T)),
        ]
    )


def _edges(mask: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Where neighbouring rows differ: (row below, first column, one past the last column)."""
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


# --- the other views ------------------------------------------------------------------------------


def dominant_card(split: str, seed: int, size: int) -> str:
    """Scenes whose class is that of the largest thing, which is outlined."""
    figures = []
    for index in range(SAMPLES):
        scene = dominant_scene(split, seed, index, TEXTURED)
        label, drawn = class_of(scene, TEXTURED), render(scene, size)
        assert label is not None
        shown = embedded(drawn.image) + outlines(drawn, [dominant(scene.things)])
        figures.append(figure(shown, size, overview(scene), TEXTURED[label]))
    return f"""<article>
<h2>The class is that of the largest thing</h2>
<div class="pictures">{"".join(figures)}</div>
</article>
"""


def text_card(split: str, seed: int) -> str:
    """Sentences with the words that decide their class, and related pairs of phrases."""
    sentences, pairs = [], []
    for index in range(SAMPLES):
        one, pair = sentence(split, seed, index), phrase_pair(split, seed, index)
        at, marked = 0, []
        for place in one.deciding:
            start, end = one.spans[place]
            word = f'<span class="w" style="--c:{INKS[1]}">{escape(one.text[start:end])}</span>'
            marked += [escape(one.text[at:start]), word]
            at = end
        marked.append(escape(one.text[at:]))
        sentences.append(f"<li>{''.join(marked)} <b>{escape(CLASSES[one.label])}</b></li>")
        pairs.append(
            f"<li>{escape(pair.first)} / {escape(pair.second)} "
            f"<b>{pair.relation.name.lower()}</b></li>"
        )
    return f"""<article>
<h2>Words alone</h2>
<div class="columns">
<section><h3>Sentences; the words that decide are marked</h3><ul>{"".join(sentences)}</ul></section>
<section><h3>Pairs of phrases and their relation</h3><ul>{"".join(pairs)}</ul></section>
</div>
</article>
"""
