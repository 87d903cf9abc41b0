"""Blocks that nobody has read yet, on a CPU, where plain operations stand in for the kernels.

What the kernels themselves compute is held to plain operations in `test_kernels`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.capture import lazy_map
from overt.capture import trace as seeing
from overt.capture.block_scores import block_log_softmax, tap_gradients
from overt.capture.call import Call, QKCall, Route
from overt.capture.lazy_map import BlockInputs, LazyAttentionMap
from overt.capture.trace import AttentionTrace
from overt.losses import Loss, cross_entropy, kl
from overt.losses.grounding import direct_supervision

ROWS = torch.tensor([[1, 0, 3], [2, -1, -1]])


def plain_cross_entropy(target: Any, log_eps: float, **given: Any) -> Any:
    """What the kernels sum, out of log-shares that are there."""
    logs = block_log_softmax(**given)
    return -(target[:, None] * torch.where(logs.isneginf(), log_eps, logs)).sum(dim=-1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU with the kernels."""
    monkeypatch.setattr(seeing, "can_fuse", lambda *_: True)
    monkeypatch.setattr(lazy_map, "fused_cross_entropy", plain_cross_entropy)


def attended() -> tuple[AttentionTrace, list[torch.Tensor]]:
    """Four words and six regions in two layers of three heads; a sample has one region less."""
    torch.manual_seed(0)
    learned = [torch.randn(2, 3, 10, 8, dtype=torch.float64).requires_grad_() for _ in range(4)]
    allowed = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    allowed[1, ..., 9:] = False
    calls = []
    for at, (query, key) in enumerate(zip(learned[::2], learned[1::2], strict=True)):
        source = QKCall(query, key, 0.3, None, allowed, taps=tap_gradients(query, key))
        calls.append(Call(str(at), torch.nn.Identity(), source, Route.SDPA, False))
    return AttentionTrace(calls, words(4) + regions(6)), learned


def truth(layers: int = 1) -> AttentionMap:
    """Some words look at two regions each; one of them is not there."""
    wanted = torch.zeros(2, layers, 1, 4, 6, dtype=torch.float64)
    wanted[0, :, :, 1, :2], wanted[0, :, :, 3, 4], wanted[1, :, :, 2, 4:] = 0.5, 1.0, 0.5
    return AttentionMap(wanted, regions(6), words(4))


def of_rows(layers: int = 1) -> AttentionMap:
    """The truth of `ROWS` alone."""
    at = ROWS.clamp_min(0)[:, None, None, :, None].expand(2, layers, 1, 3, 6)
    values = truth(layers).values.gather(3, at) * (ROWS >= 0)[:, None, None, :, None]
    return AttentionMap(values, regions(6), words(3, "rows"))


def total_of(losses: dict[str, Loss]) -> torch.Tensor:
    return torch.stack([one.mean() for one in losses.values()]).sum()


