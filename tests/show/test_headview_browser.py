"""The head view in a real browser: opening heads, choosing tokens, keys alone, and no requests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overt.attention import AttentionMap, words
from overt.show.headview import head_view

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.long

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
NAMES = ["[CLS]", "the", "dog", "chased", "a", "cat"]
Open = Callable[..., "sync_api.Page"]


def shifted(count: int = 6, layers: int = 2, heads: int = 3) -> AttentionMap:
    """In layer l and head h, query n looks at key n + l + h."""
    weights = torch.full((1, layers, heads, count, count), 0.2 / (count - 1))
    for layer in range(layers):
        for head in range(heads):
            for query in range(count):
                weights[0, layer, head, query, (query + layer + head) % count] = 0.8
    return AttentionMap(weights, words(count), words(count))


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> "sync_api.Page":
    view = head_view(shifted(), tokens=NAMES, layer=0, head=1, token="dog")
    return open_page(view.save(tmp_path / "heads.html"))


def told(page: "sync_api.Page") -> str:
    return page.locator(".oh-told").inner_text()


def test_it_opens_at_the_choice_and_a_click_opens_another_head(page: "sync_api.Page") -> None:
    assert page.locator(".oh-title").inner_text() == "Layer 0, head 1"
    assert told(page).startswith("dog looks most at chased 0.800")
    assert page.locator(".oh-lines line").count() == 6  # the lines of one query
    row = page.locator(".oh-layer canvas").nth(1)
    box = row.bounding_box()
    assert box
    row.click(position={"x": box["width"] * 2.5 / 3, "y": box["height"] / 2})
    assert page.locator(".oh-title").inner_text() == "Layer 1, head 2"
    assert told(page).startswith("dog looks most at cat 0.800")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "heads-desktop.png", full_page=True)


def test_tokens_are_chosen_by_clicking_and_by_typing(page: "sync_api.Page") -> None:
    page.locator(".oh-query button").nth(3).click()
    page.mouse.move(0, 0)
    assert told(page).startswith("chased looks most at a 0.800")
    page.locator(".oh-token").fill("cat")
    page.locator(".oh-token").press("Enter")
    assert told(page).startswith("cat looks most at [CLS] 0.800")
    page.get_by_role("button", name="All tokens").click()
    assert page.locator(".oh-lines line").count() == 36
    page.locator(".oh-key button").nth(0).click()  # who looks at [CLS]?
    assert page.locator(".oh-lines line").count() == 6


def test_keys_alone_are_enough(page: "sync_api.Page") -> None:
    page.locator(".oh-all").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".oh-title").inner_text() == "Layer 1, head 0"
    page.get_by_role("button", name="Heat map").press("Enter")
    page.locator(".oh-table canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert told(page) == "the looks at dog: 0.7998"


def test_a_phone_in_the_dark_has_no_sideways_scrolling(tmp_path: Path, open_page: Open) -> None:
    view = head_view(shifted(200, 4, 16), budget=0.05)
    page = open_page(view.save(tmp_path / "heads.html"), width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "is here coarse" in page.locator(".oh-about").inner_text()
    assert "keys: those with the strongest" in page.locator(".oh-note").inner_text()
    page.locator(".oh-layer canvas").nth(0).click(position={"x": 5, "y": 5})
    assert "small picture of this head alone" in page.locator(".oh-note").inner_text()
    page.screenshot(path=ARTEFACTS / "heads-phone-dark.png", full_page=True)


def test_it_works_inside_the_frame_of_a_notebook(tmp_path: Path, open_page: Open) -> None:
    frame = head_view(shifted(), tokens=NAMES, token="dog", layer=0)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}")
    inside = open_page(tmp_path / "cell.html").frame_locator("iframe")
    assert inside.locator(".oh-told").inner_text().startswith("dog looks most at dog 0.800")
