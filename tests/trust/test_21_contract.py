"""Trust 21: a public contract for attention modules, kept by ours and told by broken ones."""

from pathlib import Path

import pytest
import torch

from overt.testing import attending, check_attention_module, examine_attention_module
from overt.testing.attention import CHECKS, NAMES
from tests.testing.broken import BROKEN, Honest
from tests.testing.shipped import APART, FACES
from tests.testing.shipped import attending as attending_classes

TESTS = Path(__file__).resolve().parents[1]
QUICK = tuple(check for check in CHECKS if check not in attending.SLOW)


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes in signatures are not checked for users, and a compiler would trip over it."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


def test_every_attention_module_shipped_keeps_every_promise(reached, full):
    kept = 0
    for name, face in FACES.items():
        torch.manual_seed(0)
        checks = CHECKS if full else QUICK
        exempt = {one: why for one, why in face.exempt.items() if full or one in _names(QUICK)}
        report = check_attention_module(
            face.make(), face.attend, face.sizes, exempt=exempt, checks=checks
        )
        assert len(report.passed) + len(report.exempt) == len(checks), name
        kept += len(report.passed)
    excused = sum(len(face.exempt) for face in FACES.values())
    reached(
        21,
        "25 checks or more, kept by every module shipped",
        f"{len(CHECKS)} checks on {len(FACES)} modules, all kept but for {excused} that do not "
        "apply, each with its reason",
    )


@pytest.mark.long
def test_every_attention_module_shipped_compiles_and_exports():
    for name, face in FACES.items():
        torch.manual_seed(0)
        checks = attending.SLOW
        exempt = {one: why for one, why in face.exempt.items() if one in _names(checks)}
        report = examine_attention_module(
            face.make(), face.attend, face.sizes, exempt=exempt, checks=checks
        )
        assert not report.failed, f"{name}: {report}"


def test_no_attention_module_is_forgotten():
    """A new class that attends is asked here, or is a model whose own test asks it."""
    asked = {type(face.make()).__name__ for face in FACES.values()}
    models = "\n".join(
        text
        for text in (path.read_text() for path in TESTS.rglob("test_*.py"))
        if "check_model(" in text or "check_decoder(" in text
    )
    found = list(attending_classes())
    forgotten = [
        f"{one.place}: {one.name}"
        for one in found
        if not (one.name in asked or one.name in APART or (one.model and one.name in models))
    ]
    assert forgotten == [], "attend, and no contract is asked of them"
    names = {one.name for one in found}
    assert {"SoftAttention", "HardAttention", "WordAttention", "SelfAttention"} <= names
    assert names >= set(APART), "reasons for classes that are gone"


@pytest.mark.long
def test_for_every_promise_a_module_that_breaks_it_and_no_other(reached, full):
    assert tuple(BROKEN) == NAMES
    told = 0
    for name, broken in BROKEN.items():
        torch.manual_seed(0)
        own = tuple(check for check in CHECKS if check in QUICK or check.__name__ == name)
        report = examine_attention_module(broken(), checks=CHECKS if full else own)
        assert list(report.failed) == [name], f"{broken.__name__}: {report}"
        told += 1
    torch.manual_seed(0)
    assert not examine_attention_module(Honest()).failed
    reached(
        21,
        "two broken modules fail",
        f"{told} of {len(BROKEN)} broken modules found, each by the check of its promise alone",
    )


def _names(checks):
    return {check.__name__ for check in checks}
