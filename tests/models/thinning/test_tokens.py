"""Kept tokens stand side by side, in order, and nothing else is left of the others."""

import pytest
import torch

from overt.models.thinning.tokens import extended, gathered
from tests.models.thinning.tiny import tokens

KEPT = torch.tensor(
    [[True, False, True, True, False], [True, False, False, False, True]]
)  # three tokens of the first sample, two of the second


def test_each_sample_keeps_its_own_tokens_in_order() -> None:
    states = torch.randn(2, 5, 3)
    step = gathered(tokens(states), KEPT)
    assert step.places.tolist() == [[0, 2, 3], [0, 4, -1]]
    assert step.there.tolist() == [[True, True, True], [True, True, False]]
    assert step.holder.tolist() == [[0, -1, 1, 2, -1], [0, -1, -1, -1, 1]]
    for sample, kept in enumerate(KEPT):
        torch.testing.assert_close(step.states[sample][step.there[sample]], states[sample][kept])
    assert step.states.isfinite().all(), "padding goes through every layer"


def test_the_gradient_reaches_kept_tokens_only() -> None:
    states = torch.randn(2, 5, 3, requires_grad=True)
    step = gathered(tokens(states), KEPT)
    step.states[step.there].sum().backward()
    assert states.grad is not None
    torch.testing.assert_close(states.grad, KEPT[..., None].expand(2, 5, 3).float())


def test_a_token_that_is_not_there_stays_so() -> None:
    there = torch.tensor([[True, True, True, False, False]])
    step = gathered(tokens(torch.randn(1, 5, 2), there=there), torch.ones(1, 5, dtype=torch.bool))
    assert step.there.tolist() == there.tolist()


def test_nothing_left_is_refused() -> None:
    kept = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match="no token of sample 1"):
        gathered(tokens(torch.randn(2, 2, 3)), kept)


def test_one_more_token_has_no_place() -> None:
    step = gathered(tokens(torch.randn(2, 5, 3)), KEPT)
    more = extended(step, torch.full((2, 3), 7.0), torch.tensor([True, False]))
    assert more.places[:, -1].tolist() == [-1, -1]
    assert more.there[:, -1].tolist() == [True, False]
    assert (more.states[:, -1] == 7).all()
    assert torch.equal(more.holder, step.holder)
