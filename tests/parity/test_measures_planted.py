"""Models whose reason is known: every measure of faithfulness puts the map that tells it first.

Three maps are judged by the same measure on the same samples: one with most of its weight on the
one key that decides, one that has it among others, and a random one. Means over samples must fall
in that order, in the direction that the measure declares.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from overt import measure
from overt.attention import AttentionMap, Kind, grid, words
from overt.capture.call import Call, Route, Written
from overt.geometry import PixelGeometry
from overt.measure import (
    Retrained,
    blurred,
    imputed,
    in_features,
    in_pixels,
    in_tokens,
    random_map,
    to_mean,
    top_cells,
)
from overt.testing import PlantedCell, PlantedWord, toy_batch

SAMPLES, CELL, WORD = 32, 5, 3


def maps_of(deciding: torch.Tensor, layout, seen: torch.Tensor | None = None):
    """A truthful map, a half truthful one and a random one, by which keys decide."""
    generator = torch.Generator().manual_seed(7)
    count = deciding.shape[1]
    noise = torch.rand(SAMPLES, count, generator=generator)
    even = AttentionMap.from_cells(torch.ones(SAMPLES, count), layout, seen)
    # half of the samples are told the truth, and the others what is nearly nothing of it
    told = (torch.arange(SAMPLES) % 2 == 0)[:, None]
    truth = AttentionMap.from_cells(0.05 * noise + deciding, layout, seen).normalize()
    half = AttentionMap.from_cells(0.05 * noise + deciding * told, layout, seen).normalize()
    return truth, half, random_map(even, generator)


def in_order(function, numbers):
    """Whether the truthful map is best and the random one last, by the declared direction."""
    sign = 1 if function.measure.higher_is_better else -1
    means = [sign * measure.mean(one) for one in numbers]
    assert means[0] > means[1] > means[2], f"{function.measure.name}: {means}"


# --- ways to ask: masks of features, and three baselines in pixels and in features


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
    return model, batch, features, maps_of(deciding, grid(4, 4))


def ways(picture):
    model, batch, features, _ = picture
    generator = torch.Generator().manual_seed(2)
    rough = partial(imputed, generator=generator)

    def on_images(images):
        return model(replace(batch, images=images)).prediction

    def on_features(values):
        return model.decide(replace(features, values=values)).prediction

    pixels, cells = partial(in_pixels, on_images, batch.images), features.values
    made = {"masks": lambda keep: model.decide(features, {"image": keep}).prediction}
    fills = {"mean": to_mean, "blurred": blurred, "imputed": rough}
    for name, fill in fills.items():
        made[f"{name} pixels"] = pixels((4, 4), fill=fill)
        made[f"{name} features"] = in_features(on_features, cells, (4, 4), fill)
    return made


WAYS = ["masks"] + [
    f"{fill} {place}" for fill in ("mean", "blurred", "imputed") for place in ("pixels", "features")
]


def of_cells(function):
    """A measure of cells, asked for the one cell that a map means most."""
    asked = lambda decide, attention, generator: function(  # noqa: E731
        decide, top_cells(attention, generator, 1)
    )
    return asked, function


def of_maps(function, **more):
    return partial(function, **more), function


REMOVING = [
    of_cells(measure.deletion),
    of_cells(measure.insertion),
    of_cells(measure.flips),
    of_maps(measure.deletion_area),
    of_maps(measure.insertion_area),
    of_maps(measure.flipping),
    of_maps(measure.comprehensiveness),
    of_maps(measure.sufficiency),
    of_maps(measure.flip_share),
    of_maps(measure.infidelity, draws=12),
]
BY_KEY = [measure.leave_one_out_agreement, measure.gradient_agreement]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", REMOVING, ids=lambda one: one[1].__name__)
def test_removing_tells_the_truthful_map(picture, asked, way):
    ask, function = asked
    decide, maps = ways(picture)[way], picture[3]
    numbers = [ask(decide, one, torch.Generator().manual_seed(3)) for one in maps]
    in_order(function, numbers)


@pytest.mark.parametrize("way", ["masks", "mean pixels", "blurred pixels", "mean features"])
@pytest.mark.parametrize("function", BY_KEY, ids=lambda one: one.__name__)
def test_single_keys_tell_the_truthful_map(picture, function, way):
    decide, maps = ways(picture)[way], picture[3]
    in_order(function, [function(decide, one) for one in maps])


# --- words


@pytest.fixture(scope="module")
def text():
    """The planted word stands once in each text, at any place."""
    generator = torch.Generator().manual_seed(4)
    batch = toy_batch(SAMPLES)
    tokens = torch.where(batch.token_mask & (batch.tokens == WORD), WORD + 1, batch.tokens)
    lengths = batch.token_mask.sum(dim=-1)
    place = (torch.rand(SAMPLES, generator=generator) * lengths).long()
    tokens = tokens.scatter(1, place[:, None], WORD)
    batch = replace(batch, tokens=tokens)
    deciding = torch.nn.functional.one_hot(place, tokens.shape[1]).float()
    maps = maps_of(deciding, words(tokens.shape[1]), batch.token_mask)
    return PlantedWord(WORD).eval(), batch, maps


@pytest.mark.parametrize("asked", REMOVING, ids=lambda one: one[1].__name__)
def test_words_tell_the_truthful_map(text, asked):
    ask, function = asked
    model, batch, maps = text
    features = model.encode(batch)

    def on_tokens(tokens):
        return model(replace(batch, tokens=tokens)).prediction

    def masked(keep):
        return model.decide(features, {"text": keep}).prediction

    for decide in (masked, in_tokens(on_tokens, batch.tokens, blank=9)):
        numbers = [ask(decide, one, torch.Generator().manual_seed(3)) for one in maps]
        in_order(function, numbers)


@pytest.mark.parametrize("function", BY_KEY, ids=lambda one: one.__name__)
def test_single_words_tell_the_truthful_map(text, function):
    model, batch, maps = text
    features = model.encode(batch)
    decide = lambda keep: model.decide(features, {"text": keep}).prediction  # noqa: E731
    in_order(function, [function(decide, one) for one in maps])


# --- attention that is used: the answer is a weighted mean, and only one key has anything to say


def pooled(picture):
    """What a model answers that weighs the planted values by attention."""
    features = picture[2].values[..., 0].clone()
    features[:, [at for at in range(16) if at != CELL]] = 0

    def respond(weights):
        score = 8 * (weights * features.to(weights)).sum(dim=-1)
        return torch.stack([-score, score], dim=-1)

    return respond


def running(attention: AttentionMap, respond):
    weights = attention.weights[:, 0]

    def run(edit):
        source = Written(weights, Kind.PROBABILITY, weights.log())
        call = Call("planted", nn.Identity(), source, Route.SOFTMAX, False)
        used = weights if edit is None else edit(call, weights)
        return respond(used[:, 0, 0])

    return run


def test_edits_tell_the_truthful_map(picture):
    respond, maps = pooled(picture), picture[3]
    runs = [running(one, respond) for one in maps]
    in_order(
        measure.beyond_random,
        [measure.beyond_random(run, torch.Generator().manual_seed(0)) for run in runs],
    )
    in_order(measure.weights_to_flip, [measure.weights_to_flip(run) for run in runs])


def test_no_other_map_gives_the_answer_of_the_truthful_one(picture):
    respond, maps = pooled(picture), picture[3]
    found = [
        measure.adversarial_distance(respond, one, torch.Generator().manual_seed(0), steps=40)
        for one in maps
    ]
    in_order(measure.adversarial_distance, found)


def test_training_again_tells_the_truthful_map(picture):
    maps = picture[3]

    def retrain(attention, train, test):
        """Whatever is learned, it is right only where the deciding cell is left."""
        return Retrained(torch.where(test[:, CELL], 1.0, 0.5), attention, attention)

    for remove in (measure.roar, measure.recursive_roar):
        found = []
        for one in maps:
            again = partial(retrain, one)
            whole = again(*[torch.ones(SAMPLES, 16, dtype=torch.bool)] * 2)
            generator = torch.Generator().manual_seed(0)
            found.append(measure.roar_faithfulness(whole, again, generator, remove=remove))
        in_order(measure.roar_faithfulness, found)


# --- maps that are made anew: from inputs hardly different, and from models that forget


def test_holding_still_tells_the_truthful_map(picture):
    """The reason does not change with a little noise, so neither should a map of it."""
    _, batch, _, (truth, _, _) = picture

    def attending(share, generator):
        def attend(images):
            drawn = random_map(truth, generator)
            return replace(truth, values=share * truth.weights + (1 - share) * drawn.weights)

        return attend

    for function in (measure.sensitivity_max, measure.sensitivity_mean, measure.stability):
        numbers = [
            function(
                attending(share, torch.Generator().manual_seed(0)),
                batch.images,
                torch.Generator().manual_seed(2),
            )
            for share in (1.0, 0.5, 0.0)
        ]
        in_order(function, numbers)


def test_forgetting_tells_the_map_of_the_model():
    """The truthful map is read off the weights. A map that is not made of the model stays."""
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
        measure.forgotten_similarity(model, partial(look, share), torch.Generator().manual_seed(5))
        for share in (1.0, 0.5, 0.0)
    ]
    in_order(measure.forgotten_similarity, found)
    assert float(found[2].min()) == pytest.approx(1)
