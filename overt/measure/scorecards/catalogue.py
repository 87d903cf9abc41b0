"""The measures that a scorecard can ask, each with what it needs and what it cannot say.

A name stands for a function of `overt.measure`, whose numbers these are. Behind an @ stands what
takes the place of what is removed: `mask` is the model's own way, `mean`, `blur` and `imputed` are
those of `overt.measure.removal`, in pixels where there is a picture, else in features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Form, Kind
from overt.capture.edits import Bias, Edit
from overt.data.human import pooled
from overt.errors import BadInput
from overt.measure.agreement import cc, js, kendall, kl, sim, spearman
from overt.measure.answers import accuracy
from overt.measure.calibration import brier
from overt.measure.cells import first, mass_cells, ranked
from overt.measure.drawing import seed_of
from overt.measure.effects import gradient_agreement, leave_one_out_agreement
from overt.measure.faithfulness import deletion, flips, insertion
from overt.measure.fixations import auc_judd, auc_shuffled, information_gain, nss
from overt.measure.flipping import (
    BINS,
    TENTHS,
    Curve,
    comprehensiveness,
    deletion_area,
    flip_share,
    flipping,
    insertion_area,
    sufficiency,
)
from overt.measure.interventions import (
    Run,
    beyond_random,
    edit_flips,
    editing,
    evened,
    output_change,
    permuted,
    weights_to_flip,
)
from overt.measure.location import cut_out, iou, mass_inside, mean_iou, otsu_jaccard, pointing_game
from overt.measure.measured import Declared, Measure, Measured, defined, row
from overt.measure.randomised import forgotten_similarity
from overt.measure.rationales import (
    iou_f1,
    token_ap,
    token_auc,
    token_auprc,
    token_f1,
    token_iou,
    token_precision,
    token_recall,
)
from overt.measure.scorecards.entries import Ask, Entry, Need, Question, Unasked
from overt.measure.scorecards.sight import ATTENTION, MASK, PERSON, REMOVALS, Sight
from overt.measure.sensitivity import infidelity, sensitivity_max, sensitivity_mean, stability
from overt.measure.shape import effective_support, entropy, gini, head_redundancy, hoyer
from overt.measure.transport import emd

DEAREST = (
    "emd",
    "kendall",
    "leave_one_out_agreement",
)  # exact, slow; both kinds by name
LESSER = ("kl", "token_precision", "token_recall", "cut_out", "iou", "hoyer", "brier")
_MOVED = "An unchanged answer says that these weights did not have to be, not that they did nothing"


def catalogue() -> tuple[Entry, ...]:
    """All measures, by the question that they answer."""
    return tuple(_entries())


def usual() -> tuple[str, ...]:
    """The keys that are asked where nothing is said: the quick ones, and of each family some."""
    return tuple(entry.key for entry in catalogue() if _is_usual(entry))


def choose(names: Sequence[str] | None) -> tuple[Entry, ...]:
    """The entries of these names: a key, a name for all its baselines, or `all`; None: the usual.

    An unknown name is `BadInput` and is answered with the nearest ones.
    """
    every = catalogue()
    if names is None:
        return tuple(entry for entry in every if _is_usual(entry))
    wanted: set[str] = set()
    for name in names:
        found = [e.key for e in every if name in (e.key, e.name, "all", e.question.name.lower())]
        if not found:
            known = list(dict.fromkeys(word for e in every for word in (e.name, e.key)))
            near = get_close_matches(name, known, 3) or known[:3]
            raise BadInput(
                f"there is no measure '{name}'; near it: {', '.join(near)} (`overt measure --list` "
                "shows all)."
            )
        wanted.update(found)
    if not wanted:
        raise BadInput("no measure was named; `overt measure --list` shows all.")
    return tuple(entry for entry in every if entry.key in wanted)


def _is_usual(entry: Entry) -> bool:
    if entry.name in DEAREST or entry.question is Question.STABILITY:
        return False
    name, _, removal = entry.key.partition("@")
    if not removal:
        return name not in LESSER
    if removal == MASK:
        return name not in ("deletion", "insertion", "flips", "flipping", "infidelity")
    return name in ("deletion_area", "insertion_area") and removal != "imputed"


def _entries() -> Iterator[Entry]:
    yield from _agreement()
    yield from _location()
    yield from _faithfulness()
    yield from _intervention()
    yield from _stability()
    yield from _shape()
    answered: list[tuple[Declared[...], str]] = [
        (accuracy, "Nothing of why: a model can be right for a wrong reason."),
        (brier, "How well it knows what it does not know by itself: being right counts as well."),
    ]
    for function, cannot in answered:
        needs, ask = (Need.LABELS, Need.MODEL), partial(_answered, function)
        yield _entry(function, Question.TASK, needs, cannot, ask, each_map=False)


# --- where people look


_PLAUSIBLE = (
    "That the model uses what people use: plausible is not faithful (Jacovi and Goldberg 2020)."
)
_TIES = "Anything of maps with ties, which are rewarded: one without order gets (1 + share) / 2."
_CENTRE = "Without the prior beside it, more than that both look at the middle (Tatler 2007)."


def _agreement() -> Iterator[Entry]:
    with_truth: list[tuple[Declared[...], str]] = [
        (spearman, "How much weight is on the right places: only the order counts."),
        (kendall, "How much weight is on the right places: only the order counts."),
        (cc, _CENTRE),
        (sim, f"How far off what is missed lies. {_CENTRE}"),
        (kl, "More than its worst cell: one zero where people looked makes it infinite."),
        (js, f"How far off what is missed lies. {_CENTRE}"),
        (emd, "Which part is wrong: near misses and few far ones can cost the same."),
    ]
    for function, cannot in with_truth:
        told = f"{cannot} {_PLAUSIBLE}"
        asked = partial(_with_truth, function)
        yield _entry(function, Question.AGREEMENT, (Need.TRUTH,), told, asked)
    fixated: list[tuple[Declared[...], Ask, str]] = [
        (nss, _nss, _CENTRE),
        (auc_judd, _auc_judd, f"Whether weights are right, beyond their order. {_CENTRE}"),
        (
            auc_shuffled,
            _auc_shuffled,
            "That looking at the middle is wrong, which it punishes (Kümmerer et al. 2018).",
        ),
        (
            information_gain,
            _information_gain,
            "Anything of a map that is no density: weights are read as chances of a fixation.",
        ),
    ]
    for function, ask, cannot in fixated:
        yield _entry(function, Question.AGREEMENT, (Need.FIXATIONS,), f"{cannot} {_PLAUSIBLE}", ask)
    needs = (Need.WORDS, Need.REGION)
    ranked_words: list[tuple[Declared[...], str]] = [
        (token_auprc, _TIES),
        (token_ap, "Anything below the share of words that are marked, which is chance."),
        (token_auc, "How many words before the marked ones a reader would have to pass."),
    ]
    for function, said in ranked_words:
        asked = partial(_words, function)
        yield _entry(function, Question.AGREEMENT, needs, f"{said} {_PLAUSIBLE}", asked)
    marked: list[Declared[...]] = [token_f1, token_iou, token_precision, token_recall, iou_f1]
    for function in marked:
        told = f"How sure the map is: as many words are chosen as were marked. {_PLAUSIBLE}"
        yield _entry(function, Question.AGREEMENT, needs, told, partial(_chosen, function))


def _with_truth(function: Declared[...], sight: Sight, name: str) -> Measured:
    return function(sight.on_truth(name), sight.truth(name).target)


def _fixations(sight: Sight, name: str) -> AttentionMap:
    found = sight.truth(name).fixations
    if found is None:
        raise Unasked("the data set has no single fixations")
    return found if name == PERSON else pooled(found)


def _nss(sight: Sight, name: str) -> Measured:
    return nss(sight.on_truth(name), _fixations(sight, name))


def _auc_judd(sight: Sight, name: str) -> Measured:
    return auc_judd(sight.on_truth(name), _fixations(sight, name))


def _auc_shuffled(sight: Sight, name: str) -> Measured:
    others = sight.truth(name).others
    if others is None:
        raise Unasked("the data set does not know the fixations on other images")
    return auc_shuffled(sight.on_truth(name), _fixations(sight, name), others)


def _information_gain(sight: Sight, name: str) -> Measured:
    prior = sight.truth(name).prior
    if prior is None:
        raise Unasked("the data set has no prior of where people look whatever is shown")
    return information_gain(sight.on_truth(name), _fixations(sight, name), prior)


def _text_only(sight: Sight, name: str) -> None:
    if len(sight.truth(name).target.keys.spans[0].shape) != 1:
        raise Unasked("cells of a picture are no words")


def _words(function: Declared[...], sight: Sight, name: str) -> Measured:
    _text_only(sight, name)
    return _with_truth(function, sight, name)


def _chosen(function: Declared[...], sight: Sight, name: str) -> Measured:
    """Measures of chosen words: as many of the most attended as people have marked."""
    _text_only(sight, name)
    attention, truth = sight.on_truth(name), sight.truth(name).target
    wanted, _ = row(truth)
    count = (wanted > 0).sum(dim=-1, keepdim=True)
    order = ranked(attention, sight.draw("words"))
    cells = first(order, count) & row(attention)[1]
    values = cells.to(attention.weights.dtype)[:, None, None, None]
    hard = replace(attention, values=values, kind=Kind.AMOUNT, form=Form.PLAIN)
    return function(hard, truth)


# --- where the thing is


def _location() -> Iterator[Entry]:
    edges = "Anything of what is outside the truth and decides all the same."
    said: list[tuple[Declared[...], str]] = [
        (pointing_game, f"More than the one largest weight does. {edges}"),
        (mass_inside, f"A map that covers all of a large thing is not better. {edges}"),
        (iou, f"It hangs on the threshold of one half. {edges}"),
        (mean_iou, f"It is low for a map of one part of the thing. {edges}"),
        (otsu_jaccard, f"It is low for a map of one part of the thing. {edges}"),
        (cut_out, f"It hangs on two thresholds of one half. {edges}"),
    ]
    for function, cannot in said:
        ask = partial(_with_region, function)
        yield _entry(function, Question.LOCATION, (Need.REGION,), cannot, ask)


def _with_region(function: Declared[...], sight: Sight, name: str) -> Measured:
    truth = sight.truth(name)
    if truth.fixations is not None:
        raise Unasked("a density of fixations has no edge")
    return function(sight.on_truth(name), truth.target)


# --- what drives the answer


_HOLES = "A model that was never shown holes may fail for their sake (Hooker et al. 2019)"
_SHAPES = "and the shape of a hole may tell what was there (Rong et al. 2022)."


def _faithfulness() -> Iterator[Entry]:
    curves: list[tuple[Declared[...], str, Sequence[float], Callable[[Curve], Measured]]] = [
        (deletion_area, "deletion", TENTHS, lambda curve: curve.area),
        (insertion_area, "insertion", TENTHS, lambda curve: curve.area),
        (flipping, "deletion", TENTHS, lambda curve: curve.drop),
        (comprehensiveness, "deletion", BINS, lambda curve: curve.drop),
        (sufficiency, "insertion", BINS, lambda curve: curve.drop),
        (flip_share, "deletion", TENTHS, _least),
    ]
    for removal in REMOVALS:
        for function, kind, shares, read in curves:
            ask = partial(_curve, kind, shares, read, removal)
            yield _removed(function, removal, ask)
        cut: list[Declared[...]] = [deletion, insertion, flips]
        for function in cut:
            yield _removed(function, removal, partial(_cells, function, removal))
        yield _removed(infidelity, removal, partial(_infidelity, removal))
        yield _removed(leave_one_out_agreement, removal, partial(_one_out, removal))
    yield _entry(
        gradient_agreement,
        Question.FAITHFULNESS,
        (Need.MODEL, Need.GRADIENTS),
        "That the gradient is right, which is one more view of the model (Jain and Wallace 2019).",
        _slope,
        removal=MASK,
    )


def _removed(function: Declared[...], removal: str, ask: Ask) -> Entry:
    cannot = f"{_HOLES}, {_SHAPES}"
    if removal == MASK:
        cannot = f"{_HOLES}; what a removed part has told its neighbours before stays."
    return _entry(function, Question.FAITHFULNESS, (Need.MODEL,), cannot, ask, removal)


def _curve(
    kind: str,
    shares: Sequence[float],
    read: Callable[[Curve], Measured],
    removal: str,
    sight: Sight,
    name: str,
) -> Measured:
    return read(sight.curve(kind, name, removal, shares))


def _least(curve: Curve) -> Measured:
    at = torch.tensor(curve.shares, dtype=torch.float64, device=curve.probability.device)
    return defined(torch.where(curve.changed, at[:, None], 1.0).amin(dim=0), curve.there)


def _cells(function: Declared[...], removal: str, sight: Sight, name: str) -> Measured:
    """The fewest cells that hold half of the attention between them."""
    chosen = mass_cells(sight.map(name), sight.draw("cells"))
    return function(sight.decide(removal), chosen)


def _infidelity(removal: str, sight: Sight, name: str) -> Measured:
    draws = sight.draw("infidelity")
    return infidelity(sight.decide(removal), sight.map(name), draws, draws=32)


def _one_out(removal: str, sight: Sight, name: str) -> Measured:
    return _alike(sight.map(name), sight.effects[removal])


def _slope(sight: Sight, name: str) -> Measured:
    return _alike(sight.map(name), sight.slope)


def _alike(attention: AttentionMap, effect: AttentionMap) -> Measured:
    """Tau-b with what each key does; not defined where none does anything."""
    some = (effect.weights != 0).flatten(1).any(dim=-1)
    return defined(kendall(attention, effect), some)


# --- other attention


def _intervention() -> Iterator[Entry]:
    changed = replace(output_change.measure, name="output change")
    edits: list[tuple[str, Callable[[Sight], Edit | Bias]]] = [
        ("permuted", lambda sight: permuted(sight.draw("permuted"))),
        ("evened", lambda sight: evened),
    ]
    for word, edit in edits:
        named = replace(changed, name=f"output change, {word}")
        ask = partial(_edited, output_change, edit)
        key = f"output_change_{word}"
        yield _of_model(key, named, f"{_MOVED} (Wiegreffe and Pinter 2019).", ask)
        named = replace(edit_flips.measure, name=f"edit flips, {word}")
        ask = partial(_edited, edit_flips, edit)
        yield _of_model(f"edit_flips_{word}", named, f"{_MOVED} (Wiegreffe and Pinter 2019).", ask)
    key, cannot = (
        "beyond_random_weights",
        "That the largest weights are the reason: others rank too.",
    )
    yield _of_model(key, beyond_random.measure, f"{cannot} (Serrano and Smith 2019).", _beyond)
    cannot = "Which of the removed weights it was (Serrano and Smith 2019)."
    yield _of_model("weights_to_flip", weights_to_flip.measure, cannot, _to_flip)


def _of_model(key: str, meaning: Measure, cannot: str, ask: Ask) -> Entry:
    needs = (Need.MODEL, Need.ATTENTION)
    return Entry(key, meaning, Question.INTERVENTION, needs, cannot, ask, each_map=False)


def _run(sight: Sight) -> Run:
    model = sight.model
    if not isinstance(model, nn.Module):
        raise Unasked("only a PyTorch module has attention that can be changed in flight")
    inner = getattr(model, "model", None)
    watched = inner if isinstance(inner, nn.Module) else model
    return editing(watched, lambda: model(sight.batch).prediction)


def _edited(
    function: Declared[...], edit: Callable[[Sight], Edit | Bias], sight: Sight, name: str
) -> Measured:
    return function(_run(sight), edit(sight))


def _beyond(sight: Sight, name: str) -> Measured:
    return beyond_random(_run(sight), sight.draw("weights"))


def _to_flip(sight: Sight, name: str) -> Measured:
    return weights_to_flip(_run(sight))


# --- the same map again


def _stability() -> Iterator[Entry]:
    still = (
        "That the map is right: one that never changes is as stable as can be (Yeh et al. 2019)."
    )
    steady: list[Declared[...]] = [
        sensitivity_max,
        sensitivity_mean,
        stability,
    ]
    for function in steady:
        ask = partial(_disturbed, function)
        yield _entry(function, Question.STABILITY, (Need.PIXELS,), still, ask, each_map=False)
    yield _entry(
        forgotten_similarity,
        Question.STABILITY,
        (Need.MODEL, Need.ATTENTION),
        "That a map which changes is right: it is a check, not a score (Adebayo et al. 2018).",
        _forgotten,
        each_map=False,
    )


def _disturbed(function: Declared[...], sight: Sight, name: str) -> Measured:
    """Noise in units of a full range of 255 for bytes, and of 1 for other numbers."""
    pictures, model = sight.pictures, sight.model
    sight.map(ATTENTION)
    bytes_ = not pictures.is_floating_point()
    unit = 255.0 if bytes_ else 1.0

    def attend(images: Tensor) -> AttentionMap:
        given = images * unit
        given = given.round().clamp(0, 255).to(pictures.dtype) if bytes_ else given
        changed = replace(sight.alone, images=given.to(pictures.dtype))
        return Sight(model, changed, over=sight.over).map(ATTENTION)

    return function(attend, pictures.float() / unit, sight.draw("noise"))


def _forgotten(sight: Sight, name: str) -> Measured:
    """All portions are asked of the same forgetful model: its weights are drawn from the seed."""
    if not isinstance(sight.model, nn.Module):
        raise Unasked("only a PyTorch module has weights that can be forgotten")
    sight.map(ATTENTION)
    generator = torch.Generator().manual_seed(seed_of(sight.seed, "forget") >> 1)

    def look() -> AttentionMap:
        return Sight(sight.model, sight.batch, over=sight.over).map(ATTENTION)

    return forgotten_similarity(sight.model, look, generator)


# --- shape, and the rest


def _shape() -> Iterator[Entry]:
    cannot = "Whether it is right: a sharp map may be sharply wrong."
    said: list[Declared[...]] = [
        entropy,
        effective_support,
        gini,
        hoyer,
    ]
    for function in said:
        yield _entry(function, Question.SHAPE, (), cannot, partial(_of_map, function))
    alike = "That one head would do: heads that look alike may carry other things."
    yield _entry(head_redundancy, Question.SHAPE, (Need.MODEL,), alike, _redundancy, each_map=False)


def _redundancy(sight: Sight, name: str) -> Measured:
    return head_redundancy(sight.heads)


def _of_map(function: Declared[...], sight: Sight, name: str) -> Measured:
    return function(sight.map(name))


def _answered(function: Declared[...], sight: Sight, name: str) -> Measured:
    if sight.batch.labels is None:
        raise Unasked("the data set has no right answers")
    logits = sight.output.prediction
    most = int(sight.batch.labels.max()) if len(sight) else 0
    if most >= logits.shape[-1]:
        raise Unasked(f"the model knows {logits.shape[-1]} classes, and the data set others")
    return function(logits, sight.batch.labels)


def _entry(
    function: Declared[...],
    question: Question,
    needs: tuple[Need, ...],
    cannot: str,
    ask: Ask,
    removal: str = "",
    each_map: bool = True,
) -> Entry:
    key = function.__name__ + (f"@{removal}" if removal else "")
    meaning = function.measure
    if removal:
        meaning = replace(meaning, name=f"{meaning.name}, {removal}")
    return Entry(key, meaning, question, needs, cannot, ask, each_map)
