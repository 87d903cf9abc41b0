"""Consistency: maps that follow their photo exactly, maps that follow nothing, and a control."""

from collections.abc import Callable

import pytest
import torch

from overt.attention import AttentionMap, Kind, grid
from overt.data.batch import Batch
from overt.data.resident import vary
from overt.geometry import PixelGeometry
from overt.measure import js, of_others, spearman, view_consistency
from overt.measure.consistency import on_common_pixels
from overt.measure.photos import painted

SIZE = 16


def photos(count: int, generator: torch.Generator) -> Batch:
    """Smooth noise: what is bright differs from photo to photo."""
    small = torch.rand(count, 1, 4, 4, generator=generator)
    large = torch.nn.functional.interpolate(small, (SIZE, SIZE), mode="bicubic").clamp(0, 1)
    return Batch(
        ids=tuple(map(str, range(count))),
        images=large.expand(-1, 3, -1, -1),
        geometry=PixelGeometry.identity(count, (SIZE, SIZE)),
    )


def bright(batch: Batch, side: int = SIZE) -> AttentionMap:
    """Attention to what is bright: it follows its photo wherever that goes."""
    assert batch.images is not None
    cells = torch.nn.functional.adaptive_avg_pool2d(batch.images[:, :1], side).flatten(1)
    layout = grid(side, side, geometry=batch.geometry)
    return AttentionMap.from_cells(cells + 0.01, layout).normalize()


def middle(batch: Batch, side: int = SIZE) -> AttentionMap:
    """Attention to the middle of the canvas, whatever is shown."""
    at = torch.linspace(-1, 1, side)
    cells = (-(at[:, None].square() + 1.3 * at.square())).exp().flatten()
    layout = grid(side, side, geometry=batch.geometry)
    return AttentionMap.from_cells(cells.expand(len(batch), -1).clone(), layout).normalize()


def views(look: Callable[[Batch], AttentionMap], batch: Batch, count: int = 3) -> list:
    generator = torch.Generator().manual_seed(5)
    return [look(vary(batch, generator)) for _ in range(count)]


def test_a_map_that_follows_its_photo_is_consistent(generator):
    batch = photos(12, generator)
    numbers = view_consistency(bright(batch), views(bright, batch))
    assert numbers.shape == (12,)
    torch.testing.assert_close(numbers, torch.ones(12))
    apart = view_consistency(bright(batch), views(bright, batch), js)
    torch.testing.assert_close(apart, torch.zeros(12), atol=1e-6, rtol=0)


def test_coarse_maps_are_nearly_so(generator):
    """Cells are cut elsewhere after a shift, so that no model of cells reaches one."""
    batch = photos(12, generator)

    def coarse(some: Batch) -> AttentionMap:
        return bright(some, 8)

    assert view_consistency(coarse(batch), views(coarse, batch)).min() > 0.9


def test_without_the_geometry_it_would_look_inconsistent(generator):
    batch = photos(12, generator)
    moved = views(bright, batch, 1)[0]
    assert spearman(bright(batch), moved).mean() < 0.7


def test_a_map_of_the_middle_is_found_out_by_the_control(generator):
    batch = photos(12, generator)

    def both(look: Callable[[Batch], AttentionMap]) -> tuple[float, float]:
        seen = views(look, batch)
        own = view_consistency(look(batch), seen)
        others = view_consistency(look(batch), [of_others(view) for view in seen])
        return float(own.mean()), float(others.mean())

    own, others = both(middle)
    assert own > 0.3 and own == others
    own, others = both(bright)
    assert own == pytest.approx(1) and abs(others) < 0.3


def test_a_mirror_is_undone_exactly(generator):
    values = torch.rand(3, 16, generator=generator)
    geometry = PixelGeometry.identity(3, (4, 4))
    one = AttentionMap.from_cells(values, grid(4, 4, geometry=geometry))
    flipped = AttentionMap.from_cells(
        values.reshape(3, 4, 4).flip(-1).reshape(3, 16), grid(4, 4, geometry=geometry.flip())
    )
    torch.testing.assert_close(view_consistency(one, [flipped]), torch.ones(3))


