"""A small image set held whole in memory, on any device, and the classic way to vary it.

CIFAR fits into a GPU many times over; kept there as bytes, a batch is one index and no copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int, Shaped, UInt8
from torch import Tensor

from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput
from overt.geometry import PixelGeometry

CHUNK = 4096


@dataclass(frozen=True)
class Moves:
    """How each image is shifted within a border and whether it is mirrored."""

    top: Int[Tensor, " b"]
    left: Int[Tensor, " b"]
    flip: Bool[Tensor, " b"]
    margin: int


def draw(count: int, generator: torch.Generator, margin: int = 4) -> Moves:
    """Shifts of up to `margin` pixels each way and mirrors for half of the images."""
    device = generator.device
    top, left = torch.randint(0, 2 * margin + 1, (2, count), generator=generator, device=device)
    flip = torch.rand(count, generator=generator, device=device) < 0.5
    return Moves(top, left, flip, margin)


def move(images: Shaped[Tensor, "b 3 y x"], moves: Moves) -> Shaped[Tensor, "b 3 y x"]:
    """The images seen through a window of their own size, shifted over a black border, mirrored."""
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


def crop_and_flip(
    images: Shaped[Tensor, "b 3 y x"], generator: torch.Generator, margin: int = 4
) -> Shaped[Tensor, "b 3 y x"]:
    """Each image shifted by up to `margin` pixels and mirrored half of the time.

    The generator decides everything: the same state gives the same images.
    """
    return move(images, draw(len(images), generator, margin))


def vary(batch: Batch, generator: torch.Generator, margin: int = 4) -> Batch:
    """A batch whose images are shifted and mirrored, and whose geometry knows it.

    Attention targets and pictures made from the geometry stay on the right pixels.
    """
    return _changed(batch, draw(_images(batch), generator, margin))


def shift(batch: Batch, generator: torch.Generator, margin: int = 4) -> Batch:
    """A batch whose images are shifted and never mirrored: a mirrored digit is no digit.

    The shifts are those that `vary` makes of the same generator.
    """
    moves = draw(_images(batch), generator, margin)
    return _changed(batch, replace(moves, flip=torch.zeros_like(moves.flip)))


def _images(batch: Batch) -> int:
    if batch.images is None or batch.geometry is None:
        raise BadInput("Only a batch with images and their geometry can be varied.")
    return len(batch.images)


def _changed(batch: Batch, moves: Moves) -> Batch:
    assert batch.images is not None and batch.geometry is not None
    geometry = _moved(batch.geometry, moves)
    return replace(batch, images=move(batch.images, moves), geometry=geometry)


@dataclass(frozen=True)
class Resident:
    """All images and labels of a data set as two tensors; a data set itself."""

    name: str
    split: str
    ids: tuple[str, ...]
    images: UInt8[Tensor, "n 3 y x"]
    labels: Int[Tensor, " n"]
    source: str

    @classmethod
    def of(cls, dataset: Source, device: torch.device | str = "cpu") -> "Resident":
        """The whole of `dataset`, of one image and one label an item, copied to `device` once."""
        ids: list[str] = []
        images, labels = [], []
        for start in range(0, len(dataset), CHUNK):
            batch = dataset.batch(range(start, min(start + CHUNK, len(dataset))))
            if batch.images is None or batch.labels is None or batch.image_of is not None:
                raise BadInput(f"{dataset.name} has not one image and one label a sample.")
            ids += batch.ids
            images.append(batch.images.to(device))
            labels.append(batch.labels.to(device))
        if not ids:
            raise BadInput(f"{dataset.name} {dataset.split} is empty.")
        held = torch.cat(images), torch.cat(labels)
        return cls(dataset.name, str(dataset.split), tuple(ids), *held, dataset.digest())

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these places, on the device where the tensors are."""
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
        """The hash of the data set the tensors were read from."""
        return self.source


def _moved(geometry: PixelGeometry, moves: Moves) -> PixelGeometry:
    """The geometry after `move`; shifting and mirroring compose with what was done before."""
    shift = torch.stack([moves.top, moves.left], dim=-1).to(geometry.offset)
    offset = geometry.offset + moves.margin - shift
    sign = torch.ones_like(geometry.scale)
    sign[:, 1] = torch.where(moves.flip.to(sign.device), -1.0, 1.0)
    far = torch.zeros_like(offset)
    far[:, 1] = geometry.canvas[1] * moves.flip.to(far.device)
    return replace(geometry, scale=geometry.scale * sign, offset=offset * sign + far)
