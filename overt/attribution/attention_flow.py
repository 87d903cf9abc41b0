"""Attention flow: the maximum flow from each position to each input through all layers.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020,
https://arxiv.org/abs/2005.00928, section 3. The positions of all layers are the nodes of a graph,
and weights are the capacities of its edges.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.attribution.attention_rollout import reachable_inputs
from overt.attribution.raw_attention import HeadFusion, hide_missing_rows
from overt.errors import missing_package_message

# One graph is solved per row and input. This many edges in total take about a minute.
MAX_EDGES = 1_000_000_000


def flow(
    attention: AttentionMap,
    rows: Int[Tensor, "b s"] | None = None,
    fuse: HeadFusion = torch.mean,
    *,
    residual: bool = True,
) -> AttentionMap:
    """Compute the maximum flow from each position after the last layer to each input.

    Abnar and Zuidema 2020. An integer solver finds the minimum cut of each graph, and the flow is
    the sum of the weights that are cut, so it has their precision and their gradient. Needs scipy.

    Args:
        attention: The complete map of a small model, such as `trace.map()`.
        rows: Positions per sample; None computes all.
        fuse: Fuses heads, called as `fuse(weights, dim=, keepdim=True)`.
        residual: Mix each layer with the identity, as in `rollout`.

    Returns:
        A map of amounts with one layer and one head.

    Raises:
        ValueError: The attention is not self-attention or signed, or the graphs are too large.
        ImportError: scipy is not installed.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 2, 1, 3, 3), words(3), words(3))
        >>> flow(attention).shape  # doctest: +SKIP
        (1, 1, 1, 3, 3)
    """
    layers = _edge_capacities(attention, fuse, residual)
    b, l, n, _ = layers.shape
    at = torch.arange(n).expand(b, n) if rows is None else rows.cpu()
    if at.numel() and int(at.max()) >= n:
        raise ValueError(f"row {int(at.max())} is out of range for {n} positions")
    # One graph per row and input, each with l n^2 edges.
    if at.numel() * n * l * n * n > MAX_EDGES:
        raise ValueError(
            f"attention flow is for small graphs: {at.numel() * n} graphs of {l * n * n} edges "
            "would take too long; use fewer rows, or rollout"
        )
    found = torch.stack(
        [
            torch.stack([_flow_from(layers[sample], row) for row in at[sample].tolist()])
            for sample in range(b)
        ]
    )
    mask, queries = None, attention.queries
    if attention.mask is not None:
        mask = reachable_inputs(attention.visible, at, residual, l)
    if rows is not None:
        mask = hide_missing_rows(mask, (at >= 0).to(found.device), n)
        queries = Layout((Span("rows", (at.shape[1],), slice(0, at.shape[1])),), at.shape[1])
    return replace(
        attention,
        values=found[:, None, None],
        queries=queries,
        mask=mask,
        kind=Kind.AMOUNT,
        form=Form.PLAIN,
    )


def _edge_capacities(
    attention: AttentionMap, fuse: HeadFusion, residual: bool
) -> Float[Tensor, "b l n n"]:
    """Return the capacities of each layer: heads fused and mixed with the identity."""
    if len(attention.queries) != len(attention.keys) or attention.kind is Kind.SIGNED:
        raise ValueError(
            "attention flow needs non-negative self-attention, got "
            f"{len(attention.queries)} queries, {len(attention.keys)} keys, {attention.kind.value}"
        )
    # Heads are fused first, since edges of several heads in parallel would add up.
    layers = attention.over_heads(fuse).weights[:, :, 0]
    if not residual:
        return layers
    layers = layers + torch.eye(len(attention.keys), dtype=layers.dtype, device=layers.device)
    # A + I, with rows that sum to one; padding rows are zero.
    layers = layers / layers.sum(dim=-1, keepdim=True)
    return layers * attention.rows[:, None, :, None]


def _flow_from(layers: Float[Tensor, "l n n"], row: int) -> Float[Tensor, " n"]:
    """Return the flow from one position after the last layer to each input."""
    if row < 0:
        return layers.new_zeros(layers.shape[-1])
    # Maximum flow equals minimum cut: the sum of the weights from the source side (`above`, one
    # level up) to the other side. The cut is fixed, so the sum has the gradient of the weights.
    above = _minimum_cuts(layers.detach().double().cpu().numpy(), row).to(layers.device)
    with torch.autocast(layers.device.type, enabled=False):
        return torch.einsum(
            "jki,kim,jkm->j", above[:, 1:].to(layers), layers, (~above[:, :-1]).to(layers)
        )


def _minimum_cuts(layers: Any, row: int) -> Bool[Tensor, "n levels n"]:
    """Return, for each input, the nodes on the source side of the minimum cut, by level."""
    try:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow
    except ImportError as problem:
        raise ImportError(missing_package_message("scipy"), name="scipy") from problem
    import numpy as np

    l, n, _ = layers.shape
    # SciPy solves integer capacities only.
    level, start, end = np.nonzero(layers)
    carried = layers[level, start, end]
    largest = max(1.0, float(layers.sum(axis=-1).max()))  # amounts must fit 32 bits
    # A weight that rounds to zero keeps a capacity of one, so its path stays open.
    amounts = np.maximum(np.rint(carried * (2**30 / largest)), 1).astype(np.int32)
    size = (l + 1) * n  # node (level, position); inputs are level 0
    ends = [at.astype(np.int32) for at in ((level + 1) * n + start, level * n + end)]
    network = csr_array((amounts, tuple(ends)), shape=(size, size))  # SciPy 1.14 takes 32 bits
    near = np.zeros((n, size), dtype=bool)
    for place in range(n):
        solved = maximum_flow(network, l * n + row, place)
        # The source side of a minimum cut is what the residual graph still reaches.
        left = csr_array(network - solved.flow)
        left.eliminate_zeros()
        near[place, breadth_first_order(left, l * n + row, return_predecessors=False)] = True
    return torch.from_numpy(near.reshape(n, l + 1, n))
