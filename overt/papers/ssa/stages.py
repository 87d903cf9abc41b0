"""Self Supervision for Attention Networks: train, search for surrogate targets, train again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from overt import io
from overt.data.dataset import Dataset
from overt.errors import CorruptFileError
from overt.experiments.builders import Step, adamw, fit_stage
from overt.experiments.evaluate import Evaluator
from overt.experiments.experiment import Stage
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import load_weights
from overt.losses import SupervisedModel
from overt.nn import AttentionModel, TextTransformer
from overt.papers.ssa import warm_start
from overt.papers.ssa.config import SsaRecipe, SsaSearch, SsaStart, SsaTarget
from overt.papers.ssa.supervision import (
    GAMMA,
    Augmentation,
    ExtraLosses,
    SsaStep,
    TargetedDataset,
    all_batches,
    discriminator_sets,
    gather_targets,
    grad_cam_targets,
    graph_key,
    labels_of,
    placebo_targets,
    supervised_model,
    target_chunks,
)
from overt.papers.ssa.warm_start import WarmStart
from overt.targets import Surrogates, generate_surrogates
from overt.targets.sources import Targets
from overt.targets.surrogate import (
    GridMasks,
    NoMask,
    RemoveWords,
    ShiftedGridMasks,
    each_position,
    exhaustive_search,
    greedy_refine,
    weighted_maps,
    weighted_masks,
    whole_words,
)
from overt.targets.surrogate.generate import model_digest
from overt.targets.surrogate.masks import MaskGenerator
from overt.train import FitResult, Monitor, ParameterSet, Reporter, processes
from overt.train.loop import derive_seed, seed_everything

SHARD = 4096  # items per file


@dataclass(frozen=True)
class SsaStageInputs:
    """Data and networks of the stages; `shown` is the training split with all display fields."""

    train: Dataset
    validation: Evaluator
    first: nn.Module
    second: nn.Module
    names: tuple[str, ...]
    more: ExtraLosses
    shown: Dataset
    batch: int = 256
    augment: Augmentation = field(default=lambda batch: batch)


class SsaStages:
    """The stages of one run, and what later stages and the evaluation take from earlier ones."""

    def __init__(self, recipe: SsaRecipe, context: RunContext, parts: SsaStageInputs) -> None:
        self.recipe, self.context, self.parts = recipe, context, parts
        self.device = processes(context.device).device
        self.found: Surrogates | None = None
        self.gammas: dict[str, float] = {}
        self.seconds = 0.0
        self._warm_start: WarmStart | None = None

    @property
    def model(self) -> nn.Module:
        """Return the network to evaluate: the second, or the first if there is no second."""
        return self.parts.second if self.recipe.supervised else self.parts.first

    @property
    def needs_first(self) -> bool:
        """Return whether this run needs a first network."""
        plan = self.recipe.supervise
        return plan.target is not SsaTarget.TRUTH or plan.start is SsaStart.BASELINE

    def all(self) -> list[Stage]:
        """Return the stages in order."""
        found = [Stage("baseline", self.train_first)] if self.needs_first else []
        if self.recipe.needs_search:
            found.append(Stage("search", self.search))
        if self.recipe.supervised:
            found.append(Stage("train", self.train_second))
        return found

    # --- first training

    def warm_start(self) -> WarmStart:
        """Return the warm start of this run; the main process decides for all."""
        if self._warm_start is None:
            # A sibling may finish at any time, so two processes that search could choose different
            # folders. The main process searches and records its choice; the others read the record
            # after the barrier.
            ranks = processes(self.context.device)
            if ranks.is_main:
                self._warm_start = warm_start.find_warm_start(self.recipe, self.context)
            ranks.barrier()
            self._warm_start = self._warm_start or warm_start.find_warm_start(
                self.recipe, self.context
            )
        return self._warm_start

    def train_first(self, resume: bool, reporter: Reporter) -> FitResult | None:
        """Train the first network, or load that of a finished sibling run."""
        first = self.parts.first.to(self.device)
        # Without a second training the first network is the result: the runner saves it in
        # `model/`, where siblings find it.
        if not self.recipe.supervised:
            return self.fit_task(first, "baseline", resume, reporter)
        start = self.warm_start()
        if start.baseline is not None:
            reporter.say(f"baseline: loaded from {start.baseline}")
            load_weights(first, start.baseline)
            first.eval()
            return None
        fitted = self.fit_task(first, "baseline", resume, reporter)
        # A resumed run comes here again after its first stage: an intact copy is kept.
        kept = self.context.out / warm_start.BASELINE
        ranks = processes(self.context.device)
        if ranks.is_main and not io.is_intact(kept):
            cast(Any, first).save_pretrained(kept)
        ranks.barrier()
        return fitted

    def fit_task(self, net: nn.Module, stage: str, resume: bool, reporter: Reporter) -> FitResult:
        """Train without any target, by the task loss and extra losses."""
        step = SsaStep(self.recipe.supervise, {}, self.parts.more, self.parts.augment)
        sets = {"model": adamw(net, self.recipe.train)}
        return self.fit(net, step, sets, stage, resume, reporter)

    def fit(
        self,
        net: nn.Module,
        step: Step,
        sets: dict[str, ParameterSet],
        stage: str,
        resume: bool,
        reporter: Reporter,
        data: Dataset | None = None,
    ) -> FitResult:
        """Train on `data` or the training split; validation uses the network inside."""

        def validate(trained: nn.Module) -> dict[str, float]:
            # Targets and discriminators belong to the wrapper; the accuracy is that of the network
            # inside.
            inner = trained.model if isinstance(trained, SupervisedModel) else trained
            model = cast(AttentionModel, inner)
            return {"accuracy": self.parts.validation.accuracy(model, self.device)}

        return fit_stage(
            net,
            self.parts.train if data is None else data,
            *(step, sets, self.recipe.train, self.context, resume, reporter),
            stage=stage,
            monitor=Monitor(validate, "accuracy"),
            before_step=partial(graph_key, net),
        )

    # --- search

    def search(self, resume: bool, reporter: Reporter) -> None:
        """Find a surrogate target for every training sample, or load those of a sibling run."""
        start = self.warm_start()
        out, first = self.context.out, self.parts.first
        if start.surrogates is not None:
            self.found = Surrogates(start.surrogates)
            # The key of the targets has a digest of the weights that were searched.
            if self.found.plan.key.model != model_digest(first):
                raise CorruptFileError(
                    f"{start.surrogates} has targets of another network than the first one of "
                    f"{out}: remove the run and start again."
                )
            self.seconds = _seconds(start.surrogates.parent)
            reporter.say(f"search: targets loaded from {start.surrogates}")
            return
        # A resumed search continues its shards, so the time of the earlier attempts is added.
        before, begun = _seconds(out), time.perf_counter()
        options = self.recipe.surrogate
        total = len(self.parts.train)
        try:
            with reporter.stage("search", total, 0):
                self.found = generate_surrogates(
                    cast(Any, first),
                    self.parts.train,
                    out / warm_start.SURROGATES,
                    masks=self.masks(),
                    search=_search_function(options.search, options.probes),
                    shard=SHARD,
                    batch=self.parts.batch,
                    on_progress=lambda done, of: reporter.step(done, {}),
                )
        finally:
            self.seconds = round(before + time.perf_counter() - begun, 2)
            if processes(self.context.device).is_main:
                io.write_json(out / warm_start.TIME, {"seconds": self.seconds})

    def masks(self) -> list[MaskGenerator]:
        """Return the masks of each span; none for the network's own maps."""
        options = self.recipe.surrogate
        found: list[MaskGenerator] = []
        for name in self.parts.names:
            # One candidate, the whole input: the search returns the network's own map.
            if self.recipe.supervise.target is SsaTarget.OWN:
                found.append(NoMask(name))
            elif name == "text":
                # A pretrained encoder splits words into tokens: whole words are removed, so that no
                # part of one remains.
                whole = isinstance(self.parts.first, TextTransformer)
                units = whole_words if whole else each_position
                found.append(RemoveWords(options.words, options.texts, units=units))
            else:
                kind = ShiftedGridMasks if options.shift else GridMasks
                found.append(kind(options.count, options.scale, options.grid))
        return found

    # --- second training

    def train_second(self, resume: bool, reporter: Reporter) -> FitResult:
        """Train again with targets, from scratch or from the first network."""
        parts, plan = self.parts, self.recipe.supervise
        second = parts.second.to(self.device)
        if plan.start is SsaStart.BASELINE:
            second.load_state_dict(parts.first.state_dict())
        # Trained as long again without targets: the control for training time.
        if plan.target is SsaTarget.NONE:
            return self.fit_task(second, "train", resume, reporter)
        targets, longest = self.targets()
        # The first stages may have been loaded, resumed or run, and each leaves another RNG state.
        # With a seed of their own, discriminators start the same in all three cases.
        seed_everything(derive_seed(self.context.seed, self.recipe.name, "teachers"))
        # Two samples suffice: they are only used for the number of keys and the feature widths.
        example = parts.train.batch(range(min(2, len(parts.train)))).to(self.device)
        net = supervised_model(second, plan, parts.names, example, longest)
        sets = {"model": adamw(second, self.recipe.train), **discriminator_sets(net, plan)}
        data, targets = self.training_data(targets)
        step = SsaStep(plan, targets, parts.more, parts.augment)
        fitted = self.fit(net, step, sets, "train", resume, reporter, data)
        # The scales measured during training (section 3.3), for the results.
        self.gammas = {
            name.removeprefix(GAMMA): float(cast(Any, one).weight)
            for name, one in net.loss_modules.items()
            if name.startswith(GAMMA)
        }
        return fitted

    def training_data(
        self, targets: dict[str, Targets | None]
    ) -> tuple[Dataset, dict[str, Targets | None]]:
        """Return the training data and the targets that remain to be looked up.

        With a CUDA graph, batches carry their targets, since a captured step cannot look up ids. A
        batch has room for the targets of one span; two cannot be captured.
        """
        data = self.parts.train
        if not self.recipe.train.graph or len(targets) > 1:
            return data, targets
        ((name, source),) = targets.items()
        return data if source is None else TargetedDataset(data, source), {name: None}

    def targets(self) -> tuple[dict[str, Targets | None], int]:
        """Return the targets of every span, and the number of words of the longest text."""
        plan, parts = self.recipe.supervise, self.parts
        if plan.target is SsaTarget.TRUTH:
            return dict.fromkeys(parts.names), _longest(parts.train)
        found: dict[str, Targets | None] = {}
        longest = 0
        for name in parts.names:
            if plan.target is SsaTarget.GRADCAM:
                source = grad_cam_targets(parts.first, parts.train, name, self.device)
                found[name] = gather_targets(source, self.device)
            else:
                assert self.found is not None
                ids = self.found.ids
                chosen = placebo_targets(
                    plan.target,
                    partial(self.found.target, name=name),
                    ids,
                    lambda: labels_of(parts.train),
                )
                found[name] = gather_targets(target_chunks(chosen, ids), self.device)
        # A discriminator over words is a linear layer of fixed width: that of the longest text.
        if "text" in parts.names:
            longest = _longest(parts.train)
        return found, longest


CHUNK = 4096  # masked samples per forward pass


def _longest(data: Dataset) -> int:
    widths = [
        batch.tokens.shape[1]
        for batch in all_batches(data, torch.device("cpu"))
        if batch.tokens is not None
    ]
    return max(widths, default=0)


def _search_function(how: SsaSearch, probes: int) -> Callable[..., Any]:
    match how:
        case SsaSearch.ALL:
            return partial(exhaustive_search, chunk=CHUNK)
        case SsaSearch.REFINE:
            return partial(greedy_refine, probes=probes, chunk=CHUNK)
        case SsaSearch.MEAN_MAP:
            return partial(weighted_maps, chunk=CHUNK)
        case SsaSearch.MEAN_MASK:
            return partial(weighted_masks, chunk=CHUNK)


def _seconds(place: Any) -> float:
    path = place / warm_start.TIME
    return float(io.read_json(path)["seconds"]) if path.is_file() else 0.0
