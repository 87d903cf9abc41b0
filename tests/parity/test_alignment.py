"""Alignment of Hugging Face captioners: training steps, generation with cache and beams."""

import pytest
import torch

from overt.capture import generate
from overt.losses.attention_losses import classification
from overt.losses.caption_reward import log_probabilities, next_token_cross_entropy
from overt.metrics.word_alignment import alignment_divergence, hide_regions, region_effects
from overt.nn.mask_perturbation import (
    CAPTIONER,
    MASKS,
    Aligner,
    align,
    find_cross_attention,
    fuse_as_published,
    gate,
    lu2021_choices,
)
from overt.nn.wrappers.wrapped_model import wrap

transformers = pytest.importorskip("transformers", reason="no transformers")

PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[2, 4, 5, 6], [2, 7, 8, 9]])
PATCHES = 5  # four, and the class token
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}


def _scale_weights(model):
    """Initialize with large weights, so that attention is not uniform."""
    torch.manual_seed(1)
    for value in model.parameters():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=0.4)
    return model.eval()


def blip():
    """Make a BLIP, which computes its softmax explicitly."""
    sides = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {
        **sides, **ENDS, "vocab_size": 20, "encoder_hidden_size": 16, "num_hidden_layers": 2,
        "max_position_embeddings": 32, "sep_token_id": 3, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    vision = {**sides, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = _scale_weights(transformers.BlipForConditionalGeneration(config))
    return model, {"pixel_values": PIXELS, "input_ids": TOKENS[:, :-1]}


def _encoder_decoder(decoder):
    vision = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=8,
    )  # fmt: skip
    joined = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    joined.decoder_start_token_id, joined.pad_token_id = 2, 1
    model = _scale_weights(transformers.VisionEncoderDecoderModel(config=joined))
    return model, {"pixel_values": PIXELS, "decoder_input_ids": TOKENS[:, :-1]}


def vit_gpt2():
    """Make a ViT-GPT-2 captioner, which uses a fused kernel."""
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, add_cross_attention=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ENDS,
    )  # fmt: skip
    return _encoder_decoder(config)


def vit_bert():
    """Make a ViT-BERT captioner."""
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, is_decoder=True, add_cross_attention=True,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **ENDS,
    )  # fmt: skip
    return _encoder_decoder(config)


MODELS = [blip, vit_gpt2, vit_bert]


def _is_cross(call) -> bool:
    return call.cross


def _loss(model, inputs):
    found = model(**inputs).logits
    return next_token_cross_entropy(found, TOKENS[:, 1:], torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("options", [{}, {"finish": fuse_as_published}, "lu2021"])
def test_mask_and_captioner_steps_train_their_own_parameters(make, options):
    model, inputs = make()
    options = lu2021_choices() if options == "lu2021" else options
    places = find_cross_attention(model, lambda: model(**inputs))
    assert len(places) == 2
    assert all((one.heads, one.width) == (2, 8) for one in places.values())
    aligner = Aligner(model, places, **options)
    before = {name: value.clone() for name, value in aligner.state_dict().items()}
    for which, parameters in (
        (MASKS, aligner.mask_parameters()),
        (CAPTIONER, aligner.captioner_parameters()),
    ):
        losses = align(aligner, lambda: _loss(model, inputs), strength=0.1).losses[which]
        sum(loss.mean() for loss in losses.values()).backward(inputs=parameters)
        torch.optim.SGD(parameters, lr=0.1).step()
        moved = {name for name, now in aligner.state_dict().items() if not now.equal(before[name])}
        assert moved
        assert all(name.startswith("masks.") is (which == MASKS) for name in moved)
        before = {name: value.clone() for name, value in aligner.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_generation_uses_aligned_attention(make, beams):
    """With and without a cache, and as one pass over the full caption; maps are those in use."""
    model, inputs = make()
    aligner = Aligner(model, find_cross_attention(model, lambda: model(**inputs)), fuse=gate)
    prompt = {"pixel_values": PIXELS, "max_new_tokens": 4, "num_beams": beams, "do_sample": False}
    plain = generate(model, where=_is_cross, **prompt)
    found = generate(model, where=_is_cross, edit=aligner.edit(), **prompt)
    without = generate(model, where=_is_cross, edit=aligner.edit(), use_cache=False, **prompt)
    assert torch.equal(found.output.sequences, without.output.sequences)
    torch.testing.assert_close(
        found.attention.weights, without.attention.weights, atol=1e-5, rtol=0
    )
    count = found.attention.values.shape[3]
    written = found.output.sequences[:, :-1]
    again = {**inputs, "input_ids" if "input_ids" in inputs else "decoder_input_ids": written}
    with aligner.aligned() as trace:
        model(**again)
    expected = trace.after().weights[:, :, :, -count:]
    rows = found.attention.rows[:, None, None, :, None]
    torch.testing.assert_close(found.attention.weights, expected * rows, atol=1e-5, rtol=0)
    assert (found.attention.weights[..., :1, :] - plain.attention.weights[..., :1, :]).abs().max()


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_alignment_does_not_change_the_model(make):
    model, inputs = make()
    before = model(**inputs).logits
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    implementation = model.config._attn_implementation
    aligner = Aligner(model, find_cross_attention(model, lambda: model(**inputs)))
    assert (aligner(**inputs).logits - before).abs().max() > 1e-3
    assert torch.equal(model(**inputs).logits, before)
    after = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
    assert after == hooks and model.config._attn_implementation == implementation


@pytest.mark.long
@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_region_effects_work_for_each_captioner(make):
    model, inputs = make()
    aligner = Aligner(model, find_cross_attention(model, lambda: model(**inputs)))
    with aligner.aligned() as trace:
        model(**inputs)
    divergence = alignment_divergence(trace.before(), trace.after())
    assert divergence.shape == (2, 2) and (divergence > 0).all()

    def word_scores():
        return log_probabilities(model(**inputs).logits, TOKENS[:, 1:])

    effect = region_effects(hide_regions(model, word_scores), trace.before())
    assert effect.values.shape == (2, 1, 1, 3, PATCHES) and (effect.weights > 0).any()


def test_a_wrapped_captioner_can_be_aligned():
    model, inputs = vit_gpt2()
    wrapped = wrap(model, call=lambda net, batch: net(**batch).logits[:, -1]).eval()
    aligner = Aligner(wrapped, find_cross_attention(wrapped, lambda: wrapped(inputs)))
    assert list(aligner.places) == [
        f"model.decoder.transformer.h.{at}.crossattention" for at in (0, 1)
    ]
    found = align(aligner, lambda: classification(wrapped(inputs).prediction, TOKENS[:, 3]))
    sum(one.mean() for one in found.losses[MASKS].values()).backward(
        inputs=aligner.mask_parameters()
    )
    assert all(one.grad is not None for one in aligner.mask_parameters())
    with torch.no_grad():
        assert (aligner(inputs).prediction - wrapped(inputs).prediction).abs().max() > 1e-3
    assert found.aligned.after().values.shape == (2, 2, 2, 3, PATCHES)
