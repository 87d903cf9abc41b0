"""Rationale metrics compared with scikit-learn and ERASER."""

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
from overt.metrics import discretize, iou_f1, token_auprc, token_f1, uniform_map
from overt.metrics.rationales import (
    extract_spans,
    match_spans,
    span_f1,
    span_precision,
    span_recall,
    token_ap,
    token_auc,
    token_iou,
    token_precision,
    token_recall,
)


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_token_auprc_agrees_with_eraser(k, levels, seed):
    """ERASER computes `auc(recall, precision)` of scikit-learn's curve."""
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


@pytest.mark.long
@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_token_ap_and_auc_agree_with_sklearn(k, levels, seed):
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


def test_a_uniform_map_has_chance_ap_and_auc_but_a_higher_auprc():
    truth = AttentionMap.from_cells(torch.tensor([[1.0, 0, 0, 0]]), words(4))
    even = uniform_map(truth)
    assert token_ap(even, truth).tolist() == [0.25] and token_auc(even, truth).tolist() == [0.5]
    assert token_auprc(even, truth).tolist() == [0.625]  # (1 + 1/4) / 2


def test_selected_words_agree_with_sklearn(generator):
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


def official_iou_f1(truth, predicted, threshold=0.5):
    """Reimplement `partial_match_score` of rationale_benchmark/metrics.py without torch."""

    def f1(p, r):
        return 0 if p == 0 or r == 0 else 2 * p * r / (p + r)

    keyed = []
    for spans in (truth, predicted):
        by_key = {}
        for key, start, end in spans:
            by_key.setdefault(key, set()).add((start, end))
        keyed.append(by_key)
    true, ours = keyed
    hits = {}
    for key, spans in ours.items():
        hits[key] = 0
        for start, end in spans:
            best = 0.0
            for first, last in true.get(key, ()):
                mine, other = set(range(start, end)), set(range(first, last))
                best = max(best, len(mine & other) / len(mine | other) if mine | other else 0.0)
            hits[key] += best >= threshold
    recalls = [hits.get(key, 0) / len(spans) for key, spans in true.items()]
    precisions = [hits[key] / len(spans) for key, spans in ours.items()]
    macro = f1(
        sum(precisions) / len(precisions) if precisions else 0,
        sum(recalls) / len(recalls) if recalls else 0,
    )
    total, predictions = sum(map(len, true.values())), sum(map(len, ours.values()))
    found = sum(hits.values())
    return macro, f1(found / predictions if predictions else 0, found / total if total else 0)


SPAN = st.tuples(st.integers(0, 8), st.integers(0, 4)).map(lambda one: (one[0], one[0] + one[1]))
LISTS = st.lists(st.tuples(st.lists(SPAN, max_size=4), st.lists(SPAN, max_size=4)), max_size=6)


@given(LISTS, st.sampled_from([0.1, 0.5, 1.0]))
def test_spans_are_matched_as_in_eraser(samples, threshold):
    """Overlapping, repeated, adjacent and empty spans included."""
    ours, theirs = [one for one, _ in samples], [two for _, two in samples]
    flat = [
        [(key, *span) for key, spans in enumerate(side) for span in spans]
        for side in (theirs, ours)
    ]
    found = match_spans(ours, theirs, threshold)
    macro, micro = official_iou_f1(*flat, threshold)
    assert found.f1() == pytest.approx(macro, abs=1e-12)
    assert found.micro_f1() == pytest.approx(micro, abs=1e-12)


@given(st.integers(2, 16), st.integers(0, 2**31))
def test_iou_f1_of_maps_agrees_with_eraser(k, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen, truth = (torch.rand(2, 7, k, generator=generator) > 0.5).float()
    maps = [AttentionMap.from_cells(one, words(k)) for one in (chosen, truth)]
    flat = [
        [(key, *span) for key, spans in enumerate(extract_spans(one)) for span in spans]
        for one in reversed(maps)
    ]
    assert iou_f1(*maps) == pytest.approx(official_iou_f1(*flat)[0], abs=1e-12)


def test_iou_f1_is_the_f1_of_means():
    """Two samples: precision 1 and 1/2, recall 1/2 and 1."""
    chosen = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 1, 0]])
    truth = torch.tensor([[1.0, 0, 1, 0], [1.0, 0, 0, 0]])
    maps = [AttentionMap.from_cells(one, words(4)) for one in (chosen, truth)]
    assert span_precision(*maps).tolist() == [1, 0.5]
    assert span_recall(*maps).tolist() == [0.5, 1]
    assert span_f1(*maps).mean().item() == pytest.approx(2 / 3)
    assert iou_f1(*maps) == pytest.approx(0.75)
    one = match_spans(extract_spans(maps[0]), extract_spans(maps[1])).select(torch.tensor([1, 1]))
    assert one.f1() == pytest.approx(2 / 3) and len(one) == 2


def test_different_samples_and_zero_overlap_raise():
    with pytest.raises(ValueError, match="1 and 2"):
        match_spans([[]], [[], []])
    with pytest.raises(ValueError, match=r"overlap .* 0\.0"):
        match_spans([[]], [[]], overlap=0.0)


