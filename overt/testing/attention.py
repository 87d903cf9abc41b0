"""The contract of a module that attends: every promise asked, every broken one told."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jaxtyping
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.testing import attending
from overt.testing.attending import Check
from overt.testing.given import Answer, Attend, Case, Sizes, plainly, random_given

CHECKS = (*attending.FIRST, *attending.THEN)
NAMES = tuple(check.__name__ for check in CHECKS)


@dataclass(frozen=True)
class Report:
    """What came of the checks of a module: names, and for each broken promise a sentence."""

    module: str
    passed: tuple[str, ...]
    failed: Mapping[str, str]
    exempt: Mapping[str, str]

    def __str__(self) -> str:
        asked = len(self.passed) + len(self.failed)
        lines = [f"{self.module} keeps {len(self.passed)} of {asked} promises."]
        lines += [f"  broken: {name}: {why}" for name, why in self.failed.items()]
        lines += [f"  exempt: {name}: {why}" for name, why in self.exempt.items()]
        return "\n".join(lines)


def check_attention_module(
    module: nn.Module,
    attend: Attend = plainly,
    sizes: Sizes = Sizes(),  # noqa: B008  frozen
    *,
    exempt: Mapping[str, str] | None = None,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
    checks: Sequence[Check] = CHECKS,
) -> Report:
    """Raise an AssertionError that lists every promise a module breaks; else what was asked.

    `attend` says how it is called, from a `Given` to an output and an `AttentionMap`; without it
    `module(queries, keys, present)`. `sizes` are the features it takes. `exempt` names checks that
    do not hold for this kind of module, each with the reason; one that is kept after all is a
    broken promise too, so that no excuse outlives its reason. `unreached` are the beginnings of the
    names of parameters that need no gradient. `checks` may be fewer, such as all but those that
    compile. The module itself is not run and not changed.
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
    attend: Attend = plainly,
    sizes: Sizes = Sizes(),  # noqa: B008  frozen
    *,
    exempt: Mapping[str, str] | None = None,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
    checks: Sequence[Check] = CHECKS,
) -> Report:
    """What `check_attention_module` finds, without raising."""
    excused = dict(exempt or {})
    unknown = sorted(set(excused) - set(NAMES))
    if unknown:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(NAMES)}")
    found: dict[str, str | None] = {}
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(),
        _without_shape_checks(),
    ):
        warnings.simplefilter("ignore")  # of compilers and gradient checks
        case = _case(module, attend, sizes, tuple(unreached), tolerance)
        if isinstance(case, str):
            found[NAMES[0]] = case
        else:
            for check in checks:
                found[check.__name__] = _asked(check, case)
                if check in attending.FIRST and found[check.__name__] is not None:
                    break  # nothing else can be said
    failed = {name: why for name, why in found.items() if why is not None and name not in excused}
    kept = [name for name in excused if name in found and found[name] is None]
    failed |= {name: f"it is exempt ({excused[name]}), and it is kept" for name in kept}
    passed = tuple(name for name, why in found.items() if why is None and name not in excused)
    return Report(type(module).__name__, passed, failed, excused)


def _case(
    module: nn.Module, attend: Attend, sizes: Sizes, unreached: tuple[str, ...], tolerance: float
) -> Case | str:
    """The module and its first answer, or why there is none."""
    given = random_given(sizes, (2, 3), [6, 4, 2])
    try:
        fresh = copy.deepcopy(module).eval()
        output, attention = attend(copy.deepcopy(fresh), given.clone())
    except Exception as error:
        how = "module(queries, keys, present)" if attend is plainly else "attend(module, given)"
        return f"{how} could not be called ({_told(error)}); `attend` says how a module is called"
    answer = Answer(
        output.detach() if isinstance(output, Tensor) else output,
        attention.detach() if isinstance(attention, AttentionMap) else attention,
    )
    return Case(fresh, attend, sizes, given, answer, unreached, tolerance)


@contextmanager
def _without_shape_checks() -> Iterator[None]:
    """Shapes of signatures go unchecked: who checks them draws random numbers to do so."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def _asked(check: Check, case: Case) -> str | None:
    try:
        return check(case)
    except Exception as error:  # a module that raises breaks the promise it was asked for
        return _told(error)


def _told(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:160]}" if said else type(error).__name__
