"""Agreement of a map over tokens with human rationales (ERASER).

DeYoung, Jain, Rajani, Lehman, Xiong, Socher and Wallace, "ERASER: A Benchmark to Evaluate
Rationalized NLP Models", ACL 2020, https://arxiv.org/abs/1911.03429, section 4.1. A soft map is
scored by `token_auprc`; selected tokens (weights of 0 and 1) by `token_f1` and the like, which
raise for a soft map. To select as many tokens as people do on average:

    chosen = discretize(attention, generator, share=0.15)
    token_f1(chosen, rationale)

ERASER's "IoU F1" is the F1 of a mean precision and a mean recall over all samples, so it is one
number per dataset: `iou_f1` of all maps at once, or `match_spans` of annotated spans.

These are metrics of plausibility; they do not measure faithfulness.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind
from overt.metrics.metric import (
    SampleScores,
    declare_metric,
    mask_undefined,
    paired_rows,
    single_row,
)
from overt.metrics.ranks import average_precision, pr_auc, roc_auc
from overt.metrics.top_cells import top_share


def discretize(attention: AttentionMap, generator: torch.Generator, share: float) -> AttentionMap:
    """Set the most attended `share` of the tokens to 1 and all others to 0.

    ERASER uses the average share that rationales have in a dataset.

    Args:
        attention: A map with one row per sample.
        generator: Breaks ties.
        share: The share of tokens to select.

    Returns:
        A map of zeros and ones; NaN for a row without weight or with a weight that is not finite,
        which has no most attended tokens.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.1, 0.5, 0.3, 0.1]]), words(4))
        >>> chosen = discretize(attention, torch.Generator().manual_seed(0), share=0.5)
        >>> chosen.weights.flatten()
        tensor([0., 1., 1., 0.])
    """
    weights, _ = single_row(attention)
    chosen = top_share(attention, generator, share).to(attention.weights.dtype)
    chosen = torch.where((weights != 0).any(dim=-1, keepdim=True), chosen, torch.nan)
    values = chosen[:, None, None, None]
    return replace(attention, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)


@declare_metric("token AUPRC", "share", higher_is_better=True, low=0.0, high=1.0)
def token_auprc(attention: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the area under the precision-recall curve of tokens ranked by weight (ERASER).

    Points at each distinct weight are joined by straight lines. Chance is about the share p of
    tokens in the rationale. The lines reward ties: a constant map gets (1 + p) / 2. Compare maps
    with ties by `token_ap` or `token_auc`.

    Args:
        attention: A map with one row per sample, over tokens.
        rationale: The tokens that people marked.

    Returns:
        One area per sample; NaN without a rationale.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), words(4))
        >>> rationale = AttentionMap.from_cells(torch.tensor([[1, 0, 1, 0]]), words(4))
        >>> token_auprc(attention, rationale)  # 1/2 + 1/2 (1/2 + 2/3) / 2
        tensor([0.7917])
    """
    ours, theirs, seen = paired_rows(attention, rationale)
    there = (theirs > 0).any(dim=-1) & (ours != 0).any(dim=-1)
    return mask_undefined(pr_auc(ours, theirs > 0, seen).clamp(0, 1), there)


