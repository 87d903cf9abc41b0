"""Two runs in one page: samples side by side, what changed, and where only one is right."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import files
from overt.show.page import report
from overt.show.sample import Sample

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.long
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]
NAMES = ("soft attention", "truth-supervised")


@pytest.fixture
def two_runs(run_folder: Callable[..., Path], samples: Callable[..., list[Sample]]) -> list[Path]:
    """Two runs over the same 8 samples, with their numbers."""
    folders = []
    for name in NAMES:
        folder, shown = run_folder(name), samples(name, 8)
        numbers = {
            "id": np.array([one.id for one in shown]),
            "cluster": np.array([one.id.split("/")[0] for one in shown]),
            "prediction": np.array([one.prediction for one in shown]),
            "truth": np.array([one.truth for one in shown]),
            "accuracy": np.array([one.right for one in shown], np.float32),
            "mass_inside": np.array([one.scores["mass inside"] for one in shown], np.float32),
        }
        files.write_arrays(folder / "samples.npz", numbers)
        folders.append(folder)
    return folders


def shown(page: "sync_api.Page") -> list[int]:
    cards = page.locator(".card:visible")
    return [int(number) for number in cards.evaluate_all("all => all.map(c => c.dataset.number)")]


def test_differences_stand_in_words_and_in_a_table(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    page = open_page(report(tmp_path / "page.html", two_runs))
    first = page.locator(".short").inner_text()
    assert "Is truth-supervised better than soft attention?" in first
    rows = page.locator("#pairs tbody tr")
    assert rows.locator("th").all_inner_texts() == ["Accuracy ↑", "Mass inside ↑"]
    assert "All 8 test samples are the same" in page.locator("#pairs .of").inner_text()
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-compared.png", full_page=True)


def test_both_maps_and_what_changed_stand_side_by_side(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    page = open_page(report(tmp_path / "page.html", two_runs))
    card = page.locator(".card").first
    boxes = [one.bounding_box() for one in card.locator(".frame").all()]
    assert len(boxes) == 4 and None not in boxes  # the photo, two maps, what changed
    tops = {round(box["y"]) for box in boxes if box is not None}
    assert len(tops) == 1
    assert card.locator(".shift img.heat").evaluate("i => i.complete && i.naturalWidth > 0")
    assert card.locator(".changed .word").count() > 3


def test_the_filter_finds_where_only_one_is_right(
    tmp_path: Path,
    two_runs: list[Path],
    samples: Callable[..., list[Sample]],
    open_page: Open,
) -> None:
    page = open_page(report(tmp_path / "page.html", two_runs))
    rights = [[bool(one.right) for one in samples(name, 8)] for name in NAMES]
    answer = page.get_by_label("Answer", exact=True)
    for run, (name, own, other) in enumerate(zip(NAMES, rights, rights[::-1], strict=True)):
        wanted = [i + 1 for i in range(8) if own[i] and not other[i]]
        assert run == 0 or wanted  # the better run is right alone somewhere
        answer.select_option(f"only {name} right")
        assert shown(page) == wanted


def test_two_runs_fit_a_phone_and_the_dark(
    tmp_path: Path, two_runs: list[Path], open_page: Open
) -> None:
    path = report(tmp_path / "page.html", two_runs)
    page = open_page(path, width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.locator(".frame").evaluate_all("all => all.map(f => f.offsetWidth)")
    assert min(widths) > 120
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "report-compared-phone.png", full_page=True)
