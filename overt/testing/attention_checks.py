"""Checks of attention modules: each returns a failure message, or None.

Every check runs copies of the module. The first four are run first: the others need them.
"""

import copy
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from overt.attention import AttentionMap, Form, Kind
from overt.testing.attention_inputs import (
    AttentionCase,
    AttentionInputs,
    AttentionOutput,
    CallModule,
    first_difference,
    is_probability,
    random_inputs,
)

Failure = str | None

HALF_PRECISION_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}  # by dtype


# --- outputs


def gives_output_and_map(case: AttentionCase) -> Failure:
    """The output is a floating-point tensor with one row per sample, and an `AttentionMap`."""
    output, attention = case.result.output, case.result.attention
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return f"the output is a {type(output).__name__}, not a floating-point tensor"
    if not isinstance(attention, AttentionMap):
        return f"the map is a {type(attention).__name__}, not an AttentionMap"
    return None


def map_has_expected_axes(case: AttentionCase) -> Failure:
    """Output and map have the samples, queries and keys of the inputs."""
    return _axes(case.result, case.inputs)


def outputs_are_finite(case: AttentionCase) -> Failure:
    """Output and map are finite."""
    return _not_finite(case.result)


def copies_are_independent(case: AttentionCase) -> Failure:
    """A deep copy after a pass gives the same result, and is independent of the original."""
    module = case.copy()
    case.run(module=module)
    other = copy.deepcopy(module)
    failure = case.differs(case.run(module=other))
    if failure is not None:
        return f"for a copy {failure}"
    before = {name: value.detach().clone() for name, value in other.named_parameters()}
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1)
    failure = case.differs(case.run(module=module))
    with torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(before[name])  # a copy may share parameters with the module of the user
    return None if failure is None else f"the original changed with its copy: {failure}"


# --- rows of weights


def weights_are_not_negative(case: AttentionCase) -> Failure:
    """Weights are not negative, unless the map is signed."""
    if case.result.attention.kind is Kind.SIGNED:
        return None
    least = float(case.result.weights.min())
    return f"a weight is {least:.2g}" if least < 0 else None


def rows_sum_to_one(case: AttentionCase) -> Failure:
    """Rows of probabilities sum to one, and rows of amounts are not zero."""
    sums = case.result.weights.detach().double().sum(dim=-1)
    if case.result.attention.kind is Kind.AMOUNT:
        return None if (sums > 0).all() else "a row with visible keys is zero"
    if is_probability(case.result.attention):
        away = float((sums - 1).abs().max())
        return f"the sum of a row differs from one by {away:.2g}" if away > 1e-4 else None
    return None


def masked_keys_get_no_weight(case: AttentionCase) -> Failure:
    """The weight of a masked key is exactly zero."""
    hidden = rearrange(~case.inputs.present, "b k -> b 1 1 1 k")
    most = float((case.result.weights * hidden).abs().max())
    return f"a masked key has a weight of {most:.2g}" if most else None


def masked_keys_are_not_read(case: AttentionCase) -> Failure:
    """The content of masked keys changes nothing, and has a gradient of zero."""
    inputs, hidden = case.inputs, ~case.inputs.present[..., None]
    # large other values at masked keys: any use of them shows
    other = replace(inputs, keys=torch.where(hidden, 20 - 3 * inputs.keys, inputs.keys))
    if case.is_self_attention:
        other = replace(other, queries=other.keys)
    failure = case.differs(case.run(other))
    if failure is not None:
        return failure
    # also no gradient: a weight of 0 times a value of any size still has one
    leaves = _require_grad(inputs)
    (found,) = torch.autograd.grad(_weighted_total(case, case.copy(), leaves), [leaves.keys])
    most = float((found * hidden).abs().max())
    return f"a masked key has a gradient of {most:.2g}" if most else None


