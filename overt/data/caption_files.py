"""Captions from a user's own files: plain text, COCO annotations or Karpathy's splits.

A `.json` file is Karpathy's if its images have sentences, and COCO's if it has annotations. Any
other file has one caption per line, alone or as `IMAGE<tab>caption`, with or without `#NUMBER`
after the image, as in Flickr8k. Captions of one image are grouped, since document frequencies
count images; where no image is named, each caption is an image of its own.
"""

from collections.abc import Collection
from pathlib import Path

from overt.data.captions import PARTS, iterate_karpathy
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import read_lines
from overt.data.splits import Split
from overt.errors import CorruptFileError, UserError

ImageCaptions = tuple[str, tuple[str, ...]]  # an image and its captions


def read_captions(
    path: Path, split: str | None = None, only: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """Read the captions of every image of a file, in the order of the file.

    Args:
        path: Text file or `.json` file.
        split: Split of a Karpathy file; None reads `train`. Other files have no splits.
        only: Names of the images to keep; None keeps all. Leaving out test images avoids counting
            test captions.

    Returns:
        The captions of each image.

    Raises:
        UserError: The file, split or image does not exist.
        CorruptFileError: An entry has no caption.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a text or a .json file of captions.")
    if path.suffix.lower() != ".json":
        found = _lines(path, split)
    elif _has_sentences(path):
        found = _karpathy(path, split)
    else:
        found = _coco(path, split)
    if not found:
        raise UserError(f"{path} has no caption{'' if split is None else f' in {split}'}.")
    if only is None:
        return [texts for _, texts in found]
    kept = [texts for name, texts in found if name in only]
    if not kept:
        raise UserError(f"{path} has no caption of the {len(only)} requested images.")
    return kept


def _has_sentences(path: Path) -> bool:
    """Return whether the first image has its captions with it, as in Karpathy's files."""
    try:
        return "sentences" in next(iterate_records(path, "images"), {})
    except CorruptFileError:
        return False  # a file of annotations need not name its images


def _karpathy(path: Path, split: str | None) -> list[ImageCaptions]:
    wanted = Split.TRAIN if split is None else split
    if wanted not in PARTS:
        raise UserError(f"{path} has train, val and test, not {split!r}.")
    parts = PARTS[Split(wanted)]
    return [(one.photo, one.captions) for one, part, _ in iterate_karpathy(path) if part in parts]


def _coco(path: Path, split: str | None) -> list[ImageCaptions]:
    _no_split(path, split)
    found: dict[str, list[str]] = {}
    for number, entry in enumerate(iterate_records(path, "annotations")):
        match entry:
            case {"image_id": int() | str() as image, "caption": text}:
                text = _text(path, f"annotation {number}", text)
                found.setdefault(str(image), []).append(text)
            case _:
                raise CorruptFileError(f"{path}: annotation {number} has no image_id and caption.")
    return [(image, tuple(texts)) for image, texts in found.items()]


def _lines(path: Path, split: str | None) -> list[ImageCaptions]:
    _no_split(path, split)
    found: dict[str, list[str]] = {}
    named: bool | None = None
    for number, line in enumerate(read_lines(path), start=1):
        image, tab, text = line.partition("\t")
        if named is not None and named != bool(tab):
            raise UserError(
                f"{path}: line {number} {'names' if tab else 'does not name'} its image, unlike "
                "the lines before; write IMAGE<tab>caption on every line or on none."
            )
        named = bool(tab)
        key = image.rpartition("#")[0] or image if tab else f"line {number}"
        found.setdefault(key, []).append(_text(path, f"line {number}", text if tab else line))
    return [(image, tuple(texts)) for image, texts in found.items()]


def _no_split(path: Path, split: str | None) -> None:
    if split is not None:
        raise UserError(f"{path} has no split {split!r}: only Karpathy's files have splits.")


def _text(path: Path, where: str, text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise CorruptFileError(f"{path}: {where} has no caption.")
    return text.strip()
