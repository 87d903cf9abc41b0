"""Word-region alignment compared with scipy and with decoding without each region."""

from dataclasses import replace

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import kendalltau

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.data.vocabulary import PAD
from overt.losses.caption_reward import log_probabilities
from overt.metrics.agreement import js, kendall
from overt.metrics.controls import random_map
from overt.metrics.grounding import grounding_accuracy
from overt.metrics.word_alignment import (
    alignment_divergence,
    effect_agreement,
    hide_regions,
    l1_norm,
    mean_over_words,
    most_attended_region,
    region_deletion_curve,
    region_effects,
    region_gradients,
    score_each_row,
    select_words,
    shift_to_next_word,
)
from overt.nn.mask_perturbation import (
    Aligner,
    find_cross_attention,
    fuse_as_published,
    fuse_enhanced_normalized,
    fuse_renormalized,
)
from tests.nn.captioning.test_captioner import TOKENS, captioner, region_batch

ROWS = TOKENS[:, 1:] != PAD


def word_log_probs(model, features=None, mask=None):
    """Return the log-probability of every word of the toy captions."""
    features = model.encode(region_batch()) if features is None else features
    return log_probabilities(
        model.decode_captions(features, TOKENS[:, :-1], mask).logits, TOKENS[:, 1:]
    )


@pytest.fixture
def model():
    return captioner(seed=2)


@pytest.fixture
def attention(model):
    return select_words(model(region_batch()).attention, ROWS).detach()


def random_maps(generator, layers=2, heads=2):
    weights = torch.rand(2, layers, heads, 3, 4, generator=generator)
    mask = torch.tensor([[True] * 4, [True, True, True, False]])[:, None].expand(2, 3, 4).clone()
    mask[1, 2] = False
    values = weights * mask[:, None, None]
    return AttentionMap(values, regions(4), words(3), mask, Kind.AMOUNT).normalize()


def test_select_words_hides_padding_rows(model):
    whole = model(region_batch()).attention
    for kept in (whole, replace(whole, values=whole.weights, form=Form.PLAIN)):
        found = select_words(kept, ROWS)
        found.check()
        assert torch.equal(found.rows, ROWS)
        assert not found.weights.transpose(1, 3)[~ROWS].any()
        there = found.weights.transpose(1, 3)[ROWS]
        torch.testing.assert_close(there, whole.weights.transpose(1, 3)[ROWS])


def test_the_truth_shifts_to_the_row_that_predicts_the_word():
    truth = torch.zeros(1, 1, 1, 4, 3)
    truth[0, 0, 0, 2, 1] = 1  # the word at position 2 is grounded in region 1
    mask = (truth[:, 0, 0] > 0).any(-1, keepdim=True).expand(1, 4, 3)
    moved = shift_to_next_word(AttentionMap(truth, regions(3), words(4), mask, Kind.AMOUNT))
    assert moved.rows.tolist() == [[False, True, False]]
    looks = torch.eye(3)[[0, 1, 2]].view(1, 1, 1, 3, 3)
    attention = AttentionMap(looks, regions(3), words(3))
    assert grounding_accuracy(attention, moved).item() == 1
    with pytest.raises(ValueError, match="at least 2 tokens"):
        shift_to_next_word(AttentionMap(truth[..., :1, :], regions(3), words(1)))


def test_kendall_by_layer_agrees_with_scipy(generator):
    weights, effect = random_maps(generator), random_maps(generator, 1, 1)
    found = effect_agreement(weights, effect)
    mean = weights.weights.mean(dim=2)
    for b in range(2):
        for l in range(2):
            taus = []
            for q in range(3 if b == 0 else 2):
                seen = weights.visible[b, q]
                taus.append(
                    kendalltau(mean[b, l, q][seen], effect.weights[b, 0, 0, q][seen]).statistic
                )
            assert float(found[b, l]) == pytest.approx(sum(taus) / len(taus), abs=1e-6)


def test_words_without_any_effect_are_left_out(generator):
    weights, effect = random_maps(generator), random_maps(generator, 1, 1)
    dead = replace(effect, values=effect.values.clone(), kind=Kind.AMOUNT)
    dead.values[0, :, :, 1] = 0
    rows = score_each_row(kendall, weights.over_heads(), effect)[0, :, 0]
    expected = (rows[:, 0] + rows[:, 2]) / 2
    torch.testing.assert_close(effect_agreement(weights, dead)[0], expected)


def test_divergence_by_layer_agrees_with_scipy(generator):
    before, after = random_maps(generator), random_maps(generator)
    found = alignment_divergence(before, replace(after, values=2 * after.values, kind=Kind.AMOUNT))
    for l in range(2):
        each = [
            jensenshannon(before.weights[0, l, h, q], after.weights[0, l, h, q]) ** 2
            for h in range(2)
            for q in range(3)
        ]
        assert float(found[0, l]) == pytest.approx(sum(each) / 6, abs=1e-6)
    assert not alignment_divergence(before, before).any()


