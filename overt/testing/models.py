"""Contract of models: from a batch to an `Output`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind
from overt.data.batch import Batch
from overt.nn.output import Output


@dataclass(frozen=True, eq=False)
class ModelCase:
    """A model in evaluation mode, the batch it is checked on, and its output.

    Args:
        make: Builds the model.
        model: The model.
        batch: The batch.
        features: The encoded batch.
        output: The output of the model.
        unreached: Prefixes of the names of parameters without a gradient.
        tolerance: The tolerance of comparisons.
    """

    make: Callable[[], nn.Module]
    model: nn.Module
    batch: Batch
    features: Any
    output: Output
    unreached: tuple[str, ...]
    tolerance: float

    def spans(self) -> dict[str, int]:
        """Return the number of positions of each span that the model attends to."""
        return {span.name: len(span) for one in self.output.attention for span in one.keys.spans}

    def mask(self, name: str, value: float) -> Float[Tensor, "b k"]:
        """Return a constant mask over one span."""
        device = self.output.prediction.device
        return torch.full((len(self.batch), self.spans()[name]), value, device=device)


Failure = str | None


def check_model(
    make_model: Callable[[], nn.Module],
    batch: Batch,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
) -> tuple[str, ...]:
    """Check the contract of a model.

    Args:
        make_model: Builds a new model.
        batch: At least two samples, with texts of unequal length if there are texts.
        unreached: Prefixes of the names of parameters that need no gradient.
        tolerance: The tolerance of comparisons.

    Returns:
        The names of all checks.

    Raises:
        AssertionError: A check failed; the message names it.

    Example:
        >>> from overt.testing import PlantedCell, toy_batch
        >>> check_model(PlantedCell, toy_batch())[0]
        'output_is_an_output'
    """
    with torch.random.fork_rng(devices=[]):
        model = make_model().eval()
        with torch.no_grad():
            features = _encode(model, batch)
            output = _decide(model, features)
        case = ModelCase(make_model, model, batch, features, output, tuple(unreached), tolerance)
        for check in CHECKS:
            name = check.__name__
            try:
                failure = check(case)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            if failure is not None:
                raise AssertionError(f"{name}: {failure}")
    return tuple(check.__name__ for check in CHECKS)


def output_is_an_output(case: ModelCase) -> Failure:
    """`decide` returns an `Output` with a tuple of maps."""
    if not isinstance(case.output, Output):
        return f"decide returned a {type(case.output).__name__}"
    if not isinstance(case.output.attention, tuple):
        return f"attention is a {type(case.output.attention).__name__}, not a tuple"
    return None


def prediction_is_finite(case: ModelCase) -> Failure:
    """The prediction has one row of finite floating-point logits per sample."""
    prediction = case.output.prediction
    if prediction.ndim != 2 or len(prediction) != len(case.batch):
        return f"shape {tuple(prediction.shape)} for {len(case.batch)} samples"
    if not prediction.is_floating_point():
        return f"logits are {prediction.dtype}"
    return None if prediction.isfinite().all() else "some logits are not finite"


def maps_are_valid(case: ModelCase) -> Failure:
    """Maps have five axes and one row per sample, and pass `AttentionMap.check`."""
    for at, one in enumerate(case.output.attention):
        if not isinstance(one, AttentionMap):
            return f"map {at} is a {type(one).__name__}"
        if one.values.ndim != 5 or len(one) != len(case.batch):
            return f"map {at} has shape {tuple(one.values.shape)} for {len(case.batch)} samples"
        one.check()
    return None


def rows_sum_to_one(case: ModelCase) -> Failure:
    """Every row of probabilities with a visible key sums to one."""
    for at, one in enumerate(case.output.attention):
        if one.kind is Kind.PROBABILITY:
            sums = one.weights.float().sum(dim=-1)
            rows = rearrange(one.rows, "b q -> b 1 1 q").expand_as(sums)
            away = (sums[rows] - 1).abs()
            if len(away) and away.max() > 1e-3:
                return f"a row of map {at} is {float(away.max()):g} away from one"
    return None


def extras_are_tensors(case: ModelCase) -> Failure:
    """Extras have string names and are finite tensors."""
    for name, value in case.output.extras.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"extra {name!r} is a {type(value).__name__}"
        if not value.isfinite().all():
            return f"extra {name!r} is not finite"
    return None


def forward_is_decide_of_encode(case: ModelCase) -> Failure:
    """`forward(batch)` and `decide(encode(batch))` are exactly equal."""
    return differs(case.model(case.batch), case.output, 0.0)


def eval_is_deterministic(case: ModelCase) -> Failure:
    """The same batch gives exactly the same output twice, for any random state."""
    torch.manual_seed(1)
    first = case.model(case.batch)
    torch.manual_seed(2)
    return differs(case.model(case.batch), first, 0.0)


def features_are_reusable(case: ModelCase) -> Failure:
    """`decide` does not modify features: repeated and masked calls see the same ones."""
    # removing a span first: a masked call that writes into the features would change the last one
    for name in case.spans():
        _decide(case.model, case.features, {name: case.mask(name, 0.0)})
    return differs(_decide(case.model, case.features), case.output, 0.0)


def inputs_are_not_modified(case: ModelCase) -> Failure:
    """No tensor of the batch is modified."""
    before = {name: (value, value.clone()) for name, value in _tensors("batch", case.batch)}
    case.model(case.batch)
    changed = [name for name, (value, kept) in before.items() if not torch.equal(value, kept)]
    return f"{changed} changed" if changed else None


def model_is_not_modified(case: ModelCase) -> Failure:
    """A forward pass changes no mode or gradient, and in eval mode no parameter or buffer."""
    model = copy.deepcopy(case.model)
    for training in (True, False):
        model.train(training)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = [value.requires_grad for value in model.parameters()]
        model(case.batch)
        if any(module.training is not training for module in model.modules()):
            return "a forward pass changed the train or eval mode"
        if [value.requires_grad for value in model.parameters()] != wanted:
            return "a forward pass changed requires_grad"
        if any(value.grad is not None for value in model.parameters()):
            return "a forward pass left gradients"
        if not training:
            after = model.state_dict()
            moved = [name for name, value in state.items() if not torch.equal(value, after[name])]
            if moved:
                return f"a forward pass in eval mode changed {moved}"
    return None


def samples_are_independent(case: ModelCase) -> Failure:
    """The output of a sample is the same alone and in a batch."""
    for at in range(min(3, len(case.batch))):
        alone = torch.tensor([at], device=case.output.prediction.device)
        failure = differs(
            case.model(case.batch.select(alone)), select(case.output, alone), case.tolerance
        )
        if failure is not None:
            return f"sample {at} alone: {failure}"
    return None


def sample_order_is_equivariant(case: ModelCase) -> Failure:
    """Permuting the samples permutes the outputs."""
    order = torch.arange(len(case.batch), device=case.output.prediction.device).flip(0)
    return differs(case.model(case.batch.select(order)), select(case.output, order), case.tolerance)


def padding_is_not_read(case: ModelCase) -> Failure:
    """More padding with other content does not change the output, and gets no attention."""
    if case.batch.token_mask is None and case.batch.region_mask is None:
        return None
    # padding has the words of other samples, not zeros: a model that reads it gives another result
    longer = _longer(case.batch)
    output = case.model(longer)
    difference = _max_difference(output.prediction, case.output.prediction)
    if difference > case.tolerance:
        return f"padding changes logits by {difference:g}"
    for name, present in (("text", longer.token_mask), ("regions", longer.region_mask)):
        for one in output.attention:
            if present is None or [span.name for span in one.keys.spans] != [name]:
                continue
            hidden = rearrange(~present, "b n -> b 1 1 1 n")
            if one.values.shape[-1] == hidden.shape[-1] and (one.weights * hidden).any():
                return f"padding of {name!r} gets attention {float((one.weights * hidden).max()):g}"
    return None


def mask_of_ones_is_no_mask(case: ModelCase) -> Failure:
    """A mask of ones is the same as no mask."""
    kept = {name: case.mask(name, 1.0) for name in case.spans()}
    # an empty mapping means no mask too
    both = [_decide(case.model, case.features, mask) for mask in (kept, {})]
    for one in both:
        failure = differs(one, case.output, case.tolerance)
        if failure is not None:
            return failure
    return None


def masks_change_the_answer(case: ModelCase) -> Failure:
    """Removing all of a span that the model attends to changes a logit."""
    for name in case.spans():
        mask = {name: case.mask(name, 0.0)}
        without = _decide(case.model, case.features, mask).prediction
        if not without.isfinite().all():
            return f"without {name!r} some logits are not finite"
        # "global" is the whole sequence as one position: a map of it need not depend on a mask
        if name != "global" and torch.equal(without, case.output.prediction):
            return f"a mask over {name!r} changes no logit"
    return None


def masks_stay_in_their_sample(case: ModelCase) -> Failure:
    """Removing a span of the first sample does not change the logits of others."""
    for name in case.spans():
        mask = case.mask(name, 1.0)
        mask[0] = 0
        output = _decide(case.model, case.features, {name: mask})
        difference = _max_difference(output.prediction[1:], case.output.prediction[1:])
        if difference > case.tolerance:
            return f"a mask over {name!r} of one sample changes logits of others by {difference:g}"
    return None


@torch.enable_grad()
def gradient_reaches_every_parameter(case: ModelCase) -> Failure:
    """Logits, maps and extras give a finite gradient to every parameter."""
    # with a mask too: parameters such as the embedding of a removed word are used only then
    model = copy.deepcopy(case.model).train()
    features = _encode(model, case.batch)
    half = {name: case.mask(name, 1.0) for name in case.spans()}
    for mask in half.values():
        mask[:, ::2] = 0
    total = torch.zeros(())
    for output in (_decide(model, features), _decide(model, features, half)):
        parts = [output.prediction, *(one.weights for one in output.attention)]
        parts += [extra for extra in output.extras.values() if extra.is_floating_point()]
        for part in parts:
            total = total + (part.float() * torch.rand_like(part, dtype=torch.float32)).sum().cpu()
    total.backward()
    silent, broken = [], []
    for name, value in model.named_parameters():
        if value.requires_grad and not name.startswith(case.unreached or ("\0",)):
            if value.grad is None:
                silent.append(name)
            elif not value.grad.isfinite().all():
                broken.append(name)
    if broken:
        return f"the gradient of {broken} is not finite"
    return f"no gradient reaches {silent}" if silent else None


def state_dict_is_complete(case: ModelCase) -> Failure:
    """A new model that loads the state dict gives the same output."""
    model, other = copy.deepcopy(case.model), case.make().eval()
    with torch.no_grad():
        for value in model.parameters():
            # weights that no constructor would draw: a tensor missing from the state dict shows
            value.mul_(1.01)
    other.load_state_dict(model.state_dict())
    return differs(other(case.batch), model(case.batch), 0.0)


def copies_are_independent(case: ModelCase) -> Failure:
    """A deep copy gives the same output, and changing it does not change the original."""
    other = copy.deepcopy(case.model)
    failure = differs(other(case.batch), case.output, 0.0)
    if failure is not None:
        return failure
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1)
    failure = differs(case.model(case.batch), case.output, 0.0)
    return None if failure is None else f"the original changed with its copy: {failure}"


CHECKS: tuple[Callable[[ModelCase], Failure], ...] = tuple(
    check if check is gradient_reaches_every_parameter else torch.no_grad()(check)
    for check in (
        output_is_an_output,
        prediction_is_finite,
        maps_are_valid,
        rows_sum_to_one,
        extras_are_tensors,
        forward_is_decide_of_encode,
        eval_is_deterministic,
        copies_are_independent,  # before the checks that use a copy
        features_are_reusable,
        inputs_are_not_modified,
        model_is_not_modified,
        samples_are_independent,
        sample_order_is_equivariant,
        padding_is_not_read,
        mask_of_ones_is_no_mask,
        masks_change_the_answer,
        masks_stay_in_their_sample,
        gradient_reaches_every_parameter,
        state_dict_is_complete,
    )
)


# --- helpers


def _encode(model: nn.Module, batch: Batch) -> Any:
    return model.encode(batch)  # type: ignore[operator]


def _decide(model: nn.Module, features: Any, mask: Mapping[str, Tensor] | None = None) -> Any:
    return model.decide(features, mask)  # type: ignore[operator]


def differs(found: Output, expected: Output, tolerance: float) -> Failure:
    """Return how two outputs differ by more than `tolerance`, or None."""
    difference = _max_difference(found.prediction, expected.prediction)
    # NaN must count as a difference
    if not difference <= tolerance:
        return f"logits differ by {difference:g}"
    if len(found.attention) != len(expected.attention):
        return f"{len(found.attention)} maps instead of {len(expected.attention)}"
    for at, (one, two) in enumerate(zip(found.attention, expected.attention, strict=True)):
        difference = _max_difference(one.weights, two.weights)
        if not difference <= tolerance:
            return f"map {at} differs by {difference:g}"
    return None


def _max_difference(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape:
        raise ValueError(f"shape {tuple(one.shape)} instead of {tuple(two.shape)}")
    return (
        float((one.detach().double() - two.detach().double()).abs().max()) if one.numel() else 0.0
    )


def select(output: Output, rows: Tensor) -> Output:
    """Return some samples of an output."""
    maps = tuple(one.select(rows) for one in output.attention)
    return Output(output.prediction[rows], maps)


def _tensors(name: str, value: object) -> list[tuple[str, Tensor]]:
    """Return every tensor in nested dataclasses, with its path."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if is_dataclass(value) and not isinstance(value, type):
        inner = [_tensors(f"{name}.{one.name}", getattr(value, one.name)) for one in fields(value)]
        return [pair for pairs in inner for pair in pairs]
    return []


def _longer(batch: Batch, extra: int = 2) -> Batch:
    """Return the batch with more padding, filled with words and regions of other samples."""
    changed: dict[str, Any] = {"target": None}
    if batch.tokens is not None and batch.token_mask is not None:
        junk = batch.tokens.roll(1, dims=0)
        tokens = torch.where(batch.token_mask, batch.tokens, junk)
        changed["tokens"] = torch.cat([tokens, junk[:, :1].expand(-1, extra)], dim=1)
        changed["token_mask"] = nn.functional.pad(batch.token_mask, (0, extra))
        if batch.text is not None:
            spans = nn.functional.pad(batch.text.spans, (0, 0, 0, extra), value=-1)
            changed["text"] = replace(batch.text, spans=spans)
    if batch.region_mask is not None:
        changed["region_mask"] = nn.functional.pad(batch.region_mask, (0, extra))
        for name in ("boxes", "features"):
            value = getattr(batch, name)
            if value is not None:
                junk = value.roll(1, dims=0)
                real = torch.where(batch.region_mask[..., None], value, junk)
                changed[name] = torch.cat([real, junk[:, :1].expand(-1, extra, -1)], dim=1)
    return replace(batch, **changed)
