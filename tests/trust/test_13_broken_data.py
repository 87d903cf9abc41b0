"""Trust 13: broken shards raise with their name; skipping is opt-in and counted."""

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

from overt import io
from overt.data import catalog, cifar, stl10
from overt.data.batch import Batch
from overt.data.bottom_up import BottomUpFeatures
from overt.data.feature_cache import FeatureCache, FeatureKey, build_feature_cache
from overt.data.photo_dataset import PhotoDataset, PhotoEntry
from overt.data.skip_corrupt import skip_corrupt_items
from overt.errors import CorruptFileError, UserError
from overt.inspect.load_model import load_model, locate_model
from overt.targets.surrogate.generate import generate_surrogates
from overt.targets.surrogate.masks import RemoveWords
from overt.targets.surrogate.store import Surrogates
from tests.experiments import foreign
from tests.targets.surrogate.toys import Planted, Toys

Fault = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Store:
    """A sharded store: `make` returns two shards, `read` verifies, `naive` does not."""

    make: Callable[[Path], tuple[Path, Path]]
    read: Callable[[Path], object]
    naive: Callable[[Path], object]


# --- faults, applied to the second of two shards


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
    """Replace one number of the shard by NaN and write a valid manifest."""
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
    with io.atomic_folder(second) as inside:
        for old in copy.iterdir():
            if old.name != io.MANIFEST:
                shutil.copy(old, inside / old.name)
        np.save(inside / path.name, values)
    shutil.rmtree(copy)


def _file(shard: Path) -> Path:
    """Return the file of a shard with its numbers."""
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

    build_feature_cache(place, FeatureKey("toy", "w", "t", "d"), Items(), encode, shard=4, batch=2)
    return place / "shard-00000", place / "shard-00001"


def make_surrogates(place: Path) -> tuple[Path, Path]:
    generate_surrogates(Planted(), Toys(), place, [RemoveWords()], shard=3, batch=2)
    return place / "shard-00000", place / "shard-00001"


def read_surrogates(place: Path) -> object:
    found = Surrogates(place)
    return found.target(found.ids)


