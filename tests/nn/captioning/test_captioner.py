"""`Captioner`: contract, parity with torch layers, masks, caching, saving."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import overt
from overt.data.batch import Batch
from overt.errors import CorruptFileError
from overt.nn.captioning.captioner import (
    CACHED_POSITIONS,
    CachedRegionEncoder,
    Captioner,
    CaptionerSizes,
    sinusoidal_positions,
)
from overt.nn.output import Decoder, DecoderState
from overt.nn.vqa.image_encoders import CachedImageEncoder, CNNEncoder
from overt.testing import check_decoder, toy_batch

SIZES = CaptionerSizes(vocabulary=12, width=16, layers=2, heads=4, inner=24)
TOKENS = torch.tensor([[3, 5, 6, 7, 4], [3, 8, 9, 4, 0], [3, 10, 11, 5, 4]])


def region_batch(counts=(5, 3, 4), seed=0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    present = torch.arange(5) < torch.tensor(counts)[:, None]
    return Batch(
        ids=tuple("abc"),
        features=torch.randn(3, 5, 8, generator=generator),
        region_mask=present,
        boxes=torch.rand(3, 5, 4, generator=generator),
        tokens=TOKENS,
        token_mask=TOKENS > 0,
    )


def captioner(eye=None, seed=0) -> Captioner:
    torch.manual_seed(seed)
    return Captioner(SIZES, eye or CachedRegionEncoder(8)).eval()


def test_captioner_passes_check_decoder_over_regions_and_a_grid():
    check_decoder(captioner, region_batch(), TOKENS[:, :-1])
    pixels = replace(toy_batch(3), tokens=TOKENS, token_mask=TOKENS > 0, text=None)
    check_decoder(lambda: captioner(CNNEncoder([4, 4], [2, 4])), pixels, TOKENS[:, :-1])


def test_regions_are_independent_without_encoder_layers():
    batch = region_batch()
    changed = batch.features.clone()
    changed[:, 0] += 1
    for depth, alone in ((0, True), (1, False), (None, False)):
        torch.manual_seed(0)
        model = Captioner(replace(SIZES, encoder=depth), CachedRegionEncoder(8)).eval()
        assert len(model.encoder) == (SIZES.layers if depth is None else depth)
        before, after = (
            model.encode(replace(batch, features=one)).states for one in (batch.features, changed)
        )
        assert torch.equal(before[:, 1:], after[:, 1:]) is alone
        assert Captioner.from_config(model.config()).sizes == model.sizes


def test_captioner_and_its_state_implement_the_protocols():
    model = captioner()
    assert isinstance(model, Decoder)
    assert isinstance(model.start(model.encode(region_batch())), DecoderState)


@torch.no_grad()
def test_step_by_step_decoding_equals_teacher_forcing():
    model, batch = captioner(), region_batch()
    output_all = model(batch)
    state = model.start(model.encode(batch))
    for at in range(TOKENS.shape[1] - 1):
        output, state = model.step(state, TOKENS[:, at])
        torch.testing.assert_close(output.prediction, output_all.logits[:, at], atol=1e-5, rtol=0)
        torch.testing.assert_close(
            *(output.attention[0].weights[..., 0, :], output_all.attention.weights[..., at, :]),
            atol=1e-5,
            rtol=0,
        )


@torch.no_grad()
def test_layers_agree_with_torch_transformer_layers():
    model, batch = captioner(), region_batch()
    memory = model.encode(batch)

    def give(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
        parts = [ours.query, ours.key, ours.value]
        theirs.in_proj_weight.copy_(torch.cat([one.weight for one in parts]))
        theirs.in_proj_bias.copy_(torch.cat([one.bias for one in parts]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())

    def rest(theirs: nn.Module, ours: nn.Module) -> None:
        theirs.linear1.load_state_dict(ours.think[0].state_dict())
        theirs.linear2.load_state_dict(ours.think[3].state_dict())
        for at, norm in enumerate(ours.norms, start=1):
            getattr(theirs, f"norm{at}").load_state_dict(norm.state_dict())

    states = model.of_region(batch.features)
    for layer in model.encoder:
        theirs = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
        give(theirs.self_attn, layer.own)
        rest(theirs, layer)
        states = theirs(states, src_key_padding_mask=~batch.region_mask)
    there = batch.region_mask
    torch.testing.assert_close(states[there], memory.states[there], atol=1e-5, rtol=1e-4)
    given = TOKENS[:, :-1]
    states = model.word(given) * 4 + sinusoidal_positions(4, 16)
    for layer in model.decoder:
        theirs = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True).eval()
        give(theirs.self_attn, layer.own)
        give(theirs.multihead_attn, layer.cross)
        rest(theirs, layer)
        later = nn.Transformer.generate_square_subsequent_mask(4)
        states = theirs(states, memory.states, later, memory_key_padding_mask=~there)
    torch.testing.assert_close(model(batch).logits, model.next(states), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_watched_cross_attention_equals_the_returned_attention():
    model, batch = captioner(), region_batch()
    with overt.watch(model) as trace:
        output_all = model(batch)
    cross = [call for call in trace.calls if call.cross]
    assert [call.name for call in cross] == ["decoder.0.cross", "decoder.1.cross"]
    weights = torch.stack([call.weights() for call in cross], dim=1)
    torch.testing.assert_close(output_all.attention.weights, weights, atol=1e-6, rtol=0)
    output_all.attention.check()
    assert [len(output_all.attention.queries), len(output_all.attention.keys)] == [4, 5]


@torch.no_grad()
def test_absent_regions_do_not_change_the_output():
    model, batch = captioner(), region_batch()
    junk = torch.where(batch.region_mask[..., None], batch.features, 100.0)
    output_all, other = model(batch), model(replace(batch, features=junk))
    torch.testing.assert_close(output_all.logits, other.logits)
    hidden = ~batch.region_mask[:, None, None, None].expand_as(output_all.attention.weights)
    assert not output_all.attention.weights[hidden].any()


@torch.no_grad()
def test_a_mask_hides_regions_from_words():
    model, batch = captioner(), region_batch()
    features = model.encode(batch)
    mask = torch.ones(3, 5)
    mask[:, 1] = 0
    output_all = model.decode_captions(features, TOKENS[:, :-1], {"regions": mask})
    assert not output_all.attention.weights[..., 1].any()
    assert (output_all.logits - model(batch).logits).abs().max() > 1e-4
    output, _ = model.step(model.start(features, {"regions": mask}), TOKENS[:, 0])
    torch.testing.assert_close(output.prediction, output_all.logits[:, 0], atol=1e-5, rtol=0)
    kept = model.decode_captions(features, TOKENS[:, :-1], {"regions": torch.ones(3, 5)})
    torch.testing.assert_close(kept.logits, model(batch).logits)
    assert torch.equal(
        model.decode_captions(features, TOKENS[:, :-1], {"image": mask}).logits, kept.logits
    )


def test_decoding_is_causal_and_every_parameter_gets_a_gradient():
    model, batch = captioner(), region_batch()
    changed = TOKENS.clone()
    changed[:, 2:] = 5
    one, two = model(batch).logits, model(replace(batch, tokens=changed)).logits
    torch.testing.assert_close(one[:, :2], two[:, :2])
    one.square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_beams_of_one_image_share_its_encoding():
    model, batch = captioner(), region_batch()
    state = model.start(model.encode(batch)).reorder(torch.tensor([0, 0, 1]))
    _, state = model.step(state, torch.tensor([3, 3, 3]))
    swapped = state.reorder(torch.tensor([1, 0, 2]))
    assert swapped.seen is state.seen and swapped.past[0][0] is not state.past[0][0]
    assert state.reorder(torch.tensor([2, 0, 0])).seen is not state.seen


def test_positions_are_sinusoidal():
    places = sinusoidal_positions(3, 6)
    assert places[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert float(places[2, 2]) == pytest.approx(torch.sin(torch.tensor(2 / 10_000 ** (1 / 3))))
    torch.testing.assert_close(sinusoidal_positions(1, 6, start=2), places[2:])


@pytest.mark.parametrize("eye", [CachedRegionEncoder(8), CachedImageEncoder(8, (1, 5))])
def test_saved_model_gives_equal_logits(tmp_path, eye):
    model, batch = captioner(eye), region_batch()
    model.save_pretrained(tmp_path / "model")
    again = Captioner.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(batch).logits, model(batch).logits, atol=0, rtol=0)
    assert again.config() == model.config()


def test_corrupt_config_raises(tmp_path):
    model = captioner()
    model.config = lambda: {"sizes": {}, "eye": {"kind": "regions", "width": 8}}
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CorruptFileError):
        Captioner.from_pretrained(tmp_path / "model")


def test_bad_input_raises():
    with pytest.raises(ValueError, match="heads=3"):
        CaptionerSizes(vocabulary=5, width=16, heads=3)
    with pytest.raises(ValueError, match=r"8 features.* none"):
        captioner()(replace(region_batch(), features=None))
    with pytest.raises(ValueError, match=r"8 features.* 4"):
        captioner()(replace(region_batch(), features=torch.zeros(3, 5, 4)))
    with pytest.raises(ValueError, match="tokens"):
        captioner()(replace(region_batch(), tokens=None))


@torch.no_grad()
def test_an_image_with_several_captions_is_encoded_once():
    model, batch = captioner(), region_batch()
    rows = torch.tensor([2, 0, 2])
    spread = model.encode(batch).select(rows)
    output_all = model.decode_captions(spread, TOKENS[:, :-1])
    apart = model.decode_captions(model.encode(batch.select(rows)), TOKENS[:, :-1])
    torch.testing.assert_close(output_all.logits, apart.logits)
    torch.testing.assert_close(output_all.attention.weights, apart.attention.weights)


@pytest.mark.parametrize("eye", [CachedRegionEncoder(8), CachedImageEncoder(8, (1, 5))])
def test_captions_of_one_image_are_decoded_together(eye: CachedRegionEncoder | CachedImageEncoder):
    """Logits, gradients and attention equal those of each caption decoded alone."""
    model, batch = captioner(eye=eye), region_batch()
    memory = model.encode(batch)
    tokens = torch.tensor([[3, 5, 6], [3, 7, 8], [3, 6, 5], [3, 8, 8], [3, 5, 5], [3, 9, 7]])
    apart = model.decode_captions(memory.select(torch.tensor([0, 0, 1, 1, 2, 2])), tokens)
    together = model.decode_captions(memory, tokens)
    again = model.decode_captions(memory, tokens, projected=model.project_memory(memory))
    torch.testing.assert_close(together.logits, apart.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(together.logits, again.logits)
    torch.testing.assert_close(together.attention.weights, apart.attention.weights)
    assert torch.equal(together.attention.visible, apart.attention.visible)
    together.attention.check()
    weight = model.decoder[0].cross.key.weight
    ours, theirs = (
        torch.autograd.grad(one.logits.square().sum(), weight)[0] for one in (together, apart)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_unequal_numbers_of_captions_per_image_raise():
    model, batch = captioner(), region_batch()
    with pytest.raises(ValueError, match=r"4 captions for 3"):
        model.decode_captions(model.encode(batch), TOKENS[[0, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"0 captions for 3"):
        model.decode_captions(model.encode(batch), TOKENS[:0])


def test_empty_batch_gives_empty_logits():
    model, batch = captioner(), region_batch()
    memory = model.encode(batch).select(torch.arange(0))
    output_all = model.decode_captions(memory, TOKENS[:0])
    assert output_all.logits.shape == (0, 5, 12) and len(output_all.attention) == 0
    with pytest.raises(ValueError, match="3 captions for 0"):
        model.decode_captions(memory, TOKENS)


def test_positions_beyond_the_cache_are_computed():
    model = captioner()
    found = model._places(2, start=CACHED_POSITIONS - 1)
    torch.testing.assert_close(found, sinusoidal_positions(2, 16, start=CACHED_POSITIONS - 1))
    assert torch.equal(model._places(2, start=3), sinusoidal_positions(5, 16)[3:])
    for start, count in ((0, 1), (7, 1), (3, 40), (CACHED_POSITIONS - 1, 1)):
        assert torch.equal(model._places(count, start), sinusoidal_positions(count, 16, start))
    assert "places" not in model.state_dict()
