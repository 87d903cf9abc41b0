"""Perturb attention where a mask is small, or enhance it there.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, eq. 3 and 5-10; after Lu et
al., "Attention Calibration for Transformer in Neural Machine Translation", ACL 2021.

Every fusion as published multiplies attention by a factor between 1 and e that depends on the mask
alone. So after renormalisation it is a bias of less than 1 on the scores: a fused kernel can apply
it, and a region without attention cannot regain it, whatever the mask.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Weights = Float[Tensor, "b h q k"]
Visible = Bool[Tensor, "b #q k"] | None
AverageAttention = Callable[[Weights, Visible], Weights]  # replaces perturbed attention

ETA = 0.1  # of the moving average, in all experiments of the paper


@dataclass(frozen=True)
class AttentionShape:
    """Shape of an attention module: heads, key-value groups, and features per head.

    Args:
        heads: The number of heads.
        groups: The number of groups of keys and values.
        width: The features per head.

    Example:
        >>> AttentionShape(heads=8, groups=8, width=64).heads
        8
    """

    heads: int
    groups: int
    width: int


# --- perturbation


def uniform_average(weights: Weights, visible: Visible) -> Weights:
    """Average the weights of a query over its visible keys (Lu et al.).

    Their code divides by the padded length, so padding gets attention; here it does not. A key with
    less than average attention gains by perturbation, so a mask trained to do harm cannot find it.

    Args:
        weights: The attention of a layer.
        visible: Which keys each query may see; None is all.

    Returns:
        The weights to mix in where the mask is small.

    Example:
        >>> weights = torch.tensor([[[[0.8, 0.2]], [[0.4, 0.6]]]])  # two heads
        >>> uniform_average(weights, None).flatten()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if visible is None:
        return weights.mean(dim=-1, keepdim=True).expand_as(weights)
    seen = visible[:, None].expand_as(weights)
    # not 1 / n: the sum of a row is below one if the model has a learned sink
    share = weights.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(seen, share, 0)


def head_mean(weights: Weights, visible: Visible) -> Weights:
    """Average over heads, one reading of the paper; with one head nothing is perturbed.

    Args:
        weights: The attention of a layer.
        visible: Which keys each query may see; None is all.

    Returns:
        The weights to mix in where the mask is small.

    Example:
        >>> weights = torch.tensor([[[[0.8, 0.2]], [[0.4, 0.6]]]])  # two heads
        >>> head_mean(weights, None).flatten()
        tensor([0.6000, 0.4000, 0.6000, 0.4000])
    """
    return weights.mean(dim=1, keepdim=True).expand_as(weights)


def zero_average(weights: Weights, visible: Visible) -> Weights:
    """Return zeros: perturbed attention is removed. The paper argues against it.

    Args:
        weights: The attention of a layer.
        visible: Which keys each query may see; None is all.

    Returns:
        The weights to mix in where the mask is small.

    Example:
        >>> weights = torch.tensor([[[[0.8, 0.2]], [[0.4, 0.6]]]])  # two heads
        >>> zero_average(weights, None).flatten()
        tensor([0., 0., 0., 0.])
    """
    return torch.zeros_like(weights)


def perturb(
    weights: Weights,
    mask: Weights,
    average: AverageAttention = uniform_average,
    visible: Visible = None,
) -> Weights:
    """Compute `m a + (1 - m) average` (eq. 3). Rows are not renormalised.

    Args:
        weights: The attention a of a layer.
        mask: The mask m, between 0 and 1.
        average: The attention to mix in.
        visible: Which keys each query may see; None is all.

    Returns:
        The perturbed attention.

    Example:
        >>> weights, mask = torch.tensor([[[[0.9, 0.1]]]]), torch.tensor([[[[0.0, 1.0]]]])
        >>> perturb(weights, mask).flatten()
        tensor([0.5000, 0.1000])
    """
    # lerp(a, b, m) is a + m (b - a): m = 1 returns the weights unchanged
    return torch.lerp(average(weights, visible), weights, mask.to(weights))


# --- enhancement


def enhance(weights: Weights, mask: Weights) -> Weights:
    """Compute `a exp(1 - m)` (eq. 5): up to e times as much where the mask is small.

    Args:
        weights: The attention a of a layer.
        mask: The mask m, between 0 and 1.

    Returns:
        The enhanced attention; its rows do not sum to one.

    Example:
        >>> enhance(torch.tensor([[[[0.9, 0.1]]]]), torch.tensor([[[[0.0, 1.0]]]])).flatten()
        tensor([2.4465, 0.1000])
    """
    return weights * (1 - mask).exp()


def fuse_max(weights: Weights, enhanced: Weights) -> Weights:
    """Take the larger of the two (eq. 6).

    As published this is the enhanced one everywhere, since it is never smaller. There is only a
    choice if the enhanced weights are normalised first.
    """
    return torch.maximum(weights, enhanced)


def fuse_sum(weights: Weights, enhanced: Weights, eta: float = ETA) -> Weights:
    """Compute `a + eta a'` (eq. 7), which the paper calls a moving average."""
    return weights + eta * enhanced


