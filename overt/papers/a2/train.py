"""Attention-Aligned Transformer: cross-entropy training, then the self-critical stage."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from overt import losses
from overt.data.batch import Batch
from overt.experiments.builders import dataset_info, fit_stage
from overt.experiments.dataset_views import example_of
from overt.experiments.experiment import Evaluation, Experiment, Stage
from overt.experiments.inference_spec import InferenceSpec, NotInteractive, make_spec
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import load_weights
from overt.losses import caption_reward
from overt.nn import mask_perturbation
from overt.nn.captioning.captioner import Memory
from overt.nn.captioning.decoding import DecodingRules, GeneratedTexts
from overt.nn.output import Decoder
from overt.papers.a2.config import A2Baseline, A2Critic, A2Recipe, A2Schedule
from overt.papers.a2.data import A2Data, CaptionerInput, every_nth_image, load_data, unique_images
from overt.papers.a2.evaluate import CiderScorer, caption_texts, evaluate_captioner
from overt.papers.a2.model import AlignedCaptioner, CaptionerNet, build_captioner, inner_captioner
from overt.papers.a2.next_word import NextWordClassifier, NextWordDataset
from overt.papers.a2.reward import CiderReward, RewardTimer, ScoreFn, gpu_scorer, graphed_scorer
from overt.papers.a2.sampling import (
    CaptionSampler,
    graphed_sampler,
    greedy_sampler,
    training_sampler,
)
from overt.papers.a2.warm_start import find_warm_start
from overt.train import (
    FitResult,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    processes,
    warmup_cosine,
)
from overt.train.monitor import capture_by_watch

FINAL_TEMPERATURE = 1.5  # of `decay` after training, as in the code of Lu et al.
BETAS = (0.9, 0.98)  # of Adam in "Attention is all you need"


def build(recipe: A2Recipe, context: RunContext) -> Experiment:
    """Return the data, the captioner, its one or two training stages, and the evaluation."""
    parts = load_data(recipe, context)
    model = build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder)
    device = processes(context.device).device
    rules = DecodingRules(max_length=parts.longest)
    timer = RewardTimer()
    val_scorer = CiderScorer(parts.val.references)
    use_graph = recipe.train.graph and device.type == "cuda"
    sampler = (
        graphed_sampler(greedy_sampler(model, rules)) if use_graph else greedy_sampler(model, rules)
    )

    def write(net: Decoder, batch: Batch) -> GeneratedTexts:
        return sampler(inner_captioner(model).encode(batch))[0]

    def validate(net: nn.Module) -> dict[str, float]:
        with timer.paused():
            found = caption_texts(cast(CaptionerNet, net), parts.val, parts.words, write)
            return {"cider_d": float(val_scorer(found).mean())}

    monitor = Monitor(validate, "cider_d")
    stages = [_cross_entropy_stage(recipe, context, parts, model, monitor)]
    if recipe.critic.epochs:
        draw = training_sampler(model, recipe.critic, rules)
        scorer = None
        if use_graph:
            draw = graphed_sampler(draw)
            scorer = graphed_scorer(gpu_scorer(parts.train.texts(), device))
        stages.append(
            _self_critical_stage(recipe, context, parts, model, monitor, rules, timer, draw, scorer)
        )

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluate_captioner(model, parts, rules, device)
        return replace(found, clock=timer.summary())

    example = example_of(parts.test)
    return Experiment(
        model=model,
        sources=[dataset_info(part) for part in (parts.train, parts.val, parts.test)],
        stages=stages,
        evaluate=evaluate,
        example=example,
        inference_spec=inference_spec_of(model, parts, example),
        test_data=NextWordDataset(parts.test, parts.truth),
        evaluated_model=NextWordClassifier(model),
    )


def inference_spec_of(
    model: CaptionerNet, parts: A2Data, example: Callable[[], Batch]
) -> InferenceSpec | NotInteractive | None:
    """Return how the captioner is used interactively: an image, encoded as cells or boxes."""
    inputs = parts.image_input
    if not isinstance(inputs, CaptionerInput):
        return inputs
    return make_spec(
        *(model, (), parts.words, example),
        inputs.kind,
        backbone=inputs.backbone,
        pixels=inputs.pixels,
        longest=parts.longest,
    )


def encode_images(model: CaptionerNet, batch: Batch, each: int | None = None) -> Memory:
    """Return the memory of every sample; an image with several captions is encoded once.

    With `each`, the number of captions per image, return the memory of every image instead. The
    captioner repeats it itself, and the device is not synchronized.
    """
    if each is not None:
        return inner_captioner(model).encode(every_nth_image(batch, each))
    pictures, of = unique_images(batch)
    return inner_captioner(model).encode(pictures).select(of)


# --- cross-entropy


def noam_schedule(width: int, warmup: int, steps: int) -> Callable[[float], float]:
    """Return the factor `d^-1/2 min(s^-1/2, s w^-3/2)` of "Attention is all you need"."""

    def factor(fraction: float) -> float:
        step = 1 + round(fraction * steps)
        return width**-0.5 * min(step**-0.5, step * warmup**-1.5)

    return factor


def parameter_sets(model: CaptionerNet, recipe: A2Recipe, pictures: int) -> dict[str, ParameterSet]:
    """Return the optimizers of the first stage: captioner, and masks with their own loss."""
    plan = recipe.train
    if recipe.learn.schedule is A2Schedule.NOAM:
        steps = plan.epochs * math.ceil(math.ceil(pictures / plan.batch) / plan.accumulate)
        goes = noam_schedule(
            inner_captioner(model).sizes.width, recipe.learn.warmup, min(steps, plan.steps or steps)
        )
    else:
        goes = warmup_cosine(plan.warmup)
    ours = _parameters_by_set(model)
    found = {
        mask_perturbation.CAPTIONER: ParameterSet(
            torch.optim.AdamW(
                ours[mask_perturbation.CAPTIONER], plan.rate, BETAS, weight_decay=plan.decay
            ),
            goes,
            plan.clip,
        )
    }
    if mask_perturbation.MASKS in ours:
        # Masks learn from a loss of their own, so they get their own optimizer and a tight clip.
        adam = torch.optim.Adam(ours[mask_perturbation.MASKS], recipe.align.rate)
        found[mask_perturbation.MASKS] = ParameterSet(adam, warmup_cosine(plan.warmup), clip=1.0)
    return found


def _parameters_by_set(model: CaptionerNet) -> dict[str, list[nn.Parameter]]:
    if isinstance(model, AlignedCaptioner):
        return model.parameter_sets()
    return {mask_perturbation.CAPTIONER: list(model.parameters())}


def next_word_losses(
    model: CaptionerNet, batch: Batch, recipe: A2Recipe, each: int | None = None
) -> Losses:
    """Compute eq. 11 with aligned attention, and eq. 4 where masks learn by perturbation.

    With `each`, the number of captions per image, nothing synchronizes the device, so that the
    step can be captured in a CUDA graph.
    """
    assert batch.tokens is not None and batch.token_mask is not None
    memory, captioner = encode_images(model, batch, each), inner_captioner(model)
    tokens, wanted, rows = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.token_mask[:, 1:]
    read = captioner.project_memory(memory)  # the same in both passes of `align`

    def task() -> losses.Loss:
        logits = captioner.decode_captions(memory, tokens, projected=read).logits
        return caption_reward.next_token_cross_entropy(logits, wanted, rows, recipe.learn.smoothing)

    if not isinstance(model, AlignedCaptioner):
        return {mask_perturbation.CAPTIONER: {"caption": task()}}
    if recipe.align.perturbs:
        queries = rows.reshape(len(memory), -1)  # captions of one image query it as one text
        found = mask_perturbation.align(
            model, task, recipe.align.penalty, queries, mask_perturbation.restricted_by_fit
        )
        return found.losses
    with model.aligned():
        return {mask_perturbation.CAPTIONER: {"caption": task()}}


def _cross_entropy_stage(
    recipe: A2Recipe, context: RunContext, parts: A2Data, model: CaptionerNet, monitor: Monitor
) -> Stage:
    sets = parameter_sets(model, recipe, len(parts.train))
    each = parts.train.each

    def before(progress: Progress) -> None:
        if isinstance(model, AlignedCaptioner):
            # The weight of plain attention is e^(-s / TP): with TP = steps / 1.5 it ends at e^-1.5.
            model.advance(FINAL_TEMPERATURE * progress.fraction)

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        return next_word_losses(model, batch, recipe, each)

    def run(resume: bool, reporter: Reporter) -> FitResult | None:
        begun = find_warm_start(recipe, context)
        if begun is not None:
            load_weights(model, begun)
            return None
        return fit_stage(
            *(model, parts.train, step, sets, recipe.train, context, resume, reporter),
            monitor=monitor,
            capture=capture_by_watch,
            before_step=before,
        )

    return Stage("train", run)


# --- self-critical training


def self_critical_step(
    model: CaptionerNet,
    batch: Batch,
    reward: CiderReward,
    critic: A2Critic,
    rules: DecodingRules,
    write: CaptionSampler | None = None,
) -> caption_reward.SelfCriticalStep:
    """Compute the loss of eq. 12 on the images of a batch, with aligned attention throughout.

    With a greedy baseline its caption is generated beside the sampled ones. The model should be
    in eval mode, so that captions are sampled without dropout. `write` samples the captions, by
    default `training_sampler`.
    """
    pictures, _ = unique_images(batch)
    memory = inner_captioner(model).encode(pictures)
    write = write or training_sampler(model, critic, rules)
    alone: list[GeneratedTexts] = []
    # The parts of a self-critical step: sample, score, log-probabilities, baseline.
    held: list[Tensor] = []

    def draw() -> GeneratedTexts:
        *before, drawn = write(memory)
        alone.extend(before)
        return drawn

    def worth(drawn: caption_reward.SampledCaptions) -> Tensor:
        *before, rewards = reward([*alone, drawn], pictures)  # one call takes half the time of two
        held.extend(one[:, 0] for one in before)
        return rewards

    def tell(drawn: caption_reward.SampledCaptions) -> Tensor:
        # Shift right: each token is predicted from those before it.
        begin = torch.full_like(drawn.tokens[:, :1], rules.begin)
        tokens = torch.cat([begin, drawn.tokens[:, :-1]], dim=1)
        if isinstance(model, AlignedCaptioner):
            with model.aligned():
                logits = model.captioner.decode_captions(memory, tokens).logits
        else:
            logits = model.decode_captions(memory, tokens).logits
        # Without the tokens that the sampler may not choose, this is the distribution it drew from.
        return caption_reward.log_probabilities(logits, drawn.tokens, rules.forbidden)

    def against(rewards: Tensor) -> Tensor:
        match critic.baseline:
            case A2Baseline.GREEDY:
                return caption_reward.constant_baseline(held[0].to(rewards))(rewards)
            case A2Baseline.OTHERS:
                return caption_reward.leave_one_out_baseline(rewards)
            case A2Baseline.ALL:
                return caption_reward.mean_baseline(rewards)

    return caption_reward.self_critical(draw, worth, tell, against)


def _self_critical_stage(
    recipe: A2Recipe,
    context: RunContext,
    parts: A2Data,
    model: CaptionerNet,
    monitor: Monitor,
    rules: DecodingRules,
    timer: RewardTimer,
    write: CaptionSampler,
    scorer: ScoreFn | None,
) -> Stage:
    """Train the captioner by reward; masks stay fixed after the first stage."""
    critic = recipe.critic

    def run(resume: bool, reporter: Reporter) -> FitResult:
        reward = CiderReward(parts.train, timer, scorer)
        optimizer = torch.optim.Adam(
            _parameters_by_set(model)[mask_perturbation.CAPTIONER], critic.rate
        )

        def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
            net.eval()
            if isinstance(model, AlignedCaptioner):
                model.advance(FINAL_TEMPERATURE)
            timer.step()
            found = self_critical_step(model, batch, reward, critic, rules, write)
            return {mask_perturbation.CAPTIONER: {"critic": found.loss, **_logged_values(found)}}

        plan = replace(
            recipe.train,
            epochs=critic.epochs,
            steps=critic.steps,
            batch=critic.batch,
            accumulate=1,
            patience=critic.epochs,
            graph=False,  # the reward runs in Python, in the middle of a step
        )
        sets = {mask_perturbation.CAPTIONER: ParameterSet(optimizer, clip=recipe.train.clip)}
        return fit_stage(
            *(model, parts.train, step, sets, plan, context, resume, reporter),
            stage="critic",
            monitor=monitor,
            capture=capture_by_watch,
        )

    return Stage("critic", run)


def _logged_values(found: caption_reward.SelfCriticalStep) -> dict[str, losses.Loss]:
    """Return values of a self-critical step as losses without weight, for the log."""
    one = found.loss.total.new_ones(())
    numbers = {
        "reward": found.reward,
        "best": found.best,
        "baseline": found.baseline,
        "spread": found.spread,
        "idle": found.idle,
        "length": found.length,
    }
    return {name: losses.Loss(one * value, one) for name, value in numbers.items()}
