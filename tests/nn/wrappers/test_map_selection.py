"""Selection of maps: the query row that decides, per span, of one or all layers."""

import pytest
import torch
from torch import Tensor

from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, Layout, Span, words
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.capture.trace import AttentionTrace
from overt.nn.wrappers.map_selection import (
    all_layers,
    last_layer,
    last_layer_of,
    layout_pair,
    unnamed_positions,
)

TOKENS = words(1, "class") + words(2, "registers") + words(4, "image") + words(3, "text")


def call(q: int = 10, k: int = 10, allowed: Tensor | None = None, cross: bool = False) -> Call:
    query, key = torch.randn(2, 2, q, 4), torch.randn(2, 2, k, 4)
    source = QKCall(query, key, 0.5, allowed=allowed)
    return Call("layer", torch.nn.Identity(), source, Route.SDPA, cross)


def row_over(call: Call, row: int, keys: slice) -> Tensor:
    weights = call.weights()[:, :, row, keys]
    return weights / weights.sum(dim=-1, keepdim=True)


def test_last_layer_returns_the_class_token_row_per_span() -> None:
    first, second = call(), call()
    image, text = last_layer(AttentionTrace([first, second], TOKENS))
    assert [image.keys.spans[0].name, text.keys.spans[0].name] == ["image", "text"]
    assert image.values.shape == (2, 1, 2, 1, 4) and image.kind is Kind.PROBABILITY
    torch.testing.assert_close(image.weights[:, 0, :, 0], row_over(second, 0, slice(3, 7)))
    torch.testing.assert_close(text.weights[:, 0, :, 0], row_over(second, 0, slice(7, 10)))


def test_all_layers_stacks_layers_of_equal_size() -> None:
    calls = [call(), call(4, 4), call()]
    image, _ = all_layers(AttentionTrace(calls, TOKENS))
    assert image.values.shape == (2, 2, 2, 1, 4)
    torch.testing.assert_close(image.weights[:, 0, :, 0], row_over(calls[0], 0, slice(3, 7)))


def test_single_query_is_the_global_query() -> None:
    """A pooling head attends with one learned query."""
    pooling = call(q=1)
    image, _ = last_layer(AttentionTrace([call(), pooling], TOKENS))
    torch.testing.assert_close(image.weights[:, 0, :, 0], row_over(pooling, 0, slice(3, 7)))
    assert image.queries.spans[0].name == "global"


def test_without_a_class_token_rows_are_averaged_over_present_queries() -> None:
    there = torch.tensor([[True] * 6 + [False] * 4, [True] * 10])
    one = call(allowed=there[:, None, None, :])
    (found,) = last_layer(AttentionTrace([one], words(10)))
    for sample, count in enumerate((6, 10)):
        expected = one.weights()[sample, :, :count].mean(dim=1)
        torch.testing.assert_close(found.weights[sample, 0, :, 0], expected)
    assert found.mask is not None and torch.equal(found.mask[:, 0], there)
    found.check()


def test_queries_without_keys_of_a_span_are_left_out_of_its_mean() -> None:
    allowed = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    allowed[..., 0, :4] = False  # the first query sees no key of the first span
    one = call(allowed=allowed)
    layout = words(4, "one") + words(6, "two")
    found, _ = last_layer(AttentionTrace([one], layout))
    weights = one.weights()[:, :, 1:, :4]
    expected = (weights / weights.sum(dim=-1, keepdim=True)).mean(dim=2)
    torch.testing.assert_close(found.weights[:, 0, :, 0], expected)


def test_causal_model_uses_the_row_of_its_last_token() -> None:
    """The mask gives the padding, on the right or on the left."""
    there = torch.tensor([[True] * 6 + [False] * 4, [False] * 3 + [True] * 7])
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    one = call(allowed=causal & there[:, None, None, :])
    (found,) = last_layer(AttentionTrace([one], words(10)))
    assert found.values.shape == (2, 1, 2, 1, 10)
    torch.testing.assert_close(found.weights[0, 0, :, 0], one.weights()[0, :, 5])
    torch.testing.assert_close(found.weights[1, 0, :, 0], one.weights()[1, :, 9])
    plain = call(allowed=causal[None, None])
    (found,) = last_layer(AttentionTrace([plain], words(10)))
    torch.testing.assert_close(found.weights[:, 0, :, 0], plain.weights()[:, :, 9])


