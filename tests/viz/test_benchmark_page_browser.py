"""Benchmark pages in a real browser: layout at three widths, readable text, sorting, the menu.

Screenshots for visual inspection go to the ignored folder `artefacts/`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from overt.metrics.scorecard.benchmark import Benchmark, ModelResult
from overt.viz.benchmark_page import render_benchmark
from tests.metrics.scorecard.test_benchmark import MEANS, make_card
from tests.viz.test_browse_page_browser import wcag_contrast
from tests.viz.test_chapter_page_browser import ARTEFACTS, SMALLEST_CONTRAST, TEXT_COLOURS, WIDTHS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
Open = Callable[..., "sync_api.Page"]


@pytest.fixture
def page_path(tmp_path: Path) -> Path:
    results = [
        ModelResult(name, "scenes test", (make_card(MEANS, seed, 0.3),), {"rise": "no image"})
        for seed, name in enumerate(("attention CNN", "VQA", "captioner"))
    ]
    path = tmp_path / "index.html"
    about = dict.fromkeys(MEANS, "what the method computes, in a few words")
    path.write_text(render_benchmark(Benchmark(tuple(results)), about, "overt bench --model x"))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_does_not_overflow_and_its_text_is_readable(
    page_path: Path, open_page: Open, width: int, scheme: str
) -> None:
    page = open_page(page_path, width=width, color_scheme=scheme)
    wide, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.width && box.right > innerWidth + 1 && !one.closest(".scroll, .skip");
        }).map((one) => one.className)"""
    )
    assert outside == []
    names = page.locator("#metrics tbody th").evaluate_all("all => all.map(e => e.clientWidth)")
    assert min(names) > 100  # names are not broken letter by letter on a phone
    pale = [
        (text, round(wcag_contrast(colour, ground), 2))
        for text, colour, ground in page.evaluate(TEXT_COLOURS)
        if wcag_contrast(colour, ground) < SMALLEST_CONTRAST
    ]
    assert pale == []
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"benchmark-{width}-{scheme}.png", full_page=True)


def test_a_click_on_a_heading_sorts_and_the_menu_shows_one_metric(
    page_path: Path, open_page: Open
) -> None:
    page = open_page(page_path)
    assert page.locator(".by-metric:visible").count() == 1
    page.select_option("#metric", "1")
    shown = page.locator(".by-metric:visible")
    assert shown.count() == 1 and "deletion_area@mask" in shown.inner_html()
    table = page.locator("#model-0 table")
    table.locator("thead .sort").nth(1).click()
    values = table.locator("tbody tr").evaluate_all("all => all.map(r => r.cells[1].dataset.sort)")
    numbers = [float(one) for one in values if one]
    assert numbers == sorted(numbers) and len(numbers) == len(MEANS)
    assert table.locator("thead th").nth(1).get_attribute("aria-sort") == "ascending"
    table.locator("thead .sort").nth(0).click()
    names = table.locator("tbody .name").all_inner_texts()
    assert names == sorted(names)
