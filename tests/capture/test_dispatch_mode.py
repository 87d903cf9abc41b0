"""Attention that no route recognizes is found by its operations, and attention alone is."""

import copy
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from overt.capture import UncapturedAttentionError, watch
from overt.capture.dispatch_mode import (
    NOT_CHECKED,
    AttentionDispatchMode,
    can_check,
    check_notes,
    mark_checked,
    needs_check,
)
from tests.capture.toys import FusedAttention, Stack


class Block(nn.Module):
    """Four heads of projected queries, keys and values, and an arithmetic by `attend`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in self.parts)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (scores(q, k) - 3).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


class Divided(Block):
    attend = staticmethod(divided)


class DividedLast(Block):
    def attend(self, q, k, v):
        weights = scores(q, k).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)


class LogSoftmax(Block):
    def attend(self, q, k, v):
        return scores(q, k).log_softmax(-1).exp() @ v


@torch.jit.script
def scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Scripted(Block):
    attend = staticmethod(scripted)


class ScriptedFused(Block):
    @staticmethod
    @torch.jit.script
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class HalfOfTheHeads(Block):
    """Two heads by SDPA, which is seen, and two by hand."""

    def attend(self, q, k, v):
        one = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2])
        return torch.cat([one, divided(q[:, 2:], k[:, 2:], v[:, 2:])], dim=1)


class SelfAttentionWithBias(Divided):
    """A class whose name ends like that of a table of biases."""


class OuterAttention(Divided):
    """An attention of its own, around another that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FusedAttention()

    def attend(self, q, k, v):
        return divided(q, k, v) + 0 * self.inner(v.transpose(1, 2).flatten(2)).sum()


class LogSumExp(Block):
    def attend(self, q, k, v):
        logits = scores(q, k)
        return (logits - logits.logsumexp(-1, keepdim=True)).exp() @ v


class Powers(Block):
    def attend(self, q, k, v):
        weights = torch.pow(2, scores(q, k))
        return weights / weights.sum(-1, keepdim=True) @ v


class Rectified(Block):
    """Weights without any softmax; the sums of some rows are zero."""

    def attend(self, q, k, v):
        weights = scores(q, k).relu()
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-6) @ v


class EntryByEntry(Block):
    """A product with the values that is no matrix product."""

    def attend(self, q, k, v):
        return (scores(q, k).softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)


class EntriesOfEinsum(Block):
    def attend(self, q, k, v):
        return torch.einsum("bhqk,bhkd->bhqdk", scores(q, k).softmax(-1), v).sum(-1)


class HalfEntryByEntry(EntryByEntry):
    def attend(self, q, k, v):
        one = scores(q[:, :2], k[:, :2]).softmax(-1) @ v[:, :2]
        return torch.cat([one, super().attend(q[:, 2:], k[:, 2:], v[:, 2:])], dim=1)


HIDDEN = [LogSumExp, Powers, Rectified, EntryByEntry, EntriesOfEinsum, HalfEntryByEntry]
HIDDEN += [Divided, DividedLast, LogSoftmax, Scripted, ScriptedFused, HalfOfTheHeads]
HIDDEN += [SelfAttentionWithBias, OuterAttention]


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("training", [False, True])
def test_attention_that_no_route_knows_is_named(kind, training):
    model, x = Stack(FusedAttention(), kind()).train(training), torch.randn(2, 6, 16)
    for _ in range(2):  # a block that was refused does not count
        with pytest.raises(UncapturedAttentionError, match=r"'layers\.1") as found, watch(model):
            model(x)
    said = str(found.value)
    assert "without=['layers.1" in said and "which leaves 'layers.0'" in said
    with watch(model, without=re.findall(r"without=\['([^']*)'", said)) as trace:
        model(x)
    assert "layers.0" in trace.names and "layers.1" not in trace.names


class Operator(Block):
    def attend(self, q, k, v):
        return torch.ops.aten.scaled_dot_product_attention(q, k, v)


class Overload(Block):
    def attend(self, q, k, v):
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, False)


class Added(Block):
    """Weights times values, added to something in one operation."""

    def attend(self, q, k, v):
        weights = scores(q, k).softmax(-1).flatten(0, 1)
        v = v.flatten(0, 1)
        return torch.baddbmm(torch.zeros_like(v), weights, v).unflatten(0, (-1, 4))


class AddedInPlace(Added):
    num_heads = 4

    def attend(self, q, k, v):
        weights = scores(q, k).softmax(-1).flatten(0, 1)
        v = v.flatten(0, 1)
        return v.baddbmm(weights, v).unflatten(0, (-1, 4)) - v.unflatten(0, (-1, 4))


class FourHeads(Added):
    num_heads = 4


