"""Layers are found in every family, and what they are given fits the tokens that are left."""

import pytest
import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinModel,
)

from overt.models.thinning.layers import (
    at_places,
    averages,
    layers_of,
    seen_by_masks,
    thinned_arguments,
    tokens_layout,
)
from tests.models.thinning.encoders import MODELS, SMALL, WORDS, made, vit
from tests.models.thinning.tiny import layout

PLACES = torch.tensor([[0, 2, 5], [0, 3, -1]])


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found_in_order(name: str) -> None:
    model = made(name)
    found = layers_of(model)
    assert [int(one.rsplit(".", 1)[1]) for one in found] == [0, 1, 2, 3]
    assert all(model.get_submodule(one) is layer for one, layer in found.items())


def test_two_towers_are_ambiguous_and_each_alone_is_not() -> None:
    text = {name: value for name, value in WORDS.items() if name != "num_labels"}
    image = {name: value for name, value in SMALL.items() if name != "num_labels"}
    model = CLIPModel(
        CLIPConfig(text_config=CLIPTextConfig(**text), vision_config=CLIPVisionConfig(**image))
    )
    with pytest.raises(ValueError, match=r"2 lists of them.*give thin\(\) the part"):
        layers_of(model)
    assert len(layers_of(model.vision_model)) == 4


def test_models_without_such_layers_are_refused() -> None:
    swin = SwinModel(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2])
    )
    with pytest.raises(ValueError, match="inside windows"):
        layers_of(swin)
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])
    )
    with pytest.raises(ValueError, match="no such list"):
        layers_of(resnet)


def test_tokens_are_cells_and_what_stands_around_them() -> None:
    found = tokens_layout(made("DINOv2 with registers"), 41, (24, 24))
    assert [(span.name, span.shape) for span in found.spans] == [
        ("class", (1,)), ("registers", (4,)), ("image", (6, 6))
    ]  # fmt: skip
    wide = tokens_layout(vit(), 1 + 2 * 8, (8, 32))
    assert wide.find("image").shape == (2, 8)
    assert tokens_layout(vit(), 26, None).find("image").shape == (5, 5), "a square, unless known"
    with pytest.raises(ValueError, match="6 cells, which are not 2 x 2"):
        tokens_layout(vit(), 7, None)


def test_a_text_begins_with_its_class_token() -> None:
    found = tokens_layout(made("BERT"), 9, None)
    assert [(span.name, span.index) for span in found.spans] == [
        ("class", slice(0, 1)), ("text", slice(1, 9))
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 3, 6, 6), (2, 1, 1, 6), (1, 1, 6, 6)])
def test_a_bias_is_taken_at_rows_and_columns(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    found = at_places(bias, PLACES, 6)
    full = bias.expand(2, -1, -1, -1)
    for sample in range(2):
        for column, to in enumerate(PLACES[sample]):
            for row, at in enumerate(PLACES[sample][: found.shape[2]]):
                at = at if shape[2] == 6 else torch.tensor(0)
                expected = full[sample, :, at, to] if min(at, to) >= 0 else torch.zeros(shape[1])
                torch.testing.assert_close(found[sample, :, row, column], expected)


def test_a_token_without_a_place_sees_all() -> None:
    assert at_places(torch.zeros(1, 1, 6, 6, dtype=torch.bool), PLACES, 6)[1, 0, 2].all()


def test_arguments_that_are_no_masks_are_left_alone() -> None:
    states = torch.randn(2, 3, 6)  # as many features as tokens
    other = {"output_attentions": False, "scale": torch.tensor(2.0), "deep": torch.randn(2, 9, 7)}
    args, kwargs = thinned_arguments((states, None, 4), other, PLACES, layout(1, 5))
    assert args[0] is states and args[1:] == (None, 4)
    assert all(kwargs[name] is value for name, value in other.items())


def test_masks_and_rotations_follow_the_tokens() -> None:
    mask, turns = torch.rand(2, 6) > 0.5, torch.randn(5, 4)
    given = {"key_padding_mask": mask, "position_embeddings": (turns, turns + 1)}
    _, kwargs = thinned_arguments((), given, PLACES, layout(1, 5))
    assert torch.equal(kwargs["key_padding_mask"][0], mask[0, [0, 2, 5]])
    one, other = kwargs["position_embeddings"]
    assert one.shape == (2, 1, 2, 4), "the class token has none"
    torch.testing.assert_close(one[0, 0], turns[[1, 4]])
    torch.testing.assert_close(other[1, 0, 0], turns[2] + 1)


def test_one_mask_for_all_samples_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="the same for all samples"):
        thinned_arguments((torch.ones(6, 6),), {}, PLACES, layout(1, 5))


def test_masks_say_who_is_there() -> None:
    places = torch.arange(4).expand(2, 4)
    there = torch.tensor([[True, True, False, False], [True, True, True, True]])
    as_bool = there[:, None, None].expand(2, 1, 4, 4)
    as_scores = torch.zeros(2, 1, 1, 4).masked_fill(~there[:, None, None], -1e9)
    bias = torch.randn(1, 3, 4, 4)
    for mask in (as_bool, as_scores):
        found = seen_by_masks((torch.randn(2, 4, 8), mask), {"bias": bias}, places)
        assert found is not None and torch.equal(found, there)
    assert seen_by_masks((torch.randn(2, 4, 8), None), {}, places) is None


def test_heads_that_average_are_known() -> None:
    assert averages(made("DINOv2 with registers")) == "Dinov2WithRegistersForImageClassification"
    assert averages(made("ViT")) is None
    pooled = nn.Module()
    pooled.global_pool = "avg"
    assert averages(pooled) == "Module"
