"""Words that can be pressed keep the text as it is, escape it, and carry what a press shows."""

import re
from html import unescape

import numpy as np

from overt.show.pressing import Mapped, changed_words, cut, spans_of, words_to_press

TEXT = "a <b>red</b>  ring?"
SPANS = np.array([[0, 1], [2, 12], [14, 18], [-1, -1]])
WEIGHTS = np.array([0.1, 0.6, 0.3, 0.0])


def plain(markup: str) -> str:
    shown = re.sub('<span class="aside">.*?</span>', "", markup)
    return unescape(re.sub("<[^>]*>", "", shown))


def test_the_text_stays_as_it_was() -> None:
    assert plain(words_to_press(TEXT, SPANS, WEIGHTS)) == TEXT
    assert plain(changed_words(TEXT, SPANS, WEIGHTS, WEIGHTS[::-1])) == TEXT
    assert "".join(piece for piece, _ in cut(TEXT, SPANS)) == TEXT


def test_each_word_is_a_button_with_its_weight() -> None:
    found = words_to_press(TEXT, SPANS, WEIGHTS)
    assert found.count("<button") == 3 and "<b>" not in found
    assert re.findall('data-weight="([^"]*)"', found) == ["0.1", "0.6", "0.3"]
    assert 'title="a: 0.100"' in found and "opacity:1.000" in found
    assert "most weight on: &lt;b&gt;red" in found


def test_a_word_with_a_map_carries_it() -> None:
    maps = {1: Mapped("1 1 1 1 AA", 'most "here"')}
    found = words_to_press("a dog", spans_of("a dog"), None, maps)
    assert found.startswith("a <button") and found.count("<button") == 1
    assert 'data-cells="1 1 1 1 AA"' in found and "most &quot;here&quot;" in found
    assert "data-weight" not in found and "style" not in found


def test_weights_that_are_no_numbers_count_as_none() -> None:
    found = words_to_press("a b", spans_of("a b"), np.array([np.nan, -1.0]))
    assert re.findall('data-weight="([^"]*)"', found) == ["0", "0"]


def test_changed_words_say_how_much_and_which_way() -> None:
    found = changed_words(
        "a b c", spans_of("a b c"), np.array([0.5, 0.5, 0]), np.array([0.1, 0.5, 0.4])
    )
    assert "a: −0.400" in found and "c: +0.400" in found
    colours = re.findall(r"var\(--(\w+)\) (\d+)%", found)
    assert colours == [("less", "60"), ("less", "0"), ("more", "60")]
