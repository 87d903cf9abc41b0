"""Leading axes become samples and heads, and go back as they came."""

import pytest
import torch
from torch import nn

from overt.capture.axis_provenance import axes_of
from overt.capture.axis_roles import (
    BATCH_HEADS,
    HEAD,
    SAMPLE,
    WINDOW,
    LeadingAxes,
    all_samples,
    ambiguous_axes_error,
    axis_evidence,
    broadcast_lead,
    broadcast_positions,
    infer_leading_axes,
)

ORDERS = {
    "plain": (((2, SAMPLE),), ((3, HEAD),)),
    "heads first": (((3, HEAD),), ((2, SAMPLE),)),
    "folded": (((2, SAMPLE), (3, HEAD)),),
    "folded, heads first": (((3, HEAD), (2, SAMPLE)),),
    "windows": (((2, SAMPLE),), ((3, HEAD),), ((4, WINDOW),)),
    "groups": (((2, SAMPLE),), ((3, HEAD),), ((4, HEAD),)),
    "no heads": (((2, SAMPLE),),),
}


@pytest.mark.parametrize("order", ORDERS)
def test_there_and_back(order):
    shape = LeadingAxes(ORDERS[order])
    tensor = torch.randn(*shape.lead, 5, 6)
    four = shape.to_bhnm(tensor)
    assert four.shape == (*shape.sizes, 5, 6)
    assert torch.equal(shape.from_bhnm(four).reshape(tensor.shape), tensor)
    assert shape.plain is (order == "plain")
    if "heads first" in order:
        assert not shape.ordered
        assert torch.equal(four[1, 2], tensor.reshape(3, 2, 5, 6)[2, 1])
    if order == "windows":
        assert torch.equal(four[1 * 4 + 3, 2], tensor[1, 2, 3])


def test_what_is_missing_is_shared():
    shape = LeadingAxes(ORDERS["heads first"])
    assert shape.to_bhnm(torch.zeros(3, 1, 5, 6)).shape == (2, 3, 5, 6)
    assert all_samples((2, 3)).sizes == (6, 1) and BATCH_HEADS.plain
    assert broadcast_lead(torch.zeros(1, 3, 5, 6), torch.zeros(2, 1, 4, 6)) == (2, 3)
    assert broadcast_positions(3, 2) == (None, 0)


def test_without_evidence_habit_decides_or_nothing_does():
    module = nn.Identity()
    assert infer_leading_axes(module, (2, 3), ()).plain
    module.num_heads = 2
    assert infer_leading_axes(module, (2, 3), ()).factors == (((2, HEAD),), ((3, SAMPLE),))
    assert infer_leading_axes(module, (3,), ()).factors == (((3, SAMPLE),),)
    with pytest.raises(NotImplementedError, match=r"\(4,\) of Identity"):
        infer_leading_axes(module, (4,), ())
    assert "layers=" in str(ambiguous_axes_error(module, (4,)))


def test_evidence_of_a_tensor_that_is_not_known():
    found = axis_evidence(axes_of(torch.randn(2, 3, 5, 6)), -2, -1, (0, 1))
    assert found.roles(0) is None and found.roles(1) is None and not found.has_heads
