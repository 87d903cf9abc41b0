"""Encoder layers: found in every family; their masks and positions follow the kept tokens."""

import pytest
import torch
from torch import Tensor, nn
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

from overt.nn.token_pruning.encoder_layers import (
    encoder_layers,
    find_mean_pooling,
    index_mask,
    prune_arguments,
    token_layout,
    visible_tokens,
)
from tests.nn.token_pruning.encoders import MODELS, SMALL, WORDS, make_model, vit
from tests.nn.token_pruning.tiny import layout

POSITIONS = torch.tensor([[0, 2, 5], [0, 3, -1]])


@pytest.mark.parametrize("name", MODELS)
def test_encoder_layers_are_found_in_order(name: str) -> None:
    model = make_model(name)
    found = encoder_layers(model)
    assert [int(one.rsplit(".", 1)[1]) for one in found] == [0, 1, 2, 3]
    assert all(model.get_submodule(one) is layer for one, layer in found.items())


def test_two_towers_raise_and_one_tower_does_not() -> None:
    text = {name: value for name, value in WORDS.items() if name != "num_labels"}
    image = {name: value for name, value in SMALL.items() if name != "num_labels"}
    model = CLIPModel(
        CLIPConfig(text_config=CLIPTextConfig(**text), vision_config=CLIPVisionConfig(**image))
    )
    with pytest.raises(ValueError, match=r"2: .*submodule"):
        encoder_layers(model)
    assert len(encoder_layers(model.vision_model)) == 4


def test_models_without_encoder_layers_raise() -> None:
    swin = SwinModel(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2])
    )
    with pytest.raises(ValueError, match="windowed attention"):
        encoder_layers(swin)
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])
    )
    with pytest.raises(ValueError, match="found 0"):
        encoder_layers(resnet)


def test_image_token_layout_has_special_tokens_and_cells() -> None:
    found = token_layout(make_model("DINOv2 with registers"), 41, (24, 24))
    assert [(span.name, span.shape) for span in found.spans] == [
        ("class", (1,)), ("registers", (4,)), ("image", (6, 6))
    ]  # fmt: skip
    wide = token_layout(vit(), 1 + 2 * 8, (8, 32))
    assert wide.find("image").shape == (2, 8)
    assert token_layout(vit(), 26, None).find("image").shape == (5, 5), "square by default"
    with pytest.raises(ValueError, match=r"6 cells.* 2 x 2"):
        token_layout(vit(), 7, None)


def test_text_token_layout_begins_with_the_class_token() -> None:
    found = token_layout(make_model("BERT"), 9, None)
    assert [(span.name, span.index) for span in found.spans] == [
        ("class", slice(0, 1)), ("text", slice(1, 9))
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 3, 6, 6), (2, 1, 1, 6), (1, 1, 6, 6)])
def test_index_mask_selects_rows_and_columns(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    found = index_mask(bias, POSITIONS, 6)
    full = bias.expand(2, -1, -1, -1)
    for sample in range(2):
        for column, to in enumerate(POSITIONS[sample]):
            for row, at in enumerate(POSITIONS[sample][: found.shape[2]]):
                at = at if shape[2] == 6 else torch.tensor(0)
                expected = full[sample, :, at, to] if min(at, to) >= 0 else torch.zeros(shape[1])
                torch.testing.assert_close(found[sample, :, row, column], expected)


def test_padding_token_sees_all_tokens() -> None:
    assert index_mask(torch.zeros(1, 1, 6, 6, dtype=torch.bool), POSITIONS, 6)[1, 0, 2].all()


def test_arguments_that_are_not_masks_are_unchanged() -> None:
    states = torch.randn(2, 3, 6)  # as many features as tokens
    other = {"output_attentions": False, "scale": torch.tensor(2.0), "deep": torch.randn(2, 9, 7)}
    args, kwargs = prune_arguments((states, None, 4), other, POSITIONS, layout(1, 5))
    assert args[0] is states and args[1:] == (None, 4)
    assert all(kwargs[name] is value for name, value in other.items())


def test_masks_and_rotary_embeddings_follow_the_kept_tokens() -> None:
    mask, turns = torch.rand(2, 6) > 0.5, torch.randn(5, 4)
    given = {"key_padding_mask": mask, "position_embeddings": (turns, turns + 1)}
    _, kwargs = prune_arguments((), given, POSITIONS, layout(1, 5))
    assert torch.equal(kwargs["key_padding_mask"][0], mask[0, [0, 2, 5]])
    one, other = kwargs["position_embeddings"]
    assert one.shape == (2, 1, 2, 4), "the class token has none"
    torch.testing.assert_close(one[0, 0], turns[[1, 4]])
    torch.testing.assert_close(other[1, 0, 0], turns[2] + 1)


def test_one_mask_for_all_samples_raises() -> None:
    with pytest.raises(NotImplementedError, match=r"shared.*samples"):
        prune_arguments((torch.ones(6, 6),), {}, POSITIONS, layout(1, 5))


def test_visible_tokens_are_read_from_masks() -> None:
    places = torch.arange(4).expand(2, 4)
    there = torch.tensor([[True, True, False, False], [True, True, True, True]])
    as_bool = there[:, None, None].expand(2, 1, 4, 4)
    as_scores = torch.zeros(2, 1, 1, 4).masked_fill(~there[:, None, None], -1e9)
    bias = torch.randn(1, 3, 4, 4)
    for mask in (as_bool, as_scores):
        found = visible_tokens((torch.randn(2, 4, 8), mask), {"bias": bias}, places)
        assert found is not None and torch.equal(found, there)
    assert visible_tokens((torch.randn(2, 4, 8), None), {}, places) is None


def test_mean_pooling_heads_are_found() -> None:
    assert (
        find_mean_pooling(make_model("DINOv2 with registers"))
        == "Dinov2WithRegistersForImageClassification"
    )
    assert find_mean_pooling(make_model("ViT")) is None
    pooled = nn.Module()
    pooled.global_pool = "avg"
    assert find_mean_pooling(pooled) == "Module"


def test_torchscript_layers_raise() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
            self.layers = nn.ModuleList(made)

        def forward(self, tokens: Tensor) -> Tensor:
            for layer in self.layers:
                tokens = layer(tokens)
            return tokens

    model = Encoder().eval()
    assert list(encoder_layers(model)) == ["layers.0", "layers.1"]
    with pytest.raises(ValueError, match=r"'the model'.*TorchScript"):
        encoder_layers(torch.jit.script(model))
    model.layers[1] = torch.jit.script(model.layers[1])
    with pytest.raises(ValueError, match=r"'layers\.1'.*TorchScript"):
        encoder_layers(model)
    kept = Encoder().eval()
    kept.head = torch.jit.script(nn.Linear(8, 2))  # a scripted part without attention is allowed
    assert len(encoder_layers(kept)) == 2
