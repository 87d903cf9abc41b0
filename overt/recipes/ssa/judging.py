"""What a run of Self Supervision for Attention Networks says besides its accuracy.

Of the test: agreement with the truth or with people, also that of the first network (`_before`),
accuracies of several right answers, and of texts what is lost when the attended words are written
over. Of the training split: what the search found.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap
from overt.capture.resting import resting
from overt.data.batch import Batch
from overt.measure.measured import Measure
from overt.measure.removal import in_tokens
from overt.models import Output
from overt.models.adopting.hiding import kept_keys
from overt.recipes.evaluation import CONTRAST_SEED, DELETION, Judge, Noted, also, drawn, noted
from overt.recipes.experiment import Evaluation, Value, direction
from overt.recipes.ssa.stages import Stages
from overt.recipes.ssa.teaching import everything
from overt.show.sample import Sample
from overt.supervise import Surrogates
from overt.supervise.surrogate import OnlyWords, asking, mean, without_whole
from overt.supervise.targets import fitted

CARRIED = 100  # samples whose exact earth mover's distance on a grid is computed: each is a search
LOOKED, DRAWN = 64, 4  # training samples that are looked through, and drawn
ALONE = 200  # held-out texts of which only two words are kept
SEARCHED = 2000  # training samples on which what was found is held against the truth

CHANCE = Measure("probability of the truth", "probability", True, 0.0, 1.0)
SHARE = Measure("share", "share", None, 0.0, 1.0)
TIMES = Measure("questions", "questions", None, 0.0)
AGREEMENT = {
    "pointing": measure.pointing_game,
    "mass_inside": measure.mass_inside,
    "rank_correlation": measure.spearman,
}


def judged(judge: Judge, stages: Stages, name: str, blank: int | None = None) -> Evaluation:
    """Everything about the network of a run: the judge's numbers and those above.

    `blank` is the token of a hidden word, where texts are judged.
    """
    device = stages.device
    model: Any = stages.model
    portions: list[Noted] = []

    def beside(batch: Batch) -> None:
        written = {} if blank is None else overwritten(model, batch, blank)
        portions.append(_further(model, batch) | written)

    found = judge.evaluate(model, device, beside)
    more = noted(portions)
    more |= _carried(judge, model, name, device)
    if stages.recipe.taught and stages.needs_first:
        first: Any = stages.parts.first.to(device)
        with resting(first):
            before = noted(_agreement(first, batch, name) for batch in judge.batches(device))
            before |= _carried(judge, first, name, device)
        more |= {f"{key}_before": value for key, value in before.items()}
    found = _by_type(also(found, more, str(judge.data.split)))
    return replace(
        found,
        ours={**found.ours, **_of_search(stages), **_of_scale(stages)},
        gallery=[*found.gallery, *_looks(stages, judge.classes, name)],
    )


def _further(model: Any, batch: Batch) -> Noted:
    """Accuracies where several answers are right, as VQA counts them."""
    if batch.answers is None:
        return {}
    said = model(batch).prediction
    declared = measure.soft_accuracy.measure
    return {"vqa_accuracy": (declared, measure.soft_accuracy(said, batch.answers))}


def overwritten(model: Any, batch: Batch, blank: int) -> Noted:
    """Deletion when `blank` is written over the attended words, beside as many random ones.

    The search, and the judge's own deletion, hide words inside the network: what was taught by the
    one could please the other. Here it is the text that changes.
    """
    assert batch.tokens is not None
    features = model.encode(batch)
    attention = model.decide(features).looking_at("text").over_heads()
    layout = getattr(features, "layout", None)  # a pretrained encoder has tokens that are no words

    def classify(tokens: Tensor) -> Tensor:
        changed = replace(batch, tokens=tokens)
        read = model.encode(changed) if layout is None else replace(features, batch=changed)
        prediction: Tensor = model.decide(read).prediction
        return prediction

    written = in_tokens(classify, batch.tokens, blank)

    def decide(keep: Tensor) -> Tensor:
        return written(keep if layout is None else kept_keys(layout, {"text": keep}))

    generator = torch.Generator().manual_seed(CONTRAST_SEED)
    found = measure.contrast(decide, attention, None, generator, draws=2)
    return {"deletion_overwritten": (DELETION, found.beyond_random)}


def _agreement(model: Any, batch: Batch, name: str) -> Noted:
    """Accuracy, and how well a map agrees with where the batch says to look."""
    output = model(batch)
    found: Noted = {}
    if batch.labels is not None:
        accuracy = measure.accuracy(output.prediction, batch.labels)
        found["accuracy"] = measure.accuracy.measure, accuracy
    return found | _held_against(mean(output.looking_at(name)), batch)


def _held_against(attention: AttentionMap, batch: Batch) -> Noted:
    truth = batch.target
    if truth is None or truth.keys.spans[0].name != attention.keys.spans[0].name:
        return {}
    return {key: (one.measure, one(attention, truth)) for key, one in AGREEMENT.items()}


def _carried(judge: Judge, model: Any, name: str, device: torch.device) -> Noted:
    """The earth mover's distance to the truth: of all texts, of the first samples of pictures."""
    count = len(judge.data) if name == "text" else CARRIED

    def one(batch: Batch) -> Noted:
        truth = batch.target
        attention = mean(model(batch).looking_at(name)).to("cpu")
        if truth is None or truth.keys.spans[0].name != name:
            return {}
        return {"emd": (measure.emd.measure, measure.emd(attention, truth.to("cpu")))}

    left = count
    parts: list[Noted] = []
    for batch in judge.first(count, device):  # an item may be several samples
        some = batch if len(batch) <= left else batch.select(torch.arange(left))
        parts.append(one(some))
        left -= len(some)
        if left <= 0:
            break
    return noted(parts)


