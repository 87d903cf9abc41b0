"""Attending Self-Attention: build the VL-BERT of a recipe."""

from dataclasses import replace
from pathlib import Path

from overt.experiments.builders import pretrained_encoder
from overt.experiments.recipe import scale_width
from overt.nn.vlbert.model import ClassificationHead, VLBert, VLBertSizes
from overt.nn.vlbert.regions import PooledRegionEncoder, PrecomputedRegionEncoder, RegionEncoder
from overt.papers.vgp.config import VgpInit, VgpModel, VgpRecipe
from overt.papers.vgp.data import VgpData

CNN = ((32, 64, 64, 128), (2, 1, 2, 1))  # channels and strides: a grid of 1/4 of the side
POSITIONS = 128  # for the longest text, the regions and the end token


def build_model(recipe: VgpRecipe, parts: VgpData) -> VLBert:
    """Build the Transformer, randomly initialized or from MiniLM."""
    model = recipe.model
    eye = region_encoder(model, parts)
    if model.begin is VgpInit.MINILM:
        # The begin and end tokens of MiniLM's tokenizer, read from a tokenized text.
        texts = parts.train.texts
        begin, end = texts.tokens[0, [0, int(texts.lengths[0]) - 1]].tolist()
        folder = encoder_folder(model)
        # MiniLM has 384 features.
        net = VLBert.from_encoder(
            *(folder, eye, ClassificationHead(384, 3, model.dropout), begin, end, parts.relations),
            gain=model.gain,
            dropout=model.dropout,
        )
        return net if model.width >= 1 else drop_upper_layers(net, model.width)
    sizes = VLBertSizes(
        vocabulary=parts.vocabulary,
        width=recipe.hidden_width,
        layers=model.layers,
        heads=model.heads,
        inner=4 * recipe.hidden_width,
        positions=POSITIONS,
        dropout=model.dropout,
        gain=model.gain,
    )
    return VLBert(
        sizes, eye, ClassificationHead(recipe.hidden_width, 3, model.dropout), parts.relations
    )


def drop_upper_layers(net: VLBert, share: float) -> VLBert:
    """Remove upper layers, keeping this share of them."""
    layers = max(1, round(share * net.sizes.layers))
    del net.encoder.layers[layers:]
    net.sizes = replace(net.sizes, layers=layers)
    return net


def region_encoder(model: VgpModel, parts: VgpData) -> RegionEncoder:
    """Return the region encoder: precomputed features, or a CNN trained end to end."""
    features = parts.train.texts.features
    if features is not None:
        return PrecomputedRegionEncoder(features.shape[-1])
    channels, strides = CNN
    return PooledRegionEncoder([scale_width(one, model.width) for one in channels], list(strides))


def encoder_folder(model: VgpModel) -> Path:
    """Return the folder of the pretrained encoder."""
    return pretrained_encoder(model.folder, "set model.folder, or use model.begin=random")
