"""Attention interventions: edits by hand, a watched model and alternative attention."""

import math

import pytest
import scipy.spatial.distance
import torch
from torch import nn

from overt.attention import AttentionMap, Kind, words
from overt.capture.call import Call, MaterializedCall, Route
from overt.capture.edits import Bias
from overt.metrics import (
    editable_forward,
    js,
    knock_out_attention,
    output_change,
    permute_weights,
    uniform_weights,
)
from overt.metrics.interventions import (
    adversarial_distance,
    beyond_random_weights,
    drop_random_weights,
    drop_top_weights,
    edit_flips,
    find_alternative_attention,
    gain_over_uniform_attention,
    seed_divergence,
    weights_to_flip,
)
from overt.metrics.query_swap import total_variation
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


def make_call(weights: torch.Tensor, hidden: torch.Tensor | None = None) -> Call:
    """Return a call with these weights; hidden keys have a score of -inf."""
    logits = weights.clamp_min(1e-9).log()
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return Call(
        "toy",
        nn.Identity(),
        MaterializedCall(weights, Kind.PROBABILITY, logits),
        Route.SOFTMAX,
        False,
    )


@pytest.fixture
def weights_and_call(generator):
    """Return weights of 2 samples, 3 heads, 4 queries, 6 keys; one sample has 4 visible keys."""
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    scores = torch.randn(2, 3, 4, 6, generator=generator).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights, hidden, make_call(weights, hidden.expand_as(weights))


def test_permutation_keeps_weights_and_visibility(weights_and_call, generator):
    weights, hidden, call = weights_and_call
    found = permute_weights(generator)(call, weights)
    assert torch.equal(found.sort(dim=-1).values, weights.sort(dim=-1).values)
    assert not torch.equal(found, weights)
    assert (found.masked_select(hidden.expand_as(found)) == 0).all()
    one, two = (permute_weights(torch.Generator().manual_seed(2))(call, weights) for _ in range(2))
    assert torch.equal(one, two)


def test_uniform_weights_cover_visible_keys(weights_and_call):
    weights, _, call = weights_and_call
    found = uniform_weights(call, weights)
    torch.testing.assert_close(found[0], torch.full((3, 4, 6), 1 / 6))
    torch.testing.assert_close(found[1, ..., :4], torch.full((3, 4, 4), 1 / 4))
    assert (found[1, ..., 4:] == 0).all()
    half = uniform_weights(call, weights / 2)  # the weight of a learned sink is kept
    torch.testing.assert_close(half.sum(dim=-1), torch.full((2, 3, 4), 0.5))


def test_dropping_top_weights_renormalizes_the_others(weights_and_call):
    weights, _, call = weights_and_call
    found = drop_top_weights(0.3)(call, weights)
    for b, count in ((0, 2), (1, 1)):  # 0.3 of 6 and of 4 keys
        for h in range(3):
            for q in range(4):
                left = weights[b, h, q].clone()
                left[left.argsort(descending=True)[:count]] = 0
                torch.testing.assert_close(found[b, h, q], left / left.sum())
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 3, 4))


def test_dropping_keeps_at_least_one_visible_key(weights_and_call, generator):
    weights, hidden, call = weights_and_call
    for edit in (drop_top_weights(1.0), drop_random_weights(1.0, generator)):
        found = edit(call, weights)
        assert torch.equal((found > 0).sum(dim=-1), torch.ones(2, 3, 4, dtype=torch.long))
        assert (found.masked_select(hidden.expand_as(found)) == 0).all()
    single = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 1, 1, 3)
    spread = drop_top_weights(0.3)(make_call(single), single)  # all other weights were zero
    torch.testing.assert_close(spread.flatten(), torch.tensor([0.0, 0.5, 0.5]))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"above 0.* 1"):
            drop_top_weights(share)


def test_equal_weights_are_dropped_anywhere_and_the_same_each_time():
    """In the order of the keys, uniform attention would always lose its first keys."""
    even = torch.full((2, 4, 60, 10), 0.1)
    call = make_call(even)
    found = drop_top_weights(0.2)(call, even)
    dropped = (found == 0).float().mean(dim=(0, 1, 2))
    assert float(dropped.sum()) == pytest.approx(2)  # of ten
    assert float(dropped.min()) > 0.1 and float(dropped.max()) < 0.3
    assert torch.equal(found, drop_top_weights(0.2)(call, even))
    assert torch.equal(found[0], found[1])  # does not depend on the other samples


