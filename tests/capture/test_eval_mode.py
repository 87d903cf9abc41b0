"""A model that was made still is as it was found afterwards, whatever happened in between."""

import pytest
import torch
from torch import nn

from overt.capture.eval_mode import eval_mode, eval_mode_forked_rng


def modes(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


@pytest.fixture
def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    made[1][0].eval()
    return made


@pytest.mark.parametrize("hold", [eval_mode, eval_mode_forked_rng])
def test_every_part_is_in_evaluation_mode_and_then_as_it_was(model: nn.Module, hold) -> None:
    before = modes(model)
    with hold(model):
        assert not any(modes(model))
        model[0].train()  # somebody else meddles
    assert modes(model) == before == [True, True, True, False, True]
    with pytest.raises(KeyboardInterrupt), hold(model):
        raise KeyboardInterrupt
    assert modes(model) == before


def test_still_gives_the_model(model: nn.Module) -> None:
    with eval_mode(model) as held:
        assert held is model


@pytest.mark.parametrize("what", ["a model", "a function"])
def test_nobody_misses_the_random_numbers(model: nn.Module, what: str) -> None:
    state = torch.get_rng_state()
    with eval_mode_forked_rng(model if what == "a model" else torch.rand):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
