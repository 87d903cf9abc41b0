"""Photos in which things are outlined: one sample is a photo and one kind of thing in it.

What sets of boxes and masks are read into. A photo with a dog and two chairs is two samples, "dog"
and "chair": a map of a class is held to the things of that class (Zhang, Lin, Brandt, Shen and
Sclaroff, "Top-down Neural Attention by Excitation Backprop", 2016, the pointing game).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.images import How, Size
from overt.data.photos import Box, Entry, PhotoSet, target
from overt.errors import BadInput, Damaged

Mask = Bool[Tensor, "y x"]
Outline = Callable[["Things", Size], Mask]  # which pixels of a photo of this size are the things


@dataclass(frozen=True)
class Things:
    """All things of one kind in one photo: its place in the list, the kind, and their boxes."""

    photo: int
    kind: int
    boxes: tuple[Box, ...]


class Outlined:
    """Photos brought to a canvas, with the place of one kind of thing in each sample as target.

    The target is the share of each of `cells` that `outline` covers, normalised; where nothing of
    it is on the canvas its row is zero and sees no cell. `labels` are the kinds, `groups` their
    names, `boxes` the things' boxes in pixels of the photo, of no size where a sample has fewer. A
    photo that several samples of a batch look at is opened once. `about` names the files and rules
    that the outlines come from.
    """

    def __init__(
        self,
        name: str,
        split: str,
        folder: Path | str,
        photos: Sequence[str],
        things: Sequence[Things],
        classes: tuple[str, ...],
        outline: Outline,
        size: Size,
        how: How,
        cells: Size,
        about: str,
    ) -> None:
        if not things:
            raise BadInput(f"{name} {split} has no photo with anything outlined in it.")
        self.name, self.split, self.classes, self.cells = name, split, classes, cells
        entries = [Entry(photo, 0) for photo in photos]
        self._photos = PhotoSet(name, split, folder, entries, ("photo",), size, how)
        self._names, self.things, self._outline, self._about = photos, things, outline, about
        self.files = self._photos.files

    def __len__(self) -> int:
        return len(self.things)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The kind of thing of each sample, without opening a photo."""
        return torch.tensor([one.kind for one in self._chosen(indices)], dtype=torch.long)

    def masks(self, indices: Sequence[int]) -> list[Mask]:
        """Which pixels of each photo show the things, at the photo's own size."""
        chosen = self._chosen(indices)
        geometry = self._photos.batch([one.photo for one in chosen]).geometry
        assert geometry is not None
        return self._outlined(chosen, geometry.size)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these places, with where their things are as target."""
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
            target=target(shares, self.cells, geometry),
        )

    def digest(self) -> str:
        """A hash of every photo, of what is outlined in it, and of how."""
        whole = hashlib.sha256(f"{self._about} {self._photos.digest()}\n".encode())
        for one in self.things:
            whole.update(f"{one.photo} {one.kind} {one.boxes}\n".encode())
        return whole.hexdigest()

    def _chosen(self, indices: Sequence[int]) -> list[Things]:
        places = [int(place) for place in indices]
        for place in places:
            if not 0 <= place < len(self):
                raise BadInput(
                    f"{self.name} {self.split} has samples 0 to {len(self) - 1}, not {place}."
                )
        return [self.things[place] for place in places]

    def _outlined(self, chosen: Sequence[Things], sizes: Int[Tensor, "b 2"]) -> list[Mask]:
        masks = []
        for one, (height, width) in zip(chosen, sizes.tolist(), strict=True):
            mask = self._outline(one, (height, width))
            if tuple(mask.shape) != (height, width):
                raise Damaged(
                    f"what is outlined in {self._names[one.photo]} has {mask.shape[0]} x "
                    f"{mask.shape[1]} pixels, but the photo has {height} x {width}; get both again."
                )
            masks.append(mask)
        return masks


def inside_boxes(things: Things, size: Size) -> Mask:
    """The pixels whose middle lies in one of the boxes."""
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
