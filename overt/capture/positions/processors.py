"""The geometry of an image processor: what it does to photos of any size, asked of itself.

Nothing is read from a processor's settings but the size of its patches, where it hands out patches
instead of pictures; the rest is measured with test pictures (`positions.probe`). So boxes, masks
and fixations go through exactly the transform the pixels went through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from overt.capture.positions.probe import Canvas, Canvases, Tiles, measure
from overt.capture.positions.ramps import NotAffine, Photo, Size, TooSmall, dark
from overt.geometry import PixelGeometry

COIN_TOSSES = 8  # a mirror tossed with a coin comes out the same twice half the time


def image_geometry(processor: Any, sizes: Sequence[Size]) -> PixelGeometry:
    """Where a Hugging Face processor puts photos of each (height, width) on its canvas.

    `processor` is an image processor, or a processor that has one; settings that are given at each
    call are given by `functools.partial(processor, do_center_crop=False)`. Photos that become
    canvases of different sizes share the largest, padded below and on the right, as processors pad
    a batch.
    """
    return _alone(tile_geometries(processor, sizes), processor)


def tile_geometries(processor: Any, sizes: Sequence[Size]) -> Tiles:
    """Where a Hugging Face processor puts photos on their canvases, one or several a photo."""
    processor = getattr(processor, "image_processor", processor)
    reason: NotAffine | None = None
    for reading in _readings(processor, sizes[0]):
        try:
            return measure(reading, sizes)
        except NotAffine as problem:
            reason = reason or problem
    raise _refused(processor, reason)


def transform_geometry(transform: Callable[[Any], Any], sizes: Sequence[Size]) -> PixelGeometry:
    """Where a transform of one PIL picture, such as timm's or torchvision's, puts each photo.

    A transform that draws at random is refused: its geometry is another at each call.
    """

    def canvases(photo: Photo) -> list[Canvas]:
        return [_channels_first(picture) for picture in _pictures(transform(_picture(photo)))]

    try:
        return _alone(measure(canvases, sizes, repeats=COIN_TOSSES), transform)
    except NotAffine as problem:
        raise _refused(transform, problem) from problem


def _readings(processor: Any, size: Size) -> Iterator[Canvases]:
    """The ways in which the processor's output may be a picture; the ramps tell which is right."""
    try:
        given = _processed(processor, dark(size))
    except Exception as problem:
        raise ValueError(
            f"{_name(processor)} does not take one plain picture ({problem}), so what it does to "
            "photos cannot be measured; build the PixelGeometry by hand"
        ) from problem
    if "image_grid_thw" in given:
        for merge in dict.fromkeys((int(getattr(processor, "merge_size", 1)), 1)):
            for channels in (_channels_first_patch, _channels_last_patch):
                yield partial(_unpatched, processor, "image_grid_thw", merge, channels)
    elif "spatial_shapes" in given:
        yield partial(_unpatched, processor, "spatial_shapes", 1, _channels_last_patch)
    elif "pixel_values" in given:
        yield lambda photo: _pictures(_processed(processor, photo)["pixel_values"])
    else:
        raise NotAffine(
            f"{_name(processor)} gives {sorted(given)} and no pixel_values, so where its "
            "pixels came from cannot be measured; build the PixelGeometry by hand"
        )


def _processed(processor: Any, photo: Photo) -> Mapping[str, Any]:
    given = processor(images=[_picture(photo)])
    return given if isinstance(given, Mapping) else {"pixel_values": given}


def _picture(photo: Photo) -> Any:
    from PIL import Image

    return Image.fromarray(photo)


def _pictures(value: Any) -> list[Canvas]:
    """Every picture of a nest of lists and arrays, in order."""
    if isinstance(value, list | tuple):
        return [picture for part in value for picture in _pictures(part)]
    array = np.asarray(value)
    if array.ndim < 2:
        raise NotAffine(f"an output of shape {array.shape} is no picture")
    if array.ndim == 2:
        return [array[None]]
    return [array] if array.ndim == 3 else [p for part in array for p in _pictures(part)]


def _channels_first(picture: Canvas) -> Canvas:
    last = picture.shape[-1] in (1, 3) and picture.shape[0] not in (1, 3)
    return np.moveaxis(picture, -1, 0) if last else picture


def _channels_first_patch(patch: np.ndarray, side: int) -> np.ndarray:
    return patch.reshape(len(patch), -1, side, side)


def _channels_last_patch(patch: np.ndarray, side: int) -> np.ndarray:
    return np.moveaxis(patch.reshape(len(patch), side, side, -1), -1, 1)


def _unpatched(
    processor: Any,
    grid: str,
    merge: int,
    channels: Callable[[np.ndarray, int], np.ndarray],
    photo: Photo,
) -> list[Canvas]:
    """The picture that was cut into flat patches, `merge` x `merge` neighbours after each other."""
    given = _processed(processor, photo)
    *_, rows, columns = np.asarray(given[grid]).reshape(-1).tolist()
    patches = np.asarray(given["pixel_values"], dtype=np.float64)
    if patches.ndim == 3:  # one photo, its patches filled up with empty ones
        patches = patches[0, : rows * columns]
    side = int(processor.patch_size)
    cells = channels(patches.reshape(rows * columns, -1), side)
    if rows % merge or columns % merge:
        raise NotAffine(f"{rows} x {columns} patches do not merge {merge} by {merge}")
    blocks = cells.reshape(rows // merge, columns // merge, merge, merge, -1, side, side)
    picture = blocks.transpose(4, 0, 2, 5, 1, 3, 6)
    return [picture.reshape(-1, rows * side, columns * side)]


def _alone(tiles: Tiles, of: Any) -> PixelGeometry:
    if len(tiles.geometries) > 1:
        raise ValueError(
            f"{_name(of)} cuts a photo into up to {len(tiles.geometries)} tiles; "
            "tile_geometries gives the geometry of each"
        )
    return tiles.geometries[0]


def _refused(what: Any, reason: NotAffine | None) -> NotAffine:
    if isinstance(reason, TooSmall):
        return TooSmall(
            f"the picture is too small to tell where {_name(what)} puts it and where its cells "
            f"lie: {reason}. Give a larger one, or build the PixelGeometry by hand."
        )
    return NotAffine(
        f"{_name(what)} does more to a photo than stretch, cut, pad and mirror it: {reason}. "
        "Give what is used for evaluation, or build the PixelGeometry by hand."
    )


def _name(what: Any) -> str:
    return getattr(what, "__name__", type(what).__name__)
