"""Answer accuracy: classification, VQA accuracy, WUPS, chance level and groups."""

import itertools
import math

import pytest
import sklearn.dummy
import sklearn.metrics
import torch

from overt.data.vqa_answers import (
    exact_answers,
    normalize_answer,
    normalize_answers,
    official_answers_2015,
    vqa_scores,
)
from overt.metrics import accuracy, brier, mean, reliability_diagram, soft_accuracy, vqa_accuracy
from overt.metrics.answer_accuracy import (
    majority_accuracy,
    split_by_group,
    vqa_accuracy_upper_bound,
    wups,
)


def test_accuracy_agrees_with_sklearn(generator):
    logits = torch.randn(40, 5, generator=generator)
    labels = torch.randint(0, 5, (40,), generator=generator)
    found = accuracy(logits, labels)
    assert set(found.tolist()) <= {0.0, 1.0}
    expected = sklearn.metrics.accuracy_score(labels, logits.argmax(dim=-1))
    assert mean(found) == pytest.approx(expected)


def test_a_sample_without_a_label_is_not_counted():
    logits = torch.eye(3)
    found = accuracy(logits, torch.tensor([0, -1, 0]))
    assert found[1].isnan() and mean(found) == 0.5


def reference_vqa_accuracy(answer: str, truths: list[str]) -> float:
    """Compute the official score: leave out each person in turn and compare with the others."""
    if len(set(truths)) > 1:
        truths = [normalize_answer(truth) for truth in truths]
        answer = normalize_answer(answer)
    scores = []
    for left_out in range(len(truths)):
        others = [truth for number, truth in enumerate(truths) if number != left_out]
        scores.append(min(1.0, sum(other == answer for other in others) / 3))
    return sum(scores) / len(scores)


TRUTHS = [
    ["red"] * 10,
    ["two"] * 10,
    ["two"] * 9 + ["3"],
    ["2"] * 2 + ["two"] * 8,
    ["dont know"] * 4 + ["no"] * 6,
    ["t-shirt"] * 4 + ["shirt"] * 3 + ["a shirt"] * 3,
    ["Yes"] * 5 + ["yes"] * 5,
    ["a"] * 4 + ["b"] * 3 + ["c"] * 2 + ["d"],
]


def test_vqa_accuracy_agrees_with_the_official_definition():
    for truths in TRUTHS:
        for answer in {*truths, "no", "shirt", "2"}:
            found = float(vqa_accuracy([answer], [truths]))
            assert found == pytest.approx(reference_vqa_accuracy(answer, truths))


def test_the_mean_is_over_questions_instead_of_batches():
    answers = ["red", "no", "no", "yes", "a"]
    truths = [TRUTHS[0], TRUTHS[4], TRUTHS[0], TRUTHS[6], TRUTHS[7]]
    whole = mean(vqa_accuracy(answers, truths))
    expected = sum(map(reference_vqa_accuracy, answers, truths)) / 5
    assert whole == pytest.approx(expected)
    parts = [vqa_accuracy(answers[:4], truths[:4]), vqa_accuracy(answers[4:], truths[4:])]
    assert mean(torch.cat(parts)) == pytest.approx(expected)
    assert (mean(parts[0]) + mean(parts[1])) / 2 != pytest.approx(expected)
    by_type = split_by_group(
        vqa_accuracy(answers, truths), ["other", "yes/no", "other", "yes/no", "other"]
    )
    assert mean(by_type["yes/no"]) == pytest.approx((1 + 1) / 2)


def test_normalization_limits_the_upper_bound():
    assert vqa_accuracy_upper_bound(TRUTHS).tolist() == [1] * 8
    lost = vqa_accuracy_upper_bound(TRUTHS, spell=normalize_answer)
    assert lost.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]  # "two" stays "two" where all agree
    assert vqa_accuracy_upper_bound(TRUTHS, normalize_answers, normalize_answer).tolist() == [1] * 8
    first = vqa_accuracy_upper_bound(TRUTHS, official_answers_2015)
    assert first.tolist() == pytest.approx([1, 0, 0.3, 0.6, 1, 1, 1, 0.9])
    assert vqa_accuracy_upper_bound([[]]).tolist() == [0]
    assert float(vqa_accuracy(["two"], [TRUTHS[2]])) == 1
    assert float(vqa_accuracy(["two"], [TRUTHS[2]], official_answers_2015)) == 0
    assert float(vqa_accuracy(["YES"], [TRUTHS[6]], exact_answers)) == 0


def reference_wups(given: list[str], true: list[str], table: dict, threshold: float) -> float:
    def mu(a: str, t: str) -> float:
        found = 1.0 if a == t else table.get((a, t), table.get((t, a), 0.0))
        return found * (1.0 if found >= threshold else 0.1)

    one, other = 1.0, 1.0
    for a in given:
        one *= max(mu(a, t) for t in true)
    for t in true:
        other *= max(mu(a, t) for a in given)
    return min(one, other)


