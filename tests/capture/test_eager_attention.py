"""Attention that a model writes out is known by its softmax and its product with the values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.attention import Kind
from overt.attribution import gradient_attention
from overt.capture import Route, UncapturedAttentionError, watch
from tests.capture.toys import Stack, WrittenAttention


class ByHand(nn.Module):
    """One head, written out by `write(scores, x)`."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.query = nn.Linear(8, 8)

    def forward(self, x):
        return self.write(self.query(x) @ x.transpose(1, 2), x)


WAYS = {
    "tensor method": lambda s, x: s.softmax(-1) @ x,
    "keyword": lambda s, x: torch.softmax(s, dim=2) @ x,
    "functional": lambda s, x: torch.matmul(F.softmax(s, dim=-1), x),
    "bmm": lambda s, x: torch.bmm(s.softmax(dim=-1), x),
    "tensor bmm": lambda s, x: s.softmax(dim=-1).bmm(x),
    "einsum": lambda s, x: torch.einsum("bij,bjd->bid", s.softmax(-1), x),
    "einsum of a list": lambda s, x: torch.einsum("bij,bjd->bid", [s.softmax(-1), x]),
    "values first": lambda s, x: torch.einsum("bjd,bij->bid", x, s.softmax(-1)),
    "cast": lambda s, x: s.double().softmax(-1).to(x.dtype) @ x,
    "dropout": lambda s, x: F.dropout(s.softmax(-1), 0.5, True) @ x,
    "dropout then cast": lambda s, x: F.dropout(s.softmax(-1), 0.5, True).double().float() @ x,
    "reshaped": lambda s, x: (s.softmax(-1).view(len(x), 1, *s.shape[1:]) @ x[:, None])[:, 0],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_it_gives_the_softmax_before_dropout(way):
    torch.manual_seed(0)
    model, x = ByHand(WAYS[way]), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    expected = (model.query(x) @ x.transpose(1, 2)).softmax(-1)
    assert [call.route for call in trace] == [Route.SOFTMAX]
    torch.testing.assert_close(trace.map().weights[:, 0, 0], expected)
    assert trace.map().kind is Kind.PROBABILITY
    torch.testing.assert_close(trace.calls[0].log_weights()[:, 0].float(), expected.log())


@pytest.mark.parametrize("way", WAYS)
def test_queries_and_keys_are_known_where_scores_are_their_product(way):
    torch.manual_seed(0)
    model, x = ByHand(WAYS[way]), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    source = trace.calls[0].source
    torch.testing.assert_close(source.query[:, 0], model.query(x))
    torch.testing.assert_close(source.key[:, 0], x)
    few = WrittenAttention(8, 2)
    with watch(few) as trace:
        few(x)
    (call,) = trace.calls
    scores = call.source.query @ call.source.key.transpose(-1, -2)
    ratio = (call.scores() / scores).detach()
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.flatten()[0])))
    one = call.heads([1]).source
    assert torch.equal(one.query[:, 0], call.source.query[:, 1])


def test_queries_and_keys_of_other_scores_are_not_made_up():
    def write(scores, x):
        other = torch.cat([scores, scores[..., :1]], dim=-1)
        return other.softmax(dim=-1)[..., :-1] @ x

    model, x = ByHand(write), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    assert trace.calls[0].source.query is None and trace.calls[0].source.key is None


