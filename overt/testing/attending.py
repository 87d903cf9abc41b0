"""The promises of an attention module, one small function each: a complaint, or None.

Each runs copies and leaves the module alone. The first four are asked first: where one of them is
broken nothing else can be said.
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
from overt.testing.given import Answer, Attend, Case, Given, apart, is_share, random_given

Complaint = str | None

ROUGH = {torch.bfloat16: 0.1, torch.float16: 0.02}  # what sixteen bits may move


# --- what comes out


def gives_output_and_map(case: Case) -> Complaint:
    """A tensor of floating-point numbers, one row a sample, and an `AttentionMap`."""
    output, attention = case.answer.output, case.answer.attention
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return f"the output is a {type(output).__name__}, not a tensor of floating-point numbers"
    if not isinstance(attention, AttentionMap):
        return f"the map is a {type(attention).__name__}, not an AttentionMap"
    return None


def axes_are_those_asked_for(case: Case) -> Complaint:
    """As many samples, queries and keys come out as went in."""
    return _axes(case.answer, case.given)


def answers_are_finite(case: Case) -> Complaint:
    """No number of output or map is infinite or none at all."""
    return _not_finite(case.answer)


def copies_are_independent(case: Case) -> Complaint:
    """A deep copy that was made after a pass answers the same, and moves nothing when it learns."""
    module = case.copy()
    case.ask(module=module)
    other = copy.deepcopy(module)
    complaint = case.differs(case.ask(module=other))
    if complaint is not None:
        return f"of a copy {complaint}"
    before = {name: value.detach().clone() for name, value in other.named_parameters()}
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1)
    complaint = case.differs(case.ask(module=module))
    with torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(before[name])  # it may be the user's own module that a copy shares
    return None if complaint is None else f"the original moved with its copy: {complaint}"


# --- rows of weights


def weights_are_not_negative(case: Case) -> Complaint:
    """No key gets less than nothing, unless the map says that it is signed."""
    if case.answer.attention.kind is Kind.SIGNED:
        return None
    least = float(case.answer.weights.min())
    return f"a weight is {least:.2g}" if least < 0 else None


def rows_sum_to_one(case: Case) -> Complaint:
    """A row of probabilities gives away all of its attention; a row of amounts some."""
    sums = case.answer.weights.detach().double().sum(dim=-1)
    if case.answer.attention.kind is Kind.AMOUNT:
        return None if (sums > 0).all() else "a row that sees keys keeps none of them"
    if is_share(case.answer.attention):
        away = float((sums - 1).abs().max())
        return f"a row sums to {away:.2g} away from one" if away > 1e-4 else None
    return None


def hidden_keys_get_no_weight(case: Case) -> Complaint:
    """The weight of a key that is not there is exactly zero."""
    hidden = rearrange(~case.given.present, "b k -> b 1 1 1 k")
    most = float((case.answer.weights * hidden).abs().max())
    return f"a key that is not there gets {most:.2g}" if most else None


def hidden_keys_are_not_read(case: Case) -> Complaint:
    """What stands in keys that are not there changes nothing, and gets a gradient of zero."""
    given, hidden = case.given, ~case.given.present[..., None]
    other = replace(given, keys=torch.where(hidden, 20 - 3 * given.keys, given.keys))
    if case.to_itself:
        other = replace(other, queries=other.keys)
    complaint = case.differs(case.ask(other))
    if complaint is not None:
        return complaint
    leaves = _leaves(given)
    (found,) = torch.autograd.grad(_totalled(case, case.copy(), leaves), [leaves.keys])
    most = float((found * hidden).abs().max())
    return f"a key that is not there gets a gradient of {most:.2g}" if most else None


def padding_changes_nothing(case: Case) -> Complaint:
    """The same answer comes with more keys behind that are not there."""
    given, extra = case.given, 2
    count = given.keys.shape[1]
    keys = nn.functional.pad(given.keys, (0, 0, 0, extra))
    longer = Given(
        keys if case.to_itself else given.queries,
        keys,
        nn.functional.pad(given.present, (0, extra)),
        (1, count + extra),
    )
    output, weights = case.there(case.ask(longer), longer)
    if case.to_itself:
        output, weights = output[:, :count], weights[..., :count, :]
    first = zip(
        ("output", "map"),
        (output, weights[..., :count]),
        case.there(case.answer, given),
        strict=True,
    )
    return apart(first, case.tolerance)


def nothing_to_see_gives_nothing(case: Case) -> Complaint:
    """A sample without keys has a row of zeros and an output that is finite."""
    given = _last_without_keys(case.given)
    answer = case.ask(given)
    complaint = _not_finite(answer)
    if complaint is not None:
        return f"without keys {complaint}"
    most = float(answer.weights[-1].abs().max())
    return f"without keys there is still a weight of {most:.2g}" if most else None


def nothing_to_see_has_a_finite_gradient(case: Case) -> Complaint:
    """A sample without keys makes no gradient infinite or none at all."""
    given, module = _leaves(_last_without_keys(case.given)), case.copy()
    named = [*_inputs(given), *module.named_parameters()]
    found = _gradients(case, module, given, [one for _, one in named])
    wrong = [
        name
        for (name, _), gradient in zip(named, found, strict=True)
        if gradient is not None and not gradient.isfinite().all()
    ]
    return f"without keys the gradient of {wrong[0]} is not finite" if wrong else None


# --- samples, keys and queries


def samples_stand_alone(case: Case) -> Complaint:
    """A sample is answered the same alone as in a batch."""
    for at in range(len(case.given.keys)):
        found = case.ask(case.given.select([at]))
        given = case.given.select([at])
        expected = (part[[at]] for part in case.there(case.answer, case.given))
        complaint = apart(
            zip(("output", "map"), case.there(found, given), expected, strict=True), case.tolerance
        )
        if complaint is not None:
            return f"of sample {at} alone {complaint}"
    return None


def samples_may_come_in_any_order(case: Case) -> Complaint:
    """Samples in another order give the same answers in that order."""
    order = list(reversed(range(len(case.given.keys))))
    given = case.given.select(order)
    expected = (part[order] for part in case.there(case.answer, case.given))
    return apart(
        zip(("output", "map"), case.there(case.ask(given), given), expected, strict=True),
        case.tolerance,
    )


def keys_may_come_in_any_order(case: Case) -> Complaint:
    """Keys in another order get the same weights in that order, and make the same output."""
    given = case.given
    order = torch.arange(given.keys.shape[1]).flip(0).roll(2)
    keys = given.keys[:, order]
    queries = keys if case.to_itself else given.queries
    turned = Given(queries, keys, given.present[:, order], given.shape)
    output, weights = case.there(case.answer, given)
    weights = weights[..., order]
    if case.to_itself:
        output, weights = output[:, order], weights[..., order, :]
    found = case.there(case.ask(turned), turned)
    return apart(zip(("output", "map"), found, (output, weights), strict=True), case.tolerance)


def queries_stand_alone(case: Case) -> Complaint:
    """A query is answered the same alone as among others."""
    if case.to_itself or case.given.queries.shape[1] == 1:
        return None
    for at in range(case.given.queries.shape[1]):
        alone = replace(case.given, queries=case.given.queries[:, [at]])
        found = case.ask(alone)
        expected = case.answer.output[:, [at]], case.answer.weights[..., [at], :]
        pairs = zip(("output", "map"), (found.output, found.weights), expected, strict=True)
        complaint = apart(pairs, case.tolerance)
        if complaint is not None:
            return f"of query {at} alone {complaint}"
    return None


def a_batch_may_be_empty(case: Case) -> Complaint:
    """No samples give no answers, and no error."""
    return _axes(case.ask(case.given.select([])), case.given.select([]))


def other_numbers_of_keys_are_allowed(case: Case) -> Complaint:
    """One key, or other shapes of the grid, are answered by the same weights."""
    for shape in ((1, 1), (3, 3), (5, 2)):
        count = shape[0] * shape[1]
        given = random_given(case.sizes, shape, [count, count, (count + 1) // 2])
        answer = case.ask(given)
        complaint = _axes(answer, given) or _not_finite(answer)
        if complaint is not None:
            return f"with {shape[0]} x {shape[1]} keys {complaint}"
    return None


# --- what a pass may not do


def eval_is_deterministic(case: Case) -> Complaint:
    """The same question gets exactly the same answer twice, whatever the random state."""
    module = case.copy()
    torch.manual_seed(1)
    first = case.ask(module=module)
    torch.manual_seed(2)
    return case.differs(case.ask(module=module), first, tolerance=0.0)


def eval_draws_no_random_numbers(case: Case) -> Complaint:
    """A pass in eval mode leaves the generators of torch, numpy and Python as they were."""
    module = case.copy()
    before = torch.get_rng_state(), random.getstate(), _numpy_state()
    case.ask(module=module)
    after = torch.get_rng_state(), random.getstate(), _numpy_state()
    same = torch.equal(before[0], after[0]), before[1] == after[1], before[2] == after[2]
    names = [n for n, kept in zip(("torch", "random", "numpy"), same, strict=True) if not kept]
    return f"a pass in eval mode drew from the generator of {names[0]}" if names else None


def both_modes_work_and_stay(case: Case) -> Complaint:
    """A pass works in train and in eval mode, and switches no part between them."""
    module = case.copy()
    for training in (True, False):
        mode = "train" if training else "eval"
        module.train(training)
        complaint = _not_finite(case.ask(module=module))
        if complaint is not None:
            return f"in {mode} mode {complaint}"
        moved = [name for name, one in module.named_modules() if one.training is not training]
        if moved:
            return f"a pass in {mode} mode switched {moved[0] or 'the module'}"
    return None


def inputs_are_left_alone(case: Case) -> Complaint:
    """No tensor that goes in is written to."""
    given = case.given.clone()
    case.attend(case.copy(), given)
    for name in ("queries", "keys", "present"):
        if not torch.equal(getattr(given, name), getattr(case.given, name)):
            return f"a pass changed the {name} it was given"
    return None


def module_is_left_as_found(case: Case) -> Complaint:
    """A pass in eval mode changes no weight and no buffer, and leaves no gradient."""
    module = case.copy()
    before = {name: value.clone() for name, value in _own(module)}
    wanted = [value.requires_grad for value in module.parameters()]
    case.ask(module=module)
    moved = [name for name, value in _own(module) if not torch.equal(value, before[name])]
    if moved:
        return f"a pass in eval mode changed {moved[0]}"
    if [value.requires_grad for value in module.parameters()] != wanted:
        return "a pass changed what requires a gradient"
    left = [name for name, value in module.named_parameters() if value.grad is not None]
    return f"a pass left a gradient at {left[0]}" if left else None


def hooks_are_left_alone(case: Case) -> Complaint:
    """Hooks of the user are called and stay, and a pass leaves none of its own."""
    module, calls = case.copy(), []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    before = _hooks(module)
    case.ask(module=module)
    changed = [name for name, number in _hooks(module).items() if before[name] != number]
    handle.remove()
    if changed:
        return f"a pass changed the hooks of {changed[0] or 'the module'}"
    return None if calls else "a hook on the module was not called"


def nothing_is_kept_after_a_pass(case: Case) -> Complaint:
    """No tensor of a pass stays on the module: it would hold the graph and its memory."""
    module = case.copy()
    before = set(_held(module))
    case.ask(module=module)
    kept = sorted(set(_held(module)) - before)
    return f"after a pass {kept[0]} holds a tensor" if kept else None


def calls_do_not_mix(case: Case) -> Complaint:
    """A pass inside another one, and passes in other threads, get the answers of their own."""
    other = random_given(case.sizes, case.given.shape, [6, 5, 3], seed=1)
    questions = (case.given, other)
    expected = [case.ask(one) for one in questions]
    module = case.copy()
    busy: list[int] = []

    def interrupt(*_: Any) -> None:
        if not busy:
            busy.append(1)
            case.ask(other, module)
            busy.clear()

    handles = [one.register_forward_hook(interrupt) for one in module.modules() if one != module]
    complaint = case.differs(case.ask(module=module))
    for handle in handles:
        handle.remove()
    if complaint is not None:
        return f"after a pass in the middle of it {complaint}"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: case.ask(questions[at % 2], module), range(8)))
    for at, answer in enumerate(found):
        pairs = zip(
            ("output", "map"),
            case.there(answer, questions[at % 2]),
            case.there(expected[at % 2], questions[at % 2]),
            strict=True,
        )
        complaint = apart(pairs, case.tolerance)
        if complaint is not None:
            return f"beside other threads {complaint}"
    return None


# --- state


def state_can_be_saved(case: Case) -> Complaint:
    """The state is tensors by name, and safetensors gives back what it was given."""
    from safetensors.torch import load, save

    state = case.copy().state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        return f"{odd[0]} in the state is a {type(state[odd[0]]).__name__}, not a tensor"
    plain = {name: value.detach().clone().contiguous() for name, value in state.items()}
    again = load(save(plain))
    lost = [n for n, value in plain.items() if n not in again or not torch.equal(again[n], value)]
    return f"{lost[0]} does not come back" if lost else None


def state_is_the_whole_state(case: Case) -> Complaint:
    """A module with other weights that loads the state answers the same."""
    module, other = case.copy(), case.copy()
    with torch.no_grad():
        for value in other.state_dict().values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.mul_(1.5).add_(0.1)
    other.load_state_dict(module.state_dict())
    return case.differs(case.ask(module=other))


def no_tensor_hides_from_the_state(case: Case) -> Complaint:
    """Every tensor is a parameter or a buffer: else no checkpoint, device or format reaches it."""
    held = sorted(_held(case.copy()))
    return f"{held[0]} holds a tensor that is no parameter and no buffer" if held else None


# --- gradients


def gradient_reaches_every_parameter(case: Case) -> Complaint:
    """Output and map together send a finite gradient to every parameter that wants one."""
    module = case.copy()
    named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    named = [one for one in named if not one[0].startswith(case.unreached or ("\0",))]
    found = _gradients(case, module, case.given, [value for _, value in named])
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is None:
            return f"no gradient reaches {name}"
        if not gradient.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


def gradient_reaches_every_input(case: Case) -> Complaint:
    """Queries and keys get a gradient, in 64 bits, that is not zero."""
    module, given = case.copy().double(), _leaves(case.given.to(torch.float64))
    leaves = _inputs(given)
    found = _gradients(case, module, given, [one for _, one in leaves])
    for (name, _), gradient in zip(leaves, found, strict=True):
        if gradient is None or float(gradient.abs().max()) < 1e-10:
            return f"no gradient reaches the {name}"
    return None


def map_can_be_supervised(case: Case) -> Complaint:
    """The map has a gradient: a loss on it reaches a weight or an input."""
    module, given = case.copy(), _leaves(case.given)
    leaves = [*(one for _, one in _inputs(given)), *module.parameters()]
    weights = Answer(*case.attend(module, given)).weights
    if not weights.requires_grad:
        return "the map has no gradient, so no loss on it can teach anything"
    share = torch.rand(weights.shape, generator=torch.Generator().manual_seed(3)).to(weights)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad((weights * share).sum(), wanted, allow_unused=True)
    if not any(one is not None and bool(one.any()) for one in found):
        return "the gradient of the map reaches nothing"
    return None


def gradient_is_right(case: Case) -> Complaint:
    """In 64 bits the gradient is that of finite differences, for inputs and parameters."""
    module, given = case.copy().double(), _leaves(case.given.to(torch.float64))
    leaves = [one for _, one in _inputs(given)]
    leaves += [value for value in module.parameters() if value.requires_grad]
    found = _gradients(case, module, given, leaves)
    moving = [leaf for leaf, g in zip(leaves, found, strict=True) if g is not None and g.any()]
    if not moving:
        return None

    def answer(*_: Tensor) -> tuple[Tensor, ...]:
        # finite differences move the leaves themselves, which is where a module reads them
        made = Answer(*case.attend(module, given))
        return tuple(part for part in case.there(made, given) if part.requires_grad)

    try:
        torch.autograd.gradcheck(answer, moving, fast_mode=True)
    except GradcheckError as error:
        first = " ".join(str(error).split())
        return f"finite differences disagree: {first[:120]}"
    return None


# --- number formats


def bfloat16_is_allowed(case: Case) -> Complaint:
    """In bfloat16 the answer is finite and about the same."""
    return _in_format(case, torch.bfloat16)


def float16_is_allowed(case: Case) -> Complaint:
    """In float16 the answer is finite and about the same."""
    return _in_format(case, torch.float16)


def output_keeps_the_number_format(case: Case) -> Complaint:
    """What goes in as 16, 32 or 64 bits comes out as such."""
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        output = case.ask(case.given.to(kind), case.copy().to(kind)).output
        if output.dtype is not kind:
            return f"{_short(kind)} went in and {_short(output.dtype)} came out"
    return None


def autocast_is_allowed(case: Case) -> Complaint:
    """Under autocast to bfloat16 the answer is finite and about the same."""
    with torch.autocast("cpu", torch.bfloat16):
        answer = case.ask()
    return _not_finite(answer) or case.differs(answer, tolerance=ROUGH[torch.bfloat16])


def large_scores_stay_finite(case: Case) -> Complaint:
    """Keys ten thousand times as large give finite answers and finite gradients."""
    keys = case.given.keys * 1e4
    large = replace(case.given, keys=keys, queries=keys if case.to_itself else case.given.queries)
    large = _leaves(large)
    module = case.copy()
    complaint = _not_finite(case.ask(large, module))
    if complaint is not None:
        return complaint
    named = [*_inputs(large), *module.named_parameters()]
    found = _gradients(case, module, large, [one for _, one in named])
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is not None and not gradient.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


# --- ways to run it


def gradients_may_be_off(case: Case) -> Complaint:
    """Without gradients, and in inference mode, the answer is the same and has no graph."""
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            answer = case.ask()
            complaint = case.differs(answer)
        if complaint is not None:
            return f"under {off.__name__} {complaint}"
        if answer.output.requires_grad:
            return f"under {off.__name__} the output has a graph"
    return None


def inputs_may_be_strided(case: Case) -> Complaint:
    """Views that do not lie in a row in memory are answered alike."""
    given = case.given
    keys = given.keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(*given.queries.shape[:-1], 2 * given.queries.shape[-1])
    wide[..., ::2] = given.queries
    queries = keys if case.to_itself else wide[..., ::2]
    present = given.present.t().contiguous().t()
    output, attention = case.attend(case.copy(), Given(queries, keys, present, given.shape))
    return case.differs(Answer(output, attention))


def device_can_be_changed(case: Case) -> Complaint:
    """On the meta device everything is there, with the right shapes: no tensor stayed behind."""
    output, attention = case.attend(case.copy().to("meta"), case.given.to("meta"))
    if output.device.type != "meta" or attention.values.device.type != "meta":
        return "a tensor came out on another device than went in"
    if output.shape != case.answer.output.shape:
        return f"the output has shape {tuple(output.shape)} there"
    return None


def can_be_compiled(case: Case) -> Complaint:
    """`torch.compile` gives the same answer; parts that it leaves out are fine."""
    torch.compiler.reset()  # else a module of the same class may already be at its limit
    module = case.copy()
    compiled = torch.compile(module, backend="eager")
    try:
        found = case.ask(module=compiled)  # type: ignore[arg-type]
    finally:
        torch.compiler.reset()
    return case.differs(found)


def can_be_exported(case: Case) -> Complaint:
    """`torch.export` makes one whole graph of it that gives the same answer."""
    given = case.given.clone()
    tensors = (given.queries, given.keys, given.present)
    plain = _Plain(case.copy(), case.attend, given.shape).eval()
    output, weights = torch.export.export(plain, tensors).module()(*tensors)
    told = replace(case.answer.attention, values=weights, form=Form.PLAIN)
    return case.differs(Answer(output, told))


class _Plain(nn.Module):
    """A module and how it is called, from tensors to tensors."""

    def __init__(self, module: nn.Module, attend: Attend, shape: tuple[int, int]) -> None:
        super().__init__()
        self.module, self.attend, self.shape = module, attend, shape

    def forward(self, queries: Tensor, keys: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the weights."""
        answer = Answer(*self.attend(self.module, Given(queries, keys, present, self.shape)))
        return answer.output, answer.weights


