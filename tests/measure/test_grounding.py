"""Grounding: values by hand, slow copies, and scikit-learn for the classes."""

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import accuracy_score, precision_recall_fscore_support

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.geometry import RegionGeometry
from overt.measure.controls import uniform
from overt.measure.grounding import (
    by_layer_and_head,
    grounding_accuracy,
    grounding_mass,
    located,
    per_class,
    pointing_at_boxes,
    reach,
)

MEASURES = (grounding_mass, grounding_accuracy, reach, pointing_at_boxes)


def block(weights: list, kind=Kind.SUBPROBABILITY) -> AttentionMap:
    """Rows of one sample, layer and head."""
    values = torch.tensor(weights, dtype=torch.float64)[None, None, None]
    return AttentionMap(values, regions(values.shape[-1]), words(values.shape[-2]), kind=kind)


def truth(rows: list[list[int]], m: int, boxes=None) -> AttentionMap:
    wanted = torch.zeros(1, 1, 1, len(rows), m, dtype=torch.float64)
    for at, found in enumerate(rows):
        wanted[0, 0, 0, at, found] = 1
    geometry = None if boxes is None else RegionGeometry(torch.tensor([boxes]))
    keys = regions(m, geometry=geometry)
    seen = wanted[:, 0, 0].any(dim=-1, keepdim=True).expand(-1, -1, m)
    return AttentionMap(wanted, keys, words(len(rows)), seen, Kind.AMOUNT).normalize()


def random_case(seed: int) -> tuple[AttentionMap, AttentionMap]:
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, 2, 4, 6, generator=drawn, dtype=torch.float64)
    sink = torch.rand(3, 2, 2, 4, 1, generator=drawn, dtype=torch.float64)
    mask = torch.rand(3, 1, 5, generator=drawn) < 0.8
    mask[..., 0] = True
    weights = scores[..., :5].exp() * mask[:, None, None]
    weights = weights / weights.sum(dim=-1, keepdim=True) * sink
    wanted = (torch.rand(3, 1, 1, 4, 5, generator=drawn) < 0.3).double()
    wanted[1] = 0
    boxes = torch.rand(3, 5, 4, generator=drawn)
    boxes[..., 2:] += boxes[..., :2]
    attention = AttentionMap(weights, regions(5), words(4), mask, Kind.SUBPROBABILITY)
    keys = regions(5, geometry=RegionGeometry(boxes))
    return attention, AttentionMap(wanted, keys, words(4), None, Kind.AMOUNT).normalize()


def slow(attention: AttentionMap, true: AttentionMap) -> dict[str, list]:
    """All four, one weight at a time."""
    found = {measure.__name__: [] for measure in MEASURES}
    boxes = true.keys.spans[0].geometry.boxes.tolist()
    b, l, h, q, k = attention.values.shape
    for at in range(b):
        for layer in range(l):
            for head in range(h):
                values = {name: [] for name in found}
                for row in range(q):
                    seen = [key for key in range(k) if attention.visible[at, row, key]]
                    right = [key for key in seen if true.weights[at, 0, 0, row, key] > 0]
                    if not right:
                        continue
                    weights = attention.weights[at, layer, head, row].tolist()
                    total = sum(weights[key] for key in seen)
                    best = max(seen, key=lambda key: weights[key])
                    x = (boxes[at][best][0] + boxes[at][best][2]) / 2
                    y = (boxes[at][best][1] + boxes[at][best][3]) / 2
                    hit = any(
                        boxes[at][key][0] <= x <= boxes[at][key][2]
                        and boxes[at][key][1] <= y <= boxes[at][key][3]
                        for key in right
                    )
                    values["grounding_mass"].append(sum(weights[key] for key in right) / total)
                    values["grounding_accuracy"].append(float(best in right))
                    values["reach"].append(total)
                    values["pointing_at_boxes"].append(float(hit))
                for name, some in values.items():
                    found[name].append(sum(some) / len(some) if some else math.nan)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_all_agree_with_slow_copies(seed):
    attention, true = random_case(seed)
    expected = slow(attention, true)
    for measure in MEASURES:
        found = measure(attention, true)
        assert found.shape == (3, 2, 2)
        wanted = torch.tensor(expected[measure.__name__]).view(3, 2, 2)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert found[1].isnan().all()  # nothing is grounded there


def test_perfect_grounding_beside_a_sink():
    """All of what little goes to regions is on the right one: mass 1, reach a thousandth."""
    attention, true = block([[0.001, 0.0, 0.0]]), truth([[0]], 3)
    assert float(grounding_mass(attention, true)) == 1
    assert float(grounding_accuracy(attention, true)) == 1
    assert float(reach(attention, true)) == pytest.approx(0.001)


def test_reach_refuses_rows_that_were_renormalised():
    attention = block([[0.001, 0.0, 0.0]])
    with pytest.raises(ValueError, match="how far they reach is lost"):
        reach(attention.normalize(), truth([[0]], 3))


