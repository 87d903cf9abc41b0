"""Comparison of two runs in a real browser: differences, changes and filters."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import io
from overt.viz.gallery_sample import GallerySample
from overt.viz.report_page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]
NAMES = ("soft attention", "truth-supervised")


@pytest.fixture
def two_runs(
    run_folder: Callable[..., Path], samples: Callable[..., list[GallerySample]]
) -> list[Path]:
    """Two runs over the same 8 samples, with values per sample."""
    folders = []
    for name in NAMES:
        folder, gallery = run_folder(name), samples(name, 8)
        numbers = {
            "id": np.array([one.id for one in gallery]),
            "cluster": np.array([one.id.split("/")[0] for one in gallery]),
            "prediction": np.array([one.prediction for one in gallery]),
            "truth": np.array([one.truth for one in gallery]),
            "accuracy": np.array([one.right for one in gallery], np.float32),
            "mass_inside": np.array([one.scores["mass inside"] for one in gallery], np.float32),
        }
        io.write_arrays(folder / "samples.npz", numbers)
        folders.append(folder)
    return folders


def visible_cards(page: "sync_api.Page") -> list[int]:
    cards = page.locator(".card:visible")
    return [int(number) for number in cards.evaluate_all("all => all.map(c => c.dataset.number)")]


def test_differences_are_in_a_sentence_and_a_table(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", two_runs))
    first = page.locator(".short").inner_text()
    assert "Is truth-supervised better than soft attention?" in first
    rows = page.locator("#pairs tbody tr")
    assert rows.locator("th").all_inner_texts() == ["Accuracy ↑", "Mass inside ↑"]
    assert "the same 8 test samples" in page.locator("#pairs .of").inner_text()
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-compared.png", full_page=True)


def test_both_maps_and_their_change_are_in_one_row(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", two_runs))
    card = page.locator(".card").first
    boxes = [one.bounding_box() for one in card.locator(".frame").all()]
    assert len(boxes) == 4 and None not in boxes  # the photo, two maps, their difference
    tops = {round(box["y"]) for box in boxes if box is not None}
    assert len(tops) == 1
    assert card.locator(".shift img.heat").evaluate("i => i.complete && i.naturalWidth > 0")
    assert card.locator(".changed .word").count() > 3


def test_filter_selects_samples_that_only_one_run_gets_right(
    tmp_path: Path,
    two_runs: list[Path],
    samples: Callable[..., list[GallerySample]],
    open_page: Open,
) -> None:
    page = open_page(write_report(tmp_path / "page.html", two_runs))
    rights = [[bool(one.right) for one in samples(name, 8)] for name in NAMES]
    answer = page.get_by_label("Answer", exact=True)
    for run, (name, right, other_right) in enumerate(zip(NAMES, rights, rights[::-1], strict=True)):
        expected = [i + 1 for i in range(8) if right[i] and not other_right[i]]
        assert run == 0 or expected  # only the better run is right on some samples
        answer.select_option(f"only {name} right")
        assert visible_cards(page) == expected


def test_two_runs_fit_a_phone_in_the_dark_theme(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    path = write_report(tmp_path / "page.html", two_runs)
    page = open_page(path, width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.locator(".frame").evaluate_all("all => all.map(f => f.offsetWidth)")
    assert min(widths) > 120
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-compared-phone.png", full_page=True)
