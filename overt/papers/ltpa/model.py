"""Learn to Pay Attention: build networks from a config, and load weights to start from."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from overt import io
from overt.errors import UserError
from overt.nn.learned_attention.attention import CLASSIFIERS, SCORES
from overt.papers.ltpa.config import (
    LtpaGradient,
    LtpaModel,
    LtpaNetwork,
    row_label,
)
from overt.papers.ltpa.resnet import ResNet, ResNetAttention, ResNetSizes
from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGDropout, VGGGap, VGGProgressive, VGGSizes


def start_folder(model: LtpaModel, seed: int) -> Path:
    """Return the folder that `model.start` names, for this row and this seed."""
    assert model.start is not None
    named = model.start.replace("{seed}", str(seed))
    if "{row}" not in named:
        return Path(named)
    label = row_label(replace(model, start=None))
    if label is None:
        raise UserError("model.start contains {row}, but this network is not a row of Table 1.")
    return Path(named.replace("{row}", label))


def build_network(model: LtpaModel, classes: int, pool: int = 2) -> nn.Module:
    """Build the network of a row; `pool` is the side of the first pooling of a VGG."""
    dropout = VGGDropout(model.first_dropout, model.inside_dropout, model.dropout)
    sizes = VGGSizes(classes, model.width, dropout, pool)
    depth = ResNetSizes(classes, model.width, model.blocks)
    score, decision = SCORES[model.score.value], CLASSIFIERS[model.decision.value]
    match model.net:
        case LtpaNetwork.VGG:
            return VGG(sizes)
        case LtpaNetwork.GAP:
            return VGGGap(sizes)
        case LtpaNetwork.PAN:
            return VGGProgressive(sizes)
        case LtpaNetwork.RESNET:
            return ResNet(depth)
        case LtpaNetwork.VGG_ATTENTION:
            mean = model.gradient is LtpaGradient.MEAN
            return VGGAttention(sizes, model.levels, score, decision, mean)
        case LtpaNetwork.RESNET_ATTENTION:
            return ResNetAttention(depth, model.levels, score, decision)


def load_start_weights(model: nn.Module, folder: Path) -> None:
    # Take the folder of a run, or that of a model.
    """Load the weights of another run of the same network, except the classifier (CUB, A.3)."""
    place = folder / "model" if (folder / "model").is_dir() else folder
    if not (place / WEIGHTS).is_file():
        raise UserError(
            f"model.start={folder} contains no network: use the folder of a finished run."
        )
    io.verify(place)
    theirs, own = io.read_tensors(place / WEIGHTS), model.state_dict()
    # The classifier has one output per class of the other dataset, so it keeps its new weights.
    taken = {name: one for name, one in own.items() if "decision" not in name.split(".")}
    for name, one in taken.items():
        if name not in theirs or theirs[name].shape != one.shape:
            raise UserError(
                f"model.start={folder} contains another network: {name} must have the shape "
                f"{tuple(one.shape)}. model.net, model.levels and model.width must be the same."
            )
    model.load_state_dict({**own, **{name: theirs[name] for name in taken}})


WEIGHTS = "model.safetensors"
