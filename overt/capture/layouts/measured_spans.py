"""Spans of image tokens by measurement, without knowledge of the model or the processor.

Two measurements meet in the media input of the model: which image or frame each of its elements
shows, and where (`source_canvases`), and which token each element belongs to (`token_owners`). A
token gets the box of its own elements. Tokens that form no grid, or depend on several canvases, are
an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attention import Span
from overt.capture.layouts.media_batch import BatchMedia
from overt.capture.layouts.patch_grids import Size, cells_span, compact_index, select_images
from overt.capture.layouts.source_canvases import SourceCanvas
from overt.capture.layouts.token_owners import (
    NONE,
    SHARED,
    TokenOwners,
    measure_owners,
    token_elements,
)
from overt.geometry import PixelGeometry

OFF_CENTRE = 0.3  # of a cell: how far tokens that overlap may be from the centre of their cell
WIDEST = 2.2  # cells that such a token may depend on, along an axis
WHOLE = 0.02  # a canvas that shows all but this share of each side shows the whole image


_NO_GRID = (
    "tokens do not form a grid of cells: they depend on overlapping parts of the image, or on "
    "other areas (convolutions, attention that mixes positions)"
)


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """Tokens that form a grid over one image, tile or group of frames.

    Attributes:
        sources: The images or frames, by number.
        sample: The sample of the tokens.
        positions: The positions of the tokens.
        geometry: The pixels of the image; the canvas is that of the grid.
    """

    sources: tuple[int, ...]
    sample: int
    positions: Int[Tensor, "r c"]
    geometry: PixelGeometry

    @property
    def shape(self) -> Size:
        """Rows and columns."""
        return self.positions.shape[0], self.positions.shape[1]

    @property
    def cell(self) -> tuple[float, float]:
        """Height and width of a cell, in pixels of the canvas."""
        canvas, shape = self.geometry.canvas, self.shape
        return canvas[0] / shape[0], canvas[1] / shape[1]


@dataclass(frozen=True, eq=False)
class MeasuredSpans:
    """Spans of the tokens of one media input.

    Attributes:
        spans: The spans with a place.
        beside: Name of the argument if the tokens are keys of cross-attention, else empty.
        length: Length of the sequence of tokens.
        queries: Tokens that depend on whole images (a resampler).
    """

    spans: tuple[Span, ...]
    beside: str
    length: int
    queries: Bool[Tensor, "b n"]


def measure_spans(model: nn.Module, inputs: Mapping[str, Any], media: BatchMedia) -> MeasuredSpans:
    """Measure the spans of images or videos.

    Args:
        model: The model.
        inputs: Its inputs.
        media: The images or videos, with their processor.

    Returns:
        The spans.

    Raises:
        ValueError: If a token has no place: it depends on several canvases or on an area that is
            no cell of a grid; or if the processor does more than scale, crop, pad and flip.
    """
    name = media.input_name(inputs)
    owners = measure_owners(model, inputs, name)
    samples = len(inputs["input_ids"])
    queries = torch.zeros(samples, owners.length, dtype=torch.bool)
    if owners.resampled:
        queries.view(-1)[owners.shared] = True
        return MeasuredSpans((), owners.beside, owners.length, queries)
    canvases = media.canvases(inputs)
    grids = list(_token_grids(owners, canvases, media.sizes))
    spans = list(_video_spans(grids, media) if media.frames else _image_spans(grids, media))
    spans += marked_span("padding", _padding_tokens(owners, canvases, samples))
    return MeasuredSpans(tuple(spans), owners.beside, owners.length, queries)


# --- grids


def _token_grids(
    owners: TokenOwners, canvases: Sequence[SourceCanvas], sizes: Sequence[Size]
) -> Iterator[TokenGrid]:
    """Yield the grid of tokens on each canvas; canvases with the same tokens are one grid."""
    flat = owners.owner.reshape(-1).numpy()
    uneven: _UnevenGrids | None = None
    found: dict[tuple[int, ...], list[tuple[SourceCanvas, _CanvasGrid]]] = {}
    for canvas in canvases:
        of_pixel = flat[canvas.index]
        if (of_pixel != of_pixel[:1]).any():
            raise ValueError("the colours of a pixel belong to different tokens")
        if (of_pixel == NONE).all():
            continue  # a canvas that the model does not read
        part = None if (of_pixel == SHARED).any() else _even_grid(of_pixel[0])
        if part is None:
            uneven = uneven or _UnevenGrids(owners)
            part = uneven.grid(canvas.index)
        found.setdefault(tuple(part.tokens.ravel().tolist()), []).append((canvas, part))
    known: set[int] = set()
    for tokens, members in found.items():
        if known & set(tokens):
            raise ValueError("a token depends on several tiles or images")
        known |= set(tokens)
        canvas, part = members[0]
        # Frames that are merged into one token have to show the same place.
        if any(not _same_place(members[0], other) for other in members[1:]):
            raise ValueError("a token depends on canvases that show different parts of an image")
        samples = {token // owners.length for token in tokens}
        if len(samples) > 1:
            raise ValueError("the tokens of one image belong to several samples")
        placed = canvas.placement
        geometry = PixelGeometry(
            size=torch.tensor([sizes[canvas.source]]),
            scale=torch.tensor([placed.scale], dtype=torch.float64),
            offset=torch.tensor([placed.offset], dtype=torch.float64),
            canvas=placed.canvas,
            kept=torch.tensor([placed.kept], dtype=torch.float64),
        )
        yield TokenGrid(
            sources=tuple(dict.fromkeys(each.source for each, _ in members)),
            sample=samples.pop(),
            positions=torch.from_numpy(part.tokens) % owners.length,
            geometry=geometry.crop(*part.origin, *part.size),
        )


@dataclass(frozen=True, eq=False)
class _CanvasGrid:
    """Tokens of the cells of a part of a canvas, with its first pixel and its size."""

    tokens: Int[np.ndarray, "r c"]
    origin: Size
    size: Size


def _even_grid(of_pixel: Int[np.ndarray, "y x"]) -> _CanvasGrid | None:
    """Return the grid of equal rectangles that the tokens of a canvas form; None if they do not."""
    there = of_pixel != NONE
    rows, columns = there.any(axis=1).nonzero()[0], there.any(axis=0).nonzero()[0]
    top, left, bottom, right = rows[0], columns[0], rows[-1] + 1, columns[-1] + 1
    used = of_pixel[top:bottom, left:right]
    # A cell starts where any pixel of a row or column differs from the one before. Equal cells
    # then reproduce the canvas exactly.
    starts = [
        np.flatnonzero(np.append(True, (np.diff(used, axis=axis) != 0).any(axis=1 - axis)))
        for axis in (0, 1)
    ]
    tokens = used[np.ix_(*starts)]
    cell = (used.shape[0] // tokens.shape[0], used.shape[1] // tokens.shape[1])
    spread = tokens.repeat(cell[0], axis=0).repeat(cell[1], axis=1)
    if spread.shape != used.shape or (spread != used).any() or (tokens < 0).any():
        return None
    if len(np.unique(tokens)) != tokens.size:
        return None
    return _CanvasGrid(tokens, (int(top), int(left)), (used.shape[0], used.shape[1]))


class _UnevenGrids:
    """Grids of tokens that depend on a little more or less than their cell, by interpolation."""

    def __init__(self, owners: TokenOwners) -> None:
        flat = owners.owner.flatten()
        self.tokens = owners.shared if len(owners.shared) else flat[flat >= 0].unique()
        self.reach = owners.reach or token_elements(flat, self.tokens)
        self.place = np.full((2, len(flat)), -1)  # row and column on the canvas

    def grid(self, index: Int[np.ndarray, "c y x"]) -> _CanvasGrid:
        """Return the grid of a canvas; its cells divide the canvas evenly."""
        self.place[:] = -1
        self.place[:, index] = np.indices(index.shape)[1:]
        tokens, boxes = [], []
        for token, reach in zip(self.tokens.tolist(), self.reach, strict=True):
            places = self.place[:, reach.numpy()]
            places = places[:, places[0] >= 0]
            if places.size:
                tokens.append(token)
                boxes.append(np.stack([places.min(axis=1), places.max(axis=1) + 1], axis=1))
        found = np.array(boxes)  # (token, axis, start and end)
        place, shape = [], []
        for axis, side in enumerate(index.shape[1:]):
            intervals, at = np.unique(found[:, axis], axis=0, return_inverse=True)
            cell = side / len(intervals)
            centres = (np.arange(len(intervals)) + 0.5) * cell
            # Wider ones, cut off by the border, and a shift of the whole grid are off the centre.
            off = np.abs(intervals.mean(axis=1) - centres).max() > OFF_CENTRE * cell
            if off or np.ptp(intervals, axis=1).max() > WIDEST * cell:
                raise ValueError(_NO_GRID)
            place.append(at.ravel())
            shape.append(len(intervals))
        grid = np.full(shape, -1)
        grid[tuple(place)] = tokens
        if (grid < 0).any() or grid.size != len(tokens):
            raise ValueError(_NO_GRID)
        return _CanvasGrid(grid, (0, 0), (index.shape[1], index.shape[2]))


def _same_place(
    one: tuple[SourceCanvas, _CanvasGrid], other: tuple[SourceCanvas, _CanvasGrid]
) -> bool:
    (first, grid), (second, again) = one, other
    return (
        grid.tokens.shape == again.tokens.shape
        and (grid.origin, grid.size) == (again.origin, again.size)
        and np.allclose(first.placement.scale, second.placement.scale)
        and np.allclose(first.placement.offset, second.placement.offset)
    )


def _padding_tokens(
    owners: TokenOwners, canvases: Sequence[SourceCanvas], samples: int
) -> Bool[Tensor, "b n"]:
    """Return the tokens whose canvases show no image."""
    owner = owners.owner.reshape(-1)
    which = torch.zeros(samples * owners.length, dtype=torch.bool)
    which[owner[owner >= 0]] = True
    which[owners.shared] = False
    for canvas in canvases:
        here = owner[torch.from_numpy(canvas.index.ravel().copy())]
        which[here[here >= 0]] = False
    return which.reshape(samples, -1)


def marked_span(name: str, which: Bool[Tensor, "b n"]) -> list[Span]:
    """Return the span of the marked positions of each sample; none if there is none."""
    if not bool(which.any()):
        return []
    rows = [each.nonzero()[:, 0] for each in which]
    index = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return [Span(name, (index.shape[1],), compact_index(index))]


# --- images


def _image_spans(grids: Sequence[TokenGrid], media: BatchMedia) -> Iterator[Span]:
    """Yield the spans "image", "detail" and tiles of each image number."""
    of_image: dict[int, dict[str, TokenGrid]] = {}
    for image in range(len(media.sizes)):
        own = [grid for grid in grids if image in grid.sources]
        if any(len(grid.sources) > 1 for grid in own):
            raise ValueError("a token depends on several images")
        of_image[image] = _named_views(own)
    _check_samples(of_image, media)
    several = max(len(rows) for rows in media.rows) > 1
    for number in range(max(len(rows) for rows in media.rows)):
        mine = [rows[number] if number < len(rows) else None for rows in media.rows]
        views = [{} if image is None else of_image[image] for image in mine]
        names = dict.fromkeys(name for each in views for name in each)
        for name in sorted(names, key=_view_order):
            text = f"{name} {number + 1}" if several else name
            if name.startswith("tile"):
                text = f"image {number + 1} {name}" if several else f"image {name}"
            yield _grid_span(text, [each.get(name) for each in views])


def _view_order(name: str) -> tuple[int, int]:
    kind, _, number = name.partition(" ")
    return ["image", "detail", "tile"].index(kind), int(number or 0)


def _named_views(grids: Sequence[TokenGrid]) -> dict[str, TokenGrid]:
    """Name the grids of one image: "image" shows all of it, "detail" is its tiles together."""
    if not grids:
        return {}
    seen = torch.cat([grid.geometry._window() for grid in grids])
    low, high = seen[:, :2].amin(dim=0), seen[:, 2:].amax(dim=0)
    room = WHOLE * (high - low) + 1
    whole = [bool((box[:2] <= low + room).all() and (box[2:] >= high - room).all()) for box in seen]
    views = [grid for grid, all_of_it in zip(grids, whole, strict=True) if all_of_it]
    tiles = [grid for grid, all_of_it in zip(grids, whole, strict=True) if not all_of_it]
    # Two views of the whole image: the one with fewer cells is the thumbnail.
    views.sort(key=lambda grid: grid.positions.numel())
    if len(views) > 2 or (len(views) == 2 and tiles):
        raise ValueError(f"{len(views)} canvases show the whole image")
    named = dict(zip(("image", "detail"), views, strict=False))
    joined = _join_tiles(tiles)
    if joined is not None:
        named["detail" if views else "image"] = joined
    elif tiles:
        named |= {f"tile {number + 1}": tile for number, tile in enumerate(tiles)}
    return named


def _join_tiles(tiles: Sequence[TokenGrid]) -> TokenGrid | None:
    """Return the tiles of one resized image as one grid; None if they leave gaps or overlap."""
    if not tiles:
        return None
    first = tiles[0]
    cell = torch.tensor(first.cell, dtype=torch.float64)
    places = []
    for tile in tiles:
        same = tile.cell == first.cell and torch.allclose(
            tile.geometry.scale, first.geometry.scale, rtol=1e-3
        )
        # Cells from the top left corner of the resized image to that of the tile.
        at = -tile.geometry.offset[0] / cell
        if not same or tile.sample != first.sample:
            return None
        places.append(at)
    at = torch.stack(places) - torch.stack(places).amin(dim=0)
    start = at.round().long()
    if bool(((at - start).abs() > 0.1).any()):
        return None
    ends = start + torch.tensor([tile.shape for tile in tiles])
    rows, columns = ends.amax(dim=0).tolist()
    positions = torch.full((rows, columns), -1)
    for (top, left), tile in zip(start.tolist(), tiles, strict=True):
        part = positions[top : top + tile.shape[0], left : left + tile.shape[1]]
        if bool((part >= 0).any()):
            return None
        part.copy_(tile.positions)
    if bool((positions < 0).any()):
        return None
    corner = int((start.sum(dim=1) == 0).nonzero()[0, 0])
    seen = torch.cat([tile.geometry._window() for tile in tiles])
    geometry = replace(
        tiles[corner].geometry,
        canvas=(round(rows * first.cell[0]), round(columns * first.cell[1])),
        kept=torch.cat([seen[:, :2].amin(dim=0), seen[:, 2:].amax(dim=0)])[None],
    )
    return TokenGrid(first.sources, first.sample, positions, geometry)


def _check_samples(of_image: Mapping[int, Mapping[str, TokenGrid]], media: BatchMedia) -> None:
    """Raise unless every image has tokens in the sample that it was given for."""
    for sample, rows in enumerate(media.rows):
        for image in rows:
            found = {grid.sample for grid in of_image[image].values()}
            if found != {sample}:
                raise ValueError(
                    f"image {image + 1} was given for sample {sample}, but its tokens are in "
                    f"{sorted(found) or 'no sample'}"
                )


def _grid_span(name: str, grids: Sequence[TokenGrid | None]) -> Span:
    """Return the span of one grid per sample, None for a sample without it."""
    there = [grid for grid in grids if grid is not None]
    geometry = _joined_geometry(there)
    rows = iter(range(len(there)))
    chosen = [None if grid is None else next(rows) for grid in grids]
    return cells_span(
        name,
        [None if grid is None else grid.positions for grid in grids],
        select_images(geometry, chosen),
    )


def _joined_geometry(grids: Sequence[TokenGrid]) -> PixelGeometry:
    """Return the geometry of several grids, one row each, on a canvas that fits the largest."""
    rows, columns = (max(grid.shape[axis] for grid in grids) for axis in (0, 1))
    cell = tuple(max(1, round(side)) for side in grids[0].cell)
    fitted = [
        grid.geometry.resize((grid.shape[0] * cell[0], grid.shape[1] * cell[1])).crop(
            0, 0, rows * cell[0], columns * cell[1]
        )
        for grid in grids
    ]
    return PixelGeometry.join(fitted)


# --- videos


def _video_spans(grids: Sequence[TokenGrid], media: BatchMedia) -> Iterator[Span]:
    """Yield one span of shape (frames, rows, columns) per video number."""
    videos: list[list[TokenGrid]] = []
    start = 0
    for frames in media.frames:
        own = [grid for grid in grids if set(grid.sources) & set(range(start, start + frames))]
        videos.append(_frames_in_order(own, start, frames))
        start += frames
    several = max(len(rows) for rows in media.rows) > 1
    for number in range(max(len(rows) for rows in media.rows)):
        mine = [videos[rows[number]] if number < len(rows) else [] for rows in media.rows]
        for sample, own in enumerate(mine):
            if not {grid.sample for grid in own} <= {sample}:
                raise ValueError(f"a video was given for sample {sample}, but has no tokens in it")
        there = [own[0] for own in mine if own]
        shape = (
            max(len(own) for own in mine),
            *(max(grid.shape[axis] for grid in there) for axis in (0, 1)),
        )
        index = torch.full((len(mine), *shape), -1)
        for sample, own in enumerate(mine):
            for time, grid in enumerate(own):
                index[sample, time, : grid.shape[0], : grid.shape[1]] = grid.positions
        rows_of = iter(range(len(there)))
        chosen = [next(rows_of) if own else None for own in mine]
        yield Span(
            f"video {number + 1}" if several else "video",
            shape,
            compact_index(index.flatten(1)),
            select_images(_joined_geometry(there), chosen),
        )


def _frames_in_order(grids: Sequence[TokenGrid], start: int, frames: int) -> list[TokenGrid]:
    """Return the grids of a video by time; each has its own frames, evenly spread."""
    ordered = sorted(grids, key=lambda grid: min(grid.sources))
    if not ordered:
        raise ValueError("a video has no tokens")
    for time, grid in enumerate(ordered):
        # Step t of T shows frames around t / T of the video.
        low, high = (frames * n / len(ordered) + start for n in (time, time + 1))
        if min(grid.sources) < low - 1 or max(grid.sources) > high:
            raise ValueError("the steps of a video are not evenly spread over its frames")
        if grid.shape != ordered[0].shape or not torch.allclose(
            grid.geometry.offset, ordered[0].geometry.offset, atol=0.5
        ):
            raise ValueError("the frames of a video have different grids")
    used = [source for grid in ordered for source in grid.sources]
    if len(set(used)) != len(used):
        raise ValueError("a frame belongs to several steps of a video")
    return ordered


# --- positions between the cells


def mark_spans(
    spans: Sequence[Span], marked: Bool[Tensor, "b n"], ids: Int[Tensor, "b n"]
) -> list[Span]:
    """Return the spans "newline" and "separator" of positions that belong to no cell.

    A newline follows the tokens of a whole row of a grid, and so do others of the same id. Another
    mark between the first and the last cell of a sample is a separator.

    Args:
        spans: The spans with cells.
        marked: The positions that may be marks: special tokens, and image tokens without a cell.
        ids: The token ids.
    """
    inside = span_mask(spans, *marked.shape)
    between = inside.long().cumsum(dim=1).gt(0) & inside.flip(1).long().cumsum(dim=1).flip(1).gt(0)
    # A place after the last position is never marked.
    padded = torch.nn.functional.pad(marked, (0, 1))
    lines = torch.zeros_like(padded)
    for span in spans:
        grids = _index_of(span, len(marked)).reshape(len(marked), -1, *span.shape[-2:])
        for sample, frames in enumerate(grids):
            for grid in frames:
                after = _after_rows(grid)
                if len(after) < 2 or not bool(padded[sample, after[:-1]].all()):
                    continue
                lines[sample, after[:-1]] = True
                last = int(after[-1])
                if padded[sample, last] and ids[sample, last] in ids[sample, after[:-1]]:
                    lines[sample, last] = True
    newlines = lines[:, :-1]
    return marked_span("newline", newlines) + marked_span("separator", marked & between & ~newlines)


def _after_rows(grid: Int[Tensor, "r c"]) -> Int[Tensor, " _"]:
    """Return the position after each row of a grid, if the positions of every row are in order."""
    rows = [row[row >= 0] for row in grid if bool((row >= 0).any())]
    in_order = all(bool((row.diff() == 1).all()) for row in rows)
    return torch.stack([row[-1] + 1 for row in rows]) if rows and in_order else grid.new_zeros(0)


def _index_of(span: Span, samples: int) -> Int[Tensor, "b n"]:
    """Return the positions of a span in each sample."""
    if isinstance(span.index, slice):
        return torch.arange(span.index.stop)[span.index].expand(samples, -1)
    return span.index


def span_mask(spans: Sequence[Span], samples: int, length: int) -> Bool[Tensor, "b n"]:
    """Return which positions belong to one of the spans."""
    taken = torch.zeros(samples, length + 1, dtype=torch.bool)
    for span in spans:
        taken.scatter_(1, _index_of(span, samples).remainder(length + 1), True)
    return taken[:, :length]