def test_a_sink_that_is_cut_off_leaves_a_part_of_one():
    def write(scores, x):
        sink = torch.zeros(*scores.shape[:2], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return F.dropout(weights, 0.3, True) @ x

    model, x = ByHand(write), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    found = trace.map().check()
    assert found.kind is Kind.SUBPROBABILITY
    assert bool((found.weights.sum(-1) < 1).all())
    scores = model.query(x) @ x.transpose(1, 2)
    torch.testing.assert_close(trace.calls[0].scores()[:, 0], scores)


def test_mixed_weights_are_what_the_values_met_and_signed():
    mix = nn.Linear(5, 5)
    model, x = ByHand(lambda s, x: mix(s.softmax(-1)) @ x), torch.randn(2, 5, 8)
    with watch(model) as trace:
        out = model(x)
    assert trace.map().kind is Kind.SIGNED
    torch.testing.assert_close(trace.map().weights[:, 0, 0] @ x, out)
    with pytest.raises(ValueError, match="after the softmax"):
        trace.log_block(torch.zeros(2, 1).long(), torch.zeros(2, 1).long())
    torch.testing.assert_close(
        trace.block(torch.zeros(2, 1).long(), torch.ones(2, 1).long()).weights[:, 0, 0, 0, 0],
        trace.map().weights[:, 0, 0, 0, 1],
    )


def test_two_softmaxes_before_two_products_are_two_calls():
    def both(scores, x):
        a, b = scores.softmax(-1), (2 * scores).softmax(-1)
        return a @ x + b @ x

    model, x = ByHand(both), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    scores = model.query(x) @ x.transpose(1, 2)
    assert len(trace) == 2
    torch.testing.assert_close(trace.map(1).weights[:, 0, 0], (2 * scores).softmax(-1))


def test_a_softmax_that_meets_no_values_is_not_attention():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.choose = WrittenAttention(), nn.Linear(16, 3)

        def forward(self, x):
            share = self.choose(x).softmax(-1)
            return self.attend(x) * share.sum(-1, keepdim=True)

    model = Router()
    with watch(model) as trace:
        model(torch.randn(2, 5, 16))
    assert trace.names == ("attend",)


def test_heads_folded_into_the_batch_are_told_apart():
    class Folded(nn.Module):
        num_heads = 4

        def forward(self, x):
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2).flatten(0, 1)
            return (heads @ heads.transpose(1, 2)).softmax(-1) @ heads

    model, x = Folded(), torch.randn(2, 5, 16)
    with watch(model) as trace:
        model(x)
    assert trace.calls[0].shape == (2, 4, 5, 5)


def test_a_softmax_over_another_axis_is_said_and_not_guessed():
    class OddAttention(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(1, 2)).softmax(1).transpose(1, 2) @ x

    model = OddAttention()
    with (
        pytest.raises(UncapturedAttentionError, match=r"'OddAttention'.*softmax\(dim=-1\)"),
        watch(model),
    ):
        model(torch.randn(2, 5, 8))


def test_dropout_leaves_no_trace_in_what_is_seen_and_gradients_are_those_of_the_softmax():
    torch.manual_seed(0)
    model = Stack(WrittenAttention(rate=0.5)).train()
    x = torch.randn(2, 6, 16)
    with watch(model) as trace:
        model(x)
    layer = model.layers[0]
    torch.testing.assert_close(trace.map().weights[:, 0], layer.last)
    mine = torch.autograd.grad(
        trace.map().weights.square().sum(), layer.key.weight, retain_graph=True
    )
    theirs = torch.autograd.grad(layer.last.square().sum(), layer.key.weight)
    torch.testing.assert_close(mine[0], theirs[0])


def test_nothing_is_held_once_a_module_is_done():
    from overt.capture.state import STATE

    model = Stack(WrittenAttention())
    with watch(model):
        model(torch.randn(2, 5, 16))
        assert not STATE.traces


def test_a_product_with_a_vector_is_no_attention():
    def write(scores, x):
        weights = scores.softmax(-1)
        lengths = scores @ torch.ones(5)
        return weights @ x + lengths[..., None]

    model = ByHand(write)
    with watch(model) as trace:
        model(torch.randn(2, 5, 8))
    assert [call.kind for call in trace] == [Kind.PROBABILITY]


SORTING = {
    "product": lambda groups, x: x.mT @ groups,
    "einsum": lambda groups, x: torch.einsum("bnc,bnd->bcd", groups, x),
}


@pytest.mark.parametrize("sort", SORTING.values(), ids=SORTING)
def test_sorting_positions_into_groups_is_no_attention(sort):
    def write(scores, x):
        return sort(x[..., :3].softmax(-1), scores.softmax(-1) @ x)

    model = ByHand(write)
    with watch(model) as trace:
        model(torch.randn(2, 5, 8))
    assert [call.shape for call in trace] == [(2, 1, 5, 5)]


class Shares(nn.Module):
    """A softmax that is a module of its own, by itself or beside something else."""

    def __init__(self, beside: bool):
        super().__init__()
        self.beside = beside

    def forward(self, scores):
        shares = F.softmax(scores, dim=-1)
        return (shares, None) if self.beside else shares


