"""OSIE: photos with the free-viewing fixations of fifteen people.

Xu, Jiang, Wang, Kankanhalli and Zhao, "Predicting Human Gaze beyond Pixels", Journal of Vision
2014, https://github.com/NUS-VIP/predicting-human-gaze-beyond-pixels. `osie/` has the photos in
`images/` and `fixations.json`: for every photo and person [[x...], [y...], [ms...]], in pixels of
800 x 600, the size at which the photos were shown.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.download import require_file
from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import (
    ALL,
    PhotoDataset,
    PhotoEntry,
    check_count,
    check_only_all,
    density_target,
    people_maps,
)
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from overt.io import digest, read_json

FOLDER = "osie"
PHOTOS = 700
SHOWN = (600, 800)  # height and width on the screen
DEGREE = 24.0  # screen pixels per degree of visual angle: 800 pixels were 33.7 degrees
SIZE, CELLS = (224, 224), (14, 14)


@dataclass(frozen=True, eq=False)
class Fixations:
    """Fixations of one person in order: (y, x) in screen pixels, and durations in ms."""

    points: Float[Tensor, "n 2"]
    times: Float[Tensor, " n"]


class Osie:
    """Photos with the density of people's fixations as target.

    Every fixation is a Gaussian of `bandwidth` screen pixels and counts the same, whatever its
    duration. The target is the mean over people of the share of their fixations in each cell.

    Args:
        root: Data folder, see `data_root`.
        split: `all`; there is no official split.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.
        bandwidth: Standard deviation in screen pixels; the default is one degree of visual angle. 0
            counts fixations.
        photos: Expected number of photos; None accepts any number.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> person = [[400, 100], [300, 200], [250, 180]]  # two fixations: x, y, milliseconds
        >>> with TemporaryDirectory() as root:
        ...     write_json(Path(root, FOLDER, "fixations.json"), {"1001.jpg": [person]})
        ...     Path(root, FOLDER, "images").mkdir()
        ...     Image.new("RGB", (800, 600)).save(Path(root, FOLDER, "images", "1001.jpg"))
        ...     data = Osie(root, photos=None)
        ...     data.batch([0]).target.shape, data.points([0])[0][0].tolist()
        ((1, 1, 1, 1, 196), [[300.0, 400.0], [200.0, 100.0]])
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        size: Size = SIZE,
        resize: Resize = crop,
        cells: Size = CELLS,
        bandwidth: float = DEGREE,
        photos: int | None = PHOTOS,
    ) -> None:
        root = Path(root)
        check_only_all("osie", split)
        if bandwidth < 0:
            raise UserError(f"bandwidth must be at least 0, got {bandwidth}; 0 counts fixations.")
        self.name, self.split, self.cells, self.bandwidth = "osie", split, cells, bandwidth
        self._path = root / FOLDER / "fixations.json"
        table = read_fixations(self._path)
        check_count(self._path, len(table), photos, "photos")
        self._people = list(table.values())
        entries = [PhotoEntry(name, 0) for name in table]
        folder = root / FOLDER / "images"
        self._photos = PhotoDataset("osie", split, folder, entries, ("photo",), size, resize)
        self.files = self._photos.files
        self._brought: dict[int, PixelGeometry] = {}
        self._everybody: dict[tuple[float, ...], Float[Tensor, " k"]] = {}

    def __len__(self) -> int:
        return len(self._photos)

    def fixations(self, indices: Sequence[int]) -> list[tuple[Fixations, ...]]:
        """Return the fixations of each person for each photo, in screen pixels."""
        return [self._people[place] for place in self._photos.places(indices)]

    def points(self, indices: Sequence[int]) -> list[list[Float[Tensor, "n 2"]]]:
        """Return the fixated points (y, x) of each person in pixels of the stored photo."""
        return self._points(indices, self._geometry(indices).size)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the photos at `indices`, with the fixation density as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        maps = self._maps(indices, found.geometry, self.bandwidth)
        shares = maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-12)
        wanted = density_target(shares.mean(dim=1), self.cells, found.geometry)
        return replace(found, labels=None, target=wanted)

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Return the smoothed fixations of each person in each cell, one query per person.

        `.each_row()` makes a sample of every person: agreement between people is the human ceiling.
        """
        return self._each(indices, self.bandwidth)

    def counts(self, indices: Sequence[int]) -> AttentionMap:
        """Return the number of fixations of each person in each cell, one query per person, not
        smoothed.

        A person without a fixation on the canvas sees no cell.
        """
        return self._each(indices, 0.0)

    def others(self, indices: Sequence[int]) -> AttentionMap:
        """Return the number of fixations on all other photos in each cell of this one."""
        return self._elsewhere(indices, 0.0)

    def prior(self, indices: Sequence[int]) -> AttentionMap:
        """Return the density of all fixations on other photos: where people look regardless of the
        image.

        Each fixation is a Gaussian of the dataset's bandwidth; no photo is in its own prior.
        """
        return self._elsewhere(indices, self.bandwidth).normalize()

    def digest(self) -> str:
        """Return a hash of the photos, the fixations and the bandwidth."""
        about = f"osie {self.bandwidth} {digest(self._path)} {self._photos.digest()}"
        return hashlib.sha256(about.encode()).hexdigest()

    def _each(self, indices: Sequence[int], bandwidth: float) -> AttentionMap:
        geometry = self._geometry(indices)
        return people_maps(self._maps(indices, geometry, bandwidth), self.cells, geometry)

    def _elsewhere(self, indices: Sequence[int], bandwidth: float) -> AttentionMap:
        """Return the fixations on all photos in the cells, minus those on the photo itself."""
        geometry = self._geometry(indices)
        own = self._maps(indices, geometry, bandwidth).double().sum(dim=1)
        whole = torch.zeros_like(own)
        for row in range(len(own)):
            whole[row] = self._everywhere(geometry[row], bandwidth)
        rest = whole - own
        rest = torch.where(rest > 1e-6 * whole, rest, 0)  # less is a rounding error
        return AttentionMap.from_cells(rest.float(), grid(*self.cells, geometry=geometry))

    def _everywhere(self, one: PixelGeometry, bandwidth: float) -> Float[Tensor, " k"]:
        """Return all fixations of the dataset on the cells of a photo; cached by geometry."""
        parts = (one.size, one.scale, one.offset, one.cells(self.cells))
        key = (bandwidth, *(value for part in parts for value in part.flatten().tolist()))
        if key not in self._everybody:
            screen = [person.points for people in self._people for person in people]
            scale = one.size[0].double() / torch.tensor(SHOWN, dtype=torch.float64)
            points = (torch.cat(screen).double() * scale).float()
            spread = bandwidth * float(one.size[0, 0]) / SHOWN[0]
            self._everybody[key] = one.density([points], self.cells, spread)[0]
        return self._everybody[key]

    def _geometry(self, indices: Sequence[int]) -> PixelGeometry:
        """Return how each photo was resized; a photo is opened for it once."""
        places = self._photos.places(indices)
        for place in places:
            if place not in self._brought:
                found = self._photos.batch([place]).geometry
                assert found is not None
                self._brought[place] = found
        if not places:
            return PixelGeometry.identity(0, self._photos.size)
        return PixelGeometry.join([self._brought[place] for place in places])

    def _maps(
        self, indices: Sequence[int], geometry: PixelGeometry, bandwidth: float
    ) -> Float[Tensor, "b p k"]:
        points = self._points(indices, geometry.size)
        most = max([1, *map(len, points)])
        maps = torch.zeros(len(points), most, self.cells[0] * self.cells[1])
        for row, people in enumerate(points):
            if people:
                alone = geometry[torch.full((len(people),), row)]
                scale = float(geometry.size[row, 0]) / SHOWN[0]
                maps[row, : len(people)] = alone.density(people, self.cells, bandwidth * scale)
        return maps

    def _points(self, indices: Sequence[int], sizes: Tensor) -> list[list[Tensor]]:
        found = []
        for people, size in zip(self.fixations(indices), sizes, strict=True):
            scale = size.double() / torch.tensor(SHOWN, dtype=torch.float64)
            found.append([(person.points.double() * scale).float() for person in people])
        return found


def read_fixations(path: Path) -> dict[str, tuple[Fixations, ...]]:
    """Read the fixations of every photo and person, and check them."""
    require_file(path)
    table = read_json(path)
    if not isinstance(table, dict) or not table:
        raise CorruptFileError(f"{path} is not a table of photos; download it again.")
    return {name: _people(path, name, people) for name, people in table.items()}


def _people(path: Path, photo: str, people: object) -> tuple[Fixations, ...]:
    if not isinstance(people, list) or not people:
        raise CorruptFileError(f"{path}: {photo} has no people; download it again.")
    found = []
    for number, person in enumerate(people):
        try:
            across, down, times = (torch.tensor(part, dtype=torch.float32) for part in person)
            points = torch.stack([down, across], dim=-1)
            good = points.ndim == 2 and times.shape == across.shape
        except (TypeError, ValueError, RuntimeError) as problem:
            raise _wrong(path, photo, number) from problem
        limits = torch.tensor(SHOWN)
        if not good or bool(((points < 0) | (points > limits)).any()):
            raise _wrong(path, photo, number)
        found.append(Fixations(points, times))
    return tuple(found)


def _wrong(path: Path, photo: str, number: int) -> CorruptFileError:
    return CorruptFileError(
        f"{path}: person {number} of {photo} has no fixations [[x...], [y...], [ms...]] on the "
        "screen; download it again."
    )
