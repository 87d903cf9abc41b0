"""The page of a scorecard in a real browser: it fits, it explains itself, it asks for nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from overt.show.scores import scores_page
from tests.measure.scorecards.test_card import made

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

Open = Callable[..., "sync_api.Page"]


def test_the_page_fits_and_its_marks_say_why(tmp_path: Path, open_page: Open) -> None:
    page = open_page(scores_page(tmp_path / "card.html", made(1), made(2, lift=0.0, name="two")))
    assert page.locator("h1").inner_text() == "ours and two"
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    beaten = page.locator("td:has(.mark.better)").nth(1)
    assert beaten.is_visible()
    told = page.locator("td[title*='Holm']").first.get_attribute("title")
    assert told is not None and "effect" in told and "beaten" in told
    dot = page.locator(".strip circle").first.bounding_box()
    frame = page.locator(".strip").first.bounding_box()
    assert dot is not None and frame is not None
    assert frame["x"] <= dot["x"] and dot["x"] + dot["width"] <= frame["x"] + frame["width"]
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
