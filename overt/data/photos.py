"""Labelled photos in files of their own: what sets of large pictures are read into.

A photo is opened when a batch asks for it and brought to one canvas; its geometry leads back to the
file's own pixels. The lists and folders that name the photos are read when the set is opened, and
every file they name must be there.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.download import safe_join
from overt.data.images import How, Size, crop, open_image, prepare
from overt.data.splits import Split, rows_of, split_of
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import PixelGeometry

ALL = "all"  # the whole set: those who cross-validate make parts of their own
ENDINGS = (".jpg", ".jpeg")
MOST_BYTES = 100_000_000  # of a list; the longest there is has 5 MB

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the photo
Window = Callable[[int, Size], Box]


@dataclass(frozen=True)
class Entry:
    """One photo: its place below the folder of the set, with `/`, and its class number."""

    path: str
    label: int


def whole(place: int, size: Size) -> Box:
    """All of a photo of this size."""
    return (0.0, 0.0, float(size[1]), float(size[0]))


class PhotoSet:
    """One split of a set of photos with a class each, brought to a canvas of `size`.

    `how` brings a photo to the canvas (`images.crop`, `fit`, `stretch`). `window` says which part
    of the photo at a place is shown at all.
    """

    def __init__(
        self,
        name: str,
        split: str,
        folder: Path | str,
        entries: Sequence[Entry],
        classes: tuple[str, ...],
        size: Size,
        how: How = crop,
        window: Window = whole,
    ) -> None:
        if min(size) < 1:
            raise BadInput(f"A canvas of {size[0]} x {size[1]} pixels shows nothing.")
        self.name, self.split, self.classes, self.size = name, split, classes, size
        self._folder, self._entries, self._how, self._window = Path(folder), entries, how, window
        self.files = tuple(self._existing(entry) for entry in entries)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of samples: the set's and the file's."""
        return tuple(f"{self.name}/{self._entries[place].path}" for place in self.places(indices))

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class numbers, without opening a photo."""
        chosen = [self._entries[place].label for place in self.places(indices)]
        return torch.tensor(chosen, dtype=torch.long)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places of the split, opened now."""
        ready = [self._draw(place) for place in self.places(indices)]
        nothing = PixelGeometry.identity(0, self.size)
        return Batch(
            ids=self.ids(indices),
            images=torch.stack([image for image, _ in ready])
            if ready
            else torch.empty(0, 3, *self.size, dtype=torch.uint8),
            geometry=PixelGeometry.join([made for _, made in ready]) if ready else nothing,
            labels=self.labels(indices),
        )

    def digest(self) -> str:
        """A hash of the split, and of every photo in it with its name and class."""
        if self._digest is None:
            found = hashlib.sha256(f"{self.name} {self.split} {len(self.classes)}\n".encode())
            for entry, path in zip(self._entries, self.files, strict=True):
                found.update(f"{entry.label} {digest(path)} {entry.path}\n".encode())
            self._digest = found.hexdigest()
        return self._digest

    def places(self, indices: Sequence[int]) -> list[int]:
        """The indices as numbers, when all of them are in the split."""
        found = [int(place) for place in indices]
        for place in found:
            if not 0 <= place < len(self):
                raise BadInput(
                    f"{self.name} {self.split} has samples 0 to {len(self) - 1}, not {place}."
                )
        return found

    def _draw(self, place: int) -> tuple[Tensor, PixelGeometry]:
        photo, size = open_image(self.files[place])
        left, top, right, bottom = _edges(self._window(place, size), size)
        if right <= left or bottom <= top:
            raise Damaged(f"{self.files[place]}: the box of this photo shows nothing of it.")
        image, geometry = prepare(photo[top:bottom, left:right], self.size, self._how)
        return image, _cut_from(geometry, size, top, left)

    def _existing(self, entry: Entry) -> Path:
        path = _below(self._folder, entry.path)
        if path.is_dir():
            raise Damaged(f"{path} is a folder and no photo; rename it, or put it elsewhere.")
        if not path.is_file():
            whose = self.name or self._folder.resolve()  # the folder `.` has no name
            raise Damaged(f"{path} is missing, but {whose} names it; get it again.")
        return path


def target(shares: Float[Tensor, "b k"], cells: Size, geometry: PixelGeometry) -> AttentionMap:
    """Where attention should go, from the share of each cell that shows the thing; normalised.

    Where no cell shows it the row is zero and sees no cell, so that nothing counts it.
    """
    seen = (shares.sum(dim=-1, keepdim=True) > 0).expand(shares.shape)
    return AttentionMap.from_cells(shares, grid(*cells, geometry=geometry), seen).normalize()


