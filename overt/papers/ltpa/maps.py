"""Learn to Pay Attention: maps of a network at image size: levels, class activations, controls.

Levels have different grids, and gradients have that of the image. To compare them with each other
and with a mask, all are upsampled bilinearly to the image (figure 9 and appendix A.4).
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt import metrics
from overt.attention import AttentionMap, Kind, grid
from overt.attribution import activation_attention
from overt.data.batch import Batch
from overt.experiments.evaluate import PerItemMetrics
from overt.metrics.robustness import Classify
from overt.metrics.segmentation import (
    CombineRule,
    binarize_otsu,
    combine_levels,
    geometric_mean,
    jaccard,
    product_of_levels,
)
from overt.nn.cnn import ImageFeatures
from overt.nn.learned_attention.attention import MultiLevelFeatures, grid_shape
from overt.papers.ltpa.vgg import VGGGap, VGGProgressive

Maps = dict[str, Float[Tensor, "b y x"]]
CENTRE = 0.25  # standard deviation of the centre prior, relative to each side


def image_classifier(model: Any) -> Classify:
    """Return the network as a function of images in [0, 1].

    Networks normalize bytes themselves, and leave floating-point images unchanged.
    """

    def classify(images: Float[Tensor, "b 3 y x"]) -> Float[Tensor, "b c"]:
        ids = tuple(map(str, range(len(images))))
        # The normalization of bytes by `normalize_pixels`, as a differentiable function of [0, 1].
        logits: Tensor = model(Batch(ids=ids, images=(images * 255 - 110) / 70)).prediction
        return logits

    return classify


def unit_images(batch: Batch) -> Float[Tensor, "b 3 y x"]:
    """Return the images of a batch of bytes scaled to [0, 1], one row per sample."""
    assert batch.images is not None
    return batch.images[batch.image_index].float() / 255


# --- maps


def all_maps(model: Any, batch: Batch) -> Maps:
    """Return every map of a network for a batch by name, and the controls, all at image size."""
    images = unit_images(batch)
    size = (images.shape[-2], images.shape[-1])
    features = model.encode(batch)
    output = model.decide(features)
    found = level_maps(output.attention, size)
    if isinstance(model, VGGGap):
        assert batch.labels is not None
        chosen = output.prediction.argmax(dim=-1)
        for name, classes in (("cam_chosen", chosen), ("cam_true", batch.labels)):
            found[name] = combine_levels([model.class_activation(features, classes)], size)
    found |= activation_maps(model, features, size)
    slope = image_gradient(image_classifier(model), images)
    found["gradient"] = slope.abs().sum(dim=1).double()
    found["gradient_input"] = (slope * images).sum(dim=1).abs().double()
    even = torch.ones_like(found["gradient"])
    return {**found, "centre": even * centre_prior(size).to(even.device), "uniform": even}


def activation_maps(model: Any, features: Any, size: tuple[int, int]) -> Maps:
    """Return the sum of squares over the channels of every level: the rival of figure 3.

    `activation_8x8` and so on, and the last two levels joined. Empty for networks whose cells are
    not on the grid of a level, VGG and ResNet-164.
    """
    levels: tuple[ImageFeatures, ...] = ()
    if isinstance(features, MultiLevelFeatures):
        levels = features.cells
    elif isinstance(model, VGGProgressive):
        levels = (features.cells,)
    elif isinstance(model, VGGGap):
        levels = (features,)
    attention = []
    for cells in levels:
        rows, columns = grid_shape(cells.layout)
        maps = rearrange(cells.values, "b (y x) d -> b d y x", y=rows, x=columns)
        attention.append(activation_attention(maps))
    return {f"activation_{name}": one for name, one in level_maps(attention, size).items()}


def level_maps(attention: Sequence[AttentionMap], size: tuple[int, int]) -> Maps:
    """Return each level by its grid, the lowest first, and the last two joined if there are two."""
    found = {level_name(one): combine_levels([one], size) for one in attention}
    if len(attention) > 1:
        last = attention[-2:]
        found["joined"] = combine_levels(last, size, join_function(last))
    return found


def level_name(attention: AttentionMap) -> str:
    """Return the name of a level: its grid, such as 8x8."""
    rows, columns = grid_shape(attention.keys)
    return f"{rows}x{columns}"


def join_function(attention: Sequence[AttentionMap]) -> CombineRule:
    """Return the geometric mean of distributions; the plain product if one of them is a gate.

    The two maps of progressive attention are applied one after the other, and the paper takes no
    root (A.4).
    """
    even = all(one.kind is Kind.PROBABILITY for one in attention)
    return geometric_mean if even else product_of_levels


def image_gradient(
    classify: Classify, images: Float[Tensor, "b 3 y x"]
) -> Float[Tensor, "b 3 y x"]:
    """Compute the gradient of the largest logit by each pixel (Simonyan et al. 2013)."""
    with torch.enable_grad():
        at = images.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(classify(at).amax(dim=-1).sum(), at)
    return slope


def centre_prior(size: tuple[int, int]) -> Float[Tensor, "y x"]:
    """Return a Gaussian over the middle of the image: a control that ignores the image."""
    # Distances of pixel centres from the middle, relative to the side.
    rows, columns = (
        torch.exp(-((((torch.arange(side).double() + 0.5) / side - 0.5) / CENTRE) ** 2) / 2)
        for side in size
    )
    return rows[:, None] * columns


# --- comparison with object masks


def mask_metrics(maps: Maps, masks: Bool[Tensor, "b y x"]) -> PerItemMetrics:
    """Compute pointing, mass and Jaccard of every map, per pixel: `jaccard_joined` and so on.

    A map is binarized at Otsu's threshold. The uniform map has no shape; if the whole image were
    its shape, its Jaccard would be its mass.
    """
    layout = grid(masks.shape[1], masks.shape[2])
    truth = AttentionMap.from_cells(masks.flatten(1).double(), layout)
    found: PerItemMetrics = {}
    for name, one in maps.items():
        # Class activations may be negative. Pointing and mass need amounts; Otsu's threshold takes
        # any sign.
        positive = AttentionMap.from_cells(one.clamp_min(0).flatten(1), layout)
        for function, word in ((metrics.pointing_game, "pointing"), (metrics.mass_inside, "mass")):
            found[f"{word}_{name}"] = function.info, function(positive, truth)
        if name != "uniform":
            shape = binarize_otsu(one)
            found[f"jaccard_{name}"] = jaccard.info, jaccard(shape, masks)
    return found


def all_labels(batches: Sequence[Batch]) -> Int[Tensor, " n"]:
    """Return the labels of all batches."""
    return torch.cat([batch.labels for batch in batches if batch.labels is not None])
