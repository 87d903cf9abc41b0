"""Metrics of a scorecard: complete declarations, and values equal to their functions."""

from dataclasses import replace

import pytest
import torch

from overt import metrics
from overt.data.human_attention import GroundTruth, pool_people
from overt.errors import UserError
from overt.metrics.metric import MetricUnavailableError
from overt.metrics.scorecard.catalog import available_metrics, default_keys, select_metrics
from overt.metrics.scorecard.entry import MetricQuestion, ScorecardMetric
from overt.metrics.scorecard.metric_context import ATTENTION, MASK, REMOVALS, MetricContext
from overt.nn.cnn import AttentiveCNN
from overt.testing import PlantedCell, PlantedWord
from tests.metrics.declared_metrics import FUNCTIONS
from tests.metrics.scorecard.test_metric_context import batch_with_people
from tests.metrics.scorecard.toys import Pictures, Texts, partly_true_map, small_bert


def metrics_by_key() -> dict[str, ScorecardMetric]:
    return {entry.key: entry for entry in available_metrics()}


def test_keys_are_unique_and_every_entry_states_its_limitation() -> None:
    every = available_metrics()
    assert len(metrics_by_key()) == len(every) >= 70
    for entry in every:
        assert entry.limitation.endswith(".") and len(entry.limitation) > 30, entry.key
        assert entry.info.unit and entry.info.low < entry.info.high
        assert entry.name in FUNCTIONS or not entry.each_map, entry.key
    assert {entry.question for entry in every} == set(MetricQuestion)


def test_every_deletion_metric_has_all_baselines() -> None:
    names = {e.name for e in available_metrics() if "@" in e.key} - {"gradient_agreement"}
    assert names == {
        "deletion_area", "insertion_area", "flipping", "comprehensiveness", "sufficiency",
        "flip_share", "deletion", "insertion", "flips", "infidelity", "leave_one_out_agreement",
    }  # fmt: skip
    assert {f"{name}@{removal}" for name in names for removal in REMOVALS} <= set(metrics_by_key())


def test_metrics_are_selected_by_key_name_question_or_all() -> None:
    assert [e.key for e in select_metrics(["spearman"])] == ["spearman"]
    assert [e.key for e in select_metrics(["deletion_area@blur"])] == ["deletion_area@blur"]
    assert {e.key for e in select_metrics(["flips"])} == {
        f"flips@{removal}" for removal in REMOVALS
    }
    assert {e.question for e in select_metrics(["location"])} == {MetricQuestion.LOCATION}
    assert select_metrics(["all"]) == tuple(available_metrics()) or len(
        select_metrics(["all"])
    ) == len(available_metrics())
    assert (
        tuple(e.key for e in select_metrics(None)) == default_keys()
        and 20 < len(default_keys()) < 45
    )
    with pytest.raises(UserError, match=r"speerman.*spearman"):
        select_metrics(["speerman"])
    with pytest.raises(UserError, match="no metric"):
        select_metrics([])


def context() -> MetricContext:
    batch = Pictures(6).batch(range(6))
    assert batch.target is not None
    looks = {"half": partly_true_map(0.5, None)}
    return MetricContext(PlantedCell(gain=3.0).eval(), batch, GroundTruth(batch.target), looks)


WITH_TRUTH = ["spearman", "kendall", "cc", "sim", "kl", "js", "emd"]
WITH_TRUTH += ["pointing_game", "mass_inside", "iou", "mean_iou", "otsu_jaccard", "cut_out"]


@pytest.mark.parametrize("key", WITH_TRUTH)
def test_agreement_and_location_entries_equal_their_functions(key: str) -> None:
    seen = context()
    found = metrics_by_key()[key].compute(seen, "half")
    wanted = FUNCTIONS[key](seen.map("half"), seen.truth("half").target)
    torch.testing.assert_close(found, wanted, equal_nan=True)


AREAS = ["deletion_area", "insertion_area", "flipping", "comprehensiveness", "sufficiency"]


@pytest.mark.parametrize("key", [*AREAS, "flip_share"])
@pytest.mark.parametrize("removal", [MASK, "mean"])
def test_metrics_of_shared_curves_equal_their_functions(key: str, removal: str) -> None:
    seen = context()
    found = metrics_by_key()[f"{key}@{removal}"].compute(seen, "half")
    again = context()
    wanted = FUNCTIONS[key](again.decide(removal), again.map("half"), again.generator("curve"))
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("key", ["leave_one_out_agreement", "gradient_agreement"])
def test_single_key_metrics_equal_their_functions(key: str) -> None:
    seen = context()
    found = metrics_by_key()[f"{key}@mask"].compute(seen, "half")
    wanted = FUNCTIONS[key](seen.decide(MASK), seen.map("half"))
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_fixations_of_all_people_are_pooled() -> None:
    batch, truth = batch_with_people()
    seen = MetricContext(PlantedCell(), batch, truth, {"half": partly_true_map(0.5, None)})
    assert truth.fixations is not None and truth.others is not None and truth.prior is not None
    counts, half = pool_people(truth.fixations), seen.map("half")
    assert seen.describe("half").endswith("; fixations are counted on 4x4 cells")
    pairs = {
        "nss": metrics.nss(half, counts),
        "auc_judd": metrics.auc_judd(half, counts),
        "auc_shuffled": metrics.auc_shuffled(half, counts, truth.others),
        "information_gain": metrics.information_gain(half, counts, truth.prior),
    }
    for key, wanted in pairs.items():
        torch.testing.assert_close(
            metrics_by_key()[key].compute(seen, "half"), wanted, equal_nan=True
        )
    gained = metrics_by_key()["information_gain"].compute(seen, "prior")
    torch.testing.assert_close(gained, torch.zeros(5), atol=1e-5, rtol=0)
    with pytest.raises(MetricUnavailableError, match="no region"):
        metrics_by_key()["mass_inside"].compute(seen, "half")


