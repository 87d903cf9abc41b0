"""VQA-HAT: human attention on photos for questions of VQA v1.

Das, Agrawal, Zitnick, Parikh and Batra, "Human Attention in Visual Question Answering: Do Humans
and Deep Networks Look at the Same Regions?", EMNLP 2016, https://abhishekdas.com/vqa-hat/. People
deblurred regions of a blurred photo. The maps are grey images
`vqa-hat/vqahat_train/QUESTION_1.png` (58,475 maps, one per question) and
`vqa-hat/vqahat_val/QUESTION_{1,2,3}.png` (1,374 questions, three people each); questions, answers
and photos are those of VQA v1.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.data.dataset import digest_files
from overt.data.download import require_folder
from overt.data.images import Size, open_image
from overt.data.photo_dataset import check_count, density_target, people_maps
from overt.data.splits import Split
from overt.data.vqa import V1, Vqa, VqaEdition
from overt.data.vqa_dataset import names_and_sizes
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

FOLDER = "vqa-hat"
NAME = re.compile(r"(\d+)(?:_(\d+))?\.png")
MAPS = {Split.TRAIN: 58_475, Split.VAL: 4_122}
CELLS = (14, 14)

Fuse = Callable[[Float[Tensor, "b p k"], Bool[Tensor, "b p"]], Float[Tensor, "b k"]]


def mean_map(maps: Float[Tensor, "b p k"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b k"]:
    """Return the mean over people of their normalised maps."""
    shares = maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return shares.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)


def first_map(maps: Float[Tensor, "b p k"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b k"]:
    """Return the map of the first person."""
    return maps[:, 0]


class VqaHat:
    """The questions of VQA v1 with human attention maps; splits are train and val.

    A batch is that of `Vqa` with people's attention as target: a map is stretched over its photo
    and transformed like the photo; the weight of a cell is the mass inside it. With features
    instead of photos, the grid covers the whole photo. Black maps are ignored.

    Args:
        root: Data folder, see `data_root`.
        split: `train` or `val`.
        cells: Grid (rows, columns) of the target.
        fuse: Combines the maps of several people: `mean_map` or `first_map`.
        maps: Expected number of maps per split; None accepts any number.
        edition: Edition of VQA.
        **options: Further arguments of `Vqa`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from dataclasses import replace
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> about = {"image_id": 9, "question_id": 90}
        >>> asked = {"questions": [{**about, "question": "Colour?"}]}
        >>> answers = [{"answer": "red"}] * 8 + [{"answer": "blue"}] * 2
        >>> said = {"annotations": [{**about, "multiple_choice_answer": "red", "answers": answers}]}
        >>> seen = Image.new("L", (8, 6))
        >>> seen.paste(255, (0, 0, 4, 6))  # a person looked at the left half
        >>> few = replace(V1, questions={})  # V1 expects the official number of questions
        >>> with TemporaryDirectory() as root:
        ...     files = Path(root, "vqa")
        ...     write_json(files / V1.questions_file.format(part="train2014"), asked)
        ...     write_json(files / V1.annotations_file.format(part="train2014"), said)
        ...     photo = Path(root, "coco", "train2014", "COCO_train2014_000000000009.jpg")
        ...     person = Path(root, FOLDER, "vqahat_train", "90_1.png")
        ...     for path, image in ((photo, Image.new("RGB", (8, 6))), (person, seen)):
        ...         path.parent.mkdir(parents=True)
        ...         image.save(path)
        ...     data = VqaHat(root, cells=(1, 2), maps=None, edition=few)
        ...     data.batch([0]).target.weights.flatten().round()
        tensor([1., 0.])
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        cells: Size = CELLS,
        fuse: Fuse = mean_map,
        maps: dict[Split, int] | None = MAPS,
        edition: VqaEdition = V1,
        **options: Any,
    ) -> None:
        root = Path(root)
        if split not in (Split.TRAIN, Split.VAL):
            raise UserError(f"vqa_hat has train and val, not {split!r}.")
        self.name, self.split, self.cells, self._fuse = "vqa_hat", Split(split), cells, fuse
        self._folder = root / FOLDER / f"vqahat_{split}"
        self.maps = list_maps(self._folder)
        count = sum(map(len, self.maps.values()))
        wanted = None if maps is None else maps[self.split]
        check_count(self._folder, count, wanted, "maps", "all")
        self.vqa = Vqa(root, split, edition, keep=self.maps.__contains__, **options)
        asked = set(self.vqa.ids.tolist())
        for question in self.maps:
            if question not in asked:
                raise CorruptFileError(
                    f"{self._folder}: there is no question {question} in VQA {split}."
                )
        self.classes, self.reader = self.vqa.classes, self.vqa.reader
        self.files = (*self.vqa.files, *(path for each in self.maps.values() for path in each))

    def __len__(self) -> int:
        return len(self.vqa)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices`, with human attention as target."""
        found = self.vqa.batch(indices)
        maps, geometry = self._people(indices, found.sample_geometry)
        fused = self._fuse(maps, maps.sum(dim=-1) > 0)
        return replace(found, target=density_target(fused, self.cells, geometry))

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Return the map of each person, one query per person; absent people see no cell.

        `.each_row()` makes a sample of every person.
        """
        geometry = None
        if self.vqa.files:
            geometry = self.vqa.batch(indices).sample_geometry
        maps, geometry = self._people(indices, geometry)
        return people_maps(maps, self.cells, geometry)

    def digest(self) -> str:
        """Return a hash of the questions, of names and sizes of the maps, and of the fusion.

        Map contents are left out: they are 1 GB.
        """
        about = f"vqa_hat {self.split} {self._fuse.__name__} {self.vqa.digest()}"
        maps = (path for paths in self.maps.values() for path in paths)
        return digest_files(about, [], names_and_sizes(maps))

    def _people(
        self, indices: Sequence[int], geometry: PixelGeometry | None
    ) -> tuple[Float[Tensor, "b p k"], PixelGeometry]:
        """Return each person's map on the cells, and the geometry of the photos."""
        questions = self.vqa.ids[[int(place) for place in indices]].tolist()
        pictures = [[read_map(path) for path in self.maps[question]] for question in questions]
        if geometry is None:
            sizes = [(each[0].shape[0], each[0].shape[1]) for each in pictures]
            whole = [PixelGeometry.identity(1, size).resize((224, 224)) for size in sizes]
            geometry = PixelGeometry.join(whole) if whole else PixelGeometry.identity(0, (224, 224))
        return sum_maps(pictures, self.cells, geometry), geometry


def sum_maps(
    pictures: Sequence[Sequence[Float[Tensor, "_ _"]]], cells: Size, geometry: PixelGeometry
) -> Float[Tensor, "b p k"]:
    """Return the mass of each person's map in each cell; an absent person has none."""
    most = max([1, *map(len, pictures)])
    maps = torch.zeros(len(pictures), most, cells[0] * cells[1])
    boxes = geometry.cells(cells)
    for row, each in enumerate(pictures):
        for person, picture in enumerate(each):
            maps[row, person] = sum_in_boxes(picture, boxes[row], geometry.size[row])
    return maps


def sum_in_boxes(
    picture: Float[Tensor, "y x"], boxes: Float[Tensor, "k 4"], size: Tensor
) -> Float[Tensor, " k"]:
    """Return the sum of a map inside each box, exact where a box cuts a pixel.

    Boxes are in pixels of a photo of `size`, over the whole of which the map is stretched.
    """
    height, width = picture.shape
    summed = torch.nn.functional.pad(picture.double().cumsum(0).cumsum(1), (1, 0, 1, 0))
    x0, y0, x1, y1 = (boxes.double() * _stretch(size, height, width)).unbind(-1)
    lower = _interpolate(summed, y1, x1) - _interpolate(summed, y0, x1)
    return (
        (lower - _interpolate(summed, y1, x0) + _interpolate(summed, y0, x0)).clamp_min(0).float()
    )


def list_maps(folder: Path) -> dict[int, tuple[Path, ...]]:
    """Return the map files of each question in a folder, by person, sorted by question."""
    require_folder(folder)
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.png"):
        name = NAME.fullmatch(path.name)
        if name is None:
            raise CorruptFileError(f"{path} is not named QUESTION_PERSON.png, such as `123_1.png`.")
        found.setdefault(int(name[1]), []).append((int(name[2] or 1), path))
    if not found:
        raise CorruptFileError(f"{folder} has no maps; download them again.")
    return {
        question: tuple(path for _, path in sorted(found[question])) for question in sorted(found)
    }


def read_map(path: Path) -> Float[Tensor, "y x"]:
    """Read a grey image as values from 0 to 1."""
    pixels, _ = open_image(path)
    return torch.from_numpy(pixels).float().mean(dim=-1) / 255


def _stretch(size: Tensor, height: int, width: int) -> Float[Tensor, " 4"]:
    down, across = height / size[0].double(), width / size[1].double()
    return torch.stack([across, down, across, down])


def _interpolate(summed: Float[Tensor, "y x"], y: Tensor, x: Tensor) -> Float[Tensor, " k"]:
    """Interpolate a summed-area table bilinearly."""
    top = y.floor().long().clamp(0, summed.shape[0] - 1)
    left = x.floor().long().clamp(0, summed.shape[1] - 1)
    bottom = (top + 1).clamp_max(summed.shape[0] - 1)
    right = (left + 1).clamp_max(summed.shape[1] - 1)
    down, across = y - top, x - left
    upper = summed[top, left] * (1 - across) + summed[top, right] * across
    lower = summed[bottom, left] * (1 - across) + summed[bottom, right] * across
    return upper * (1 - down) + lower * down
