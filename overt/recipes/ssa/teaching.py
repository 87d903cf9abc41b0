"""Self Supervision for Attention Networks: where targets come from, and the step that teaches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt import models, supervise
from overt.attention import POINT, AttentionMap, Layout, Span
from overt.capture.resting import resting
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput
from overt.models.answering.vqa import Asked
from overt.models.cnn import Cells
from overt.models.text import Words
from overt.recipes.ssa.recipe import Counts, Distance, Sees, Target
from overt.recipes.ssa.recipe import Supervise as Plan
from overt.supervise import Discriminator, Loss, Scale, Taught, placebo
from overt.supervise.adversary import deceive, tell_apart
from overt.supervise.surrogate import mean, of_truth
from overt.supervise.targets import Targets, fitted
from overt.train import Losses, ParameterSet, Progress

PORTION = 512  # samples at a time
SEED = 5  # of placebos: the same for every run, so that runs differ in nothing else
RIVAL = "rival_"
GAMMA = "gamma_"

Part = tuple[Sequence[str], AttentionMap]


# --- targets


def gathered(parts: Iterable[Part], device: torch.device) -> Targets:
    """Targets by sample id, all of them on the device, words as wide as the longest text.

    A batch is then one index, where reading it from the disk would be as many reads as samples.
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
        raise BadInput("there are no samples to take targets of")
    width = max(one.shape[-1] for one in values)
    pad = torch.nn.functional.pad
    weights = torch.cat([pad(one, (0, width - one.shape[-1])) for one in values])
    visible = torch.cat([pad(one, (0, width - one.shape[-1])) for one in seen])
    shape = span.shape if len(span.shape) > 1 else (width,)
    keys = Layout((Span(span.name, shape, slice(0, width)),), width)

    def give(ids: Sequence[str]) -> AttentionMap:
        rows = torch.tensor([place[one] for one in ids], device=device)
        return AttentionMap(weights[rows], keys, POINT, visible[rows, None], kind)

    return give


