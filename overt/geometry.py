"""Where a position stands in the world: pixels of a cell, characters of a token, box of a region.

The same object aligns a loss target and an overlay, so that the two can never disagree. Points and
sizes are (y, x) and (height, width); boxes are (x0, y0, x1, y1), as in every detection format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PixelGeometry:
    """How each photo of a batch became the model's canvas: `canvas = original * scale + offset`.

    Resizing, cropping, padding and flipping compose into one scale and one offset an axis, so a
    cell of any grid laid over the canvas leads back to a box of the original photo, and a box, a
    mask or a set of fixations on the photo leads to a target on the cells. Tiles are several
    geometries of one photo, each with its own crop. `kept` is the part of the photo, as a box, that
    no crop has cut away; None is the whole photo. What was cut stays away when a border is put in
    its place.
    """

    size: Int[Tensor, "b 2"]
    scale: Float[Tensor, "b 2"]
    offset: Float[Tensor, "b 2"]
    canvas: tuple[int, int]
    kept: Float[Tensor, "b 4"] | None = None

    def __post_init__(self) -> None:
        if min(self.canvas) < 1:
            raise ValueError(f"a canvas of {self.canvas} pixels shows nothing")

    @staticmethod
    def identity(batch: int, size: tuple[int, int]) -> "PixelGeometry":
        """Photos that all have `size` = (height, width) and are fed as they are."""
        sizes = torch.tensor([size] * batch, dtype=torch.long).reshape(batch, 2)
        ones, zeros = torch.ones(batch, 2, dtype=torch.float64), torch.zeros(batch, 2)
        return PixelGeometry(sizes, ones, zeros.double(), size)

    @staticmethod
    def join(parts: Sequence["PixelGeometry"]) -> "PixelGeometry":
        """One batch out of several, when all were brought to the same canvas."""
        canvases = {part.canvas for part in parts}
        if len(canvases) != 1:
            raise ValueError(
                f"only geometries of one canvas join, and these have {sorted(canvases) or 'none'}"
            )
        return PixelGeometry(
            size=torch.cat([part.size for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            offset=torch.cat([part.offset for part in parts]),
            canvas=parts[0].canvas,
            kept=torch.cat([part._window() for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, item: int | Int[Tensor, " n"]) -> "PixelGeometry":
        """The geometry of one sample, or of the samples an index tensor names, in its order."""
        rows = torch.tensor([item]) if isinstance(item, int) else item.to(self.size.device)
        return replace(
            self,
            size=self.size[rows],
            scale=self.scale[rows],
            offset=self.offset[rows],
            kept=None if self.kept is None else self.kept[rows],
        )

    def to(self, device: torch.device | str) -> "PixelGeometry":
        """The same geometry on another device."""
        return replace(
            self,
            size=self.size.to(device),
            scale=self.scale.to(device),
            offset=self.offset.to(device),
            kept=None if self.kept is None else self.kept.to(device),
        )

    # --- how the canvas was made; each step acts on the canvas so far

    def resize(self, size: tuple[int, int]) -> "PixelGeometry":
        """The canvas stretched to `size` = (height, width)."""
        ratio = self.scale.new_tensor([size[0] / self.canvas[0], size[1] / self.canvas[1]])
        return replace(self, scale=self.scale * ratio, offset=self.offset * ratio, canvas=size)

    def crop(self, top: int, left: int, height: int, width: int) -> "PixelGeometry":
        """The window of the canvas that starts at (top, left), empty beyond the canvas."""
        moved = replace(
            self, offset=self.offset - self.offset.new_tensor([top, left]), canvas=(height, width)
        )
        low, high = moved._to_photo(0, 0), moved._to_photo(height, width)
        first, last = self._window().split(2, dim=-1)
        start = torch.minimum(low, high).flip(-1).maximum(first).minimum(last)
        stop = torch.maximum(low, high).flip(-1).maximum(first).minimum(last)
        return replace(moved, kept=torch.cat([start, stop], dim=-1))

    def pad(self, top: int, left: int, bottom: int, right: int) -> "PixelGeometry":
        """The canvas with borders that show nothing of the photo."""
        height, width = self.canvas
        return self.crop(-top, -left, height + top + bottom, width + left + right)

    def flip(self) -> "PixelGeometry":
        """The canvas mirrored left to right."""
        mirror = self.scale.new_tensor([1, -1])
        width = self.offset.new_tensor([0, self.canvas[1]])
        return replace(self, scale=self.scale * mirror, offset=self.offset * mirror + width)

    # --- from the model to the photo

    def cells(self, shape: tuple[int, ...]) -> Float[Tensor, "b k 4"]:
        """The box of the photo under each cell of a grid, in pixels, clipped to the photo.

        The last two numbers of `shape` are rows and columns; numbers before them (frames of a
        video) repeat the grid. A cell that lies wholly in the padding has an empty box.
        """
        y0, x0, y1, x1 = self._cell_edges(shape)
        boxes = torch.stack(
            [
                x0[:, None, :].expand(-1, y0.shape[1], -1),
                y0[:, :, None].expand(-1, -1, x0.shape[1]),
                x1[:, None, :].expand(-1, y0.shape[1], -1),
                y1[:, :, None].expand(-1, -1, x0.shape[1]),
            ],
            dim=-1,
        ).flatten(1, 2)
        return boxes.repeat(1, math.prod(shape[:-2]), 1)

    def paint(
        self, values: Float[Tensor, "b k"], shape: tuple[int, int]
    ) -> list[Float[Tensor, "_ _"]]:
        """The values of a grid drawn smoothly on each photo at its size; 0 where nothing was seen.

        A pixel takes the bilinear mean of the cells around the canvas point it went to; at the
        centre of a cell it has the value of the cell.
        """
        self._one_each(values, "rows of values")
        if values.shape[1] != math.prod(shape):
            raise ValueError(f"{values.shape[1]} values do not fill a grid of shape {shape}")
        kept = self._window()
        painted = []
        for row, values_of_one in enumerate(values):
            height, width = (int(n) for n in self.size[row])
            y = self._to_canvas(row, 0, height)
            x = self._to_canvas(row, 1, width)
            at = torch.stack(
                [
                    (2 * x / self.canvas[1] - 1)[None, :].expand(height, width),
                    (2 * y / self.canvas[0] - 1)[:, None].expand(height, width),
                ],
                dim=-1,
            )
            picture = torch.nn.functional.grid_sample(
                values_of_one.double().reshape(1, 1, *shape),
                at[None].to(values.device),
                mode="bilinear",
                padding_mode="border",
                align_corners=False,
            )[0, 0]
            x0, y0, x1, y1 = kept[row]
            across = _within(torch.arange(width, device=kept.device) + 0.5, x0, x1)
            down = _within(torch.arange(height, device=kept.device) + 0.5, y0, y1)
            seen = ((at.abs() <= 1).all(dim=-1) & down[:, None] & across[None, :]).to(values.device)
            painted.append((picture * seen).to(values.dtype))
        return painted

    # --- from the photo to the model

    def cover_boxes(
        self, boxes: Float[Tensor, "b m 4"], shape: tuple[int, ...]
    ) -> Float[Tensor, "b m k"]:
        """The share of each cell that each box covers, from 0 to 1; boxes are in photo pixels."""
        self._one_each(boxes, "rows of boxes")
        if boxes.ndim != 3 or boxes.shape[2] != 4:
            raise ValueError(
                f"boxes are (b, m, 4), x0 y0 x1 y1 of m things, not {tuple(boxes.shape)}"
            )
        cells = self.cells(shape)[:, None]
        boxes = boxes.to(cells.dtype)[:, :, None]
        width = torch.minimum(cells[..., 2], boxes[..., 2]) - torch.maximum(
            cells[..., 0], boxes[..., 0]
        )
        height = torch.minimum(cells[..., 3], boxes[..., 3]) - torch.maximum(
            cells[..., 1], boxes[..., 1]
        )
        area = self._cell_area(shape)[:, None, None]
        return (width.clamp_min(0) * height.clamp_min(0) / area).float()

    def cover_masks(
        self, masks: Sequence[Bool[Tensor, "..."]], shape: tuple[int, ...]
    ) -> Float[Tensor, "b k"]:
        """The share of each cell that a photo mask covers, exact where a cell cuts a pixel."""
        self._one_each(masks, "masks")
        cells = self.cells(shape)
        area = self._cell_area(shape)
        covered = cells.new_zeros(cells.shape[:2])
        for row, mask in enumerate(masks):
            expected = tuple(int(n) for n in self.size[row])
            if tuple(mask.shape) != expected:
                raise ValueError(
                    f"mask {row} has shape {tuple(mask.shape)}, but its photo is {expected}"
                )
            summed = mask.to(cells.device).double().cumsum(0).cumsum(1)
            integral = torch.nn.functional.pad(summed, (1, 0, 1, 0))
            x0, y0, x1, y1 = cells[row].unbind(-1)
            inside = (
                _at(integral, y1, x1)
                - _at(integral, y0, x1)
                - _at(integral, y1, x0)
                + _at(integral, y0, x0)
            )
            covered[row] = inside / area[row]
        return covered.clamp(0, 1).float()

    def density(
        self,
        points: Sequence[Float[Tensor, "_ 2"]],
        shape: tuple[int, ...],
        bandwidth: float,
    ) -> Float[Tensor, "b k"]:
        """How much of the fixations at `points` = (y, x) falls into each cell.

        Each point is a Gaussian of standard deviation `bandwidth` photo pixels, integrated over
        the cell in closed form; with `bandwidth` 0 points are counted.
        """
        self._one_each(points, "sets of points")
        if bandwidth < 0:
            raise ValueError(f"a bandwidth of {bandwidth} pixels; it cannot be below zero")
        y0, x0, y1, x1 = self._cell_edges(shape)
        found = y0.new_zeros(len(self), shape[-2] * shape[-1])
        for row, at in enumerate(points):
            at = at.to(y0)
            in_y = _between(at[:, :1], y0[row], y1[row], bandwidth)
            in_x = _between(at[:, 1:], x0[row], x1[row], bandwidth)
            found[row] = torch.einsum("ny,nx->yx", in_y, in_x).flatten()
        return found.float().repeat(1, math.prod(shape[:-2]))

    # --- helpers

    def _cell_edges(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, bottom and right photo coordinates of the rows and columns of cells."""
        lines = []
        kept = self._window()
        for axis in (0, 1):
            count = shape[-2 + axis]
            steps = torch.arange(count + 1, dtype=torch.float64, device=self.scale.device)
            canvas = steps * (self.canvas[axis] / count)
            photo = (canvas[None] - self.offset[:, axis, None]) / self.scale[:, axis, None]
            first, last = kept[:, 1 - axis, None], kept[:, 3 - axis, None]
            photo = photo.maximum(first).minimum(last)
            low = torch.minimum(photo[:, :-1], photo[:, 1:])  # a flip swaps the two edges
            high = torch.maximum(photo[:, :-1], photo[:, 1:])
            lines.append((low, high))
        (y0, y1), (x0, x1) = lines
        return y0, x0, y1, x1

    def _cell_area(self, shape: tuple[int, ...]) -> Float[Tensor, " b"]:
        """Photo pixels under a whole cell, its padding included: coverage never exceeds 1."""
        on_canvas = self.canvas[0] / shape[-2] * self.canvas[1] / shape[-1]
        return on_canvas / self.scale.abs().prod(dim=-1)

    def _window(self) -> Float[Tensor, "b 4"]:
        """The part of each photo that no crop has cut away."""
        if self.kept is not None:
            return self.kept
        size = self.size.to(self.scale.dtype).flip(-1)
        return torch.cat([torch.zeros_like(size), size], dim=-1)

    def _to_photo(self, y: int, x: int) -> Float[Tensor, "b 2"]:
        """The photo coordinates of a canvas point."""
        return (self.scale.new_tensor([y, x]) - self.offset) / self.scale

    def _one_each(self, given: Tensor | Sequence[Tensor], what: str) -> None:
        if len(given) != len(self):
            raise ValueError(f"{len(given)} {what} for {len(self)} photos")

    def _to_canvas(self, row: int, axis: int, count: int) -> Float[Tensor, " n"]:
        """The canvas coordinate of the centre of each photo pixel along one axis."""
        centres = torch.arange(count, dtype=torch.float64, device=self.scale.device) + 0.5
        return centres * self.scale[row, axis] + self.offset[row, axis]


