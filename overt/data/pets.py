"""Oxford-IIIT Pets: photos of cats and dogs of 37 breeds, segmented by hand.

Parkhi, Vedaldi, Zisserman and Jawahar, "Cats and Dogs", CVPR 2012,
https://www.robots.ox.ac.uk/~vgg/data/pets/. `oxford-iiit-pet/` has `images/NAME.jpg`,
`annotations/trimaps/NAME.png` with 1 for the animal, 2 for the background and 3 for the edge, and
`annotations/{trainval,test}.txt`, one line per photo: NAME, breed, 1 cat or 2 dog, and its number.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from overt.data.images import Resize, Size, open_image, stretch
from overt.data.object_masks import Mask, ObjectGroup, ObjectMasks, check_listed
from overt.data.photo_dataset import check_photo_count, read_lines
from overt.errors import CorruptFileError, UserError
from overt.io import digest

FOLDER = "oxford-iiit-pet"
PHOTOS = {"trainval": 3_680, "test": 3_669}
BREEDS = 37
SIZE, CELLS = (224, 224), (14, 14)
NAME = re.compile(r"([A-Za-z_]+)_(\d+)")

TrimapRule = Callable[[Int[Tensor, "y x"]], Mask]


def animal(trimap: Int[Tensor, "y x"]) -> Mask:
    """Return the pixels that are certainly the animal."""
    return trimap == 1


def animal_and_edge(trimap: Int[Tensor, "y x"]) -> Mask:
    """Return the pixels of the animal and of its uncertain edge."""
    return trimap != 2


def oxford_pets(
    root: Path | str,
    split: str = "test",
    size: Size = SIZE,
    resize: Resize = stretch,
    cells: Size = CELLS,
    inside: TrimapRule = animal,
    photos: dict[str, int] | None = PHOTOS,
) -> ObjectMasks:
    """Open Oxford-IIIT Pets with the mask of the animal.

    There are no boxes: the official ones are of heads, and of some photos only.

    Args:
        root: Data folder, see `data_root`.
        split: `trainval` or `test`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.
        inside: Which pixels of a trimap are inside: `animal` or `animal_and_edge`.
        photos: Expected number of photos per split; None accepts any number.

    Returns:
        The photos with masks.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_text
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER)
        ...     write_text(folder / "annotations" / "test.txt", "Abyssinian_201 1 1 1")
        ...     (folder / "images").mkdir()
        ...     Image.new("RGB", (8, 6)).save(folder / "images" / "Abyssinian_201.jpg")
        ...     (folder / "annotations" / "trimaps").mkdir()
        ...     Image.new("L", (8, 6), 1).save(folder / "annotations/trimaps/Abyssinian_201.png")
        ...     oxford_pets(root, "test", photos=None).batch([0]).groups
        ('Abyssinian',)
    """
    root = Path(root)
    if split not in PHOTOS:
        raise UserError(f"pets has {' and '.join(PHOTOS)}, not {split!r}.")
    folder = root / FOLDER
    listed = folder / "annotations" / f"{split}.txt"
    names, breeds, classes = _read(listed)
    check_photo_count(listed, len(names), None if photos is None else photos[split])
    pictures = [folder / "annotations" / "trimaps" / f"{name}.png" for name in names]
    check_listed(pictures, split)
    return ObjectMasks(
        "pets",
        split,
        folder / "images",
        [f"{name}.jpg" for name in names],
        [ObjectGroup(photo, breed, ()) for photo, breed in enumerate(breeds)],
        classes,
        partial(_cut_out, pictures=pictures, inside=inside),
        size,
        resize,
        cells,
        f"pets {inside.__name__} {digest(listed)} {[digest(one) for one in pictures]}",
    )


def _cut_out(things: ObjectGroup, size: Size, pictures: Sequence[Path], inside: TrimapRule) -> Mask:
    path = pictures[things.photo]
    pixels, _ = open_image(path)
    trimap = torch.from_numpy(pixels[..., 0].astype("int64"))
    if not bool(((trimap >= 1) & (trimap <= 3)).all()):
        raise CorruptFileError(f"{path} has values other than 1, 2 and 3; download it again.")
    return inside(trimap)


def _read(path: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return the photos of a list, the breed of each from 0, and the names of the breeds."""
    names, breeds = [], []
    classes = [f"breed {number + 1}" for number in range(BREEDS)]
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            continue
        parts = line.split()
        name = NAME.fullmatch(parts[0])
        if len(parts) != 4 or name is None or parts[1] not in map(str, range(1, BREEDS + 1)):
            raise CorruptFileError(f"{path}: line {number} is not `NAME BREED SPECIES NUMBER`.")
        names.append(parts[0])
        breeds.append(int(parts[1]) - 1)
        classes[breeds[-1]] = name[1]
    return names, breeds, tuple(classes)