def _by_type(found: Evaluation) -> Evaluation:
    """An evaluation with VQA accuracy by the type of answer, where it has one."""
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


# --- what the search found


def _looks(stages: Stages, classes: Sequence[str], name: str) -> list[Sample]:
    """Where the first network looked by itself, and where it was surest (figures 3 and 5).

    Of the first training samples, those that a mask has made surer of the truth most of all.
    """
    found = stages.found
    if found is None:
        return []
    first: Any = stages.parts.first.to(stages.device)
    shown = stages.parts.shown
    batch = shown.batch(range(min(LOOKED, len(shown)))).to(stages.device)
    with resting(first):
        output: Output = first(batch)
    own = mean(output.looking_at(name))
    target = fitted(found.target(batch.ids, name).to(stages.device), own)
    base, best = found.base(batch.ids, name).exp(), found.best(batch.ids, name).exp()
    chosen = (best - base).argsort(descending=True, stable=True)[:DRAWN].tolist()
    said = output.prediction.argmax(dim=-1)
    truth = batch.labels if batch.labels is not None else said
    return [
        Sample(
            id=f"{batch.ids[row]}, {title}",
            group=title,
            prediction=classes[int(said[row])],
            truth=classes[int(truth[row])],
            scores={"probability_of_truth": float(score[row])},
            **drawn(batch, Output(output.prediction, (attention,)), row),
        )
        for title, attention, score in (("own look", own, base), ("best look", target, best))
        for row in chosen
    ]


def _of_scale(stages: Stages) -> dict[str, Value]:
    """The weight that was found for each span: gamma and beta of section 3.3."""
    return {
        f"gamma_{name}": Value(weight, "ratio", "neither", "train", 1)
        for name, weight in stages.gammas.items()
    }


def _of_search(stages: Stages) -> dict[str, Value]:
    """Scores before and after, how often a mask beat none, and what was found against the truth."""
    found = stages.found
    if found is None:
        return {}
    ours: dict[str, Value] = {}
    several = len(found.names) > 1
    for name in stages.parts.names:
        tail = f"_{name}" if several else ""
        base, best = found.base(found.ids, name), found.best(found.ids, name)
        rows: Noted = {
            "base_score": (CHANCE, base.exp()),
            "best_score": (CHANCE, best.exp()),
            "improved": (SHARE, (best > base).float()),
            "probes": (TIMES, found.probes(found.ids, name).float()),
        }
        rows |= noted(_surrogates_against_truth(stages, found, name))
        ours |= {
            f"{key}{tail}": _mean(declared, values)
            for key, (declared, values) in rows.items()
            if not torch.isnan(values).all()
        }
    if "text" in stages.parts.names:
        ours |= _words_alone(stages)
    ours["search_seconds"] = Value(stages.seconds, "seconds", "lower", "train", 1)
    return ours


def _words_alone(stages: Stages) -> dict[str, Value]:
    """How sure the first network is of the truth from its two best words alone (figure 6)."""
    first: Any = stages.parts.first.to(stages.device)
    held = stages.parts.validation.first(ALONE, stages.device)
    whole, two = list[Tensor](), list[Tensor]()
    for batch in held:
        with asking(first, batch, ["text"]) as look:
            found = without_whole(look, OnlyWords(count=stages.recipe.surrogate.texts))
        whole.append(found.base.exp())
        two.append(found.best.exp())
    both = {"whole_text_score": torch.cat(whole), "two_words_score": torch.cat(two)}
    return {key: replace(_mean(CHANCE, values), split="val") for key, values in both.items()}


def _mean(declared: Measure, values: Tensor) -> Value:
    """A mean over training samples. It describes them and is not drawn anew."""
    there = values[~values.isnan()].double()
    towards = direction(declared.higher_is_better)
    return Value(float(there.mean()), declared.unit, towards, "train", len(there))


def _surrogates_against_truth(stages: Stages, found: Surrogates, name: str) -> Iterator[Noted]:
    """What was found, and what the first network looked at by itself, against the truth."""
    first: Any = stages.parts.first.to(stages.device)
    done = 0
    for batch in _until(everything(stages.parts.train, stages.device), SEARCHED):
        if batch.target is None:
            return
        with resting(first):
            own = mean(first(batch).looking_at(name))
        target = fitted(found.target(batch.ids, name).to(stages.device), own)
        for who, one in (("surrogate", target), ("own", own)):
            held = _held_against(one, batch)
            yield {f"{who}_{key}": value for key, value in held.items()}
        done += len(batch)


def _until(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        count -= len(batch)
        if count <= 0:
            return