def padding_changes_nothing(case: AttentionCase) -> Failure:
    """Additional masked keys at the end do not change the result."""
    inputs, extra = case.inputs, 2
    count = inputs.keys.shape[1]
    keys = nn.functional.pad(inputs.keys, (0, 0, 0, extra))
    longer = AttentionInputs(
        keys if case.is_self_attention else inputs.queries,
        keys,
        nn.functional.pad(inputs.present, (0, extra)),
        (1, count + extra),
    )
    output, weights = case.valid_parts(case.run(longer), longer)
    if case.is_self_attention:
        # the padding is among the queries too, and its rows are not compared
        output, weights = output[:, :count], weights[..., :count, :]
    first = zip(
        ("output", "map"),
        (output, weights[..., :count]),
        case.valid_parts(case.result, inputs),
        strict=True,
    )
    return first_difference(first, case.tolerance)


def fully_masked_rows_are_zero(case: AttentionCase) -> Failure:
    """A sample without keys has a row of zeros and a finite output."""
    inputs = _last_without_keys(case.inputs)
    result = case.run(inputs)
    failure = _not_finite(result)
    if failure is not None:
        return f"without keys {failure}"
    most = float(result.weights[-1].abs().max())
    return f"without keys there is a weight of {most:.2g}" if most else None


def fully_masked_rows_have_finite_gradients(case: AttentionCase) -> Failure:
    """A sample without keys does not make a gradient infinite or NaN."""
    inputs, module = _require_grad(_last_without_keys(case.inputs)), case.copy()
    named = [*_inputs(inputs), *module.named_parameters()]
    found = _gradients(case, module, inputs, [one for _, one in named])
    wrong = [
        name
        for (name, _), gradient in zip(named, found, strict=True)
        if gradient is not None and not gradient.isfinite().all()
    ]
    return f"without keys the gradient of {wrong[0]} is not finite" if wrong else None


# --- samples, keys and queries


def samples_are_independent(case: AttentionCase) -> Failure:
    """The result of a sample is the same alone and in a batch."""
    for at in range(len(case.inputs.keys)):
        found = case.run(case.inputs.select([at]))
        inputs = case.inputs.select([at])
        expected = (part[[at]] for part in case.valid_parts(case.result, case.inputs))
        failure = first_difference(
            zip(("output", "map"), case.valid_parts(found, inputs), expected, strict=True),
            case.tolerance,
        )
        if failure is not None:
            return f"for sample {at} alone {failure}"
    return None


def sample_order_is_equivariant(case: AttentionCase) -> Failure:
    """Permuting the samples permutes the results."""
    order = list(reversed(range(len(case.inputs.keys))))
    inputs = case.inputs.select(order)
    expected = (part[order] for part in case.valid_parts(case.result, case.inputs))
    return first_difference(
        zip(("output", "map"), case.valid_parts(case.run(inputs), inputs), expected, strict=True),
        case.tolerance,
    )


def key_order_is_equivariant(case: AttentionCase) -> Failure:
    """Permuting the keys permutes their weights and does not change the output."""
    inputs = case.inputs
    # flip and roll: neither a symmetric order nor one that fixes the first key
    order = torch.arange(inputs.keys.shape[1]).flip(0).roll(2)
    keys = inputs.keys[:, order]
    queries = keys if case.is_self_attention else inputs.queries
    turned = AttentionInputs(queries, keys, inputs.present[:, order], inputs.shape)
    output, weights = case.valid_parts(case.result, inputs)
    weights = weights[..., order]
    if case.is_self_attention:
        output, weights = output[:, order], weights[..., order, :]
    found = case.valid_parts(case.run(turned), turned)
    return first_difference(
        zip(("output", "map"), found, (output, weights), strict=True), case.tolerance
    )


def queries_are_independent(case: AttentionCase) -> Failure:
    """The result of a query is the same alone and among others."""
    # in self-attention a single query would also be the only key
    if case.is_self_attention or case.inputs.queries.shape[1] == 1:
        return None
    for at in range(case.inputs.queries.shape[1]):
        alone = replace(case.inputs, queries=case.inputs.queries[:, [at]])
        found = case.run(alone)
        expected = case.result.output[:, [at]], case.result.weights[..., [at], :]
        pairs = zip(("output", "map"), (found.output, found.weights), expected, strict=True)
        failure = first_difference(pairs, case.tolerance)
        if failure is not None:
            return f"for query {at} alone {failure}"
    return None


