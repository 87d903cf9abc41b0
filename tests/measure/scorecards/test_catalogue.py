"""Every measure that a scorecard can ask: declared in full, and equal to its function."""

from dataclasses import replace

import pytest
import torch

from overt import measure
from overt.data.human import Truth, pooled
from overt.errors import BadInput
from overt.measure.scorecards.catalogue import catalogue, choose, usual
from overt.measure.scorecards.entries import Entry, Question, Unasked
from overt.measure.scorecards.sight import ATTENTION, MASK, REMOVALS, Sight
from overt.models.cnn import AttentiveCNN
from overt.testing import PlantedCell, PlantedWord
from tests.measure.scorecards.test_sight import peopled
from tests.measure.scorecards.toys import Pictures, Texts, small_bert, told


def by_key() -> dict[str, Entry]:
    return {entry.key: entry for entry in catalogue()}


def test_keys_are_unique_and_every_entry_says_what_it_cannot_say() -> None:
    every = catalogue()
    assert len(by_key()) == len(every) >= 70
    for entry in every:
        assert entry.cannot.endswith(".") and len(entry.cannot) > 30, entry.key
        assert entry.measure.unit and entry.measure.low < entry.measure.high
        assert hasattr(measure, entry.name) or not entry.each_map, entry.key
    assert {entry.question for entry in every} == set(Question)


def test_every_deletion_measure_has_all_baselines() -> None:
    names = {e.name for e in catalogue() if "@" in e.key} - {"gradient_agreement"}
    assert names == {
        "deletion_area", "insertion_area", "flipping", "comprehensiveness", "sufficiency",
        "flip_share", "deletion", "insertion", "flips", "infidelity", "leave_one_out_agreement",
    }  # fmt: skip
    assert {f"{name}@{removal}" for name in names for removal in REMOVALS} <= set(by_key())


def test_choosing_by_key_by_name_by_question_and_all() -> None:
    assert [e.key for e in choose(["spearman"])] == ["spearman"]
    assert [e.key for e in choose(["deletion_area@blur"])] == ["deletion_area@blur"]
    assert {e.key for e in choose(["flips"])} == {f"flips@{removal}" for removal in REMOVALS}
    assert {e.question for e in choose(["location"])} == {Question.LOCATION}
    assert choose(["all"]) == tuple(catalogue()) or len(choose(["all"])) == len(catalogue())
    assert tuple(e.key for e in choose(None)) == usual() and 20 < len(usual()) < 45
    with pytest.raises(BadInput, match="there is no measure 'speerman'; near it: spearman"):
        choose(["speerman"])
    with pytest.raises(BadInput, match="no measure was named"):
        choose([])


def sight() -> Sight:
    batch = Pictures(6).batch(range(6))
    assert batch.target is not None
    looks = {"half": told(0.5, None)}
    return Sight(PlantedCell(gain=3.0).eval(), batch, Truth(batch.target), looks)


WITH_TRUTH = ["spearman", "kendall", "cc", "sim", "kl", "js", "emd"]
WITH_TRUTH += ["pointing_game", "mass_inside", "iou", "mean_iou", "otsu_jaccard", "cut_out"]


@pytest.mark.parametrize("key", WITH_TRUTH)
def test_agreement_and_location_are_their_functions(key: str) -> None:
    seen = sight()
    found = by_key()[key].ask(seen, "half")
    wanted = getattr(measure, key)(seen.map("half"), seen.truth("half").target)
    torch.testing.assert_close(found, wanted, equal_nan=True)


AREAS = ["deletion_area", "insertion_area", "flipping", "comprehensiveness", "sufficiency"]


