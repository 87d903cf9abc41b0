"""Words and their regions: against scipy, against captions told again region by region."""

from dataclasses import replace

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import kendalltau

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.data.vocabulary import PAD
from overt.measure.agreement import js, kendall
from overt.measure.controls import random_map
from overt.measure.grounding import grounding_accuracy
from overt.measure.wording import (
    absolute,
    alignment_divergence,
    effect_agreement,
    fall,
    hiding,
    looked_at,
    of_next,
    over_words,
    region_effects,
    region_gradients,
    row_by_row,
    spoken,
)
from overt.supervise.perturb import (
    Aligner,
    as_printed,
    crossings,
    enhanced_first,
    renormalised,
)
from overt.supervise.reward import log_probabilities
from tests.models.captioning.test_captioner import TOKENS, captioner, region_batch

ROWS = TOKENS[:, 1:] != PAD


def said(model, features=None, mask=None):
    """The log-probability of every word of the toy captions."""
    features = model.encode(region_batch()) if features is None else features
    return log_probabilities(model.write(features, TOKENS[:, :-1], mask).logits, TOKENS[:, 1:])


@pytest.fixture
def model():
    return captioner(seed=2)


@pytest.fixture
def attention(model):
    return spoken(model(region_batch()).attention, ROWS).detach()


def random_maps(generator, layers=2, heads=2):
    weights = torch.rand(2, layers, heads, 3, 4, generator=generator)
    mask = torch.tensor([[True] * 4, [True, True, True, False]])[:, None].expand(2, 3, 4).clone()
    mask[1, 2] = False
    values = weights * mask[:, None, None]
    return AttentionMap(values, regions(4), words(3), mask, Kind.AMOUNT).normalize()


def test_rows_are_hidden_by_word(model):
    whole = model(region_batch()).attention
    for kept in (whole, replace(whole, values=whole.weights, form=Form.PLAIN)):
        found = spoken(kept, ROWS)
        found.check()
        assert torch.equal(found.rows, ROWS)
        assert not found.weights.transpose(1, 3)[~ROWS].any()
        there = found.weights.transpose(1, 3)[ROWS]
        torch.testing.assert_close(there, whole.weights.transpose(1, 3)[ROWS])


def test_the_truth_moves_to_the_row_that_writes_the_word():
    truth = torch.zeros(1, 1, 1, 4, 3)
    truth[0, 0, 0, 2, 1] = 1  # the word at place 2 speaks of region 1
    mask = (truth[:, 0, 0] > 0).any(-1, keepdim=True).expand(1, 4, 3)
    moved = of_next(AttentionMap(truth, regions(3), words(4), mask, Kind.AMOUNT))
    assert moved.rows.tolist() == [[False, True, False]]
    looks = torch.eye(3)[[0, 1, 2]].view(1, 1, 1, 3, 3)
    attention = AttentionMap(looks, regions(3), words(3))
    assert grounding_accuracy(attention, moved).item() == 1
    with pytest.raises(ValueError, match="no word after"):
        of_next(AttentionMap(truth[..., :1, :], regions(3), words(1)))


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


def test_words_on_which_nothing_has_an_effect_do_not_count(generator):
    weights, effect = random_maps(generator), random_maps(generator, 1, 1)
    dead = replace(effect, values=effect.values.clone(), kind=Kind.AMOUNT)
    dead.values[0, :, :, 1] = 0
    rows = row_by_row(kendall, weights.over_heads(), effect)[0, :, 0]
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


def test_rows_without_a_word_have_no_number(generator):
    weights = random_maps(generator)
    numbers = row_by_row(kendall, weights, random_maps(generator, 1, 1))
    assert numbers.shape == (2, 2, 2, 3)
    assert numbers[1, :, :, 2].isnan().all() and numbers[0].isfinite().all()
    assert over_words(torch.full((1, 1, 1, 2), torch.nan)).isnan().all()
    with pytest.raises(ValueError, match="same words and regions"):
        row_by_row(js, weights, AttentionMap(torch.ones(2, 1, 1, 1, 3), regions(3)))


