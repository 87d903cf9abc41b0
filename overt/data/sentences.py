"""Captions from a user's own files: one a line, COCO's annotations, or Karpathy's splits.

A `.json` file is Karpathy's where its images have sentences, and COCO's where it has annotations.
Any other file has a caption a line, alone or as `IMAGE<tab>caption`, with `#NUMBER` after the image
or not, as Flickr8k has it. Captions of one image stand together, since what is rare is counted in
images; where no image is named each caption is of an image of its own.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from overt.data.captions import PARTS
from overt.data.photos import read_lines
from overt.data.records import records
from overt.data.splits import Split
from overt.errors import BadInput, Damaged

Named = tuple[str, tuple[str, ...]]  # an image and its captions


def read_captions(
    path: Path, split: str | None = None, only: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """The captions of every image of a file, in the order of the file.

    Karpathy's files have splits, of which `split` is one and `train` the one that is read unasked;
    other files have none, and asking for one is refused. With `only`, images of other names are
    left out: what is counted on test captions is no news to a test.
    """
    if not path.is_file():
        raise BadInput(f"{path} is no file of captions; give a text or a .json file.")
    if path.suffix.lower() != ".json":
        found = _lines(path, split)
    elif _has_sentences(path):
        found = _karpathy(path, split)
    else:
        found = _coco(path, split)
    if not found:
        raise BadInput(f"{path} has no caption{'' if split is None else f' in {split}'}.")
    if only is None:
        return [texts for _, texts in found]
    kept = [texts for name, texts in found if name in only]
    if not kept:
        raise BadInput(f"{path} has no caption of the {len(only)} images that were asked for.")
    return kept


def _has_sentences(path: Path) -> bool:
    """Whether the first image of a file has its captions with it, as Karpathy's images have."""
    try:
        return any("sentences" in entry for entry in _first(records(path, "images")))
    except Damaged:
        return False  # a file of annotations need not name its images


def _first(entries: Iterable[dict[str, object]]) -> Iterable[dict[str, object]]:
    for entry in entries:
        return [entry]
    return []


def _karpathy(path: Path, split: str | None) -> list[Named]:
    wanted = Split.TRAIN if split is None else split
    if wanted not in PARTS:
        raise BadInput(f"{path} has train, val and test, not {split!r}.")
    found = []
    for number, entry in enumerate(records(path, "images")):
        match entry:
            case {"filename": str(name), "split": str(part), "sentences": [_, *_] as said}:
                texts = [one.get("raw") if isinstance(one, dict) else None for one in said]
            case _:
                raise Damaged(f"{path}: entry {number} has no filename, split and sentences.")
        if part in PARTS[Split(wanted)]:
            found.append((name, tuple(_text(path, f"entry {number}", text) for text in texts)))
    return found


def _coco(path: Path, split: str | None) -> list[Named]:
    _no_split(path, split)
    found: dict[str, list[str]] = {}
    for number, entry in enumerate(records(path, "annotations")):
        match entry:
            case {"image_id": int() | str() as image, "caption": text}:
                text = _text(path, f"annotation {number}", text)
                found.setdefault(str(image), []).append(text)
            case _:
                raise Damaged(f"{path}: annotation {number} has no image_id and caption.")
    return [(image, tuple(texts)) for image, texts in found.items()]


def _lines(path: Path, split: str | None) -> list[Named]:
    _no_split(path, split)
    found: dict[str, list[str]] = {}
    named: bool | None = None
    for number, line in enumerate(read_lines(path), start=1):
        image, tab, text = line.partition("\t")
        if named is not None and named != bool(tab):
            raise BadInput(
                f"{path}: line {number} {'names' if tab else 'does not name'} its image and those "
                "before it do not agree; write IMAGE<tab>caption on every line or on none."
            )
        named = bool(tab)
        key = image.rpartition("#")[0] or image if tab else f"line {number}"
        found.setdefault(key, []).append(_text(path, f"line {number}", text if tab else line))
    return [(image, tuple(texts)) for image, texts in found.items()]


def _no_split(path: Path, split: str | None) -> None:
    if split is not None:
        raise BadInput(f"{path} has no splits, only Karpathy's files have; leave {split!r} out.")


def _text(path: Path, where: str, text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise Damaged(f"{path}: {where} has no caption.")
    return text.strip()