def test_rows_without_a_word_give_nan(generator):
    weights = random_maps(generator)
    numbers = score_each_row(kendall, weights, random_maps(generator, 1, 1))
    assert numbers.shape == (2, 2, 2, 3)
    assert numbers[1, :, :, 2].isnan().all() and numbers[0].isfinite().all()
    assert mean_over_words(torch.full((1, 1, 1, 2), torch.nan)).isnan().all()
    with pytest.raises(ValueError, match=r"words.*regions"):
        score_each_row(js, weights, AttentionMap(torch.ones(2, 1, 1, 1, 3), regions(3)))


@pytest.mark.long
@torch.no_grad()
def test_region_effects_agree_with_decoding_without_each_region(model, attention):
    masked_log_probs = hide_regions(model, lambda: word_log_probs(model))
    found = region_effects(masked_log_probs, attention)
    features, present = model.encode(region_batch()), region_batch().region_mask
    whole = word_log_probs(model, features)
    torch.testing.assert_close(masked_log_probs(present[:, None]), whole)
    for key in range(5):
        keep = present.clone()
        keep[:, key] = False
        expected = (whole - word_log_probs(model, features, {"regions": keep.float()})).abs()
        expected = expected * (ROWS & present[:, [key]])
        torch.testing.assert_close(
            found.weights[:, 0, 0, :, key].float(), expected, atol=1e-5, rtol=1e-4
        )
    signed = region_effects(masked_log_probs, attention, lambda change: change)
    torch.testing.assert_close(signed.weights.abs(), found.weights)
    assert signed.kind is Kind.SIGNED and found.kind is Kind.AMOUNT


@torch.no_grad()
def test_a_single_region_is_kept(model):
    batch = region_batch(counts=(5, 1, 4))
    seen = select_words(model(batch).attention, ROWS)

    def masked_log_probs():
        return log_probabilities(model(batch).logits, TOKENS[:, 1:])

    found = region_effects(hide_regions(model, masked_log_probs), seen)
    assert found.weights.isfinite().all() and not found.weights[1].any()


def test_region_gradients_agree_with_one_backward_pass_per_word(model, attention):
    features = model.encode(region_batch())
    found = region_gradients(
        lambda states: word_log_probs(model, replace(features, states=states)),
        features.states,
        attention,
    )
    assert all(value.grad is None for value in model.parameters())
    sums = region_gradients(
        lambda states: word_log_probs(model, replace(features, states=states)),
        *(features.states, attention, l1_norm),
    )
    for b, q in ROWS.nonzero().tolist():
        states = features.states.detach().clone().requires_grad_()
        outputs = model.decode_captions(replace(features, states=states), TOKENS[:, :-1]).logits
        probability = outputs[b, q].softmax(-1)[TOKENS[b, q + 1]]
        probability.backward()
        slope = states.grad[b].masked_fill(~region_batch().region_mask[b, :, None], 0)
        slope = slope / probability.detach()  # gradient of the logarithm
        row = found.weights[b, 0, 0, q].float()
        torch.testing.assert_close(row, slope.norm(dim=-1), atol=1e-5, rtol=1e-3)
        row = sums.weights[b, 0, 0, q].float()
        torch.testing.assert_close(row, slope.abs().sum(-1), atol=1e-5, rtol=1e-3)
    with pytest.raises(ValueError, match="no gradient"):
        region_gradients(lambda states: torch.zeros(3, 4), features.states, attention)


@torch.no_grad()
def test_hiding_regions_from_one_word_affects_only_later_words(model, attention, generator):
    """An earlier word with all regions visible keeps its log-probability."""
    masked_log_probs = hide_regions(model, lambda: word_log_probs(model))
    keep = attention.visible.any(1)[:, None].expand(3, 4, 5).clone()
    keep[:, 2, :2] = False
    outputs, whole = masked_log_probs(keep), word_log_probs(model)
    torch.testing.assert_close(outputs[:, :2], whole[:, :2])
    assert (outputs[:, 2] - whole[:, 2]).abs().max() > 1e-4
    only = hide_regions(model, lambda: word_log_probs(model), layers=["decoder.1.cross"])
    assert (only(keep)[:, 2] - outputs[:, 2]).abs().max() > 1e-5
    with pytest.raises(ValueError, match=r"keep.*shape"):
        masked_log_probs(keep[:, :, :3])


@pytest.mark.long
@torch.no_grad()
def test_region_deletion_curve_agrees_with_a_loop(model, attention, generator):
    masked_log_probs = hide_regions(model, lambda: word_log_probs(model))
    effect = region_effects(masked_log_probs, attention)
    found = region_deletion_curve(masked_log_probs, effect, generator, shares=(0.0, 0.4, 1.0))
    assert not found.drop[0].any()
    order = effect.weights[:, 0, 0].argsort(dim=-1, descending=True)
    for at, share in ((1, 0.4), (2, 1.0)):
        keep = region_batch().region_mask[:, None].expand(3, 4, 5).clone()
        for b, q in ROWS.nonzero().tolist():
            there = int(region_batch().region_mask[b].sum())
            taken = min(max(1, round(share * there)), there - 1)
            keep[b, q, order[b, q, :taken]] = False
        expected = (word_log_probs(model) - masked_log_probs(keep)).double()
        expected = torch.where(ROWS, expected, torch.nan).nanmean(-1)
        torch.testing.assert_close(found.drop[at], expected, atol=1e-6, rtol=1e-4)
    drop, there = found.drop, region_batch().region_mask.sum(dim=-1)
    first = (0.4 * there).round().clamp_min(1).minimum(there - 1) / there
    last = (there - 1) / there
    area = first * (drop[0] + drop[1]) / 2 + (last - first) * (drop[1] + drop[2]) / 2
    torch.testing.assert_close(found.area, (area / last).float())
    again = region_deletion_curve(masked_log_probs, random_map(effect, generator), generator)
    assert again.drop.isfinite().all() and again.log_probability.shape == (10, 3, 4)


