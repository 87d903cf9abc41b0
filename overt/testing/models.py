"""The contract of a model: what goes from a batch to an `Output`, checked promise by promise."""

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
from overt.models.output import Output


@dataclass(frozen=True, eq=False)
class Case:
    """A model in eval mode, the batch it is checked on, and what it answered."""

    make: Callable[[], nn.Module]
    model: nn.Module
    batch: Batch
    features: Any
    output: Output
    unreached: tuple[str, ...]
    tolerance: float

    def spans(self) -> dict[str, int]:
        """The spans the model attends to, and how many positions each has."""
        return {span.name: len(span) for one in self.output.attention for span in one.keys.spans}

    def mask(self, name: str, value: float) -> Float[Tensor, "b k"]:
        """A mask over one span with the same value everywhere."""
        device = self.output.prediction.device
        return torch.full((len(self.batch), self.spans()[name]), value, device=device)


Complaint = str | None


def check_model(
    make_model: Callable[[], nn.Module],
    batch: Batch,
    unreached: Sequence[str] = (),
    tolerance: float = 1e-5,
) -> tuple[str, ...]:
    """Raise an AssertionError that names the promise a model breaks; else the names of all checks.

    `make_model` builds a model anew each time. `batch` should have two samples or more, with texts
    of unequal length where there are texts. `unreached` are the beginnings of the names of
    parameters that need no gradient. Numbers that rounding may move agree to `tolerance`.
    """
    with torch.random.fork_rng(devices=[]):
        model = make_model().eval()
        with torch.no_grad():
            features = _encode(model, batch)
            output = _decide(model, features)
        case = Case(make_model, model, batch, features, output, tuple(unreached), tolerance)
        for check in CHECKS:
            name = check.__name__
            try:
                complaint = check(case)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            if complaint is not None:
                raise AssertionError(f"{name}: {complaint}")
    return tuple(check.__name__ for check in CHECKS)


def output_is_an_output(case: Case) -> Complaint:
    """What comes out is an `Output` with a tuple of maps."""
    if not isinstance(case.output, Output):
        return f"decide gave a {type(case.output).__name__}"
    if not isinstance(case.output.attention, tuple):
        return f"attention is a {type(case.output.attention).__name__}, not a tuple"
    return None


def prediction_is_finite(case: Case) -> Complaint:
    """One row of floating-point logits a sample, all finite."""
    prediction = case.output.prediction
    if prediction.ndim != 2 or len(prediction) != len(case.batch):
        return f"shape {tuple(prediction.shape)} for {len(case.batch)} samples"
    if not prediction.is_floating_point():
        return f"logits are {prediction.dtype}"
    return None if prediction.isfinite().all() else "some logits are not finite"


def maps_keep_their_promise(case: Case) -> Complaint:
    """Five axes, one row a sample, and what `AttentionMap.check` asks for."""
    for at, one in enumerate(case.output.attention):
        if not isinstance(one, AttentionMap):
            return f"map {at} is a {type(one).__name__}"
        if one.values.ndim != 5 or len(one) != len(case.batch):
            return f"map {at} has shape {tuple(one.values.shape)} for {len(case.batch)} samples"
        one.check()
    return None


def rows_sum_to_one(case: Case) -> Complaint:
    """Every row of probabilities that sees a key gives away all of its attention."""
    for at, one in enumerate(case.output.attention):
        if one.kind is Kind.PROBABILITY:
            sums = one.weights.float().sum(dim=-1)
            rows = rearrange(one.rows, "b q -> b 1 1 q").expand_as(sums)
            away = (sums[rows] - 1).abs()
            if len(away) and away.max() > 1e-3:
                return f"a row of map {at} is {float(away.max()):g} away from one"
    return None


def extras_are_tensors(case: Case) -> Complaint:
    """Extras have names and are finite tensors."""
    for name, value in case.output.extras.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            return f"extra {name!r} is a {type(value).__name__}"
        if not value.isfinite().all():
            return f"extra {name!r} is not finite"
    return None


def forward_is_decide_of_encode(case: Case) -> Complaint:
    """`forward(batch)` and `decide(encode(batch))` give exactly the same."""
    return differs(case.model(case.batch), case.output, 0.0)


