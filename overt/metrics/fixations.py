"""Agreement with human fixations: NSS, AUC-Judd, shuffled AUC and information gain.

`fixations` is a map of amounts: the number of fixations on each key. Kümmerer, Wallis and Bethge,
"Saliency Benchmarking Made Easy", ECCV 2018, https://arxiv.org/abs/1704.08615, explain why these
metrics disagree: each favors another map of the same density. `cc`, `sim` and `kl` compare with a
density.

**Every fixation counts**, also where several fall on one cell, as in the MIT/Tübingen benchmark of
these authors. The first code of the MIT benchmark (`AUC_Judd.m`, `NSS.m`) reads a binary map: a
place that was fixated often counts once, which makes little difference on pixels and more on coarse
cells. `fixated_cells` gives its convention: `auc_judd(attention, fixated_cells(fixations))`.

**Scores depend on the grid.** On coarse cells a fixation counts for its whole cell, and few cells
are without fixations: the same map has other scores on 14 x 14 cells than on the pixels of the
photo, AUC most of all. Compare scores of one grid only. Published scores are on the photo's pixels,
to which the MIT benchmark resizes every map:

    fixations = ...                                       # counts on a grid of the photo's size
    auc_judd(resize_to_fixations(attention, fixations), fixations)
"""

import math
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    single_row,
    to_distribution,
)
from overt.metrics.ranks import roc_auc

FLOOR = 2.220446e-16  # added before a logarithm, as in the published code


@declare_metric("NSS", "deviations", higher_is_better=True)
def nss(attention: AttentionMap, fixations: AttentionMap) -> SampleScores:
    """Compute normalized scanpath saliency: the standardized map value at fixations; 0 is chance.

    Peters, Iyer, Itti and Koch 2005. The standard deviation is that of all visible keys, divided by
    their number.

    Args:
        attention: A map with one row per sample.
        fixations: The number of fixations on each key.

    Returns:
        One score per sample; NaN for a constant map.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0]]), grid(2, 2))
        >>> fixations = AttentionMap.from_cells(torch.tensor([[3, 0, 0, 0]]), grid(2, 2))
        >>> nss(attention, fixations)  # mean 1/4, deviation sqrt(3) / 4: (1 - 1/4) / (sqrt(3) / 4)
        tensor([1.7321])
    """
    ours, counts, seen = paired_rows(attention, fixations)
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    # divided by n, not n - 1, as in the published code
    centred = (ours - ours.sum(dim=-1, keepdim=True) / count) * seen
    deviation = (centred.square().sum(dim=-1, keepdim=True) / count).sqrt()
    varies = _varies(ours, seen) & (deviation[:, 0] > 0)
    each = centred / torch.where(deviation > 0, deviation, 1)
    total = counts.sum(dim=-1)
    return mask_undefined((each * counts).sum(dim=-1) / total, varies & (total > 0))


@declare_metric("AUC-Judd", "share", higher_is_better=True, low=0.0, high=1.0)
def auc_judd(attention: AttentionMap, fixations: AttentionMap) -> SampleScores:
    """Compute how often a fixation has a larger weight than a key without fixations; 0.5 is chance.

    Judd, Ehinger, Durand and Torralba 2009. Ties count by half, where the published code adds
    random noise to the map. The published code also draws straight lines between fixations, which
    adds up to 1 / 2n for n of them; this is the exact area, as in scikit-learn. Several fixations
    on one key count each; the published code counts them once, see `fixated_cells`.

    Args:
        attention: A map with one row per sample.
        fixations: The number of fixations on each key.

    Returns:
        One area per sample.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), grid(2, 2))
        >>> fixations = AttentionMap.from_cells(torch.tensor([[1, 0, 1, 0]]), grid(2, 2))
        >>> auc_judd(attention, fixations)  # 0.4 > 0.3, 0.4 > 0.1 and 0.2 > 0.1, of four pairs
        tensor([0.7500])
    """
    ours, counts, seen = paired_rows(attention, fixations)
    # negatives are the keys without fixations, each once; positives count per fixation
    return _auc(ours, counts, ((counts == 0) & seen).double())


@declare_metric("shuffled AUC", "share", higher_is_better=True, low=0.0, high=1.0)
def auc_shuffled(
    attention: AttentionMap, fixations: AttentionMap, others: AttentionMap
) -> SampleScores:
    """Compute how often a fixation has a larger weight than one on another image; 0.5 is chance.

    Zhang, Tong, Marks, Shan and Cottrell 2008. A center bias gains nothing, since people look at
    the center of all images. All fixations on other images are used, where the published code
    samples some repeatedly.

    Args:
        attention: A map with one row per sample.
        fixations: The number of fixations on each key.
        others: The fixations on other images, as from `fixations_on_other_images`.

    Returns:
        One area per sample.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), grid(2, 2))
        >>> fixations = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0]]), grid(2, 2))
        >>> others = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 1]]), grid(2, 2))
        >>> auc_shuffled(attention, fixations, others)  # a tie with 0.4, and 0.4 > 0.1
        tensor([0.7500])
    """
    ours, counts, seen = paired_rows(attention, fixations)
    _, elsewhere, also = paired_rows(attention, others)
    # only keys that both images show: elsewhere there can be no fixations of the other image
    both = seen & also
    return _auc(ours, counts * both, elsewhere * both)


