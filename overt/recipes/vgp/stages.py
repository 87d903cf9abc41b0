"""Grounded supervision: tune, then tune for other tasks; each stage goes on if it was stopped."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from overt.data.batch import Batch
from overt.measure.grounding import by_layer_and_head, grounding_accuracy
from overt.models.vlbert.downstream import fitting, for_expressions, for_questions
from overt.models.vlbert.model import VLBert
from overt.recipes.building import adamw, limits, watching
from overt.recipes.experiment import Stage
from overt.recipes.recipe import Context, Train
from overt.recipes.vgp.data import Parts, Task
from overt.recipes.vgp.held import HeldTexts
from overt.recipes.vgp.judging import portions, validated
from overt.recipes.vgp.recipe import Against, Supervise, VgpRecipe, Way
from overt.recipes.vgp.teaching import SAMPLES, Lesson, aimed, teachers_of
from overt.supervise import Taught, classification, grounding
from overt.supervise.heads import best_heads
from overt.train import Fitted, Losses, Monitor, Progress, Reporter, fit, processes
from overt.train.loop import mixed, seed_everything
from overt.train.monitor import by_watching

Step = Callable[[nn.Module, Batch, Progress], Losses]
PLAIN = Supervise(way=Way.NONE)
NOTHING = Against()


@dataclass(eq=False)
class Stages:
    """The stages of one run, and what the judge takes from them."""

    recipe: VgpRecipe
    context: Context
    parts: Parts
    net: VLBert
    refers: VLBert | None = None
    answers: VLBert | None = None
    expressions: Task | None = None
    questions: Task | None = None

    def all(self) -> list[Stage]:
        """The stages, in their order."""
        found = [Stage("first", self.begin)] if self.recipe.first.epochs else []
        if self.recipe.supervise.way is not Way.ORIGINAL:
            found.append(Stage("tune", self.tune))
        if self.recipe.after.epochs and self.parts.expressions is not None:
            found.append(Stage("refer", self.refer))
        if self.recipe.after.epochs and self.parts.questions is not None:
            found.append(Stage("ask", self.ask))
        return found

    # --- captions

    def begin(self, resume: bool, reporter: Reporter) -> Fitted:
        """Learn the two tasks without any supervision of attention."""
        lesson = Lesson(PLAIN, self.parts.train.links, NOTHING)
        plan = replace(self.recipe.train, epochs=self.recipe.first.epochs)
        taught = Taught(self.net)
        return self.fit(taught, self.parts.train.texts, lesson, plan, "first", resume, reporter)

    def tune(self, resume: bool, reporter: Reporter) -> Fitted:
        """Learn the two tasks with attention supervised as the recipe says."""
        recipe, parts = self.recipe, self.parts
        texts = aimed(parts.train.texts, recipe.supervise.target)
        self.net.to(self.device)
        seed_everything(mixed(self.context.seed, recipe.name, "teachers"))
        teachers = teachers_of(self.net, recipe.supervise, recipe.against, self.some)
        which = self.best() if recipe.supervise.way is Way.CHOSEN else None
        lesson = Lesson(recipe.supervise, parts.train.links, recipe.against, which)
        taught = Taught(self.net, **teachers)
        return self.fit(taught, texts, lesson, recipe.train, "tune", resume, reporter)

    def some(self) -> list[Batch]:
        """A few batches of the training part."""
        texts = self.parts.train.texts
        return [texts.batch(range(min(SAMPLES, len(texts))))]

    def best(self) -> torch.Tensor:
        """The heads that ground best before the network is tuned, on validation."""
        pairs = []
        training = self.net.training
        self.net.eval()
        with torch.no_grad():
            for batch in portions(self.parts.val.texts):
                assert batch.target is not None
                block = self.net(batch).seen.block("text", "regions")
                pairs.append((block, batch.target))
        self.net.train(training)
        scores = by_layer_and_head(grounding_accuracy, pairs)
        count = max(1, round(self.recipe.supervise.share * scores.numel()))
        return best_heads(scores, count)

    # --- afterwards

    def refer(self, resume: bool, reporter: Reporter) -> Fitted:
        """Learn which region an expression means."""
        assert self.parts.expressions is not None
        self.expressions = self.parts.expressions()
        seed_everything(mixed(self.context.seed, self.recipe.name, "refer"))
        self.refers = for_expressions(self.net).to(self.device)

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            assert batch.region_mask is not None
            logits = net(batch).prediction
            return {"model": {"task": grounding.choice(logits, fitting(batch), batch.region_mask)}}

        data = self.expressions.train
        return self.fit(self.refers, data, step, self.after, "refer", resume, reporter)

    def ask(self, resume: bool, reporter: Reporter) -> Fitted:
        """Learn to answer questions."""
        assert self.parts.questions is not None
        self.questions = self.parts.questions()
        seed_everything(mixed(self.context.seed, self.recipe.name, "ask"))
        dropout = self.recipe.model.dropout
        self.answers = for_questions(self.net, self.questions.classes, dropout).to(self.device)

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            assert batch.labels is not None
            return {"model": {"task": classification(net(batch).prediction, batch.labels)}}

        data = self.questions.train
        return self.fit(self.answers, data, step, self.after, "ask", resume, reporter)

    @property
    def after(self) -> Train:
        """How tasks afterwards are learned; nothing is validated there that could be waited for."""
        after = self.recipe.after
        return replace(self.recipe.train, epochs=after.epochs, rate=after.rate, patience=None)

    # --- all

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return processes(self.context.device).device

    def fit(
        self,
        net: nn.Module,
        data: HeldTexts,
        step: Step,
        plan: Train,
        stage: str,
        resume: bool,
        reporter: Reporter,
    ) -> Fitted:
        """One training; the last weights are those that count, so that budgets are equal."""
        monitor = None
        if isinstance(net, Taught):
            val = self.parts.val

            def validate(trained: nn.Module) -> dict[str, float]:
                return validated(cast(VLBert, cast(Any, trained).model), val.texts, val.links)

            monitor = Monitor(validate, "identification")
        return fit(
            net,
            data,
            step,
            {"model": adamw(net, plan)},
            limits(plan),
            out=self.context.out,
            seed=self.context.seed,
            stage=stage,
            device=self.context.device,
            monitor=monitor,
            attention=watching(plan, by_watching),
            resume=resume,
            reporter=reporter,
        )
