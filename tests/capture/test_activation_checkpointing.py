"""Activation checkpointing computes again what was computed, edits included."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overt.capture import Bias, activation_checkpointing, watch
from overt.capture.activation_checkpointing import (
    CheckpointPhase,
    checkpoint_phase,
    without_reentrant_checkpoints,
)
from tests.capture.toys import FusedAttention, WrittenAttention


class Saving(nn.Module):
    """Two layers, each behind a checkpoint."""

    def __init__(self, attention, reentrant=False, on=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([attention(), attention()]).double()
        self.reentrant, self.on = reentrant, on

    def forward(self, x):
        for layer in self.layers:
            added = checkpoint(layer, x, use_reentrant=self.reentrant) if self.on else layer(x)
            x = x + added
        return x


def sharpened(call, weights):
    weights = weights**2
    return weights / weights.sum(dim=-1, keepdim=True)


def gradients(model, edit, where):
    torch.manual_seed(1)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    with watch(model, edit=edit) as trace:
        loss = model(x).square().sum() + trace.map(0).weights.square().sum()
        if where == "inside":
            loss.backward()
    if where == "after":
        loss.backward()
    if where == "in another thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert len(trace) == 2
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("where", ["inside", "after", "in another thread"])
@pytest.mark.parametrize("attention", [FusedAttention, WrittenAttention])
@pytest.mark.parametrize("edit", [None, sharpened, Bias(lambda call: torch.arange(6.0).double())])
def test_gradients_are_equal_with_and_without(attention, edit, where):
    with_it = gradients(Saving(attention), edit, where)
    without = gradients(Saving(attention, on=False), edit, where)
    for mine, theirs in zip(with_it, without, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["inside", "after", "in another thread"])
def test_edits_are_repeated_where_pytorch_does_not_show_its_hooks(monkeypatch, where):
    """PyTorch 2.6: the checkpoint is found on the call stack."""
    monkeypatch.setattr(activation_checkpointing, "SHOWS_SAVED_TENSORS_HOOKS", False)
    for attention in (FusedAttention, WrittenAttention):
        test_gradients_are_equal_with_and_without(attention, sharpened, where)
    test_which_pass_is_under_way()


def test_the_model_is_left_as_found_after_the_second_pass():
    model = Saving(FusedAttention)
    gradients(model, sharpened, "after")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()


def test_reentrant_checkpointing_is_refused():
    model = Saving(FusedAttention, reentrant=True)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="use_reentrant=False"), watch(model):
        model(x)


def test_a_stored_reentrant_checkpoint_is_switched_until_the_last_session_ends():
    """As Hugging Face models store it; a function that is set inside the block stays."""
    model, other = Saving(FusedAttention), nn.Linear(1, 1)
    stored = model._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    other._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    unchanged = other._gradient_checkpointing_func
    with without_reentrant_checkpoints([model, other]):
        with without_reentrant_checkpoints([model, other]):
            pass
        assert model._gradient_checkpointing_func.keywords == {"use_reentrant": False}
        assert other._gradient_checkpointing_func is unchanged
    assert model._gradient_checkpointing_func is stored
    with without_reentrant_checkpoints([model]):
        model._gradient_checkpointing_func = "of the user"
    assert model._gradient_checkpointing_func == "of the user"


def test_which_pass_is_under_way():
    passes = []

    def note(x):
        passes.append(checkpoint_phase())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    note(x)
    checkpoint(note, x, use_reentrant=False).sum().backward()
    with torch.no_grad():
        note(x)
    assert passes == [
        CheckpointPhase.NONE,
        CheckpointPhase.FORWARD,
        CheckpointPhase.RECOMPUTE,
        CheckpointPhase.NONE,
    ]
