"""View consistency: maps that follow the image, maps that do not, and the control."""

from collections.abc import Callable

import pytest
import torch

from overt.attention import AttentionMap, Kind, grid
from overt.data.batch import Batch
from overt.data.in_memory_images import random_shift_flip
from overt.geometry import PixelGeometry
from overt.metrics import js, spearman, view_consistency
from overt.metrics.consistency import on_common_pixels, weights_of_next_sample
from overt.metrics.pixel_maps import to_photo_pixels

SIZE = 16


def random_photos(count: int, generator: torch.Generator) -> Batch:
    """Return images of smooth noise, with bright parts that differ per image."""
    small = torch.rand(count, 1, 4, 4, generator=generator)
    large = torch.nn.functional.interpolate(small, (SIZE, SIZE), mode="bicubic").clamp(0, 1)
    return Batch(
        ids=tuple(map(str, range(count))),
        images=large.expand(-1, 3, -1, -1),
        geometry=PixelGeometry.identity(count, (SIZE, SIZE)),
    )


def attend_to_bright(batch: Batch, side: int = SIZE) -> AttentionMap:
    """Attend to bright pixels: equivariant to shifts and flips."""
    assert batch.images is not None
    cells = torch.nn.functional.adaptive_avg_pool2d(batch.images[:, :1], side).flatten(1)
    layout = grid(side, side, geometry=batch.geometry)
    return AttentionMap.from_cells(cells + 0.01, layout).normalize()


def attend_to_center(batch: Batch, side: int = SIZE) -> AttentionMap:
    """Attend to the center of the canvas, independent of the image."""
    at = torch.linspace(-1, 1, side)
    cells = (-(at[:, None].square() + 1.3 * at.square())).exp().flatten()
    layout = grid(side, side, geometry=batch.geometry)
    return AttentionMap.from_cells(cells.expand(len(batch), -1).clone(), layout).normalize()


def views(look: Callable[[Batch], AttentionMap], batch: Batch, count: int = 3) -> list:
    generator = torch.Generator().manual_seed(5)
    return [look(random_shift_flip(batch, generator)) for _ in range(count)]


def test_an_equivariant_map_is_consistent(generator):
    batch = random_photos(12, generator)
    numbers = view_consistency(attend_to_bright(batch), views(attend_to_bright, batch))
    assert numbers.shape == (12,)
    torch.testing.assert_close(numbers, torch.ones(12))
    apart = view_consistency(attend_to_bright(batch), views(attend_to_bright, batch), js)
    torch.testing.assert_close(apart, torch.zeros(12), atol=1e-6, rtol=0)


def test_coarse_equivariant_maps_are_nearly_consistent(generator):
    """After a shift the cells have other borders, so a coarse map does not reach 1."""
    batch = random_photos(12, generator)

    def coarse(some: Batch) -> AttentionMap:
        return attend_to_bright(some, 8)

    assert view_consistency(coarse(batch), views(coarse, batch)).min() > 0.9


def test_maps_look_inconsistent_without_the_geometry(generator):
    batch = random_photos(12, generator)
    moved = views(attend_to_bright, batch, 1)[0]
    assert spearman(attend_to_bright(batch), moved).mean() < 0.7


def test_the_control_detects_a_center_map(generator):
    batch = random_photos(12, generator)

    def both(look: Callable[[Batch], AttentionMap]) -> tuple[float, float]:
        seen = views(look, batch)
        own = view_consistency(look(batch), seen)
        others = view_consistency(look(batch), [weights_of_next_sample(view) for view in seen])
        return float(own.mean()), float(others.mean())

    own, others = both(attend_to_center)
    assert own > 0.3 and own == others
    own, others = both(attend_to_bright)
    assert own == pytest.approx(1) and abs(others) < 0.3


def test_a_flip_is_undone_exactly(generator):
    values = torch.rand(3, 16, generator=generator)
    geometry = PixelGeometry.identity(3, (4, 4))
    one = AttentionMap.from_cells(values, grid(4, 4, geometry=geometry))
    flipped = AttentionMap.from_cells(
        values.reshape(3, 4, 4).flip(-1).reshape(3, 16), grid(4, 4, geometry=geometry.flip())
    )
    torch.testing.assert_close(view_consistency(one, [flipped]), torch.ones(3))


