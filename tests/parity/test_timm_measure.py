"""`overt measure` on timm models: one with attention, and a convolutional one."""

from pathlib import Path

import pytest

from tests.parity.separate_packages import run_with_packages


@pytest.mark.long
def test_a_vit_has_attention_and_a_resnet_has_class_activation(tmp_path: Path) -> None:
    found = run_with_packages("tests.parity.timm_measure", str(tmp_path))
    vit, resnet = found["vit_tiny_patch16_224"], found["resnet10t"]
    assert vit["maps"][:2] == ["attention", "gradient"]
    assert "class activation" not in vit["maps"]
    assert {"deletion_area@mask", "output_change_evened"} <= set(vit["measures"])
    assert resnet["maps"][:2] == ["class activation", "gradient"]
    assert set(resnet["measures"]) == {"mass_inside", "deletion_area@mean"}
