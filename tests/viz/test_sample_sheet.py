"""Sample sheets: one image with samples in rows and runs in columns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.errors import UserError
from overt.viz.gallery_sample import GallerySample
from overt.viz.photo_overlay import overlay, spotlight
from overt.viz.sample_sheet import GAP, MARGIN, TILE, save_sample_sheet

Make = Callable[..., list[GallerySample]]


def load_sheet(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def find_tile(sheet: np.ndarray, tile: np.ndarray, left: int) -> list[int]:
    """The rows of the sheet at which a tile appears in the column that begins at `left`."""
    column = sheet[:, left : left + tile.shape[1]]
    height = len(tile)
    return [
        y
        for y in range(len(column) - height + 1)
        if (column[y : y + height : 16] == tile[::16]).all()
    ]


@pytest.mark.long
def test_samples_are_rows_and_runs_are_columns(tmp_path: Path, samples: Make) -> None:
    soft, truth = samples("soft attention", 2), samples("truth-supervised", 2)
    save_sample_sheet({"soft": soft, "truth": truth[::-1]}, tmp_path / "a.png")
    sheet = load_sheet(tmp_path / "a.png")
    assert sheet.shape[1] == 2 * MARGIN + 3 * TILE + 2 * GAP
    tops = []
    for column, run in ((1, soft), (2, truth)):
        for sample in run:
            tile = overlay(sample.image, sample.cells, truth=sample.truth_cells)
            tile = np.asarray(Image.fromarray(tile).resize((TILE, TILE), Image.Resampling.LANCZOS))
            tops.append(find_tile(sheet, tile, MARGIN + column * (TILE + GAP)))
    assert all(len(found) == 1 for found in tops)
    assert tops[0] == tops[2] and tops[1] == tops[3] and tops[0] < tops[1]


def test_hard_attention_is_drawn_with_spotlight(tmp_path: Path, samples: Make) -> None:
    hard_samples = [
        replace(sample, cells=(sample.cells >= sample.cells.max()).astype(float))
        for sample in samples("soft attention", 2)
    ]
    save_sample_sheet({"hard": hard_samples}, tmp_path / "a.png", draw=spotlight)
    sheet = load_sheet(tmp_path / "a.png")
    for sample in hard_samples:
        tile = spotlight(sample.image, sample.cells, truth=sample.truth_cells)
        tile = np.asarray(Image.fromarray(tile).resize((TILE, TILE), Image.Resampling.LANCZOS))
        assert len(find_tile(sheet, tile, MARGIN + TILE + GAP)) == 1


def test_sheet_is_deterministic(tmp_path: Path, samples: Make) -> None:
    for name in ("a.png", "b.png"):
        save_sample_sheet({"soft": samples("soft attention", 1)}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_text_only_samples_and_long_words_are_drawn(tmp_path: Path, samples: Make) -> None:
    text = "Which " + "very " * 60 + "Donaudampfschifffahrtsgesellschaft" * 3
    spans = np.array([[0, 5], [6, 10], [306, len(text)]])
    alone = GallerySample(id="a", text=text, spans=spans, word_weights=np.array([0.2, 0.3, 0.5]))
    save_sample_sheet({"a": [alone] * 3 + samples("no attention", 2)}, tmp_path / "a.png")
    sheet = load_sheet(tmp_path / "a.png")
    assert (sheet < 250).any() and (sheet[-MARGIN + 10 :] == 255).all()


def test_runs_without_shared_samples_raise(tmp_path: Path, samples: Make) -> None:
    with pytest.raises(UserError, match="share no sample"):
        save_sample_sheet({"a": samples("soft attention", 1), "b": []}, tmp_path / "a.png")
    with pytest.raises(UserError, match="least one run"):
        save_sample_sheet({}, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