def test_cross_attention_is_averaged_over_all_queries() -> None:
    one = call(q=3, cross=True)
    image, _ = last_layer(AttentionTrace([call(), one], (words(3, "objects"), TOKENS)))
    weights = one.weights()[..., 3:7]
    expected = (weights / weights.sum(dim=-1, keepdim=True)).mean(dim=2)
    torch.testing.assert_close(image.weights[:, 0, :, 0], expected)


def test_signed_weights_are_unchanged() -> None:
    used = torch.randn(2, 2, 10, 10)
    mixed = Call(
        "m", torch.nn.Identity(), MaterializedCall(used, Kind.SIGNED), Route.SOFTMAX, False
    )
    image, _ = last_layer(AttentionTrace([mixed], TOKENS))
    assert image.kind is Kind.SIGNED
    torch.testing.assert_close(image.weights[:, 0, :, 0], used[:, :, 0, 3:7])


def test_without_a_layout_keys_are_positions() -> None:
    (found,) = last_layer(AttentionTrace([call()]))
    assert [span.name for span in found.keys.spans] == ["positions"]


def test_axis_with_registers_only_is_returned() -> None:
    names = [
        one.keys.spans[0].name
        for one in last_layer(AttentionTrace([call(3, 3)], words(3, "registers")))
    ]
    assert names == ["registers"]


def test_spans_may_have_different_positions_per_sample() -> None:
    """For example the class token of a left-padded text."""
    index = torch.tensor([[0], [2]])
    text = Span("text", (3,), torch.tensor([[1, 2, 3], [3, 4, -1]]))
    one = call(5, 5)
    (found,) = last_layer(AttentionTrace([one], Layout((Span("class", (1,), index), text), 5)))
    torch.testing.assert_close(found.weights[0, 0, :, 0], row_over(one, 0, slice(1, 4))[0])
    torch.testing.assert_close(found.weights[1, 0, :, 0, :2], row_over(one, 2, slice(3, 5))[1])
    assert not found.weights[1, ..., 2].any()


def test_layout_of_another_size_raises() -> None:
    with pytest.raises(ValueError, match=r"\(9, 9\).*\[\(4, 4\), \(10, 10\)\]"):
        last_layer(AttentionTrace([call(), call(4, 4)], words(9)))


def test_layout_pair_and_unnamed_positions() -> None:
    assert layout_pair(None) == (None, None)
    assert layout_pair(TOKENS) == (TOKENS, TOKENS)
    assert layout_pair((GLOBAL_QUERY, TOKENS)) == (GLOBAL_QUERY, TOKENS)
    assert len(unnamed_positions(4)) == 4


def test_a_derived_map_is_selected_as_the_last_layer() -> None:
    there = torch.tensor([[True] * 6 + [False] * 4, [True] * 10])
    for layout, allowed in ((TOKENS, None), (words(10), there[:, None, None, :])):
        trace = AttentionTrace([call(), call(allowed=allowed)], layout)
        weights = trace.calls[-1].weights()[:, None]
        derived = AttentionMap(weights, words(10), words(10), kind=Kind.AMOUNT)
        for found, expected in zip(last_layer_of(trace, derived), last_layer(trace), strict=True):
            torch.testing.assert_close(found.weights, expected.weights)
            assert torch.equal(found.visible, expected.visible)


def test_zeros_of_a_derived_map_are_not_hidden() -> None:
    weights = torch.zeros(2, 1, 1, 10, 10)
    weights[..., 4] = 2.0
    derived = AttentionMap(weights, words(10), words(10), kind=Kind.AMOUNT)
    image, _ = last_layer_of(AttentionTrace([call()], TOKENS), derived)
    assert image.visible.all()
    torch.testing.assert_close(image.weights[0, 0, 0, 0], torch.tensor([0.0, 1.0, 0.0, 0.0]))
    two = weights.expand(-1, 2, -1, -1, -1)
    wide = AttentionMap(two, words(10), words(10), kind=Kind.AMOUNT)
    with pytest.raises(ValueError, match=r"\(2, 2, 10, 10\)"):
        last_layer_of(AttentionTrace([call()], TOKENS), wide)
