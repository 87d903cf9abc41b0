import itertools
import math

import pytest
import sklearn.dummy
import sklearn.metrics
import torch

from overt.data.answers import as_first_published, as_said, normalize, normalized
from overt.measure import (
    accuracy,
    brier,
    by_group,
    chance,
    mean,
    reachable,
    reliability,
    soft_accuracy,
    vqa_accuracy,
    vqa_scores,
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


def slow_vqa_accuracy(answer: str, truths: list[str]) -> float:
    """The official evaluation, person by person: each is left out in turn, others agree or not."""
    if len(set(truths)) > 1:
        truths = [normalize(truth) for truth in truths]
        answer = normalize(answer)
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


def test_vqa_accuracy_agrees_with_a_slow_copy():
    for truths in TRUTHS:
        for answer in {*truths, "no", "shirt", "2"}:
            found = float(vqa_accuracy([answer], [truths]))
            assert found == pytest.approx(slow_vqa_accuracy(answer, truths))


def test_the_mean_is_over_questions_not_over_batches():
    answers = ["red", "no", "no", "yes", "a"]
    truths = [TRUTHS[0], TRUTHS[4], TRUTHS[0], TRUTHS[6], TRUTHS[7]]
    whole = mean(vqa_accuracy(answers, truths))
    expected = sum(map(slow_vqa_accuracy, answers, truths)) / 5
    assert whole == pytest.approx(expected)
    parts = [vqa_accuracy(answers[:4], truths[:4]), vqa_accuracy(answers[4:], truths[4:])]
    assert mean(torch.cat(parts)) == pytest.approx(expected)
    assert (mean(parts[0]) + mean(parts[1])) / 2 != pytest.approx(expected)
    by_type = by_group(
        vqa_accuracy(answers, truths), ["other", "yes/no", "other", "yes/no", "other"]
    )
    assert mean(by_type["yes/no"]) == pytest.approx((1 + 1) / 2)


def test_spellings_that_make_questions_unanswerable():
    assert reachable(TRUTHS).tolist() == [1] * 8
    lost = reachable(TRUTHS, spell=normalize)
    assert lost.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]  # "two" stays "two" where all agree
    assert reachable(TRUTHS, normalized, normalize).tolist() == [1] * 8
    first = reachable(TRUTHS, as_first_published)
    assert first.tolist() == pytest.approx([1, 0, 0.3, 0.6, 1, 1, 1, 0.9])
    assert reachable([[]]).tolist() == [0]
    assert float(vqa_accuracy(["two"], [TRUTHS[2]])) == 1
    assert float(vqa_accuracy(["two"], [TRUTHS[2]], as_first_published)) == 0
    assert float(vqa_accuracy(["YES"], [TRUTHS[6]], as_said)) == 0


def slow_wups(given: list[str], true: list[str], table: dict, threshold: float) -> float:
    def mu(a: str, t: str) -> float:
        found = 1.0 if a == t else table.get((a, t), table.get((t, a), 0.0))
        return found * (1.0 if found >= threshold else 0.1)

    one, other = 1.0, 1.0
    for a in given:
        one *= max(mu(a, t) for t in true)
    for t in true:
        other *= max(mu(a, t) for a in given)
    return min(one, other)


def test_wups_agrees_with_a_slow_copy():
    table = {("cup", "mug"): 0.95, ("cup", "table"): 0.5, ("red", "blue"): 0.92}

    def alike(one: str, other: str) -> float:
        return table.get((one, other), table.get((other, one), 0.0))

    words = ["cup", "mug", "table", "red", "blue"]
    sets = [[a, b] for a in words for b in words if a != b] + [[a] for a in words]
    for threshold in (0.0, 0.9):
        pairs = list(itertools.product(sets, sets))
        found = wups([a for a, _ in pairs], [t for _, t in pairs], alike, threshold)
        expected = [slow_wups(a, t, table, threshold) for a, t in pairs]
        assert found.tolist() == pytest.approx(expected)
    assert wups([["cup"]], [["mug"]], alike).tolist() == pytest.approx([0.95])
    assert wups([["cup"]], [["table"]], alike).tolist() == pytest.approx([0.05])
    assert wups([["cup"]], [["cup", "table"]], alike, 0.0).tolist() == pytest.approx([0.5])
    assert wups([[], []], [[], ["cup"]], alike).tolist() == [1, 0]


def test_answers_and_questions_must_be_as_many():
    with pytest.raises(ValueError, match="1 answers to 2 questions"):
        vqa_accuracy(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="1 answers to 2 questions"):
        wups([["a"]], [["a"], ["b"]], lambda a, b: 0.0)


def test_soft_accuracy_is_what_the_answer_is_worth():
    logits = torch.tensor([[0.1, 2.0, 0.3], [5.0, 2.0, 0.3], [0.0, 0.0, 1.0]])
    scores = vqa_scores(torch.tensor([[7.0, 3.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(soft_accuracy(logits, scores), torch.tensor([0.9, 0.0, 0.0]))


def test_chance_agrees_with_a_constant_answer(generator):
    labels = torch.randint(0, 4, (60,), generator=generator)
    groups = ["abc"[int(i)] for i in torch.randint(0, 3, (60,), generator=generator)]
    dummy = sklearn.dummy.DummyClassifier(strategy="most_frequent")
    for name, values in by_group(chance(labels, groups), groups).items():
        chosen = labels[[one == name for one in groups]]
        expected = dummy.fit(chosen[:, None], chosen).score(chosen[:, None], chosen)
        assert mean(values) == pytest.approx(expected)
    assert mean(chance(labels)) == pytest.approx(float(labels.bincount().max()) / 60)
    assert mean(chance(labels, groups)) >= mean(chance(labels))


def test_chance_of_samples_without_a_label():
    found = chance(torch.tensor([-1, 2, 2, 1, -1]), ["a", "b", "b", "b", "b"])
    assert found.isnan().tolist() == [True, False, False, False, True]
    assert found[1:4].tolist() == [1, 1, 0]


def test_groups_keep_their_numbers_in_order():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = by_group(values, ["z", "a", "z", "a"])
    assert list(found) == ["a", "z"]
    assert found["a"].tolist() == [2, 4] and found["z"].tolist() == [1, 3]
    with pytest.raises(ValueError, match="4 numbers for 1 groups"):
        by_group(values, ["z"])


def test_logits_that_are_no_numbers_are_not_right():
    logits = torch.tensor([[math.nan, 1.0], [math.nan, math.nan], [0.0, 1.0]])
    found = accuracy(logits, torch.tensor([0, 0, 1]))
    assert found.isnan().tolist() == [True, True, False] and found[2] == 1
    worth = soft_accuracy(logits, torch.tensor([[1.0, 0], [1, 0], [0, 0.6]]))
    assert worth.isnan().tolist() == [True, True, False]
    assert float(worth[2]) == pytest.approx(0.6)


@pytest.mark.parametrize("judge", [accuracy, brier, reliability])
def test_a_label_that_is_no_class_is_refused(judge):
    with pytest.raises(ValueError, match="row 1 is labelled 7, and there are 2 classes, 0 to 1"):
        judge(torch.zeros(3, 2), torch.tensor([0, 7, 9]))


def test_on_a_card_a_label_that_is_no_class_waits_for_nothing():
    """A device without values would raise if it were asked for one."""
    logits, labels = torch.zeros(3, 2, device="meta"), torch.zeros(3, dtype=int, device="meta")
    assert accuracy(logits, labels).shape == brier(logits, labels).shape == (3,)
