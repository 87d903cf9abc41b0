"""Attention changed in flight: rows by hand, a watched model, and the search for other maps."""

import math

import pytest
import scipy.spatial.distance
import torch
from torch import nn

from overt.attention import AttentionMap, Kind, words
from overt.capture.call import Call, Route, Written
from overt.capture.edits import Bias
from overt.measure import (
    adversarial_distance,
    alternative,
    beyond_random,
    edit_flips,
    editing,
    evened,
    js,
    knocked_out,
    moved,
    output_change,
    permuted,
    seed_divergence,
    weights_to_flip,
    without_random,
    without_top,
    worth_of_attention,
)
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


def a_call(weights: torch.Tensor, hidden: torch.Tensor | None = None) -> Call:
    """A call that used these weights; hidden keys have a score of -inf."""
    logits = weights.clamp_min(1e-9).log()
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return Call(
        "toy", nn.Identity(), Written(weights, Kind.PROBABILITY, logits), Route.SOFTMAX, False
    )


@pytest.fixture
def rows(generator):
    """Weights of 2 samples, 3 heads and 4 queries over 6 keys; one sample sees only four."""
    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    scores = torch.randn(2, 3, 4, 6, generator=generator).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(dim=-1)
    return weights, hidden, a_call(weights, hidden.expand_as(weights))


def test_permuting_keeps_the_weights_and_what_may_be_seen(rows, generator):
    weights, hidden, call = rows
    found = permuted(generator)(call, weights)
    assert torch.equal(found.sort(dim=-1).values, weights.sort(dim=-1).values)
    assert not torch.equal(found, weights)
    assert (found.masked_select(hidden.expand_as(found)) == 0).all()
    one, two = (permuted(torch.Generator().manual_seed(2))(call, weights) for _ in range(2))
    assert torch.equal(one, two)


def test_evening_spreads_over_what_may_be_seen(rows):
    weights, _, call = rows
    found = evened(call, weights)
    torch.testing.assert_close(found[0], torch.full((3, 4, 6), 1 / 6))
    torch.testing.assert_close(found[1, ..., :4], torch.full((3, 4, 4), 1 / 4))
    assert (found[1, ..., 4:] == 0).all()
    half = evened(call, weights / 2)  # a learned sink has taken the rest, and keeps it
    torch.testing.assert_close(half.sum(dim=-1), torch.full((2, 3, 4), 0.5))


def test_without_the_largest_the_others_grow(rows):
    weights, _, call = rows
    found = without_top(0.3)(call, weights)
    for b, count in ((0, 2), (1, 1)):  # 0.3 of 6 and of 4 keys
        for h in range(3):
            for q in range(4):
                left = weights[b, h, q].clone()
                left[left.argsort(descending=True)[:count]] = 0
                torch.testing.assert_close(found[b, h, q], left / left.sum())
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(2, 3, 4))


def test_something_is_always_left(rows, generator):
    weights, hidden, call = rows
    for edit in (without_top(1.0), without_random(1.0, generator)):
        found = edit(call, weights)
        assert torch.equal((found > 0).sum(dim=-1), torch.ones(2, 3, 4, dtype=torch.long))
        assert (found.masked_select(hidden.expand_as(found)) == 0).all()
    single = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 1, 1, 3)
    spread = without_top(0.3)(a_call(single), single)  # nothing else had any weight
    torch.testing.assert_close(spread.flatten(), torch.tensor([0.0, 0.5, 0.5]))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            without_top(share)


def test_random_weights_are_as_many_and_seeded(rows):
    weights, _, call = rows
    one, two = (without_random(0.5, torch.Generator().manual_seed(3))(call, weights) for _ in "ab")
    assert torch.equal(one, two)
    assert torch.equal((one > 0).sum(dim=-1), (without_top(0.5)(call, weights) > 0).sum(dim=-1))


def test_knocking_out_takes_and_gives_nothing_back(rows):
    weights, _, call = rows
    keys, queries = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    keys[:, 1], queries[:, 2] = True, True
    found = knocked_out(keys, queries)(call, weights)
    expected = weights.clone()
    expected[:, :, 2, 1] = 0
    assert torch.equal(found, expected)
    every = knocked_out(keys)(call, weights)
    assert (every[..., 1] == 0).all() and torch.equal(every[..., 2:], weights[..., 2:])
    with pytest.raises(ValueError, match="4 queries to 6 keys in 2 samples"):
        knocked_out(keys[:, :5])(call, weights)


# --- a model that is watched


class Classifier(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.stack = Stack(attention(), attention())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.stack(x, mask).mean(dim=1))


@pytest.mark.parametrize("attention", [FusedAttention, WrittenAttention])
def test_a_watched_model_answers_under_edits_and_is_left_as_found(attention, generator):
    model = Classifier(attention).double().eval()
    x = torch.randn(5, 6, 16, dtype=torch.float64, generator=generator)
    run = editing(model, lambda: model(3 * x))
    with torch.no_grad():
        before = run(None)
        torch.testing.assert_close(run(lambda call, weights: weights), before)
        after = run(evened)
    expected = (before.softmax(-1) - after.softmax(-1)).abs().sum(-1) / 2
    found = output_change(run, evened)
    torch.testing.assert_close(found, expected.float())
    assert (found > 0).all()
    assert torch.equal(edit_flips(run, evened), (before.argmax(-1) != after.argmax(-1)).float())
    with torch.no_grad():
        assert torch.equal(model(3 * x), before), "the model is as it was"
    assert (output_change(run, Bias(lambda call: torch.zeros(1, dtype=x.dtype))) < 1e-12).all()
    last = editing(model, lambda: model(3 * x), layers=[1])
    assert not torch.equal(output_change(last, evened), found)
    drop = beyond_random(run, torch.Generator().manual_seed(0), share=0.3, draws=2)
    assert drop.shape == (5,) and (drop.abs() <= 1).all()


