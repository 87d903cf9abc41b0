"""Oxford-IIIT Pets: photos of cats and dogs of 37 breeds, each cut out by hand.

Parkhi, Vedaldi, Zisserman and Jawahar, "Cats and Dogs", CVPR 2012,
https://www.robots.ox.ac.uk/~vgg/data/pets/. In `oxford-iiit-pet/` lie `images/NAME.jpg`,
`annotations/trimaps/NAME.png` with 1 for the animal, 2 for what is around it and 3 for the edge,
and `annotations/{trainval,test}.txt`, a line a photo: NAME, breed, 1 cat or 2 dog, and its number.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from overt.data.images import How, Size, open_image, stretch
from overt.data.objects import Mask, Outlined, Things
from overt.data.photos import counted, read_lines
from overt.errors import BadInput, Damaged
from overt.files import digest

FOLDER = "oxford-iiit-pet"
PHOTOS = {"trainval": 3_680, "test": 3_669}
BREEDS = 37
SIZE, CELLS = (224, 224), (14, 14)
NAME = re.compile(r"([A-Za-z_]+)_(\d+)")

Inside = Callable[[Int[Tensor, "y x"]], Mask]


def animal(trimap: Int[Tensor, "y x"]) -> Mask:
    """What is surely the animal."""
    return trimap == 1


def animal_and_edge(trimap: Int[Tensor, "y x"]) -> Mask:
    """The animal with the edge, where nobody can tell."""
    return trimap != 2


def oxford_pets(
    root: Path | str,
    split: str = "test",
    size: Size = SIZE,
    how: How = stretch,
    cells: Size = CELLS,
    inside: Inside = animal,
    photos: dict[str, int] | None = PHOTOS,
) -> Outlined:
    """Photos with the outline of the animal; trainval or test, as published.

    `inside` says what of a trimap is the animal. There are no boxes: those of the official files
    are of heads, and of some photos only. `photos` says how many a split has; None takes any
    number.
    """
    root = Path(root)
    if split not in PHOTOS:
        raise BadInput(f"pets has {' and '.join(PHOTOS)}, not {split!r}.")
    folder = root / FOLDER
    listed = folder / "annotations" / f"{split}.txt"
    names, breeds, classes = _read(listed)
    counted(listed, len(names), None if photos is None else photos[split])
    pictures = [folder / "annotations" / "trimaps" / f"{name}.png" for name in names]
    for picture in pictures:
        if not picture.is_file():
            raise Damaged(f"{picture} is missing, but {split} names it; get it again.")
    return Outlined(
        "pets",
        split,
        folder / "images",
        [f"{name}.jpg" for name in names],
        [Things(photo, breed, ()) for photo, breed in enumerate(breeds)],
        classes,
        partial(_cut_out, pictures=pictures, inside=inside),
        size,
        how,
        cells,
        f"pets {inside.__name__} {digest(listed)} {[digest(one) for one in pictures]}",
    )


def _cut_out(things: Things, size: Size, pictures: Sequence[Path], inside: Inside) -> Mask:
    path = pictures[things.photo]
    pixels, _ = open_image(path)
    trimap = torch.from_numpy(pixels[..., 0].astype("int64"))
    if not bool(((trimap >= 1) & (trimap <= 3)).all()):
        raise Damaged(f"{path} holds other numbers than 1, 2 and 3; get it again.")
    return inside(trimap)


def _read(path: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """The photos of a list, the breed of each from 0, and the names of the breeds by number."""
    names, breeds = [], []
    classes = [f"breed {number + 1}" for number in range(BREEDS)]
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            continue
        parts = line.split()
        name = NAME.fullmatch(parts[0])
        if len(parts) != 4 or name is None or parts[1] not in map(str, range(1, BREEDS + 1)):
            raise Damaged(f"{path}: line {number} is not `NAME BREED SPECIES NUMBER`.")
        names.append(parts[0])
        breeds.append(int(parts[1]) - 1)
        classes[breeds[-1]] = name[1]
    return names, breeds, tuple(classes)