@pytest.mark.parametrize("loss", [cross_entropy, kl])
@pytest.mark.parametrize("layers", [1, 2], ids=["one for all", "one a layer"])
def test_losses_and_gradients_are_those_of_a_block_that_is_there(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, loss: Any, layers: int
) -> None:
    found = []
    for way in (True, False):
        monkeypatch.setattr(seeing, "can_fuse", lambda *_, way=way: way)
        trace, learned = attended()
        block = trace.log_block("text", "regions", ROWS)
        assert isinstance(block, LazyAttentionMap) == way
        made = loss(block, of_rows(layers))
        if isinstance(block, LazyAttentionMap):
            assert (block.pending is not None) == (layers == 1), (
                "layers that differ have to be read"
            )
        found.append((made.total.detach(), torch.autograd.grad(made.mean(), learned)))
    torch.testing.assert_close(*(total for total, _ in found), rtol=1e-12, atol=1e-12)
    for one, two in zip(*(slopes for _, slopes in found), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("among", [None, torch.tensor([[True, True, False, True]] * 2)])
def test_direct_supervision_reads_no_block(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None, among: Any
) -> None:
    trace, learned = attended()
    monkeypatch.setattr(seeing, "can_fuse", lambda *_: False)
    expected = direct_supervision(trace.log_block, truth(), words=among)
    slopes = torch.autograd.grad(total_of(expected), learned)
    monkeypatch.setattr(seeing, "can_fuse", lambda *_: True)
    monkeypatch.setattr(lazy_map, "block_log_softmax", lambda **_: pytest.fail("a block was read"))
    found = direct_supervision(trace.log_block, truth(), words=among)
    for name, one in found.items():
        torch.testing.assert_close(one.total, expected[name].total, rtol=1e-12, atol=1e-12)
        assert torch.equal(one.count, expected[name].count)
    mine = torch.autograd.grad(total_of(found), learned)
    for ours, theirs in zip(mine, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_is_asked_of_the_axes_reads_nothing(on_gpu: None) -> None:
    block = attended()[0].log_block("text", "regions", ROWS)
    assert isinstance(block, LazyAttentionMap)
    assert block.shape == (2, 2, 3, 3, 6) and len(block) == 2
    assert (block.kind, block.form) == (Kind.PROBABILITY, Form.LOG)
    assert block.visible.shape == (2, 3, 6)
    assert block.rows.tolist() == [[True] * 3, [True, False, False]]
    assert repr(block).startswith("AttentionMap(b=2 l=2 h=3 q=3 k=6, probability")
    assert block.pending is not None
    open_ = LazyAttentionMap.from_inputs(
        replace(block.pending, mask=None), block.queries, block.keys
    )
    assert open_.visible.all() and open_.visible.shape == (2, 3, 6) and open_.pending is not None


def test_once_it_is_read_it_is_a_map_like_any_other(on_gpu: None) -> None:
    trace, _ = attended()
    block, fresh = (trace.log_block("text", "regions", ROWS) for _ in range(2))
    assert isinstance(block, LazyAttentionMap)
    values = block.check().values
    assert block.pending is None and block.values is values, "it is computed once"
    assert block.shape == tuple(values.shape) and block.visible.shape == (2, 3, 6)
    assert block.fused_cross_entropy(of_rows().values, -1.0) is None
    among = torch.tensor([[True] * 3 + [False] * 3] * 2)
    narrow = (
        one.restrict_keys(among) for one in (block, fresh) if isinstance(one, LazyAttentionMap)
    )
    torch.testing.assert_close(*(one.weights for one in narrow))
    copy = replace(block, mask=block.mask)
    assert copy.values is values
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = block.colour


def test_targets_that_learn_or_do_not_fit_are_left_to_plain_operations(on_gpu: None) -> None:
    block = attended()[0].log_block("text", "regions", ROWS)
    assert isinstance(block, LazyAttentionMap)
    wanted = of_rows().values
    assert block.fused_cross_entropy(wanted.requires_grad_(), -1.0) is None
    assert block.fused_cross_entropy(wanted.detach()[:, :, :, :2], -1.0) is None
    with pytest.raises(ValueError, match=r"layers.*heads"):
        cross_entropy(block, AttentionMap(wanted.detach()[:1], regions(6), words(3)))


def test_a_graph_that_is_compiled_takes_plain_operations(
    monkeypatch: pytest.MonkeyPatch, on_gpu: None
) -> None:
    """A block may be made outside of it: the kernels are not for a compiler to look into."""
    trace, _ = attended()
    block, plain = (trace.log_block("text", "regions", ROWS) for _ in range(2))
    expected = cross_entropy(plain, of_rows()).total
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(
        lazy_map, "fused_cross_entropy", lambda **_: pytest.fail("a kernel would be traced")
    )
    torch.testing.assert_close(cross_entropy(block, of_rows()).total, expected)


def test_gradients_are_as_where_the_block_was_asked_for(on_gpu: None) -> None:
    trace, _ = attended()
    with torch.no_grad():
        silent = trace.log_block("text", "regions", ROWS)
    assert not silent.values.requires_grad
    learns = trace.log_block("text", "regions", ROWS)
    with torch.no_grad():
        assert learns.values.requires_grad


def test_sizes_of_block_inputs() -> None:
    query = torch.randn(2, 3, 10, 8)
    inputs = BlockInputs(
        [*tap_gradients(query)] * 5, [query] * 5, slice(0, 2), slice(2, 6), 1.0, None, True
    )
    assert inputs.sizes == (2, 5, 3)
    assert inputs.log_softmax().shape == (2, 5, 3, 2, 4)
