"""Does a map mark the words that people marked? Tokens of a text against human rationales.

DeYoung, Jain, Rajani, Lehman, Xiong, Socher and Wallace, "ERASER: A Benchmark to Evaluate
Rationalized NLP Models", ACL 2020, https://arxiv.org/abs/1911.03429, section 4.1. A soft map is
judged by `token_auprc`; words that were chosen by `token_f1` and the like. To choose as many words
as people do on average:

    chosen = hardened(attention, generator, share=0.15)
    token_f1(chosen, rationale)

How plausible a map is says nothing of how faithful it is.
"""

from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import Bool
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.measure.cells import top_share
from overt.measure.measured import Measured, defined, measured, rows
from overt.measure.ranks import average_precision, precision_area, roc_area


def hardened(attention: AttentionMap, generator: torch.Generator, share: float) -> AttentionMap:
    """The most attended `share` of the words as a map of ones, all others nothing.

    ERASER takes the share that rationales have on average in a data set. Random ones of equals.
    """
    chosen = top_share(attention, generator, share).to(attention.weights.dtype)
    values = chosen[:, None, None, None]
    return replace(attention, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)


@measured("token AUPRC", "share", higher_is_better=True, low=0.0, high=1.0)
def token_auprc(attention: AttentionMap, rationale: AttentionMap) -> Measured:
    """The area under precision over recall when words are taken from the most attended on.

    As ERASER computes it: points at each distinct weight, joined by straight lines. Chance is about
    the share p of words that the rationale has, not a half, but for ties: lines reward them, and a
    map without any order gets (1 + p) / 2. Compare maps with ties by `token_ap` or `token_auc`. Not
    defined without a rationale.
    """
    ours, theirs, seen = rows(attention, rationale)
    there = (theirs > 0).any(dim=-1) & (ours != 0).any(dim=-1)
    return defined(precision_area(ours, theirs > 0, seen).clamp(0, 1), there)


@measured("token AP", "share", higher_is_better=True, low=0.0, high=1.0)
def token_ap(attention: AttentionMap, rationale: AttentionMap) -> Measured:
    """Average precision: how many words are right, at each of those of the rationale in turn.

    The area of `token_auprc` by steps in the place of lines, as scikit-learn has it. A map without
    any order gets the share of words that the rationale has.
    """
    ours, theirs, seen = rows(attention, rationale)
    there = (theirs > 0).any(dim=-1) & (ours != 0).any(dim=-1)
    return defined(average_precision(ours, theirs > 0, seen).clamp(0, 1), there)


@measured("token AUC", "share", higher_is_better=True, low=0.0, high=1.0)
def token_auc(attention: AttentionMap, rationale: AttentionMap) -> Measured:
    """How often a word of the rationale has more weight than another word; ties count by half.

    0.5 is chance, however many words people mark. Not defined where all words are marked.
    """
    ours, theirs, seen = rows(attention, rationale)
    marked = theirs > 0
    rest = seen & ~marked
    there = marked.any(dim=-1) & rest.any(dim=-1) & (ours != 0).any(dim=-1)
    return defined(roc_area(ours, marked.double(), rest.double()), there)


@measured("token precision", "share", higher_is_better=True, low=0.0, high=1.0)
def token_precision(chosen: AttentionMap, rationale: AttentionMap) -> Measured:
    """The share of the chosen words that people marked; not defined where none was chosen."""
    ours, theirs, there = _words(chosen, rationale)
    count = ours.sum(dim=-1)
    return defined((ours & theirs).sum(dim=-1) / count.clamp_min(1), there & (count > 0))


@measured("token recall", "share", higher_is_better=True, low=0.0, high=1.0)
def token_recall(chosen: AttentionMap, rationale: AttentionMap) -> Measured:
    """The share of the words that people marked that were chosen."""
    ours, theirs, there = _words(chosen, rationale)
    return defined((ours & theirs).sum(dim=-1) / theirs.sum(dim=-1).clamp_min(1), there)


@measured("token F1", "share", higher_is_better=True, low=0.0, high=1.0)
def token_f1(chosen: AttentionMap, rationale: AttentionMap) -> Measured:
    """The harmonic mean of precision and recall of the chosen words; 0 where none was chosen."""
    ours, theirs, there = _words(chosen, rationale)
    total = ours.sum(dim=-1) + theirs.sum(dim=-1)
    return defined(2 * (ours & theirs).sum(dim=-1) / total.clamp_min(1), there)


@measured("token IoU", "share", higher_is_better=True, low=0.0, high=1.0)
def token_iou(chosen: AttentionMap, rationale: AttentionMap) -> Measured:
    """The words that both have over those that either has."""
    ours, theirs, there = _words(chosen, rationale)
    return defined((ours & theirs).sum(dim=-1) / (ours | theirs).sum(dim=-1).clamp_min(1), there)


@measured("IoU F1", "share", higher_is_better=True, low=0.0, high=1.0)
def iou_f1(chosen: AttentionMap, rationale: AttentionMap, overlap: float = 0.5) -> Measured:
    """The F1 of runs of words: one is found when it has an IoU of `overlap` with a true one.

    As ERASER counts it: a chosen run counts for precision when it overlaps any true run so far, and
    the same number is divided by the true runs for recall, at most all of them.
    """
    ours, theirs, there = _words(chosen, rationale)
    found = []
    for mine, true in zip(ours.cpu(), theirs.cpu(), strict=True):
        runs, targets = _runs(mine), _runs(true)
        hits = sum(any(_overlap(one, two) >= overlap for two in targets) for one in runs)
        precision = hits / len(runs) if runs else 0.0
        recall = min(1.0, hits / len(targets)) if targets else 0.0
        both = precision + recall
        found.append(2 * precision * recall / both if both else 0.0)
    return defined(torch.tensor(found, dtype=torch.float64, device=ours.device), there)


def _words(
    chosen: AttentionMap, rationale: AttentionMap
) -> tuple[Bool[Tensor, "b k"], Bool[Tensor, "b k"], Bool[Tensor, " b"]]:
    """What is chosen, what is true, and where there is any truth."""
    ours, theirs, _ = rows(chosen, rationale)
    return ours > 0, theirs > 0, (theirs > 0).any(dim=-1)


def _runs(words: Bool[Tensor, " k"]) -> list[set[int]]:
    """Words that stand next to each other, as sets of places."""
    runs = groupby(range(len(words)), key=lambda at: bool(words[at]))
    return [set(places) for chosen, places in runs if chosen]


def _overlap(one: set[int], two: set[int]) -> float:
    return len(one & two) / len(one | two)
