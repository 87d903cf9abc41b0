"""Differences of attention maps, in blocks and without padding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture.call import Call, MaterializedCall, QKCall, Route
from overt.inspect import output_difference, weight_difference
from overt.inspect.weight_difference import MapDifference


def call(source: Any) -> Call:
    return Call("layer", nn.Identity(), source, Route.SDPA, False)


def written(weights: Tensor, logits: Tensor) -> Call:
    return call(MaterializedCall(weights, Kind.PROBABILITY, logits))


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_only_rows_that_are_empty_under_both_are_left_out(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDPA gives a row of padding no weights, eager attention gives all keys the same."""
    monkeypatch.setattr(output_difference, "BLOCK", block)
    q, k = torch.randn(2, 1, 2, 3, 4), torch.randn(2, 1, 2, 3, 4)
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    allowed[..., 0, :] = False
    fused = call(QKCall(q[0], k[0], 0.5, allowed=allowed))
    logits = (q[0] @ k[0].mT * 0.5).masked_fill(~allowed, torch.finfo(torch.float32).min)
    eager = written(logits.softmax(-1), logits)
    assert weight_difference._weights_difference(fused, eager) < 1e-6
    # A row that only one of them hides is a difference.
    one_more = allowed.clone()
    one_more[..., 1, :] = False
    wrong = call(replace(fused.source, allowed=one_more))
    off = weight_difference._weights_difference(wrong, eager)
    assert off == pytest.approx(float(eager.weights()[:, :, 1].max()))


def test_weights_of_an_output_are_listed_in_the_order_of_the_layers() -> None:
    one, two, cross = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 2)
    output = {
        "decoder_attentions": (two, None),
        "encoder_attentions": (one,),
        "cross_attentions": (cross,),
        "part": {"attentions": (cross,)},
    }
    found = list(weight_difference._returned_weights(output))
    assert [given for given, _ in found] == [False, False, True, False]
    assert [x for _, x in found] == [one, two, cross, cross]


def test_the_largest_difference_keeps_its_module() -> None:
    found = MapDifference()
    for name, off in (("a", 0.1), ("b", 0.3), ("c", float("nan")), ("d", 2.0)):
        found.add(name, off)
    assert (found.maps, found.module) == (4, "c")
