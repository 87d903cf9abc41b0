"""Gradients by the input: saliency, input x gradient, SmoothGrad and VarGrad.

The gradient says how the score changes with a small change of each input. It needs one backward
pass; its averages over noise run in chunks and need no more memory than one.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import Kind
from overt.attribution.attribution_map import AttributionMap
from overt.attribution.model_inputs import (
    Inputs,
    Model,
    PlaceGeometry,
    VariedInput,
    precise,
    vary_input,
)
from overt.attribution.target_scores import Target


def input_gradient(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    *,
    embedding: nn.Module | None = None,
    norm: float = math.inf,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute the size of the gradient at each input: saliency (Simonyan et al. 2014).

    "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps",
    https://arxiv.org/abs/1312.6034, section 3.1: the largest absolute gradient over channels.

    Args:
        model: The network.
        inputs: Pixels (b, c, y, x), features (b, n, d), tokens (b, n), or keyword arguments of the
            model, such as the output of a Hugging Face tokenizer.
        target: A class, of all samples or one per sample; a `Contrast` of two classes; or a
            function of the model's output that returns one score per row.
        geometry: How the images were resized and cropped, or the characters of each token.
        embedding: For tokens: the layer whose output is varied; found automatically if there is
            one.
        norm: Order of the norm over channels; 2 is usual for the embeddings of words.
        chunk: How many rows are run at a time; None runs as many as `inputs` has.

    Returns:
        A map of amounts over pixels or words.

    Raises:
        ValueError: The target has no gradient to the inputs.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
        >>> input_gradient(model, torch.zeros(1, 2), 0).weights.flatten()
        tensor([1., 2.])
    """
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        found = _gradients(varied, varied.values, chunk)
        return varied.to_map(_norm(varied, found, norm), Kind.AMOUNT)


