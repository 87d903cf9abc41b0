"""Class activation maps: CAM, Grad-CAM, Grad-CAM++, HiResCAM, LayerCAM and Score-CAM.

For the cells of a convolutional network or of Swin, and, except for CAM, for the tokens of a ViT,
whose grid is found automatically. Each function returns a map over a grid with one global query.
The model is run in evaluation mode, and its hooks, mode, gradients and random state are restored.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from overt.attention import AttentionMap, Kind, Layout
from overt.attribution.feature_layers import (
    LayerGradient,
    RecordedFeatures,
    cell_map,
    cells_of,
    channels_first,
    layer_gradient,
)
from overt.attribution.target_scores import (
    Classes,
    Target,
    check_classes,
    classes_per_sample,
    score_target,
)
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.geometry import PixelGeometry


def class_activation(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Classes,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    head: nn.Linear | None = None,
) -> AttentionMap:
    """Compute the class activation map: features weighted by the classifier (Zhou et al. 2016).

    "Learning Deep Features for Discriminative Localization", CVPR 2016,
    https://arxiv.org/abs/1512.04150, eq. 2. Exact if `layer` is followed by the mean over cells and
    one linear layer: the mean over the map plus the bias of the class is its score. This is
    checked; use `grad_cam` for other networks.

    Args:
        model: The network.
        images: The input images.
        target: The class, of all samples or one per sample.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        head: The linear layer; the last one of the model by default.

    Returns:
        A signed map over the cells of the layer.

    Raises:
        ValueError: The model does not end with a mean and a linear layer.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> class_activation(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    head = head or _last_linear(model)
    with eval_mode_forked_rng(model), RecordedFeatures(model, layer) as features:
        scores = model(images)
    found = channels_first(features.only(), images.shape[-2:])
    if found.shape[1] != head.in_features or not _is_linear_head(found, head, scores):
        raise ValueError(
            "class activation needs a model that ends with the mean over the cells of the layer "
            "and one linear layer; use grad_cam"
        )
    chosen = check_classes(classes_per_sample(target, len(found)), len(found), head.out_features)
    # Eq. 2: sum over channels of the weight of the class times the feature, without the bias.
    values = torch.einsum("bcyx,bc->byx", found, head.weight[chosen.to(found.device)])
    return cell_map(values, Kind.SIGNED, geometry)


def grad_cam(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    *,
    layout: Layout | None = None,
    create_graph: bool = False,
) -> AttentionMap:
    """Compute Grad-CAM: the positive part of features weighted by their mean gradient.

    Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based
    Localization", ICCV 2017, https://arxiv.org/abs/1610.02391, eq. 1 and 2.

    The layer returns cells (b, c, y, x), or (b, y, x, c) as in Swin, or the tokens (b, n, d) of a
    ViT. After its last attention a ViT with a class token reads no cell any more: choose the block
    before the last, `blocks[-2]`, or, if blocks begin with a norm, `blocks[-1].norm1`. Maps of
    different layers differ; state the layer in a comparison.

    Args:
        model: The network.
        images: The input images.
        target: A class, of all samples or one per sample; a `Contrast` of two classes; or a
            function of the model's output that returns one score per sample.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        layout: Which tokens are cells. Found automatically for models of Hugging Face and timm with
            one patch embedding; class token and registers are left out.
        create_graph: As in `torch.autograd.grad`: keep the graph of the result.

    Returns:
        A map of amounts over the cells of the layer.

    Raises:
        ValueError: The layer returns something else, or the target does not depend on its cells.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> grad_cam(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    found = layer_gradient(
        model, layer, images, target, geometry, layout, create_graph=create_graph
    )
    with torch.set_grad_enabled(create_graph):
        # Eq. 1: the weight of a channel is its mean gradient over the cells. Eq. 2: ReLU of their
        # sum.
        made = _weighted_sum(found, found.gradient.mean(dim=(2, 3)))
    return made if create_graph else made.detach()


def grad_cam_plus_plus(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    *,
    layout: Layout | None = None,
) -> AttentionMap:
    """Compute Grad-CAM++, which weights the positive gradients of a channel (Chattopadhay 2018).

    "Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional Networks",
    WACV 2018, https://arxiv.org/abs/1710.11063, eq. 5 and 19: the exponential of the score is
    explained, so that its second and third derivatives are powers of the first.

    Args:
        model: The network.
        images: The input images.
        target: See `grad_cam`.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        layout: See `grad_cam`.

    Returns:
        A map of amounts over the cells of the layer.

    Raises:
        ValueError: See `grad_cam`.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> grad_cam_plus_plus(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    found = layer_gradient(model, layer, images, target, geometry, layout)
    slope = found.gradient
    below = 2 * slope.square() + found.features.sum(dim=(2, 3), keepdim=True) * slope.pow(3)
    # A cell without gradient has no weight; the quotient is 0 / 0 there.
    share = torch.where((slope != 0) & (below != 0), slope.square() / below, 0)
    return _weighted_sum(found, (share * slope.clamp_min(0)).sum(dim=(2, 3))).detach()


def hires_cam(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    *,
    layout: Layout | None = None,
) -> AttentionMap:
    """Compute HiResCAM: features times their gradient, cell by cell (Draelos and Carin 2020).

    "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks",
    https://arxiv.org/abs/2011.08891, eq. 7. If one linear layer follows the features, the sum of
    the map plus the bias of the class is its score.

    Args:
        model: The network.
        images: The input images.
        target: See `grad_cam`.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        layout: See `grad_cam`.

    Returns:
        A signed map over the cells of the layer; `positive()` gives the usual picture.

    Raises:
        ValueError: See `grad_cam`.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> hires_cam(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    found = layer_gradient(model, layer, images, target, geometry, layout)
    values = (found.features * found.gradient).sum(dim=1).detach()
    return cell_map(values, Kind.SIGNED, found.geometry)


def layer_cam(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    *,
    layout: Layout | None = None,
) -> AttentionMap:
    """Compute LayerCAM: features times the positive part of their gradient (Jiang et al. 2021).

    "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", IEEE TIP 2021,
    https://doi.org/10.1109/TIP.2021.3089943, eq. 6. It is meant for early layers as well.

    Args:
        model: The network.
        images: The input images.
        target: See `grad_cam`.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        layout: See `grad_cam`.

    Returns:
        A map of amounts over the cells of the layer.

    Raises:
        ValueError: See `grad_cam`.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> layer_cam(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    found = layer_gradient(model, layer, images, target, geometry, layout)
    values = (found.features * found.gradient.clamp_min(0)).sum(dim=1).clamp_min(0).detach()
    return cell_map(values, Kind.AMOUNT, found.geometry)


@torch.no_grad()
def score_cam(
    model: nn.Module,
    images: Float[Tensor, "b c y x"],
    target: Target,
    layer: nn.Module,
    geometry: PixelGeometry | None = None,
    *,
    layout: Layout | None = None,
    chunk: int = 32,
) -> AttentionMap:
    """Compute Score-CAM: features weighted by the score of the image seen through each channel.

    Wang et al., "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks",
    CVPR Workshops 2020, https://arxiv.org/abs/1910.01279, eq. 2 and 3. It needs no gradient but one
    run per channel. A channel is upsampled linearly and scaled to 0 to 1; a constant channel hides
    the whole image.

    Args:
        model: The network.
        images: The input images.
        target: See `grad_cam`.
        layer: The layer whose features are used.
        geometry: How the images were resized and cropped, if known.
        layout: See `grad_cam`.
        chunk: How many masked images are run at a time.

    Returns:
        A map of amounts over the cells of the layer.

    Raises:
        ValueError: The layer returns something else, or `chunk` is below 1.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(3, 4, 3, padding=1)
        >>> model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> score_cam(model, torch.randn(1, 3, 8, 8), 7, conv).shape
        (1, 1, 1, 1, 64)
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    with eval_mode_forked_rng(model):
        with RecordedFeatures(model, layer) as features:
            score_target(model(images), target)  # checks the target before many runs
        found = features.only(tokens=True)
        to_cells, geometry = cells_of(model, found, images, geometry, layout)
        cells = to_cells(found)
        b, channels = cells.shape[:2]
        scores = torch.zeros(b * channels, device=cells.device, dtype=torch.float32)
        for start in range(0, b * channels, chunk):
            pair = torch.arange(start, min(start + chunk, b * channels), device=cells.device)
            sample, channel = pair % b, pair // b
            shown = _unit_range(
                interpolate(cells[sample, channel][:, None], images.shape[-2:], mode="bilinear")
            )
            output = model(images[sample] * shown.to(images.dtype))
            scores[pair] = score_target(output, target, None, sample, b).float()
        # Eq. 3; the score of the baseline in eq. 2 cancels in the softmax.
        weights = scores.reshape(channels, b).T.softmax(dim=1).to(cells)
    values = torch.einsum("bcyx,bc->byx", cells, weights).clamp_min(0)
    return cell_map(values, Kind.AMOUNT, geometry)


def _weighted_sum(found: LayerGradient, weights: Float[Tensor, "b c"]) -> AttentionMap:
    """Return the positive part of the weighted sum of channels."""
    values = torch.einsum("bcyx,bc->byx", found.features, weights).clamp_min(0)
    return cell_map(values, Kind.AMOUNT, found.geometry)


def _unit_range(values: Float[Tensor, "n 1 y x"]) -> Float[Tensor, "n 1 y x"]:
    """Scale each image to 0 to 1; a constant one becomes zero."""
    low, high = values.amin(dim=(2, 3), keepdim=True), values.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (values - low) / (high - low), 0)


def _last_linear(model: nn.Module) -> nn.Linear:
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ValueError("the model has no linear layer; use grad_cam")
    return found[-1]


def _is_linear_head(features: Tensor, head: nn.Linear, scores: Any) -> bool:
    if not isinstance(scores, Tensor):
        return False
    expected = torch.nn.functional.linear(features.mean(dim=(2, 3)), head.weight, head.bias)
    return scores.shape == expected.shape and torch.allclose(scores, expected, rtol=1e-3, atol=1e-4)
