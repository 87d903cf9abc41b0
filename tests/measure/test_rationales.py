"""Words that people marked: against scikit-learn and ERASER's way of counting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import (
    auc,
    average_precision_score,
    f1_score,
    jaccard_score,
    precision_recall_curve,
    precision_score,
    recall_score,
    roc_auc_score,
)

from overt.attention import AttentionMap, words
from overt.measure import (
    hardened,
    iou_f1,
    token_auprc,
    token_f1,
    token_iou,
    token_precision,
    token_recall,
    uniform,
)
from overt.measure.rationales import token_ap, token_auc


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_the_area_is_that_of_eraser(k, levels, seed):
    """ERASER: `auc(recall, precision)` of scikit-learn's curve."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 2**levels + 1, (5, k), generator=generator).float()
    truth = torch.rand(5, k, generator=generator) > 0.6
    seen = torch.rand(5, k, generator=generator) > 0.2
    found = token_auprc(
        AttentionMap.from_cells(weights, words(k), seen),
        AttentionMap.from_cells(truth.float(), words(k)),
    )
    for b in range(5):
        there = truth[b][seen[b]]
        if not there.any():
            assert found[b].isnan()
            continue
        precision, recall, _ = precision_recall_curve(there.numpy(), weights[b][seen[b]].numpy())
        assert float(found[b]) == pytest.approx(auc(recall, precision), abs=1e-6)


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_steps_and_ranks_are_those_of_sklearn(k, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 2**levels + 1, (5, k), generator=generator).float()
    truth = torch.rand(5, k, generator=generator) > 0.6
    seen = torch.rand(5, k, generator=generator) > 0.2
    maps = (
        AttentionMap.from_cells(weights, words(k), seen),
        AttentionMap.from_cells(truth.float(), words(k)),
    )
    for ours, foreign in ((token_ap, average_precision_score), (token_auc, roc_auc_score)):
        found = ours(*maps)
        for b in range(5):
            there, given = truth[b][seen[b]].numpy(), weights[b][seen[b]].numpy()
            if not there.any() or (ours is token_auc and there.all()):
                assert found[b].isnan()
            else:
                assert float(found[b]) == pytest.approx(foreign(there, given), abs=1e-6)


def test_a_map_without_any_order_is_chance_but_for_straight_lines():
    truth = AttentionMap.from_cells(torch.tensor([[1.0, 0, 0, 0]]), words(4))
    even = uniform(truth)
    assert token_ap(even, truth).tolist() == [0.25] and token_auc(even, truth).tolist() == [0.5]
    assert token_auprc(even, truth).tolist() == [0.625]  # (1 + 1/4) / 2


def test_chosen_words_agree_with_sklearn(generator):
    chosen = torch.rand(20, 9, generator=generator) > 0.5
    truth = torch.rand(20, 9, generator=generator) > 0.5
    chosen[0], truth[1] = False, False
    maps = [AttentionMap.from_cells(one.float(), words(9)) for one in (chosen, truth)]
    for ours, foreign in (
        (token_precision, precision_score),
        (token_recall, recall_score),
        (token_f1, f1_score),
        (token_iou, jaccard_score),
    ):
        found = ours(*maps)
        assert found[1].isnan()
        assert bool(found[0].isnan()) == (ours is token_precision)
        expected = [
            foreign(truth[b].numpy(), chosen[b].numpy(), zero_division=0.0) for b in range(2, 20)
        ]
        assert found[2:].tolist() == pytest.approx(expected, abs=1e-6)


def test_runs_by_hand():
    truth = AttentionMap.from_cells(torch.tensor([[1.0, 1, 0, 1, 1, 1, 0, 0]] * 4), words(8))
    chosen = torch.tensor(
        [
            [1.0, 1, 0, 1, 1, 1, 0, 0],  # both runs
            [1.0, 0, 0, 0, 0, 0, 1, 1],  # half of the first is enough; another run is wrong
            [0.0, 0, 0, 1, 0, 0, 0, 0],  # a third of a run is not
            [0.0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    found = iou_f1(AttentionMap.from_cells(chosen, words(8)), truth)
    assert found.tolist() == pytest.approx([1, 0.5, 0, 0])
    less = iou_f1(AttentionMap.from_cells(chosen, words(8)), truth, overlap=0.3)
    assert float(less[2]) == pytest.approx(2 * 1 * 0.5 / 1.5)
    none = AttentionMap.from_cells(torch.zeros(4, 8), words(8))
    assert iou_f1(truth, none).isnan().all()


def test_a_soft_map_is_hardened_to_its_share(generator):
    seen = torch.tensor([[True] * 10, [True] * 4 + [False] * 6])
    soft = AttentionMap.from_cells(torch.rand(2, 10, generator=generator), words(10), seen)
    hard = hardened(soft, generator, share=0.5).check()
    assert hard.weights.sum(dim=-1).flatten().tolist() == [5, 2]
    kept = hard.weights[0, 0, 0, 0] > 0
    weights = soft.weights[0, 0, 0, 0]
    assert weights[kept].min() > weights[~kept].max()
    even = hardened(uniform(soft), generator, share=0.3)
    assert even.weights.sum(dim=-1).flatten().tolist() == [3, 1]


def test_the_best_map_scores_one():
    truth = AttentionMap.from_cells(torch.tensor([[0.0, 1.0, 1.0, 0.0]]), words(4))
    for measure in (
        token_auprc,
        token_ap,
        token_auc,
        token_f1,
        token_iou,
        token_precision,
        token_recall,
        iou_f1,
    ):
        assert measure(truth, truth).tolist() == [1]
