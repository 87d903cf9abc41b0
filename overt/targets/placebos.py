"""Placebo targets: controls for supervised attention.

Random cues can raise accuracy as much as human ones (Shrestha, Kafle and Kanan, "A negative case
analysis of visual grounding methods for VQA", ACL 2020). A target therefore helps only if it beats
its placebo: the same loss, on the same rows, for as many steps, without its information. Each
function takes a target source and returns another one. The result for a sample depends on the seed
and its id only, not on the batch, its order or its padding. Rows without a target stay without one.

Losses on whole batches (`distribution_matching`, and a discriminator without context) do not use
which sample a target belongs to. For them swapped targets are not a placebo but nearly the same
targets; permuted keys and random maps are one only as far as the targets of a dataset have
something in common.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form
from overt.losses.attention_losses import at_least_float32
from overt.targets.sources import Targets


def swapped_targets(targets: Targets, ids: Sequence[str], seed: int) -> Targets:
    """Give every sample the target of another one, each used once.

    This preserves the statistics of the dataset. The map of a longer or shorter text is resampled:
    each word gets the share of its stretch. Maps over images must have the same shape.

    Args:
        targets: The source.
        ids: The samples that have a target.
        seed: The seed of the order.

    Returns:
        A target source.

    Raises:
        ValueError: There are fewer than two samples.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.eye(2)[[int(i) for i in ids]], axes="b k")
        >>> swapped_targets(targets, ["0", "1"], seed=0)(["0"]).weights.flatten()
        tensor([0., 1.])
    """
    return _exchanged(targets, _partners(ids, seed))


def swapped_within_class(targets: Targets, classes: Mapping[str, Hashable], seed: int) -> Targets:
    """Give every sample the target of another one of its class, which preserves class statistics.

    Samples that are alone in their class swap with each other; a single one gets any other target.

    Args:
        targets: The source.
        classes: The class of each sample, by id.
        seed: The seed of the order.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.eye(4)[[int(i) for i in ids]], axes="b k")
        >>> classes = {"0": "cat", "1": "dog", "2": "cat", "3": "dog"}
        >>> swapped_within_class(targets, classes, seed=0)(["0"]).weights.flatten()
        tensor([0., 0., 1., 0.])
    """
    members: dict[Hashable, list[str]] = {}
    for one, of in classes.items():
        members.setdefault(of, []).append(one)
    alone = [group[0] for group in members.values() if len(group) == 1]
    partners: dict[str, str] = {}
    for group in members.values():
        if len(group) > 1:
            partners |= _partners(group, seed)
    if len(alone) == 1:
        partners[alone[0]] = _partners(list(classes), seed)[alone[0]]
    elif alone:
        partners |= _partners(alone, seed)
    return _exchanged(targets, partners)


def permuted_keys(targets: Targets, seed: int) -> Targets:
    """Permute the weights of each target over its keys: as sharp as the target, on other keys.

    Args:
        targets: The source.
        seed: The seed of the permutations.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[0.7, 0.2, 0.1]]), axes="b k")
        >>> permuted_keys(targets, seed=0)(["a"]).weights.flatten().sort().values
        tensor([0.1000, 0.2000, 0.7000])
    """

    def move(weights: Float[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, " n"]:
        return weights[torch.randperm(len(weights), generator=generator)]

    return _redrawn(targets, move, seed)


def random_targets(targets: Targets, seed: int) -> Targets:
    """Draw maps uniformly from all maps over the visible keys, with the mass of the target.

    Args:
        targets: The source.
        seed: The seed of the maps.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[0.7, 0.2, 0.1]]), axes="b k")
        >>> random_targets(targets, seed=0)(["a"]).weights.sum()
        tensor(1.)
    """

    def draw(weights: Float[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, " n"]:
        amounts = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
        # in 16 bits the sum of a few thousand counts would be infinite
        return amounts / amounts.sum() * at_least_float32(weights).sum()

    return _redrawn(targets, draw, seed)


def uniform_targets(targets: Targets) -> Targets:
    """Return uniform maps with the mass of the target.

    Args:
        targets: The source.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> uniform_targets(targets)(["a"]).weights.flatten()
        tensor([0.5000, 0.5000])
    """

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        own = targets(ids)
        seen = rearrange(own.visible, "b q k -> b 1 1 q k")
        # in 16 bits the sum of a few thousand counts would be infinite
        mass = at_least_float32(own.weights).sum(dim=-1, keepdim=True)
        share = mass / seen.sum(dim=-1, keepdim=True).clamp_min(1)
        return _replace_weights(own, (share * seen).to(own.weights.dtype))

    return targets_of


def own_attention(targets: Targets, look: Targets) -> Targets:
    """Return the model's own attention on the rows that have a target.

    The control for surrogates: the same model, trained on its own attention, without a search.

    Args:
        targets: The source.
        look: Returns the attention of the model for some samples.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> def look(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[0.4, 0.6]]), axes="b k")
        >>> own_attention(targets, look)(["a"]).weights.flatten()
        tensor([0.4000, 0.6000])
    """

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        own, seen = targets(ids), look(ids).detach()
        rows = (own.weights.sum(dim=-1, keepdim=True) > 0).any(dim=1, keepdim=True)
        return _replace_weights(seen, seen.weights * rows.any(dim=2, keepdim=True))

    return targets_of


def no_targets(targets: Targets) -> Targets:
    """Return empty targets: the same training without supervision.

    Args:
        targets: The source.

    Returns:
        A target source.

    Example:
        >>> def targets(ids):
        ...     return AttentionMap.from_weights(torch.tensor([[1.0, 0.0]]), axes="b k")
        >>> no_targets(targets)(["a"]).weights.flatten()
        tensor([0., 0.])
    """

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        own = targets(ids)
        return _replace_weights(own, torch.zeros_like(own.weights))

    return targets_of


# --- partners of samples


def _partners(ids: Sequence[str], seed: int) -> dict[str, str]:
    """Return a partner for every sample: a cycle through all, in an order given by the seed."""
    order = sorted(set(ids), key=lambda one: _digest(seed, one))
    if len(order) < 2:
        raise ValueError(f"swapping targets needs at least two samples, got {len(order)}")
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def _exchanged(targets: Targets, partners: Mapping[str, str]) -> Targets:
    def targets_of(ids: Sequence[str]) -> AttentionMap:
        unknown = [one for one in ids if one not in partners]
        if unknown:
            raise ValueError(
                f"sample {unknown[0]!r} is not among the samples to swap ({len(unknown)} are "
                "missing)"
            )
        own = targets(ids)
        return _resampled_onto(targets([partners[one] for one in ids]), own)

    return targets_of


# --- weights on other keys


def _replace_weights(own: AttentionMap, weights: Float[Tensor, "b l h q k"]) -> AttentionMap:
    return replace(own, values=weights.to(own.values.dtype), form=Form.PLAIN)


def _resampled_onto(other: AttentionMap, own: AttentionMap) -> AttentionMap:
    """Place the rows of `other` on the visible keys of `own`, resampled if their numbers differ."""
    flat = len(own.keys.spans) == 1 and len(own.keys.spans[0].shape) == 1
    if not flat and len(other.keys) != len(own.keys):
        raise ValueError(f"cannot swap targets of {len(other.keys)} and {len(own.keys)} cells")
    first, count = _visible_first(other.weights.double(), other.visible)
    rank = own.visible.cumsum(dim=-1) - 1  # b q k
    mine = own.visible.sum(dim=-1, keepdim=True)
    if not flat and (mine != count).any():
        raise ValueError("cannot swap targets with different numbers of visible cells")
    # cumulative mass, with each key spread evenly over its stretch
    until = torch.nn.functional.pad(first.cumsum(dim=-1), (1, 0))

    def mass(edge: Tensor) -> Tensor:
        at = (edge * count).double() / mine.clamp_min(1)
        low = at.floor().clamp(0, first.shape[-1] - 1).long()
        part = rearrange(at - low, "b q k -> b 1 1 q k")
        spread = rearrange(low, "b q k -> b 1 1 q k").expand(*first.shape[:-1], -1)
        return until.gather(-1, spread) + part * first.gather(-1, spread)

    stretched = mass((rank + 1).clamp_min(0)) - mass(rank.clamp_min(0))
    keep = rank.clamp_min(0).clamp_max(first.shape[-1] - 1)
    plain = first.gather(-1, rearrange(keep, "b q k -> b 1 1 q k").expand_as(stretched))
    same = rearrange(mine == count, "b q 1 -> b 1 1 q 1")
    found = torch.where(same, plain, stretched)
    seen = rearrange(own.visible, "b q k -> b 1 1 q k")
    wanted = own.weights.sum(dim=-1, keepdim=True) > 0
    return replace(_replace_weights(own, found * seen * wanted), kind=other.kind)


def _visible_first(
    weights: Float[Tensor, "b l h q k"], visible: Bool[Tensor, "b q k"]
) -> tuple[Float[Tensor, "b l h q k"], Tensor]:
    """Move the weights of visible keys to the front, and return the number of visible keys."""
    order = (~visible).to(torch.uint8).argsort(dim=-1, stable=True)
    seen = rearrange(visible, "b q k -> b 1 1 q k")
    spread = rearrange(order, "b q k -> b 1 1 q k").expand_as(weights)
    return (weights * seen).gather(-1, spread), visible.sum(dim=-1, keepdim=True)


def _redrawn(
    targets: Targets,
    draw: Callable[[Float[Tensor, " n"], torch.Generator], Float[Tensor, " n"]],
    seed: int,
) -> Targets:
    """Replace each row of visible weights by a random draw of its sample."""

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        own = targets(ids)
        weights, visible = own.weights.detach().cpu(), own.visible.cpu()
        found = torch.zeros_like(weights)
        _, l, h, q, _ = weights.shape
        for b, one in enumerate(ids):
            generator = torch.Generator().manual_seed(_digest(seed, one))
            for layer, head, query in product(range(l), range(h), range(q)):
                seen, row = visible[b, query], weights[b, layer, head, query]
                drawn = draw(row[seen], generator)
                found[b, layer, head, query, seen] = drawn.to(found.dtype)
        return _replace_weights(own, found.to(own.values.device))

    return targets_of


def _digest(seed: int, one: str) -> int:
    """Return a number of a sample and a seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{one}".encode()).digest()[:7], "big")
