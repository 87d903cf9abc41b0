"""Scene-67 (MIT Indoor): photos of 67 classes of rooms.

Quattoni and Torralba, "Recognizing Indoor Scenes", 2009,
https://web.mit.edu/torralba/www/indoor.html. Photos are in `Images/ROOM/`; the official split is
`TrainImages.txt` and `TestImages.txt`, 80 and 20 photos per room, one line `ROOM/NAME.jpg` each.
"""

from collections.abc import Sequence
from pathlib import Path

from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import (
    ALL,
    PhotoDataset,
    PhotoEntry,
    check_distinct,
    check_photo_count,
    class_folders,
    list_class_photos,
    parse_split_or_all,
    read_lines,
    select_split,
)
from overt.data.splits import Split
from overt.errors import CorruptFileError

FOLDER = "indoorCVPR_09"
ROOMS = 67
TRAIN, TEST = 5_360, 1_340
VALIDATION = 536
SIZE = (224, 224)


def scene67(
    root: Path | str,
    split: str = Split.TRAIN,
    size: Size = SIZE,
    resize: Resize = crop,
    photos: tuple[int, int] | None = (TRAIN, TEST),
    validation: int = VALIDATION,
) -> PhotoDataset:
    """Open Scene-67: 4,824 / 536 / 1,340 photos in train / val / test; `all` has every photo.

    The folders have about 15,620 photos, of which the lists name 6,700. If a photo cannot be
    decoded, remove it, and `all` has the rest.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `all`.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        photos: Expected number of photos in the train and test lists; None accepts any number.
        validation: Number of training items held out as `val`.

    Returns:
        The photos with their classes.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for number in range(67):
        ...         folder = Path(root, FOLDER, "Images", f"room{number:02}")
        ...         folder.mkdir(parents=True)
        ...         Image.new("RGB", (8, 6)).save(folder / "1.jpg")
        ...     data = scene67(root, "all")
        ...     len(data), data.classes[0]
        (67, 'room00')
    """
    root = Path(root)
    part = parse_split_or_all(split)
    folder = root / FOLDER
    rooms = class_folders(folder / "Images", ROOMS)
    if part == ALL:
        entries = list_class_photos(folder / "Images", rooms)
        return PhotoDataset("scene67", part, folder / "Images", entries, rooms, size, resize)
    lists = [folder / "TrainImages.txt", folder / "TestImages.txt"]
    train, test = (read_list(path, rooms) for path in lists)
    if photos is not None:
        for path, found, wanted in zip(lists, (train, test), photos, strict=True):
            check_photo_count(path, len(found), wanted)
    check_distinct(folder, [*train, *test])
    entries = select_split(part, train, test, validation)
    return PhotoDataset("scene67", part, folder / "Images", entries, rooms, size, resize)


def read_list(path: Path, rooms: Sequence[str]) -> list[PhotoEntry]:
    """Read the photos of a list."""
    numbers = {room: number for number, room in enumerate(rooms)}
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        room, slash, name = line.partition("/")
        if room not in numbers or not slash or not name:
            raise CorruptFileError(
                f"{path}: line {number} is not `ROOM/PHOTO`, with a room of Images/."
            )
        entries.append(PhotoEntry(line, numbers[room]))
    return entries
