"""Token merging compared with the published rule, sample by sample and pair by pair."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overt.nn.token_pruning.merge import (
    bipartite_matching,
    by_keys,
    by_states,
    make_merger,
    merge_pairs,
)
from tests.nn.token_pruning.tiny import qk_call, softmax_call, tokens


def slow_matching(metric: Tensor, free: list[bool], count: int) -> dict[int, int]:
    """Compute ToMe's bipartite soft matching of one sample: source to target."""
    pairs = []
    for source in range(0, len(metric), 2):
        likes = [
            (float(F.cosine_similarity(metric[source], metric[target], dim=0)), target)
            for target in range(1, len(metric), 2)
            if free[source] and free[target]
        ]
        if likes:
            pairs.append((*max(likes), source))
    pairs.sort(reverse=True)
    return {source: target for _, target, source in pairs[:count]}


@pytest.mark.parametrize(("length", "count"), [(9, 3), (12, 2), (17, 8), (6, 1)])
def test_matching_follows_the_published_rule(length: int, count: int) -> None:
    metric = torch.randn(4, length, 5, generator=torch.Generator().manual_seed(length))
    free = (torch.arange(length) > 0).expand(4, -1)  # the first is a class token
    source, target = bipartite_matching(metric, free, count)
    for sample in range(4):
        expected = slow_matching(metric[sample], free[sample].tolist(), count)
        found = dict(zip(source[sample].tolist(), target[sample].tolist(), strict=True))
        assert found == expected


def slow_merged(states: Tensor, sizes: Tensor, pairs: dict[int, int]) -> dict[int, Tensor]:
    """Compute the size-weighted mean of each group, by the position of its target."""
    groups = {at: [at] for at in range(len(states)) if at not in pairs}
    for source, target in pairs.items():
        groups[target].append(source)
    return {
        at: sum(states[one] * sizes[one] for one in group) / sum(sizes[one] for one in group)
        for at, group in groups.items()
    }


def test_merged_tokens_are_means_weighted_by_size() -> None:
    states, sizes = torch.randn(3, 11, 4), torch.randint(1, 5, (3, 11)).float()
    given = tokens(states)
    given = type(given)(states, given.there, given.free, sizes, given.places, given.layout)
    source, target = bipartite_matching(states, given.free, 4)
    step = merge_pairs(given, source, target)
    for sample in range(3):
        pairs = dict(zip(source[sample].tolist(), target[sample].tolist(), strict=True))
        expected = slow_merged(states[sample], sizes[sample], pairs)
        assert step.places[sample].tolist() == sorted(expected), "remaining tokens keep their order"
        for slot, at in enumerate(sorted(expected)):
            torch.testing.assert_close(step.states[sample, slot], expected[at])
        for one, into in pairs.items():
            assert step.holder[sample, one] == step.holder[sample, into]
    torch.testing.assert_close(step.sizes.sum(1), sizes.sum(1))  # the total size is kept


def test_several_sources_may_share_a_target() -> None:
    metric = torch.tensor([[[0.0, 1], [1.0, 0], [1.0, 0.1], [-1.0, 0], [1.0, 0.2]]])
    source, target = bipartite_matching(metric, torch.tensor([[False, True, True, True, True]]), 2)
    assert source.tolist() == [[2, 4]] and target.tolist() == [[1, 1]]
    step = merge_pairs(tokens(metric), source, target)
    torch.testing.assert_close(step.states[0, 1], metric[0, [1, 2, 4]].mean(0))
    assert step.sizes.tolist() == [[1, 3, 1]]


def test_at_most_half_of_the_free_tokens_are_merged() -> None:
    metric = torch.randn(2, 8, 3)
    free = torch.tensor([[False, False, True, True, True, True, True, True]] * 2)
    source, target = bipartite_matching(metric, free, 100)
    assert source.shape == (2, 3)
    assert (source > 1).all() and (target > 1).all()


def test_padding_is_never_merged() -> None:
    there = torch.tensor([[True] * 4 + [False] * 4, [True] * 8])
    given = tokens(torch.randn(2, 8, 3), there=there)
    source, target = bipartite_matching(given.states, given.free, 3)
    assert source.shape[1] == 1, "the shorter sample has one pair"
    assert (source[0] < 4).all() and (target[0] < 4).all()


def test_merging_nothing_changes_nothing() -> None:
    states = torch.randn(2, 7, 3)
    for count, given in (
        (0, tokens(states)),
        (4, tokens(states[:, :1])),
        (4, tokens(states[:, :2])),
    ):
        step = make_merger(count, by_states)(given)
        assert torch.equal(step.states, given.states)
        assert (step.sizes == 1).all()


def test_gradient_reaches_every_merged_token() -> None:
    states = torch.randn(1, 7, 3, requires_grad=True)
    make_merger(2, by_states)(tokens(states)).states.sum().backward()
    assert states.grad is not None and (states.grad > 0).all()


def test_keys_are_the_mean_over_heads() -> None:
    keys = torch.randn(2, 3, 5, 4)
    found = by_keys(tokens(torch.randn(2, 5, 6), qk_call(keys)))
    torch.testing.assert_close(found, keys.mean(1))


def test_missing_keys_raise() -> None:
    with pytest.raises(ValueError, match="metric=by_states"):
        by_keys(tokens(torch.randn(1, 3, 2)))
    with pytest.raises(ValueError, match="eagerly"):
        by_keys(tokens(torch.randn(1, 3, 2), softmax_call(torch.rand(1, 1, 3, 3))))
