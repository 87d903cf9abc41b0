import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, Layout, Span, words
from overt.capture.call import Call, Projected, Route, Written
from overt.capture.derived.sinks import Sink, find_sinks, without_sinks
from overt.capture.seen import Seen
from overt.geometry import TextGeometry

N = 12


def even() -> Tensor:
    """Two samples, three heads, an even spread."""
    return torch.full((2, 3, N, N), 1 / N).double()


def sunk(position: int, mass: float, heads: int = 3, queries: int = N) -> Tensor:
    """One position of the first sample takes `mass` in some heads and queries."""
    weights = even()
    part = weights[0, :heads, :queries]
    part[:] = (1 - mass) / (N - 1)
    part[..., position] = mass
    return weights


def seen_with(*layers: Tensor, kind: Kind = Kind.PROBABILITY) -> Seen:
    return Seen(
        [
            Call(f"layer.{i}", nn.Identity(), Written(one, kind), Route.SOFTMAX, False)
            for i, one in enumerate(layers)
        ]
    )


def test_a_sink_is_found_where_it_is_with_its_numbers() -> None:
    (found,) = find_sinks(seen_with(even(), sunk(4, 0.6)))
    assert (found.sample, found.layer, found.position) == (0, "layer.1", 4)
    assert found.share == pytest.approx(0.6)
    assert found.fair == pytest.approx(1 / N)
    assert found.often == 1
    assert found.name == "position 4"


@pytest.mark.parametrize(
    ("weights", "seen"),
    [
        (sunk(0, 0.3), False),  # 3.6 times its share
        (sunk(0, 0.5), True),
        (sunk(0, 0.9, heads=1), False),  # one head of three
        (sunk(0, 0.9, heads=2), True),
        (sunk(0, 0.9, queries=6), False),  # not over half of the queries
        (sunk(0, 0.9, queries=7), True),
    ],
)
def test_most_queries_and_heads_must_agree(weights: Tensor, seen: bool) -> None:
    assert bool(find_sinks(seen_with(weights))) is seen


def slow(weights: Tensor, shown: Tensor, times: float) -> dict[int, tuple[float, float, float]]:
    """One sample, query by query, head by head."""
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
def test_numbers_agree_with_counting_one_by_one(causal: bool) -> None:
    query, key = torch.randn(2, 2, 4, 20, 8).double()
    key[:, :, 1] = 3 * query.mean(dim=2)
    allowed = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    allowed[1, ..., 17:] = False
    source = Projected(query, key, 0.5, allowed=allowed, causal=causal)
    seen = Seen([Call("one", nn.Identity(), source, Route.SDPA, False)])
    found = {(one.sample, one.position): one for one in find_sinks(seen, 1.5, 0.05)}
    assert found
    for sample in range(2):
        shown = seen.calls[0].visible()[sample].expand(20, 20)
        for position, numbers in slow(source.weights()[sample], shown, 1.5).items():
            one = found.get((sample, position))
            assert (one is not None) == (numbers[2] > 0.05)
            if one is not None:
                assert (one.share, one.fair, one.often) == pytest.approx(numbers)


def test_a_learned_sink_has_no_position() -> None:
    source = Projected(
        torch.randn(2, 3, N, 4), torch.randn(2, 3, N, 4), 0.1, sinks=torch.full((3,), 4.0)
    )
    found = find_sinks(Seen([Call("one", nn.Identity(), source, Route.SDPA, False)]))
    assert {(one.position, one.name) for one in found} == {(-1, "learned sink")}
    left = 1 - source.weights().sum(dim=-1).mean(dim=(1, 2))
    assert [one.share for one in found] == pytest.approx(left.tolist())


def test_sinks_are_named_by_tokens_and_layouts() -> None:
    seen = seen_with(sunk(0, 0.9))
    assert find_sinks(seen)[0].name == "first position"
    tokens = [["[CLS]", *"abcdefghijk"]] * 2
    assert find_sinks(seen, tokens=tokens)[0].name == "[CLS]"
    layout = words(1, "class") + words(4, "registers") + words(7, "image")
    assert find_sinks(seen.within(layout))[0].name == "class"
    third = seen_with(sunk(3, 0.9)).within(layout)
    assert find_sinks(third)[0].name == "registers 2"
    spans = torch.tensor([[[0, 3], [4, 7]]] * 2)
    text = TextGeometry(("the dog",) * 2, spans)
    index = torch.tensor([[2, 3]] * 2)
    told = Layout((Span("text", (2,), index, text),), N)
    assert find_sinks(seen_with(sunk(3, 0.9)).within(told))[0].name == "text 1 'dog'"


def test_without_sinks_the_rest_is_renormalised_and_nothing_else_changes() -> None:
    seen = seen_with(sunk(4, 0.6), sunk(4, 0.2))
    maps = seen.map()
    found = without_sinks(maps, find_sinks(seen)).check()
    assert not found.values[0, ..., 4].any() and not found.visible[0, :, 4].any()
    expected = maps.values.clone()
    expected[0, ..., 4] = 0
    expected[0] = expected[0] / expected[0].sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found.values, expected)
    assert maps.values[0, 0, 0, 0, 4] == pytest.approx(0.6)  # the map itself is as it was
    torch.testing.assert_close(without_sinks(maps, []).values, maps.values)


def test_logarithms_masks_and_gradients_are_kept() -> None:
    scores = torch.randn(1, 1, 1, 2, 4).double().requires_grad_()
    mask = torch.tensor([[[True, True, True, False]]])
    maps = AttentionMap.from_scores(scores, words(4), words(2), mask)
    sink = Sink(0, "", 0, "", 0.0, 0.0, 0.0)
    found = without_sinks(maps, [sink]).check()
    expected = scores[..., 1:3].softmax(-1)
    torch.testing.assert_close(found.weights[..., 1:3], expected)
    assert found.visible[0, 0].tolist() == [False, True, True, False]
    found.weights[..., 1].sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()


def test_what_cannot_be_told_is_refused() -> None:
    seen = seen_with(even()[..., :4, :4])
    with pytest.raises(ValueError, match="no query sees more than 5 keys"):
        find_sinks(seen)
    with pytest.raises(ValueError, match="times is above 1"):
        find_sinks(seen, times=0.5)
    with pytest.raises(ValueError, match="is not in a map of 2 samples and 4 keys"):
        without_sinks(seen.map(), [Sink(0, "", 9, "", 0.0, 0.0, 0.0)])
    signed = AttentionMap(even()[:, None], words(N), words(N), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="take their positive part"):
        without_sinks(signed, [])