@pytest.mark.parametrize(
    "key", ["output_change_evened", "edit_flips_permuted", "beyond_random_weights"]
)
def test_interventions_change_attention_in_the_forward_pass(key: str) -> None:
    found = metrics_by_key()[key].compute(
        MetricContext(small_bert(), Texts(4).batch(range(4)), over="text"), "model"
    )
    assert found.shape == (4,) and bool(((found >= -1) & (found <= 1)).all())
    if key == "output_change_evened":
        assert bool((found > 0).all())


def test_a_map_independent_of_the_input_has_zero_sensitivity() -> None:
    seen = context()
    assert torch.equal(metrics_by_key()["sensitivity_max"].compute(seen, "model"), torch.zeros(6))
    moving = MetricContext(AttentiveCNN(3).eval(), Pictures(4).batch(range(4)))
    assert bool((metrics_by_key()["sensitivity_max"].compute(moving, "model") > 0).all())
    assert bool((metrics_by_key()["stability"].compute(moving, "model") > 0).all())


def test_as_many_words_are_selected_as_people_marked() -> None:
    batch = Texts(6).batch(range(6))
    assert batch.target is not None
    seen = MetricContext(PlantedWord().eval(), batch, GroundTruth(batch.target))
    chosen = ("token_f1", "token_iou", "token_precision", "token_recall")
    for key in (*chosen, "token_auprc", "token_ap", "token_auc"):
        assert metrics_by_key()[key].compute(seen, ATTENTION).tolist() == [1.0] * 6
    with pytest.raises(MetricUnavailableError, match="not words"):
        metrics_by_key()["token_f1"].compute(context(), ATTENTION)


def test_heads_are_compared_before_fusion() -> None:
    seen = MetricContext(small_bert(), Texts(4).batch(range(4)), over="text")
    found = metrics_by_key()["head_redundancy"].compute(seen, "model")
    assert seen.heads.values.shape[2] == 2 and seen.map(ATTENTION).values.shape[2] == 1
    torch.testing.assert_close(found, metrics.head_redundancy(seen.heads))
    with pytest.raises(ValueError, match="at least 2 heads"):
        metrics_by_key()["head_redundancy"].compute(context(), "model")


def test_accuracy_is_unavailable_for_other_classes() -> None:
    seen = context()
    assert set(metrics_by_key()["accuracy"].compute(seen, "model").tolist()) <= {0.0, 1.0}
    labels = torch.full((6,), 7)
    other = MetricContext(seen.model, replace(seen.batch, labels=labels))
    with pytest.raises(MetricUnavailableError, match="2 classes"):
        metrics_by_key()["accuracy"].compute(other, "model")
    with pytest.raises(MetricUnavailableError):
        metrics_by_key()["brier"].compute(other, "model")
    assert (
        metrics_by_key()["brier"].compute(seen, "model") >= 0
    ).all() and "brier" not in default_keys()


def test_keys_equal_those_of_committed_results() -> None:
    """Functions may be renamed; keys may not, because stored scorecards contain them."""
    plain = """
        spearman kendall cc sim kl js emd nss auc_judd auc_shuffled information_gain
        token_auprc token_ap token_auc token_f1 token_iou token_precision token_recall
        span_f1 span_precision span_recall pointing_game mass_inside iou mean_iou
        otsu_jaccard cut_out output_change_permuted edit_flips_permuted output_change_evened
        edit_flips_evened beyond_random_weights weights_to_flip sensitivity_max
        sensitivity_mean stability forgotten_similarity entropy effective_support gini hoyer
        head_redundancy accuracy brier
    """
    removal = """
        deletion_area insertion_area flipping comprehensiveness sufficiency flip_share
        deletion insertion flips infidelity leave_one_out_agreement
    """
    expected = {*plain.split(), "gradient_agreement@mask"}
    expected |= {f"{one}@{way}" for one in removal.split() for way in REMOVALS}
    assert {entry.key for entry in available_metrics()} == expected
    assert all(entry.key == entry.info.key for entry in available_metrics())


def test_questions_hold_for_data_without_people() -> None:
    assert all("people" not in question.value for question in MetricQuestion)
