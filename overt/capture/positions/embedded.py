"""Image tokens that stand between words: which cell of which photo or tile each one is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import Layout, Span
from overt.capture.positions.grids import Patches, Size, cells_span, compact, empty, patch_positions
from overt.capture.positions.probe import Tiles
from overt.capture.positions.processors import tile_geometries
from overt.geometry import PixelGeometry


@dataclass(frozen=True, eq=False)
class Photos:
    """The photos of a batch: which ones each sample has, their sizes, and where they went."""

    rows: tuple[tuple[int, ...], ...]
    sizes: tuple[Size, ...]
    tiles: Tiles

    def alone(self) -> PixelGeometry:
        """The geometry of a batch with one photo a sample, brought to one canvas."""
        if any(len(rows) != 1 for rows in self.rows) or len(self.tiles.geometries) != 1:
            raise ValueError("this model takes one photo a sample and no tiles")
        return self.tiles.geometries[0]


def photos_of(processor: Any, images: Sequence[Any]) -> Photos:
    """The photos of a batch, given as pictures or (height, width), one or a list a sample."""
    if processor is None:
        raise ValueError("photos were given without the processor that brought them to the model")
    nested = [
        list(each) if isinstance(each, list | tuple) and not _is_size(each) else [each]
        for each in images
    ]
    sizes = [_size(image) for each in nested for image in each]
    counted = iter(range(len(sizes)))
    rows = tuple(tuple(next(counted) for _ in each) for each in nested)
    return Photos(rows, tuple(sizes), tile_geometries(processor, sizes))


def _is_size(value: Any) -> bool:
    return len(value) == 2 and all(isinstance(n, int) for n in value)


def _size(image: Any) -> tuple[int, int]:
    """The (height, width) of a photo, or the pair itself."""
    if isinstance(image, tuple | list):
        return int(image[0]), int(image[1])
    if hasattr(image, "getbands"):  # a PIL picture, which says width first
        return int(image.size[1]), int(image.size[0])
    shape = tuple(image.shape)
    height, width = shape[-2:] if len(shape) == 3 and shape[0] in (1, 3) else shape[:2]
    return int(height), int(width)


def grid_spans(
    taken: Bool[Tensor, "b n"],
    grids: Sequence[Size],
    cell: Size,
    photos: Photos | None,
    lead: int = 0,
) -> list[Span]:
    """The cells of each photo, row by row, for photos of these grids in the order of the batch.

    A cell is `cell` pixels of the canvas; `lead` tokens stand before the cells of each photo (a
    class token).
    """
    shares = [lead + rows * columns for rows, columns in grids]
    found = _share(taken, shares)
    owners = _owners(found, photos)
    if photos is not None:
        _same_cells(photos, grids, cell)
    spans = []
    for number in range(max(len(of_one) for of_one in owners)):
        positions: list[Tensor | None] = []
        rows: list[int | None] = []
        for of_one in owners:
            row = of_one[number] if number < len(of_one) else None
            rows.append(row)
            positions.append(None if row is None else found[row][1][lead:].reshape(grids[row]))
        geometry = None
        if photos is not None:
            whole = empty(photos.tiles.geometries[0], rows)
            geometry = _covering(whole, [p for p in positions if p is not None], cell)
        spans.append(cells_span(_named("image", number, owners), positions, geometry))
    return spans


def tile_spans(
    taken: Bool[Tensor, "b n"], grid: Size, cell: Size, photos: Photos | None
) -> list[Span]:
    """The cells of each tile, for tiles that all have one grid (Idefics3, SmolVLM)."""
    if photos is None:
        raise ValueError("tiles are counted by the photos; give images= and processor=")
    counts = photos.tiles.present.sum(dim=1).tolist()
    shares = [grid[0] * grid[1]] * sum(counts)
    found = _share(taken, shares)
    first = torch.tensor([0, *counts]).cumsum(0).tolist()
    spans = []
    most = max(len(rows) for rows in photos.rows)
    for number in range(most):
        for tile, geometry in enumerate(photos.tiles.geometries):
            rows: list[int | None] = [
                of_one[number] if number < len(of_one) and tile < counts[of_one[number]] else None
                for of_one in photos.rows
            ]
            if all(row is None for row in rows):
                continue
            positions = [
                None if row is None else found[first[row] + tile][1].reshape(grid) for row in rows
            ]
            name = _named("image", number, photos.rows) + f" tile {tile + 1}"
            there = [p for p in positions if p is not None]
            spans.append(cells_span(name, positions, _covering(empty(geometry, rows), there, cell)))
    return spans


def anyres_spans(
    model: Any,
    taken: Bool[Tensor, "b n"],
    inputs: Mapping[str, Any],
    photos: Photos | None,
    patches: Patches,
) -> list[Span]:
    """The whole photo, its details from tiles put together, and the tokens that end rows.

    That is LLaVA-NeXT: "image" is the photo on one canvas, "detail" what its tiles show, without
    the rows or columns that are padding, and "newline" the token after each row of details.
    """
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    if model.config.model_type != "llava_next":
        raise ValueError(
            f"how {model.config.model_type} packs its tiles is not known here; build the Layout by "
            "hand, with one Span a tile"
        )
    side = int(model.config.vision_config.image_size)
    base = patches.grid((side, side))
    if (base[0] * patches.patch[0], base[1] * patches.patch[1]) != (side, side):
        raise ValueError(f"patches of {patches.patch} do not fill tiles of {side} pixels")
    details = []
    for size in inputs["image_sizes"].tolist():
        down, across = get_anyres_image_grid_shape(size, model.config.image_grid_pinpoints, side)
        cells = torch.arange(down * base[0] * across * base[1])
        details.append(unpad_image(cells.reshape(1, down * base[0], across * base[1]), size)[0])
    widths = [across + 1 for _, across in (tuple(d.shape) for d in details)]
    shares = [
        base[0] * base[1] + len(detail) * width
        for detail, width in zip(details, widths, strict=True)
    ]
    found = _share(taken, shares)
    owners = _owners(found, photos)
    if any(len(of_one) != 1 for of_one in owners):
        raise ValueError("LLaVA-NeXT with other than one photo a sample; build the Layout by hand")
    start = base[0] * base[1]
    rows = [own[start:].reshape(-1, width) for (_, own), width in zip(found, widths, strict=True)]
    ends = torch.nn.utils.rnn.pad_sequence(
        [of_one[:, -1] for of_one in rows], batch_first=True, padding_value=-1
    )
    whole, parts = None, None
    if photos is not None:
        whole = photos.tiles.geometries[0]
        parts = _put_together(photos, details, base, side)
    return [
        cells_span("image", [own[:start].reshape(base) for _, own in found], whole),
        cells_span("detail", [of_one[:, :-1] for of_one in rows], parts),
        Span("newline", (ends.shape[1],), compact(ends)),
    ]


def merged_layout(grids: Sequence[Size], merge: int, photos: Photos | None) -> Layout:
    """The patches of all photos in one sequence, 2 x 2 neighbours together (Qwen2-VL's encoder)."""
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


def _share(
    taken: Bool[Tensor, "b n"], shares: Sequence[int]
) -> list[tuple[int, Int[Tensor, " _"]]]:
    """The sample of each photo or tile, and the positions of its tokens there, in order."""
    counts = taken.sum(dim=1).tolist()
    if sum(counts) != sum(shares):
        raise ValueError(
            f"there are {sum(counts)} image tokens in the batch and {sum(shares)} cells on the "
            f"photos ({list(shares)[:8]}); were the photos, or the processor, others?"
        )
    found = []
    left: Iterator[int] = iter(shares)
    for sample, marked in enumerate(taken):
        places = marked.nonzero()[:, 0]
        while len(places):
            share = next(left)
            if share > len(places):
                raise ValueError(
                    f"sample {sample} has {len(places)} image tokens left for a photo of {share}"
                )
            found.append((sample, places[:share]))
            places = places[share:]
    return found


def _owners(found: Sequence[tuple[int, Tensor]], photos: Photos | None) -> Sequence[Sequence[int]]:
    """The photos of each sample, as counted by their tokens, which has to agree with the photos."""
    samples = 1 + max((sample for sample, _ in found), default=0)
    if photos is not None:
        samples = max(samples, len(photos.rows))
    owners = [[row for row, (s, _) in enumerate(found) if s == sample] for sample in range(samples)]
    if photos is not None and [tuple(of_one) for of_one in owners] != list(photos.rows):
        raise ValueError(
            f"the samples have {[len(of_one) for of_one in owners]} photos by their tokens, and "
            f"{[len(of_one) for of_one in photos.rows]} were given"
        )
    return owners


def _named(name: str, number: int, owners: Sequence[Sequence[int]]) -> str:
    return name if max(len(of_one) for of_one in owners) == 1 else f"{name} {number + 1}"


def _covering(
    geometry: PixelGeometry, positions: Sequence[Int[Tensor, "_ _"]], cell: Size
) -> PixelGeometry:
    """The geometry on as much of the canvas as the largest of these grids of cells covers."""
    rows, columns = (max(p.shape[axis] for p in positions) for axis in (0, 1))
    return geometry.crop(0, 0, rows * cell[0], columns * cell[1])


def _same_cells(photos: Photos, grids: Sequence[Size], cell: Size) -> None:
    """The canvases that the processor makes are those that the model cut into these grids."""
    for canvas, grid in zip(photos.tiles.canvases[:, 0].tolist(), grids, strict=True):
        if (canvas[0] // cell[0], canvas[1] // cell[1]) != grid:
            raise ValueError(
                f"the processor makes a canvas of {tuple(canvas)} pixels, and the model was given "
                f"{grid} cells of {cell}; were the photos or the settings of the processor others?"
            )


def _put_together(
    photos: Photos, details: Sequence[Int[Tensor, "_ _"]], base: Size, side: int
) -> PixelGeometry:
    """The geometry of the tiles of each photo as one picture, cut to the cells that are left."""
    cell = side / base[0]
    largest = [max(detail.shape[axis] for detail in details) for axis in (0, 1)]
    canvas = (int(largest[0] * cell), int(largest[1] * cell))
    placed = []
    for row, detail in enumerate(details):
        across = _columns(detail, base)
        tiles = [g[row] for g in photos.tiles.geometries[1:]]
        shown = [
            (tile, number)
            for number, tile in enumerate(tiles)
            if (tile._window()[0, 2:] > tile._window()[0, :2]).all()
        ]
        tile, number = shown[0]
        down, right = divmod(number, across)
        first = int(detail[0, 0])
        top, left = divmod(first, across * base[1])
        origin = torch.tensor([down * side - top * cell, right * side - left * cell])
        whole = replace(tile, offset=tile.offset + origin.to(tile.offset), canvas=canvas, kept=None)
        height, width = (int(n * cell) for n in detail.shape)
        placed.append(whole.crop(0, 0, height, width).crop(0, 0, *canvas))
    return PixelGeometry.join(placed)


def _columns(detail: Int[Tensor, "r c"], base: Size) -> int:
    """How many tiles stand side by side: cells are numbered before any was cut away."""
    if len(detail) < 2:
        return -(-detail.shape[1] // base[1])
    return int(detail[1, 0] - detail[0, 0]) // base[1]
