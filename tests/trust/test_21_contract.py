"""Trust 21: the checks of attention modules pass for all modules and fail for broken ones."""

from pathlib import Path

import pytest
import torch

from overt.testing import attention_checks, check_attention_module, examine_attention_module
from overt.testing.attention import CHECKS, NAMES
from tests.testing.attention_modules import EXCLUDED, MODULES, attention_classes
from tests.testing.broken import BROKEN, CorrectAttention

TESTS = Path(__file__).resolve().parents[1]
QUICK = tuple(check for check in CHECKS if check not in attention_checks.SLOW_CHECKS)


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable shape checks, as for users; the compiler does not support them."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.long
def test_every_attention_module_passes_every_check(record_result, full):
    passed = 0
    for name, face in MODULES.items():
        torch.manual_seed(0)
        checks = CHECKS if full else QUICK
        exempt = {one: why for one, why in face.exempt.items() if full or one in _names(QUICK)}
        report = check_attention_module(
            face.make(), face.attend, face.sizes, exempt=exempt, checks=checks
        )
        assert len(report.passed) + len(report.exempt) == len(checks), name
        passed += len(report.passed)
    exempted = sum(len(face.exempt) for face in MODULES.values())
    record_result(
        21,
        "at least 25 checks, passed by every module",
        f"{len(CHECKS)} checks on {len(MODULES)} modules, all passed except {exempted} that do not "
        "apply, each with its reason",
    )


@pytest.mark.long
def test_every_attention_module_compiles_and_exports():
    for name, face in MODULES.items():
        torch.manual_seed(0)
        checks = attention_checks.SLOW_CHECKS
        exempt = {one: why for one, why in face.exempt.items() if one in _names(checks)}
        report = examine_attention_module(
            face.make(), face.attend, face.sizes, exempt=exempt, checks=checks
        )
        assert not report.failed, f"{name}: {report}"


def test_every_attention_module_is_checked():
    """Every attention class is checked here, or is a model that is checked in its tests."""
    checked = {type(face.make()).__name__ for face in MODULES.values()}
    models = "\n".join(
        text
        for text in (path.read_text() for path in TESTS.rglob("test_*.py"))
        if "check_model(" in text or "check_decoder(" in text
    )
    found = list(attention_classes())
    unchecked = [
        f"{one.place}: {one.name}"
        for one in found
        if not (one.name in checked or one.name in EXCLUDED or (one.model and one.name in models))
    ]
    assert unchecked == [], "attention modules without checks"
    names = {one.name for one in found}
    assert {"SoftAttention", "HardAttention", "WordAttention", "BertSelfAttention"} <= names
    assert names >= set(EXCLUDED), "reasons for removed classes"


@pytest.mark.long
def test_each_broken_module_fails_exactly_its_check(record_result, full):
    assert tuple(BROKEN) == NAMES
    found = 0
    for name, broken in BROKEN.items():
        torch.manual_seed(0)
        checks = tuple(check for check in CHECKS if check in QUICK or check.__name__ == name)
        report = examine_attention_module(broken(), checks=CHECKS if full else checks)
        assert list(report.failed) == [name], f"{broken.__name__}: {report}"
        found += 1
    torch.manual_seed(0)
    assert not examine_attention_module(CorrectAttention()).failed
    record_result(
        21,
        "two broken modules fail",
        f"{found} of {len(BROKEN)} broken modules found, each only by its check",
    )


def _names(checks):
    return {check.__name__ for check in checks}
