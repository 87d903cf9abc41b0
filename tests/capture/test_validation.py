"""Rejected inputs; models with these inputs are in tests/parity/test_axis_orders.py."""

import pytest
import torch
from torch import nn

from overt.capture.axis_provenance import Axes, Factor, axes_of, set_axes
from overt.capture.state import STATE
from overt.capture.validation import (
    check_positions,
    check_rows,
    check_values,
    raise_unsupported,
    set_output_axes,
)


@pytest.fixture(autouse=True)
def forgotten():
    yield
    STATE.op_nodes.clear()
    STATE.key_slices.clear()


def test_an_error_names_the_module_and_what_to_do():
    with pytest.raises(NotImplementedError, match=r"Identity.*layers="):
        raise_unsupported(nn.Identity(), "does it")


def test_values_that_another_attention_gave():
    out = torch.randn(2, 5, 8)
    axes = axes_of(torch.randn(2, 5, 8))
    set_output_axes(out, axes.axes[:1], axes.axes[2], frozenset())
    with pytest.raises(NotImplementedError, match="another attention"):
        check_values(nn.Identity(), out, 1, 2)
    check_values(nn.Identity(), torch.randn(2, 5, 8), 1, 2)


def test_values_that_are_summed_over_channels():
    value = torch.randn(2, 8, 5)
    axes = axes_of(value)
    set_axes(value, Axes(axes.axes, axes.dims(1)))
    with pytest.raises(NotImplementedError, match="channels"):
        check_values(nn.Identity(), value, 1, 2)
    check_values(nn.Identity(), value, 2, 1)


def test_parts_of_the_keys_for_the_same_queries():
    rows, keys = axes_of(torch.randn(6, 7)).axes
    first, last = (Factor(keys[0].dims, 3, (at, 1)) for at in (0, 4))
    check_positions(nn.Identity(), rows, keys, (first,))
    check_positions(nn.Identity(), rows, keys, (first,))
    with pytest.raises(NotImplementedError, match=r"slices.*keys"):
        check_positions(nn.Identity(), rows, keys, (last,))
    other = axes_of(torch.randn(6, 7)).axes[0]
    check_positions(nn.Identity(), other, keys, (last,))
    chosen = (Factor(rows[0].dims, 2, gathered=True),)
    with pytest.raises(NotImplementedError, match="by index"):
        check_positions(nn.Identity(), chosen, keys, keys)


def test_values_that_an_index_selected_and_keys_that_were_rolled():
    rows, keys = axes_of(torch.randn(6, 7)).axes
    chosen = (Factor(keys[0].dims, 7, gathered=True),)
    moved = (Factor(keys[0].dims, 7, moved=True),)
    for given in ((rows, keys, chosen), (rows, moved, keys), (moved, keys, keys)):
        with pytest.raises(NotImplementedError, match="by index"):
            check_positions(nn.Identity(), *given)


def test_parts_of_the_queries_for_the_same_keys():
    rows, keys = axes_of(torch.randn(6, 7)).axes
    first, last = (Factor(rows[0].dims, 3, (at, 1)) for at in (0, 3))
    check_positions(nn.Identity(), (first,), keys, keys)
    check_positions(nn.Identity(), (first,), keys, keys)
    with pytest.raises(NotImplementedError, match=r"slices.*queries"):
        check_positions(nn.Identity(), (last,), keys, keys)


def test_heads_that_are_folded_into_rows():
    rows, heads, keys = axes_of(torch.randn(6, 4, 7)).axes
    features = heads[0].dims
    check_rows(nn.Identity(), rows, keys, features)
    check_rows(nn.Identity(), (*rows, *heads), (*keys, *heads), features)  # both: positions
    with pytest.raises(NotImplementedError, match="folds heads"):
        check_rows(nn.Identity(), (*rows, *heads), keys, features)