def test_only_what_both_views_show_is_compared():
    """A crop to the right half: what the whole view does on the left does not matter."""
    whole = PixelGeometry.identity(1, (4, 4))
    right = torch.rand(4, 2)
    crop = AttentionMap.from_cells(
        right.reshape(1, -1), grid(4, 2, geometry=whole.crop(0, 2, 4, 2))
    )
    for left in (torch.zeros(4, 2), 9 * torch.rand(4, 2)):
        both = torch.cat([left, right], dim=1).reshape(1, -1)
        full = AttentionMap.from_cells(both, grid(4, 4, geometry=whole))
        ours, theirs = on_common_pixels(painted(full), painted(crop))
        assert ours.visible.reshape(4, 4).tolist() == [[False, False, True, True]] * 4
        torch.testing.assert_close(ours.weights, theirs.weights)
        assert view_consistency(full, [crop]).tolist() == [1]


def test_photos_of_different_sizes_stand_in_one_batch(generator):
    """Each number is the one that its photo has alone, and `compare` is asked once a size."""
    sizes = [(6, 9), (8, 4), (6, 9)]
    geometry = PixelGeometry.join(
        [PixelGeometry.identity(1, size).resize((4, 4)) for size in sizes]
    )
    one, other = (
        AttentionMap.from_cells(torch.rand(3, 4, generator=generator), layout)
        for layout in (grid(2, 2, geometry=geometry), grid(2, 2, geometry=geometry.flip()))
    )
    asked: list[tuple[int, int]] = []

    def compare(first: AttentionMap, second: AttentionMap) -> torch.Tensor:
        asked.append((len(first), len(first.keys)))
        return spearman(first, second)

    numbers = view_consistency(one, [other], compare)
    assert asked == [(2, 54), (1, 32)]
    for row in range(3):
        only = torch.tensor([row])
        alone = view_consistency(one.select(only), [other.select(only)])
        torch.testing.assert_close(numbers[only], alone)


def test_views_without_a_number_are_left_out():
    geometry = PixelGeometry.identity(2, (4, 4))
    values = torch.rand(2, 16)
    one = AttentionMap.from_cells(values, grid(4, 4, geometry=geometry))
    constant = AttentionMap.from_cells(torch.ones(2, 16), grid(4, 4, geometry=geometry))
    torch.testing.assert_close(view_consistency(one, [one, constant]), torch.ones(2))
    assert view_consistency(one, [constant]).isnan().all(), "it follows nothing"


def test_signed_maps_can_be_compared(generator):
    geometry = PixelGeometry.identity(1, (4, 4))
    values = torch.randn(1, 1, 1, 1, 16, generator=generator)
    one = AttentionMap(values, grid(4, 4, geometry=geometry), kind=Kind.SIGNED)
    assert view_consistency(one, [one]).tolist() == pytest.approx([1])


def test_the_control_keeps_views_in_their_places(generator):
    batch = photos(3, generator)
    view = views(bright, batch, 1)[0]
    control = of_others(view)
    assert control.keys is view.keys
    assert torch.equal(control.values[0], view.values[1])
    assert torch.equal(control.values[2], view.values[0])
    with pytest.raises(ValueError, match="two samples at least"):
        of_others(view.select(torch.tensor([0])))


def test_bad_input_is_said_in_a_sentence(generator):
    batch = photos(2, generator)
    one = bright(batch)
    with pytest.raises(ValueError, match="no view to compare"):
        view_consistency(one, [])
    with pytest.raises(ValueError, match="2 and of 1 photos"):
        view_consistency(one, [one.select(torch.tensor([0]))])
    other = AttentionMap.from_cells(
        torch.rand(2, 4), grid(2, 2, geometry=PixelGeometry.identity(2, (8, 8)))
    )
    with pytest.raises(ValueError, match="are not the same photo"):
        view_consistency(one, [other])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same(generator):
    batch = photos(4, generator)
    one, seen = bright(batch, 8), [bright(batch, 4)]
    found = view_consistency(one.to("cuda"), [view.to("cuda") for view in seen])
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), view_consistency(one, seen), atol=1e-3, rtol=0)
