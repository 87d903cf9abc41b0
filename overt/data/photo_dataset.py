"""Labelled photos in files.

A photo is opened on demand and resized to one canvas; its geometry maps back to the pixels of the
file. Lists and folders of photos are read when the dataset is opened, and every file must exist.
"""

import csv
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.download import require_file, require_folder, safe_join
from overt.data.images import Resize, Size, crop, open_image, prepare_image
from overt.data.splits import Split, parse_split, split_indices
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from overt.io import digest

ALL = "all"  # the whole dataset, for cross-validation
ENDINGS = (".jpg", ".jpeg")
MOST_BYTES = 100_000_000  # of a list; the longest official one has 5 MB

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the photo
CropWindow = Callable[[int, Size], Box]


@dataclass(frozen=True)
class PhotoEntry:
    """A photo: its path below the folder of the dataset, with `/`, and its class."""

    path: str
    label: int


def whole_photo(place: int, size: Size) -> Box:
    """Return the box of the whole photo."""
    return (0.0, 0.0, float(size[1]), float(size[0]))


class PhotoDataset:
    """One split of a dataset of labelled photos.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        folder: Folder of the photos.
        entries: The photos with their classes.
        classes: Names of the classes.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        window: Returns the box of a photo to show, by its index and size.

    Raises:
        UserError: The canvas is empty.
        CorruptFileError: A photo is missing.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> dog = PhotoEntry("1.jpg", label=0)
        >>> with TemporaryDirectory() as folder:
        ...     Image.new("RGB", (8, 6)).save(Path(folder, "1.jpg"))
        ...     data = PhotoDataset("toy", "all", folder, [dog], ("dog",), size=(32, 32))
        ...     data.batch([0]).ids, data.batch([0]).images.shape
        (('toy/1.jpg',), torch.Size([1, 3, 32, 32]))
    """

    def __init__(
        self,
        name: str,
        split: str,
        folder: Path | str,
        entries: Sequence[PhotoEntry],
        classes: tuple[str, ...],
        size: Size,
        resize: Resize = crop,
        window: CropWindow = whole_photo,
    ) -> None:
        if min(size) < 1:
            raise UserError(f"size must be at least 1 x 1 pixels, got {size[0]} x {size[1]}.")
        self.name, self.split, self.classes, self.size = name, split, classes, size
        self._folder, self._entries = Path(folder), entries
        self._resize, self._window = resize, window
        self.files = tuple(self._existing(entry) for entry in entries)
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the ids of samples: dataset and file name."""
        return tuple(f"{self.name}/{self._entries[place].path}" for place in self.places(indices))

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class indices, without opening a photo."""
        chosen = [self._entries[place].label for place in self.places(indices)]
        return torch.tensor(chosen, dtype=torch.long)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Open and return the photos at `indices`."""
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
        """Return a hash of the split, and of every photo with its name and class."""
        if self._digest is None:
            found = hashlib.sha256(f"{self.name} {self.split} {len(self.classes)}\n".encode())
            for entry, path in zip(self._entries, self.files, strict=True):
                found.update(f"{entry.label} {digest(path)} {entry.path}\n".encode())
            self._digest = found.hexdigest()
        return self._digest

    def places(self, indices: Sequence[int]) -> list[int]:
        """Return the indices as integers; raise `UserError` if one is out of range."""
        return check_indices(self, indices, "samples")

    def _draw(self, place: int) -> tuple[Tensor, PixelGeometry]:
        photo, size = open_image(self.files[place])
        left, top, right, bottom = _edges(self._window(place, size), size)
        if right <= left or bottom <= top:
            raise CorruptFileError(f"{self.files[place]}: the box of this photo is outside of it.")
        image, geometry = prepare_image(photo[top:bottom, left:right], self.size, self._resize)
        return image, _cut_from(geometry, size, top, left)

    def _existing(self, entry: PhotoEntry) -> Path:
        path = _below(self._folder, entry.path)
        if path.is_dir():
            raise CorruptFileError(
                f"{path} is a folder, not a photo; rename it, or put it elsewhere."
            )
        if not path.is_file():
            whose = self.name or self._folder.resolve()  # the folder `.` has no name
            raise CorruptFileError(f"{path} is missing, but {whose} lists it; download it again.")
        return path


def density_target(
    density: Float[Tensor, "b k"], cells: Size, geometry: PixelGeometry
) -> AttentionMap:
    """Make a normalised target from a density, such as fixations or a heat map.

    A row without mass is zero and sees no cell, so that it counts nowhere.
    """
    seen = (density.sum(dim=-1, keepdim=True) > 0).expand(density.shape)
    return AttentionMap.from_cells(density, grid(*cells, geometry=geometry), seen).normalize()


def region_target(
    shares: Float[Tensor, "b k"], cells: Size, geometry: PixelGeometry
) -> AttentionMap:
    """Make a normalised target from the share of each cell that shows the object.

    The shares are kept as `coverage`, which localization metrics read. A row without the object is
    zero and sees no cell, so that it counts nowhere.
    """
    seen = (shares.sum(dim=-1, keepdim=True) > 0).expand(shares.shape)
    return AttentionMap.from_coverage(shares, grid(*cells, geometry=geometry), seen)


def people_maps(maps: Float[Tensor, "b p k"], cells: Size, geometry: PixelGeometry) -> AttentionMap:
    """Return the map of each person, one query per person; a person without mass sees no cell."""
    return AttentionMap(
        rearrange(maps, "b p k -> b 1 1 p k"),
        grid(*cells, geometry=geometry),
        words(maps.shape[1], name="people"),
        (maps.sum(dim=-1, keepdim=True) > 0).expand(maps.shape),
        Kind.AMOUNT,
    )


def parse_split_or_all(name: str) -> str:
    """Return the split of that name, or `all`; raise `UserError` for another name."""
    return ALL if name == ALL else parse_split(name)


def check_only_all(name: str, split: str) -> None:
    """Raise `UserError` for a split of a dataset that has no official one."""
    if split != ALL:
        raise UserError(f"{name} has no official split {split!r}; use 'all' and cross-validate.")


def select_split(
    split: str, train: Sequence[PhotoEntry], test: Sequence[PhotoEntry], validation: int
) -> list[PhotoEntry]:
    """Return the entries of a split, from those of the two official parts."""
    if split == ALL:
        return [*train, *test]
    part = test if split == Split.TEST else train
    return [part[row] for row in split_indices(parse_split(split), len(part), validation)]


def read_lines(path: Path) -> list[str]:
    """Read the lines of a list that are not blank."""
    require_file(path)
    if path.stat().st_size > MOST_BYTES:
        raise CorruptFileError(
            f"{path} has {path.stat().st_size} bytes, too many for a list; download it again."
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise CorruptFileError(
            f"{path} is not text ({problem.reason}); download the file again."
        ) from problem
    found = [line.strip() for line in text.split("\n")]
    found = [line for line in found if line]
    if not found:
        raise CorruptFileError(f"{path} is empty; download the file again.")
    return found


def iterate_csv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a table that has these columns."""
    require_file(path)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.reader(file, strict=True)
            if tuple(next(table, ())) != columns:
                raise CorruptFileError(
                    f"{path} does not start with {','.join(columns)}; download it again."
                )
            for row in table:
                yield table.line_num, row
    except (csv.Error, UnicodeDecodeError) as problem:
        raise CorruptFileError(
            f"{path} is not a table of text: {problem}; download it again."
        ) from problem


