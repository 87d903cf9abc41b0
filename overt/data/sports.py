"""Event-8: photos of eight sports, a folder a class, without an official split.

Li and Fei-Fei, "What, Where and Who? Classifying Events by Scene and Object Recognition", 2007,
http://vision.stanford.edu/lijiali/event_dataset/. The archive's folders lie in `event_dataset/`.
"""

from pathlib import Path

from overt.data.images import How, Size, crop
from overt.data.photos import ALL, PhotoSet, class_folders, counted, in_folders, only_all

FOLDER = "event_dataset"
SPORTS = 8
SIZE = (224, 224)


def event8(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    how: How = crop,
    photos: int | None = None,
) -> PhotoSet:
    """Event-8: about 1,579 photos of 8 sports.

    Counts differ between papers (1,574 and 1,579), so any number is taken unless `photos` says
    how many there must be.
    """
    root = Path(root)
    only_all("event8", split)
    names = class_folders(root / FOLDER, SPORTS)
    entries = in_folders(root / FOLDER, names)
    counted(root / FOLDER, len(entries), photos)
    return PhotoSet("event8", split, root / FOLDER, entries, names, size, how)
