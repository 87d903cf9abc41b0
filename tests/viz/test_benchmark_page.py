"""Benchmark pages: every map, metric and rank, what limits them, and no outside requests."""

import re

import numpy as np
import pytest

from overt.metrics.scorecard.benchmark import Benchmark, ModelResult
from overt.viz.benchmark_page import render_benchmark
from tests.metrics.scorecard.test_benchmark import MEANS, make_card

METHODS = {
    "ig": "integrated gradients from zero",
    "attention": "of the last layer; mean over heads",
}


@pytest.fixture
def found() -> Benchmark:
    """Return a benchmark of two models, one with three seeds and a map without some scores."""
    first = make_card(MEANS | {"target": 1.0})
    first.numbers["lime", "spearman"][:5] = np.nan
    runs = tuple(make_card(MEANS, seed) for seed in range(3))
    return Benchmark((
        ModelResult("CNN", "scenes test", (first,), {"rollout": "needs a Transformer <b>"}),
        ModelResult("VQA", "toys test", runs),
    ))  # fmt: skip


def test_page_has_every_model_method_metric_and_rank(found: Benchmark) -> None:
    page = render_benchmark(found, METHODS, "overt bench --model CNN=x")
    assert "4 methods on 2 models by 3 metrics" in page and "overt bench --model CNN=x" in page
    for key in found.keys:
        assert f'<option value="{list(sorted_first(found)).index(key)}">{key}</option>' in page
    for result in found.results:
        assert f"{result.model} on {result.data}</h2>" in page
        for name in result.maps:
            assert f'<span class="name">{name}</span>' in page
    assert "rank 1<" in page or "rank 1 <" in page  # attention is first alone
    assert "integrated gradients from zero" in page and "mean over heads" not in page
    assert "planted tests 67%" in page and "with fewer than five seeds" in page.lower()
    assert "needs a Transformer &lt;b&gt;" in page and ", n = 35" in page


def sorted_first(found: Benchmark) -> list[str]:
    """Return the metrics in the order of the menu: the reference first."""
    return sorted(found.keys, key=lambda key: key != found.reference)


def test_cells_sort_the_best_first_in_either_direction(found: Benchmark) -> None:
    page = render_benchmark(found, {})
    (table,) = re.findall(r'id="model-0".*?</table>', page, re.DOTALL)
    rows = re.findall(r'<span class="name">(.*?)</span>.*?</tr>', table, re.DOTALL)
    assert (
        rows[0] == "attention"
        and rows[-1] == "target"
        and rows.index("random") > rows.index("lime")
    )
    first = re.search(r'<span class="name">attention</span>.*?</tr>', table, re.DOTALL)
    assert first is not None
    sorts = [float(one) for one in re.findall(r'<td data-sort="([^"]+)"', first[0])]
    assert len(sorts) == 3 and max(sorts) < 0  # higher is better, and lower is better


def test_page_makes_no_requests_and_empty_benchmarks_render(found: Benchmark) -> None:
    page = render_benchmark(found, METHODS, "</script><script>alert(1)</script>")
    assert page.startswith("<!doctype html>") and page.count("<script>") == 2
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page) and "url(http" not in page
    assert "No metric of these models" in render_benchmark(Benchmark(()), {})
