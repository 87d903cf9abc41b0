"""Grounding metrics compared with reference code and scikit-learn, and by hand."""

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import accuracy_score, precision_recall_fscore_support

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.geometry import RegionGeometry
from overt.metrics.controls import uniform_map
from overt.metrics.grounding import (
    block_mass,
    box_accuracy,
    classification_report,
    grounding_accuracy,
    grounding_mass,
    mean_by_layer_and_head,
    pointing_at_boxes,
)

MEASURES = (grounding_mass, grounding_accuracy, block_mass, pointing_at_boxes)


def block(weights: list, kind=Kind.SUBPROBABILITY) -> AttentionMap:
    """Return the attention rows of one sample, layer and head."""
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


def reference_values(attention: AttentionMap, true: AttentionMap) -> dict[str, list]:
    """Compute all four metrics weight by weight."""
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
                    values["block_mass"].append(total)
                    values["pointing_at_boxes"].append(float(hit))
                for name, some in values.items():
                    found[name].append(sum(some) / len(some) if some else math.nan)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_grounding_metrics_agree_with_the_reference(seed):
    attention, true = random_case(seed)
    expected = reference_values(attention, true)
    for measure in MEASURES:
        found = measure(attention, true)
        assert found.shape == (3, 2, 2)
        wanted = torch.tensor(expected[measure.__name__]).view(3, 2, 2)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert found[1].isnan().all()  # no grounded words


def test_grounding_ignores_weight_on_a_sink():
    """The small weight on regions is all on the right one: mass 1, block mass 0.001."""
    attention, true = block([[0.001, 0.0, 0.0]]), truth([[0]], 3)
    assert float(grounding_mass(attention, true)) == 1
    assert float(grounding_accuracy(attention, true)) == 1
    assert float(block_mass(attention, true)) == pytest.approx(0.001)


def test_block_mass_of_normalized_rows_raises():
    attention = block([[0.001, 0.0, 0.0]])
    with pytest.raises(ValueError, match="renormalization"):
        block_mass(attention.normalize(), truth([[0]], 3))


def test_rows_match_an_example_by_hand_and_skip_missing_truth():
    attention = block([[0.2, 0.1, 0.1], [0.0, 0.3, 0.1], [0.5, 0.0, 0.0]])
    true = truth([[0], [0, 2], []], 3)
    assert float(grounding_mass(attention, true)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(grounding_accuracy(attention, true)) == pytest.approx(0.5)
    assert float(block_mass(attention, true)) == pytest.approx(0.4)


def test_a_uniform_map_scores_as_a_random_key():
    true = truth([[0, 3], [1]], 4)
    even = uniform_map(block([[0.1] * 4, [0.2] * 4]))
    assert float(grounding_accuracy(even, true)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(grounding_mass(even, true)) == pytest.approx((0.5 + 0.25) / 2)


def test_log_and_plain_weights_give_the_same_values():
    attention, true = random_case(0)
    logs = replace(attention, values=attention.log_weights, form=Form.LOG)
    for measure in MEASURES:
        torch.testing.assert_close(measure(logs, true), measure(attention, true), equal_nan=True)


def test_pointing_accepts_an_overlapping_box():
    boxes = [[0.0, 0.0, 10.0, 10.0], [2.0, 2.0, 6.0, 6.0], [20.0, 20.0, 30.0, 30.0]]
    true = truth([[0]], 3, boxes)
    near, far = block([[0.1, 0.5, 0.0]]), block([[0.1, 0.0, 0.5]])
    assert float(grounding_accuracy(near, true)) == 0
    assert float(pointing_at_boxes(near, true)) == 1
    assert float(pointing_at_boxes(far, true)) == 0
    with pytest.raises(ValueError, match="RegionGeometry"):
        pointing_at_boxes(near, truth([[0]], 3))


def test_rows_of_another_shape_raise():
    with pytest.raises(ValueError, match=r"samples.*rows.*keys"):
        grounding_mass(block([[0.1, 0.2]]), truth([[0], [1]], 2))
    with pytest.raises(ValueError, match="signed"):
        grounding_mass(block([[0.1, -0.2]], Kind.SIGNED), truth([[0]], 2))


def test_mean_by_layer_and_head_averages_samples():
    pairs = [random_case(seed) for seed in range(2)]
    found = mean_by_layer_and_head(grounding_mass, pairs)
    every = torch.cat([grounding_mass(*one) for one in pairs])
    torch.testing.assert_close(found, every[[0, 2, 3, 5]].mean(dim=0))


def test_metrics_declare_their_direction():
    assert [measure.info.higher_is_better for measure in MEASURES] == [True, True, None, True]


# --- referring expressions


def test_a_predicted_box_is_correct_from_iou_one_half():
    boxes = torch.tensor([[[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6]]]).expand(3, 3, 4)
    meant = torch.tensor([[0.0, 0, 2, 2]]).expand(3, 4)
    logits = torch.eye(3)
    assert box_accuracy(logits, boxes, meant).tolist() == [1, 1, 0]
    assert box_accuracy(logits, boxes, meant, overlap=0.51).tolist() == [1, 0, 0]


def test_absent_boxes_are_ignored_and_no_box_gives_nan():
    boxes = torch.tensor([[[0.0, 0, 2, 2], [3, 3, 4, 4]]]).expand(2, 2, 4)
    meant = torch.tensor([[3.0, 3, 4, 4]]).expand(2, 4)
    present = torch.tensor([[False, True], [False, False]])
    found = box_accuracy(torch.tensor([[9.0, 0], [9, 0]]), boxes, meant, present)
    assert float(found[0]) == 1 and found[1].isnan()


# --- classes


@pytest.mark.parametrize("seed", range(3))
def test_classification_report_agrees_with_sklearn(seed):
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (60,), generator=drawn)
    predicted = torch.where(
        torch.rand(60, generator=drawn) < 0.5, labels, torch.randint(0, 5, (60,))
    )
    found = classification_report(predicted, labels, 5)
    every = precision_recall_fscore_support(
        labels.numpy(), predicted.numpy(), labels=range(5), zero_division=0
    )
    assert found.precision == pytest.approx(tuple(every[0]))
    assert found.recall == pytest.approx(tuple(every[1]))
    assert found.f1 == pytest.approx(tuple(every[2]))
    assert found.count == tuple(every[3])
    assert found.accuracy == pytest.approx(accuracy_score(labels.numpy(), predicted.numpy()))
    assert found.macro_f1 == pytest.approx(every[2].mean())


def test_missing_classes_and_labels_are_left_out_of_the_report():
    found = classification_report(torch.tensor([0, 1, 1]), torch.tensor([0, 0, -1]), 3)
    assert found.count == (2, 0, 0) and found.accuracy == 0.5
    assert found.f1[0] == pytest.approx(2 / 3) and found.f1[1] == 0 and math.isnan(found.f1[2])
    assert found.macro_f1 == pytest.approx(1 / 3)
    nothing = classification_report(
        torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), 2
    )
    assert math.isnan(nothing.accuracy) and math.isnan(nothing.macro_f1)
    with pytest.raises(ValueError, match="below 2"):
        classification_report(torch.tensor([2]), torch.tensor([0]), 2)


