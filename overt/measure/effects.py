"""Do weights follow what each key does to the answer? Key by key, by removing it or by its slope.

Jain and Wallace, "Attention is not Explanation", NAACL 2019, https://arxiv.org/abs/1902.10186,
section 4.1: attention against leaving one out, and against gradients. Either is itself a view of
the model, and they need not agree with each other: hold the number to that of a random map.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.measure.agreement import kendall
from overt.measure.faithfulness import Decide, probabilities
from overt.measure.measured import Measured, defined, measured, row

Compare = Callable[[AttentionMap, AttentionMap], Measured]


def leave_one_out(decide: Decide, attention: AttentionMap, at_once: int = 1) -> AttentionMap:
    """How far the answer moves when each key alone is removed: half the sum of all changes.

    Keys that no sample may see are not asked for. One call of `decide` a key; or, where `decide`
    can take the samples several times over, one of all samples without one key after all samples
    without another, one call for `at_once` keys. On a card that is many times as fast.
    """
    if at_once < 1:
        raise ValueError(f"a call leaves out one key at least, not {at_once}")
    _, seen = row(attention)
    b, k = seen.shape
    whole = probabilities(decide, torch.ones_like(seen))
    moved = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device)
    some = seen.any(dim=0).nonzero()[:, 0]
    for keys in some.split(at_once) if len(some) else ():  # of none, split makes an empty part
        m = len(keys)
        keep = torch.ones(m, k, dtype=torch.bool, device=seen.device).scatter(
            1, keys[:, None], False
        )
        without = probabilities(decide, keep[:, None].expand(m, b, k).flatten(0, 1))
        moved[:, keys] = (without.unflatten(0, (m, b)) - whole).abs().sum(dim=-1).T / 2
    return AttentionMap.from_cells(moved.masked_fill(~seen, 0), attention.keys, seen)


def slope(decide: Decide, attention: AttentionMap) -> AttentionMap:
    """How steeply the log-odds of the answer change with the mask of each key, without its sign.

    The mask multiplies features, so this is gradient times input. Within a sample log-odds rank
    keys as the probability does, and do not round to nothing when the model is sure.
    """
    _, seen = row(attention)
    with torch.inference_mode(False), torch.enable_grad():
        keep = torch.ones(seen.shape, device=seen.device, requires_grad=True)
        logits = decide(keep)
        found = None
        if logits.requires_grad:
            odds = _log_odds(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            (found,) = torch.autograd.grad(odds.sum(), keep, allow_unused=True)
    if found is None:
        raise ValueError(
            "the logits do not depend on the mask in a way that gradients can follow: decide must "
            "multiply by it, not compare with it"
        )
    return AttentionMap.from_cells(found.abs().double().masked_fill(~seen, 0), attention.keys, seen)


@measured("leave-one-out agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def leave_one_out_agreement(
    decide: Decide, attention: AttentionMap, compare: Compare = kendall, at_once: int = 1
) -> Measured:
    """Whether weights rank keys as removing them does: tau-b with `leave_one_out`.

    `compare` is any measure of two maps. Not defined where no key does anything.
    """
    return _agreement(attention, leave_one_out(decide, attention, at_once), compare)


@measured("gradient agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def gradient_agreement(
    decide: Decide, attention: AttentionMap, compare: Compare = kendall
) -> Measured:
    """Whether weights rank keys as gradients do: tau-b with `slope`."""
    return _agreement(attention, slope(decide, attention), compare)


def _agreement(attention: AttentionMap, effect: AttentionMap, compare: Compare) -> Measured:
    some = (effect.weights != 0).flatten(1).any(dim=-1)
    return defined(compare(attention, effect), some)


def _log_odds(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    answer = logits.argmax(dim=-1, keepdim=True)
    others = logits.scatter(-1, answer, -torch.inf)
    return logits.gather(-1, answer)[:, 0] - others.logsumexp(dim=-1)
