"""Attention and a mask over it: disturbed where the mask is small, or strengthened there.

Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022, eq. 3 and 5-10; after Lu et
al., "Attention Calibration for Transformer in Neural Machine Translation", ACL 2021.

Every fusion as printed multiplies attention by a factor between 1 and e that depends on the mask
alone. So, made to sum to one again, it is a bias on the scores of less than 1: a fused kernel can
do it, and a region that attention has left cannot come back by it, whatever the mask says.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Weights = Float[Tensor, "b h q k"]
Visible = Bool[Tensor, "b #q k"] | None
Average = Callable[[Weights, Visible], Weights]  # what is put in the place of disturbed attention

ETA = 0.1  # of the moving average, in all experiments of the paper


@dataclass(frozen=True)
class Place:
    """An attention module: its heads, the groups of heads that share keys, numbers a head."""

    heads: int
    groups: int
    width: int


# --- disturbing


def uniform(weights: Weights, visible: Visible) -> Weights:
    """The same for all keys that a query sees (Lu et al.): the mean of its weights over them.

    Their code divides by the padded length, so that padding gets attention; here it does not. What
    a disturbed key then gets is more than it had where it had less than average: a mask that is to
    do harm cannot show such a key.
    """
    if visible is None:
        return weights.mean(dim=-1, keepdim=True).expand_as(weights)
    seen = visible[:, None].expand_as(weights)
    share = weights.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(seen, share, 0)


def head_mean(weights: Weights, visible: Visible) -> Weights:
    """The mean over heads, as the paper's words can be read; with one head nothing is disturbed."""
    return weights.mean(dim=1, keepdim=True).expand_as(weights)


def nothing(weights: Weights, visible: Visible) -> Weights:
    """Zero: what is disturbed is removed. The paper argues against it."""
    return torch.zeros_like(weights)


def perturb(
    weights: Weights, mask: Weights, average: Average = uniform, visible: Visible = None
) -> Weights:
    """`m a + (1 - m) average` (eq. 3). Rows do not sum to one: nothing is renormalised."""
    return torch.lerp(average(weights, visible), weights, mask.to(weights))


# --- strengthening


def enhance(weights: Weights, mask: Weights) -> Weights:
    """`a exp(1 - m)` (eq. 5): up to e times as much where the mask is small."""
    return weights * (1 - mask).exp()


def largest(weights: Weights, enhanced: Weights) -> Weights:
    """The larger of the two (eq. 6).

    As printed that is the enhanced one everywhere, since it is never smaller; only when it is made
    to sum to one before is there anything to choose.
    """
    return torch.maximum(weights, enhanced)


def added(weights: Weights, enhanced: Weights, eta: float = ETA) -> Weights:
    """`a + eta a'` (eq. 7), which the paper calls a moving average."""
    return weights + eta * enhanced


def mixed(
    weights: Weights, enhanced: Weights, share: float | Float[Tensor, "#b #h #q 1"]
) -> Weights:
    """`s a + (1 - s) a'` (eq. 8 and 9)."""
    share = share if isinstance(share, float) else share.to(weights)
    return torch.lerp(enhanced, weights, share)


def normalised(weights: Weights) -> Weights:
    """Rows that sum to one; a row without weight stays zero."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


# --- fusions, one a layer


class Fusion(nn.Module, ABC):
    """What a layer makes of its weights and the enhanced ones: `fusion(weights, enhanced, query)`.

    It must grow with its inputs: twice the weights, twice the result. All four of the paper do.
    """

    @abstractmethod
    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """The aligned weights."""


class Largest(Fusion):
    """Max pooling."""

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """The larger of the two."""
        return largest(weights, enhanced)


class MovingAverage(Fusion):
    """A tenth of the enhanced weights on top."""

    def __init__(self, eta: float = ETA) -> None:
        super().__init__()
        self.eta = eta

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """The sum of the two, the second times eta."""
        return added(weights, enhanced, self.eta)


class Decay(Fusion):
    """The share `exp(-s / T)` of plain attention, which falls as training goes on.

    `elapsed` is `s / T`: steps done over the temperature. It is part of the state, so that a model
    that is loaded fuses as it did last. Lu et al. take T = 100,000 steps and evaluate at 1.5, so
    T is about two thirds of training.
    """

    elapsed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("elapsed", torch.zeros(()))

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Less and less of the plain weights."""
        return mixed(weights, enhanced, (-self.elapsed).exp().to(weights).reshape(1, 1, 1, 1))


class Gate(Fusion):
    """The share `sigmoid(w q + b)` of plain attention, one a word and head (eq. 9-10).

    `heads` have weights of their own, as the paper says; with 1 all heads have the same, as in the
    code of Lu et al. `width` is the numbers of a head's query.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(heads))

    def share(self, query: Float[Tensor, "b h q d"]) -> Float[Tensor, "b h q 1"]:
        """How much of plain attention each word keeps."""
        score = (query * self.weight[:, None]).sum(dim=-1) + self.bias[:, None]
        return score.sigmoid()[..., None]

    def forward(
        self, weights: Weights, enhanced: Weights, query: Float[Tensor, "b h q d"]
    ) -> Weights:
        """Each word by its own share."""
        return mixed(weights, enhanced, self.share(query))


Fuse = Callable[[Place], Fusion]


def max_pooling(place: Place) -> Fusion:
    """Fuse by the larger weight (eq. 6)."""
    return Largest()


def moving_average(place: Place) -> Fusion:
    """Fuse by adding a tenth (eq. 7)."""
    return MovingAverage()


def decay(place: Place) -> Fusion:
    """Fuse more and more as training goes on (eq. 8); tell `Aligner.advance` how far it is."""
    return Decay()


def gate(place: Place) -> Fusion:
    """Fuse by a learned gate for every layer and head (eq. 9-10)."""
    return Gate(place.heads, place.width)


def shared_gate(place: Place) -> Fusion:
    """Fuse by a learned gate for every layer, the same for all heads (Lu et al.)."""
    return Gate(1, place.width)