def test_only_pixels_visible_in_both_views_are_compared():
    """With a crop to the right half, values on the left of the full view do not matter."""
    whole = PixelGeometry.identity(1, (4, 4))
    right = torch.rand(4, 2)
    crop = AttentionMap.from_cells(
        right.reshape(1, -1), grid(4, 2, geometry=whole.crop(0, 2, 4, 2))
    )
    for left in (torch.zeros(4, 2), 9 * torch.rand(4, 2)):
        both = torch.cat([left, right], dim=1).reshape(1, -1)
        full = AttentionMap.from_cells(both, grid(4, 4, geometry=whole))
        ours, theirs = on_common_pixels(to_photo_pixels(full), to_photo_pixels(crop))
        assert ours.visible.reshape(4, 4).tolist() == [[False, False, True, True]] * 4
        torch.testing.assert_close(ours.weights, theirs.weights)
        assert view_consistency(full, [crop]).tolist() == [1]


def test_a_batch_can_have_images_of_different_sizes(generator):
    """Each value equals that of the image alone, and `compare` is called once per size."""
    sizes = [(6, 9), (8, 4), (6, 9)]
    geometry = PixelGeometry.join(
        [PixelGeometry.identity(1, size).resize((4, 4)) for size in sizes]
    )
    one, other = (
        AttentionMap.from_cells(torch.rand(3, 4, generator=generator), layout)
        for layout in (grid(2, 2, geometry=geometry), grid(2, 2, geometry=geometry.flip()))
    )
    calls: list[tuple[int, int]] = []

    def compare(first: AttentionMap, second: AttentionMap) -> torch.Tensor:
        calls.append((len(first), len(first.keys)))
        return spearman(first, second)

    numbers = view_consistency(one, [other], compare)
    assert calls == [(2, 54), (1, 32)]
    for row in range(3):
        only = torch.tensor([row])
        alone = view_consistency(one.select(only), [other.select(only)])
        torch.testing.assert_close(numbers[only], alone)


def test_undefined_views_are_left_out():
    geometry = PixelGeometry.identity(2, (4, 4))
    values = torch.rand(2, 16)
    one = AttentionMap.from_cells(values, grid(4, 4, geometry=geometry))
    constant = AttentionMap.from_cells(torch.ones(2, 16), grid(4, 4, geometry=geometry))
    torch.testing.assert_close(view_consistency(one, [one, constant]), torch.ones(2))
    assert view_consistency(one, [constant]).isnan().all(), "undefined for constant views"


def test_signed_maps_can_be_compared(generator):
    geometry = PixelGeometry.identity(1, (4, 4))
    values = torch.randn(1, 1, 1, 1, 16, generator=generator)
    one = AttentionMap(values, grid(4, 4, geometry=geometry), kind=Kind.SIGNED)
    assert view_consistency(one, [one]).tolist() == pytest.approx([1])


def test_the_control_keeps_the_geometry_of_views(generator):
    batch = random_photos(3, generator)
    view = views(attend_to_bright, batch, 1)[0]
    control = weights_of_next_sample(view)
    assert control.keys is view.keys
    assert torch.equal(control.values[0], view.values[1])
    assert torch.equal(control.values[2], view.values[0])
    with pytest.raises(ValueError, match="at least 2"):
        weights_of_next_sample(view.select(torch.tensor([0])))


def test_bad_input_raises(generator):
    batch = random_photos(2, generator)
    one = attend_to_bright(batch)
    with pytest.raises(ValueError, match="at least 1 view"):
        view_consistency(one, [])
    with pytest.raises(ValueError, match="2 and 1"):
        view_consistency(one, [one.select(torch.tensor([0]))])
    other = AttentionMap.from_cells(
        torch.rand(2, 4), grid(2, 2, geometry=PixelGeometry.identity(2, (8, 8)))
    )
    with pytest.raises(ValueError, match="geometry"):
        view_consistency(one, [other])


@pytest.mark.gpu
def test_gpu_and_cpu_agree(generator):
    batch = random_photos(4, generator)
    one, seen = attend_to_bright(batch, 8), [attend_to_bright(batch, 4)]
    found = view_consistency(one.to("cuda"), [view.to("cuda") for view in seen])
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), view_consistency(one, seen), atol=1e-3, rtol=0)
