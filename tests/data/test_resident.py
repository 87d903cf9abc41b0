import pytest
import torch

from overt.data.batch import Batch
from overt.data.resident import Moves, Resident, crop_and_flip, draw, move, shift, vary
from overt.errors import BadInput
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


def slow_move(images, moves):
    """One pixel at a time: mirror the window at (top, left) of the bordered picture."""
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
def test_moving_agrees_with_a_slow_copy(generator, dtype):
    images = torch.randint(0, 256, (9, 3, 6, 8), generator=generator).to(dtype)
    moves = draw(9, generator, margin=3)
    assert torch.equal(move(images, moves), slow_move(images, moves))


def test_no_shift_and_no_mirror_change_nothing():
    images = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    still = Moves(torch.full((2,), 4), torch.full((2,), 4), torch.zeros(2, dtype=torch.bool), 4)
    assert torch.equal(move(images, still), images)


def test_the_generator_decides_everything():
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    first, second, other = (
        crop_and_flip(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_the_global_stream_is_left_alone(generator):
    before = torch.get_rng_state()
    crop_and_flip(torch.zeros(4, 3, 8, 8), generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_shift_and_half_of_the_mirrors_are_drawn(generator):
    moves = draw(9_000, generator, margin=4)
    for shifts in (moves.top, moves.left):
        counts = torch.bincount(shifts, minlength=9)
        assert len(counts) == 9 and (counts - 1_000).abs().max() < 150
    assert abs(moves.flip.float().mean() - 0.5) < 0.03


def test_geometry_follows_the_pixels(generator):
    """A lit pixel of a photo lands in the cell that the geometry says it does."""
    count, side = 40, 8
    images = torch.zeros(count, 3, side, side)
    at = torch.randint(0, side, (count, 2), generator=generator)
    images[torch.arange(count), :, at[:, 0], at[:, 1]] = 1
    batch = Batch(
        tuple(map(str, range(count))), images, geometry=PixelGeometry.identity(count, (side, side))
    )
    moved = vary(batch, generator, margin=3)
    boxes = torch.cat([at.flip(-1), at.flip(-1) + 1], dim=-1)[:, None].float()
    cover = moved.geometry.cover_boxes(boxes, (side, side))[:, 0]
    assert torch.equal(cover.reshape(count, side, side), moved.images[:, 0])
    assert 0 < moved.images.sum() < 3 * count  # some were shifted out of sight


def test_only_images_with_a_geometry_can_be_varied(generator):
    with pytest.raises(BadInput):
        vary(Batch(("a",)), generator)


def test_a_resident_set_gives_the_batches_of_its_source(monkeypatch):
    monkeypatch.setattr("overt.data.resident.CHUNK", 3)
    source = Toy()
    held = Resident.of(source)
    assert len(held) == 7 and held.digest() == "abc" and (held.name, held.split) == ("toy", "train")
    ours, theirs = held.batch([5, 0, 5]), source.batch([5, 0, 5])
    assert ours.ids == theirs.ids and torch.equal(ours.images, theirs.images)
    assert torch.equal(ours.labels, theirs.labels)
    assert ours.geometry.canvas == (4, 5) and len(ours.geometry) == 3


def test_a_set_without_one_image_a_sample_is_refused():
    class Text(Toy):
        def batch(self, indices) -> Batch:
            return Batch(
                tuple(map(str, indices)), labels=torch.zeros(len(indices), dtype=torch.long)
            )

    class Nothing(Toy):
        def __len__(self) -> int:
            return 0

    for source in (Text(), Nothing()):
        with pytest.raises(BadInput, match="toy"):
            Resident.of(source)


def test_shifting_mirrors_nothing(generator):
    images = torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(tuple(map(str, range(32))), images, geometry=PixelGeometry.identity(32, (8, 8)))
    shifted = shift(batch, torch.Generator().manual_seed(3))
    moves = draw(32, torch.Generator().manual_seed(3))
    assert moves.flip.any()
    plain = Moves(moves.top, moves.left, torch.zeros(32, dtype=torch.bool), moves.margin)
    assert torch.equal(shifted.images, slow_move(images, plain))
    assert (shifted.geometry.scale > 0).all()
    kept = ~moves.flip  # what is not mirrored is what `vary` makes of it
    varied = vary(batch, torch.Generator().manual_seed(3))
    assert torch.equal(shifted.images[kept], varied.images[kept])
    assert torch.equal(shifted.geometry.offset[kept], varied.geometry.offset[kept])


def test_shifting_needs_images(generator):
    with pytest.raises(BadInput, match="images and their geometry"):
        shift(Batch(("a",)), generator)