@declare_metric("token AP", "share", higher_is_better=True, low=0.0, high=1.0)
def token_ap(attention: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the average precision of tokens ranked by weight.

    The step-wise version of `token_auprc`, as in scikit-learn. A constant map gets the share of
    tokens in the rationale.

    Args:
        attention: A map with one row per sample, over tokens.
        rationale: The tokens that people marked.

    Returns:
        One average precision per sample; NaN without a rationale.
    """
    ours, theirs, seen = paired_rows(attention, rationale)
    there = (theirs > 0).any(dim=-1) & (ours != 0).any(dim=-1)
    return mask_undefined(average_precision(ours, theirs > 0, seen).clamp(0, 1), there)


@declare_metric("token AUC", "share", higher_is_better=True, low=0.0, high=1.0)
def token_auc(attention: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute how often a marked token has more weight than another token (ROC AUC); 0.5 is chance.

    Ties count by half. Chance does not depend on how many tokens are marked.

    Args:
        attention: A map with one row per sample, over tokens.
        rationale: The tokens that people marked.

    Returns:
        One area per sample; NaN where no token or every token is marked.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.4, 0.3, 0.2, 0.1]]), words(4))
        >>> rationale = AttentionMap.from_cells(torch.tensor([[1, 0, 1, 0]]), words(4))
        >>> token_auc(attention, rationale)  # 0.4 > 0.3, 0.4 > 0.1 and 0.2 > 0.1, of four pairs
        tensor([0.7500])
    """
    ours, theirs, seen = paired_rows(attention, rationale)
    marked = theirs > 0
    rest = seen & ~marked
    there = marked.any(dim=-1) & rest.any(dim=-1) & (ours != 0).any(dim=-1)
    return mask_undefined(roc_auc(ours, marked.double(), rest.double()), there)


@declare_metric("token precision", "share", higher_is_better=True, low=0.0, high=1.0)
def token_precision(chosen: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the share of selected tokens that people marked.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.

    Returns:
        One precision per sample; NaN where no token is selected.
    """
    ours, theirs, there = _binary_tokens(chosen, rationale)
    count = ours.sum(dim=-1)
    return mask_undefined((ours & theirs).sum(dim=-1) / count.clamp_min(1), there & (count > 0))


@declare_metric("token recall", "share", higher_is_better=True, low=0.0, high=1.0)
def token_recall(chosen: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the share of marked tokens that are selected.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.

    Returns:
        One recall per sample; NaN without a rationale.
    """
    ours, theirs, there = _binary_tokens(chosen, rationale)
    return mask_undefined((ours & theirs).sum(dim=-1) / theirs.sum(dim=-1).clamp_min(1), there)


@declare_metric("token F1", "share", higher_is_better=True, low=0.0, high=1.0)
def token_f1(chosen: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the F1 of selected against marked tokens; 0 where none is selected.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.

    Returns:
        One F1 per sample; NaN without a rationale.

    Example:
        >>> from overt import words
        >>> chosen = AttentionMap.from_cells(torch.tensor([[0, 1, 1, 0]]), words(4))
        >>> rationale = AttentionMap.from_cells(torch.tensor([[0, 1, 1, 1]]), words(4))
        >>> token_f1(chosen, rationale)  # precision 1, recall 2/3
        tensor([0.8000])
    """
    ours, theirs, there = _binary_tokens(chosen, rationale)
    total = ours.sum(dim=-1) + theirs.sum(dim=-1)
    return mask_undefined(2 * (ours & theirs).sum(dim=-1) / total.clamp_min(1), there)


@declare_metric("token IoU", "share", higher_is_better=True, low=0.0, high=1.0)
def token_iou(chosen: AttentionMap, rationale: AttentionMap) -> SampleScores:
    """Compute the intersection over union of selected and marked tokens.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.

    Returns:
        One IoU per sample; NaN without a rationale.
    """
    ours, theirs, there = _binary_tokens(chosen, rationale)
    return mask_undefined(
        (ours & theirs).sum(dim=-1) / (ours | theirs).sum(dim=-1).clamp_min(1), there
    )


# --- spans


TokenSpan = tuple[int, int]  # first token, token after the last


@dataclass(frozen=True, eq=False)
class SpanMatches:
    """Span counts of each sample: predicted spans that match a true one, predicted, and true.

    ERASER's F1 of a dataset is the F1 of the mean precision and the mean recall (`f1`), not the
    mean of the samples' F1. For an interval, draw samples with `select` and compute `f1` of each
    draw.
    """

    matched: Int[Tensor, " b"]
    predicted: Int[Tensor, " b"]
    true: Int[Tensor, " b"]

    def __len__(self) -> int:
        return len(self.matched)

    def select(self, rows: Int[Tensor, " m"]) -> "SpanMatches":
        """Select samples by index, in this order; an index may be repeated."""
        return SpanMatches(self.matched[rows], self.predicted[rows], self.true[rows])

    @property
    def precision(self) -> SampleScores:
        """Compute the share of predicted spans that match; NaN where none is predicted."""
        return mask_undefined(
            self.matched / self.predicted.clamp_min(1).double(), self.predicted > 0
        )

    @property
    def recall(self) -> SampleScores:
        """Compute matches over true spans; NaN where there is no true span.

        Above 1 where several predicted spans match one true span, as in ERASER: for disjoint spans
        that takes an `overlap` below 0.5.
        """
        return mask_undefined(self.matched / self.true.clamp_min(1).double(), self.true > 0)

    def f1(self) -> float:
        """Compute ERASER's macro F1: the F1 of the mean precision and the mean recall.

        The means are over samples with a predicted span and over samples with a true span.
        """
        each = self.matched.double()
        precision = _mean((each / self.predicted.clamp_min(1))[self.predicted > 0])
        recall = _mean((each / self.true.clamp_min(1))[self.true > 0])
        return _f1(precision, recall)

    def micro_f1(self) -> float:
        """Compute ERASER's micro F1, from the counts of all samples together."""
        matched = float(self.matched.sum())
        precision = matched / max(1.0, float(self.predicted.sum()))
        return _f1(precision, matched / max(1.0, float(self.true.sum())))


def match_spans(
    predicted: Sequence[Sequence[TokenSpan]],
    truth: Sequence[Sequence[TokenSpan]],
    overlap: float = 0.5,
) -> SpanMatches:
    """Count per sample the predicted spans with an IoU of at least `overlap` with a true span.

    ERASER's `partial_match_score`, per sample and document. Spans count as annotated: adjacent ones
    are two, repeated ones are one, and an empty true span counts but matches nothing.

    Args:
        predicted: Spans (first token, token after the last) per sample.
        truth: Annotated spans per sample.
        overlap: The least IoU of a match.

    Returns:
        The counts per sample.

    Raises:
        ValueError: The numbers of samples differ, or `overlap` is not above 0 and at most 1.

    Example:
        >>> match_spans([[(0, 2), (7, 9)]], [[(0, 3)]]).f1()
        0.6666666666666666
    """
    if len(predicted) != len(truth):
        raise ValueError(
            f"predicted and truth must have the same samples, got {len(predicted)} and {len(truth)}"
        )
    if not 0 < overlap <= 1:
        raise ValueError(f"overlap must be above 0 and at most 1, got {overlap}")
    counts = []
    for ours, theirs in zip(predicted, truth, strict=True):
        mine, true = set(ours), set(theirs)
        matched = sum(any(_span_iou(one, two) >= overlap for two in true) for one in mine)
        counts.append((matched, len(mine), len(true)))
    table = torch.tensor(counts, dtype=torch.long).reshape(-1, 3)
    return SpanMatches(table[:, 0], table[:, 1], table[:, 2])


def extract_spans(chosen: AttentionMap) -> list[list[TokenSpan]]:
    """Convert selected tokens to spans (first token, token after the last) per sample.

    Args:
        chosen: A map of zeros and ones, as from `discretize`, or a normalized rationale, whose
            marked tokens share one weight.

    Returns:
        The spans of each sample.

    Raises:
        ValueError: The map is soft: every token with weight would count as selected.
    """
    values, _ = single_row(chosen)
    largest = values.amax(dim=-1, keepdim=True)
    soft = (values != 0) & ((values - largest).abs() > 1e-6 * largest.abs())
    if soft.any():
        at = int(soft.any(dim=-1).nonzero()[0, 0])
        raise ValueError(
            f"selected tokens must share one weight, got {float(values[at][soft[at]][0]):.3g} and "
            f"{float(largest[at, 0]):.3g} in sample {at}: the map is soft. Select with "
            "discretize(attention, generator, share=0.15)"
        )
    return [_contiguous_spans(each > 0) for each in values.cpu()]


def iou_f1(chosen: AttentionMap, rationale: AttentionMap, overlap: float = 0.5) -> float:
    """Compute ERASER's IoU F1 of all samples together (section 4.1), one number per dataset.

    Spans are runs of selected tokens and runs of marked tokens: two adjacent annotated spans are
    one run here. To count them as two, pass the annotated spans to `match_spans`.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.
        overlap: The least IoU of a match.

    Returns:
        One number for the dataset.

    Example:
        >>> from overt import words
        >>> chosen = AttentionMap.from_cells(torch.tensor([[1, 1, 0, 0, 1]]), words(5))
        >>> rationale = AttentionMap.from_cells(torch.tensor([[1, 1, 1, 0, 0]]), words(5))
        >>> round(iou_f1(chosen, rationale), 4)  # one of two spans matches: precision 1/2, recall 1
        0.6667
    """
    return _match_maps(chosen, rationale, overlap).f1()


@declare_metric("span precision", "share", higher_is_better=True, low=0.0, high=1.0)
def span_precision(
    chosen: AttentionMap, rationale: AttentionMap, overlap: float = 0.5
) -> SampleScores:
    """Compute the share of selected spans that match a marked span.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.
        overlap: The least IoU of a match.

    Returns:
        One precision per sample; NaN where no token is selected.
    """
    return _match_maps(chosen, rationale, overlap).precision.to(chosen.values.device)


@declare_metric("span recall", "share", higher_is_better=True, low=0.0)
def span_recall(
    chosen: AttentionMap, rationale: AttentionMap, overlap: float = 0.5
) -> SampleScores:
    """Compute the number of matching selected spans over the number of marked spans.

    Above 1 where several selected spans match one marked span.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.
        overlap: The least IoU of a match.

    Returns:
        One recall per sample; NaN without a rationale.
    """
    return _match_maps(chosen, rationale, overlap).recall.to(chosen.values.device)


@declare_metric("span F1", "share", higher_is_better=True, low=0.0, high=1.0)
def span_f1(chosen: AttentionMap, rationale: AttentionMap, overlap: float = 0.5) -> SampleScores:
    """Compute the F1 of selected against marked spans of each sample; 0 where none is selected.

    Its mean is not ERASER's IoU F1 (`iou_f1`), which is the F1 of the means of `span_precision` and
    `span_recall`.

    Args:
        chosen: A map of zeros and ones, as from `discretize`.
        rationale: The tokens that people marked.
        overlap: The least IoU of a match.

    Returns:
        One F1 per sample; NaN without a rationale.
    """
    found = _match_maps(chosen, rationale, overlap)
    precision, recall = found.precision.nan_to_num(0).double(), found.recall.double()
    both = precision + recall
    each = 2 * precision * recall / torch.where(both > 0, both, 1)
    return mask_undefined(each, found.true > 0).to(chosen.values.device)


def _match_maps(chosen: AttentionMap, rationale: AttentionMap, overlap: float) -> SpanMatches:
    ours, theirs, _ = _binary_tokens(chosen, rationale)
    return match_spans(
        [_contiguous_spans(one) for one in ours],
        [_contiguous_spans(one) for one in theirs],
        overlap,
    )


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def _f1(precision: float, recall: float) -> float:
    both = precision + recall
    return 2 * precision * recall / both if both else 0.0


def _binary_tokens(
    chosen: AttentionMap, rationale: AttentionMap
) -> tuple[Bool[Tensor, "b k"], Bool[Tensor, "b k"], Bool[Tensor, " b"]]:
    """Return selected tokens, marked tokens, and samples with a rationale; raise for a soft map."""
    ours, theirs, _ = paired_rows(chosen, rationale)
    soft = (ours != 0) & (ours != 1)
    if soft.any():
        at = int(soft.any(dim=-1).nonzero()[0, 0])
        raise ValueError(
            f"selected tokens must be 0 or 1, got {float(ours[at][soft[at]][0]):.3g} in "
            f"sample {at}: the map is soft. Select with discretize(attention, generator, "
            "share=0.15), or score it with token_auprc, token_ap or token_auc"
        )
    return ours > 0, theirs > 0, (theirs > 0).any(dim=-1)


def _contiguous_spans(words: Bool[Tensor, " k"]) -> list[TokenSpan]:
    """List the runs of adjacent tokens as spans."""
    runs = groupby(enumerate(words.tolist()), key=lambda pair: pair[1])
    found = [[at for at, _ in places] for chosen, places in runs if chosen]
    return [(places[0], places[-1] + 1) for places in found]


def _span_iou(one: TokenSpan, two: TokenSpan) -> float:
    """Compute the IoU of two spans; 0 where both are empty."""
    both = max(0, min(one[1], two[1]) - max(one[0], two[0]))
    either = max(0, one[1] - one[0]) + max(0, two[1] - two[0]) - both
    return both / either if either else 0.0
