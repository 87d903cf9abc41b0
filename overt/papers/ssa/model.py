"""Self Supervision for Attention Networks: build the text classifiers from a config."""

from collections.abc import Callable

from torch import nn

from overt.experiments.builders import pretrained_encoder
from overt.experiments.recipe import scale_width
from overt.nn import StructuredClassifier, TextClassifier, TextTransformer
from overt.nn.text_transformer import load_for_finetuning
from overt.papers.ssa.config import SsaPretrained, SsaTextModel, SsaTextNetwork


def text_classifier(model: SsaTextModel, vocabulary: int, classes: int) -> nn.Module:
    """Build a text classifier of the configured size."""
    match model.net:
        case SsaTextNetwork.SMALL:
            return TextClassifier(vocabulary, classes, model.width, model.hops, model.dropout)
        case SsaTextNetwork.STRUCTURED:
            # The sizes of Lin et al.: embeddings of 300, a BiLSTM of 256 per direction, d_a = 350,
            # and 2000 before the classes.
            sizes = {"word": 300, "state": 256, "hidden": 350, "joint": 2000}
            scaled = {name: scale_width(size, model.width) for name, size in sizes.items()}
            return StructuredClassifier(
                vocabulary, classes, hops=model.hops, dropout=model.dropout, **scaled
            )


def encoder_factory(model: SsaPretrained) -> Callable[[int], TextTransformer]:
    """Return a function that loads the pretrained encoder with a classifier on top."""
    folder = pretrained_encoder(model.folder, "or set model.folder")

    def opened(classes: int) -> TextTransformer:
        found = load_for_finetuning(folder, classes)
        if model.width < 1:
            # The lower layers stay. The config is saved with the weights, so it must state how many
            # remain.
            layers = found.model.base_model.encoder.layer
            del layers[max(1, round(len(layers) * model.width)) :]
            found.model.config.num_hidden_layers = len(layers)
        return found

    return opened
