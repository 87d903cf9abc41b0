"""Launch Triton kernels for the statistics of one attention call, in memory linear in its length.

The kernels are used on a GPU only after they were compared with plain operations on rows of the
same call (`agrees`), once per kind of call; if they differ, a warning names the module.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.capture.call import QKCall, select_block
from overt.capture.kernels import triton_launch

MAX_HEAD_DIM = 256
MAX_GROUPS = 64  # of keys, for shares
MAX_TOP = 64
ROWS, KEYS = 64, 64  # per block
CHECKED_ROWS = 128  # of a call, that are compared with plain operations
# Largest difference relative to the largest number, by the format of queries and keys.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_AGREES: dict[Any, bool] = {}  # by kind of call


@dataclass(frozen=True, eq=False)
class RowSums:
    """Statistics of the rows of a call, that are written block by block; None if not requested."""

    received: Float[Tensor, "b h k"] | None
    entropy: Float[Tensor, "b h q"] | None
    weights: Float[Tensor, "b h q n"] | None
    indices: Int[Tensor, "b h q n"] | None
    shares: Float[Tensor, "b h q m"] | None

    def restrict(self, samples: slice, heads: slice) -> "RowSums":
        """Return views of some samples and heads."""
        every = (self.received, self.entropy, self.weights, self.indices, self.shares)
        return RowSums(*(None if one is None else one[samples, heads] for one in every))

    @property
    def given(self) -> list[Tensor]:
        """The requested results but the indices, which ties may exchange."""
        every = (self.received, self.entropy, self.weights, self.shares)
        return [one for one in every if one is not None]


Reduce = Callable[[QKCall, RowSums, Tensor, Tensor | None], None]


def supports(source: QKCall, sums: RowSums) -> bool:
    """Return whether the kernels support this call: on a GPU, without functions of the scores."""
    query, key = source.query, source.key
    return (
        triton_launch.triton_installed()
        and (query.is_cuda or triton_launch.INTERPRETED)
        and not torch.compiler.is_compiling()
        and query.dtype in triton_launch.FORMATS
        and query.dtype == key.dtype
        and query.device == key.device
        and query.stride(-1) == key.stride(-1) == 1
        and 0 < query.shape[-1] <= MAX_HEAD_DIM
        and query.numel() > 0
        and key.numel() > 0
        and source.score_mod is None
        and source.mask_mod is None
        and (sums.shares is None or 0 < sums.shares.shape[-1] <= MAX_GROUPS)
        and (sums.weights is None or sums.weights.shape[-1] <= MAX_TOP)
    )


def agrees(
    source: QKCall,
    sums: RowSums,
    counted: Float[Tensor, "b q"],
    groups: Float[Tensor, "b k m"] | None,
    plain: Reduce,
    name: str,
) -> bool:
    """Return whether the kernels agree with plain operations on the first rows of a call.

    Compared once per device, format, head size, kind of masks, and requested statistics.

    Args:
        source: The call.
        sums: The requested results; not written.
        counted: As for `reduce_rows`.
        groups: As for `reduce_rows`.
        plain: Writes the same results by plain operations.
        name: Name of the module, for the warning.
    """
    kind = (
        source.query.device,
        source.query.dtype,
        source.query.shape[-1],
        source.query.shape[1] // source.key.shape[1],
        *(_kind(one) for one in (source.bias, source.allowed, source.sinks)),
        source.causal,
        source.softcap is None,
        *(one is None for one in (sums.received, sums.entropy, sums.weights, sums.shares)),
    )
    if kind not in _AGREES:
        q = min(source.shape[2], CHECKED_ROWS)
        some = _first_rows(source, q)
        wanted, found = (_empty_like(sums, q) for _ in range(2))
        plain(some, wanted, counted[:, :q], groups)
        reduce_rows(some, found, counted[:, :q], groups)
        limit = TOLERANCE[source.query.dtype]
        pairs = zip(wanted.given, found.given, strict=True)
        off = torch.stack([_relative_difference(*pair) for pair in pairs]).max()
        _AGREES[kind] = bool(off <= limit)
        if not _AGREES[kind]:
            warnings.warn(
                f"the kernels for statistics of {name or 'the model'} differ from plain operations "
                f"by {float(off):.2g} of the largest number, more than {limit:.0e}; plain "
                "operations are used for such calls, which is slower",
                stacklevel=2,
            )
    return _AGREES[kind]


def reduce_rows(
    source: QKCall,
    sums: RowSums,
    counted: Float[Tensor, "b q"],
    groups: Float[Tensor, "b k m"] | None,
) -> None:
    """Compute the requested statistics of a call and write them into `sums`.

    Args:
        source: A call that `supports` accepts.
        sums: Contiguous results, to be overwritten.
        counted: 1 for queries that count in `received`, else 0.
        groups: 1 for the keys of each group, else 0.
    """
    from overt.capture.kernels import statistics_kernels

    b, h, q, k = source.shape
    given = _arguments(source)
    query = source.query
    levels = query.new_empty((b, h, q), dtype=torch.float32)
    counted = counted.float().contiguous()
    unused = levels  # any tensor where a kernel reads nothing
    by_rows, by_keys = (b * h, -(-q // ROWS)), (b * h, -(-k // KEYS))
    num_groups = 0 if groups is None else groups.shape[2]
    with _on_device(query):
        statistics_kernels.row_statistics[by_rows](
            levels,
            unused if sums.entropy is None else sums.entropy,
            unused if sums.shares is None else sums.shares,
            unused if groups is None else groups.float().contiguous(),
            num_groups,
            unused if source.sinks is None else source.sinks.contiguous(),
            **given,
            SINKS=source.sinks is not None,
            ENTROPY=sums.entropy is not None,
            SHARES=sums.shares is not None,
            BM=max(16, triton_launch._next_power_of_two(num_groups)),
        )
        if sums.received is not None:
            statistics_kernels.received_sums[by_keys](sums.received, counted, levels, **given)
        if sums.weights is not None and sums.indices is not None:
            top = sums.weights.shape[-1]
            statistics_kernels.largest_keys[by_rows](
                sums.weights,
                sums.indices,
                top,
                levels,
                **given,
                BT=max(2, triton_launch._next_power_of_two(top)),
            )
            order = sums.weights.sort(dim=-1, descending=True)
            sums.indices.copy_(sums.indices.gather(-1, order.indices))
            sums.weights.copy_(order.values)
            sums.indices.masked_fill_(sums.weights == 0, -1)


def _arguments(source: QKCall) -> dict[str, Any]:
    """Return the arguments of every kernel."""
    b, h, q, k = source.shape
    query, key = source.query, source.key
    given: dict[str, Any] = {
        "queries": query,
        "keys": key,
        "heads": h,
        "groups": key.shape[1],
        "num_rows": q,
        "num_keys": k,
        "scale": source.scale,
        "softcap": 1.0 if source.softcap is None else source.softcap,
        "query_b": query.stride(0),
        "query_h": query.stride(1),
        "query_n": query.stride(2),
        "key_b": key.stride(0),
        "key_g": key.stride(1),
        "key_n": key.stride(2),
        "CAPPED": source.softcap is not None,
        "BIASED": source.bias is not None,
        "MASKED": source.allowed is not None,
        "CAUSAL": source.causal,
        "EXACT": "ieee" if query.dtype == torch.float32 else "tf32",
        "D": query.shape[-1],
        "BD": max(16, triton_launch._next_power_of_two(query.shape[-1])),
        "BS": ROWS,
        "BR": KEYS,
    }
    for name, mask in (("bias", source.bias), ("allowed", source.allowed)):
        whole = None if mask is None else mask.expand(b, h, q, k)  # strides of zero, no copy
        if whole is not None and whole.dtype == torch.bool:
            whole = whole.view(torch.uint8)
        given[name] = query if whole is None else whole
        strides = (0, 0, 0, 0) if whole is None else whole.stride()
        given |= {f"{name}_{axis}": one for axis, one in zip("bhsr", strides, strict=True)}
    return given


def _on_device(query: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(query.device) if query.is_cuda else nullcontext()


def _kind(mask: Tensor | None) -> Any:
    return None if mask is None else (mask.dtype, mask.ndim, *(size == 1 for size in mask.shape))


def _first_rows(source: QKCall, count: int) -> QKCall:
    """Return the call restricted to its first queries, of which causal masks see the first keys."""
    rows, sizes = slice(0, count), (source.shape[2], source.shape[3])
    bias, allowed = (
        None if one is None else select_block(one, rows, None, sizes)
        for one in (source.bias, source.allowed)
    )
    query = source.query[:, :, rows]
    return replace(source, query=query, bias=bias, allowed=allowed, taps=None)


def _empty_like(sums: RowSums, q: int) -> RowSums:
    """Return zeros for the results of the first queries."""
    rows = (sums.entropy, sums.weights, sums.indices, sums.shares)
    entropy, weights, indices, shares = (
        None if one is None else torch.zeros_like(one[:, :, :q]).contiguous() for one in rows
    )
    if indices is not None:
        indices -= 1
    received = None if sums.received is None else torch.zeros_like(sums.received)
    return RowSums(received, entropy, weights, indices, shares)


def _relative_difference(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the largest difference relative to the largest number; infinite for NaN."""
    most = wanted.abs().amax().clamp_min(1e-6)
    return ((found - wanted).abs().amax() / most).nan_to_num(torch.inf)