def test_nan_logits_give_nan_box_accuracy():
    boxes = torch.tensor([[[0.0, 0, 1, 1], [2, 2, 3, 3]]]).expand(2, 2, 4)
    logits = torch.tensor([[math.nan, 1.0], [1.0, math.nan]])
    meant = torch.tensor([[0.0, 0, 1, 1]]).expand(2, 4)
    assert box_accuracy(logits, boxes, meant).isnan().all()
    present = torch.tensor([[True, False], [True, False]])
    found = box_accuracy(logits, boxes, meant, present)
    assert found.isnan().tolist() == [True, False] and found[1] == 1


@pytest.mark.parametrize("measure", [grounding_mass, block_mass])
def test_negative_rows_are_left_out(measure):
    true = truth([[0], [0]], 3)
    both, one = block([[0.2, 0.3, 0.1], [-0.3, 0.4, 0.2]]), block([[0.2, 0.3, 0.1]])
    assert torch.equal(measure(both, true), measure(one, truth([[0]], 3)))
    assert measure(block([[-0.3, 0.4, 0.2]]), truth([[0]], 3)).isnan().all()


def test_empty_target_boxes_raise():
    boxes = torch.tensor([[[0.0, 0, 4, 4], [4, 4, 8, 8]]])
    for wrong in ((4.0, 0.0, 0.0, 4.0), (1.0, 1.0, 1.0, 4.0), (0.0, 0.0, float("nan"), 4.0)):
        with pytest.raises(ValueError, match=rf"x0 < x1 .*\({wrong[0]:g}, .*sample 0"):
            box_accuracy(torch.zeros(1, 2), boxes, torch.tensor([wrong]))


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
@pytest.mark.parametrize("measure", MEASURES, ids=lambda one: one.__name__)
def test_rows_with_non_finite_weights_are_left_out(measure, wrong):
    """Without this check an infinite weight would be the maximum of its row."""
    boxes = [[0.0, 0, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]]
    true = truth([[0], [1]], 3, boxes)
    found = measure(block([[wrong, 0.2, 0.1], [0.1, 0.6, 0.1]]), true)
    torch.testing.assert_close(
        found, measure(block([[0.0, 0, 0], [0.1, 0.6, 0.1]]), truth([[], [1]], 3, boxes))
    )
    assert measure(block([[wrong, 0.2, 0.1], [0.1, wrong, 0.1]]), true).isnan().all()
