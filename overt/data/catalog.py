"""Catalog of the datasets: their files, how to check them and how to get them.

The entries are in `catalog.json`. Light enough for `overt data list` and `overt doctor`: heavy
packages are imported on demand.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from overt.data.download import Progress, download, extract, matches
from overt.data.easy_vqa_files import easy_vqa_folder
from overt.errors import CorruptFileError, UserError
from overt.io import lock

FileCheck = Callable[[Path], Iterator[str]]
DatasetReader = Callable[[Path], Any]

DOWNLOADS = ".downloads"
CIFAR_PIXELS = 3072


@dataclass(frozen=True)
class DatasetFile:
    """A file below the data folder, with its exact size and checksum where they are published."""

    path: str
    size: int | None = None
    checksum: str | None = None
    url: str | None = None
    check: FileCheck | None = None  # checks the contents, record by record


@dataclass(frozen=True)
class PhotoFolder:
    """A folder of photos, with or without subfolders, and the number of photos."""

    path: str
    count: int


@dataclass(frozen=True)
class Archive:
    """An archive that has the files of a dataset."""

    url: str
    checksum: str


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset of the catalog: description, files and readers.

    `instructions` tell how to get it by hand. `readers` open its splits: they find problems that
    sizes and checksums do not show.
    """

    name: str
    description: str
    homepage: str
    licence: str
    instructions: str
    files: tuple[DatasetFile, ...] = ()
    photos: tuple[PhotoFolder, ...] = ()
    archive: Archive | None = None
    readers: tuple[DatasetReader, ...] = ()


def data_root(given: Path | str | None = None) -> Path:
    """Return the data folder: `given`, or the environment variable OVERT_DATA.

    Args:
        given: Folder; None or "" takes OVERT_DATA.

    Returns:
        The folder; it need not exist.

    Raises:
        UserError: Neither is set.

    Example:
        >>> str(data_root("datasets"))
        'datasets'
    """
    found = given or os.environ.get("OVERT_DATA")
    if not found:
        raise UserError("No data folder is set: give --data FOLDER or set OVERT_DATA.")
    return Path(found)


def find_dataset(name: str) -> DatasetEntry:
    """Return the entry called `name`; raise `UserError` with the nearest names if there is none."""
    for each in DATASETS:
        if each.name == name:
            return each
    known = [each.name for each in DATASETS]
    near = difflib.get_close_matches(name[:80], known, cutoff=0.6)
    offer = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}."
    raise UserError(f"Unknown dataset {name!r}: {offer}")


def available_datasets(root: Path) -> tuple[str, ...]:
    """Return the names of datasets whose files all exist; `check_dataset` checks the contents."""
    return tuple(each.name for each in DATASETS if not list(_missing(root, each)))


def check_dataset(root: Path, name: str) -> list[str]:
    """Return every problem of a dataset, one sentence each with file and index; empty if it is
    fine.

    Files are compared with their published size and checksum and checked record by record.
    """
    chosen = find_dataset(name)
    missing = list(_missing(root, chosen))
    if missing or name in GENERATED:
        return missing
    if name == "easyvqa":
        return _check_easyvqa(root)
    problems: list[str] = []
    for file in chosen.files:
        problems += _check_file(root / file.path, file, chosen)
    for photos in chosen.photos:
        problems += _check_photos(root / photos.path, photos)
    if not problems and chosen.readers:
        problems += _check_readers(root, chosen)
    return problems


def prepare_dataset(root: Path, name: str, on_progress: Progress | None = None) -> str:
    """Download or generate a dataset and return a sentence that says what was done.

    A dataset that is present and correct is kept. Scenes are generated in the number that the
    demo uses for questions, and kept in the cache.
    """
    chosen = find_dataset(name)
    if name == "scenes":
        return _make_scenes(on_progress)
    if name in GENERATED:
        return f"{name} is generated on demand; there is nothing to prepare."
    if not check_dataset(root, name):
        where = easy_vqa_folder(root) if name == "easyvqa" else root
        return f"{name} is ready in {where}."
    if chosen.archive is None and not (chosen.files and all(file.url for file in chosen.files)):
        raise UserError(
            f"{name} cannot be downloaded automatically. {chosen.instructions} "
            f"See {chosen.homepage}"
        )
    return download_dataset(root, chosen, on_progress)


