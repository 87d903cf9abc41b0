"""Learn to Pay Attention: evaluate the error, the maps, and the analyses of a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from overt import metrics
from overt.attention import AttentionMap, Kind
from overt.data.batch import Batch
from overt.experiments import preflight
from overt.experiments.evaluate import (
    Evaluator,
    PerItemMetrics,
    add_calibration_error,
    add_family_charts,
    add_metrics,
    finite_or_none,
    mean_with_interval,
)
from overt.experiments.experiment import DatasetInfo, Evaluation, MetricValue
from overt.experiments.recipe import RunContext
from overt.metrics.metric import MetricInfo
from overt.metrics.pixel_maps import to_grid
from overt.metrics.segmentation import jaccard
from overt.metrics.transfer import no_preprocessing, transfer_accuracy, zca_whitening
from overt.nn import AttentionModel, ImageFeatures, Output
from overt.papers.ltpa.analysis import AnalysisInputs, MaskFn, run_analysis
from overt.papers.ltpa.config import LtpaDataset, LtpaEvaluation
from overt.papers.ltpa.maps import level_maps, level_name
from overt.papers.ltpa.transfer_probes import (
    DiscoveryPhotos,
    TransferProbe,
    TransferScores,
    discovery_jaccard,
    open_discovery,
    open_probes,
    open_stl10,
    stl10_scores,
    svm_scores,
)
from overt.papers.ltpa.vgg import VGGGap
from overt.viz.gallery_sample import GallerySample

FAMILIES = ("fooled_fgsm", "fooled_pgd", "pointing", "mass", "jaccard", "transfer")
TransferResult = tuple[str, MetricInfo, TransferScores, str]


@dataclass
class LastLevel:
    """A network reduced to the map closest to its decision.

    That is the last level, or for a network with class activations the map of the predicted class:
    the paper uses the true class, which is not known at inference. The entropy of every level is
    collected on the way, by its grid.
    """

    model: Any
    entropies: dict[str, list[Tensor]] = field(default_factory=dict)

    def take_entropies(self) -> PerItemMetrics:
        """Return the entropies collected since the last call."""
        found, self.entropies = self.entropies, {}
        return {name: (metrics.entropy.info, torch.cat(parts)) for name, parts in found.items()}

    def encode(self, batch: Batch) -> Any:
        """Encode a batch, and collect the entropy of the maps of all levels."""
        features = self.model.encode(batch)
        for one in self.model.decide(features).attention:
            # A gate is not a distribution and has no entropy.
            if one.kind is Kind.PROBABILITY:
                found = self.entropies.setdefault(f"entropy_{level_name(one)}", [])
                found.append(metrics.entropy(one).cpu())
        return features

    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the prediction, with one map or none."""
        output = self.model.decide(features, mask)
        if isinstance(self.model, VGGGap):
            chosen = output.prediction.argmax(dim=-1)
            return replace(
                output, attention=(positive_class_activation(self.model, features, chosen),)
            )
        return replace(output, attention=output.attention[-1:])

    def __call__(self, batch: Batch) -> Output:
        return self.decide(self.encode(batch))


def positive_class_activation(
    model: VGGGap, features: ImageFeatures, chosen: Tensor
) -> AttentionMap:
    """Return the positive part of the class activations of a class, normalized to sum to 1."""
    found = model.class_activation(features, chosen)
    return replace(found, values=found.values.clamp_min(0), kind=Kind.AMOUNT).normalize()


def evaluate_model(evaluator: Evaluator, model: nn.Module, device: torch.device) -> Evaluation:
    """Evaluate a model, with the error beside the accuracy, and the entropy of every level."""
    last_level = LastLevel(model)
    found, entropies = evaluator.evaluate_with(
        cast(AttentionModel, last_level), device, lambda batch: last_level.take_entropies()
    )
    right = found.ours["accuracy"]
    # The interval is mirrored: the upper end of the accuracy is the lower end of the error.
    low, high = (None if end is None else 1 - end for end in (right.high, right.low))
    error = replace(right, value=1 - right.value, direction="lower", low=low, high=high)
    ours: dict[str, MetricValue] = {"error": error, **found.ours}
    samples: dict[str, np.ndarray] = {"error": 1 - found.samples["accuracy"]}
    for name, (_, each) in entropies.items():
        around = metrics.confidence_interval(each)
        ours[name] = MetricValue(
            *(around.mean, "nats", "neither", right.split, around.count),
            *(finite_or_none(around.low), finite_or_none(around.high)),
        )
        samples[name] = each.numpy()
    gallery = add_level_maps(found.gallery, found.samples["id"].tolist(), evaluator, model, device)
    return replace(found, ours=ours, samples={**found.samples, **samples}, gallery=gallery)


