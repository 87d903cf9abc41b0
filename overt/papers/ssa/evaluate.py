"""Self Supervision for Attention Networks: metrics of a run besides its accuracy.

On the test split: agreement with the ground truth or human attention, also of the first network
(`_before`), soft accuracy with several right answers, and for texts the deletion metric with
attended words overwritten. On the training split: what the search found.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import metrics
from overt.attention import AttentionMap
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.data.batch import Batch
from overt.experiments.evaluate import (
    CONTRAST_SEED,
    DELETION,
    Evaluator,
    PerItemMetrics,
    add_metrics,
    concatenate_metrics,
    gallery_fields,
)
from overt.experiments.experiment import Evaluation, MetricValue, direction_word
from overt.metrics.metric import MetricInfo
from overt.metrics.removal import token_removal
from overt.nn import Output
from overt.nn.wrappers.key_masking import key_weights
from overt.papers.ssa.stages import SsaStages
from overt.papers.ssa.supervision import all_batches
from overt.targets import Surrogates
from overt.targets.sources import match_keys
from overt.targets.surrogate import KeepWords, masked_batch, mean_map, search_without_whole
from overt.viz.gallery_sample import GallerySample

EMD_SAMPLES = 100  # images with an exact earth mover's distance, which is slow on a grid
GALLERY_CANDIDATES, GALLERY_SAMPLES = 64, 4  # training samples considered, and shown
TWO_WORD_TEXTS = 200  # validation texts reduced to two words
SEARCH_SAMPLES = 2000  # training samples whose surrogates are compared with the truth

CHANCE = MetricInfo("probability of the truth", "probability", True, 0.0, 1.0)
SHARE = MetricInfo("share", "share", None, 0.0, 1.0)
TIMES = MetricInfo("questions", "questions", None, 0.0)
AGREEMENT = {
    "pointing": metrics.pointing_game,
    "mass_inside": metrics.mass_inside,
    "rank_correlation": metrics.spearman,
}


def evaluate_run(
    evaluator: Evaluator, stages: SsaStages, name: str, blank: int | None = None
) -> Evaluation:
    """Evaluate the network of a run, with all metrics of this module.

    `blank` is the mask token, for texts.
    """
    device = stages.device
    model: Any = stages.model

    def more_metrics(batch: Batch) -> PerItemMetrics:
        written = {} if blank is None else overwrite_deletion(model, batch, blank)
        return _soft_accuracy(model, batch) | written

    found, more = evaluator.evaluate_with(model, device, more_metrics)
    more |= _emd_to_truth(evaluator, model, name, device)
    # With the ground truth as target from scratch there is no first network to compare with.
    if stages.recipe.supervised and stages.needs_first:
        first: Any = stages.parts.first.to(device)
        with eval_mode_forked_rng(first):
            before = evaluator.collect(lambda batch: _agreement(first, batch, name), first, device)
            before |= _emd_to_truth(evaluator, first, name, device)
        more |= {f"{key}_before": value for key, value in before.items()}
    found = _by_type(add_metrics(found, more, str(evaluator.data.split)))
    return replace(
        found,
        ours={
            **found.ours,
            **_validation_values(stages),
            **_search_values(stages),
            **_scale_values(stages),
        },
        gallery=[*found.gallery, *_search_gallery(stages, evaluator.classes, name)],
    )


def _soft_accuracy(model: Any, batch: Batch) -> PerItemMetrics:
    """Return the VQA accuracy, where several answers are right."""
    if batch.answers is None:
        return {}
    prediction = model(batch).prediction
    declared = metrics.soft_accuracy.info
    return {"vqa_accuracy": (declared, metrics.soft_accuracy(prediction, batch.answers))}


def overwrite_deletion(model: Any, batch: Batch, blank: int) -> PerItemMetrics:
    """Compute the deletion metric with attended words overwritten by `blank`, against random words.

    The search, and the deletion metric of the evaluator, hide words inside the network: supervision
    by the one could please the other. Here the text itself changes.
    """
    assert batch.tokens is not None
    features = model.encode(batch)
    attention = model.decide(features).attention_to("text").over_heads()
    layout = getattr(features, "layout", None)  # a pretrained encoder has tokens that are not words

    def classify(tokens: Tensor) -> Tensor:
        changed = replace(batch, tokens=tokens)
        read = model.encode(changed) if layout is None else replace(features, batch=changed)
        prediction: Tensor = model.decide(read).prediction
        return prediction

    written = token_removal(classify, batch.tokens, blank)

    def decide(keep: Tensor) -> Tensor:
        return written(keep if layout is None else key_weights(layout, {"text": keep}))

    # Seeded per batch, so that all networks are compared with the same random words.
    generator = torch.Generator().manual_seed(CONTRAST_SEED)
    found = metrics.contrast_removal(decide, attention, None, generator, draws=2)
    return {"deletion_overwritten": (DELETION, found.beyond_random)}


def _agreement(model: Any, batch: Batch, name: str) -> PerItemMetrics:
    """Return the accuracy, and how well a map agrees with the ground truth of the batch."""
    output = model(batch)
    found: PerItemMetrics = {}
    if batch.labels is not None:
        accuracy = metrics.accuracy(output.prediction, batch.labels)
        found["accuracy"] = metrics.accuracy.info, accuracy
    return found | _truth_agreement(mean_map(output.attention_to(name)), batch)


def _truth_agreement(attention: AttentionMap, batch: Batch) -> PerItemMetrics:
    truth = batch.target
    if truth is None or truth.keys.spans[0].name != attention.keys.spans[0].name:
        return {}
    return {key: (one.info, one(attention, truth)) for key, one in AGREEMENT.items()}


def _emd_to_truth(
    evaluator: Evaluator, model: Any, name: str, device: torch.device
) -> PerItemMetrics:
    """Compute the earth mover's distance to the truth: of all texts, or of the first images."""
    count = len(evaluator.data) if name == "text" else EMD_SAMPLES

    def one(batch: Batch) -> PerItemMetrics:
        truth = batch.target
        attention = mean_map(model(batch).attention_to(name)).to("cpu")
        if truth is None or truth.keys.spans[0].name != name:
            return {}
        return {"emd": (metrics.emd.info, metrics.emd(attention, truth.to("cpu")))}

    left = count
    parts: list[PerItemMetrics] = []
    for batch in evaluator.first_batches(count, device):  # an item may have several samples
        some = batch if len(batch) <= left else batch.select(torch.arange(left))
        parts.append(one(some))
        left -= len(some)
        if left <= 0:
            break
    return concatenate_metrics(parts)


