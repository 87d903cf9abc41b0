"""Measure the geometry of an image processor or transform for images of any size.

Of the settings of a processor only the patch size is used, if it returns patches instead of images;
everything else is measured with test images (`probe`). Boxes, masks and fixations therefore get
exactly the transform of the pixels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from overt.capture.layouts.probe import Canvas, Canvases, Tiles, measure_placement
from overt.capture.layouts.ramp_images import (
    ImageTooSmallError,
    NotAffineError,
    Photo,
    Size,
    dark_image,
)
from overt.geometry import PixelGeometry

MAX_ASPECT_RATIO = 100  # of an image, as in `overt.data.images`
REPEATS = 8  # a random flip gives the same result twice half of the time


def image_geometry(processor: Any, sizes: Sequence[Size]) -> PixelGeometry:
    """Measure where a Hugging Face processor puts images on its canvas.

    Images whose canvases differ in size share the largest one, padded below and on the right, as
    processors pad a batch.

    Args:
        processor: An image processor, or a processor that has one. Use
            `functools.partial(processor, do_center_crop=False)` for settings passed at each call.
        sizes: (height, width) of each image.

    Returns:
        The geometry, with one row per image.

    Raises:
        ValueError: If the processor makes tiles, or does more than scale, crop, pad and flip.

    Example:
        >>> def processor(images):
        ...     small = [np.asarray(image.resize((32, 32))) for image in images]
        ...     return {"pixel_values": np.moveaxis(np.stack(small), -1, 1)}
        >>> geometry = image_geometry(processor, sizes=[(64, 128)])
        >>> geometry.scale.tolist(), geometry.canvas
        ([[0.5, 0.25]], (32, 32))
    """
    return _single_geometry(tile_geometries(processor, sizes), processor)


def tile_geometries(processor: Any, sizes: Sequence[Size]) -> Tiles:
    """Measure where a Hugging Face processor puts images on their canvases, one or several each.

    Args:
        processor: As for `image_geometry`.
        sizes: (height, width) of each image.

    Returns:
        The geometry of each tile.

    Raises:
        ValueError: If the processor does more than scale, crop, pad and flip.

    Example:
        >>> def processor(images):
        ...     halves = [np.asarray(images[0])[:, :64], np.asarray(images[0])[:, 64:]]
        ...     return {"pixel_values": np.moveaxis(np.stack(halves), -1, 1)[None]}
        >>> tiles = tile_geometries(processor, sizes=[(64, 128)])
        >>> [(one.offset.tolist(), one.canvas) for one in tiles.geometries]
        [([[0.0, 0.0]], (64, 64)), ([[0.0, -64.0]], (64, 64))]
    """
    processor = getattr(processor, "image_processor", processor)
    _check_aspect_ratios(processor, sizes)
    reason: NotAffineError | None = None
    for reading in _readings(processor, sizes[0]):
        try:
            return measure_placement(reading, sizes)
        except NotAffineError as problem:
            reason = reason or problem
    raise _geometry_error(processor, reason)


def transform_geometry(transform: Callable[[Any], Any], sizes: Sequence[Size]) -> PixelGeometry:
    """Measure where a transform of one PIL image, such as those of timm or torchvision, puts it.

    Args:
        transform: Maps a PIL image to a tensor or image.
        sizes: (height, width) of each image.

    Returns:
        The geometry, with one row per image.

    Raises:
        ValueError: If the transform is random, or does more than scale, crop, pad and flip.

    Example:
        >>> geometry = transform_geometry(lambda image: image.resize((32, 32)), [(64, 96)])
        >>> geometry.scale.tolist(), geometry.canvas
        ([[0.5, 0.3333333333333333]], (32, 32))
    """
    _check_aspect_ratios(transform, sizes)

    def canvases(photo: Photo) -> list[Canvas]:
        return [_channels_first(picture) for picture in _pictures(transform(_picture(photo)))]

    try:
        return _single_geometry(measure_placement(canvases, sizes, repeats=REPEATS), transform)
    except NotAffineError as problem:
        raise _geometry_error(transform, problem) from problem


def _check_aspect_ratios(what: Any, sizes: Sequence[Size]) -> None:
    """Raise for thin images, which a processor would enlarge to gigabytes."""
    for height, width in sizes:
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            few = f"it has {height} x {width} pixels, too few along its shorter side"
            raise _geometry_error(what, ImageTooSmallError(few))


def _readings(processor: Any, size: Size) -> Iterator[Canvases]:
    """Yield the possible ways to read images from the output; the ramps show which one is right."""
    try:
        given = _processed(processor, dark_image(size))
    except Exception as problem:
        raise ValueError(
            f"{_name(processor)} does not accept a single image ({problem}), so its geometry "
            "cannot be measured; build the PixelGeometry by hand"
        ) from problem
    # Neither the order of channels in a patch nor the merging of neighbours is declared, so all
    # readings are tried.
    if "image_grid_thw" in given:
        for merge in dict.fromkeys((int(getattr(processor, "merge_size", 1)), 1)):
            for channels in (_channels_first_patch, _channels_last_patch):
                yield partial(_images_from_patches, processor, "image_grid_thw", merge, channels)
    elif "spatial_shapes" in given:
        yield partial(_images_from_patches, processor, "spatial_shapes", 1, _channels_last_patch)
    elif "pixel_values" in given:
        yield lambda photo: _pictures(_processed(processor, photo)["pixel_values"])
    else:
        raise NotAffineError(
            f"{_name(processor)} returns {sorted(given)} and no pixel_values, so its geometry "
            "cannot be measured; build the PixelGeometry by hand"
        )


def _processed(processor: Any, photo: Photo) -> Mapping[str, Any]:
    given = processor(images=[_picture(photo)])
    return given if isinstance(given, Mapping) else {"pixel_values": given}


def _picture(photo: Photo) -> Any:
    from PIL import Image

    return Image.fromarray(photo)


def _pictures(value: Any) -> list[Canvas]:
    """Return all images in nested lists and arrays, in order."""
    if isinstance(value, list | tuple):
        return [picture for part in value for picture in _pictures(part)]
    array = np.asarray(value)
    if array.ndim < 2:
        raise NotAffineError(f"an output of shape {array.shape} is not an image")
    if array.ndim == 2:
        return [array[None]]
    return [array] if array.ndim == 3 else [p for part in array for p in _pictures(part)]


def _channels_first(picture: Canvas) -> Canvas:
    # An image has 1 or 3 channels; if both ends could be channels, the first axis is.
    last = picture.shape[-1] in (1, 3) and picture.shape[0] not in (1, 3)
    return np.moveaxis(picture, -1, 0) if last else picture


def _channels_first_patch(patch: np.ndarray, side: int) -> np.ndarray:
    return patch.reshape(len(patch), -1, side, side)


def _channels_last_patch(patch: np.ndarray, side: int) -> np.ndarray:
    return np.moveaxis(patch.reshape(len(patch), side, side, -1), -1, 1)


def _images_from_patches(
    processor: Any,
    grid: str,
    merge: int,
    channels: Callable[[np.ndarray, int], np.ndarray],
    photo: Photo,
) -> list[Canvas]:
    """Reassemble an image from flat patches, `merge` x `merge` neighbours consecutive."""
    given = _processed(processor, photo)
    # (frames, rows, columns) or (rows, columns).
    *_, rows, columns = np.asarray(given[grid]).reshape(-1).tolist()
    patches = np.asarray(given["pixel_values"], dtype=np.float64)
    if patches.ndim == 3:  # one image, padded with empty patches
        patches = patches[0, : rows * columns]
    side = int(processor.patch_size)
    cells = channels(patches.reshape(rows * columns, -1), side)
    if rows % merge or columns % merge:
        raise NotAffineError(f"{rows} x {columns} patches are not divisible by {merge}")
    blocks = cells.reshape(rows // merge, columns // merge, merge, merge, -1, side, side)
    # (rows / m, columns / m, m, m, c, y, x) -> (c, rows / m, m, y, columns / m, m, x).
    picture = blocks.transpose(4, 0, 2, 5, 1, 3, 6)
    return [picture.reshape(-1, rows * side, columns * side)]


def _single_geometry(tiles: Tiles, of: Any) -> PixelGeometry:
    if len(tiles.geometries) > 1:
        raise ValueError(
            f"{_name(of)} splits an image into up to {len(tiles.geometries)} tiles; use "
            "tile_geometries for the geometry of each"
        )
    return tiles.geometries[0]


def _geometry_error(what: Any, reason: NotAffineError | None) -> NotAffineError:
    if isinstance(reason, ImageTooSmallError):
        return ImageTooSmallError(
            f"the image is too small to measure the geometry of {_name(what)}: {reason}. Use a "
            "larger one, or build the PixelGeometry by hand."
        )
    return NotAffineError(
        f"{_name(what)} does more to an image than scale, crop, pad and flip it: {reason}. "
        "Use the evaluation transform, or build the PixelGeometry by hand."
    )


def _name(what: Any) -> str:
    return getattr(what, "__name__", type(what).__name__)