class AttentionInParts(nn.Module):
    def __init__(self, beside: bool):
        super().__init__()
        self.query, self.shares = nn.Linear(8, 8), Shares(beside)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        shares = self.shares(self.query(x) @ x.transpose(1, 2))
        return self.dropout(shares[0] if self.shares.beside else shares) @ x


class Blend(AttentionInParts):
    """The same, named like nothing that looks: a mixture of experts."""


@pytest.mark.parametrize("beside", [False, True])
def test_a_softmax_that_is_a_module_of_its_own_belongs_to_the_attention_around_it(beside):
    torch.manual_seed(0)
    model, x = AttentionInParts(beside), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    expected = (model.query(x) @ x.transpose(1, 2)).softmax(-1)
    (call,) = trace.calls
    assert call.module is model and call.kind is Kind.PROBABILITY
    torch.testing.assert_close(call.weights()[:, 0], expected)
    with watch(model, edit=lambda call, weights: torch.zeros_like(weights)):
        assert not model(x).any()


def test_a_router_that_gives_its_shares_away_is_not_followed():
    model = Blend(beside=False)
    with (
        pytest.raises(UncapturedAttentionError, match="attention .*outside"),
        watch(model),
    ):
        model(torch.randn(2, 5, 8))


# --- one query a sample, without an axis of queries


class PoolingAttention(nn.Module):
    """One query over the words of a sample, as `write(scores, x, drop)` writes it: (b, d)."""

    num_heads = 2  # which says nothing about this product

    def __init__(self, write, rate=0.0):
        super().__init__()
        self.write, self.score, self.drop = write, nn.Linear(8, 1), nn.Dropout(rate)

    def forward(self, x, mask=None):
        scores = self.score(x)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], -1e9)
        return self.write(scores, x, self.drop)


POOLED = {
    "bmm": lambda s, x, drop: torch.bmm(
        drop(F.softmax(s.squeeze(2), dim=1)).unsqueeze(1), x
    ).squeeze(1),
    "indexed": lambda s, x, drop: (drop(s[..., 0].softmax(-1))[:, None] @ x)[:, 0],
    "summed": lambda s, x, drop: (drop(s.squeeze(2).softmax(1)).unsqueeze(2) * x).sum(dim=1),
    "values first": lambda s, x, drop: (x * drop(torch.softmax(s, dim=1))).sum(dim=1),
    "function": lambda s, x, drop: torch.mul(drop(torch.softmax(s, dim=-2)), x).sum(1),
    "einsum": lambda s, x, drop: torch.einsum("bk,bkd->bd", drop(s.squeeze(2).softmax(-1)), x),
    "turned": lambda s, x, drop: (drop(s.softmax(dim=1)).transpose(1, 2) @ x).flatten(1),
}


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("way", POOLED)
def test_one_query_without_an_axis_of_queries_is_seen(way, rate):
    torch.manual_seed(0)
    model, x = PoolingAttention(POOLED[way], rate), torch.randn(4, 5, 8)
    with watch(model) as trace:
        torch.manual_seed(1)
        found = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), found), "what the model gives is what it gives unseen"
    expected = model.score(x).squeeze(2).softmax(dim=1)
    (call,) = trace.calls
    assert call.shape == (4, 1, 1, 5) and call.kind is Kind.PROBABILITY
    torch.testing.assert_close(call.weights()[:, 0, 0], expected)
    torch.testing.assert_close(call.log_weights()[:, 0, 0], expected.log())
    call.weights()[..., 0].sum().backward()
    assert model.score.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("way", POOLED)
def test_one_query_can_be_edited_and_hides_what_its_scores_hide(way):
    torch.manual_seed(0)
    model, x = PoolingAttention(POOLED[way]), torch.randn(4, 5, 8)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 3:] = False
    with watch(model) as trace:
        model(x, mask)
    assert trace.map().mask[:, 0].tolist() == mask.tolist()
    with watch(model, edit=lambda call, weights: torch.full_like(weights, 1 / 5)):
        torch.testing.assert_close(model(x), x.mean(dim=1))


