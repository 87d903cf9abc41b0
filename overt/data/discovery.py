"""Object Discovery: photos of airplanes, cars and horses from the web, with masks drawn by hand.

Rubinstein, Joulin, Kopf and Liu, "Unsupervised Joint Object Discovery and Segmentation in Internet
Images", 2013, https://people.csail.mit.edu/mrub/ObjectDiscovery/. The photos that papers compare on
are 100 of each kind: `Data/Airplane100/0001.jpg`, and `Data/Airplane100/GroundTruth/0001.png` that
is not black where the object is. Some photos do not show their object; their masks are empty.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.images import How, Size, open_image, stretch
from overt.data.photos import ALL, Entry, PhotoSet, counted, jpegs, only_all, target
from overt.errors import BadInput, Damaged
from overt.files import digest

FOLDER = "ObjectDiscovery-data/Data"
KINDS = ("airplane", "car", "horse")
PHOTOS = 100
SIZE = (224, 224)
CELLS = (14, 14)


class ObjectDiscovery:
    """Object Discovery: 100 photos of each of `kinds`, with the mask of the object as target.

    The target is the share of each of `cells` that the mask covers. A photo without the object has
    a row of zeros that sees no cell, so that nothing counts it. `photos` says how many photos a
    kind has, where they are not the official ones; None takes any number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        size: Size = SIZE,
        how: How = stretch,
        cells: Size = CELLS,
        kinds: Sequence[str] = KINDS,
        photos: int | None = PHOTOS,
    ) -> None:
        root = Path(root)
        only_all("discovery", split)
        self.name, self.split, self.classes, self.cells = "discovery", split, KINDS, cells
        folder = root / FOLDER
        entries: list[Entry] = []
        for kind in kinds:
            if kind not in KINDS:
                raise BadInput(f"There is no kind {kind!r}; choose from {', '.join(KINDS)}.")
            entries += _entries(folder, kind, photos)
        self._photos = PhotoSet(self.name, split, folder, entries, KINDS, size, how)
        self._masks = [folder / _mask_of(entry) for entry in entries]
        for photo, mask in zip(self._photos.files, self._masks, strict=True):
            if not mask.is_file():
                raise Damaged(f"{mask} is missing, the mask of {photo}; get it again.")
        self.files = (*self._photos.files, *self._masks)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._photos)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The kind that each photo was looked up by, without opening it."""
        return self._photos.labels(indices)

    def masks(self, indices: Sequence[int]) -> list[Bool[Tensor, "_ _"]]:
        """Which pixels of each photo show the object, at the photo's own size."""
        return [_read_mask(self._masks[place]) for place in self._photos.places(indices)]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places, with their masks as target; `groups` are the kinds."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        masks = self.masks(indices)
        for place, mask, size in zip(indices, masks, found.geometry.size.tolist(), strict=True):
            if list(mask.shape) != size:
                raise Damaged(
                    f"{self._masks[place]} has {mask.shape[0]} x {mask.shape[1]} pixels, but its "
                    f"photo has {size[0]} x {size[1]}; get both again."
                )
        shares = found.geometry.cover_masks(masks, self.cells)
        kinds = tuple(KINDS[label] for label in self.labels(indices).tolist())
        return replace(found, groups=kinds, target=target(shares, self.cells, found.geometry))

    def digest(self) -> str:
        """A hash of every photo and every mask."""
        if self._digest is None:
            found = hashlib.sha256(self._photos.digest().encode())
            for path in self._masks:
                found.update(digest(path).encode())
            self._digest = found.hexdigest()
        return self._digest


def _entries(folder: Path, kind: str, photos: int | None) -> list[Entry]:
    here = folder / f"{kind.capitalize()}100"
    if not here.is_dir():
        raise BadInput(f"{here} is missing; `overt data list` says how to get it.")
    found = sorted(jpegs(here))
    counted(here, len(found), photos)
    return [Entry(f"{here.name}/{name}", KINDS.index(kind)) for name in found]


def _mask_of(entry: Entry) -> PurePosixPath:
    photo = PurePosixPath(entry.path)
    return photo.parent / "GroundTruth" / f"{photo.stem}.png"


def _read_mask(path: Path) -> Bool[Tensor, "_ _"]:
    pixels, _ = open_image(path)
    return torch.from_numpy(pixels.any(axis=-1))
