"""Build the experiment of a small vision-language model on scenes, with fewer image tokens."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt import losses
from overt.capture import generate, watch
from overt.data.batch import Batch
from overt.errors import UserError
from overt.experiments import settings, warm_start
from overt.experiments.builders import adamw, dataset_info, fit_stage
from overt.experiments.dataset_views import example_of, open_scenes
from overt.experiments.encoder_pretraining import STAGE as ENCODER_STAGE
from overt.experiments.encoder_pretraining import pretrain_encoder
from overt.experiments.evaluate import Evaluator, labels_of, mean_with_interval
from overt.experiments.experiment import Evaluation, Experiment, MetricValue, Stage
from overt.experiments.inference_spec import describe_inputs
from overt.experiments.recipe import RunContext, scale_width
from overt.experiments.vision_language_recipes import (
    BoxTarget,
    ImageTokenPruning,
    PruningRule,
    VisionLanguageRecipe,
)
from overt.metrics.generation_signals import stream_signals
from overt.metrics.linear_detector import area_under_roc, compare_detectors
from overt.metrics.metric import MetricInfo, declare_metric
from overt.nn import by_grid, by_random, keep_above_uniform, keep_share, keep_top
from overt.nn.output import Output
from overt.nn.token_pruning.image_token_scores import by_centre, by_image_encoder
from overt.nn.token_pruning.pruned_decoder import (
    PrunedDecoder,
    merge_image_tokens,
    prune_image_tokens,
    zip_image_tokens,
)
from overt.nn.vqa.vision_language import Prompts, VisionLanguageSizes, VisionLanguageVQA
from overt.train import FitResult, Losses, Monitor, Progress, Reporter, processes

FIRST = "first"  # name of the folder that a run starts from
FOLDS = 5
BOOTSTRAP = 200  # resamples of the interval of an area under the ROC curve
REPEATS, NEW_TOKENS = 10, 8  # of a measurement of latency
MERGE_STEPS = 3  # a step merges at most half of the tokens


def build_vision_language(recipe: VisionLanguageRecipe, context: RunContext) -> Experiment:
    """Build the training and the evaluation of a recipe."""
    train, validation, test = open_scenes(recipe.data)
    plan = recipe.model
    width = -(-scale_width(128, plan.width) // (2 * plan.heads)) * 2 * plan.heads
    model = VisionLanguageVQA(
        VisionLanguageSizes(
            words=train.vocabulary.words,
            answers=train.answers,
            side=recipe.data.size,
            width=width,
            vision_layers=plan.vision_layers,
            layers=plan.layers,
            heads=plan.heads,
        )
    )
    _check(recipe)
    try:
        make_pruned(model, recipe.prune, context.seed)
    except ValueError as error:  # before training: the decoder lacks the layer
        raise UserError(f"prune.layer={recipe.prune.layer}: {error}") from error
    device = processes(context.device).device

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        return {"model": training_losses(model, batch, recipe)}

    def accuracy(net: nn.Module) -> dict[str, float]:
        model.maps = False
        return {"accuracy": validation.accuracy(model, device)}

    def pretrain(resume: bool, reporter: Reporter) -> FitResult | None:
        if recipe.pretrain.epochs == 0 or find_trained(recipe, context) is not None:
            return None
        return pretrain_encoder(model, train, recipe, context, resume, reporter)

    def run(resume: bool, reporter: Reporter) -> FitResult | None:
        begun = find_trained(recipe, context)
        if begun is not None:
            warm_start.load_weights(model, begun)
            return None
        sets = {"model": adamw(model, recipe.train)}
        monitor = Monitor(accuracy, "accuracy")
        return fit_stage(
            model, train, step, sets, recipe.train, context, resume, reporter, monitor=monitor
        )

    def evaluate(reporter: Reporter) -> Evaluation:
        found = evaluate_pruned(model, test, recipe.prune, context.seed, device)
        model.maps = False  # for counting operations
        return found

    example = example_of(test.data)
    return Experiment(
        model=model,
        sources=[dataset_info(data) for data in (train, validation.data, test.data)],
        stages=[Stage(ENCODER_STAGE, pretrain), Stage("train", run)],
        evaluate=evaluate,
        example=example,
        inference_spec=describe_inputs(model, test.classes, train.vocabulary, example),
        test_data=test.data,
    )


def _check(recipe: VisionLanguageRecipe) -> None:
    if not 0 < recipe.prune.share <= 1:
        raise UserError(f"prune.share must be above 0 and at most 1, got {recipe.prune.share}")
    last = recipe.model.layers - 1
    first = recipe.supervise.first_layer
    if recipe.supervise.target is not BoxTarget.NOTHING and not 0 <= first <= last:
        raise UserError(f"supervise.first_layer must be 0 to {last}, got {first}")
    if recipe.supervise.target is BoxTarget.SWAPPED and recipe.train.batch < 2:
        raise UserError("supervise.target=swapped needs train.batch=2 or more scenes")


# --- training


def training_losses(
    model: VisionLanguageVQA, batch: Batch, recipe: VisionLanguageRecipe
) -> dict[str, losses.Loss]:
    """Compute the loss of the answers, and that of supervised attention if there is one."""
    prompts, labels = model.encode(batch), labels_of(batch)
    plan = recipe.supervise
    if plan.target is BoxTarget.NOTHING:
        return {"task": model.answer_loss(prompts, labels)}
    target = batch.target
    assert target is not None
    if plan.target is BoxTarget.SWAPPED:  # all questions of a scene get those of the one before
        asked = len(batch) // max(1, int(batch.image_index.max()) + 1)
        target = target.select(torch.arange(len(batch), device=labels.device).roll(asked))
    layout = model.layout(prompts.input_ids.shape[1] + 2, prompts.geometry)
    layers = range(plan.first_layer, recipe.model.layers)
    with watch(model.vlm.model.language_model, layers=[*layers], layout=layout) as trace:
        task = model.answer_loss(prompts, labels)
    attention = trace.log_block(prompts.last[:, None], "image")
    return {"task": task, "attention": plan.weight * losses.cross_entropy(attention, target)}


def find_trained(recipe: VisionLanguageRecipe, context: RunContext) -> Path | None:
    """Return the model of a finished row that differs in pruning only; None to train one."""
    if recipe.prune.rule is PruningRule.NONE:
        return None
    ours = settings.to_json(recipe)

    def find() -> Path | None:
        for run in warm_start.finished_siblings(context):
            theirs = settings.fill_defaults(run.results["settings"], recipe)
            if (
                run.results["recipe"] == recipe.name
                and theirs["prune.rule"] == PruningRule.NONE.value
                and warm_start.same_settings(theirs, ours, lambda key: key[:6] != "prune.")
            ):
                return run.folder / "model"
        return None

    return warm_start.recorded_folders(context, lambda: {FIRST: find()}).get(FIRST)


# --- rules


def make_pruned(
    model: VisionLanguageVQA, plan: ImageTokenPruning, seed: int
) -> PrunedDecoder | None:
    """Return the model with fewer image tokens that the settings describe; None without a rule."""
    vlm, cells = model.vlm, model.cells
    at, share = (plan.layer,), partial(keep_share, share=plan.share)
    match plan.rule:
        case PruningRule.NONE:
            return None
        case PruningRule.LAST_QUERY:
            return prune_image_tokens(vlm, at, share)
        case PruningRule.PYRAMID:
            half = partial(keep_share, share=plan.share**0.5)
            return prune_image_tokens(vlm, (plan.layer, plan.layer + 2), half)
        case PruningRule.ADAPTIVE:
            return prune_image_tokens(vlm, at, keep_above_uniform)
        case PruningRule.IMAGE_ENCODER:
            return prune_image_tokens(vlm, (0,), share, by_image_encoder, vision_layer=-1)
        case PruningRule.ZIP:
            count = max(2, round(plan.share * cells))
            context = max(1, count // 4)
            keep = partial(keep_top, count=count - context)
            return zip_image_tokens(vlm, (0,), keep, by_image_encoder, context, vision_layer=-1)
        case PruningRule.MERGE:
            steps = range(plan.layer, plan.layer + MERGE_STEPS)
            return merge_image_tokens(vlm, steps, round((1 - plan.share) * cells / MERGE_STEPS))
        case PruningRule.RANDOM:
            score = by_random(torch.Generator().manual_seed(seed))
        case PruningRule.GRID:
            score = by_grid
        case PruningRule.CENTRE:
            score = by_centre
    return prune_image_tokens(vlm, at, share, score, capture=False)


# --- evaluation


@declare_metric("evidence kept", "share", higher_is_better=True, low=0.0, high=1.0)
def evidence_kept(kept: Float[Tensor, "b k"], target: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    """Compute the share of the evidence on image tokens that reach the last layer."""
    whole = target.sum(dim=-1)
    return torch.where(whole > 0, (kept * target).sum(dim=-1) / whole, torch.nan)


def evaluate_pruned(
    model: VisionLanguageVQA,
    test: Evaluator,
    plan: ImageTokenPruning,
    seed: int,
    device: torch.device,
) -> Evaluation:
    """Test a model with fewer image tokens: answers, evidence kept, latency and memory.

    Of the unpruned model attention and the signals of wrong answers are evaluated as well.
    """
    pruned = make_pruned(model, plan, seed)
    model.maps = pruned is None
    within: AbstractContextManager[object] = nullcontext() if pruned is None else pruned

    def last_map(output: Output, batch: Batch) -> Tensor:
        assert pruned is not None and batch.target is not None
        cells = pruned.kept.block("global", "image").values[:, -1, 0, 0]
        return evidence_kept(cells, batch.target.weights[:, 0, 0, 0])

    def last_length(output: Output, batch: Batch) -> Tensor:
        assert pruned is not None
        text = pruned.steps[0].slots.shape[1] - model.cells
        padded = text - batch.token_mask.sum(dim=1) - 2  # type: ignore[union-attr]
        return (pruned.steps[-1].count - text + padded).float()

    own: dict[str, Callable[[Output, Batch], Tensor]] = {}
    if pruned is not None:
        last_map.info = evidence_kept.info  # type: ignore[attr-defined]
        last_length.info = MetricInfo("image tokens", "tokens", None, 0.0)  # type: ignore[attr-defined]
        own = {"evidence_kept": last_map, "image_tokens": last_length}
    with within:
        found = replace(test, metrics=own).evaluate(model, device)
        measured = measure_latency(
            model, next(test.first_batches(16, device)), str(test.data.split)
        )
    ours = {**found.ours, **measured}
    if pruned is None:
        ours |= detect_wrong_answers(model, test, found, device)
    return replace(found, ours=ours)


def measure_latency(model: VisionLanguageVQA, batch: Batch, split: str) -> dict[str, MetricValue]:
    """Measure the seconds of reading prompts and of writing a token, and the bytes of the cache."""
    given = pad_left(model, model.encode(batch)).as_kwargs()

    def seconds(tokens: int) -> tuple[float, int]:
        _synchronize(batch)
        start = time.perf_counter()
        output = model.vlm.generate(
            **given,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        _synchronize(batch)
        layers = output.past_key_values.layers
        size = sum(one.keys.nbytes + one.values.nbytes for one in layers)
        return time.perf_counter() - start, size

    seconds(1 + NEW_TOKENS)  # warms up
    prefill, decode, sizes = [], [], []
    for _ in range(REPEATS):
        first, size = seconds(1)
        prefill.append(1000 * first)
        sizes.append(size / len(batch))
        decode.append(1000 * (seconds(1 + NEW_TOKENS)[0] - first) / NEW_TOKENS)
    return {
        name: mean_with_interval(MetricInfo(name, unit, False), np.array(values), split)
        for name, unit, values in (
            ("prefill", "ms", prefill),
            ("decode", "ms", decode),
            ("cache", "bytes", sizes),
        )
    }


def _synchronize(batch: Batch) -> None:
    if batch.images is not None and batch.images.is_cuda:
        torch.cuda.synchronize()


def pad_left(model: VisionLanguageVQA, prompts: Prompts) -> Prompts:
    """Return prompts with their padding on the left, as `generate` needs it."""
    n = prompts.input_ids.shape[1]
    at = torch.arange(n, device=prompts.last.device) - (n - 1 - prompts.last)[:, None]
    ids, there = (one.gather(1, at % n) for one in (prompts.input_ids, prompts.attention_mask))
    return replace(
        prompts, input_ids=ids, attention_mask=there, last=torch.full_like(prompts.last, n - 1)
    )


def detect_wrong_answers(
    model: VisionLanguageVQA, test: Evaluator, found: Evaluation, device: torch.device
) -> dict[str, MetricValue]:
    """Predict wrong answers from attention, beside the length of the question and the confidence.

    The areas under the ROC curve have percentile intervals from resampled answers. There are none
    if a kind of answer is rarer than the folds.
    """
    features, lengths = [], []
    for batch in test.batches(device):
        prompts = pad_left(model, model.encode(batch))
        n = prompts.input_ids.shape[1]
        image = torch.nn.functional.pad(prompts.input_ids == model.image_id, (0, 1))
        context = torch.nn.functional.pad(prompts.attention_mask.bool(), (0, 1))
        written = generate(
            model.vlm,
            keys=slice(0, n + 1),
            reduce=stream_signals(image, context),
            **prompts.as_kwargs(),
            max_new_tokens=1,
            do_sample=False,
        )
        # of the answer's row: image share and entropy, in each layer; the others follow from them
        signals = written.attention.weights.mean(dim=2)[:, :, 0]
        features.append(signals[..., [0, 2]].flatten(1).cpu())
        lengths.append(prompts.attention_mask.sum(dim=1).float().cpu())
    wrong = torch.from_numpy(found.samples["accuracy"]) < 0.5
    if int(min(wrong.sum(), (~wrong).sum())) < FOLDS:
        return {}
    compared = compare_detectors(torch.cat(features), torch.cat(lengths), wrong, FOLDS)
    scores = {
        "signals": compared.signals,
        "length": compared.length,
        "both": compared.both,
        "confidence": -torch.from_numpy(found.samples["confidence"]),
    }
    split, draw = str(test.data.split), torch.Generator().manual_seed(0)
    rows = [torch.randint(len(wrong), (len(wrong),), generator=draw) for _ in range(BOOTSTRAP)]
    made = {}
    for name, score in scores.items():
        again = [area_under_roc(score[row], wrong[row]) for row in rows]
        low, high = np.nanquantile(again, [0.025, 0.975]).tolist()
        area = area_under_roc(score, wrong)
        made[f"wrong_by_{name}"] = MetricValue(
            area, "area under ROC", "higher", split, len(wrong), low, high
        )
    return made
