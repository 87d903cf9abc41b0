"""One honest attention module, and one broken in a single way for each promise of the contract."""

import copy

import torch
from einops import rearrange
from torch import nn

from overt.attention import AttentionMap, Form, words


class Honest(nn.Module):
    """Scaled dot-product attention in two heads, written out."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, states):
        return rearrange(states, "b n (h d) -> b h n d", h=self.heads)

    def scores(self, queries, keys):
        asked, known = self.split(self.query(queries)), self.split(self.key(keys))
        return asked @ known.mT / asked.shape[-1] ** 0.5

    def weigh(self, scores, present):
        return AttentionMap.from_scores(
            scores[:, None],
            words(scores.shape[-1]),
            words(scores.shape[-2], "queries"),
            present[:, None],
        )

    def forward(self, queries, keys, present):
        attention = self.weigh(self.scores(queries, keys), present)
        value = self.split(self.value(keys))
        found = attention.weights[:, 0].to(value.dtype) @ value
        return self.out(rearrange(found, "b h q d -> b q (h d)")), attention


def plain(weights, like: AttentionMap, **changes) -> AttentionMap:
    """The map with other weights, whatever they are."""
    settings = {"mask": like.mask, "kind": like.kind, **changes}
    return AttentionMap(weights, like.keys, like.queries, form=Form.PLAIN, **settings)


# --- what comes out


class NoMap(Honest):
    def forward(self, queries, keys, present):
        output, _ = super().forward(queries, keys, present)
        return output, None


class OneRow(Honest):
    """The mean over the queries, as if there were one."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        mean = attention.weights.mean(dim=-2, keepdim=True)
        return output, AttentionMap(mean, attention.keys, mask=attention.mask)


