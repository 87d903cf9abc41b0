import pytest
import torch

from overt.data.batch import Batch
from overt.data.in_memory_images import (
    InMemoryImages,
    ShiftFlip,
    apply_shift_flip,
    draw_shift_flip,
    random_crop_flip,
    random_shift,
    random_shift_flip,
)
from overt.errors import UserError
from overt.geometry import PixelGeometry


class Toy:
    name, split = "toy", "train"

    def __len__(self) -> int:
        return 7

    def batch(self, indices) -> Batch:
        rows = list(indices)
        images = torch.stack([torch.full((3, 4, 5), row, dtype=torch.uint8) for row in rows])
        return Batch(tuple(map(str, rows)), images, labels=torch.tensor(rows))

    def digest(self) -> str:
        return "abc"


def slow_shift_flip(images, moves):
    """One pixel at a time: mirror the window at (top, left) of the padded image."""
    out = torch.zeros_like(images)
    _, _, height, width = images.shape
    for b in range(len(images)):
        for y in range(height):
            for x in range(width):
                across = width - 1 - x if moves.flip[b] else x
                row = y + int(moves.top[b]) - moves.margin
                column = across + int(moves.left[b]) - moves.margin
                if 0 <= row < height and 0 <= column < width:
                    out[b, :, y, x] = images[b, :, row, column]
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_apply_shift_flip_agrees_with_a_slow_copy(generator, dtype):
    images = torch.randint(0, 256, (9, 3, 6, 8), generator=generator).to(dtype)
    moves = draw_shift_flip(9, generator, margin=3)
    assert torch.equal(apply_shift_flip(images, moves), slow_shift_flip(images, moves))


def test_zero_shift_without_flip_changes_nothing():
    images = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    identity = ShiftFlip(
        torch.full((2,), 4), torch.full((2,), 4), torch.zeros(2, dtype=torch.bool), 4
    )
    assert torch.equal(apply_shift_flip(images, identity), images)


def test_result_depends_only_on_the_generator():
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    first, second, other = (
        random_crop_flip(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_global_rng_state_is_unchanged(generator):
    before = torch.get_rng_state()
    random_crop_flip(torch.zeros(4, 3, 8, 8), generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_shifts_and_flips_are_uniform(generator):
    moves = draw_shift_flip(9_000, generator, margin=4)
    for shifts in (moves.top, moves.left):
        counts = torch.bincount(shifts, minlength=9)
        assert len(counts) == 9 and (counts - 1_000).abs().max() < 150
    assert abs(moves.flip.float().mean() - 0.5) < 0.03


def test_geometry_follows_the_pixels(generator):
    """The geometry maps a bright pixel of the photo to its new cell."""
    count, side = 40, 8
    images = torch.zeros(count, 3, side, side)
    at = torch.randint(0, side, (count, 2), generator=generator)
    images[torch.arange(count), :, at[:, 0], at[:, 1]] = 1
    batch = Batch(
        tuple(map(str, range(count))), images, geometry=PixelGeometry.identity(count, (side, side))
    )
    moved = random_shift_flip(batch, generator, margin=3)
    boxes = torch.cat([at.flip(-1), at.flip(-1) + 1], dim=-1)[:, None].float()
    cover = moved.geometry.cover_boxes(boxes, (side, side))[:, 0]
    assert torch.equal(cover.reshape(count, side, side), moved.images[:, 0])
    assert 0 < moved.images.sum() < 3 * count  # some were shifted outside the image


def test_random_shift_flip_without_images_raises(generator):
    with pytest.raises(UserError):
        random_shift_flip(Batch(("a",)), generator)


def test_batches_equal_those_of_the_source(monkeypatch):
    monkeypatch.setattr("overt.data.in_memory_images.CHUNK", 3)
    source = Toy()
    dataset = InMemoryImages.from_dataset(source)
    assert (
        len(dataset) == 7
        and dataset.digest() == "abc"
        and (dataset.name, dataset.split) == ("toy", "train")
    )
    found, expected = dataset.batch([5, 0, 5]), source.batch([5, 0, 5])
    assert found.ids == expected.ids and torch.equal(found.images, expected.images)
    assert torch.equal(found.labels, expected.labels)
    assert found.geometry.canvas == (4, 5) and len(found.geometry) == 3


def test_dataset_without_one_image_per_sample_raises():
    class Text(Toy):
        def batch(self, indices) -> Batch:
            return Batch(
                tuple(map(str, indices)), labels=torch.zeros(len(indices), dtype=torch.long)
            )

    class Nothing(Toy):
        def __len__(self) -> int:
            return 0

    for source in (Text(), Nothing()):
        with pytest.raises(UserError, match="toy"):
            InMemoryImages.from_dataset(source)


def test_random_shift_does_not_flip(generator):
    images = torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(tuple(map(str, range(32))), images, geometry=PixelGeometry.identity(32, (8, 8)))
    shifted = random_shift(batch, torch.Generator().manual_seed(3))
    moves = draw_shift_flip(32, torch.Generator().manual_seed(3))
    assert moves.flip.any()
    plain = ShiftFlip(moves.top, moves.left, torch.zeros(32, dtype=torch.bool), moves.margin)
    assert torch.equal(shifted.images, slow_shift_flip(images, plain))
    assert (shifted.geometry.scale > 0).all()
    kept = ~moves.flip  # without a flip, both functions agree
    varied = random_shift_flip(batch, torch.Generator().manual_seed(3))
    assert torch.equal(shifted.images[kept], varied.images[kept])
    assert torch.equal(shifted.geometry.offset[kept], varied.geometry.offset[kept])


def test_random_shift_without_images_raises(generator):
    with pytest.raises(UserError, match=r"images.*geometry"):
        random_shift(Batch(("a",)), generator)