def fuse_lerp(
    weights: Weights, enhanced: Weights, share: float | Float[Tensor, "#b #h #q 1"]
) -> Weights:
    """Compute `s a + (1 - s) a'` (eq. 8 and 9)."""
    # lerp needs one dtype; under autocast the gate is often in another than the weights
    share = share if isinstance(share, float) else share.to(weights)
    return torch.lerp(enhanced, weights, share)


def normalize_rows(weights: Weights) -> Weights:
    """Normalise rows to sum to one; a zero row stays zero."""
    total = weights.sum(dim=-1, keepdim=True)
    # where instead of an epsilon: rows that sum to something small still sum to one exactly
    return weights / torch.where(total > 0, total, 1)


# --- fusions, one per layer


class Fusion(nn.Module, ABC):
    """Fusion of a layer's weights with the enhanced ones: `fusion(weights, enhanced, query)`.

    It must be homogeneous: twice the weights give twice the result. All four of the paper are.
    """

    @abstractmethod
    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Return the aligned weights."""


class MaxFusion(Fusion):
    """Max pooling."""

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Return the larger of the two."""
        return fuse_max(weights, enhanced)


class MovingAverageFusion(Fusion):
    """Add a tenth of the enhanced weights."""

    def __init__(self, eta: float = ETA) -> None:
        super().__init__()
        self.eta = eta

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Return the sum, with the enhanced weights times eta."""
        return fuse_sum(weights, enhanced, self.eta)


class DecayFusion(Fusion):
    """The share `exp(-s / T)` of plain attention, which decays during training.

    `elapsed` is `s / T`: steps over temperature. It is part of the state, so a loaded model keeps
    its share. Lu et al. use T = 100,000 steps and evaluate at 1.5, so T is about two thirds of
    training.
    """

    elapsed: Tensor

    def __init__(self) -> None:
        super().__init__()
        # a buffer, not a float: it is saved with the weights, and a captured CUDA graph reads its
        # new value
        self.register_buffer("elapsed", torch.zeros(()))

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Return the mixture with the current share."""
        # four axes, as torch.lerp broadcasts a tensor weight only
        return fuse_lerp(weights, enhanced, (-self.elapsed).exp().to(weights).reshape(1, 1, 1, 1))


class GateFusion(Fusion):
    """The share `sigmoid(w q + b)` of plain attention, per word and head (eq. 9-10).

    `heads` have their own weights, as in the paper; with 1, all heads share them, as in the code of
    Lu et al. `width` is the number of features of a head's query.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(heads))

    def share(self, query: Float[Tensor, "b h q d"]) -> Float[Tensor, "b h q 1"]:
        """Compute the share of plain attention of each word."""
        # one dot product per head: (b h q d) with (h 1 d); heads = 1 broadcasts to a shared gate
        score = (query * self.weight[:, None]).sum(dim=-1) + self.bias[:, None]
        return score.sigmoid()[..., None]

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Return the mixture with the share of each word."""
        return fuse_lerp(weights, enhanced, self.share(query))


MakeFusion = Callable[[AttentionShape], Fusion]


def max_pooling(place: AttentionShape) -> Fusion:
    """Make the fusion by the larger weight (eq. 6).

    Args:
        place: shape of the attention module.

    Returns:
        A module: `fusion(weights, enhanced, query)`.

    Example:
        >>> type(max_pooling(AttentionShape(heads=2, groups=2, width=4))).__name__
        'MaxFusion'
    """
    return MaxFusion()


def moving_average(place: AttentionShape) -> Fusion:
    """Make the fusion that adds a tenth of the enhanced weights (eq. 7).

    Args:
        place: shape of the attention module.

    Returns:
        A module: `fusion(weights, enhanced, query)`.

    Example:
        >>> type(moving_average(AttentionShape(heads=2, groups=2, width=4))).__name__
        'MovingAverageFusion'
    """
    return MovingAverageFusion()


def decay(place: AttentionShape) -> Fusion:
    """Make the fusion that grows during training (eq. 8); set its progress with `Aligner.advance`.

    Args:
        place: shape of the attention module.

    Returns:
        A module: `fusion(weights, enhanced, query)`.

    Example:
        >>> type(decay(AttentionShape(heads=2, groups=2, width=4))).__name__
        'DecayFusion'
    """
    return DecayFusion()


def gate(place: AttentionShape) -> Fusion:
    """Make the fusion with a learned gate per layer and head (eq. 9-10).

    Args:
        place: shape of the attention module.

    Returns:
        A module: `fusion(weights, enhanced, query)`.

    Example:
        >>> type(gate(AttentionShape(heads=2, groups=2, width=4))).__name__
        'GateFusion'
    """
    return GateFusion(place.heads, place.width)


def shared_gate(place: AttentionShape) -> Fusion:
    """Make the fusion with a learned gate per layer, shared by all heads (Lu et al.).

    Args:
        place: shape of the attention module.

    Returns:
        A module: `fusion(weights, enhanced, query)`.

    Example:
        >>> type(shared_gate(AttentionShape(heads=2, groups=2, width=4))).__name__
        'GateFusion'
    """
    return GateFusion(1, place.width)
