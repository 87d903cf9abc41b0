"""Map image tokens between words to cells of images or tiles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import Layout, Span
from overt.capture.layouts.media_batch import BatchMedia
from overt.capture.layouts.patch_grids import (
    PatchSpec,
    Size,
    cells_span,
    compact_index,
    patch_positions,
    select_images,
)
from overt.capture.layouts.probe import Tiles
from overt.capture.layouts.processors import tile_geometries
from overt.geometry import PixelGeometry


@dataclass(frozen=True, eq=False)
class BatchImages(BatchMedia):
    """The images of a batch."""

    @cached_property
    def tiles(self) -> Tiles:
        """Geometry of the canvases that the processor makes of each image by itself."""
        return tile_geometries(self.processor, self.sizes)

    def single_geometry(self) -> PixelGeometry:
        """Return the geometry of a batch with one image per sample on one canvas."""
        if any(len(rows) != 1 for rows in self.rows) or len(self.tiles.geometries) != 1:
            raise ValueError("this model takes one image per sample, without tiles")
        return self.tiles.geometries[0]


def batch_images(processor: Any, images: Sequence[Any]) -> BatchImages:
    """Collect the images of a batch: images or (height, width), one or a list per sample."""
    if processor is None:
        raise ValueError("images need the processor that prepared them: pass processor=")
    if not isinstance(images, list | tuple):
        raise TypeError(
            f"images must be a list with one entry per sample, got a {type(images).__name__}: use "
            "images=[photo]"
        )
    nested = [
        list(each) if isinstance(each, list | tuple) and not _is_size(each) else [each]
        for each in images
    ]
    sizes = [_size(image) for each in nested for image in each]
    counted = iter(range(len(sizes)))
    rows = tuple(tuple(next(counted) for _ in each) for each in nested)
    return BatchImages(processor, rows, tuple(sizes))


def batch_videos(processor: Any, videos: Sequence[Any]) -> BatchMedia:
    """Collect the videos of a batch: frames or (frames, height, width), one or a list per sample.

    A video is an array of frames, or a list of images. A list of lists of images is several videos.
    """
    if processor is None:
        raise ValueError("videos need the processor that prepared them: pass processor=")
    nested = [list(each) if _is_video_list(each) else [each] for each in videos]
    forms = [_video_form(video) for each in nested for video in each]
    counted = iter(range(len(forms)))
    rows = tuple(tuple(next(counted) for _ in each) for each in nested)
    frames = tuple(count for count, _ in forms)
    return BatchMedia(processor, rows, tuple(size for n, size in forms for _ in range(n)), frames)


def _is_video_list(value: Any) -> bool:
    """Return whether a value is several videos."""
    if not isinstance(value, list | tuple) or _is_video_size(value):
        return False
    return all(_is_video_size(v) or isinstance(v, list) or len(np.shape(v)) == 4 for v in value)


def _is_video_size(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(isinstance(n, int) for n in value)


def _video_form(video: Any) -> tuple[int, Size]:
    """Return the number of frames of a video, and their (height, width)."""
    if _is_video_size(video):
        return video[0], (video[1], video[2])
    sizes = {_size(frame) for frame in video}
    if len(sizes) != 1:
        raise ValueError(f"the frames of a video need one size, got {sorted(sizes) or 'no frame'}")
    return len(video), sizes.pop()


def _is_size(value: Any) -> bool:
    return len(value) == 2 and all(isinstance(n, int) for n in value)


def _size(image: Any) -> tuple[int, int]:
    """Return the (height, width) of an image, or the pair itself."""
    if isinstance(image, tuple | list):
        return int(image[0]), int(image[1])
    if hasattr(image, "getbands"):  # a PIL image, whose size is (width, height)
        return int(image.size[1]), int(image.size[0])
    if not hasattr(image, "shape"):
        raise TypeError(
            f"expected an image or its (height, width), got a {type(image).__name__}: open a file "
            "with PIL.Image.open"
        )
    shape = tuple(image.shape)
    height, width = shape[-2:] if len(shape) == 3 and shape[0] in (1, 3) else shape[:2]
    return int(height), int(width)


def grid_spans(
    taken: Bool[Tensor, "b n"],
    grids: Sequence[Size],
    cell: Size,
    photos: BatchImages | None,
    lead: int = 0,
) -> list[Span]:
    """Return the spans of the cells of each image, row by row.

    Args:
        taken: The image tokens of the batch.
        grids: Grid of each image, in the order of the batch.
        cell: Pixels of the canvas per cell.
        photos: The images, None for spans without geometry.
        lead: Number of tokens before the cells of each image (a class token).
    """
    # Tokens are given out in order: the first image takes as many as it has cells, then the next.
    shares = [lead + rows * columns for rows, columns in grids]
    found = _assign_tokens(taken, shares)
    owners = _owners(found, photos)
    if photos is not None:
        _check_grids(photos, grids, cell)
    spans = []
    # One span per image number; a sample with fewer images has none of its cells (-1).
    for number in range(max(len(of_one) for of_one in owners)):
        positions: list[Tensor | None] = []
        rows: list[int | None] = []
        for of_one in owners:
            row = of_one[number] if number < len(of_one) else None
            rows.append(row)
            positions.append(None if row is None else found[row][1][lead:].reshape(grids[row]))
        geometry = None
        if photos is not None:
            whole = select_images(photos.tiles.geometries[0], rows)
            geometry = _crop_to_cells(whole, [p for p in positions if p is not None], cell)
        spans.append(cells_span(_span_name("image", number, owners), positions, geometry))
    return spans


def anyres_spans(
    model: Any,
    taken: Bool[Tensor, "b n"],
    inputs: Mapping[str, Any],
    photos: BatchImages | None,
    patches: PatchSpec,
) -> list[Span]:
    """Return the spans of LLaVA-NeXT: whole image, tiles, and newline tokens.

    "image" is the image on one canvas, "detail" its tiles merged into one grid without padded rows
    and columns, and "newline" the token after each row of "detail".
    """
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    if model.config.model_type != "llava_next":
        raise ValueError(
            f"no layout rule for the tiles of {model.config.model_type}; build the Layout by hand, "
            "with one Span per tile"
        )
    side = int(model.config.vision_config.image_size)
    base = patches.grid((side, side))
    if (base[0] * patches.patch[0], base[1] * patches.patch[1]) != (side, side):
        raise ValueError(
            f"tiles of {side} pixels are not divisible into patches of {patches.patch}"
        )
    # The model's own functions choose the tiles and cut off padding. Applied to numbered cells,
    # they show which cells are left.
    details = []
    for size in inputs["image_sizes"].tolist():
        down, across = get_anyres_image_grid_shape(size, model.config.image_grid_pinpoints, side)
        cells = torch.arange(down * base[0] * across * base[1])
        details.append(unpad_image(cells.reshape(1, down * base[0], across * base[1]), size)[0])
    # One newline token ends each row.
    widths = [across + 1 for _, across in (tuple(d.shape) for d in details)]
    shares = [
        base[0] * base[1] + len(detail) * width
        for detail, width in zip(details, widths, strict=True)
    ]
    found = _assign_tokens(taken, shares)
    owners = _owners(found, photos)
    if any(len(of_one) != 1 for of_one in owners):
        raise ValueError("LLaVA-NeXT needs one image per sample; else build the Layout by hand")
    start = base[0] * base[1]
    # Order of the tokens: the whole image, then the rows of the tiles.
    rows = [own[start:].reshape(-1, width) for (_, own), width in zip(found, widths, strict=True)]
    ends = torch.nn.utils.rnn.pad_sequence(
        [of_one[:, -1] for of_one in rows], batch_first=True, padding_value=-1
    )
    whole, parts = None, None
    if photos is not None:
        whole = photos.tiles.geometries[0]
        parts = _merge_tiles(photos, details, base, side)
    return [
        cells_span("image", [own[:start].reshape(base) for _, own in found], whole),
        cells_span("detail", [of_one[:, :-1] for of_one in rows], parts),
        Span("newline", (ends.shape[1],), compact_index(ends)),
    ]


def merged_layout(grids: Sequence[Size], merge: int, photos: BatchImages | None) -> Layout:
    """Return the layout of the patches of all images in one sequence (encoder of Qwen2-VL).

    `merge` x `merge` neighbours are consecutive.
    """
    spans, start = [], 0
    for row, grid in enumerate(grids):
        geometry = None
        if photos is not None:
            canvas = photos.tiles.canvases[row, 0].tolist()
            geometry = photos.tiles.geometries[0][row].crop(0, 0, *canvas)
        name = "image" if len(grids) == 1 else f"image {row + 1}"
        spans.append(cells_span(name, [patch_positions(grid, merge) + start], geometry))
        start += grid[0] * grid[1]
    return Layout(tuple(spans), start)


def _assign_tokens(
    taken: Bool[Tensor, "b n"], shares: Sequence[int]
) -> list[tuple[int, Int[Tensor, " _"]]]:
    """Return the sample of each image or tile, and the positions of its tokens, in order."""
    counts = taken.sum(dim=1).tolist()
    if sum(counts) != sum(shares):
        raise ValueError(
            f"the batch has {sum(counts)} image tokens, but the images have {sum(shares)} cells "
            f"({list(shares)[:8]}): {_explain_mismatch(sum(counts), sum(shares))}"
        )
    found = []
    left: Iterator[int] = iter(shares)
    for sample, marked in enumerate(taken):
        places = marked.nonzero()[:, 0]
        while len(places):
            share = next(left)
            if share > len(places):
                raise ValueError(
                    f"sample {sample} has {len(places)} image tokens left for an image of {share}"
                )
            found.append((sample, places[:share]))
            places = places[share:]
    return found


def _explain_mismatch(tokens: int, cells: int) -> str:
    """Return a reason why two counts differ: merged cells, or other images."""
    if 0 < tokens < cells and not cells % tokens:
        return (
            f"the model merges or resamples {cells // tokens} cells into a token, in an unknown "
            "order; build the Layout by hand"
        )
    return (
        "the images or the processor differ from those of the inputs, or the model merges, "
        "resamples or adds image tokens in an unknown way; then build the Layout by hand"
    )


def _owners(
    found: Sequence[tuple[int, Tensor]], photos: BatchImages | None
) -> Sequence[Sequence[int]]:
    """Return the images of each sample, counted by their tokens; raise if `photos` differ."""
    samples = 1 + max((sample for sample, _ in found), default=0)
    if photos is not None:
        samples = max(samples, len(photos.rows))
    owners = [[row for row, (s, _) in enumerate(found) if s == sample] for sample in range(samples)]
    if photos is not None and [tuple(of_one) for of_one in owners] != list(photos.rows):
        raise ValueError(
            f"the samples have tokens of {[len(of_one) for of_one in owners]} images, but "
            f"{[len(of_one) for of_one in photos.rows]} images were given"
        )
    return owners


def _span_name(name: str, number: int, owners: Sequence[Sequence[int]]) -> str:
    return name if max(len(of_one) for of_one in owners) == 1 else f"{name} {number + 1}"


def _crop_to_cells(
    geometry: PixelGeometry, positions: Sequence[Int[Tensor, "_ _"]], cell: Size
) -> PixelGeometry:
    """Crop the geometry to the part of the canvas that the largest of these grids covers."""
    rows, columns = (max(p.shape[axis] for p in positions) for axis in (0, 1))
    return geometry.crop(0, 0, rows * cell[0], columns * cell[1])


def _check_grids(photos: BatchImages, grids: Sequence[Size], cell: Size) -> None:
    """Raise if the canvases of the processor do not match the grids of the model."""
    for canvas, grid in zip(photos.tiles.canvases[:, 0].tolist(), grids, strict=True):
        if (canvas[0] // cell[0], canvas[1] // cell[1]) != grid:
            raise ValueError(
                f"the processor makes a canvas of {tuple(canvas)} pixels, but the inputs have "
                f"{grid} cells of {cell} pixels; use the same images and processor settings"
            )


def _merge_tiles(
    photos: BatchImages, details: Sequence[Int[Tensor, "_ _"]], base: Size, side: int
) -> PixelGeometry:
    """The geometry of the tiles of each image as one canvas, cropped to the remaining cells."""
    cell = side / base[0]
    # The canvas fits the largest image of the batch, as spans do.
    largest = [max(detail.shape[axis] for detail in details) for axis in (0, 1)]
    canvas = (int(largest[0] * cell), int(largest[1] * cell))
    placed = []
    for row, detail in enumerate(details):
        across = _tiles_per_row(detail, base)
        tiles = [g[row] for g in photos.tiles.geometries[1:]]
        shown = [
            (tile, number)
            for number, tile in enumerate(tiles)
            if (tile._window()[0, 2:] > tile._window()[0, :2]).all()
        ]
        # All tiles have the scale of one resized image, so any visible tile gives the place of the
        # image: moved by the place of the tile, minus the cells that were cut off.
        tile, number = shown[0]
        down, right = divmod(number, across)
        first = int(detail[0, 0])
        top, left = divmod(first, across * base[1])
        origin = torch.tensor([down * side - top * cell, right * side - left * cell])
        whole = replace(tile, offset=tile.offset + origin.to(tile.offset), canvas=canvas, kept=None)
        height, width = (int(n * cell) for n in detail.shape)
        placed.append(whole.crop(0, 0, height, width).crop(0, 0, *canvas))
    return PixelGeometry.join(placed)


def _tiles_per_row(detail: Int[Tensor, "r c"], base: Size) -> int:
    """Number of tiles per row; cells are numbered before padding is removed."""
    if len(detail) < 2:
        return -(-detail.shape[1] // base[1])
    return int(detail[1, 0] - detail[0, 0]) // base[1]
