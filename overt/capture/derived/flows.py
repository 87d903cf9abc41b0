"""Attention flow: how much can reach each input at once, through all layers.

Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020,
https://arxiv.org/abs/2005.00928, section 3. Positions of all layers are the nodes of a network, and
weights are what its edges can carry.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.capture.derived.maps import Fuse, hidden_rows
from overt.capture.derived.rolling import reached

# One network is solved for each row and input. So many edges in all take about a minute.
MOST_EDGES = 1_000_000_000


def flow(
    attention: AttentionMap,
    rows: Int[Tensor, "b s"] | None = None,
    fuse: Fuse = torch.mean,
    *,
    residual: bool = True,
) -> AttentionMap:
    """The largest flow from each position after the last layer to each input (Abnar et al. 2020).

    `attention` is the whole map of a small model, such as `seen.map()`; `rows` asks for some
    positions. Heads are fused and, with `residual`, mixed with the identity, as for `rollout`. A
    solver on integers finds the narrowest cut of each network, and the flow is the sum of the
    weights that it cuts, so it has their precision and their gradient. Needs scipy.
    """
    layers = _layers(attention, fuse, residual)
    b, l, n, _ = layers.shape
    at = torch.arange(n).expand(b, n) if rows is None else rows.cpu()
    if at.numel() and int(at.max()) >= n:
        raise ValueError(f"row {int(at.max())} is beyond the {n} positions")
    if at.numel() * n * l * n * n > MOST_EDGES:
        raise ValueError(
            f"attention flow is for small graphs: {at.numel() * n} networks of {l * n * n} edges "
            "would take too long; ask for fewer rows, or use rollout"
        )
    found = torch.stack(
        [
            torch.stack([_from(layers[sample], row) for row in at[sample].tolist()])
            for sample in range(b)
        ]
    )
    mask, queries = None, attention.queries
    if attention.mask is not None:
        mask = reached(attention.visible, at, residual, l)
    if rows is not None:
        mask = hidden_rows(mask, (at >= 0).to(found.device), n)
        queries = Layout((Span("rows", (at.shape[1],), slice(0, at.shape[1])),), at.shape[1])
    return replace(
        attention,
        values=found[:, None, None],
        queries=queries,
        mask=mask,
        kind=Kind.AMOUNT,
        form=Form.PLAIN,
    )


def _layers(attention: AttentionMap, fuse: Fuse, residual: bool) -> Float[Tensor, "b l n n"]:
    """What each layer can carry: heads fused and mixed with the identity."""
    if len(attention.queries) != len(attention.keys) or attention.kind is Kind.SIGNED:
        raise ValueError(
            "attention flow needs self-attention whose weights are shares: "
            f"{len(attention.queries)} queries, {len(attention.keys)} keys, {attention.kind.value}"
        )
    layers = attention.over_heads(fuse).weights[:, :, 0]
    if not residual:
        return layers
    layers = layers + torch.eye(len(attention.keys), dtype=layers.dtype, device=layers.device)
    layers = layers / layers.sum(dim=-1, keepdim=True)
    return layers * attention.rows[:, None, :, None]


def _from(layers: Float[Tensor, "l n n"], row: int) -> Float[Tensor, " n"]:
    """The flow from one position after the last layer to each input."""
    if row < 0:
        return layers.new_zeros(layers.shape[-1])
    above = _cuts(layers.detach().double().cpu().numpy(), row).to(layers.device)
    with torch.autocast(layers.device.type, enabled=False):
        return torch.einsum(
            "jki,kim,jkm->j", above[:, 1:].to(layers), layers, (~above[:, :-1]).to(layers)
        )


def _cuts(layers: Any, row: int) -> Bool[Tensor, "n levels n"]:
    """For each input, the nodes on the near side of the narrowest cut before it, by level."""
    try:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow
    except ImportError as problem:
        raise ImportError("attention flow needs scipy: pip install scipy") from problem
    import numpy as np

    l, n, _ = layers.shape
    level, start, end = np.nonzero(layers)
    carried = layers[level, start, end]
    largest = max(1.0, float(layers.sum(axis=-1).max()))  # amounts must fit 32 bits
    amounts = np.maximum(np.rint(carried * (2**30 / largest)), 1).astype(np.int32)
    size = (l + 1) * n  # node (level, position); inputs are level 0
    ends = [at.astype(np.int32) for at in ((level + 1) * n + start, level * n + end)]
    network = csr_array((amounts, tuple(ends)), shape=(size, size))  # SciPy 1.14 takes 32 bits
    near = np.zeros((n, size), dtype=bool)
    for place in range(n):
        solved = maximum_flow(network, l * n + row, place)
        left = csr_array(network - solved.flow)
        left.eliminate_zeros()
        near[place, breadth_first_order(left, l * n + row, return_predecessors=False)] = True
    return torch.from_numpy(near.reshape(n, l + 1, n))
