"""Maps of one size: what they are made of, and how they are held against a mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt import measure
from overt.data.batch import Batch
from overt.recipes.ltpa.building import network
from overt.recipes.ltpa.maps import (
    centre,
    classifier,
    found_by,
    from_0_to_1,
    image_gradient,
    join_of,
    labels_of,
    levels,
    maps_of,
)
from overt.recipes.ltpa.recipe import Model, Net
from overt.testing import toy_batch


def net(kind: Net = Net.VGG_ATTENTION, levels: int = 2) -> Any:
    torch.manual_seed(0)
    return network(Model(kind, levels=levels, width=0.05), 3).eval()


def test_numbers_from_0_to_1_are_the_bytes_of_the_batch() -> None:
    model, batch = net(), toy_batch()
    assert batch.images is not None and not batch.images.is_floating_point()
    logits = classifier(model)(from_0_to_1(batch))
    torch.testing.assert_close(logits, model(batch).prediction)


def test_every_level_and_the_last_two_joined() -> None:
    output = net(levels=3)(toy_batch())
    found = levels(output.attention, (32, 32))
    assert list(found) == ["32x32", "16x16", "8x8", "joined"]
    torch.testing.assert_close(
        found["joined"], (found["16x16"] * found["8x8"]).sqrt(), check_dtype=False
    )
    assert list(levels(net(levels=1)(toy_batch()).attention, (32, 32))) == ["8x8"]
    assert levels((), (32, 32)) == {}


def test_a_gate_is_multiplied_without_a_root() -> None:
    attention = net(Net.PAN)(toy_batch()).attention
    assert join_of(attention) is measure.product
    found = levels(attention, (32, 32))
    torch.testing.assert_close(found["joined"], found["16x16"] * found["8x8"])
    assert join_of(net()(toy_batch()).attention) is measure.root_of_product


def test_class_activations_are_of_the_chosen_and_of_the_right_class() -> None:
    model, batch = net(Net.GAP), toy_batch()
    labels = (model(batch).prediction.argmax(dim=-1) + 1) % 3
    batch = replace(batch, labels=labels)
    found = maps_of(model, batch)
    features = model.encode(batch)
    for name, classes in (("cam_chosen", (labels + 2) % 3), ("cam_true", labels)):
        wanted = measure.combined([model.class_activation(features, classes)], (32, 32))
        torch.testing.assert_close(found[name], wanted)
    assert not torch.equal(found["cam_chosen"], found["cam_true"])


def test_the_gradient_is_that_of_the_chosen_logit() -> None:
    """A linear classifier has its weights as gradient."""
    weight = torch.randn(4, 3 * 2 * 2, generator=torch.Generator().manual_seed(0))
    images = torch.rand(5, 3, 2, 2)
    with torch.no_grad():
        slope = image_gradient(lambda x: x.flatten(1) @ weight.T, images)
    chosen = (images.flatten(1) @ weight.T).argmax(dim=-1)
    torch.testing.assert_close(slope, weight[chosen].reshape(5, 3, 2, 2))


def test_the_gradients_leave_no_trace_and_take_the_size_of_a_change() -> None:
    model, batch = net(Net.VGG), toy_batch()
    with torch.no_grad():
        found = maps_of(model, batch)
    assert list(found) == ["gradient", "gradient_input", "centre", "uniform"]
    assert all(one.grad is None for one in model.parameters())
    slope = image_gradient(classifier(model), from_0_to_1(batch))
    torch.testing.assert_close(found["gradient"], slope.abs().sum(dim=1).double())
    by_input = (slope * from_0_to_1(batch)).sum(dim=1).abs().double()
    torch.testing.assert_close(found["gradient_input"], by_input)


def test_the_centre_is_a_bell_in_the_middle() -> None:
    found = centre((4, 6))
    torch.testing.assert_close(found, found.flip(0).flip(1))
    assert found.argmax() in (8, 9, 14, 15)
    assert float(found[0, 2] / found[1, 2]) == pytest.approx(
        torch.exp(torch.tensor((0.125**2 - 0.375**2) / (2 * 0.25**2))).item()
    )


def test_maps_against_a_mask_worked_out_by_hand() -> None:
    masks = torch.tensor([[[True, True], [False, False]]])
    maps = {
        "good": torch.tensor([[[0.6, 0.2], [0.1, 0.1]]], dtype=torch.float64),
        "signed": torch.tensor([[[-1.0, -3.0], [2.0, -1.0]]], dtype=torch.float64),
        "uniform": torch.ones(1, 2, 2, dtype=torch.float64),
    }
    found = {name: float(values[0]) for name, (_, values) in found_by(maps, masks).items()}
    assert found["pointing_good"] == 1 and found["mass_good"] == pytest.approx(0.8)
    assert found["jaccard_good"] == 0.5  # Otsu keeps the one pixel of .6
    assert found["pointing_signed"] == 0 and found["mass_signed"] == 0
    assert found["jaccard_signed"] == 0  # the pixel of 2 alone, which is outside
    assert found["pointing_uniform"] == found["mass_uniform"] == 0.5
    assert "jaccard_uniform" not in found


def test_labels_of_several_batches() -> None:
    batches = [
        Batch(("a", "b"), labels=torch.tensor([1, 2])),
        Batch(("c",), labels=torch.tensor([0])),
    ]
    assert labels_of(batches).tolist() == [1, 2, 0]