def split_or_all(name: str) -> str:
    """The split of that name, or `all`; another name is `BadInput`."""
    return ALL if name == ALL else split_of(name)


def only_all(name: str, split: str) -> None:
    """Refuse a split of a data set that has no official one."""
    if split != ALL:
        raise BadInput(f"{name} has no official split {split!r}; take 'all' and cross-validate.")


def chosen(
    split: str, train: Sequence[Entry], test: Sequence[Entry], validation: int
) -> list[Entry]:
    """The entries of a split, out of those of the two official parts."""
    if split == ALL:
        return [*train, *test]
    part = test if split == Split.TEST else train
    return [part[row] for row in rows_of(split_of(split), len(part), validation)]


def read_lines(path: Path) -> list[str]:
    """The lines of a list that are not blank."""
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    if path.stat().st_size > MOST_BYTES:
        raise Damaged(f"{path} has {path.stat().st_size} bytes, too many for a list; get it again.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise Damaged(f"{path} is not text ({problem.reason}); get the file again.") from problem
    found = [line.strip() for line in text.split("\n")]
    found = [line for line in found if line]
    if not found:
        raise Damaged(f"{path} is empty; get the file again.")
    return found


def class_folders(folder: Path, count: int, besides: str | None = None) -> tuple[str, ...]:
    """The names of the `count` folders below `folder`, sorted, which numbers the classes.

    A folder named `besides` is no class, nor is a hidden one.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is missing; `overt data list` says how to get it.")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = tuple(name for name in found if name != besides and not name.startswith("."))
    if len(names) != count:
        raise Damaged(f"{folder} has {len(names)} classes, not {count}; get the data set again.")
    return names


def in_folders(folder: Path, names: Sequence[str]) -> list[Entry]:
    """The JPEGs in each of these folders below `folder`, a class a folder, sorted by name.

    What is no JPEG by its name is passed over: the official archives carry some.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is missing; `overt data list` says how to get it.")
    entries: list[Entry] = []
    for label, name in enumerate(names):
        photos = sorted(jpegs(folder / name)) if (folder / name).is_dir() else []
        if not photos:
            raise Damaged(f"{folder / name} has no photos; get the data set again.")
        entries += [Entry(f"{name}/{photo}", label) for photo in photos]
    return entries


def jpegs(folder: Path) -> Iterable[str]:
    """The names of the files in a folder that are JPEGs by their name."""
    for path in folder.iterdir():
        hidden = path.name.startswith(".")  # what some systems put beside a file
        if path.suffix.lower() in ENDINGS and not hidden and path.is_file():
            yield path.name


def apart(where: Path, entries: Iterable[Entry]) -> None:
    """Refuse lists that name a photo twice: it would be in train and in test, or count double."""
    seen: set[str] = set()
    for entry in entries:
        if entry.path in seen:
            raise Damaged(f"{where} names {entry.path!r} twice; get the lists again.")
        seen.add(entry.path)


def counted(where: Path, have: int, wanted: int | None) -> None:
    """Refuse a set with another number of photos than it has officially; None takes any number."""
    if wanted is not None and have != wanted:
        raise Damaged(f"{where} has {have} photos, not {wanted}; get the data set again.")


def _below(folder: Path, name: str) -> Path:
    try:
        return safe_join(folder, name)
    except BadInput as problem:
        raise Damaged(f"{folder}: a list names {name!r}, which leads out of it.") from problem


def _edges(box: Box, size: Size) -> tuple[int, int, int, int]:
    """The whole pixels that a box touches, within the photo."""
    left, top, right, bottom = box
    return (
        max(0, int(left // 1)),
        max(0, int(top // 1)),
        min(size[1], int(-(-right // 1))),
        min(size[0], int(-(-bottom // 1))),
    )


def _cut_from(geometry: PixelGeometry, size: Size, top: int, left: int) -> PixelGeometry:
    """The geometry of the whole photo, when that of a window of it at (top, left) is known."""
    corner = geometry.offset.new_tensor([top, left])
    kept = geometry.kept
    if kept is None:
        high = geometry.size.to(corner.dtype).flip(-1)
        kept = torch.cat([torch.zeros_like(high), high], dim=-1)
    return replace(
        geometry,
        size=torch.tensor([size], dtype=torch.long),
        offset=geometry.offset - corner * geometry.scale,
        kept=kept + torch.cat([corner.flip(-1)] * 2),
    )
