"""From the plain values of Learn to Pay Attention to data, network and training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from overt import files, measure, models
from overt.attention import AttentionMap, Kind
from overt.data.batch import Batch
from overt.data.source import Source as DataSet
from overt.errors import BadInput
from overt.models.ltpa import DECISIONS, SCORES
from overt.models.resnet import Depth
from overt.models.vgg import Dropout, Sizes
from overt.recipes import checks
from overt.recipes.building import SPLITS, First, experiment
from overt.recipes.evaluation import Judge, also, calibrated, charted, valued
from overt.recipes.experiment import Evaluation, Experiment, Source, Value
from overt.recipes.ltpa import Fall, Files, Judging, LtpaRecipe, Model, Net, Pictures, Scenes, Sgd
from overt.recipes.ltpa_judging import Asked, Masks, everything
from overt.recipes.ltpa_probes import Probe, probes, right
from overt.recipes.recipe import Context, Train
from overt.train import ParameterSet, Reporter, processes, warm_then_cosine

PORTION = 256  # images that are judged at a time
CELL = 4  # pixels a side of a cell of the last level
FAMILIES = ("fooled_fgsm", "fooled_pgd", "pointing", "mass", "jaccard", "transfer")
WEIGHTS = "model.safetensors"
HALVINGS = 12  # the published 300 epochs halve the rate every 25


def pictures(recipe: LtpaRecipe, data: Pictures, context: Context) -> Experiment:
    """CIFAR-10 or CIFAR-100, held on the device."""
    from overt.data import Cifar10, Cifar100
    from overt.data.cifar import Records
    from overt.data.sets import root_of

    root = root_of(context.data_root)
    kind = Cifar10 if data.name is Files.CIFAR10 else Cifar100

    def part(split: str) -> First[Records]:
        return First(kind(root, split), data.limit)

    if data.held_out:
        train, held, test = map(part, SPLITS)
        return trained(recipe, context, train, held, test, train.data.classes)
    train, test = part("train+val"), part("test")
    return trained(recipe, context, train, None, test, train.data.classes)


def scenes(recipe: LtpaRecipe, data: Scenes, context: Context) -> Experiment:
    """Scenes to be told apart by the shape of their largest thing, drawn once."""
    from overt.data.scenes.classify import DominantScenes

    side = -(-data.size // CELL)

    def part(split: str, count: int) -> DominantScenes:
        most = count if data.limit is None else min(count, data.limit)
        return DominantScenes(split, data.world, most, size=data.size, cells=(side, side))

    train, held, test = (
        part(split, count)
        for split, count in zip(SPLITS, (data.train, data.val, data.test), strict=True)
    )

    def masks(rows: Sequence[int]) -> Tensor:
        return torch.stack([test.mask(row) for row in rows])

    return trained(recipe, context, train, held, test, train.classes, masks)


def trained(
    recipe: LtpaRecipe,
    context: Context,
    train: DataSet,
    held: DataSet | None,
    test: DataSet,
    classes: tuple[str, ...],
    masks: Masks | None = None,
) -> Experiment:
    """One stage of training on images that lie on the device, and a test of every level.

    What the network is to be judged by is opened before it is trained.
    """
    from overt.data import Resident, vary

    device = processes(context.device).device

    def moved(batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return vary(batch, generator)

    model = network(recipe.model, len(classes))
    if recipe.model.start is not None:
        begin_from(model, Path(recipe.model.start))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    judge = Judge(test, classes, portion=PORTION)
    built = experiment(
        model,
        Resident.of(train, device),
        None if held is None else Judge(held, classes, portion=PORTION),
        judge,
        recipe.train,
        context,
        vary=moved if recipe.data.vary else lambda batch: batch,
        learn=lambda net, plan: sgd(net, plan, recipe.sgd),
    )
    asked = capped(recipe.judge, recipe.data.limit)
    others: tuple[Probe, ...] = ()
    if asked.items and asked.transfer != 0:
        own = recipe.data.name if isinstance(recipe.data, Pictures) else "scenes"
        root = checks.data_root(context.data_root)
        others = probes(root, own, asked.transfer, device, asked.photos)

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluated(judge, model, device)
        if not asked.items:
            return found
        return judged_further(found, judge, model, device, asked, masks, others)

    used = [Source(one.name, str(one.data.split), one.data.digest(), len(one)) for one in others]
    return replace(built, evaluate=evaluate, sources=[*built.sources, *used])


def capped(judging: Judging, limit: int | None) -> Judging:
    """What is asked of a run on a few items: a quarter of them, and of fewer by PGD.

    Attacks take many times the work of a test, and a run on few items is meant to be short.
    """
    if limit is None:
        return judging
    few, most = max(1, limit // 4), judging.transfer
    return replace(
        judging,
        items=min(judging.items, few),
        pgd=min(judging.pgd, limit // 16),
        transfer=few if most is None else min(most, few),
    )


def network(model: Model, classes: int) -> nn.Module:
    """The network of a row."""
    dropout = Dropout(model.first_dropout, model.inside_dropout, model.dropout)
    sizes = Sizes(classes, model.width, dropout)
    depth = Depth(classes, model.width, model.blocks)
    score, decision = SCORES[model.score.value], DECISIONS[model.decision.value]
    match model.net:
        case Net.VGG:
            return models.VGG(sizes)
        case Net.GAP:
            return models.VGGGap(sizes)
        case Net.PAN:
            return models.VGGProgressive(sizes)
        case Net.RESNET:
            return models.ResNet(depth)
        case Net.VGG_ATTENTION:
            return models.VGGAttention(sizes, model.levels, score, decision)
        case Net.RESNET_ATTENTION:
            return models.ResNetAttention(depth, model.levels, score, decision)


def begin_from(model: nn.Module, folder: Path) -> None:
    """Give a network what another of its kind has learned, but for the classifier (CUB, A.3)."""
    place = folder / "model" if (folder / "model").is_dir() else folder
    if not (place / WEIGHTS).is_file():
        raise BadInput(f"model.start={folder} holds no network; name the folder of a finished run.")
    files.verify(place)
    theirs, own = files.read_tensors(place / WEIGHTS), model.state_dict()
    taken = {name: one for name, one in own.items() if "decision" not in name.split(".")}
    for name, one in taken.items():
        if name not in theirs or theirs[name].shape != one.shape:
            raise BadInput(
                f"model.start={folder} holds another network: its {name} is not one of "
                f"{tuple(one.shape)}; the kind, the levels and the width must be the same."
            )
    model.load_state_dict({**own, **{name: theirs[name] for name in taken}})


def sgd(model: nn.Module, plan: Train, options: Sgd) -> ParameterSet:
    """All parameters, biases and norms too, under SGD with one rate and one decay."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        plan.rate,
        momentum=options.momentum,
        dampening=options.dampening,
        weight_decay=plan.decay,
        nesterov=options.nesterov,
    )
    match options.fall:
        case Fall.COSINE:
            schedule = warm_then_cosine(plan.warmup)
        case Fall.HALVES:
            schedule = warm_then_halves(plan.warmup)
    return ParameterSet(optimizer, schedule, plan.clip)