@pytest.mark.parametrize("way", POOLED)
def test_gradients_of_one_query_are_those_of_its_weights(way):
    torch.manual_seed(0)
    model, x = PoolingAttention(POOLED[way]).double(), torch.randn(4, 5, 8, dtype=torch.float64)
    with watch(model) as trace:
        target = model(x).square().sum(dim=1)
    found = gradient_attention(trace, target)
    weights = model.score(x).squeeze(2).softmax(dim=1).detach().requires_grad_()
    (slope,) = torch.autograd.grad((weights[:, None] @ x).square().sum(), weights)
    torch.testing.assert_close(found.values[:, 0, 0, 0], weights * slope)


class Gate(PoolingAttention):
    """A mixture of experts is written as additive attention is, and is none."""


@pytest.mark.parametrize("way", ["summed", "einsum", "bmm"])
def test_a_gate_that_is_written_alike_is_not_taken_for_attention(way):
    with (
        pytest.raises(UncapturedAttentionError, match="has no attention"),
        watch(model := Gate(POOLED[way])),
    ):
        model(torch.randn(4, 5, 8))


def test_shares_that_meet_no_values_are_no_attention():
    """(b, k) by (k, c), a picture of shares, and shares by numbers: nobody looks at anything."""

    def elsewhere(scores, x, drop):
        shares = scores.squeeze(2).softmax(dim=1)
        return shares @ x[0] + (shares * 2).sum() + (shares.unsqueeze(2) * x[:, :1]).sum()

    model = PoolingAttention(elsewhere)
    with pytest.raises(UncapturedAttentionError, match="not captured"), watch(model):
        model(torch.randn(4, 5, 8))


def over(write):
    """Weights that are written over in place, by `write`, which gives what meets the values."""

    def attend(s, x):
        weights = s.softmax(-1)
        attend.clean = weights.detach().clone()
        weights = write(weights)
        attend.used = weights.detach().clone()
        return weights @ x

    return attend


OVER = {
    "item": lambda w: w.index_fill_(-1, torch.tensor([1]), 0),
    "times": lambda w: w.mul_(0.5),
    "filled": lambda w: w.masked_fill_(w > 0.3, 0),
    "cast": lambda w: w.double().float().mul_(0.5),
}


@pytest.mark.parametrize("write", OVER.values(), ids=OVER.keys())
def test_weights_that_are_changed_in_place_are_those_that_were_used(write):
    torch.manual_seed(0)
    attend = over(write)
    model, x = ByHand(attend), torch.randn(2, 5, 8)
    with torch.no_grad(), watch(model) as trace:
        model(x)
    found = trace.map()
    assert found.kind is Kind.SIGNED
    torch.testing.assert_close(found.weights[:, 0, 0], attend.used, rtol=0, atol=0)
    every = torch.arange(5).repeat(2, 1)
    block = trace.block(every, every).weights[:, 0, 0]
    torch.testing.assert_close(block, attend.used, rtol=0, atol=0)
    with pytest.raises(ValueError, match="no logarithm"):
        trace.log_block(every, every)


def test_dropout_in_place_is_left_out_as_any_other():
    torch.manual_seed(0)
    attend = over(nn.Dropout(0.5, inplace=True))
    model, x = ByHand(attend), torch.randn(2, 5, 8)
    with torch.no_grad(), watch(model) as trace:
        out = model(x)
    assert trace.map().kind is Kind.PROBABILITY
    torch.testing.assert_close(trace.map().weights[:, 0, 0], attend.clean, rtol=0, atol=0)
    torch.testing.assert_close(out, attend.used @ x)


def test_additive_attention_that_is_changed_in_place_is_no_probability():
    class Pooling(nn.Module):
        def forward(self, x):
            shares = x.sum(-1).softmax(-1).mul_(0.5)
            return torch.einsum("bk,bkd->bd", shares, x)

    class PoolingAttention(Pooling):
        pass

    model, x = PoolingAttention(), torch.randn(2, 5, 8)
    with watch(model) as trace:
        model(x)
    assert trace.map().kind is Kind.SIGNED
    torch.testing.assert_close(trace.map().weights[:, 0, 0, 0], x.sum(-1).softmax(-1) / 2)
