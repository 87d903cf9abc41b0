"""A correct attention module, and one broken module per check of the contract."""

import copy

import torch
from einops import rearrange
from torch import nn

from overt.attention import AttentionMap, Form, words


class CorrectAttention(nn.Module):
    """Scaled dot-product attention in two heads as explicit softmax."""

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
    """Make a map with other weights, without checks."""
    settings = {"mask": like.mask, "kind": like.kind, **changes}
    return AttentionMap(weights, like.keys, like.queries, form=Form.PLAIN, **settings)


# --- output


class NoMap(CorrectAttention):
    def forward(self, queries, keys, present):
        output, _ = super().forward(queries, keys, present)
        return output, None


class OneRow(CorrectAttention):
    """Returns the mean map over the queries."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        mean = attention.weights.mean(dim=-2, keepdim=True)
        return output, AttentionMap(mean, attention.keys, mask=attention.mask)


class DividesByZero(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output / 0, attention


class SharedCopy(CorrectAttention):
    def __deepcopy__(self, memo):
        return copy.copy(self)


# --- rows


class NegativeWeights(CorrectAttention):
    """Eight times the weight minus seven times a uniform one: sums to one, may be negative."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        even = present / present.sum(dim=1, keepdim=True).clamp_min(1)
        weights = 8 * attention.weights - 7 * even[:, None, None, None] * (attention.weights > 0)
        return output, plain(weights.to(output.dtype), attention)


class HalvesWeights(CorrectAttention):
    """Returns a map after dropout, with half of the weight."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output, plain(attention.weights * 0.5, attention)


class AddsEpsilon(CorrectAttention):
    """Returns the epsilon that is added against division by zero."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        hidden = ~present & present.any(dim=1, keepdim=True)
        shown = attention.weights + 1e-6 * hidden[:, None, None, None]
        return output, plain(shown, attention, mask=None)


class AddsEverything(CorrectAttention):
    """Reads masked keys by a residual connection."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output + keys.sum(dim=1, keepdim=True), attention


class DividesByLength(CorrectAttention):
    """Averages over all positions including padding."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output / keys.shape[1], attention


class MinusBillion(CorrectAttention):
    """Adds -1e9 to masked scores: without visible keys the weights are uniform."""

    def weigh(self, scores, present):
        hidden = ~present[:, None, None]
        weights = (scores - 1e9 * hidden.to(scores.dtype)).softmax(dim=-1)
        if scores.dtype is torch.float16:  # 1e9 is infinite in float16
            weights = scores.masked_fill(hidden, -6e4).softmax(dim=-1)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


class NanToNum(CorrectAttention):
    """Replaces NaN in the weights of empty rows but not in their gradient."""

    def weigh(self, scores, present):
        hidden = torch.zeros_like(scores).masked_fill(~present[:, None, None], -torch.inf)
        weights = (scores + hidden).softmax(dim=-1).nan_to_num(0.0)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


# --- samples, keys, queries