def test_random_drops_are_seeded_and_as_many_as_top_drops(weights_and_call):
    weights, _, call = weights_and_call
    one, two = (
        drop_random_weights(0.5, torch.Generator().manual_seed(3))(call, weights) for _ in "ab"
    )
    assert torch.equal(one, two)
    assert torch.equal(
        (one > 0).sum(dim=-1), (drop_top_weights(0.5)(call, weights) > 0).sum(dim=-1)
    )


def test_knock_out_does_not_renormalize(weights_and_call):
    weights, _, call = weights_and_call
    keys, queries = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    keys[:, 1], queries[:, 2] = True, True
    found = knock_out_attention(keys, queries)(call, weights)
    expected = weights.clone()
    expected[:, :, 2, 1] = 0
    assert torch.equal(found, expected)
    every = knock_out_attention(keys)(call, weights)
    assert (every[..., 1] == 0).all() and torch.equal(every[..., 2:], weights[..., 2:])
    with pytest.raises(ValueError, match=r"\(2, 6\).*\(2, 4\)"):
        knock_out_attention(keys[:, :5])(call, weights)


# --- a watched model


class Classifier(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.stack = Stack(attention(), attention())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.stack(x, mask).mean(dim=1))


@pytest.mark.parametrize("attention", [FusedAttention, WrittenAttention])
def test_editable_forward_runs_edits_and_restores_the_model(attention, generator):
    model = Classifier(attention).double().eval()
    x = torch.randn(5, 6, 16, dtype=torch.float64, generator=generator)
    run = editable_forward(model, lambda: model(3 * x))
    with torch.no_grad():
        before = run(None)
        torch.testing.assert_close(run(lambda call, weights: weights), before)
        after = run(uniform_weights)
    expected = (before.softmax(-1) - after.softmax(-1)).abs().sum(-1) / 2
    found = output_change(run, uniform_weights)
    torch.testing.assert_close(found, expected.float())
    assert (found > 0).all()
    assert torch.equal(
        edit_flips(run, uniform_weights), (before.argmax(-1) != after.argmax(-1)).float()
    )
    with torch.no_grad():
        assert torch.equal(model(3 * x), before), "the model is unchanged"
    assert (output_change(run, Bias(lambda call: torch.zeros(1, dtype=x.dtype))) < 1e-12).all()
    last = editable_forward(model, lambda: model(3 * x), layers=[1])
    assert not torch.equal(output_change(last, uniform_weights), found)
    drop = beyond_random_weights(run, torch.Generator().manual_seed(0), share=0.3, draws=2)
    assert drop.shape == (5,) and (drop.abs() <= 1).all()


def test_weights_to_flip_matches_an_example_by_hand():
    """Four keys vote by their weights; the last two together can outvote the first."""
    weights = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])[:, None, None]
    votes = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]])

    def run(edit):
        used = weights if edit is None else edit(make_call(weights), weights)
        return (used[:, 0, 0] @ votes).float()

    assert weights_to_flip(run, (0.25, 0.5, 0.75)).tolist() == [0.5, 0.25]
    assert weights_to_flip(run, (0.25,)).tolist() == [1, 0.25]
    # one weight of four is a quarter, even for a smaller share
    assert weights_to_flip(run, (0.01, 0.05, 0.5)).tolist() == [0.5, 0.25]
    with pytest.raises(ValueError, match="must increase"):
        weights_to_flip(run, (0.5, 0.25))


# --- other maps with the same answer


def weighted_mean_model(values: torch.Tensor):
    """Return a model that outputs the weighted mean of values."""
    return lambda weights: torch.einsum("bk,bkc->bc", weights, values.to(weights.dtype))


@pytest.fixture
def maps(generator):
    return AttentionMap.from_scores(torch.randn(6, 1, 1, 1, 8, generator=generator), words(8))


def test_equal_keys_allow_distant_alternative_attention(maps, generator):
    values = torch.randn(6, 1, 2, generator=generator).expand(6, 8, 2)
    found = find_alternative_attention(weighted_mean_model(values), maps, generator, steps=80)
    found.attention.check()
    assert (found.change <= 0.01).all()
    assert (found.distance > 0.5).all()  # ln 2 is 0.693
    torch.testing.assert_close(js(found.attention, maps), found.distance, atol=1e-5, rtol=0)


