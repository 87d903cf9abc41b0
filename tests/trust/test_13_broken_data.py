"""Trust 13: a broken shard stops the work and is named; skipping is asked for, and counted."""

import base64
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from overt import files
from overt.data import cifar, sets, stl10
from overt.data.batch import Batch
from overt.data.bottomup import BottomUp
from overt.data.features import FeatureCache, Key, build
from overt.data.photos import Entry, PhotoSet
from overt.data.skipping import readable
from overt.errors import BadInput, Damaged
from overt.recipes.opening import locate, open_model
from overt.supervise.surrogate.kept import Surrogates
from overt.supervise.surrogate.making import surrogates
from overt.supervise.surrogate.masks import WithoutWords
from tests.recipes import foreign
from tests.supervise.surrogate.toys import Planted, Toys

Fault = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Store:
    """A kind of data in shards: made in a folder, whose first two shards and reader it gives."""

    make: Callable[[Path], tuple[Path, Path]]
    read: Callable[[Path], object]
    naive: Callable[[Path], object]


# --- faults; each is done to the second of two shards


def truncated(first: Path, second: Path) -> None:
    path = _file(second)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])


def missing(first: Path, second: Path) -> None:
    shutil.rmtree(second) if second.is_dir() else second.unlink()


def swapped(first: Path, second: Path) -> None:
    aside = second.with_name("aside")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def duplicated(first: Path, second: Path) -> None:
    missing(first, second)
    shutil.copytree(first, second) if first.is_dir() else shutil.copy(first, second)


def not_a_number(first: Path, second: Path) -> None:
    """One number of the shard, and a manifest that says that it belongs there."""
    path = _file(second)
    if path.suffix == ".tsv":
        lines = path.read_bytes().splitlines()
        fields = lines[1].split(b"\t")
        values = np.frombuffer(base64.b64decode(fields[5]), "<f4").copy()
        values[3] = np.nan
        fields[5] = base64.b64encode(values.tobytes())
        lines[1] = b"\t".join(fields)
        path.write_bytes(b"\n".join(lines) + b"\n")
        return
    values = np.load(path)
    values[1] = np.nan
    copy = Path(shutil.copytree(second, second.parent.parent / "copy"))
    with files.writing(second) as inside:
        for old in copy.iterdir():
            if old.name != files.MANIFEST:
                shutil.copy(old, inside / old.name)
        np.save(inside / path.name, values)
    shutil.rmtree(copy)


def _file(shard: Path) -> Path:
    """The file of a shard that holds its numbers."""
    if shard.is_file():
        return shard
    return next(shard / name for name in ("features.npy", "map-0.npy") if (shard / name).exists())


# --- stores


class Items:
    name, split = "items", "train"

    def __len__(self) -> int:
        return 12

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch(tuple(f"item-{i}" for i in indices), labels=torch.tensor(list(indices)))

    def digest(self) -> str:
        return "d"


def make_cache(place: Path) -> tuple[Path, Path]:
    def encode(batch: Batch) -> torch.Tensor:
        assert batch.labels is not None
        return batch.labels[:, None, None].float() + torch.zeros(1, 4, 8)

    build(place, Key("toy", "w", "t", "d"), Items(), encode, shard=4, batch=2)
    return place / "shard-00000", place / "shard-00001"


def make_surrogates(place: Path) -> tuple[Path, Path]:
    surrogates(Planted(), Toys(), place, [WithoutWords()], shard=3, batch=2)
    return place / "shard-00000", place / "shard-00001"


def read_surrogates(place: Path) -> object:
    found = Surrogates(place)
    return found.target(found.ids)


def make_cifar(place: Path) -> tuple[Path, Path]:
    dice = np.random.default_rng(0)
    folder = place / cifar.CIFAR10_FOLDER
    folder.mkdir(parents=True)
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = dice.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{stem}.bin").write_bytes(records.tobytes())
    return folder / "data_batch_2.bin", folder / "data_batch_3.bin"


def published(place: Path) -> sets.DataSet:
    """CIFAR-10 as if these files were the official ones, with their sizes and checksums."""
    official = sets.find("cifar10")
    stated = []
    for file in official.files:
        data = (place / file.path).read_bytes()
        mark = f"sha1:{hashlib.sha1(data).hexdigest()}"
        stated.append(replace(file, size=len(data), checksum=mark, look=None))
    return replace(official, files=tuple(stated), archive=None)


def read_cifar(place: Path) -> object:
    """Open the set, take its digest as a run does, and have `overt data check` look at it."""
    data = cifar.Cifar10(place, "train+val", records=8, validation=4)
    data.digest()
    chosen = OFFICIAL[place.parent.name]
    problems = [
        line for file in chosen.files for line in sets._check_file(place / file.path, file, chosen)
    ]
    if problems:
        raise Damaged(problems[0])
    return data.batch(range(len(data)))


OFFICIAL: dict[str, sets.DataSet] = {}


