"""Check at the end of a block that records still match what the model computed.

Two checks. Version counters of the tensors of a record show in-place changes; they are compared for
every call, at no cost. In the first block of a model one row of each call is also recomputed:
weights times values must equal the output, and the exponential of the log-weights must equal the
weights. All differences of a block are read with one synchronization.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overt.attention import Kind
from overt.capture.block_scores import no_autocast
from overt.capture.call import MaterializedCall, QKCall

_QK_NAMES = ("queries", "keys", "masks", "masks", "values", "outputs")
_MATERIALIZED_NAMES = ("weights", "logits", "factors", "factors", "values", "outputs")
_NOT_REQUIRED = ("factors", "values", "outputs")
_OTHER_FORM = "unsupported shape of values or outputs"
# Tolerance relative to the largest value; kernels may round more than their dtype does.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def _tensors_of(
    source: QKCall | MaterializedCall, value: Tensor | None, output: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the tensors of a record, in the order of `_QK_NAMES` or `_MATERIALIZED_NAMES`."""
    if isinstance(source, QKCall):
        return source.query, source.key, source.bias, source.allowed, value, output
    return source.used, source.logits, source.query, source.key, value, output


def tensor_versions(
    source: QKCall | MaterializedCall, value: Tensor | None, output: Tensor | None
) -> tuple[int, ...]:
    """Return the version counter of each tensor of a record; -1 where it has none."""
    return tuple(
        -1 if one is None or one.is_inference() else one._version
        for one in _tensors_of(source, value, output)
    )


def modified_tensors(
    source: QKCall | MaterializedCall,
    value: Tensor | None,
    output: Tensor | None,
    before: tuple[int, ...] | None,
) -> frozenset[str]:
    """Return the names of the tensors that were modified in place since versions `before`."""
    if before is None or before == tensor_versions(source, value, output):
        return frozenset()
    names = _QK_NAMES if isinstance(source, QKCall) else _MATERIALIZED_NAMES
    now = tensor_versions(source, value, output)
    return frozenset(
        name for name, was, is_ in zip(names, before, now, strict=True) if 0 <= was != is_
    )


def required_for_weights(names: frozenset[str]) -> list[str]:
    """Return those of the modified tensors that are needed to compute the weights."""
    return sorted(names.difference(_NOT_REQUIRED))


@dataclass(frozen=True)
class RowCheck:
    """Difference between a recomputed row and what the model computed.

    Attributes:
        off: Largest difference relative to the tolerance; more than 1 is wrong. None if the row
            could not be recomputed.
        what: Message for a wrong row.
        why: Why the row could not be recomputed.
    """

    off: Tensor | None
    what: str = ""
    why: str = ""


def check_last_row(
    source: QKCall | MaterializedCall, value: Tensor | None, output: Tensor | None, exact: bool
) -> list[RowCheck]:
    """Recompute the last row of a call; `exact` is whether the output is weights times values."""
    first = source.weights(slice(0, 1), slice(0, 1))
    if first.is_meta:
        return [RowCheck(None, why="tensors on the meta device have no values")]
    with torch.no_grad(), no_autocast(first.device):
        row = source.shape[2] - 1  # the last query sees most keys under a causal mask
        return [*_check_log_weights(source, row), _check_output(source, value, output, exact, row)]


def _check_log_weights(source: QKCall | MaterializedCall, row: int) -> list[RowCheck]:
    """Compare the exponential of the log-weights with the weights, if both are stored."""
    if isinstance(source, QKCall) or source.logits is None or source.kind is Kind.SIGNED:
        return []
    at = slice(row, row + 1)
    weights = source.weights(at)
    found = source.log_weights(at).exp()
    off = _relative_difference(found - weights.to(found.dtype), weights)
    close = max(_TOLERANCE.get(one.dtype, 0.1) for one in (weights, source.logits))
    return [RowCheck(off / close, "exp(log_weights) differs from the weights")]


def _check_output(
    source: QKCall | MaterializedCall,
    value: Tensor | None,
    output: Tensor | None,
    exact: bool,
    row: int,
) -> RowCheck:
    """Compare weights times values with the output."""
    if value is None or output is None:
        return RowCheck(None, why="values or outputs not available")
    if not exact:
        return RowCheck(None, why="dropout or an added term")
    b, h, q, k = source.shape
    d = value.shape[-1]
    weights = source.weights(slice(row, row + 1))
    if output.dtype not in _TOLERANCE or value.shape[-2] != k or output.shape[-2:] != (q, d):
        return RowCheck(None, why=_OTHER_FORM)
    there = output[..., row : row + 1, :].to(weights.dtype)
    if output.shape[:-2] == (b, h) and value.ndim == 4 and h % value.shape[1] == 0:
        values = value.to(weights.dtype).repeat_interleave(h // value.shape[1], dim=1)
        found = [weights @ values - there]
    elif output.shape[:-2] == (b * h,) and value.numel() == b * h * k * d:
        values = value.to(weights.dtype).reshape(b * h, k, d)
        turned = weights.transpose(0, 1).reshape(b * h, 1, k)  # heads may be folded either way
        found = [one @ values - there for one in (weights.reshape(b * h, 1, k), turned)]
    else:
        return RowCheck(None, why=_OTHER_FORM)
    # Some kernels return NaN for a row that sees no key, where the record has zeros.
    offs = [_relative_difference(torch.where(there.isfinite(), one, 0), values) for one in found]
    off = torch.stack(offs).amin()
    return RowCheck(off / _TOLERANCE[output.dtype], "weights @ values differs from the output")


def _relative_difference(difference: Tensor, scale: Tensor) -> Tensor:
    """Return the largest difference relative to the largest entry; infinite for NaN."""
    most = scale.abs().amax().to(difference.dtype).clamp_min(1e-12)
    return (difference.abs().amax() / most).nan_to_num(torch.inf)


def failed_checks(found: Sequence[RowCheck]) -> list[int]:
    """Return the indices of the checks that failed, with one synchronization per device."""
    places = [at for at, one in enumerate(found) if one.off is not None]
    if not places:
        return []
    offs = torch.stack([found[at].off.float().cpu() for at in places])  # type: ignore[union-attr]
    return [at for at, wrong in zip(places, (offs > 1).tolist(), strict=True) if wrong]
