"""Attention attached to timm models reads the intermediate features of timm."""

from typing import Any

import pytest

from tests.parity.separate_packages import run_with_packages

FIRST, LAST, TOKENS = "channels first", "channels last", "tokens"
LEVELS: dict[str, list[list[Any]]] = {
    "ResNet": [[f"layer{at}", FIRST, 0] for at in (2, 3, 4)],
    "ConvNeXt": [[f"stages.{at}", FIRST, 0] for at in (1, 2, 3)],
    "EfficientNet": [[f"blocks.{at}", FIRST, 0] for at in (2, 3, 4)],
    "ViT": [[f"blocks.{at}", TOKENS, 1] for at in (1, 3, 5)],
    "ViT with registers": [[f"blocks.{at}", TOKENS, 5] for at in range(3)],
    "DeiT": [[f"blocks.{at}", TOKENS, 2] for at in range(3)],
    "Swin": [[f"layers.{at}", LAST, 0] for at in range(3)],
    "pyramid": [[f"[{at}]", FIRST, 0] for at in (2, 3, 4)],
}
each = pytest.mark.parametrize("name", LEVELS)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Return the output of timm_attached.py, run in a subprocess; it also runs `check_model`."""
    return run_with_packages("tests.parity.timm_attached")


@pytest.mark.long
@each
def test_levels_are_the_last_resolutions_or_evenly_spaced_blocks(
    rows: dict[str, Any], name: str
) -> None:
    assert rows[name]["levels"] == LEVELS[name]


@pytest.mark.long
@each
def test_the_last_level_equals_the_last_intermediate_features_of_timm(
    rows: dict[str, Any], name: str
) -> None:
    """Without class, distillation and register tokens, and with channels first."""
    assert rows[name]["intermediates"] == (None if name == "pyramid" else 0)


@pytest.mark.long
@each
def test_a_saved_model_is_restored_if_timm_can_build_it(rows: dict[str, Any], name: str) -> None:
    unusual = name in ("ViT with registers", "DeiT", "Swin")  # timm does not keep these settings
    assert rows[name]["library"] == (None if unusual else "timm")
    assert rows[name]["saved"] == 0


@pytest.mark.long
@each
def test_overt_look_uses_the_transform_of_timm(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    assert row["panels"] == (len(row["levels"]) if row["library"] else None)
