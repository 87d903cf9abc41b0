"""Gathering kept tokens: order, padding, gradients."""

import pytest
import torch

from overt.nn.token_pruning.tokens import append_token, gather_tokens
from tests.nn.token_pruning.tiny import tokens

KEPT = torch.tensor(
    [[True, False, True, True, False], [True, False, False, False, True]]
)  # three tokens of the first sample, two of the second


def test_each_sample_keeps_its_own_tokens_in_order() -> None:
    states = torch.randn(2, 5, 3)
    step = gather_tokens(tokens(states), KEPT)
    assert step.places.tolist() == [[0, 2, 3], [0, 4, -1]]
    assert step.there.tolist() == [[True, True, True], [True, True, False]]
    assert step.holder.tolist() == [[0, -1, 1, 2, -1], [0, -1, -1, -1, 1]]
    for sample, kept in enumerate(KEPT):
        torch.testing.assert_close(step.states[sample][step.there[sample]], states[sample][kept])
    assert step.states.isfinite().all(), "padding passes through every layer"


def test_gradient_reaches_kept_tokens_only() -> None:
    states = torch.randn(2, 5, 3, requires_grad=True)
    step = gather_tokens(tokens(states), KEPT)
    step.states[step.there].sum().backward()
    assert states.grad is not None
    torch.testing.assert_close(states.grad, KEPT[..., None].expand(2, 5, 3).float())


def test_absent_tokens_stay_absent() -> None:
    there = torch.tensor([[True, True, True, False, False]])
    step = gather_tokens(
        tokens(torch.randn(1, 5, 2), there=there), torch.ones(1, 5, dtype=torch.bool)
    )
    assert step.there.tolist() == there.tolist()


def test_sample_without_kept_tokens_raises() -> None:
    kept = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match=r"0 tokens.*sample 1"):
        gather_tokens(tokens(torch.randn(2, 2, 3)), kept)


def test_appended_token_has_no_position() -> None:
    step = gather_tokens(tokens(torch.randn(2, 5, 3)), KEPT)
    more = append_token(step, torch.full((2, 3), 7.0), torch.tensor([True, False]))
    assert more.places[:, -1].tolist() == [-1, -1]
    assert more.there[:, -1].tolist() == [True, False]
    assert (more.states[:, -1] == 7).all()
    assert torch.equal(more.holder, step.holder)
