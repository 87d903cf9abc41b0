"""The metrics of scorecards, each with what it requires and what it cannot show.

A key is that of a function of `overt.metrics`. After an @ it says how keys are removed: `mask` is
the model's own masking; `mean`, `blur` and `imputed` are the fills of `overt.metrics.removal`, in
pixels where there is a picture, else in features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial

import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind
from overt.capture.edits import Bias, Edit
from overt.data.human_attention import pool_people
from overt.errors import UserError
from overt.metrics.agreement import cc, js, kendall, kl, sim, spearman
from overt.metrics.answer_accuracy import accuracy
from overt.metrics.calibration import brier
from overt.metrics.concentration import effective_support, entropy, gini, head_redundancy, hoyer
from overt.metrics.deletion_curves import (
    BINS,
    TENTHS,
    PerturbationCurve,
    aopc,
    comprehensiveness,
    deletion_area,
    flip_share,
    insertion_area,
    sufficiency,
)
from overt.metrics.faithfulness import deletion, flips, insertion
from overt.metrics.fixations import auc_judd, auc_shuffled, information_gain, nss
from overt.metrics.interventions import (
    Run,
    beyond_random_weights,
    edit_flips,
    editable_forward,
    output_change,
    permute_weights,
    uniform_weights,
    weights_to_flip,
)
from overt.metrics.key_effects import gradient_agreement, leave_one_out_agreement
from overt.metrics.localization import (
    iou,
    localization_accuracy,
    mass_inside,
    mean_iou,
    otsu_jaccard,
    pointing_game,
)
from overt.metrics.metric import (
    Metric,
    MetricInfo,
    MetricUnavailableError,
    SampleScores,
    mask_undefined,
    single_row,
)
from overt.metrics.model_randomization import randomization_similarity
from overt.metrics.rationales import (
    span_f1,
    span_precision,
    span_recall,
    token_ap,
    token_auc,
    token_auprc,
    token_f1,
    token_iou,
    token_precision,
    token_recall,
)
from overt.metrics.rng import derive_seed
from overt.metrics.scorecard.entry import (
    ComputeMetric,
    MetricQuestion,
    Requirement,
    ScorecardMetric,
)
from overt.metrics.scorecard.metric_context import ATTENTION, MASK, PERSON, REMOVALS, MetricContext
from overt.metrics.sensitivity import infidelity, sensitivity_max, sensitivity_mean, stability
from overt.metrics.top_cells import first_cells, mass_cells, rank_keys
from overt.metrics.transport import emd

SLOW = (
    "emd",
    "kendall",
    "leave_one_out_agreement",
)  # exact but slow: only by name
SECONDARY = (
    "kl",
    "token_precision",
    "token_recall",
    "span_precision",
    "span_recall",
    "cut_out",
    "iou",
    "hoyer",
    "brier",
)
_UNCHANGED = (
    "That the weights do nothing: an unchanged answer shows only that they are not necessary"
)


def available_metrics() -> tuple[ScorecardMetric, ...]:
    """List all metrics of scorecards, by the question that they answer.

    Returns:
        The entries.

    Example:
        >>> "mass_inside" in {one.key for one in available_metrics()}
        True
    """
    return tuple(_entries())


def default_keys() -> tuple[str, ...]:
    """List the keys of the default metrics: the fast ones, some of each family."""
    return tuple(entry.key for entry in available_metrics() if _is_default(entry))


def select_metrics(names: Sequence[str] | None) -> tuple[ScorecardMetric, ...]:
    """Select metrics by name: a key, a name for all its removals, a question, or "all".

    Args:
        names: The names; None for the default metrics.

    Returns:
        The entries, in the order of `available_metrics`.

    Raises:
        UserError: A name is unknown; the message has the nearest ones.

    Example:
        >>> [entry.key for entry in select_metrics(["spearman", "entropy"])]
        ['spearman', 'entropy']
    """
    every = available_metrics()
    if names is None:
        return tuple(entry for entry in every if _is_default(entry))
    wanted: set[str] = set()
    for name in names:
        found = [e.key for e in every if name in (e.key, e.name, "all", e.question.name.lower())]
        if not found:
            known = list(dict.fromkeys(word for e in every for word in (e.name, e.key)))
            near = get_close_matches(name, known, 3) or known[:3]
            raise UserError(
                f"unknown metric '{name}': did you mean {', '.join(near)}? `overt measure --list` "
                "shows all."
            )
        wanted.update(found)
    if not wanted:
        raise UserError("no metric was named: `overt measure --list` shows all.")
    return tuple(entry for entry in every if entry.key in wanted)


def _is_default(entry: ScorecardMetric) -> bool:
    if entry.name in SLOW or entry.question is MetricQuestion.STABILITY:
        return False
    name, _, removal = entry.key.partition("@")
    if not removal:
        return name not in SECONDARY
    if removal == MASK:
        return name not in ("deletion", "insertion", "flips", "flipping", "infidelity")
    return name in ("deletion_area", "insertion_area") and removal != "imputed"


def _entries() -> Iterator[ScorecardMetric]:
    yield from _agreement()
    yield from _location()
    yield from _faithfulness()
    yield from _intervention()
    yield from _stability()
    yield from _shape()
    answered: list[tuple[Metric[...], str]] = [
        (accuracy, "Why: a model can be right for the wrong reason."),
        (brier, "Calibration by itself: accuracy counts as well."),
    ]
    for function, limitation in answered:
        needs, compute = (Requirement.LABELS, Requirement.MODEL), partial(_task_score, function)
        yield _entry(function, MetricQuestion.TASK, needs, limitation, compute, each_map=False)


# --- agreement with people


_PLAUSIBLE = (
    "That the model uses what people use: plausible is not faithful (Jacovi and Goldberg 2020)."
)
_TIES = "The quality of maps with ties, which it rewards: a constant map gets (1 + share) / 2."
_CENTRE = "More than a shared center bias, unless the prior scores lower (Tatler 2007)."


def _agreement() -> Iterator[ScorecardMetric]:
    with_truth: list[tuple[Metric[...], str]] = [
        (spearman, "How much weight is on the right keys: only the order counts."),
        (kendall, "How much weight is on the right keys: only the order counts."),
        (cc, _CENTRE),
        (sim, f"How far misplaced weight is from the target. {_CENTRE}"),
        (kl, "More than its worst cell: one zero where people looked makes it infinite."),
        (js, f"How far misplaced weight is from the target. {_CENTRE}"),
        (emd, "Which part is wrong: many near misses and few far ones can cost the same."),
    ]
    for function, limitation in with_truth:
        limits = f"{limitation} {_PLAUSIBLE}"
        compute = partial(_with_truth, function)
        yield _entry(function, MetricQuestion.AGREEMENT, (Requirement.TRUTH,), limits, compute)
    fixated: list[tuple[Metric[...], ComputeMetric, str]] = [
        (nss, _nss, _CENTRE),
        (auc_judd, _auc_judd, f"Whether weights are right beyond their order. {_CENTRE}"),
        (
            auc_shuffled,
            _auc_shuffled,
            "That attention at the center is wrong, which it penalizes (Kümmerer et al. 2018).",
        ),
        (
            information_gain,
            _information_gain,
            "The quality of a map that is not a density: weights are read as probabilities.",
        ),
    ]
    for function, compute_fixated, limitation in fixated:
        yield _entry(
            function,
            MetricQuestion.AGREEMENT,
            (Requirement.FIXATIONS,),
            f"{limitation} {_PLAUSIBLE}",
            compute_fixated,
        )
    needs = (Requirement.WORDS, Requirement.REGION)
    ranked_words: list[tuple[Metric[...], str]] = [
        (token_auprc, _TIES),
        (token_ap, "Differences below chance, which is the share of marked words."),
        (token_auc, "How many unmarked words are ranked above the marked ones."),
    ]
    for function, said in ranked_words:
        compute = partial(_token_ranking, function)
        yield _entry(function, MetricQuestion.AGREEMENT, needs, f"{said} {_PLAUSIBLE}", compute)
    marked: list[Metric[...]] = [
        *(token_f1, token_iou, token_precision, token_recall),
        *(span_f1, span_precision, span_recall),
    ]
    for function in marked:
        limits = f"How confident the map is: as many words are selected as marked. {_PLAUSIBLE}"
        if function is span_f1:
            limits = f"ERASER's IoU F1, which is the F1 of the two mean span rates. {limits}"
        yield _entry(
            function, MetricQuestion.AGREEMENT, needs, limits, partial(_token_selection, function)
        )


def _with_truth(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    return function(context.on_truth(name), context.truth(name).target)


def _fixations(context: MetricContext, name: str) -> AttentionMap:
    found = context.truth(name).fixations
    if found is None:
        raise MetricUnavailableError("the dataset has no single fixations")
    return found if name == PERSON else pool_people(found)


def _nss(context: MetricContext, name: str) -> SampleScores:
    return nss(context.on_truth(name), _fixations(context, name))


def _auc_judd(context: MetricContext, name: str) -> SampleScores:
    return auc_judd(context.on_truth(name), _fixations(context, name))


def _auc_shuffled(context: MetricContext, name: str) -> SampleScores:
    others = context.truth(name).others
    if others is None:
        raise MetricUnavailableError("the dataset has no fixations on other images")
    return auc_shuffled(context.on_truth(name), _fixations(context, name), others)


def _information_gain(context: MetricContext, name: str) -> SampleScores:
    prior = context.truth(name).prior
    if prior is None:
        raise MetricUnavailableError("the dataset has no prior of fixations")
    return information_gain(context.on_truth(name), _fixations(context, name), prior)


def _text_only(context: MetricContext, name: str) -> None:
    if len(context.truth(name).target.keys.spans[0].shape) != 1:
        raise MetricUnavailableError("the keys are cells of a picture, not words")


def _token_ranking(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    _text_only(context, name)
    return _with_truth(function, context, name)


def _token_selection(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    """Score as many of the most attended tokens as people have marked."""
    _text_only(context, name)
    attention, truth = context.on_truth(name), context.truth(name).target
    wanted, _ = single_row(truth)
    count = (wanted > 0).sum(dim=-1, keepdim=True)
    order = rank_keys(attention, context.generator("words"))
    cells = first_cells(order, count) & single_row(attention)[1]
    values = cells.to(attention.weights.dtype)[:, None, None, None]
    hard = replace(attention, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)
    # a map without weight, or with a weight that is not finite, has no most attended tokens
    there = (single_row(attention)[0] != 0).any(dim=-1)
    return mask_undefined(function(hard, truth).to(there.device), there)


# --- localization


def _location() -> Iterator[ScorecardMetric]:
    outside = "Whether something outside the region decides."
    said: list[tuple[Metric[...], str]] = [
        (pointing_game, f"Anything beyond the largest weight. {outside}"),
        (mass_inside, f"Whether the map covers all of a large object. {outside}"),
        (iou, f"A result that does not depend on the threshold of 0.5. {outside}"),
        (mean_iou, f"That a map of one part of the object, which scores low, is bad. {outside}"),
        (
            otsu_jaccard,
            f"That a map of one part of the object, which scores low, is bad. {outside}",
        ),
        (
            localization_accuracy,
            f"A result that does not depend on two thresholds of 0.5. {outside}",
        ),
    ]
    for function, limitation in said:
        compute = partial(_with_region, function)
        yield _entry(function, MetricQuestion.LOCATION, (Requirement.REGION,), limitation, compute)


def _with_region(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    truth = context.truth(name)
    if truth.fixations is not None:
        raise MetricUnavailableError("a fixation density has no region")
    return function(context.on_truth(name), truth.target)


# --- faithfulness


_HOLES = (
    "Whether content or holes changed the answer: the model was not trained on holes (Hooker et "
    "al. 2019)"
)
_SHAPES = "and the shape of a hole may reveal what was there (Rong et al. 2022)."


def _faithfulness() -> Iterator[ScorecardMetric]:
    curves: list[
        tuple[Metric[...], str, Sequence[float], Callable[[PerturbationCurve], SampleScores]]
    ] = [
        (deletion_area, "deletion", TENTHS, lambda curve: curve.area),
        (insertion_area, "insertion", TENTHS, lambda curve: curve.area),
        (aopc, "deletion", TENTHS, lambda curve: curve.step_drop),
        (comprehensiveness, "deletion", BINS, lambda curve: curve.drop),
        (sufficiency, "insertion", BINS, lambda curve: curve.drop),
        (flip_share, "deletion", TENTHS, lambda curve: curve.flip_share),
    ]
    for removal in REMOVALS:
        for function, kind, shares, read in curves:
            compute = partial(_curve, kind, shares, read, removal)
            yield _removal_entry(function, removal, compute)
        cut: list[Metric[...]] = [deletion, insertion, flips]
        for function in cut:
            yield _removal_entry(function, removal, partial(_mass_cells, function, removal))
        yield _removal_entry(infidelity, removal, partial(_infidelity, removal))
        yield _removal_entry(leave_one_out_agreement, removal, partial(_leave_one_out, removal))
    yield _entry(
        gradient_agreement,
        MetricQuestion.FAITHFULNESS,
        (Requirement.MODEL, Requirement.GRADIENTS),
        "That the gradient is right: it is an approximation too (Jain and Wallace 2019).",
        _gradient,
        removal=MASK,
    )


def _removal_entry(function: Metric[...], removal: str, compute: ComputeMetric) -> ScorecardMetric:
    limitation = f"{_HOLES}, {_SHAPES}"
    if removal == MASK:
        limitation = (
            f"{_HOLES}; features of other cells keep what they received from a removed one."
        )
    return _entry(
        function, MetricQuestion.FAITHFULNESS, (Requirement.MODEL,), limitation, compute, removal
    )


def _curve(
    kind: str,
    shares: Sequence[float],
    read: Callable[[PerturbationCurve], SampleScores],
    removal: str,
    context: MetricContext,
    name: str,
) -> SampleScores:
    return read(context.curve(kind, name, removal, shares))


def _mass_cells(
    function: Metric[...], removal: str, context: MetricContext, name: str
) -> SampleScores:
    """Score the fewest cells that hold half of the attention."""
    chosen = mass_cells(context.map(name), context.generator("cells"))
    return function(context.decide(removal), chosen)


def _infidelity(removal: str, context: MetricContext, name: str) -> SampleScores:
    draws = context.generator("infidelity")
    return infidelity(context.decide(removal), context.map(name), draws, draws=32)


def _leave_one_out(removal: str, context: MetricContext, name: str) -> SampleScores:
    return _effect_agreement(context.map(name), context.effects[removal])


def _gradient(context: MetricContext, name: str) -> SampleScores:
    return _effect_agreement(context.map(name), context.key_gradients)


def _effect_agreement(attention: AttentionMap, effect: AttentionMap) -> SampleScores:
    """Compute tau-b with the effect of each key; NaN where no key has an effect."""
    some = (effect.weights != 0).flatten(1).any(dim=-1)
    return mask_undefined(kendall(attention, effect), some)


# --- interventions


def _intervention() -> Iterator[ScorecardMetric]:
    # the words are part of keys in committed results
    edits: list[tuple[str, str, Callable[[MetricContext], Edit | Bias]]] = [
        ("permuted", "permuted", lambda context: permute_weights(context.generator("permuted"))),
        ("evened", "uniform", lambda context: uniform_weights),
    ]
    changes: list[Metric[...]] = [output_change, edit_flips]
    for word, weights, edit in edits:
        for function in changes:
            info = replace(
                function.info,
                key=f"{function.info.key}_{word}",
                name=f"{function.info.name}, {word}",
                description=f"{function.info.description} ({weights} weights)",
            )
            compute = partial(_edited, function, edit)
            yield _model_entry(info, f"{_UNCHANGED} (Wiegreffe and Pinter 2019).", compute)
    limitation = (
        "That the largest weights are the reason: others rank too (Serrano and Smith 2019)."
    )
    yield _model_entry(beyond_random_weights.info, limitation, _beyond_random_weights)
    limitation = "Which of the removed weights mattered (Serrano and Smith 2019)."
    yield _model_entry(weights_to_flip.info, limitation, _weights_to_flip)


def _model_entry(info: MetricInfo, limitation: str, compute: ComputeMetric) -> ScorecardMetric:
    needs = (Requirement.MODEL, Requirement.ATTENTION)
    return ScorecardMetric(
        info.key, info, MetricQuestion.INTERVENTION, needs, limitation, compute, each_map=False
    )


def _run(context: MetricContext) -> Run:
    model = context.model
    if not isinstance(model, nn.Module):
        raise MetricUnavailableError("attention can be edited only in a PyTorch module")
    inner = getattr(model, "model", None)
    watched = inner if isinstance(inner, nn.Module) else model
    return editable_forward(watched, lambda: model(context.batch).prediction)


def _edited(
    function: Metric[...],
    edit: Callable[[MetricContext], Edit | Bias],
    context: MetricContext,
    name: str,
) -> SampleScores:
    return function(_run(context), edit(context))


def _beyond_random_weights(context: MetricContext, name: str) -> SampleScores:
    return beyond_random_weights(_run(context), context.generator("weights"))


def _weights_to_flip(context: MetricContext, name: str) -> SampleScores:
    return weights_to_flip(_run(context))


# --- stability


def _stability() -> Iterator[ScorecardMetric]:
    still = "That the map is right: a constant map is perfectly stable (Yeh et al. 2019)."
    steady: list[Metric[...]] = [
        sensitivity_max,
        sensitivity_mean,
        stability,
    ]
    for function in steady:
        compute = partial(_perturbed, function)
        yield _entry(
            function,
            MetricQuestion.STABILITY,
            (Requirement.PIXELS,),
            still,
            compute,
            each_map=False,
        )
    yield _entry(
        randomization_similarity,
        MetricQuestion.STABILITY,
        (Requirement.MODEL, Requirement.ATTENTION),
        "That a map which changes is right: it is a check, not a score (Adebayo et al. 2018).",
        _randomized,
        each_map=False,
    )


def _perturbed(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    """Score under noise, relative to the range of 255 for integer images and of 1 for others."""
    pictures, model = context.pictures, context.model
    context.map(ATTENTION)
    bytes_ = not pictures.is_floating_point()
    unit = 255.0 if bytes_ else 1.0

    def attend(images: Tensor) -> AttentionMap:
        given = images * unit
        given = given.round().clamp(0, 255).to(pictures.dtype) if bytes_ else given
        changed = replace(context.unshared, images=given.to(pictures.dtype))
        return MetricContext(model, changed, over=context.over).map(ATTENTION)

    return function(attend, pictures.float() / unit, context.generator("noise"))


def _randomized(context: MetricContext, name: str) -> SampleScores:
    """Score a randomized model; all portions use the same random weights, drawn from the seed."""
    if not isinstance(context.model, nn.Module):
        raise MetricUnavailableError("weights can be randomized only in a PyTorch module")
    context.map(ATTENTION)
    generator = torch.Generator().manual_seed(derive_seed(context.seed, "forget") >> 1)

    def look() -> AttentionMap:
        return MetricContext(context.model, context.batch, over=context.over).map(ATTENTION)

    return randomization_similarity(context.model, look, generator)


# --- shape and task


def _shape() -> Iterator[ScorecardMetric]:
    limitation = "Whether it is right: a sharp map may be wrong."
    said: list[Metric[...]] = [
        entropy,
        effective_support,
        gini,
        hoyer,
    ]
    for function in said:
        yield _entry(function, MetricQuestion.SHAPE, (), limitation, partial(_map_score, function))
    alike = "That one head is enough: heads with equal maps may carry different values."
    yield _entry(
        head_redundancy,
        MetricQuestion.SHAPE,
        (Requirement.MODEL,),
        alike,
        _redundancy,
        each_map=False,
    )


def _redundancy(context: MetricContext, name: str) -> SampleScores:
    return head_redundancy(context.heads)


def _map_score(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    return function(context.map(name))


def _task_score(function: Metric[...], context: MetricContext, name: str) -> SampleScores:
    if context.batch.labels is None:
        raise MetricUnavailableError("the dataset has no labels")
    logits = context.output.prediction
    most = int(context.batch.labels.max()) if len(context) else 0
    if most >= logits.shape[-1]:
        raise MetricUnavailableError(
            f"the dataset has labels up to {most}, the model has {logits.shape[-1]} classes"
        )
    return function(logits, context.batch.labels)


def _entry(
    function: Metric[...],
    question: MetricQuestion,
    needs: tuple[Requirement, ...],
    limitation: str,
    compute: ComputeMetric,
    removal: str = "",
    each_map: bool = True,
) -> ScorecardMetric:
    info = function.info
    key = info.key
    if removal:
        key = f"{key}@{removal}"
        info = replace(
            info,
            key=key,
            name=f"{info.name}, {removal}",
            description=f"{info.description} (removal by {removal})",
        )
    return ScorecardMetric(key, info, question, needs, limitation, compute, each_map)


def describe(key: str) -> str:
    """Return the one-line summary of a scorecard metric; empty for an unknown key."""
    return _summaries().get(key, "")


@cache
def _summaries() -> dict[str, str]:
    return {entry.key: entry.info.summary for entry in available_metrics()}
