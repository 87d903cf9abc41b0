"""Grad-CAM, its image, its variants and the imputation of ROAD equal those of pytorch-grad-cam.

`make .venv/.apart` installs pytorch-grad-cam next to timm, in a folder that only this uses.
"""

from typing import Any

import pytest

from tests.parity.separate_packages import run_with_packages

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Return the output of grad_cams.py, run in a subprocess."""
    packages = ("pytorch_grad_cam", "torchvision", "timm", "cv2")
    return run_with_packages("tests.parity.grad_cams", packages=packages)


@pytest.mark.parametrize(("layer", "shape"), [("fine", [8, 12]), ("coarse", [4, 6])])
def test_cells_equal_those_of_pytorch_grad_cam(
    rows: dict[str, Any], layer: str, shape: Any
) -> None:
    assert rows[layer]["shape"] == shape
    assert rows[layer]["cells"] <= 1e-6


@pytest.mark.parametrize("layer", ["fine", "coarse"])
def test_pixels_equal_those_of_pytorch_grad_cam(rows: dict[str, Any], layer: str) -> None:
    """Theirs are resized by OpenCV, ours are painted with the geometry of the cells."""
    assert rows[layer]["picture"] <= 1e-6


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit_tiny_patch16_224", [4, 6]),
        ("deit_tiny_distilled_patch16_224", [4, 6]),
        ("vit_small_patch14_reg4_dinov2", [4, 6]),
        ("swin_tiny_patch4_window7_224", [2, 3]),
    ],
)
def test_transformer_cells_equal_those_of_pytorch_grad_cam(
    rows: dict[str, Any], name: str, shape: Any
) -> None:
    """Theirs needs a function to reshape tokens; ours finds cells, class tokens and registers."""
    assert rows[name]["shape"] == shape
    assert rows[name]["cells"] <= 1e-6


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *(("grad-cam++ cnn", 1e-4), ("grad-cam++ vit", 1e-4)),
        *(("hires-cam cnn", 1e-6), ("hires-cam vit", 1e-5)),
        *(("layer-cam cnn", 1e-6), ("layer-cam vit", 1e-5), ("score-cam cnn", 1e-5)),
    ],
)
def test_variants_equal_those_of_pytorch_grad_cam(
    rows: dict[str, Any], name: str, tolerance: float
) -> None:
    assert rows["variants"][name] <= tolerance


def test_imputed_pixels_equal_those_of_pytorch_grad_cam(rows: dict[str, Any]) -> None:
    assert rows["imputed"] <= 1e-6
