"""Geometry of positions: pixels of a grid cell, characters of a token, box of a region.

Loss targets and overlays use the same geometry, so they are always aligned. Points and sizes are
(y, x) and (height, width); boxes are (x0, y0, x1, y1), as in detection formats.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]


@dataclass(frozen=True, eq=False)
class PixelGeometry:
    """The mapping of each image of a batch to the canvas: `canvas = original * scale + offset`.

    Resizing, cropping, padding and flipping compose into one scale and one offset per axis, so a
    grid cell on the canvas maps back to a box of the original image, and boxes, masks or fixations
    on the image map to targets on the cells. Tiles are several geometries of one image, each with
    its own crop.

    Args:
        size: Height and width of the original images.
        scale: The scale of each axis.
        offset: The offset of each axis.
        canvas: Height and width of the canvas.
        kept: The part of the image, as a box, that no crop has removed; None is the whole image. A
            removed part stays removed if a border is added in its place.

    Raises:
        ValueError: The canvas is empty.

    Example:
        >>> geometry = PixelGeometry.identity(1, (100, 200)).resize((224, 224))
        >>> geometry.cells((2, 2))[0, 3].round()
        tensor([100.,  50., 200., 100.], dtype=torch.float64)
    """

    size: Int[Tensor, "b 2"]
    scale: Float[Tensor, "b 2"]
    offset: Float[Tensor, "b 2"]
    canvas: tuple[int, int]
    kept: Float[Tensor, "b 4"] | None = None

    def __post_init__(self) -> None:
        if min(self.canvas) < 1:
            raise ValueError(f"canvas must be at least 1 x 1 pixels, got {self.canvas}")

    @staticmethod
    def identity(batch: int, size: tuple[int, int]) -> "PixelGeometry":
        """Return the geometry of images that are used unchanged.

        Args:
            batch: The number of images.
            size: Height and width of all images.

        Returns:
            The geometry.

        Raises:
            TypeError: The size is not a pair.
        """
        if not isinstance(size, tuple | list | torch.Size) or len(size) != 2:
            raise TypeError(f"size must be (height, width) of the images, got {size!r}")
        sizes = torch.tensor([size] * batch, dtype=torch.long).reshape(batch, 2)
        # float64: coordinates are composed over several steps, and cell edges are compared with
        # pixels
        ones, zeros = torch.ones(batch, 2, dtype=torch.float64), torch.zeros(batch, 2)
        return PixelGeometry(sizes, ones, zeros.double(), size)

    @staticmethod
    def join(parts: Sequence["PixelGeometry"]) -> "PixelGeometry":
        """Concatenate geometries with the same canvas.

        Args:
            parts: The geometries.

        Returns:
            The geometry of all images.

        Raises:
            ValueError: The canvases differ, or there are no parts.
        """
        canvases = {part.canvas for part in parts}
        if len(canvases) != 1:
            raise ValueError(
                f"geometries need the same canvas to be joined, got {sorted(canvases) or 'none'}"
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
        """Return the geometry of one sample, or of the samples in an index tensor."""
        rows = torch.tensor([item]) if isinstance(item, int) else item.to(self.size.device)
        return replace(
            self,
            size=self.size[rows],
            scale=self.scale[rows],
            offset=self.offset[rows],
            kept=None if self.kept is None else self.kept[rows],
        )

    def to(self, device: torch.device | str) -> "PixelGeometry":
        """Return the geometry on another device."""
        return replace(
            self,
            size=self.size.to(device),
            scale=self.scale.to(device),
            offset=self.offset.to(device),
            kept=None if self.kept is None else self.kept.to(device),
        )

    # --- preprocessing steps; each applies to the current canvas

    def resize(self, size: tuple[int, int]) -> "PixelGeometry":
        """Return the geometry after resizing the canvas.

        Args:
            size: The new height and width.

        Returns:
            The new geometry.
        """
        # the ratio of the whole sides, not of one pixel: rounded sizes stretch a little
        ratio = self.scale.new_tensor([size[0] / self.canvas[0], size[1] / self.canvas[1]])
        return replace(self, scale=self.scale * ratio, offset=self.offset * ratio, canvas=size)

    def crop(self, top: int, left: int, height: int, width: int) -> "PixelGeometry":
        """Return the geometry after cropping the canvas; beyond the canvas the crop is empty.

        Args:
            top: The first row.
            left: The first column.
            height: The height of the crop.
            width: The width of the crop.

        Returns:
            The new geometry.
        """
        moved = replace(
            self, offset=self.offset - self.offset.new_tensor([top, left]), canvas=(height, width)
        )
        # what is cropped away stays away: a later pad must not bring it back
        low, high = moved._to_photo(0, 0), moved._to_photo(height, width)
        first, last = self._window().split(2, dim=-1)
        # points are (y, x) and boxes (x, y): flip; minimum and maximum, because a mirror swaps the
        # edges
        start = torch.minimum(low, high).flip(-1).maximum(first).minimum(last)
        stop = torch.maximum(low, high).flip(-1).maximum(first).minimum(last)
        return replace(moved, kept=torch.cat([start, stop], dim=-1))

    def pad(self, top: int, left: int, bottom: int, right: int) -> "PixelGeometry":
        """Return the geometry after padding the canvas with empty borders.

        Args:
            top: Rows above.
            left: Columns to the left.
            bottom: Rows below.
            right: Columns to the right.

        Returns:
            The new geometry.
        """
        height, width = self.canvas
        # padding is a crop that is larger than the canvas; `kept` clips it to the image
        return self.crop(-top, -left, height + top + bottom, width + left + right)

    def flip(self) -> "PixelGeometry":
        """Return the geometry after a horizontal flip."""
        # x' = width - x: a negative scale
        mirror = self.scale.new_tensor([1, -1])
        width = self.offset.new_tensor([0, self.canvas[1]])
        return replace(self, scale=self.scale * mirror, offset=self.offset * mirror + width)

    # --- from the model to the image

    def cells(self, shape: tuple[int, ...]) -> Float[Tensor, "b k 4"]:
        """Return the image box under each cell of a grid, in pixels, clipped to the image.

        A cell that is entirely padding has an empty box.

        Args:
            shape: Rows and columns last; numbers before them (video frames) repeat the grid.

        Returns:
            The boxes.
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
        # a video grid has leading axes: every frame has the same cells
        return boxes.repeat(1, math.prod(shape[:-2]), 1)

    def paint(
        self, values: Float[Tensor, "b k"], shape: tuple[int, int]
    ) -> list[Float[Tensor, "_ _"]]:
        """Draw the values of a grid on each image by bilinear interpolation; 0 where cropped.

        At the centre of a cell a pixel has the value of the cell.

        Args:
            values: One row of values per image.
            shape: Rows and columns of the grid.

        Returns:
            One array per image, of its size.

        Raises:
            ValueError: The number of rows or values is wrong.
        """
        self._check_count(values, "rows of values")
        if values.shape[1] != math.prod(shape):
            raise ValueError(
                f"a grid of shape {shape} needs {math.prod(shape)} values, got {values.shape[1]}"
            )
        kept = self._window()
        painted = []
        for row, row_values in enumerate(values):
            height, width = (int(n) for n in self.size[row])
            y = self._to_canvas(row, 0, height)
            x = self._to_canvas(row, 1, width)
            # grid_sample takes (x, y) from -1 to 1 over the canvas
            at = torch.stack(
                [
                    (2 * x / self.canvas[1] - 1)[None, :].expand(height, width),
                    (2 * y / self.canvas[0] - 1)[:, None].expand(height, width),
                ],
                dim=-1,
            )
            picture = torch.nn.functional.grid_sample(
                row_values.double().reshape(1, 1, *shape),
                at[None].to(values.device),
                mode="bilinear",
                padding_mode="border",
                align_corners=False,
            )[0, 0]
            # pixels that a crop removed were not seen by the model
            x0, y0, x1, y1 = kept[row]
            across = _within(torch.arange(width, device=kept.device) + 0.5, x0, x1)
            down = _within(torch.arange(height, device=kept.device) + 0.5, y0, y1)
            seen = ((at.abs() <= 1).all(dim=-1) & down[:, None] & across[None, :]).to(values.device)
            painted.append((picture * seen).to(values.dtype))
        return painted

    # --- from one view of the images to another

    def move_cells(
        self, values: Float[Tensor, "b k"], shape: tuple[int, int], view: "PixelGeometry"
    ) -> Float[Tensor, "b k"]:
        """Move the values of a grid to the same grid on another view of the images.

        Each cell gives every cell of the other view the share of its value that is the share of its
        area: the sum over a region of the image stays. What the other view does not show is lost.
        This does not synchronize the GPU.

        Args:
            values: One row of values per image, such as weights of attention.
            shape: Rows and columns of the grid.
            view: The geometry of the same images after a crop, a shift, a flip or a resize.

        Returns:
            The values on the grid of the view.

        Raises:
            ValueError: The number of rows or values is wrong.

        Example:
            >>> photo = PixelGeometry.identity(1, (4, 4))
            >>> photo.move_cells(torch.tensor([[1.0, 2.0]]), (1, 2), photo.flip())
            tensor([[2., 1.]])
        """
        self._check_count(values, "rows of values")
        view._check_count(values, "rows of values")
        if values.shape[1] != math.prod(shape):
            raise ValueError(
                f"a grid of shape {shape} needs {math.prod(shape)} values, got {values.shape[1]}"
            )
        y0, x0, y1, x1 = self._cell_edges(shape)
        top, left, bottom, right = view._cell_edges(shape)
        # an overlap of boxes is the product of one factor per row and one per column
        down = _shared(y0, y1, top, bottom)
        across = _shared(x0, x1, left, right)
        grid = values.to(down.dtype).reshape(-1, *shape)
        return torch.einsum("byx,byv,bxu->bvu", grid, down, across).flatten(1).to(values.dtype)

    # --- from the image to the model

    def cover_boxes(
        self,
        boxes: Float[Tensor, "b m 4"],
        shape: tuple[int, ...],
        format: BoxFormat = "xyxy",
    ) -> Float[Tensor, "b m k"]:
        """Compute the share of each cell that each box covers, from 0 to 1.

        A warning names the first sample whose boxes were all cropped away: they are valid, but its
        target is empty, and the sample does not count in any loss or metric. Another warning says
        that all boxes lie in the first pixel, as do shares of the width and height.

        Args:
            boxes: Boxes in pixels of the image; (0, 0, 0, 0) is an absent object.
            shape: Rows and columns of the grid, last.
            format: "xyxy" (x0, y0, x1, y1), "xywh" (x0, y0, width, height) as in COCO, or "cxcywh"
                (center, width, height), as in `torchvision.ops.box_convert`.

        Returns:
            The covered shares.

        Raises:
            ValueError: A box is inverted, empty or outside its image: its target would be empty,
                and the sample would not count in any metric. Or the format is unknown.

        Example:
            >>> photo = PixelGeometry.identity(1, (4, 4))
            >>> photo.cover_boxes(torch.tensor([[[2.0, 0.0, 2.0, 4.0]]]), (1, 2), format="xywh")
            tensor([[[0., 1.]]])
        """
        if format != "xyxy":
            boxes = _corners(boxes, format)
        self._check_boxes(boxes)
        covered = self.cover_any_boxes(boxes, shape)
        self._warn_if_cropped(boxes, covered)
        self._warn_if_shares(boxes)
        return covered

    def cover_any_boxes(
        self, boxes: Float[Tensor, "b m 4"], shape: tuple[int, ...]
    ) -> Float[Tensor, "b m k"]:
        """Compute `cover_boxes` without checks, for boxes of a detector and inside a model.

        A box that is inverted or outside the image covers nothing. This does not synchronize the
        GPU.

        Args:
            boxes: (x0, y0, x1, y1) in pixels of the image.
            shape: Rows and columns of the grid, last.

        Returns:
            The covered shares.

        Raises:
            ValueError: The boxes have a wrong shape.
        """
        self._check_count(boxes, "rows of boxes")
        if boxes.ndim != 3 or boxes.shape[2] != 4:
            raise ValueError(
                f"boxes must have the shape (b, m, 4), x0 y0 x1 y1, got {tuple(boxes.shape)}"
            )
        # (b, 1, k, 4) with boxes (b, m, 1, 4): the overlap of each box with each cell
        cells = self.cells(shape)[:, None]
        boxes = boxes.to(cells.dtype)[:, :, None]
        # negative where they do not overlap: clamped below
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
        """Compute the share of each cell that a mask covers, exact for fractional pixels.

        Args:
            masks: One mask per image, of its size.
            shape: Rows and columns of the grid, last.

        Returns:
            The covered shares.

        Raises:
            ValueError: A mask has another size than its image.
        """
        self._check_count(masks, "masks")
        cells = self.cells(shape)
        area = self._cell_area(shape)
        covered = cells.new_zeros(cells.shape[:2])
        for row, mask in enumerate(masks):
            expected = tuple(int(n) for n in self.size[row])
            if tuple(mask.shape) != expected:
                raise ValueError(
                    f"mask {row} has shape {tuple(mask.shape)}, its image has {expected}"
                )
            # a summed-area table: the sum over any box from its four corners
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
        """Compute the density of fixations in each cell.

        Each point is a Gaussian, integrated over the cell in closed form.

        Args:
            points: The fixations (y, x) of each image.
            shape: Rows and columns of the grid, last.
            bandwidth: The standard deviation in pixels of the image; 0 counts points.

        Returns:
            The density.

        Raises:
            ValueError: The bandwidth is negative.
        """
        self._check_count(points, "sets of points")
        if bandwidth < 0:
            raise ValueError(f"bandwidth must not be negative, got {bandwidth}")
        y0, x0, y1, x1 = self._cell_edges(shape)
        found = y0.new_zeros(len(self), shape[-2] * shape[-1])
        for row, at in enumerate(points):
            at = at.to(y0)
            # an isotropic Gaussian factorises: one factor per row of cells and one per column
            in_y = _between(at[:, :1], y0[row], y1[row], bandwidth)
            in_x = _between(at[:, 1:], x0[row], x1[row], bandwidth)
            found[row] = torch.einsum("ny,nx->yx", in_y, in_x).flatten()
        return found.float().repeat(1, math.prod(shape[:-2]))

    # --- helpers

    def _cell_edges(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return top, left, bottom and right image coordinates of the rows and columns of cells."""
        lines = []
        kept = self._window()
        for axis in (0, 1):
            count = shape[-2 + axis]
            steps = torch.arange(count + 1, dtype=torch.float64, device=self.scale.device)
            # count + 1 lines bound `count` cells; back to the image by inverting canvas = image *
            # scale + offset
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
        """Return the area of a cell in image pixels, with its padding: coverage is at most 1."""
        # not the clipped area: a cell that is half padding cannot be covered fully
        on_canvas = self.canvas[0] / shape[-2] * self.canvas[1] / shape[-1]
        return on_canvas / self.scale.abs().prod(dim=-1)

    def _window(self) -> Float[Tensor, "b 4"]:
        """Return the part of each image that no crop has removed."""
        if self.kept is not None:
            return self.kept
        size = self.size.to(self.scale.dtype).flip(-1)
        return torch.cat([torch.zeros_like(size), size], dim=-1)

    def _to_photo(self, y: int, x: int) -> Float[Tensor, "b 2"]:
        """Return the image coordinates of a canvas point."""
        return (self.scale.new_tensor([y, x]) - self.offset) / self.scale

    def _check_boxes(self, boxes: Float[Tensor, "b m 4"]) -> None:
        if not isinstance(boxes, Tensor):
            raise TypeError(
                f"boxes must be one tensor (b, m, 4), got {type(boxes).__name__}: for different "
                "numbers of boxes use torch.nn.utils.rnn.pad_sequence(boxes, batch_first=True); a "
                "box of zeros covers nothing"
            )
        if len(boxes) != len(self) or boxes.ndim != 3 or boxes.shape[2] != 4:
            return  # a wrong shape is reported elsewhere
        size = self.size.to(boxes.device).flip(-1)[:, None]
        low, high = boxes[..., :2], boxes[..., 2:]
        # a box of zeros is padding of the batch and is allowed
        there = boxes.isfinite().all(dim=-1) & (low < high).all(dim=-1)
        there = there & (high > 0).all(dim=-1) & (low < size).all(dim=-1)
        wrong = (~there & (boxes != 0).any(dim=-1)).nonzero()
        if len(wrong):
            row, at = wrong[0].tolist()
            height, width = self.size[row].tolist()
            raise ValueError(
                f"box {at} of sample {row} is {_numbers(boxes[row, at])} in an image of {width} x "
                f"{height} pixels: boxes are (x0, y0, x1, y1) with x0 < x1 and y0 < y1 and overlap "
                'their image; for (x, y, width, height) pass format="xywh"'
            )

    def _warn_if_cropped(
        self, boxes: Float[Tensor, "b m 4"], covered: Float[Tensor, "b m k"]
    ) -> None:
        """Warn of the samples whose boxes cover no cell, because they were cropped away."""
        empty = (boxes != 0).any(dim=-1).any(dim=-1) & ~(covered > 0).flatten(1).any(dim=-1)
        rows = empty.nonzero()[:, 0].tolist()
        if rows:
            warnings.warn(
                f"the boxes of {len(rows)} of {len(boxes)} samples were cropped away, first those "
                f"of sample {rows[0]}: their targets are empty and do not count in losses and "
                "metrics",
                stacklevel=3,
            )

    def _warn_if_shares(self, boxes: Float[Tensor, "b m 4"]) -> None:
        """Warn if boxes seem to be shares of the image instead of pixels."""
        if boxes.numel() and 0 < float(boxes.max()) <= 1 and int(self.size.min()) > 16:
            warnings.warn(
                "all boxes lie in the first pixel of their images: boxes are in pixels; multiply "
                "shares of the image by its width and height",
                stacklevel=3,
            )

    def _check_count(self, given: Tensor | Sequence[Tensor], what: str) -> None:
        if len(given) != len(self):
            raise ValueError(f"expected {len(self)} {what}, one per image, got {len(given)}")

    def _to_canvas(self, row: int, axis: int, count: int) -> Float[Tensor, " n"]:
        """Return the canvas coordinate of the centre of each image pixel along one axis."""
        # the centre of pixel i is at i + 0.5
        centres = torch.arange(count, dtype=torch.float64, device=self.scale.device) + 0.5
        return centres * self.scale[row, axis] + self.offset[row, axis]


def resize_by_area(
    pictures: Float[Tensor, "b c y x"], shape: tuple[int, int]
) -> Float[Tensor, "b c v u"]:
    """Resize pictures by area: each new cell is the mean of what it covers, at any ratio.

    A cell that is covered in part counts by its covered share, so the mean of a picture is kept.
    Adaptive pooling and interpolation with `mode="area"` count it as whole, and agree with this
    only where one side is a multiple of the other.

    Args:
        pictures: The pictures.
        shape: The new height and width, larger or smaller.

    Returns:
        The resized pictures.

    Example:
        >>> resize_by_area(torch.tensor([[[[0.0, 0.0, 6.0]]]]), (1, 2))  # the middle is in both
        tensor([[[[0., 4.]]]])
    """
    now = pictures.shape[-2:]
    if all(max(pair) % min(pair) == 0 for pair in zip(now, shape, strict=True)):
        return torch.nn.functional.adaptive_avg_pool2d(pictures, shape)
    return _area_means(_area_means(pictures, -2, shape[0]), -1, shape[1])


def _area_means(values: Tensor, dim: int, length: int) -> Tensor:
    """Average the cells along one axis by area."""
    now = values.shape[dim]
    precise = values.to(torch.promote_types(values.dtype, torch.float32)).movedim(dim, -1)
    found = []
    # a sum per new cell instead of a matrix product, in which zero times infinity reaches all cells
    for new in range(length):
        first, last = new * now // length, -(-(new + 1) * now // length)
        # borders are whole numbers in units of 1 / (now * length) of the axis
        low = torch.arange(first, last, device=values.device) * length
        covered = (low + length).clamp_max((new + 1) * now) - low.clamp_min(new * now)
        found.append((precise[..., first:last] * (covered / now).to(precise)).sum(dim=-1))
    return torch.stack(found, dim=-1).movedim(-1, dim).to(values.dtype)


def _corners(boxes: Float[Tensor, "b m 4"], format: str) -> Float[Tensor, "b m 4"]:
    """Convert boxes of another format to (x0, y0, x1, y1)."""
    if format not in ("xywh", "cxcywh"):
        raise ValueError(f"format must be 'xyxy', 'xywh' or 'cxcywh', got {format!r}")
    first, size = boxes[..., :2], boxes[..., 2:]
    low = first if format == "xywh" else first - size / 2
    return torch.cat([low, low + size], dim=-1)


def _at(integral: Float[Tensor, "y x"], y: Float[Tensor, " k"], x: Float[Tensor, " k"]) -> Tensor:
    """Interpolate the integral image, which is exact for constant pixels."""
    # the table has one more row and column than the image, so an edge at `height` is valid
    top, left = y.floor().long(), x.floor().long()
    bottom = (top + 1).clamp_max(integral.shape[0] - 1)
    right = (left + 1).clamp_max(integral.shape[1] - 1)
    down, across = y - top, x - left
    upper = integral[top, left] * (1 - across) + integral[top, right] * across
    lower = integral[bottom, left] * (1 - across) + integral[bottom, right] * across
    return upper * (1 - down) + lower * down


def _within(at: Float[Tensor, " n"], low: Tensor, high: Tensor) -> Bool[Tensor, " n"]:
    return (at >= low) & (at <= high)


def _shared(
    low: Float[Tensor, "b n"],
    high: Float[Tensor, "b n"],
    start: Float[Tensor, "b n"],
    stop: Float[Tensor, "b n"],
) -> Float[Tensor, "b n n"]:
    """Return the share of each interval (low, high) that each interval (start, stop) covers."""
    ends = torch.minimum(high[:, :, None], stop[:, None])
    begins = torch.maximum(low[:, :, None], start[:, None])
    length = (high - low)[:, :, None]
    # an interval outside of the image is empty and has nothing to give
    return (ends - begins).clamp_min(0) / length.where(length > 0, 1)


def _between(
    at: Float[Tensor, "n 1"], low: Float[Tensor, " k"], high: Float[Tensor, " k"], bandwidth: float
) -> Float[Tensor, "n k"]:
    """Return the mass of a Gaussian at each point between two lines."""
    if bandwidth == 0:
        # half open: a point on the line between two cells counts once
        return ((at >= low) & (at < high)).double()
    # difference of the Gaussian's distribution function at both lines
    reach = bandwidth * math.sqrt(2)
    return 0.5 * (torch.erf((high - at) / reach) - torch.erf((low - at) / reach))


@dataclass(frozen=True, eq=False)
class TextGeometry:
    """The characters of each token in the original text.

    Args:
        texts: The original texts.
        spans: The first character of each token and the one after its last; (-1, -1) for no token.

    Example:
        >>> spans = torch.tensor([[[0, 1], [2, 5], [6, 10], [-1, -1]]])
        >>> TextGeometry(("a red ring",), spans).tokens(0)
        ['a', 'red', 'ring', '']
    """

    texts: tuple[str, ...]
    spans: Int[Tensor, "b n 2"]

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise TypeError(f"texts must be a tuple with one text per sample: ({self.texts!r},)")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, item: int | Int[Tensor, " n"]) -> "TextGeometry":
        """Return the geometry of one text, or of the texts in an index tensor."""
        rows = [item] if isinstance(item, int) else item.tolist()
        return TextGeometry(
            tuple(self.texts[row] for row in rows),
            self.spans[torch.tensor(rows, dtype=torch.long, device=self.spans.device)],
        )

    def to(self, device: torch.device | str) -> "TextGeometry":
        """Return the geometry on another device."""
        return replace(self, spans=self.spans.to(device))

    def tokens(self, row: int) -> list[str]:
        """Return the text of each token of one sample; the empty string for no token.

        Args:
            row: The index of the sample.

        Returns:
            The tokens.
        """
        return [self.texts[row][max(a, 0) : max(b, 0)] for a, b in self.spans[row].tolist()]

    def cover(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> Float[Tensor, "b n"]:
        """Compute the share of each token's characters inside marked ranges.

        Args:
            ranges: The marked ranges (start, end) of each text.

        Returns:
            The covered shares.

        Raises:
            TypeError: A text has a range in place of a list of ranges.
            ValueError: The number of lists is not that of the texts.

        Example:
            >>> spans = torch.tensor([[[0, 1], [2, 5], [6, 10]]])
            >>> TextGeometry(("a red ring",), spans).cover([[(2, 5)]])  # one list per text
            tensor([[0., 1., 0.]])
        """
        for marked in ranges:
            if any(isinstance(one, int) for one in marked):
                raise TypeError(
                    f"expected a list of ranges (start, end) for each text, got {marked!r}: write "
                    f"[{tuple(marked)!r}]"
                )
        if len(ranges) != len(self):
            raise ValueError(
                f"expected {len(self)} lists of ranges, one per text, got {len(ranges)}"
            )
        covered = torch.zeros(self.spans.shape[:2], device=self.spans.device)
        for row, (text, spans, marked) in enumerate(
            zip(self.texts, self.spans, ranges, strict=True)
        ):
            flags = torch.zeros(len(text) + 1, dtype=torch.float64)
            for start, end in marked:
                flags[max(start, 0) : max(end, 0)] = 1
            # prefix sums: marked characters in [low, high) are total[high] - total[low]
            total = torch.nn.functional.pad(flags.cumsum(0), (1, 0)).to(spans.device)
            low, high = spans.clamp_min(0).unbind(-1)
            covered[row] = (total[high] - total[low]) / (high - low).clamp_min(1)
        return covered


@dataclass(frozen=True, eq=False)
class RegionGeometry:
    """The box of each region in pixels of the original image.

    Args:
        boxes: The boxes (x0, y0, x1, y1); absent regions have empty boxes.

    Example:
        >>> boxes = torch.tensor([[[0.0, 0.0, 10.0, 10.0], [10.0, 0.0, 30.0, 10.0]]])
        >>> regions = RegionGeometry(boxes)
        >>> regions.overlap(torch.tensor([[[0.0, 0.0, 20.0, 10.0]]])).round(decimals=2)
        tensor([[[0.5000, 0.3300]]])
    """

    boxes: Float[Tensor, "b m 4"]

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, item: int | Int[Tensor, " n"]) -> "RegionGeometry":
        """Return the regions of one sample, or of the samples in an index tensor."""
        rows = torch.tensor([item]) if isinstance(item, int) else item
        return RegionGeometry(self.boxes[rows.to(self.boxes.device)])

    def to(self, device: torch.device | str) -> "RegionGeometry":
        """Return the geometry on another device."""
        return RegionGeometry(self.boxes.to(device))

    def overlap(self, boxes: Float[Tensor, "b n 4"]) -> Float[Tensor, "b n m"]:
        """Compute the intersection over union of boxes with each region; 0 for empty boxes.

        Args:
            boxes: The boxes to compare.

        Returns:
            One number per box and region.
        """
        # float64: areas in pixels have seven digits and more, and differences of them lose
        # float32's
        ours, theirs = self.boxes[:, None].double(), boxes[:, :, None].double()
        low = torch.maximum(ours[..., :2], theirs[..., :2])
        high = torch.minimum(ours[..., 2:], theirs[..., 2:])
        both = (high - low).clamp_min(0).prod(dim=-1)
        either = _area(ours) + _area(theirs) - both
        return torch.where(either > 0, both / either.clamp_min(1e-12), 0).float()


def _numbers(box: Float[Tensor, " 4"]) -> str:
    return f"({', '.join(f'{number:g}' for number in box.tolist())})"


def _area(boxes: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b"]:
    return (boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(dim=-1)


Geometry = PixelGeometry | TextGeometry | RegionGeometry
