"""Maps at image size, and their comparison with a mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.data.batch import Batch
from overt.metrics.segmentation import combine_levels, geometric_mean, product_of_levels
from overt.papers.ltpa.config import LtpaModel, LtpaNetwork
from overt.papers.ltpa.maps import (
    activation_maps,
    all_labels,
    all_maps,
    centre_prior,
    image_classifier,
    image_gradient,
    join_function,
    level_maps,
    mask_metrics,
    unit_images,
)
from overt.papers.ltpa.model import build_network
from overt.testing import toy_batch


def make_network(kind: LtpaNetwork = LtpaNetwork.VGG_ATTENTION, levels: int = 2) -> Any:
    torch.manual_seed(0)
    return build_network(LtpaModel(kind, levels=levels, width=0.05), 3).eval()


def test_unit_images_give_the_logits_of_the_uint8_images() -> None:
    model, batch = make_network(), toy_batch()
    assert batch.images is not None and not batch.images.is_floating_point()
    logits = image_classifier(model)(unit_images(batch))
    torch.testing.assert_close(logits, model(batch).prediction)


def test_level_maps_have_each_level_and_the_last_two_joined() -> None:
    output = make_network(levels=3)(toy_batch())
    found = level_maps(output.attention, (32, 32))
    assert list(found) == ["32x32", "16x16", "8x8", "joined"]
    torch.testing.assert_close(
        found["joined"], (found["16x16"] * found["8x8"]).sqrt(), check_dtype=False
    )
    assert list(level_maps(make_network(levels=1)(toy_batch()).attention, (32, 32))) == ["8x8"]
    assert level_maps((), (32, 32)) == {}


def test_gate_maps_are_joined_by_product_without_a_root() -> None:
    attention = make_network(LtpaNetwork.PAN)(toy_batch()).attention
    assert join_function(attention) is product_of_levels
    found = level_maps(attention, (32, 32))
    torch.testing.assert_close(found["joined"], found["16x16"] * found["8x8"])
    assert join_function(make_network()(toy_batch()).attention) is geometric_mean


def test_class_activation_maps_are_of_the_predicted_and_the_true_class() -> None:
    model, batch = make_network(LtpaNetwork.GAP), toy_batch()
    labels = (model(batch).prediction.argmax(dim=-1) + 1) % 3
    batch = replace(batch, labels=labels)
    found = all_maps(model, batch)
    features = model.encode(batch)
    for name, classes in (("cam_chosen", (labels + 2) % 3), ("cam_true", labels)):
        wanted = combine_levels([model.class_activation(features, classes)], (32, 32))
        torch.testing.assert_close(found[name], wanted)
    assert not torch.equal(found["cam_chosen"], found["cam_true"])


def test_the_image_gradient_is_that_of_the_predicted_logit() -> None:
    """The gradient of a linear classifier is its weights."""
    weight = torch.randn(4, 3 * 2 * 2, generator=torch.Generator().manual_seed(0))
    images = torch.rand(5, 3, 2, 2)
    with torch.no_grad():
        slope = image_gradient(lambda x: x.flatten(1) @ weight.T, images)
    chosen = (images.flatten(1) @ weight.T).argmax(dim=-1)
    torch.testing.assert_close(slope, weight[chosen].reshape(5, 3, 2, 2))


def test_gradient_maps_are_absolute_values_and_leave_no_gradients() -> None:
    model, batch = make_network(LtpaNetwork.VGG), toy_batch()
    with torch.no_grad():
        found = all_maps(model, batch)
    assert list(found) == ["gradient", "gradient_input", "centre", "uniform"]
    assert all(one.grad is None for one in model.parameters())
    slope = image_gradient(image_classifier(model), unit_images(batch))
    torch.testing.assert_close(found["gradient"], slope.abs().sum(dim=1).double())
    by_input = (slope * unit_images(batch)).sum(dim=1).abs().double()
    torch.testing.assert_close(found["gradient_input"], by_input)


def test_the_centre_prior_is_a_gaussian_at_the_centre() -> None:
    found = centre_prior((4, 6))
    torch.testing.assert_close(found, found.flip(0).flip(1))
    assert found.argmax() in (8, 9, 14, 15)
    assert float(found[0, 2] / found[1, 2]) == pytest.approx(
        torch.exp(torch.tensor((0.125**2 - 0.375**2) / (2 * 0.25**2))).item()
    )


def test_mask_metrics_equal_hand_computed_values() -> None:
    masks = torch.tensor([[[True, True], [False, False]]])
    maps = {
        "good": torch.tensor([[[0.6, 0.2], [0.1, 0.1]]], dtype=torch.float64),
        "signed": torch.tensor([[[-1.0, -3.0], [2.0, -1.0]]], dtype=torch.float64),
        "uniform": torch.ones(1, 2, 2, dtype=torch.float64),
    }
    found = {name: float(values[0]) for name, (_, values) in mask_metrics(maps, masks).items()}
    assert found["pointing_good"] == 1 and found["mass_good"] == pytest.approx(0.8)
    assert found["jaccard_good"] == 0.5  # Otsu keeps the one pixel of .6
    assert found["pointing_signed"] == 0 and found["mass_signed"] == 0
    assert found["jaccard_signed"] == 0  # only the pixel of 2, which is outside
    assert found["pointing_uniform"] == found["mass_uniform"] == 0.5
    assert "jaccard_uniform" not in found


def test_all_labels_joins_batches() -> None:
    batches = [
        Batch(("a", "b"), labels=torch.tensor([1, 2])),
        Batch(("c",), labels=torch.tensor([0])),
    ]
    assert all_labels(batches).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (LtpaNetwork.VGG_ATTENTION, ["16x16", "8x8", "joined"]),
        (LtpaNetwork.PAN, ["8x8"]),
        (LtpaNetwork.GAP, ["8x8"]),
        (LtpaNetwork.VGG, []),
        (LtpaNetwork.RESNET, []),
    ],
)
def test_activation_maps_are_sums_of_squares_of_each_level(
    kind: LtpaNetwork, names: list[str]
) -> None:
    torch.manual_seed(0)
    model: Any = build_network(LtpaModel(kind, width=0.05, blocks=1), 3).eval()
    features = model.encode(toy_batch())
    found = activation_maps(model, features, (32, 32))
    assert list(found) == [f"activation_{name}" for name in names]
    if kind is LtpaNetwork.VGG_ATTENTION:
        for cells, side in zip(features.cells, (16, 8), strict=True):
            squares = cells.values.square().sum(dim=-1).reshape(-1, 1, side, side)
            large = torch.nn.functional.interpolate(
                squares.double(), (32, 32), mode="bilinear", align_corners=False
            )[:, 0]
            one = found[f"activation_{side}x{side}"]
            torch.testing.assert_close(
                one / one.sum(dim=(1, 2), keepdim=True),
                large / large.sum(dim=(1, 2), keepdim=True),
                rtol=1e-4,
                atol=1e-7,
                check_dtype=False,
            )
        torch.testing.assert_close(
            found["activation_joined"],
            (found["activation_16x16"] * found["activation_8x8"]).sqrt(),
            check_dtype=False,
        )
