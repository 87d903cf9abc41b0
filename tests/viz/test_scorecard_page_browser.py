"""Scorecard pages in a real browser: layout, tooltips and themes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from overt.viz.scorecard_page import write_scorecard_page
from tests.metrics.scorecard.test_result import make_scorecard

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

Open = Callable[..., "sync_api.Page"]


@pytest.mark.long
def test_page_fits_and_its_marks_have_tooltips(tmp_path: Path, open_page: Open) -> None:
    page = open_page(
        write_scorecard_page(
            tmp_path / "card.html", make_scorecard(1), make_scorecard(2, lift=0.0, name="two")
        )
    )
    assert page.locator("h1").inner_text() == "ours and two"
    overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0
    mark = page.locator("td:has(.mark.better)").nth(1)
    assert mark.is_visible()
    tooltip = page.locator("td[title*='Holm']").first.get_attribute("title")
    assert tooltip is not None and "effect" in tooltip and "worse" in tooltip
    dot = page.locator(".strip circle").first.bounding_box()
    frame = page.locator(".strip").first.bounding_box()
    assert dot is not None and frame is not None
    assert frame["x"] <= dot["x"] and dot["x"] + dot["width"] <= frame["x"] + frame["width"]
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
