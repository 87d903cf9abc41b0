"""Fixation metrics compared with scikit-learn and the published code, and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from overt.attention import AttentionMap, grid, words
from overt.metrics import auc_judd, auc_shuffled, center_map, information_gain, nss, uniform_map
from overt.metrics.controls import mean_of_other_maps
from overt.metrics.fixations import (
    fixated_cells,
    fixations_on_other_images,
    resize_to_fixations,
)


@pytest.fixture
def maps_and_fixations(generator):
    """Return maps with ties and fixation counts."""
    weights = torch.randint(0, 6, (12, 20), generator=generator).float() + 0.1
    counts = torch.poisson(torch.full((12, 20), 0.4), generator=generator)
    counts[:, 0] = 1
    return AttentionMap.from_cells(weights, grid(4, 5)), AttentionMap.from_cells(counts, grid(4, 5))


def row_weights(made: AttentionMap) -> np.ndarray:
    return made.weights[:, 0, 0, 0].double().numpy()


def test_nss_agrees_with_a_loop_over_fixations(maps_and_fixations):
    maps, fixations = maps_and_fixations
    found = nss(maps, fixations)
    for b, (weights, counts) in enumerate(
        zip(row_weights(maps), row_weights(fixations), strict=True)
    ):
        scaled = (weights - weights.mean()) / weights.std()
        each = [scaled[at] for at, count in enumerate(counts) for _ in range(int(count))]
        assert float(found[b]) == pytest.approx(float(np.mean(each)), abs=1e-5)
    assert nss(uniform_map(maps), fixations).isnan().all()


def test_auc_judd_agrees_with_sklearn(maps_and_fixations):
    maps, fixations = maps_and_fixations
    found = auc_judd(maps, fixations)
    for b, (weights, counts) in enumerate(
        zip(row_weights(maps), row_weights(fixations), strict=True)
    ):
        weight = np.where(counts > 0, counts, 1)
        expected = roc_auc_score(counts > 0, weights, sample_weight=weight)
        assert float(found[b]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(auc_judd(uniform_map(maps), fixations), torch.full((12,), 0.5))


def published_judd(saliency: np.ndarray, fixated: np.ndarray) -> float:
    """Compute AUC-Judd as the code of the MIT benchmark, without noise."""
    levels = np.sort(saliency[fixated])[::-1]
    true, false = [0.0], [0.0]
    for place, level in enumerate(levels, start=1):
        above = (saliency >= level).sum()
        true.append(place / len(levels))
        false.append((above - place) / (saliency.size - len(levels)))
    return float(np.trapezoid([*true, 1.0], [*false, 1.0]))


def test_auc_judd_is_within_half_a_fixation_of_the_published_code(generator):
    for _ in range(20):
        saliency = torch.rand(40, generator=generator)
        fixated = torch.rand(40, generator=generator) > 0.7
        ours = auc_judd(
            AttentionMap.from_cells(saliency[None], words(40)),
            AttentionMap.from_cells(fixated[None].float(), words(40)),
        )
        added = published_judd(saliency.numpy(), fixated.numpy()) - float(ours)
        assert -1e-6 <= added <= 1 / (2 * int(fixated.sum())) + 1e-6


def test_fixated_cells_give_the_binary_map_of_the_published_code(generator):
    """`AUC_Judd.m` and `NSS.m` read places with `fixationMap > 0`, however often fixated."""
    differs = False
    for _ in range(20):
        saliency = torch.rand(40, generator=generator)
        counts = torch.poisson(torch.full((40,), 1.0), generator=generator)
        maps = AttentionMap.from_cells(saliency[None], words(40))
        fixations = AttentionMap.from_cells(counts[None], words(40))
        once = fixated_cells(fixations)
        assert row_weights(once).tolist() == [(counts > 0).double().tolist()]
        published = published_judd(saliency.numpy(), (counts > 0).numpy())
        added = published - float(auc_judd(maps, once))
        assert -1e-6 <= added <= 1 / (2 * int((counts > 0).sum())) + 1e-6
        standard = (saliency - saliency.mean()) / saliency.std(correction=0)
        assert float(nss(maps, once)) == pytest.approx(float(standard[counts > 0].mean()), abs=1e-5)
        differs |= abs(published - float(auc_judd(maps, fixations))) > 0.02
    assert differs  # every fixation counts without it
    assert torch.equal(fixated_cells(once).weights, once.weights)


def test_shuffled_auc_agrees_with_sklearn(maps_and_fixations):
    maps, fixations = maps_and_fixations
    others = fixations_on_other_images(fixations)
    found = auc_shuffled(maps, fixations, others)
    rows = zip(row_weights(maps), row_weights(fixations), row_weights(others), strict=True)
    for b, (weights, counts, elsewhere) in enumerate(rows):
        expected = roc_auc_score(
            [1] * 20 + [0] * 20,
            np.concatenate([weights, weights]),
            sample_weight=np.concatenate([counts, elsewhere]),
        )
        assert float(found[b]) == pytest.approx(expected, abs=1e-6)


def test_fixations_on_other_images_exclude_the_image_itself(maps_and_fixations):
    _, fixations = maps_and_fixations
    others = row_weights(fixations_on_other_images(fixations))
    counts = row_weights(fixations)
    assert np.array_equal(others, counts.sum(axis=0, keepdims=True) - counts)
    with pytest.raises(ValueError, match="at least 2 images"):
        fixations_on_other_images(fixations.select(torch.tensor([0])))


def test_a_center_map_has_chance_level_shuffled_auc():
    """With all fixations near the center, the center map has a high AUC-Judd and shuffled AUC 0.5.

    Every image has the same fixations.
    """
    like = AttentionMap.from_cells(torch.ones(6, 81), grid(9, 9))
    middle = center_map(like)
    counts = (middle.weights[:, 0, 0, 0] > 1 / 60).float()
    fixations = AttentionMap.from_cells(counts, grid(9, 9))
    assert (auc_judd(middle, fixations) > 0.95).all()
    shuffled = auc_shuffled(middle, fixations, fixations_on_other_images(fixations))
    torch.testing.assert_close(shuffled, torch.full((6,), 0.5))
    gain = information_gain(middle, fixations, middle)
    torch.testing.assert_close(gain, torch.zeros(6))


def test_information_gain_matches_an_example_by_hand():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    maps = AttentionMap.from_cells(weights, words(4))
    counts = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    gain = information_gain(maps, AttentionMap.from_cells(counts, words(4)), uniform_map(maps))
    assert float(gain[0]) == pytest.approx((2 * 1 + 0) / 3, abs=1e-5)
    # a fixation at zero weight costs the epsilon of the published code
    assert float(gain[1]) == pytest.approx(math.log2(2.220446e-16 / 0.25), abs=1e-3)


def test_the_prior_can_be_the_mean_of_other_maps(maps_and_fixations):
    maps, fixations = maps_and_fixations
    prior = mean_of_other_maps(fixations)
    found = information_gain(fixations, fixations, prior)
    assert (found > 0).all()  # the fixations themselves are the best map
    assert information_gain(maps, fixations, prior).isfinite().all()


def test_images_without_fixations_give_nan(maps_and_fixations):
    maps, fixations = maps_and_fixations
    none = AttentionMap.from_cells(torch.zeros(12, 20), grid(4, 5))
    for found in (
        nss(maps, none),
        auc_judd(maps, none),
        auc_shuffled(maps, none, fixations),
        auc_shuffled(maps, fixations, none),
        information_gain(maps, none, maps),
        information_gain(maps, fixations, none),
    ):
        assert found.isnan().all()


def test_hidden_keys_do_not_count(maps_and_fixations, generator):
    maps, fixations = maps_and_fixations
    seen = torch.ones(12, 20, dtype=torch.bool)
    seen[:, 15:] = False
    weights, counts = (one.weights[:, 0, 0, 0] for one in (maps, fixations))
    hidden = [AttentionMap.from_cells(one, words(20), seen) for one in (weights, counts)]
    short = [AttentionMap.from_cells(one[:, :15], words(15)) for one in (weights, counts)]
    for measure in (nss, auc_judd, lambda a, f: information_gain(a, f, center_of(a))):
        torch.testing.assert_close(measure(*hidden), measure(*short))
    torch.testing.assert_close(
        auc_shuffled(*hidden, fixations_on_other_images(hidden[1])),
        auc_shuffled(*short, fixations_on_other_images(short[1])),
    )


def center_of(maps: AttentionMap) -> AttentionMap:
    return uniform_map(maps)


def test_negative_weights_give_nan_information_gain(maps_and_fixations):
    maps, counts = maps_and_fixations
    weights = maps.weights[:, 0, 0, 0].clone()
    weights[0, int((counts.weights[0, 0, 0, 0] == 0).nonzero()[0])] = -1  # a cell without fixation
    signed = AttentionMap.from_cells(weights, grid(4, 5))
    for ours, prior in ((signed, uniform_map(maps)), (uniform_map(maps), signed)):
        found = information_gain(ours, counts, prior)
        assert found[0].isnan() and not found[1:].isnan().any()
    assert not nss(signed, counts).isnan().any()


def resize_with_pillow(picture: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Resize bicubically with a = -0.5, like MATLAB's `imresize` except at the border."""
    from PIL import Image

    made = Image.fromarray(picture.astype(np.float32), mode="F")
    return np.asarray(made.resize(shape[::-1], Image.Resampling.BICUBIC), dtype=np.float64)


