"""Attention with any order of axes: the exact map, or an error that names the module."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attention import Kind
from overt.attribution import gradient_attention
from overt.capture import watch
from tests.capture.families import noise

B, H, N, D = 4, 4, 6, 8  # as many samples as heads, so that sizes do not identify an axis


class ProjectedAttention(nn.Module):
    """Query, key and value projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(H * D, H * D) for _ in range(3))

    def parts(self, x: Tensor) -> list[Tensor]:
        return [part(x).unflatten(-1, (H, D)) for part in (self.query, self.key, self.value)]


def true_weights(model: ProjectedAttention, x: Tensor) -> Tensor:
    query, key, _ = (one.transpose(1, 2) for one in model.parts(x))
    return (query @ key.mT / math.sqrt(D)).softmax(-1)


def _softmax(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(D)).softmax(-1)


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def _explicit(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _softmax(query, key) @ value


def _left(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (value.mT @ _softmax(query, key).mT).mT


def _bmm_left(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    lead = query.shape[:-2]
    query, key, value = (one.reshape(-1, *one.shape[-2:]) for one in (query, key, value))
    out = torch.bmm(value.transpose(1, 2), _softmax(query, key).permute(0, 2, 1))
    return out.transpose(1, 2).unflatten(0, lead)


CORES = {"sdpa": _fused, "matmul": _explicit, "values left": _left, "bmm, values left": _bmm_left}


def heads_first(core, q, k, v):
    return core(*(one.permute(2, 0, 1, 3) for one in (q, k, v))).permute(1, 2, 0, 3)


def heads_folded_first(core, q, k, v):
    q, k, v = (one.permute(2, 0, 1, 3).reshape(H * B, N, D) for one in (q, k, v))
    return core(q, k, v).unflatten(0, (H, B)).permute(1, 2, 0, 3)


def heads_folded_behind(core, q, k, v):
    q, k, v = (one.transpose(1, 2).contiguous().view(B * H, N, D) for one in (q, k, v))
    return core(q, k, v).unflatten(0, (B, H)).transpose(1, 2)


def heads_split_and_concatenated(core, q, k, v):
    q, k, v = (torch.cat(one.flatten(2).split(D, dim=2), dim=0) for one in (q, k, v))
    return torch.stack(core(q, k, v).chunk(H, dim=0), dim=2)


def grouped(core, q, k, v):
    q, k, v = (one.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4) for one in (q, k, v))
    return core(q, k, v).permute(0, 3, 1, 2, 4).flatten(2, 3)


def heads_second(core, q, k, v):
    return core(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2)


ORDERS = [
    heads_first,
    heads_folded_first,
    heads_folded_behind,
    heads_split_and_concatenated,
    grouped,
]
ORDERS += [heads_second]


class OrderedAttention(ProjectedAttention):
    def __init__(self, order: Callable, core: Callable) -> None:
        super().__init__()
        self.order, self.core = order, core

    def forward(self, x: Tensor) -> Tensor:
        return self.order(self.core, *self.parts(x)).flatten(2)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda one: one.__name__)
def test_heads_are_found_on_any_axis(order, core) -> None:
    torch.manual_seed(0)
    model, x = OrderedAttention(order, CORES[core]).double(), noise(B, N, H * D).double()
    plain = model(x)
    with watch(model) as trace:
        out = model(x)
    torch.testing.assert_close(out, plain)
    expected = true_weights(model, x)
    (call,) = trace.calls
    torch.testing.assert_close(call.weights(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(call.log_weights().exp(), expected, rtol=0, atol=1e-12)
    assert call.kind is Kind.PROBABILITY
    _, _, value = (one.transpose(1, 2) for one in model.parts(x))
    if call.value is not None:
        torch.testing.assert_close(call.value.reshape(B, H, N, D), value)

    # edits of weights reach the right sample and head
    def edit(call, weights):
        return torch.where(torch.arange(H)[:, None, None] == 1, 0, weights)

    with watch(model, edit=edit):
        changed = model(x).unflatten(-1, (H, D))
    assert not changed[:, :, 1].any()
    torch.testing.assert_close(changed[:, :, 0], plain.unflatten(-1, (H, D))[:, :, 0])
    # and so do gradients
    target = (out.unflatten(-1, (H, D))[:, :, 2]).square().sum((1, 2))
    found = gradient_attention(trace, target).values[:, 0]
    assert not found[:, [0, 1, 3]].any() and bool(found[:, 2].any(dim=-1).all())


class InterleavedGroups(ProjectedAttention):
    """Key groups on the inner axis of the heads: the weights have groups first."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        q = q.unflatten(2, (2, 2))  # (b, n, member, group, d)
        k, v = (one[:, :, :2] for one in (k, v))
        if self.fused:
            q = q.permute(0, 3, 2, 1, 4)
            k, v = (one.permute(0, 2, 1, 3)[:, :, None].expand_as(q) for one in (k, v))
            return _fused(q, k, v).permute(0, 3, 2, 1, 4).flatten(2)
        weights = (torch.einsum("bnrgd,bmgd->bgrnm", q, k) / math.sqrt(D)).softmax(-1)
        return torch.einsum("bgrnm,bmgd->bnrgd", weights, v).flatten(2)


@pytest.mark.parametrize("fused", [True, False])
def test_heads_are_numbered_in_the_order_of_their_features(fused: bool) -> None:
    torch.manual_seed(0)
    model, x = InterleavedGroups(fused), noise(B, N, H * D)
    plain = model(x)
    with watch(model) as trace:
        torch.testing.assert_close(model(x), plain)
    query, key, _ = (one.transpose(1, 2) for one in model.parts(x))
    expected = _softmax(query, key[:, :2].repeat(1, 2, 1, 1))
    torch.testing.assert_close(trace.map().weights[:, 0], expected)

    def edit(call, weights):
        return torch.where(torch.arange(H)[:, None, None] == 1, 0, weights)

    with watch(model, edit=edit):
        changed = model(x).unflatten(-1, (H, D))
    assert not changed[:, :, 1].any()
    torch.testing.assert_close(changed[:, :, 2], plain.unflatten(-1, (H, D))[:, :, 2])


class LatentAttention(ProjectedAttention):
    """Learned queries, the same for all samples."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.latents = fused, nn.Parameter(noise(1, 3, H * D))

    def forward(self, x: Tensor) -> Tensor:
        _, key, value = (one.transpose(1, 2) for one in self.parts(x))
        query = self.query(self.latents).unflatten(-1, (H, D)).transpose(1, 2)
        return (_fused if self.fused else _explicit)(query, key, value)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("b", [2, 4])
def test_latent_queries_have_the_batch_of_their_keys(fused: bool, b: int) -> None:
    model, x = LatentAttention(fused), noise(b, N, H * D)
    with watch(model) as trace:
        model(x)
    query = model.query(model.latents).unflatten(-1, (H, D)).transpose(1, 2)
    expected = _softmax(query, model.parts(x)[1].transpose(1, 2))
    assert trace.calls[0].shape == (b, H, 3, N)
    torch.testing.assert_close(trace.map().weights[:, 0], expected)


class WindowAttention(ProjectedAttention):
    """Windows of positions, with `order` of (b, window, position, head, feature)."""

    def __init__(self, order: tuple[int, ...], fold: bool, fused: bool, heads: int) -> None:
        super().__init__()
        self.order, self.fold, self.fused, self.heads = order, fold, fused, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).unflatten(1, (2, -1)).permute(self.order)
            for part in (self.query, self.key, self.value)
        )
        if self.fold:
            q, k, v = (one.flatten(0, 1) for one in (q, k, v))
        return (_fused if self.fused else _explicit)(q, k, v)


WINDOWS = {
    "after heads": ((0, 3, 1, 2, 4), False),
    "before heads": ((0, 1, 3, 2, 4), False),
    "next to folded heads": ((0, 3, 1, 2, 4), True),
    "before folded": ((3, 0, 1, 2, 4), True),
    "first": ((1, 0, 3, 2, 4), False),
}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", WINDOWS)
def test_windows_are_samples_and_not_heads(way: str, fused: bool, heads: int) -> None:
    """Hiera has windows after its one head; HaloNet has heads in the batch next to windows."""
    model, x = WindowAttention(*WINDOWS[way], fused, heads), noise(2, 2 * N, H * D)
    with watch(model) as trace:
        model(x)
    q, k = (
        part(x).unflatten(-1, (heads, -1)).unflatten(1, (2, N)).transpose(2, 3)
        for part in (model.query, model.key)
    )
    scale = math.sqrt(H * D // heads) if fused else math.sqrt(D)
    expected = (q @ k.mT / scale).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(trace.map().weights[:, 0], expected)


# --- products that are not a map from queries to keys


class SaganBlock(nn.Module):
    """Values to the left of the weights, as in SAGAN and VQGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one(x).flatten(2) for one in (self.query, self.key, self.value))
        weights = torch.bmm(query.permute(0, 2, 1), key).softmax(-1)
        return torch.bmm(value, weights.permute(0, 2, 1)).view_as(x)


@pytest.mark.parametrize("side", [3, 2])
def test_values_to_the_left_of_the_weights_are_captured(side: int) -> None:
    model, x = SaganBlock(), noise(2, 8, 4, side)
    with watch(model) as trace:
        model(x)
    query, key = (one(x).flatten(2) for one in (model.query, model.key))
    assert trace.map().kind is Kind.PROBABILITY
    torch.testing.assert_close(trace.map().weights[:, 0, 0], (query.mT @ key).softmax(-1))


class ExtraProductAttention(ProjectedAttention):
    """Attention with another product of the same shape before the values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one[:, :, 0] for one in self.parts(x))
        weights = _softmax(query, key)
        value = value @ torch.eye(D)  # (b, n, d) by (d, d), where n is d
        return weights @ value


def test_a_product_before_the_values_is_not_mistaken_for_the_weights() -> None:
    model, x = ExtraProductAttention(), noise(2, D, H * D)
    with watch(model) as trace:
        model(x)
    query, key, _ = (one[:, :, 0] for one in model.parts(x))
    (call,) = trace.calls
    assert call.kind is Kind.PROBABILITY
    torch.testing.assert_close(call.weights()[:, 0], _softmax(query, key))


class ChannelAttention(ProjectedAttention):
    """Attention from channels to channels, as in XCiT."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.permute(0, 2, 3, 1) for one in self.parts(x))
        return (_fused if self.fused else _explicit)(q, k, v)


class ChannelBlock(nn.Module):
    """Attention between channels of an image, without projections, as in DANet."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(*x.shape[:2], -1)
        weights = torch.bmm(flat, flat.permute(0, 2, 1)).softmax(-1)
        return torch.bmm(weights, flat).view_as(x)


class NystromAttention(ProjectedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        few = [one.unflatten(2, (3, 2)).mean(3) for one in (q, k)]
        first, middle, last = _softmax(q, few[1]), _softmax(*few), _softmax(few[0], k)
        return (first @ torch.linalg.pinv(middle)) @ (last @ v)


class AgentAttention(ProjectedAttention):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        agents = q.unflatten(2, (3, 2)).mean(3)
        return self.core(q, agents, self.core(agents, k, v))


class EfficientAttention(ProjectedAttention):
    """Linear attention: keys and values are summed first."""

    def __init__(self, soft: bool) -> None:
        super().__init__()
        self.soft = soft

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        context = torch.einsum("bhdn,bhne->bhde", k.mT.softmax(-1), v)
        return torch.einsum("bhnd,bhde->bhne", q.softmax(-1) if self.soft else q, context)


class RingAttention(ProjectedAttention):
    """Two halves of the keys, each with a separate softmax."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        out, total = 0, 0
        for key, value in zip(k.chunk(2, dim=2), v.chunk(2, dim=2), strict=True):
            mass = (q @ key.mT / math.sqrt(D)).exp().sum(-1, keepdim=True)
            out, total = out + mass * self.core(q, key, value), total + mass
        return out / total


class SparseAttention(ProjectedAttention):
    """A subset of queries, the most active first, as in Informer."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in self.parts(x))
        top = q.norm(dim=-1).topk(3, dim=-1).indices
        out = v.mean(1, keepdim=True).expand(v.shape).clone()
        at = torch.arange(len(q))[:, None]
        out[at, top] = self.core(q[at, top], k, v)
        return out


class DiagonalAttention(ProjectedAttention):
    """Weights of a window, laid out along a diagonal before the product with the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        weights = (q * k).softmax(-1)[..., :N]
        return F.pad(weights, (0, 1)).flatten(2)[..., : N * N].unflatten(2, (N, N)) @ v


class FoldedRows(ProjectedAttention):
    """One key and value head; query heads are folded into rows, as in early StarCoder."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.core(q.flatten(1, 2), k[:, :, 0], v[:, :, 0])


class ChunkedAttention(ProjectedAttention):
    """Queries in chunks, to save memory."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        return torch.cat([self.core(one, k, v) for one in q.split(2, dim=2)], dim=2)


class FlippedAttention(ProjectedAttention):
    """Keys and values in reversed order."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(x))
        return self.core(q, k.flip(2), v.flip(2))


class HeadsToHeads(ProjectedAttention):
    """Heads of one position attend to each other: a missing transpose."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.core = _fused if fused else _explicit

    def forward(self, x: Tensor) -> Tensor:
        return self.core(*self.parts(x)).flatten(2)


REJECTED = {
    "heads to heads, fused": (lambda: HeadsToHeads(True), "channels"),
    "heads to heads, explicit": (lambda: HeadsToHeads(False), "channels"),
    "heads as rows, fused": (lambda: FoldedRows(True), "folds heads"),
    "heads as rows, explicit": (lambda: FoldedRows(False), "folds heads"),
    "chunks, fused": (lambda: ChunkedAttention(True), "slices of its queries"),
    "chunks, explicit": (lambda: ChunkedAttention(False), "slices of its queries"),
    "flipped, fused": (lambda: FlippedAttention(True), "by index"),
    "flipped, explicit": (lambda: FlippedAttention(False), "by index"),
    "channels, fused": (lambda: ChannelAttention(True), "channels"),
    "channels, explicit": (lambda: ChannelAttention(False), "channels"),
    "Nystrom": (NystromAttention, "another attention|other positions"),
    "agents, fused": (lambda: AgentAttention(True), "another attention"),
    "agents, explicit": (lambda: AgentAttention(False), "another attention"),
    "efficient": (lambda: EfficientAttention(True), "another attention|linear attention"),
    "efficient, one softmax": (lambda: EfficientAttention(False), "linear attention"),
    "ring, fused": (lambda: RingAttention(True), "slices of its keys"),
    "ring, explicit": (lambda: RingAttention(False), "slices of its keys"),
    "sorted queries, fused": (lambda: SparseAttention(True), "by index"),
    "sorted queries, explicit": (lambda: SparseAttention(False), "by index"),
    "diagonal": (DiagonalAttention, "other positions"),
}


@pytest.mark.parametrize("length", [N, D])
@pytest.mark.parametrize("way", REJECTED)
def test_unsupported_attention_raises_with_the_name_of_its_module(way: str, length: int) -> None:
    make, reason = REJECTED[way]
    model = make()
    name = type(model).__name__
    if length != N and name in ("NystromAttention", "AgentAttention", "DiagonalAttention"):
        pytest.skip("the landmarks are of one length")
    with pytest.raises(NotImplementedError, match=f"{name} .*({reason})"), watch(model):
        model(noise(2, length, H * D))


def test_channel_attention_of_images_is_rejected() -> None:
    with pytest.raises(NotImplementedError, match="ChannelBlock .*channels"):  # noqa: SIM117
        with watch(model := ChannelBlock()):
            model(noise(2, 8, 3, 3))
