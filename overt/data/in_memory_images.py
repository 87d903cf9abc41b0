"""A small image dataset in memory on any device, with random shift and flip.

CIFAR fits into GPU memory many times; stored there as bytes, a batch needs no copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import UserError
from overt.geometry import PixelGeometry

CHUNK = 4096


@dataclass(frozen=True)
class ShiftFlip:
    """Shift of each image within a border, and whether it is flipped horizontally."""

    top: Int[Tensor, " b"]
    left: Int[Tensor, " b"]
    flip: Bool[Tensor, " b"]
    margin: int


def draw_shift_flip(count: int, generator: torch.Generator, margin: int = 4) -> ShiftFlip:
    """Draw shifts of up to `margin` pixels each way, and flips for half of the images."""
    device = generator.device
    top, left = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device=device)
    flip = torch.rand(count, generator=generator, device=device) < 0.5
    return ShiftFlip(top, left, flip, margin)


def apply_shift_flip(
    images: Shaped[Tensor, "b 3 y x"], moves: ShiftFlip
) -> Shaped[Tensor, "b 3 y x"]:
    """Shift the images over a black border and flip them horizontally."""
    height, width = images.shape[-2:]
    device, margin = images.device, moves.margin
    bordered = torch.nn.functional.pad(images, (margin,) * 4)
    down = torch.arange(height, device=device)
    across = torch.arange(width, device=device).expand(len(images), width)
    across = torch.where(moves.flip.to(device)[:, None], across.flip(-1), across)
    rows = moves.top.to(device)[:, None] + down
    columns = moves.left.to(device)[:, None] + across
    which = torch.arange(len(images), device=device)[:, None, None]
    picked = bordered[which, :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def random_crop_flip(
    images: Shaped[Tensor, "b 3 y x"], generator: torch.Generator, margin: int = 4
) -> Shaped[Tensor, "b 3 y x"]:
    """Pad, crop and flip images at random, the standard augmentation of CIFAR.

    Args:
        images: Images.
        generator: Source of randomness; the same state gives the same images.
        margin: Largest shift in pixels.

    Returns:
        Images of the same shape.

    Example:
        >>> images = torch.rand(2, 3, 8, 8)
        >>> random_crop_flip(images, torch.Generator().manual_seed(0), margin=1).shape
        torch.Size([2, 3, 8, 8])
    """
    return apply_shift_flip(images, draw_shift_flip(len(images), generator, margin))


def random_shift_flip(batch: Batch, generator: torch.Generator, margin: int = 4) -> Batch:
    """Shift and flip the images of a batch at random, and update the geometry.

    Attention targets and overlays that use the geometry stay on the right pixels.

    Args:
        batch: Batch with images and geometry.
        generator: Source of randomness; the same state gives the same images.
        margin: Largest shift in pixels.

    Returns:
        The batch with new images and their geometry.

    Raises:
        UserError: The batch has no images or no geometry.

    Example:
        >>> geometry = PixelGeometry.identity(1, (8, 8))
        >>> batch = Batch(("a",), torch.rand(1, 3, 8, 8), geometry=geometry)
        >>> moved = random_shift_flip(batch, torch.Generator().manual_seed(0), margin=2)
        >>> moved.geometry.scale.tolist(), moved.geometry.offset.tolist()  # flipped horizontally
        ([[1.0, -1.0]], [[-2.0, 10.0]])
    """
    return _apply_to_batch(batch, draw_shift_flip(_images(batch), generator, margin))


def random_shift(batch: Batch, generator: torch.Generator, margin: int = 4) -> Batch:
    """Shift the images of a batch at random without flips: a mirrored digit is not a digit.

    The shifts are those of `random_shift_flip` with the same generator.

    Args:
        batch: Batch with images and geometry.
        generator: Source of randomness; the same state gives the same images.
        margin: Largest shift in pixels.

    Returns:
        The batch with new images and their geometry.

    Raises:
        UserError: The batch has no images or no geometry.

    Example:
        >>> geometry = PixelGeometry.identity(1, (8, 8))
        >>> batch = Batch(("a",), torch.rand(1, 3, 8, 8), geometry=geometry)
        >>> moved = random_shift(batch, torch.Generator().manual_seed(0), margin=2)
        >>> moved.geometry.scale.tolist()  # positive: not flipped
        [[1.0, 1.0]]
    """
    moves = draw_shift_flip(_images(batch), generator, margin)
    return _apply_to_batch(batch, replace(moves, flip=torch.zeros_like(moves.flip)))


def _images(batch: Batch) -> int:
    if batch.images is None or batch.geometry is None:
        raise UserError("Shift and flip need a batch with images and their geometry.")
    return len(batch.images)


def _apply_to_batch(batch: Batch, moves: ShiftFlip) -> Batch:
    assert batch.images is not None and batch.geometry is not None
    geometry = _shift_flip_geometry(batch.geometry, moves)
    return replace(batch, images=apply_shift_flip(batch.images, moves), geometry=geometry)


@dataclass(frozen=True)
class InMemoryImages:
    """All images and labels of a dataset as two tensors.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        ids: Id of each sample.
        images: Images of all samples.
        labels: Class of each sample.
        source: Digest of the original dataset.

    Example:
        >>> import numpy as np
        >>> from overt.data import ImageArrays
        >>> pictures, labels = np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, 1, 0])
        >>> classes, rows = ("cat", "dog"), np.arange(4)
        >>> data = ImageArrays("toy", "train", "train", [pictures], labels, rows, classes, files=[])
        >>> InMemoryImages.from_dataset(data).batch([1, 2]).labels
        tensor([1, 1])
    """

    name: str
    split: str
    ids: tuple[str, ...]
    images: UInt8[Tensor, "n 3 y x"]
    labels: Int[Tensor, " n"]
    source: str

    @classmethod
    def from_dataset(cls, dataset: Dataset, device: torch.device | str = "cpu") -> "InMemoryImages":
        """Copy all of `dataset` to `device`.

        Args:
            dataset: Dataset with one image and one label per item.
            device: Device of the tensors.

        Raises:
            UserError: The dataset is empty, or has no images or labels.
        """
        ids: list[str] = []
        images, labels = [], []
        for start in range(0, len(dataset), CHUNK):
            batch = dataset.batch(range(start, min(start + CHUNK, len(dataset))))
            if batch.images is None or batch.labels is None or batch.image_of is not None:
                raise UserError(f"{dataset.name} needs one image and one label per sample.")
            ids += batch.ids
            images.append(batch.images.to(device))
            labels.append(batch.labels.to(device))
        if not ids:
            raise UserError(f"{dataset.name} {dataset.split} is empty.")
        held = torch.cat(images), torch.cat(labels)
        return cls(dataset.name, str(dataset.split), tuple(ids), *held, dataset.digest())

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, on the device of the tensors."""
        rows = torch.as_tensor(list(indices), dtype=torch.long)
        at = rows.to(self.images.device)
        height, width = self.images.shape[-2:]
        return Batch(
            ids=tuple(self.ids[row] for row in rows.tolist()),
            images=self.images[at],
            geometry=PixelGeometry.identity(len(rows), (height, width)).to(self.images.device),
            labels=self.labels[at],
        )

    def digest(self) -> str:
        """Return the hash of the original dataset."""
        return self.source


def _shift_flip_geometry(geometry: PixelGeometry, moves: ShiftFlip) -> PixelGeometry:
    """Return the geometry after shift and flip, composed with earlier transforms."""
    shift = torch.stack([moves.top, moves.left], dim=-1).to(geometry.offset)
    offset = geometry.offset + moves.margin - shift
    sign = torch.ones_like(geometry.scale)
    sign[:, 1] = torch.where(moves.flip.to(sign.device), -1.0, 1.0)
    far = torch.zeros_like(offset)
    far[:, 1] = geometry.canvas[1] * moves.flip.to(far.device)
    return replace(geometry, scale=geometry.scale * sign, offset=offset * sign + far)