def class_folders(folder: Path, count: int, besides: str | None = None) -> tuple[str, ...]:
    """Return the names of the `count` folders below `folder`, sorted, which numbers the classes.

    A folder named `besides` and hidden folders are not classes.
    """
    require_folder(folder)
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = tuple(name for name in found if name != besides and not name.startswith("."))
    if len(names) != count:
        raise CorruptFileError(
            f"{folder} has {len(names)} classes, expected {count}; download the dataset again."
        )
    return names


def list_class_photos(folder: Path, names: Sequence[str]) -> list[PhotoEntry]:
    """Return the JPEGs in each of these folders below `folder`, one class per folder, sorted by
    name.

    Files without a JPEG extension are skipped: the official archives have some.
    """
    require_folder(folder)
    entries: list[PhotoEntry] = []
    for label, name in enumerate(names):
        photos = sorted(list_jpegs(folder / name)) if (folder / name).is_dir() else []
        if not photos:
            raise CorruptFileError(f"{folder / name} has no photos; download the dataset again.")
        entries += [PhotoEntry(f"{name}/{photo}", label) for photo in photos]
    return entries


def open_class_folders(
    name: str,
    split: str,
    folder: Path,
    classes: int,
    photos: int | None,
    size: Size,
    resize: Resize,
    besides: str | None = None,
) -> PhotoDataset:
    """Open a dataset without an official split that has one folder of photos per class.

    A class is named by its folder, without a number and a dot before the name.
    """
    check_only_all(name, split)
    names = class_folders(folder, classes, besides)
    entries = list_class_photos(folder, names)
    check_photo_count(folder, len(entries), photos)
    shown = tuple(one.split(".", 1)[-1] for one in names)
    return PhotoDataset(name, split, folder, entries, shown, size, resize)


def list_jpegs(folder: Path) -> Iterable[str]:
    """Yield the names of the files in a folder that have a JPEG extension."""
    for path in folder.iterdir():
        hidden = path.name.startswith(".")  # metadata that some systems put beside a file
        if path.suffix.lower() in ENDINGS and not hidden and path.is_file():
            yield path.name


def check_distinct(where: Path, entries: Iterable[PhotoEntry]) -> None:
    """Raise `CorruptFileError` for a photo that is listed twice, such as in train and test."""
    seen: set[str] = set()
    for entry in entries:
        if entry.path in seen:
            raise CorruptFileError(f"{where} lists {entry.path!r} twice; download the lists again.")
        seen.add(entry.path)


def check_photo_count(where: Path, have: int, wanted: int | None) -> None:
    """Raise `CorruptFileError` for an unexpected number of photos; None accepts any number."""
    check_count(where, have, wanted, "photos", "the dataset")


def check_count(where: Path, have: int, wanted: int | None, what: str, source: str = "it") -> None:
    """Raise `CorruptFileError` for an unexpected number of entries; None accepts any number."""
    if wanted is not None and have != wanted:
        raise CorruptFileError(
            f"{where} has {have} {what}, expected {wanted}; download {source} again."
        )


def _below(folder: Path, name: str) -> Path:
    try:
        return safe_join(folder, name)
    except UserError as problem:
        raise CorruptFileError(f"{folder}: {name!r} in a list points outside of it.") from problem


def _edges(box: Box, size: Size) -> tuple[int, int, int, int]:
    """Return the pixels that a box touches, within the photo."""
    left, top, right, bottom = box
    return (
        max(0, int(left // 1)),
        max(0, int(top // 1)),
        min(size[1], int(-(-right // 1))),
        min(size[0], int(-(-bottom // 1))),
    )


def _cut_from(geometry: PixelGeometry, size: Size, top: int, left: int) -> PixelGeometry:
    """Return the geometry of the whole photo, given that of a window at (top, left)."""
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
