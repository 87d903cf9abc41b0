"""Localization metrics: pointing game, mass inside, IoU, Otsu and partly covered cells."""

import pytest
import torch
from skimage.filters import threshold_otsu
from sklearn.metrics import jaccard_score

from overt.attention import AttentionMap, Kind, grid, words
from overt.geometry import PixelGeometry
from overt.metrics import mass_inside, mean_iou, otsu_jaccard, pointing_game, uniform_map
from overt.metrics.localization import covered_share, iou, localization_accuracy, support_mask
from overt.metrics.resample import resample_to_grid

LOCATION = (pointing_game, mass_inside, iou, mean_iou, otsu_jaccard)


def cell_map(*rows: list[float], seen: list[list[bool]] | None = None) -> AttentionMap:
    mask = None if seen is None else torch.tensor(seen)
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])), mask)


def test_location_metrics_match_examples_by_hand():
    attention = cell_map([0.1, 0.6, 0.3, 0.0], [0.1, 0.6, 0.3, 0.0], [0.4, 0.4, 0.1, 0.1])
    truth = cell_map([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [1, 0, 0.5]  # a tie counts by halves
    # the third cell of the second sample is covered by half: 0.1 + 0.3 / 2
    torch.testing.assert_close(mass_inside(attention, truth), torch.tensor([0.6, 0.25, 0.5]))
    torch.testing.assert_close(mass_inside(attention, truth, 0.0), torch.tensor([0.6, 0.4, 0.5]))


def test_a_uniform_map_scores_the_covered_share(generator):
    truth = AttentionMap.from_cells(
        (torch.rand(9, 16, generator=generator) > 0.6).float(), grid(4, 4)
    )
    share = truth.weights.mean(dim=-1).flatten()
    torch.testing.assert_close(pointing_game(uniform_map(truth), truth), share)
    torch.testing.assert_close(mass_inside(uniform_map(truth), truth), share)


def test_location_metrics_agree_with_a_loop_over_cells(generator):
    weights = torch.rand(2, 30, 7, generator=generator)
    seen = torch.rand(30, 7, generator=generator) > 0.3
    truth = torch.where(weights[1] > 0.6, weights[1], 0)
    ours = AttentionMap.from_cells(weights[0], words(7), seen)
    theirs = AttentionMap.from_cells(truth, words(7))
    pointed, mass = pointing_game(ours, theirs), mass_inside(ours, theirs)
    for b in range(30):
        keys = [k for k in range(7) if seen[b, k]]
        share = {k: float(truth[b, k]) for k in keys}
        if not any(share.values()):
            assert pointed[b].isnan() and mass[b].isnan()
            continue
        best = max(keys, key=lambda k: float(weights[0, b, k]))
        assert float(pointed[b]) == pytest.approx(share[best])
        total = sum(float(weights[0, b, k]) for k in keys)
        part = sum(float(weights[0, b, k]) * share[k] for k in keys)
        assert float(mass[b]) == pytest.approx(part / total)


def test_the_threshold_is_a_covered_share():
    truth = cell_map([0.1, 1.0, 0.5, 0.0])
    assert covered_share(truth).tolist()[0] == pytest.approx([0.1, 1.0, 0.5, 0.0])
    assert support_mask(truth).tolist() == [[True, True, True, False]]
    assert support_mask(truth, above=0.3).tolist() == [[False, True, True, False]]
    attention = cell_map([1.0, 0.0, 0.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [pytest.approx(0.1)]
    assert pointing_game(attention, truth, above=0.0).tolist() == [1]
    assert pointing_game(attention, truth, above=0.3).tolist() == [0]
    assert mass_inside(attention, truth, above=0.3).tolist() == [0]


def test_a_gradient_points_where_it_is_largest():
    """The pointing game needs an order of the cells instead of a distribution."""
    signed = AttentionMap(
        torch.tensor([-3.0, -1.0, -2.0]).reshape(1, 1, 1, 1, 3), words(3), kind=Kind.SIGNED
    )
    assert pointing_game(signed, cell_map([0.0, 1.0, 0.0])).tolist() == [1]


# --- regions


def test_iou_agrees_with_sklearn_at_every_threshold(generator):
    weights = torch.rand(10, 16, generator=generator)
    truth = (torch.rand(10, 16, generator=generator) > 0.6).float()
    seen = torch.rand(10, 16, generator=generator) > 0.1
    attention = AttentionMap.from_cells(weights, grid(4, 4), seen)
    target = AttentionMap.from_cells(truth, grid(4, 4))
    each = []
    for at in (0.15, 0.5, 0.9):
        found = iou(attention, target, at)
        each.append(found)
        for b in range(10):
            shown = weights[b][seen[b]]
            expected = jaccard_score(
                truth[b][seen[b]].bool().numpy(), (shown > at * shown.max()).numpy()
            )
            assert float(found[b]) == pytest.approx(expected, abs=1e-6)
        assert torch.equal(
            localization_accuracy(attention, target, at, 0.3), (found >= 0.3).float()
        )
    mean = mean_iou(attention, target, (0.15, 0.5, 0.9))
    torch.testing.assert_close(mean, torch.stack(each).mean(dim=0))
    with pytest.raises(ValueError, match="1 threshold"):
        mean_iou(attention, target, ())


def test_otsu_thresholds_agree_with_scikit_image(generator):
    weights = torch.rand(8, 36, generator=generator).square()
    truth = (torch.rand(8, 36, generator=generator) > 0.5).float()
    seen = torch.ones(8, 36, dtype=torch.bool)
    seen[4:] = torch.rand(4, 36, generator=generator) > 0.3
    found = otsu_jaccard(
        AttentionMap.from_cells(weights, grid(6, 6), seen),
        AttentionMap.from_cells(truth, grid(6, 6)),
    )
    for b in range(8):
        shown = weights[b][seen[b]].double().numpy()
        expected = jaccard_score(truth[b][seen[b]].bool().numpy(), shown > threshold_otsu(shown))
        assert float(found[b]) == pytest.approx(expected, abs=1e-6)


def test_an_empty_map_or_truth_gives_nan():
    some, none = cell_map([0.2, 0.8, 0.0]), cell_map([0.0, 0.0, 0.0])
    for measure in (iou, mean_iou, otsu_jaccard, localization_accuracy):
        assert measure(some, none).isnan().all() and measure(none, some).isnan().all()
    assert iou(uniform_map(some), some).tolist() == [pytest.approx(1 / 3)]  # one of three cells
    assert iou(uniform_map(some), some, above=0.0).tolist() == [pytest.approx(2 / 3)]


def test_negative_weights_give_nan_mass_inside():
    truth = cell_map(*[[0.0, 1, 0, 0]] * 3)
    found = mass_inside(cell_map([-3.0, 2, 2, 0], [2, -1.5, 0.6, 0], [1, 1, 0, 0]), truth)
    assert found.isnan().tolist() == [True, True, False] and float(found[2]) == 0.5
    assert pointing_game(cell_map([-3.0, 2, 1, 0]), cell_map([0.0, 1, 0, 0])).tolist() == [1]


# --- cells partly covered by the truth


def boxes_and_map(generator, count=20, side=14, size=224):
    """Return random boxes as pixel masks and as covered shares of cells, and random weights."""
    corners = torch.rand(count, 2, 2, generator=generator).mul(size).sort(dim=1).values.round()
    boxes = torch.cat([corners[:, 0], corners[:, 1] + 1], dim=-1).clamp_max(size)
    masks = torch.zeros(count, size, size, dtype=torch.bool)
    for b, (x0, y0, x1, y1) in enumerate(boxes.long().tolist()):
        masks[b, y0:y1, x0:x1] = True
    geometry = PixelGeometry.identity(count, (size, size))
    shares = geometry.cover_boxes(boxes[:, None], (side, side))[:, 0]
    weights = torch.rand(count, side * side, generator=generator).square()
    return masks, shares, weights


@pytest.mark.parametrize("metric", LOCATION, ids=lambda one: one.__name__)
def test_values_on_cells_equal_values_on_pixels(metric, generator):
    """Every cell is also drawn as a block of pixels: both give the same value."""
    masks, shares, weights = boxes_and_map(generator)
    drawn = weights.reshape(-1, 14, 14).repeat_interleave(16, 1).repeat_interleave(16, 2)
    pixels = AttentionMap.from_cells(drawn.flatten(1), grid(224, 224))
    on_pixels = metric(pixels, AttentionMap.from_cells(masks.flatten(1), grid(224, 224)))
    attention = AttentionMap.from_cells(weights, grid(14, 14))
    on_cells = metric(attention, AttentionMap.from_coverage(shares, grid(14, 14)))
    torch.testing.assert_close(on_cells, on_pixels, atol=1e-5, rtol=1e-5)
    touched = metric(attention, AttentionMap.from_coverage(shares, grid(14, 14)), above=0.0)
    assert float((touched - on_pixels).mean()) > 0.005  # values of version 1 are too high


def test_a_partly_covered_cell_keeps_its_share(generator):
    """With normalized weights alone the only touched cell would count as fully covered."""
    truth = AttentionMap.from_coverage(torch.tensor([[0.0, 0.2, 0.0, 0.0]]), grid(2, 2))
    assert float(truth.weights.sum()) == 1
    assert covered_share(truth).tolist() == [[0, pytest.approx(0.2), 0, 0]]
    attention = cell_map([0.0, 1.0, 0.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [pytest.approx(0.2)]
    assert mass_inside(attention, truth).tolist() == [pytest.approx(0.2)]
    assert otsu_jaccard(attention, truth).tolist() == [pytest.approx(0.2)]


def test_replaced_weights_do_not_use_the_old_coverage():
    truth = AttentionMap.from_coverage(torch.tensor([[0.0, 0.2, 0.4, 0.0]]), grid(2, 2))
    other = uniform_map(truth)
    assert covered_share(other).tolist() == [[1, 1, 1, 1]]
    assert (
        covered_share(truth.to("cpu").select(torch.tensor([0, 0]))).tolist()
        == [[0, pytest.approx(0.2), pytest.approx(0.4), 0]] * 2
    )
    assert resample_to_grid(truth, (4, 4)).coverage is None


def test_counts_and_distributions_are_relative_to_their_largest_weight():
    assert covered_share(cell_map([0.0, 3.0, 1.5])).tolist() == [[0, 1, 0.5]]
    assert covered_share(cell_map([0.0, 0.5, 0.25])).tolist() == [[0, 0.5, 0.25]]
    marked = cell_map([0.0, 1.0, 1.0, 1.0]).normalize()
    assert covered_share(marked).tolist() == [[0, 1, 1, 1]]


def test_a_constant_map_scores_the_covered_share_on_any_grid(generator):
    """It scores the share covered by the truth, also after resampling to another grid."""
    _, shares, _ = boxes_and_map(generator)
    truth = AttentionMap.from_coverage(shares, grid(14, 14))
    even = uniform_map(AttentionMap.from_cells(torch.rand(20, 49, generator=generator), grid(7, 7)))
    drawn = resample_to_grid(even, (14, 14))
    share = shares.mean(dim=-1)
    for metric in LOCATION:
        for one in (uniform_map(truth), drawn):
            torch.testing.assert_close(metric(one, truth), share, atol=1e-5, rtol=1e-5)


def test_location_metrics_have_version_2():
    for metric in (*LOCATION, localization_accuracy):
        assert metric.info.version == 2
