"""Query swap: partners, change of maps, and score functions with and without query effect."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.metrics import js
from overt.metrics.query_swap import (
    QuerySwap,
    different_class_mask,
    draw_partners,
    other_samples_mask,
    same_class_mask,
    swap_queries,
    total_variation,
)
from overt.nn.learned_attention.attention import additive_score, dot_score, parametrised_score
from overt.papers.ltpa.vgg import HEAD_ONLY, VGGAttention, VGGSizes


def cell_map(*rows: list[float]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])))


# --- partners


def test_masks_of_allowed_partners():
    labels = torch.tensor([0, 1, 0, -1])
    assert same_class_mask(labels).nonzero().tolist() == [[0, 2], [2, 0]]
    assert different_class_mask(labels).nonzero().tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert torch.equal(other_samples_mask(labels), ~torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("rule", [same_class_mask, different_class_mask, other_samples_mask])
def test_every_allowed_partner_is_drawn(rule, generator):
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    allowed = rule(labels)
    drawn = torch.stack([draw_partners(allowed, generator) for _ in range(200)])
    for row in range(6):
        found = set(drawn[:, row].tolist())
        assert found == (set(allowed[row].nonzero()[:, 0].tolist()) or {-1})


def test_partners_depend_on_the_generator_only():
    allowed = other_samples_mask(torch.arange(9))
    first, again, other = (
        draw_partners(allowed, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


# --- change of a map


def test_total_variation_matches_an_example_by_hand():
    before = cell_map([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0])
    after = cell_map([0.25, 0.5, 0.25], [0.0, 0.0, 3.0], [0.4, 0.6, 1.0], [0.2, 0.3, 0.5])
    torch.testing.assert_close(
        total_variation(after, before), torch.tensor([0.25, 1.0, 0.0, torch.nan]), equal_nan=True
    )
    assert torch.equal(total_variation(after, before)[:3], total_variation(before, after)[:3])


def test_total_variation_agrees_with_optimal_transport(generator):
    """Total variation is the optimal transport cost with equal cost of every move."""
    import ot

    first, second = torch.rand(2, 5, 7, generator=generator).double().softmax(dim=-1)
    cost = 1 - torch.eye(7).double()
    expected = [float(ot.emd2(a, b, cost)) for a, b in zip(first, second, strict=True)]
    found = total_variation(*(AttentionMap.from_cells(one, words(7)) for one in (first, second)))
    torch.testing.assert_close(found, torch.tensor(expected).float())


def map_of_query(batch_of_cells: Tensor) -> Callable[[Tensor], AttentionMap]:
    """Return a map function in which a sample with the query of j has the map of j."""
    return lambda rows: AttentionMap.from_cells(batch_of_cells[rows], words(3))


def test_a_map_equal_to_its_query_moves_with_the_partner():
    own = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    found = swap_queries(map_of_query(own), torch.tensor([1, 0, -1]))
    torch.testing.assert_close(found.moved, torch.tensor([0.75, 0.75, torch.nan]), equal_nan=True)
    torch.testing.assert_close(found.js[:2], js(found.other, found.own)[:2])
    assert found.js[2].isnan() and found.there.tolist() == [True, True, False]
    assert found.change[0].tolist() == [-1, -0.5, torch.inf]
    assert found.change[2].isnan().all()
    truth = cell_map([1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
    torch.testing.assert_close(
        found.gain(truth), torch.tensor([-0.75, 0.25, torch.nan]), equal_nan=True
    )


def test_hidden_keys_do_not_change():
    seen = torch.tensor([[True, True, False]])
    first = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, 9.0]]), words(3), seen)
    second = AttentionMap.from_cells(torch.tensor([[0.25, 0.75, 1.0]]), words(3), seen)
    found = QuerySwap(first, second, torch.tensor([True]))
    assert found.change.tolist() == [[-0.5, 0.5, 0.0]]
    assert found.moved.tolist() == [0.25]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("score", "follows"), [(parametrised_score, False), (dot_score, True), (additive_score, True)]
)
def test_dot_products_depend_on_the_query_and_additive_pc_does_not(score, follows, level):
    """With a softmax, <u, l + g> gives the same map for any g; <l, g> does not."""
    torch.manual_seed(0)
    model = VGGAttention(VGGSizes(3, 0.1, HEAD_ONLY), 2, score).eval()
    for one in model.classify.scores:
        if hasattr(one, "weight"):
            one.weight.data *= 100  # initial maps are nearly uniform for any query
    batch = Batch(ids=tuple("abcd"), images=torch.rand(4, 3, 32, 32))
    features = model.encode(batch)

    def look(rows: Tensor) -> AttentionMap:
        assert features.query is not None
        swapped = replace(features, query=50 * features.query[rows])
        return model.decide(swapped).attention[level]

    nobody = torch.arange(len(batch))
    found = swap_queries(
        look, draw_partners(other_samples_mask(nobody), torch.Generator().manual_seed(0))
    )
    assert not found.own.values.requires_grad
    if follows:
        assert found.moved.min() > 1e-3 and found.js.min() > 0
    else:
        assert found.moved.max() < 1e-6 and found.change.abs().max() < 1e-4


def test_grid_maps_can_be_swapped():
    level = AttentionMap.from_cells(torch.rand(4, 9), grid(3, 3)).normalize()
    assert not swap_queries(lambda rows: level, torch.tensor([1, 0, 3, 2])).moved.any()


@pytest.mark.gpu
def test_gpu_and_cpu_agree(generator):
    maps = torch.rand(6, 9, generator=generator)
    numbers = []
    for device in ("cpu", "cuda"):
        labels = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        chosen = draw_partners(same_class_mask(labels), torch.Generator().manual_seed(0))
        own = maps.to(device)
        found = swap_queries(
            lambda rows, own=own: AttentionMap.from_cells(own[rows], grid(3, 3)), chosen
        )
        assert found.moved.device.type == device
        numbers.append([found.moved.cpu(), found.js.cpu(), found.change.cpu()])
    torch.testing.assert_close(*numbers)