@pytest.mark.parametrize("key", [*AREAS, "flip_share"])
@pytest.mark.parametrize("removal", [MASK, "mean"])
def test_curves_that_are_shared_give_what_each_function_gives(key: str, removal: str) -> None:
    seen = sight()
    found = by_key()[f"{key}@{removal}"].ask(seen, "half")
    again = sight()
    wanted = getattr(measure, key)(again.decide(removal), again.map("half"), again.draw("curve"))
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("key", ["leave_one_out_agreement", "gradient_agreement"])
def test_single_keys_are_their_functions(key: str) -> None:
    seen = sight()
    found = by_key()[f"{key}@mask"].ask(seen, "half")
    wanted = getattr(measure, key)(seen.decide(MASK), seen.map("half"))
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_fixations_are_those_of_all_people_together() -> None:
    batch, truth = peopled()
    seen = Sight(PlantedCell(), batch, truth, {"half": told(0.5, None)})
    assert truth.fixations is not None and truth.others is not None and truth.prior is not None
    counts, half = pooled(truth.fixations), seen.map("half")
    pairs = {
        "nss": measure.nss(half, counts),
        "auc_judd": measure.auc_judd(half, counts),
        "auc_shuffled": measure.auc_shuffled(half, counts, truth.others),
        "information_gain": measure.information_gain(half, counts, truth.prior),
    }
    for key, wanted in pairs.items():
        torch.testing.assert_close(by_key()[key].ask(seen, "half"), wanted, equal_nan=True)
    gained = by_key()["information_gain"].ask(seen, "prior")
    torch.testing.assert_close(gained, torch.zeros(5), atol=1e-5, rtol=0)
    with pytest.raises(Unasked, match="has no edge"):
        by_key()["mass_inside"].ask(seen, "half")


@pytest.mark.parametrize(
    "key", ["output_change_evened", "edit_flips_permuted", "beyond_random_weights"]
)
def test_attention_is_changed_in_flight(key: str) -> None:
    found = by_key()[key].ask(Sight(small_bert(), Texts(4).batch(range(4)), over="text"), "model")
    assert found.shape == (4,) and bool(((found >= -1) & (found <= 1)).all())
    if key == "output_change_evened":
        assert bool((found > 0).all())


def test_a_map_that_is_not_made_of_the_input_holds_still() -> None:
    seen = sight()
    assert torch.equal(by_key()["sensitivity_max"].ask(seen, "model"), torch.zeros(6))
    moving = Sight(AttentiveCNN(3).eval(), Pictures(4).batch(range(4)))
    assert bool((by_key()["sensitivity_max"].ask(moving, "model") > 0).all())
    assert bool((by_key()["stability"].ask(moving, "model") > 0).all())


def test_words_are_chosen_as_many_as_people_marked() -> None:
    batch = Texts(6).batch(range(6))
    assert batch.target is not None
    seen = Sight(PlantedWord().eval(), batch, Truth(batch.target))
    chosen = ("token_f1", "token_iou", "token_precision", "token_recall")
    for key in (*chosen, "token_auprc", "token_ap", "token_auc"):
        assert by_key()[key].ask(seen, ATTENTION).tolist() == [1.0] * 6
    with pytest.raises(Unasked, match="no words"):
        by_key()["token_f1"].ask(sight(), ATTENTION)


def test_heads_are_compared_before_they_are_fused() -> None:
    seen = Sight(small_bert(), Texts(4).batch(range(4)), over="text")
    found = by_key()["head_redundancy"].ask(seen, "model")
    assert seen.heads.values.shape[2] == 2 and seen.map(ATTENTION).values.shape[2] == 1
    torch.testing.assert_close(found, measure.head_redundancy(seen.heads))
    with pytest.raises(ValueError, match="a layer of one head"):
        by_key()["head_redundancy"].ask(sight(), "model")


def test_accuracy_of_other_classes_is_not_asked() -> None:
    seen = sight()
    assert set(by_key()["accuracy"].ask(seen, "model").tolist()) <= {0.0, 1.0}
    labels = torch.full((6,), 7)
    other = Sight(seen.model, replace(seen.batch, labels=labels))
    with pytest.raises(Unasked, match="knows 2 classes"):
        by_key()["accuracy"].ask(other, "model")
    with pytest.raises(Unasked):
        by_key()["brier"].ask(other, "model")
    assert (by_key()["brier"].ask(seen, "model") >= 0).all() and "brier" not in usual()
