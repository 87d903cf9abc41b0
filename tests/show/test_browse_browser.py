"""The page to look around in, in a real browser: pointing, clicking, keys, and no requests."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap, Layout, Span, words
from overt.geometry import PixelGeometry, TextGeometry
from overt.show.look import save
from overt.show.overlay import overlay
from overt.show.panel import Choice, Panel, panel

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]


PHOTO = np.full((120, 200, 3), 128, dtype=np.uint8)
WHERE = PixelGeometry.identity(1, (120, 200)).crop(0, 40, 120, 120)  # the middle was seen
TEXT = "a dog"


def seeing() -> Panel:
    """A class token, a 3 x 3 picture, two words; query n looks at key n + 1, the last at key 0."""
    geometry = TextGeometry((TEXT,), torch.tensor([[[0, 1], [2, 5]]]))
    cells = Layout((Span("image", (3, 3), slice(0, 9), WHERE),), 9)
    layout = Layout((Span("class", (1,), slice(0, 1)),), 1) + cells + words(2, geometry=geometry)
    weights = torch.full((12, 12), 0.02)
    weights[torch.arange(12), (torch.arange(12) + 1) % 12] = 0.78
    values = torch.stack([weights, torch.full_like(weights, 1 / 12)])  # head 1 prefers nothing
    attention = AttentionMap(values.expand(1, 2, 2, 12, 12).clone(), layout, layout)
    return panel(attention, "everything", photos={"image": PHOTO})


def hottest(page: "sync_api.Page") -> tuple[float, float]:
    """The place of the warmest pixel of the picture, in shares of its width and height."""
    shot = page.locator(".picture").first.screenshot()
    pixels = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
    warm = pixels[..., 0] - pixels[..., 2]
    y, x = np.unravel_index(warm.argmax(), warm.shape)
    return x / warm.shape[1], y / warm.shape[0]


def near(found: tuple[float, float], column: int, row: int) -> bool:
    """Whether a place lies in a cell of the 3 x 3 grid over the middle of the photo."""
    x, y = 0.2 + 0.6 * (column + 0.5) / 3, (row + 0.5) / 3
    return abs(found[0] - x) < 0.1 and abs(found[1] - y) < 1 / 6


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> "sync_api.Page":
    return open_page(save(tmp_path / "view.html", [seeing()], [Choice(0, 0, 0)]))


def test_it_opens_at_the_choice(page: "sync_api.Page") -> None:
    now = page.locator(".now")
    assert now.inner_text().startswith("“class” looks most at row 1, column 1 (78 %)")
    assert "layer 0, head 0" in now.inner_text()
    assert near(hottest(page), 0, 0)
    assert page.locator(".told").inner_text().endswith("94.0 % of the weight is on this picture")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "look-desktop.png", full_page=True)


def test_pointing_at_a_cell_shows_where_it_looks_and_leaving_goes_back(
    page: "sync_api.Page",
) -> None:
    picture = page.locator(".picture")
    box = picture.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    assert (
        page.locator(".now")
        .inner_text()
        .startswith("row 2, column 2 looks most at row 2, column 3 (78 %)")
    )
    assert near(hottest(page), 2, 1)
    page.mouse.move(box["x"] + 0.05 * box["width"], box["y"] + 5)  # what the model never saw
    assert page.locator(".now").inner_text().startswith("“class” looks")


def test_a_click_stays_and_arrow_keys_move_on(page: "sync_api.Page") -> None:
    picture = page.locator(".picture")
    box = picture.bounding_box()
    assert box
    picture.click(position={"x": 0.3 * box["width"], "y": 0.5 * box["height"]})
    page.mouse.move(5, 5)
    assert page.locator(".now").inner_text().startswith("row 2, column 1 looks")
    picture.press("ArrowDown")
    picture.press("ArrowRight")
    picture.press("ArrowRight")
    picture.press("ArrowRight")
    assert page.locator(".now").inner_text().startswith("row 3, column 3 looks most at “a” (78 %)")
    assert page.locator(".token", has_text="a").first.get_attribute("title") == "a: 78 %"


def test_words_are_chosen_and_marked(page: "sync_api.Page") -> None:
    page.locator(".text .token").nth(0).click()
    page.mouse.move(5, 5)
    assert page.locator(".now").inner_text().startswith("“a” looks most at “dog” (78 %)")
    marks = page.locator(".text .token").evaluate_all(
        "all => all.map(t => getComputedStyle(t).backgroundColor)"
    )
    assert marks[0] != marks[1]
    assert page.locator(".token[aria-pressed=true]").inner_text() == "a"
    page.locator(".mean").click()
    assert page.locator(".now").inner_text().startswith("The mean of all queries looks")


def test_layer_and_head_are_chosen_by_controls_and_by_the_small_pictures(
    page: "sync_api.Page",
) -> None:
    page.locator("input.layer").fill("1")
    page.locator("select.head").select_option("1")
    assert "layer 1, head 1" in page.locator(".now").inner_text()
    tiles = page.locator("canvas.tiles")
    tiles.click(position={"x": 40, "y": 40})
    assert "layer 0, head 0" in page.locator(".now").inner_text()
    assert page.locator("select.head").input_value() == "0"
    page.locator("select.head").select_option("")
    assert "mean of 2 heads" in page.locator(".now").inner_text()


def test_the_heat_is_the_overlay_of_the_library(page: "sync_api.Page") -> None:
    """Every pixel of the page's picture is that of `overt.show.overlay`, but for rounding."""
    page.evaluate(
        "() => { const p = document.querySelector('.picture'); p.style.width = '200px';"
        "p.style.height = '120px'; p.style.position = 'fixed'; p.style.inset = '0 auto auto 0';"
        "p.style.zIndex = 9; p.style.borderRadius = 0; p.querySelector('.cell').remove(); }"
    )
    shot = page.locator(".picture").screenshot()
    found = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)[:120, :200]
    weights = np.full(9, 0.02)
    weights[0] = 0.78
    wanted = overlay(PHOTO, weights.reshape(3, 3), WHERE).astype(int)
    step = wanted.shape[0] // 120
    wanted = wanted[step // 2 :: step, step // 2 :: step]
    inside = np.s_[2:-2, 44:156]
    assert np.abs(found - wanted)[inside].mean() < 3
    assert np.abs(found - wanted)[2:-2, 2:38].max() < 8  # left of what was seen: the photo alone


def test_text_alone_has_a_table_that_can_be_pointed_at(tmp_path: Path, open_page: Open) -> None:
    layout = words(2, geometry=TextGeometry((TEXT,), torch.tensor([[[0, 1], [2, 5]]])))
    values = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).expand(1, 1, 1, 2, 2).clone()
    made = panel(AttentionMap(values, layout, layout), "words")
    page = open_page(save(tmp_path / "words.html", [made]))
    assert page.locator("canvas.tiles").count() == 0
    page.locator("canvas.table").click(position={"x": 100, "y": 92 + 27})
    assert page.locator(".now").inner_text().startswith("“dog” looks most at “dog” (70 %)")


def test_cross_attention_has_two_sides(tmp_path: Path, open_page: Open) -> None:
    whole = seeing().attention
    made = panel(whole.block("text", "image"), "across", photos={"image": PHOTO})
    page = open_page(save(tmp_path / "cross.html", [made], [Choice(0, 0, 0)]))
    assert page.locator("h3").all_inner_texts()[:2] == ["Click a word", "to see where it looks"]
    page.locator(".token", has_text="dog").click()
    assert page.locator(".now").inner_text().startswith("“dog” looks most at row")


def test_it_fits_a_phone_and_the_dark(tmp_path: Path, open_page: Open) -> None:
    path = save(tmp_path / "view.html", [seeing()])
    page = open_page(path, width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=ARTEFACTS / "look-phone.png", full_page=True)
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
