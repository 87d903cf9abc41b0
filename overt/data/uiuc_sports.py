"""Event-8 (UIUC Sports): photos of eight sports, one folder per class, without an official split.

Li and Fei-Fei, "What, Where and Who? Classifying Events by Scene and Object Recognition", 2007,
http://vision.stanford.edu/lijiali/event_dataset/. The folders of the archive are in
`event_dataset/`.
"""

from pathlib import Path

from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import ALL, PhotoDataset, open_class_folders

FOLDER = "event_dataset"
SPORTS = 8
SIZE = (224, 224)


def event8(
    root: Path | str,
    split: str = ALL,
    size: Size = SIZE,
    resize: Resize = crop,
    photos: int | None = None,
) -> PhotoDataset:
    """Open Event-8: about 1,579 photos of 8 sports.

    Counts differ between papers (1,574 and 1,579), so any number is accepted by default.

    Args:
        root: Data folder, see `data_root`.
        split: `all`; there is no official split.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        photos: Expected number of photos; None accepts any number.

    Returns:
        The photos with their classes.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for sport in "badminton bocce croquet polo rowing sailing snow wall".split():
        ...         Path(root, FOLDER, sport).mkdir(parents=True)
        ...         Image.new("RGB", (8, 6)).save(Path(root, FOLDER, sport, "1.jpg"))
        ...     data = event8(root)
        ...     len(data), data.classes[:2]
        (8, ('badminton', 'bocce'))
    """
    folder = Path(root) / FOLDER
    return open_class_folders("event8", split, folder, SPORTS, photos, size, resize)
