"""One picture for people in a hurry: samples down, runs across."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.errors import BadInput
from overt.show.overlay import overlay, spotlight
from overt.show.picture import GAP, MARGIN, TILE, picture
from overt.show.sample import Sample

Make = Callable[..., list[Sample]]


def drawn(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def find(sheet: np.ndarray, tile: np.ndarray, left: int) -> list[int]:
    """The rows at which a tile stands in the column that begins at `left`."""
    column = sheet[:, left : left + tile.shape[1]]
    height = len(tile)
    return [
        y
        for y in range(len(column) - height + 1)
        if (column[y : y + height : 16] == tile[::16]).all()
    ]


def test_samples_stand_in_rows_and_runs_in_columns(tmp_path: Path, samples: Make) -> None:
    soft, truth = samples("soft attention", 2), samples("truth-supervised", 2)
    picture({"soft": soft, "truth": truth[::-1]}, tmp_path / "a.png")
    sheet = drawn(tmp_path / "a.png")
    assert sheet.shape[1] == 2 * MARGIN + 3 * TILE + 2 * GAP
    tops = []
    for column, run in ((1, soft), (2, truth)):
        for sample in run:
            tile = overlay(sample.image, sample.cells, truth=sample.truth_cells)
            tile = np.asarray(Image.fromarray(tile).resize((TILE, TILE), Image.Resampling.LANCZOS))
            tops.append(find(sheet, tile, MARGIN + column * (TILE + GAP)))
    assert all(len(found) == 1 for found in tops)
    assert tops[0] == tops[2] and tops[1] == tops[3] and tops[0] < tops[1]


def test_kept_cells_of_several_questions_stand_in_rows(tmp_path: Path, samples: Make) -> None:
    asked = [
        replace(sample, cells=(sample.cells >= sample.cells.max()).astype(float))
        for sample in samples("soft attention", 2)
    ]
    picture({"hard": asked}, tmp_path / "a.png", draw=spotlight)
    sheet = drawn(tmp_path / "a.png")
    for sample in asked:
        tile = spotlight(sample.image, sample.cells, truth=sample.truth_cells)
        tile = np.asarray(Image.fromarray(tile).resize((TILE, TILE), Image.Resampling.LANCZOS))
        assert len(find(sheet, tile, MARGIN + TILE + GAP)) == 1


def test_the_same_samples_give_the_same_bytes(tmp_path: Path, samples: Make) -> None:
    for name in ("a.png", "b.png"):
        picture({"soft": samples("soft attention", 1)}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_text_alone_and_long_words_still_make_a_picture(tmp_path: Path, samples: Make) -> None:
    text = "Which " + "very " * 60 + "Donaudampfschifffahrtsgesellschaft" * 3
    spans = np.array([[0, 5], [6, 10], [306, len(text)]])
    alone = Sample(id="a", text=text, spans=spans, word_weights=np.array([0.2, 0.3, 0.5]))
    picture({"a": [alone] * 3 + samples("no attention", 2)}, tmp_path / "a.png")
    sheet = drawn(tmp_path / "a.png")
    assert (sheet < 250).any() and (sheet[-MARGIN + 10 :] == 255).all()


def test_runs_that_share_nothing_are_bad_input(tmp_path: Path, samples: Make) -> None:
    with pytest.raises(BadInput, match="share no sample"):
        picture({"a": samples("soft attention", 1), "b": []}, tmp_path / "a.png")
    with pytest.raises(BadInput, match="at least one run"):
        picture({}, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
