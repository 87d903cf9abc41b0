"""`check_attention_module`: reports, exemptions, failures."""

import jaxtyping
import pytest
import torch
from torch import nn

from overt.testing import (
    InputSizes,
    attention_checks,
    check_attention_module,
    examine_attention_module,
    weights_to_map,
)
from overt.testing.attention import CHECKS, NAMES
from tests.testing.broken import AddsEverything, CorrectAttention, HalvesWeights, NoMap, UnusedLayer

QUICK = tuple(check for check in CHECKS if check not in attention_checks.SLOW_CHECKS)


def test_correct_module_passes_and_is_reported():
    report = check_attention_module(CorrectAttention(), checks=QUICK)
    assert report.passed == tuple(check.__name__ for check in QUICK)
    assert not report.failed and not report.exempt
    assert str(report) == f"CorrectAttention passes {len(QUICK)} of {len(QUICK)} checks."


class TwoFaults(AddsEverything, HalvesWeights):
    """A module that fails two checks."""


def test_all_failed_checks_are_reported_together():
    with pytest.raises(AssertionError) as error:
        check_attention_module(TwoFaults(), checks=QUICK)
    lines = str(error.value).splitlines()
    assert lines[0] == f"TwoFaults passes {len(QUICK) - 2} of {len(QUICK)} checks."
    assert [line.split(":")[1].strip() for line in lines[1:]] == [
        "rows_sum_to_one",
        "masked_keys_are_not_read",
    ]


def test_module_without_a_map_fails_the_first_check_only():
    report = examine_attention_module(NoMap())
    assert list(report.failed) == ["gives_output_and_map"] and not report.passed


def test_module_with_another_signature_fails_with_a_hint():
    report = examine_attention_module(nn.Linear(8, 8))
    message = report.failed["gives_output_and_map"]
    assert message.startswith("module(queries, keys, present) failed (TypeError: ")
    assert message.endswith("; use `attend` to define the call")


def test_exemptions_are_reported_and_outdated_ones_fail():
    excuse = {"gradient_reaches_every_parameter": "it is kept for later"}
    report = check_attention_module(UnusedLayer(), exempt=excuse, checks=QUICK)
    assert "exempt: gradient_reaches_every_parameter: it is kept for later" in str(report)
    stale = examine_attention_module(CorrectAttention(), exempt=excuse, checks=QUICK)
    assert stale.failed == {
        "gradient_reaches_every_parameter": "it is exempt (it is kept for later), but it passes"
    }
    with pytest.raises(ValueError, match="'rows'"):
        check_attention_module(CorrectAttention(), exempt={"rows": "why not"})


def test_unreached_parameters_may_be_listed():
    assert check_attention_module(UnusedLayer(), unreached=["spare."], checks=QUICK)


def test_torch_multihead_attention_fails_two_checks():
    """A sample without keys gives NaN, forward and backward."""

    def attend(module, given):
        output, weights = module(
            given.queries,
            given.keys,
            given.keys,
            key_padding_mask=~given.present,
            average_attn_weights=False,
        )
        return output, weights_to_map(weights, given)

    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    report = examine_attention_module(module, attend, InputSizes(), checks=QUICK)
    assert list(report.failed) == [
        "fully_masked_rows_are_zero",
        "fully_masked_rows_have_finite_gradients",
    ]


def test_jaxtyping_setting_is_restored():
    before = jaxtyping.config.jaxtyping_disable
    examine_attention_module(CorrectAttention(), checks=attention_checks.BASIC_CHECKS)
    assert jaxtyping.config.jaxtyping_disable == before


def test_check_names_are_stable():
    assert tuple(check.__name__ for check in CHECKS) == NAMES and len(NAMES) == 42