def empty_batch_is_allowed(case: AttentionCase) -> Failure:
    """An empty batch gives an empty result without an error."""
    return _axes(case.run(case.inputs.select([])), case.inputs.select([]))


def key_count_may_vary(case: AttentionCase) -> Failure:
    """The same weights work for one key and for other grid shapes."""
    for shape in ((1, 1), (3, 3), (5, 2)):
        count = shape[0] * shape[1]
        inputs = random_inputs(case.sizes, shape, [count, count, (count + 1) // 2])
        result = case.run(inputs)
        failure = _axes(result, inputs) or _not_finite(result)
        if failure is not None:
            return f"with {shape[0]} x {shape[1]} keys {failure}"
    return None


# --- side effects


def eval_is_deterministic(case: AttentionCase) -> Failure:
    """The result in evaluation mode is exactly the same twice, for any random state."""
    module = case.copy()
    torch.manual_seed(1)
    first = case.run(module=module)
    torch.manual_seed(2)
    return case.differs(case.run(module=module), first, tolerance=0.0)


def eval_draws_no_random_numbers(case: AttentionCase) -> Failure:
    """A pass in evaluation mode does not use the generators of torch, numpy and Python."""
    module = case.copy()
    before = torch.get_rng_state(), random.getstate(), _numpy_state()
    case.run(module=module)
    after = torch.get_rng_state(), random.getstate(), _numpy_state()
    # a model that draws in eval mode changes the results of everything after it
    same = torch.equal(before[0], after[0]), before[1] == after[1], before[2] == after[2]
    names = [n for n, kept in zip(("torch", "random", "numpy"), same, strict=True) if not kept]
    return f"a forward pass in eval mode used the generator of {names[0]}" if names else None


def train_and_eval_modes_work(case: AttentionCase) -> Failure:
    """A forward pass works in train and eval mode, and does not change the mode of any part."""
    module = case.copy()
    for training in (True, False):
        mode = "train" if training else "eval"
        module.train(training)
        failure = _not_finite(case.run(module=module))
        if failure is not None:
            return f"in {mode} mode {failure}"
        moved = [name for name, one in module.named_modules() if one.training is not training]
        if moved:
            return f"a forward pass changed the {mode} mode of {moved[0] or 'the module'}"
    return None


def inputs_are_not_modified(case: AttentionCase) -> Failure:
    """No input tensor is modified."""
    inputs = case.inputs.clone()
    case.attend(case.copy(), inputs)
    for name in ("queries", "keys", "present"):
        if not torch.equal(getattr(inputs, name), getattr(case.inputs, name)):
            return f"a forward pass modified the {name}"
    return None


def module_is_not_modified(case: AttentionCase) -> Failure:
    """A forward pass in evaluation mode changes no parameter or buffer, and leaves no gradient."""
    module = case.copy()
    before = {name: value.clone() for name, value in _parameters_and_buffers(module)}
    wanted = [value.requires_grad for value in module.parameters()]
    case.run(module=module)
    moved = [
        name
        for name, value in _parameters_and_buffers(module)
        if not torch.equal(value, before[name])
    ]
    if moved:
        return f"a forward pass in eval mode changed {moved[0]}"
    if [value.requires_grad for value in module.parameters()] != wanted:
        return "a forward pass changed requires_grad"
    left = [name for name, value in module.named_parameters() if value.grad is not None]
    return f"a forward pass left a gradient at {left[0]}" if left else None


def hooks_are_preserved(case: AttentionCase) -> Failure:
    """Hooks of the user are called and kept, and a forward pass adds none."""
    module, calls = case.copy(), []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    before = _hooks(module)
    case.run(module=module)
    changed = [name for name, number in _hooks(module).items() if before[name] != number]
    handle.remove()
    if changed:
        return f"a forward pass changed the hooks of {changed[0] or 'the module'}"
    return None if calls else "a hook on the module was not called"


def no_tensor_is_retained(case: AttentionCase) -> Failure:
    """No tensor of a forward pass stays on the module, where it would keep the graph alive."""
    module = case.copy()
    # tensors that the module had before the pass are allowed here
    before = set(_unregistered_tensors(module))
    case.run(module=module)
    kept = sorted(set(_unregistered_tensors(module)) - before)
    return f"after a forward pass {kept[0]} has a tensor" if kept else None


def calls_are_reentrant(case: AttentionCase) -> Failure:
    """Nested forward passes and passes in other threads give their own results."""
    other = random_inputs(case.sizes, case.inputs.shape, [6, 5, 3], seed=1)
    questions = (case.inputs, other)
    expected = [case.run(one) for one in questions]
    module = case.copy()
    busy: list[int] = []

    # a hook on a submodule runs the whole module again, in the middle of the first pass
    def interrupt(*_: Any) -> None:
        if not busy:
            busy.append(1)
            case.run(other, module)
            busy.clear()

    handles = [one.register_forward_hook(interrupt) for one in module.modules() if one != module]
    failure = case.differs(case.run(module=module))
    for handle in handles:
        handle.remove()
    if failure is not None:
        return f"after a nested forward pass {failure}"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: case.run(questions[at % 2], module), range(8)))
    for at, result in enumerate(found):
        pairs = zip(
            ("output", "map"),
            case.valid_parts(result, questions[at % 2]),
            case.valid_parts(expected[at % 2], questions[at % 2]),
            strict=True,
        )
        failure = first_difference(pairs, case.tolerance)
        if failure is not None:
            return f"with other threads {failure}"
    return None


