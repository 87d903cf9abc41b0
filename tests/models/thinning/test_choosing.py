"""Scores by hand, what rules are shown, and what becomes of the rest."""

from functools import partial

import pytest
import torch
from torch import Tensor

from overt.attention import words
from overt.models.hard.selection import keep_above_uniform, keep_all, keep_top
from overt.models.thinning.choosing import (
    by_chance,
    by_class_attention,
    by_grid,
    by_presence,
    choosing,
    fused,
)
from overt.models.thinning.tokens import Tokens
from tests.models.thinning.tiny import attended, layout, tokens, written

CELLS = torch.tensor([[[9.0, 9.0], [3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [6.0, 8.0]]])


def test_presence_is_the_norm_and_the_largest_are_kept() -> None:
    """T-HAN-1 behind a class token: norms 5, 0, 1, 10; two of them are the first and the last."""
    given = tokens(CELLS)
    torch.testing.assert_close(by_presence(given)[:, 1:], torch.tensor([[5.0, 0.0, 1.0, 10.0]]))
    step = choosing(partial(keep_top, count=2), by_presence)(given)
    assert step.places.tolist() == [[0, 1, 4]]


def test_rules_see_free_tokens_alone_and_the_others_stay() -> None:
    shown: list[Tensor] = []

    def rule(scores: Tensor) -> Tensor:
        shown.append(scores)
        return torch.ones_like(scores, dtype=torch.bool)  # also of what it should not ask for

    there = torch.tensor([[True, True, True, True, False]])
    step = choosing(rule, by_presence)(tokens(CELLS, there=there))
    assert shown[0].isfinite().tolist() == [[False, True, True, True, False]]
    assert step.places.tolist() == [[0, 1, 2, 3]], "the class token stays, padding does not"


def test_a_choice_has_no_gradient() -> None:
    states = CELLS.clone().requires_grad_()
    step = choosing(partial(keep_top, count=2), by_presence)(tokens(states))
    assert step.scores is not None and not step.scores.requires_grad
    step.states.sum().backward()
    assert states.grad is not None
    assert states.grad[0, :, 0].tolist() == [1, 1, 0, 0, 1]


def test_adaptive_rules_keep_different_numbers() -> None:
    states = torch.tensor([[1.0, 5.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.1]])[..., None]
    step = choosing(keep_above_uniform, by_presence)(tokens(states))
    assert step.places.tolist() == [[0, 1, -1], [0, 2, 3]]


# --- scores


def test_class_attention_is_the_mean_of_its_row_over_heads() -> None:
    weights = torch.rand(2, 3, 5, 5).softmax(-1)
    found = by_class_attention(tokens(torch.randn(2, 5, 4), written(weights)))
    torch.testing.assert_close(found, weights[:, :, 0].mean(1))


def test_the_class_token_is_found_where_it_stands() -> None:
    weights = torch.rand(1, 2, 4, 4).softmax(-1)
    given = tokens(torch.randn(1, 4, 4), written(weights))
    moved = torch.tensor([[3, 0, 1, 2]])
    given = Tokens(
        given.states, given.there, given.free, given.sizes, moved, given.layout, given.call
    )
    torch.testing.assert_close(by_class_attention(given), weights[:, :, 1].mean(1))


def test_without_a_class_token_all_that_are_there_count() -> None:
    weights = torch.rand(1, 2, 3, 3).softmax(-1)
    there = torch.tensor([[True, True, False]])
    places = torch.arange(3)[None]
    given = Tokens(
        torch.randn(1, 3, 4), there, there, torch.ones(1, 3), places, words(3), written(weights)
    )
    torch.testing.assert_close(by_class_attention(given), weights[:, :, :2].mean((1, 2)))


def test_there_is_no_attention_before_the_first_layer() -> None:
    with pytest.raises(ValueError, match="begin with after=1"):
        by_class_attention(tokens(torch.randn(1, 3, 2)))


def test_chance_is_that_of_its_generator() -> None:
    given = tokens(torch.randn(4, 7, 2))
    one = by_chance(torch.Generator().manual_seed(5))
    same = by_chance(torch.Generator().manual_seed(5))
    first, second = one(given), one(given)
    assert torch.equal(first, same(given)) and not torch.equal(first, second)
    assert not torch.equal(first[0], first[1]), "each sample has its own"


def test_the_grid_is_covered_evenly_for_every_number_of_cells() -> None:
    places = torch.arange(65)[None]
    there = torch.ones(1, 65, dtype=torch.bool)
    given = Tokens(
        torch.zeros(1, 65, 2), there, there, torch.ones(1, 65), places, layout(8, 8), None
    )
    scores = by_grid(given)
    assert scores[0, 0] == -torch.inf, "the class token is no cell"
    order = scores[0, 1:].argsort(descending=True)
    assert sorted(order.tolist()) == list(range(64)) and scores[0, 1:].unique().numel() == 64
    for count in (4, 8, 16, 32):
        chosen = torch.zeros(64).index_fill(0, order[:count], 1).reshape(8, 8)
        quarters = chosen.reshape(2, 4, 2, 4).sum((1, 3))
        assert (quarters == count // 4).all()


def test_a_grid_needs_cells() -> None:
    given = tokens(torch.randn(1, 3, 2))
    given = Tokens(given.states, given.there, given.free, given.sizes, given.places, words(3))
    with pytest.raises(ValueError, match="one grid of cells"):
        by_grid(given)


# --- the rest


def test_the_rest_becomes_one_token_weighted_by_its_scores() -> None:
    """EViT by hand: the two least of four cells, each times its score, summed."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).expand(1, 1, 5, 5)
    states = torch.randn(1, 5, 3)
    plan = choosing(partial(keep_top, count=2), by_class_attention, fused)
    step = plan(tokens(states, written(weights)))
    assert step.places.tolist() == [[0, 2, 4, -1]]
    expected = 0.2 * states[0, 1] + 0.15 * states[0, 3]
    torch.testing.assert_close(step.states[0, -1], expected)
    assert step.there.all()


def test_weights_of_the_rest_keep_their_gradient() -> None:
    keys = torch.randn(1, 2, 5, 4, requires_grad=True)
    plan = choosing(partial(keep_top, count=2), by_class_attention, fused)
    plan(tokens(torch.randn(1, 5, 3), attended(keys))).states[:, -1].sum().backward()
    assert keys.grad is not None and keys.grad.abs().sum() > 0


def test_nothing_is_made_of_nothing() -> None:
    step = choosing(keep_all, by_presence, fused)(tokens(CELLS))
    assert step.places.tolist() == [[0, 1, 2, 3, 4]]
