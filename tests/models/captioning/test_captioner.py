from dataclasses import replace

import pytest
import torch
from torch import nn

import overt
from overt.data.batch import Batch
from overt.errors import Damaged
from overt.models.answering.eyes import CachedEye, TrainedEye
from overt.models.captioning.captioner import (
    PLACES,
    CachedRegions,
    Captioner,
    CaptionSizes,
    waves,
)
from overt.models.output import Decoder, State
from overt.testing import check_decoder, toy_batch

SIZES = CaptionSizes(vocabulary=12, width=16, layers=2, heads=4, inner=24)
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
    return Captioner(SIZES, eye or CachedRegions(8)).eval()


def test_the_contract_of_decoders_holds_over_regions_and_over_a_grid():
    check_decoder(captioner, region_batch(), TOKENS[:, :-1])
    pixels = replace(toy_batch(3), tokens=TOKENS, token_mask=TOKENS > 0, text=None)
    check_decoder(lambda: captioner(TrainedEye([4, 4], [2, 4])), pixels, TOKENS[:, :-1])


def test_regions_that_tell_each_other_nothing_know_of_themselves_alone():
    batch = region_batch()
    changed = batch.features.clone()
    changed[:, 0] += 1
    for depth, alone in ((0, True), (1, False), (None, False)):
        torch.manual_seed(0)
        model = Captioner(replace(SIZES, encoder=depth), CachedRegions(8)).eval()
        assert len(model.encoder) == (SIZES.layers if depth is None else depth)
        before, after = (
            model.encode(replace(batch, features=one)).states for one in (batch.features, changed)
        )
        assert torch.equal(before[:, 1:], after[:, 1:]) is alone
        assert Captioner.from_config(model.config()).sizes == model.sizes


def test_the_protocols_of_decoders_and_states_are_kept():
    model = captioner()
    assert isinstance(model, Decoder)
    assert isinstance(model.start(model.encode(region_batch())), State)


@torch.no_grad()
def test_one_word_at_a_time_tells_what_all_at_once_does():
    model, batch = captioner(), region_batch()
    told = model(batch)
    state = model.start(model.encode(batch))
    for at in range(TOKENS.shape[1] - 1):
        output, state = model.step(state, TOKENS[:, at])
        torch.testing.assert_close(output.prediction, told.logits[:, at], atol=1e-5, rtol=0)
        torch.testing.assert_close(
            *(output.attention[0].weights[..., 0, :], told.attention.weights[..., at, :]),
            atol=1e-5,
            rtol=0,
        )