def make_regions(place: Path) -> tuple[Path, Path]:
    place.mkdir(parents=True)
    for name, photos in (("a", range(3)), ("b", range(3, 6))):
        rows = []
        for photo in photos:
            boxes, values = np.full((2, 4), photo, "<f4"), np.full((2, 8), photo + 1, "<f4")
            packed = [base64.b64encode(one.tobytes()).decode() for one in (boxes, values)]
            rows.append("\t".join([str(photo), "9", "9", "2", *packed]))
        (place / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    return place / "a.tsv", place / "b.tsv"


def read_regions(place: Path) -> object:
    return BottomUp(place).get(range(6)).features


def make_stl(place: Path) -> tuple[Path, Path]:
    dice = np.random.default_rng(0)
    folder = place / stl10.FOLDER
    folder.mkdir(parents=True)
    for part, count in (("test", 3), ("train", 4)):
        pixels = dice.integers(0, 256, (count, stl10.PIXELS), dtype=np.uint8)
        (folder / f"{part}_X.bin").write_bytes(pixels.tobytes())
        (folder / f"{part}_y.bin").write_bytes(bytes(range(1, count + 1)))
    return folder / "test_X.bin", folder / "train_X.bin"


def read_stl(place: Path) -> object:
    return [
        stl10.Stl10(place, split, records=count, validation=1).batch(range(3))
        for split, count in (("test", 3), ("train", 4))
    ]


def whole_files(pattern: str, kind: str) -> Callable[[Path], object]:
    """A reader that takes what lies there, as scripts do."""

    def read(place: Path) -> object:
        found = [np.fromfile(path, kind) for path in sorted(place.rglob(pattern))]
        return np.concatenate(found)

    return read


def whole_arrays(name: str) -> Callable[[Path], object]:
    def read(place: Path) -> object:
        return [np.load(path) for path in sorted(place.rglob(name))]

    return read


def whole_lines(place: Path) -> object:
    found = {}
    for path in sorted(place.glob("*.tsv")):
        for line in path.read_text().splitlines():
            fields = line.split("\t")
            data = base64.b64decode(fields[5] + "=" * (-len(fields[5]) % 4))
            found[fields[0]] = np.frombuffer(data[: len(data) // 4 * 4], "<f4")
    return found


STORES = {
    "feature cache": Store(
        make_cache, lambda place: FeatureCache(place).check(), whole_arrays("features.npy")
    ),
    "surrogates": Store(make_surrogates, read_surrogates, whole_arrays("map-0.npy")),
    "CIFAR-10": Store(make_cifar, read_cifar, whole_files("data_batch_*.bin", "u1")),
    "regions": Store(make_regions, read_regions, whole_lines),
    "STL-10": Store(make_stl, read_stl, whole_files("*_X.bin", "u1")),
}
FAULTS: tuple[Fault, ...] = (truncated, missing, swapped, duplicated, not_a_number)
# bytes are never NaN; lines that say whose they are may stand in any file
NO_SUCH_FAULT = {
    ("CIFAR-10", not_a_number),
    ("STL-10", not_a_number),
    ("regions", swapped),
}


def test_a_broken_shard_stops_the_work_and_is_named(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    stopped, silent, cases = 0, 0, 0
    for number, (name, store) in enumerate(STORES.items()):
        for fault in FAULTS:
            if (name, fault) in NO_SUCH_FAULT:
                continue
            place = tmp_path / f"{number}-{fault.__name__}" / "store"
            place.parent.mkdir()
            first, second = store.make(place)
            if name == "CIFAR-10":
                OFFICIAL[place.parent.name] = published(place)
            store.read(place)
            fault(first, second)
            cases += 1
            with pytest.raises((Damaged, BadInput)) as caught:
                store.read(place)
            told = str(caught.value)
            assert "\n" not in told
            named = [first.name, second.name, *([str(place)] if fault is missing else [])]
            assert any(one in told for one in named), (name, fault.__name__, told)
            assert re.search(r"\d", told.replace(str(tmp_path), "")), told  # an index
            stopped += 1
            try:
                store.naive(place)
                silent += 1
            except (OSError, ValueError, EOFError, IndexError):
                pass
    assert stopped == cases > 18 and silent > cases // 2
    reached(
        13,
        "truncated, missing, swapped, duplicated, NaN: stop, name file and index",
        f"{stopped} of {cases} stopped and named, over {len(STORES)} kinds of store",
        f"reading what is there takes {silent} of {cases} without a word",
    )


def test_shards_of_a_model_that_are_missing_or_cut_off_are_named(tmp_path: Path) -> None:
    folder = foreign.bert(tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for part, of_part in parts.items():
        save_file({one: weights[one] for one in of_part}, folder / part, {"format": "pt"})
    where = {one: part for part, of_part in parts.items() for one in of_part}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_model(locate(str(folder))).notes == ()
    second = folder / "part-2.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    with pytest.raises(Damaged, match="bert"):
        open_model(locate(str(folder)))
    second.unlink()
    with pytest.raises(BadInput, match=r"part-2\.safetensors"):
        open_model(locate(str(folder)))


def test_skipping_is_asked_for_counted_and_reported(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    for number in range(40):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    for number in (7, 30):
        data = (tmp_path / f"{number}.png").read_bytes()
        (tmp_path / f"{number}.png").write_bytes(data[:50])
    entries = [Entry(f"{number}.png", 0) for number in range(40)]
    photos = PhotoSet("own", "all", tmp_path, entries, ("photo",), (8, 8))
    with pytest.raises(Damaged, match=r"7\.png"):  # unasked it stops
        [photos.batch([number]) for number in range(40)]
    said: list[str] = []
    some = readable(photos, said.append)
    assert [one.index for one in some.skipped] == [7, 30] and len(some) == 38
    assert said[-1] == "2 of 40 items of own all were passed over." and len(said) == 3
    assert some.digest() != photos.digest()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        left = those_that_open(photos)
    lost = len(photos) - len(left)
    assert lost == 2 and told == []
    reached(
        13,
        "skipping only when asked, counted and reported",
        f"{len(some.skipped)} of {len(photos)} passed over, {len(said) - 1} named, 1 count told",
        f"`except: continue` loses {lost} of {len(photos)} without a word",
    )


def those_that_open(photos: PhotoSet) -> list[Batch]:
    """What a loader keeps that goes on whatever happens."""
    left = []
    for number in range(len(photos)):
        try:
            left.append(photos.batch([number]))
        except Exception:
            continue
    return left