def eval_is_deterministic(case: Case) -> Complaint:
    """The same batch gives exactly the same twice, whatever the random state."""
    torch.manual_seed(1)
    first = case.model(case.batch)
    torch.manual_seed(2)
    return differs(case.model(case.batch), first, 0.0)


def features_can_be_used_again(case: Case) -> Complaint:
    """`decide` leaves features as they are: a second, third and masked call find them unchanged."""
    for name in case.spans():
        _decide(case.model, case.features, {name: case.mask(name, 0.0)})
    return differs(_decide(case.model, case.features), case.output, 0.0)


def inputs_are_left_alone(case: Case) -> Complaint:
    """No tensor of the batch is written to."""
    before = {name: (value, value.clone()) for name, value in _tensors("batch", case.batch)}
    case.model(case.batch)
    changed = [name for name, (value, kept) in before.items() if not torch.equal(value, kept)]
    return f"{changed} changed" if changed else None


def model_is_left_as_found(case: Case) -> Complaint:
    """Mode, gradients, and in eval mode weights and buffers are as they were before a pass."""
    model = copy.deepcopy(case.model)
    for training in (True, False):
        model.train(training)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = [value.requires_grad for value in model.parameters()]
        model(case.batch)
        if any(module.training is not training for module in model.modules()):
            return "a pass changed between train and eval mode"
        if [value.requires_grad for value in model.parameters()] != wanted:
            return "a pass changed what requires a gradient"
        if any(value.grad is not None for value in model.parameters()):
            return "a pass left gradients behind"
        if not training:
            after = model.state_dict()
            moved = [name for name, value in state.items() if not torch.equal(value, after[name])]
            if moved:
                return f"a pass in eval mode changed {moved}"
    return None


def samples_stand_alone(case: Case) -> Complaint:
    """A sample is answered the same alone as in a batch."""
    for at in range(min(3, len(case.batch))):
        alone = torch.tensor([at], device=case.output.prediction.device)
        complaint = differs(
            case.model(case.batch.select(alone)), select(case.output, alone), case.tolerance
        )
        if complaint is not None:
            return f"sample {at} alone: {complaint}"
    return None


def order_does_not_matter(case: Case) -> Complaint:
    """Samples in another order give the same answers in that order."""
    order = torch.arange(len(case.batch), device=case.output.prediction.device).flip(0)
    return differs(case.model(case.batch.select(order)), select(case.output, order), case.tolerance)


def padding_is_not_read(case: Case) -> Complaint:
    """More padding with other words in it changes no answer, and gets no attention."""
    if case.batch.token_mask is None and case.batch.region_mask is None:
        return None
    longer = _longer(case.batch)
    output = case.model(longer)
    apart = _apart(output.prediction, case.output.prediction)
    if apart > case.tolerance:
        return f"padding moves logits by {apart:g}"
    for name, present in (("text", longer.token_mask), ("regions", longer.region_mask)):
        for one in output.attention:
            if present is None or [span.name for span in one.keys.spans] != [name]:
                continue
            hidden = rearrange(~present, "b n -> b 1 1 1 n")
            if one.values.shape[-1] == hidden.shape[-1] and (one.weights * hidden).any():
                return f"padding of {name!r} gets attention {float((one.weights * hidden).max()):g}"
    return None


def mask_of_ones_is_no_mask(case: Case) -> Complaint:
    """Keeping everything is the same as giving no mask."""
    kept = {name: case.mask(name, 1.0) for name in case.spans()}
    both = [_decide(case.model, case.features, mask) for mask in (kept, {})]
    for one in both:
        complaint = differs(one, case.output, case.tolerance)
        if complaint is not None:
            return complaint
    return None


def masks_change_the_answer(case: Case) -> Complaint:
    """Removing all of a span the model attends to moves some logit."""
    for name in case.spans():
        mask = {name: case.mask(name, 0.0)}
        without = _decide(case.model, case.features, mask).prediction
        if not without.isfinite().all():
            return f"without {name!r} some logits are not finite"
        if name != "global" and torch.equal(without, case.output.prediction):
            return f"a mask over {name!r} moves no logit"
    return None


