"""Losses raise in one sentence where numbers would be wrong, NaN or broadcast in silence."""

import pytest
import torch

from overt.losses import next_token_cross_entropy
from overt.losses.distribution_matching import adaptive_gaussian_kernel, gaussian_kernel
from overt.losses.forgetting import distillation, feature_distillation

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of shapes at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("make", [gaussian_kernel, adaptive_gaussian_kernel])
@pytest.mark.parametrize("widths", [(), (0.0,), (-1.0,), (1.0, NAN), (INF,), 1.0, None])
def test_widths_that_are_not_positive_raise(make, widths):
    with pytest.raises(ValueError, match=r"(widths|factors).*positive"):
        make(widths)


def test_teachers_of_another_shape_raise():
    """One row of a teacher would broadcast to all samples."""
    with pytest.raises(ValueError, match=r"3, 4.*1, 4"):
        distillation(torch.rand(3, 4), torch.rand(1, 4))
    states = torch.rand(2, 5, 4)
    for teacher, present in ((states[:1], torch.ones(2, 5)), (states, torch.ones(2, 4))):
        with pytest.raises(ValueError, match=r"2, 5, 4"):
            feature_distillation(states, teacher, present.bool())


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_temperatures_that_are_not_positive_and_finite_raise(temperature):
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
        distillation(torch.rand(3, 4), torch.rand(3, 4), temperature)


def test_tokens_outside_of_the_vocabulary_raise_unless_they_are_padding():
    logits, tokens = torch.zeros(2, 5, 7), torch.arange(10).reshape(2, 5) % 7
    mask = torch.arange(5).expand(2, 5) < 3
    padded = tokens.where(mask, -100)
    found = next_token_cross_entropy(logits, padded, mask)
    assert torch.equal(found.total, next_token_cross_entropy(logits, tokens, mask).total)
    for wrong in (7, -1):
        with pytest.raises(ValueError, match=rf"0 to 6.* {wrong}"):
            next_token_cross_entropy(logits, tokens.where(~mask, wrong), mask)
    with pytest.raises(ValueError, match=r"boolean.*float"):
        next_token_cross_entropy(logits, tokens, mask.float())


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, NAN])
def test_smoothing_out_of_range_raises(smoothing):
    logits, tokens = torch.zeros(1, 2, 3), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match=f"smoothing.*{smoothing}"):
        next_token_cross_entropy(logits, tokens, tokens == 0, smoothing)