def test_wups_agrees_with_its_definition():
    table = {("cup", "mug"): 0.95, ("cup", "table"): 0.5, ("red", "blue"): 0.92}

    def alike(one: str, other: str) -> float:
        return table.get((one, other), table.get((other, one), 0.0))

    words = ["cup", "mug", "table", "red", "blue"]
    sets = [[a, b] for a in words for b in words if a != b] + [[a] for a in words]
    for threshold in (0.0, 0.9):
        pairs = list(itertools.product(sets, sets))
        found = wups([a for a, _ in pairs], [t for _, t in pairs], alike, threshold)
        expected = [reference_wups(a, t, table, threshold) for a, t in pairs]
        assert found.tolist() == pytest.approx(expected)
    assert wups([["cup"]], [["mug"]], alike).tolist() == pytest.approx([0.95])
    assert wups([["cup"]], [["table"]], alike).tolist() == pytest.approx([0.05])
    assert wups([["cup"]], [["cup", "table"]], alike, 0.0).tolist() == pytest.approx([0.5])
    assert wups([[], []], [[], ["cup"]], alike).tolist() == [1, 0]


def test_different_numbers_of_answers_and_questions_raise():
    with pytest.raises(ValueError, match="1 and 2"):
        vqa_accuracy(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="1 and 2"):
        wups([["a"]], [["a"], ["b"]], lambda a, b: 0.0)


def test_soft_accuracy_is_the_score_of_the_predicted_answer():
    logits = torch.tensor([[0.1, 2.0, 0.3], [5.0, 2.0, 0.3], [0.0, 0.0, 1.0]])
    scores = vqa_scores(torch.tensor([[7.0, 3.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(soft_accuracy(logits, scores), torch.tensor([0.9, 0.0, 0.0]))


@pytest.mark.newer("scikit-learn>=1.7")
def test_majority_accuracy_agrees_with_sklearn(generator):
    labels = torch.randint(0, 4, (60,), generator=generator)
    groups = ["abc"[int(i)] for i in torch.randint(0, 3, (60,), generator=generator)]
    dummy = sklearn.dummy.DummyClassifier(strategy="most_frequent")
    for name, values in split_by_group(majority_accuracy(labels, groups), groups).items():
        chosen = labels[[one == name for one in groups]]
        expected = dummy.fit(chosen[:, None], chosen).score(chosen[:, None], chosen)
        assert mean(values) == pytest.approx(expected)
    assert mean(majority_accuracy(labels)) == pytest.approx(float(labels.bincount().max()) / 60)
    assert mean(majority_accuracy(labels, groups)) >= mean(majority_accuracy(labels))


def test_majority_accuracy_skips_samples_without_a_label():
    found = majority_accuracy(torch.tensor([-1, 2, 2, 1, -1]), ["a", "b", "b", "b", "b"])
    assert found.isnan().tolist() == [True, False, False, False, True]
    assert found[1:4].tolist() == [1, 1, 0]


def test_groups_keep_the_order_of_values():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = split_by_group(values, ["z", "a", "z", "a"])
    assert list(found) == ["a", "z"]
    assert found["a"].tolist() == [2, 4] and found["z"].tolist() == [1, 3]
    with pytest.raises(ValueError, match="4 and 1"):
        split_by_group(values, ["z"])


def test_nan_logits_give_nan_accuracy():
    logits = torch.tensor([[math.nan, 1.0], [math.nan, math.nan], [0.0, 1.0]])
    found = accuracy(logits, torch.tensor([0, 0, 1]))
    assert found.isnan().tolist() == [True, True, False] and found[2] == 1
    worth = soft_accuracy(logits, torch.tensor([[1.0, 0], [1, 0], [0, 0.6]]))
    assert worth.isnan().tolist() == [True, True, False]
    assert float(worth[2]) == pytest.approx(0.6)


@pytest.mark.parametrize("judge", [accuracy, brier, reliability_diagram])
def test_a_label_outside_the_classes_raises(judge):
    with pytest.raises(ValueError, match=r"row 1.*7.*2 classes"):
        judge(torch.zeros(3, 2), torch.tensor([0, 7, 9]))


def test_label_checks_do_not_synchronize_the_gpu():
    """Meta tensors have no values: reading one would raise."""
    logits, labels = torch.zeros(3, 2, device="meta"), torch.zeros(3, dtype=int, device="meta")
    assert accuracy(logits, labels).shape == brier(logits, labels).shape == (3,)


def test_a_string_instead_of_a_list_of_answers_raises():
    """Without this check the string "yes" would count as three answers: y, e and s."""
    for score in (lambda truths: vqa_accuracy(["yes"], truths), vqa_accuracy_upper_bound):
        with pytest.raises(ValueError, match=r"question 0 .*'yes'"):
            score(["yes"])
    with pytest.raises(ValueError, match="answers .*'yes'"):
        vqa_accuracy("yes", [["yes"]] * 3)
    with pytest.raises(ValueError, match=r"answers.*question 0"):
        wups(["cat"], [["cat"]], lambda one, other: 0.0)
    with pytest.raises(ValueError, match=r"answers .* 0"):
        wups([["cat"]], ["cat"], lambda one, other: 0.0)


def test_logits_and_labels_that_do_not_fit_raise(monkeypatch):
    """One label would broadcast, and logits without an axis of samples be one sample."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    logits = torch.rand(3, 4)
    for judge in (accuracy, brier, reliability_diagram):
        for labels in (torch.zeros(1).long(), torch.zeros(4).long()):
            with pytest.raises(ValueError, match=r"3, 4"):
                judge(logits, labels)
        with pytest.raises(ValueError, match=r"4,.*4,"):
            judge(logits[0], torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"3, 4.*3, 2"):
        soft_accuracy(logits, torch.rand(3, 2))