# --- state


def state_can_be_saved(case: AttentionCase) -> Failure:
    """The state dict consists of tensors, and survives a safetensors round trip."""
    from safetensors.torch import load, save

    state = case.copy().state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        return f"{odd[0]} in the state dict is a {type(state[odd[0]]).__name__}, not a tensor"
    plain = {name: value.detach().clone().contiguous() for name, value in state.items()}
    again = load(save(plain))
    lost = [n for n, value in plain.items() if n not in again or not torch.equal(again[n], value)]
    return f"{lost[0]} is lost in a round trip" if lost else None


def state_dict_is_complete(case: AttentionCase) -> Failure:
    """A module with other weights that loads the state dict gives the same result."""
    module, other = case.copy(), case.copy()
    with torch.no_grad():
        for value in other.state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point():
                # other values in the same shapes: loading must overwrite all of them
                value.mul_(1.5).add_(0.1)
    other.load_state_dict(module.state_dict())
    return case.differs(case.run(module=other))


def all_tensors_are_registered(case: AttentionCase) -> Failure:
    """Every tensor is a parameter or a buffer, so that checkpoints and `.to` include it."""
    held = sorted(_unregistered_tensors(case.copy()))
    return f"{held[0]} has a tensor that is not a parameter or buffer" if held else None


# --- gradients


def gradient_reaches_every_parameter(case: AttentionCase) -> Failure:
    """Output and map give a finite gradient to every parameter that requires one."""
    module = case.copy()
    named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    # "\0" matches no name: startswith(()) would be an error for None
    named = [one for one in named if not one[0].startswith(case.unreached or ("\0",))]
    found = _gradients(case, module, case.inputs, [value for _, value in named])
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is None:
            return f"no gradient reaches {name}"
        if not gradient.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


def gradient_reaches_every_input(case: AttentionCase) -> Failure:
    """Queries and keys get a non-zero gradient, in float64."""
    module, inputs = case.copy().double(), _require_grad(case.inputs.to(torch.float64))
    leaves = _inputs(inputs)
    found = _gradients(case, module, inputs, [one for _, one in leaves])
    for (name, _), gradient in zip(leaves, found, strict=True):
        # float64, because in float32 rounding noise may look like a gradient
        if gradient is None or float(gradient.abs().max()) < 1e-10:
            return f"no gradient reaches the {name}"
    return None


