"""Caltech-101 and Caltech-256: photos of things, a folder a class, without an official split.

Fei-Fei, Fergus and Perona, "One-Shot Learning of Object Categories", 2006,
https://data.caltech.edu/records/mzrjq-6wc02 (`101_ObjectCategories/NAME/image_0001.jpg`); Griffin,
Holub and Perona, "Caltech-256 Object Category Dataset", 2007,
https://data.caltech.edu/records/nyy15-4j048 (`256_ObjectCategories/001.NAME/001_0001.jpg`).
"""

from pathlib import Path

from overt.data.images import How, Size, crop
from overt.data.photos import ALL, PhotoSet, class_folders, counted, in_folders, only_all

FOLDER_101, FOLDER_256 = "101_ObjectCategories", "256_ObjectCategories"
PHOTOS_101, PHOTOS_256 = 8_677, 29_780
BACKGROUND, CLUTTER = "BACKGROUND_Google", "257.clutter"  # not classes, and not counted
SIZE = (224, 224)


def caltech101(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    how: How = crop,
    photos: int | None = PHOTOS_101,
) -> PhotoSet:
    """Caltech-101: 8,677 photos of 101 classes, without the background folder.

    `photos` says how many there are, where the files are not the official ones; None takes any.
    """
    root = Path(root)
    return _folders("caltech101", root / FOLDER_101, 101, BACKGROUND, photos, split, size, how)


def caltech256(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    how: How = crop,
    photos: int | None = PHOTOS_256,
) -> PhotoSet:
    """Caltech-256: 29,780 photos of 256 classes, without the clutter folder.

    `photos` says how many there are, where the files are not the official ones; None takes any.
    """
    root = Path(root)
    return _folders("caltech256", root / FOLDER_256, 256, CLUTTER, photos, split, size, how)


def _folders(
    name: str,
    folder: Path,
    classes: int,
    besides: str,
    photos: int | None,
    split: str,
    size: Size,
    how: How,
) -> PhotoSet:
    only_all(name, split)
    names = class_folders(folder, classes, besides)
    entries = in_folders(folder, names)
    counted(folder, len(entries), photos)
    shown = tuple(one.split(".", 1)[-1] for one in names)
    return PhotoSet(name, split, folder, entries, shown, size, how)
