"""Maps are read cell by cell and words show their own maps: with a pointer, and by keys alone.

Screenshots go to the ignored folder `artefacts/`, for people to look at.
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
from overt.show.page import report
from overt.show.sample import Sample

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]


def corner(row: int, column: int) -> np.ndarray:
    """A map of 2 x 2 cells with most of its weight in one."""
    cells = np.full((2, 2), 0.1, np.float32)
    cells[row, column] = 0.7
    return cells


def a_caption() -> Sample:
    """A white photo and a caption of two words: one looks up left, the other down right."""
    return Sample(
        id="photo-1",
        image=np.full((200, 200, 3), 255, np.uint8),
        text="a red dog / one dog",
        prediction="red dog",
        cells=np.full((2, 2), 0.25, np.float32),
        answer_cells=np.stack([corner(0, 0), corner(1, 1)]),
        boxes=np.array([[0.0, 0.0, 100.0, 100.0], [100.0, 100.0, 200.0, 200.0]], np.float32),
    )


def pixels(page: "sync_api.Page") -> np.ndarray:
    shot = page.locator(".view .frame").first.screenshot()
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


def test_pointing_at_a_cell_reads_its_weight(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    photo = np.full((100, 200, 3), 255, np.uint8)
    geometry = PixelGeometry.identity(1, (100, 200)).crop(0, 100, 100, 100)  # the right half
    cells = np.array([[0.1, 0.2], [0.3, 0.4]])
    sample = Sample(id="a", image=photo, geometry=geometry, cells=cells)
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    frame, reading = page.locator(".view .frame"), page.locator(".reading")
    box = frame.bounding_box()
    assert box is not None
    wanted = {(0.6, 0.2): "row 1, column 1: 0.100, 0.4 × even"}
    wanted |= {(0.9, 0.8): "row 2, column 2: 0.400, 1.6 × even", (0.3, 0.5): ""}
    for (x, y), said in wanted.items():
        frame.hover(position={"x": x * box["width"], "y": y * box["height"]})
        assert reading.inner_text() == said
    frame.hover(position={"x": 0.9 * box["width"], "y": 0.8 * box["height"]})
    mark = page.locator(".cell").bounding_box()
    assert mark is not None and mark["x"] - box["x"] == pytest.approx(0.75 * box["width"], abs=1)
    assert mark["width"] == pytest.approx(0.25 * box["width"], abs=1)


def test_a_pressed_word_shows_its_own_map(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=[a_caption()])]))
    red, dog = (page.get_by_role("button", name=name, exact=True) for name in ("red", "dog"))
    even = pixels(page)
    height, width = even.shape[:2]

    def heat(picture: np.ndarray, y: float, x: float) -> int:
        """How much less blue than red there is: heat is yellow."""
        red_, _, blue = picture[int(y * height), int(x * width)]
        return int(red_ - blue)

    red.click()
    assert red.get_attribute("aria-pressed") == "true"
    seen = pixels(page)
    assert heat(seen, 0.25, 0.25) > heat(seen, 0.75, 0.75) + 40
    assert page.locator(".reading").inner_text() == "the map of “red”"
    assert "top left" in (page.locator(".view img.heat").get_attribute("alt") or "")
    page.locator(".view .frame").hover(position={"x": 9, "y": 9})
    assert page.locator(".reading").inner_text().startswith("row 1, column 1: 0.7")
    dog.click()
    assert red.get_attribute("aria-pressed") == "false"
    seen = pixels(page)
    assert heat(seen, 0.75, 0.75) > heat(seen, 0.25, 0.25) + 40
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-caption.png", full_page=True)
    dog.click()
    page.mouse.move(0, 0)
    assert np.abs(pixels(page) - even).max() < 8  # as before
    assert page.locator("svg.regions rect").count() == 2


def test_a_word_of_a_text_says_its_weight(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    spans, weights = np.array([[0, 3], [4, 6]]), np.array([0.75, 0.25])
    sample = Sample(id="a", text="who is", spans=spans, word_weights=weights, prediction="me")
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    page.get_by_role("button", name="who", exact=True).click()
    assert page.locator(".reading").inner_text() == "“who”: 0.750, 1.5 × even"


def test_a_level_is_chosen_by_its_small_picture(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    levels = {"4x4": np.eye(4), "2x2": corner(0, 1)}
    sample = replace(a_caption(), answer_cells=None, levels=levels)
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    small = page.locator(".level button")
    assert small.count() == 2
    small.first.click()
    box = page.locator(".view > .frame").bounding_box()
    assert box is not None
    page.locator(".view > .frame").hover(
        position={"x": 0.3 * box["width"], "y": 0.3 * box["height"]}
    )
    assert page.locator(".reading").inner_text() == "row 2, column 2: 1.000, 4.0 × even"


def test_everything_can_be_done_by_keys_alone(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    samples = [a_caption(), replace(a_caption(), id="photo-2")]
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=samples)]))

    def here() -> str:
        return page.evaluate("document.activeElement.closest('.card')?.ariaLabel || ''")

    page.keyboard.press("j")
    assert here() == "Sample photo-1"
    page.keyboard.press("j")
    assert here() == "Sample photo-2"
    page.keyboard.press("k")
    assert here() == "Sample photo-1"
    page.keyboard.press("Tab")  # its map
    reading = page.locator(".reading").first
    assert reading.inner_text() == "row 1, column 1: 0.250, 1.0 × even"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # there is no third column
    assert reading.inner_text() == "row 2, column 2: 0.250, 1.0 × even"
    page.keyboard.press("Tab")  # the words of the answer, one stop
    assert page.evaluate("document.activeElement.textContent") == "red"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert reading.inner_text() == "the map of “dog”"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") not in ("red", "dog")
    seen = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert seen != "none"  # the focus shows


def test_every_picture_says_what_it_shows(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    page = open_page(report(tmp_path / "page.html", [run_folder(samples=[a_caption()])]))
    alts = page.locator("img").evaluate_all("all => all.map(i => i.alt)")
    assert alts and all(re.match(r"Attention: most .* in one cell of 2 × 2\.", alt) for alt in alts)
    named = page.locator("[role=img], [role=application]").evaluate_all(
        "all => all.every(e => e.ariaLabel || e.querySelector('title, desc'))"
    )
    assert named
    unnamed = page.locator("button, select, input").evaluate_all(
        "all => all.filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
