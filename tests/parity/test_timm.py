"""Captured maps of timm models equal the weights in use, with fused attention on and off.

`make .venv/.apart` installs timm and torchvision into .venv/timm, which only these tests use.
"""

from typing import Any

import pytest

from tests.parity.separate_packages import run_with_packages
from tests.parity.timm_maps import MODELS


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Return the output of timm_maps.py, run in a subprocess."""
    return run_with_packages("tests.parity.timm_maps")


@pytest.mark.long
@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_maps_equal_the_weights_in_use(rows: dict[str, Any], name: str, path: str) -> None:
    row = rows[f"{name}, {path}"]
    assert row["captured"] == row["modules"], "one map per attention module, in order"
    assert row["own"] == len(row["captured"])
    assert row["difference"] <= 1e-6
    assert row["slope"] <= 1e-5, "the gradient through all maps to the pixels"
    assert row["output"] <= 2e-6, "the output equals that without capture"
    assert row["largest"] > 0.4, "a uniform map would not test this"


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_fused_attention_stays_fused(rows: dict[str, Any], name: str) -> None:
    routes = rows[f"{name}, fused"]["routes"]
    if name.startswith("Swin v2"):
        assert routes == ["SOFTMAX"], "timm does not fuse it"
    elif name.startswith("CaiT"):
        assert routes == ["SDPA", "SOFTMAX"], (
            "its talking heads cannot be fused, its last layers are"
        )
    else:
        assert routes == ["SDPA"]
    assert rows[f"{name}, explicit"]["routes"] == ["SOFTMAX"]


@pytest.mark.long
@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_only_talking_heads_have_signed_maps(rows: dict[str, Any], path: str) -> None:
    for name in MODELS:
        row = rows[f"{name}, {path}"]
        signed = [module for module, kind in row["kinds"].items() if kind == "SIGNED"]
        if name.startswith("CaiT"):
            assert signed == ["blocks.0.attn", "blocks.1.attn"]
            assert row["lowest"] < 0, "heads are mixed with weights of both signs"
        else:
            assert signed == []
            assert row["lowest"] >= 0
