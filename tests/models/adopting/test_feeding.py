"""Batches put to Hugging Face models, and what their positions then are."""

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
from overt.models.adopting.adopted import adopt
from overt.models.adopting.feeding import automatic, by_keywords, calling, prediction_of
from overt.testing import check_model, toy_batch
from tests.models import tiny


def test_a_batch_by_the_names_of_the_model() -> None:
    batch = toy_batch()
    text = by_keywords(batch, ("input_ids", "attention_mask", "token_type_ids"))
    assert (
        set(text) == {"input_ids", "attention_mask"} and text["attention_mask"].dtype == torch.long
    )
    image = by_keywords(batch, ("pixel_values", "attention_mask"))
    assert set(image) == {"pixel_values"}  # a mask of words is none of patches
    assert torch.equal(image["pixel_values"], batch.images[[0, 1, 2, 2]])
    given = {"x": 1, "labels": 2, "other": 3, "none": None}
    assert by_keywords(given, ("x", "labels", "none")) == {"x": 1}


def test_bytes_become_what_the_processor_says() -> None:
    batch, model = toy_batch(), tiny.vit().eval()
    found = calling(tiny.Bytes())(model, batch)
    torch.testing.assert_close(found, model(tiny.pixels(batch)).logits)
    ready = replace(batch, images=tiny.pixels(batch), image_of=None, geometry=None)
    torch.testing.assert_close(calling(None)(model, ready), found)


def test_a_batch_with_nothing_for_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="ViTForImageClassification takes pixel_values"):
        calling(None)(tiny.vit(), Batch(("a",)))


def test_the_prediction_of_an_output() -> None:
    tensor = torch.ones(2, 3)
    assert prediction_of(tensor) is tensor

    class Output:
        logits = None
        pooler_output = tensor

    assert prediction_of(Output()) is tensor
    with pytest.raises(ValueError, match="a dict has neither logits nor a pooled output"):
        prediction_of({})


# --- layouts --------------------------------------------------------------------------------


class Tokenizer:
    """Token 3 opens a text and token 4 closes it."""

    cls_token_id = 3
    all_special_ids = (3, 4)
    unk_token_id = None


def spans(layout: Any) -> dict[str, Any]:
    return {span.name: span for span in layout.spans}


def test_a_vision_model_has_a_class_token_and_cells_with_their_pixels() -> None:
    batch = toy_batch()
    found = spans(automatic(tiny.vit(), batch))
    assert found["class"].index == slice(0, 1) and found["image"].index == slice(1, 17)
    assert found["image"].shape == (4, 4) and len(found["image"].geometry) == 4
    output = adopt(tiny.vit(), processor=tiny.Bytes())(batch)
    assert output.looking_at("image").keys.find("image").shape == (4, 4)


def test_a_text_model_has_words_and_the_token_it_answers_from() -> None:
    tokens = torch.tensor([[3, 5, 6, 7, 4, 0], [0, 3, 8, 9, 10, 4]])
    present = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    batch = replace(toy_batch(2), tokens=tokens, token_mask=present)
    found = spans(automatic(tiny.bert(), batch, tokenizer=Tokenizer()))
    assert found["class"].index.tolist() == [[0], [1]]
    assert found["text"].index.tolist() == [[-1, 1, 2, 3, -1, -1], [-1, -1, 2, 3, 4, -1]]
    assert found["special"].index.tolist() == [[0, 4], [1, 5]]
    assert found["text"].geometry is batch.text  # each word in its own column
    model = adopt(tiny.bert("eager"), tokenizer=Tokenizer()).eval()
    looked = model(batch).looking_at("text").weights[:, 0, :, 0]
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
    """Registers, and an answer from the class token and the mean of the patches."""
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


@pytest.mark.parametrize("make", [tiny.vit, tiny.bert, dinov2, distilbert, pooled_vit])
def test_automatic_layouts_keep_the_contract(make: Callable[[], nn.Module]) -> None:
    names = check_model(
        lambda: adopt(make(), processor=tiny.Bytes()),
        toy_batch(),
        unreached=["model.dinov2_with_registers.embeddings.mask_token"],  # used in pretraining only
    )
    assert len(names) == 19


def test_encoder_and_decoder_give_the_attention_between_them() -> None:
    config = BartConfig(
        vocab_size=12, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_labels=2,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    model = BartForSequenceClassification(config).eval()
    ids = torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    queries, keys = automatic(model, inputs)
    assert isinstance(queries, Layout) and len(queries) == len(keys) == 4
    adopted = adopt(model)
    output = adopted(inputs)
    (looked,) = output.attention
    model.set_attn_implementation("eager")
    own = model(**inputs, output_attentions=True).cross_attentions[-1].mean(dim=2)
    torch.testing.assert_close(looked.weights[:, 0, :, 0], own)
    without = adopted.decide(adopted.encode(inputs), {"text": torch.tensor([[1.0, 0, 1, 1]] * 2)})
    assert not without.attention[0].weights[..., 1].any()
    assert not torch.equal(without.prediction, output.prediction)


def test_two_towers_ask_which_one() -> None:
    config = CLIPConfig(
        text_config=CLIPTextConfig(vocab_size=12, max_position_embeddings=8, **SMALL).to_dict(),
        vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **SMALL).to_dict(),
    )
    inputs = {
        "input_ids": torch.ones(2, 4, dtype=torch.long),
        "pixel_values": torch.zeros(2, 3, 32, 32),
    }
    with pytest.raises(ValueError, match=r"sequences \['text', 'vision'\]; choose one"):
        automatic(CLIPModel(config), inputs)


def test_windows_are_refused() -> None:
    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4
    )
    with pytest.raises(ValueError, match="attends inside windows"):
        automatic(SwinForImageClassification(config), toy_batch())


def test_a_model_of_unknown_make_has_no_layout() -> None:
    assert automatic(nn.Linear(2, 2), toy_batch()) is None


def test_the_logits_of_a_plain_dictionary() -> None:
    logits = torch.rand(2, 3)
    assert prediction_of({"loss": None, "logits": logits}) is logits
    with pytest.raises(ValueError, match="a dict has neither logits"):
        prediction_of({"scores": logits})


def test_a_mapping_of_other_names_is_told_those_of_the_model() -> None:
    """Before its layout is looked for, which is not known without inputs."""
    with pytest.raises(ValueError, match="ViTForImageClassification takes pixel_values"):
        adopt(tiny.vit())({"input_ids": torch.ones(1, 3).long()})
