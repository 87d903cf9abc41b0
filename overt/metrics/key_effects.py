"""Agreement of weights with the effect of each key: leave-one-out and gradients.

Jain and Wallace, "Attention is not Explanation", NAACL 2019, https://arxiv.org/abs/1902.10186,
section 4.1. Both references are approximations of the model's behaviour and need not agree with
each other: compare with the score of a random map.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap
from overt.metrics.agreement import kendall
from overt.metrics.argument_checks import check_count
from overt.metrics.faithfulness import Decide, class_probabilities
from overt.metrics.metric import SampleScores, declare_metric, mask_undefined, single_row

Compare = Callable[[AttentionMap, AttentionMap], SampleScores]


def leave_one_out(decide: Decide, attention: AttentionMap, at_once: int = 1) -> AttentionMap:
    """Compute how far the answer moves (total variation) when each key alone is removed.

    Keys that are hidden in all samples are skipped.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample; only its keys are used.
        at_once: Keys per call. Above 1, `decide` must accept the samples several times over: all
            samples without one key, then all samples without the next. Much faster on a GPU.

    Returns:
        A map of the effects.

    Raises:
        ValueError: `at_once` is below 1.

    Example:
        >>> attention = AttentionMap.from_weights(torch.full((1, 3), 1 / 3), axes="b k")
        >>> def decide(keep):  # only the first key matters
        ...     return torch.stack([5.0 * keep[:, 0], torch.zeros(len(keep))], dim=1)
        >>> leave_one_out(decide, attention).weights.flatten().round(decimals=2)
        tensor([0.4900, 0.0000, 0.0000], dtype=torch.float64)
    """
    at_once = check_count("at_once", at_once)
    _, seen = single_row(attention)
    b, k = seen.shape
    whole = class_probabilities(decide, torch.ones_like(seen))
    moved = torch.zeros(seen.shape, dtype=torch.float64, device=seen.device)
    some = seen.any(dim=0).nonzero()[:, 0]
    for keys in (
        some.split(at_once) if len(some) else ()
    ):  # split of an empty tensor returns one empty chunk
        m = len(keys)
        keep = torch.ones(m, k, dtype=torch.bool, device=seen.device).scatter(
            1, keys[:, None], False
        )
        without = class_probabilities(decide, keep[:, None].expand(m, b, k).flatten(0, 1))
        moved[:, keys] = (without.unflatten(0, (m, b)) - whole).abs().sum(dim=-1).T / 2
    return AttentionMap.from_cells(moved.masked_fill(~seen, 0), attention.keys, seen)


def gradient_times_input(decide: Decide, attention: AttentionMap) -> AttentionMap:
    """Compute the absolute gradient of the answer's log-odds by the mask of each key.

    The mask multiplies features, so this is gradient times input. Within a sample, log-odds rank
    keys as the probability does, without vanishing when the model is certain.

    Args:
        decide: Returns the logits given a mask of kept keys; must be differentiable in the mask.
        attention: A map with one row per sample; only its keys are used.

    Returns:
        A map of the absolute gradients.

    Raises:
        ValueError: The logits have no gradient by the mask.
    """
    _, seen = single_row(attention)
    with torch.inference_mode(False), torch.enable_grad():
        keep = torch.ones(seen.shape, device=seen.device, requires_grad=True)
        logits = decide(keep)
        found = None
        if logits.requires_grad:
            odds = _log_odds(logits.to(torch.promote_types(logits.dtype, torch.float32)))
            (found,) = torch.autograd.grad(odds.sum(), keep, allow_unused=True)
    if found is None:
        raise ValueError(
            "the logits have no gradient by the mask: decide must multiply by it and not compare it"
        )
    return AttentionMap.from_cells(found.abs().double().masked_fill(~seen, 0), attention.keys, seen)


@declare_metric("leave-one-out agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def leave_one_out_agreement(
    decide: Decide, attention: AttentionMap, compare: Compare = kendall, at_once: int = 1
) -> SampleScores:
    """Compute Kendall's tau-b of the weights with the effect of removing each key.

    Args:
        decide: Returns the logits given a mask of kept keys.
        attention: A map with one row per sample.
        compare: A metric of two maps.
        at_once: Keys per call; see `leave_one_out`.

    Returns:
        One correlation per sample; NaN where no key has an effect.

    Example:
        >>> from overt import words
        >>> effects = torch.tensor([3.0, 2.0, 1.0])
        >>> def decide(keep):  # the log-odds are the sum of the effects of the kept words
        ...     return torch.stack([keep @ effects, torch.zeros(len(keep))], dim=1)
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.5, 0.2, 0.3]]), words(3))
        >>> leave_one_out_agreement(decide, attention)  # two concordant pairs, one not: 1 / 3
        tensor([0.3333])
    """
    return _agreement(attention, leave_one_out(decide, attention, at_once), compare)


@declare_metric("gradient agreement", "correlation", higher_is_better=True, low=-1.0, high=1.0)
def gradient_agreement(
    decide: Decide, attention: AttentionMap, compare: Compare = kendall
) -> SampleScores:
    """Compute Kendall's tau-b of the weights with gradient times input of each key.

    Args:
        decide: Returns the logits given a mask of kept keys; must be differentiable in the mask.
        attention: A map with one row per sample.
        compare: A metric of two maps.

    Returns:
        One correlation per sample; NaN where no key has an effect.

    Example:
        >>> from overt import words
        >>> effects = torch.tensor([3.0, 2.0, 1.0])
        >>> def decide(keep):  # the log-odds are the sum of the effects of the kept words
        ...     return torch.stack([keep @ effects, torch.zeros(len(keep))], dim=1)
        >>> weights = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
        >>> gradient_agreement(decide, AttentionMap.from_cells(weights, words(3)))
        tensor([ 1., -1.])
    """
    return _agreement(attention, gradient_times_input(decide, attention), compare)


def _agreement(attention: AttentionMap, effect: AttentionMap, compare: Compare) -> SampleScores:
    some = (effect.weights != 0).flatten(1).any(dim=-1)
    return mask_undefined(compare(attention, effect), some)


def _log_odds(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    answer = logits.argmax(dim=-1, keepdim=True)
    others = logits.scatter(-1, answer, -torch.inf)
    return logits.gather(-1, answer)[:, 0] - others.logsumexp(dim=-1)
