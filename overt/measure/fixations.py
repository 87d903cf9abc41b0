"""Does a map say where people looked? Single fixations are asked, not a picture smoothed of them.

`fixations` is a map of amounts: how many fixations fell on each key. Every fixation counts, also
where several fell on one cell. Kümmerer, Wallis and Bethge, "Saliency Benchmarking Made Easy", ECCV
2018, https://arxiv.org/abs/1704.08615, on why the numbers disagree: each wants another map of the
same density. `cc`, `sim` and `kl` compare with a density.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.measure.measured import Measured, defined, measured, row, rows, shares
from overt.measure.ranks import roc_area

FLOOR = 2.220446e-16  # what the published code adds before a logarithm


@measured("NSS", "deviations", higher_is_better=True)
def nss(attention: AttentionMap, fixations: AttentionMap) -> Measured:
    """Normalised scanpath saliency: how far the map is above its mean at a fixation, in deviations.

    Peters, Iyer, Itti and Koch 2005. 0 is chance. The deviation is that of all visible keys, as
    divided by their number. Not defined for a constant map.
    """
    ours, counts, seen = rows(attention, fixations)
    count = seen.sum(dim=-1, keepdim=True).clamp_min(1)
    centred = (ours - ours.sum(dim=-1, keepdim=True) / count) * seen
    deviation = (centred.square().sum(dim=-1, keepdim=True) / count).sqrt()
    varies = _varies(ours, seen) & (deviation[:, 0] > 0)
    each = centred / torch.where(deviation > 0, deviation, 1)
    total = counts.sum(dim=-1)
    return defined((each * counts).sum(dim=-1) / total, varies & (total > 0))


@measured("AUC-Judd", "share", higher_is_better=True, low=0.0, high=1.0)
def auc_judd(attention: AttentionMap, fixations: AttentionMap) -> Measured:
    """How often a fixation lies higher in the map than a key that nobody looked at; 0.5 is chance.

    Judd, Ehinger, Durand and Torralba 2009. Equal weights count by half, where the published code
    adds random noise to the map; and it draws straight lines between fixations, which adds up to
    1 / 2n for n of them. Ours is the area itself, as scikit-learn has it.
    """
    ours, counts, seen = rows(attention, fixations)
    return _area(ours, counts, ((counts == 0) & seen).double())


@measured("shuffled AUC", "share", higher_is_better=True, low=0.0, high=1.0)
def auc_shuffled(
    attention: AttentionMap, fixations: AttentionMap, others: AttentionMap
) -> Measured:
    """How often a fixation lies higher in the map than one made on another image; 0.5 is chance.

    Zhang, Tong, Marks, Shan and Cottrell 2008. A map of the centre gains nothing, since people
    look there in all images. `others` are the fixations on other images, as `of_other_images` makes
    them; all of them are asked, where the published code draws some at random again and again.
    """
    ours, counts, seen = rows(attention, fixations)
    _, elsewhere, also = rows(attention, others)
    both = seen & also
    return _area(ours, counts * both, elsewhere * both)


@measured("information gain", "bits a fixation", higher_is_better=True)
def information_gain(
    attention: AttentionMap, fixations: AttentionMap, prior: AttentionMap
) -> Measured:
    """`log2(a / prior)` at a fixation: what the map knows beyond the prior, in bits.

    Kümmerer, Wallis and Bethge 2015. The prior is a density, such as `centre`, or `mean_of_others`
    of people's own: below 0 the map is worth less than knowing that people look at the middle. Both
    are read as shares, with a floor of 2.2e-16 as in the published code. Not defined where either
    has a weight below 0.
    """
    ours, counts, _ = rows(attention, fixations)
    expected, _, _ = rows(prior, fixations)
    first, second = shares(ours, attention.kind), shares(expected, prior.kind)
    gain = ((first + FLOOR).log() - (second + FLOOR).log()) / math.log(2)
    total = counts.sum(dim=-1)
    there = ~(first.isnan().any(dim=-1) | second.isnan().any(dim=-1))
    mean = torch.where(counts > 0, gain * counts, 0).sum(dim=-1) / total
    return defined(mean, there & (total > 0))


def of_other_images(fixations: AttentionMap) -> AttentionMap:
    """For each image all fixations of the batch that were made on other images."""
    if len(fixations) < 2:
        raise ValueError("fixations on other images need two images at least")
    counts, _ = row(fixations)
    others = (counts.sum(dim=0, keepdim=True) - counts).clamp_min(0)
    values = others[:, None, None, None]
    return replace(fixations, values=values, mask=None, kind=Kind.AMOUNT, form=Form.PLAIN)


def _area(
    ours: Float[Tensor, "b k"], positive: Float[Tensor, "b k"], negative: Float[Tensor, "b k"]
) -> Measured:
    there = (positive.sum(dim=-1) > 0) & (negative.sum(dim=-1) > 0)
    return defined(roc_area(ours, positive, negative), there & (ours != 0).any(dim=-1))


def _varies(values: Float[Tensor, "b k"], seen: Bool[Tensor, "b k"]) -> Bool[Tensor, " b"]:
    highest = values.masked_fill(~seen, -torch.inf).amax(dim=-1)
    return highest > values.masked_fill(~seen, torch.inf).amin(dim=-1)
