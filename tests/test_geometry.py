"""Geometry of pixels, text and regions: coverage, densities, painting and selection."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

# --- reference: the operations of Pillow, step by step

Step = tuple[str, tuple[int, ...]]


def apply_with_pillow(photo: Image.Image, steps: list[Step]) -> Image.Image:
    for name, numbers in steps:
        if name == "resize":
            height, width = numbers
            photo = photo.resize((width, height), Image.Resampling.BOX)
        elif name == "crop":
            top, left, height, width = numbers
            photo = photo.crop((left, top, left + width, top + height))
        elif name == "pad":
            top, left, bottom, right = numbers
            photo = ImageOps.expand(photo, (left, top, right, bottom), 0)
        else:
            photo = ImageOps.mirror(photo)
    return photo


def apply_with_geometry(size: tuple[int, int], steps: list[Step]) -> PixelGeometry:
    geometry = PixelGeometry.identity(1, size)
    for name, numbers in steps:
        if name == "resize":
            geometry = geometry.resize((numbers[0], numbers[1]))
        elif name == "flip":
            geometry = geometry.flip()
        else:
            geometry = getattr(geometry, name)(*numbers)
    return geometry


def to_image(mask: torch.Tensor) -> Image.Image:
    return Image.fromarray(mask.float().numpy())


def brightness(photo: Image.Image, shape: tuple[int, int]) -> torch.Tensor:
    """Return the mean of the canvas pixels of each cell."""
    canvas = torch.from_numpy(np.array(photo))
    rows, columns = shape
    high, wide = photo.height // rows, photo.width // columns
    cells = [
        canvas[r * high : (r + 1) * high, c * wide : (c + 1) * wide].mean()
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack(cells)


def box_mask(size: tuple[int, int], box: tuple[int, int, int, int]) -> torch.Tensor:
    x0, y0, x1, y1 = box
    mask = torch.zeros(size, dtype=torch.bool)
    mask[y0:y1, x0:x1] = True
    return mask


TRANSFORMS: dict[str, tuple[tuple[int, int], list[Step], tuple[int, int]]] = {
    "identity": ((32, 48), [], (4, 6)),
    "halved": ((32, 48), [("resize", (16, 24))], (4, 6)),
    "doubled": ((32, 48), [("resize", (64, 96))], (8, 8)),
    "squeezed": ((32, 64), [("resize", (32, 32))], (4, 4)),
    "centre crop": ((64, 96), [("resize", (32, 48)), ("crop", (0, 8, 32, 32))], (4, 4)),
    "letterbox": ((32, 64), [("resize", (16, 32)), ("pad", (8, 0, 8, 0))], (8, 8)),
    "odd padding": ((30, 30), [("pad", (1, 2, 1, 4))], (8, 6)),
    "flipped": ((32, 48), [("flip", ())], (4, 6)),
    "flip of a crop": ((64, 64), [("crop", (8, 16, 32, 40)), ("flip", ())], (4, 5)),
    "crop of a flip": ((64, 64), [("flip", ()), ("crop", (8, 16, 32, 40))], (4, 5)),
    "random resized crop": ((64, 80), [("crop", (10, 30, 32, 40)), ("resize", (64, 80))], (8, 8)),
    "pad, then crop": ((32, 32), [("pad", (4, 4, 4, 4)), ("crop", (7, 1, 32, 32))], (8, 8)),
    "crop, then pad": ((32, 32), [("crop", (8, 8, 16, 16)), ("pad", (8, 8, 8, 8))], (8, 8)),
    "crop, flip, pad": (
        (32, 48),
        [("crop", (8, 4, 16, 20)), ("flip", ()), ("pad", (0, 8, 8, 4)), ("resize", (48, 64))],
        (6, 8),
    ),
    "merged patches": ((64, 64), [("resize", (32, 32))], (2, 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_coverage_of_a_box_agrees_with_pillow(transform, generator):
    size, steps, shape = TRANSFORMS[transform]
    geometry = apply_with_geometry(size, steps)
    for _ in range(8):
        left, top = (int(torch.randint(n - 8, (), generator=generator)) for n in (size[1], size[0]))
        wide, high = (int(n) for n in torch.randint(2, 9, (2,), generator=generator))
        mask = box_mask(size, (left, top, left + wide, top + high))
        expected = brightness(apply_with_pillow(to_image(mask), steps), shape)

        torch.testing.assert_close(geometry.cover_masks([mask], shape)[0], expected)
        box = torch.tensor([[[left, top, left + wide, top + high]]]).float()
        torch.testing.assert_close(geometry.cover_boxes(box, shape)[0, 0], expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_full_photo_covers_everything_except_padding(transform):
    size, steps, shape = TRANSFORMS[transform]
    geometry = apply_with_geometry(size, steps)
    full_mask = torch.ones(size, dtype=torch.bool)
    expected = brightness(apply_with_pillow(to_image(full_mask), steps), shape)
    torch.testing.assert_close(geometry.cover_masks([full_mask], shape)[0], expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_cell_positions_agree_with_pillow(transform):
    """Images of their own x and y coordinates show where each canvas pixel comes from."""
    size, steps, shape = TRANSFORMS[transform]
    boxes = apply_with_geometry(size, steps).cells(shape)[0]
    y, x = torch.meshgrid(torch.arange(size[0]) + 0.5, torch.arange(size[1]) + 0.5, indexing="ij")
    there = brightness(apply_with_pillow(to_image(torch.ones(size)), steps), shape)
    for number, (low, high) in ((x, (0, 2)), (y, (1, 3))):
        mean = brightness(apply_with_pillow(to_image(number), steps), shape) / there
        whole = there > 0.999  # a mean over padding is meaningless
        middle = (boxes[:, low] + boxes[:, high]) / 2
        torch.testing.assert_close(middle[whole].float(), mean[whole], atol=1e-3, rtol=1e-4)
    empty = ((boxes[:, 2:] - boxes[:, :2]) <= 1e-9).any(dim=-1)
    assert torch.equal(empty, there == 0)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_moved_cells_agree_with_pillow(transform, generator):
    """Spread each value over the pixels of its cell, transform the picture, and sum by cell."""
    size, steps, _ = TRANSFORMS[transform]
    shape = (2, 2) if size == (30, 30) else (4, 4)  # cells of whole pixels on either side
    values = torch.rand(1, shape[0] * shape[1], generator=generator)
    high, wide = size[0] // shape[0], size[1] // shape[1]
    density = values.reshape(shape) / (high * wide)
    picture = density.repeat_interleave(high, dim=0).repeat_interleave(wide, dim=1)
    view = apply_with_geometry(size, steps)
    y, x = view.canvas[0] / shape[0], view.canvas[1] / shape[1]
    area = y * x / float(view.scale.abs().prod())
    expected = brightness(apply_with_pillow(to_image(picture), steps), shape) * area
    moved = PixelGeometry.identity(1, size).move_cells(values, shape, view)
    torch.testing.assert_close(moved[0], expected, atol=1e-5, rtol=1e-4)


def test_moved_cells_of_another_count_raise():
    photo = PixelGeometry.identity(2, (8, 8))
    for values, shape, message in (
        (torch.ones(2, 3), (2, 2), "needs 4 values, got 3"),
        (torch.ones(1, 4), (2, 2), "expected 2 rows of values"),
    ):
        with pytest.raises(ValueError, match=message):
            photo.move_cells(values, shape, photo)


def test_coverage_after_an_odd_resize_is_close_to_pillow():
    """If a side is not a multiple of the other, the box filter of Pillow is not exact."""
    for size, target in (((37, 53), (28, 28)), ((100, 75), (32, 24)), ((91, 47), (60, 44))):
        mask = box_mask(size, (size[1] // 3, size[0] // 4, size[1] // 3 + 15, size[0] // 4 + 12))
        steps: list[Step] = [("resize", target)]
        shape = (target[0] // 4, target[1] // 4)
        photo = apply_with_pillow(to_image(mask), steps)
        ours = apply_with_geometry(size, steps).cover_masks([mask], shape)[0]
        # Pillow differs by a part of one canvas pixel at an edge
        assert (ours - brightness(photo, shape)).abs().max() < 0.25
        assert (ours - brightness(photo, shape)).abs().mean() < 0.02


def test_tiles_of_a_photo_cover_a_mask_like_the_full_photo(generator):
    size, canvas, side = (60, 90), (48, 64), 16
    whole = PixelGeometry.identity(1, size).resize(canvas)
    corners = [(y, x) for y in range(0, canvas[0], side) for x in range(0, canvas[1], side)]
    tiles = PixelGeometry.join([whole.crop(y, x, side, side) for y, x in corners])
    mask = torch.rand(size, generator=generator) > 0.7
    covered = tiles.cover_masks([mask] * len(tiles), (4, 4))
    assert covered.shape == (12, 16)
    fine = whole.cover_masks([mask], (12, 16)).reshape(12, 16)
    for tile, (y, x) in enumerate(corners):
        part = fine[y // 4 : y // 4 + 4, x // 4 : x // 4 + 4]
        torch.testing.assert_close(covered[tile].reshape(4, 4), part)


def test_coverage_of_merged_patches_is_the_mean_of_patches(generator):
    geometry = PixelGeometry.identity(1, (37, 53)).resize((64, 96)).flip()
    mask = torch.rand(37, 53, generator=generator) > 0.5
    fine = geometry.cover_masks([mask], (8, 12)).reshape(1, 1, 8, 12)
    coarse = geometry.cover_masks([mask], (4, 6)).reshape(1, 1, 4, 6)
    torch.testing.assert_close(torch.nn.functional.avg_pool2d(fine, 2), coarse)


# --- coverage compared with sampling


def sampled_cover(
    mask: torch.Tensor, size: tuple[int, int], steps: list[Step], shape: tuple[int, int], fine: int
) -> torch.Tensor:
    """Sample each cell at fine x fine points, and map each point back through the steps."""
    canvases = [size]
    for name, numbers in steps:
        height, width = canvases[-1]
        if name == "resize":
            canvases.append((numbers[0], numbers[1]))
        elif name == "crop":
            canvases.append((numbers[2], numbers[3]))
        elif name == "pad":
            canvases.append((height + numbers[0] + numbers[2], width + numbers[1] + numbers[3]))
        else:
            canvases.append((height, width))
    high, wide = canvases[-1][0] / shape[0], canvases[-1][1] / shape[1]
    result = []
    for r in range(shape[0]):
        for c in range(shape[1]):
            hits = 0
            for i in range(fine):
                for j in range(fine):
                    y, x = (r + (i + 0.5) / fine) * high, (c + (j + 0.5) / fine) * wide
                    hits += sample_mask(mask, canvases, steps, y, x)
            result.append(hits / fine**2)
    return torch.tensor(result)


def sample_mask(mask, canvases, steps, y, x) -> bool:
    for at in range(len(steps) - 1, -1, -1):
        name, numbers = steps[at]
        before, after = canvases[at], canvases[at + 1]
        if not (0 <= y < after[0] and 0 <= x < after[1]):
            return False
        if name == "resize":
            y, x = y * before[0] / after[0], x * before[1] / after[1]
        elif name == "crop":
            y, x = y + numbers[0], x + numbers[1]
        elif name == "pad":
            y, x = y - numbers[0], x - numbers[1]
        else:
            x = after[1] - x
    inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]
    return bool(inside and mask[int(y), int(x)])


def test_cover_masks_agrees_with_sampling(generator):
    size, shape = (9, 13), (3, 4)
    mask = torch.rand(size, generator=generator) > 0.5
    ways: list[list[Step]] = [
        [("resize", (7, 10))],
        [("crop", (2, 1, 5, 9)), ("resize", (12, 12)), ("flip", ())],
        [("resize", (12, 17)), ("crop", (3, 4, 8, 9)), ("pad", (2, 1, 3, 5)), ("resize", (11, 6))],
    ]
    for steps in ways:
        ours = apply_with_geometry(size, steps).cover_masks([mask], shape)[0]
        sampled = sampled_cover(mask, size, steps, shape, fine=40)
        torch.testing.assert_close(ours, sampled, atol=0.02, rtol=0)


@given(st.data())
def test_cover_boxes_equals_cover_masks_of_the_same_box(data):
    number = st.integers(2, 20)
    size = (data.draw(number), data.draw(number))
    geometry = PixelGeometry.identity(1, size).resize((data.draw(number), data.draw(number)))
    if data.draw(st.booleans()):
        geometry = geometry.flip()
    if data.draw(st.booleans()):
        top, left = data.draw(st.integers(-5, 15)), data.draw(st.integers(-5, 15))
        geometry = geometry.crop(top, left, data.draw(number), data.draw(number))
    if data.draw(st.booleans()):
        geometry = geometry.pad(*(data.draw(st.integers(0, 4)) for _ in range(4)))
    shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
    x0, y0 = (data.draw(st.integers(0, side - 1)) for side in reversed(size))
    x1, y1 = data.draw(st.integers(x0 + 1, size[1])), data.draw(st.integers(y0 + 1, size[0]))
    by_mask = geometry.cover_masks([box_mask(size, (x0, y0, x1, y1))], shape)
    by_box = geometry.cover_boxes(torch.tensor([[[x0, y0, x1, y1]]]).float(), shape)[:, 0]
    torch.testing.assert_close(by_mask, by_box, atol=1e-5, rtol=0)
    assert by_box.min() >= 0 and by_box.max() <= 1 + 1e-6


def test_frames_of_a_video_repeat_the_grid():
    geometry = PixelGeometry.identity(1, (8, 8))
    mask = box_mask((8, 8), (0, 0, 3, 5))
    once = geometry.cover_masks([mask], (2, 2))
    assert torch.equal(geometry.cover_masks([mask], (3, 2, 2)), once.repeat(1, 3))
    assert torch.equal(geometry.cells((3, 2, 2)), geometry.cells((2, 2)).repeat(1, 3, 1))
    points = [torch.tensor([[1.0, 2.0]])]
    assert torch.equal(
        geometry.density(points, (3, 2, 2), 1.0), geometry.density(points, (2, 2), 1.0).repeat(1, 3)
    )


# --- fixations


def test_density_agrees_with_numerical_integration(generator):
    size, shape, bandwidth, fine = (20, 30), (2, 3), 3.0, 200
    geometry = PixelGeometry.identity(1, size).resize((24, 24)).crop(2, 3, 20, 18).flip()
    points = torch.rand(5, 2, generator=generator) * torch.tensor(size)
    ours = geometry.density([points], shape, bandwidth)[0]
    for k, (x0, y0, x1, y1) in enumerate(geometry.cells(shape)[0].tolist()):
        steps = (torch.arange(fine, dtype=torch.float64) + 0.5) / fine
        y, x = torch.meshgrid(y0 + steps * (y1 - y0), x0 + steps * (x1 - x0), indexing="ij")
        total = 0.0
        for py, px in points.tolist():
            bell = torch.exp(-((y - py) ** 2 + (x - px) ** 2) / (2 * bandwidth**2))
            total += float(bell.mean()) / (2 * math.pi * bandwidth**2) * (y1 - y0) * (x1 - x0)
        assert float(ours[k]) == pytest.approx(total, rel=1e-4)


def test_density_of_points_far_from_the_edge_sums_to_their_count():
    geometry = PixelGeometry.identity(2, (100, 120)).resize((56, 56)).flip()
    inside = torch.tensor([[50.0, 60.0], [40.0, 70.0], [60.0, 50.0]])
    found = geometry.density([inside, inside[:0]], (7, 7), 4.0)
    torch.testing.assert_close(found.sum(dim=-1), torch.tensor([3.0, 0.0]))


@given(st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_bandwidth_zero_counts_every_visible_point_once(flip, rows, columns):
    points = torch.rand(50, 2) * torch.tensor([30.0, 40.0])
    geometry = PixelGeometry.identity(1, (30, 40)).resize((33, 27)).crop(5, 4, 20, 20)
    geometry = geometry.flip() if flip else geometry
    counted = geometry.density([points], (rows, columns), 0.0)[0]
    expected = torch.zeros(rows * columns)
    for y, x in points.tolist():
        on_y, on_x = y * 33 / 30 - 5, x * 27 / 40 - 4
        on_x = 20 - on_x if flip else on_x
        if 0 <= on_y < 20 and 0 <= on_x < 20:
            expected[int(on_y / 20 * rows) * columns + int(on_x / 20 * columns)] += 1
    assert torch.equal(counted, expected)


# --- painting


def test_a_cell_is_painted_on_its_pixels():
    geometry = PixelGeometry.identity(1, (64, 96)).resize((32, 48)).crop(0, 8, 32, 32).flip()
    shape = (4, 4)
    for cell, (x0, y0, x1, y1) in enumerate(geometry.cells(shape)[0].tolist()):
        (picture,) = geometry.paint(torch.eye(16)[[cell]], shape)
        assert picture.shape == (64, 96)
        y, x = divmod(int(picture.argmax()), 96)
        assert x0 <= x < x1 and y0 <= y < y1
        inside = picture[int(y0) : int(y1), int(x0) : int(x1)]
        assert inside.max() == picture.max() and inside.mean() > 0.4
        far = picture.clone()
        far[max(int(y0) - 16, 0) : int(y1) + 16, max(int(x0) - 16, 0) : int(x1) + 16] = 0
        assert far.max() == 0, "a cell must not extend beyond its neighbours"


def test_invisible_pixels_are_painted_zero():
    geometry = PixelGeometry.identity(1, (8, 12)).crop(2, 3, 4, 6).pad(2, 2, 2, 2)
    (picture,) = geometry.paint(torch.ones(1, 4), (2, 2))
    expected = torch.zeros(8, 12)
    expected[2:6, 3:9] = 1
    assert torch.equal(picture, expected)


def test_painting_interpolates_between_cell_centers():
    geometry = PixelGeometry.identity(1, (9, 9))
    values = torch.arange(9.0)[None]
    (picture,) = geometry.paint(values, (3, 3))
    torch.testing.assert_close(picture[1::3, 1::3].reshape(1, 9), values)
    (wide,) = PixelGeometry.identity(1, (1, 5)).paint(torch.tensor([[0.0, 1.0]]), (1, 2))
    torch.testing.assert_close(wide[0], torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]))


def test_averaging_a_painted_map_restores_linear_values():
    """Linear values are exact after the bilinear round trip inside the grid."""
    geometry = PixelGeometry.identity(1, (40, 60)).resize((20, 20))
    y, x = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
    values = (2 * y + x + 1).reshape(1, 25)
    (picture,) = geometry.paint(values, (5, 5))
    back = picture.reshape(5, 8, 5, 12).mean(dim=(1, 3))
    torch.testing.assert_close(back[1:-1, 1:-1], values.reshape(5, 5)[1:-1, 1:-1])


def test_each_photo_is_painted_at_its_size():
    sizes = [(10, 20), (30, 6)]
    joined = PixelGeometry.join([PixelGeometry.identity(1, s).resize((8, 8)) for s in sizes])
    pictures = joined.paint(torch.ones(2, 4), (2, 2))
    assert [tuple(p.shape) for p in pictures] == sizes
    assert all(bool((p == 1).all()) for p in pictures)


# --- batches of geometries


def test_join_and_index_keep_each_photo():
    one = PixelGeometry.identity(1, (10, 20)).resize((8, 8))
    two = PixelGeometry.identity(2, (30, 6)).crop(1, 1, 4, 4).resize((8, 8))
    joined = PixelGeometry.join([one, two])
    assert len(joined) == 3
    torch.testing.assert_close(joined[0].cells((2, 2)), one.cells((2, 2)))
    torch.testing.assert_close(joined[-1].cells((2, 2)), two[0].cells((2, 2)))
    swapped = joined[torch.tensor([2, 0])]
    torch.testing.assert_close(
        swapped.cells((2, 2)), torch.cat([two[1].cells((2, 2)), one.cells((2, 2))])
    )
    torch.testing.assert_close(joined.to("cpu").cells((2, 2)), joined.cells((2, 2)))


def test_empty_batches_are_accepted():
    none = PixelGeometry.identity(0, (4, 4))
    assert none.cells((2, 2)).shape == (0, 4, 4)
    assert none.cover_masks([], (2, 2)).shape == (0, 4)
    assert none.density([], (2, 2), 1.0).shape == (0, 4)
    assert none.paint(torch.zeros(0, 4), (2, 2)) == []
    assert TextGeometry((), torch.zeros(0, 3, 2, dtype=torch.long)).cover([]).shape == (0, 3)


def test_invalid_counts_and_shapes_raise():
    two = PixelGeometry.identity(2, (4, 6))
    with pytest.raises(ValueError, match="2 masks.* 1"):
        two.cover_masks([torch.ones(4, 6, dtype=torch.bool)], (2, 2))
    with pytest.raises(ValueError, match=r"mask 1 .*\(6, 4\).*\(4, 6\)"):
        two.cover_masks([torch.ones(4, 6).bool(), torch.ones(6, 4).bool()], (2, 2))
    with pytest.raises(ValueError, match="2 rows of boxes.* 3"):
        two.cover_boxes(torch.zeros(3, 1, 4), (2, 2))
    with pytest.raises(ValueError, match=r"2 sets.*points.* 1"):
        two.density([torch.zeros(1, 2)], (2, 2), 1.0)
    with pytest.raises(ValueError, match="bandwidth .* -1"):
        two.density([torch.zeros(1, 2)] * 2, (2, 2), -1.0)
    with pytest.raises(ValueError, match="needs .* got 5"):
        two.paint(torch.zeros(2, 5), (2, 2))
    with pytest.raises(ValueError, match="canvas .* 1 x 1"):
        two.resize((0, 4))
    with pytest.raises(ValueError, match="same canvas"):
        PixelGeometry.join([two, two.resize((5, 5))])
    with pytest.raises(ValueError, match=r"2 lists.*ranges.* 1"):
        TextGeometry(("a", "b"), torch.zeros(2, 1, 2, dtype=torch.long)).cover([[(0, 1)]])


# --- text and regions

TEXT = "a red ring left of a tall box"
SPANS = [(0, 1), (2, 5), (6, 10), (11, 15), (16, 18), (19, 20), (21, 25), (26, 29)]


def test_tokens_are_the_spans_of_the_text():
    spans = torch.tensor([[*SPANS, (-1, -1)]])
    assert TextGeometry((TEXT,), spans).tokens(0) == [*TEXT.split(), ""]


@given(st.lists(st.tuples(st.integers(-2, 31), st.integers(-2, 31)), max_size=3))
def test_text_cover_agrees_with_counting_characters(ranges):
    spans = torch.tensor([[*SPANS, (-1, -1), (3, 3)]])
    covered = TextGeometry((TEXT,), spans).cover([ranges])[0]
    marked = {at for start, end in ranges for at in range(max(start, 0), end)}
    expected = [
        sum(at in marked for at in range(start, end)) / (end - start) if end > start else 0.0
        for start, end in spans[0].tolist()
    ]
    torch.testing.assert_close(covered, torch.tensor(expected))


def test_texts_are_selected_in_order():
    spans = torch.tensor([[(0, 1)], [(0, 2)], [(0, 3)]])
    geometry = TextGeometry(("xyz", "abc", "klm"), spans)
    chosen = geometry[torch.tensor([2, 0])]
    assert chosen.texts == ("klm", "xyz")
    assert [chosen.tokens(row) for row in range(2)] == [["klm"], ["x"]]
    assert geometry[1].tokens(0) == ["ab"] and len(geometry[torch.tensor([]).long()]) == 0


def test_overlap_agrees_with_counting_pixels(generator):
    corner = torch.randint(0, 10, (2, 4, 2), generator=generator)
    boxes = torch.cat([corner, corner + torch.randint(0, 10, (2, 4, 2), generator=generator)], -1)
    regions = RegionGeometry(boxes[:, :3].float())
    iou = regions.overlap(boxes[:, 1:].float())
    for b in range(2):
        for n, theirs in enumerate(boxes[b, 1:].tolist()):
            for m, ours in enumerate(boxes[b, :3].tolist()):
                one, two = box_mask((20, 20), tuple(ours)), box_mask((20, 20), tuple(theirs))
                both, either = int((one & two).sum()), int((one | two).sum())
                assert float(iou[b, n, m]) == pytest.approx(both / either if either else 0.0)


def test_regions_are_selected_in_order():
    regions = RegionGeometry(torch.arange(12.0).reshape(3, 1, 4))
    assert regions[1].boxes[0, 0, 0] == 4 and len(regions) == 3
    assert regions[torch.tensor([2, 0])].boxes[:, 0, 0].tolist() == [8, 0]


def test_boxes_of_another_shape_raise(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=r"b, m, 4.*\(2, 4\)"):
        PixelGeometry.identity(2, (8, 8)).cover_boxes(torch.rand(2, 4), (2, 2))
    with pytest.raises(TypeError, match=r"list.*pad_sequence"):
        PixelGeometry.identity(2, (8, 8)).cover_boxes([torch.rand(1, 4), torch.rand(2, 4)], (2, 2))


WRONG_BOXES = {
    "inverted across": (6.0, 1.0, 2.0, 4.0),
    "inverted down": (2.0, 4.0, 6.0, 1.0),
    "x, y, width, height": (6.0, 5.0, 3.0, 2.0),
    "empty": (2.0, 2.0, 2.0, 4.0),
    "right of the photo": (8.0, 1.0, 12.0, 4.0),
    "below the photo": (1.0, 6.0, 4.0, 9.0),
    "left of the photo": (-5.0, 1.0, -1.0, 4.0),
    "above the photo": (1.0, -5.0, 4.0, 0.0),
    "not a number": (1.0, float("nan"), 4.0, 5.0),
    "endless": (1.0, 1.0, float("inf"), 5.0),
}


@pytest.mark.parametrize("wrong", WRONG_BOXES)
def test_boxes_that_cover_nothing_raise_with_their_coordinates(wrong):
    """A target of such a box is empty, and metrics would silently skip its sample."""
    geometry = PixelGeometry.identity(2, (6, 8))
    boxes = torch.tensor([[[1.0, 1, 4, 5], [0, 0, 0, 0]], [[1, 1, 4, 5], WRONG_BOXES[wrong]]])
    first = f"{WRONG_BOXES[wrong][0]:g}".replace(".", "[.]")
    with pytest.raises(ValueError, match=rf"box 1.*sample 1.*\({first}, .*8 x 6"):
        geometry.cover_boxes(boxes, (3, 4))
    found = geometry.cover_any_boxes(boxes.nan_to_num(0, 1.0, 0.0), (3, 4))
    assert (found[0, 1] == 0).all() and (found[1, 0] > 0).any()


def test_boxes_in_shares_of_the_image_give_a_warning():
    photo = PixelGeometry.identity(1, (120, 200))
    with pytest.warns(UserWarning, match="first pixel.*width"):
        photo.cover_boxes(torch.tensor([[[0.1, 0.2, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0]]]), (3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photo.cover_boxes(torch.tensor([[[0.1, 0.2, 50.0, 1.0], [0.0, 0.0, 1.0, 1.0]]]), (3, 4))
        photo.cover_boxes(torch.zeros(1, 2, 4), (3, 4))  # absent objects
        small = PixelGeometry.identity(1, (4, 4))
        small.cover_boxes(torch.tensor([[[0.0, 0.0, 1.0, 1.0]]]), (2, 2))


@pytest.mark.parametrize("form", ["xywh", "cxcywh"])
def test_box_formats_equal_those_of_torchvision(form):
    ops = pytest.importorskip("torchvision.ops")
    geometry = PixelGeometry.identity(2, (6, 8))
    boxes = torch.tensor([[[1.0, 1, 4, 5], [0, 0, 0, 0]], [[2.5, 0, 8, 3], [0, 1, 1, 2]]])
    converted = ops.box_convert(boxes, "xyxy", form)
    found = geometry.cover_boxes(converted, (3, 4), format=form)
    torch.testing.assert_close(found, geometry.cover_boxes(boxes, (3, 4)))


def test_corners_and_sizes_of_a_box_agree():
    geometry, corners = PixelGeometry.identity(1, (6, 8)), torch.tensor([[[2.0, 1, 6, 4]]])
    expected = geometry.cover_boxes(corners, (3, 4))
    for form, box in (("xywh", [2.0, 1, 4, 3]), ("cxcywh", [4.0, 2.5, 4, 3])):
        found = geometry.cover_boxes(torch.tensor([[box]]), (3, 4), format=form)
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="format=.xywh"):
        geometry.cover_boxes(torch.tensor([[[4.0, 2, 1, 1]]]), (3, 4))


def test_a_cropped_box_is_accepted_with_a_warning():
    geometry = PixelGeometry.identity(2, (6, 8)).crop(0, 4, 6, 4)
    boxes = torch.tensor([[[0.0, 0, 0, 0]], [[0.0, 0, 3, 6]]])  # an absent object, a cropped one
    with pytest.warns(UserWarning, match=r"1 of 2 .*sample 1"):
        assert (geometry.cover_boxes(boxes, (3, 2)) == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        geometry.cover_boxes(boxes[:, :0], (3, 2))
        geometry.cover_boxes(torch.tensor([[[0.0, 0, 0, 0]], [[0.0, 0, 6, 6]]]), (3, 2))
    over = PixelGeometry.identity(1, (6, 8)).cover_boxes(torch.tensor([[[-3.0, -3, 2, 2]]]), (3, 4))
    assert (over[0, 0] > 0).tolist() == [True] + [
        False
    ] * 11  # a box partly outside counts where it is inside


def test_texts_and_ranges_without_their_list_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    spans = torch.tensor([[[0, 1], [2, 5]]])
    with pytest.raises(TypeError, match=r"texts.*\('a red',\)"):
        TextGeometry("a red", spans)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\[\(2, 5\)\]"):
        TextGeometry(("a red",), spans).cover([(2, 5)])  # type: ignore[list-item]


def test_identity_of_one_number_raises():
    with pytest.raises(TypeError, match=r"size.*got 32"):
        inspect.unwrap(PixelGeometry.identity)(2, 32)
