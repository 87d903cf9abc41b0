"""Blocks that nobody has read yet, on a CPU, where plain operations stand in for the kernels.

What the kernels themselves compute is held to plain operations in `test_kernels`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.capture import seen as seeing
from overt.capture import unread
from overt.capture.call import Call, Projected, Route
from overt.capture.products import log_shares, tap
from overt.capture.seen import Seen
from overt.capture.unread import Places, Unread
from overt.supervise import Loss, cross_entropy, kl
from overt.supervise.grounding import direct

ROWS = torch.tensor([[1, 0, 3], [2, -1, -1]])


def plain_costs(wanted: Any, nothing: float, **given: Any) -> Any:
    """What the kernels sum, out of log-shares that are there."""
    logs = log_shares(**given)
    return -(wanted[:, None] * torch.where(logs.isneginf(), nothing, logs)).sum(dim=-1)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a card with the kernels."""
    monkeypatch.setattr(seeing, "fused", lambda *_: True)
    monkeypatch.setattr(unread, "costs", plain_costs)


def attended() -> tuple[Seen, list[torch.Tensor]]:
    """Four words and six regions in two layers of three heads; a sample has one region less."""
    torch.manual_seed(0)
    learned = [torch.randn(2, 3, 10, 8, dtype=torch.float64).requires_grad_() for _ in range(4)]
    allowed = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    allowed[1, ..., 9:] = False
    calls = []
    for at, (query, key) in enumerate(zip(learned[::2], learned[1::2], strict=True)):
        source = Projected(query, key, 0.3, None, allowed, taps=tap(query, key))
        calls.append(Call(str(at), torch.nn.Identity(), source, Route.SDPA, False))
    return Seen(calls, words(4) + regions(6)), learned


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
    monkeypatch: pytest.MonkeyPatch, on_card: None, loss: Any, layers: int
) -> None:
    found = []
    for way in (True, False):
        monkeypatch.setattr(seeing, "fused", lambda *_, way=way: way)
        seen, learned = attended()
        block = seen.log_block("text", "regions", ROWS)
        assert isinstance(block, Unread) == way
        made = loss(block, of_rows(layers))
        if isinstance(block, Unread):
            assert (block.unread is not None) == (layers == 1), "layers that differ have to be read"
        found.append((made.total.detach(), torch.autograd.grad(made.mean(), learned)))
    torch.testing.assert_close(*(total for total, _ in found), rtol=1e-12, atol=1e-12)
    for one, two in zip(*(slopes for _, slopes in found), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("among", [None, torch.tensor([[True, True, False, True]] * 2)])
def test_direct_supervision_reads_no_block(
    monkeypatch: pytest.MonkeyPatch, on_card: None, among: Any
) -> None:
    seen, learned = attended()
    monkeypatch.setattr(seeing, "fused", lambda *_: False)
    expected = direct(seen.log_block, truth(), words=among)
    slopes = torch.autograd.grad(total_of(expected), learned)
    monkeypatch.setattr(seeing, "fused", lambda *_: True)
    monkeypatch.setattr(unread, "log_shares", lambda **_: pytest.fail("a block was read"))
    found = direct(seen.log_block, truth(), words=among)
    for name, one in found.items():
        torch.testing.assert_close(one.total, expected[name].total, rtol=1e-12, atol=1e-12)
        assert torch.equal(one.count, expected[name].count)
    mine = torch.autograd.grad(total_of(found), learned)
    for ours, theirs in zip(mine, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_what_is_asked_of_the_axes_reads_nothing(on_card: None) -> None:
    block = attended()[0].log_block("text", "regions", ROWS)
    assert isinstance(block, Unread)
    assert block.shape == (2, 2, 3, 3, 6) and len(block) == 2
    assert (block.kind, block.form) == (Kind.PROBABILITY, Form.LOG)
    assert block.visible.shape == (2, 3, 6)
    assert block.rows.tolist() == [[True] * 3, [True, False, False]]
    assert repr(block).startswith("AttentionMap(b=2 l=2 h=3 q=3 k=6, probability")
    assert block.unread is not None
    open_ = Unread.of(replace(block.unread, mask=None), block.queries, block.keys)
    assert open_.visible.all() and open_.visible.shape == (2, 3, 6) and open_.unread is not None


def test_once_it_is_read_it_is_a_map_like_any_other(on_card: None) -> None:
    seen, _ = attended()
    block, fresh = (seen.log_block("text", "regions", ROWS) for _ in range(2))
    assert isinstance(block, Unread)
    values = block.check().values
    assert block.unread is None and block.values is values, "it is computed once"
    assert block.shape == tuple(values.shape) and block.visible.shape == (2, 3, 6)
    assert block.costs(of_rows().values, -1.0) is None
    among = torch.tensor([[True] * 3 + [False] * 3] * 2)
    narrow = (one.narrowed(among) for one in (block, fresh) if isinstance(one, Unread))
    torch.testing.assert_close(*(one.weights for one in narrow))
    copy = replace(block, mask=block.mask)
    assert copy.values is values
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = block.colour


def test_targets_that_learn_or_do_not_fit_are_left_to_plain_operations(on_card: None) -> None:
    block = attended()[0].log_block("text", "regions", ROWS)
    assert isinstance(block, Unread)
    wanted = of_rows().values
    assert block.costs(wanted.requires_grad_(), -1.0) is None
    assert block.costs(wanted.detach()[:, :, :, :2], -1.0) is None
    with pytest.raises(ValueError, match="only layers and heads broadcast"):
        cross_entropy(block, AttentionMap(wanted.detach()[:1], regions(6), words(3)))


def test_a_graph_that_is_compiled_takes_plain_operations(
    monkeypatch: pytest.MonkeyPatch, on_card: None
) -> None:
    """A block may be made outside of it: the kernels are not for a compiler to look into."""
    seen, _ = attended()
    block, plain = (seen.log_block("text", "regions", ROWS) for _ in range(2))
    expected = cross_entropy(plain, of_rows()).total
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(unread, "costs", lambda **_: pytest.fail("a kernel would be traced"))
    torch.testing.assert_close(cross_entropy(block, of_rows()).total, expected)


def test_gradients_are_as_where_the_block_was_asked_for(on_card: None) -> None:
    seen, _ = attended()
    with torch.no_grad():
        silent = seen.log_block("text", "regions", ROWS)
    assert not silent.values.requires_grad
    learns = seen.log_block("text", "regions", ROWS)
    with torch.no_grad():
        assert learns.values.requires_grad


def test_places_know_their_sizes() -> None:
    query = torch.randn(2, 3, 10, 8)
    places = Places([*tap(query)] * 5, [query] * 5, slice(0, 2), slice(2, 6), 1.0, None, True)
    assert places.sizes == (2, 5, 3)
    assert places.log_shares().shape == (2, 5, 3, 2, 4)