@pytest.mark.parametrize("kind", [Operator, Overload, FourHeads, AddedInPlace])
def test_operators_and_added_products_are_captured(kind):
    model, x = Stack(FusedAttention(), kind()).eval(), torch.randn(2, 6, 16)
    with watch(model) as trace:
        model(x)
    y = x + model.layers[0](x)
    q, k = (part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in model.layers[1].parts[:2])
    torch.testing.assert_close(trace.calls[1].weights(), scores(q, k).softmax(-1))


def test_a_model_that_attends_itself_is_not_told_to_leave_itself_out():
    class Whole(Divided):
        def __init__(self):
            super().__init__()
            self.first = FusedAttention()

        def forward(self, x, mask=None):
            return super().forward(self.first(x))

    with (
        pytest.raises(UncapturedAttentionError, match=r"the model.*layers=") as found,
        watch(model := Whole()),
    ):
        model(torch.randn(2, 6, 16))
    assert "without" not in str(found.value)


def test_exported_graphs_are_captured():
    class Both(Block):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v) + scores(q, k).softmax(-1) @ v

    x = torch.randn(2, 6, 16)
    model = Both().eval()
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad(), watch(exported) as trace:
        exported(x)
    q, k = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in model.parts[:2])
    assert len(trace) == 2
    for call in trace:
        torch.testing.assert_close(call.weights(), scores(q, k).softmax(-1))


class Threaded(nn.Module):
    """A model that gives its second layer to a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = FusedAttention(), FusedAttention()

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(self.there, x)
            return self.here(x) + there.result()


def test_a_worker_thread_of_the_model_is_named():
    model, x = Threaded(), torch.randn(2, 6, 16)
    with (
        pytest.raises(UncapturedAttentionError, match=r"'there'.*thread"),
        watch(model),
    ):
        model(x)
    with watch(model, without=["there"]) as trace:
        model(x)
    assert trace.names == ("here",)


class FunctionsInThread(Block):
    """The layers of the worker are leaves, its attention is a function."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().forward, x).result()

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def test_functions_in_a_worker_thread_are_named_by_the_module_around_its_layers():
    model, x = Stack(FusedAttention(), FunctionsInThread()), torch.randn(2, 6, 16)
    for _ in range(2):
        with (
            pytest.raises(
                UncapturedAttentionError,
                match=r"'layers.1'.*thread.*without=\['layers.1'\]",
            ),
            watch(model),
        ):
            model(x)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with watch(model, without=["layers.1"]) as trace:
        copied = copy.deepcopy(model)
        model(x)
    assert trace.names == ("layers.0",)
    assert not any(module._forward_pre_hooks for module in copied.modules())


class BiasInForward(Block):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, causal_lower_right(6, 6))


def test_a_tensor_subclass_that_a_model_creates_is_named_once():
    model, x = Stack(BiasInForward()), torch.randn(2, 6, 16)
    with (
        pytest.raises(NotImplementedError, match=r"BiasInForward.*again"),
        watch(model),
    ):
        model(x)
    with watch(model) as trace:
        model(x)
    assert not trace.map().weights.triu(1).any() and NOT_CHECKED in repr(trace)


def test_another_user_of_the_model_in_another_thread_is_none_of_ours():
    class Waiting(Stack):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if x.shape[0] == 1:  # the other user calls while this call is at work
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(self, x.repeat(2, 1, 1)).result()
            return super().forward(x, mask)

    model = Waiting(FusedAttention())
    with watch(model) as trace:
        model(torch.randn(1, 6, 16))
    assert len(trace) == 1


class NothingAttention(Block):
    """Attention that gives its result to somebody else, and returns None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.result = x * 2
        return None  # type: ignore[return-value]


def test_a_forward_that_returns_none_has_run():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = FusedAttention(), NothingAttention()

        def forward(self, x):
            self.two(x)
            return self.one(x)

    with (
        pytest.raises(UncapturedAttentionError, match=r"1 of 2 .*'two'"),
        watch(model := Model()),
    ):
        model(torch.randn(1, 6, 16))
    try:  # also while an error is being handled, which is not its own
        raise KeyError
    except KeyError:
        with pytest.raises(UncapturedAttentionError, match=r"1 of 2 .* 'two'"), watch(model):
            model(torch.randn(1, 6, 16))


class KernelAttention(nn.Module):
    """Attention by a kernel that nothing can look into."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class AttentionNet(nn.Module):
    """A root named like attention, which attends itself; one part of it is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = KernelAttention()

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, self.hidden(x))


def test_attention_around_a_module_is_no_excuse_for_it():
    model, x = AttentionNet(), torch.randn(2, 1, 6, 16)
    with (
        pytest.raises(UncapturedAttentionError, match=r"1 of 1 .*'hidden'"),
        watch(model),
    ):
        model(x)
    with watch(model, without=["hidden"]) as trace:
        model(x)
    assert len(trace) == 1


class Others(nn.Module):
    """A softmax for everything but attention: experts, a codebook, an expected place, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.codes = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16))
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        share = self.router(x).softmax(-1)
        said = torch.einsum("bnd,edf->bnef", x, self.experts)
        x = x + torch.einsum("bne,bnef->bnf", share, said) + F.linear(share, self.codes.mT)
        place = F.linear(share, torch.arange(4.0)[None])
        groups = share.mT @ x  # positions sorted into groups
        x = x + place + groups.mean(1, keepdim=True) + (x * self.scale.exp()) @ x.mT @ x
        mask = (x[..., 0] > 0).float() + 1e-9
        choice = F.one_hot(x[..., 0].argsort(-1), x.shape[1]).to(x)
        x = (
            x
            + (mask / mask.sum(-1, keepdim=True))[:, None].expand(-1, 2, -1).bmm(x).mean(1)[:, None]
        )
        x = x + choice @ x + (share[..., None] * said).sum(-2)  # a mean, an order, experts
        return x + F.softplus(x) * x.sigmoid()


