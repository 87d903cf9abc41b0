from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.pictures import Pictures
from overt.data.resident import Resident, vary
from overt.data.source import Source
from overt.errors import BadInput

ROWS = np.array([4, 0, 2])


def pictures(tmp_path: Path, labels: bool = True, content: bytes = b"x") -> Pictures:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    images = np.arange(5 * 3 * 4 * 6, dtype=np.uint16).astype(np.uint8).reshape(5, 3, 4, 6)
    numbers = np.arange(5, dtype=np.int64) % 2 if labels else None
    return Pictures(
        "toy", "val", "train", [images[:1], images[1:]], numbers, ROWS, ("a", "b"), [path]
    )


def test_a_batch_has_the_rows_of_the_split(tmp_path):
    found = pictures(tmp_path)
    batch = found.batch([2, 0])
    assert isinstance(found, Source) and len(found) == 3
    assert batch.ids == ("toy/train/000002", "toy/train/000004")
    assert batch.images[:, 0, 0, 0].tolist() == [2 * 72, (4 * 72) % 256]
    assert batch.labels.tolist() == [0, 0] and batch.geometry.canvas == (4, 6)
    batch.images.zero_()
    assert found.batch([2]).images.any()
    assert len(found.batch([])) == 0


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_out_of_range_is_refused(tmp_path, place):
    with pytest.raises(BadInput, match=rf"toy val has samples 0 to 2, not {place}"):
        pictures(tmp_path).batch([0, place])


def test_without_labels_there_are_pictures_alone(tmp_path):
    found = pictures(tmp_path, labels=False)
    assert found.batch([1]).labels is None
    with pytest.raises(BadInput, match="no labels"):
        found.labels([0])
    with pytest.raises(BadInput, match="label"):
        Resident.of(found)


def test_it_can_live_on_a_device_and_vary_there(tmp_path, generator):
    resident = Resident.of(pictures(tmp_path))
    assert torch.equal(resident.images, pictures(tmp_path).images(range(3)))
    assert vary(resident.batch([0, 1]), generator, margin=1).images.shape == (2, 3, 4, 6)


def test_the_digest_is_that_of_files_and_rows(tmp_path):
    before = pictures(tmp_path).digest()
    assert before == pictures(tmp_path).digest()
    assert before != pictures(tmp_path, content=b"y").digest()
