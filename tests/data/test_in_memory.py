"""In-memory datasets: their batches equal those of the source dataset."""

import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.in_memory import InMemoryDataset
from overt.errors import UserError


class Toy:
    """Five items of two samples each, about one of three images; texts of one to four words."""

    name, split = "toy", "train"

    def __len__(self) -> int:
        return 5

    def batch(self, indices) -> Batch:
        items = [int(one) for one in indices]
        rows = [2 * item + part for item in items for part in range(2)]
        lengths = torch.tensor([1 + row % 4 for row in rows])
        width = int(lengths.max())
        present = torch.arange(width) < lengths[:, None]
        image_ids = sorted({item % 3 for item in items})
        return Batch(
            ids=tuple(f"toy/{row}" for row in rows),
            images=torch.stack(
                [torch.full((3, 4, 4), 9 * n, dtype=torch.uint8) for n in image_ids]
            ),
            image_of=torch.tensor([image_ids.index(item % 3) for item in items for _ in range(2)]),
            tokens=torch.where(
                present, torch.arange(1, width + 1) + torch.tensor(rows)[:, None], 0
            ),
            token_mask=present,
            labels=torch.tensor(rows),
            target=AttentionMap.from_coverage(
                (torch.tensor(rows)[:, None].float() + torch.arange(4)) / 99, grid(2, 2)
            ),
        )

    def digest(self) -> str:
        return "abc"


def assert_same_batch(found: Batch, expected: Batch) -> None:
    assert found.ids == expected.ids
    for name in ("tokens", "token_mask", "labels"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(
        found.images[found.image_index], expected.images[expected.image_index]
    )
    torch.testing.assert_close(found.target.weights, expected.target.weights)
    assert torch.equal(found.target.visible, expected.target.visible)
    assert torch.equal(found.target.coverage, expected.target.coverage)
    assert found.target.keys.spans[0].shape == expected.target.keys.spans[0].shape


@pytest.mark.parametrize("items", [[0], [3, 1], [4, 0, 2], range(5)])
def test_batches_equal_those_of_the_source(items):
    assert_same_batch(InMemoryDataset.from_dataset(Toy()).batch(items), Toy().batch(items))


def test_dataset_has_the_name_and_digest_of_the_source():
    dataset = InMemoryDataset.from_dataset(Toy())
    assert isinstance(dataset, Dataset) and len(dataset) == 5
    assert (dataset.name, dataset.split, dataset.digest()) == ("toy", "train", "abc")
    assert dataset.each == 2


def test_batches_without_images_and_targets():
    class Plain(Toy):
        def batch(self, indices) -> Batch:
            found = super().batch(indices)
            return Batch(
                found.ids, tokens=found.tokens, token_mask=found.token_mask, labels=found.labels
            )

    found = InMemoryDataset.from_dataset(Plain()).batch([1])
    assert found.images is None and found.target is None
    torch.testing.assert_close(found.tokens, Toy().batch([1]).tokens)


def test_empty_datasets_and_batches_without_tokens_raise():
    class Empty(Toy):
        def __len__(self) -> int:
            return 0

    class Wordless(Toy):
        def batch(self, indices) -> Batch:
            found = super().batch(indices)
            return Batch(found.ids, labels=found.labels)

    with pytest.raises(UserError, match=r"toy train.*empty"):
        InMemoryDataset.from_dataset(Empty())
    with pytest.raises(UserError, match="needs tokens"):
        InMemoryDataset.from_dataset(Wordless())


def test_with_full_length_keeps_the_padding():
    dataset = InMemoryDataset.from_dataset(Toy())
    assert dataset.batch([0]).tokens.shape[1] == 2
    uncut = dataset.with_full_length().batch([0])
    assert uncut.tokens.shape == uncut.token_mask.shape == (2, 4)
    assert not uncut.token_mask[:, 2:].any()
    torch.testing.assert_close(uncut.tokens[:, :2], dataset.batch([0]).tokens)


def test_features_are_stored_once_per_image():
    requests: list[list[str]] = []

    def features(names):
        requests.append(list(names))
        return torch.stack([torch.full((4, 2), float(name)) for name in names])

    dataset = InMemoryDataset.from_dataset(Toy()).with_features(["7", "8", "7", "9", "8"], features)
    assert requests == [["7", "8", "9"]] and len(dataset.features) == 3
    found = dataset.batch([4, 0])
    assert found.images is None and found.features.shape == (4, 4, 2)
    assert found.features[:, 0, 0].tolist() == [8, 8, 7, 7]
    with pytest.raises(ValueError, match=r"2 .* 5 items"):
        InMemoryDataset.from_dataset(Toy()).with_features(["7", "8"], features)