def test_distinct_keys_allow_no_alternative_attention(generator):
    """With three keys of three classes the output determines the weights."""
    maps = AttentionMap.from_scores(torch.randn(6, 1, 1, 1, 3, generator=generator), words(3))
    values = 2 * torch.eye(3).expand(6, 3, 3)
    found = find_alternative_attention(weighted_mean_model(values), maps, generator, steps=80)
    assert (found.change <= 0.01).all()
    assert (found.distance < 0.01).all()
    assert float(total_variation(found.attention, maps).max()) < 0.1


def test_the_search_is_seeded_and_leaves_no_gradient(maps, generator):
    values = torch.randn(6, 8, 2, generator=generator, requires_grad=True)
    one, two = (
        adversarial_distance(
            weighted_mean_model(values), maps, torch.Generator().manual_seed(1), steps=20
        )
        for _ in range(2)
    )
    assert torch.equal(one, two) and not one.requires_grad
    assert values.grad is None
    wide = adversarial_distance(
        weighted_mean_model(values), maps, torch.Generator().manual_seed(1), within=0.2, steps=20
    )
    assert float(wide.mean()) > float(one.mean())
    assert float(wide.max()) <= math.log(2)
    with pytest.raises(ValueError, match="within"):
        find_alternative_attention(weighted_mean_model(values), maps, generator, within=0.0)


def test_hidden_keys_stay_hidden_and_empty_rows_give_nan(generator):
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[1, 3:], seen[2] = False, False
    scores = torch.randn(3, 1, 1, 1, 5, generator=generator)
    maps = AttentionMap.from_scores(scores, words(5), mask=seen[:, None])
    values = torch.randn(3, 5, 2, generator=generator)
    found = find_alternative_attention(
        weighted_mean_model(values), maps, generator, within=0.1, steps=20
    )
    found.attention.check()
    assert found.distance.isnan().tolist() == [False, False, True]


# --- retraining


def test_gain_over_uniform_attention_is_a_difference():
    edits = []

    def train(edit):
        edits.append(edit)
        return torch.tensor([1.0, 1.0, 0.0]) if edit is None else torch.tensor([1.0, 0.0, 0.0])

    assert gain_over_uniform_attention(train).tolist() == [0, 1, 0]
    assert edits == [None, uniform_weights]
    with pytest.raises(ValueError, match="same samples"):
        gain_over_uniform_attention(lambda edit: torch.zeros(2 if edit is None else 3))


def test_seed_divergence_is_the_mean_over_pairs(generator):
    maps = [
        AttentionMap.from_cells(torch.rand(4, 6, generator=generator), words(6)) for _ in range(3)
    ]
    found = seed_divergence(maps)
    for b in range(4):
        each = [one.weights[b].flatten().double().numpy() for one in maps]
        pairs = [(each[0], each[1]), (each[0], each[2]), (each[1], each[2])]
        expected = [scipy.spatial.distance.jensenshannon(*pair) ** 2 for pair in pairs]
        assert float(found[b]) == pytest.approx(sum(expected) / 3, abs=1e-6)
    torch.testing.assert_close(seed_divergence([maps[0]] * 3), torch.zeros(4))
    with pytest.raises(ValueError, match="at least 2"):
        seed_divergence(maps[:1])


def test_nan_logits_give_nan_flips(generator):
    def run(edit: object) -> torch.Tensor:
        return torch.tensor([[1.0, 0.0], [torch.nan, 0.0], [1.0, 0.0]]).masked_fill(
            torch.tensor([[False], [False], [edit is not None]]), torch.nan
        )

    for found in (edit_flips(run, uniform_weights), weights_to_flip(run)):
        assert found.isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="draws .* 0"):
        beyond_random_weights(run, generator, draws=0)


def test_nan_outputs_and_negative_weights_have_no_alternative(generator):
    weights = torch.tensor([[0.5, 0.5, 0.0], [2.0, -0.5, 0.5], [0.2, 0.3, 0.5]])
    wrong = torch.tensor([[0.0], [0.0], [torch.nan]])
    found = find_alternative_attention(
        lambda given: given[:, :2] + wrong,
        AttentionMap.from_cells(weights, words(3)),
        generator,
        steps=2,
        starts=1,
    )
    assert found.distance.isnan().tolist() == found.change.isnan().tolist() == [False, True, True]