def test_what_has_to_go_before_the_answer_changes():
    """Four keys vote by their weights; the last two together outvote what is left of the first."""
    weights = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])[:, None, None]
    votes = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]])

    def run(edit):
        used = weights if edit is None else edit(a_call(weights), weights)
        return (used[:, 0, 0] @ votes).float()

    assert weights_to_flip(run, (0.25, 0.5, 0.75)).tolist() == [0.5, 0.25]
    assert weights_to_flip(run, (0.25,)).tolist() == [1, 0.25]
    with pytest.raises(ValueError, match="must grow"):
        weights_to_flip(run, (0.5, 0.25))


# --- other maps with the same answer


def pooled(values: torch.Tensor):
    """The answer of a weighted mean of values."""
    return lambda weights: torch.einsum("bk,bkc->bc", weights, values.to(weights.dtype))


@pytest.fixture
def maps(generator):
    return AttentionMap.from_scores(torch.randn(6, 1, 1, 1, 8, generator=generator), words(8))


def test_where_all_keys_say_the_same_attention_may_be_anywhere(maps, generator):
    values = torch.randn(6, 1, 2, generator=generator).expand(6, 8, 2)
    found = alternative(pooled(values), maps, generator, steps=80)
    found.attention.check()
    assert (found.change <= 0.01).all()
    assert (found.distance > 0.5).all()  # ln 2 is 0.693
    torch.testing.assert_close(js(found.attention, maps), found.distance, atol=1e-5, rtol=0)


def test_where_every_key_says_something_else_attention_must_stay(generator):
    """Three keys of three classes: the answer gives the weights away."""
    maps = AttentionMap.from_scores(torch.randn(6, 1, 1, 1, 3, generator=generator), words(3))
    values = 2 * torch.eye(3).expand(6, 3, 3)
    found = alternative(pooled(values), maps, generator, steps=80)
    assert (found.change <= 0.01).all()
    assert (found.distance < 0.01).all()
    assert float(moved(found.attention, maps).max()) < 0.1


def test_the_search_is_seeded_and_leaves_no_gradient(maps, generator):
    values = torch.randn(6, 8, 2, generator=generator, requires_grad=True)
    one, two = (
        adversarial_distance(pooled(values), maps, torch.Generator().manual_seed(1), steps=20)
        for _ in range(2)
    )
    assert torch.equal(one, two) and not one.requires_grad
    assert values.grad is None
    wide = adversarial_distance(
        pooled(values), maps, torch.Generator().manual_seed(1), within=0.2, steps=20
    )
    assert float(wide.mean()) > float(one.mean())
    assert float(wide.max()) <= math.log(2)
    with pytest.raises(ValueError, match="within is above 0"):
        alternative(pooled(values), maps, generator, within=0.0)


def test_hidden_keys_stay_hidden_and_empty_rows_have_no_number(generator):
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[1, 3:], seen[2] = False, False
    scores = torch.randn(3, 1, 1, 1, 5, generator=generator)
    maps = AttentionMap.from_scores(scores, words(5), mask=seen[:, None])
    values = torch.randn(3, 5, 2, generator=generator)
    found = alternative(pooled(values), maps, generator, within=0.1, steps=20)
    found.attention.check()
    assert found.distance.isnan().tolist() == [False, False, True]


# --- training again


def test_the_worth_of_attention_is_a_difference():
    asked = []

    def train(edit):
        asked.append(edit)
        return torch.tensor([1.0, 1.0, 0.0]) if edit is None else torch.tensor([1.0, 0.0, 0.0])

    assert worth_of_attention(train).tolist() == [0, 1, 0]
    assert asked == [None, evened]
    with pytest.raises(ValueError, match="same samples"):
        worth_of_attention(lambda edit: torch.zeros(2 if edit is None else 3))


def test_seeds_are_compared_pair_by_pair(generator):
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
    with pytest.raises(ValueError, match="two at least"):
        seed_divergence(maps[:1])


def test_answers_that_are_no_numbers_have_not_stayed_the_same(generator):
    def run(edit: object) -> torch.Tensor:
        return torch.tensor([[1.0, 0.0], [torch.nan, 0.0], [1.0, 0.0]]).masked_fill(
            torch.tensor([[False], [False], [edit is not None]]), torch.nan
        )

    for found in (edit_flips(run, evened), weights_to_flip(run)):
        assert found.isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="0 draws leave no random weights"):
        beyond_random(run, generator, draws=0)


def test_no_alternative_is_known_of_answers_or_weights_that_are_none(generator):
    weights = torch.tensor([[0.5, 0.5, 0.0], [2.0, -0.5, 0.5], [0.2, 0.3, 0.5]])
    wrong = torch.tensor([[0.0], [0.0], [torch.nan]])
    found = alternative(
        lambda given: given[:, :2] + wrong,
        AttentionMap.from_cells(weights, words(3)),
        generator,
        steps=2,
        starts=1,
    )
    assert found.distance.isnan().tolist() == found.change.isnan().tolist() == [False, True, True]
