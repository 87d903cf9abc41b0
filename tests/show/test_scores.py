"""The page of a scorecard: all numbers, what they cannot say, and no way out of the file."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from overt.measure.scorecards.card import Scorecard
from overt.measure.statistics import Interval
from overt.show.scores import drawn, render, scores_page
from tests.measure.scorecards.test_card import made


def test_the_page_has_every_measure_map_and_limit() -> None:
    card = made()
    page = render(card, command="overt measure ours toys")
    for key in card.keys:
        assert f"<code>{key}</code>" in page and f"<dt>{key}</dt>" in page
    for name in card.maps:
        assert f'<th scope="col">{name}</th>' in page
    assert "attention beats random on 2 of 2 measures." in page
    assert "<b>nss</b>: there are no fixations." in page and "overt measure ours toys" in page
    assert page.count('class="mark better"') == 3 and "Holm 0.0003" in page
    assert page.count('<svg class="strip"') == 3  # accuracy is of the model: no maps to draw


def test_a_comparison_is_a_table_of_its_own() -> None:
    page = render(made(1, name="one"), made(2, lift=0.0, name="two"))
    assert '<h2 id="h-compare">one less two</h2>' in page and "one and two" in page
    assert "h-compare" not in render(made())


def test_a_comparison_says_what_it_leaves_out() -> None:
    one, two = (
        replace(
            made(seed, name=name),
            key_counts=np.full(40, keys, dtype=np.float32),
            measures=tuple({**about, "question": "shape"} for about in made().measures),
        )
        for seed, name, keys in ((1, "one", 16), (2, "two", 64))
    )
    assert f"<p>N{one.not_compared(two)[1:]}.</p>".replace("'", "&#39;") in render(one, two)
    assert "Not compared" not in render(one, one)


def test_nothing_in_the_page_is_code_or_asks_a_host(tmp_path: Path) -> None:
    path = scores_page(tmp_path / "page.html", made(name="</script><script>alert(1)</script>"))
    page = path.read_text()
    assert page.startswith("<!doctype html>") and page.count("<script>") == 1
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page) and "url(http" not in page


def test_a_drawing_keeps_inside_and_says_all_aloud() -> None:
    there = {"a": Interval(0.5, 0.4, 0.6, 9), "b<": Interval(0.1, 0.1, 0.1, 9)}
    svg = str(drawn(there))
    assert "a 0.5; b&lt; 0.1" in svg and svg.count("<circle") == 1
    places = [float(x) for x in re.findall(r'(?:x1|x2|cx)="([\d.]+)"', svg)]
    assert min(places) >= 0 and max(places) <= 150
    assert str(drawn({"a": Interval(float("inf"), float("inf"), float("inf"), 2)})) == ""
    assert "8.0" in str(drawn({"a": Interval(1.0, 1.0, 1.0, 2)}))


def test_an_infinite_mean_is_shown_as_one() -> None:
    card = made()
    card.numbers["attention", "spearman"][0] = np.inf
    again = Scorecard(**{name: getattr(card, name) for name in card.__dataclass_fields__})
    assert "∞</span>" in render(again)