def warm_then_halves(warmup: float) -> Callable[[float], float]:
    """A rate that climbs over the first `warmup` of training, and is halved every twelfth of it."""

    def factor(fraction: float) -> float:
        if fraction < warmup:
            return max(fraction / warmup, 0.01)
        return 0.5 ** int(fraction * HALVINGS)

    return factor


# --- judging


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
                rows, columns = one.keys.find("image").shape
                found = self.entropies.setdefault(f"entropy_{rows}x{columns}", [])
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
    return replace(found, ours=ours, samples={**found.samples, **samples})


def judged_further(
    found: Evaluation,
    judge: Judge,
    model: nn.Module,
    device: torch.device,
    judging: Judging,
    masks: Masks | None,
    others: Sequence[Probe],
) -> Evaluation:
    """An evaluation with all that the section `judge` of the recipe asks for."""
    batches = tuple(judge.first(judging.items, device))
    asked = Asked(model, Judged(model), batches, masks)
    found = also(calibrated(found), everything(asked, judging), str(judge.data.split))
    prepare = measure.whitening if judging.whiten else measure.as_they_are
    declared = measure.transfer_accuracy.measure
    moved = {
        f"transfer_{one.name}": valued(declared, right(model, one, prepare), str(one.data.split))
        for one in others
    }
    return charted(replace(found, ours={**found.ours, **moved}), FAMILIES)
