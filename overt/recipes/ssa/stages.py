"""Self Supervision for Attention Networks: train, search, train again; each goes on if stopped."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from overt import files, models
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import Damaged
from overt.recipes.building import adamw, limits, watching
from overt.recipes.evaluation import Judge
from overt.recipes.experiment import Stage
from overt.recipes.recipe import Context
from overt.recipes.ssa import ground as ssa_ground
from overt.recipes.ssa.ground import Ground
from overt.recipes.ssa.recipe import Search, SsaRecipe, Start, Target
from overt.recipes.ssa.teaching import (
    GAMMA,
    Aimed,
    Lesson,
    More,
    by_gradient,
    everything,
    gathered,
    labels_of,
    measuring,
    placebo_of,
    portions,
    rivals_of,
    taught,
)
from overt.supervise import Surrogates, Taught, surrogates
from overt.supervise.surrogate import (
    Grids,
    ShiftedGrids,
    Whole,
    WithoutWords,
    each_place,
    refine,
    search,
    weighted_maps,
    weighted_masks,
    whole_words,
)
from overt.supervise.surrogate.making import digest_of
from overt.supervise.surrogate.masks import Masks
from overt.supervise.targets import Targets
from overt.train import Fitted, Losses, Monitor, Progress, Reporter, fit, processes
from overt.train.loop import mixed, seed_everything

CHUNK = 4096  # masked samples that the network is asked about at a time
SHARD = 4096  # items that are kept together


@dataclass(frozen=True)
class Parts:
    """What the stages of a run work on; `shown` is the training part with all that people see."""

    train: Source
    validation: Judge
    first: nn.Module
    second: nn.Module
    names: tuple[str, ...]
    more: More
    shown: Source
    batch: int = 256


class Stages:
    """The stages of one run, and what later ones and the judge take from earlier ones."""

    def __init__(self, recipe: SsaRecipe, context: Context, parts: Parts) -> None:
        self.recipe, self.context, self.parts = recipe, context, parts
        self.device = processes(context.device).device
        self.found: Surrogates | None = None
        self.gammas: dict[str, float] = {}
        self.seconds = 0.0
        self._ground: Ground | None = None

    @property
    def model(self) -> nn.Module:
        """The network that is judged: the second, or the first where there is no other."""
        return self.parts.second if self.recipe.taught else self.parts.first

    @property
    def needs_first(self) -> bool:
        """Whether anything of this run stands on a first network."""
        plan = self.recipe.supervise
        return plan.target is not Target.TRUTH or plan.start is Start.BASELINE

    def all(self) -> list[Stage]:
        """The stages, in their order."""
        found = [Stage("baseline", self.train_first)] if self.needs_first else []
        if self.recipe.searched:
            found.append(Stage("search", self.search))
        if self.recipe.taught:
            found.append(Stage("train", self.train_second))
        return found

    # --- the first training

    def ground(self) -> Ground:
        """What this run stands on; the first of several processes decides it for all."""
        if self._ground is None:
            ranks = processes(self.context.device)
            if ranks.first:
                self._ground = ssa_ground.ground_of(self.recipe, self.context)
            ranks.wait()
            self._ground = self._ground or ssa_ground.ground_of(self.recipe, self.context)
        return self._ground

    def train_first(self, resume: bool, reporter: Reporter) -> Fitted | None:
        """Train the first network, or take that of a run beside this one."""
        first = self.parts.first.to(self.device)
        if not self.recipe.taught:
            return self.fit(first, self.plain, {"model": adamw(first, self.recipe.train)},
                            "baseline", resume, reporter)  # fmt: skip
        ground = self.ground()
        if ground.baseline is not None:
            reporter.say(f"baseline: that of {ground.baseline}")
            ssa_ground.load(first, ground.baseline)
            first.eval()
            return None
        fitted = self.fit(first, self.plain, {"model": adamw(first, self.recipe.train)},
                          "baseline", resume, reporter)  # fmt: skip
        kept = self.context.out / ssa_ground.BASELINE
        ranks = processes(self.context.device)
        if ranks.first and not files.is_whole(kept):
            cast(Any, first).save_pretrained(kept)
        ranks.wait()
        return fitted

    def plain(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """A step without any target: the task, and what the network asks for."""
        return Lesson(self.recipe.supervise, {}, self.parts.more)(net, batch, progress)

    def fit(
        self,
        net: nn.Module,
        step: Callable[[nn.Module, Batch, Progress], Losses],
        sets: dict[str, Any],
        stage: str,
        resume: bool,
        reporter: Reporter,
        data: Source | None = None,
    ) -> Fitted:
        """One training, on `data` or on what there is; validation looks at the network inside."""

        def validate(trained: nn.Module) -> dict[str, float]:
            inner = trained.model if isinstance(trained, Taught) else trained
            judged = cast(models.Model, inner)
            return {"accuracy": self.parts.validation.accuracy(judged, self.device)}

        return fit(
            net,
            self.parts.train if data is None else data,
            step,
            sets,
            limits(self.recipe.train),
            out=self.context.out,
            seed=self.context.seed,
            stage=stage,
            device=self.context.device,
            monitor=Monitor(validate, "accuracy"),
            attention=watching(self.recipe.train),
            before=partial(measuring, net),
            resume=resume,
            reporter=reporter,
        )

    # --- the search

    def search(self, resume: bool, reporter: Reporter) -> None:
        """Find a target for every training sample, or take those of a run beside this one."""
        ground = self.ground()
        out, first = self.context.out, self.parts.first
        if ground.surrogates is not None:
            self.found = Surrogates(ground.surrogates)
            if self.found.plan.key.model != digest_of(first):
                raise Damaged(
                    f"{ground.surrogates} holds targets of another network than the first one "
                    f"of {out}; remove the run and start again."
                )
            self.seconds = _seconds(ground.surrogates.parent)
            reporter.say(f"search: targets of {ground.surrogates}")
            return
        before, begun = _seconds(out), time.perf_counter()
        options = self.recipe.surrogate
        total = len(self.parts.train)
        try:
            with reporter.stage("search", total, 0):
                self.found = surrogates(
                    cast(Any, first),
                    self.parts.train,
                    out / ssa_ground.SURROGATES,
                    masks=self.masks(),
                    search=_search_by(options.search, options.probes),
                    shard=SHARD,
                    batch=self.parts.batch,
                    on_progress=lambda done, of: reporter.step(done, {}),
                )
        finally:
            self.seconds = round(before + time.perf_counter() - begun, 2)
            if processes(self.context.device).first:
                files.write_json(out / ssa_ground.TIME, {"seconds": self.seconds})

    def masks(self) -> list[Masks]:
        """What is removed, a kind of input after the other; nothing for the network's own maps."""
        options = self.recipe.surrogate
        found: list[Masks] = []
        for name in self.parts.names:
            if self.recipe.supervise.target is Target.OWN:
                found.append(Whole(name))
            elif name == "text":
                whole = isinstance(self.parts.first, models.TextTransformer)
                units = whole_words if whole else each_place
                found.append(WithoutWords(options.words, options.texts, units=units))
            else:
                kind = ShiftedGrids if options.shift else Grids
                found.append(kind(options.count, options.scale, options.grid))
        return found

    # --- the second training

    def train_second(self, resume: bool, reporter: Reporter) -> Fitted:
        """Train again with targets, from scratch or from the first network."""
        parts, plan = self.parts, self.recipe.supervise
        second = parts.second.to(self.device)
        if plan.start is Start.BASELINE:
            second.load_state_dict(parts.first.state_dict())
        if plan.target is Target.NONE:
            return self.fit(second, self.plain, {"model": adamw(second, self.recipe.train)},
                            "train", resume, reporter)  # fmt: skip
        targets, longest = self.targets()
        seed_everything(mixed(self.context.seed, self.recipe.name, "teachers"))
        example = parts.train.batch(range(min(2, len(parts.train)))).to(self.device)
        net = taught(second, plan, parts.names, example, longest)
        sets = {"model": adamw(second, self.recipe.train), **rivals_of(net, plan)}
        data, targets = self.aimed(targets)
        lesson = Lesson(plan, targets, parts.more)
        fitted = self.fit(net, lesson, sets, "train", resume, reporter, data)
        self.gammas = {
            name.removeprefix(GAMMA): float(cast(Any, one).weight)
            for name, one in net.teachers.items()
            if name.startswith(GAMMA)
        }
        return fitted

    def aimed(self, targets: dict[str, Targets | None]) -> tuple[Source, dict[str, Targets | None]]:
        """The data to train on, and what is left to ask for: steps to be recorded ask nothing.

        A batch has room for the targets of one span; two cannot be recorded.
        """
        data = self.parts.train
        if not self.recipe.train.graph or len(targets) > 1:
            return data, targets
        ((name, source),) = targets.items()
        return data if source is None else Aimed(data, source), {name: None}

    def targets(self) -> tuple[dict[str, Targets | None], int]:
        """The source of every span, and the number of words of the longest text."""
        plan, parts = self.recipe.supervise, self.parts
        if plan.target is Target.TRUTH:
            return dict.fromkeys(parts.names), _longest(parts.train)
        found: dict[str, Targets | None] = {}
        longest = 0
        for name in parts.names:
            if plan.target is Target.GRADCAM:
                source = by_gradient(parts.first, parts.train, name, self.device)
                found[name] = gathered(source, self.device)
            else:
                assert self.found is not None
                ids = self.found.ids
                chosen = placebo_of(
                    plan.target,
                    partial(self.found.target, name=name),
                    ids,
                    lambda: labels_of(parts.train),
                )
                found[name] = gathered(portions(chosen, ids), self.device)
        if "text" in parts.names:
            longest = _longest(parts.train)
        return found, longest


def _longest(data: Source) -> int:
    widths = [
        batch.tokens.shape[1]
        for batch in everything(data, torch.device("cpu"))
        if batch.tokens is not None
    ]
    return max(widths, default=0)


def _search_by(how: Search, probes: int) -> Callable[..., Any]:
    match how:
        case Search.ALL:
            return partial(search, chunk=CHUNK)
        case Search.REFINE:
            return partial(refine, probes=probes, chunk=CHUNK)
        case Search.MEAN_MAP:
            return partial(weighted_maps, chunk=CHUNK)
        case Search.MEAN_MASK:
            return partial(weighted_masks, chunk=CHUNK)


def _seconds(place: Any) -> float:
    path = place / ssa_ground.TIME
    return float(files.read_json(path)["seconds"]) if path.is_file() else 0.0