def _by_type(found: Evaluation) -> Evaluation:
    """Add VQA accuracy by answer type, if there are types."""
    if "vqa_accuracy" not in found.samples:
        return found
    values, groups = found.samples["vqa_accuracy"], found.samples["group"]
    cells = {
        str(group): {
            "value": float(np.nanmean(values[groups == group])),
            "n": int((~np.isnan(values[groups == group])).sum()),
        }
        for group in sorted(set(groups.tolist()))
    }
    return replace(found, groups={**found.groups, "vqa_accuracy": cells})


# --- search


def _search_gallery(stages: SsaStages, classes: Sequence[str], name: str) -> list[GallerySample]:
    """Return the map of the first network by itself and on its best masked input (figures 3 and 5).

    Of the first training samples, those whose confidence in the label a mask raised most.
    """
    found = stages.found
    if found is None:
        return []
    first: Any = stages.parts.first.to(stages.device)
    shown = stages.parts.shown
    batch = shown.batch(range(min(GALLERY_CANDIDATES, len(shown)))).to(stages.device)
    with eval_mode_forked_rng(first):
        output: Output = first(batch)
    own = mean_map(output.attention_to(name))
    target = match_keys(found.target(batch.ids, name).to(stages.device), own)
    # The scores of a search are log-probabilities of the label.
    base, best = found.base(batch.ids, name).exp(), found.best(batch.ids, name).exp()
    chosen = (best - base).argsort(descending=True, stable=True)[:GALLERY_SAMPLES].tolist()
    prediction = output.prediction.argmax(dim=-1)
    truth = batch.labels if batch.labels is not None else prediction
    return [
        GallerySample(
            id=f"{batch.ids[row]}, {title}",
            group=title,
            prediction=classes[int(prediction[row])],
            truth=classes[int(truth[row])],
            scores={"probability_of_truth": float(score[row])},
            **gallery_fields(batch, Output(output.prediction, (attention,)), row),
        )
        for title, attention, score in (("own look", own, base), ("best look", target, best))
        for row in chosen
    ]


