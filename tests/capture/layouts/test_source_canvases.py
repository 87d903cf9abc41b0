"""Batches of photos through processors whose arrangement is known by hand."""

import numpy as np
import pytest
from PIL import Image

from overt.capture.layouts.ramp_images import ImageTooSmallError, NotAffineError
from overt.capture.layouts.source_canvases import measure_canvases

SIZES = [(40, 64), (64, 48)]


def resized(photo, size=(32, 32)):
    picture = Image.fromarray(photo).resize(size[::-1])
    return np.moveaxis(np.asarray(picture, dtype=np.float64), -1, 0) / 255 - 0.5


def test_canvases_of_a_batch_in_any_order_with_padding():
    def prepare(photos):
        # The second photo first, then padding, then the two halves of the first one.
        tall, wide = resized(photos[1]), resized(photos[0], (32, 64))
        return np.stack([tall, 0 * tall, wide[:, :, :32], wide[:, :, 32:]])[None]

    found = measure_canvases(prepare, SIZES, (1, 4, 3, 32, 32))
    assert [canvas.source for canvas in found] == [1, 0, 0]
    index = np.arange(4 * 3 * 32 * 32).reshape(4, 3, 32, 32)
    for canvas, at in zip(found, (0, 2, 3), strict=True):
        assert np.array_equal(canvas.index, index[at])
    assert found[0].placement.scale == pytest.approx((0.5, 32 / 48))
    assert [one.placement.offset for one in found[1:]] == [(0, 0), (0, -32)]
    assert [one.placement.scale for one in found[1:]] == [pytest.approx((0.8, 1))] * 2


def test_flat_patches_are_assembled_by_what_they_show():
    draw = np.random.default_rng(0).permutation(2 * 16)

    def prepare(photos, channels_last=False):
        rows = []
        for photo in photos:
            cells = resized(photo).reshape(3, 4, 8, 4, 8).transpose(1, 3, 0, 2, 4)
            cells = np.moveaxis(cells, 2, -1) if channels_last else cells
            rows.append(cells.reshape(16, -1))
        return np.concatenate(rows)[draw]

    for last in (False, True):
        found = measure_canvases(lambda p, last=last: prepare(p, last), SIZES, (32, 192))
        assert sorted(canvas.source for canvas in found) == [0, 1]
        for canvas in found:
            assert canvas.placement.scale == pytest.approx(
                (32 / SIZES[canvas.source][0], 32 / SIZES[canvas.source][1])
            )
            # Cell (1, 2) of the photo is the patch that the permutation put there.
            row = int(np.flatnonzero(draw == canvas.source * 16 + 6)[0])
            assert (canvas.index[:, 8:16, 16:24] // 192 == row).all()


def test_a_patch_of_a_video_has_several_frames():
    def prepare(photos):
        frames = np.stack([resized(photo) for photo in photos])  # t c y x
        cells = frames.reshape(2, 2, 3, 4, 8, 4, 8).transpose(0, 3, 5, 2, 1, 4, 6)
        return cells.reshape(2 * 16, -1)

    found = measure_canvases(prepare, [(64, 64)] * 4, (32, 384), patch=8)
    assert [canvas.source for canvas in found] == [0, 1, 2, 3]
    assert {n // 384 for n in found[3].index.ravel().tolist()} == set(range(16, 32))
    assert not set(found[0].index.ravel()) & set(found[1].index.ravel())


def test_more_photos_than_levels_are_numbered():
    sizes = [(32, 32)] * 19

    def prepare(photos):
        return np.stack([resized(photo) for photo in photos[::-1]])

    found = measure_canvases(prepare, sizes, (19, 3, 32, 32))
    assert [canvas.source for canvas in found] == list(range(18, -1, -1))


def test_what_cannot_be_measured_is_refused():
    draw = np.random.default_rng(0)

    def mix(photos):
        return (resized(photos[0]) + resized(photos[1]))[None] / 2

    with pytest.raises(NotAffineError, match="mixes several"):
        measure_canvases(mix, SIZES, (1, 3, 32, 32))
    with pytest.raises(NotAffineError, match="random"):
        measure_canvases(lambda p: resized(p[0])[None] * draw.random(), SIZES[:1], (1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"\(1, 3.*\(2, 3"):
        measure_canvases(lambda p: resized(p[0])[None], SIZES[:1], (2, 3, 32, 32))
    with pytest.raises(NotAffineError, match="does not depend"):
        measure_canvases(lambda p: np.zeros((1, 3, 32, 32)), SIZES[:1], (1, 3, 32, 32))
    with pytest.raises(NotAffineError, match="no known form"):
        measure_canvases(lambda p: resized(p[0]).reshape(4, -1), SIZES[:1], (4, 768), patch=7)
    with pytest.raises(ImageTooSmallError):
        measure_canvases(lambda p: resized(p[0])[None], [(2, 3)], (1, 3, 32, 32))