@declare_metric("information gain", "bits per fixation", higher_is_better=True)
def information_gain(
    attention: AttentionMap, fixations: AttentionMap, prior: AttentionMap
) -> SampleScores:
    """Compute the information gain over a prior at fixations, `log2(a / prior)`.

    Kümmerer, Wallis and Bethge 2015. Below 0 the map is worse than the prior. Both maps are
    normalized, with a floor of 2.2e-16 as in the published code.

    Args:
        attention: A map with one row per sample.
        fixations: The number of fixations on each key.
        prior: A density, such as `center_map`, or `mean_of_other_maps` of human densities.

    Returns:
        One gain per sample, in bits per fixation; NaN where either map has a negative weight.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), grid(2, 2))
        >>> fixations = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0]]), grid(2, 2))
        >>> prior = AttentionMap.from_cells(torch.tensor([[1, 1, 1, 1]]), grid(2, 2))
        >>> information_gain(attention, fixations, prior)  # log2(0.5 / 0.25)
        tensor([1.])
    """
    ours, counts, _ = paired_rows(attention, fixations)
    expected, _, _ = paired_rows(prior, fixations)
    first, second = to_distribution(ours, attention.kind), to_distribution(expected, prior.kind)
    # in bits
    gain = ((first + FLOOR).log() - (second + FLOOR).log()) / math.log(2)
    total = counts.sum(dim=-1)
    there = ~(first.isnan().any(dim=-1) | second.isnan().any(dim=-1))
    mean = torch.where(counts > 0, gain * counts, 0).sum(dim=-1) / total
    return mask_undefined(mean, there & (total > 0))


def resize_to_fixations(attention: AttentionMap, fixations: AttentionMap) -> AttentionMap:
    """Resize a map to the grid of the fixation map, as the MIT benchmark does before scoring.

    Bicubic, with the kernel of `imresize` (a = -0.5), antialiased where the map gets smaller.
    Beyond the edge there is zero padding, where `imresize` mirrors. As there, weights are not
    clipped: some may fall below 0 next to a steep edge, and the result is then signed. `nss` and
    the AUCs accept it; for `information_gain` take the positive part, or use `resample_to_grid`,
    which is bilinear.

    Args:
        attention: A map over the cells of one image.
        fixations: The fixation map.

    Returns:
        The resized map.

    Raises:
        ValueError: Either map is not over the cells of one image, or cells are hidden.
    """
    for one in (attention, fixations):
        spans = one.keys.spans
        if len(spans) != 1 or len(spans[0].shape) != 2 or len(spans[0]) != len(one.keys):
            raise ValueError(
                f"expected a map over the cells of one image, got keys of "
                f"{[span.name for span in spans]}: take .between(query, key) first"
            )
    weights, seen = single_row(attention)
    if not bool((seen | ~seen.any(dim=-1, keepdim=True)).all()):
        raise ValueError("a map with hidden cells cannot be resized")
    now, (height, width) = attention.keys.spans[0].shape, fixations.keys.spans[0].shape
    if now == (height, width):
        return attention
    picture = rearrange(weights, "b (y x) -> b 1 y x", y=now[0], x=now[1])
    picture = torch.nn.functional.interpolate(
        picture, (height, width), mode="bicubic", align_corners=False, antialias=True
    )
    # a cubic kernel overshoots at steep edges
    signed = attention.kind is Kind.SIGNED or bool((picture < 0).any())
    mask = seen.any(dim=-1, keepdim=True)[:, None].expand(-1, 1, len(fixations.keys))
    return replace(
        attention,
        values=rearrange(picture, "b 1 y x -> b 1 1 1 (y x)").to(attention.weights.dtype),
        keys=fixations.keys,
        mask=None if attention.mask is None else mask,
        kind=Kind.SIGNED if signed else Kind.AMOUNT,
        form=Form.PLAIN,
        coverage=None,
    )


def fixated_cells(fixations: AttentionMap) -> AttentionMap:
    """Return 1 where there are fixations and 0 elsewhere, as the first code of the MIT benchmark.

    Args:
        fixations: The number of fixations on each key.

    Returns:
        A binary map, in which a cell that was fixated repeatedly counts once.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), grid(2, 2))
        >>> fixations = AttentionMap.from_cells(torch.tensor([[3, 0, 1, 0]]), grid(2, 2))
        >>> auc_judd(attention, fixations)  # (3 * 2 + 1) of (3 + 1) * 2 pairs
        tensor([0.8750])
        >>> auc_judd(attention, fixated_cells(fixations))  # (2 + 1) of 2 * 2 pairs
        tensor([0.7500])
    """
    # where, not `>`: an unknown number stays unknown
    weights = fixations.weights
    some = torch.where(weights.isnan(), weights, (weights > 0).to(weights.dtype))
    return replace(fixations, values=some, kind=Kind.AMOUNT, form=Form.PLAIN, coverage=None)


def fixations_on_other_images(fixations: AttentionMap) -> AttentionMap:
    """Sum for each image the fixations of the batch on all other images."""
    if len(fixations) < 2:
        raise ValueError(f"fixations on other images need at least 2 images, got {len(fixations)}")
    counts, _ = single_row(fixations)
    # counts are whole numbers, but may be stored in float: the clamp removes rounding
    others = (counts.sum(dim=0, keepdim=True) - counts).clamp_min(0)
    values = others[:, None, None, None]
    return replace(fixations, values=values, mask=None, kind=Kind.AMOUNT, form=Form.PLAIN)


def _auc(
    ours: Float[Tensor, "b k"], positive: Float[Tensor, "b k"], negative: Float[Tensor, "b k"]
) -> SampleScores:
    there = (positive.sum(dim=-1) > 0) & (negative.sum(dim=-1) > 0)
    return mask_undefined(roc_auc(ours, positive, negative), there & (ours != 0).any(dim=-1))


def _varies(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    highest = values.masked_fill(~seen, -torch.inf).amax(dim=-1)
    return highest > values.masked_fill(~seen, torch.inf).amin(dim=-1)
