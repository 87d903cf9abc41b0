import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn

import overt
from overt.capture import generate
from overt.data.vocabulary import PAD
from overt.models.captioning.decoding import Rules, beam, greedy
from overt.supervise.loss import Loss
from overt.supervise.perturb.aligner import (
    CAPTIONER,
    MASKS,
    Aligner,
    MaskReport,
    Pass,
    align,
    as_printed,
    attached,
    crossings,
    enhanced_first,
    lu2021,
    mean_square,
    norm_of_all,
    paper,
    renormalised,
    square_norm,
)
from overt.supervise.perturb.fusing import (
    Place,
    decay,
    enhance,
    gate,
    head_mean,
    max_pooling,
    moving_average,
    normalised,
    nothing,
    perturb,
    uniform,
)
from overt.supervise.perturb.masks import RandomMask
from overt.supervise.reward import next_words
from overt.testing import check_decoder
from overt.train.loop import Limits, ParameterSet, fit
from tests.models.captioning.test_captioner import TOKENS, captioner, region_batch

ROWS = TOKENS[:, 1:] != PAD
FUSIONS = [max_pooling, moving_average, decay, gate]


def aligner(seed=0, **options) -> Aligner:
    model, batch = captioner(seed=seed), region_batch()
    made = Aligner(model, crossings(model, lambda: model(batch)), **options).eval()
    made.advance(1.0)
    return made


def task(made: Aligner) -> Loss:
    return next_words(made.model(region_batch()).logits, TOKENS[:, 1:], ROWS)


def cross_weights(seen):
    return [call.weights() for call in seen.calls]


def test_cross_attention_is_found_with_its_sizes():
    model, batch = captioner(), region_batch()
    found = crossings(model, lambda: model(batch))
    assert found == {f"decoder.{at}.cross": Place(4, 4, 4) for at in range(2)}
    with pytest.raises(ValueError, match="looks at another sequence"):
        crossings(model.encoder, lambda: model.encoder[0](torch.zeros(1, 2, 16), None))