Check = Callable[[Case], Complaint]

FIRST: tuple[Check, ...] = (
    gives_output_and_map,
    axes_are_those_asked_for,
    answers_are_finite,
    copies_are_independent,
)
THEN: tuple[Check, ...] = (
    weights_are_not_negative,
    rows_sum_to_one,
    hidden_keys_get_no_weight,
    hidden_keys_are_not_read,
    padding_changes_nothing,
    nothing_to_see_gives_nothing,
    nothing_to_see_has_a_finite_gradient,
    samples_stand_alone,
    samples_may_come_in_any_order,
    keys_may_come_in_any_order,
    queries_stand_alone,
    a_batch_may_be_empty,
    other_numbers_of_keys_are_allowed,
    eval_is_deterministic,
    eval_draws_no_random_numbers,
    both_modes_work_and_stay,
    inputs_are_left_alone,
    module_is_left_as_found,
    hooks_are_left_alone,
    nothing_is_kept_after_a_pass,
    calls_do_not_mix,
    state_can_be_saved,
    state_is_the_whole_state,
    no_tensor_hides_from_the_state,
    gradient_reaches_every_parameter,
    gradient_reaches_every_input,
    map_can_be_supervised,
    gradient_is_right,
    bfloat16_is_allowed,
    float16_is_allowed,
    output_keeps_the_number_format,
    autocast_is_allowed,
    large_scores_stay_finite,
    gradients_may_be_off,
    inputs_may_be_strided,
    device_can_be_changed,
    can_be_compiled,
    can_be_exported,
)

