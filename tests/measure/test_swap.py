"""Query swap: what an identity says of `pc`, what must move with `dp`, and values by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.measure import Swap, alike, anyone, js, moved, partners, swapped, unlike
from overt.models.paying.attention import additive, dot, parametrised
from overt.models.paying.vgg import HEAD_ONLY, Sizes, VGGAttention


def cells(*rows: list[float]) -> AttentionMap:
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])))


# --- whose query


def test_who_may_ask_for_whom():
    labels = torch.tensor([0, 1, 0, -1])
    assert alike(labels).nonzero().tolist() == [[0, 2], [2, 0]]
    assert unlike(labels).nonzero().tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert torch.equal(anyone(labels), ~torch.eye(4, dtype=torch.bool))


@pytest.mark.parametrize("rule", [alike, unlike, anyone])
def test_partners_are_allowed_and_any_of_them_is_drawn(rule, generator):
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    allowed = rule(labels)
    drawn = torch.stack([partners(allowed, generator) for _ in range(200)])
    for row in range(6):
        found = set(drawn[:, row].tolist())
        assert found == (set(allowed[row].nonzero()[:, 0].tolist()) or {-1})


def test_the_generator_decides():
    allowed = anyone(torch.arange(9))
    first, again, other = (
        partners(allowed, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


# --- how far a map moves


def test_moved_by_hand():
    before = cells([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0])
    after = cells([0.25, 0.5, 0.25], [0.0, 0.0, 3.0], [0.4, 0.6, 1.0], [0.2, 0.3, 0.5])
    torch.testing.assert_close(
        moved(after, before), torch.tensor([0.25, 1.0, 0.0, torch.nan]), equal_nan=True
    )
    assert torch.equal(moved(after, before)[:3], moved(before, after)[:3])


def test_moved_agrees_with_the_cost_of_carrying_by_cells(generator):
    """Total variation is the work of optimal transport when every step costs the same."""
    import ot

    first, second = torch.rand(2, 5, 7, generator=generator).double().softmax(dim=-1)
    cost = 1 - torch.eye(7).double()
    expected = [float(ot.emd2(a, b, cost)) for a, b in zip(first, second, strict=True)]
    found = moved(*(AttentionMap.from_cells(one, words(7)) for one in (first, second)))
    torch.testing.assert_close(found, torch.tensor(expected).float())


def follow(batch_of_cells: Tensor) -> Callable[[Tensor], AttentionMap]:
    """Maps that are what the query is: sample i asked by j looks like the map of j."""
    return lambda rows: AttentionMap.from_cells(batch_of_cells[rows], words(3))


def test_a_map_that_is_its_query():
    own = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    found = swapped(follow(own), torch.tensor([1, 0, -1]))
    torch.testing.assert_close(found.moved, torch.tensor([0.75, 0.75, torch.nan]), equal_nan=True)
    torch.testing.assert_close(found.js[:2], js(found.other, found.own)[:2])
    assert found.js[2].isnan() and found.there.tolist() == [True, True, False]
    assert found.change[0].tolist() == [-1, -0.5, torch.inf]
    assert found.change[2].isnan().all()
    truth = cells([1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
    torch.testing.assert_close(
        found.gain(truth), torch.tensor([-0.75, 0.25, torch.nan]), equal_nan=True
    )


def test_keys_that_nobody_sees_do_not_change():
    seen = torch.tensor([[True, True, False]])
    first = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, 9.0]]), words(3), seen)
    second = AttentionMap.from_cells(torch.tensor([[0.25, 0.75, 1.0]]), words(3), seen)
    found = Swap(first, second, torch.tensor([True]))
    assert found.change.tolist() == [[-0.5, 0.5, 0.0]]
    assert found.moved.tolist() == [0.25]


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("score", "follows"), [(parametrised, False), (dot, True), (additive, True)]
)
def test_dot_products_follow_their_query_and_the_published_sum_does_not(score, follows, level):
    """With a softmax, <u, l + g> gives the same map for any g; <l, g> does not."""
    torch.manual_seed(0)
    model = VGGAttention(Sizes(3, 0.1, HEAD_ONLY), 2, score).eval()
    for one in model.classify.scores:
        if hasattr(one, "weight"):
            one.weight.data *= 100  # or a map is nearly uniform at the start, whatever is asked
    batch = Batch(ids=tuple("abcd"), images=torch.rand(4, 3, 32, 32))
    features = model.encode(batch)

    def look(rows: Tensor) -> AttentionMap:
        assert features.query is not None
        asked = replace(features, query=50 * features.query[rows])
        return model.decide(asked).attention[level]

    nobody = torch.arange(len(batch))
    found = swapped(look, partners(anyone(nobody), torch.Generator().manual_seed(0)))
    assert not found.own.values.requires_grad
    if follows:
        assert found.moved.min() > 1e-3 and found.js.min() > 0
    else:
        assert found.moved.max() < 1e-6 and found.change.abs().max() < 1e-4


def test_grids_work_too():
    level = AttentionMap.from_cells(torch.rand(4, 9), grid(3, 3)).normalize()
    assert not swapped(lambda rows: level, torch.tensor([1, 0, 3, 2])).moved.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same(generator):
    maps = torch.rand(6, 9, generator=generator)
    numbers = []
    for device in ("cpu", "cuda"):
        labels = torch.tensor([0, 0, 1, 1, 2, 2], device=device)
        chosen = partners(alike(labels), torch.Generator().manual_seed(0))
        own = maps.to(device)
        found = swapped(
            lambda rows, own=own: AttentionMap.from_cells(own[rows], grid(3, 3)), chosen
        )
        assert found.moved.device.type == device
        numbers.append([found.moved.cpu(), found.js.cpu(), found.change.cpu()])
    torch.testing.assert_close(*numbers)
