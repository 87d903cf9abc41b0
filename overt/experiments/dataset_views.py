"""Splits of an experiment: views of datasets, and evaluators of the validation and test data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.scenes.dataset import Scenes
from overt.data.scenes.questions import ALL_FAMILIES, chance_accuracy
from overt.experiments.evaluate import Evaluator
from overt.experiments.recipe import SPLITS, GeneratedScenes

CELL_PIXELS = 8  # side of a feature cell of a scene, in pixels
EXAMPLES = 8  # items of an example batch

DatasetT = TypeVar("DatasetT", bound=Dataset)


class DatasetView(Generic[DatasetT]):
    """A dataset with the name, the split, the items and the hash of another; subclasses differ."""

    def __init__(self, data: DatasetT) -> None:
        self.data, self.name, self.split = data, data.name, str(data.split)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these items."""
        return self.data.batch(indices)

    def digest(self) -> str:
        """Return the hash of the whole dataset."""
        return self.data.digest()


class LimitedDataset(DatasetView[DatasetT]):
    """The first `limit` items of a dataset; None keeps all of them."""

    def __init__(self, data: DatasetT, limit: int | None) -> None:
        super().__init__(data)
        self.count = len(data) if limit is None else min(limit, len(data))

    def __len__(self) -> int:
        return self.count


ThreeSplits = tuple[LimitedDataset[DatasetT], LimitedDataset[DatasetT], LimitedDataset[DatasetT]]


def open_splits(open_split: Callable[[str], DatasetT], limit: int | None) -> ThreeSplits[DatasetT]:
    """Open the training, validation and test split, with at most `limit` items each."""
    train, val, test = (LimitedDataset(open_split(split), limit) for split in SPLITS)
    return train, val, test


def evaluators(
    val: Dataset, test: Dataset, classes: Sequence[str], batch_size: int
) -> tuple[Evaluator, Evaluator]:
    """Return the evaluators of a validation and a test split."""
    first, second = (Evaluator(part, classes, batch_size=batch_size) for part in (val, test))
    return first, second


def open_scenes(
    data: GeneratedScenes, held_out: str | None = None
) -> tuple[Scenes, Evaluator, Evaluator]:
    """Open questions about scenes: training data, and evaluators of validation and test.

    `held_out` is a family of questions that only the test has.
    """
    side = -(-data.size // CELL_PIXELS)
    seen = tuple(family for family in ALL_FAMILIES if family != held_out)

    def part(split: str, families: tuple[str, ...]) -> Scenes:
        count = data.counts()[split]
        return Scenes(
            split, data.world, count, size=data.size, families=families, cells=(side, side)
        )

    train = part("train", seen)
    validation = Evaluator(part("val", seen), train.answers)
    test = part("test", ALL_FAMILIES)
    return train, validation, Evaluator(test, train.answers, chance_accuracy, held_out)


def batches_of(data: Dataset, size: int) -> Iterator[Batch]:
    """Yield all items of a dataset in order, `size` per batch."""
    for start in range(0, len(data), size):
        yield data.batch(range(start, min(start + size, len(data))))


def example_of(data: Dataset) -> Callable[[], Batch]:
    """Return a function that makes a batch of the first items."""
    return lambda: data.batch(range(min(EXAMPLES, len(data))))
