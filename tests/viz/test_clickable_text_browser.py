"""Cell readings and word maps of reports in a real browser, by pointer and keyboard.

Screenshots for visual inspection go to the ignored folder `artefacts/`.
"""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz.gallery_sample import GallerySample
from overt.viz.report_page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]


def peaked_map(row: int, column: int) -> np.ndarray:
    """A map of 2 x 2 cells with most of its weight in one."""
    cells = np.full((2, 2), 0.1, np.float32)
    cells[row, column] = 0.7
    return cells


def caption_sample() -> GallerySample:
    """A white photo with a caption of two words, whose maps are top left and bottom right."""
    return GallerySample(
        id="photo-1",
        image=np.full((200, 200, 3), 255, np.uint8),
        text="a red dog / one dog",
        prediction="red dog",
        cells=np.full((2, 2), 0.25, np.float32),
        answer_cells=np.stack([peaked_map(0, 0), peaked_map(1, 1)]),
        boxes=np.array([[0.0, 0.0, 100.0, 100.0], [100.0, 100.0, 200.0, 200.0]], np.float32),
    )


def frame_pixels(page: "sync_api.Page") -> np.ndarray:
    shot = page.locator(".view .frame").first.screenshot()
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


def test_hovering_a_cell_shows_its_weight(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    photo = np.full((100, 200, 3), 255, np.uint8)
    geometry = PixelGeometry.identity(1, (100, 200)).crop(0, 100, 100, 100)  # the right half
    cells = np.array([[0.1, 0.2], [0.3, 0.4]])
    sample = GallerySample(id="a", image=photo, geometry=geometry, cells=cells)
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    frame, reading = page.locator(".view .frame"), page.locator(".reading")
    box = frame.bounding_box()
    assert box is not None
    readings = {(0.6, 0.2): "row 1, column 1: 0.100, 0.4 × uniform"}
    readings |= {(0.9, 0.8): "row 2, column 2: 0.400, 1.6 × uniform", (0.3, 0.5): ""}
    for (x, y), text in readings.items():
        frame.hover(position={"x": x * box["width"], "y": y * box["height"]})
        assert reading.inner_text() == text
    frame.hover(position={"x": 0.9 * box["width"], "y": 0.8 * box["height"]})
    mark = page.locator(".cell").bounding_box()
    assert mark is not None and mark["x"] - box["x"] == pytest.approx(0.75 * box["width"], abs=1)
    assert mark["width"] == pytest.approx(0.25 * box["width"], abs=1)


def test_clicked_word_shows_its_map(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[caption_sample()])]))
    red, dog = (page.get_by_role("button", name=name, exact=True) for name in ("red", "dog"))
    before = frame_pixels(page)
    height, width = before.shape[:2]

    def heat(picture: np.ndarray, y: float, x: float) -> int:
        """Red minus blue: heat is yellow."""
        red_, _, blue = picture[int(y * height), int(x * width)]
        return int(red_ - blue)

    red.click()
    assert red.get_attribute("aria-pressed") == "true"
    after = frame_pixels(page)
    assert heat(after, 0.25, 0.25) > heat(after, 0.75, 0.75) + 40
    assert page.locator(".reading").inner_text() == "the map of “red”"
    assert "top left" in (page.locator(".view img.heat").get_attribute("alt") or "")
    page.locator(".view .frame").hover(position={"x": 9, "y": 9})
    assert page.locator(".reading").inner_text().startswith("row 1, column 1: 0.7")
    dog.click()
    assert red.get_attribute("aria-pressed") == "false"
    after = frame_pixels(page)
    assert heat(after, 0.75, 0.75) > heat(after, 0.25, 0.25) + 40
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-caption.png", full_page=True)
    dog.click()
    page.mouse.move(0, 0)
    assert np.abs(frame_pixels(page) - before).max() < 8  # as before
    assert page.locator("svg.regions rect").count() == 2


def test_clicked_word_of_a_text_shows_its_weight(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    spans, weights = np.array([[0, 3], [4, 6]]), np.array([0.75, 0.25])
    sample = GallerySample(
        id="a", text="who is", spans=spans, word_weights=weights, prediction="me"
    )
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    page.get_by_role("button", name="who", exact=True).click()
    assert page.locator(".reading").inner_text() == "“who”: 0.750, 1.5 × uniform"


def test_level_is_selected_by_its_thumbnail(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    levels = {"4x4": np.eye(4), "2x2": peaked_map(0, 1)}
    sample = replace(caption_sample(), answer_cells=None, levels=levels)
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    thumbnails = page.locator(".level button")
    assert thumbnails.count() == 2
    thumbnails.first.click()
    box = page.locator(".view > .frame").bounding_box()
    assert box is not None
    page.locator(".view > .frame").hover(
        position={"x": 0.3 * box["width"], "y": 0.3 * box["height"]}
    )
    assert page.locator(".reading").inner_text() == "row 2, column 2: 1.000, 4.0 × uniform"


def test_report_can_be_used_by_keyboard_only(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    samples = [caption_sample(), replace(caption_sample(), id="photo-2")]
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=samples)]))

    def focused_card() -> str:
        return page.evaluate("document.activeElement.closest('.card')?.ariaLabel || ''")

    page.keyboard.press("j")
    assert focused_card() == "Sample photo-1"
    page.keyboard.press("j")
    assert focused_card() == "Sample photo-2"
    page.keyboard.press("k")
    assert focused_card() == "Sample photo-1"
    page.keyboard.press("Tab")  # its map
    reading = page.locator(".reading").first
    assert reading.inner_text() == "row 1, column 1: 0.250, 1.0 × uniform"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # there is no third column
    assert reading.inner_text() == "row 2, column 2: 0.250, 1.0 × uniform"
    page.keyboard.press("Tab")  # the words of the answer, one stop
    assert page.evaluate("document.activeElement.textContent") == "red"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert reading.inner_text() == "the map of “dog”"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") not in ("red", "dog")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # the focus is visible


def test_every_image_and_control_has_a_label(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[caption_sample()])]))
    alts = page.locator("img").evaluate_all("all => all.map(i => i.alt)")
    assert alts and all(re.match(r"Attention: most .* in one cell of 2 × 2\.", alt) for alt in alts)
    labelled = page.locator("[role=img], [role=application]").evaluate_all(
        "all => all.every(e => e.ariaLabel || e.querySelector('title, desc'))"
    )
    assert labelled
    unlabelled = page.locator("button, select, input").evaluate_all(
        "all => all.filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length))"
        ".map(e => e.outerHTML)"
    )
    assert unlabelled == []
