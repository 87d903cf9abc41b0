"""OSIE: photos, and where fifteen people looked when nothing was asked of them.

Xu, Jiang, Wang, Kankanhalli and Zhao, "Predicting Human Gaze beyond Pixels", Journal of Vision
2014, https://github.com/NUS-VIP/predicting-human-gaze-beyond-pixels. In `osie/` lie the photos,
`images/`, and `fixations.json`: for every photo and person [[x...], [y...], [ms...]], in pixels of
800 x 600, the size at which the photos were shown.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.images import How, Size, crop
from overt.data.photos import ALL, Entry, PhotoSet, only_all, target
from overt.errors import BadInput, Damaged
from overt.files import digest, read_json
from overt.geometry import PixelGeometry

FOLDER = "osie"
PHOTOS = 700
SHOWN = (600, 800)  # height and width on the screen
DEGREE = (
    24.0  # pixels on the screen in one degree of the eye's field: 800 of them were 33.7 degrees
)
SIZE, CELLS = (224, 224), (14, 14)


@dataclass(frozen=True, eq=False)
class Fixations:
    """Where one person looked in turn, (y, x) in pixels of the screen, and for how many ms."""

    points: Float[Tensor, "n 2"]
    times: Float[Tensor, " n"]


class Osie:
    """Photos with the density of people's fixations as target; there is one split, `all`.

    Every fixation is a Gaussian of `bandwidth` screen pixels, one degree of the eye's field unless
    said otherwise, and counts the same, however long it was. The target is the mean over people of
    the share of their fixations in each cell. `photos` says how many there are; None takes any
    number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        size: Size = SIZE,
        how: How = crop,
        cells: Size = CELLS,
        bandwidth: float = DEGREE,
        photos: int | None = PHOTOS,
    ) -> None:
        root = Path(root)
        only_all("osie", split)
        if bandwidth < 0:
            raise BadInput(f"A bandwidth of {bandwidth} pixels cannot be; 0 counts fixations.")
        self.name, self.split, self.cells, self.bandwidth = "osie", split, cells, bandwidth
        self._path = root / FOLDER / "fixations.json"
        table = read_fixations(self._path)
        if photos is not None and len(table) != photos:
            raise Damaged(f"{self._path} has {len(table)} photos, not {photos}; get it again.")
        self._people = list(table.values())
        entries = [Entry(name, 0) for name in table]
        folder = root / FOLDER / "images"
        self._photos = PhotoSet("osie", split, folder, entries, ("photo",), size, how)
        self.files = self._photos.files
        self._brought: dict[int, PixelGeometry] = {}
        self._everybody: dict[tuple[float, ...], Float[Tensor, " k"]] = {}

    def __len__(self) -> int:
        return len(self._photos)

    def fixations(self, indices: Sequence[int]) -> list[tuple[Fixations, ...]]:
        """What each person looked at, photo by photo, in pixels of the screen."""
        return [self._people[place] for place in self._photos.places(indices)]

    def points(self, indices: Sequence[int]) -> list[list[Float[Tensor, "n 2"]]]:
        """Where each person looked, (y, x) in pixels of the photo as it is stored."""
        return self._points(indices, self._geometry(indices).size)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places, with where people looked as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        maps = self._maps(indices, found.geometry, self.bandwidth)
        shares = maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-12)
        wanted = target(shares.mean(dim=1), self.cells, found.geometry)
        return replace(found, labels=None, target=wanted)

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Where each person looked, one query a person: fixations in each cell.

        `.each_row()` makes a sample of every person: what one says of the others is the ceiling.
        """
        return self._each(indices, self.bandwidth)

    def counts(self, indices: Sequence[int]) -> AttentionMap:
        """How many fixations of each person fell into each cell, one query a person, not smoothed.

        A person none of whose fixations fell on the canvas sees no cell.
        """
        return self._each(indices, 0.0)

    def others(self, indices: Sequence[int]) -> AttentionMap:
        """How many fixations on all other photos would fall into each cell of this one."""
        return self._elsewhere(indices, 0.0)

    def prior(self, indices: Sequence[int]) -> AttentionMap:
        """Where people look whatever is shown: the density of all fixations on other photos.

        Each is a Gaussian of the set's bandwidth, and no photo is in its own prior.
        """
        return self._elsewhere(indices, self.bandwidth).normalize()

    def digest(self) -> str:
        """A hash of the photos, the fixations and the bandwidth."""
        about = f"osie {self.bandwidth} {digest(self._path)} {self._photos.digest()}"
        return hashlib.sha256(about.encode()).hexdigest()

    def _each(self, indices: Sequence[int], bandwidth: float) -> AttentionMap:
        geometry = self._geometry(indices)
        maps = self._maps(indices, geometry, bandwidth)
        return AttentionMap(
            rearrange(maps, "b p k -> b 1 1 p k"),
            grid(*self.cells, geometry=geometry),
            words(maps.shape[1], name="people"),
            (maps.sum(dim=-1, keepdim=True) > 0).expand(maps.shape),
            Kind.AMOUNT,
        )

    def _elsewhere(self, indices: Sequence[int], bandwidth: float) -> AttentionMap:
        """What the fixations on all photos put into the cells, less those on the photo itself."""
        geometry = self._geometry(indices)
        own = self._maps(indices, geometry, bandwidth).double().sum(dim=1)
        whole = torch.zeros_like(own)
        for row in range(len(own)):
            whole[row] = self._everywhere(geometry[row], bandwidth)
        rest = torch.where(whole - own > 1e-6 * whole, whole - own, 0)  # rounding is no fixation
        return AttentionMap.from_cells(rest.float(), grid(*self.cells, geometry=geometry))

    def _everywhere(self, one: PixelGeometry, bandwidth: float) -> Float[Tensor, " k"]:
        """All fixations of the data set on the cells of a photo; kept for photos brought alike."""
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
        """How each photo was brought to the canvas; a photo is opened for it once."""
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
    """The people of every photo; one in another form is `Damaged`, with photo and person."""
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    table = read_json(path)
    if not isinstance(table, dict) or not table:
        raise Damaged(f"{path} is no table of photos; get it again.")
    return {name: _people(path, name, people) for name, people in table.items()}


def _people(path: Path, photo: str, people: object) -> tuple[Fixations, ...]:
    if not isinstance(people, list) or not people:
        raise Damaged(f"{path}: nobody looked at {photo}; get it again.")
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


def _wrong(path: Path, photo: str, number: int) -> Damaged:
    return Damaged(
        f"{path}: person {number} of {photo} has no fixations [[x...], [y...], [ms...]] on the "
        "screen; get it again."
    )
