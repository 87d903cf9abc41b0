from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.image_arrays import ImageArrays
from overt.data.in_memory_images import InMemoryImages, random_shift_flip
from overt.errors import UserError

ROWS = np.array([4, 0, 2])


def make_arrays(tmp_path: Path, labels: bool = True, content: bytes = b"x") -> ImageArrays:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    images = np.arange(5 * 3 * 4 * 6, dtype=np.uint16).astype(np.uint8).reshape(5, 3, 4, 6)
    numbers = np.arange(5, dtype=np.int64) % 2 if labels else None
    return ImageArrays(
        "toy", "val", "train", [images[:1], images[1:]], numbers, ROWS, ("a", "b"), [path]
    )


def test_batches_have_the_rows_of_the_split(tmp_path):
    found = make_arrays(tmp_path)
    batch = found.batch([2, 0])
    assert isinstance(found, Dataset) and len(found) == 3
    assert batch.ids == ("toy/train/000002", "toy/train/000004")
    assert batch.images[:, 0, 0, 0].tolist() == [2 * 72, (4 * 72) % 256]
    assert batch.labels.tolist() == [0, 0] and batch.geometry.canvas == (4, 6)
    batch.images.zero_()
    assert found.batch([2]).images.any()
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 3])
def test_out_of_range_index_raises(tmp_path, place):
    with pytest.raises(UserError, match=rf"toy val .*3 .*{place} "):
        make_arrays(tmp_path).batch([0, place])


def test_arrays_without_labels_give_images_only(tmp_path):
    found = make_arrays(tmp_path, labels=False)
    assert found.batch([1]).labels is None
    with pytest.raises(UserError, match="no labels"):
        found.labels([0])
    with pytest.raises(UserError, match="label"):
        InMemoryImages.from_dataset(found)


def test_arrays_can_be_loaded_in_memory_and_shifted(tmp_path, generator):
    in_memory = InMemoryImages.from_dataset(make_arrays(tmp_path))
    assert torch.equal(in_memory.images, make_arrays(tmp_path).images(range(3)))
    assert random_shift_flip(in_memory.batch([0, 1]), generator, margin=1).images.shape == (
        2,
        3,
        4,
        6,
    )


def test_digest_depends_on_the_files(tmp_path):
    before = make_arrays(tmp_path).digest()
    assert before == make_arrays(tmp_path).digest()
    assert before != make_arrays(tmp_path, content=b"y").digest()
