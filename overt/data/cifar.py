"""CIFAR-10 and CIFAR-100 from the official binary version, memory-mapped.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html. A record is the label bytes (one, or coarse and fine)
and 3,072 bytes of a 32 x 32 image, plane by plane.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from numpy.typing import NDArray

from overt.data.image_arrays import ImageArrays, check_records
from overt.data.splits import Labels, Split, parse_labels, parse_split, split_indices
from overt.errors import CorruptFileError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
VALIDATION = 5_000

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR100_FOLDER = "cifar-100-binary"
CIFAR10_NAMES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
COARSE_NAMES = tuple(
    """aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
    medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1
    vehicles_2""".split()
)
FINE_NAMES = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab
    crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()
)


def open_records(
    path: Path, limits: Sequence[int], records: int
) -> UInt8[np.ndarray, "n bytes_of_record"]:
    """Memory-map the records of one file.

    Args:
        path: Binary file.
        limits: Number of classes of each label byte.
        records: Expected number of records.

    Raises:
        UserError: The file is missing.
        CorruptFileError: The file has another length, or a label is out of range.
    """
    length = len(limits) + PIXELS
    check_records(path, records, length)
    found = np.memmap(path, dtype=np.uint8, mode="r", shape=(records, length))
    for place, limit in enumerate(limits):
        wrong = np.flatnonzero(found[:, place] >= limit)
        if len(wrong):
            raise CorruptFileError(
                f"{path}: record {wrong[0]} has label {found[wrong[0], place]}, expected "
                f"0 to {limit - 1}. Download the file again."
            )
    return found


class CifarDataset(ImageArrays):
    """One split of CIFAR, read from memory-mapped records."""

    def __init__(
        self,
        name: str,
        split: Split,
        parts: Sequence[NDArray[np.uint8]],
        label: int,
        rows: NDArray[np.int64],
        classes: tuple[str, ...],
        files: Sequence[Path],
    ) -> None:
        labels = np.concatenate([part[:, label] for part in parts]).astype(np.int64)
        part = "test" if split is Split.TEST else "train"
        pictures = [_pictures(one) for one in parts]
        super().__init__(name, split, part, pictures, labels, rows, classes, files, digits=5)


def _pictures(part: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a view of the pixels of the records; nothing is copied."""
    behind = part[:, part.shape[1] - PIXELS :]
    strides = (part.strides[0], SIDE * SIDE, SIDE, 1)
    return np.lib.stride_tricks.as_strided(
        behind, (len(part), 3, SIDE, SIDE), strides, writeable=False
    )


class Cifar10(CifarDataset):
    """CIFAR-10: 45,000 / 5,000 / 10,000 images of 10 classes in train / val / test.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test` or `train+val`.
        records: Number of records per file, for files that are not the official ones.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     Path(root, CIFAR10_FOLDER).mkdir()
        ...     for number in range(1, 6):  # two black airplanes per file
        ...         path = Path(root, CIFAR10_FOLDER, f"data_batch_{number}.bin")
        ...         _ = path.write_bytes(bytes(2 * (1 + PIXELS)))
        ...     data = Cifar10(root, "train", records=2, validation=1)
        >>> len(data), data.batch([0]).images.shape
        (9, torch.Size([1, 3, 32, 32]))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        records: int = 10_000,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        chosen = parse_split(split)
        folder = root / CIFAR10_FOLDER
        stems = [f"data_batch_{number}" for number in range(1, 6)]
        files = [
            folder / f"{stem}.bin" for stem in (["test_batch"] if chosen is Split.TEST else stems)
        ]
        parts = [open_records(path, [10], records) for path in files]
        rows = split_indices(chosen, records * len(parts), validation)
        classes = _names(folder / "batches.meta.txt", CIFAR10_NAMES)
        super().__init__("cifar10", chosen, parts, 0, rows, classes, files)


class Cifar100(CifarDataset):
    """CIFAR-100: 45,000 / 5,000 / 10,000 images of 100 fine or 20 coarse classes.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test` or `train+val`.
        labels: `fine` or `coarse`.
        records: Number of records per file; None expects the official number.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     Path(root, CIFAR100_FOLDER).mkdir()
        ...     path = Path(root, CIFAR100_FOLDER, "test.bin")
        ...     _ = path.write_bytes(bytes([4, 0]) + bytes(PIXELS))  # a black apple
        ...     data = Cifar100(root, "test", labels="coarse", records=1)
        >>> data.classes[data.labels([0])]
        'fruit_and_vegetables'
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        labels: str = Labels.FINE,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        chosen, kind = parse_split(split), parse_labels(labels)
        folder = root / CIFAR100_FOLDER
        path = folder / ("test.bin" if chosen is Split.TEST else "train.bin")
        official = 10_000 if chosen is Split.TEST else 50_000
        part = open_records(path, [20, 100], official if records is None else records)
        fine = kind is Labels.FINE
        classes = _names(folder / f"{kind}_label_names.txt", FINE_NAMES if fine else COARSE_NAMES)
        rows = split_indices(chosen, len(part), validation)
        super().__init__("cifar100", chosen, [part], int(fine), rows, classes, [path])


def _names(path: Path, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names in the file, or `known` if there is no file."""
    if not path.is_file():
        return known
    try:
        found = tuple(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError as problem:
        raise CorruptFileError(
            f"{path} is not text ({problem.reason}); download the file again."
        ) from problem
    if len(found) != len(known):
        raise CorruptFileError(
            f"{path} has {len(found)} class names, expected {len(known)}; download the file again."
        )
    return found
