"""Launch Triton kernels for the log-softmax and cross-entropy of rows in all layers at once.

The kernels read queries and keys in place, where `block_scores` would copy them to float32. In the
backward pass, the gradient of the rows is computed for all layers in one launch; that of the keys
is added into the gradient of attention when the backward pass reaches the layer. The cross-entropy
with targets is summed without writing the softmax, which is recomputed in the backward pass: a few
numbers per row are saved.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture import _torch_compat

KEY_BLOCK, SHORT_KEY_BLOCK = 64, 32  # keys per block; the faster sizes on an H200
MAX_ROWS = 64  # per sample; a program holds all of them
MAX_HEAD_DIM = 128
FORMATS = (torch.bfloat16, torch.float16, torch.float32)
TRITON = find_spec("triton") is not None  # at import time: a compiled graph cannot call find_spec
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # run the kernels on a CPU, for tests
SavedRows = tuple[Tensor, Tensor, Tensor]  # log-sums, target masses, targets of `RowCrossEntropy`
# Gradient of the cross-entropies, and `SavedRows`.
CrossEntropyGradient = tuple[Tensor, Tensor, Tensor, Tensor]
# Gradient of the log-softmax, the log-softmax, and the row sums of the gradient.
LogSoftmaxGradient = tuple[Tensor, Tensor, Tensor]


def triton_installed() -> bool:
    """Return whether Triton is installed; it comes with the CUDA wheels of torch only."""
    return TRITON


def supports(queries: Sequence[Tensor], keys: Sequence[Tensor], rows: int) -> bool:
    """Return whether the kernels support these layers: on a GPU, equal shapes, and few rows."""
    query, key = queries[0], keys[0]
    return (
        triton_installed()
        and (query.is_cuda or INTERPRETED)
        and query.dtype in FORMATS
        and query.dtype == key.dtype
        and 0 < rows <= MAX_ROWS
        and 0 < query.shape[-1] <= MAX_HEAD_DIM
        and query.numel() > 0
        and key.numel() > 0
        # kernels use 32-bit offsets
        and all(one.shape[2] * one.stride(2) < 2**31 for one in (query, key))
        and all(_same_layout(one, query) for one in queries)
        and all(_same_layout(one, key) for one in keys)
    )


def _same_layout(one: Tensor, first: Tensor) -> bool:
    return (
        one.shape == first.shape
        and one.stride() == first.stride()
        and one.stride(-1) == 1
        and one.dtype == first.dtype
        and one.device == first.device
    )


class BlockLauncher:
    """Launches the kernels for selected rows and keys of the queries and keys of all layers.

    Kernels get raw addresses and may run after the caller has dropped the tensors, so the launcher
    keeps them alive.
    """

    def __init__(
        self,
        queries: Sequence[Float[Tensor, "b h q d"]],
        keys: Sequence[Float[Tensor, "b g k d"]],
        rows: Int[Tensor, "b s"],
        columns: slice,
        scale: float,
        hidden: Bool[Tensor, "b 1 #s r"] | None,
    ) -> None:
        b, h, _, d = queries[0].shape
        start, stop, _ = columns.indices(keys[0].shape[2])
        self.query, self.key, self.held = queries[0], keys[0], (*queries, *keys)
        self.sizes = len(queries), b, h, rows.shape[1], stop - start
        self.groups, self.width, self.start = keys[0].shape[1], d, start
        self.rows, self.scale = rows.contiguous(), scale
        self.hidden = None
        if hidden is not None:  # kernels need contiguous keys per row
            self.hidden = hidden[:, 0].contiguous().expand(b, rows.shape[1], -1)
        self.pointers = _pointers([*queries, *keys])
        # Multiples of 16 bytes allow vector loads.
        self.aligned = all(one.data_ptr() % 16 == 0 for one in (*queries, *keys))

    def log_softmax(self) -> Float[Tensor, "l b h s r"]:
        """Compute the log-softmax of the scores; -inf where a key is hidden."""
        from overt.capture.kernels import row_softmax

        l, b, h, *_ = self.sizes
        out = torch.empty(self.sizes, dtype=torch.float32, device=self.query.device)
        with self._on_device():
            row_softmax.row_log_softmax[(l * b * h,)](
                out,
                *self._mask_arguments(),
                **self._kernel_arguments(),
                num_warps=self._num_warps(2),
            )
        return out

    def row_gradient(
        self,
        slopes: Float[Tensor, "l b h s r"],
        logs: Float[Tensor, "l b h s r"],
        once: bool,
    ) -> tuple[Float[Tensor, "l b h s d"], Float[Tensor, "l b h s"]]:
        """Compute the gradient of the rows in every layer, and the summed slopes of each row.

        Rows that share a position are summed. With `once` the first of them holds the sum and the
        others are zero, ready for `scatter_add_`; without it each of them holds the sum.
        """
        from overt.capture.kernels import row_softmax

        l, b, h, s, _ = self.sizes
        device = self.query.device
        made = torch.empty((l, b, h, s, self.width), dtype=self.query.dtype, device=device)
        sums = torch.empty((l, b, h, s), dtype=torch.float32, device=device)
        with self._on_device():
            row_softmax.row_gradient[(l * b * h,)](
                made, sums, slopes, logs, once, **self._kernel_arguments()
            )
        return made, sums

    def add_key_gradient(
        self, given: LogSoftmaxGradient, layer: int, whole: Float[Tensor, "b g k d"]
    ) -> None:
        """Add the gradient of the keys of one layer into `whole`."""
        from overt.capture.kernels import row_softmax

        self._add_to_layer(
            partial(self._launch_key_gradient, row_softmax.key_gradient, KEY_BLOCK, 4, given),
            layer,
            whole,
        )

    def write_key_gradient(
        self, given: LogSoftmaxGradient, into: Float[Tensor, "l b g k d"], begin: int
    ) -> None:
        """Write the gradients of the selected keys in all layers, from `begin` on."""
        from overt.capture.kernels import row_softmax

        self._launch_key_gradient(
            row_softmax.key_gradient, KEY_BLOCK, 4, given, into, begin, False, 0
        )

    def cross_entropy(self, target: Float[Tensor, "b s r"], log_eps: float) -> "RowCrossEntropy":
        """Compute the cross-entropy of each row; the log-softmax of a hidden key is `log_eps`."""
        from overt.capture.kernels import row_softmax

        l, b, h, s, _ = self.sizes
        device = self.query.device
        made = [torch.empty((l, b, h, s), dtype=torch.float32, device=device) for _ in range(3)]
        target = target.to(torch.float32).contiguous()
        with self._on_device():
            row_softmax.cross_entropy[(l * b * h,)](
                *made,
                target,
                log_eps,
                *self._mask_arguments(),
                **self._kernel_arguments(SHORT_KEY_BLOCK),
                num_warps=self._num_warps(1),
            )
        return RowCrossEntropy(made[0], made[1], made[2], target)

    def cross_entropy_row_gradient(
        self, slopes: Float[Tensor, "l b h s"], kept: SavedRows
    ) -> Float[Tensor, "l b h s d"]:
        """Compute the gradient of the rows in every layer from that of their cross-entropy.

        The first of several rows at one position holds their sum, the others are zero.
        """
        from overt.capture.kernels import row_softmax

        l, b, h, s, _ = self.sizes
        kind = {"dtype": self.query.dtype, "device": self.query.device}
        found = torch.empty((l, b, h, s, self.width), **kind)  # type: ignore[call-overload]
        with self._on_device():
            row_softmax.cross_entropy_row_gradient[(l * b * h,)](
                found,
                slopes,
                *kept,
                *self._mask_arguments(),
                **self._kernel_arguments(SHORT_KEY_BLOCK),
                num_warps=self._num_warps(1),
            )
        return found

    def add_cross_entropy_key_gradient(
        self, given: CrossEntropyGradient, layer: int, whole: Float[Tensor, "b g k d"]
    ) -> None:
        """Add the gradient of the keys of one layer, from the cross-entropies, into `whole`."""
        self._add_to_layer(partial(self._cross_entropy_to_keys, given), layer, whole)

    def write_cross_entropy_key_gradient(
        self, given: CrossEntropyGradient, into: Float[Tensor, "l b g k d"], begin: int
    ) -> None:
        """Write the gradients of the selected keys in all layers, from `begin` on."""
        self._cross_entropy_to_keys(given, into, begin, False, 0)

    def write_cross_entropy_gradients(
        self,
        given: CrossEntropyGradient,
        of_queries: Float[Tensor, "l b h q d"],
        of_keys: Float[Tensor, "l b h k d"],
    ) -> None:
        """Write whole gradients of queries and keys; only if each head has keys of its own."""
        from overt.capture.kernels import row_softmax

        l, b, h, *_ = self.sizes
        into = [(one, *one.stride()[:4], one.shape[3]) for one in (of_queries, of_keys)]
        with self._on_device():
            row_softmax.cross_entropy_gradients[(l * b * h,)](
                *into[0],
                *into[1],
                *given,
                *self._mask_arguments(),
                **self._kernel_arguments(SHORT_KEY_BLOCK),
                num_warps=self._num_warps(2),
            )

    def _cross_entropy_to_keys(self, given: CrossEntropyGradient, *where: Any) -> None:
        from overt.capture.kernels import row_softmax

        every = *given, *self._mask_arguments()
        self._launch_key_gradient(
            row_softmax.cross_entropy_key_gradient,
            SHORT_KEY_BLOCK,
            self._num_warps(2),
            every,
            *where,
        )

    def _add_to_layer(self, put: Callable[..., None], layer: int, whole: Tensor) -> None:
        """Add the keys of one layer, through a copy if the kernel cannot write to `whole`."""
        # The kernels assume contiguous features and the dtype of the keys; autograd may pass other
        # gradients.
        if whole.stride(-1) != 1 or whole.dtype != self.key.dtype:
            own = torch.zeros_like(self.key)
            self._add_to_layer(put, layer, own)
            whole += own
            return
        put(whole[None], self.start, True, layer)

    def _launch_key_gradient(
        self,
        kernel: Any,
        keys: int,
        warps: int,
        given: tuple[Any, ...],
        into: Float[Tensor, "l b g k d"],
        begin: int,
        adds: bool,
        layer: int,
    ) -> None:
        # One program per layer, sample, group of heads, and block of keys.
        grid = (len(into) * self.sizes[1] * self.groups, -(-self.sizes[-1] // keys))
        ends = into.stride()[:4]
        with self._on_device():
            kernel[grid](
                into,
                *ends,
                begin,
                adds,
                layer,
                *given,
                **self._kernel_arguments(keys),
                num_warps=warps,
            )

    def _num_warps(self, least: int) -> int:
        """Warps per program: few for few rows, which have little work."""
        return max(least, _next_power_of_two(self.sizes[3]) // 16)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device of the queries the current CUDA device."""
        return torch.cuda.device(self.query.device) if self.query.is_cuda else nullcontext()

    def _mask_arguments(self) -> tuple[Any, ...]:
        """Return the mask and its strides; any tensor if there is no mask."""
        if self.hidden is None:
            return self.rows, 0, 0, False
        return self.hidden, *self.hidden.stride()[:2], True

    def _kernel_arguments(self, keys: int = KEY_BLOCK) -> dict[str, Any]:
        """Return the arguments of every kernel; `keys` is the size of a block of keys."""
        from overt.capture.kernels.row_softmax import FORMATS as formats

        l, b, h, s, r = self.sizes
        return {
            "pointers": self.pointers,
            "rows": self.rows,
            "layers": l,
            "samples": b,
            "heads": h,
            "groups": self.groups,
            "num_rows": s,
            "num_keys": r,
            "start": self.start,
            "scale": self.scale,
            "query_b": self.query.stride(0),
            "query_h": self.query.stride(1),
            "query_n": self.query.stride(2),
            "key_b": self.key.stride(0),
            "key_g": self.key.stride(1),
            "key_n": self.key.stride(2),
            "FORMAT": formats[self.query.dtype],
            # Only products of float32 could be rounded to TF32; for 16 bits the option has no
            # effect.
            "EXACT": "ieee" if self.query.dtype == torch.float32 else "tf32",
            "ALIGNED": self.aligned,
            "D": self.width,
            # `tl.arange` needs powers of two, `tl.dot` at least 16.
            "BD": max(16, _next_power_of_two(self.width)),
            "BS": max(16, _next_power_of_two(s)),
            "BR": keys,
        }


@dataclass(frozen=True)
class RowCrossEntropy:
    """Cross-entropy of each row, and what its backward pass needs."""

    values: Float[Tensor, "l b h s"]
    log_sums: Float[Tensor, "l b h s"]  # log of the softmax denominator
    target_masses: Float[Tensor, "l b h s"]  # sum of the target over visible keys
    target: Float[Tensor, "b s r"]

    @property
    def saved(self) -> SavedRows:
        """The tensors saved for the backward pass."""
        return self.log_sums, self.target_masses, self.target


def _pointers(tensors: Sequence[Tensor]) -> Int[Tensor, " n"]:
    """Return the addresses of tensors as a tensor on their device.

    Added to zeros in one launch: a copy from the host would synchronize.
    """
    found = torch.zeros(len(tensors), dtype=torch.long, device=tensors[0].device)
    _torch_compat.add_scalars_(found.unbind(), [one.data_ptr() for one in tensors])
    return found


def _next_power_of_two(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, size - 1).bit_length()
