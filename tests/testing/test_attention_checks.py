"""Some checks on broken modules; tests/trust/test_21_contract.py runs all of them."""

import pytest
import torch

from overt.testing import InputSizes, attention_checks, default_call
from overt.testing.attention import CHECKS, _run_check, examine_attention_module
from overt.testing.attention_inputs import AttentionCase, AttentionOutput, random_inputs
from tests.testing.broken import BROKEN, CorrectAttention

CHECK_NAMES = (
    "outputs_are_finite",
    "rows_sum_to_one",
    "masked_keys_are_not_read",
    "fully_masked_rows_have_finite_gradients",
    "calls_are_reentrant",
    "gradient_matches_finite_differences",
)


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    """Shapes are not checked for users, and the checks draw random numbers."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("name", CHECK_NAMES)
def test_check_fails_for_the_broken_module_only(name):
    check = getattr(attention_checks, name)
    for module, broken in ((CorrectAttention(), False), (BROKEN[name](), True)):
        given = random_inputs(InputSizes(), (2, 3), [6, 4, 2])
        output, attention = default_call(module, given.clone())
        answer = AttentionOutput(output.detach(), attention.detach())
        case = AttentionCase(module.eval(), default_call, InputSizes(), given, answer, (), 1e-5)
        assert (_run_check(check, case) is not None) is broken


def test_every_check_has_a_docstring():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(names) >= 25
    for check in CHECKS:
        assert check.__doc__ and check.__doc__.strip().endswith(".")
    assert set(attention_checks.SLOW_CHECKS) <= set(attention_checks.FURTHER_CHECKS)


def test_failure_messages_are_one_line():
    for name in ("rows_sum_to_one", "samples_are_independent", "strided_inputs_are_allowed"):
        report = examine_attention_module(BROKEN[name](), checks=(getattr(attention_checks, name),))
        assert "\n" not in report.failed[name] and len(report.failed[name]) < 200


def test_checks_leave_module_and_rng_state_unchanged():
    module = CorrectAttention().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    examine_attention_module(module, checks=attention_checks.BASIC_CHECKS)
    assert torch.equal(torch.rand(1), expected)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module._forward_hooks and all(p.grad is None for p in module.parameters())
