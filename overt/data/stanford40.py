"""Action-40 (Stanford 40 Actions): photos of people doing one of forty actions.

Yao, Jiang, Khosla, Lin, Guibas and Fei-Fei, "Human Action Recognition by Learning Bases of Action
Attributes and Parts", 2011, http://vision.stanford.edu/Datasets/40actions.html. The official split
is `ImageSplits/ACTION_train.txt` and `ACTION_test.txt`, one photo of `JPEGImages/` per line;
`ImageSplits/actions.txt` lists the actions below one line of headings.
"""

from pathlib import Path

from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import (
    PhotoDataset,
    PhotoEntry,
    check_distinct,
    check_photo_count,
    parse_split_or_all,
    read_lines,
    select_split,
)
from overt.data.splits import Split
from overt.errors import CorruptFileError

FOLDER = "stanford40"
ACTIONS = 40
TRAIN, TEST = 4_000, 5_532
VALIDATION = 400
SIZE = (224, 224)


def action40(
    root: Path | str,
    split: str = Split.TRAIN,
    size: Size = SIZE,
    resize: Resize = crop,
    photos: tuple[int, int] | None = (TRAIN, TEST),
    validation: int = VALIDATION,
) -> PhotoDataset:
    """Open Action-40: 3,600 / 400 / 5,532 photos in train / val / test; `all` has all 9,532.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `all`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        photos: Expected number of photos in train and test; None accepts any number.
        validation: Number of training items held out as `val`.

    Returns:
        The photos with their classes.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_text
        >>> actions = [f"action{number:02d}" for number in range(ACTIONS)]
        >>> lines = chr(10).join(["name", *actions])
        >>> with TemporaryDirectory() as root:
        ...     lists, folder = Path(root, FOLDER, "ImageSplits"), Path(root, FOLDER, "JPEGImages")
        ...     folder.mkdir(parents=True)
        ...     write_text(lists / "actions.txt", lines)
        ...     for name in (f"{one}_{part}" for one in actions for part in ("train", "test")):
        ...         write_text(lists / f"{name}.txt", f"{name}.jpg")
        ...         Image.new("RGB", (8, 6)).save(folder / f"{name}.jpg")
        ...     data = action40(root, "test", photos=None, validation=1)
        >>> len(data), data.classes[0]
        (40, 'action00')
    """
    root = Path(root)
    part = parse_split_or_all(split)
    folder = root / FOLDER
    actions = read_actions(folder / "ImageSplits" / "actions.txt")
    train, test = (_read(folder / "ImageSplits", actions, which) for which in ("train", "test"))
    if photos is not None:
        for found, wanted, which in zip((train, test), photos, ("train", "test"), strict=True):
            check_photo_count(folder / "ImageSplits" / f"*_{which}.txt", len(found), wanted)
    check_distinct(folder / "ImageSplits", [*train, *test])
    entries = select_split(part, train, test, validation)
    return PhotoDataset("action40", part, folder / "JPEGImages", entries, actions, size, resize)


def read_actions(path: Path) -> tuple[str, ...]:
    """Read the names of the forty actions, in the file's order, which numbers the classes."""
    found = tuple(line.split()[0] for line in read_lines(path)[1:])
    if len(found) != ACTIONS or len(set(found)) != ACTIONS:
        raise CorruptFileError(
            f"{path} has {len(set(found))} actions, expected {ACTIONS}; download it again."
        )
    return found


def _read(folder: Path, actions: tuple[str, ...], which: str) -> list[PhotoEntry]:
    entries: list[PhotoEntry] = []
    for label, action in enumerate(actions):
        if "/" in action or "\\" in action:
            raise CorruptFileError(
                f"{folder / 'actions.txt'}: {action!r} is not the name of an action."
            )
        entries += [
            PhotoEntry(name, label) for name in read_lines(folder / f"{action}_{which}.txt")
        ]
    return entries