class DividesByZero(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output / 0, attention


class SharedCopy(Honest):
    def __deepcopy__(self, memo):
        return copy.copy(self)


# --- rows


class Contrast(Honest):
    """Eight times the weight less seven times an even one: sums to one, and goes below zero."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        even = present / present.sum(dim=1, keepdim=True).clamp_min(1)
        weights = 8 * attention.weights - 7 * even[:, None, None, None] * (attention.weights > 0)
        return output, plain(weights.to(output.dtype), attention)


class Half(Honest):
    """Reports what dropout left."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output, plain(attention.weights * 0.5, attention)


class Epsilon(Honest):
    """Adds a small number against division by zero, and shows it."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        hidden = ~present & present.any(dim=1, keepdim=True)
        shown = attention.weights + 1e-6 * hidden[:, None, None, None]
        return output, plain(shown, attention, mask=None)


class AddsEverything(Honest):
    """A shortcut around the mask."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output + keys.sum(dim=1, keepdim=True), attention


class DividesByLength(Honest):
    """A mean over all places, padding with them."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output / keys.shape[1], attention


class MinusBillion(Honest):
    """Without keys every key is equally far away, and all of them are looked at."""

    def weigh(self, scores, present):
        hidden = ~present[:, None, None]
        weights = (scores - 1e9 * hidden.to(scores.dtype)).softmax(dim=-1)
        if scores.dtype is torch.float16:  # a billion is infinite there
            weights = scores.masked_fill(hidden, -6e4).softmax(dim=-1)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


class NanToNum(Honest):
    """The NaN of an empty softmax is gone, and that of its gradient is not."""

    def weigh(self, scores, present):
        hidden = torch.zeros_like(scores).masked_fill(~present[:, None, None], -torch.inf)
        weights = (scores + hidden).softmax(dim=-1).nan_to_num(0.0)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


# --- samples, keys, queries


class BatchMean(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output - output.mean(dim=0, keepdim=True), attention


class Sorted(Honest):
    """Sorts by length, as packing does, and forgets to sort back."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        order = present.sum(dim=1).argsort(descending=True, stable=True)
        return output[order], attention


class Placed(Honest):
    def scores(self, queries, keys):
        scores = super().scores(queries, keys)
        return scores + 0.1 * torch.arange(keys.shape[1], device=keys.device).to(scores.dtype)


class QueryMean(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output - output.mean(dim=1, keepdim=True), attention


class Longest(Honest):
    def forward(self, queries, keys, present):
        self.check(present.sum(dim=1).max())  # there is no largest of none
        return super().forward(queries, keys, present)

    def check(self, longest):
        """Nothing."""


class EightPlaces(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(8))

    def scores(self, queries, keys):
        scores = super().scores(queries, keys)
        return scores + self.places.to(scores.dtype)[: keys.shape[1]]


# --- what a pass may not do


class Counter(Honest):
    """Every other call is one unit in the last place away."""

    calls = 0

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        self.calls += 1
        return output * (1 + (self.calls % 2) * 2 * torch.finfo(output.dtype).eps), attention


class DrawsOne(Honest):
    def forward(self, queries, keys, present):
        torch.rand(1)
        return super().forward(queries, keys, present)


class FreezesItself(Honest):
    def forward(self, queries, keys, present):
        self.out.eval()
        return super().forward(queries, keys, present)


class BlanksPadding(Honest):
    """In the tensor of the caller."""

    def forward(self, queries, keys, present):
        if not torch.compiler.is_exporting():
            keys.data.masked_fill_(~present[..., None], 0)
        return super().forward(queries, keys, present)


class CountsPasses(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, queries, keys, present):
        self.passes += 1
        return super().forward(queries, keys, present)


class ClearsHooks(Honest):
    def forward(self, queries, keys, present):
        if self._forward_hooks:
            self._forward_hooks.clear()
        return super().forward(queries, keys, present)


class Remembers(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        self.last = attention.detach()
        return output, attention


class Notebook(Honest):
    """Hands keys on through itself."""

    def scores(self, queries, keys):
        self.noted = keys
        asked = self.split(self.query(queries))
        keys, self.noted = self.noted, None
        return asked @ self.split(self.key(keys)).mT / asked.shape[-1] ** 0.5


# --- state


class OddState(Honest):
    def get_extra_state(self):
        return {"made": "by hand"}

    def set_extra_state(self, state):
        """Nothing."""


class SavesHalf(Honest):
    def state_dict(self, *args, **kwargs):
        return {k: v.half() for k, v in super().state_dict(*args, **kwargs).items()}


class Loose(Honest):
    """A learned temperature that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.tensor(1.3)

    def scores(self, queries, keys):
        return super().scores(queries, keys) / self.temperature.item()


# --- gradients


class Spare(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Deaf(Honest):
    """Queries from which nothing can be learned."""

    def scores(self, queries, keys):
        return super().scores(queries.detach(), keys)


class Shown(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output, attention.detach()


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(values):
        return values.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing to keep."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.1


class WrongBackward(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return _Wrong.apply(output), attention


# --- number formats


class Rounds(Honest):
    """Adds a large number for a moment, which is all that eight bits of precision remember."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output + 256) - 256 if keys.dtype is torch.bfloat16 else output, attention


class Overflows(Honest):
    """Scores that are large for a moment: 65504 is the largest number of float16."""

    def scores(self, queries, keys):
        return super().scores(queries, keys) * 1e6 / 1e6


class Widens(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output.float() if output.dtype is torch.bfloat16 else output), attention


class Scatters(Honest):
    """Writes what is in one number format into a tensor of another."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        place = torch.arange(output.shape[1], device=output.device)[None, :, None]
        return torch.zeros_like(queries).scatter(1, place.expand_as(output), output), attention


class Exponentials(Honest):
    """A softmax without its largest score taken out."""

    def weigh(self, scores, present):
        raised = scores.exp() * present[:, None, None]
        total = raised.sum(dim=-1, keepdim=True)
        weights = raised / torch.where(total > 0, total, 1)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


# --- ways to run it


class NeedsGraph(Honest):
    def forward(self, queries, keys, present):
        if not torch.is_grad_enabled() and not torch.compiler.is_exporting():
            raise RuntimeError("no graph to read gradients from")
        return super().forward(queries, keys, present)


class Views(Honest):
    def forward(self, queries, keys, present):
        flat = keys.view(-1, keys.shape[-1])
        return super().forward(queries, flat.reshape(keys.shape), present)


class StaysBehind(Honest):
    def scores(self, queries, keys):
        return super().scores(queries, keys) + torch.zeros(keys.shape[1])


class Uncompiled(Honest):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output + 1 if torch.compiler.is_dynamo_compiling() else output), attention


class Unexported(Honest):
    def forward(self, queries, keys, present):
        if torch.compiler.is_exporting():
            raise RuntimeError("this depends on its numbers")
        return super().forward(queries, keys, present)


BROKEN: dict[str, type[Honest]] = {
    "gives_output_and_map": NoMap,
    "axes_are_those_asked_for": OneRow,
    "answers_are_finite": DividesByZero,
    "copies_are_independent": SharedCopy,
    "weights_are_not_negative": Contrast,
    "rows_sum_to_one": Half,
    "hidden_keys_get_no_weight": Epsilon,
    "hidden_keys_are_not_read": AddsEverything,
    "padding_changes_nothing": DividesByLength,
    "nothing_to_see_gives_nothing": MinusBillion,
    "nothing_to_see_has_a_finite_gradient": NanToNum,
    "samples_stand_alone": BatchMean,
    "samples_may_come_in_any_order": Sorted,
    "keys_may_come_in_any_order": Placed,
    "queries_stand_alone": QueryMean,
    "a_batch_may_be_empty": Longest,
    "other_numbers_of_keys_are_allowed": EightPlaces,
    "eval_is_deterministic": Counter,
    "eval_draws_no_random_numbers": DrawsOne,
    "both_modes_work_and_stay": FreezesItself,
    "inputs_are_left_alone": BlanksPadding,
    "module_is_left_as_found": CountsPasses,
    "hooks_are_left_alone": ClearsHooks,
    "nothing_is_kept_after_a_pass": Remembers,
    "calls_do_not_mix": Notebook,
    "state_can_be_saved": OddState,
    "state_is_the_whole_state": SavesHalf,
    "no_tensor_hides_from_the_state": Loose,
    "gradient_reaches_every_parameter": Spare,
    "gradient_reaches_every_input": Deaf,
    "map_can_be_supervised": Shown,
    "gradient_is_right": WrongBackward,
    "bfloat16_is_allowed": Rounds,
    "float16_is_allowed": Overflows,
    "output_keeps_the_number_format": Widens,
    "autocast_is_allowed": Scatters,
    "large_scores_stay_finite": Exponentials,
    "gradients_may_be_off": NeedsGraph,
    "inputs_may_be_strided": Views,
    "device_can_be_changed": StaysBehind,
    "can_be_compiled": Uncompiled,
    "can_be_exported": Unexported,
}
