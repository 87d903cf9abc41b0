"""Caltech-101 and Caltech-256: photos of objects, one folder per class, without an official split.

Fei-Fei, Fergus and Perona, "One-Shot Learning of Object Categories", 2006,
https://data.caltech.edu/records/mzrjq-6wc02 (`101_ObjectCategories/NAME/image_0001.jpg`); Griffin,
Holub and Perona, "Caltech-256 Object Category Dataset", 2007,
https://data.caltech.edu/records/nyy15-4j048 (`256_ObjectCategories/001.NAME/001_0001.jpg`).
"""

from pathlib import Path

from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import ALL, PhotoDataset, open_class_folders

FOLDER_101, FOLDER_256 = "101_ObjectCategories", "256_ObjectCategories"
PHOTOS_101, PHOTOS_256 = 8_677, 29_780
BACKGROUND, CLUTTER = "BACKGROUND_Google", "257.clutter"  # not classes, and not counted
SIZE = (224, 224)


def caltech101(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    resize: Resize = crop,
    photos: int | None = PHOTOS_101,
) -> PhotoDataset:
    """Open Caltech-101: 8,677 photos of 101 classes, without the background folder.

    Args:
        root: Data folder, see `data_root`.
        split: `all`; there is no official split.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        photos: Expected number of photos; None accepts any number.

    Returns:
        The photos with their classes.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for number in range(101):
        ...         folder = Path(root, FOLDER_101, f"class {number:03}")
        ...         folder.mkdir(parents=True)
        ...         Image.new("RGB", (8, 6)).save(folder / "image_0001.jpg")
        ...     data = caltech101(root, size=(32, 32), photos=None)
        ...     len(data), data.classes[0], data.batch([0]).images.shape
        (101, 'class 000', torch.Size([1, 3, 32, 32]))
    """
    folder = Path(root) / FOLDER_101
    return open_class_folders(
        "caltech101", split, folder, 101, photos, size, resize, besides=BACKGROUND
    )


def caltech256(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    resize: Resize = crop,
    photos: int | None = PHOTOS_256,
) -> PhotoDataset:
    """Open Caltech-256: 29,780 photos of 256 classes, without the clutter folder.

    Args:
        root: Data folder, see `data_root`.
        split: `all`; there is no official split.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        photos: Expected number of photos; None accepts any number.

    Returns:
        The photos with their classes.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for number in range(1, 257):
        ...         folder = Path(root, FOLDER_256, f"{number:03}.class-{number}")
        ...         folder.mkdir(parents=True)
        ...         Image.new("RGB", (8, 6)).save(folder / f"{number:03}_0001.jpg")
        ...     data = caltech256(root, photos=None)
        ...     len(data), data.classes[0]
        (256, 'class-1')
    """
    folder = Path(root) / FOLDER_256
    return open_class_folders(
        "caltech256", split, folder, 256, photos, size, resize, besides=CLUTTER
    )
