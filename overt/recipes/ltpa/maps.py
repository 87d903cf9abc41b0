"""Where a network looks, as pictures of one size: its levels, what speaks for a class, controls.

Levels have grids of their own, gradients have that of the image. To be held against one another and
against a mask, all become pictures of the image: cells are enlarged bilinearly (figure 9 and
appendix A.4 of Learn to Pay Attention).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt import measure, models
from overt.attention import AttentionMap, Kind, grid
from overt.data.batch import Batch
from overt.measure.robustness import Classify
from overt.measure.segmentation import Join
from overt.models.paying.attention import shape_of
from overt.recipes.evaluation import Noted

Maps = dict[str, Float[Tensor, "b y x"]]
CENTRE = 0.25  # the deviation of the centre prior, as a share of each side


def classifier(model: Any) -> Classify:
    """The network as a function of images from 0 to 1.

    Networks bring bytes to their range themselves, and take other numbers as they are.
    """

    def classify(images: Float[Tensor, "b 3 y x"]) -> Float[Tensor, "b c"]:
        ids = tuple(map(str, range(len(images))))
        logits: Tensor = model(Batch(ids=ids, images=(images * 255 - 110) / 70)).prediction
        return logits

    return classify


def from_0_to_1(batch: Batch) -> Float[Tensor, "b 3 y x"]:
    """The images of a batch of bytes as numbers from 0 to 1, a row a sample."""
    assert batch.images is not None
    return batch.images[batch.image_index].float() / 255


# --- the maps there are


def maps_of(model: Any, batch: Batch) -> Maps:
    """Every map of a network for a batch by its name, and the controls, all at the image's size."""
    images = from_0_to_1(batch)
    size = (images.shape[-2], images.shape[-1])
    features = model.encode(batch)
    output = model.decide(features)
    found = levels(output.attention, size)
    if isinstance(model, models.VGGGap):
        assert batch.labels is not None
        chosen = output.prediction.argmax(dim=-1)
        for name, classes in (("cam_chosen", chosen), ("cam_true", batch.labels)):
            found[name] = measure.combined([model.class_activation(features, classes)], size)
    slope = image_gradient(classifier(model), images)
    found["gradient"] = slope.abs().sum(dim=1).double()
    found["gradient_input"] = (slope * images).sum(dim=1).abs().double()
    even = torch.ones_like(found["gradient"])
    return {**found, "centre": even * centre(size).to(even.device), "uniform": even}


def levels(attention: Sequence[AttentionMap], size: tuple[int, int]) -> Maps:
    """Each level by its grid, the lowest first, and the last two joined where there are two."""
    found = {name_of(one): measure.combined([one], size) for one in attention}
    if len(attention) > 1:
        last = attention[-2:]
        found["joined"] = measure.combined(last, size, join_of(last))
    return found


def name_of(attention: AttentionMap) -> str:
    """What a level is called: its grid, such as 8x8."""
    rows, columns = shape_of(attention.keys)
    return f"{rows}x{columns}"


def join_of(attention: Sequence[AttentionMap]) -> Join:
    """The root of the product of distributions; the product alone where one of them is a gate.

    The two maps of progressive attention follow one another, and the paper takes no root (A.4).
    """
    even = all(one.kind is Kind.PROBABILITY for one in attention)
    return measure.root_of_product if even else measure.product


def image_gradient(
    classify: Classify, images: Float[Tensor, "b 3 y x"]
) -> Float[Tensor, "b 3 y x"]:
    """How the logit of the class that is chosen grows with each pixel (Simonyan et al. 2013)."""
    with torch.enable_grad():
        at = images.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(classify(at).amax(dim=-1).sum(), at)
    return slope


def centre(size: tuple[int, int]) -> Float[Tensor, "y x"]:
    """A map that knows nothing but where things tend to be: a bell over the middle of the image."""
    rows, columns = (
        torch.exp(-((((torch.arange(side).double() + 0.5) / side - 0.5) / CENTRE) ** 2) / 2)
        for side in size
    )
    return rows[:, None] * columns


# --- held against the mask of what they should find


def found_by(maps: Maps, masks: Bool[Tensor, "b y x"]) -> Noted:
    """Pointing, mass and Jaccard of every map, pixel by pixel: `jaccard_joined` and so on.

    Shapes are the pixels above Otsu's threshold. A uniform map has no shape; if all the image were
    its shape, the Jaccard would be its mass.
    """
    layout = grid(masks.shape[1], masks.shape[2])
    truth = AttentionMap.from_cells(masks.flatten(1).double(), layout)
    found: Noted = {}
    for name, one in maps.items():
        positive = AttentionMap.from_cells(one.clamp_min(0).flatten(1), layout)
        for function, word in ((measure.pointing_game, "pointing"), (measure.mass_inside, "mass")):
            found[f"{word}_{name}"] = function.measure, function(positive, truth)
        if name != "uniform":
            shape = measure.binarised(one)
            found[f"jaccard_{name}"] = measure.jaccard.measure, measure.jaccard(shape, masks)
    return found


def labels_of(batches: Sequence[Batch]) -> Int[Tensor, " n"]:
    """The labels of all batches."""
    return torch.cat([batch.labels for batch in batches if batch.labels is not None])
