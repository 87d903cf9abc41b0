"""Attention sinks: detection, names, removal."""

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, Layout, Span, words
from overt.attribution.sinks import Sink, find_sinks, remove_sinks
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.capture.trace import AttentionTrace
from overt.geometry import TextGeometry

N = 12


def uniform_weights() -> Tensor:
    """Make uniform weights of two samples and three heads."""
    return torch.full((2, 3, N, N), 1 / N).double()


def sink_weights(position: int, mass: float, heads: int = 3, queries: int = N) -> Tensor:
    """Give one position of the first sample `mass` in some heads and queries."""
    weights = uniform_weights()
    part = weights[0, :heads, :queries]
    part[:] = (1 - mass) / (N - 1)
    part[..., position] = mass
    return weights


def make_trace(*layers: Tensor, kind: Kind = Kind.PROBABILITY) -> AttentionTrace:
    return AttentionTrace(
        [
            Call(f"layer.{i}", nn.Identity(), MaterializedCall(one, kind), Route.SOFTMAX, False)
            for i, one in enumerate(layers)
        ]
    )


def test_sink_is_found_with_its_share_and_frequency() -> None:
    (found,) = find_sinks(make_trace(uniform_weights(), sink_weights(4, 0.6)))
    assert (found.sample, found.layer, found.position) == (0, "layer.1", 4)
    assert found.share == pytest.approx(0.6)
    assert found.uniform_share == pytest.approx(1 / N)
    assert found.frequency == 1
    assert found.name == "position 4"


@pytest.mark.parametrize(
    ("weights", "seen"),
    [
        (sink_weights(0, 0.3), False),  # 3.6 times the uniform share
        (sink_weights(0, 0.5), True),
        (sink_weights(0, 0.9, heads=1), False),  # one of three heads
        (sink_weights(0, 0.9, heads=2), True),
        (sink_weights(0, 0.9, queries=6), False),  # not more than half of the queries
        (sink_weights(0, 0.9, queries=7), True),
    ],
)
def test_sinks_need_a_majority_of_queries_and_heads(weights: Tensor, seen: bool) -> None:
    assert bool(find_sinks(make_trace(weights))) is seen


def slow_sinks(
    weights: Tensor, shown: Tensor, times: float
) -> dict[int, tuple[float, float, float]]:
    """Compute the numbers of one sample query by query and head by head."""
    h, q, k = weights.shape
    found = {}
    for j in range(k):
        mass, fair, taken, total = 0.0, 0.0, 0, 0
        for i in range(q):
            count = int(shown[i].sum())
            if count <= times or not shown[:, i].any():
                continue
            for head in range(h):
                total += 1
                mass += float(weights[head, i, j])
                fair += bool(shown[i, j]) / count
                taken += float(weights[head, i, j]) > times * bool(shown[i, j]) / count
        found[j] = (mass / total, fair / total, taken / total)
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_find_sinks_agrees_with_the_slow_reference(causal: bool) -> None:
    query, key = torch.randn(2, 2, 4, 20, 8).double()
    key[:, :, 1] = 3 * query.mean(dim=2)
    allowed = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    allowed[1, ..., 17:] = False
    source = QKCall(query, key, 0.5, allowed=allowed, causal=causal)
    trace = AttentionTrace([Call("one", nn.Identity(), source, Route.SDPA, False)])
    found = {(one.sample, one.position): one for one in find_sinks(trace, 1.5, 0.05)}
    assert found
    for sample in range(2):
        shown = trace.calls[0].visible()[sample].expand(20, 20)
        for position, numbers in slow_sinks(source.weights()[sample], shown, 1.5).items():
            one = found.get((sample, position))
            assert (one is not None) == (numbers[2] > 0.05)
            if one is not None:
                assert (one.share, one.uniform_share, one.frequency) == pytest.approx(numbers)


def test_a_learned_sink_has_no_position() -> None:
    source = QKCall(
        torch.randn(2, 3, N, 4), torch.randn(2, 3, N, 4), 0.1, sinks=torch.full((3,), 4.0)
    )
    found = find_sinks(AttentionTrace([Call("one", nn.Identity(), source, Route.SDPA, False)]))
    assert {(one.position, one.name) for one in found} == {(-1, "learned sink")}
    left = 1 - source.weights().sum(dim=-1).mean(dim=(1, 2))
    assert [one.share for one in found] == pytest.approx(left.tolist())


def test_sinks_are_named_by_tokens_and_layouts() -> None:
    seen = make_trace(sink_weights(0, 0.9))
    assert find_sinks(seen)[0].name == "first position"
    tokens = [["[CLS]", *"abcdefghijk"]] * 2
    assert find_sinks(seen, tokens=tokens)[0].name == "[CLS]"
    layout = words(1, "class") + words(4, "registers") + words(7, "image")
    assert find_sinks(seen.with_layout(layout))[0].name == "class"
    third = make_trace(sink_weights(3, 0.9)).with_layout(layout)
    assert find_sinks(third)[0].name == "registers 2"
    spans = torch.tensor([[[0, 3], [4, 7]]] * 2)
    text = TextGeometry(("the dog",) * 2, spans)
    index = torch.tensor([[2, 3]] * 2)
    named = Layout((Span("text", (2,), index, text),), N)
    assert find_sinks(make_trace(sink_weights(3, 0.9)).with_layout(named))[0].name == "text 1 'dog'"


def test_remove_sinks_renormalises_the_other_keys() -> None:
    trace = make_trace(sink_weights(4, 0.6), sink_weights(4, 0.2))
    maps = trace.map()
    found = remove_sinks(maps, find_sinks(trace)).check()
    assert not found.values[0, ..., 4].any() and not found.visible[0, :, 4].any()
    expected = maps.values.clone()
    expected[0, ..., 4] = 0
    expected[0] = expected[0] / expected[0].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found.values, expected)
    assert maps.values[0, 0, 0, 0, 4] == pytest.approx(0.6)  # the given map is unchanged
    torch.testing.assert_close(remove_sinks(maps, []).values, maps.values)


def test_remove_sinks_keeps_log_weights_masks_and_gradients() -> None:
    scores = torch.randn(1, 1, 1, 2, 4).double().requires_grad_()
    mask = torch.tensor([[[True, True, True, False]]])
    maps = AttentionMap.from_scores(scores, words(4), words(2), mask)
    sink = Sink(0, "", 0, "", 0.0, 0.0, 0.0)
    found = remove_sinks(maps, [sink]).check()
    expected = scores[..., 1:3].softmax(-1)
    torch.testing.assert_close(found.weights[..., 1:3], expected)
    assert found.visible[0, 0].tolist() == [False, True, True, False]
    found.weights[..., 1].sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()


def test_invalid_arguments_and_signed_maps_raise() -> None:
    trace = make_trace(uniform_weights()[..., :4, :4])
    with pytest.raises(ValueError, match="5 visible"):
        find_sinks(trace)
    with pytest.raises(ValueError, match=r"ratio .* 0\.5"):
        find_sinks(trace, ratio=0.5)
    with pytest.raises(ValueError, match=r"2 samples.* 4 keys"):
        remove_sinks(trace.map(), [Sink(0, "", 9, "", 0.0, 0.0, 0.0)])
    signed = AttentionMap(uniform_weights()[:, None], words(N), words(N), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="positive part"):
        remove_sinks(signed, [])
