"""Pruned timm models equal models with hidden tokens, with position biases and rotations too.

`make .venv/.apart` installs timm and torchvision into .venv/timm, which only these tests use.
"""

from typing import Any

import pytest

from tests.parity.separate_packages import run_with_packages
from tests.parity.timm_pruning import MODELS


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Return the output of timm_pruning.py, run in a subprocess."""
    return run_with_packages("tests.parity.timm_pruning")


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_keeping_all_tokens_equals_the_unchanged_model(rows: dict[str, Any], name: str) -> None:
    assert rows[name]["all"] == rows[name]["merge none"] == 0
    assert rows[name]["after"] == 0, "the model is unchanged afterwards"


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_pruning_equals_hiding_the_removed_tokens(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    for rule in ("half", "adaptive"):
        assert row[rule] <= 1e-5
        assert row[f"{rule} moved"] > 0.1, "tokens without effect would not test this"
        assert row[f"{rule} lengths"][-1] < row[f"{rule} lengths"][0]
    assert len(set(row["half kept"])) == 1 and len(set(row["adaptive kept"])) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_merging_shortens_the_sequence(rows: dict[str, Any], name: str) -> None:
    n = rows[name]["merged lengths"][0]
    assert rows[name]["merged"] and rows[name]["merged lengths"] == [n, n - 3, n - 6]


@pytest.mark.long
def test_class_and_register_tokens_are_found(rows: dict[str, Any]) -> None:
    assert rows["DeiT"]["spans"] == ["class", "distillation", "image"]
    assert rows["ViT with registers, normed queries"]["spans"] == ["class", "registers", "image"]
    assert rows["ViT with pooling by attention"]["spans"] == ["image"]


@pytest.mark.long
def test_explicit_attention_can_be_pruned(rows: dict[str, Any]) -> None:
    assert rows["explicit"] <= 1e-5
    assert "adds a position bias" in rows["rejected"]
    assert "leave out rest=" in rows["EVA-02 (rotated)"]["fused"]
