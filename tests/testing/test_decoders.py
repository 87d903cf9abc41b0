"""`check_decoder` on correct and broken decoders."""

from dataclasses import replace

import pytest
import torch

from overt import testing
from overt.nn.output import Decoder, DecoderState
from overt.testing import toy_batch

TOKENS = torch.tensor([[1, 2, 3]] * 4)


def test_correct_decoder_passes():
    testing.check_decoder(testing.Copier, toy_batch(), TOKENS)
    assert isinstance(testing.Copier(), Decoder)
    assert isinstance(testing.Copier().start(testing.Copier().encode(toy_batch())), DecoderState)


class StatefulModule(testing.Copier):
    """Counts steps in the module instead of in its state."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self, state, tokens):
        self.steps += 1
        moved = testing.CopierState(state.features, state.place + self.steps)
        return super().step(moved, tokens)


class IgnoresReorder(testing.Copier):
    """Does not reorder its state."""

    def start(self, features):
        state = super().start(features)
        return _IgnoresReorderState(state.features, state.place)

    def step(self, state, tokens):
        output, after = super().step(state, tokens)
        return output, _IgnoresReorderState(after.features, after.place)


class _IgnoresReorderState(testing.CopierState):
    def reorder(self, rows):
        turned = super().reorder(rows)
        return testing.CopierState(super().reorder(rows.sort().values).features, turned.place)


class Mixing(testing.Copier):
    """Mixes samples of the batch."""

    def step(self, state, tokens):
        output, after = super().step(state, tokens)
        return replace(output, prediction=output.prediction + output.prediction[:1].flip(-1)), after


@pytest.mark.parametrize(
    ("broken", "message"),
    [(StatefulModule, "repeated"), (IgnoresReorder, "reordered"), (Mixing, "reordered|alone")],
)
def test_broken_decoder_fails_by_check_name(broken, message):
    with pytest.raises(AssertionError, match=message):
        testing.check_decoder(broken, toy_batch(), TOKENS)
