"""Axes are followed from the projection that they began with, whatever is done to them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overt.capture.axis_provenance import (
    TRACKED_FUNCTIONS,
    Axes,
    OpNode,
    axes_of,
    node_of,
    record_op,
    set_axes,
    unknown_axes,
)
from overt.capture.state import STATE


class Noting(torch.overrides.TorchFunctionMode):
    """Notes every function, as a watcher does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in TRACKED_FUNCTIONS:
            record_op(func, args, kwargs or {}, result)
        return result


@pytest.fixture(autouse=True)
def forgotten():
    yield
    STATE.op_nodes.clear()


def project(heads=4):
    with Noting():
        x = F.linear(torch.randn(2, 6, 8), torch.randn(24, 8))
    root = axes_of(x)
    return x, root.axes[0][0].dims, root.axes[1][0].dims, root.axes[2][0].dims


def letters(axes: Axes, batch, position, feature):
    """b, n or f for each factor of each axis."""
    names = {batch: "b", position: "n", feature: "f"}
    return ["".join(names.get(one.dims, "?") for one in axis) for axis in axes.axes]


WAYS = {
    "heads": (lambda x: x.view(2, 6, 4, 6).transpose(1, 2), ["b", "f", "n", "f"]),
    "keywords": (
        lambda x: x.unflatten(-1, (4, 6)).transpose(dim0=1, dim1=2),
        ["b", "f", "n", "f"],
    ),
    "heads first": (lambda x: x.view(2, 6, 4, 6).permute(2, 0, 1, 3), ["f", "b", "n", "f"]),
    "folded": (
        lambda x: x.view(2, 6, 4, 6).transpose(1, 2).reshape(8, 6, 6),
        ["bf", "n", "f"],
    ),
    "folded first": (
        lambda x: torch.cat(x.chunk(4, dim=-1), dim=0),
        ["fb", "n", "f"],
    ),
    "packed": (
        lambda x: x.reshape(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)[1],
        ["b", "f", "n", "f"],
    ),
    "windows": (lambda x: x.view(2, 3, 2, 4, 6).movedim(3, 1), ["b", "f", "n", "n", "f"]),
    "turned": (lambda x: x.mT, ["b", "f", "n"]),
    "cut": (lambda x: x[:, 1:5, ..., None], ["b", "n", "f", ""]),
    "rotated": (
        lambda x: torch.cat((-x[..., 12:], x[..., :12]), dim=-1) * torch.ones(6, 24),
        ["b", "n", "ff"],
    ),
    "normed": (lambda x: F.layer_norm(x.view(2, 6, 4, 6), (6,)), ["b", "n", "f", "f"]),
    "repeated": (lambda x: x.view(2, 6, 4, 6).repeat_interleave(2, dim=2), ["b", "n", "f?", "f"]),
    "chosen": (lambda x: x[:, torch.tensor([3, 1])], ["b", "n", "f"]),
    "chosen by a list": (lambda x: x[:, [3, 1]], ["b", "n", "f"]),
    "selected": (lambda x: x.index_select(1, torch.tensor([3, 1])), ["b", "n", "f"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_axes_are_followed(way):
    x, *dims = project()
    change, expected = WAYS[way]
    with Noting():
        made = change(x)
    found = axes_of(made)
    assert letters(found, *dims) == expected
    chosen = [at for at, axis in enumerate(found.axes) if any(one.gathered for one in axis)]
    assert chosen == ([1] if way.startswith(("chosen", "selected")) else [])


def test_projections_and_convolutions_know_their_features():
    with Noting():
        x = F.linear(torch.randn(2, 6, 8), torch.randn(24, 8))
        y = F.conv2d(torch.randn(2, 3, 4, 4), torch.randn(5, 3, 1, 1)).flatten(2)
        weight = nn.Parameter(torch.randn(8, 24))
        z = torch.randn(2, 6, 8) @ weight
        heads = torch.einsum(
            "bnd,hde->bhne", torch.randn(2, 6, 8), nn.Parameter(torch.randn(4, 8, 3))
        )
    assert axes_of(x).all_features(2) and not axes_of(x).all_features(1)
    assert axes_of(y).all_features(1) and not axes_of(y).all_features(2)
    assert axes_of(z).all_features(2) and not axes_of(z).all_features(1)
    assert axes_of(heads).all_features(1) and not axes_of(heads).all_features(0)


def test_heads_that_were_split_off_before_a_projection_stay_heads():
    x, *_ = project()
    with Noting():
        heads = F.linear(x.view(2, 6, 4, 6), torch.randn(5, 6)).transpose(1, 2)
        folded = x.view(2, 6, 4, 6).transpose(1, 2).reshape(8, 6, 6)
        again = F.linear(folded, torch.randn(5, 6))
        pooled = F.conv1d(folded.mT, torch.randn(6, 6, 1))
    assert [axes_of(heads).all_features(at) for at in range(4)] == [False, True, False, True]
    for made, last in ((again, 2), (pooled, 1)):
        found = axes_of(made)
        assert [one.dims <= found.features for one in found.axes[0]] == [False, True]
        assert found.all_features(last) and not found.all_features(3 - last)


def test_what_is_not_known_has_its_sizes_and_nothing_else():
    x = torch.randn(2, 1, 3)
    found = axes_of(x)
    assert [sum(one.size for one in axis) for axis in found.axes] == [2, 0, 3]
    assert not found.features and axes_of(x) is found
    with Noting():
        odd = torch.randn(4, 9).view(6, 6)  # neither axis of one is an axis of the other
    assert len(axes_of(odd).axes) == 2
    assert (
        unknown_axes((2,), certain=True).axes[0][0].dims != axes_of(torch.zeros(2)).axes[0][0].dims
    )


def test_notes_hold_no_memory_and_can_be_placed():
    x = torch.randn(2, 3)
    note = node_of(x)
    assert isinstance(note, OpNode) and note.ref() is x
    axes = unknown_axes((2, 3))
    set_axes(x, axes)
    assert axes_of(x) is axes
    del x
    assert note.ref() is None