def make_cifar(place: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    folder = place / cifar.CIFAR10_FOLDER
    folder.mkdir(parents=True)
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{stem}.bin").write_bytes(records.tobytes())
    return folder / "data_batch_2.bin", folder / "data_batch_3.bin"


def local_catalog_entry(place: Path) -> catalog.DatasetEntry:
    """Return the CIFAR-10 entry with the sizes and checksums of these files."""
    official = catalog.find_dataset("cifar10")
    local_files = []
    for file in official.files:
        data = (place / file.path).read_bytes()
        mark = f"sha1:{hashlib.sha1(data).hexdigest()}"
        local_files.append(replace(file, size=len(data), checksum=mark, check=None))
    return replace(official, files=tuple(local_files), archive=None)


def read_cifar(place: Path) -> object:
    """Open the dataset, compute its digest as a run does, and check its files."""
    data = cifar.Cifar10(place, "train+val", records=8, validation=4)
    data.digest()
    entry = OFFICIAL[place.parent.name]
    problems = [
        line for file in entry.files for line in catalog._check_file(place / file.path, file, entry)
    ]
    if problems:
        raise CorruptFileError(problems[0])
    return data.batch(range(len(data)))


OFFICIAL: dict[str, catalog.DatasetEntry] = {}


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
    return BottomUpFeatures(place).get(range(6)).features


def make_stl(place: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    folder = place / stl10.FOLDER
    folder.mkdir(parents=True)
    for part, count in (("test", 3), ("train", 4)):
        pixels = rng.integers(0, 256, (count, stl10.PIXELS), dtype=np.uint8)
        (folder / f"{part}_X.bin").write_bytes(pixels.tobytes())
        (folder / f"{part}_y.bin").write_bytes(bytes(range(1, count + 1)))
    return folder / "test_X.bin", folder / "train_X.bin"


def read_stl(place: Path) -> object:
    return [
        stl10.Stl10(place, split, records=count, validation=1).batch(range(3))
        for split, count in (("test", 3), ("train", 4))
    ]


def naive_files(pattern: str, kind: str) -> Callable[[Path], object]:
    """Return a reader that concatenates all files without verification."""

    def read(place: Path) -> object:
        found = [np.fromfile(path, kind) for path in sorted(place.rglob(pattern))]
        return np.concatenate(found)

    return read


def naive_arrays(name: str) -> Callable[[Path], object]:
    def read(place: Path) -> object:
        return [np.load(path) for path in sorted(place.rglob(name))]

    return read


def naive_lines(place: Path) -> object:
    found = {}
    for path in sorted(place.glob("*.tsv")):
        for line in path.read_text().splitlines():
            fields = line.split("\t")
            data = base64.b64decode(fields[5] + "=" * (-len(fields[5]) % 4))
            found[fields[0]] = np.frombuffer(data[: len(data) // 4 * 4], "<f4")
    return found


STORES = {
    "feature cache": Store(
        make_cache, lambda place: FeatureCache(place).check(), naive_arrays("features.npy")
    ),
    "surrogates": Store(make_surrogates, read_surrogates, naive_arrays("map-0.npy")),
    "CIFAR-10": Store(make_cifar, read_cifar, naive_files("data_batch_*.bin", "u1")),
    "regions": Store(make_regions, read_regions, naive_lines),
    "STL-10": Store(make_stl, read_stl, naive_files("*_X.bin", "u1")),
}
FAULTS: tuple[Fault, ...] = (truncated, missing, swapped, duplicated, not_a_number)
# bytes are never NaN; lines with ids can be in any file
NO_SUCH_FAULT = {
    ("CIFAR-10", not_a_number),
    ("STL-10", not_a_number),
    ("regions", swapped),
}


@pytest.mark.long
def test_a_broken_shard_raises_with_its_name_and_index(
    tmp_path: Path, record_result: Callable[..., None]
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
                OFFICIAL[place.parent.name] = local_catalog_entry(place)
            store.read(place)
            fault(first, second)
            cases += 1
            with pytest.raises((CorruptFileError, UserError)) as caught:
                store.read(place)
            message = str(caught.value)
            assert "\n" not in message
            accepted_names = [first.name, second.name, *([str(place)] if fault is missing else [])]
            assert any(one in message for one in accepted_names), (name, fault.__name__, message)
            assert re.search(r"\d", message.replace(str(tmp_path), "")), message  # the index
            stopped += 1
            try:
                store.naive(place)
                silent += 1
            except (OSError, ValueError, EOFError, IndexError):
                pass
    assert stopped == cases > 18 and silent > cases // 2
    record_result(
        13,
        "truncated, missing, swapped, duplicated, NaN: error with file and index",
        f"{stopped} of {cases} raise with the name, over {len(STORES)} kinds of store",
        f"reading without checks accepts {silent} of {cases} without an error",
    )


def test_missing_or_truncated_model_shards_raise_with_their_name(tmp_path: Path) -> None:
    folder = foreign.bert(tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for part, part_names in parts.items():
        save_file({one: weights[one] for one in part_names}, folder / part, {"format": "pt"})
    part_by_weight = {one: part for part, part_names in parts.items() for one in part_names}
    index = {"metadata": {"total_size": 1}, "weight_map": part_by_weight}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(locate_model(str(folder))).notes == ()
    second = folder / "part-2.safetensors"
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptFileError, match="bert"):
        load_model(locate_model(str(folder)))
    second.unlink()
    with pytest.raises(UserError, match=r"part-2\.safetensors"):
        load_model(locate_model(str(folder)))


def test_skipping_is_opt_in_counted_and_reported(
    tmp_path: Path, record_result: Callable[..., None]
) -> None:
    for number in range(40):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    for number in (7, 30):
        data = (tmp_path / f"{number}.png").read_bytes()
        (tmp_path / f"{number}.png").write_bytes(data[:50])
    entries = [PhotoEntry(f"{number}.png", 0) for number in range(40)]
    photos = PhotoDataset("own", "all", tmp_path, entries, ("photo",), (8, 8))
    with pytest.raises(CorruptFileError, match=r"7\.png"):  # without skipping it raises
        [photos.batch([number]) for number in range(40)]
    messages: list[str] = []
    remaining = skip_corrupt_items(photos, messages.append)
    assert [one.index for one in remaining.skipped] == [7, 30] and len(remaining) == 38
    assert messages[-1] == "2 of 40 items of own all were skipped." and len(messages) == 3
    assert remaining.digest() != photos.digest()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        loaded = load_ignoring_errors(photos)
    lost = len(photos) - len(loaded)
    assert lost == 2 and caught_warnings == []
    record_result(
        13,
        "skipping is opt-in, counted and reported",
        f"{len(remaining.skipped)} of {len(photos)} skipped, {len(messages) - 1} listed, "
        "1 count reported",
        f"`except: continue` loses {lost} of {len(photos)} without an error",
    )


def load_ignoring_errors(photos: PhotoDataset) -> list[Batch]:
    """Load all samples and ignore every exception."""
    loaded = []
    for number in range(len(photos)):
        try:
            loaded.append(photos.batch([number]))
        except Exception:
            continue
    return loaded