def masks_stay_in_their_sample(case: Case) -> Complaint:
    """Removing a span of the first sample moves no other sample's logits."""
    for name in case.spans():
        mask = case.mask(name, 1.0)
        mask[0] = 0
        output = _decide(case.model, case.features, {name: mask})
        apart = _apart(output.prediction[1:], case.output.prediction[1:])
        if apart > case.tolerance:
            return f"a mask over {name!r} of one sample moves another's logits by {apart:g}"
    return None


@torch.enable_grad()
def gradient_reaches_every_parameter(case: Case) -> Complaint:
    """Logits, maps and extras together send a finite gradient to every parameter."""
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


def state_dict_is_the_whole_state(case: Case) -> Complaint:
    """A new model that loads the state answers the same."""
    model, other = copy.deepcopy(case.model), case.make().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.01)
    other.load_state_dict(model.state_dict())
    return differs(other(case.batch), model(case.batch), 0.0)


def copies_are_independent(case: Case) -> Complaint:
    """A deep copy answers the same, and training it leaves the original alone."""
    other = copy.deepcopy(case.model)
    complaint = differs(other(case.batch), case.output, 0.0)
    if complaint is not None:
        return complaint
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1)
    complaint = differs(case.model(case.batch), case.output, 0.0)
    return None if complaint is None else f"the original moved with its copy: {complaint}"


CHECKS: tuple[Callable[[Case], Complaint], ...] = tuple(
    check if check is gradient_reaches_every_parameter else torch.no_grad()(check)
    for check in (
        output_is_an_output,
        prediction_is_finite,
        maps_keep_their_promise,
        rows_sum_to_one,
        extras_are_tensors,
        forward_is_decide_of_encode,
        eval_is_deterministic,
        copies_are_independent,  # before the checks that work on a copy
        features_can_be_used_again,
        inputs_are_left_alone,
        model_is_left_as_found,
        samples_stand_alone,
        order_does_not_matter,
        padding_is_not_read,
        mask_of_ones_is_no_mask,
        masks_change_the_answer,
        masks_stay_in_their_sample,
        gradient_reaches_every_parameter,
        state_dict_is_the_whole_state,
    )
)


# --- helpers


def _encode(model: nn.Module, batch: Batch) -> Any:
    return model.encode(batch)  # type: ignore[operator]


def _decide(model: nn.Module, features: Any, mask: Mapping[str, Tensor] | None = None) -> Any:
    return model.decide(features, mask)  # type: ignore[operator]


def differs(found: Output, expected: Output, tolerance: float) -> Complaint:
    """How two outputs differ by more than `tolerance`, or None."""
    apart = _apart(found.prediction, expected.prediction)
    if not apart <= tolerance:
        return f"logits differ by {apart:g}"
    if len(found.attention) != len(expected.attention):
        return f"{len(found.attention)} maps in the place of {len(expected.attention)}"
    for at, (one, two) in enumerate(zip(found.attention, expected.attention, strict=True)):
        apart = _apart(one.weights, two.weights)
        if not apart <= tolerance:
            return f"map {at} differs by {apart:g}"
    return None


def _apart(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape:
        raise ValueError(f"shape {tuple(one.shape)} in the place of {tuple(two.shape)}")
    return (
        float((one.detach().double() - two.detach().double()).abs().max()) if one.numel() else 0.0
    )


def select(output: Output, rows: Tensor) -> Output:
    """The samples named, in their order."""
    maps = tuple(one.select(rows) for one in output.attention)
    return Output(output.prediction[rows], maps)


def _tensors(name: str, value: object) -> list[tuple[str, Tensor]]:
    """Every tensor in a tree of dataclasses, with where it stands."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if is_dataclass(value) and not isinstance(value, type):
        inner = [_tensors(f"{name}.{one.name}", getattr(value, one.name)) for one in fields(value)]
        return [pair for pairs in inner for pair in pairs]
    return []


def _longer(batch: Batch, extra: int = 2) -> Batch:
    """The batch with more padding, in which words and regions of other samples stand."""
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
