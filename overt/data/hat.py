"""VQA-HAT: where people looked, in a blurred photo, to answer questions of VQA v1.

Das, Agrawal, Zitnick, Parikh and Batra, "Human Attention in Visual Question Answering: Do Humans
and Deep Networks Look at the Same Regions?", EMNLP 2016, https://abhishekdas.com/vqa-hat/. The maps
are grey pictures `vqa-hat/vqahat_train/QUESTION_1.png` (58,475 of them, one a question) and
`vqa-hat/vqahat_val/QUESTION_{1,2,3}.png` (1,374 questions, three people each); questions, answers
and photos are those of VQA v1.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.images import Size, open_image
from overt.data.photos import target
from overt.data.splits import Split
from overt.data.vqa import V1, Edition, Vqa
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry

FOLDER = "vqa-hat"
NAME = re.compile(r"(\d+)(?:_(\d+))?\.png")
MAPS = {Split.TRAIN: 58_475, Split.VAL: 4_122}
CELLS = (14, 14)

Fuse = Callable[[Float[Tensor, "b p k"], Bool[Tensor, "b p"]], Float[Tensor, "b k"]]


def mean_map(maps: Float[Tensor, "b p k"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b k"]:
    """The mean over people, each of whom counts the same: maps are shares of what a person saw."""
    shares = maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return shares.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)


def first_map(maps: Float[Tensor, "b p k"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b k"]:
    """The map of the first person alone."""
    return maps[:, 0]


class VqaHat:
    """The questions of VQA v1 that people's attention is known for; splits are train and val.

    A batch is that of `Vqa` (its options are taken over), with people's attention over `cells` as
    target: a map is laid over its photo, brought to the canvas as the photo was, and what falls
    into a cell is its weight. Where features stand in for photos, the grid lies over the whole
    photo. `fuse` makes one map of several people's; a map that is black counts for nobody.
    `maps` says how many files a split has; None takes any number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        cells: Size = CELLS,
        fuse: Fuse = mean_map,
        maps: dict[Split, int] | None = MAPS,
        edition: Edition = V1,
        **options: Any,
    ) -> None:
        root = Path(root)
        if split not in (Split.TRAIN, Split.VAL):
            raise BadInput(f"vqa_hat has train and val, not {split!r}.")
        self.name, self.split, self.cells, self._fuse = "vqa_hat", Split(split), cells, fuse
        self._folder = root / FOLDER / f"vqahat_{split}"
        self.maps = read_names(self._folder)
        count = sum(map(len, self.maps.values()))
        if maps is not None and count != maps[self.split]:
            raise Damaged(f"{self._folder} has {count} maps, not {maps[self.split]}; get them all.")
        self.vqa = Vqa(root, split, edition, keep=self.maps.__contains__, **options)
        asked = set(self.vqa.ids.tolist())
        for question in self.maps:
            if question not in asked:
                raise Damaged(f"{self._folder}: there is no question {question} in VQA {split}.")
        self.classes, self.reader = self.vqa.classes, self.vqa.reader
        self.files = (*self.vqa.files, *(path for each in self.maps.values() for path in each))

    def __len__(self) -> int:
        return len(self.vqa)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places, with where people looked as target."""
        found = self.vqa.batch(indices)
        maps, there, geometry = self._people(indices, found.sample_geometry)
        return replace(found, target=target(self._fuse(maps, there), self.cells, geometry))

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Where each person looked, one query a person; one who is not there sees no cell.

        `.each_row()` makes a sample of every person.
        """
        geometry = None
        if self.vqa.files:
            geometry = self.vqa.batch(indices).sample_geometry
        maps, there, geometry = self._people(indices, geometry)
        return AttentionMap(
            rearrange(maps, "b p k -> b 1 1 p k"),
            grid(*self.cells, geometry=geometry),
            words(maps.shape[1], name="people"),
            there[..., None].expand(maps.shape),
            Kind.AMOUNT,
        )

    def digest(self) -> str:
        """A hash of what `Vqa` reads, of names and sizes of the maps, and of how they are fused.

        Not of the contents of maps: there are 1 GB of them.
        """
        about = f"vqa_hat {self.split} {self._fuse.__name__} {self.vqa.digest()}"
        whole = hashlib.sha256(about.encode())
        for paths in self.maps.values():
            for path in paths:
                whole.update(f"{path.name} {os.stat(path).st_size}\n".encode())
        return whole.hexdigest()

    def _people(
        self, indices: Sequence[int], geometry: PixelGeometry | None
    ) -> tuple[Float[Tensor, "b p k"], Bool[Tensor, "b p"], PixelGeometry]:
        """Each person's map on the cells, who is there, and the geometry of the photos."""
        questions = self.vqa.ids[[int(place) for place in indices]].tolist()
        paths = [self.maps[question] for question in questions]
        pictures = [[read_map(path) for path in each] for each in paths]
        if geometry is None:
            sizes = [(each[0].shape[0], each[0].shape[1]) for each in pictures]
            whole = [PixelGeometry.identity(1, size).resize((224, 224)) for size in sizes]
            geometry = PixelGeometry.join(whole) if whole else PixelGeometry.identity(0, (224, 224))
        most = max([1, *map(len, paths)])
        maps = torch.zeros(len(paths), most, self.cells[0] * self.cells[1])
        boxes = geometry.cells(self.cells)
        for row, each in enumerate(pictures):
            for person, picture in enumerate(each):
                maps[row, person] = gathered(picture, boxes[row], geometry.size[row])
        return maps, maps.sum(dim=-1) > 0, geometry


