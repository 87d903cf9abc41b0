"""Selection of the cached positions to keep, the same number for each head.

Axis letters:  b batch  g head of keys and values  k cached position  n kept position
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.nn.hard_attention.selection import keep_top, kept_first_order


def keep_positions(
    scores: Float[Tensor, "b g k"],
    present: Bool[Tensor, "b k"],
    keep: int,
    first: int = 0,
    last: int = 0,
) -> Int[Tensor, "b g n"]:
    """Select the `keep` largest positions of each sample and head, in ascending order.

    Ties go to the first. Padding is selected only where a sample has fewer real positions than
    `keep`, so that all have the same number; under left padding it stays in front.

    Args:
        scores: Score of each position; infinity for positions that are always kept.
        present: Positions that are not padding.
        keep: Number of positions to keep; all if there are no more.
        first: Number of real positions at the beginning that are always kept: attention sinks.
        last: Number of positions at the end that are always kept.

    Returns:
        The kept positions.

    Raises:
        ValueError: The sizes do not match, more positions are protected than kept, or a score is
            not a number.

    Example:
        >>> scores = torch.tensor([[[0.1, 0.5, 0.3, 0.9, 0.2]]])
        >>> everything = torch.ones(1, 5, dtype=torch.bool)
        >>> keep_positions(scores, everything, keep=3)
        tensor([[[1, 2, 3]]])
        >>> keep_positions(scores, everything, keep=3, first=1, last=1)
        tensor([[[0, 3, 4]]])
    """
    b, _, k = scores.shape
    if tuple(present.shape) != (b, k):
        raise ValueError(
            f"present must have the shape ({b}, {k}) of the scores' samples and positions, got "
            f"{tuple(present.shape)}"
        )
    check_kept(keep, first, last)
    if bool(scores.isnan().any()):
        raise ValueError("scores must be numbers, got NaN")
    places = torch.arange(k, device=scores.device)
    front = present & (present.cumsum(dim=-1) <= first)
    protected = front | (places >= k - last)
    protected = (scores.isposinf() | protected[:, None]) & present[:, None]
    most_protected = int(protected.sum(dim=-1).max()) if protected.numel() else 0
    if min(keep, k) < most_protected:
        raise ValueError(
            f"{most_protected} positions are protected by first, last or an infinite score, but "
            f"keep is {keep}; keep more, or use a smaller window"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # finite, because `keep_top` keeps no infinite score: protected, then real, then padding
    most = torch.finfo(scores.dtype).max
    scores = scores.masked_fill(protected, most)
    scores = scores.clamp_min(-most / 2).masked_fill(~present[:, None], -most)
    kept = keep_top(rearrange(scores, "b g k -> (b g) k"), min(keep, k))
    order = kept_first_order(kept)[:, : min(keep, k)]
    return rearrange(order, "(b g) n -> b g n", b=b)


def check_kept(keep: int, first: int, last: int) -> None:
    """Raise unless `keep` positions can contain the `first` and the `last` ones."""
    if keep < 1 or first < 0 or last < 0 or first + last > keep:
        raise ValueError(
            f"expected keep >= first + last and at least 1, got keep={keep}, first={first} and "
            f"last={last}"
        )
