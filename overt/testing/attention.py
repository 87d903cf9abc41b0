"""Contract of attention modules."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jaxtyping
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.testing import attention_checks
from overt.testing.attention_checks import Check
from overt.testing.attention_inputs import (
    AttentionCase,
    AttentionOutput,
    CallModule,
    InputSizes,
    default_call,
    random_inputs,
)

CHECKS = (*attention_checks.BASIC_CHECKS, *attention_checks.FURTHER_CHECKS)
NAMES = tuple(check.__name__ for check in CHECKS)


@dataclass(frozen=True)
class ContractReport:
    """The result of the checks of a module.

    Args:
        module: The class of the module.
        passed: The names of the passed checks.
        failed: The failed checks, with the reason.
        exempt: The exempt checks, with the reason.

    Example:
        >>> failed = {"eval_is_deterministic": "the output differs by 0.1"}
        >>> report = ContractReport("Attend", ("rows_sum_to_one",), failed, {})
        >>> print(report)
        Attend passes 1 of 2 checks.
          failed: eval_is_deterministic: the output differs by 0.1
    """

    module: str
    passed: tuple[str, ...]
    failed: Mapping[str, str]
    exempt: Mapping[str, str]

    def __str__(self) -> str:
        total = len(self.passed) + len(self.failed)
        lines = [f"{self.module} passes {len(self.passed)} of {total} checks."]
        lines += [f"  failed: {name}: {why}" for name, why in self.failed.items()]
        lines += [f"  exempt: {name}: {why}" for name, why in self.exempt.items()]
        return "\n".join(lines)


def check_attention_module(
    module: nn.Module,
    attend: CallModule = default_call,
    sizes: InputSizes = InputSizes(),  # noqa: B008  frozen
    *,
    exempt: Mapping[str, str] | None = None,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
    checks: Sequence[Check] = CHECKS,
) -> ContractReport:
    """Check the contract of an attention module.

    Args:
        module: The module; it is neither run nor changed, only copies are.
        attend: How the module is called, from `AttentionInputs` to an output and an `AttentionMap`;
            `module(queries, keys, present)` by default.
        sizes: The features of its inputs.
        exempt: Checks that do not apply to this module, with the reason. An exempt check that
            passes counts as a failure, so that no exemption outlives its reason.
        unreached: Prefixes of the names of parameters that need no gradient.
        tolerance: The tolerance of comparisons.
        checks: The checks to run, such as all but those that compile.

    Returns:
        The report.

    Raises:
        AssertionError: A check failed; the message lists all failures.
        ValueError: `exempt` names an unknown check.

    Example:
        >>> from overt.testing.attention_checks import rows_sum_to_one
        >>> class Uniform(nn.Module):
        ...     def forward(self, queries, keys, present):
        ...         weights = present / present.sum(dim=-1, keepdim=True)
        ...         weights = weights[:, None, None].expand(-1, 1, queries.shape[1], -1)
        ...         return weights[:, 0] @ keys, weights
        >>> print(check_attention_module(Uniform(), checks=[rows_sum_to_one]))
        Uniform passes 1 of 1 checks.
    """
    report = examine_attention_module(
        module,
        attend,
        sizes,
        exempt=exempt,
        unreached=unreached,
        tolerance=tolerance,
        checks=checks,
    )
    if report.failed:
        raise AssertionError(str(report))
    return report


def examine_attention_module(
    module: nn.Module,
    attend: CallModule = default_call,
    sizes: InputSizes = InputSizes(),  # noqa: B008  frozen
    *,
    exempt: Mapping[str, str] | None = None,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
    checks: Sequence[Check] = CHECKS,
) -> ContractReport:
    """Run the checks of `check_attention_module` and return the report without raising.

    Args:
        module: The module; it is neither run nor changed, only copies are.
        attend: How the module is called, from `AttentionInputs` to an output and an `AttentionMap`;
            `module(queries, keys, present)` by default.
        sizes: The features of its inputs.
        exempt: Checks that do not apply to this module, with the reason. An exempt check that
            passes counts as a failure, so that no exemption outlives its reason.
        unreached: Prefixes of the names of parameters that need no gradient.
        tolerance: The tolerance of comparisons.
        checks: The checks to run, such as all but those that compile.

    Returns:
        The report.

    Raises:
        ValueError: `exempt` names an unknown check.

    Example:
        >>> from overt.testing.attention_checks import rows_sum_to_one
        >>> class Doubled(nn.Module):
        ...     def forward(self, queries, keys, present):
        ...         weights = 2 * present / present.sum(dim=-1, keepdim=True)
        ...         weights = weights[:, None, None].expand(-1, 1, queries.shape[1], -1)
        ...         return weights[:, 0] @ keys, weights
        >>> report = examine_attention_module(Doubled(), checks=[rows_sum_to_one])
        >>> report.failed
        {'rows_sum_to_one': 'the sum of a row differs from one by 1'}
    """
    excused = dict(exempt or {})
    unknown = sorted(set(excused) - set(NAMES))
    if unknown:
        raise ValueError(f"unknown check {unknown[0]!r}; available: {', '.join(NAMES)}")
    found: dict[str, str | None] = {}
    # the caller's generators, gradient mode and warnings are left as they were
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(),
        _without_shape_checks(),
    ):
        warnings.simplefilter("ignore")  # from compilers and gradient checks
        case = _make_case(module, attend, sizes, tuple(unreached), tolerance)
        if isinstance(case, str):
            found[NAMES[0]] = case
        else:
            for check in checks:
                found[check.__name__] = _run_check(check, case)
                # without an output and a map every further check would fail for the same reason
                if check in attention_checks.BASIC_CHECKS and found[check.__name__] is not None:
                    break  # the other checks need this one
    failed = {name: why for name, why in found.items() if why is not None and name not in excused}
    unneeded = [name for name in excused if name in found and found[name] is None]
    # an exemption that is not needed any more is an error: it would hide a later failure
    failed |= {name: f"it is exempt ({excused[name]}), but it passes" for name in unneeded}
    passed = tuple(name for name, why in found.items() if why is None and name not in excused)
    return ContractReport(type(module).__name__, passed, failed, excused)


def _make_case(
    module: nn.Module,
    attend: CallModule,
    sizes: InputSizes,
    unreached: tuple[str, ...],
    tolerance: float,
) -> AttentionCase | str:
    """Return the module with its first result, or why it could not be called."""
    # samples of different lengths, one without padding
    inputs = random_inputs(sizes, (2, 3), [6, 4, 2])
    try:
        fresh = copy.deepcopy(module).eval()
        output, attention = attend(copy.deepcopy(fresh), inputs.clone())
    except Exception as error:
        how = (
            "module(queries, keys, present)" if attend is default_call else "attend(module, inputs)"
        )
        return f"{how} failed ({_error_text(error)}); use `attend` to define the call"
    result = AttentionOutput(
        output.detach() if isinstance(output, Tensor) else output,
        attention.detach() if isinstance(attention, AttentionMap) else attention,
    )
    return AttentionCase(fresh, attend, sizes, inputs, result, unreached, tolerance)


@contextmanager
def _without_shape_checks() -> Iterator[None]:
    """Disable jaxtyping checks, which draw random numbers."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _run_check(check: Check, case: AttentionCase) -> str | None:
    try:
        return check(case)
    except Exception as error:  # a check fails if the module raises
        return _error_text(error)


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
