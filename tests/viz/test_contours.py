"""Contour lines and hard masks: positions on the photo, shares and invalid values."""

import numpy as np
import pytest

from overt.geometry import PixelGeometry
from overt.viz.contours import (
    contour_level,
    contour_lines,
    contours,
    hard_mask,
    top_share_mask,
)
from overt.viz.photo_overlay import paint_map
from tests.viz.test_photo_overlay import CHANGES, one_hot, photo_pixels_in_cell


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("draw", [contours, hard_mask], ids=["contours", "hard mask"])
def test_marked_pixels_follow_the_geometry(change, draw):
    """The marked pixels surround those of the cell, at the original size of the photo."""
    size = (300, 420)
    geometry = change(PixelGeometry.identity(1, size))
    photo = np.full((*size, 3), 128, np.uint8)
    for row, column in ((0, 0), (1, 3), (3, 2), (2, 1)):
        into = photo_pixels_in_cell(geometry, row, column)
        if geometry.kept is not None:  # the crop removes pixels
            x0, y0, x1, y1 = geometry.kept[0].tolist()
            into = into[((into >= (y0, x0)) & (into < (y1, x1))).all(axis=1)]
        if len(into) < 200:  # the cell is mostly padding
            continue
        made = draw(photo, one_hot(4, 4, row, column), geometry)
        assert made.shape == photo.shape
        marked = (made != 128).any(axis=-1)
        marked = ~marked if draw is hard_mask else marked
        at = np.argwhere(marked)
        low, high = into.min(axis=0), into.max(axis=0) + 1
        cell = np.abs(geometry.cells((4, 4))[0].diff(dim=0).numpy()).max()
        slack = 3 if draw is hard_mask else 0.5 * cell
        middle = (at.min(axis=0) + at.max(axis=0)) / 2
        assert (low - slack <= middle).all() and (middle <= high + slack).all()
        if draw is hard_mask:
            assert np.abs(at.min(axis=0) - low).max() <= 2
            assert np.abs(at.max(axis=0) + 1 - high).max() <= 2


def test_small_photo_is_enlarged_and_keeps_its_aspect():
    for draw in (contours, hard_mask):
        assert draw(np.zeros((40, 60, 3), np.uint8), np.ones((2, 2))).shape == (160, 240, 3)


def slow_top_share(cells, share):
    """Add cells in descending order until their sum reaches the share."""
    left = sorted(((-weight, at) for at, weight in enumerate(cells.ravel().tolist())))
    kept, so_far = set(), 0.0
    for negative, at in left:
        if so_far >= share * cells.sum() - 1e-9 or negative >= 0:
            break
        kept.add(at)
        so_far -= negative
    return np.isin(np.arange(cells.size), list(kept)).reshape(cells.shape)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_top_share_mask_has_the_fewest_cells(share):
    cells = np.random.default_rng(0).dirichlet(np.full(30, 0.4)).reshape(5, 6)
    kept = top_share_mask(cells, share)
    assert (kept == slow_top_share(cells, share)).all()
    assert cells[kept].sum() >= share - 1e-9
    assert not top_share_mask(np.zeros((2, 2)), share).any()


def test_contour_encloses_the_requested_share():
    y, x = np.mgrid[:120, :160] + 0.5
    heat = np.exp(-((x - 70) ** 2 + (y - 50) ** 2) / 400)
    for share in (0.25, 0.5, 0.75):
        level = contour_level(heat, share)
        assert heat[heat >= level].sum() / heat.sum() == pytest.approx(share, abs=0.01)
        (loop,) = contour_lines(heat, level)
        radius = [np.hypot(px - 70, py - 50) for px, py in loop]
        # a circle of radius r encloses 1 - exp(-r^2 / 400) of the Gaussian
        expected = np.sqrt(-400 * np.log(1 - share))
        assert np.mean(radius) == pytest.approx(expected, abs=0.5)
        assert max(radius) - min(radius) < 1.0


def test_contour_at_the_edge_follows_the_edge():
    heat = np.zeros((20, 30))
    heat[:10] = 1.0
    (loop,) = contour_lines(heat, 0.5)
    xs, ys = np.array(loop).T
    assert (xs.min(), xs.max(), ys.min()) == (0, 30, 0) and ys.max() == pytest.approx(10)


def test_empty_map_draws_nothing():
    photo = np.full((64, 64, 3), 77, np.uint8)
    assert (contours(photo, np.zeros((4, 4))) == 77).all()
    assert contour_lines(np.zeros((3, 3)), 0.0) == []
    assert paint_map(np.array([[-1.0]]), PixelGeometry.identity(1, (2, 2))).max() == 0


def test_truth_is_outlined_and_the_input_photo_unchanged():
    photo = np.full((256, 256, 3), 77, np.uint8)
    truth = one_hot(4, 4, 1, 1)
    made = contours(photo, np.zeros((4, 4)), truth=truth)
    at = np.argwhere((made == 255).all(axis=-1))
    assert np.abs(at.min(axis=0) - 64).max() <= 2 and np.abs(at.max(axis=0) - 128).max() <= 2
    assert (photo == 77).all()


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_invalid_shares_and_nan_maps_raise(share):
    with pytest.raises(ValueError, match="share"):
        top_share_mask(np.ones((2, 2)), share)
    with pytest.raises(ValueError, match="between 0 and 1"):
        contour_level(np.ones((2, 2)), share)
    with pytest.raises(ValueError, match="not finite"):
        contours(np.zeros((8, 8, 3), np.uint8), np.array([[np.nan]]))
