"""How a network of Learn to Pay Attention is judged: its error, its maps, and all that is asked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from overt import measure, models
from overt.attention import AttentionMap, Kind
from overt.data.batch import Batch
from overt.measure.measured import Measure
from overt.measure.photos import squares
from overt.recipes import checks
from overt.recipes.evaluation import Judge, also, calibrated, charted, valued
from overt.recipes.experiment import Evaluation, Source, Value
from overt.recipes.ltpa.judging import Asked, Masks, everything
from overt.recipes.ltpa.maps import levels, name_of
from overt.recipes.ltpa.probes import (
    Answers,
    Probe,
    Shapes,
    as_they_stand,
    discovery,
    jaccards,
    probes,
    right,
    right_as_it_stands,
)
from overt.recipes.ltpa.recipe import Files, Judging
from overt.recipes.recipe import Context
from overt.show.sample import Sample

FAMILIES = ("fooled_fgsm", "fooled_pgd", "pointing", "mass", "jaccard", "transfer")
Answered = tuple[str, Measure, Answers, str]


@dataclass
class Judged:
    """A network as it is judged: by the map that stands nearest to its decision.

    That is the last level, or for a network of class activations what speaks for the class it
    chose: the right class, which the paper takes, is not known when a picture is looked at. The
    entropy of every level is noted on the way, by its grid.
    """

    model: Any
    entropies: dict[str, list[Tensor]] = field(default_factory=dict)

    def encode(self, batch: Batch) -> Any:
        """The features, after a look at the maps of all levels."""
        features = self.model.encode(batch)
        for one in self.model.decide(features).attention:
            if one.kind is Kind.PROBABILITY:
                found = self.entropies.setdefault(f"entropy_{name_of(one)}", [])
                found.append(measure.entropy(one).cpu())
        return features

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> models.Output:
        """The prediction, with one map or none."""
        output = self.model.decide(features, mask)
        if isinstance(self.model, models.VGGGap):
            chosen = output.prediction.argmax(dim=-1)
            return replace(output, attention=(speaking(self.model, features, chosen),))
        return replace(output, attention=output.attention[-1:])

    def __call__(self, batch: Batch) -> models.Output:
        return self.decide(self.encode(batch))


def speaking(model: models.VGGGap, features: models.Cells, chosen: Tensor) -> AttentionMap:
    """What speaks for a class, cell by cell: the positive part of its activations, as shares."""
    found = model.class_activation(features, chosen)
    return replace(found, values=found.values.clamp_min(0), kind=Kind.AMOUNT).normalize()


def evaluated(judge: Judge, model: nn.Module, device: torch.device) -> Evaluation:
    """What a judge finds, with the error beside the accuracy and the entropy of every level."""
    judged = Judged(model)
    found = judge.evaluate(cast(models.Model, judged), device)
    right = found.ours["accuracy"]
    assert right.low is not None and right.high is not None
    error = replace(
        right, value=1 - right.value, direction="lower", low=1 - right.high, high=1 - right.low
    )
    ours: dict[str, Value] = {"error": error, **found.ours}
    samples: dict[str, np.ndarray] = {"error": 1 - found.samples["accuracy"]}
    for name, parts in judged.entropies.items():
        each = torch.cat(parts).float()
        around = measure.bootstrap(each)
        ours[name] = Value(
            around.mean, "nats", "neither", right.split, around.count, around.low, around.high
        )
        samples[name] = each.numpy()
    gallery = with_levels(found.gallery, found.samples["id"].tolist(), judge, model, device)
    return replace(found, ours=ours, samples={**found.samples, **samples}, gallery=gallery)


def with_levels(
    gallery: Sequence[Sample], ids: Sequence[str], judge: Judge, model: Any, device: torch.device
) -> list[Sample]:
    """The samples with a map of every level, the lowest first, and the last two joined.

    Those of a network with one map or none are left as they are. `ids` are all items of the judge.
    """
    if not gallery:
        return []
    rows = [ids.index(sample.id) for sample in gallery]
    batch = judge.data.batch(rows).to(device)
    attention = model(batch).attention
    if len(attention) < 2:
        return list(gallery)
    assert batch.images is not None
    size = (batch.images.shape[-2], batch.images.shape[-1])
    found = {name: one for name, one in levels(attention, size).items() if name == "joined"}
    own = {name_of(one): squares(one) for one in attention}
    pictures = {name: one.float().cpu().numpy() for name, one in {**own, **found}.items()}
    return [
        replace(sample, levels={name: each[row] for name, each in pictures.items()})
        for row, sample in enumerate(gallery)
    ]


@dataclass(frozen=True)
class Others:
    """The other data sets that a network is taken to, opened before it is trained."""

    own: str
    features: tuple[Probe, ...] = ()
    classes: Mapping[str, Probe] = field(default_factory=dict)
    shapes: Shapes | None = None

    @staticmethod
    def opened(context: Context, own: str, judging: Judging, device: torch.device) -> "Others":
        """What lies on disk and is asked for; Table 3 and figure 9 are of networks of CIFAR."""
        root = checks.data_root(context.data_root)
        if not judging.items:
            return Others(own)
        found = Others(own)
        options = (judging.transfer, device, judging.photos)
        if judging.transfer != 0:
            features = probes(root, own, *options)
            found = replace(found, features=features, classes=as_they_stand(root, own, *options))
        if judging.segment and own in (Files.CIFAR10, Files.CIFAR100):
            shapes = discovery(root, judging.items, device, judging.photos)
            found = replace(found, shapes=shapes)
        return found

    def sources(self) -> list[Source]:
        """What a run says of them; the two parts of STL-10 are one set."""
        used = [(one.name, one.data, len(one)) for one in self.features]
        used += [("stl10", one.data, len(one)) for one in self.classes.values()]
        if self.shapes is not None:
            used.append(("discovery", self.shapes.data, len(self.shapes)))
        named = {(name, str(data.split)): (data, count) for name, data, count in used}
        return [
            Source(name, split, data.digest(), count)
            for (name, split), (data, count) in named.items()
        ]

    def answers(self, model: nn.Module, judging: Judging) -> Iterator[Answered]:
        """What the network makes of them: a name, what is measured, the answers, the split."""
        prepare = measure.whitening if judging.whiten else measure.as_they_are
        for one in self.features:
            moved, split = measure.transfer_accuracy.measure, str(one.data.split)
            yield f"transfer_{one.name}", moved, right(model, one, prepare), split
        for name, probe in self.classes.items():
            same = right_as_it_stands(model, probe)
            yield name, measure.accuracy.measure, same, str(probe.data.split)
        if self.shapes is not None:
            for name, each in jaccards(model, self.shapes, self.own).items():
                yield name, measure.jaccard.measure, each, str(self.shapes.data.split)


def judged_further(
    found: Evaluation,
    judge: Judge,
    model: nn.Module,
    device: torch.device,
    judging: Judging,
    masks: Masks | None,
    others: Others,
) -> Evaluation:
    """An evaluation with all that the section `judge` of the recipe asks for."""
    batches = tuple(judge.first(judging.items, device))
    asked = Asked(model, Judged(model), batches, masks)
    found = also(calibrated(found), everything(asked, judging), str(judge.data.split))
    ours, elsewhere = dict(found.ours), dict(found.elsewhere)
    for name, declared, answers, split in others.answers(model, judging):
        ours[name] = valued(declared, answers.values, split)
        elsewhere[name] = answers.values.float().cpu().numpy()
        elsewhere[f"{name}.id"] = np.array(answers.ids)
    return charted(replace(found, ours=ours, elsewhere=elsewhere), FAMILIES)


def capped(judging: Judging, limit: int | None) -> Judging:
    """What is asked of a run on a few items: an eighth of them, and of fewer by PGD.

    Attacks take many times the work of a test, and a run on few items is meant to be short.
    """
    if limit is None:
        return judging
    few, most = max(1, limit // 4), judging.transfer
    return replace(
        judging,
        items=min(judging.items, max(1, limit // 8)),
        pgd=min(judging.pgd, max(1, limit // 64)),
        transfer=few if most is None else min(most, few),
    )
