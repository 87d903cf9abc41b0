"""One attention call as it was made: queries, keys and everything that shaped the scores.

A call can give any part of its weights without the rest: a block of s rows and r keys costs s x r
scores, whatever the length of the sequence. Arithmetic is in float32 at least, outside autocast.

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
from overt.capture.products import ALL, Index, Tap, take, unrounded

# score_mod of FlexAttention: (score, b, h, q, k) -> score, on tensors that broadcast
Modify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Given = Index | None  # all of them for None; a slice as a default breaks graphs of PyTorch 2.11
Allow = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Route(Enum):
    """How a call was seen."""

    SDPA = "scaled_dot_product_attention"
    FLEX = "flex_attention"
    INTERFACE = "overt attention interface"
    SOFTMAX = "softmax written out"


@dataclass(frozen=True, eq=False)
class Projected:
    """Weights that are the softmax of `query . key`, scaled, capped, biased and masked.

    Keys may have fewer heads than queries: each group serves several (grouped-query attention).
    `sinks` are learned scores of a key that has no value: they take mass and give nothing.
    """

    query: Float[Tensor, "b h q d"]
    key: Float[Tensor, "b g k d"]
    scale: float
    bias: Float[Tensor, "..."] | None = None
    allowed: Bool[Tensor, "..."] | None = None
    causal: bool = False  # query i sees keys 0 to i, as `is_causal` of SDPA has it
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None
    modify: Modify | None = None
    allow: Allow | None = None
    taps: tuple[Tap, ...] | None = None  # of queries and keys, where gradients may be brought

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        b, h, q, _ = self.query.shape
        return b, h, q, self.key.shape[2]

    @property
    def kind(self) -> Kind:
        """A probability, or what a sink leaves of one."""
        return Kind.PROBABILITY if self.sinks is None else Kind.SUBPROBABILITY

    @property
    def plain(self) -> bool:
        """Whether the scores are `query . key` with masks and biases, and nothing else."""
        return self.softcap is None and self.modify is None and self.allow is None

    def heads(self, chosen: Sequence[int]) -> "Projected":
        """The same call for some of its heads."""
        _, h, _, _ = self.shape
        g = self.key.shape[1]
        at = torch.tensor(list(chosen), device=self.query.device)
        if self.modify is not None or self.allow is not None:
            raise ValueError("heads of a call with a score function cannot be taken apart")
        return replace(
            self,
            query=self.query[:, at],
            key=self.key[:, at // (h // g)],
            taps=None,
            bias=_of_heads(self.bias, at),
            allowed=_of_heads(self.allowed, at),
            sinks=None if self.sinks is None else self.sinks[at],
        )

    def scores(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The logits of some rows and keys; -inf where a query may not look."""
        with unrounded(self.query.device):
            precise = torch.promote_types(self.query.dtype, torch.float32)
            query = take(self.query, rows, 2).to(precise)
            key = take(self.key, keys, 2).to(precise)
            g = key.shape[1]
            grouped = rearrange(query, "b (g n) s d -> b g n s d", g=g)
            scores = grouped @ rearrange(key, "b g r d -> b g 1 d r")
            # models written out scale the scores, and large scores show the difference
            scores = rearrange(scores, "b g n s r -> b (g n) s r") * self.scale
            return self.shaped(scores, rows, keys)

    def shaped(
        self, scores: Float[Tensor, "*l b h s r"], rows: Given, keys: Given
    ) -> Float[Tensor, "*l b h s r"]:
        """Scaled products after the cap, the biases and the masks of this call."""
        _, _, q, k = self.shape
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.modify is not None:
            scores = self.modify(scores, *self._places(rows, keys))
        if self.bias is not None:
            scores = scores + part_of(self.bias, rows, keys, (q, k)).to(scores.dtype)
        allowed = self.seen(rows, keys)
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def seen(self, rows: Given, keys: Given) -> Bool[Tensor, "#b #h #s #r"] | None:
        """Which keys the masks leave to each query; None when there is no mask."""
        _, _, q, k = self.shape
        masks = []
        if self.allowed is not None:
            masks.append(part_of(self.allowed, rows, keys, (q, k)))
        if self.causal:
            device = self.query.device
            i, j = _positions(rows, q, device), _positions(keys, k, device)
            masks.append(rearrange(i, "b s -> b 1 s 1") >= rearrange(j, "b r -> b 1 1 r"))
        if self.allow is not None:
            masks.append(self.allow(*self._places(rows, keys)))
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else torch.stack(torch.broadcast_tensors(*masks)).all(0)

    def log_total(self, rows: Given = None) -> Float[Tensor, "b h s 1"]:
        """The logarithm of what the weights of each row are divided by; 0 for an empty row."""
        scores = self.scores(rows)
        empty = scores.isneginf().all(dim=-1, keepdim=True)  # its gradient would be NaN
        total = torch.where(empty, 0, scores).logsumexp(dim=-1, keepdim=True)
        total = total.masked_fill(empty, -torch.inf)
        if self.sinks is not None:
            total = torch.logaddexp(total, rearrange(self.sinks, "h -> 1 h 1 1").to(total.dtype))
        return torch.where(total.isneginf(), 0, total)

    def log_weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The logarithms of the weights, each row divided by all of its keys."""
        scores = self.scores(rows, keys)
        if (keys is None or keys == ALL) and self.sinks is None:
            empty = scores.isneginf().all(dim=-1, keepdim=True)
            return torch.where(empty, 0, scores).log_softmax(-1).masked_fill(empty, -torch.inf)
        return scores - self.log_total(rows)

    def weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The weights of some rows and keys; zero in a row that sees nothing."""
        return self.log_weights(rows, keys).exp()

    def _places(self, rows: Given, keys: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, q, k = self.shape
        device = self.query.device
        return (
            torch.arange(b, device=device)[:, None, None, None],
            torch.arange(h, device=device)[None, :, None, None],
            rearrange(_positions(rows, q, device), "b s -> b 1 s 1"),
            rearrange(_positions(keys, k, device), "b r -> b 1 1 r"),
        )


@dataclass(frozen=True, eq=False)
class Written:
    """Weights that are there in full, as they met the values, before dropout.

    `logits` is what went into the softmax; None when something came after it (mixed heads, edits):
    then the weights themselves are all there is. The `dropped` last columns of the logits took part
    in the softmax and met no value (learned sinks). `query` and `key` are what the scores were the
    product of, scaled or not, where the model has multiplied just before its softmax.
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
        """Never: there are no queries and keys to multiply."""
        return False

    def heads(self, chosen: Sequence[int]) -> "Written":
        """The same call for some of its heads."""
        at = torch.tensor(list(chosen), device=self.used.device)
        logits, query, key = (
            None if one is None else one[:, at] for one in (self.logits, self.query, self.key)
        )
        return replace(self, used=self.used[:, at], logits=logits, query=query, key=key)

    def scores(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The logits of some rows and keys; logarithms of the weights when there are no logits."""
        if self.logits is None:
            return self.log_weights(rows, keys)
        kept = self.logits[..., : self.logits.shape[-1] - self.dropped]
        scores = take(take(kept, rows, 2), keys, 3)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def seen(self, rows: Given, keys: Given) -> Bool[Tensor, "#b #h #s #r"] | None:
        """None: a mask that was added into the scores is read off them."""
        return None

    def log_weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The logarithms of the weights, each row divided by all of its keys."""
        if self.kind is Kind.SIGNED:
            raise ValueError(
                "these weights were mixed after the softmax and have no logarithms; "
                "read `map` or `block`"
            )
        if self.logits is None:
            used = self.weights(rows, keys)
            return torch.where(used > 0, torch.where(used > 0, used, 1).log(), -torch.inf)
        scores = take(self.logits, rows, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        empty = scores.isneginf().all(dim=-1, keepdim=True)  # all hidden by an edit: zero, not NaN
        scores = torch.where(empty, 0, scores).log_softmax(-1).masked_fill(empty, -torch.inf)
        return take(scores[..., : scores.shape[-1] - self.dropped], keys, 3)

    def weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The weights of some rows and keys."""
        return take(take(self.used, rows, 2), keys, 3)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model: who made it, and what it can be asked.

    `name` is the module's name, `step` the number of the model's forward pass it belongs to.
    `value` and `output` are what the weights met and what came out, where the route shows them.
    `chosen` are the heads that were chosen by `heads`, None when all are here as they were.
    """

    name: str
    module: torch.nn.Module
    source: Projected | Written
    route: Route
    cross: bool
    step: int = 0
    value: Tensor | None = None
    output: Tensor | None = None
    chosen: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        """Who called, what kind of attention it is, its sizes, and how it was seen."""
        return f"Call({self.name or 'the model'}: {self.told()})"

    def told(self) -> str:
        """The call in a few words, whoever made it."""
        sizes = " ".join(f"{axis}={size}" for axis, size in zip("bhqk", self.shape, strict=True))
        kind = "cross" if self.cross else "self"
        return f"{kind}-attention, {sizes}, seen by {self.route.value}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        return self.source.shape

    @property
    def kind(self) -> Kind:
        """What a row of the weights is."""
        return self.source.kind

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key, counted from the end, as decoders with a cache do.

        Padding whose every key has a very low score is spread evenly, and says nothing.
        """
        if self.cross:
            return False
        _, _, q, k = self.shape
        if isinstance(self.source, Projected) and self.source.causal:
            return True
        if q == 1:
            return bool(getattr(self.module, "is_causal", False))
        seen = self.visible()
        if seen is None:
            return False
        later = torch.ones(q, k, dtype=torch.bool, device=seen.device).triu(k - q + 1)
        wrong = (seen & later).any(dim=-1)
        spread = self._spread()
        return not bool((wrong if spread is None else wrong & ~spread).any())

    def heads(self, chosen: Sequence[int]) -> "Call":
        """The same call for some of its heads, with their values and outputs where these have any.

        Outputs that were chosen are copies, by which no gradient of a target can be asked for.
        """
        h = self.shape[1]
        wrong = [head for head in chosen if not -h <= head < h]
        if wrong:
            raise ValueError(f"{self.name or 'the model'} has heads 0 to {h - 1}, not {wrong}")
        at = [head % h for head in chosen]
        return replace(
            self,
            source=self.source.heads(at),
            value=_chosen(self.value, at, self.shape),
            output=_chosen(self.output, at, self.shape),
            chosen=tuple(at if self.chosen is None else (self.chosen[head] for head in at)),
        )

    def weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The weights of some rows and keys, exactly as the model used them, before dropout."""
        return self.source.weights(rows, keys)

    def log_weights(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """Their logarithms, taken from the scores so that nothing underflows."""
        return self.source.log_weights(rows, keys)

    def scores(self, rows: Given = None, keys: Given = None) -> Float[Tensor, "b h s r"]:
        """The logits of some rows and keys; -inf where a query may not look."""
        return self.source.scores(rows, keys)

    def visible(self, rows: Given = None, keys: Given = None) -> Bool[Tensor, "b #s r"] | None:
        """Which keys each query may see, in any head; None when all see all.

        A mask that is added as a very low score hides a key as a mask of -inf does, unless it hides
        every key of a row: then the model spreads that row evenly, and all of it counts as seen. A
        score function of FlexAttention hides what it gives such a score.
        """
        b, _, q, k = self.shape
        found = self.source.seen(rows, keys)
        low = self._low(rows)
        if low is not None:  # of all keys: a row is spread evenly only if none is left
            open_ = low > _edge(low.dtype)
            open_ = open_ | ((~open_).all(dim=-1, keepdim=True) & ~low.isneginf())
            open_ = part_of(open_, ALL, keys, (q, k))
            given = isinstance(self.source, Projected) and self.source.modify is None
            if given or not bool(open_.all()):  # a bias is taken for a mask without asking it
                found = open_ if found is None else found & open_
        if found is None:
            return None
        found = found.any(dim=1) if found.shape[1] > 1 else found[:, 0]
        s, r = found.shape[-2:]
        width = _count(keys, k)
        return found.expand(b, s, width if r == 1 else r)

    def _low(self, rows: Given) -> Float[Tensor, "#b #h #s #k"] | None:
        """The scores of some rows and all keys from which hidden keys are read off, if any are."""
        source = self.source
        if isinstance(source, Written):
            return None if source.logits is None else source.scores(rows).detach()
        if source.modify is not None:
            return source.scores(rows).detach()
        return None if source.bias is None else part_of(source.bias, rows, ALL, self.shape[2:])

    def _spread(self) -> Bool[Tensor, "#b #q"] | None:
        """Which queries have nothing but very low scores; None when scores do not say."""
        low = self._low(ALL)
        return None if low is None else (low <= _edge(low.dtype)).all(dim=-1).all(dim=1)


def _edge(dtype: torch.dtype) -> float:
    """The score below which a key is hidden: models write -1e4, -1e9 or the lowest number.

    Biases by distance may go as low in some heads; a key is hidden when it is so in all.
    """
    return max(torch.finfo(dtype).min / 2, -9e3)


def part_of(values: Tensor, rows: Given, keys: Given, sizes: tuple[int, int]) -> Tensor:
    """The rows and keys of something that broadcasts to (b, h, q, k)."""
    values = values.reshape((1,) * (4 - values.ndim) + tuple(values.shape))
    if values.shape[2] == sizes[0] and sizes[0] > 1:
        values = take(values, rows, 2)
    if values.shape[3] == sizes[1] and sizes[1] > 1:
        values = take(values, keys, 3)
    return values


def _chosen(
    given: Tensor | None, at: Sequence[int], shape: tuple[int, int, int, int]
) -> Tensor | None:
    """Values (b g k d) or outputs (b h q d) of some heads; None where heads cannot be told."""
    b, h, _, _ = shape
    if given is None or given.ndim != 4 or given.shape[0] != b or h % given.shape[1]:
        return None
    return given[:, torch.tensor(at, device=given.device) // (h // given.shape[1])]


def _of_heads(values: Tensor | None, at: Tensor) -> Tensor | None:
    if values is None or values.ndim < 3 or values.shape[-3] == 1:
        return values
    return values.index_select(values.ndim - 3, at)


def _positions(index: Given, length: int, device: torch.device) -> Int[Tensor, "b n"]:
    if not isinstance(index, Tensor):
        return torch.arange(length, device=device)[ALL if index is None else index][None]
    return index.to(device).clamp_min(0)


def _count(index: Given, length: int) -> int:
    if isinstance(index, Tensor):
        return index.shape[1]
    return len(range(length)[ALL if index is None else index])


def default_scale(query: Tensor) -> float:
    """What SDPA multiplies by when it is not told: one over the root of the feature size."""
    return 1 / math.sqrt(query.shape[-1])