@torch.no_grad()
def test_removal_agrees_with_captions_told_again(model, attention):
    tell = hiding(model, lambda: said(model))
    found = region_effects(tell, attention)
    features, present = model.encode(region_batch()), region_batch().region_mask
    whole = said(model, features)
    torch.testing.assert_close(tell(present[:, None]), whole)
    for key in range(5):
        keep = present.clone()
        keep[:, key] = False
        expected = (whole - said(model, features, {"regions": keep.float()})).abs()
        expected = expected * (ROWS & present[:, [key]])
        torch.testing.assert_close(
            found.weights[:, 0, 0, :, key].float(), expected, atol=1e-5, rtol=1e-4
        )
    signed = region_effects(tell, attention, lambda change: change)
    torch.testing.assert_close(signed.weights.abs(), found.weights)
    assert signed.kind is Kind.SIGNED and found.kind is Kind.AMOUNT


@torch.no_grad()
def test_a_region_that_is_alone_stays(model):
    batch = region_batch(counts=(5, 1, 4))
    seen = spoken(model(batch).attention, ROWS)

    def tell():
        return log_probabilities(model(batch).logits, TOKENS[:, 1:])

    found = region_effects(hiding(model, tell), seen)
    assert found.weights.isfinite().all() and not found.weights[1].any()


def test_gradients_agree_with_a_backward_pass_a_word(model, attention):
    features = model.encode(region_batch())
    found = region_gradients(
        lambda states: said(model, replace(features, states=states)), features.states, attention
    )
    assert all(value.grad is None for value in model.parameters())
    sums = region_gradients(
        lambda states: said(model, replace(features, states=states)),
        *(features.states, attention, absolute),
    )
    for b, q in ROWS.nonzero().tolist():
        states = features.states.detach().clone().requires_grad_()
        told = model.write(replace(features, states=states), TOKENS[:, :-1]).logits
        probability = told[b, q].softmax(-1)[TOKENS[b, q + 1]]
        probability.backward()
        slope = states.grad[b].masked_fill(~region_batch().region_mask[b, :, None], 0)
        slope = slope / probability.detach()  # of the logarithm
        row = found.weights[b, 0, 0, q].float()
        torch.testing.assert_close(row, slope.norm(dim=-1), atol=1e-5, rtol=1e-3)
        row = sums.weights[b, 0, 0, q].float()
        torch.testing.assert_close(row, slope.abs().sum(-1), atol=1e-5, rtol=1e-3)
    with pytest.raises(ValueError, match="does not depend"):
        region_gradients(lambda states: torch.zeros(3, 4), features.states, attention)


@torch.no_grad()
def test_hiding_from_one_word_is_hiding_from_it_alone(model, attention, generator):
    """A word whose regions are all open, and that stands before, is told as before."""
    tell = hiding(model, lambda: said(model))
    keep = attention.visible.any(1)[:, None].expand(3, 4, 5).clone()
    keep[:, 2, :2] = False
    told, whole = tell(keep), said(model)
    torch.testing.assert_close(told[:, :2], whole[:, :2])
    assert (told[:, 2] - whole[:, 2]).abs().max() > 1e-4
    only = hiding(model, lambda: said(model), layers=["decoder.1.cross"])
    assert (only(keep)[:, 2] - told[:, 2]).abs().max() > 1e-5
    with pytest.raises(ValueError, match="was told for"):
        tell(keep[:, :, :3])


