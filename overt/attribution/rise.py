"""RISE: the mean score of randomly masked images in which a pixel is visible.

Petsiuk, Das and Saenko, "RISE: Randomized Input Sampling for Explanation of Black-box Models",
BMVC 2018, https://arxiv.org/abs/1806.07421.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import Kind
from overt.attribution.attribution_map import AttributionMap
from overt.attribution.model_inputs import Inputs, Model, vary_input
from overt.attribution.target_scores import Contrast, Target
from overt.geometry import PixelGeometry


def rise(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    geometry: PixelGeometry | None = None,
    *,
    masks: int = 4000,
    cells: int = 7,
    keep: float = 0.5,
    chunk: int = 32,
) -> AttributionMap:
    """Compute RISE: the mean score of randomly masked images in which a pixel is visible.

    Eq. 6 of the paper. All images use the same masks. Memory does not depend on the number of
    masks. Masked pixels are multiplied by zero: images should be centred on zero, as normalised
    ones are.

    Args:
        model: The network, or any function of images.
        inputs: The images (b, c, y, x), or keyword arguments of the model with one image tensor.
        target: A class, whose softmax probability is the score; a `Contrast` of two; or a function
            of the model's output that returns one score per row.
        generator: The random generator of the masks.
        geometry: How the images were resized and cropped, if known.
        masks: The number of masks.
        cells: The sides of the grid that is upsampled to a mask.
        keep: The share of visible cells.
        chunk: How many masked images are run at a time. The masks do not depend on it.

    Returns:
        A map over the pixels of the images.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
        >>> drawn = torch.Generator().manual_seed(0)
        >>> rise(model, torch.randn(1, 3, 16, 16), 7, drawn, masks=8).shape
        (1, 1, 1, 1, 256)
    """
    if masks < 1 or cells < 1 or chunk < 1 or not 0 < keep <= 1:
        raise ValueError(
            f"masks, cells and chunk must be at least 1 and keep in (0, 1], got {masks}, {cells}, "
            f"{chunk} and {keep}"
        )
    with vary_input(model, inputs, target, geometry) as varied:
        images = varied.values
        if images.ndim != 4:
            raise ValueError(f"rise needs images (b, c, y, x), got {tuple(images.shape)}")
        b, height, width = len(images), *images.shape[2:]
        values = torch.zeros(b, height * width, dtype=torch.float64, device=images.device)
        at_once = max(1, chunk // b)
        for start in range(0, masks, at_once):
            count = min(at_once, masks - start)
            shown = rise_masks(count, (height, width), cells, keep, generator).to(images)
            for number, at in varied.chunks(count, chunk):
                hidden = images[at] * shown[number, None]
                score = varied.score(hidden, at, torch.softmax).double()
                values.index_add_(0, at, score[:, None] * shown[number].flatten(1).double())
        # Eq. 6 divides by the expected value of a mask, `keep`.
        signed = callable(target) or isinstance(target, Contrast)
        found = (values / (masks * keep)).to(images.dtype)
        return varied.to_map(found, Kind.SIGNED if signed else Kind.AMOUNT)


def rise_masks(
    count: int, size: tuple[int, int], cells: int, keep: float, generator: torch.Generator
) -> Float[Tensor, "n y x"]:
    """Draw random binary grids, upsample them smoothly over more than the image, and shift them.

    The grid covers one cell more than the image in each direction, and each mask starts at a random
    pixel of its first cell. Computed as two products of small matrices, for all masks at once.

    Args:
        count: The number of masks.
        size: Height and width of the masks.
        cells: The sides of the grid.
        keep: The probability of a visible cell.
        generator: The random generator.

    Returns:
        The masks.
    """
    device = generator.device
    # one row of random numbers per mask, so that masks do not depend on the chunk size
    draws = torch.rand(count, cells * cells + 2, generator=generator, device=device)
    grids = (draws[:, :-2] < keep).float().unflatten(1, (cells, cells))
    lines = []
    for length, draw in zip(size, draws[:, -2:].unbind(1), strict=True):
        step = -(-length // cells)  # pixels of a cell, rounded up
        pixel = torch.arange(length, device=device) + (draw * step).floor()[:, None]
        place = (pixel + 0.5) * cells / ((cells + 1) * step) - 0.5
        centres = torch.arange(cells, device=device)
        distance = (place.clamp(0, cells - 1)[..., None] - centres).abs()
        lines.append((1 - distance).clamp_min(0))  # linear interpolation between two centres
    return lines[0] @ grids @ lines[1].mT
