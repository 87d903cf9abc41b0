"""Object Discovery: photos of airplanes, cars and horses from the web, with masks drawn by hand.

Rubinstein, Joulin, Kopf and Liu, "Unsupervised Joint Object Discovery and Segmentation in Internet
Images", 2013, https://people.csail.mit.edu/mrub/ObjectDiscovery/. Papers evaluate on 100 photos
per class: `Data/Airplane100/0001.jpg`, and `Data/Airplane100/GroundTruth/0001.png`, which is not
black where the object is. Some photos do not show their object; their masks are empty.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import digest_files
from overt.data.download import require_folder
from overt.data.images import Resize, Size, open_image, stretch
from overt.data.photo_dataset import (
    ALL,
    PhotoDataset,
    PhotoEntry,
    check_only_all,
    check_photo_count,
    list_jpegs,
    region_target,
)
from overt.errors import CorruptFileError, UserError

FOLDER = "ObjectDiscovery-data/Data"
KINDS = ("airplane", "car", "horse")
PHOTOS = 100
SIZE = (224, 224)
CELLS = (14, 14)


class ObjectDiscovery:
    """Object Discovery: 100 photos of each class, with the mask of the object as target.

    The target is the share of each cell that the mask covers. A photo without the object has a row
    of zeros that sees no cell and counts nowhere.

    Args:
        root: Data folder, see `data_root`.
        split: `all`; there is no official split.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.
        kinds: Classes to use: airplane, car, horse.
        photos: Expected number of photos per class; None accepts any number.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER, "Car100")
        ...     (folder / "GroundTruth").mkdir(parents=True)
        ...     Image.new("RGB", (8, 6)).save(folder / "0001.jpg")
        ...     Image.new("L", (8, 6), 255).save(folder / "GroundTruth" / "0001.png")
        ...     data = ObjectDiscovery(root, kinds=("car",), photos=None)
        ...     data.batch([0]).groups, int(data.masks([0])[0].sum())
        (('car',), 48)
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        size: Size = SIZE,
        resize: Resize = stretch,
        cells: Size = CELLS,
        kinds: Sequence[str] = KINDS,
        photos: int | None = PHOTOS,
    ) -> None:
        root = Path(root)
        check_only_all("discovery", split)
        self.name, self.split, self.classes, self.cells = "discovery", split, KINDS, cells
        folder = root / FOLDER
        entries: list[PhotoEntry] = []
        for kind in kinds:
            if kind not in KINDS:
                raise UserError(f"Unknown class {kind!r}: choose from {', '.join(KINDS)}.")
            entries += _entries(folder, kind, photos)
        self._photos = PhotoDataset(self.name, split, folder, entries, KINDS, size, resize)
        self._masks = [folder / _mask_of(entry) for entry in entries]
        for photo, mask in zip(self._photos.files, self._masks, strict=True):
            if not mask.is_file():
                raise CorruptFileError(
                    f"{mask} is missing, the mask of {photo}; download it again."
                )
        self.files = (*self._photos.files, *self._masks)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._photos)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class that each photo was searched by, without opening it."""
        return self._photos.labels(indices)

    def masks(self, indices: Sequence[int]) -> list[Bool[Tensor, "_ _"]]:
        """Return the mask of the object at the photo's own size."""
        return [_read_mask(self._masks[place]) for place in self._photos.places(indices)]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the photos at `indices`, with masks as target and classes as `groups`."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        masks = self.masks(indices)
        for place, mask, size in zip(indices, masks, found.geometry.size.tolist(), strict=True):
            if list(mask.shape) != size:
                raise CorruptFileError(
                    f"{self._masks[place]} has {mask.shape[0]} x {mask.shape[1]} pixels, but its "
                    f"photo has {size[0]} x {size[1]}; download both again."
                )
        shares = found.geometry.cover_masks(masks, self.cells)
        kinds = tuple(KINDS[label] for label in self.labels(indices).tolist())
        return replace(
            found, groups=kinds, target=region_target(shares, self.cells, found.geometry)
        )

    def digest(self) -> str:
        """Return a hash of every photo and every mask."""
        if self._digest is None:
            self._digest = digest_files(self._photos.digest(), self._masks)
        return self._digest


def _entries(folder: Path, kind: str, photos: int | None) -> list[PhotoEntry]:
    here = folder / f"{kind.capitalize()}100"
    require_folder(here)
    found = sorted(list_jpegs(here))
    check_photo_count(here, len(found), photos)
    return [PhotoEntry(f"{here.name}/{name}", KINDS.index(kind)) for name in found]


def _mask_of(entry: PhotoEntry) -> PurePosixPath:
    photo = PurePosixPath(entry.path)
    return photo.parent / "GroundTruth" / f"{photo.stem}.png"


def _read_mask(path: Path) -> Bool[Tensor, "_ _"]:
    pixels, _ = open_image(path)
    return torch.from_numpy(pixels.any(axis=-1))
