"""From the plain values of aligned captioning to an experiment: cross-entropy, then the critic."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from overt import supervise
from overt.data.batch import Batch
from overt.models.captioning.captioner import Memory
from overt.models.captioning.decoding import Rules, Texts
from overt.models.output import Decoder
from overt.recipes.a2.data import Parts, Sight, every, one_each, opened
from overt.recipes.a2.evaluation import Scorer, evaluated, texts_of
from overt.recipes.a2.ground import ground_of, take
from overt.recipes.a2.judging import NextWord, NextWords
from overt.recipes.a2.networks import AlignedCaptioner, Net, network, plain_of
from overt.recipes.a2.recipe import A2Recipe, Baseline, Critic, Schedule
from overt.recipes.a2.rewarding import Clock, Judge, Reward, by_comparing, recorded_judge
from overt.recipes.a2.writing import Write, drawing, recorded, usual
from overt.recipes.building import limits, source, watching
from overt.recipes.experiment import Evaluation, Experiment, Stage
from overt.recipes.recipe import Context
from overt.recipes.spoken import Mute, Spoken, spoken
from overt.supervise import perturb, reward
from overt.train import (
    Fitted,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    fit,
    processes,
    warm_then_cosine,
)
from overt.train.monitor import by_watching

ELAPSED = 1.5  # temperatures of `decay` in a whole training, as in the code of Lu et al.
BETAS = (0.9, 0.98)  # of Adam, as in "Attention is all you need"


def build(recipe: A2Recipe, context: Context) -> Experiment:
    """The data, the captioner, its one or two stages, and a test of the captions it writes."""
    parts = opened(recipe, context)
    model = network(recipe.model, recipe.align, parts.words.size, parts.eye)
    device = processes(context.device).device
    rules = Rules(longest=parts.longest)
    clock = Clock()
    scorer = Scorer(parts.val.references)
    may_record = recipe.train.graph and device.type == "cuda"
    said = recorded(usual(model, rules)) if may_record else usual(model, rules)

    def write(net: Decoder, batch: Batch) -> Texts:
        return said(plain_of(model).encode(batch))[0]

    def validate(net: nn.Module) -> dict[str, float]:
        with clock.stopped():
            found = texts_of(cast(Net, net), parts.val, parts.words, write)
            return {"cider_d": float(scorer(found).mean())}

    monitor = Monitor(validate, "cider_d")
    stages = [_first(recipe, context, parts, model, monitor)]
    if recipe.critic.epochs:
        draw = drawing(model, recipe.critic, rules)
        judging = None
        if may_record:
            draw = recorded(draw)
            judging = recorded_judge(by_comparing(parts.train.texts(), device))
        stages.append(_second(recipe, context, parts, model, monitor, rules, clock, draw, judging))

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluated(model, parts, rules, device)
        return replace(found, clock=clock.marks())

    def example() -> Batch:
        return parts.test.batch(range(min(8, len(parts.test))))

    return Experiment(
        model=model,
        sources=[source(part) for part in (parts.train, parts.val, parts.test)],
        stages=stages,
        evaluate=evaluate,
        example=example,
        spoken=asked(model, parts, example),
        judged=NextWords(parts.test, parts.truth),
        answers=NextWord(model),
    )


def asked(model: Net, parts: Parts, example: Callable[[], Batch]) -> Spoken | Mute | None:
    """How the captioner is asked: with a picture, of which it sees cells or boxes."""
    how = parts.seen
    if not isinstance(how, Sight):
        return how
    return spoken(
        *(model, (), parts.words, example),
        how.sees,
        backbone=how.backbone,
        pixels=how.pixels,
        longest=parts.longest,
    )


def encoded(model: Net, batch: Batch, each: int | None = None) -> Memory:
    """The memory of every sample; a picture with several captions is encoded once.

    With `each`, the captions of every picture, it is the memory of every picture: `write` knows
    what to do with it, and the device is not waited for.
    """
    if each is not None:
        return plain_of(model).encode(every(batch, each))
    pictures, of = one_each(batch)
    return plain_of(model).encode(pictures).select(of)


# --- cross-entropy


def noam(width: int, warmup: int, steps: int) -> Callable[[float], float]:
    """The rate of "Attention is all you need": `d^-1/2 min(s^-1/2, s w^-3/2)` at step s."""

    def factor(fraction: float) -> float:
        step = 1 + round(fraction * steps)
        return width**-0.5 * min(step**-0.5, step * warmup**-1.5)

    return factor


def parameter_sets(model: Net, recipe: A2Recipe, pictures: int) -> dict[str, ParameterSet]:
    """The optimizers of the first stage: of the captioner, and of masks with their own loss."""
    plan = recipe.train
    if recipe.learn.schedule is Schedule.NOAM:
        steps = plan.epochs * math.ceil(math.ceil(pictures / plan.batch) / plan.accumulate)
        goes = noam(
            plain_of(model).sizes.width, recipe.learn.warmup, min(steps, plan.steps or steps)
        )
    else:
        goes = warm_then_cosine(plan.warmup)
    ours = _owned(model)
    found = {
        perturb.CAPTIONER: ParameterSet(
            torch.optim.AdamW(ours[perturb.CAPTIONER], plan.rate, BETAS, weight_decay=plan.decay),
            goes,
            plan.clip,
        )
    }
    if perturb.MASKS in ours:
        adam = torch.optim.Adam(ours[perturb.MASKS], recipe.align.rate)
        found[perturb.MASKS] = ParameterSet(adam, warm_then_cosine(plan.warmup), clip=1.0)
    return found


def _owned(model: Net) -> dict[str, list[nn.Parameter]]:
    if isinstance(model, AlignedCaptioner):
        return model.parameter_sets()
    return {perturb.CAPTIONER: list(model.parameters())}


def next_word_losses(model: Net, batch: Batch, recipe: A2Recipe, each: int | None = None) -> Losses:
    """Eq. 11 with aligned attention, and eq. 4 where masks learn by disturbing.

    With `each`, the captions of every picture, nothing waits for the device: it can be recorded.
    """
    assert batch.tokens is not None and batch.token_mask is not None
    memory, captioner = encoded(model, batch, each), plain_of(model)
    tokens, wanted, rows = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.token_mask[:, 1:]
    read = captioner.read(memory)  # the same in both passes of `align`

    def task() -> supervise.Loss:
        logits = captioner.write(memory, tokens, read=read).logits
        return reward.next_words(logits, wanted, rows, recipe.learn.smoothing)

    if not isinstance(model, AlignedCaptioner):
        return {perturb.CAPTIONER: {"caption": task()}}
    if recipe.align.disturbs:
        asked = rows.reshape(len(memory), -1)  # captions of a picture ask it as one text
        return perturb.align(model, task, recipe.align.penalty, asked).losses
    with model.aligned():
        return {perturb.CAPTIONER: {"caption": task()}}


def _first(recipe: A2Recipe, context: Context, parts: Parts, model: Net, monitor: Monitor) -> Stage:
    sets = parameter_sets(model, recipe, len(parts.train))
    each = parts.train.each

    def before(progress: Progress) -> None:
        if isinstance(model, AlignedCaptioner):
            model.advance(ELAPSED * progress.fraction)

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        return next_word_losses(model, batch, recipe, each)

    def run(resume: bool, reporter: Reporter) -> Fitted | None:
        begun = ground_of(recipe, context)
        if begun is not None:
            take(model, begun)
            return None
        return fit(
            model,
            parts.train,
            step,
            sets,
            limits(recipe.train),
            out=context.out,
            seed=context.seed,
            device=context.device,
            monitor=monitor,
            attention=watching(recipe.train, by_watching),
            before=before,
            resume=resume,
            reporter=reporter,
        )

    return Stage("train", run)


# --- the critic


def critical(
    model: Net,
    batch: Batch,
    judge: Reward,
    critic: Critic,
    rules: Rules,
    write: Write | None = None,
) -> reward.Critique:
    """One step of eq. 12 on the pictures of a batch, with aligned attention throughout.

    With a greedy baseline its caption is written beside those that are drawn. The model should be
    in eval mode: captions are then drawn from the captioner that is used, without dropout. `write`
    is how captions are drawn, by default `drawing`.
    """
    pictures, _ = one_each(batch)
    memory = plain_of(model).encode(pictures)
    write = write or drawing(model, critic, rules)
    alone: list[Texts] = []
    held: list[Tensor] = []

    def draw() -> Texts:
        *before, drawn = write(memory)
        alone.extend(before)
        return drawn

    def worth(drawn: reward.Drawn) -> Tensor:
        *before, rewards = judge([*alone, drawn], pictures)  # in one go: half the time of two
        held.extend(one[:, 0] for one in before)
        return rewards

    def tell(drawn: reward.Drawn) -> Tensor:
        begin = torch.full_like(drawn.tokens[:, :1], rules.begin)
        tokens = torch.cat([begin, drawn.tokens[:, :-1]], dim=1)
        if isinstance(model, AlignedCaptioner):
            with model.aligned():
                logits = model.captioner.write(memory, tokens).logits
        else:
            logits = model.write(memory, tokens).logits
        return reward.log_probabilities(logits, drawn.tokens, rules.never)

    def against(rewards: Tensor) -> Tensor:
        match critic.baseline:
            case Baseline.GREEDY:
                return reward.given(held[0].to(rewards))(rewards)
            case Baseline.OTHERS:
                return reward.mean_of_others(rewards)
            case Baseline.ALL:
                return reward.mean_of_all(rewards)

    return reward.self_critical(draw, worth, tell, against)


def _second(
    recipe: A2Recipe,
    context: Context,
    parts: Parts,
    model: Net,
    monitor: Monitor,
    rules: Rules,
    clock: Clock,
    write: Write,
    judging: Judge | None,
) -> Stage:
    """Self-critical training of the captioner; masks stay as the first stage left them."""
    critic = recipe.critic

    def run(resume: bool, reporter: Reporter) -> Fitted:
        judge = Reward(parts.train, clock, judging)
        optimizer = torch.optim.Adam(_owned(model)[perturb.CAPTIONER], critic.rate)

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            net.eval()
            if isinstance(model, AlignedCaptioner):
                model.advance(ELAPSED)
            clock.step()
            found = critical(model, batch, judge, critic, rules, write)
            return {perturb.CAPTIONER: {"critic": found.loss, **_watched(found)}}

        plan = replace(
            recipe.train,
            epochs=critic.epochs,
            steps=critic.steps,
            batch=critic.batch,
            accumulate=1,
            patience=critic.epochs,
            graph=False,  # captions are judged in Python, in the middle of a step
        )
        return fit(
            model,
            parts.train,
            step,
            {perturb.CAPTIONER: ParameterSet(optimizer, clip=recipe.train.clip)},
            limits(plan),
            out=context.out,
            seed=context.seed,
            stage="critic",
            device=context.device,
            monitor=monitor,
            attention=watching(recipe.train, by_watching),
            resume=resume,
            reporter=reporter,
        )

    return Stage("critic", run)


def _watched(found: reward.Critique) -> dict[str, supervise.Loss]:
    """What to watch of a self-critical step, as losses without weight, so that the log has them."""
    one = found.loss.total.new_ones(())
    numbers = {
        "reward": found.reward,
        "best": found.best,
        "baseline": found.baseline,
        "spread": found.spread,
        "idle": found.idle,
        "length": found.length,
    }
    return {name: supervise.Loss(one * value, one) for name, value in numbers.items()}
