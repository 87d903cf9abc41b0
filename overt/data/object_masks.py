"""Photos with object masks: one sample is a photo and one class of objects in it.

A photo with a dog and two chairs is two samples, "dog" and "chair": the map of a class is compared
with the objects of that class (Zhang, Lin, Brandt, Shen and Sclaroff, "Top-down Neural Attention by
Excitation Backprop", 2016, the pointing game).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.images import Resize, Size
from overt.data.photo_dataset import Box, PhotoDataset, PhotoEntry, region_target
from overt.errors import CorruptFileError, UserError

Mask = Bool[Tensor, "y x"]
MaskOf = Callable[["ObjectGroup", Size], Mask]  # the pixels of the objects in a photo of this size


@dataclass(frozen=True)
class ObjectGroup:
    """All objects of one class in one photo: index of the photo, class, boxes."""

    photo: int
    kind: int
    boxes: tuple[Box, ...]


# folder of the photos, photos below it, samples, and names of the classes
AnnotatedPhotos = tuple[Path, Sequence[str], Sequence[ObjectGroup], tuple[str, ...]]


class ObjectMasks:
    """Photos with the objects of one class per sample as target.

    The target is the share of each cell that the mask covers, normalised; where no object is on the
    canvas its row is zero and sees no cell. `labels` are the classes, `groups` their names, `boxes`
    the boxes in pixels of the photo, padded with empty ones. A photo that several samples of a
    batch share is opened once.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        folder: Folder of the photos.
        photos: Photos below `folder`.
        things: The samples.
        classes: Names of the classes.
        outline: Returns the mask of a sample.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.
        about: Names the files and rules of the masks, for the digest.

    Raises:
        UserError: There are no samples.
        CorruptFileError: A photo is missing, or a box or mask does not fit its photo.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.data.images import stretch
        >>> grids = {"size": (32, 32), "resize": stretch, "cells": (2, 2)}
        >>> dog = ObjectGroup(photo=0, kind=0, boxes=((0.0, 0.0, 4.0, 6.0),))
        >>> with TemporaryDirectory() as folder:
        ...     Image.new("RGB", (8, 6)).save(Path(folder, "1.jpg"))
        ...     photos = (folder, ["1.jpg"], [dog], ("dog",))
        ...     data = ObjectMasks("toy", "all", *photos, box_mask, **grids, about="boxes")
        ...     data.batch([0]).target.weights.flatten()
        tensor([0.5000, 0.0000, 0.5000, 0.0000])
    """

    def __init__(
        self,
        name: str,
        split: str,
        folder: Path | str,
        photos: Sequence[str],
        things: Sequence[ObjectGroup],
        classes: tuple[str, ...],
        outline: MaskOf,
        size: Size,
        resize: Resize,
        cells: Size,
        about: str,
    ) -> None:
        if not things:
            raise UserError(f"{name} {split} has no photo with an object.")
        self.name, self.split, self.classes, self.cells = name, split, classes, cells
        entries = [PhotoEntry(photo, 0) for photo in photos]
        self._photos = PhotoDataset(name, split, folder, entries, ("photo",), size, resize)
        self._names, self.things, self._outline, self._about = photos, things, outline, about
        self.files = self._photos.files

    def __len__(self) -> int:
        return len(self.things)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class of each sample, without opening a photo."""
        return torch.tensor([one.kind for one in self._chosen(indices)], dtype=torch.long)

    def masks(self, indices: Sequence[int]) -> list[Mask]:
        """Return the mask of the objects at the photo's own size."""
        chosen = self._chosen(indices)
        geometry = self._photos.batch([one.photo for one in chosen]).geometry
        assert geometry is not None
        return self._outlined(chosen, geometry.size)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, with their objects as target."""
        chosen = self._chosen(indices)
        photos = sorted({one.photo for one in chosen})
        found = self._photos.batch(photos)
        assert found.geometry is not None
        image_of = torch.tensor([photos.index(one.photo) for one in chosen], dtype=torch.long)
        geometry = found.geometry[image_of]
        shares = geometry.cover_masks(self._outlined(chosen, geometry.size), self.cells)
        return Batch(
            ids=tuple(
                f"{self.name}/{self._names[one.photo]}/{self.classes[one.kind]}" for one in chosen
            ),
            images=found.images,
            image_of=image_of,
            geometry=found.geometry,
            boxes=_padded([one.boxes for one in chosen]),
            labels=self.labels(indices),
            groups=tuple(self.classes[one.kind] for one in chosen),
            target=region_target(shares, self.cells, geometry),
        )

    def digest(self) -> str:
        """Return a hash of every photo, of the objects in it, and of `about`."""
        whole = hashlib.sha256(f"{self._about} {self._photos.digest()}\n".encode())
        for one in self.things:
            whole.update(f"{one.photo} {one.kind} {one.boxes}\n".encode())
        return whole.hexdigest()

    def _chosen(self, indices: Sequence[int]) -> list[ObjectGroup]:
        return [self.things[place] for place in check_indices(self, indices, "samples")]

    def _outlined(self, chosen: Sequence[ObjectGroup], sizes: Int[Tensor, "b 2"]) -> list[Mask]:
        masks = []
        for one, (height, width) in zip(chosen, sizes.tolist(), strict=True):
            for box in one.boxes:
                if not _is_on(box, (height, width)):
                    numbers = ", ".join(f"{number:g}" for number in box)
                    raise CorruptFileError(
                        f"{self._names[one.photo]}: the box ({numbers}) of a "
                        f"{self.classes[one.kind]} is inverted, empty or outside of the photo, "
                        f"which has {width} x {height} pixels; download both again."
                    )
            mask = self._outline(one, (height, width))
            if tuple(mask.shape) != (height, width):
                raise CorruptFileError(
                    f"the mask of {self._names[one.photo]} has {mask.shape[0]} x "
                    f"{mask.shape[1]} pixels, its photo {height} x {width}; download both again."
                )
            masks.append(mask)
        return masks


def _is_on(box: Box, size: Size) -> bool:
    """Return whether a box has an area and overlaps a photo of this size."""
    left, top, right, bottom = box
    height, width = size
    return (
        left < right and top < bottom and right > 0 and bottom > 0 and left < width and top < height
    )


def check_listed(pictures: Sequence[Path], split: str) -> None:
    """Raise `CorruptFileError` if the mask of a photo of the split is missing."""
    for picture in pictures:
        if not picture.is_file():
            raise CorruptFileError(
                f"{picture} is missing, but {split} lists it; download it again."
            )


def box_mask(things: ObjectGroup, size: Size) -> Mask:
    """Return the pixels whose centre is in one of the boxes."""
    down, across = (torch.arange(side) + 0.5 for side in size)
    mask = torch.zeros(size, dtype=torch.bool)
    for left, top, right, bottom in things.boxes:
        rows = (down >= top) & (down < bottom)
        mask |= rows[:, None] & ((across >= left) & (across < right))[None, :]
    return mask


def _padded(boxes: Sequence[Sequence[Box]]) -> Float[Tensor, "b m 4"]:
    most = max([1, *map(len, boxes)])
    return torch.tensor(
        [[*each, *[(0.0, 0.0, 0.0, 0.0)] * (most - len(each))] for each in boxes],
        dtype=torch.float32,
    ).reshape(len(boxes), most, 4)