def map_can_be_supervised(case: AttentionCase) -> Failure:
    """The map has a gradient that reaches a parameter or an input."""
    module, inputs = case.copy(), _require_grad(case.inputs)
    leaves = [*(one for _, one in _inputs(inputs)), *module.parameters()]
    weights = AttentionOutput(*case.attend(module, inputs)).weights
    if not weights.requires_grad:
        return "the map has no gradient"
    # random factors: the plain sum of a softmax is one and has no gradient
    share = torch.rand(weights.shape, generator=torch.Generator().manual_seed(3)).to(weights)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad((weights * share).sum(), wanted, allow_unused=True)
    if not any(one is not None and bool(one.any()) for one in found):
        return "the gradient of the map reaches nothing"
    return None


def gradient_matches_finite_differences(case: AttentionCase) -> Failure:
    """In float64 the gradient matches finite differences, for inputs and parameters."""
    module, inputs = case.copy().double(), _require_grad(case.inputs.to(torch.float64))
    leaves = [one for _, one in _inputs(inputs)]
    leaves += [value for value in module.parameters() if value.requires_grad]
    found = _gradients(case, module, inputs, leaves)
    moving = [leaf for leaf, g in zip(leaves, found, strict=True) if g is not None and g.any()]
    if not moving:
        return None

    def result(*_: Tensor) -> tuple[Tensor, ...]:
        # gradcheck modifies the leaves in place, where the module reads them
        made = AttentionOutput(*case.attend(module, inputs))
        return tuple(part for part in case.valid_parts(made, inputs) if part.requires_grad)

    try:
        # fast mode compares one random projection of the Jacobian instead of every entry
        torch.autograd.gradcheck(result, moving, fast_mode=True)
    except GradcheckError as error:
        first = " ".join(str(error).split())
        return f"finite differences disagree: {first[:120]}"
    return None


# --- dtypes


def bfloat16_is_allowed(case: AttentionCase) -> Failure:
    """In bfloat16 the result is finite and about the same."""
    return _in_format(case, torch.bfloat16)


def float16_is_allowed(case: AttentionCase) -> Failure:
    """In float16 the result is finite and about the same."""
    return _in_format(case, torch.float16)


def output_keeps_dtype(case: AttentionCase) -> Failure:
    """The dtype of the output is that of the inputs."""
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        output = case.run(case.inputs.to(kind), case.copy().to(kind)).output
        if output.dtype is not kind:
            return f"the output is {_dtype_name(output.dtype)} for {_dtype_name(kind)} inputs"
    return None


def autocast_is_allowed(case: AttentionCase) -> Failure:
    """Under bfloat16 autocast the result is finite and about the same."""
    with torch.autocast("cpu", torch.bfloat16):
        result = case.run()
    return _not_finite(result) or case.differs(
        result, tolerance=HALF_PRECISION_TOLERANCE[torch.bfloat16]
    )


def large_scores_are_finite(case: AttentionCase) -> Failure:
    """Keys ten thousand times as large give finite results and gradients."""
    # scores of this size overflow an exp that does not subtract the maximum
    keys = case.inputs.keys * 1e4
    large = replace(
        case.inputs, keys=keys, queries=keys if case.is_self_attention else case.inputs.queries
    )
    large = _require_grad(large)
    module = case.copy()
    failure = _not_finite(case.run(large, module))
    if failure is not None:
        return failure
    named = [*_inputs(large), *module.named_parameters()]
    found = _gradients(case, module, large, [one for _, one in named])
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is not None and not gradient.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


# --- execution


def no_grad_is_allowed(case: AttentionCase) -> Failure:
    """Under no_grad and inference mode the result is the same and has no graph."""
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            result = case.run()
            failure = case.differs(result)
        if failure is not None:
            return f"under {off.__name__} {failure}"
        if result.output.requires_grad:
            return f"under {off.__name__} the output has a graph"
    return None


