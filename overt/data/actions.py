"""Action-40 (Stanford 40 Actions): photos of people doing one of forty things.

Yao, Jiang, Khosla, Lin, Guibas and Fei-Fei, "Human Action Recognition by Learning Bases of Action
Attributes and Parts", 2011, http://vision.stanford.edu/Datasets/40actions.html. The official split
is `ImageSplits/ACTION_train.txt` and `ACTION_test.txt`, a photo of `JPEGImages/` a line;
`ImageSplits/actions.txt` names the actions below one line of headings.
"""

from pathlib import Path

from overt.data.images import How, Size, crop
from overt.data.photos import (
    Entry,
    PhotoSet,
    apart,
    chosen,
    counted,
    read_lines,
    split_or_all,
)
from overt.data.splits import Split
from overt.errors import Damaged

FOLDER = "stanford40"
ACTIONS = 40
TRAIN, TEST = 4_000, 5_532
VALIDATION = 400
SIZE = (224, 224)


def action40(
    root: Path | str,
    split: str = Split.TRAIN,
    size: Size = SIZE,
    how: How = crop,
    photos: tuple[int, int] | None = (TRAIN, TEST),
    validation: int = VALIDATION,
) -> PhotoSet:
    """Action-40: 3,600 / 400 / 5,532 photos in train / val / test; `all` is all 9,532.

    `photos` says how many the train and test lists have, where they are not the official ones;
    None takes any number.
    """
    root = Path(root)
    part = split_or_all(split)
    folder = root / FOLDER
    actions = read_actions(folder / "ImageSplits" / "actions.txt")
    train, test = (_read(folder / "ImageSplits", actions, which) for which in ("train", "test"))
    if photos is not None:
        for found, wanted, which in zip((train, test), photos, ("train", "test"), strict=True):
            counted(folder / "ImageSplits" / f"*_{which}.txt", len(found), wanted)
    apart(folder / "ImageSplits", [*train, *test])
    entries = chosen(part, train, test, validation)
    return PhotoSet("action40", part, folder / "JPEGImages", entries, actions, size, how)


def read_actions(path: Path) -> tuple[str, ...]:
    """The names of the forty actions, in the file's order, which numbers the classes."""
    found = tuple(line.split()[0] for line in read_lines(path)[1:])
    if len(found) != ACTIONS or len(set(found)) != ACTIONS:
        raise Damaged(f"{path} names {len(set(found))} actions, not {ACTIONS}; get it again.")
    return found


def _read(folder: Path, actions: tuple[str, ...], which: str) -> list[Entry]:
    entries: list[Entry] = []
    for label, action in enumerate(actions):
        if "/" in action or "\\" in action:
            raise Damaged(f"{folder / 'actions.txt'}: {action!r} is not the name of an action.")
        entries += [Entry(name, label) for name in read_lines(folder / f"{action}_{which}.txt")]
    return entries
