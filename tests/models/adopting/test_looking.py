"""Which maps are shown: the row that decides, over each kind of input, of one layer or of all."""

import pytest
import torch
from torch import Tensor

from overt.attention import POINT, Kind, Layout, Span, words
from overt.capture.call import Call, Projected, Route, Written
from overt.capture.seen import Seen
from overt.models.adopting.looking import every, last, pair_of, positions

TOKENS = words(1, "class") + words(2, "registers") + words(4, "image") + words(3, "text")


def call(q: int = 10, k: int = 10, allowed: Tensor | None = None, cross: bool = False) -> Call:
    query, key = torch.randn(2, 2, q, 4), torch.randn(2, 2, k, 4)
    source = Projected(query, key, 0.5, allowed=allowed)
    return Call("layer", torch.nn.Identity(), source, Route.SDPA, cross)


def over(call: Call, row: int, keys: slice) -> Tensor:
    weights = call.weights()[:, :, row, keys]
    return weights / weights.sum(dim=-1, keepdim=True)


def test_the_class_token_of_the_last_layer_looks_at_each_kind_of_input() -> None:
    first, second = call(), call()
    image, text = last(Seen([first, second], TOKENS))
    assert [image.keys.spans[0].name, text.keys.spans[0].name] == ["image", "text"]
    assert image.values.shape == (2, 1, 2, 1, 4) and image.kind is Kind.PROBABILITY
    torch.testing.assert_close(image.weights[:, 0, :, 0], over(second, 0, slice(3, 7)))
    torch.testing.assert_close(text.weights[:, 0, :, 0], over(second, 0, slice(7, 10)))


def test_every_layer_is_stacked_and_those_of_other_sizes_are_left_out() -> None:
    calls = [call(), call(4, 4), call()]
    image, _ = every(Seen(calls, TOKENS))
    assert image.values.shape == (2, 2, 2, 1, 4)
    torch.testing.assert_close(image.weights[:, 0, :, 0], over(calls[0], 0, slice(3, 7)))


def test_one_query_needs_no_name() -> None:
    """A pooling head that looks with one learned query."""
    pooling = call(q=1)
    image, _ = last(Seen([call(), pooling], TOKENS))
    torch.testing.assert_close(image.weights[:, 0, :, 0], over(pooling, 0, slice(3, 7)))
    assert image.queries.spans[0].name == "global"


def test_without_a_class_token_it_is_the_mean_over_queries_that_are_there() -> None:
    there = torch.tensor([[True] * 6 + [False] * 4, [True] * 10])
    one = call(allowed=there[:, None, None, :])
    (found,) = last(Seen([one], words(10)))
    for sample, count in enumerate((6, 10)):
        expected = one.weights()[sample, :, :count].mean(dim=1)
        torch.testing.assert_close(found.weights[sample, 0, :, 0], expected)
    assert found.mask is not None and torch.equal(found.mask[:, 0], there)
    found.check()


def test_a_query_that_sees_nothing_of_a_kind_does_not_count_in_its_mean() -> None:
    allowed = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    allowed[..., 0, :4] = False  # the first sees no word of the first kind
    one = call(allowed=allowed)
    layout = words(4, "one") + words(6, "two")
    found, _ = last(Seen([one], layout))
    weights = one.weights()[:, :, 1:, :4]
    expected = (weights / weights.sum(dim=-1, keepdim=True)).mean(dim=2)
    torch.testing.assert_close(found.weights[:, 0, :, 0], expected)


def test_a_causal_model_looks_from_its_last_token() -> None:
    """Padded on the right or on the left, which the mask tells."""
    there = torch.tensor([[True] * 6 + [False] * 4, [False] * 3 + [True] * 7])
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    one = call(allowed=causal & there[:, None, None, :])
    (found,) = last(Seen([one], words(10)))
    assert found.values.shape == (2, 1, 2, 1, 10)
    torch.testing.assert_close(found.weights[0, 0, :, 0], one.weights()[0, :, 5])
    torch.testing.assert_close(found.weights[1, 0, :, 0], one.weights()[1, :, 9])
    plain = call(allowed=causal[None, None])
    (found,) = last(Seen([plain], words(10)))
    torch.testing.assert_close(found.weights[:, 0, :, 0], plain.weights()[:, :, 9])


def test_cross_attention_looks_from_all_queries() -> None:
    one = call(q=3, cross=True)
    image, _ = last(Seen([call(), one], (words(3, "objects"), TOKENS)))
    weights = one.weights()[..., 3:7]
    expected = (weights / weights.sum(dim=-1, keepdim=True)).mean(dim=2)
    torch.testing.assert_close(image.weights[:, 0, :, 0], expected)


def test_signed_weights_stay_as_they_are() -> None:
    used = torch.randn(2, 2, 10, 10)
    mixed = Call("m", torch.nn.Identity(), Written(used, Kind.SIGNED), Route.SOFTMAX, False)
    image, _ = last(Seen([mixed], TOKENS))
    assert image.kind is Kind.SIGNED
    torch.testing.assert_close(image.weights[:, 0, :, 0], used[:, :, 0, 3:7])


def test_without_a_layout_keys_are_positions() -> None:
    (found,) = last(Seen([call()]))
    assert [span.name for span in found.keys.spans] == ["positions"]


def test_an_axis_of_servants_alone_is_shown() -> None:
    names = [one.keys.spans[0].name for one in last(Seen([call(3, 3)], words(3, "registers")))]
    assert names == ["registers"]


def test_spans_at_different_places_in_each_sample() -> None:
    """The class token of a text that is padded on the left."""
    index = torch.tensor([[0], [2]])
    text = Span("text", (3,), torch.tensor([[1, 2, 3], [3, 4, -1]]))
    one = call(5, 5)
    (found,) = last(Seen([one], Layout((Span("class", (1,), index), text), 5)))
    torch.testing.assert_close(found.weights[0, 0, :, 0], over(one, 0, slice(1, 4))[0])
    torch.testing.assert_close(found.weights[1, 0, :, 0, :2], over(one, 2, slice(3, 5))[1])
    assert not found.weights[1, ..., 2].any()


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 queries and 9 keys.*\[\(4, 4\), \(10, 10\)\]"):
        last(Seen([call(), call(4, 4)], words(9)))


def test_pairs_and_positions() -> None:
    assert pair_of(None) == (None, None)
    assert pair_of(TOKENS) == (TOKENS, TOKENS)
    assert pair_of((POINT, TOKENS)) == (POINT, TOKENS)
    assert len(positions(4)) == 4
