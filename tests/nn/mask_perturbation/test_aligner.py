"""`Aligner`: aligned and perturbed attention, losses and their gradients, training, saving."""

import copy
import gc
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch import nn

import overt
from overt.capture import generate
from overt.data.vocabulary import PAD
from overt.errors import UserError
from overt.losses.caption_reward import next_token_cross_entropy
from overt.losses.loss import Loss
from overt.nn.captioning.decoding import DecodingRules, beam_search, greedy
from overt.nn.mask_perturbation.aligner import (
    CAPTIONER,
    MASKS,
    Aligner,
    AlignmentPass,
    MaskReport,
    align,
    find_cross_attention,
    fuse_as_published,
    fuse_enhanced_normalized,
    fuse_renormalized,
    global_norm,
    keep_mask_gradient,
    lu2021_choices,
    mean_square,
    published_choices,
    square_norm,
)
from overt.nn.mask_perturbation.fusion import (
    AttentionShape,
    decay,
    enhance,
    gate,
    head_mean,
    max_pooling,
    moving_average,
    normalize_rows,
    perturb,
    uniform_average,
    zero_average,
)
from overt.nn.mask_perturbation.gradient_scope import restricted_by_fit
from overt.nn.mask_perturbation.mask_networks import RandomMask
from overt.testing import check_decoder
from overt.train.loop import FitConfig, ParameterSet, fit
from tests.nn.captioning.test_captioner import TOKENS, captioner, region_batch

TOKEN_MASK = TOKENS[:, 1:] != PAD
FUSIONS = [max_pooling, moving_average, decay, gate]


def make_aligner(seed=0, **options) -> Aligner:
    model, batch = captioner(seed=seed), region_batch()
    made = Aligner(model, find_cross_attention(model, lambda: model(batch)), **options).eval()
    made.advance(1.0)
    return made


def caption_loss(made: Aligner) -> Loss:
    return next_token_cross_entropy(made.model(region_batch()).logits, TOKENS[:, 1:], TOKEN_MASK)


def cross_weights(trace):
    return [call.weights() for call in trace.calls]


def test_find_cross_attention_returns_shapes():
    model, batch = captioner(), region_batch()
    found = find_cross_attention(model, lambda: model(batch))
    assert found == {f"decoder.{at}.cross": AttentionShape(4, 4, 4) for at in range(2)}
    with pytest.raises(ValueError, match="no cross-attention"):
        find_cross_attention(model.encoder, lambda: model.encoder[0](torch.zeros(1, 2, 16), None))


