"""The control with maps of another sample: never the same sample, independent of portions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from overt import metrics
from overt.metrics.scorecard.metric_context import OTHER, MetricContext
from overt.metrics.scorecard.sample_pairs import pair_samples, partner_items, samples_per_item
from overt.testing import PlantedCell, PlantedWord
from tests.metrics.scorecard.toys import Pictures, Texts


class VariableItems:
    """Items of one, two and three samples in turn."""

    name, split = "several", "test"

    def __init__(self, count: int) -> None:
        self.inner = Pictures(6 * count)

    def __len__(self) -> int:
        return len(self.inner) // 6

    def batch(self, indices):
        rows = [6 * item + at for item in indices for at in range(item % 3 + 1)]
        return self.inner.batch(rows)

    def digest(self) -> str:
        return "several"


@pytest.mark.parametrize("total", [2, 3, 50])
def test_no_item_is_its_own_partner(total) -> None:
    found = partner_items(range(total), total, seed=4)
    assert all(0 <= other < total != item for item, other in enumerate(found))
    assert all(item != other for item, other in enumerate(found))
    assert found[1:] == partner_items(range(1, total), total, seed=4)
    with pytest.raises(ValueError, match=r"2 items .* 1"):
        partner_items([0], 1, seed=0)


def test_samples_are_paired_with_those_of_the_partner_in_turn() -> None:
    assert pair_samples([1, 3], [2, 2]).tolist() == [0, 2, 3, 2]
    assert samples_per_item(VariableItems(4), [0, 1, 2, 3], 7) == [1, 2, 3, 1]
    assert samples_per_item(Pictures(3), [0, 2], 2) == [1, 1]


@pytest.mark.parametrize("kind", ["pictures", "texts", "several"])
def test_values_do_not_depend_on_the_portion_size(kind) -> None:
    data = {"pictures": Pictures(7), "texts": Texts(7), "several": VariableItems(5)}[kind]
    model = PlantedWord() if kind == "texts" else PlantedCell(gain=3.0)
    cards = [metrics.scorecard(model, data, ["spearman", "cc"], portion=size) for size in (2, 7)]
    assert cards[0].maps == cards[1].maps and OTHER in cards[0].maps
    for pair, values in cards[0].numbers.items():
        np.testing.assert_allclose(values, cards[1].numbers[pair], atol=1e-5, err_msg=str(pair))


def test_the_other_map_is_the_judged_map_of_the_partner() -> None:
    """Each map encodes the number of its sample."""
    data = Pictures(5)
    names = list(data.batch(range(5)).ids)
    map_samples: list[torch.Tensor] = []

    def map_by_sample(batch):
        model = PlantedCell()
        found = model(batch).attention[-1]
        encoded = torch.zeros(len(batch), found.values.shape[-1])
        for row, name in enumerate(batch.ids):
            encoded[row, names.index(name)] = 1
        made = replace(found, values=encoded[:, None, None, None])
        map_samples.append(made.weights.flatten(1).argmax(dim=-1))
        return made

    from overt.metrics.scorecard.evaluate import _ScorecardJob

    work = _ScorecardJob(None, data, (), {"map_by_sample": map_by_sample}, None, 0, 5, 5, 5)
    found = work._context(range(5)).map(OTHER).weights.flatten(1).argmax(dim=-1)
    assert found.tolist() == partner_items(range(5), 5, seed=0)


def test_samples_of_the_same_image_are_not_paired() -> None:
    """With several questions per image, a map of the same image is not a control."""

    class Same(Pictures):
        def batch(self, indices):
            found = super().batch(indices)
            return replace(found, images=torch.ones_like(found.images))

    card = metrics.scorecard(PlantedCell(), Same(4), ["cc"])
    assert (OTHER, "cc") not in card.numbers


def test_a_single_sample_has_no_other_map() -> None:
    assert OTHER not in metrics.scorecard(PlantedCell(), Pictures(1), ["entropy"]).maps
    assert OTHER not in MetricContext(PlantedCell().eval(), Pictures(2).batch(range(2))).names()