def download_dataset(root: Path, chosen: DatasetEntry, on_progress: Progress | None = None) -> str:
    """Download a dataset below `root`; its files appear there only after all checks passed."""
    work = root / DOWNLOADS / chosen.name
    ready = work / "ready"
    with lock(work):
        if chosen.archive is not None:
            path = work / chosen.archive.url.rsplit("/", 1)[-1]
            download(chosen.archive.url, path, chosen.archive.checksum, on_progress)
            shutil.rmtree(ready, ignore_errors=True)
            extract(path, ready)
        for file in chosen.files:
            if file.url is not None:
                download(file.url, ready / file.path, file.checksum, on_progress)
            if not (ready / file.path).is_file():
                raise CorruptFileError(f"{chosen.homepage}: the download has no {file.path}.")
            for problem in _check_file(ready / file.path, file, chosen):
                raise CorruptFileError(f"The download is corrupt: {problem}")
        for photos in chosen.photos:
            if not (ready / photos.path).is_dir():
                raise CorruptFileError(f"{chosen.homepage}: the download has no {photos.path}.")
            for problem in _check_photos(ready / photos.path, photos):
                raise CorruptFileError(f"The download is corrupt: {problem}")
        for file in chosen.files:
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(ready / file.path, target)
        for photos in chosen.photos:
            _move_photos(ready / photos.path, root / photos.path)
        shutil.rmtree(work, ignore_errors=True)
    return f"{chosen.name} was downloaded to {root} and checked by {describe_checksum(chosen)}."


def describe_checksum(chosen: DatasetEntry) -> str:
    """Return what the bytes of a download are compared with.

    MD5 and SHA-1 detect a broken download but not a forged one: against that there is only the
    encrypted connection, where no SHA-256 is published.
    """
    whole = [chosen.archive.checksum] if chosen.archive is not None else []
    named = whole or [file.checksum for file in chosen.files if file.checksum is not None]
    kinds = sorted({one.partition(":")[0] for one in named})
    if not kinds:
        return "size only"
    listed = ", ".join(_KINDS.get(kind, kind) for kind in kinds)
    if kinds == ["sha256"]:
        return listed
    return f"{listed}, which detects accidents but not forgery"


_KINDS = {"sha256": "SHA-256", "sha1": "SHA-1", "md5": "MD5"}


def _missing(root: Path, chosen: DatasetEntry) -> Iterator[str]:
    if chosen.name == "easyvqa":
        try:
            easy_vqa_folder(root)
        except UserError as problem:
            yield str(problem)
    for file in chosen.files:
        if not (root / file.path).is_file():
            yield f"{root / file.path} is missing."
    for photos in chosen.photos:
        if not (root / photos.path).is_dir():
            yield f"{root / photos.path} is missing."


def _check_file(path: Path, file: DatasetFile, chosen: DatasetEntry) -> Iterator[str]:
    size = path.stat().st_size
    if file.check is not None:
        found = list(file.check(path))
        yield from found
        if found:
            return
    if file.size is not None and size != file.size:
        yield f"{path} has {size} bytes, expected {file.size}; download it again."
    elif not size:
        yield f"{path} is empty; download it again."
    elif file.checksum is not None and not matches(path, file.checksum):
        for other in chosen.files:
            if other.checksum is not None and matches(path, other.checksum):
                yield f"{path} has the contents of {other.path}; download it again."
                return
        yield f"{path} is not the published file: expected checksum {file.checksum}."