def strided_inputs_are_allowed(case: AttentionCase) -> Failure:
    """Non-contiguous inputs give the same result."""
    inputs = case.inputs
    keys = inputs.keys.transpose(1, 2).contiguous().transpose(1, 2)
    # every second column of a wider tensor: the last stride is 2
    wide = torch.zeros(*inputs.queries.shape[:-1], 2 * inputs.queries.shape[-1])
    wide[..., ::2] = inputs.queries
    queries = keys if case.is_self_attention else wide[..., ::2]
    present = inputs.present.t().contiguous().t()
    output, attention = case.attend(
        case.copy(), AttentionInputs(queries, keys, present, inputs.shape)
    )
    return case.differs(AttentionOutput(output, attention))


def device_can_be_changed(case: AttentionCase) -> Failure:
    """On the meta device all outputs have the right device and shape: no tensor stays behind."""
    output, attention = case.attend(case.copy().to("meta"), case.inputs.to("meta"))
    if output.device.type != "meta" or attention.values.device.type != "meta":
        return "an output is on another device than the inputs"
    if output.shape != case.result.output.shape:
        return f"the output has shape {tuple(output.shape)} on the meta device"
    return None


def can_be_compiled(case: AttentionCase) -> Failure:
    """`torch.compile` gives the same result; graph breaks are allowed."""
    torch.compiler.reset()  # the recompilation limit is per class
    module = case.copy()
    # the eager backend traces the graph without generating code, which is what may fail here
    compiled = torch.compile(module, backend="eager")
    try:
        found = case.run(module=compiled)  # type: ignore[arg-type]
    finally:
        torch.compiler.reset()
    return case.differs(found)


def can_be_exported(case: AttentionCase) -> Failure:
    """`torch.export` captures one graph that gives the same result."""
    inputs = case.inputs.clone()
    tensors = (inputs.queries, inputs.keys, inputs.present)
    plain = _TensorModule(case.copy(), case.attend, inputs.shape).eval()
    output, weights = torch.export.export(plain, tensors).module()(*tensors)
    attention = replace(case.result.attention, values=weights, form=Form.PLAIN)
    return case.differs(AttentionOutput(output, attention))


