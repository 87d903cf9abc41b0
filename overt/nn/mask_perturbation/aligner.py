"""Attention alignment: find the regions a word needs by perturbation, then enhance them.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, section 4. One mask network
per layer perturbs cross-attention so that captions get as bad as possible while little is
perturbed (eq. 4). What it perturbs is taken as relevant and is enhanced (eq. 5-10) while the
captioner trains and generates. The model is edited from outside by `watch`: any encoder-decoder
works.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind
from overt.capture.call import Call
from overt.capture.edits import Bias, Edit
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace, Layouts
from overt.errors import UserError
from overt.losses.loss import Loss
from overt.nn import checkpoint
from overt.nn.backbone_attention.backbones import build_model, describe_model
from overt.nn.mask_perturbation.fusion import (
    AttentionShape,
    AverageAttention,
    DecayFusion,
    Fusion,
    MakeFusion,
    Weights,
    decay,
    enhance,
    gate,
    head_mean,
    max_pooling,
    moving_average,
    normalize_rows,
    perturb,
    shared_gate,
    uniform_average,
    zero_average,
)
from overt.nn.mask_perturbation.gradient_scope import RestrictGradient, restrict_gradient
from overt.nn.mask_perturbation.mask_networks import MakeMask, linear, query_key

CAPTIONER, MASKS = "captioner", "masks"  # the two disjoint sets of parameters
LAMBDA = 0.035  # the paper's; with `mean_square`, try 0.03 to 1

FuseCall = Callable[[Call, Weights, Weights], Weights]
MaskCall = Callable[[Call], Weights]
InsertFusion = Callable[[FuseCall, MaskCall], Edit | Bias]


# --- inserting a fusion into the model


def fuse_renormalized(fuse: FuseCall, mask: MaskCall) -> Bias:
    """Renormalise the weights after the fusion: a bias on the fused kernel.

    A fusion is homogeneous, so its value at (1, exp(1 - m)) is the factor on attention. The
    logarithm of the factor, between 0 and 1, is added to the scores.

    Args:
        fuse: The fusion of plain and enhanced weights.
        mask: Returns the mask of a call.

    Returns:
        An edit for `overt.watch`.

    Example:
        >>> type(fuse_renormalized(lambda call, plain, strong: strong, lambda call: 0)).__name__
        'Bias'
    """

    # softmax(s + log f) is a f renormalised, so adding log f to the scores is exact and the fused
    # kernel never has to materialise the weights
    def bias(call: Call) -> Tensor:
        strong = (1 - mask(call)).exp()
        return fuse(call, torch.ones_like(strong), strong).log()

    return Bias(bias)


def fuse_as_published(fuse: FuseCall, mask: MaskCall) -> Edit:
    """Use the weights of the fusion without normalisation: rows sum to as much as e.

    Args:
        fuse: The fusion of plain and enhanced weights.
        mask: Returns the mask of a call.

    Returns:
        An edit for `overt.watch`.

    Example:
        >>> weights = torch.tensor([[[[0.5, 0.5]]]])
        >>> edit = fuse_as_published(lambda call, plain, strong: strong, lambda call: weights * 0)
        >>> edit(None, weights)  # 0.5 e
        tensor([[[[1.3591, 1.3591]]]])
    """
    # an edit, not a bias: unnormalised rows cannot come out of a softmax
    return lambda call, weights: fuse(call, weights, enhance(weights, mask(call).to(weights)))


def fuse_enhanced_normalized(fuse: FuseCall, mask: MaskCall) -> Edit:
    """Normalise the enhanced weights before the fusion, and not the result.

    This is not a bias: a key may also lose weight. Only then does max pooling differ from the
    enhanced weights.

    Args:
        fuse: The fusion of plain and enhanced weights.
        mask: Returns the mask of a call.

    Returns:
        An edit for `overt.watch`.

    Example:
        >>> weights, mask = torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[[0.0, 1.0]]]])
        >>> edit = fuse_enhanced_normalized(lambda call, plain, strong: strong, lambda call: mask)
        >>> edit(None, weights)
        tensor([[[[0.7311, 0.2689]]]])
    """
    return lambda call, weights: fuse(
        call, weights, normalize_rows(enhance(weights, mask(call).to(weights)))
    )


def detach_mask(mask: Weights) -> Weights:
    """Detach the mask: the captioner cannot learn to change it.

    Args:
        mask: The mask of a layer.

    Returns:
        The mask.

    Example:
        >>> mask = torch.rand(1, 1, 1, 2, requires_grad=True)
        >>> detach_mask(mask).requires_grad
        False
    """
    return mask.detach()


def keep_mask_gradient(mask: Weights) -> Weights:
    """Keep the mask as another path from queries and keys to captions (the code of Lu et al.).

    Args:
        mask: The mask of a layer.

    Returns:
        The mask.

    Example:
        >>> mask = torch.rand(1, 1, 1, 2, requires_grad=True)
        >>> keep_mask_gradient(mask).requires_grad
        True
    """
    return mask


# --- penalty on the perturbation

Penalty = Callable[[Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]], Loss]


def mean_square(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """Compute `(1 - m)^2`, averaged over layers, heads, words and regions.

    The mean does not depend on the number of regions, but puts lambda on another scale than the
    paper's: check the mean of the masks.

    Args:
        masks: The masks of each layer, with the keys that each word may see.

    Returns:
        The penalty.

    Example:
        >>> masks = [(torch.full((1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 2, dtype=torch.bool))]
        >>> mean_square(masks).mean()
        tensor(0.2500)
    """
    # hidden keys are left out: the code of Lu et al. counts padding as fully perturbed
    total = torch.stack([((1 - m.float()) ** 2).where(seen, 0).sum() for m, seen in masks]).sum()
    return Loss(total, torch.stack([seen.sum() for _, seen in masks]).sum())


def square_norm(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """Compute `||1 - m||^2` of every word, layer and head (eq. 4), and their mean.

    Args:
        masks: The masks of each layer, with the keys that each word may see.

    Returns:
        The penalty.

    Example:
        >>> masks = [(torch.full((1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 2, dtype=torch.bool))]
        >>> square_norm(masks).mean()
        tensor(0.5000)
    """
    # the same sum as `mean_square`, divided by rows instead of entries: the squared norm of a row
    return replace(
        mean_square(masks), count=torch.stack([seen.any(-1).sum() for _, seen in masks]).sum()
    )


def global_norm(masks: Sequence[tuple[Weights, Bool[Tensor, "b h q k"]]]) -> Loss:
    """Compute `||1 - m||` over everything, not squared, divided by the number of keys (Lu et al.).

    It does not decompose into rows, so gradient accumulation does not work with it.

    Args:
        masks: The masks of each layer, with the keys that each word may see.

    Returns:
        The penalty.

    Example:
        >>> masks = [(torch.full((1, 1, 1, 2), 0.5), torch.ones(1, 1, 1, 2, dtype=torch.bool))]
        >>> global_norm(masks).mean()  # sqrt(0.5) / 2
        tensor(0.3536)
    """
    whole = mean_square(masks)
    # Lu et al. divide by the source length: here the longest visible row
    keys = torch.stack([seen.sum(-1).amax() for _, seen in masks]).amax().clamp_min(1)
    # 1e-12: the gradient of sqrt is infinite at 0, which all masks at 1 would reach
    return Loss((whole.total + 1e-12).sqrt() / keys, torch.ones_like(keys), batch_level=True)


# --- passes


@dataclass(frozen=True)
class MaskReport:
    """Statistics of the masks of one layer: their mean, and their spread over the keys of a word.

    Constant masks are useless: after renormalisation, aligned attention equals plain attention.

    Args:
        name: The name of the layer.
        mean: The mean of the masks.
        spread: Their spread over the keys of a word.

    Example:
        >>> report = MaskReport("decoder.0.cross", mean=0.99, spread=0.001)
        >>> report.collapsed, report.advice
        (True, 'decoder.0.cross perturbs nothing: lower lambda, or train the masks longer.')
    """

    name: str
    mean: float
    spread: float

    @property
    def collapsed(self) -> bool:
        """Whether the masks of a word are all the same."""
        return self.spread < 0.01

    @property
    def advice(self) -> str:
        """What to do about collapsed masks; empty if they are not collapsed.

        A large lambda leaves attention unchanged, and a small one perturbs all of it (section 5.3).
        """
        if not self.collapsed:
            return ""
        if self.mean > 0.95:
            return f"{self.name} perturbs nothing: lower lambda, or train the masks longer."
        if self.mean < 0.05:
            return f"{self.name} perturbs every region: raise lambda."
        return (
            f"{self.name} perturbs all regions of a word equally, by {1 - self.mean:.2f}: change "
            "lambda or the learning rate of the masks."
        )


@dataclass(eq=False)
class AlignmentPass:
    """One forward pass with masks: the masks by layer, and the captured attention.

    Args:
        masks: masks of each layer.
        visible: visible keys of each mask.
        calls: attention calls before they are edited.
        trace: attention after the edit.

    Example:
        >>> from overt.nn import CachedRegionEncoder, Captioner, CaptionerSizes
        >>> from overt.testing import toy_batch
        >>> sizes = CaptionerSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> model = Captioner(sizes, CachedRegionEncoder(width=4)).eval()
        >>> batch = replace(toy_batch(3), features=torch.rand(3, 5, 4))
        >>> aligner = Aligner(model, find_cross_attention(model, lambda: model(batch)))
        >>> with aligner.aligned() as found:
        ...     output = aligner.model(batch)
        >>> found.before().weights.shape, found.after().weights.shape
        (torch.Size([3, 1, 2, 5, 5]), torch.Size([3, 1, 2, 5, 5]))
    """

    masks: dict[str, list[Weights]] = field(default_factory=dict)
    visible: dict[str, list[Bool[Tensor, "b h q k"]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    trace: AttentionTrace | None = None

    def before(self, layout: Layouts | None = None) -> AttentionMap:
        """Return the attention of all layers before the edit, in the same pass.

        Args:
            layout: layout of words and regions, as for `watch`.
        """
        return self._called(self.calls, layout)

    def after(self, layout: Layouts | None = None) -> AttentionMap:
        """Return the attention of all layers after the edit."""
        return self._called([] if self.trace is None else self.trace.calls, layout)

    def perturbation(self, layout: Layouts | None = None) -> AttentionMap:
        """Return `1 - m` of all layers, from 0 to 1: the relevance found by the masks.

        Of two masks of one word the smaller hides more, so this ranks regions like attention.
        """
        like = self.before(layout)
        # `_called` has checked that every layer attended once, so each list has exactly one mask
        masks = torch.stack([mask for _, (mask,) in self.masks.items()], dim=1)
        hidden = rearrange(~like.visible, "b q k -> b 1 1 q k")
        # Kind.AMOUNT: 1 - m is between 0 and 1, but its rows do not sum to one
        values = (1 - masks).masked_fill(hidden, 0)
        return replace(like, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)

    def _called(self, calls: Sequence[Call], layout: Layouts | None) -> AttentionMap:
        if len(calls) != len(self.masks) or not calls:
            raise ValueError(
                f"cannot stack {len(calls)} calls of {len(self.masks)} layers: read a pass in "
                "which the model ran once, after its block"
            )
        return AttentionTrace(calls, layout).map()

    def entries(
        self, rows: Bool[Tensor, "b q"] | None = None
    ) -> list[tuple[Weights, Bool[Tensor, "b h q k"]]]:
        """Return every mask with its counted entries: visible keys, in the given rows."""
        found = []
        for name, masks in self.masks.items():
            for mask, seen in zip(masks, self.visible[name], strict=True):
                kept = seen if rows is None else seen & _words_of(rows, seen)
                found.append((mask, kept))
        if not found:
            raise ValueError("no attention was masked: run the model inside the block")
        return found

    def penalty(self, rows: Bool[Tensor, "b q"] | None = None, norm: Penalty = mean_square) -> Loss:
        """Compute the size of the perturbation (eq. 4).

        Args:
            rows: words that are not padding.
            norm: how to measure it.
        """
        return norm(self.entries(rows))

    @torch.no_grad()
    def report(self, rows: Bool[Tensor, "b q"] | None = None) -> tuple[MaskReport, ...]:
        """Return statistics of the masks of every layer."""
        found = []
        for name in self.masks:
            only = AlignmentPass({name: self.masks[name]}, {name: self.visible[name]})
            entries = [(m.float(), seen) for m, seen in only.entries(rows)]
            count = sum(int(seen.sum()) for _, seen in entries)
            total = sum(float(m.where(seen, 0).sum()) for m, seen in entries)
            spreads = torch.cat([_std_over_keys(m, seen) for m, seen in entries])
            found.append(
                MaskReport(name, total / max(1, count), float(spreads.mean()) if count else 0.0)
            )
        return tuple(found)


def _words_of(rows: Tensor, seen: Bool[Tensor, "b h q k"]) -> Bool[Tensor, "b 1 q 1"]:
    """Return the rows for every head and key, checked."""
    expected = (seen.shape[0], seen.shape[2])
    if rows.dtype is not torch.bool or rows.shape != expected:
        raise ValueError(
            f"rows must be a bool mask of shape {expected}, one entry per query of the captured "
            f"cross-attention, got {str(rows.dtype).removeprefix('torch.')} of shape "
            f"{tuple(rows.shape)}"
        )
    return rows[:, None, :, None].to(seen.device)


def _std_over_keys(mask: Weights, seen: Bool[Tensor, "b h q k"]) -> Float[Tensor, " n"]:
    """Compute the standard deviation over keys of every row with two or more keys."""
    # rows with one visible key are left out: their spread is 0 whatever the mask does
    count = seen.sum(dim=-1)
    mean = mask.where(seen, 0).sum(dim=-1) / count.clamp_min(1)
    square = ((mask - mean[..., None]) ** 2).where(seen, 0).sum(dim=-1)
    return (square / count.clamp_min(1)).sqrt()[count > 1]


# Weak reference to a pass. The pass holds a trace made under the edit, so an edit that held the
# pass would form a cycle and keep the graph of a whole step alive until garbage collection.
PassRef = Callable[[], AlignmentPass | None]


def _no_pass() -> None:
    """Record the masks nowhere."""


def find_cross_attention(model: nn.Module, run: Callable[[], Any]) -> dict[str, AttentionShape]:
    """Find the cross-attention modules of a model with their shapes, by running it once.

    Args:
        model: an encoder-decoder.
        run: runs the model.

    Returns:
        The shape of each cross-attention module, by name.

    Raises:
        TypeError: `run` is not a function.
        ValueError: the model has no cross-attention.

    Example:
        >>> from overt.nn import CachedRegionEncoder, Captioner, CaptionerSizes
        >>> from overt.testing import toy_batch
        >>> sizes = CaptionerSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> model = Captioner(sizes, CachedRegionEncoder(width=4)).eval()
        >>> batch = replace(toy_batch(3), features=torch.rand(3, 5, 4))
        >>> find_cross_attention(model, lambda: model(batch))
        {'decoder.0.cross': AttentionShape(heads=2, groups=2, width=4)}
    """
    if not callable(run):
        raise TypeError(
            f"run must be a function, such as lambda: model(**inputs), got {type(run).__name__}"
        )
    with torch.no_grad(), watch(model) as trace:
        run()
    found: dict[str, AttentionShape] = {}
    for call in trace.calls:
        if not call.cross:
            continue
        query, key = _query_and_key(call)
        _, heads, _, width = query.shape
        found[call.name] = AttentionShape(heads, key.shape[1], width)
    if not found:
        names = [call.name for call in trace.calls]
        raise ValueError(f"the model has no cross-attention, only {names}")
    return found


# --- the aligner


_RunMask = Callable[[nn.Module, Tensor, Tensor], Weights]


def _trainable_mask(network: nn.Module, query: Tensor, key: Tensor) -> Weights:
    """Run a mask network with gradients."""
    mask: Tensor = network(query, key)
    return mask


def _frozen_mask(network: nn.Module, query: Tensor, key: Tensor) -> Weights:
    """Run a mask network without gradients on its parameters; its inputs keep theirs."""
    # functional_call with detached copies, not requires_grad_(False): the same parameters must keep
    # their gradient in the perturbed pass of the same step
    own = {name: one.detach() for name, one in network.named_parameters()}
    mask: Tensor = torch.func.functional_call(network, own, (query, key))
    return mask


class Aligner(nn.Module):
    """Model with cross-attention aligned by mask networks.

    Calling it runs the model with aligned attention. If the model is a `Decoder`, so is the
    aligner, and the output of its steps has aligned attention. There are two sets of parameters for
    two optimizers, `captioner_parameters` and `mask_parameters`; `align` returns the losses of
    each. The gate belongs to the captioner.

    Args:
        model: an encoder-decoder.
        places: its cross-attention modules, from `find_cross_attention`.
        fuse: makes the fusion of a layer: `max_pooling`, `moving_average`, `decay` or `gate`.
        mask: makes the mask network of a layer.
        average: replaces perturbed attention.
        finish: how the fusion is inserted into the model.
        through: whether captions can train the inputs of the masks.
        penalty: penalty on the perturbation.

    Raises:
        ValueError: `places` is empty.

    Example:
        >>> from overt.nn import CachedRegionEncoder, Captioner, CaptionerSizes
        >>> from overt.testing import toy_batch
        >>> sizes = CaptionerSizes(vocabulary=10, width=8, layers=2, heads=2, inner=16)
        >>> model = Captioner(sizes, CachedRegionEncoder(width=4)).eval()
        >>> batch = replace(toy_batch(3), features=torch.rand(3, 5, 4))
        >>> places = find_cross_attention(model, lambda: model(batch))
        >>> aligner = Aligner(model, places, fuse=max_pooling)
        >>> with aligner.aligned() as found:
        ...     output = aligner.model(batch)
        >>> found.perturbation().weights.shape  # 2 layers, 2 heads, 5 words, 5 regions
        torch.Size([3, 2, 2, 5, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        places: Mapping[str, AttentionShape],
        fuse: MakeFusion = gate,
        mask: MakeMask = query_key,
        average: AverageAttention = uniform_average,
        finish: InsertFusion = fuse_renormalized,
        through: Callable[[Weights], Weights] = detach_mask,
        penalty: Penalty = mean_square,
    ) -> None:
        super().__init__()
        if not isinstance(places, Mapping) or not places:
            got = "empty" if isinstance(places, Mapping) else f"a {type(places).__name__}"
            raise ValueError(f"places is {got}: pass the result of find_cross_attention")
        for what, choice in (("fuse", fuse), ("mask", mask)):
            if not callable(choice):
                raise TypeError(
                    f"{what} must be a function of overt.nn.mask_perturbation, not called, such as "
                    f"{what}=mask_perturbation.{'gate' if what == 'fuse' else 'query_key'}, got "
                    f"{choice!r}"
                )
        self.model, self.places = model, dict(places)
        self.average, self.finish, self.through = average, finish, through
        self.penalty = penalty
        chosen: tuple[Callable[..., Any], ...] = (fuse, mask, average, finish, through, penalty)
        self.choices = {what: _choice_name(one) for what, one in zip(_CHOICES, chosen, strict=True)}
        # masks and fusions are siblings of `model`, so that both sets of parameters stay disjoint
        self.masks = nn.ModuleDict({_key(name): mask(one) for name, one in places.items()})
        self.fusions = nn.ModuleDict({_key(name): fuse(one) for name, one in places.items()})
        # the capture session of `step`, reused for every word: opening one per word is slow
        self._stepping: watch | None = None

    # --- saving and loading

    def config(self) -> dict[str, Any]:
        """Return the description of the model, its places, and the names of the choices."""
        places = {name: asdict(place) for name, place in self.places.items()}
        described = describe_model(self.model)
        return {"kind": KIND, "model": described, "places": places, "choices": self.choices}

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the weights of the model, masks and fusions, and the config."""
        checkpoint.save(self, folder)

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, model: nn.Module | None = None, **choices: Any
    ) -> "Aligner":
        """Load an aligner written by `save_pretrained`, in eval mode.

        Args:
            folder: the saved folder.
            model: a custom model, if overt cannot build it.
            **choices: choices that are not plain functions of this package, such as
                `mask=linear(36)`.
        """

        def build(config: Mapping[str, Any]) -> "Aligner":
            made = build_model(config["model"]) if model is None else model
            places = {name: AttentionShape(**place) for name, place in config["places"].items()}
            return cls(made, places, **_restore_choices(config["choices"], choices))

        return checkpoint.load(build, folder)

    # --- parameters

    def mask_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the mask networks."""
        return list(self.masks.parameters())

    def captioner_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the model and the gates."""
        return [*self.model.parameters(), *self.fusions.parameters()]

    def advance(self, elapsed: float) -> None:
        """Set the training progress of `decay`, in temperatures; other fusions ignore it.

        With `1.5 * fraction of training` the final share of plain attention is exp(-1.5), 22 %.
        """
        for one in self.fusions.values():
            if isinstance(one, DecayFusion):
                one.elapsed.fill_(elapsed)

    # --- running the model

    @contextmanager
    def aligned(self, learn_masks: bool = True) -> Iterator[AlignmentPass]:
        """Run the model with aligned attention inside this context, for captions and their loss.

        Args:
            learn_masks: with `through=keep_mask_gradient`, whether the mask networks get a
                gradient.
        """
        found = AlignmentPass()
        run_mask = _trainable_mask if learn_masks else _frozen_mask
        edit = self._aligning(ref(found), run_mask)
        with watch(self.model, list(self.places), edit=edit) as trace:
            found.trace = trace
            yield found

    @contextmanager
    def perturbed(self) -> Iterator[AlignmentPass]:
        """Run the model with perturbed attention inside this context, for the loss of the masks."""
        found = AlignmentPass()
        # the weak reference: see PassRef
        noted = ref(found)

        def edit(call: Call, weights: Weights) -> Weights:
            mask = self._mask(call, noted).to(weights)
            # perturbed weights (eq. 3) are inserted as they are: the paper does not renormalise
            # them
            return perturb(weights, mask, self.average, call.visible())

        with watch(self.model, list(self.places), edit=edit) as trace:
            found.trace = trace
            yield found

    def edit(self) -> Edit | Bias:
        """Return the aligning edit, for `overt.capture.generate(model, edit=...)`."""
        inner = self._aligning(_no_pass)
        if isinstance(inner, Bias):
            # `generate` watches the whole model: leave its self-attention and encoder unchanged
            make = inner.make
            return Bias(lambda call: make(call) if call.name in self.places else None)
        return lambda call, weights: inner(call, weights) if call.name in self.places else weights

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model with aligned attention."""
        with self.aligned():
            return self.model(*inputs, **named)

    def _aligning(self, noted: PassRef, run_mask: _RunMask = _trainable_mask) -> Edit | Bias:
        # `detach_mask` or `keep_mask_gradient` acts here only: the perturbed pass needs the
        # gradient
        def fuse(call: Call, weights: Weights, enhanced: Weights) -> Weights:
            fusion = self.fusions[_key(call.name)]
            assert isinstance(fusion, Fusion)
            return fusion(weights, enhanced, _query_and_key(call)[0].to(weights))

        return self.finish(fuse, lambda call: self.through(self._mask(call, noted, run_mask)))

    def _mask(self, call: Call, noted: PassRef, run_mask: _RunMask = _trainable_mask) -> Weights:
        query, key = _query_and_key(call)
        network = self.masks[_key(call.name)]
        # under autocast queries may be bfloat16 while the mask network is float32; a network
        # without parameters (RandomMask) takes the dtype of the queries
        dtype = next(network.parameters(), query).dtype
        mask = run_mask(network, query.to(dtype), key.to(dtype))
        found = noted()
        if found is not None:
            visible = call.visible()
            seen = mask.new_ones((), dtype=torch.bool) if visible is None else visible[:, None]
            found.calls.append(call)
            found.masks.setdefault(call.name, []).append(mask)
            found.visible.setdefault(call.name, []).append(seen.expand_as(mask))
        return mask

    # --- captions

    def generate(self, *inputs: Any, **named: Any) -> Any:
        """Run `model.generate` with aligned attention, for models of Hugging Face."""
        with self.aligned(learn_masks=False):
            return self.model.generate(*inputs, **named)  # type: ignore[operator]

    # --- the Decoder protocol

    def encode(self, batch: Any) -> Any:
        """Return the features of a batch."""
        return self.model.encode(batch)  # type: ignore[operator]

    def start(self, features: Any) -> Any:
        """Return the state before the first token."""
        return self.model.start(features)  # type: ignore[operator]

    def step(self, state: Any, tokens: Tensor) -> tuple[Any, Any]:
        """Run one step with aligned attention, which the output contains."""
        if self._stepping is None:
            self._stepping = watch(
                *(self.model, list(self.places)),
                edit=self._aligning(_no_pass),
                each=lambda call: (call.weights(), call.kind),
            )
        with self._stepping as trace:
            output, after = self.model.step(state, tokens)  # type: ignore[operator]
        weights = torch.stack([one for one, _ in trace.results], dim=1)
        # the model's own map is computed from queries and keys, so it does not know of the edit
        own = output.attention[0]
        aligned = replace(own, values=weights, form=Form.PLAIN, kind=trace.results[0][1])
        return replace(output, attention=(aligned, *output.attention[1:])), after

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the capture session: a copy captures its own model."""
        return {**self.__dict__, "_stepping": None}


KIND = "aligned"  # identifies the folder in config.json
_CHOICES = ("fuse", "mask", "average", "finish", "through", "penalty")
# The keys are written to config.json: they stay when a function is renamed.
_KNOWN: dict[str, Callable[..., Any]] = {
    "max_pooling": max_pooling,
    "moving_average": moving_average,
    "decay": decay,
    "gate": gate,
    "shared_gate": shared_gate,
    "query_key": query_key,
    "uniform": uniform_average,
    "head_mean": head_mean,
    "nothing": zero_average,
    "renormalised": fuse_renormalized,
    "as_printed": fuse_as_published,
    "enhanced_first": fuse_enhanced_normalized,
    "detached": detach_mask,
    "attached": keep_mask_gradient,
    "mean_square": mean_square,
    "square_norm": square_norm,
    "norm_of_all": global_norm,
}


def _choice_name(choice: Callable[..., Any]) -> str:
    """Return the saved name of a choice: a key of `_KNOWN`, or its qualified name."""
    for name, known in _KNOWN.items():
        if known is choice:
            return name
    return str(getattr(choice, "__qualname__", repr(choice)))


def _restore_choices(saved: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions of a saved aligner: the given ones, else those of this package."""
    found = {}
    for what in _CHOICES:
        name = str(saved[what])
        choice = given.get(what, _KNOWN.get(name))
        if choice is None or _choice_name(choice) != name:
            raise UserError(
                f"the aligner was saved with {what}={name}, got "
                f"{'nothing' if choice is None else _choice_name(choice)}; pass the same function "
                f"to Aligner.from_pretrained(folder, {what}=...)."
            )
        found[what] = choice
    return found


def published_choices(regions: int) -> dict[str, Any]:
    """Return the choices of the paper: `Aligner(model, places, **published_choices(regions=100))`.

    Masks are linear in the state, for at most `regions` regions; perturbed attention is the mean
    over heads; nothing is renormalised; the penalty is the squared norm.

    Args:
        regions: The largest number of regions.

    Returns:
        Arguments of `Aligner`.

    Example:
        >>> sorted(published_choices(regions=100))
        ['average', 'finish', 'mask', 'penalty']
    """
    return {
        "mask": linear(regions),
        "average": head_mean,
        "finish": fuse_as_published,
        "penalty": square_norm,
    }


def lu2021_choices() -> dict[str, Any]:
    """Return the choices of the code of Lu et al. (2021), as arguments of `Aligner`.

    Masks from queries and keys, a uniform average (here without padding), no renormalisation, one
    gate for all heads of a layer, masks with a gradient, and the norm of everything, not squared.

    Returns:
        Arguments of `Aligner`.

    Example:
        >>> sorted(lu2021_choices())
        ['average', 'finish', 'fuse', 'mask', 'penalty', 'through']
    """
    return {
        "fuse": shared_gate,
        "mask": query_key,
        "average": uniform_average,
        "finish": fuse_as_published,
        "through": keep_mask_gradient,
        "penalty": global_norm,
    }


@dataclass(frozen=True, eq=False)
class Alignment:
    """Losses of both sets of parameters, and the two passes behind them.

    Args:
        losses: The losses of the captioner and of the masks.
        aligned: The pass with aligned attention.
        perturbed: The pass with perturbed attention.

    Example:
        >>> Alignment({"captioner": {}}, AlignmentPass(), AlignmentPass()).aligned.masks
        {}
    """

    losses: dict[str, dict[str, Loss]]
    aligned: AlignmentPass
    perturbed: AlignmentPass


def align(
    aligner: Aligner,
    task: Callable[[], Loss | Float[Tensor, ""]],
    strength: float = LAMBDA,
    rows: Bool[Tensor, "b q"] | None = None,
    restrict: RestrictGradient = restrict_gradient,
) -> Alignment:
    """Run the model twice: aligned for its loss (eq. 11), perturbed for the masks' (eq. 4).

    The losses of the masks have a gradient on `mask_parameters` only, and the caption loss has none
    on them, wherever `backward` is called: a plain loop may sum all losses and step both
    optimizers.

    Args:
        aligner: the model with masks.
        task: runs the model and returns its loss: a `Loss`, or a tensor with one number, such as
            `model(**inputs).loss` of Hugging Face, which is the mean over `rows`. Whatever does not
            depend on cross-attention, such as the encoder, can be computed before.
        strength: weight of the penalty, lambda.
        rows: the positions whose prediction has a label, without padding. `labels != -100` if row t
            predicts label t (VisionEncoderDecoder); BLIP and decoder-only models shift the labels
            themselves: `torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))`.
        restrict: restricts the gradient of the masks' losses. `fit` does this itself, so
            `restricted_by_fit` saves it the work; sharded parameters need it too.

    Returns:
        The losses by parameter set, and both passes.

    Raises:
        TypeError: `aligner` is not an `Aligner`, or `task` is not a function that returns a loss.
        ValueError: `rows` has not the shape of the words.

    Example:
        >>> from overt.nn import CachedRegionEncoder, Captioner, CaptionerSizes
        >>> from overt.testing import toy_batch
        >>> sizes = CaptionerSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> model = Captioner(sizes, CachedRegionEncoder(width=4)).eval()
        >>> batch = replace(toy_batch(3), features=torch.rand(3, 5, 4))
        >>> aligner = Aligner(model, find_cross_attention(model, lambda: model(batch)))
        >>> def task():
        ...     logits = model(batch).logits.flatten(0, 1)
        ...     return nn.functional.cross_entropy(logits, batch.tokens[:, 1:].flatten())
        >>> result = align(aligner, task)
        >>> {name: list(losses) for name, losses in result.losses.items()}
        {'captioner': ['caption'], 'masks': ['harm', 'penalty']}
        >>> sum(one.mean() for group in result.losses.values() for one in group.values()).backward()
    """
    if not isinstance(aligner, Aligner) or not callable(task):
        raise TypeError(
            "expected align(aligner, task) with an Aligner and a function such as "
            f"lambda: model(**inputs).loss, got {type(aligner).__name__} and {type(task).__name__}"
        )
    # masks are frozen here: their gradient comes from the perturbed pass alone
    with aligner.aligned(learn_masks=False) as aligned:
        loss = _as_sum(task(), rows)
    with aligner.perturbed() as perturbed:
        harm = _as_sum(task(), rows)
    penalty = perturbed.penalty(rows, aligner.penalty)
    # eq. 4 in both parts: raise the caption loss, and perturb little
    against = {"harm": -1.0 * harm, "penalty": strength * penalty}
    masks = restrict(against, aligner.mask_parameters())
    return Alignment({CAPTIONER: {"caption": loss}, MASKS: masks}, aligned, perturbed)


def _as_sum(loss: Loss | Tensor, rows: Tensor | None) -> Loss:
    """Return a mean over the rows as a sum and a count."""
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            "task must return a Loss or a tensor with one number, such as the loss of a Hugging "
            f"Face model, got {shape}"
        )
    count = torch.ones_like(loss) if rows is None else rows.sum().to(loss)
    return Loss(loss * count, count)


def _key(name: str) -> str:
    """Return a module name without dots, for `nn.ModuleDict`."""
    return name.replace(".", "/") or "model"


def _query_and_key(call: Call) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b g k d"]]:
    """Return the queries and keys of a call."""
    query, key = call.source.query, call.source.key
    if query is None or key is None:
        raise ValueError(
            f"the queries and keys of {call.name or 'the model'} were not captured: its weights "
            "were already edited, or it computes attention in an unknown way; use "
            "scaled_dot_product_attention (attn_implementation='sdpa')"
        )
    return query, key
