"""Views of datasets, and the splits of an experiment."""

from typing import Any

import pytest

from overt.data.batch import Batch
from overt.data.scenes.questions import chance_accuracy
from overt.experiments import builders, dataset_views
from overt.experiments.dataset_views import DatasetView, LimitedDataset
from overt.experiments.recipe import GeneratedScenes


class NumberDataset:
    """Items 0, 1, 2 ..."""

    name = "numbers"

    def __init__(self, count: int, split: str = "test") -> None:
        self.count, self.split = count, split

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any) -> Batch:
        return Batch(ids=tuple(str(index) for index in indices))

    def digest(self) -> str:
        return f"{self.count}"


@pytest.mark.parametrize(("limit", "wanted"), [(None, 5), (3, 3), (5, 5), (9, 5)])
def test_a_limited_dataset_has_the_first_items(limit: int | None, wanted: int) -> None:
    first = LimitedDataset(NumberDataset(5), limit)
    assert len(first) == wanted and (first.name, first.split) == ("numbers", "test")
    assert first.batch([2, 0]).ids == ("2", "0") and first.digest() == "5"
    assert builders.dataset_info(first).n == wanted


def test_a_view_equals_its_dataset() -> None:
    view = DatasetView(NumberDataset(3))
    assert (view.name, view.split, len(view), view.digest()) == ("numbers", "test", 3, "3")
    assert view.batch([1]).ids == ("1",)


def test_three_splits_are_opened_and_two_are_evaluated() -> None:
    train, val, test = dataset_views.open_splits(lambda split: NumberDataset(9, split), limit=4)
    assert [(one.split, len(one)) for one in (train, val, test)] == [
        ("train", 4),
        ("val", 4),
        ("test", 4),
    ]
    found = dataset_views.evaluators(val, test, ("a", "b"), batch_size=7)
    assert [(one.data, one.classes, one.batch_size) for one in found] == [
        (val, ("a", "b"), 7),
        (test, ("a", "b"), 7),
    ]


def test_batches_cover_a_dataset_in_order() -> None:
    found = [batch.ids for batch in dataset_views.batches_of(NumberDataset(5), 2)]
    assert found == [("0", "1"), ("2", "3"), ("4",)]
    assert dataset_views.example_of(NumberDataset(3))().ids == ("0", "1", "2")
    assert len(dataset_views.example_of(NumberDataset(30))()) == dataset_views.EXAMPLES


def test_scenes_have_cells_of_8_pixels_and_a_chance_level_in_the_test() -> None:
    data = GeneratedScenes(limit=2, size=60)
    train, val, test = dataset_views.open_scenes(data, held_out="exist")
    assert train.batch([0]).target.keys.spans[0].shape == (8, 8)
    assert [len(one) for one in (train, val.data, test.data)] == [2, 2, 2]
    assert (test.chance, test.held_out, val.chance) == (chance_accuracy, "exist", None)
