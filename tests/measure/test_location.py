import pytest
import torch
from skimage.filters import threshold_otsu
from sklearn.metrics import jaccard_score

from overt.attention import AttentionMap, Kind, grid, words
from overt.measure import (
    cut_out,
    iou,
    mass_inside,
    mean_iou,
    otsu_jaccard,
    pointing_game,
    support,
    uniform,
)


def cells(*rows: list[float], seen: list[list[bool]] | None = None) -> AttentionMap:
    mask = None if seen is None else torch.tensor(seen)
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])), mask)


def test_values_by_hand():
    attention = cells([0.1, 0.6, 0.3, 0.0], [0.1, 0.6, 0.3, 0.0], [0.4, 0.4, 0.1, 0.1])
    truth = cells([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [1, 0, 0.5]  # a tie counts by halves
    torch.testing.assert_close(mass_inside(attention, truth), torch.tensor([0.6, 0.4, 0.5]))


def test_a_uniform_map_scores_the_share_of_the_truth(generator):
    truth = AttentionMap.from_cells(
        (torch.rand(9, 16, generator=generator) > 0.6).float(), grid(4, 4)
    )
    share = truth.weights.mean(dim=-1).flatten()
    torch.testing.assert_close(pointing_game(uniform(truth), truth), share)
    torch.testing.assert_close(mass_inside(uniform(truth), truth), share)


def test_agrees_with_a_loop_over_cells(generator):
    weights = torch.rand(2, 30, 7, generator=generator)
    seen = torch.rand(30, 7, generator=generator) > 0.3
    truth = torch.where(weights[1] > 0.6, weights[1], 0)
    ours = AttentionMap.from_cells(weights[0], words(7), seen)
    theirs = AttentionMap.from_cells(truth, words(7))
    pointed, mass = pointing_game(ours, theirs), mass_inside(ours, theirs)
    for b in range(30):
        keys = [k for k in range(7) if seen[b, k]]
        inside = {k for k in keys if truth[b, k] > 0}
        if not inside:
            assert pointed[b].isnan() and mass[b].isnan()
            continue
        best = max(keys, key=lambda k: float(weights[0, b, k]))
        assert float(pointed[b]) == (best in inside)
        total = sum(float(weights[0, b, k]) for k in keys)
        part = sum(float(weights[0, b, k]) for k in inside)
        assert float(mass[b]) == pytest.approx(part / total)


def test_the_threshold_is_a_share_of_the_largest_weight():
    truth = cells([0.1, 1.0, 0.5, 0.0])
    assert support(truth).tolist() == [[True, True, True, False]]
    assert support(truth, above=0.3).tolist() == [[False, True, True, False]]
    attention = cells([1.0, 0.0, 0.0, 0.0])
    assert pointing_game(attention, truth).tolist() == [1]
    assert pointing_game(attention, truth, above=0.3).tolist() == [0]
    assert mass_inside(attention, truth, above=0.3).tolist() == [0]


def test_a_gradient_points_where_it_is_largest():
    """Pointing needs an order of the cells, not a distribution."""
    signed = AttentionMap(
        torch.tensor([-3.0, -1.0, -2.0]).reshape(1, 1, 1, 1, 3), words(3), kind=Kind.SIGNED
    )
    assert pointing_game(signed, cells([0.0, 1.0, 0.0])).tolist() == [1]


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
        assert torch.equal(cut_out(attention, target, at, 0.3), (found >= 0.3).float())
    mean = mean_iou(attention, target, (0.15, 0.5, 0.9))
    torch.testing.assert_close(mean, torch.stack(each).mean(dim=0))
    with pytest.raises(ValueError, match="no threshold"):
        mean_iou(attention, target, ())


def test_otsu_cuts_the_visible_keys_as_scikit_image_does(generator):
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


def test_regions_need_a_map_and_a_truth():
    some, none = cells([0.2, 0.8, 0.0]), cells([0.0, 0.0, 0.0])
    for measure in (iou, mean_iou, otsu_jaccard, cut_out):
        assert measure(some, none).isnan().all() and measure(none, some).isnan().all()
    assert iou(uniform(some), some).tolist() == [pytest.approx(2 / 3)]


def test_weights_below_zero_have_no_mass_inside():
    truth = cells(*[[0.0, 1, 0, 0]] * 3)
    found = mass_inside(cells([-3.0, 2, 2, 0], [2, -1.5, 0.6, 0], [1, 1, 0, 0]), truth)
    assert found.isnan().tolist() == [True, True, False] and float(found[2]) == 0.5
    assert pointing_game(cells([-3.0, 2, 1, 0]), cells([0.0, 1, 0, 0])).tolist() == [1]