def gathered(
    picture: Float[Tensor, "y x"], boxes: Float[Tensor, "k 4"], size: Tensor
) -> Float[Tensor, " k"]:
    """What of a picture falls into each box, exact where a box cuts a pixel.

    Boxes are in pixels of a photo of `size`, over the whole of which the picture is stretched.
    """
    height, width = picture.shape
    summed = torch.nn.functional.pad(picture.double().cumsum(0).cumsum(1), (1, 0, 1, 0))
    x0, y0, x1, y1 = (boxes.double() * _stretch(size, height, width)).unbind(-1)
    return (
        (
            _read(summed, y1, x1)
            - _read(summed, y0, x1)
            - _read(summed, y1, x0)
            + _read(summed, y0, x0)
        )
        .clamp_min(0)
        .float()
    )


def read_names(folder: Path) -> dict[int, tuple[Path, ...]]:
    """The maps of each question in a folder, by person, questions in the order of their numbers."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is missing; `overt data list` says how to get it.")
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.png"):
        name = NAME.fullmatch(path.name)
        if name is None:
            raise Damaged(f"{path} is not called after a question and a person, `123_1.png`.")
        found.setdefault(int(name[1]), []).append((int(name[2] or 1), path))
    if not found:
        raise Damaged(f"{folder} has no maps; get them again.")
    return {
        question: tuple(path for _, path in sorted(found[question])) for question in sorted(found)
    }


def read_map(path: Path) -> Float[Tensor, "y x"]:
    """A grey picture as numbers from 0 to 1."""
    pixels, _ = open_image(path)
    return torch.from_numpy(pixels).float().mean(dim=-1) / 255


def _stretch(size: Tensor, height: int, width: int) -> Float[Tensor, " 4"]:
    down, across = height / size[0].double(), width / size[1].double()
    return torch.stack([across, down, across, down])


def _read(summed: Float[Tensor, "y x"], y: Tensor, x: Tensor) -> Float[Tensor, " k"]:
    """A table of sums read between its lines."""
    top = y.floor().long().clamp(0, summed.shape[0] - 1)
    left = x.floor().long().clamp(0, summed.shape[1] - 1)
    bottom = (top + 1).clamp_max(summed.shape[0] - 1)
    right = (left + 1).clamp_max(summed.shape[1] - 1)
    down, across = y - top, x - left
    upper = summed[top, left] * (1 - across) + summed[top, right] * across
    lower = summed[bottom, left] * (1 - across) + summed[bottom, right] * across
    return upper * (1 - down) + lower * down
