"""Inputs of Hugging Face models made from batches, and the inferred layouts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTModel,
)

from overt.attention import Layout
from overt.data.batch import Batch
from overt.nn.wrappers.hf_inputs import (
    extract_prediction,
    infer_layout,
    inputs_by_name,
    make_predict,
)
from overt.nn.wrappers.wrapped_model import wrap
from overt.testing import check_model, toy_batch
from tests.nn import tiny


def test_inputs_are_selected_by_argument_names_of_the_model() -> None:
    batch = toy_batch()
    text = inputs_by_name(batch, ("input_ids", "attention_mask", "token_type_ids"))
    assert (
        set(text) == {"input_ids", "attention_mask"} and text["attention_mask"].dtype == torch.long
    )
    image = inputs_by_name(batch, ("pixel_values", "attention_mask"))
    assert set(image) == {"pixel_values"}  # a mask of words is not a mask of patches
    assert torch.equal(image["pixel_values"], batch.images[[0, 1, 2, 2]])
    pixels = torch.zeros(1, 3, 2, 2)
    assert inputs_by_name(pixels, ("pixel_values", "labels")) == {"pixel_values": pixels}
    given = {"x": 1, "labels": 2, "other": 3, "none": None}
    assert inputs_by_name(given, ("x", "labels", "none")) == {"x": 1}


def test_uint8_images_are_normalized_as_the_processor_does() -> None:
    batch, model = toy_batch(), tiny.vit().eval()
    found = make_predict(tiny.TinyProcessor())(model, batch)
    torch.testing.assert_close(found, model(tiny.pixels(batch)).logits)
    ready = replace(batch, images=tiny.pixels(batch), image_of=None, geometry=None)
    torch.testing.assert_close(make_predict(None)(model, ready), found)


def test_batch_without_inputs_for_the_model_raises() -> None:
    with pytest.raises(ValueError, match="pixel_values"):
        make_predict(None)(tiny.vit(), Batch(("a",)))


def test_extract_prediction_of_model_outputs() -> None:
    tensor = torch.ones(2, 3)
    assert extract_prediction(tensor) is tensor

    class Output:
        logits = None
        pooler_output = tensor

    assert extract_prediction(Output()) is tensor
    with pytest.raises(ValueError, match=r"dict.*logits"):
        extract_prediction({})


# --- layouts --------------------------------------------------------------------------------


class Tokenizer:
    """Token 3 begins a text and token 4 ends it."""

    cls_token_id = 3
    all_special_ids = (3, 4)
    unk_token_id = None


def spans(layout: Any) -> dict[str, Any]:
    return {span.name: span for span in layout.spans}


def test_layout_of_a_vision_model_has_a_class_token_and_cells_with_geometry() -> None:
    batch = toy_batch()
    found = spans(infer_layout(tiny.vit(), batch))
    assert found["class"].index == slice(0, 1) and found["image"].index == slice(1, 17)
    assert found["image"].shape == (4, 4) and len(found["image"].geometry) == 4
    output = wrap(tiny.vit(), processor=tiny.TinyProcessor())(batch)
    assert output.attention_to("image").keys.find("image").shape == (4, 4)


def test_layout_of_a_text_model_has_class_token_words_and_special_tokens() -> None:
    tokens = torch.tensor([[3, 5, 6, 7, 4, 0], [0, 3, 8, 9, 10, 4]])
    present = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    batch = replace(toy_batch(2), tokens=tokens, token_mask=present)
    found = spans(infer_layout(tiny.bert(), batch, tokenizer=Tokenizer()))
    assert found["class"].index.tolist() == [[0], [1]]
    assert found["text"].index.tolist() == [[-1, 1, 2, 3, -1, -1], [-1, -1, 2, 3, 4, -1]]
    assert found["special"].index.tolist() == [[4], [5]]  # the class token is in one span only
    assert found["text"].geometry is batch.text  # each word in a separate column
    model = wrap(tiny.bert("eager"), tokenizer=Tokenizer()).eval()
    looked = model(batch).attention_to("text").weights[:, 0, :, 0]
    own = model.model(tokens, present.long(), output_attentions=True).attentions[-1]
    for sample, row, first in ((0, 0, 1), (1, 1, 2)):
        expected = own[sample, :, row, first : first + 3]
        expected = expected / expected.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(looked[sample, :, first : first + 3], expected)
    torch.testing.assert_close(looked.sum(dim=-1), torch.ones(2, 2))


SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def dinov2() -> nn.Module:
    """A model with registers that predicts from the class token and the mean of the patches."""
    config = Dinov2WithRegistersConfig(image_size=32, patch_size=8, num_labels=3, **SMALL)
    return Dinov2WithRegistersForImageClassification(config)


def distilbert() -> nn.Module:
    config = DistilBertConfig(
        vocab_size=12, dim=16, n_layers=1, n_heads=2, hidden_dim=16, num_labels=3,
        max_position_embeddings=16,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config)


def pooled_vit() -> nn.Module:
    return ViTModel(ViTConfig(image_size=32, patch_size=8, **SMALL))


@pytest.mark.long
@pytest.mark.parametrize("make", [tiny.vit, tiny.bert, dinov2, distilbert, pooled_vit])
def test_models_with_inferred_layouts_pass_check_model(make: Callable[[], nn.Module]) -> None:
    names = check_model(
        lambda: wrap(make(), processor=tiny.TinyProcessor()),
        toy_batch(),
        unreached=["model.dinov2_with_registers.embeddings.mask_token"],  # used in pretraining only
    )
    assert len(names) == 19


def test_encoder_decoder_model_returns_cross_attention() -> None:
    config = BartConfig(
        vocab_size=12, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_labels=2,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    model = BartForSequenceClassification(config).eval()
    ids = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    queries, keys = infer_layout(model, inputs)
    assert isinstance(queries, Layout) and len(queries) == len(keys) == 4
    adopted = wrap(model)
    output = adopted(inputs)
    (looked,) = output.attention
    model.set_attn_implementation("eager")
    own = model(**inputs, output_attentions=True).cross_attentions[-1].mean(dim=2)
    torch.testing.assert_close(looked.weights[:, 0, :, 0], own)
    without = adopted.decide(adopted.encode(inputs), {"text": torch.tensor([[1.0, 0, 1, 1]] * 2)})
    assert not without.attention[0].weights[..., 1].any()
    assert not torch.equal(without.prediction, output.prediction)


def test_two_towers_raise_and_list_their_names() -> None:
    config = CLIPConfig(
        text_config=CLIPTextConfig(vocab_size=12, max_position_embeddings=8, **SMALL).to_dict(),
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **SMALL).to_dict(),
    )
    inputs = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "pixel_values": torch.zeros(2, 3, 32, 32),
    }
    with pytest.raises(ValueError, match="'text'.*'vision'"):
        infer_layout(CLIPModel(config), inputs)


def test_windowed_attention_raises() -> None:
    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4
    )
    with pytest.raises(ValueError, match="windows"):
        infer_layout(SwinForImageClassification(config), toy_batch())


def test_unknown_model_has_no_inferred_layout() -> None:
    assert infer_layout(nn.Linear(2, 2), toy_batch()) is None


def test_extract_prediction_of_a_dict() -> None:
    logits = torch.rand(2, 3)
    assert extract_prediction({"loss": None, "logits": logits}) is logits
    with pytest.raises(ValueError, match=r"dict.*logits"):
        extract_prediction({"scores": logits})


def test_mapping_with_unknown_names_raises_with_the_names_of_the_model() -> None:
    """The check comes before the layout, which needs the inputs."""
    with pytest.raises(ValueError, match="pixel_values"):
        wrap(tiny.vit())({"input_ids": torch.ones(1, 3).long()})