@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("finish", [renormalised, as_printed, enhanced_first])
@torch.no_grad()
def test_the_model_attends_as_the_fusion_says(fuse, finish):
    made, batch = aligner(fuse=fuse, finish=finish), region_batch()
    with overt.watch(made.model, ["decoder.0.cross"]) as plain:
        made.model(batch)
    with made.aligned() as found:
        made.model(batch)
    (call,) = plain.calls
    weights = call.weights()
    mask = found.masks["decoder.0.cross"][0]
    enhanced = enhance(weights, mask)
    if finish is enhanced_first:
        enhanced = normalised(enhanced)
    fused = made.fusions["decoder/0/cross"](weights, enhanced, call.source.query)
    expected = normalised(fused) if finish is renormalised else fused
    torch.testing.assert_close(cross_weights(found.seen)[0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("average", [uniform, head_mean, nothing])
@torch.no_grad()
def test_the_model_is_disturbed_as_the_equation_says(average):
    made, batch = aligner(average=average), region_batch()
    with overt.watch(made.model, ["decoder.0.cross"]) as plain:
        made.model(batch)
    with made.perturbed() as found:
        made.model(batch)
    mask = found.masks["decoder.0.cross"][0]
    visible = batch.region_mask[:, None]
    expected = perturb(plain.calls[0].weights(), mask, average, visible)
    torch.testing.assert_close(cross_weights(found.seen)[0], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a2_8_the_penalty_of_the_toy_and_what_it_counts():
    mask = torch.tensor([0.9, 0.1, 0.5]).view(1, 1, 1, 3)
    seen = torch.ones_like(mask, dtype=torch.bool)
    assert float(square_norm([(mask, seen)]).mean()) == pytest.approx(1.07)
    assert float(mean_square([(mask, seen)]).mean()) == pytest.approx(1.07 / 3)
    whole = norm_of_all([(mask, seen), (mask, seen)])
    assert float(whole.mean()) == pytest.approx(2.14**0.5 / 3) and whole.batch_level
    ones = torch.ones_like(mask)
    assert float(square_norm([(ones, seen)]).total) == 0
    made = aligner()
    with made.perturbed() as found:
        made.model(region_batch())
    # words that are no padding x regions that are there, in 2 layers of 4 heads
    regions = region_batch().region_mask.sum(-1)
    assert int(found.penalty(ROWS).count) == 8 * int((ROWS.sum(-1) * regions).sum())


def settings(made):
    return {name: value.clone() for name, value in made.state_dict().items()}


def step(made: Aligner, which: str, parameters, rate=0.1, strength=0.035) -> None:
    losses = align(made, lambda: task(made), strength, ROWS).losses[which]
    objective = sum(loss.mean() for loss in losses.values())
    objective.backward(inputs=parameters)
    torch.optim.SGD(parameters, lr=rate).step()
    for parameter in made.parameters():
        parameter.grad = None


def test_a2_9_neither_set_of_parameters_touches_the_other():
    made = aligner()
    ours, theirs = made.captioner_parameters(), made.mask_parameters()
    assert {id(one) for one in ours}.isdisjoint(id(one) for one in theirs)
    assert len(ours) + len(theirs) == len(list(made.parameters()))
    before = settings(made)
    step(made, MASKS, theirs)
    moved = {name for name, value in made.state_dict().items() if not value.equal(before[name])}
    assert moved and all(name.startswith("masks.") for name in moved)
    before = settings(made)
    step(made, CAPTIONER, ours)
    moved = {name for name, value in made.state_dict().items() if not value.equal(before[name])}
    assert any(name.startswith("fusions.") for name in moved)
    assert moved and not any(name.startswith("masks.") for name in moved)


@pytest.mark.parametrize("options", [{}, {"through": attached}])
def test_captions_reach_masks_only_where_they_are_attached(options):
    made = aligner(**options)
    with made.aligned():
        loss = task(made).total
    found = torch.autograd.grad(loss, made.mask_parameters(), allow_unused=True)
    assert any(one is not None for one in found) is bool(options)


def test_a2_10_a_step_of_the_masks_does_harm():
    made = aligner(seed=3)

    @torch.no_grad()
    def harm():
        with made.perturbed():
            return float(task(made).total)

    before = harm()
    step(made, MASKS, made.mask_parameters(), rate=0.05, strength=0.0)
    assert harm() > before


class OneRegion(nn.Module):
    """A word is right when region 1 of 4 is read; attention to it is what `scores` make it."""

    def __init__(self, scores) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)
        self.cross = PlantedAttention()

    def forward(self):
        key = torch.eye(4)[None, None]
        query = (self.scores * 2)[None, None, None]  # divided by sqrt(4) again
        value = torch.tensor([0.0, 4.0, 0.0, 0.0])[None, None, :, None].expand(1, 1, 4, 4)
        return self.cross(query, key, value)[0, 0, 0, 0]


class PlantedAttention(nn.Module):
    is_cross_attention = True

    def forward(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(query, key, value)


def planted(scores, average):
    """1 - m of every region after masks were trained on the loss -log sigmoid(what was read)."""
    torch.manual_seed(0)
    model = OneRegion(scores)
    made = Aligner(model, crossings(model, model), average=average)
    optimizer = torch.optim.Adam(made.mask_parameters(), lr=0.05)
    for _ in range(40):
        with made.perturbed() as found:
            harm = -nn.functional.logsigmoid(model())
        loss = -harm + found.penalty().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 1 - found.masks["cross"][0].detach().flatten()


def test_a2_12_masks_find_the_region_that_decides():
    """Removed, it is found wherever attention is; spread evenly, only where attention is on it.

    Disturbing by the mean gives a region more that had less than the mean, which does no harm.
    """
    elsewhere, on_it = [2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]
    assert int(planted(elsewhere, nothing).argmax()) == 1
    assert int(planted(on_it, nothing).argmax()) == 1
    assert int(planted(on_it, uniform).argmax()) == 1
    assert int(planted(elsewhere, uniform).argmin()) == 1


@pytest.mark.parametrize("finish", [renormalised, as_printed, enhanced_first])
@torch.no_grad()
def test_a2_13_regions_that_are_not_there_get_nothing(finish):
    made, batch = aligner(finish=finish), region_batch()
    hidden = ~batch.region_mask[:, None, None]
    for passing in (made.aligned, made.perturbed):
        with passing() as found:
            made.model(batch)
        for weights in cross_weights(found.seen):
            assert not weights[hidden.expand_as(weights)].any()


@torch.no_grad()
def test_an_aligner_writes_as_a_decoder_and_shows_aligned_attention():
    check_decoder(aligner, region_batch(), TOKENS[:, :-1])
    made, batch = aligner(seed=3), region_batch()
    rules = Rules(longest=4)
    for found in (greedy(made, batch, rules), beam(made, batch, 3, rules)):
        begun = torch.cat([torch.full((3, 1), rules.begin), found.tokens[:, :-1]], dim=1)
        with made.aligned() as seen:
            made.model.write(made.encode(batch), begun)
        expected = torch.stack(cross_weights(seen.seen), dim=1)
        rows = found.mask[:, None, None, :, None]
        (shown,) = found.attention
        torch.testing.assert_close(shown.weights, expected * rows, atol=1e-5, rtol=0)
        plain = made.model.write(made.encode(batch), begun).attention.weights
        assert (plain - expected).abs().max() > 1e-3


@torch.no_grad()
def test_the_model_is_left_as_it_was_and_calling_aligns():
    made, batch = aligner(), region_batch()
    before = made.model(batch).logits
    assert (made(batch).logits - before).abs().max() > 1e-5
    assert torch.equal(made.model(batch).logits, before)
    twin = copy.deepcopy(made)
    assert torch.equal(twin(batch).logits, made(batch).logits)
    state = made.start(made.encode(batch))
    made.step(state, TOKENS[:, 0])
    torch.nn.init.zeros_(copy.deepcopy(made).model.next.weight)
    assert made.step(state, TOKENS[:, 0])[0].prediction.any()


@torch.no_grad()
def test_collapsed_masks_are_reported():
    made = aligner()
    with made.aligned() as found:
        made.model(region_batch())
    assert [one.name for one in found.report(ROWS)] == ["decoder.0.cross", "decoder.1.cross"]
    assert not any(one.collapsed for one in found.report(ROWS))
    for network in made.masks.values():
        nn.init.constant_(network.bias, 9.0)
        for layer in (network.query, network.key):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    with made.aligned() as found:
        made.model(region_batch())
    report = found.report(ROWS)
    assert all(one.collapsed and one.mean > 0.99 for one in report)
    assert "decoder.0.cross disturbs nothing: lower lambda" in report[0].advice
    assert "raise lambda" in MaskReport("one", 0.01, 0.0).advice
    assert "alike, by 0.40" in MaskReport("one", 0.6, 0.001).advice
    assert not MaskReport("one", 0.6, 0.2).advice
    with pytest.raises(ValueError, match="no attention was masked"):
        Pass().penalty()


def test_presets_make_the_choices_they_name():
    printed = aligner(**paper(regions=5))
    assert printed.average is head_mean and printed.finish is as_printed
    assert printed.penalty is square_norm
    code = aligner(**lu2021())
    assert code.through is attached and code.penalty is norm_of_all and code.average is uniform
    assert next(iter(code.fusions.values())).weight.shape == (1, 4)
    for made in (printed, code, aligner(mask=RandomMask)):
        losses = align(made, lambda made=made: task(made), rows=ROWS).losses
        assert all(one.total.isfinite() for group in losses.values() for one in group.values())
        assert losses[MASKS]["harm"].weight == -1


def test_a_bart_is_aligned_from_outside():
    transformers = pytest.importorskip("transformers", reason="no transformers")
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
        max_position_embeddings=32, pad_token_id=1, decoder_start_token_id=2, init_std=0.5,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": ids != 1, "decoder_input_ids": ids[:, :3]}
    places = crossings(model, lambda: model(**inputs))
    assert list(places) == [f"model.decoder.layers.{at}.encoder_attn" for at in range(2)]
    made = Aligner(model, places)
    labels = torch.tensor([[4, 5, 6], [8, 9, 10]])
    seen = torch.ones(2, 3, dtype=torch.bool)
    found = align(made, lambda: next_words(model(**inputs).logits, labels, seen))
    objective = sum(one.mean() for one in found.losses[MASKS].values())
    objective.backward(inputs=made.mask_parameters())
    assert all(one.grad is not None for one in made.mask_parameters())
    assert all(one.grad is None for one in made.captioner_parameters())
    for weights in cross_weights(found.fused.seen):
        assert not weights[1, :, :, 2:].any()
    prompt = {"input_ids": ids, "attention_mask": ids != 1, "max_new_tokens": 3}
    plain = generate(model, **prompt).attention.weights
    aligned = generate(model, edit=made.edit(), **prompt).attention.weights
    assert plain.shape == aligned.shape and not torch.allclose(plain, aligned)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="needs places"):
        Aligner(captioner(), {})


class Captions:
    """The toy batch as a data set of three items."""

    def __len__(self):
        return 3

    def batch(self, indices):
        return region_batch().select(torch.tensor(list(indices)))


def test_fit_trains_both_sets_and_keeps_them(tmp_path):
    made = aligner(fuse=decay)
    before = settings(made)

    def one(model, batch, progress):
        model.advance(3 * progress.fraction)
        rows = batch.tokens[:, 1:] != PAD

        def caption():
            return next_words(model.model(batch).logits, batch.tokens[:, 1:], rows)

        return align(model, caption, strength=0.5, rows=rows).losses

    sets = {
        CAPTIONER: ParameterSet(torch.optim.Adam(made.captioner_parameters(), lr=0.01)),
        MASKS: ParameterSet(torch.optim.Adam(made.mask_parameters(), lr=0.01)),
    }
    limits = Limits(epochs=3, batch=3)
    fitted = fit(made, Captions(), one, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert fitted.steps == 3
    moved = {name.split(".")[0] for name, value in settings(made).items()
             if not value.equal(before[name])}  # fmt: skip
    assert moved == {"model", "masks", "fusions"}
    assert float(next(iter(made.fusions.values())).elapsed) == pytest.approx(3 * 2 / 3)


@pytest.mark.parametrize("way", ["aligned", "perturbed"])
def test_a_pass_goes_when_nobody_holds_it(way):
    """An edit that held its pass would keep the graph of every step until it is searched for."""
    made = aligner()
    gc.collect()
    gc.disable()
    try:
        with getattr(made, way)() as found:
            made.model(region_batch())
        gone = ref(found)
        del found
        assert gone() is None
    finally:
        gc.enable()
