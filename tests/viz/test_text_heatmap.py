"""Text heat maps: weights and opacity per word, escaping and SVG output."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.viz.text_heatmap import (
    MIN_OPACITY,
    describe_weights,
    text_heatmap_html,
    text_heatmap_svg,
    weighted_pieces,
)

TEXT = "Is  the red ring big?"
SPANS = np.array([[0, 2], [4, 7], [8, 11], [12, 16], [17, 20], [-1, -1]])
WEIGHTS = np.array([0.1, 0.0, 0.4, 0.3, 0.2, 0.0])


class Reader(HTMLParser):
    """The text and the words of an HTML fragment, as a browser parses them."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.aside, self.words, self.tags = "", "", [], []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.tags.append(tag)
        self.inside.append(about.get("class") or "")
        if about.get("class") == "word":
            self.words.append((about["title"], about["style"]))

    def handle_endtag(self, tag: str) -> None:
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        if "aside" in self.inside:
            self.aside += data
        else:
            self.text += data


def parse_html(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def test_each_word_has_its_weight_and_opacity() -> None:
    found = parse_html(text_heatmap_html(TEXT, SPANS, WEIGHTS))
    assert found.text == TEXT
    titles = [title for title, _ in found.words]
    assert titles == ["Is: 0.100", "the: 0.000", "red: 0.400", "ring: 0.300", "big: 0.200"]
    opacity = [float(re.search(r"opacity:([\d.]+)", style)[1]) for _, style in found.words]
    levels = np.array([0.25, 0, 1, 0.75, 0.5])
    np.testing.assert_allclose(opacity, MIN_OPACITY + (1 - MIN_OPACITY) * levels, atol=1e-3)
    assert "red 0.40, ring 0.30, big 0.20" in found.aside


@pytest.mark.parametrize("make", [text_heatmap_html, text_heatmap_svg])
def test_text_is_escaped(make) -> None:
    evil = "<script>alert(1)</script> \"'><img src=x onerror=alert(2)>"
    spans = np.array([[0, 25], [26, len(evil)]])
    made = str(make(evil, spans, np.array([0.5, 0.5])))
    assert "<script" not in made and "<img" not in made
    if make is text_heatmap_html:
        found = parse_html(made)
        assert found.text == evil and set(found.tags) == {"span"}


@given(
    st.text(max_size=30),
    st.lists(st.tuples(st.integers(-1, 33), st.integers(-1, 33), st.floats()), max_size=6),
)
def test_pieces_contain_every_character_for_any_spans(text: str, marks: list) -> None:
    spans = np.array([mark[:2] for mark in marks], dtype=np.int64).reshape(-1, 2)
    weights = np.array([mark[2] for mark in marks], dtype=np.float64)
    found = list(weighted_pieces(text, spans, weights))
    assert "".join(piece for piece, _, _ in found) == text
    assert all(0 <= level <= 1 for _, _, level in found)


def test_text_without_weight_is_described() -> None:
    assert describe_weights(TEXT, SPANS, np.zeros(6)) == "no weight on any word"
    assert parse_html(text_heatmap_html(TEXT, SPANS, np.zeros(6))).text == TEXT


def test_svg_is_well_formed_and_has_each_word_once() -> None:
    tree = ElementTree.fromstring(text_heatmap_svg(TEXT, SPANS, WEIGHTS, columns=12))
    name = "{http://www.w3.org/2000/svg}"
    words = ["".join(one.itertext()) for one in tree.iter(f"{name}text")]
    assert [word.split(": ")[0] for word in words if ":" in word] == [
        "Is",
        "the",
        "red",
        "ring",
        "big",
    ]
    rows = {one.get("y") for one in tree.iter(f"{name}text")}
    assert len(rows) == 2
    strengths = [float(one.get("fill-opacity")) for one in tree.iter(f"{name}rect")]
    np.testing.assert_allclose(strengths, [0.25, 0, 1, 0.75, 0.5], atol=1e-3)
    assert tree.find(f"{name}title").text == TEXT
