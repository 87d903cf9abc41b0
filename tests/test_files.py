import numpy as np
import pytest
import torch

from overt import files
from overt.errors import BadInput, Damaged, Failed


def fill(folder, value=0):
    """A small checkpoint of three files, one of them in a subfolder."""
    files.write_tensors(folder / "model.safetensors", {"w": torch.full((40,), float(value))})
    files.write_json(folder / "state.json", {"step": value})
    files.write_arrays(folder / "extra" / "order.npz", {"order": np.arange(20) + value})


def save(folder, value=0):
    with files.writing(folder) as temporary:
        fill(temporary, value)


def load(folder):
    """The value a checkpoint was filled with, and that all three files agree on it."""
    files.verify(folder)
    value = files.read_json(folder / "state.json")["step"]
    weights = files.read_tensors(folder / "model.safetensors")["w"]
    order = files.read_arrays(folder / "extra" / "order.npz")["order"]
    assert (weights == value).all() and (order == np.arange(20) + value).all()
    return value


def test_a_folder_comes_back_as_written(tmp_path):
    save(tmp_path / "deep" / "c", 3)
    assert load(tmp_path / "deep" / "c") == 3
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["c"]


def test_a_folder_is_replaced(tmp_path):
    save(tmp_path / "c", 1)
    save(tmp_path / "c", 2)
    assert load(tmp_path / "c") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