@pytest.mark.parametrize("training", [False, True])
def test_other_uses_of_softmax_and_exponentials_are_no_attention(training):
    model = Stack(FusedAttention(), Others()).train(training)
    with watch(model) as trace:
        model(torch.randn(2, 6, 16))
    assert trace.names == ("layers.0",)


def test_a_model_is_counted_once_for_each_way_to_attend():
    model, x = Stack(FusedAttention()), torch.randn(2, 6, 16)
    watcher = watch(model)
    assert needs_check(model, watcher.key)
    with watcher:
        model(x)
    assert not needs_check(model, watcher.key)
    model.eval()
    assert needs_check(model, watcher.key)


def test_counting_is_left_out_where_it_cannot_be_done():
    model, x = Stack(FusedAttention()), torch.randn(2, 6, 16)
    assert can_check(model)
    with AttentionDispatchMode([]):
        assert not can_check(model)
    watcher = watch(model, edit=lambda call, weights: weights)
    with watcher:
        model(x)
    assert needs_check(model, watcher.key)


def test_notes_are_kept_with_the_model():
    model = nn.Identity()
    mark_checked(model, "key", ["a note"])
    assert check_notes(model, "key") == ["a note"] and check_notes(model, "other") == []


def test_what_stays_unverified_is_printed():
    class Dropping(Block):
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    model = Stack(Dropping())
    for _ in range(2):
        with watch(model) as trace:
            model(torch.randn(2, 6, 16))
        assert "not verified (dropout or an added term): 1 call of 'layers.*'" in repr(trace)


def test_the_backward_pass_and_recomputation_are_not_counted():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x, mask=None):
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed(FusedAttention(), FusedAttention())
    with watch(model) as trace:
        model(torch.randn(2, 6, 16)).sum().backward()
    assert len(trace) == 2


def test_results_are_those_of_the_model_alone():
    torch.manual_seed(0)
    model, x = Stack(FusedAttention(), FusedAttention()).eval(), torch.randn(2, 6, 16)
    alone = model(x)
    with watch(model):
        counted_too = model(x)
    assert torch.equal(alone, counted_too)


class Switching(nn.Module):
    """Fused attention that is written out, with heads before the batch, once `written` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.written: bool | int = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, dim=-1)
        if not self.written:
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        out = ((q @ k.mT) * 0.5).softmax(dim=-1) @ v
        return out.permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize("flag", [True, 1])
def test_axes_are_followed_again_where_fused_attention_is_written_out_later(
    flag: bool | int,
) -> None:
    model, x = Switching().eval(), torch.randn(2, 5, 16)
    model.written = type(flag)(0)
    for _ in range(2):
        with watch(model) as trace:
            model(x)
        assert [tuple(call.weights().shape) for call in trace.calls] == [(2, 4, 5, 5)]
    model.written = flag
    if not isinstance(
        flag, bool
    ):  # numbers of a module may count its calls: they are not looked at
        with pytest.raises(NotImplementedError, match="Switching"), watch(model):
            model(x)
    for _ in range(2):
        with watch(model) as trace:
            model(x)
        assert [tuple(call.weights().shape) for call in trace.calls] == [(2, 4, 5, 5)]
        scores = trace.calls[0].weights()
        q, k, _ = model.project(x).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, dim=-1)
        torch.testing.assert_close(scores, ((q @ k.mT) * 0.5).softmax(dim=-1))


def test_a_block_that_was_not_followed_says_so() -> None:
    model, x = Stack(FusedAttention()).eval(), torch.randn(2, 5, 16)
    with watch(model, edit=lambda call, weights: weights) as trace:
        model(x)
    assert trace.notes == [NOT_CHECKED] and NOT_CHECKED in repr(trace)
    for _ in range(2):
        with watch(model) as trace:
            model(x)
        assert trace.notes == []
    with watch(model, edit=lambda call, weights: weights) as trace:  # followed by now
        model(x)
    assert trace.notes == []