@torch.no_grad()
def test_layers_agree_with_those_of_torch():
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
    states = model.word(given) * 4 + waves(4, 16)
    for layer in model.decoder:
        theirs = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True).eval()
        give(theirs.self_attn, layer.own)
        give(theirs.multihead_attn, layer.cross)
        rest(theirs, layer)
        later = nn.Transformer.generate_square_subsequent_mask(4)
        states = theirs(states, memory.states, later, memory_key_padding_mask=~there)
    torch.testing.assert_close(model(batch).logits, model.next(states), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_what_is_watched_is_what_is_told():
    model, batch = captioner(), region_batch()
    with overt.watch(model) as seen:
        told = model(batch)
    cross = [call for call in seen.calls if call.cross]
    assert [call.name for call in cross] == ["decoder.0.cross", "decoder.1.cross"]
    weights = torch.stack([call.weights() for call in cross], dim=1)
    torch.testing.assert_close(told.attention.weights, weights, atol=1e-6, rtol=0)
    told.attention.check()
    assert [len(told.attention.queries), len(told.attention.keys)] == [4, 5]


@torch.no_grad()
def test_regions_that_are_not_there_are_not_read():
    model, batch = captioner(), region_batch()
    junk = torch.where(batch.region_mask[..., None], batch.features, 100.0)
    told, other = model(batch), model(replace(batch, features=junk))
    torch.testing.assert_close(told.logits, other.logits)
    hidden = ~batch.region_mask[:, None, None, None].expand_as(told.attention.weights)
    assert not told.attention.weights[hidden].any()


@torch.no_grad()
def test_a_mask_hides_regions_from_words():
    model, batch = captioner(), region_batch()
    features = model.encode(batch)
    mask = torch.ones(3, 5)
    mask[:, 1] = 0
    told = model.write(features, TOKENS[:, :-1], {"regions": mask})
    assert not told.attention.weights[..., 1].any()
    assert (told.logits - model(batch).logits).abs().max() > 1e-4
    output, _ = model.step(model.start(features, {"regions": mask}), TOKENS[:, 0])
    torch.testing.assert_close(output.prediction, told.logits[:, 0], atol=1e-5, rtol=0)
    kept = model.write(features, TOKENS[:, :-1], {"regions": torch.ones(3, 5)})
    torch.testing.assert_close(kept.logits, model(batch).logits)
    assert torch.equal(model.write(features, TOKENS[:, :-1], {"image": mask}).logits, kept.logits)


def test_no_word_hears_of_later_ones_and_every_parameter_of_the_loss():
    model, batch = captioner(), region_batch()
    changed = TOKENS.clone()
    changed[:, 2:] = 5
    one, two = model(batch).logits, model(replace(batch, tokens=changed)).logits
    torch.testing.assert_close(one[:, :2], two[:, :2])
    one.square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_beams_of_one_image_share_what_was_seen_of_it():
    model, batch = captioner(), region_batch()
    state = model.start(model.encode(batch)).reorder(torch.tensor([0, 0, 1]))
    _, state = model.step(state, torch.tensor([3, 3, 3]))
    swapped = state.reorder(torch.tensor([1, 0, 2]))
    assert swapped.seen is state.seen and swapped.past[0][0] is not state.past[0][0]
    assert state.reorder(torch.tensor([2, 0, 0])).seen is not state.seen


def test_places_are_sines():
    places = waves(3, 6)
    assert places[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert float(places[2, 2]) == pytest.approx(torch.sin(torch.tensor(2 / 10_000 ** (1 / 3))))
    torch.testing.assert_close(waves(1, 6, start=2), places[2:])


@pytest.mark.parametrize("eye", [CachedRegions(8), CachedEye(8, (1, 5))])
def test_a_saved_model_tells_the_same(tmp_path, eye):
    model, batch = captioner(eye), region_batch()
    model.save_pretrained(tmp_path / "model")
    again = Captioner.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(batch).logits, model(batch).logits, atol=0, rtol=0)
    assert again.config() == model.config()


def test_a_damaged_config_is_refused(tmp_path):
    model = captioner()
    model.config = lambda: {"sizes": {}, "eye": {"kind": "regions", "width": 8}}
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(Damaged):
        Captioner.from_pretrained(tmp_path / "model")


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="does not divide into 3"):
        CaptionSizes(vocabulary=5, width=16, heads=3)
    with pytest.raises(ValueError, match="regions of 8 numbers; the batch has none"):
        captioner()(replace(region_batch(), features=None))
    with pytest.raises(ValueError, match="4 numbers a region"):
        captioner()(replace(region_batch(), features=torch.zeros(3, 5, 4)))
    with pytest.raises(ValueError, match="with tokens"):
        captioner()(replace(region_batch(), tokens=None))


@torch.no_grad()
def test_an_image_with_several_captions_is_encoded_once():
    model, batch = captioner(), region_batch()
    rows = torch.tensor([2, 0, 2])
    spread = model.encode(batch).select(rows)
    told = model.write(spread, TOKENS[:, :-1])
    apart = model.write(model.encode(batch.select(rows)), TOKENS[:, :-1])
    torch.testing.assert_close(told.logits, apart.logits)
    torch.testing.assert_close(told.attention.weights, apart.attention.weights)


@pytest.mark.parametrize("eye", [CachedRegions(8), CachedEye(8, (1, 5))])
def test_captions_of_one_image_ask_it_together(eye: CachedRegions | CachedEye):
    """What is told is what each of them is told alone, with gradients, and so is the attention."""
    model, batch = captioner(eye=eye), region_batch()
    memory = model.encode(batch)
    tokens = torch.tensor([[3, 5, 6], [3, 7, 8], [3, 6, 5], [3, 8, 8], [3, 5, 5], [3, 9, 7]])
    apart = model.write(memory.select(torch.tensor([0, 0, 1, 1, 2, 2])), tokens)
    together = model.write(memory, tokens)
    again = model.write(memory, tokens, read=model.read(memory))
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


def test_images_with_unlike_many_captions_are_refused():
    model, batch = captioner(), region_batch()
    with pytest.raises(ValueError, match="4 captions of 3 images"):
        model.write(model.encode(batch), TOKENS[[0, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"0 captions of 3 images.*one at least"):
        model.write(model.encode(batch), TOKENS[:0])


def test_of_no_image_nothing_is_told():
    model, batch = captioner(), region_batch()
    memory = model.encode(batch).select(torch.arange(0))
    told = model.write(memory, TOKENS[:0])
    assert told.logits.shape == (0, 5, 12) and len(told.attention) == 0
    with pytest.raises(ValueError, match="3 captions of 0 images"):
        model.write(memory, TOKENS)


def test_texts_longer_than_the_places_that_are_kept_have_sines_too():
    model = captioner()
    found = model._places(2, start=PLACES - 1)
    torch.testing.assert_close(found, waves(2, 16, start=PLACES - 1))
    assert torch.equal(model._places(2, start=3), waves(5, 16)[3:])
    assert "places" not in model.state_dict()
