"""Some promises and modules that break them; all of them are in tests/trust/test_21_contract.py."""

import pytest
import torch

from overt.testing import Sizes, attending, plainly
from overt.testing.attention import CHECKS, _asked, examine_attention_module
from overt.testing.given import Answer, Case, random_given
from tests.testing.broken import BROKEN, Honest

SOME = (
    "answers_are_finite",
    "rows_sum_to_one",
    "hidden_keys_are_not_read",
    "nothing_to_see_has_a_finite_gradient",
    "calls_do_not_mix",
    "gradient_is_right",
)


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    """Shapes are not checked for users: who checks them draws random numbers."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.parametrize("name", SOME)
def test_a_check_finds_the_module_that_breaks_its_promise(name):
    check = getattr(attending, name)
    for module, broken in ((Honest(), False), (BROKEN[name](), True)):
        given = random_given(Sizes(), (2, 3), [6, 4, 2])
        output, attention = plainly(module, given.clone())
        answer = Answer(output.detach(), attention.detach())
        case = Case(module.eval(), plainly, Sizes(), given, answer, (), 1e-5)
        assert (_asked(check, case) is not None) is broken


def test_every_check_says_in_a_sentence_what_it_promises():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(names) >= 25
    for check in CHECKS:
        assert check.__doc__ and check.__doc__.strip().endswith(".")
    assert set(attending.SLOW) <= set(attending.THEN)


def test_complaints_are_one_line():
    for name in ("rows_sum_to_one", "samples_stand_alone", "inputs_may_be_strided"):
        report = examine_attention_module(BROKEN[name](), checks=(getattr(attending, name),))
        assert "\n" not in report.failed[name] and len(report.failed[name]) < 200


def test_checks_leave_the_module_and_random_numbers_alone():
    module = Honest().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    examine_attention_module(module, checks=attending.FIRST)
    assert torch.equal(torch.rand(1), expected)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module._forward_hooks and all(p.grad is None for p in module.parameters())
