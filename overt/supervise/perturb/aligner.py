"""Attention aligned by disturbing it: find what a word needs by doing harm, then look there more.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, section 4. A mask network a
layer disturbs cross-attention so that captions get as bad as they can while little is disturbed
(eq. 4). What it disturbs is taken to matter and is strengthened (eq. 5-10) while the captioner
learns and writes. The model is edited from outside by `watch`: any encoder-decoder will do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.seen import Layouts, Seen
from overt.capture.watching import watch
from overt.supervise.loss import Loss
from overt.supervise.perturb.fusing import (
    Average,
    Decay,
    Fuse,
    Fusion,
    Place,
    Weights,
    enhance,
    gate,
    head_mean,
    normalised,
    perturb,
    shared_gate,
    uniform,
)
from overt.supervise.perturb.masks import MakeMask, linear, query_key

CAPTIONER, MASKS = "captioner", "masks"  # the two sets of parameters, which never touch
LAMBDA = 0.035  # the paper's; with the mean of squares 0.03 to 1 has to be tried, see `mean_square`

Fused = Callable[[Call, Weights, Weights], Weights]
Masking = Callable[[Call], Weights]
Finish = Callable[[Fused, Masking], Edit | Bias]  # how a fusion is put into the model


# --- how a fusion is put into the model


def renormalised(fuse: Fused, mask: Masking) -> Bias:
    """Weights that are made to sum to one after the fusion: a bias, on the fused kernel.

    A fusion grows with its inputs, so what it makes of (1, exp(1 - m)) is the factor on attention,
    and its logarithm, between 0 and 1, is what is added to scores.
    """

    def bias(call: Call) -> Tensor:
        strong = (1 - mask(call)).exp()
        return fuse(call, torch.ones_like(strong), strong).log()

    return Bias(bias)


def as_printed(fuse: Fused, mask: Masking) -> Edit:
    """Weights as the fusion gives them: up to e times too much of everything."""
    return lambda call, weights: fuse(call, weights, enhance(weights, mask(call).to(weights)))


def enhanced_first(fuse: Fused, mask: Masking) -> Edit:
    """Enhanced weights are made to sum to one before the fusion, and the result is left as it is.

    This is no bias: a key may also lose by it. Max pooling is only then not what is enhanced.
    """
    return lambda call, weights: fuse(
        call, weights, normalised(enhance(weights, mask(call).to(weights)))
    )


def detached(mask: Weights) -> Weights:
    """The mask as a supervisor: the captioner cannot learn to change it."""
    return mask.detach()


def attached(mask: Weights) -> Weights:
    """The mask as one more path from queries and keys to captions (the code of Lu et al.)."""
    return mask


# --- how much was disturbed

Penalty = Callable[[Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]], Loss]


def mean_square(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """`(1 - m)^2`, its mean over layers, heads, words and regions.

    The mean does not depend on how many regions there are; lambda is then on another scale than the
    paper's: watch the mean of the masks.
    """
    total = torch.stack([((1 - m.float()) ** 2).where(seen, 0).sum() for m, seen in masks]).sum()
    return Loss(total, torch.stack([seen.sum() for _, seen in masks]).sum())


def square_norm(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """`||1 - m||^2` of every word, layer and head (eq. 4), its mean over these."""
    return replace(
        mean_square(masks), count=torch.stack([seen.any(-1).sum() for _, seen in masks]).sum()
    )


def norm_of_all(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """`||1 - m||` of everything at once, not squared, divided by the keys there are (Lu et al.).

    It does not split into rows, so batches cannot be accumulated under it.
    """
    whole = mean_square(masks)
    keys = torch.stack([seen.sum(-1).amax() for _, seen in masks]).amax().clamp_min(1)
    return Loss((whole.total + 1e-12).sqrt() / keys, torch.ones_like(keys), batch_level=True)


# --- what was seen


@dataclass(frozen=True)
class MaskReport:
    """The masks of one layer: their mean, and how far those of one word differ from each other.

    Masks that are all alike say nothing: renormalised, aligned attention is then plain attention.
    """

    name: str
    mean: float
    spread: float

    @property
    def collapsed(self) -> bool:
        """Whether the masks of a word are all the same, near 0, near 1 or anywhere."""
        return self.spread < 0.01

    @property
    def advice(self) -> str:
        """What to do about masks that have collapsed, in a sentence; nothing where they have not.

        A large lambda leaves attention as it is and a small one disturbs all of it (section 5.3).
        """
        if not self.collapsed:
            return ""
        if self.mean > 0.95:
            return f"{self.name} disturbs nothing: lower lambda, or give masks more steps."
        if self.mean < 0.05:
            return f"{self.name} disturbs every region: raise lambda."
        return (
            f"{self.name} disturbs all regions of a word alike, by {1 - self.mean:.2f}: the masks "
            "have learned nothing of regions; change lambda, or their rate."
        )


@dataclass(eq=False)
class Pass:
    """One use of a model under masks: the masks by layer, and what was seen of attention.

    `calls` are those of the model before they were changed, `seen` what became of them.
    """

    masks: dict[str, list[Weights]] = field(default_factory=dict)
    visible: dict[str, list[Bool[Tensor, "b h q k"]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    seen: Seen | None = None

    def before(self, layout: Layouts | None = None) -> AttentionMap:
        """The attention of every layer as it was before masks changed it, in the same pass.

        `layout` is what its words and regions are, as `watch` takes it.
        """
        return self._called(self.calls, layout)

    def after(self, layout: Layouts | None = None) -> AttentionMap:
        """The attention of every layer with which the model went on."""
        return self._called([] if self.seen is None else self.seen.calls, layout)

    def disturbance(self, layout: Layouts | None = None) -> AttentionMap:
        """`1 - m` of every layer: what the masks hold to matter, amounts from 0 to 1.

        Of two masks of one word the smaller one hides more, so this ranks regions as attention is
        meant to.
        """
        like = self.before(layout)
        masks = torch.stack([mask for _, (mask,) in self.masks.items()], dim=1)
        hidden = rearrange(~like.visible, "b q k -> b 1 1 q k")
        values = (1 - masks).masked_fill(hidden, 0)
        return replace(like, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)

    def _called(self, calls: Sequence[Call], layout: Layouts | None) -> AttentionMap:
        if len(calls) != len(self.masks) or not calls:
            raise ValueError(
                f"{len(calls)} calls of {len(self.masks)} layers do not stack: read a pass in "
                "which the model was run once, after its block"
            )
        return Seen(calls, layout).map()

    def entries(
        self, rows: Bool[Tensor, "b q"] | None = None
    ) -> list[tuple[Weights, Bool[Tensor, "b h q k"]]]:
        """Every mask and which of its entries count: keys that are seen, by the words of `rows`."""
        found = []
        for name, masks in self.masks.items():
            for mask, seen in zip(masks, self.visible[name], strict=True):
                kept = seen if rows is None else seen & rows[:, None, :, None].to(seen.device)
                found.append((mask, kept))
        if not found:
            raise ValueError("no attention was masked: was the model run inside the block?")
        return found

    def penalty(self, rows: Bool[Tensor, "b q"] | None = None, norm: Penalty = mean_square) -> Loss:
        """How much was disturbed (eq. 4); `rows` are the words that are no padding."""
        return norm(self.entries(rows))

    @torch.no_grad()
    def report(self, rows: Bool[Tensor, "b q"] | None = None) -> tuple[MaskReport, ...]:
        """The masks of every layer in numbers."""
        found = []
        for name in self.masks:
            only = Pass({name: self.masks[name]}, {name: self.visible[name]})
            entries = [(m.float(), seen) for m, seen in only.entries(rows)]
            count = sum(int(seen.sum()) for _, seen in entries)
            total = sum(float(m.where(seen, 0).sum()) for m, seen in entries)
            spreads = torch.cat([_spread(m, seen) for m, seen in entries])
            found.append(
                MaskReport(name, total / max(1, count), float(spreads.mean()) if count else 0.0)
            )
        return tuple(found)


def _spread(mask: Weights, seen: Bool[Tensor, "b h q k"]) -> Float[Tensor, " n"]:
    """The standard deviation over keys, of every row that sees two or more."""
    count = seen.sum(dim=-1)
    mean = mask.where(seen, 0).sum(dim=-1) / count.clamp_min(1)
    square = ((mask - mean[..., None]) ** 2).where(seen, 0).sum(dim=-1)
    return (square / count.clamp_min(1)).sqrt()[count > 1]


# Where masks are noted. An edit must not hold the pass that holds what was seen under it: such a
# ring, with the graph of a whole step in it, would stay until it is searched for.
Noted = Callable[[], Pass | None]


def _nowhere() -> None:
    """No pass notes these masks."""


def crossings(model: nn.Module, run: Callable[[], Any]) -> dict[str, Place]:
    """The attention of a decoder to its encoder, by name, with sizes: `run()` runs the model once.

    >>> places = crossings(captioner, lambda: captioner(batch))  # doctest: +SKIP
    """
    with torch.no_grad(), watch(model) as seen:
        run()
    found: dict[str, Place] = {}
    for call in seen.calls:
        if not call.cross:
            continue
        query, key = _products(call)
        _, heads, _, width = query.shape
        found[call.name] = Place(heads, key.shape[1], width)
    if not found:
        names = [call.name for call in seen.calls]
        raise ValueError(f"no attention of this model looks at another sequence; it has {names}")
    return found


# --- the aligner


class Aligner(nn.Module):
    """A model whose cross-attention is aligned by mask networks of its own.

    `places` are its cross-attentions, from `crossings`. Calling it calls the model with aligned
    attention; if the model is a decoder, so is the aligner, and its steps show aligned attention.
    `fuse` makes the fusion of a layer (`max_pooling`, `moving_average`, `decay`, `gate`), `mask`
    its mask network, `average` is what disturbed attention is replaced by, `finish` how the fusion
    is put into the model, `through` whether captions may move the masks' inputs.

    There are two sets of parameters, `captioner_parameters` and `mask_parameters`, for two
    optimizers; `align` gives the losses of each. The gate belongs to the captioner.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Mapping[str, Place],
        fuse: Fuse = gate,
        mask: MakeMask = query_key,
        average: Average = uniform,
        finish: Finish = renormalised,
        through: Callable[[Weights], Weights] = detached,
        penalty: Penalty = mean_square,
    ) -> None:
        super().__init__()
        if not places:
            raise ValueError("an aligner needs places to align: see `crossings`")
        self.model, self.places = model, dict(places)
        self.average, self.finish, self.through = average, finish, through
        self.penalty = penalty
        self.masks = nn.ModuleDict({_key(name): mask(one) for name, one in places.items()})
        self.fusions = nn.ModuleDict({_key(name): fuse(one) for name, one in places.items()})
        self._stepping: watch | None = None

    # --- parameters

    def mask_parameters(self) -> list[nn.Parameter]:
        """What the mask networks learn."""
        return list(self.masks.parameters())

    def captioner_parameters(self) -> list[nn.Parameter]:
        """What the model learns, and the gates."""
        return [*self.model.parameters(), *self.fusions.parameters()]

    def advance(self, elapsed: float) -> None:
        """Say how far training is, in temperatures: for `decay`. Other fusions do not ask.

        With `1.5 * fraction of training` the last share of plain attention is exp(-1.5), 22 %.
        """
        for one in self.fusions.values():
            if isinstance(one, Decay):
                one.elapsed.fill_(elapsed)

    # --- running the model

    @contextmanager
    def aligned(self) -> Iterator[Pass]:
        """While this is open the model looks where masks say: for captions and their loss."""
        found = Pass()
        with watch(self.model, list(self.places), edit=self._aligning(ref(found))) as seen:
            found.seen = seen
            yield found

    @contextmanager
    def perturbed(self) -> Iterator[Pass]:
        """While this is open attention is disturbed: for the loss of the mask networks."""
        found = Pass()
        noted = ref(found)

        def edit(call: Call, weights: Weights) -> Weights:
            mask = self._mask(call, noted).to(weights)
            return perturb(weights, mask, self.average, call.visible())

        with watch(self.model, list(self.places), edit=edit) as seen:
            found.seen = seen
            yield found

    def edit(self) -> Edit | Bias:
        """What aligns, for a watcher of your own: `overt.capture.generate(model, edit=...)`."""
        inner = self._aligning(_nowhere)
        if isinstance(inner, Bias):
            make = inner.make
            return Bias(lambda call: make(call) if call.name in self.places else None)
        return lambda call, weights: inner(call, weights) if call.name in self.places else weights

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model says with aligned attention."""
        with self.aligned():
            return self.model(*inputs, **named)

    def _aligning(self, noted: Noted) -> Edit | Bias:
        def fuse(call: Call, weights: Weights, enhanced: Weights) -> Weights:
            fusion = self.fusions[_key(call.name)]
            assert isinstance(fusion, Fusion)
            return fusion(weights, enhanced, _products(call)[0].to(weights))

        return self.finish(fuse, lambda call: self.through(self._mask(call, noted)))

    def _mask(self, call: Call, noted: Noted) -> Weights:
        query, key = _products(call)
        network = self.masks[_key(call.name)]
        dtype = next(network.parameters(), query).dtype
        mask = network(query.to(dtype), key.to(dtype))
        found = noted()
        if found is not None:
            visible = call.visible()
            seen = mask.new_ones((), dtype=torch.bool) if visible is None else visible[:, None]
            found.calls.append(call)
            found.masks.setdefault(call.name, []).append(mask)
            found.visible.setdefault(call.name, []).append(seen.expand_as(mask))
        return mask

    # --- the face of a decoder

    def encode(self, batch: Any) -> Any:
        """The features of a batch."""
        return self.model.encode(batch)  # type: ignore[operator]

    def start(self, features: Any) -> Any:
        """The state before the first token."""
        return self.model.start(features)  # type: ignore[operator]

    def step(self, state: Any, tokens: Tensor) -> tuple[Any, Any]:
        """The next token with aligned attention, which is what the output then shows."""
        if self._stepping is None:
            self._stepping = watch(
                *(self.model, list(self.places)),
                edit=self._aligning(_nowhere),
                each=lambda call: (call.weights(), call.kind),
            )
        with self._stepping as seen:
            output, after = self.model.step(state, tokens)  # type: ignore[operator]
        weights = torch.stack([one for one, _ in seen.kept], dim=1)
        own = output.attention[0]
        looked = replace(own, values=weights, form=Form.PLAIN, kind=seen.kept[0][1])
        return replace(output, attention=(looked, *output.attention[1:])), after

    def __getstate__(self) -> dict[str, Any]:
        """A copy watches its own model."""
        return {**self.__dict__, "_stepping": None}


def paper(regions: int) -> dict[str, Any]:
    """The choices of the paper as it is printed: `Aligner(model, places, **paper(regions=100))`.

    Masks are linear in the state, for at most `regions` regions, disturbed attention is the mean of
    heads, nothing is renormalised, the penalty is the square of the norm.
    """
    return {
        "mask": linear(regions),
        "average": head_mean,
        "finish": as_printed,
        "penalty": square_norm,
    }


def lu2021() -> dict[str, Any]:
    """The choices of the code of Lu et al. (2021): `Aligner(model, places, **lu2021())`.

    Masks from queries and keys, a uniform average (here without padding), nothing renormalised, a
    gate for all heads of a layer, masks as one more path, and the norm of everything, not squared.
    """
    return {
        "fuse": shared_gate,
        "mask": query_key,
        "average": uniform,
        "finish": as_printed,
        "through": attached,
        "penalty": norm_of_all,
    }


@dataclass(frozen=True, eq=False)
class Alignment:
    """The losses of both sets of parameters, and the two passes they come from."""

    losses: dict[str, dict[str, Loss]]
    fused: Pass
    disturbed: Pass


def align(
    aligner: Aligner,
    task: Callable[[], Loss],
    strength: float = LAMBDA,
    rows: Bool[Tensor, "b q"] | None = None,
) -> Alignment:
    """Run the model twice: aligned for its own loss (eq. 11), disturbed for the masks' (eq. 4).

    `task()` runs the model and gives its loss; what does not depend on cross-attention, such as the
    encoder, can be computed before. `strength` is lambda, `rows` the words that are no padding. The
    losses go to `fit` as they are: each set's backward pass is restricted to its own parameters.
    """
    with aligner.aligned() as fused:
        loss = task()
    with aligner.perturbed() as disturbed:
        harm = task()
    penalty = disturbed.penalty(rows, aligner.penalty)
    return Alignment(
        {CAPTIONER: {"caption": loss}, MASKS: {"harm": -1.0 * harm, "penalty": strength * penalty}},
        fused,
        disturbed,
    )


def _key(name: str) -> str:
    """The name of a module as a name in a ModuleDict, which may have no dots."""
    return name.replace(".", "/") or "model"


def _products(call: Call) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b g k d"]]:
    """The queries and keys behind a call, also where the model writes its attention out."""
    query, key = call.source.query, call.source.key
    if query is None or key is None:
        raise ValueError(
            f"the queries and keys of {call.name or 'the model'} are not seen: its weights were "
            "edited before, or it writes attention out in a way of its own; use the model with "
            "scaled_dot_product_attention (attn_implementation='sdpa')"
        )
    return query, key
