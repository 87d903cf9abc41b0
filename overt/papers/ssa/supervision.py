"""Self Supervision for Attention Networks: targets, and the supervised training step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Layout, Span
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.errors import UserError
from overt.experiments.dataset_views import DatasetView, batches_of
from overt.losses import (
    Discriminator,
    Loss,
    LossBalancer,
    SupervisedModel,
    classification,
    coral,
    cross_entropy,
    emd,
    kl,
    mmd,
    mmd_linear,
    mse,
    soft_classification,
)
from overt.losses.adversarial import discriminator_loss, generator_loss
from overt.nn import Output
from overt.nn.cnn import ImageFeatures
from overt.nn.text_classifier import WordFeatures
from overt.nn.vqa.model import VQAFeatures
from overt.papers.ssa.config import SsaDiscriminatorInput, SsaLoss, SsaTarget, SsaWeighting
from overt.papers.ssa.config import SsaSupervise as Plan
from overt.targets import grad_cam_target, placebos
from overt.targets.sources import Targets, match_keys, move_target
from overt.targets.surrogate import mean_map, truth_log_probability
from overt.train import Losses, ParameterSet, Progress

PORTION = 512  # samples per chunk
SEED = 5  # of placebos: the same for every run, so that runs only differ in training
RIVAL = "rival_"
GAMMA = "gamma_"

TargetChunk = tuple[Sequence[str], AttentionMap]


# --- targets


def gather_targets(parts: Iterable[TargetChunk], device: torch.device) -> Targets:
    """Gather targets by sample id on the device, words padded to the longest text.

    A batch is then one index, where reading from disk would take one read per sample.
    """
    place: dict[str, int] = {}
    values, seen = list[Tensor](), list[Tensor]()
    span, kind = None, None
    for ids, found in parts:
        place |= {one: row for row, one in enumerate(ids, start=len(place))}
        values.append(found.weights.detach().float().to(device))
        seen.append(found.visible.any(dim=1).to(device))
        span, kind = found.keys.spans[0], found.kind
    if span is None or kind is None:
        raise UserError("the training split is empty: there are no samples to compute targets for.")
    width = max(one.shape[-1] for one in values)
    pad = torch.nn.functional.pad
    # Padded words have weight 0 and are not visible.
    weights = torch.cat([pad(one, (0, width - one.shape[-1])) for one in values])
    visible = torch.cat([pad(one, (0, width - one.shape[-1])) for one in seen])
    # A grid keeps its shape; texts get the padded width.
    shape = span.shape if len(span.shape) > 1 else (width,)
    keys = Layout((Span(span.name, shape, slice(0, width)),), width)

    def give(ids: Sequence[str]) -> AttentionMap:
        rows = torch.tensor([place[one] for one in ids], device=device)
        # `visible` lost its query axis above, and gets one query here.
        return AttentionMap(weights[rows], keys, GLOBAL_QUERY, visible[rows, None], kind)

    return give


class TargetedDataset(DatasetView[Dataset]):
    """A dataset whose batches carry their targets, so that a step need not look up ids.

    A step in a CUDA graph replays without Python and cannot. The ground truth of the dataset is
    replaced.
    """

    def __init__(self, data: Dataset, targets: Targets) -> None:
        super().__init__(data)
        self.targets = targets

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items at these indices, with their targets."""
        found = super().batch(indices)
        return replace(found, target=self.targets(found.ids))


def target_chunks(targets: Targets, ids: Sequence[str]) -> Iterator[TargetChunk]:
    """Yield the targets of these samples in chunks."""
    for start in range(0, len(ids), PORTION):
        some = ids[start : start + PORTION]
        yield some, targets(some)


def all_batches(data: Dataset, device: torch.device, portion: int = 64) -> Iterator[Batch]:
    """Return all items of a dataset in order, on a device."""
    return (batch.to(device) for batch in batches_of(data, portion))


def placebo_targets(
    target: SsaTarget, found: Targets, ids: Sequence[str], labels: Callable[[], Mapping[str, int]]
) -> Targets:
    """Return the surrogate targets, or a placebo of the same cost."""
    match target:
        case SsaTarget.SHUFFLED:
            return placebos.swapped_targets(found, ids, SEED)
        case SsaTarget.IN_CLASS:
            return placebos.swapped_within_class(found, labels(), SEED)
        case SsaTarget.SCATTERED:
            return placebos.permuted_keys(found, SEED)
        case SsaTarget.RANDOM:
            return placebos.random_targets(found, SEED)
        case SsaTarget.UNIFORM:
            return placebos.uniform_targets(found)
        case _:
            return found