@torch.no_grad()
def test_the_fall_of_words_step_by_step(model, attention, generator):
    tell = hiding(model, lambda: said(model))
    effect = region_effects(tell, attention)
    found = fall(tell, effect, generator, shares=(0.0, 0.4, 1.0))
    assert not found.drop[0].any()
    order = effect.weights[:, 0, 0].argsort(dim=-1, descending=True)
    for at, share in ((1, 0.4), (2, 1.0)):
        keep = region_batch().region_mask[:, None].expand(3, 4, 5).clone()
        for b, q in ROWS.nonzero().tolist():
            there = int(region_batch().region_mask[b].sum())
            taken = min(max(1, round(share * there)), there - 1)
            keep[b, q, order[b, q, :taken]] = False
        expected = (said(model) - tell(keep)).double()
        expected = torch.where(ROWS, expected, torch.nan).nanmean(-1)
        torch.testing.assert_close(found.drop[at], expected, atol=1e-6, rtol=1e-4)
    drop = found.drop
    area = 0.4 * (drop[0] + drop[1]) / 2 + 0.6 * (drop[1] + drop[2]) / 2
    torch.testing.assert_close(found.area, area.float())
    again = fall(tell, random_map(effect, generator), generator)
    assert again.drop.isfinite().all() and again.told.shape == (10, 3, 4)


def test_curves_that_are_none_are_refused(attention, generator):
    one = attention.over_layers().over_heads()
    tell = torch.zeros
    for shares in ((), (0.5, 0.2), (0.1, 1.5)):
        with pytest.raises(ValueError, match="must grow"):
            fall(tell, one, generator, shares)
    with pytest.raises(ValueError, match="fuse the others"):
        fall(tell, attention, generator)
    with pytest.raises(ValueError, match="two shares"):
        _ = fall(lambda keep: torch.zeros(3, 4), one, generator, (0.5,)).area


@torch.no_grad()
def test_masks_and_both_attentions_of_an_aligner(model):
    """What an aligner hides it hides from its own words; its maps are those of one pass."""
    batch = region_batch()
    aligner = Aligner(model, crossings(model, lambda: model(batch))).eval()
    with aligner.aligned() as seen:
        model(batch)
    layout = (words(4), model.encode(batch).layout)
    before, after = (spoken(one(layout), ROWS) for one in (seen.before, seen.after))
    disturbed = spoken(seen.disturbance(layout), ROWS)
    assert before.keys.spans[0].name == "regions"
    plain = spoken(model(batch).attention, ROWS)
    torch.testing.assert_close(before.layer(0).weights, plain.layer(0).weights)
    bias = after.weights / before.weights.clamp_min(1e-12)
    assert (bias[before.weights > 0] != 1).any() and disturbed.weights.max() < 1
    divergence = alignment_divergence(before, after)
    assert divergence.shape == (3, 2) and (divergence > 0).all() and (divergence < 0.1).all()

    def aligned():
        with aligner.aligned():
            return said(model)

    effect = region_effects(hiding(model, aligned), after)
    assert effect_agreement(disturbed, effect).shape == (3, 2)
    other = region_effects(hiding(model, lambda: said(model)), after)
    assert (effect.weights - other.weights).abs().max() > 1e-5
    with aligner.aligned() as twice:
        model(batch)
        model(batch)
    with pytest.raises(ValueError, match="run once"):
        twice.before()


@pytest.mark.parametrize("finish", [renormalised, as_printed, enhanced_first])
@torch.no_grad()
def test_what_is_hidden_is_hidden_from_an_aligner(model, finish):
    batch = region_batch()
    aligner = Aligner(model, crossings(model, lambda: model(batch)), finish=finish).eval()
    keep = batch.region_mask[:, None].expand(3, 4, 5).clone()
    keep[:, 1, 0] = False
    found = []
    for passing in (aligner.aligned, aligner.perturbed):

        def told(passing=passing):
            with passing() as seen:
                result = said(model)
            found.append(seen.after().weights)
            return result

        assert hiding(model, told)(keep).isfinite().all()
    for weights in found:
        assert not weights[:, :, :, 1, 0].any() and (weights[:, :, :, 2, 0] > 0).all()


def test_the_region_each_word_looks_at(attention):
    found = looked_at(attention)
    mean = attention.weights.mean(dim=(1, 2))
    for b in range(3):
        for q in range(4):
            expected = int(mean[b, q].argmax()) if ROWS[b, q] else -1
            assert int(found[b, q]) == expected
