"""One captured attention call: queries, keys, masks, biases and scale.

A call computes any block of its weights without the rest: s rows and r keys cost s x r scores,
independent of the sequence length. Arithmetic is in at least float32, with autocast disabled.

Axis letters:  b batch  h head  g group of heads that share keys  q query  k key  d feature
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import Kind
from overt.capture.axis_roles import LeadingAxes
from overt.capture.block_scores import ALL, GradTap, Index, no_autocast, take_positions

# score_mod of FlexAttention: (score, b, h, q, k) -> score, on broadcastable tensors
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
OptionalIndex = (
    Index | None
)  # None is all positions; a slice as a default breaks graphs of PyTorch 2.11
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Route(Enum):
    """How a call was captured.

    Attributes:
        SDPA: `torch.nn.functional.scaled_dot_product_attention`.
        FLEX: `flex_attention`.
        INTERFACE: `attn_implementation="overt"` of a Hugging Face model.
        SOFTMAX: A softmax in the code of the model.

    Example:
        >>> Route.SDPA.value
        'scaled_dot_product_attention'
    """

    SDPA = "scaled_dot_product_attention"
    FLEX = "flex_attention"
    INTERFACE = "overt attention interface"
    SOFTMAX = "softmax written out"


@dataclass(frozen=True, eq=False)
class QKCall:
    """A call whose weights are the softmax of `query . key`, scaled, capped, biased and masked.

    Keys may have fewer heads than queries (grouped-query attention). `sinks` are learned scores of
    a key without a value: they take part of the attention.
    """

    query: Float[Tensor, "b h q d"]
    key: Float[Tensor, "b g k d"]
    scale: float
    bias: Float[Tensor, "..."] | None = None
    allowed: Bool[Tensor, "..."] | None = None
    causal: bool = False  # query i sees keys 0 to i, as with `is_causal` of SDPA
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    taps: tuple[GradTap, ...] | None = None  # of queries and keys

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        b, h, q, _ = self.query.shape
        return b, h, q, self.key.shape[2]

    @property
    def kind(self) -> Kind:
        """A probability, or a subprobability if there are sinks."""
        return Kind.PROBABILITY if self.sinks is None else Kind.SUBPROBABILITY

    @property
    def plain(self) -> bool:
        """Whether the scores are `query . key` with masks and biases only."""
        return self.softcap is None and self.score_mod is None and self.mask_mod is None

    def heads(self, indices: Sequence[int]) -> "QKCall":
        """Return the call restricted to some of its heads."""
        _, h, _, _ = self.shape
        g = self.key.shape[1]
        at = torch.tensor(list(indices), device=self.query.device)
        if self.score_mod is not None or self.mask_mod is not None:
            raise ValueError("cannot select heads of a call with a score_mod or mask_mod")
        return replace(
            self,
            query=self.query[:, at],
            # One key head per selected head: the selection need not consist of whole groups.
            key=self.key[:, at // (h // g)],
            taps=None,
            bias=_mask_of_heads(self.bias, at),
            allowed=_mask_of_heads(self.allowed, at),
            sinks=None if self.sinks is None else self.sinks[at],
        )

    def scores(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the logits of some rows and keys; -inf where masked."""
        with no_autocast(self.query.device):
            precise = torch.promote_types(self.query.dtype, torch.float32)
            query = take_positions(self.query, rows, 2).to(precise)
            key = take_positions(self.key, keys, 2).to(precise)
            g = key.shape[1]
            # Head i has the keys of group i // n: the heads of a group are adjacent.
            grouped = rearrange(query, "b (g n) s d -> b g n s d", g=g)
            scores = grouped @ rearrange(key, "b g r d -> b g 1 d r")
            # eager models scale the scores, not the queries: large scores show the difference
            scores = rearrange(scores, "b g n s r -> b (g n) s r") * self.scale
            return self.apply_bias_and_mask(scores, rows, keys)

    def apply_bias_and_mask(
        self, scores: Float[Tensor, "*l b h s r"], rows: OptionalIndex, keys: OptionalIndex
    ) -> Float[Tensor, "*l b h s r"]:
        """Apply softcap, score_mod, bias and masks to scaled products."""
        _, _, q, k = self.shape
        # In the order of the models: capping after masking would make -inf finite again.
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.score_mod is not None:
            scores = self.score_mod(scores, *self._broadcast_indices(rows, keys))
        if self.bias is not None:
            scores = scores + select_block(self.bias, rows, keys, (q, k)).to(scores.dtype)
        allowed = self.key_mask(rows, keys)
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def key_mask(
        self, rows: OptionalIndex, keys: OptionalIndex
    ) -> Bool[Tensor, "#b #h #s #r"] | None:
        """Return which keys the masks allow for each query; None without a mask."""
        _, _, q, k = self.shape
        masks = []
        if self.allowed is not None:
            masks.append(select_block(self.allowed, rows, keys, (q, k)))
        if self.causal:
            device = self.query.device
            i, j = _positions(rows, q, device), _positions(keys, k, device)
            masks.append(rearrange(i, "b s -> b 1 s 1") >= rearrange(j, "b r -> b 1 1 r"))
        if self.mask_mod is not None:
            masks.append(self.mask_mod(*self._broadcast_indices(rows, keys)))
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else torch.stack(torch.broadcast_tensors(*masks)).all(0)

    def log_normalizer(self, rows: OptionalIndex = None) -> Float[Tensor, "b h s 1"]:
        """Compute the log of the softmax denominator of each row; 0 for an empty row."""
        scores = self.scores(rows)
        empty = scores.isneginf().all(dim=-1, keepdim=True)  # its gradient would be NaN
        total = torch.where(empty, 0, scores).logsumexp(dim=-1, keepdim=True)
        total = total.masked_fill(empty, -torch.inf)
        # A sink adds exp(sink) to the denominator, and has no key.
        if self.sinks is not None:
            total = torch.logaddexp(total, rearrange(self.sinks, "h -> 1 h 1 1").to(total.dtype))
        # In an empty row, -inf - 0 stays -inf, where -inf - -inf would be NaN.
        return torch.where(total.isneginf(), 0, total)

    def log_weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the log-weights, normalized over all keys of a row."""
        scores = self.scores(rows, keys)
        # All keys are here: one log-softmax. Some keys need the normalizer of the whole row.
        if (keys is None or keys == ALL) and self.sinks is None:
            empty = scores.isneginf().all(dim=-1, keepdim=True)
            return torch.where(empty, 0, scores).log_softmax(-1).masked_fill(empty, -torch.inf)
        return scores - self.log_normalizer(rows)

    def weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the weights of some rows and keys; zero in a fully masked row."""
        return self.log_weights(rows, keys).exp()

    def _broadcast_indices(
        self, rows: OptionalIndex, keys: OptionalIndex
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, q, k = self.shape
        device = self.query.device
        return (
            torch.arange(b, device=device)[:, None, None, None],
            torch.arange(h, device=device)[None, :, None, None],
            rearrange(_positions(rows, q, device), "b s -> b 1 s 1"),
            rearrange(_positions(keys, k, device), "b r -> b 1 1 r"),
        )


@dataclass(frozen=True, eq=False)
class MaterializedCall:
    """A call whose weights exist in full, as multiplied with the values, before dropout.

    `logits` is the input of the softmax, None if the weights were changed after it (mixed heads,
    edits). The last `dropped` columns of the logits took part in the softmax but have no value
    (learned sinks). `query` and `key` are the factors of the logits, scaled or not, if their
    product was computed right before the softmax.
    """

    used: Float[Tensor, "b h q k"]
    kind: Kind
    logits: Float[Tensor, "b h q m"] | None = None
    dropped: int = 0
    query: Float[Tensor, "b h q d"] | None = None
    key: Float[Tensor, "b g k d"] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        b, h, q, k = self.used.shape
        return b, h, q, k

    @property
    def plain(self) -> bool:
        """False: the weights are not computed from queries and keys."""
        return False

    def heads(self, indices: Sequence[int]) -> "MaterializedCall":
        """Return the call restricted to some of its heads."""
        at = torch.tensor(list(indices), device=self.used.device)
        logits, query, key = (
            None if one is None else one[:, at] for one in (self.logits, self.query, self.key)
        )
        return replace(self, used=self.used[:, at], logits=logits, query=query, key=key)

    def scores(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Return the logits of some rows and keys; log-weights if there are no logits."""
        if self.logits is None:
            return self.log_weights(rows, keys)
        kept = self.logits[..., : self.logits.shape[-1] - self.dropped]
        scores = take_positions(take_positions(kept, rows, 2), keys, 3)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def key_mask(
        self, rows: OptionalIndex, keys: OptionalIndex
    ) -> Bool[Tensor, "#b #h #s #r"] | None:
        """None: masks are part of the logits."""
        return None

    def log_weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the log-weights, normalized over all keys of a row."""
        if self.kind is Kind.SIGNED:
            raise ValueError(
                "these weights were changed after the softmax and may be negative, so they have no "
                "logarithm; use `map` or `block`"
            )
        if self.logits is None:
            used = self.weights(rows, keys)
            return torch.where(used > 0, torch.where(used > 0, used, 1).log(), -torch.inf)
        scores = take_positions(self.logits, rows, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        empty = scores.isneginf().all(
            dim=-1, keepdim=True
        )  # fully masked by an edit: zero, not NaN
        scores = torch.where(empty, 0, scores).log_softmax(-1).masked_fill(empty, -torch.inf)
        return take_positions(scores[..., : scores.shape[-1] - self.dropped], keys, 3)

    def weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Return the weights of some rows and keys."""
        return take_positions(take_positions(self.used, rows, 2), keys, 3)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model.

    Args:
        name: Name of the module in the model.
        module: The module itself.
        source: The captured tensors.
        route: How the call was captured.
        cross: Whether queries and keys come from different sequences.
        step: Index of the forward pass of the model.
        value: Values, None if they were not captured or were modified in place since.
        output: Weights times values, None as for `value`.
        head_indices: The heads selected by `heads`, None for all.
        leading_axes: Samples and heads in the leading axes of the output, None for (b, h).
        invocation: Index of the forward pass of the module, None if it is not known. Calls with the
            same one are parts of one layer: heads or chunks in a loop.

    Example:
        >>> import overt
        >>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.rand(1, 5, 8)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(x, x, x, need_weights=False)
        >>> trace.calls[0]
        Call(the model: self-attention, b=1 h=2 q=5 k=5, captured via scaled_dot_product_attention)
        >>> trace.calls[0].weights(rows=slice(0, 1)).shape  # the first query only
        torch.Size([1, 2, 1, 5])
    """

    name: str
    module: torch.nn.Module
    source: QKCall | MaterializedCall
    route: Route
    cross: bool
    step: int = 0
    value: Tensor | None = None
    output: Tensor | None = None
    head_indices: tuple[int, ...] | None = None
    leading_axes: LeadingAxes | None = None
    invocation: int | None = None

    def __repr__(self) -> str:
        """Show the module, the kind of attention, the sizes and the route."""
        return f"Call({self.name or 'the model'}: {self.summary()})"

    def summary(self) -> str:
        """Describe the call without its module."""
        sizes = " ".join(f"{axis}={size}" for axis, size in zip("bhqk", self.shape, strict=True))
        kind = "cross" if self.cross else "self"
        return f"{kind}-attention, {sizes}, captured via {self.route.value}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        return self.source.shape

    @property
    def kind(self) -> Kind:
        """The kind of the weights: probabilities, subprobabilities, amounts or signed."""
        return self.source.kind

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key; positions are aligned at the end, as with a cache.

        Padding rows that attend evenly, because all their scores are very low, are ignored.
        """
        if self.cross:
            return False
        _, _, q, k = self.shape
        if isinstance(self.source, QKCall) and self.source.causal:
            return True
        # A single query sees every key of a cache; only the module can say that it is causal.
        if q == 1:
            return bool(getattr(self.module, "is_causal", False))
        seen = self.visible()
        if seen is None:
            return False
        later = torch.ones(q, k, dtype=torch.bool, device=seen.device).triu(k - q + 1)
        wrong = (seen & later).any(dim=-1)
        spread = self.even_rows()
        return not bool((wrong if spread is None else wrong & ~spread).any())

    def heads(self, indices: Sequence[int]) -> "Call":
        """Return the call restricted to some of its heads, values and outputs included.

        The outputs are copies, so `gradients` of a target cannot be computed from them.

        Args:
            indices: Heads to keep; negative ones count from the end.

        Raises:
            ValueError: If the call has no such head.
        """
        h = self.shape[1]
        wrong = [head for head in indices if not -h <= head < h]
        if wrong:
            raise ValueError(f"{self.name or 'the model'} has heads 0 to {h - 1}, got {wrong}")
        at = [head % h for head in indices]
        return replace(
            self,
            source=self.source.heads(at),
            value=_select_heads(self.value, at, self.shape),
            output=_select_heads(self.output, at, self.shape),
            head_indices=tuple(
                at if self.head_indices is None else (self.head_indices[head] for head in at)
            ),
        )

    def weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the weights of some rows and keys, as the model used them, before dropout."""
        return self.source.weights(rows, keys)

    def log_weights(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the log-weights of some rows and keys from the scores, without underflow."""
        return self.source.log_weights(rows, keys)

    def scores(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Float[Tensor, "b h s r"]:
        """Compute the logits of some rows and keys; -inf where masked."""
        return self.source.scores(rows, keys)

    def visible(
        self, rows: OptionalIndex = None, keys: OptionalIndex = None
    ) -> Bool[Tensor, "b #s r"] | None:
        """Return which keys each query may see in at least one head; None if all see all.

        A very low additive score hides a key as -inf does, unless it hides every key of a row: then
        the model attends evenly, and all keys of the row count as visible. The same holds for the
        scores of a FlexAttention score_mod.
        """
        b, _, q, k = self.shape
        found = self.source.key_mask(rows, keys)
        low = self._low_scores(rows)
        if low is not None:  # of all keys: a row attends evenly only if all of them are hidden
            # Only finite low scores make a row attend evenly; a row of -inf has no weight at all.
            open_ = low > _hidden_threshold(low.dtype)
            open_ = open_ | ((~open_).all(dim=-1, keepdim=True) & ~low.isneginf())
            open_ = select_block(open_, ALL, keys, (q, k))
            given = isinstance(self.source, QKCall) and self.source.score_mod is None
            if given or not bool(open_.all()):  # avoids a synchronization for a bias
                found = open_ if found is None else found & open_
        if found is None:
            return None
        # A key is visible if one head may see it. A single column stands for all requested keys.
        found = found.any(dim=1) if found.shape[1] > 1 else found[:, 0]
        s, r = found.shape[-2:]
        width = _count(keys, k)
        return found.expand(b, s, width if r == 1 else r)

    def even_rows(self, rows: OptionalIndex = None) -> Bool[Tensor, "#b #s"] | None:
        """Return which queries have very low scores only, and so attend evenly; padding does.

        Args:
            rows: The queries; None for all.

        Returns:
            A mask of the queries; None if there are no such scores.
        """
        low = self._low_scores(rows)
        return None if low is None else (low <= _hidden_threshold(low.dtype)).all(dim=-1).all(dim=1)

    def _low_scores(self, rows: OptionalIndex) -> Float[Tensor, "#b #h #s #k"] | None:
        """The scores of some rows and all keys in which very low values hide keys, if any."""
        source = self.source
        if isinstance(source, MaterializedCall):
            return None if source.logits is None else source.scores(rows).detach()
        if source.score_mod is not None:
            return source.scores(rows).detach()
        return None if source.bias is None else select_block(source.bias, rows, ALL, self.shape[2:])


def _hidden_threshold(dtype: torch.dtype) -> float:
    """Return the score below which a key is hidden: models use -1e4, -1e9 or the lowest number.

    Distance biases may be as low in some heads; a key is hidden if it is so in all heads.
    """
    return max(torch.finfo(dtype).min / 2, -9e3)


def select_block(
    values: Tensor, rows: OptionalIndex, keys: OptionalIndex, sizes: tuple[int, int]
) -> Tensor:
    """Select rows and keys of a tensor that broadcasts to (b, h, q, k)."""
    # An axis of size 1 broadcasts, so it is not indexed.
    values = values.reshape((1,) * (4 - values.ndim) + tuple(values.shape))
    if values.shape[2] == sizes[0] and sizes[0] > 1:
        values = take_positions(values, rows, 2)
    if values.shape[3] == sizes[1] and sizes[1] > 1:
        values = take_positions(values, keys, 3)
    return values


def _select_heads(
    given: Tensor | None, at: Sequence[int], shape: tuple[int, int, int, int]
) -> Tensor | None:
    """Values (b g k d) or outputs (b h q d) of some heads; None if they have no head axis."""
    b, h, _, _ = shape
    if given is None or given.ndim != 4 or given.shape[0] != b or h % given.shape[1]:
        return None
    # Values may have fewer heads than queries; for outputs the divisor is 1.
    return given[:, torch.tensor(at, device=given.device) // (h // given.shape[1])]


def _mask_of_heads(values: Tensor | None, at: Tensor) -> Tensor | None:
    if values is None or values.ndim < 3 or values.shape[-3] == 1:
        return values
    return values.index_select(values.ndim - 3, at)


def _positions(index: OptionalIndex, length: int, device: torch.device) -> Int[Tensor, "b n"]:
    if not isinstance(index, Tensor):
        return torch.arange(length, device=device)[ALL if index is None else index][None]
    return index.to(device).clamp_min(0)


def _count(index: OptionalIndex, length: int) -> int:
    if isinstance(index, Tensor):
        return index.shape[1]
    return len(range(length)[ALL if index is None else index])


def default_scale(query: Tensor) -> float:
    """Return the default scale of SDPA, one over the square root of the head size."""
    return 1 / math.sqrt(query.shape[-1])
