"""Clickable words: unchanged text, escaping, weights and embedded maps."""

import re
from html import unescape

import numpy as np

from overt.viz.clickable_text import WordMap, changed_words, clickable_words, word_spans
from overt.viz.text_heatmap import split_at_spans

TEXT = "a <b>red</b>  ring?"
SPANS = np.array([[0, 1], [2, 12], [14, 18], [-1, -1]])
WEIGHTS = np.array([0.1, 0.6, 0.3, 0.0])


def visible_text(markup: str) -> str:
    without_aside = re.sub('<span class="aside">.*?</span>', "", markup)
    return unescape(re.sub("<[^>]*>", "", without_aside))


def test_visible_text_is_unchanged() -> None:
    assert visible_text(clickable_words(TEXT, SPANS, WEIGHTS)) == TEXT
    assert visible_text(changed_words(TEXT, SPANS, WEIGHTS, WEIGHTS[::-1])) == TEXT
    assert "".join(piece for piece, _ in split_at_spans(TEXT, SPANS)) == TEXT


def test_each_word_is_a_button_with_its_weight() -> None:
    found = clickable_words(TEXT, SPANS, WEIGHTS)
    assert found.count("<button") == 3 and "<b>" not in found
    assert re.findall('data-weight="([^"]*)"', found) == ["0.1", "0.6", "0.3"]
    assert 'title="a: 0.100"' in found and "opacity:1.000" in found
    assert "most weight on: &lt;b&gt;red" in found


def test_word_with_a_map_embeds_it() -> None:
    maps = {1: WordMap("1 1 1 1 AA", 'most "here"')}
    found = clickable_words("a dog", word_spans("a dog"), None, maps)
    assert found.startswith("a <button") and found.count("<button") == 1
    assert 'data-cells="1 1 1 1 AA"' in found and "most &quot;here&quot;" in found
    assert "data-weight" not in found and "style" not in found


def test_nan_and_negative_weights_count_as_zero() -> None:
    found = clickable_words("a b", word_spans("a b"), np.array([np.nan, -1.0]))
    assert re.findall('data-weight="([^"]*)"', found) == ["0", "0"]


def test_changed_words_show_size_and_sign_of_the_change() -> None:
    found = changed_words(
        "a b c", word_spans("a b c"), np.array([0.5, 0.5, 0]), np.array([0.1, 0.5, 0.4])
    )
    assert "a: −0.400" in found and "c: +0.400" in found
    colours = re.findall(r"var\(--(\w+)\) (\d+)%", found)
    assert colours == [("less", "60"), ("less", "0"), ("more", "60")]