@pytest.mark.parametrize("shape", [(30, 44), (7, 9), (3, 4)])
def test_maps_are_resized_to_fixations_as_in_the_mit_benchmark(shape, generator):
    """Compare with Pillow and the AUC code of the MIT benchmark."""
    weights = torch.rand(6, 7, 9, generator=generator)
    fixated = (torch.rand(6, *shape, generator=generator) > 0.8).float()
    fixated[:, 0, 0] = 1
    maps = AttentionMap.from_cells(weights.flatten(1), grid(7, 9))
    counts = AttentionMap.from_cells(fixated.flatten(1), grid(*shape))
    scaled = resize_to_fixations(maps, counts)
    assert scaled.keys.spans[0].shape == shape
    for b, found in enumerate(auc_judd(scaled, counts)):
        picture = resize_with_pillow(weights[b].numpy(), shape)
        np.testing.assert_allclose(row_weights(scaled)[b].reshape(shape), picture, atol=1e-5)
        expected = roc_auc_score(fixated[b].flatten().numpy(), row_weights(scaled)[b])
        assert float(found) == pytest.approx(expected, abs=1e-6)
        published = published_judd(picture.flatten(), fixated[b].flatten().numpy() > 0)
        assert abs(published - float(found)) <= 1 / (2 * fixated[b].sum()) + 1e-3


