"""Token scores by hand, inputs of selection rules, fusing of dropped tokens."""

from functools import partial

import pytest
import torch
from torch import Tensor

from overt.attention import words
from overt.nn.hard_attention.selection import keep_above_uniform, keep_all, keep_top
from overt.nn.token_pruning.selection import (
    by_class_attention,
    by_grid,
    by_presence,
    by_random,
    fuse_tokens,
    make_pruner,
)
from overt.nn.token_pruning.tokens import TokenSequence
from tests.nn.token_pruning.tiny import layout, qk_call, softmax_call, tokens

CELLS = torch.tensor([[[9.0, 9.0], [3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [6.0, 8.0]]])


def test_presence_is_the_norm_and_the_largest_norms_are_kept() -> None:
    """T-HAN-1 after a class token: norms 5, 0, 1, 10; the first and the last are kept."""
    given = tokens(CELLS)
    torch.testing.assert_close(by_presence(given)[:, 1:], torch.tensor([[5.0, 0.0, 1.0, 10.0]]))
    step = make_pruner(partial(keep_top, count=2), by_presence)(given)
    assert step.places.tolist() == [[0, 1, 4]]


def test_rules_score_free_tokens_only_and_the_others_stay() -> None:
    shown: list[Tensor] = []

    def rule(scores: Tensor) -> Tensor:
        shown.append(scores)
        return torch.ones_like(scores, dtype=torch.bool)  # also for tokens that are not free

    there = torch.tensor([[True, True, True, True, False]])
    step = make_pruner(rule, by_presence)(tokens(CELLS, there=there))
    assert shown[0].isfinite().tolist() == [[False, True, True, True, False]]
    assert step.places.tolist() == [[0, 1, 2, 3]], "the class token stays, padding does not"


def test_selection_has_no_gradient() -> None:
    states = CELLS.clone().requires_grad_()
    step = make_pruner(partial(keep_top, count=2), by_presence)(tokens(states))
    assert step.scores is not None and not step.scores.requires_grad
    step.states.sum().backward()
    assert states.grad is not None
    assert states.grad[0, :, 0].tolist() == [1, 1, 0, 0, 1]


def test_adaptive_rules_keep_different_numbers() -> None:
    states = torch.tensor([[1.0, 5.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.1]])[..., None]
    step = make_pruner(keep_above_uniform, by_presence)(tokens(states))
    assert step.places.tolist() == [[0, 1, -1], [0, 2, 3]]


# --- scores


def test_class_attention_is_the_mean_over_heads() -> None:
    weights = torch.rand(2, 3, 5, 5).softmax(-1)
    found = by_class_attention(tokens(torch.randn(2, 5, 4), softmax_call(weights)))
    torch.testing.assert_close(found, weights[:, :, 0].mean(1))


def test_class_token_is_found_by_its_position() -> None:
    weights = torch.rand(1, 2, 4, 4).softmax(-1)
    given = tokens(torch.randn(1, 4, 4), softmax_call(weights))
    moved = torch.tensor([[3, 0, 1, 2]])
    given = TokenSequence(
        given.states, given.there, given.free, given.sizes, moved, given.layout, given.call
    )
    torch.testing.assert_close(by_class_attention(given), weights[:, :, 1].mean(1))


def test_without_a_class_token_scores_average_over_present_tokens() -> None:
    weights = torch.rand(1, 2, 3, 3).softmax(-1)
    there = torch.tensor([[True, True, False]])
    places = torch.arange(3)[None]
    given = TokenSequence(
        torch.randn(1, 3, 4),
        there,
        there,
        torch.ones(1, 3),
        places,
        words(3),
        softmax_call(weights),
    )
    torch.testing.assert_close(by_class_attention(given), weights[:, :, :2].mean((1, 2)))


def test_class_attention_before_the_first_layer_raises() -> None:
    with pytest.raises(ValueError, match="after=1"):
        by_class_attention(tokens(torch.randn(1, 3, 2)))


def test_random_scores_depend_on_the_generator_only() -> None:
    given = tokens(torch.randn(4, 7, 2))
    one = by_random(torch.Generator().manual_seed(5))
    same = by_random(torch.Generator().manual_seed(5))
    first, second = one(given), one(given)
    assert torch.equal(first, same(given)) and not torch.equal(first, second)
    assert not torch.equal(first[0], first[1]), "samples differ"


def test_grid_scores_cover_the_grid_evenly() -> None:
    places = torch.arange(65)[None]
    there = torch.ones(1, 65, dtype=torch.bool)
    given = TokenSequence(
        torch.zeros(1, 65, 2), there, there, torch.ones(1, 65), places, layout(8, 8), None
    )
    scores = by_grid(given)
    assert scores[0, 0] == -torch.inf, "the class token is not a cell"
    order = scores[0, 1:].argsort(descending=True)
    assert sorted(order.tolist()) == list(range(64)) and scores[0, 1:].unique().numel() == 64
    for count in (4, 8, 16, 32):
        chosen = torch.zeros(64).index_fill(0, order[:count], 1).reshape(8, 8)
        quarters = chosen.reshape(2, 4, 2, 4).sum((1, 3))
        assert (quarters == count // 4).all()


def test_grid_scores_without_cells_raise() -> None:
    given = tokens(torch.randn(1, 3, 2))
    given = TokenSequence(
        given.states, given.there, given.free, given.sizes, given.places, words(3)
    )
    with pytest.raises(ValueError, match="one grid"):
        by_grid(given)


# --- fusing dropped tokens


def test_dropped_tokens_are_fused_by_their_scores() -> None:
    """EViT by hand: the sum of the two lowest of four cells, each times its score."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).expand(1, 1, 5, 5)
    states = torch.randn(1, 5, 3)
    plan = make_pruner(partial(keep_top, count=2), by_class_attention, fuse_tokens)
    step = plan(tokens(states, softmax_call(weights)))
    assert step.places.tolist() == [[0, 2, 4, -1]]
    expected = 0.2 * states[0, 1] + 0.15 * states[0, 3]
    torch.testing.assert_close(step.states[0, -1], expected)
    assert step.there.all()


def test_fusing_weights_keep_their_gradient() -> None:
    keys = torch.randn(1, 2, 5, 4, requires_grad=True)
    plan = make_pruner(partial(keep_top, count=2), by_class_attention, fuse_tokens)
    plan(tokens(torch.randn(1, 5, 3), qk_call(keys))).states[:, -1].sum().backward()
    assert keys.grad is not None and keys.grad.abs().sum() > 0


def test_keeping_all_tokens_adds_no_fused_token() -> None:
    step = make_pruner(keep_all, by_presence, fuse_tokens)(tokens(CELLS))
    assert step.places.tolist() == [[0, 1, 2, 3, 4]]
