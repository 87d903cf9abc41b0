import jaxtyping
import pytest
import torch
from torch import nn

from overt.testing import (
    Sizes,
    as_map,
    attending,
    check_attention_module,
    examine_attention_module,
)
from overt.testing.attention import CHECKS, NAMES
from tests.testing.broken import AddsEverything, Half, Honest, NoMap, Spare

QUICK = tuple(check for check in CHECKS if check not in attending.SLOW)


def test_an_honest_module_passes_and_the_report_says_so():
    report = check_attention_module(Honest(), checks=QUICK)
    assert report.passed == tuple(check.__name__ for check in QUICK)
    assert not report.failed and not report.exempt
    assert str(report) == f"Honest keeps {len(QUICK)} of {len(QUICK)} promises."


class Both(AddsEverything, Half):
    """Two faults."""


def test_all_broken_promises_are_told_at_once():
    with pytest.raises(AssertionError) as told:
        check_attention_module(Both(), checks=QUICK)
    lines = str(told.value).splitlines()
    assert lines[0] == f"Both keeps {len(QUICK) - 2} of {len(QUICK)} promises."
    assert [line.split(":")[1].strip() for line in lines[1:]] == [
        "rows_sum_to_one",
        "hidden_keys_are_not_read",
    ]


def test_where_there_is_no_map_nothing_else_is_asked():
    report = examine_attention_module(NoMap())
    assert list(report.failed) == ["gives_output_and_map"] and not report.passed


def test_a_module_that_cannot_be_called_is_told():
    report = examine_attention_module(nn.Linear(8, 8))
    said = report.failed["gives_output_and_map"]
    assert said.startswith("module(queries, keys, present) could not be called (TypeError: ")
    assert said.endswith("; `attend` says how a module is called")


def test_exemptions_have_a_reason_and_do_not_outlive_it():
    excuse = {"gradient_reaches_every_parameter": "it is kept for later"}
    report = check_attention_module(Spare(), exempt=excuse, checks=QUICK)
    assert "exempt: gradient_reaches_every_parameter: it is kept for later" in str(report)
    stale = examine_attention_module(Honest(), exempt=excuse, checks=QUICK)
    assert stale.failed == {
        "gradient_reaches_every_parameter": "it is exempt (it is kept for later), and it is kept"
    }
    with pytest.raises(ValueError, match="there is no check 'rows'; there are gives_output_and"):
        check_attention_module(Honest(), exempt={"rows": "why not"})


def test_parameters_that_need_no_gradient_are_named():
    assert check_attention_module(Spare(), unreached=["spare."], checks=QUICK)


def test_the_attention_of_torch_breaks_two_promises():
    """A sample without keys is NaN there, forward and backward."""

    def attend(module, given):
        output, weights = module(
            given.queries,
            given.keys,
            given.keys,
            key_padding_mask=~given.present,
            average_attn_weights=False,
        )
        return output, as_map(weights, given)

    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    report = examine_attention_module(module, attend, Sizes(), checks=QUICK)
    assert list(report.failed) == [
        "nothing_to_see_gives_nothing",
        "nothing_to_see_has_a_finite_gradient",
    ]


def test_shapes_are_checked_again_afterwards():
    before = jaxtyping.config.jaxtyping_disable
    examine_attention_module(Honest(), checks=attending.FIRST)
    assert jaxtyping.config.jaxtyping_disable == before


def test_names_are_those_of_the_checks():
    assert tuple(check.__name__ for check in CHECKS) == NAMES and len(NAMES) == 42
