"""Calibration and Brier score compared with reference code, torchmetrics and sklearn."""

import math

import pytest
import torch

from overt.metrics import brier, reliability_diagram
from overt.metrics.calibration import ReliabilityDiagram, equal_mass_bins, equal_width_bins


def random_answers(
    generator: torch.Generator, count: int = 300, scale: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scale * torch.randn(count, 5, generator=generator)
    return logits, torch.randint(0, 5, (count,), generator=generator)


def reference_ece(logits: torch.Tensor, labels: torch.Tensor, bins: int) -> float:
    """Equation 3 of Guo et al., one sample at a time."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        total = math.fsum(math.exp(value) for value in row)
        sure = math.exp(max(row)) / total
        for at in range(bins):
            if at / bins < sure <= (at + 1) / bins:
                members[at].append((sure, row.index(max(row)) == label))
    error = 0.0
    for one in members:
        if one:
            sure = math.fsum(c for c, _ in one) / len(one)
            right = sum(r for _, r in one) / len(one)
            error += len(one) / len(labels) * abs(sure - right)
    return error


@pytest.mark.parametrize("bins", [1, 5, 15])
def test_ece_agrees_with_the_reference(bins, generator):
    logits, labels = random_answers(generator)
    assert reliability_diagram(logits, labels, bins).ece == pytest.approx(
        reference_ece(logits, labels, bins)
    )


def test_ece_and_mce_agree_with_torchmetrics(generator):
    classification = pytest.importorskip(
        "torchmetrics.functional.classification", reason="torchmetrics is not installed"
    )
    logits, labels = random_answers(generator)
    found = reliability_diagram(logits, labels)
    for norm, ours in (("l1", found.ece), ("max", found.mce)):
        theirs = classification.multiclass_calibration_error(
            logits.softmax(dim=-1), labels, num_classes=5, n_bins=15, norm=norm
        )
        assert ours == pytest.approx(float(theirs), abs=1e-5)


def test_reliability_diagram_matches_an_example_by_hand():
    logits = torch.tensor([[0.95, 0.05], [0.9, 0.1], [0.6, 0.4], [0.45, 0.55]]).log()
    found = reliability_diagram(logits, torch.tensor([0, 1, 0, 0]), bins=4)
    assert found.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert found.count.tolist() == [0, 0, 2, 2]
    assert found.confidence[2:].tolist() == pytest.approx([0.575, 0.925])
    assert found.accuracy[2:].tolist() == pytest.approx([0.5, 0.5])
    assert found.gap[2:].tolist() == pytest.approx([0.075, 0.425])
    assert found.confidence[:2].isnan().all() and found.accuracy[:2].isnan().all()
    assert found.ece == pytest.approx(0.25) and found.mce == pytest.approx(0.425)


def test_a_sample_on_an_edge_belongs_to_the_bin_below():
    logits = torch.tensor([[0.0, 0.0]])  # a confidence of exactly one half
    assert reliability_diagram(logits, torch.tensor([0]), bins=2).count.tolist() == [1, 0]
    sure = torch.tensor([[1000.0, 0.0]])
    assert reliability_diagram(sure, torch.tensor([0]), bins=2).count.tolist() == [0, 1]


def test_an_overconfident_model_has_a_larger_error_than_a_calibrated_one(generator):
    logits, _ = random_answers(generator, 20_000, scale=1.5)
    labels = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
    honest, loud = reliability_diagram(logits, labels), reliability_diagram(3 * logits, labels)
    assert honest.ece < 0.015 < 0.15 < loud.ece
    filled = loud.count > 0
    assert (loud.gap[filled] > 0).float().mean() > 0.8, "confidence is above accuracy"


def test_bins_of_equal_mass_have_equal_counts(generator):
    logits, labels = random_answers(generator, 300, scale=6.0)
    even, wide = (
        reliability_diagram(logits, labels, 10, edges)
        for edges in (equal_mass_bins, equal_width_bins)
    )
    assert even.count.tolist() == [30] * 10
    assert wide.count.max() > 100
    ordered = logits.double().softmax(dim=-1).amax(dim=-1).sort().values.reshape(10, 30)
    torch.testing.assert_close(even.confidence, ordered.mean(dim=-1))
    assert even.edges[0] == 0 and even.edges[-1] == 1


def test_equal_confidences_are_in_one_bin():
    logits = torch.tensor([[0.7, 0.3]]).log().expand(10, 2)
    found = reliability_diagram(logits, torch.zeros(10, dtype=torch.long), 4, equal_mass_bins)
    assert found.count.sum() == 10 and found.count.max() == 10
    assert found.ece == pytest.approx(0.3)


def test_fewer_samples_than_bins_are_allowed(generator):
    logits, labels = random_answers(generator, 3)
    for edges in (equal_mass_bins, equal_width_bins):
        found = reliability_diagram(logits, labels, 15, edges)
        assert found.count.sum() == 3 and 0 <= found.ece <= found.mce <= 1


def test_samples_without_a_label_are_left_out(generator):
    logits, labels = random_answers(generator)
    hidden = torch.where(torch.arange(300) % 3 == 0, -1, labels)
    kept = hidden >= 0
    assert (
        reliability_diagram(logits, hidden).ece
        == reliability_diagram(logits[kept], labels[kept]).ece
    )


@pytest.mark.parametrize("edges", [equal_mass_bins, equal_width_bins])
def test_an_empty_batch_gives_nan(edges):
    found = reliability_diagram(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), edges=edges)
    assert math.isnan(found.ece) and math.isnan(found.mce) and found.count.sum() == 0


def test_zero_bins_raise(generator):
    with pytest.raises(ValueError, match="bins .* 0"):
        reliability_diagram(*random_answers(generator), bins=0)


@pytest.mark.gpu
@pytest.mark.parametrize("edges", [equal_mass_bins, equal_width_bins])
def test_gpu_and_cpu_agree(edges, generator):
    logits, labels = random_answers(generator)
    here, there = (
        reliability_diagram(logits.to(device), labels.to(device), edges=edges)
        for device in ("cpu", "cuda")
    )
    assert there.count.is_cuda and torch.equal(there.count.cpu(), here.count)
    assert there.ece == pytest.approx(here.ece) and there.mce == pytest.approx(here.mce)


# The Brier score


def test_the_brier_score_is_the_squared_distance_to_the_truth(generator):
    logits, labels = random_answers(generator, 40)
    for found, row, label in zip(
        brier(logits, labels).tolist(), logits, labels.tolist(), strict=True
    ):
        chances = row.double().softmax(dim=-1).tolist()
        slow = math.fsum((one - (at == label)) ** 2 for at, one in enumerate(chances))
        assert found == pytest.approx(slow)


def test_the_brier_score_agrees_with_sklearn(generator):
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = random_answers(generator, 200)
    two = logits[:, :2].double()
    theirs = metrics.brier_score_loss((labels > 2).long(), two.softmax(dim=-1)[:, 1])
    ours = brier(two, (labels > 2).long()).mean()
    assert float(ours) / 2 == pytest.approx(theirs)  # sklearn counts one of two classes


def test_brier_scores_of_certain_and_unlabelled_samples():
    logits = torch.tensor([[100.0, 0.0], [100.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    found = brier(logits, torch.tensor([0, 1, 1, -1]))
    assert found[:3].tolist() == pytest.approx([0, 2, 0.5])
    assert math.isnan(float(found[3]))


def test_the_true_probability_has_the_lowest_brier_score(generator):
    right = (torch.rand(4000, generator=generator) < 0.7).long()
    scores = {p: brier(torch.tensor([[0.0, math.log(p / (1 - p))]]).expand(4000, 2), right).mean()
            for p in (0.5, 0.6, 0.7, 0.8, 0.9)}  # fmt: skip
    assert min(scores, key=scores.__getitem__) == 0.7


def test_nan_logits_are_left_out(generator):
    logits, labels = random_answers(generator)
    wrong = torch.tensor([[math.nan] * 5, [math.inf, 0, 0, 0, 0]])
    found = reliability_diagram(
        torch.cat([wrong, logits]), torch.cat([torch.tensor([0, 0]), labels])
    )
    assert int(found.count.sum()) == len(labels)
    assert found.ece == reliability_diagram(logits, labels).ece
    assert math.isnan(reliability_diagram(wrong, torch.tensor([0, 1])).ece)
    assert brier(wrong, torch.tensor([0, 1])).isnan().all()


def test_a_nan_gap_of_a_filled_bin_gives_nan():
    one = torch.tensor([0.5, math.nan])
    empty = ReliabilityDiagram(torch.tensor([0.0, 0.5, 1]), torch.tensor([2, 0]), one, one - 0.1)
    full = ReliabilityDiagram(torch.tensor([0.0, 0.5, 1]), torch.tensor([2, 1]), one, one - 0.1)
    assert empty.ece == pytest.approx(0.1) and math.isnan(full.ece)