@dataclass(frozen=True, eq=False)
class Aimed:
    """A data set whose batches bring their targets along, so that a step need not read their ids.

    A recorded step cannot: it is done again without Python. What the data set itself says of where
    to look gives way.
    """

    data: Source
    targets: Targets

    @property
    def name(self) -> str:
        """That of the data set."""
        return self.data.name

    @property
    def split(self) -> str:
        """That of the data set."""
        return str(self.data.split)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The items at these places, with the maps that are their targets."""
        found = self.data.batch(indices)
        return replace(found, target=self.targets(found.ids))

    def digest(self) -> str:
        """The hash of the data set; targets are no part of it."""
        return self.data.digest()


def portions(targets: Targets, ids: Sequence[str]) -> Iterator[Part]:
    """What a source says of these samples, some at a time."""
    for start in range(0, len(ids), PORTION):
        some = ids[start : start + PORTION]
        yield some, targets(some)


def everything(data: Source, device: torch.device, portion: int = 64) -> Iterator[Batch]:
    """All items of a data set in order."""
    for start in range(0, len(data), portion):
        yield data.batch(range(start, min(start + portion, len(data)))).to(device)


def placebo_of(
    target: Target, found: Targets, ids: Sequence[str], labels: Callable[[], Mapping[str, int]]
) -> Targets:
    """The targets found, or what stands in for them at the same price."""
    match target:
        case Target.SHUFFLED:
            return placebo.swapped(found, ids, SEED)
        case Target.IN_CLASS:
            return placebo.swapped_within(found, labels(), SEED)
        case Target.SCATTERED:
            return placebo.scattered(found, SEED)
        case Target.RANDOM:
            return placebo.random_maps(found, SEED)
        case Target.UNIFORM:
            return placebo.uniform(found)
        case _:
            return found


def labels_of(data: Source) -> dict[str, int]:
    """The class of every sample, for placebos that stay within one; several answers: the best."""
    found: dict[str, int] = {}
    for batch in everything(data, torch.device("cpu")):
        known = batch.labels if batch.labels is not None else batch.answers
        assert known is not None
        classes = known if known.ndim == 1 else known.argmax(dim=-1)
        found |= dict(zip(batch.ids, classes.tolist(), strict=True))
    return found


def by_gradient(model: Any, data: Source, name: str, device: torch.device) -> Iterator[Part]:
    """Grad-CAM of the right answer over the span `name`, for every sample (PAAN)."""
    with resting(model):
        for batch in everything(data, device):
            with torch.no_grad():
                features = model.encode(batch)
                attention = mean(model.decide(features).looking_at(name))
            values, there = _values(features, name)
            asked = AskedAgain(model, features, batch, name)
            yield batch.ids, supervise.grad_cam(values, attention.keys, asked, there).detach()


@dataclass(frozen=True, eq=False)
class AskedAgain:
    """How sure a model is of the truth when the cells or words of a batch are others."""

    model: Any
    features: Any
    batch: Batch
    name: str

    def __call__(self, values: Float[Tensor, "b k d"]) -> Float[Tensor, " b"]:
        """The log-probability of the truth with these in their place."""
        with torch.backends.cudnn.flags(enabled=False):  # whose LSTM has no gradient at rest
            changed = _with_values(self.features, self.name, values)
            return of_truth(self.model.decide(changed).prediction, self.batch)


def _values(features: Any, name: str) -> tuple[Tensor, Tensor | None]:
    match features:
        case Cells():
            return features.values, None
        case Words():
            return features.values, features.present
        case Asked() if name == "image":
            return features.cells.values, None
        case Asked():
            return features.words.values, features.words.present
    raise BadInput(
        "supervise.target=gradcam and supervise.sees=attended are for networks whose cells or "
        "words stand by themselves after they were encoded; "
        f"{type(features).__name__} are read as a whole"
    )


def _with_values(features: Any, name: str, values: Tensor) -> Any:
    match features:
        case Asked() if name == "image":
            return replace(features, cells=replace(features.cells, values=values))
        case Asked():
            return replace(features, words=replace(features.words, values=values))
    return replace(features, values=values)


def from_data(batch: Batch, name: str) -> AttentionMap:
    """The truth of a batch over the span `name`, as shares; refused where the data has none."""
    found = batch.target
    if found is None or found.keys.spans[0].name != name:
        raise BadInput(
            f"supervise.target=truth: this data set does not say where to look in {name}"
        )
    return found.normalize()


# --- losses

PLAIN = {
    Distance.MSE: supervise.mse,
    Distance.CORAL: supervise.coral,
    Distance.MMD: supervise.mmd,
    Distance.MMD_LINEAR: supervise.mmd_linear,
    Distance.KL: supervise.kl,
    Distance.CROSS_ENTROPY: supervise.cross_entropy,
    Distance.EMD: supervise.emd,
}

More = Callable[[models.Output, Batch], dict[str, Loss]]


def task(output: models.Output, batch: Batch) -> Loss:
    """Cross-entropy of the right answer, or of all that are, as much as each is right."""
    if batch.answers is not None:
        return supervise.soft_classification(output.prediction, batch.answers)
    assert batch.labels is not None
    return supervise.classification(output.prediction, batch.labels)


@dataclass(frozen=True, eq=False)
class Lesson:
    """One step: the task, and the distance of attention over each span from its target.

    The sum of section 3.3, `L_c + gamma L_image + beta L_text`, with eq. 2 as the task.

    `targets` are by span; a span without any takes the truth out of the batch.
    """

    plan: Plan
    targets: Mapping[str, Targets | None]
    more: More = field(default=lambda output, batch: {})

    def __call__(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """The losses of the network and, with an adversary, of its rivals."""
        model: Any = net.model if isinstance(net, Taught) else net
        features = model.encode(batch)
        output = model.decide(features)
        first = task(output, batch)
        losses = {"task": first, **self.more(output, batch)}
        rivals: dict[str, Loss] = {}
        for name, source in self.targets.items():
            seen = mean(output.looking_at(name))
            wanted = from_data(batch, name) if source is None else source(batch.ids)
            wanted = fitted(wanted, seen)
            if self.plan.loss is Distance.ADVERSARIAL:
                rival, beside = getattr(net, RIVAL + name), shown_to(self.plan, features, name)
                far = deceive(rival, seen, wanted, *beside)
                rivals[RIVAL + name] = tell_apart(rival, seen, wanted, *beside)
            else:
                far = PLAIN[self.plan.loss](seen, wanted)
            if self.plan.counts is Counts.FOUND:
                scale = getattr(net, GAMMA + name)
                far = scale(first, far)
                losses |= scale.noted(GAMMA + name)
            losses[f"attention_{name}"] = self.plan.weight * far
        return {"model": losses, **({"rival": rivals} if rivals else {})}


def shown_to(plan: Plan, features: Any, name: str) -> tuple[Tensor | None, Tensor | None]:
    """What a discriminator is given beside a map over the span `name`: context, and values."""
    match plan.sees:
        case Sees.NOTHING:
            return None, None
        case Sees.MEAN:
            return features.pooled(), None
        case Sees.ATTENDED:
            return features.pooled(), _values(features, name)[0]


def taught(
    model: nn.Module, plan: Plan, names: Sequence[str], example: Batch, longest: int
) -> Taught:
    """The network with what the plan needs beside it: scales, and a discriminator a span."""
    teachers: dict[str, nn.Module] = {}
    if plan.counts is Counts.FOUND:
        teachers |= {GAMMA + name: Scale() for name in names}
    if plan.loss is Distance.ADVERSARIAL:
        with resting(model), torch.no_grad():
            features: Any = model.encode(example)  # type: ignore[operator]
            output = model.decide(features)  # type: ignore[operator]
            for name in names:
                keys = output.looking_at(name).keys
                count = len(keys) if len(keys.spans[0].shape) > 1 else longest
                context, values = (
                    0 if one is None else one.shape[-1] for one in shown_to(plan, features, name)
                )
                teachers[RIVAL + name] = Discriminator(
                    count, context, hidden=128, dropout=0.2, values=values
                )
    return Taught(model, **teachers)


def measuring(net: nn.Module, progress: Progress) -> int | None:
    """What tells steps apart that may not be recorded: each by itself until scales are found.

    A scale is read from the device while it is measured; after that it is a number.
    """
    scales = [one for one in net.modules() if isinstance(one, Scale)]
    return None if all(one.frozen for one in scales) else progress.step


def rivals_of(net: Taught, plan: Plan) -> dict[str, ParameterSet]:
    """The discriminators' own parameters, under Adam as they were published; none without."""
    theirs = [p for one in net.teachers.values() for p in one.parameters()]
    if not theirs:
        return {}
    return {"rival": ParameterSet(torch.optim.Adam(theirs, plan.rival, betas=(0.5, 0.999)))}
