"""Your own photos or texts with people's attention: one small class each.

    mine = OwnMaps("gaze", photos, lambda photo: [read_map(photo.with_suffix(".png"))])
    measure.scorecard(model, mine)

What people did is given by a function, so that it can come from anywhere: pictures beside photos,
arrays, a table of marks. Any other source will do as well, if its batches have a `target`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.hat import Fuse, gathered, mean_map, read_map
from overt.data.images import How, Size, stretch
from overt.data.marks import Marked, by_person, map_of
from overt.data.photos import ALL, Entry, PhotoSet, target
from overt.data.vocabulary import Reader, pad
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry, TextGeometry

SIZE, CELLS = (224, 224), (14, 14)

Heat = Float[Tensor, "y x"]
Looks = Callable[[Path], Sequence[Heat]]  # a photo -> one picture of weights a person


def pictures_in(folder: Path | str) -> Looks:
    """The grey pictures in a folder: NAME.png of a photo called NAME, or NAME_1.png and so on."""
    folder = Path(folder)

    def looks(photo: Path) -> list[Heat]:
        named = [folder / f"{photo.stem}.png", *_numbered(folder, photo.stem)]
        return [read_map(path) for path in named if path.is_file()]

    return looks


class OwnMaps:
    """Photos of your own with where people looked: `looks(photo)` gives one picture a person.

    A picture of weights may have any size; it is stretched over the whole photo, brought to the
    canvas as the photo was, and what falls into a cell is its weight. A photo that nobody looked
    at has a target that sees no cell, and counts nowhere. `fuse` makes one map of several people's,
    and `labels` are the classes of photos by name, where there are any.
    """

    def __init__(
        self,
        name: str,
        photos: Sequence[Path | str],
        looks: Looks,
        size: Size = SIZE,
        how: How = stretch,
        cells: Size = CELLS,
        fuse: Fuse = mean_map,
        labels: Mapping[str, int] | None = None,
    ) -> None:
        if not photos:
            raise BadInput(f"{name} has no photos.")
        paths = [Path(photo) for photo in photos]
        folders = {photo.parent for photo in paths}
        if len(folders) > 1:
            raise BadInput(f"The photos of {name} lie in {len(folders)} folders; put them in one.")
        self.name, self.split, self.cells = name, ALL, cells
        self._looks, self._fuse, self._labels = looks, fuse, labels
        entries = [Entry(photo.name, _label(labels, photo)) for photo in paths]
        self._photos = PhotoSet(name, ALL, folders.pop(), entries, ("photo",), size, how)
        self.files = self._photos.files

    def __len__(self) -> int:
        return len(self._photos)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The photos at these places, with where people looked as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        maps = self._maps(indices, found.geometry)
        fused = self._fuse(maps, maps.sum(dim=-1) > 0)
        labels = found.labels if self._labels is not None else None
        return replace(found, labels=labels, target=target(fused, self.cells, found.geometry))

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Where each person looked, one query a person; one who is not there sees no cell."""
        geometry = self._photos.batch(indices).geometry
        assert geometry is not None
        maps = self._maps(indices, geometry)
        return AttentionMap(
            rearrange(maps, "b p k -> b 1 1 p k"),
            grid(*self.cells, geometry=geometry),
            words(maps.shape[1], name="people"),
            (maps.sum(dim=-1, keepdim=True) > 0).expand(maps.shape),
            Kind.AMOUNT,
        )

    def digest(self) -> str:
        """A hash of the photos and of all that people did."""
        whole = hashlib.sha256(f"{self._fuse.__name__} {self._photos.digest()}".encode())
        for path in self.files:
            for heat in self._looks(path):
                whole.update(f"{tuple(heat.shape)}".encode())
                whole.update(heat.float().contiguous().numpy().tobytes())
        return whole.hexdigest()

    def _maps(self, indices: Sequence[int], geometry: PixelGeometry) -> Float[Tensor, "b p k"]:
        looked = [self._looks(self.files[place]) for place in self._photos.places(indices)]
        maps = torch.zeros(len(looked), max([1, *map(len, looked)]), self.cells[0] * self.cells[1])
        boxes = geometry.cells(self.cells)
        for row, each in enumerate(looked):
            for person, heat in enumerate(each):
                if heat.ndim != 2 or not bool((heat.isfinite() & (heat >= 0)).all()):
                    raise Damaged(
                        f"{self.files[self._photos.places(indices)[row]]}: the map of person "
                        f"{person} has numbers that are no weights, or {heat.ndim} axes, not two."
                    )
                maps[row, person] = gathered(heat, boxes[row], geometry.size[row])
        return maps


