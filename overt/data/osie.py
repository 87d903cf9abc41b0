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
        root: Path,
        split: str = ALL,
        size: Size = SIZE,
        how: How = crop,
        cells: Size = CELLS,
        bandwidth: float = DEGREE,
        photos: int | None = PHOTOS,
    ) -> None:
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

    def __len__(self) -> int:
        return len(self._photos)

    def fixations(self, indices: Sequence[int]) -> list[tuple[Fixations, ...]]:
        """What each person looked at, photo by photo, in pixels of the screen."""
        return [self._people[place] for place in self._photos.places(indices)]

    def points(self, indices: Sequence[int]) -> list[list[Float[Tensor, "n 2"]]]:
        """Where each person looked, (y, x) in pixels of the photo as it is stored."""
        sizes = self._photos.batch(indices).geometry
        assert sizes is not None
        return self._points(indices, sizes.size)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places, with where people looked as target."""
        found, maps = self._maps(indices)
        shares = maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-12)
        assert found.geometry is not None
        wanted = target(shares.mean(dim=1), self.cells, found.geometry)
        return replace(found, labels=None, target=wanted)

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Where each person looked, one query a person: fixations in each cell.

        `.each_row()` makes a sample of every person: what one says of the others is the ceiling.
        """
        found, maps = self._maps(indices)
        return AttentionMap(
            rearrange(maps, "b p k -> b 1 1 p k"),
            grid(*self.cells, geometry=found.geometry),
            words(maps.shape[1], name="people"),
            (maps.sum(dim=-1, keepdim=True) > 0).expand(maps.shape),
            Kind.AMOUNT,
        )

    def digest(self) -> str:
        """A hash of the photos, the fixations and the bandwidth."""
        about = f"osie {self.bandwidth} {digest(self._path)} {self._photos.digest()}"
        return hashlib.sha256(about.encode()).hexdigest()

    def _maps(self, indices: Sequence[int]) -> tuple[Batch, Float[Tensor, "b p k"]]:
        found = self._photos.batch(indices)
        geometry = found.geometry
        assert geometry is not None
        points = self._points(indices, geometry.size)
        most = max([1, *map(len, points)])
        maps = torch.zeros(len(points), most, self.cells[0] * self.cells[1])
        for row, people in enumerate(points):
            if people:
                alone = geometry[torch.full((len(people),), row)]
                scale = float(geometry.size[row, 0]) / SHOWN[0]
                density = alone.density(people, self.cells, self.bandwidth * scale)
                maps[row, : len(people)] = density
        return found, maps

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
