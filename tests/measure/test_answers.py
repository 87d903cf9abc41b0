import itertools

import pytest
import sklearn.dummy
import sklearn.metrics
import torch

from overt.measure import accuracy, by_group, chance, mean, soft_accuracy, vqa_scores


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


@pytest.mark.parametrize("annotators", [10, 5])
def test_vqa_scores_agree_with_every_choice_of_annotators(annotators):
    for count in range(annotators + 1):
        people = [True] * count + [False] * (annotators - count)
        choices = list(itertools.combinations(people, annotators - 1))
        expected = sum(min(sum(chosen) / 3, 1) for chosen in choices) / len(choices)
        found = vqa_scores(torch.tensor([[float(count)]]), annotators)
        assert float(found) == pytest.approx(expected)


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