class OwnMarks:
    """Texts of your own with what people marked: for each text the characters, a list a person.

    `marked[i][p]` are ranges (first character, character behind the last) that person p marked in
    text i. A token of which at least half is marked counts. The target is the share of people who
    marked each token, normalised; where nobody marked anything it sees no token.
    """

    def __init__(
        self,
        name: str,
        texts: Sequence[str],
        marked: Marked,
        reader: Reader,
        labels: Sequence[int] | None = None,
    ) -> None:
        for what, given in (("marks", marked), ("labels", labels)):
            if given is not None and len(given) != len(texts):
                raise BadInput(f"{name} has {len(texts)} texts and {len(given)} {what}.")
        self.name, self.split, self.reader = name, ALL, reader
        self._texts, self._marked, self._labels = texts, marked, labels

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The texts at these places, with what people marked as target."""
        places = self._places(indices)
        tokens, mask, text = self._read(places)
        maps, there = by_person(self._chosen(places), text, mask)
        fused = maps.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)
        seen = mask & (fused.sum(dim=-1, keepdim=True) > 0)
        labels = self._labels
        return Batch(
            ids=tuple(f"{self.name}/{place:06d}" for place in places),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=None if labels is None else torch.tensor([labels[place] for place in places]),
            target=AttentionMap.from_cells(
                fused, words(tokens.shape[1], geometry=text), seen
            ).normalize(),
        )

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """What each person marked: 1 or 0 a token, one query a person."""
        places = self._places(indices)
        _, mask, text = self._read(places)
        return map_of(*by_person(self._chosen(places), text, mask), text, mask)

    def digest(self) -> str:
        """A hash of the texts and the marks."""
        about = [
            (text, [[tuple(one) for one in person] for person in people])
            for text, people in zip(self._texts, self._marked, strict=True)
        ]
        return hashlib.sha256(f"{about} {self._labels}".encode()).hexdigest()

    def _places(self, indices: Sequence[int]) -> list[int]:
        places = [int(place) for place in indices]
        for place in places:
            if not 0 <= place < len(self):
                raise BadInput(f"{self.name} has texts 0 to {len(self) - 1}, not {place}.")
        return places

    def _read(self, places: Sequence[int]) -> tuple[Tensor, Tensor, TextGeometry]:
        texts = tuple(self._texts[place] for place in places)
        read = [self.reader.read(text) for text in texts]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        return tokens, mask, TextGeometry(texts, spans)

    def _chosen(self, places: Sequence[int]) -> Marked:
        return [self._marked[place] for place in places]


def _numbered(folder: Path, stem: str) -> list[Path]:
    found = [path for path in folder.glob("*.png") if path.stem.rpartition("_")[0] == stem]
    numbers = [path for path in found if path.stem.rpartition("_")[2].isdecimal()]
    return sorted(numbers, key=lambda path: int(path.stem.rpartition("_")[2]))


def _label(labels: Mapping[str, int] | None, photo: Path) -> int:
    if labels is None:
        return 0
    if photo.name not in labels:
        raise BadInput(f"{photo.name} has no label; give one for every photo, or none at all.")
    return labels[photo.name]