def test_auc_depends_on_the_grid_of_the_fixations(generator):
    """Score the same map and fixations on cells and on pixels."""
    weights = torch.rand(20, 16, generator=generator)
    fine = torch.zeros(20, 16, 16)
    for b in range(20):
        best = int(weights[b].argmax())
        fine[b, best // 4 * 4 + 1, best % 4 * 4 + 2] = 1
        fine[b, (b * 5) % 16, (b * 7) % 16] = 1
    coarse = fine.reshape(20, 4, 4, 4, 4).sum(dim=(2, 4))
    maps = AttentionMap.from_cells(weights, grid(4, 4))
    pixels = AttentionMap.from_cells(fine.flatten(1), grid(16, 16))
    on_cells = auc_judd(maps, AttentionMap.from_cells(coarse.flatten(1), grid(4, 4)))
    on_pixels = auc_judd(resize_to_fixations(maps, pixels), pixels)
    assert abs(float(on_cells.mean() - on_pixels.mean())) > 0.005
    with pytest.raises(ValueError, match=r"16 and 256 keys"):
        auc_judd(maps, pixels)  # not resized implicitly


def test_resizing_other_keys_than_image_cells_raises():
    maps = AttentionMap.from_cells(torch.rand(2, 4), grid(2, 2))
    assert resize_to_fixations(maps, maps) is maps
    text = AttentionMap.from_cells(torch.rand(2, 4), words(4))
    for one, other in ((text, maps), (maps, text)):
        with pytest.raises(ValueError, match=r"cells.*one image"):
            resize_to_fixations(one, other)
    hidden = torch.tensor([[True, True, True, False]] * 2)
    with pytest.raises(ValueError, match="hidden cells"):
        resize_to_fixations(AttentionMap.from_cells(torch.rand(2, 4), grid(2, 2), hidden), maps)
    empty = AttentionMap.from_cells(torch.rand(1, 4), grid(2, 2), torch.zeros(1, 4).bool())
    large = AttentionMap.from_cells(torch.ones(1, 16), grid(4, 4))
    assert auc_judd(resize_to_fixations(empty, large), large).isnan().all()