@pytest.mark.parametrize("count", [2, 3, 7, 20])
def test_the_area_uses_the_share_actually_hidden(count, generator):
    """With two regions a share of .1 removes one region, that is one half."""
    weights = torch.rand(2, 1, 1, 3, count, generator=generator)
    one = AttentionMap(weights, words(count), words(3)).normalize()

    def masked_log_probs(keep):
        return keep.double().mean(dim=-1)  # proportional to the visible share

    found = region_deletion_curve(masked_log_probs, one, generator)
    torch.testing.assert_close(found.removed, 1 - found.log_probability)
    most = min(round(0.9 * count), count - 1) / count
    torch.testing.assert_close(found.area, torch.full((2,), most / 2))


def test_a_word_with_one_region_has_no_area(generator):
    one = AttentionMap(torch.ones(1, 1, 1, 2, 1), words(1), words(2))
    found = region_deletion_curve(lambda keep: torch.zeros(1, 2), one, generator)
    assert found.area.isnan().all()


def test_invalid_shares_and_maps_raise(attention, generator):
    one = attention.over_layers().over_heads()
    masked_log_probs = torch.zeros
    for shares in ((), (0.5, 0.2), (0.1, 1.5)):
        with pytest.raises(ValueError, match="must increase"):
            region_deletion_curve(masked_log_probs, one, generator, shares)
    with pytest.raises(ValueError, match=r"one layer.*head"):
        region_deletion_curve(masked_log_probs, attention, generator)
    with pytest.raises(ValueError, match="at least 2 shares"):
        _ = region_deletion_curve(lambda keep: torch.zeros(3, 4), one, generator, (0.5,)).area


@pytest.mark.long
@torch.no_grad()
def test_an_aligner_returns_attention_before_and_after_and_its_mask(model):
    """An aligner perturbs its own words; its maps belong to one forward pass."""
    batch = region_batch()
    aligner = Aligner(model, find_cross_attention(model, lambda: model(batch))).eval()
    with aligner.aligned() as trace:
        model(batch)
    layout = (words(4), model.encode(batch).layout)
    before, after = (select_words(one(layout), ROWS) for one in (trace.before, trace.after))
    disturbed = select_words(trace.perturbation(layout), ROWS)
    assert before.keys.spans[0].name == "regions"
    plain = select_words(model(batch).attention, ROWS)
    torch.testing.assert_close(before.layer(0).weights, plain.layer(0).weights)
    bias = after.weights / before.weights.clamp_min(1e-12)
    assert (bias[before.weights > 0] != 1).any() and disturbed.weights.max() < 1
    divergence = alignment_divergence(before, after)
    assert divergence.shape == (3, 2) and (divergence > 0).all() and (divergence < 0.1).all()

    def aligned():
        with aligner.aligned():
            return word_log_probs(model)

    effect = region_effects(hide_regions(model, aligned), after)
    assert effect_agreement(disturbed, effect).shape == (3, 2)
    other = region_effects(hide_regions(model, lambda: word_log_probs(model)), after)
    assert (effect.weights - other.weights).abs().max() > 1e-5
    with aligner.aligned() as twice:
        model(batch)
        model(batch)
    with pytest.raises(ValueError, match="ran once"):
        twice.before()


@pytest.mark.parametrize("finish", [fuse_renormalized, fuse_as_published, fuse_enhanced_normalized])
@torch.no_grad()
def test_hidden_regions_are_hidden_from_an_aligner(model, finish):
    batch = region_batch()
    aligner = Aligner(
        model, find_cross_attention(model, lambda: model(batch)), finish=finish
    ).eval()
    keep = batch.region_mask[:, None].expand(3, 4, 5).clone()
    keep[:, 1, 0] = False
    found = []
    for passing in (aligner.aligned, aligner.perturbed):

        def outputs(passing=passing):
            with passing() as trace:
                result = word_log_probs(model)
            found.append(trace.after().weights)
            return result

        assert hide_regions(model, outputs)(keep).isfinite().all()
    for weights in found:
        assert not weights[:, :, :, 1, 0].any() and (weights[:, :, :, 2, 0] > 0).all()


def test_most_attended_region_is_the_argmax_of_each_word(attention):
    found = most_attended_region(attention)
    mean = attention.weights.mean(dim=(1, 2))
    for b in range(3):
        for q in range(4):
            expected = int(mean[b, q].argmax()) if ROWS[b, q] else -1
            assert int(found[b, q]) == expected