SLOW: tuple[Check, ...] = (can_be_compiled, can_be_exported)  # a second or more


# --- helpers


def _axes(answer: Answer, given: Given) -> Complaint:
    samples, count = given.keys.shape[:2]
    if len(answer.output) != samples:
        return f"{len(answer.output)} outputs for {samples} samples"
    found = answer.attention.values.shape
    if found[0] != samples or found[-1] != count:
        return f"the map has shape {tuple(found)} for {samples} samples and {count} keys"
    if found[-2] != given.queries.shape[1]:
        return f"the map has {found[-2]} queries in the place of {given.queries.shape[1]}"
    return None


def _not_finite(answer: Answer) -> Complaint:
    for name, part in (("output", answer.output), ("map", answer.weights)):
        if not part.isfinite().all():
            return f"the {name} is not finite"
    return None


def _last_without_keys(given: Given) -> Given:
    present = given.present.clone()
    present[-1] = False
    return replace(given, present=present)


def _leaves(given: Given) -> Given:
    """The same numbers as leaves that want a gradient."""
    keys = given.keys.detach().clone().requires_grad_()
    same = given.queries is given.keys
    queries = keys if same else given.queries.detach().clone().requires_grad_()
    return replace(given, queries=queries, keys=keys)


def _inputs(given: Given) -> list[tuple[str, Tensor]]:
    """Keys and queries, where there are any apart from the keys."""
    apart_ = given.queries is not given.keys and given.queries.numel() > 0
    return [("keys", given.keys), *([("queries", given.queries)] if apart_ else [])]


