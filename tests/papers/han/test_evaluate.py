"""Metrics of hard attention, compared with numpy and with torch's operation count."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overt import nn
from overt.data import SortOfClevr
from overt.experiments.evaluate import Evaluator
from overt.nn.hard_attention.selection import keep_all, keep_top
from overt.nn.vqa.image_encoders import CNNEncoder, CoordinateEncoder
from overt.nn.vqa.question_encoders import BagOfWordsEncoder
from overt.nn.vqa.stacked_attention import StackedAttention, StackedAttentionSizes
from overt.papers.han.evaluate import (
    LastHop,
    answer_scores,
    evaluate_model,
    slug,
    stacked_flops,
    validation_accuracy,
)
from overt.papers.han.networks import HAN, relation_net

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pictures() -> SortOfClevr:
    return SortOfClevr("test", count=3)


def build_relation_net(data: SortOfClevr, rule: Any) -> HAN:
    torch.manual_seed(0)
    reader = BagOfWordsEncoder(data.reader.size)
    return relation_net(
        data.reader.size, len(data.classes), rule, 16, reader=reader, maps=8, hidden=12
    ).eval()


def build_stacked_attention(data: SortOfClevr, hops: int = 2) -> StackedAttention:
    sizes = StackedAttentionSizes(data.reader.size, len(data.classes), 6, 8, 10, 7, hops, 0, 0.0)
    return StackedAttention(sizes, CoordinateEncoder(CNNEncoder([4] * 4, [2] * 4))).eval()


def test_covered_is_the_share_of_the_truth_in_kept_cells(pictures: SortOfClevr) -> None:
    """Compared per sample with plain numpy."""
    model, evaluator = (
        build_relation_net(pictures, partial(keep_top, count=6)),
        Evaluator(pictures, pictures.classes),
    )
    with torch.no_grad():
        found = evaluate_model(evaluator, model, CPU)
        batch = pictures.batch(range(len(pictures)))
        kept = model(batch).attention_to("image").weights[:, 0, 0, 0].numpy()
    assert batch.target is not None
    truth = batch.target.weights[:, 0, 0, 0].numpy()
    shares = batch.target.coverage[:, 0].numpy()
    covered = (truth * kept).sum(axis=1) / truth.sum(axis=1)
    np.testing.assert_allclose(found.samples["covered"], covered, atol=1e-6)
    np.testing.assert_allclose(found.samples["beyond_chance"], covered - 6 / 25, atol=1e-6)
    np.testing.assert_allclose(
        found.samples["mass_inside"], (kept * shares).sum(axis=1) / 6, atol=1e-6
    )
    assert found.ours["cells_kept"].value == 6 and found.ours["share_kept"].value == pytest.approx(
        6 / 25
    )
    assert found.groups["covered"]["relational"]["n"] == 30


def test_accuracy_per_question_kind_is_the_mean_of_its_samples(pictures: SortOfClevr) -> None:
    evaluator = Evaluator(pictures, pictures.classes)
    with torch.no_grad():
        model = build_relation_net(pictures, keep_all)
        found, validation = (
            evaluate_model(evaluator, model, CPU),
            validation_accuracy(evaluator, model, CPU),
        )
    kinds, right = found.samples["group"], found.samples["accuracy"]
    for kind in ("relational", "non-relational"):
        value = found.ours[f"accuracy_{slug(kind)}"]
        assert value.n == 30 and value.value == pytest.approx(right[kinds == kind].mean())
        assert found.groups["accuracy"][kind]["value"] == pytest.approx(value.value)
        assert validation[f"accuracy_{slug(kind)}"] == pytest.approx(value.value)
    assert validation["accuracy"] == pytest.approx(found.ours["accuracy"].value)
    assert "rank_correlation" not in found.ours  # equal cells have no ranks


def test_keeping_all_cells_covers_everything_at_chance_level(pictures: SortOfClevr) -> None:
    with torch.no_grad():
        found = evaluate_model(
            Evaluator(pictures, pictures.classes), build_relation_net(pictures, keep_all), CPU
        )
    assert found.ours["covered"].value == pytest.approx(1)
    assert found.ours["beyond_chance"].value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("hops", [1, 2])
def test_operations_of_stacked_attention_agree_with_torch(pictures: SortOfClevr, hops: int) -> None:
    """torch counts matrix products only; the reader and the layer on every cell are subtracted."""
    model, batch = build_stacked_attention(pictures, hops), pictures.batch(range(4))
    with torch.no_grad():
        features = model.encode(batch)
        before = FlopCounterMode(display=False)
        with before:
            model.reader(features.words, None)
            model.of_cell(features.cells.values)
        full = FlopCounterMode(display=False)
        with full:
            model.decide(features)
    wanted = (full.get_total_flops() - before.get_total_flops()) / 4
    assert stacked_flops(model, 25) == pytest.approx(wanted)


def test_soft_rows_keep_all_cells_and_are_evaluated_at_the_last_hop(pictures: SortOfClevr) -> None:
    model = build_stacked_attention(pictures)
    with torch.no_grad():
        found = evaluate_model(Evaluator(pictures, pictures.classes), model, CPU)
        batch = pictures.batch(range(3))
        one = LastHop(model)(batch).attention_to("image")
        full = model(batch).attention_to("image")
    assert found.ours["cells_kept"].value == 25 and "covered" not in found.ours
    assert one.weights.shape[1] == 1 and full.weights.shape[1] == 2
    torch.testing.assert_close(one.weights[:, 0], full.weights[:, 1])


def test_soft_answer_scores_are_used_where_given(pictures: SortOfClevr) -> None:
    from dataclasses import replace

    batch = pictures.batch([0, 1])
    output = nn.Output(torch.eye(10)[:2])
    assert answer_scores(output, batch).tolist() == [
        float(one) for one in batch.labels == torch.arange(2)
    ]
    scores = torch.zeros(2, 10)
    scores[0, 0] = 0.3
    torch.testing.assert_close(
        answer_scores(output, replace(batch, answers=scores)), torch.tensor([0.3, 0.0])
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("yes/no", "yes_no"), ("non-relational", "non_relational"), ("yes or no", "yes_or_no")],
)
def test_question_kinds_become_metric_names(kind: str, name: str) -> None:
    assert slug(kind) == name


def test_word_answers_are_scored_by_wups(pictures: SortOfClevr) -> None:
    class WordAnswers:
        name, split, classes = "words", "test", tuple(f"w{one}" for one in range(10))

        def __len__(self) -> int:
            return 20

        def batch(self, indices: Any) -> Any:
            found = pictures.batch(indices)
            true = tuple((f"w{label}",) for label in found.labels.tolist())  # type: ignore[union-attr]
            return replace(found, references=true)

        def digest(self) -> str:
            return ""

    data, model = WordAnswers(), build_relation_net(pictures, keep_all)
    with torch.no_grad():
        plain = evaluate_model(Evaluator(data, data.classes), model, CPU)
        found = evaluate_model(Evaluator(data, data.classes), model, CPU, lambda one, other: 0.5)
    assert "wups_90" not in plain.ours
    right = found.samples["accuracy"]
    np.testing.assert_allclose(found.samples["wups_90"], np.where(right == 1, 1, 0.05))
    np.testing.assert_allclose(found.samples["wups_0"], np.where(right == 1, 1, 0.5))
