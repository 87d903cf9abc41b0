"""Attending Self-Attention: fine-tune with supervision, then fine-tune for downstream tasks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import MatchingCaption
from overt.errors import UserError
from overt.experiments.builders import Step, adamw, dataset_info, fit_stage
from overt.experiments.dataset_views import batches_of, example_of
from overt.experiments.experiment import Evaluation, Experiment, Stage
from overt.experiments.inference_spec import (
    Canvas,
    ImageInput,
    InferenceSpec,
    NotInteractive,
    make_spec,
)
from overt.experiments.recipe import RunContext, TrainConfig
from overt.experiments.warm_start import load_weights
from overt.losses import SupervisedModel, classification, forgetting, grounding
from overt.losses.head_selection import top_heads
from overt.metrics.grounding import grounding_accuracy, mean_by_layer_and_head
from overt.nn.vlbert.downstream import (
    for_masked_vqa,
    for_referring_expressions,
    for_vqa,
    matching_candidates,
)
from overt.nn.vlbert.model import VLBert
from overt.papers.vgp import evaluate as evaluate_module
from overt.papers.vgp.config import (
    VgpAnswerToken,
    VgpForgetting,
    VgpMethod,
    VgpPhotos,
    VgpRecipe,
    VgpScenes,
    VgpSupervise,
)
from overt.papers.vgp.data import DownstreamTask, VgpData, load_scenes
from overt.papers.vgp.entities import load_entities
from overt.papers.vgp.evaluate import PORTION, validation_metrics
from overt.papers.vgp.in_memory import TextsInMemory
from overt.papers.vgp.model import build_model
from overt.papers.vgp.pretraining import (
    PretrainingStep,
    PretrainingTexts,
    masked_word_score,
    pretraining_heads,
)
from overt.papers.vgp.supervision import (
    FISHER_SAMPLES,
    VgpStep,
    prediction_score,
    supervision_modules,
    with_targets,
)
from overt.papers.vgp.warm_start import find_pretrained
from overt.train import FitResult, Losses, Monitor, Progress, Reporter, processes
from overt.train.loop import derive_seed, seed_everything
from overt.train.monitor import capture_by_watch

UNSUPERVISED = VgpSupervise(way=VgpMethod.NONE)
NO_REGULARIZER = VgpForgetting()


@dataclass(eq=False)
class VgpStages:
    """The stages of one run, and what the evaluation takes from them."""

    recipe: VgpRecipe
    context: RunContext
    parts: VgpData
    net: VLBert
    refers: VLBert | None = None
    answers: VLBert | None = None
    expressions: DownstreamTask | None = None
    questions: DownstreamTask | None = None

    def all(self) -> list[Stage]:
        """Return the stages in order."""
        found = [Stage("first", self.begin)] if self.recipe.first.epochs else []
        if self.recipe.supervise.way is not VgpMethod.ORIGINAL:
            found.append(Stage("tune", self.tune))
        if self.recipe.after.epochs and self.parts.expressions is not None:
            found.append(Stage("refer", self.refer))
        if self.recipe.after.epochs and self.parts.questions is not None:
            found.append(Stage("ask", self.ask))
        return found

    # --- captions

    def begin(self, resume: bool, reporter: Reporter) -> FitResult | None:
        """Train the two tasks without supervision of attention, or pretrain."""
        if self.recipe.is_pretrained:
            return self.pretrain(resume, reporter)
        step = VgpStep(UNSUPERVISED, self.parts.train.links, NO_REGULARIZER)
        plan = replace(self.recipe.train, epochs=self.recipe.first.epochs)
        supervised = SupervisedModel(self.net)
        return self.fit(supervised, self.parts.train.texts, step, plan, "first", resume, reporter)

    def pretrain(self, resume: bool, reporter: Reporter) -> FitResult | None:
        """Pretrain on single captions, or load the network of the sibling run "original"."""
        ranks = processes(self.context.device)
        # The main process searches and records its choice; the others read the record.
        place = find_pretrained(self.recipe, self.context) if ranks.is_main else None
        ranks.barrier()
        place = place or find_pretrained(self.recipe, self.context)
        self.net.to(self.device)
        if place is not None:
            reporter.say(f"pretraining: loaded from {place}")
            load_weights(self.net, place)
            self.net.eval()
            return None
        data = self.captions
        seed_everything(derive_seed(self.context.seed, self.recipe.name, "pretraining"))
        supervised = SupervisedModel(self.net, heads=pretraining_heads(self.net, data.texts))
        plan = replace(self.recipe.train, epochs=self.recipe.first.epochs, patience=None)
        step = PretrainingStep(data, self.recipe.first.share)
        return self.fit(
            supervised, data.texts, step, plan, "first", resume, reporter, validated=False
        )

    @cached_property
    def captions(self) -> PretrainingTexts:
        """Return the captions to pretrain on."""
        if self.parts.captions is None:
            raise UserError("there are no captions to pretrain on: set first.tasks=pairs.")
        return self.parts.captions()

    def tune(self, resume: bool, reporter: Reporter) -> FitResult:
        """Train the two tasks with attention supervised as configured."""
        recipe, parts = self.recipe, self.parts
        texts = with_targets(parts.train.texts, recipe.supervise.target)
        self.net.to(self.device)
        # A seed of its own: the state of the RNG depends on whether the first stage was trained or
        # resumed.
        seed_everything(derive_seed(self.context.seed, recipe.name, "teachers"))
        modules = supervision_modules(
            self.net,
            recipe.supervise,
            recipe.against,
            self.fisher_batches,
            self.fisher_score if recipe.is_pretrained else prediction_score,
        )
        which = self.best_heads() if recipe.supervise.way is VgpMethod.CHOSEN else None
        dropout = recipe.model.dropout if recipe.supervise.dropped else 0.0
        step = VgpStep(recipe.supervise, parts.train.links, recipe.against, which, dropout)
        supervised = SupervisedModel(self.net, **modules)
        return self.fit(supervised, texts, step, recipe.train, "tune", resume, reporter)

    def fisher_batches(self) -> list[Batch]:
        """Return a batch of what the network was trained on before."""
        texts = self.captions.texts if self.recipe.is_pretrained else self.parts.train.texts
        return [texts.batch(range(min(FISHER_SAMPLES, len(texts))))]

    def fisher_score(self, generator: torch.Generator) -> forgetting.Score[Batch]:
        """Return the log-likelihood of masked words."""
        return masked_word_score(self.captions, self.recipe.first.share, generator)

    def best_heads(self) -> torch.Tensor:
        """Return the heads that ground best before fine-tuning, on validation."""
        pairs = []
        training = self.net.training
        self.net.eval()
        with torch.no_grad():
            for batch in batches_of(self.parts.val.texts, PORTION):
                assert batch.target is not None
                block = self.net(batch).trace.block("text", "regions")
                pairs.append((block, batch.target))
        self.net.train(training)
        scores = mean_by_layer_and_head(grounding_accuracy, pairs)
        count = max(1, round(self.recipe.supervise.share * scores.numel()))
        return top_heads(scores, count)

    # --- downstream tasks

    def refer(self, resume: bool, reporter: Reporter) -> FitResult:
        """Fine-tune for referring expressions: which region is meant."""
        assert self.parts.expressions is not None
        self.expressions = self.parts.expressions()
        # A seed of its own, so that the new layers do not depend on the stages before.
        seed_everything(derive_seed(self.context.seed, self.recipe.name, "refer"))
        self.refers = for_referring_expressions(self.net).to(self.device)

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            assert batch.region_mask is not None
            logits, wanted = net(batch).prediction, matching_candidates(batch)
            return {"model": {"task": grounding.region_choice(logits, wanted, batch.region_mask)}}

        data = self.expressions.train
        return self.fit(self.refers, data, step, self.after, "refer", resume, reporter)

    def ask(self, resume: bool, reporter: Reporter) -> FitResult:
        """Fine-tune for questions."""
        assert self.parts.questions is not None
        self.questions = self.parts.questions()
        seed_everything(derive_seed(self.context.seed, self.recipe.name, "ask"))
        dropout = self.recipe.model.dropout
        data = self.recipe.data
        masked = isinstance(data, VgpScenes) and data.answer is VgpAnswerToken.MASK
        make = for_masked_vqa if masked else for_vqa
        self.answers = make(self.net, self.questions.classes, dropout).to(self.device)

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            assert batch.labels is not None
            return {"model": {"task": classification(net(batch).prediction, batch.labels)}}

        train = self.questions.train
        return self.fit(self.answers, train, step, self.after, "ask", resume, reporter)

    @property
    def after(self) -> TrainConfig:
        """Return the training settings of downstream tasks, without early stopping."""
        after = self.recipe.after
        return replace(self.recipe.train, epochs=after.epochs, rate=after.rate, patience=None)

    # --- shared

    @property
    def device(self) -> torch.device:
        """Return the device of the run."""
        return processes(self.context.device).device

    def fit(
        self,
        net: nn.Module,
        data: TextsInMemory,
        step: Step,
        plan: TrainConfig,
        stage: str,
        resume: bool,
        reporter: Reporter,
        validated: bool = True,
    ) -> FitResult:
        """Run one training; the last weights are used, so that budgets are equal."""
        monitor = None
        # Downstream tasks are trained for a fixed number of epochs, without validation, and so is
        # pretraining.
        if validated and isinstance(net, SupervisedModel):
            val = self.parts.val

            def validate(trained: nn.Module) -> dict[str, float]:
                return validation_metrics(
                    cast(VLBert, cast(Any, trained).model), val.texts, val.links
                )

            monitor = Monitor(validate, "identification")
        sets = {"model": adamw(net, plan)}
        return fit_stage(
            *(net, data, step, sets, plan, self.context, resume, reporter),
            stage=stage,
            monitor=monitor,
            capture=capture_by_watch,
        )


CAPTION_CLASSES = {
    MatchingCaption.BOTH: "both captions describe it",
    MatchingCaption.FIRST: "only the first describes it",
    MatchingCaption.SECOND: "only the second describes it",
}


def build(recipe: VgpRecipe, context: RunContext) -> Experiment:
    """Return the data, the network, its stages, and the evaluation."""
    device = processes(context.device).device
    match recipe.data:
        case VgpScenes() as data:
            parts = load_scenes(data, device, recipe.first.scenes)
        case VgpPhotos() as data:
            parts = load_entities(data, recipe.model, context, device)
    net = build_model(recipe, parts)
    stages = VgpStages(recipe, context, parts, net)
    example = example_of(parts.test.texts)
    return Experiment(
        model=net,
        sources=[dataset_info(one.texts) for one in (parts.train, parts.val, parts.test)],
        stages=stages.all(),
        evaluate=lambda reporter: evaluate(stages),
        example=example,
        inference_spec=inference_spec_of(net, parts, example),
        test_data=parts.test.texts,
    )


def inference_spec_of(
    net: VLBert, parts: VgpData, example: Callable[[], Batch]
) -> InferenceSpec | NotInteractive | None:
    """Return how the network is used interactively: boxes on pixels, or frozen CNN features."""
    if parts.inputs is None:
        return NotInteractive("its tokenizer is unknown")
    inputs = parts.inputs
    plain = inputs.backbone is None
    return make_spec(
        *(net, tuple(CAPTION_CLASSES[one] for one in MatchingCaption), inputs.reader, example),
        ImageInput.BOXES if plain else ImageInput.REGIONS,
        Canvas.CROP if plain else Canvas.STRETCH,
        inputs.backbone,
        inputs.pixels,
    )


def evaluate(stages: VgpStages) -> Evaluation:
    """Evaluate the network, and those fine-tuned from it for downstream tasks."""
    parts, net = stages.parts, stages.net
    net.eval()
    test, val = (
        evaluate_module.collect_results(net, one.texts, one.links)
        for one in (parts.test, parts.val)
    )
    found = evaluate_module.evaluate_captions(test, val, parts.relations, parts.test.texts.split)
    more = []
    if stages.refers is not None and stages.expressions is not None:
        more.append(
            evaluate_module.evaluate_expressions(stages.refers.eval(), stages.expressions.tests)
        )
    if stages.answers is not None and stages.questions is not None:
        more.append(
            evaluate_module.evaluate_questions(stages.answers.eval(), stages.questions.tests["all"])
        )
    found = evaluate_module.add_values(found, more)
    if parts.shown is not None:
        shown = parts.shown().to(stages.device)
        found = replace(found, gallery=evaluate_module.gallery(net, shown))
    return found
