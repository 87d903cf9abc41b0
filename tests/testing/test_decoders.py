from dataclasses import replace

import pytest
import torch

from overt import testing
from overt.models.output import Decoder, State
from overt.testing import toy_batch

TOKENS = torch.tensor([[1, 2, 3]] * 4)


def test_an_honest_decoder_passes():
    testing.check_decoder(testing.Copier, toy_batch(), TOKENS)
    assert isinstance(testing.Copier(), Decoder)
    assert isinstance(testing.Copier().start(testing.Copier().encode(toy_batch())), State)


class Forgetful(testing.Copier):
    """Counts steps in itself and not in its state."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self, state, tokens):
        self.steps += 1
        moved = testing.Copied(state.features, state.place + self.steps)
        return super().step(moved, tokens)


class Stubborn(testing.Copier):
    """Does not reorder."""

    def start(self, features):
        state = super().start(features)
        return _Stuck(state.features, state.place)

    def step(self, state, tokens):
        output, after = super().step(state, tokens)
        return output, _Stuck(after.features, after.place)


class _Stuck(testing.Copied):
    def reorder(self, rows):
        turned = super().reorder(rows)
        return testing.Copied(super().reorder(rows.sort().values).features, turned.place)


class Mixing(testing.Copier):
    """Lets samples look at each other."""

    def step(self, state, tokens):
        output, after = super().step(state, tokens)
        return replace(output, prediction=output.prediction + output.prediction[:1].flip(-1)), after


@pytest.mark.parametrize(
    ("broken", "named"),
    [(Forgetful, "taken again"), (Stubborn, "reordered"), (Mixing, "reordered|alone")],
)
def test_a_broken_decoder_is_named(broken, named):
    with pytest.raises(AssertionError, match=named):
        testing.check_decoder(broken, toy_batch(), TOKENS)
