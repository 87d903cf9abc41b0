"""Faithfulness metrics on models with a known reason: the map of the reason must rank first.

Three maps are evaluated with the same metric on the same samples: one with most of its weight on
the decisive key, one that has it for half of the samples, and a random one. Means over samples must
be in that order, in the direction that the metric declares.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from overt import metrics
from overt.attention import AttentionMap, Kind, grid, words
from overt.capture.call import Call, MaterializedCall, Route
from overt.geometry import PixelGeometry
from overt.metrics import (
    blur_fill,
    feature_removal,
    linear_imputation,
    mean_fill,
    pixel_removal,
    random_map,
    token_removal,
)
from overt.metrics.deletion_curves import flip_share
from overt.metrics.faithfulness import deletion, flips, insertion
from overt.metrics.interventions import adversarial_distance, beyond_random_weights, weights_to_flip
from overt.metrics.roar import RetrainedModel, recursive_roar, roar
from overt.metrics.sensitivity import sensitivity_mean
from overt.metrics.top_cells import top_cells
from overt.testing import PlantedCell, PlantedWord, toy_batch

SAMPLES, CELL, WORD = 32, 5, 3


def make_maps(deciding: torch.Tensor, layout, mask: torch.Tensor | None = None):
    """Make a truthful map, a half truthful one and a random one, from the decisive keys."""
    generator = torch.Generator().manual_seed(7)
    count = deciding.shape[1]
    noise = torch.rand(SAMPLES, count, generator=generator)
    even = AttentionMap.from_cells(torch.ones(SAMPLES, count), layout, mask)
    # the map is truthful for half of the samples, and almost uniform noise for the others
    truthful = (torch.arange(SAMPLES) % 2 == 0)[:, None]
    truth = AttentionMap.from_cells(0.05 * noise + deciding, layout, mask).normalize()
    half = AttentionMap.from_cells(0.05 * noise + deciding * truthful, layout, mask).normalize()
    return truth, half, random_map(even, generator)


def assert_order(function, numbers):
    """Assert that the truthful map is best and the random one last, in the declared direction."""
    sign = 1 if function.info.higher_is_better else -1
    means = [sign * metrics.mean(one) for one in numbers]
    assert means[0] > means[1] > means[2], f"{function.info.name}: {means}"


# --- removal: masks of features, and three baselines in pixels and in features


@pytest.fixture(scope="module")
def picture():
    generator = torch.Generator().manual_seed(1)
    cells = torch.randn(SAMPLES, 3, 4, 4, generator=generator)
    images = cells.repeat_interleave(2, 2).repeat_interleave(2, 3)
    batch = replace(
        toy_batch(SAMPLES),
        images=images,
        image_of=torch.arange(SAMPLES),
        geometry=PixelGeometry.identity(SAMPLES, (8, 8)),
    )
    model = PlantedCell(gain=6.0).eval()
    with torch.no_grad():
        features = model.encode(batch)
    deciding = torch.zeros(SAMPLES, 16)
    deciding[:, CELL] = 1
    return model, batch, features, make_maps(deciding, grid(4, 4))


def make_removals(picture):
    model, batch, features, _ = picture
    generator = torch.Generator().manual_seed(2)
    rough = partial(linear_imputation, generator=generator)

    def on_images(images):
        return model(replace(batch, images=images)).prediction

    def on_features(values):
        return model.decide(replace(features, values=values)).prediction

    pixels, cells = partial(pixel_removal, on_images, batch.images), features.values
    removals = {"masks": lambda keep: model.decide(features, {"image": keep}).prediction}
    fills = {"mean": mean_fill, "blurred": blur_fill, "imputed": rough}
    for name, fill in fills.items():
        removals[f"{name} pixels"] = pixels((4, 4), fill=fill)
        removals[f"{name} features"] = feature_removal(on_features, cells, (4, 4), fill)
    return removals


REMOVALS = ["masks"] + [
    f"{fill} {place}" for fill in ("mean", "blurred", "imputed") for place in ("pixels", "features")
]


def with_top_cell(function):
    """Apply a metric of cells to the cell with the largest weight."""
    metric = lambda decide, attention, generator: function(  # noqa: E731
        decide, top_cells(attention, generator, 1)
    )
    return metric, function


def with_map(function, **more):
    return partial(function, **more), function


REMOVAL_METRICS = [
    with_top_cell(deletion),
    with_top_cell(insertion),
    with_top_cell(flips),
    with_map(metrics.deletion_area),
    with_map(metrics.insertion_area),
    with_map(metrics.aopc),
    with_map(metrics.comprehensiveness),
    with_map(metrics.sufficiency),
    with_map(flip_share),
    with_map(metrics.infidelity, draws=12),
]
KEY_METRICS = [metrics.leave_one_out_agreement, metrics.gradient_agreement]


@pytest.mark.parametrize("way", REMOVALS)
@pytest.mark.parametrize("metric", REMOVAL_METRICS, ids=lambda one: one[1].__name__)
def test_removal_metrics_rank_the_truthful_map_first(picture, metric, way):
    compute, function = metric
    decide, maps = make_removals(picture)[way], picture[3]
    numbers = [compute(decide, one, torch.Generator().manual_seed(3)) for one in maps]
    assert_order(function, numbers)


@pytest.mark.parametrize("way", ["masks", "mean pixels", "blurred pixels", "mean features"])
@pytest.mark.parametrize("function", KEY_METRICS, ids=lambda one: one.__name__)
def test_key_metrics_rank_the_truthful_map_first(picture, function, way):
    decide, maps = make_removals(picture)[way], picture[3]
    assert_order(function, [function(decide, one) for one in maps])


# --- words


@pytest.fixture(scope="module")
def text():
    """Make texts with the planted word once, at a random position."""
    generator = torch.Generator().manual_seed(4)
    batch = toy_batch(SAMPLES)
    tokens = torch.where(batch.token_mask & (batch.tokens == WORD), WORD + 1, batch.tokens)
    lengths = batch.token_mask.sum(dim=-1)
    place = (torch.rand(SAMPLES, generator=generator) * lengths).long()
    tokens = tokens.scatter(1, place[:, None], WORD)
    batch = replace(batch, tokens=tokens)
    deciding = torch.nn.functional.one_hot(place, tokens.shape[1]).float()
    maps = make_maps(deciding, words(tokens.shape[1]), batch.token_mask)
    return PlantedWord(WORD).eval(), batch, maps


@pytest.mark.parametrize("metric", REMOVAL_METRICS, ids=lambda one: one[1].__name__)
def test_removal_metrics_of_words_rank_the_truthful_map_first(text, metric):
    compute, function = metric
    model, batch, maps = text
    features = model.encode(batch)

    def on_tokens(tokens):
        return model(replace(batch, tokens=tokens)).prediction

    def masked(keep):
        return model.decide(features, {"text": keep}).prediction

    for decide in (masked, token_removal(on_tokens, batch.tokens, blank=9)):
        numbers = [compute(decide, one, torch.Generator().manual_seed(3)) for one in maps]
        assert_order(function, numbers)


@pytest.mark.parametrize("function", KEY_METRICS, ids=lambda one: one.__name__)
def test_key_metrics_of_words_rank_the_truthful_map_first(text, function):
    model, batch, maps = text
    features = model.encode(batch)
    decide = lambda keep: model.decide(features, {"text": keep}).prediction  # noqa: E731
    assert_order(function, [function(decide, one) for one in maps])


# --- attention in use: the prediction is a weighted mean, and only one key is informative


def make_pooling_model(picture):
    """Make a model that pools the planted values with attention."""
    features = picture[2].values[..., 0].clone()
    features[:, [at for at in range(16) if at != CELL]] = 0

    def respond(weights):
        score = 8 * (weights * features.to(weights)).sum(dim=-1)
        return torch.stack([-score, score], dim=-1)

    return respond


def make_edit_runner(attention: AttentionMap, respond):
    weights = attention.weights[:, 0]

    def run(edit):
        source = MaterializedCall(weights, Kind.PROBABILITY, weights.log())
        call = Call("planted", nn.Identity(), source, Route.SOFTMAX, False)
        used = weights if edit is None else edit(call, weights)
        return respond(used[:, 0, 0])

    return run


def test_edit_metrics_rank_the_truthful_map_first(picture):
    respond, maps = make_pooling_model(picture), picture[3]
    runs = [make_edit_runner(one, respond) for one in maps]
    assert_order(
        beyond_random_weights,
        [beyond_random_weights(run, torch.Generator().manual_seed(0)) for run in runs],
    )
    assert_order(weights_to_flip, [weights_to_flip(run) for run in runs])


def test_adversarial_distance_ranks_the_truthful_map_first(picture):
    respond, maps = make_pooling_model(picture), picture[3]
    found = [
        adversarial_distance(respond, one, torch.Generator().manual_seed(0), steps=40)
        for one in maps
    ]
    assert_order(adversarial_distance, found)


def test_retraining_metrics_rank_the_truthful_map_first(picture):
    maps = picture[3]

    def retrain(attention, train, test):
        """Return a model that is right only where the decisive cell is left."""
        return RetrainedModel(torch.where(test[:, CELL], 1.0, 0.5), attention, attention)

    for remove in (roar, recursive_roar):
        found = []
        for one in maps:
            again = partial(retrain, one)
            full = again(*[torch.ones(SAMPLES, 16, dtype=torch.bool)] * 2)
            generator = torch.Generator().manual_seed(0)
            found.append(metrics.roar_faithfulness(full, again, generator, remove=remove))
        assert_order(metrics.roar_faithfulness, found)


# --- recomputed maps: for slightly changed inputs, and for randomized models


def test_sensitivity_metrics_rank_the_truthful_map_first(picture):
    """The reason does not change with a little noise, so a map of it should not either."""
    _, batch, _, (truth, _, _) = picture

    def make_attend(share, generator):
        def attend(images):
            drawn = random_map(truth, generator)
            return replace(truth, values=share * truth.weights + (1 - share) * drawn.weights)

        return attend

    for function in (metrics.sensitivity_max, sensitivity_mean, metrics.stability):
        numbers = [
            function(
                make_attend(share, torch.Generator().manual_seed(0)),
                batch.images,
                torch.Generator().manual_seed(2),
            )
            for share in (1.0, 0.5, 0.0)
        ]
        assert_order(function, numbers)


def test_randomization_similarity_ranks_the_map_of_the_model_first():
    """The truthful map depends on the weights; a map that does not depend on them is constant."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        model.weight[0, CELL] = 9.0
    x = torch.rand(SAMPLES, 16, generator=generator)
    fixed = torch.rand(SAMPLES, 16, generator=generator)

    def look(share):
        weights = share * (model.weight.detach() * x).abs() + (1 - share) * fixed
        return AttentionMap.from_cells(weights, words(16))

    found = [
        metrics.randomization_similarity(
            model, partial(look, share), torch.Generator().manual_seed(5)
        )
        for share in (1.0, 0.5, 0.0)
    ]
    assert_order(metrics.randomization_similarity, found)
    assert float(found[2].min()) == pytest.approx(1)
