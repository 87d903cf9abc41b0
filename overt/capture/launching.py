"""Log-shares of some rows in all layers at once, by kernels of our own on a CUDA card.

What `products.log_shares` does by copies of rows and keys in float32 is done on queries and keys as
they lie. Backward, the gradient of rows is made for all layers in one go; that of keys is added
into the gradient that attention has made, when its layer is due. What rows cost by their targets is
summed without writing their shares, which are made again backward: what is kept is a few numbers a
row.
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

KEYS, SHORT = 64, 32  # that a kernel looks at together: the better of the two, tried on an H200
ROWS = 64  # at most, of one sample: more are no longer few
WIDE = 128  # features of a head, at most
FORMATS = (torch.bfloat16, torch.float16, torch.float32)
TRITON = find_spec("triton") is not None  # asked here: a graph that is compiled cannot ask
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU then, for tests
KeptOfCosts = tuple[Tensor, Tensor, Tensor]  # levels, masses and targets, as `Costs` has them
OfCosts = tuple[Tensor, Tensor, Tensor, Tensor]  # slopes of costs, and what was kept of them
OfShares = tuple[Tensor, Tensor, Tensor]  # slopes of log-shares, these, and sums of the slopes


def installed() -> bool:
    """Whether there is a Triton: in the wheels of torch for CUDA, and in no other."""
    return TRITON


def fit(queries: Sequence[Tensor], keys: Sequence[Tensor], rows: int) -> bool:
    """Whether the kernels can take these layers: on a card, all of one size, and few rows."""
    query, key = queries[0], keys[0]
    return (
        installed()
        and (query.is_cuda or INTERPRETED)
        and query.dtype in FORMATS
        and query.dtype == key.dtype
        and 0 < rows <= ROWS
        and 0 < query.shape[-1] <= WIDE
        and query.numel() > 0
        and key.numel() > 0
        and all(one.shape[2] * one.stride(2) < 2**31 for one in (query, key))  # as kernels count
        and all(_alike(one, query) for one in queries)
        and all(_alike(one, key) for one in keys)
    )


def _alike(one: Tensor, first: Tensor) -> bool:
    return (
        one.shape == first.shape
        and one.stride() == first.stride()
        and one.stride(-1) == 1
        and one.dtype == first.dtype
        and one.device == first.device
    )


class Layers:
    """Where the queries and keys of all layers lie, and which of their rows and keys take part.

    Kernels are told addresses, some of them long after whoever asked has let go: all is held here.
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
        if hidden is not None:  # kernels go along the keys of a row: they have to lie side by side
            self.hidden = hidden[:, 0].contiguous().expand(b, rows.shape[1], -1)
        self.places = _places([*queries, *keys])
        self.aligned = all(one.data_ptr() % 16 == 0 for one in (*queries, *keys))

    def log_shares(self) -> Float[Tensor, "l b h s r"]:
        """The log-softmax of the products; -inf where a key is hidden."""
        from overt.capture import kernels

        l, b, h, *_ = self.sizes
        out = torch.empty(self.sizes, dtype=torch.float32, device=self.query.device)
        with self._there():
            kernels.log_shares[(l * b * h,)](
                out, *self._hides(), **self._given(), num_warps=self._warps(2)
            )
        return out

    def of_rows(
        self,
        slopes: Float[Tensor, "l b h s r"],
        logs: Float[Tensor, "l b h s r"],
        joined: bool = False,
    ) -> tuple[Float[Tensor, "l b h s d"], Float[Tensor, "l b h s"]]:
        """The gradient of the rows in every layer, and the sums of the slopes of each row.

        `joined`, each of several rows at one position has the sum of them all.
        """
        from overt.capture import kernels

        l, b, h, s, _ = self.sizes
        device = self.query.device
        made = torch.empty((l, b, h, s, self.width), dtype=self.query.dtype, device=device)
        sums = torch.empty((l, b, h, s), dtype=torch.float32, device=device)
        with self._there():
            kernels.to_rows[(l * b * h,)](made, sums, slopes, logs, joined, **self._given())
        return made, sums

    def add_to_keys(self, given: OfShares, layer: int, whole: Float[Tensor, "b g k d"]) -> None:
        """Add the gradient of one layer's keys to what is there."""
        from overt.capture import kernels

        self._add(partial(self._to_keys, kernels.to_keys, KEYS, 4, given), layer, whole)

    def put_keys(self, given: OfShares, into: Float[Tensor, "l b g k d"], begin: int) -> None:
        """Write the gradients of the keys that took part, in all layers, from `begin` on."""
        from overt.capture import kernels

        self._to_keys(kernels.to_keys, KEYS, 4, given, into, begin, False, 0)

    def costs(self, wanted: Float[Tensor, "b s r"], nothing: float) -> "Costs":
        """The cross-entropy of each row with its target; a hidden key has a log-share `nothing`."""
        from overt.capture import kernels

        l, b, h, s, _ = self.sizes
        device = self.query.device
        made = [torch.empty((l, b, h, s), dtype=torch.float32, device=device) for _ in range(3)]
        wanted = wanted.to(torch.float32).contiguous()
        with self._there():
            kernels.costs[(l * b * h,)](
                *made,
                wanted,
                nothing,
                *self._hides(),
                **self._given(SHORT),
                num_warps=self._warps(1),
            )
        return Costs(made[0], made[1], made[2], wanted)

    def rows_of_costs(
        self, slopes: Float[Tensor, "l b h s"], kept: KeptOfCosts
    ) -> Float[Tensor, "l b h s d"]:
        """The gradient of the rows in every layer, from that of what they cost."""
        from overt.capture import kernels

        l, b, h, s, _ = self.sizes
        kind = {"dtype": self.query.dtype, "device": self.query.device}
        found = torch.empty((l, b, h, s, self.width), **kind)  # type: ignore[call-overload]
        with self._there():
            kernels.costs_to_rows[(l * b * h,)](
                found,
                slopes,
                *kept,
                *self._hides(),
                **self._given(SHORT),
                num_warps=self._warps(1),
            )
        return found

    def add_costs_to_keys(
        self, given: OfCosts, layer: int, whole: Float[Tensor, "b g k d"]
    ) -> None:
        """Add the gradient of one layer's keys, from that of all costs, to what is there."""
        self._add(partial(self._costs_to_keys, given), layer, whole)

    def put_costs_to_keys(
        self, given: OfCosts, into: Float[Tensor, "l b g k d"], begin: int
    ) -> None:
        """Write those of all layers, from `begin` on."""
        self._costs_to_keys(given, into, begin, False, 0)

    def put_costs(
        self,
        given: OfCosts,
        of_queries: Float[Tensor, "l b h q d"],
        of_keys: Float[Tensor, "l b h k d"],
    ) -> None:
        """Write whole gradients of both, in one go; only where each head has keys of its own."""
        from overt.capture import kernels

        l, b, h, *_ = self.sizes
        into = [(one, *one.stride()[:4], one.shape[3]) for one in (of_queries, of_keys)]
        with self._there():
            kernels.costs_to_both[(l * b * h,)](
                *into[0],
                *into[1],
                *given,
                *self._hides(),
                **self._given(SHORT),
                num_warps=self._warps(2),
            )

    def _costs_to_keys(self, given: OfCosts, *where: Any) -> None:
        from overt.capture import kernels

        every = *given, *self._hides()
        self._to_keys(kernels.costs_to_keys, SHORT, self._warps(2), every, *where)

    def _add(self, put: Callable[..., None], layer: int, whole: Tensor) -> None:
        """Add one layer's keys; where a kernel cannot, by way of memory where it can."""
        if whole.stride(-1) != 1 or whole.dtype != self.key.dtype:
            own = torch.zeros_like(self.key)
            self._add(put, layer, own)
            whole += own
            return
        put(whole[None], self.start, True, layer)

    def _to_keys(
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
        grid = (len(into) * self.sizes[1] * self.groups, -(-self.sizes[-1] // keys))
        ends = into.stride()[:4]
        with self._there():
            kernel[grid](
                into, *ends, begin, adds, layer, *given, **self._given(keys), num_warps=warps
            )

    def _warps(self, least: int) -> int:
        """How many groups of threads share a program: few for few rows, which say little each."""
        return max(least, _power(self.sizes[3]) // 16)

    def _there(self) -> AbstractContextManager[Any]:
        """On the card of the queries, whichever is the present one."""
        on_card = self.query.is_cuda
        return torch.cuda.device(self.query.device) if on_card else nullcontext()

    def _hides(self) -> tuple[Any, ...]:
        """What is hidden, and its strides; some tensor or other where nothing is."""
        if self.hidden is None:
            return self.rows, 0, 0, False
        return self.hidden, *self.hidden.stride()[:2], True

    def _given(self, keys: int = KEYS) -> dict[str, Any]:
        """What every kernel is given; `keys` that it looks at together."""
        from overt.capture.kernels import FORMATS as formats

        l, b, h, s, r = self.sizes
        return {
            "places": self.places,
            "rows": self.rows,
            "layers": l,
            "samples": b,
            "heads": h,
            "groups": self.groups,
            "count": s,
            "long": r,
            "start": self.start,
            "scale": self.scale,
            "query_b": self.query.stride(0),
            "query_h": self.query.stride(1),
            "query_n": self.query.stride(2),
            "key_b": self.key.stride(0),
            "key_g": self.key.stride(1),
            "key_n": self.key.stride(2),
            "FORMAT": formats[self.query.dtype],
            "EXACT": "ieee" if self.query.dtype == torch.float32 else "tf32",
            "ALIGNED": self.aligned,
            "D": self.width,
            "BD": max(16, _power(self.width)),
            "BS": max(16, _power(s)),
            "BR": keys,
        }


@dataclass(frozen=True)
class Costs:
    """What rows cost, and what its gradient is made from: a few numbers a row, and the targets."""

    values: Float[Tensor, "l b h s"]
    levels: Float[Tensor, "l b h s"]  # logarithms of the sums that shares are divided by
    masses: Float[Tensor, "l b h s"]  # of the targets, on keys that are seen
    wanted: Float[Tensor, "b s r"]

    @property
    def kept(self) -> KeptOfCosts:
        """What the gradient is made from."""
        return self.levels, self.masses, self.wanted


def _places(tensors: Sequence[Tensor]) -> Int[Tensor, " n"]:
    """Where tensors begin in memory, on the card.

    Added to zeros, all by one launch: a copy from the host would be waited for.
    """
    found = torch.zeros(len(tensors), dtype=torch.long, device=tensors[0].device)
    torch._foreach_add_(found.unbind(), [one.data_ptr() for one in tensors])
    return found


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()