def labels_of(data: Dataset) -> dict[str, int]:
    """Return the class of every sample, for in-class placebos; with several answers, the best."""
    found: dict[str, int] = {}
    for batch in all_batches(data, torch.device("cpu")):
        known = batch.labels if batch.labels is not None else batch.answers
        # Several right answers come as weights over the classes.
        assert known is not None
        classes = known if known.ndim == 1 else known.argmax(dim=-1)
        found |= dict(zip(batch.ids, classes.tolist(), strict=True))
    return found


def grad_cam_targets(
    model: Any, data: Dataset, name: str, device: torch.device
) -> Iterator[TargetChunk]:
    """Yield the Grad-CAM of the right answer over the span `name`, for every sample (PAAN)."""
    with eval_mode_forked_rng(model):
        for batch in all_batches(data, device):
            with torch.no_grad():
                features = model.encode(batch)
                attention = mean_map(model.decide(features).attention_to(name))
            values, there = _values(features, name)
            log_probability = TruthLogProbability(model, features, batch, name)
            yield (
                batch.ids,
                grad_cam_target(values, attention.keys, log_probability, there).detach(),
            )


@dataclass(frozen=True, eq=False)
class TruthLogProbability:
    """The log-probability of the label as a function of the cells or words of a batch."""

    model: Any
    features: Any
    batch: Batch
    name: str

    def __call__(self, values: Float[Tensor, "b k d"]) -> Float[Tensor, " b"]:
        """Return the log-probability of the label with these values."""
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN LSTMs have no backward in eval mode
            changed = _with_values(self.features, self.name, values)
            return truth_log_probability(self.model.decide(changed).prediction, self.batch)


def _values(features: Any, name: str) -> tuple[Tensor, Tensor | None]:
    match features:
        case ImageFeatures():
            # Every cell of a grid is present, so there is no mask.
            return features.values, None
        case WordFeatures():
            return features.values, features.present
        case VQAFeatures() if name == "image":
            return features.cells.values, None
        case VQAFeatures():
            return features.words.values, features.words.present
    raise UserError(
        "supervise.target=gradcam and supervise.sees=attended need a network whose encoder returns "
        f"separate cells or words, got {type(features).__name__}."
    )


def _with_values(features: Any, name: str, values: Tensor) -> Any:
    match features:
        case VQAFeatures() if name == "image":
            return replace(features, cells=replace(features.cells, values=values))
        case VQAFeatures():
            return replace(features, words=replace(features.words, values=values))
    return replace(features, values=values)


def truth_target(batch: Batch, name: str) -> AttentionMap:
    """Return the ground truth of a batch over the span `name`, normalized to sum to 1."""
    found = batch.target
    if found is None or found.keys.spans[0].name != name:
        raise UserError(
            f"supervise.target=truth needs ground truth over {name}, which this dataset lacks."
        )
    return found.normalize()


# --- losses

# Without the adversarial loss, which needs a discriminator.
LOSSES = {
    SsaLoss.MSE: mse,
    SsaLoss.CORAL: coral,
    SsaLoss.MMD: mmd,
    SsaLoss.MMD_LINEAR: mmd_linear,
    SsaLoss.KL: kl,
    SsaLoss.CROSS_ENTROPY: cross_entropy,
    SsaLoss.EMD: emd,
}

ExtraLosses = Callable[[Output, Batch], dict[str, Loss]]
Augmentation = Callable[[Batch], Batch]


def task_loss(output: Output, batch: Batch) -> Loss:
    """Compute the cross-entropy of the right answer, or of several weighted answers (eq. 2)."""
    if batch.answers is not None:
        return soft_classification(output.prediction, batch.answers)
    assert batch.labels is not None
    return classification(output.prediction, batch.labels)


