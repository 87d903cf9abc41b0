"""Submitted maps: the documented format, and an error for everything else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.errors import CorruptFileError, UserError
from overt.metrics.scorecard.submission import FORMAT, load_submission

IDS = ("a", "b")
ABOUT = {"format": FORMAT, "method": "my LRP", "model": "VQA", "data": "scenes"}


def write(folder: Path, about: Any = ABOUT, **maps: Any) -> Path:
    folder.mkdir(exist_ok=True)
    given = {name: np.asarray(values) for name, values in maps.items()}
    np.savez(folder / "maps.npz", **(given or {name: np.ones((2, 3)) for name in IDS}))
    if about is not None:
        (folder / "maps.json").write_text(json.dumps(about))
    return folder


def test_a_folder_with_maps_and_a_description(tmp_path: Path) -> None:
    found = load_submission(write(tmp_path / "mine"))
    assert (found.method, found.model, found.data, len(found.maps)) == (
        "my LRP",
        "VQA",
        "scenes",
        2,
    )
    assert found.covers("VQA", "scenes", IDS)
    assert not found.covers("CNN", "scenes", IDS) and not found.covers("VQA", "osie", IDS)


def test_maps_alone_are_for_every_dataset_whose_samples_they_have(tmp_path: Path) -> None:
    found = load_submission(write(tmp_path / "deep-taylor", None))
    assert found.method == "deep-taylor" and found.model is None
    assert found.covers("any", "any", IDS) and not found.covers("any", "any", ("x", "y"))
    assert load_submission(tmp_path / "deep-taylor" / "maps.npz").method == "maps"


@pytest.mark.parametrize(
    ("maps", "error", "message"),
    [
        ({"a": np.ones((2, 3))}, UserError, "sample 'b'"),
        ({"a": [1.0], "b": [1.0], "c": [1.0]}, UserError, "1 maps .*'c'"),
        ({"a": [1.0], "b": [-1.0]}, CorruptFileError, "finite weights"),
        ({"a": [1.0], "b": [np.nan]}, CorruptFileError, "finite weights"),
        ({"a": [1.0], "b": np.ones((2, 2, 2))}, CorruptFileError, r"\(2, 2, 2\)"),
        ({"a": [1.0], "b": ["x"]}, CorruptFileError, "numbers"),
    ],
)
def test_every_map_of_a_submission_is_checked_before_any_work(
    tmp_path: Path, maps: dict[str, Any], error: type[Exception], message: str
) -> None:
    found = load_submission(write(tmp_path / "mine", **maps))
    with pytest.raises(error, match=message):
        found.covers("VQA", "scenes", IDS)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ([], '"overt maps 1"'),
        ({"method": "x"}, '"overt maps 1"'),
        ({**ABOUT, "modle": "x"}, "modle: .*data"),
        ({**ABOUT, "model": 3}, "only texts"),
        ({"format": FORMAT}, "the method"),
        ({**ABOUT, "method": "../x"}, "../x"),
    ],
)
def test_a_wrong_description_is_an_error(tmp_path: Path, about: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_submission(write(tmp_path / "mine", about))


def test_arrays_of_objects_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    np.savez(folder / "maps.npz", a=np.array([{}, None], dtype=object))
    with pytest.raises(CorruptFileError):
        load_submission(folder)
