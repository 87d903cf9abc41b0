"""Head views in a real browser: heads, tokens, keyboard, phones and notebooks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overt.attention import AttentionMap, words
from overt.viz.head_browser import head_view

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.long

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
NAMES = ["[CLS]", "the", "dog", "chased", "a", "cat"]
Open = Callable[..., "sync_api.Page"]


def shifted_map(count: int = 6, layers: int = 2, heads: int = 3) -> AttentionMap:
    """In layer l and head h, query n attends to key n + l + h."""
    weights = torch.full((1, layers, heads, count, count), 0.2 / (count - 1))
    for layer in range(layers):
        for head in range(heads):
            for query in range(count):
                weights[0, layer, head, query, (query + layer + head) % count] = 0.8
    return AttentionMap(weights, words(count), words(count))


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> "sync_api.Page":
    view = head_view(shifted_map(), tokens=NAMES, layer=0, head=1, token="dog")
    return open_page(view.save(tmp_path / "heads.html"))


def status_text(page: "sync_api.Page") -> str:
    return page.locator(".oh-told").inner_text()


def test_page_opens_at_the_choice_and_a_click_opens_another_head(page: "sync_api.Page") -> None:
    assert page.locator(".oh-title").inner_text() == "Layer 0, head 1"
    assert status_text(page).startswith("dog attends most to chased 0.800")
    assert page.locator(".oh-lines line").count() == 6  # the lines of one query
    row = page.locator(".oh-layer canvas").nth(1)
    box = row.bounding_box()
    assert box
    row.click(position={"x": box["width"] * 2.5 / 3, "y": box["height"] / 2})
    assert page.locator(".oh-title").inner_text() == "Layer 1, head 2"
    assert status_text(page).startswith("dog attends most to cat 0.800")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "heads-desktop.png", full_page=True)


def test_tokens_are_selected_by_clicking_and_typing(page: "sync_api.Page") -> None:
    page.locator(".oh-query button").nth(3).click()
    page.mouse.move(0, 0)
    assert status_text(page).startswith("chased attends most to a 0.800")
    page.locator(".oh-token").fill("cat")
    page.locator(".oh-token").press("Enter")
    assert status_text(page).startswith("cat attends most to [CLS] 0.800")
    page.get_by_role("button", name="All tokens").click()
    assert page.locator(".oh-lines line").count() == 36
    page.locator(".oh-key button").nth(0).click()  # which queries attend to [CLS]?
    assert page.locator(".oh-lines line").count() == 6


def test_page_can_be_used_by_keyboard_only(page: "sync_api.Page") -> None:
    page.locator(".oh-all").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".oh-title").inner_text() == "Layer 1, head 0"
    page.get_by_role("button", name="Heat map").press("Enter")
    page.locator(".oh-table canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert status_text(page) == "the attends to dog: 0.7998"


def test_phone_page_does_not_scroll_sideways(tmp_path: Path, open_page: Open) -> None:
    view = head_view(shifted_map(200, 4, 16), budget=0.05)
    page = open_page(view.save(tmp_path / "heads.html"), width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert "is reduced" in page.locator(".oh-about").inner_text()
    assert "keys, those with the largest" in page.locator(".oh-note").inner_text()
    page.locator(".oh-layer canvas").nth(0).click(position={"x": 5, "y": 5})
    assert "only a thumbnail of this head" in page.locator(".oh-note").inner_text()
    page.screenshot(path=ARTEFACTS / "heads-phone-dark.png", full_page=True)


def test_page_works_in_a_notebook_frame(tmp_path: Path, open_page: Open) -> None:
    frame = head_view(shifted_map(), tokens=NAMES, token="dog", layer=0)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}")
    inside = open_page(tmp_path / "cell.html").frame_locator("iframe")
    assert inside.locator(".oh-told").inner_text().startswith("dog attends most to dog 0.800")
