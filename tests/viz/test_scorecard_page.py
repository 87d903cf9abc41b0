"""Scorecard pages: metrics, limits, comparisons and no outside requests."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from overt.metrics.scorecard.result import Scorecard
from overt.metrics.statistics import Interval
from overt.viz.scorecard_page import render_scorecard, strip_plot, write_scorecard_page
from tests.metrics.scorecard.test_result import make_scorecard


def test_page_has_every_metric_map_and_limit() -> None:
    card = make_scorecard()
    page = render_scorecard(card, command="overt measure ours toys")
    for key in card.keys:
        assert f"<code>{key}</code>" in page and f"<dt>{key}</dt>" in page
    for name in card.maps:
        assert f'<th scope="col">{name}</th>' in page
    assert "attention beats random on 2 of 2" in page
    assert "<b>nss</b>: there are no fixations." in page and "overt measure ours toys" in page
    assert page.count('class="mark better"') == 3 and "Holm &lt; 0.0001" in page
    assert page.count('<svg class="strip"') == 3  # accuracy belongs to the model and has no plot
    assert page.count("finds the truth in 64% of planted tests") == 1


def test_comparison_has_a_separate_table() -> None:
    page = render_scorecard(make_scorecard(1, name="one"), make_scorecard(2, lift=0.0, name="two"))
    assert '<h2 id="h-compare">one minus two</h2>' in page and "one and two" in page
    assert "h-compare" not in render_scorecard(make_scorecard())


def test_comparison_lists_metrics_that_are_not_compared() -> None:
    one, two = (
        replace(
            make_scorecard(seed, name=name),
            key_counts=np.full(40, keys, dtype=np.float32),
            measures=tuple({**about, "question": "shape"} for about in make_scorecard().measures),
        )
        for seed, name, keys in ((1, "one", 16), (2, "two", 64))
    )
    assert f"<p>N{one.not_compared(two)[1:]}.</p>".replace("'", "&#39;") in render_scorecard(
        one, two
    )
    assert "Not compared" not in render_scorecard(one, one)


def test_names_are_escaped_and_the_page_makes_no_requests(tmp_path: Path) -> None:
    path = write_scorecard_page(
        tmp_path / "page.html", make_scorecard(name="</script><script>alert(1)</script>")
    )
    page = path.read_text()
    assert page.startswith("<!doctype html>") and page.count("<script>") == 1
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page) and "url(http" not in page


def test_strip_plot_stays_inside_and_has_a_text_alternative() -> None:
    intervals = {"a": Interval(0.5, 0.4, 0.6, 9), "b<": Interval(0.1, 0.1, 0.1, 9)}
    svg = str(strip_plot(intervals))
    assert "a 0.5; b&lt; 0.1" in svg and svg.count("<circle") == 1
    positions = [float(x) for x in re.findall(r'(?:x1|x2|cx)="([\d.]+)"', svg)]
    assert min(positions) >= 0 and max(positions) <= 150
    assert str(strip_plot({"a": Interval(float("inf"), float("inf"), float("inf"), 2)})) == ""
    assert "8.0" in str(strip_plot({"a": Interval(1.0, 1.0, 1.0, 2)}))
    alone = str(strip_plot({"a": Interval(0.5, float("nan"), float("nan"), 1)}))
    assert "nan" not in alone and "circle" in alone and "reach" not in alone


def test_infinite_mean_is_shown_as_infinity() -> None:
    card = make_scorecard()
    card.numbers["attention", "spearman"][0] = np.inf
    again = Scorecard(**{name: getattr(card, name) for name in card.__dataclass_fields__})
    assert "∞</span>" in render_scorecard(again)


def test_each_map_shows_its_n_if_they_differ() -> None:
    card = make_scorecard()
    card.numbers["random", "spearman"][:30] = np.nan
    page = render_scorecard(card)
    assert "n = 10 to 39" in page and ", n = 39" in page and ", n = 10" in page
    assert "n = 40" in page  # the other metrics have the same n for all maps


def test_page_contains_the_evaluated_map() -> None:
    card = replace(make_scorecard(), judged="attention: map 2 of 3")
    assert "attention: map 2 of 3." in render_scorecard(card)