def test_two_rows_by_hand_and_a_row_without_truth():
    attention = block([[0.2, 0.1, 0.1], [0.0, 0.3, 0.1], [0.5, 0.0, 0.0]])
    true = truth([[0], [0, 2], []], 3)
    assert float(grounding_mass(attention, true)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(grounding_accuracy(attention, true)) == pytest.approx(0.5)
    assert float(reach(attention, true)) == pytest.approx(0.4)


def test_a_uniform_map_scores_as_a_random_key():
    true = truth([[0, 3], [1]], 4)
    even = uniform(block([[0.1] * 4, [0.2] * 4]))
    assert float(grounding_accuracy(even, true)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(grounding_mass(even, true)) == pytest.approx((0.5 + 0.25) / 2)


def test_logarithms_and_plain_weights_say_the_same():
    attention, true = random_case(0)
    logs = replace(attention, values=attention.log_weights, form=Form.LOG)
    for measure in MEASURES:
        torch.testing.assert_close(measure(logs, true), measure(attention, true), equal_nan=True)


def test_pointing_forgives_a_box_beside_the_true_one():
    boxes = [[0.0, 0.0, 10.0, 10.0], [2.0, 2.0, 6.0, 6.0], [20.0, 20.0, 30.0, 30.0]]
    true = truth([[0]], 3, boxes)
    near, far = block([[0.1, 0.5, 0.0]]), block([[0.1, 0.0, 0.5]])
    assert float(grounding_accuracy(near, true)) == 0
    assert float(pointing_at_boxes(near, true)) == 1
    assert float(pointing_at_boxes(far, true)) == 0
    with pytest.raises(ValueError, match="have no boxes"):
        pointing_at_boxes(near, truth([[0]], 3))


def test_rows_of_another_size_are_refused():
    with pytest.raises(ValueError, match="take the same rows of both"):
        grounding_mass(block([[0.1, 0.2]]), truth([[0], [1]], 2))
    with pytest.raises(ValueError, match="signed"):
        grounding_mass(block([[0.1, -0.2]], Kind.SIGNED), truth([[0]], 2))


def test_a_grid_of_layers_and_heads():
    pairs = [random_case(seed) for seed in range(2)]
    found = by_layer_and_head(grounding_mass, pairs)
    every = torch.cat([grounding_mass(*one) for one in pairs])
    torch.testing.assert_close(found, every[[0, 2, 3, 5]].mean(dim=0))


def test_every_measure_says_what_it_means():
    assert [measure.measure.higher_is_better for measure in MEASURES] == [True, True, None, True]


# --- referring expressions


def test_a_chosen_box_counts_from_half_an_overlap_on():
    boxes = torch.tensor([[[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6]]]).expand(3, 3, 4)
    meant = torch.tensor([[0.0, 0, 2, 2]]).expand(3, 4)
    logits = torch.eye(3)
    assert located(logits, boxes, meant).tolist() == [1, 1, 0]
    assert located(logits, boxes, meant, overlap=0.51).tolist() == [1, 0, 0]


def test_absent_boxes_are_not_chosen_and_none_is_not_defined():
    boxes = torch.tensor([[[0.0, 0, 2, 2], [3, 3, 4, 4]]]).expand(2, 2, 4)
    meant = torch.tensor([[3.0, 3, 4, 4]]).expand(2, 4)
    present = torch.tensor([[False, True], [False, False]])
    found = located(torch.tensor([[9.0, 0], [9, 0]]), boxes, meant, present)
    assert float(found[0]) == 1 and found[1].isnan()


# --- classes


@pytest.mark.parametrize("seed", range(3))
def test_classes_agree_with_scikit_learn(seed):
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (60,), generator=drawn)
    said = torch.where(torch.rand(60, generator=drawn) < 0.5, labels, torch.randint(0, 5, (60,)))
    found = per_class(said, labels, 5)
    every = precision_recall_fscore_support(
        labels.numpy(), said.numpy(), labels=range(5), zero_division=0
    )
    assert found.precision == pytest.approx(tuple(every[0]))
    assert found.recall == pytest.approx(tuple(every[1]))
    assert found.f1 == pytest.approx(tuple(every[2]))
    assert found.count == tuple(every[3])
    assert found.accuracy == pytest.approx(accuracy_score(labels.numpy(), said.numpy()))
    assert found.macro_f1 == pytest.approx(every[2].mean())


def test_classes_that_never_occur_and_labels_that_are_none():
    found = per_class(torch.tensor([0, 1, 1]), torch.tensor([0, 0, -1]), 3)
    assert found.count == (2, 0, 0) and found.accuracy == 0.5
    assert found.f1[0] == pytest.approx(2 / 3) and found.f1[1] == 0 and math.isnan(found.f1[2])
    assert found.macro_f1 == pytest.approx(1 / 3)
    nothing = per_class(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), 2)
    assert math.isnan(nothing.accuracy) and math.isnan(nothing.macro_f1)
    with pytest.raises(ValueError, match="beyond the 2"):
        per_class(torch.tensor([2]), torch.tensor([0]), 2)


def test_a_candidate_whose_logit_is_no_number_is_not_chosen():
    boxes = torch.tensor([[[0.0, 0, 1, 1], [2, 2, 3, 3]]]).expand(2, 2, 4)
    logits = torch.tensor([[math.nan, 1.0], [1.0, math.nan]])
    meant = torch.tensor([[0.0, 0, 1, 1]]).expand(2, 4)
    assert located(logits, boxes, meant).isnan().all()
    present = torch.tensor([[True, False], [True, False]])
    found = located(logits, boxes, meant, present)
    assert found.isnan().tolist() == [True, False] and found[1] == 1


@pytest.mark.parametrize("measure", [grounding_mass, reach])
def test_rows_below_zero_have_no_shares(measure):
    true = truth([[0], [0]], 3)
    both, one = block([[0.2, 0.3, 0.1], [-0.3, 0.4, 0.2]]), block([[0.2, 0.3, 0.1]])
    assert torch.equal(measure(both, true), measure(one, truth([[0]], 3)))
    assert measure(block([[-0.3, 0.4, 0.2]]), truth([[0]], 3)).isnan().all()