def _scale_values(stages: SsaStages) -> dict[str, MetricValue]:
    """Return the loss weight measured for each span: gamma and beta of section 3.3."""
    return {
        f"gamma_{name}": MetricValue(weight, "ratio", "neither", "train", 1)
        for name, weight in stages.gammas.items()
    }


def _validation_values(stages: SsaStages) -> dict[str, MetricValue]:
    """Return the accuracy of the final network on validation, to choose settings by."""
    held = stages.parts.validation
    model: Any = stages.model
    with eval_mode_forked_rng(model):
        value = held.accuracy(model, stages.device)
    return {"val_accuracy": MetricValue(value, "share", "higher", "val", len(held.data))}


def _search_values(stages: SsaStages) -> dict[str, MetricValue]:
    """Return confidence before and after the search, and agreement of surrogates with truth."""
    found = stages.found
    if found is None:
        return {}
    ours: dict[str, MetricValue] = {}
    several = len(found.names) > 1
    for name in stages.parts.names:
        tail = f"_{name}" if several else ""
        base, best = found.base(found.ids, name), found.best(found.ids, name)
        rows: PerItemMetrics = {
            "base_score": (CHANCE, base.exp()),
            "best_score": (CHANCE, best.exp()),
            "improved": (SHARE, (best > base).float()),
            "probes": (TIMES, found.probes(found.ids, name).float()),
        }
        rows |= concatenate_metrics(_surrogates_against_truth(stages, found, name))
        ours |= {
            f"{key}{tail}": _mean(declared, values)
            for key, (declared, values) in rows.items()
            if not torch.isnan(values).all()
        }
    if "text" in stages.parts.names:
        ours |= _two_word_values(stages)
    ours["search_seconds"] = MetricValue(stages.seconds, "seconds", "lower", "train", 1)
    return ours


def _two_word_values(stages: SsaStages) -> dict[str, MetricValue]:
    """Return the confidence in the label from the two best words alone (figure 6)."""
    first: Any = stages.parts.first.to(stages.device)
    held = stages.parts.validation.first_batches(TWO_WORD_TEXTS, stages.device)
    whole, two = list[Tensor](), list[Tensor]()
    for batch in held:
        with masked_batch(first, batch, ["text"]) as look:
            found = search_without_whole(look, KeepWords(count=stages.recipe.surrogate.texts))
        whole.append(found.base.exp())
        two.append(found.best.exp())
    both = {"whole_text_score": torch.cat(whole), "two_words_score": torch.cat(two)}
    return {key: replace(_mean(CHANCE, values), split="val") for key, values in both.items()}


def _mean(declared: MetricInfo, values: Tensor) -> MetricValue:
    """Return a mean over training samples, as a description without a confidence interval."""
    there = values[~values.isnan()].double()
    towards = direction_word(declared.higher_is_better)
    mean, version = float(there.mean()), declared.version
    return MetricValue(mean, declared.unit, towards, "train", len(there), version=version)


def _surrogates_against_truth(
    stages: SsaStages, found: Surrogates, name: str
) -> Iterator[PerItemMetrics]:
    """Compare surrogates, and the first network's own maps, with the ground truth."""
    first: Any = stages.parts.first.to(stages.device)
    done = 0
    for batch in _take_samples(all_batches(stages.parts.train, stages.device), SEARCH_SAMPLES):
        if batch.target is None:
            return
        with eval_mode_forked_rng(first):
            own = mean_map(first(batch).attention_to(name))
        target = match_keys(found.target(batch.ids, name).to(stages.device), own)
        for who, one in (("surrogate", target), ("own", own)):
            held = _truth_agreement(one, batch)
            yield {f"{who}_{key}": value for key, value in held.items()}
        done += len(batch)


def _take_samples(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        count -= len(batch)
        if count <= 0:
            return