def input_x_gradient(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    *,
    embedding: nn.Module | None = None,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute input times gradient, summed over channels (Shrikumar et al. 2016).

    "Not Just a Black Box", https://arxiv.org/abs/1605.01713. It is the first-order change of the
    score if an input becomes zero; for a network of ReLUs without biases it adds up to the score.

    Args:
        model: The network.
        inputs: See `input_gradient`.
        target: See `input_gradient`.
        geometry: See `input_gradient`.
        embedding: See `input_gradient`.
        chunk: See `input_gradient`.

    Returns:
        A signed map over pixels or words.

    Raises:
        ValueError: The target has no gradient to the inputs.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
        >>> input_x_gradient(model, torch.tensor([[3.0, 3.0]]), 0).weights.flatten()
        tensor([ 3., -6.])
    """
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        found = _gradients(varied, varied.values, chunk) * varied.values
        return varied.to_map(varied.channels(found).sum(dim=1))


def smooth_grad(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    geometry: PlaceGeometry | None = None,
    *,
    embedding: nn.Module | None = None,
    samples: int = 50,
    noise: float = 0.15,
    norm: float = math.inf,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute SmoothGrad: the size of the mean gradient under Gaussian noise (Smilkov et al. 2017).

    "SmoothGrad: removing noise by adding noise", https://arxiv.org/abs/1706.03825.

    Args:
        model: The network.
        inputs: See `input_gradient`.
        target: See `input_gradient`.
        generator: The random generator of the noise.
        geometry: See `input_gradient`.
        embedding: See `input_gradient`.
        samples: How often noise is added.
        noise: Standard deviation of the noise, as a share of the range of each sample.
        norm: Order of the norm over channels.
        chunk: See `input_gradient`. The noise does not depend on it.

    Returns:
        A map of amounts over pixels or words.

    Raises:
        ValueError: A number is out of range, or the target has no gradient to the inputs.

    Example:
        >>> model, drawn = nn.Linear(2, 2), torch.Generator().manual_seed(0)
        >>> found = smooth_grad(model, torch.randn(1, 2), 0, drawn, samples=4)
        >>> torch.allclose(found.weights.flatten(), model.weight[0].abs())  # the same everywhere
        True
    """
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        mean, _ = _noisy_moments(varied, generator, samples, noise, chunk)
        return varied.to_map(_norm(varied, mean, norm), Kind.AMOUNT)


def var_grad(
    model: Model,
    inputs: Inputs,
    target: Target,
    generator: torch.Generator,
    geometry: PlaceGeometry | None = None,
    *,
    embedding: nn.Module | None = None,
    samples: int = 50,
    noise: float = 0.15,
    norm: float = math.inf,
    chunk: int | None = None,
) -> AttributionMap:
    """Compute VarGrad: the variance of the gradient under Gaussian noise (Adebayo et al. 2018).

    "Local Explanation Methods for Deep Neural Networks Lack Sensitivity to Parameter Values",
    https://arxiv.org/abs/1810.03307.

    Args:
        model: The network.
        inputs: See `input_gradient`.
        target: See `input_gradient`.
        generator: The random generator of the noise.
        geometry: See `input_gradient`.
        embedding: See `input_gradient`.
        samples: How often noise is added.
        noise: Standard deviation of the noise, as a share of the range of each sample.
        norm: Order of the norm of the variances over channels.
        chunk: See `input_gradient`. The noise does not depend on it.

    Returns:
        A map of amounts over pixels or words.

    Raises:
        ValueError: A number is out of range, or the target has no gradient to the inputs.

    Example:
        >>> drawn = torch.Generator().manual_seed(0)
        >>> found = var_grad(nn.Linear(2, 2), torch.randn(1, 2), 0, drawn, samples=4)
        >>> found.weights.flatten()  # the gradient of a linear model is the same everywhere
        tensor([0., 0.])
    """
    with vary_input(model, inputs, target, geometry, embedding) as varied:
        _, variance = _noisy_moments(varied, generator, samples, noise, chunk)
        return varied.to_map(_norm(varied, variance, norm), Kind.AMOUNT)


def _gradients(
    varied: VariedInput, values: Float[Tensor, "b ..."], chunk: int | None
) -> Float[Tensor, "b ..."]:
    if chunk is None:
        return varied.gradient(values, torch.arange(len(values), device=values.device))
    parts = [varied.gradient(values[at], at) for _, at in varied.chunks(1, chunk)]
    return torch.cat(parts)


def _norm(
    varied: VariedInput, values: Float[Tensor, "b ..."], order: float
) -> Float[Tensor, "b k"]:
    channels = varied.channels(values)
    if math.isinf(order) and order > 0:
        return channels.abs().amax(dim=1)  # several times faster than `vector_norm` of an axis
    norms: Tensor = torch.linalg.vector_norm(channels, ord=order, dim=1)
    return norms


def _noisy_moments(
    varied: VariedInput,
    generator: torch.Generator,
    samples: int,
    noise: float,
    chunk: int | None,
) -> tuple[Float[Tensor, "b ..."], Float[Tensor, "b ..."]]:
    """Compute the mean and the variance of the gradient under noise, by Welford's updates."""
    if samples < 1 or noise < 0:
        raise ValueError(
            f"samples must be at least 1 and noise at least 0, got {samples} and {noise}"
        )
    values = varied.values
    deviation = noise * _value_range(varied)
    mean = torch.zeros_like(values, dtype=precise(values))
    spread = torch.zeros_like(mean)
    for number in range(samples):
        # all samples of one draw at a time, so that the noise does not depend on the chunks
        noisy = values + deviation * _draw_noise(varied, generator).to(values)
        found = _gradients(varied, noisy, chunk)
        away = found - mean
        mean.add_(away, alpha=1 / (number + 1))
        spread.addcmul_(away, found - mean)
    return mean, spread / samples


def _value_range(varied: VariedInput) -> Float[Tensor, "b ..."]:
    """Return the largest minus the smallest value of each sample, without its padding."""
    values = varied.values
    high = low = values
    if varied.present is not None:
        hidden = varied.spread(~varied.present)
        high, low = values.masked_fill(hidden, -math.inf), values.masked_fill(hidden, math.inf)
    found = high.flatten(1).amax(dim=1) - low.flatten(1).amin(dim=1)
    found = torch.where(found.isfinite(), found, 0)  # a sample of nothing but padding
    return found.reshape(-1, *[1] * (values.ndim - 1))


def _draw_noise(varied: VariedInput, generator: torch.Generator) -> Float[Tensor, "b ..."]:
    """Draw standard normal noise; the noise of a text does not depend on its padding."""
    shape, device = varied.values.shape, generator.device
    if varied.present is None or bool(varied.present.all()):
        return torch.randn(shape, generator=generator, device=device)
    drawn = torch.zeros(shape, device=device)
    for row, own in zip(drawn, varied.present.to(device), strict=True):
        size = (int(own.sum()), *shape[2:])
        row[own] = torch.randn(size, generator=generator, device=device)
    return drawn
