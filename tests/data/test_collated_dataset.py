"""PyTorch datasets and loaders as items by index; batches of any form."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
)

from overt.data import Batch, CollatedDataset
from overt.data.collated_dataset import (
    batch_ids,
    count_samples,
    from_loader,
    is_map_style,
    move_batch,
)
from overt.errors import UserError

Point = namedtuple("Point", ["x", "y"])


class Words(Dataset[dict[str, Any]]):
    """Five items with a tensor, a label and a text."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.arange(3) + index + self.shift, "labels": index % 2, "text": f"t{index}"}


class Stream(IterableDataset[Any]):
    """Items without an index."""

    def __iter__(self) -> Any:
        yield from range(3)


def test_batches_are_those_of_a_loader() -> None:
    loader = DataLoader(Words(), batch_size=2)
    data = from_loader(loader, 2)
    for batch, start in zip(loader, (0, 2, 4), strict=True):
        ours = data.batch(range(start, min(start + 2, 5)))
        assert ours.keys() == batch.keys() and ours["text"] == batch["text"]
        torch.testing.assert_close(ours["x"], batch["x"])
    # `Subset` has `__getitems__`, which the loader uses as well
    subset = CollatedDataset(Subset(Words(), [4, 0]))
    assert subset.batch([0])["text"] == ["t4"]


def test_the_digest_depends_on_content_name_split_and_version() -> None:
    found = [
        CollatedDataset(Words()),
        CollatedDataset(Words(1)),
        CollatedDataset(Words(), name="other"),
        CollatedDataset(Words(), split="val"),
        CollatedDataset(Words(), version="1"),
        CollatedDataset(Words(), version="2"),
    ]
    assert len({one.digest() for one in found}) == len(found)
    assert CollatedDataset(Words()).digest() == found[0].digest()
    assert CollatedDataset(Words(7), version="1").digest() == found[4].digest()
    assert (found[0].name, found[0].split, len(found[0])) == ("Words", "train", 5)
    odd = CollatedDataset(Words(), collate_fn=lambda items: [object() for _ in items])
    with pytest.raises(UserError, match=r"object .*version="):
        odd.digest()


def test_streams_lists_and_numbers_are_refused() -> None:
    for data in (Stream(), [1, 2], (1, 2), "text", {"a": 1}, torch.zeros(3), 7):
        with pytest.raises(UserError, match=type(data).__name__):
            CollatedDataset(data)
    assert not is_map_style([1, 2]) and is_map_style(Words())


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"batch_size": 3}, "=3, .* 2"),
        ({"batch_size": 2, "drop_last": True}, "last 1 items"),
        ({"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 5, 5)}, "WeightedRandomS"),
        ({"batch_size": None}, "batch sampler"),
        ({"batch_sampler": [[0, 1]]}, "batch sampler"),
    ],
)
def test_loaders_that_do_more_than_shuffle_are_refused(
    options: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(UserError, match=pattern):
        from_loader(DataLoader(Words(), **options), 2)
    assert len(from_loader(DataLoader(Words(), batch_size=2, shuffle=True), 2)) == 5
    assert len(from_loader(DataLoader(Words(), batch_size=5, drop_last=True), 5)) == 5
    with pytest.raises(UserError, match="Stream"):
        from_loader(DataLoader(Stream(), batch_size=2), 2)


def test_batches_of_any_form_are_moved_and_counted() -> None:
    nested = {"a": [Point(torch.zeros(4), "x")], "n": 3, "batch": Batch(("a", "b"))}
    moved = move_batch(nested, "meta")
    assert moved["a"][0].x.device.type == "meta" and moved["a"][0].y == "x" and moved["n"] == 3
    assert isinstance(moved["a"][0], Point) and nested["a"][0].x.device.type == "cpu"
    assert count_samples(nested) == 4 and count_samples(nested["batch"]) == 2
    assert count_samples((torch.tensor(1), [torch.zeros(2, 3)])) == 2
    with pytest.raises(UserError, match="dict"):
        count_samples({"a": torch.tensor(1), "b": "text"})


def test_ids_are_those_of_the_batch_or_the_indices() -> None:
    assert batch_ids(Batch(("a", "b")), [3, 4]) == ("a", "b")
    assert batch_ids({"ids": torch.tensor([7, 8])}, [3, 4]) == ("7", "8")
    assert batch_ids([torch.zeros(2)], [3, 4]) == ("3", "4")


def test_tables_and_tuples_say_that_items_are_dictionaries() -> None:
    with pytest.raises(UserError, match="list of tuple"):
        CollatedDataset([(torch.zeros(2), 1)])
    with pytest.raises(UserError, match="got one dict"):
        CollatedDataset({"text": torch.zeros(4, 2)})


def test_items_of_different_lengths_ask_for_padding() -> None:
    uneven = [{"text": torch.zeros(length), "labels": 0} for length in (3, 4)]
    with pytest.raises(UserError, match="'text'.*pad them"):
        CollatedDataset(uneven).batch([0, 1])
    padded = CollatedDataset(uneven, collate_fn=len)
    assert padded.batch([0, 1]) == 2