def _at(integral: Float[Tensor, "y x"], y: Float[Tensor, " k"], x: Float[Tensor, " k"]) -> Tensor:
    """The integral image read between its grid points, which is exact for pixels of one value."""
    top, left = y.floor().long(), x.floor().long()
    bottom = (top + 1).clamp_max(integral.shape[0] - 1)
    right = (left + 1).clamp_max(integral.shape[1] - 1)
    down, across = y - top, x - left
    upper = integral[top, left] * (1 - across) + integral[top, right] * across
    lower = integral[bottom, left] * (1 - across) + integral[bottom, right] * across
    return upper * (1 - down) + lower * down


def _within(at: Float[Tensor, " n"], low: Tensor, high: Tensor) -> Bool[Tensor, " n"]:
    return (at >= low) & (at <= high)


def _between(
    at: Float[Tensor, "n 1"], low: Float[Tensor, " k"], high: Float[Tensor, " k"], bandwidth: float
) -> Float[Tensor, "n k"]:
    """The mass of a Gaussian at each point that lies between two lines."""
    if bandwidth == 0:
        return ((at >= low) & (at < high)).double()
    reach = bandwidth * math.sqrt(2)
    return 0.5 * (torch.erf((high - at) / reach) - torch.erf((low - at) / reach))


@dataclass(frozen=True, eq=False)
class TextGeometry:
    """The characters of the original text each token covers; (-1, -1) where there is no token."""

    texts: tuple[str, ...]
    spans: Int[Tensor, "b n 2"]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, item: int | Int[Tensor, " n"]) -> "TextGeometry":
        """The geometry of one text, or of the texts an index tensor names, in its order."""
        rows = [item] if isinstance(item, int) else item.tolist()
        return TextGeometry(
            tuple(self.texts[row] for row in rows),
            self.spans[torch.tensor(rows, dtype=torch.long, device=self.spans.device)],
        )

    def to(self, device: torch.device | str) -> "TextGeometry":
        """The same geometry on another device."""
        return replace(self, spans=self.spans.to(device))

    def tokens(self, row: int) -> list[str]:
        """The piece of text behind each token of one sample; the empty string where there is none.

        >>> spans = torch.tensor([[[0, 1], [2, 5], [6, 10], [-1, -1]]])
        >>> TextGeometry(("a red ring",), spans).tokens(0)
        ['a', 'red', 'ring', '']
        """
        return [self.texts[row][max(a, 0) : max(b, 0)] for a, b in self.spans[row].tolist()]

    def cover(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> Float[Tensor, "b n"]:
        """The share of each token's characters inside the marked ranges of its text."""
        if len(ranges) != len(self):
            raise ValueError(f"{len(ranges)} lists of ranges for {len(self)} texts")
        covered = torch.zeros(self.spans.shape[:2], device=self.spans.device)
        for row, (text, spans, marked) in enumerate(
            zip(self.texts, self.spans, ranges, strict=True)
        ):
            flags = torch.zeros(len(text) + 1, dtype=torch.float64)
            for start, end in marked:
                flags[max(start, 0) : max(end, 0)] = 1
            total = torch.nn.functional.pad(flags.cumsum(0), (1, 0)).to(spans.device)
            low, high = spans.clamp_min(0).unbind(-1)
            covered[row] = (total[high] - total[low]) / (high - low).clamp_min(1)
        return covered


@dataclass(frozen=True, eq=False)
class RegionGeometry:
    """The box of each region in pixels of the original photo; absent regions have empty boxes."""

    boxes: Float[Tensor, "b m 4"]

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, item: int | Int[Tensor, " n"]) -> "RegionGeometry":
        """The regions of one sample, or of the samples an index tensor names, in its order."""
        rows = torch.tensor([item]) if isinstance(item, int) else item
        return RegionGeometry(self.boxes[rows.to(self.boxes.device)])

    def to(self, device: torch.device | str) -> "RegionGeometry":
        """The same geometry on another device."""
        return RegionGeometry(self.boxes.to(device))

    def overlap(self, boxes: Float[Tensor, "b n 4"]) -> Float[Tensor, "b n m"]:
        """Intersection over union of each of `boxes` with each region; 0 for empty boxes."""
        ours, theirs = self.boxes[:, None].double(), boxes[:, :, None].double()
        low = torch.maximum(ours[..., :2], theirs[..., :2])
        high = torch.minimum(ours[..., 2:], theirs[..., 2:])
        both = (high - low).clamp_min(0).prod(dim=-1)
        either = _area(ours) + _area(theirs) - both
        return torch.where(either > 0, both / either.clamp_min(1e-12), 0).float()


def _area(boxes: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b"]:
    return (boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(dim=-1)


Geometry = PixelGeometry | TextGeometry | RegionGeometry
