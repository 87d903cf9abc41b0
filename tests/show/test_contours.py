"""Lines and masks lie where the heat is, whatever was done to the photo before."""

import numpy as np
import pytest

from overt.geometry import PixelGeometry
from overt.show.contours import (
    contours,
    fullest,
    hard_mask,
    height_of,
    lines,
    painted,
)
from tests.show.test_overlay import CHANGES, one_hot, photo_pixels_in_cell


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("draw", [contours, hard_mask], ids=["contours", "hard mask"])
def test_what_is_marked_lies_on_the_right_pixels(change, draw):
    """The marked pixels surround those that went into the cell, at the photo's own size."""
    size = (300, 420)
    geometry = change(PixelGeometry.identity(1, size))
    photo = np.full((*size, 3), 128, np.uint8)
    for row, column in ((0, 0), (1, 3), (3, 2), (2, 1)):
        into = photo_pixels_in_cell(geometry, row, column)
        if geometry.kept is not None:  # what a crop took away was not seen
            x0, y0, x1, y1 = geometry.kept[0].tolist()
            into = into[((into >= (y0, x0)) & (into < (y1, x1))).all(axis=1)]
        if len(into) < 200:  # the cell is in the padding, or nearly
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


def test_a_small_photo_is_enlarged_and_keeps_its_aspect():
    for draw in (contours, hard_mask):
        assert draw(np.zeros((40, 60, 3), np.uint8), np.ones((2, 2))).shape == (160, 240, 3)


def slow_fullest(cells, share):
    """Cells one by one, the largest first, until there is enough."""
    left = sorted(((-weight, at) for at, weight in enumerate(cells.ravel().tolist())))
    kept, so_far = set(), 0.0
    for negative, at in left:
        if so_far >= share * cells.sum() - 1e-9 or negative >= 0:
            break
        kept.add(at)
        so_far -= negative
    return np.isin(np.arange(cells.size), list(kept)).reshape(cells.shape)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_the_fewest_cells_that_hold_a_share(share):
    cells = np.random.default_rng(0).dirichlet(np.full(30, 0.4)).reshape(5, 6)
    kept = fullest(cells, share)
    assert (kept == slow_fullest(cells, share)).all()
    assert cells[kept].sum() >= share - 1e-9
    assert not fullest(np.zeros((2, 2)), share).any()


def test_a_line_holds_the_share_it_says():
    y, x = np.mgrid[:120, :160] + 0.5
    heat = np.exp(-((x - 70) ** 2 + (y - 50) ** 2) / 400)
    for share in (0.25, 0.5, 0.75):
        level = height_of(heat, share)
        assert heat[heat >= level].sum() / heat.sum() == pytest.approx(share, abs=0.01)
        (loop,) = lines(heat, level)
        radius = [np.hypot(px - 70, py - 50) for px, py in loop]
        # of a bell, a circle of radius r holds 1 - exp(-r^2 / 400)
        wanted = np.sqrt(-400 * np.log(1 - share))
        assert np.mean(radius) == pytest.approx(wanted, abs=0.5)
        assert max(radius) - min(radius) < 1.0


def test_a_line_at_the_edge_follows_it():
    heat = np.zeros((20, 30))
    heat[:10] = 1.0
    (loop,) = lines(heat, 0.5)
    xs, ys = np.array(loop).T
    assert (xs.min(), xs.max(), ys.min()) == (0, 30, 0) and ys.max() == pytest.approx(10)


def test_nothing_to_see_draws_nothing():
    photo = np.full((64, 64, 3), 77, np.uint8)
    assert (contours(photo, np.zeros((4, 4))) == 77).all()
    assert lines(np.zeros((3, 3)), 0.0) == []
    assert painted(np.array([[-1.0]]), PixelGeometry.identity(1, (2, 2))).max() == 0


def test_the_evidence_is_outlined_and_the_photo_left_as_it_was():
    photo = np.full((256, 256, 3), 77, np.uint8)
    truth = one_hot(4, 4, 1, 1)
    made = contours(photo, np.zeros((4, 4)), truth=truth)
    at = np.argwhere((made == 255).all(axis=-1))
    assert np.abs(at.min(axis=0) - 64).max() <= 2 and np.abs(at.max(axis=0) - 128).max() <= 2
    assert (photo == 77).all()


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_impossible_shares_are_refused(share):
    with pytest.raises(ValueError, match="share"):
        fullest(np.ones((2, 2)), share)
    with pytest.raises(ValueError, match="between 0 and 1"):
        height_of(np.ones((2, 2)), share)
    with pytest.raises(ValueError, match="not finite"):
        contours(np.zeros((8, 8, 3), np.uint8), np.array([[np.nan]]))