@dataclass(frozen=True, eq=False)
class SsaStep:
    """A training step: the task loss, and the distance of attention over each span to its target.

    The sum of section 3.3, `L_c + gamma L_image + beta L_text`, with eq. 2 as the task.

    `targets` are by span; a span with None uses the ground truth of the batch. `augment` crops and
    flips the images of a batch, and the targets of the image are moved with them.
    """

    plan: Plan
    targets: Mapping[str, Targets | None]
    more: ExtraLosses = field(default=lambda output, batch: {})
    augment: Augmentation = field(default=lambda batch: batch)

    def __call__(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """Return the losses of the network and of the discriminators, if there are any."""
        model: Any = net.model if isinstance(net, SupervisedModel) else net
        original, batch = batch, self.augment(batch)
        # In two steps, because the discriminator may also get the features.
        features = model.encode(batch)
        output = model.decide(features)
        first = task_loss(output, batch)
        losses = {"task": first, **self.more(output, batch)}
        rivals: dict[str, Loss] = {}
        for name, source in self.targets.items():
            # One map per sample: the mean over hops or glimpses, which still sums to 1.
            attention = mean_map(output.attention_to(name))
            target = truth_target(batch, name) if source is None else source(batch.ids)
            if name == "image" and batch is not original:
                target = target_of_view(target, original, batch)
            # Targets of texts are padded to the longest of the split, this batch only to its own
            # longest.
            target = match_keys(target, attention)
            if self.plan.loss is SsaLoss.ADVERSARIAL:
                rival = getattr(net, RIVAL + name)
                beside = discriminator_inputs(self.plan, features, name)
                distance = generator_loss(rival, attention, target, *beside)
                rivals[RIVAL + name] = discriminator_loss(rival, attention, target, *beside)
            else:
                distance = LOSSES[self.plan.loss](attention, target)
            if self.plan.counts is SsaWeighting.FOUND:
                # The measured scale brings both terms to the same size, as section 3.3 requires.
                scale = getattr(net, GAMMA + name)
                distance = scale(first, distance)
                losses |= scale.log_entry(GAMMA + name)
            losses[f"attention_{name}"] = self.plan.weight * distance
        # One entry per optimizer: the discriminators are trained in the same step as the network.
        return {"model": losses, **({"rival": rivals} if rivals else {})}


def target_of_view(target: AttentionMap, original: Batch, moved: Batch) -> AttentionMap:
    """Return the targets of the images of `original` for those of `moved`, an augmented batch."""
    before, after = original.sample_geometry, moved.sample_geometry
    if before is None or after is None:
        raise UserError("images that are cropped in training need a geometry for their targets.")
    return move_target(target, before, after)


def discriminator_inputs(
    plan: Plan, features: Any, name: str
) -> tuple[Tensor | None, Tensor | None]:
    """Return the context and the values that a discriminator gets with a map over `name`."""
    match plan.sees:
        case SsaDiscriminatorInput.NOTHING:
            return None, None
        case SsaDiscriminatorInput.MEAN:
            return features.pooled(), None
        case SsaDiscriminatorInput.ATTENDED:
            return features.pooled(), _values(features, name)[0]


def supervised_model(
    model: nn.Module, plan: Plan, names: Sequence[str], example: Batch, longest: int
) -> SupervisedModel:
    """Add what the loss needs to the network: scales, and a discriminator per span."""
    teachers: dict[str, nn.Module] = {}
    if plan.counts is SsaWeighting.FOUND:
        teachers |= {GAMMA + name: LossBalancer() for name in names}
    if plan.loss is SsaLoss.ADVERSARIAL:
        # A forward pass for the sizes only: it must not advance the random numbers of training.
        with eval_mode_forked_rng(model), torch.no_grad():
            features: Any = model.encode(example)  # type: ignore[operator]
            output = model.decide(features)  # type: ignore[operator]
            for name in names:
                keys = output.attention_to(name).keys
                count = len(keys) if len(keys.spans[0].shape) > 1 else longest
                context, values = (
                    0 if one is None else one.shape[-1]
                    for one in discriminator_inputs(plan, features, name)
                )
                teachers[RIVAL + name] = Discriminator(
                    count, context, hidden=128, dropout=0.2, values=values
                )
    return SupervisedModel(model, **teachers)


def graph_key(net: nn.Module, progress: Progress) -> int | None:
    """Return the CUDA graph key of a step: None once all scales are frozen, else a key per step.

    While a scale is measured it is read from the device, which cannot be captured.
    """
    scales = [one for one in net.modules() if isinstance(one, LossBalancer)]
    return None if all(one.frozen for one in scales) else progress.step


def discriminator_sets(net: SupervisedModel, plan: Plan) -> dict[str, ParameterSet]:
    """Return the optimizer of the discriminators, Adam as published; empty without any."""
    theirs = [p for one in net.loss_modules.values() for p in one.parameters()]
    if not theirs:
        return {}
    return {"rival": ParameterSet(torch.optim.Adam(theirs, plan.rival, betas=(0.5, 0.999)))}
