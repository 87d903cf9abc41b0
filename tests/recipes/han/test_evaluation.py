"""Numbers of hard attention, by hand and against torch's own count."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overt import models
from overt.data import SortOfClevr
from overt.models.answering.eyes import PlacedEye, TrainedEye
from overt.models.answering.questions import Bag
from overt.models.answering.stacked import StackedAttention, StackSizes
from overt.models.hard.selection import keep_all, keep_top
from overt.recipes.evaluation import Judge
from overt.recipes.han.evaluation import (
    LastHop,
    answered,
    evaluated,
    slug,
    stacked_flops,
    validated,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures() -> SortOfClevr:
    return SortOfClevr("test", count=3)


def small(data: SortOfClevr, rule: Any) -> models.HAN:
    torch.manual_seed(0)
    reader = Bag(data.reader.size)
    return models.relation_net(
        data.reader.size, len(data.classes), rule, 16, reader=reader, maps=8, hidden=12
    ).eval()


def stacked(data: SortOfClevr, hops: int = 2) -> StackedAttention:
    sizes = StackSizes(data.reader.size, len(data.classes), 6, 8, 10, 7, hops, 0, 0.0)
    return StackedAttention(sizes, PlacedEye(TrainedEye([4] * 4, [2] * 4))).eval()


def test_what_was_found_is_the_truth_in_kept_cells(pictures: SortOfClevr) -> None:
    """Sample by sample, in plain numpy."""
    model, judge = small(pictures, partial(keep_top, count=6)), Judge(pictures, pictures.classes)
    with torch.no_grad():
        found = evaluated(judge, model, CPU)
        batch = pictures.batch(range(len(pictures)))
        kept = model(batch).looking_at("image").weights[:, 0, 0, 0].numpy()
    assert batch.target is not None
    truth = batch.target.weights[:, 0, 0, 0].numpy()
    covered = (truth * kept).sum(axis=1) / truth.sum(axis=1)
    np.testing.assert_allclose(found.samples["covered"], covered, atol=1e-6)
    np.testing.assert_allclose(found.samples["beyond_chance"], covered - 6 / 25, atol=1e-6)
    np.testing.assert_allclose(
        found.samples["mass_inside"], (kept * (truth > 0)).sum(axis=1) / 6, atol=1e-6
    )
    assert found.ours["cells_kept"].value == 6 and found.ours["share_kept"].value == pytest.approx(
        6 / 25
    )
    assert found.groups["covered"]["relational"]["n"] == 30


def test_accuracy_by_kind_is_that_of_its_samples(pictures: SortOfClevr) -> None:
    judge = Judge(pictures, pictures.classes)
    with torch.no_grad():
        model = small(pictures, keep_all)
        found, seen = evaluated(judge, model, CPU), validated(judge.batches(CPU), model)
    kinds, right = found.samples["group"], found.samples["accuracy"]
    for kind in ("relational", "non-relational"):
        value = found.ours[f"accuracy_{slug(kind)}"]
        assert value.n == 30 and value.value == pytest.approx(right[kinds == kind].mean())
        assert found.groups["accuracy"][kind]["value"] == pytest.approx(value.value)
        assert seen[f"accuracy_{slug(kind)}"] == pytest.approx(value.value)
    assert seen["accuracy"] == pytest.approx(found.ours["accuracy"].value)
    assert "rank_correlation" not in found.ours  # all cells alike have no ranks


def test_a_choice_of_all_covers_all_by_chance(pictures: SortOfClevr) -> None:
    with torch.no_grad():
        found = evaluated(Judge(pictures, pictures.classes), small(pictures, keep_all), CPU)
    assert found.ours["covered"].value == pytest.approx(1)
    assert found.ours["beyond_chance"].value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("hops", [1, 2])
def test_operations_of_stacked_attention_agree_with_torch(pictures: SortOfClevr, hops: int) -> None:
    """torch counts matrix products only; reading and the layer on every cell are taken off."""
    model, batch = stacked(pictures, hops), pictures.batch(range(4))
    with torch.no_grad():
        features = model.encode(batch)
        before = FlopCounterMode(display=False)
        with before:
            model.reader(features.words, None)
            model.of_cell(features.cells.values)
        whole = FlopCounterMode(display=False)
        with whole:
            model.decide(features)
    wanted = (whole.get_total_flops() - before.get_total_flops()) / 4
    assert stacked_flops(model, 25) == pytest.approx(wanted)


def test_soft_rows_keep_all_and_are_judged_by_the_last_hop(pictures: SortOfClevr) -> None:
    model = stacked(pictures)
    with torch.no_grad():
        found = evaluated(Judge(pictures, pictures.classes), model, CPU)
        batch = pictures.batch(range(3))
        one = LastHop(model)(batch).looking_at("image")
        whole = model(batch).looking_at("image")
    assert found.ours["cells_kept"].value == 25 and "covered" not in found.ours
    assert one.weights.shape[1] == 1 and whole.weights.shape[1] == 2
    torch.testing.assert_close(one.weights[:, 0], whole.weights[:, 1])


def test_answers_of_people_count_where_there_are_such(pictures: SortOfClevr) -> None:
    from dataclasses import replace

    batch = pictures.batch([0, 1])
    said = models.Output(torch.eye(10)[:2])
    assert answered(said, batch).tolist() == [float(one) for one in batch.labels == torch.arange(2)]
    scores = torch.zeros(2, 10)
    scores[0, 0] = 0.3
    torch.testing.assert_close(
        answered(said, replace(batch, answers=scores)), torch.tensor([0.3, 0.0])
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("yes/no", "yes_no"), ("non-relational", "non_relational"), ("yes or no", "yes_or_no")],
)
def test_kinds_as_names(kind: str, name: str) -> None:
    assert slug(kind) == name


def test_answers_are_scored_by_meaning_where_they_are_words(pictures: SortOfClevr) -> None:
    class InWords:
        name, split, classes = "words", "test", tuple(f"w{one}" for one in range(10))

        def __len__(self) -> int:
            return 20

        def batch(self, indices: Any) -> Any:
            found = pictures.batch(indices)
            true = tuple((f"w{label}",) for label in found.labels.tolist())  # type: ignore[union-attr]
            return replace(found, references=true)

        def digest(self) -> str:
            return ""

    data, model = InWords(), small(pictures, keep_all)
    with torch.no_grad():
        plain = evaluated(Judge(data, data.classes), model, CPU)
        found = evaluated(Judge(data, data.classes), model, CPU, lambda one, other: 0.5)
    assert "wups_90" not in plain.ours
    right = found.samples["accuracy"]
    np.testing.assert_allclose(found.samples["wups_90"], np.where(right == 1, 1, 0.05))
    np.testing.assert_allclose(found.samples["wups_0"], np.where(right == 1, 1, 0.5))
