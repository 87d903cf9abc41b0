"""Shapes and gradients of the custom operators in compiled graphs; run by `test_custom_ops.py`.

The kernels are compared with plain operations in `row_softmax_cases.py`; here a stand-in by plain
operations takes their place.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from overt.capture.block_scores import block_log_softmax
from overt.capture.kernels import triton_launch
from overt.capture.kernels.custom_ops import block_log_softmax as operator


class Multiplied:
    """`triton_launch.BlockLauncher` by plain operations."""

    def __init__(self, queries: Sequence[Tensor], keys: Sequence[Tensor], rows: Tensor,
                 columns: slice, scale: float, hidden: Tensor | None) -> None:  # fmt: skip
        self.rows, self.columns, self.scale, self.hidden = rows, columns, scale, hidden
        at = rows.clamp_min(0)[:, None, :, None]
        self.at = torch.stack([one.take_along_dim(at, 2) for one in queries])
        times = queries[0].shape[1] // keys[0].shape[1]
        some = [one[:, :, columns].repeat_interleave(times, 1) for one in keys]
        self.keys, self.times = torch.stack(some), times

    def log_softmax(self) -> Tensor:
        scores = self.scale * self.at @ self.keys.mT
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        return scores.log_softmax(dim=-1).float()

    def slopes(self, slopes: Tensor, logs: Tensor) -> Tensor:
        slopes = torch.where(logs.isneginf(), 0, slopes)
        return slopes - logs.exp() * slopes.sum(dim=-1, keepdim=True)

    def row_gradient(self, slopes: Tensor, logs: Tensor, once: bool) -> tuple[Tensor, Tensor]:
        made = self.scale * self.slopes(slopes, logs) @ self.keys
        at = self.rows.clamp_min(0)
        same = (at[:, :, None] == at[:, None]).float()
        if once:
            same = same * (same.tril(-1).sum(dim=-1, keepdim=True) == 0)
        made = same[:, None] @ made
        return made, slopes.sum(dim=-1)

    def write_key_gradient(self, given: tuple[Tensor, ...], into: Tensor, begin: int) -> None:
        slopes, logs, _ = given
        made = self.scale * self.slopes(slopes, logs).mT @ self.at
        made = made.unflatten(2, (-1, self.times)).sum(dim=3)
        into[:, :, :, begin : begin + made.shape[3]] = made


def drawn(groups: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    sizes = ((4, 9), (groups, 11))
    found = [
        [torch.randn(2, n, heads, 5).transpose(1, 2).requires_grad_() for _ in range(3)]
        for heads, n in sizes
    ]
    return found[0], found[1]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a card."""
    torch._dynamo.reset()
    monkeypatch.setattr(triton_launch, "BlockLauncher", Multiplied)
    monkeypatch.setattr(triton_launch, "supports", lambda *_: True)


ROWS = torch.tensor([[0, 7, 7], [4, 1, -1]])


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("rows", [ROWS, slice(1, 7, 3)], ids=["positions", "a slice"])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_graph_has_the_shares_and_gradients_of_plain_operations(
    taken: None, monkeypatch: pytest.MonkeyPatch, groups: int, rows: Tensor | slice, hides: bool
) -> None:
    queries, keys = drawn(groups)
    visible = torch.rand(2, 3 if isinstance(rows, Tensor) else 2, 6) > 0.3 if hides else None
    if visible is not None:
        visible[..., 0] = True
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def loss() -> Tensor:
        logs = block_log_softmax(queries, keys, rows, slice(2, 8), 0.4, visible)
        return torch.where(logs.isneginf(), 0, logs).square().sum()

    found = []
    for backend in (keep, "aot_eager"):
        value = torch.compile(loss, backend=backend, fullgraph=True)()  # type: ignore[arg-type]
        found.append((value.detach(), torch.autograd.grad(value, [*queries, *keys])))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in called if "overt" in name] == ["overt.block_log_softmax.default"]
    monkeypatch.setattr(triton_launch, "supports", lambda *_: False)
    plain = loss()
    wanted = torch.autograd.grad(plain, [*queries, *keys])
    for value, slopes in found:
        torch.testing.assert_close(value, plain.detach())
        for mine, theirs in zip(slopes, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_what_a_graph_is_told_is_what_the_operators_do(taken: None) -> None:
    queries, keys = drawn()
    torch.library.opcheck(operator, (queries, keys, ROWS, 2, 8, 0.4, None))


def test_where_kernels_do_not_fit_a_graph_has_plain_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(triton_launch, "BlockLauncher", None)
    queries, keys = drawn()
    for columns in (slice(2, 8), torch.tensor([[0, 3], [1, 2]])):
        run = torch.compile(block_log_softmax, backend="eager", fullgraph=True)
        found = run(queries, keys, ROWS, columns, 0.4)
        torch.testing.assert_close(found, block_log_softmax(queries, keys, ROWS, columns, 0.4))