class _TensorModule(nn.Module):
    """A module with its call, from tensors to tensors."""

    def __init__(self, module: nn.Module, attend: CallModule, shape: tuple[int, int]) -> None:
        super().__init__()
        self.module, self.attend, self.shape = module, attend, shape

    def forward(self, queries: Tensor, keys: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the weights."""
        result = AttentionOutput(
            *self.attend(self.module, AttentionInputs(queries, keys, present, self.shape))
        )
        return result.output, result.weights


Check = Callable[[AttentionCase], Failure]

BASIC_CHECKS: tuple[Check, ...] = (
    gives_output_and_map,
    map_has_expected_axes,
    outputs_are_finite,
    copies_are_independent,
)
FURTHER_CHECKS: tuple[Check, ...] = (
    weights_are_not_negative,
    rows_sum_to_one,
    masked_keys_get_no_weight,
    masked_keys_are_not_read,
    padding_changes_nothing,
    fully_masked_rows_are_zero,
    fully_masked_rows_have_finite_gradients,
    samples_are_independent,
    sample_order_is_equivariant,
    key_order_is_equivariant,
    queries_are_independent,
    empty_batch_is_allowed,
    key_count_may_vary,
    eval_is_deterministic,
    eval_draws_no_random_numbers,
    train_and_eval_modes_work,
    inputs_are_not_modified,
    module_is_not_modified,
    hooks_are_preserved,
    no_tensor_is_retained,
    calls_are_reentrant,
    state_can_be_saved,
    state_dict_is_complete,
    all_tensors_are_registered,
    gradient_reaches_every_parameter,
    gradient_reaches_every_input,
    map_can_be_supervised,
    gradient_matches_finite_differences,
    bfloat16_is_allowed,
    float16_is_allowed,
    output_keeps_dtype,
    autocast_is_allowed,
    large_scores_are_finite,
    no_grad_is_allowed,
    strided_inputs_are_allowed,
    device_can_be_changed,
    can_be_compiled,
    can_be_exported,
)

SLOW_CHECKS: tuple[Check, ...] = (can_be_compiled, can_be_exported)  # take a second or more


# --- helpers


def _axes(result: AttentionOutput, inputs: AttentionInputs) -> Failure:
    samples, count = inputs.keys.shape[:2]
    if len(result.output) != samples:
        return f"{len(result.output)} output rows for {samples} samples"
    found = result.attention.values.shape
    if found[0] != samples or found[-1] != count:
        return f"the map has shape {tuple(found)} for {samples} samples and {count} keys"
    if found[-2] != inputs.queries.shape[1]:
        return f"the map has {found[-2]} queries instead of {inputs.queries.shape[1]}"
    return None


def _not_finite(result: AttentionOutput) -> Failure:
    for name, part in (("output", result.output), ("map", result.weights)):
        if not part.isfinite().all():
            return f"the {name} is not finite"
    return None


def _last_without_keys(inputs: AttentionInputs) -> AttentionInputs:
    present = inputs.present.clone()
    present[-1] = False
    return replace(inputs, present=present)


def _require_grad(inputs: AttentionInputs) -> AttentionInputs:
    """Return copies of the inputs that require gradients."""
    keys = inputs.keys.detach().clone().requires_grad_()
    same = inputs.queries is inputs.keys
    queries = keys if same else inputs.queries.detach().clone().requires_grad_()
    return replace(inputs, queries=queries, keys=keys)


def _inputs(inputs: AttentionInputs) -> list[tuple[str, Tensor]]:
    """Return keys and queries, unless queries are absent or the same as keys."""
    separate = inputs.queries is not inputs.keys and inputs.queries.numel() > 0
    return [("keys", inputs.keys), *([("queries", inputs.queries)] if separate else [])]


def _weighted_total(case: AttentionCase, module: nn.Module, inputs: AttentionInputs) -> Tensor:
    return case.total(AttentionOutput(*case.attend(module, inputs)), inputs)


def _gradients(
    case: AttentionCase, module: nn.Module, inputs: AttentionInputs, leaves: list[Any]
) -> list[Tensor | None]:
    """Return the gradient of a result for each leaf; None if it does not depend on it."""
    total = _weighted_total(case, module, inputs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not total.requires_grad or not wanted:
        return [None] * len(leaves)
    # `wanted` is a part of `leaves`: put the gradients back at their places
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _in_format(case: AttentionCase, kind: torch.dtype) -> Failure:
    result = case.run(case.inputs.to(kind), case.copy().to(kind))
    return _not_finite(result) or case.differs(result, tolerance=HALF_PRECISION_TOLERANCE[kind])


def _dtype_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _numpy_state() -> tuple[Any, ...]:
    _, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  other code uses it
    return numbers.tobytes(), *rest  # type: ignore[union-attr]


def _parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _hooks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the number of hooks of each kind, by module."""
    # torch keeps hooks in attributes such as _forward_hooks
    kinds = [name for name in vars(module) if name.endswith("_hooks")]
    return {
        name: tuple(len(getattr(one, kind) or ()) for kind in kinds)
        for name, one in module.named_modules()
    }


def _unregistered_tensors(module: nn.Module) -> Iterator[str]:
    """Yield the attributes with tensors that are neither parameters nor buffers."""
    for name, one in module.named_modules():
        for attribute, value in vars(one).items():
            known = attribute in ("_parameters", "_buffers", "_modules")
            if not known and not attribute.endswith("_hooks") and _contains_tensor(value):
                yield f"{name}.{attribute}" if name else attribute


def _contains_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_contains_tensor, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_contains_tensor, value))
    if is_dataclass(value) and not isinstance(value, type):
        return any(_contains_tensor(getattr(value, one.name)) for one in fields(value))
    return False
