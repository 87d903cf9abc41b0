"""Browse pages in a real browser: hovering, clicking, keyboard and no requests."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap, Layout, Span, words
from overt.geometry import PixelGeometry, TextGeometry
from overt.viz.attention_figure import save_panels
from overt.viz.browse_page import render_page
from overt.viz.panel import Choice, DeletionCheck, Panel, make_panel
from overt.viz.photo_overlay import overlay

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]


PHOTO = np.full((120, 200, 3), 128, dtype=np.uint8)
WHERE = PixelGeometry.identity(1, (120, 200)).crop(0, 40, 120, 120)  # the model gets the middle
TEXT = "a dog"


def shifted_panel() -> Panel:
    """A class token, a 3 x 3 grid, two words; query n attends to key n + 1, modulo 12."""
    geometry = TextGeometry((TEXT,), torch.tensor([[[0, 1], [2, 5]]]))
    cells = Layout((Span("image", (3, 3), slice(0, 9), WHERE),), 9)
    layout = Layout((Span("class", (1,), slice(0, 1)),), 1) + cells + words(2, geometry=geometry)
    weights = torch.full((12, 12), 0.02)
    weights[torch.arange(12), (torch.arange(12) + 1) % 12] = 0.78
    values = torch.stack([weights, torch.full_like(weights, 1 / 12)])  # head 1 is uniform
    attention = AttentionMap(values.expand(1, 2, 2, 12, 12).clone(), layout, layout)
    return make_panel(attention, "everything", photos={"image": PHOTO})


def warmest_position(page: "sync_api.Page") -> tuple[float, float]:
    """Position of the warmest pixel of the image, in shares of its width and height."""
    shot = page.locator(".picture").first.screenshot()
    pixels = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
    warm = pixels[..., 0] - pixels[..., 2]
    y, x = np.unravel_index(warm.argmax(), warm.shape)
    return x / warm.shape[1], y / warm.shape[0]


def is_in_cell(found: tuple[float, float], column: int, row: int) -> bool:
    """Whether a position is in a cell of the 3 x 3 grid over the middle of the photo."""
    x, y = 0.2 + 0.6 * (column + 0.5) / 3, (row + 0.5) / 3
    return abs(found[0] - x) < 0.1 and abs(found[1] - y) <= 1 / 6


@pytest.fixture
def page(tmp_path: Path, open_page: Open) -> "sync_api.Page":
    return open_page(save_panels(tmp_path / "view.html", [shifted_panel()], [Choice(0, 0, 0)]))


@pytest.mark.long
def test_page_opens_at_the_choice(page: "sync_api.Page") -> None:
    now = page.locator(".now")
    assert now.inner_text().startswith("“class” attends most to row 1, column 1 (78 %)")
    assert "layer 0, head 0" in now.inner_text()
    assert is_in_cell(warmest_position(page), 0, 0)
    assert page.locator(".told").inner_text().endswith("94.0 % of the weight is on this image")
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "look-desktop.png", full_page=True)


@pytest.mark.long
def test_hovering_a_cell_shows_its_attention_until_the_pointer_leaves(
    page: "sync_api.Page",
) -> None:
    picture = page.locator(".picture")
    box = picture.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    assert (
        page.locator(".now")
        .inner_text()
        .startswith("row 2, column 2 attends most to row 2, column 3 (78 %)")
    )
    assert is_in_cell(warmest_position(page), 2, 1)
    page.mouse.move(box["x"] + 0.05 * box["width"], box["y"] + 5)  # outside the crop
    assert page.locator(".now").inner_text().startswith("“class” attends")


def test_click_selects_a_cell_and_arrow_keys_move(page: "sync_api.Page") -> None:
    picture = page.locator(".picture")
    box = picture.bounding_box()
    assert box
    picture.click(position={"x": 0.3 * box["width"], "y": 0.5 * box["height"]})
    page.mouse.move(5, 5)
    assert page.locator(".now").inner_text().startswith("row 2, column 1 attends")
    picture.press("ArrowDown")
    picture.press("ArrowRight")
    picture.press("ArrowRight")
    picture.press("ArrowRight")
    assert (
        page.locator(".now").inner_text().startswith("row 3, column 3 attends most to “a” (78 %)")
    )
    assert page.locator(".token", has_text="a").first.get_attribute("title") == "a: 78 %"


def test_clicked_word_is_selected_and_marked(page: "sync_api.Page") -> None:
    page.locator(".text .token").nth(0).click()
    page.mouse.move(5, 5)
    assert page.locator(".now").inner_text().startswith("“a” attends most to “dog” (78 %)")
    marks = page.locator(".text .token").evaluate_all(
        "all => all.map(t => getComputedStyle(t).backgroundColor)"
    )
    assert marks[0] != marks[1]
    assert page.locator(".token[aria-pressed=true]").inner_text() == "a"
    page.locator(".mean").click()
    assert page.locator(".now").inner_text().startswith("The mean of all queries attends")


def test_layer_and_head_are_selected_by_controls_and_thumbnails(
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


def test_heads_are_compared_in_colors_and_special_tokens_hidden(page: "sync_api.Page") -> None:
    assert page.locator(".choose output").inner_text() == "0 of 0–1"
    assert page.locator(".legend").is_hidden()
    page.locator("select.head").select_option("all")
    assert page.locator(".legend button").all_inner_texts() == ["0", "1"]
    assert "mean of 2 heads" in page.locator(".now").inner_text()
    word = page.locator(".text .token").first
    assert word.evaluate("word => getComputedStyle(word).backgroundImage").count("rgb(") == 4
    assert "most weight there" in page.locator(".told").inner_text()

    page.locator(".legend button").nth(1).click()
    assert "layer 0, head 1" in page.locator(".now").inner_text()
    assert page.locator(".uniform").inner_text().startswith("Nearly uniform")  # head 1
    page.locator(".plain-tokens input").check()
    assert page.locator(".rest .token").get_attribute("title") == "class: 0.0 %"
    page.locator(".plain-tokens input").uncheck()
    assert page.locator(".rest .token").get_attribute("title") == "class: 8.3 %"


def test_layers_are_played_once_and_stop_at_the_last(page: "sync_api.Page") -> None:
    play = page.locator(".sweep")
    play.click()
    assert play.inner_text() == "Stop"
    sync_api.expect(page.locator(".choose output")).to_have_text("1 of 0–1")
    sync_api.expect(play).to_have_text("Play layers")
    assert "layer 1" in page.locator(".now").inner_text()


def test_heat_equals_the_overlay_of_the_library(page: "sync_api.Page") -> None:
    """Every pixel of the page equals `overt.viz.photo_overlay` up to rounding."""
    page.evaluate(
        "() => { const p = document.querySelector('.picture'); p.style.width = '200px';"
        "p.style.height = '120px'; p.style.position = 'fixed'; p.style.inset = '0 auto auto 0';"
        "p.style.zIndex = 9; p.style.borderRadius = 0; p.querySelector('.cell').remove(); }"
    )
    shot = page.locator(".picture").screenshot()
    found = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)[:120, :200]
    weights = np.full(9, 0.02)
    weights[0] = 0.78
    expected = overlay(PHOTO, weights.reshape(3, 3), WHERE).astype(int)
    step = expected.shape[0] // 120
    expected = expected[step // 2 :: step, step // 2 :: step]
    inside = np.s_[2:-2, 44:156]
    assert np.abs(found - expected)[inside].mean() < 3
    assert np.abs(found - expected)[2:-2, 2:38].max() < 8  # left of the crop: only the photo


def test_text_only_page_has_a_clickable_table(tmp_path: Path, open_page: Open) -> None:
    layout = words(2, geometry=TextGeometry((TEXT,), torch.tensor([[[0, 1], [2, 5]]])))
    values = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).expand(1, 1, 1, 2, 2).clone()
    made = make_panel(AttentionMap(values, layout, layout), "words")
    page = open_page(save_panels(tmp_path / "words.html", [made]))
    assert page.locator("canvas.tiles").count() == 0
    page.locator("canvas.table").click(position={"x": 100, "y": 92 + 27})
    assert page.locator(".now").inner_text().startswith("“dog” attends most to “dog” (70 %)")


def test_cross_attention_has_two_sides(tmp_path: Path, open_page: Open) -> None:
    attention = shifted_panel().attention
    made = make_panel(attention.block("text", "image"), "across", photos={"image": PHOTO})
    page = open_page(save_panels(tmp_path / "cross.html", [made], [Choice(0, 0, 0)]))
    assert page.locator("h3").all_inner_texts()[:2] == [
        "Query: click a word",
        "Attention of this word",
    ]
    page.locator(".token", has_text="dog").click()
    assert page.locator(".now").inner_text().startswith("“dog” attends most to row")


def answer_panel() -> Panel:
    """Two written words on a 1 x 2 grid and one word; the last key is a sink of layer 1."""
    words_of = TextGeometry(("a dog",), torch.tensor([[[0, 1], [2, 5]]]))
    prompt = TextGeometry(("what",), torch.tensor([[[0, 4]]]))
    where = PixelGeometry.identity(1, (120, 200))
    keys = Layout((Span("image", (1, 2), slice(0, 2), where),), 2) + words(1, geometry=prompt)
    rows = torch.tensor([[0.1, 0.3, 0.6], [0.3, 0.1, 0.6]])  # of "a" and "dog"
    attention = AttentionMap(rows.expand(1, 2, 1, 2, 3).clone(), keys, words(2, geometry=words_of))
    shown = make_panel(attention, "the answer, word by word", photos={"image": PHOTO})
    check = DeletionCheck("layer 1", 1, (0.3, 0.1), ((0.2, 0.4), (0.3, 0.5)))
    probabilities = {"chances": (0.25, 0.5), "before": (0.25, 0.75)}
    return replace(shown, sinks=((), (2,)), deletion=check, **probabilities)


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_words_of_an_answer_lead_to_the_image_and_back(
    tmp_path: Path, open_page: Open, width: int
) -> None:
    path = save_panels(tmp_path / "answer.html", [answer_panel()], [Choice(1, 0, 1)])
    page = open_page(path, width=width)
    ARTEFACTS.mkdir(exist_ok=True)
    answer, now = page.locator(".token.written"), page.locator(".now")
    # Each word is a button with its probability, and its change by a removal.
    assert answer.all_inner_texts() == ["a\n25 +0.0", "dog\n50 −25.0"]
    assert now.inner_text().startswith("“dog” attends most to “what” (60 %)")
    # The map is compared with random cells.
    deleted = page.locator(".deleted")
    for part in (
        "“dog” has 50.0 %; 10.0 % without the 1 cell",
        "45.0 % without",
        "40.0 % to 50.0 %",
    ):
        assert part in deleted.inner_text()
    page.locator(".mean").click()
    assert "1 of 2 words become less probable" in deleted.inner_text()
    answer.first.click()
    assert "row 1, column 2 (30 %)" in now.inner_text()
    # Sinks are marked in their layer, and can be left out: the rest of the row is renormalized.
    prompt = page.locator(".token:not(.written)", has_text="what")
    assert "sink" in prompt.get_attribute("class").split()
    page.locator(".leave").check()
    assert now.inner_text().startswith("“a” attends most to row 1, column 2 (75 %)")
    page.locator(".leave").uncheck()
    # From the left cell back to the words that attend to it.
    frame = page.locator(".picture")
    box = frame.bounding_box()
    frame.click(position={"x": box["width"] / 4, "y": box["height"] / 2})
    used = page.locator(".used")
    assert used.inner_text().startswith(
        "The selected key is attended to most from “dog” (30 %); “a” (10 %)"
    )
    assert page.locator(".marks .picked").count() == 1
    frame.click(position={"x": 3 * box["width"] / 4, "y": box["height"] / 2})
    assert "2 keys" in used.inner_text() and "“a” (40 %)" in used.inner_text()
    page.screenshot(path=ARTEFACTS / f"look-answer-{width}.png", full_page=True)
    page.locator(".clear").click()
    assert used.is_hidden() and page.locator(".marks .picked").count() == 0
    # The same by keyboard.
    frame.focus()
    for key in ("ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert "“a” (30 %); “dog” (10 %)" in used.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_page_fits_a_phone_and_has_a_dark_theme(tmp_path: Path, open_page: Open) -> None:
    path = save_panels(tmp_path / "view.html", [shifted_panel()])
    page = open_page(path, width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=ARTEFACTS / "look-phone.png", full_page=True)
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_long_title_fits_a_phone(tmp_path: Path, open_page: Open) -> None:
    title = "Where a-model (ViTForImageClassificationWithManyHeads) looks"
    path = tmp_path / "view.html"
    path.write_text(render_page([shifted_panel()], [Choice(0, 0, 0)], title))
    page = open_page(path, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_map_and_thumbnails_start_in_the_first_screen(tmp_path: Path, open_page: Open) -> None:
    path = save_panels(tmp_path / "view.html", [shifted_panel()])
    page = open_page(path)
    tops = [page.locator(one).bounding_box()["y"] for one in (".picture canvas", ".tiles")]
    assert max(tops) < 480


def test_small_panels_stand_side_by_side(tmp_path: Path, open_page: Open) -> None:
    cells = Layout((Span("image", (3, 3), slice(0, 9), WHERE),), 9)
    attention = AttentionMap(torch.full((1, 1, 1, 1, 9), 1 / 9), cells)
    panel = make_panel(attention, "level", photos={"image": PHOTO})
    page = open_page(save_panels(tmp_path / "view.html", [panel, panel]))
    first, second = (one.bounding_box() for one in page.locator(".panel").all())
    assert first["y"] == second["y"] and first["x"] + first["width"] <= second["x"]
    photo = page.locator(".picture").first.bounding_box()
    assert photo["width"] > 0.8 * first["width"]
    page.set_viewport_size({"width": 390, "height": 844})
    first, second = (one.bounding_box() for one in page.locator(".panel").all())
    assert first["x"] == second["x"] and first["y"] + first["height"] <= second["y"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_marked_words_have_readable_contrast(tmp_path: Path, open_page: Open, scheme: str) -> None:
    path = save_panels(tmp_path / "view.html", [shifted_panel()])
    page = open_page(path, color_scheme=scheme)
    colours = page.evaluate("""() => {
      const one = document.createElement("span"), found = {};
      document.body.append(one);
      for (const name of ["--ink", "--mark"]) {
        one.style.color = `var(${name})`;
        found[name] = getComputedStyle(one).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
      }
      return found;
    }""")
    assert wcag_contrast(colours["--ink"], colours["--mark"]) >= 4.5


def wcag_contrast(one: list[float], other: list[float]) -> float:
    """The contrast ratio of two sRGB colours (WCAG 2.2)."""

    def luminance(colour: list[float]) -> float:
        parts = [part / 255 for part in colour]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
