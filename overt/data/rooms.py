"""Scene-67 (MIT Indoor): photos of 67 kinds of rooms.

Quattoni and Torralba, "Recognizing Indoor Scenes", 2009,
https://web.mit.edu/torralba/www/indoor.html. Photos lie in `Images/ROOM/`; the official split is
`TrainImages.txt` and `TestImages.txt`, 80 and 20 photos a room, a line `ROOM/NAME.jpg` each.
"""

from collections.abc import Sequence
from pathlib import Path

from overt.data.images import How, Size, crop
from overt.data.photos import (
    ALL,
    Entry,
    PhotoSet,
    apart,
    chosen,
    class_folders,
    counted,
    in_folders,
    read_lines,
    split_or_all,
)
from overt.data.splits import Split
from overt.errors import Damaged

FOLDER = "indoorCVPR_09"
ROOMS = 67
TRAIN, TEST = 5_360, 1_340
VALIDATION = 536
SIZE = (224, 224)


def scene67(
    root: Path | str,
    split: str = Split.TRAIN,
    size: Size = SIZE,
    how: How = crop,
    photos: tuple[int, int] | None = (TRAIN, TEST),
    validation: int = VALIDATION,
) -> PhotoSet:
    """Scene-67: 4,824 / 536 / 1,340 photos in train / val / test; `all` is every photo there is.

    The folders hold about 15,620 photos, of which the lists name 6,700. One that cannot be decoded
    is named when it is met; take it away, and `all` is the rest. `photos` says how many the
    train and test lists have, where they are not the official ones; None takes any number.
    """
    root = Path(root)
    part = split_or_all(split)
    folder = root / FOLDER
    rooms = class_folders(folder / "Images", ROOMS)
    if part == ALL:
        entries = in_folders(folder / "Images", rooms)
        return PhotoSet("scene67", part, folder / "Images", entries, rooms, size, how)
    lists = [folder / "TrainImages.txt", folder / "TestImages.txt"]
    train, test = (read_list(path, rooms) for path in lists)
    if photos is not None:
        for path, found, wanted in zip(lists, (train, test), photos, strict=True):
            counted(path, len(found), wanted)
    apart(folder, [*train, *test])
    entries = chosen(part, train, test, validation)
    return PhotoSet("scene67", part, folder / "Images", entries, rooms, size, how)


def read_list(path: Path, rooms: Sequence[str]) -> list[Entry]:
    """The photos that a list names."""
    numbers = {room: number for number, room in enumerate(rooms)}
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        room, slash, name = line.partition("/")
        if room not in numbers or not slash or not name:
            raise Damaged(f"{path}: line {number} is not `ROOM/PHOTO`, with a room of Images/.")
        entries.append(Entry(line, numbers[room]))
    return entries