@pytest.mark.long
@pytest.mark.parametrize("fuse", FUSIONS)
@pytest.mark.parametrize("finish", [fuse_renormalized, fuse_as_published, fuse_enhanced_normalized])
@torch.no_grad()
def test_aligned_attention_follows_the_fusion(fuse, finish):
    made, batch = make_aligner(fuse=fuse, finish=finish), region_batch()
    with overt.watch(made.model, ["decoder.0.cross"]) as plain:
        made.model(batch)
    with made.aligned() as found:
        made.model(batch)
    (call,) = plain.calls
    weights = call.weights()
    mask = found.masks["decoder.0.cross"][0]
    enhanced = enhance(weights, mask)
    if finish is fuse_enhanced_normalized:
        enhanced = normalize_rows(enhanced)
    fused = made.fusions["decoder/0/cross"](weights, enhanced, call.source.query)
    expected = normalize_rows(fused) if finish is fuse_renormalized else fused
    torch.testing.assert_close(cross_weights(found.trace)[0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("average", [uniform_average, head_mean, zero_average])
@torch.no_grad()
def test_perturbed_attention_follows_the_equation(average):
    made, batch = make_aligner(average=average), region_batch()
    with overt.watch(made.model, ["decoder.0.cross"]) as plain:
        made.model(batch)
    with made.perturbed() as found:
        made.model(batch)
    mask = found.masks["decoder.0.cross"][0]
    visible = batch.region_mask[:, None]
    expected = perturb(plain.calls[0].weights(), mask, average, visible)
    torch.testing.assert_close(cross_weights(found.trace)[0], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a2_8_penalty_values_and_counts():
    mask = torch.tensor([0.9, 0.1, 0.5]).view(1, 1, 1, 3)
    seen = torch.ones_like(mask, dtype=torch.bool)
    assert float(square_norm([(mask, seen)]).mean()) == pytest.approx(1.07)
    assert float(mean_square([(mask, seen)]).mean()) == pytest.approx(1.07 / 3)
    whole = global_norm([(mask, seen), (mask, seen)])
    assert float(whole.mean()) == pytest.approx(2.14**0.5 / 3) and whole.batch_level
    ones = torch.ones_like(mask)
    assert float(square_norm([(ones, seen)]).total) == 0
    made = make_aligner()
    with made.perturbed() as found:
        made.model(region_batch())
    # words without padding x present regions, in 2 layers of 4 heads
    regions = region_batch().region_mask.sum(-1)
    assert int(found.penalty(TOKEN_MASK).count) == 8 * int((TOKEN_MASK.sum(-1) * regions).sum())


def clone_state(made):
    return {name: value.clone() for name, value in made.state_dict().items()}


def step(made: Aligner, which: str, parameters, rate=0.1, strength=0.035) -> None:
    losses = align(made, lambda: caption_loss(made), strength, TOKEN_MASK).losses[which]
    objective = sum(loss.mean() for loss in losses.values())
    objective.backward(inputs=parameters)
    torch.optim.SGD(parameters, lr=rate).step()
    for parameter in made.parameters():
        parameter.grad = None


def test_a2_9_each_step_changes_one_set_of_parameters_only():
    made = make_aligner()
    ours, theirs = made.captioner_parameters(), made.mask_parameters()
    assert {id(one) for one in ours}.isdisjoint(id(one) for one in theirs)
    assert len(ours) + len(theirs) == len(list(made.parameters()))
    before = clone_state(made)
    step(made, MASKS, theirs)
    moved = {name for name, value in made.state_dict().items() if not value.equal(before[name])}
    assert moved and all(name.startswith("masks.") for name in moved)
    before = clone_state(made)
    step(made, CAPTIONER, ours)
    moved = {name for name, value in made.state_dict().items() if not value.equal(before[name])}
    assert any(name.startswith("fusions.") for name in moved)
    assert moved and not any(name.startswith("masks.") for name in moved)


@pytest.mark.parametrize("options", [{}, {"through": keep_mask_gradient}])
def test_caption_loss_reaches_mask_inputs_only_if_attached(options):
    """Attached masks add a gradient path to queries and keys, never to the mask networks."""
    grads = {}
    for way in ("own", "plain"):
        made = make_aligner(**(options if way == "own" else {}))
        with made.aligned(learn_masks=False):
            loss = caption_loss(made).total
        masks = torch.autograd.grad(
            loss, made.mask_parameters(), allow_unused=True, retain_graph=True
        )
        assert all(one is None for one in masks)
        grads[way] = torch.autograd.grad(loss, made.captioner_parameters(), allow_unused=True)
    same = [
        torch.equal(one, two)
        for one, two in zip(grads["own"], grads["plain"], strict=True)
        if one is not None
    ]
    assert all(same) is not bool(options)


@pytest.mark.parametrize("options", [{}, {"through": keep_mask_gradient}])
def test_caption_loss_reaches_mask_networks_only_if_attached(options):
    made = make_aligner(**options)
    with made.aligned():
        loss = caption_loss(made).total
    found = torch.autograd.grad(loss, made.mask_parameters(), allow_unused=True)
    assert any(one is not None for one in found) is bool(options)


PRESETS = [{}, {"through": keep_mask_gradient}, published_choices(regions=5), lu2021_choices()]


@pytest.mark.parametrize("options", PRESETS, ids=["default", "attached", "paper", "lu2021"])
def test_one_backward_pass_gives_each_parameter_set_its_own_gradient(options):
    """After one backward pass of the sum, each set has the gradient of its own losses."""
    made = make_aligner(**options)
    raw = align(made, lambda: caption_loss(made), 0.5, TOKEN_MASK, restricted_by_fit).losses
    wanted = {}
    for name, parameters in (
        (CAPTIONER, made.captioner_parameters()),
        (MASKS, made.mask_parameters()),
    ):
        objective = sum(one.mean() for one in raw[name].values())
        found = torch.autograd.grad(objective, parameters, allow_unused=True, retain_graph=True)
        wanted |= {id(one): grad for one, grad in zip(parameters, found, strict=True)}
    losses = align(made, lambda: caption_loss(made), 0.5, TOKEN_MASK).losses
    sum(one.mean() for group in losses.values() for one in group.values()).backward()
    for name, parameter in made.named_parameters():
        expected = wanted[id(parameter)]
        if expected is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, expected, msg=lambda said, n=name: n + said)


def test_mask_losses_do_not_reach_a_shared_encoder():
    """Computations before both passes belong to the captioner."""
    made = make_aligner()
    batch = region_batch()
    features = torch.nn.Parameter(batch.features.clone())

    def shown() -> Loss:
        return next_token_cross_entropy(
            made.model(replace(batch, features=features * 1.0)).logits, TOKENS[:, 1:], TOKEN_MASK
        )

    losses = align(made, shown, 0.5, TOKEN_MASK).losses[MASKS]
    sum(one.mean() for one in losses.values()).backward()
    assert features.grad is None
    assert all(one.grad is None for one in made.captioner_parameters())
    assert all(one.grad is not None for one in made.mask_parameters())


def test_two_optimizers_in_a_plain_loop_improve_captions():
    """The caption loss decreases within a few steps, as with `fit`."""
    made = make_aligner(seed=3)
    first = torch.optim.SGD(made.captioner_parameters(), lr=0.1)
    second = torch.optim.SGD(made.mask_parameters(), lr=0.1)
    scores = []
    for _ in range(8):
        losses = align(made, lambda: caption_loss(made), 0.1, TOKEN_MASK).losses
        scores.append(float(losses[CAPTIONER]["caption"].mean().detach()))
        sum(one.mean() for group in losses.values() for one in group.values()).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert scores[-1] < scores[0] - 0.1


def test_a2_10_a_mask_step_increases_the_perturbed_loss():
    made = make_aligner(seed=3)

    @torch.no_grad()
    def harm():
        with made.perturbed():
            return float(caption_loss(made).total)

    before = harm()
    step(made, MASKS, made.mask_parameters(), rate=0.05, strength=0.0)
    assert harm() > before


class OneRegion(nn.Module):
    """A model whose logit is its attention to region 1 of 4; `scores` set the attention."""

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


def trained_perturbation(scores, average):
    """Train masks on the loss -log sigmoid(logit) and return 1 - m of every region."""
    torch.manual_seed(0)
    model = OneRegion(scores)
    made = Aligner(model, find_cross_attention(model, model), average=average)
    optimizer = torch.optim.Adam(made.mask_parameters(), lr=0.05)
    for _ in range(40):
        with made.perturbed() as found:
            harm = -nn.functional.logsigmoid(model())
        loss = -harm + found.penalty().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 1 - found.masks["cross"][0].detach().flatten()


@pytest.mark.long
def test_a2_12_masks_find_the_decisive_region():
    """Removal finds it for any attention; averaging finds it only if attention is on it.

    Perturbing by the mean raises regions below the mean, which does no harm.
    """
    elsewhere, on_it = [2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]
    assert int(trained_perturbation(elsewhere, zero_average).argmax()) == 1
    assert int(trained_perturbation(on_it, zero_average).argmax()) == 1
    assert int(trained_perturbation(on_it, uniform_average).argmax()) == 1
    assert int(trained_perturbation(elsewhere, uniform_average).argmin()) == 1


@pytest.mark.parametrize("finish", [fuse_renormalized, fuse_as_published, fuse_enhanced_normalized])
@torch.no_grad()
def test_a2_13_absent_regions_get_no_attention(finish):
    made, batch = make_aligner(finish=finish), region_batch()
    hidden = ~batch.region_mask[:, None, None]
    for passing in (made.aligned, made.perturbed):
        with passing() as found:
            made.model(batch)
        for weights in cross_weights(found.trace):
            assert not weights[hidden.expand_as(weights)].any()


@torch.no_grad()
def test_aligner_decodes_and_returns_aligned_attention():
    check_decoder(make_aligner, region_batch(), TOKENS[:, :-1])
    made, batch = make_aligner(seed=3), region_batch()
    rules = DecodingRules(max_length=4)
    for found in (greedy(made, batch, rules), beam_search(made, batch, 3, rules)):
        begun = torch.cat([torch.full((3, 1), rules.begin), found.tokens[:, :-1]], dim=1)
        with made.aligned() as trace:
            made.model.decode_captions(made.encode(batch), begun)
        expected = torch.stack(cross_weights(trace.trace), dim=1)
        rows = found.mask[:, None, None, :, None]
        (shown,) = found.attention
        torch.testing.assert_close(shown.weights, expected * rows, atol=1e-5, rtol=0)
        plain = made.model.decode_captions(made.encode(batch), begun).attention.weights
        assert (plain - expected).abs().max() > 1e-3


@torch.no_grad()
def test_aligner_leaves_the_model_unchanged_and_aligns_on_call():
    made, batch = make_aligner(), region_batch()
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
    made = make_aligner()
    with made.aligned() as found:
        made.model(region_batch())
    assert [one.name for one in found.report(TOKEN_MASK)] == ["decoder.0.cross", "decoder.1.cross"]
    assert not any(one.collapsed for one in found.report(TOKEN_MASK))
    for network in made.masks.values():
        nn.init.constant_(network.bias, 9.0)
        for layer in (network.query, network.key):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    with made.aligned() as found:
        made.model(region_batch())
    report = found.report(TOKEN_MASK)
    assert all(one.collapsed and one.mean > 0.99 for one in report)
    assert "decoder.0.cross perturbs nothing: lower lambda" in report[0].advice
    assert "raise lambda" in MaskReport("one", 0.01, 0.0).advice
    assert "by 0.40" in MaskReport("one", 0.6, 0.001).advice
    assert not MaskReport("one", 0.6, 0.2).advice
    with pytest.raises(ValueError, match=r"attention.*masked"):
        AlignmentPass().penalty()


def test_presets_set_the_published_choices():
    printed = make_aligner(**published_choices(regions=5))
    assert printed.average is head_mean and printed.finish is fuse_as_published
    assert printed.penalty is square_norm
    code = make_aligner(**lu2021_choices())
    assert (
        code.through is keep_mask_gradient
        and code.penalty is global_norm
        and code.average is uniform_average
    )
    assert next(iter(code.fusions.values())).weight.shape == (1, 4)
    for made in (printed, code, make_aligner(mask=RandomMask)):
        losses = align(made, lambda made=made: caption_loss(made), rows=TOKEN_MASK).losses
        assert all(one.total.isfinite() for group in losses.values() for one in group.values())
        assert losses[MASKS]["harm"].weight == -1


def test_aligner_wraps_bart():
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
    places = find_cross_attention(model, lambda: model(**inputs))
    assert list(places) == [f"model.decoder.layers.{at}.encoder_attn" for at in range(2)]
    made = Aligner(model, places)
    labels = torch.tensor([[4, 5, 6], [8, 9, 10]])
    seen = torch.ones(2, 3, dtype=torch.bool)
    found = align(made, lambda: next_token_cross_entropy(model(**inputs).logits, labels, seen))
    objective = sum(one.mean() for one in found.losses[MASKS].values())
    objective.backward(inputs=made.mask_parameters())
    assert all(one.grad is not None for one in made.mask_parameters())
    assert all(one.grad is None for one in made.captioner_parameters())
    for weights in cross_weights(found.aligned.trace):
        assert not weights[1, :, :, 2:].any()
    prompt = {"input_ids": ids, "attention_mask": ids != 1, "max_new_tokens": 3}
    plain = generate(model, **prompt).attention.weights
    aligned = generate(model, edit=made.edit(), **prompt).attention.weights
    assert plain.shape == aligned.shape and not torch.allclose(plain, aligned)


def test_aligner_without_cross_attention_raises():
    with pytest.raises(ValueError, match="find_cross_attention"):
        Aligner(captioner(), {})


class Captions:
    """The toy batch as a dataset of three samples."""

    def __len__(self):
        return 3

    def batch(self, indices):
        return region_batch().select(torch.tensor(list(indices)))


def test_fit_trains_both_parameter_sets(tmp_path):
    made = make_aligner(fuse=decay)
    before = clone_state(made)

    def one(model, batch, progress):
        model.advance(3 * progress.fraction)
        rows = batch.tokens[:, 1:] != PAD

        def caption():
            return next_token_cross_entropy(model.model(batch).logits, batch.tokens[:, 1:], rows)

        return align(model, caption, strength=0.5, rows=rows).losses

    sets = {
        CAPTIONER: ParameterSet(torch.optim.Adam(made.captioner_parameters(), lr=0.01)),
        MASKS: ParameterSet(torch.optim.Adam(made.mask_parameters(), lr=0.01)),
    }
    limits = FitConfig(epochs=3, batch=3)
    fitted = fit(made, Captions(), one, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert fitted.steps == 3
    moved = {name.split(".")[0] for name, value in clone_state(made).items()
             if not value.equal(before[name])}  # fmt: skip
    assert moved == {"model", "masks", "fusions"}
    assert float(next(iter(made.fusions.values())).elapsed) == pytest.approx(3 * 2 / 3)


@pytest.mark.long
@pytest.mark.parametrize("way", ["aligned", "perturbed"])
def test_alignment_pass_is_freed_without_garbage_collection(way):
    """A reference cycle through the edit would keep the graph of every step until a collection."""
    made = make_aligner()
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


def test_saved_aligner_gives_equal_logits(tmp_path):
    made = make_aligner(fuse=decay, average=head_mean, finish=fuse_as_published)
    made.save_pretrained(tmp_path / "kept")
    again = Aligner.from_pretrained(tmp_path / "kept")
    assert again.config() == made.config() and not again.training
    expected = made(region_batch())
    assert torch.equal(again(region_batch()).logits, expected.logits)
    other = Aligner.from_pretrained(tmp_path / "kept", model=captioner(seed=3))
    assert torch.equal(other(region_batch()).logits, expected.logits)


def test_custom_choices_must_be_passed_to_from_pretrained(tmp_path):
    made = make_aligner(**published_choices(regions=12))
    made.save_pretrained(tmp_path / "kept")
    with pytest.raises(UserError, match=r"mask=linear.*nothing.*mask="):
        Aligner.from_pretrained(tmp_path / "kept")
    again = Aligner.from_pretrained(tmp_path / "kept", mask=published_choices(regions=12)["mask"])
    assert torch.equal(again(region_batch()).logits, made(region_batch()).logits)
    with pytest.raises(UserError, match=r"fuse=gate.*decay"):
        Aligner.from_pretrained(tmp_path / "kept", fuse=decay, mask=published_choices(12)["mask"])


def test_saved_names_of_choices_are_stable():
    assert make_aligner().config()["choices"] == {
        "fuse": "gate",
        "mask": "query_key",
        "average": "uniform",
        "finish": "renormalised",
        "through": "detached",
        "penalty": "mean_square",
    }
    assert list(make_aligner(**lu2021_choices()).choices.values()) == [
        *("shared_gate", "query_key", "uniform", "as_printed", "attached", "norm_of_all")
    ]
    printed = make_aligner(**published_choices(regions=12), fuse=max_pooling).choices
    assert printed["mask"] == "linear.<locals>.<lambda>" and printed["average"] == "head_mean"
    changed = make_aligner(average=zero_average, finish=fuse_enhanced_normalized).choices
    assert (changed["average"], changed["finish"]) == ("nothing", "enhanced_first")


def test_a_scalar_task_loss_is_the_mean_over_the_words():
    made = make_aligner()
    summed = align(made, lambda: caption_loss(made), rows=TOKEN_MASK).losses
    for rows, count in ((TOKEN_MASK, TOKEN_MASK.sum()), (None, 1)):
        mean = align(made, lambda: caption_loss(made).mean(), rows=rows).losses
        for group, name in ((CAPTIONER, "caption"), (MASKS, "harm")):
            assert mean[group][name].count == count
            torch.testing.assert_close(mean[group][name].mean(), summed[group][name].mean())


def test_generate_runs_the_aligned_model():
    class Writer(nn.Module):
        def generate(self, batch, length):
            return made.model(batch).logits[:, :length]

    made, batch = make_aligner(fuse=decay), region_batch()
    made.model.generate = Writer().generate
    with torch.no_grad(), made.aligned():
        expected = made.model(batch).logits[:, :2]
    assert torch.equal(made.generate(batch, length=2), expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda made: align(made.model, lambda: None), TypeError, "got Captioner"),
        (lambda made: align(made, caption_loss(made)), TypeError, "Aligner.*Loss"),
        (
            lambda made: align(made, lambda: caption_loss(made) and "x"),
            TypeError,
            "Loss.*str",
        ),
        (
            lambda made: align(made, lambda: caption_loss(made), rows=torch.ones(1, 2).bool()),
            ValueError,
            r"rows.*\(1, 2\)",
        ),
        (
            lambda made: align(made, lambda: caption_loss(made), rows=TOKEN_MASK.float()),
            ValueError,
            "bool.*float32",
        ),
        (lambda made: Aligner(made.model, made.places, fuse="gate"), TypeError, "fuse.*gate"),
        (
            lambda made: Aligner(made.model, [*made.places]),
            ValueError,
            "list.*find_",
        ),
        (lambda made: find_cross_attention(made.model, 3), TypeError, "lambda.*int"),
    ],
)
def test_wrong_arguments_are_named(call, error, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(error, match=message):
        call(make_aligner())