def add_level_maps(
    gallery: Sequence[GallerySample],
    ids: Sequence[str],
    evaluator: Evaluator,
    model: Any,
    device: torch.device,
) -> list[GallerySample]:
    """Add a map of every level to the gallery, the lowest first, and the last two joined.

    Samples of a network with one map or none are unchanged. `ids` are all items of the evaluator.
    """
    if not gallery:
        return []
    rows = [ids.index(sample.id) for sample in gallery]
    batch = evaluator.data.batch(rows).to(device)
    attention = model(batch).attention
    if len(attention) < 2:
        return list(gallery)
    assert batch.images is not None
    size = (batch.images.shape[-2], batch.images.shape[-1])
    found = {name: one for name, one in level_maps(attention, size).items() if name == "joined"}
    own = {level_name(one): to_grid(one) for one in attention}
    pictures = {name: one.float().cpu().numpy() for name, one in {**own, **found}.items()}
    return [
        replace(sample, levels={name: each[row] for name, each in pictures.items()})
        for row, sample in enumerate(gallery)
    ]


@dataclass(frozen=True)
class TransferSets:
    """The other datasets a network is transferred to, opened before training."""

    own: str
    features: tuple[TransferProbe, ...] = ()
    classes: Mapping[str, TransferProbe] = field(default_factory=dict)
    shapes: DiscoveryPhotos | None = None

    @staticmethod
    def open(
        context: RunContext, own: str, settings: LtpaEvaluation, device: torch.device
    ) -> "TransferSets":
        """Open the datasets that the settings use; Table 3 and figure 9 are for CIFAR."""
        root = preflight.resolve_data_root(context.data_root)
        if not settings.items:
            return TransferSets(own)
        found = TransferSets(own)
        options = (settings.transfer, device, settings.photos)
        if settings.transfer != 0:
            features = open_probes(root, own, *options)
            found = replace(found, features=features, classes=open_stl10(root, own, *options))
        if settings.segment and own in (LtpaDataset.CIFAR10, LtpaDataset.CIFAR100):
            shapes = open_discovery(root, settings.items, device, settings.photos)
            found = replace(found, shapes=shapes)
        return found

    def sources(self) -> list[DatasetInfo]:
        """Return the dataset records for the results; the two splits of STL-10 are one dataset."""
        used = [(one.name, one.data, len(one)) for one in self.features]
        used += [("stl10", one.data, len(one)) for one in self.classes.values()]
        if self.shapes is not None:
            used.append(("discovery", self.shapes.data, len(self.shapes)))
        named = {(name, str(data.split)): (data, count) for name, data, count in used}
        return [
            DatasetInfo(name, split, data.digest(), count)
            for (name, split), (data, count) in named.items()
        ]

    def results(self, model: nn.Module, settings: LtpaEvaluation) -> Iterator[TransferResult]:
        """Yield the results on each dataset: a name, the metric, the scores, the split."""
        prepare = zca_whitening if settings.whiten else no_preprocessing
        for one in self.features:
            moved, split = transfer_accuracy.info, str(one.data.split)
            yield f"transfer_{one.name}", moved, svm_scores(model, one, prepare), split
        for name, probe in self.classes.items():
            same = stl10_scores(model, probe)
            yield name, metrics.accuracy.info, same, str(probe.data.split)
        if self.shapes is not None:
            for name, each in discovery_jaccard(model, self.shapes, self.own).items():
                yield name, jaccard.info, each, str(self.shapes.data.split)


def add_analysis(
    found: Evaluation,
    evaluator: Evaluator,
    model: nn.Module,
    device: torch.device,
    settings: LtpaEvaluation,
    masks: MaskFn | None,
    transfer: TransferSets,
) -> Evaluation:
    """Add the analyses of the section `judge` of the recipe to an evaluation."""
    batches = tuple(evaluator.first_batches(settings.items, device))
    inputs = AnalysisInputs(model, LastLevel(model), batches, masks)
    found = add_metrics(
        add_calibration_error(found), run_analysis(inputs, settings), str(evaluator.data.split)
    )
    ours, elsewhere = dict(found.ours), dict(found.elsewhere)
    for name, info, scores, split in transfer.results(model, settings):
        ours[name] = mean_with_interval(info, scores.values, split)
        elsewhere[name] = scores.values.float().cpu().numpy()
        elsewhere[f"{name}.id"] = np.array(scores.ids)
    return add_family_charts(replace(found, ours=ours, elsewhere=elsewhere), FAMILIES)


def cap_evaluation(settings: LtpaEvaluation, limit: int | None) -> LtpaEvaluation:
    """Reduce the analyses of a run with `data.limit`: an eighth of the items, fewer for PGD.

    Attacks take many times the work of a test, and a run on few items should be short.
    """
    if limit is None:
        return settings
    few, most = max(1, limit // 4), settings.transfer
    return replace(
        settings,
        items=min(settings.items, max(1, limit // 8)),
        pgd=min(settings.pgd, max(1, limit // 64)),
        transfer=few if most is None else min(most, few),
    )