def _totalled(case: Case, module: nn.Module, given: Given) -> Tensor:
    return case.total(Answer(*case.attend(module, given)), given)


def _gradients(
    case: Case, module: nn.Module, given: Given, leaves: list[Any]
) -> list[Tensor | None]:
    """The gradient of all of an answer for each leaf; None where there is no way to it."""
    total = _totalled(case, module, given)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not total.requires_grad or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _in_format(case: Case, kind: torch.dtype) -> Complaint:
    answer = case.ask(case.given.to(kind), case.copy().to(kind))
    return _not_finite(answer) or case.differs(answer, tolerance=ROUGH[kind])


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _numpy_state() -> tuple[Any, ...]:
    _, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  foreign code draws from it
    return numbers.tobytes(), *rest  # type: ignore[union-attr]


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _hooks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """How many hooks of each kind each part has."""
    kinds = [name for name in vars(module) if name.endswith("_hooks")]
    return {
        name: tuple(len(getattr(one, kind) or ()) for kind in kinds)
        for name, one in module.named_modules()
    }


def _held(module: nn.Module) -> Iterator[str]:
    """Where tensors stand that are neither parameters nor buffers."""
    for name, one in module.named_modules():
        for attribute, value in vars(one).items():
            known = attribute in ("_parameters", "_buffers", "_modules")
            if not known and not attribute.endswith("_hooks") and _holds(value):
                yield f"{name}.{attribute}" if name else attribute


def _holds(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds, value))
    if is_dataclass(value) and not isinstance(value, type):
        return any(_holds(getattr(value, one.name)) for one in fields(value))
    return False
