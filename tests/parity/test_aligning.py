"""Captioners of Hugging Face aligned from outside: trained a step, writing with cache and beams."""

import pytest
import torch

from overt.capture import generate
from overt.measure.wording import alignment_divergence, hiding, region_effects
from overt.models.adopting.adopted import adopt
from overt.supervise.losses import classification
from overt.supervise.perturb import (
    CAPTIONER,
    MASKS,
    Aligner,
    align,
    as_printed,
    crossings,
    gate,
    lu2021,
)
from overt.supervise.reward import log_probabilities, next_words

transformers = pytest.importorskip("transformers", reason="no transformers")

PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
PATCHES = 5  # four, and the class token
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}


def _loud(model):
    """Weights large enough for attention to be no mean."""
    torch.manual_seed(1)
    for value in model.parameters():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=0.4)
    return model.eval()


def blip():
    """A BLIP, which writes its softmax out."""
    sides = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {
        **sides, **ENDS, "vocab_size": 20, "encoder_hidden_size": 16, "num_hidden_layers": 2,
        "max_position_embeddings": 32, "sep_token_id": 3, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    seen = {**sides, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.BlipConfig(text_config=text, vision_config=seen, projection_dim=16)
    model = _loud(transformers.BlipForConditionalGeneration(config))
    return model, {"pixel_values": PIXELS, "input_ids": TOKENS[:, :-1]}


def _encoder_decoder(decoder):
    seen = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=8,
    )  # fmt: skip
    joined = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(seen, decoder)
    joined.decoder_start_token_id, joined.pad_token_id = 2, 1
    model = _loud(transformers.VisionEncoderDecoderModel(config=joined))
    return model, {"pixel_values": PIXELS, "decoder_input_ids": TOKENS[:, :-1]}


def vit_gpt2():
    """The usual captioner of the hub, on a fused kernel."""
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, add_cross_attention=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ENDS,
    )  # fmt: skip
    return _encoder_decoder(config)


def vit_bert():
    """The same with another decoder."""
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, is_decoder=True, add_cross_attention=True,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **ENDS,
    )  # fmt: skip
    return _encoder_decoder(config)


MODELS = [blip, vit_gpt2, vit_bert]


def _across(call) -> bool:
    return call.cross


def _loss(model, inputs):
    found = model(**inputs).logits
    return next_words(found, TOKENS[:, 1:], torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", [{}, {"finish": as_printed}, "lu2021"])
def test_masks_and_model_learn_a_step_each(make, options):
    model, inputs = make()
    options = lu2021() if options == "lu2021" else options
    places = crossings(model, lambda: model(**inputs))
    assert len(places) == 2
    assert all((one.heads, one.width) == (2, 8) for one in places.values())
    made = Aligner(model, places, **options)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    for which, parameters in (
        (MASKS, made.mask_parameters()),
        (CAPTIONER, made.captioner_parameters()),
    ):
        losses = align(made, lambda: _loss(model, inputs), strength=0.1).losses[which]
        sum(loss.mean() for loss in losses.values()).backward(inputs=parameters)
        torch.optim.SGD(parameters, lr=0.1).step()
        moved = {name for name, now in made.state_dict().items() if not now.equal(before[name])}
        assert moved
        assert all(name.startswith("masks.") is (which == MASKS) for name in moved)
        before = {name: value.clone() for name, value in made.state_dict().items()}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_captions_are_written_with_aligned_attention(make, beams):
    """With a cache and without, as one pass over the whole caption; shown as it was used."""
    model, inputs = make()
    made = Aligner(model, crossings(model, lambda: model(**inputs)), fuse=gate)
    prompt = {"pixel_values": PIXELS, "max_new_tokens": 4, "num_beams": beams, "do_sample": False}
    plain = generate(model, where=_across, **prompt)
    found = generate(model, where=_across, edit=made.edit(), **prompt)
    without = generate(model, where=_across, edit=made.edit(), use_cache=False, **prompt)
    assert torch.equal(found.output.sequences, without.output.sequences)
    torch.testing.assert_close(
        found.attention.weights, without.attention.weights, atol=1e-5, rtol=0
    )
    count = found.attention.values.shape[3]
    written = found.output.sequences[:, :-1]
    again = {**inputs, "input_ids" if "input_ids" in inputs else "decoder_input_ids": written}
    with made.aligned() as seen:
        model(**again)
    expected = seen.after().weights[:, :, :, -count:]
    rows = found.attention.rows[:, None, None, :, None]
    torch.testing.assert_close(found.attention.weights, expected * rows, atol=1e-5, rtol=0)
    assert (found.attention.weights[..., :1, :] - plain.attention.weights[..., :1, :]).abs().max()


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_the_model_is_left_as_it_was_found(make):
    model, inputs = make()
    before = model(**inputs).logits
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    implementation = model.config._attn_implementation
    made = Aligner(model, crossings(model, lambda: model(**inputs)))
    assert (made(**inputs).logits - before).abs().max() > 1e-3
    assert torch.equal(model(**inputs).logits, before)
    after = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    assert after == hooks and model.config._attn_implementation == implementation


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_words_of_any_captioner_are_analysed(make):
    model, inputs = make()
    made = Aligner(model, crossings(model, lambda: model(**inputs)))
    with made.aligned() as seen:
        model(**inputs)
    divergence = alignment_divergence(seen.before(), seen.after())
    assert divergence.shape == (2, 2) and (divergence > 0).all()

    def told():
        return log_probabilities(model(**inputs).logits, TOKENS[:, 1:])

    effect = region_effects(hiding(model, told), seen.before())
    assert effect.values.shape == (2, 1, 1, 3, PATCHES) and (effect.weights > 0).any()


def test_an_adopted_captioner_is_aligned_like_any_other():
    model, inputs = vit_gpt2()
    adopted = adopt(model, call=lambda net, batch: net(**batch).logits[:, -1]).eval()
    made = Aligner(adopted, crossings(adopted, lambda: adopted(inputs)))
    assert list(made.places) == [
        f"model.decoder.transformer.h.{at}.crossattention" for at in (0, 1)
    ]
    found = align(made, lambda: classification(adopted(inputs).prediction, TOKENS[:, 3]))
    sum(one.mean() for one in found.losses[MASKS].values()).backward(inputs=made.mask_parameters())
    assert all(one.grad is not None for one in made.mask_parameters())
    with torch.no_grad():
        assert (made(inputs).prediction - adopted(inputs).prediction).abs().max() > 1e-3
    assert found.fused.after().values.shape == (2, 2, 2, 3, PATCHES)