def test_span_metrics_match_examples_by_hand():
    truth = AttentionMap.from_cells(torch.tensor([[1.0, 1, 0, 1, 1, 1, 0, 0]] * 4), words(8))
    chosen = torch.tensor(
        [
            [1.0, 1, 0, 1, 1, 1, 0, 0],  # both spans
            [1.0, 0, 0, 0, 0, 0, 1, 1],  # half of the first span is enough; another span is wrong
            [0.0, 0, 0, 1, 0, 0, 0, 0],  # a third of a span is not enough
            [0.0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    found = span_f1(AttentionMap.from_cells(chosen, words(8)), truth)
    assert found.tolist() == pytest.approx([1, 0.5, 0, 0])
    less = span_f1(AttentionMap.from_cells(chosen, words(8)), truth, overlap=0.3)
    assert float(less[2]) == pytest.approx(2 * 1 * 0.5 / 1.5)
    none = AttentionMap.from_cells(torch.zeros(4, 8), words(8))
    assert span_f1(truth, none).isnan().all() and span_recall(truth, none).isnan().all()
    assert span_precision(none, truth).isnan().all() and iou_f1(none, truth) == 0


SELECTION_METRICS = (
    *(token_f1, token_iou, token_precision, token_recall),
    *(span_f1, span_precision, span_recall, iou_f1),
)


@pytest.mark.parametrize("function", SELECTION_METRICS, ids=lambda f: f.__name__)
def test_a_soft_map_raises(function, generator):
    """Every word of a softmax has positive weight, so all words would be selected."""
    truth = AttentionMap.from_cells(torch.tensor([[0.0, 1, 1, 0]] * 2), words(4))
    soft = AttentionMap.from_cells(torch.rand(2, 4, generator=generator), words(4)).normalize()
    with pytest.raises(ValueError, match=r"0\.\d+ .*sample 0.*discretize"):
        function(soft, truth)
    hard = discretize(soft, generator, share=0.5)
    function(hard, truth)
    hidden = torch.tensor([[True, True, True, False]] * 2)  # hidden words do not count
    values = torch.tensor([[0.0, 1, 1, 0.3]] * 2)
    function(AttentionMap.from_cells(values, words(4), hidden), truth)


@pytest.mark.parametrize("function", SELECTION_METRICS[:-1], ids=lambda f: f.__name__)
def test_nan_selections_give_nan(function, generator):
    values = torch.tensor([[0.0, 1, 1, 0]] * 3)
    truth = AttentionMap.from_cells(values, words(4))
    broken = values.clone()
    broken[1, 2] = torch.nan
    found = function(AttentionMap.from_cells(broken, words(4)), truth)
    assert found[1].isnan() and found[[0, 2]].tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [0.0, torch.nan, torch.inf, -torch.inf])
def test_discretize_selects_nothing_from_empty_or_non_finite_maps(wrong, generator):
    weights = torch.rand(2, 6, generator=generator) + 0.1
    weights[1] = wrong
    hard = discretize(AttentionMap.from_cells(weights, words(6)), generator, share=0.5)
    marked = AttentionMap.from_cells(torch.ones(2, 6), words(6))
    assert token_f1(hard, marked).isnan().tolist() == [False, True]


def test_spans_of_a_soft_map_raise(generator):
    """Every word has positive weight: the span would be the complete text."""
    soft = AttentionMap.from_cells(torch.rand(2, 6, generator=generator) + 0.1, words(6))
    for wrong in (soft, soft.normalize()):
        with pytest.raises(ValueError, match=r"one weight.*soft"):
            extract_spans(wrong)
    marked = AttentionMap.from_cells(torch.tensor([[0, 1, 1, 0, 1, 0], [0] * 6]), words(6))
    assert extract_spans(marked) == extract_spans(marked.normalize()) == [[(1, 3), (4, 5)], []]


def test_discretize_selects_the_top_share(generator):
    seen = torch.tensor([[True] * 10, [True] * 4 + [False] * 6])
    soft = AttentionMap.from_cells(torch.rand(2, 10, generator=generator), words(10), seen)
    hard = discretize(soft, generator, share=0.5).check()
    assert hard.weights.sum(dim=-1).flatten().tolist() == [5, 2]
    kept = hard.weights[0, 0, 0, 0] > 0
    weights = soft.weights[0, 0, 0, 0]
    assert weights[kept].min() > weights[~kept].max()
    even = discretize(uniform_map(soft), generator, share=0.3)
    assert even.weights.sum(dim=-1).flatten().tolist() == [3, 1]


def test_the_true_map_scores_one():
    truth = AttentionMap.from_cells(torch.tensor([[0.0, 1.0, 1.0, 0.0]]), words(4))
    for measure in (
        token_auprc,
        token_ap,
        token_auc,
        token_f1,
        token_iou,
        token_precision,
        token_recall,
        span_f1,
    ):
        assert measure(truth, truth).tolist() == [1]
    assert iou_f1(truth, truth) == 1
