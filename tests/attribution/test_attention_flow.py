"""Attention flow: cases by hand, parity with networkx, gradients, errors."""

import builtins
from typing import Any

import pytest
import torch

from overt.attention import AttentionMap, Kind, words
from overt.attribution import rollout
from overt.attribution.attention_flow import flow
from tests.capture.encoder import Encoder, inputs, padding, seen_of

pytest.importorskip("scipy")


def flow_map(layers: list[list[list[float]]]) -> AttentionMap:
    values = torch.tensor(layers, dtype=torch.float64)[None, :, None]
    n = values.shape[-1]
    return AttentionMap(values, words(n), words(n), kind=Kind.AMOUNT)


def test_flow_of_two_layers_by_hand() -> None:
    """From 0, 0.7 flows through 0, which sends 0.2 to input 1; 0.3 through 1, which sends 0.6."""
    found = flow(flow_map([[[0.8, 0.2], [0.4, 0.6]], [[0.7, 0.3], [0.5, 0.5]]]), residual=False)
    expected = torch.tensor([[1.0, 0.5], [0.9, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(found.values[0, 0, 0], expected, rtol=1e-12, atol=1e-12)


def test_flow_of_one_layer_is_its_weights_and_bottlenecks_limit_flow() -> None:
    one = flow_map([[[0.9, 0.1], [0.5, 0.5]]])
    torch.testing.assert_close(flow(one, residual=False).values, one.values)
    narrow = flow_map([[[1.0, 0.0], [0.0, 0.05]], [[0.5, 0.5], [0.5, 0.5]]])
    assert flow(narrow, residual=False).values[0, 0, 0, 0].tolist() == [0.5, 0.05]


def test_weights_above_one_do_not_overflow() -> None:
    wide = AttentionMap(torch.full((1, 3, 1, 5, 5), 8.0), words(5), words(5), kind=Kind.AMOUNT)
    assert flow(wide, residual=False).values.unique().tolist() == [40.0]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_flow_agrees_with_networkx(residual: bool, masked: bool) -> None:
    networkx = pytest.importorskip("networkx")
    seen, _ = seen_of(Encoder(), inputs(n=5), padding(5) if masked else None)
    maps = seen.map().detach()
    found = flow(maps, fuse=torch.amax, residual=residual).check()
    layers = maps.weights.amax(dim=2)
    if residual:
        layers = layers + torch.eye(5).double()
        layers = layers / layers.sum(-1, keepdim=True)
    for sample in range(2):
        graph = networkx.DiGraph()
        for l in range(3):
            for i in range(5):
                for j in range(5):
                    graph.add_edge((l + 1, i), (l, j), capacity=float(layers[sample, l, i, j]))
        for i in range(5):
            for j in range(5):
                expected = networkx.maximum_flow_value(graph, (3, i), (0, j))
                got = float(found.values[sample, 0, 0, i, j])
                assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_selected_rows_equal_full_rows_and_absent_rows_are_zero() -> None:
    seen, _ = seen_of(Encoder(causal=True), inputs(n=5))
    maps = seen.map()
    whole, rows = flow(maps), torch.tensor([[4, 1], [2, -1]])
    found = flow(maps, rows).check()
    torch.testing.assert_close(found.values[0], whole.values[0][..., [4, 1], :])
    torch.testing.assert_close(found.values[1][..., 0, :], whole.values[1][..., 2, :])
    assert not found.rows[1, 1] and not found.values[1][..., 1, :].any()
    assert torch.equal(whole.visible, rollout(maps).visible)


def test_flow_gradient_agrees_with_finite_differences() -> None:
    leaf = torch.rand(1, 2, 1, 3, 3).double().softmax(-1).requires_grad_()

    def value(weights: torch.Tensor) -> torch.Tensor:
        maps = AttentionMap(weights, words(3), words(3), kind=Kind.AMOUNT)
        return flow(maps, torch.tensor([[1]]), residual=False).values[..., 2].sum()

    assert torch.autograd.gradcheck(value, (leaf,), eps=1e-7, atol=1e-4)


def test_large_graphs_and_cross_attention_raise() -> None:
    n = 200
    large = AttentionMap(torch.ones(1, 12, 1, n, n) / n, words(n), words(n))
    with pytest.raises(ValueError, match=r"40000 .* 480000"):
        flow(large)
    across = AttentionMap(torch.ones(1, 1, 1, 2, 3) / 3, words(3), words(2))
    with pytest.raises(ValueError, match="2 queries, 3 keys"):
        flow(across)
    with pytest.raises(ValueError, match=r"row 7 .* 2 pos"):
        flow(flow_map([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[7]]))


def test_missing_scipy_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install scipy"):
        flow(flow_map([[[1.0]]]))