def _check_photos(folder: Path, photos: PhotoFolder) -> Iterator[str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(found) < photos.count:
        yield f"{folder} has {len(found)} of {photos.count} photos; download the rest."
    for number, path in enumerate(found):
        if not path.stat().st_size:
            yield f"{path}, photo {number} of {len(found)}, is empty; download it again."


def _move_photos(ready: Path, folder: Path) -> None:
    """Move photos to their folder, replacing those of the same name; others stay."""
    for path in sorted(path for path in ready.rglob("*") if path.is_file()):
        target = folder / path.relative_to(ready)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


def _check_readers(root: Path, chosen: DatasetEntry) -> Iterator[str]:
    """Yield the errors of the readers of a dataset, and each photo that cannot be decoded."""
    from overt.data.images import open_image

    for reader in chosen.readers:
        try:
            files = getattr(reader(root), "files", ())
        except (UserError, CorruptFileError) as problem:
            yield str(problem)
            continue
        for path in files:
            try:
                open_image(path)
            except (UserError, CorruptFileError) as problem:
                yield str(problem)


def _check_records(path: Path, limits: Sequence[int], records: int) -> Iterator[str]:
    """Yield the records of a CIFAR file: their number, and labels within range."""
    length = len(limits) + CIFAR_PIXELS
    size = path.stat().st_size
    if size != records * length:
        yield f"{path} ends in record {size // length}: {size} bytes, expected {records * length}."
        return
    with open(path, "rb") as file:
        data = file.read()
    for place, limit in enumerate(limits):
        labels = data[place::length]
        wrong = next((row for row, label in enumerate(labels) if label >= limit), None)
        if wrong is not None:
            yield f"{path}: record {wrong} has label {labels[wrong]}, not 0 to {limit - 1}."


def _check_lines(path: Path, records: int) -> Iterator[str]:
    """Yield the lines of a TREC file: their number and form."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not re.fullmatch(rb"[A-Z]+:[a-z]+ .*\S\s*", line):
            yield f"{path}: line {number} is not `COARSE:fine question`."
            return
    if lines[-1] or len(lines) - 1 != records:
        yield f"{path} ends in line {len(lines)} of {records}; download it again."


def _check_easyvqa(root: Path) -> list[str]:
    from overt.data import easy_vqa, images

    problems = []
    folder = easy_vqa_folder(root)
    for part in ("train", "test"):
        try:
            easy_vqa.read_questions(folder / part, easy_vqa.read_answers(folder))
            for path in sorted((folder / part / "images").glob("*.png")):
                images.open_image(path)
        except (UserError, CorruptFileError) as problem:
            problems.append(str(problem))
    return problems


def _make_scenes(on_progress: Progress | None) -> str:
    from overt.data.scenes.dataset import Scenes, default_cache

    for split, count in DEMO_SCENES.items():
        Scenes(split, SCENES_SEED, count, on_progress=on_progress)
    return f"scenes are ready in {default_cache()}: {sum(DEMO_SCENES.values())} scenes."


def _readers(module: str, name: str, splits: Sequence[str]) -> tuple[DatasetReader, ...]:
    """Return the readers of these splits, imported when they are called.

    The split of a dataset without splits is "".
    """

    def reader(root: Path, split: str) -> Any:
        opened = getattr(import_module(f"overt.data.{module}"), name)
        return opened(root, split) if split else opened(root)

    return tuple(partial(reader, split=split) for split in splits)


DEMO_SCENES = {
    "train": 4000,
    "val": 100,
    "test": 504,
}  # exactly as many as the demo uses for questions
SCENES_SEED = 1
GENERATED = ("scenes", "sortclevr")  # generated by overt
WITHOUT_FOLDER = (*GENERATED, "easyvqa")  # they have no files in the data folder

_FORMATS: dict[str, Callable[..., Iterator[str]]] = {"cifar": _check_records, "trec": _check_lines}


def _parse_file(about: str | dict[str, Any]) -> DatasetFile:
    """Return a file of the catalog: a path alone, or with size, checksum, address and format."""
    if isinstance(about, str):
        return DatasetFile(about)
    check = None
    if "check" in about:
        options = dict(about["check"])
        check = partial(_FORMATS[options.pop("format")], **options)
    return DatasetFile(**{**about, "check": check})


def _parse_entry(about: dict[str, Any]) -> DatasetEntry:
    parts = {
        "files": tuple(map(_parse_file, about.get("files", ()))),
        "photos": tuple(PhotoFolder(*item) for item in about.get("photos", {}).items()),
        "archive": Archive(**about["archive"]) if "archive" in about else None,
        "readers": _readers(**about["readers"]) if "readers" in about else (),
    }
    return DatasetEntry(**{**about, **parts})


DATASETS: tuple[DatasetEntry, ...] = tuple(
    map(_parse_entry, json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))
)