class BatchMean(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output - output.mean(dim=0, keepdim=True), attention


class Sorted(CorrectAttention):
    """Sorts samples by length, as packing does, without restoring the order."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        order = present.sum(dim=1).argsort(descending=True, stable=True)
        return output[order], attention


class UsesPositions(CorrectAttention):
    def scores(self, queries, keys):
        scores = super().scores(queries, keys)
        return scores + 0.1 * torch.arange(keys.shape[1], device=keys.device).to(scores.dtype)


class QueryMean(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output - output.mean(dim=1, keepdim=True), attention


class MaximumLength(CorrectAttention):
    def forward(self, queries, keys, present):
        self.check(present.sum(dim=1).max())  # the maximum of an empty batch raises
        return super().forward(queries, keys, present)

    def check(self, longest):
        """Do nothing."""


class EightPositions(CorrectAttention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(8))

    def scores(self, queries, keys):
        scores = super().scores(queries, keys)
        return scores + self.positions.to(scores.dtype)[: keys.shape[1]]


# --- side effects


class AlternatingOutput(CorrectAttention):
    """Changes every second output by one unit in the last place."""

    calls = 0

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        self.calls += 1
        return output * (1 + (self.calls % 2) * 2 * torch.finfo(output.dtype).eps), attention


class DrawsOne(CorrectAttention):
    def forward(self, queries, keys, present):
        torch.rand(1)
        return super().forward(queries, keys, present)


class ChangesMode(CorrectAttention):
    def forward(self, queries, keys, present):
        self.out.eval()
        return super().forward(queries, keys, present)


class BlanksPadding(CorrectAttention):
    """Writes into the tensor of the caller."""

    def forward(self, queries, keys, present):
        if not torch.compiler.is_exporting():
            keys.data.masked_fill_(~present[..., None], 0)
        return super().forward(queries, keys, present)


class CountsPasses(CorrectAttention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, queries, keys, present):
        self.passes += 1
        return super().forward(queries, keys, present)


class ClearsHooks(CorrectAttention):
    def forward(self, queries, keys, present):
        if self._forward_hooks:
            self._forward_hooks.clear()
        return super().forward(queries, keys, present)


class RetainsMap(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        self.last = attention.detach()
        return output, attention


class StoresKeys(CorrectAttention):
    """Passes keys through an attribute of the module."""

    def scores(self, queries, keys):
        self.noted = keys
        asked = self.split(self.query(queries))
        keys, self.noted = self.noted, None
        return asked @ self.split(self.key(keys)).mT / asked.shape[-1] ** 0.5


# --- state


class ExtraState(CorrectAttention):
    def get_extra_state(self):
        return {"made": "by hand"}

    def set_extra_state(self, state):
        """Do nothing."""


class SavesHalf(CorrectAttention):
    def state_dict(self, *args, **kwargs):
        return {k: v.half() for k, v in super().state_dict(*args, **kwargs).items()}


class UnregisteredTensor(CorrectAttention):
    """A temperature that is not part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.tensor(1.3)

    def scores(self, queries, keys):
        return super().scores(queries, keys) / self.temperature.item()


# --- gradients


class UnusedLayer(CorrectAttention):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class DetachesQueries(CorrectAttention):
    """Gives queries no gradient."""

    def scores(self, queries, keys):
        return super().scores(queries.detach(), keys)


class DetachesMap(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return output, attention.detach()


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(values):
        return values.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save nothing."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.1


class WrongBackward(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return _WrongGradient.apply(output), attention


# --- dtypes


class RoundsOutput(CorrectAttention):
    """Adds and subtracts 256, which loses the digits of bfloat16."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output + 256) - 256 if keys.dtype is torch.bfloat16 else output, attention


class Overflows(CorrectAttention):
    """Multiplies scores by 1e6 and divides again: the largest float16 is 65504."""

    def scores(self, queries, keys):
        return super().scores(queries, keys) * 1e6 / 1e6


class WidensOutput(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output.float() if output.dtype is torch.bfloat16 else output), attention


class ScattersOutput(CorrectAttention):
    """Scatters values of one dtype into a tensor of another."""

    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        place = torch.arange(output.shape[1], device=output.device)[None, :, None]
        return torch.zeros_like(queries).scatter(1, place.expand_as(output), output), attention


class Exponentials(CorrectAttention):
    """Computes softmax without subtracting the maximum."""

    def weigh(self, scores, present):
        raised = scores.exp() * present[:, None, None]
        total = raised.sum(dim=-1, keepdim=True)
        weights = raised / torch.where(total > 0, total, 1)
        keys, queries = words(scores.shape[-1]), words(scores.shape[-2], "queries")
        return AttentionMap(weights[:, None], keys, queries, present[:, None])


# --- execution modes


class NeedsGraph(CorrectAttention):
    def forward(self, queries, keys, present):
        if not torch.is_grad_enabled() and not torch.compiler.is_exporting():
            raise RuntimeError("no graph to read gradients from")
        return super().forward(queries, keys, present)


class ViewsInput(CorrectAttention):
    def forward(self, queries, keys, present):
        flat = keys.view(-1, keys.shape[-1])
        return super().forward(queries, flat.reshape(keys.shape), present)


class CpuTensor(CorrectAttention):
    def scores(self, queries, keys):
        return super().scores(queries, keys) + torch.zeros(keys.shape[1])


class Uncompiled(CorrectAttention):
    def forward(self, queries, keys, present):
        output, attention = super().forward(queries, keys, present)
        return (output + 1 if torch.compiler.is_dynamo_compiling() else output), attention


class Unexported(CorrectAttention):
    def forward(self, queries, keys, present):
        if torch.compiler.is_exporting():
            raise RuntimeError("this depends on its numbers")
        return super().forward(queries, keys, present)


BROKEN: dict[str, type[CorrectAttention]] = {
    "gives_output_and_map": NoMap,
    "map_has_expected_axes": OneRow,
    "outputs_are_finite": DividesByZero,
    "copies_are_independent": SharedCopy,
    "weights_are_not_negative": NegativeWeights,
    "rows_sum_to_one": HalvesWeights,
    "masked_keys_get_no_weight": AddsEpsilon,
    "masked_keys_are_not_read": AddsEverything,
    "padding_changes_nothing": DividesByLength,
    "fully_masked_rows_are_zero": MinusBillion,
    "fully_masked_rows_have_finite_gradients": NanToNum,
    "samples_are_independent": BatchMean,
    "sample_order_is_equivariant": Sorted,
    "key_order_is_equivariant": UsesPositions,
    "queries_are_independent": QueryMean,
    "empty_batch_is_allowed": MaximumLength,
    "key_count_may_vary": EightPositions,
    "eval_is_deterministic": AlternatingOutput,
    "eval_draws_no_random_numbers": DrawsOne,
    "train_and_eval_modes_work": ChangesMode,
    "inputs_are_not_modified": BlanksPadding,
    "module_is_not_modified": CountsPasses,
    "hooks_are_preserved": ClearsHooks,
    "no_tensor_is_retained": RetainsMap,
    "calls_are_reentrant": StoresKeys,
    "state_can_be_saved": ExtraState,
    "state_dict_is_complete": SavesHalf,
    "all_tensors_are_registered": UnregisteredTensor,
    "gradient_reaches_every_parameter": UnusedLayer,
    "gradient_reaches_every_input": DetachesQueries,
    "map_can_be_supervised": DetachesMap,
    "gradient_matches_finite_differences": WrongBackward,
    "bfloat16_is_allowed": RoundsOutput,
    "float16_is_allowed": Overflows,
    "output_keeps_dtype": WidensOutput,
    "autocast_is_allowed": ScattersOutput,
    "large_scores_are_finite": Exponentials,
    "no_grad_is_allowed": NeedsGraph,
    "strided_inputs_are_allowed": ViewsInput,
    "device_can_be_changed": CpuTensor,
    "can_be_compiled": Uncompiled,
    "can_be_exported": Unexported,
}
