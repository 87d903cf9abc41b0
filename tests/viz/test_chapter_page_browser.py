"""Chapter pages in a real browser: no overflow, maps in one row, readable text, links.

Screenshots for visual inspection go to the ignored folder `artefacts/`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import io
from overt.viz.chapter_page import Chapter, ChapterMetric, render_chapters
from overt.viz.gallery_sample import GallerySample
from overt.viz.run_reader import read_runs
from tests.viz.test_browse_page_browser import wcag_contrast

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]
WIDTHS = (390, 1280, 1920)
SMALLEST_CONTRAST = 4.5

# The colour and background of every text that is seen, except on maps and photos.
TEXT_COLOURS = """() => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number), found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim()) continue;
    if (one.closest("script, style, .frame, .words, .skip")) continue;
    if (!one.getClientRects().length) continue;
    let place = one, ground = [255, 255, 255];
    for (; place; place = place.parentElement) {
      const colour = parse(getComputedStyle(place).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) { ground = colour.slice(0, 3); break; }
    }
    const colour = parse(getComputedStyle(one).color).slice(0, 3);
    found.push([walker.currentNode.textContent.trim().slice(0, 40), colour, ground]);
  }
  return found;
}"""


@pytest.fixture
def page_path(
    tmp_path: Path,
    run_folder: Callable[..., Path],
    samples: Callable[..., list[GallerySample]],
) -> Path:
    """Write a page with two chapters of 8 samples and long titles."""
    folders = []
    for number, name in enumerate(("soft attention", "truth-supervised")):
        folder, gallery = run_folder(name), samples(name, 8)
        right = np.array([one.right for one in gallery], np.float32)
        values = {"accuracy": right + np.float32(number), "mass_inside": right / 2}
        ids = {"id": np.array([one.id for one in gallery])}
        io.write_arrays(folder / "samples.npz", ids | values)
        folders.append(folder)
    control, method = read_runs(folders)
    metrics = (
        ChapterMetric("accuracy", "accuracy", "questions"),
        ChapterMetric("mass_inside", "attention on the region of a word", "captions"),
    )
    chapters = [
        Chapter(
            name,
            "Visually grounded supervision of Transformers for captioning",
            "Every head of a Transformer is trained to attend from a word to its regions.",
            control,
            method,
            metrics,
            "Found so far: overt/papers/vgp/RESULTS.md.",
            "overt table vgp-scenes --rows none,direct --seeds 5 --out runs/vgp-scenes",
            "vgp.html",
        )
        for name in ("VGP", "AdaHAN")
    ]
    path = tmp_path / "report.html"
    path.write_text(render_chapters("Five papers", "A lead.", chapters, 3, "One seed."))
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
    crossing = page.evaluate(
        """() => [...document.querySelectorAll("th, td")]
          .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)"""
    )
    assert crossing == []
    pale = [
        (text, round(wcag_contrast(colour, ground), 2))
        for text, colour, ground in page.evaluate(TEXT_COLOURS)
        if wcag_contrast(colour, ground) < SMALLEST_CONTRAST
    ]
    assert pale == []
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"chapters-{width}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_maps_of_control_and_method_are_side_by_side(
    page_path: Path, open_page: Open, width: int
) -> None:
    page = open_page(page_path, width=width)
    for card in page.locator(".card").all():
        boxes = [one.bounding_box() for one in card.locator(".view .frame").all()]
        assert len(boxes) == 2 and None not in boxes
        assert len({round(box["y"]) for box in boxes if box is not None}) == 1


def test_both_maps_and_their_change_are_in_one_row(page_path: Path, open_page: Open) -> None:
    page = open_page(page_path)
    for card in page.locator(".card").all():
        boxes = [one.bounding_box() for one in card.locator(".view .frame, .shift .frame").all()]
        assert len(boxes) == 3 and None not in boxes
        assert len({round(box["y"]) for box in boxes if box is not None}) == 1


def test_photos_and_maps_are_loaded(page_path: Path, open_page: Open) -> None:
    page = open_page(page_path)
    heats = page.locator("img.heat")
    assert heats.count() == 18  # two chapters, three samples, two maps and their change
    assert heats.evaluate_all("all => all.every(i => i.complete && i.naturalWidth > 0)")
    photos = page.locator(".photo").evaluate_all(
        "all => all.map(p => getComputedStyle(p).backgroundImage.slice(0, 10))"
    )
    assert set(photos) == {'url("data:'}


def test_a_chapter_is_reached_from_the_table_and_links_to_its_report(
    page_path: Path, open_page: Open
) -> None:
    page = open_page(page_path)
    page.locator("table a").nth(1).click()
    assert page.url.endswith("#AdaHAN")
    assert page.locator("#AdaHAN").bounding_box()["y"] < 200
    assert page.locator("#AdaHAN .of a").get_attribute("href") == "vgp.html"


def test_a_cell_is_read_with_the_keyboard(page_path: Path, open_page: Open) -> None:
    page = open_page(page_path)
    frame = page.locator(".view .frame").first
    frame.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".view .reading").first.inner_text()
