"""Targets that should not help, at the price of those that should.

Random cues have been shown to raise accuracy as much as human ones do (Shrestha, Kafle and Kanan,
"A negative case analysis of visual grounding methods for VQA", ACL 2020). So a target helps only
where it beats its placebo: the same loss, on the same rows, for as many steps, with the content
gone. Each function takes a source of targets and gives another. What a sample gets depends on the
seed and its id alone, not on the batch, its order or its padding. Rows without a target stay
without one.

Losses that compare whole batches (`distributions`, and a discriminator without context) do not see
which sample a target belongs to. For them targets swapped among samples are no placebo but nearly
the same targets; scattered weights and random maps are one only as far as the targets of a data set
have something in common.
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
from overt.supervise.targets import Targets


def swapped(targets: Targets, ids: Sequence[str], seed: int) -> Targets:
    """Every sample gets the target of another, each used once: what belongs to the data set stays.

    `ids` are the samples that have a target. The map of a longer or shorter text is stretched: each
    word gets the share of its stretch. Maps over a picture must have one shape.
    """
    return _handed(targets, _round(ids, seed))


def swapped_within(targets: Targets, classes: Mapping[str, Hashable], seed: int) -> Targets:
    """The same among samples of one class, by sample id: what belongs to the class stays too.

    Samples that are alone in their class swap with each other; an only one gets any other's target.
    """
    members: dict[Hashable, list[str]] = {}
    for one, of in classes.items():
        members.setdefault(of, []).append(one)
    alone = [group[0] for group in members.values() if len(group) == 1]
    partners: dict[str, str] = {}
    for group in members.values():
        if len(group) > 1:
            partners |= _round(group, seed)
    if len(alone) == 1:
        partners[alone[0]] = _round(list(classes), seed)[alone[0]]
    elif alone:
        partners |= _round(alone, seed)
    return _handed(targets, partners)


def scattered(targets: Targets, seed: int) -> Targets:
    """The weights of the target at random places: as sharp as the target, on other keys."""

    def move(weights: Float[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, " n"]:
        return weights[torch.randperm(len(weights), generator=generator)]

    return _redrawn(targets, move, seed)


def random_maps(targets: Targets, seed: int) -> Targets:
    """A map drawn evenly from all maps over the keys there are, with the mass of the target."""

    def draw(weights: Float[Tensor, " n"], generator: torch.Generator) -> Float[Tensor, " n"]:
        amounts = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=generator)
        return amounts / amounts.sum() * weights.sum()

    return _redrawn(targets, draw, seed)


def uniform(targets: Targets) -> Targets:
    """All keys alike, with the mass of the target."""

    def give(ids: Sequence[str]) -> AttentionMap:
        own = targets(ids)
        seen = rearrange(own.visible, "b q k -> b 1 1 q k")
        share = own.weights.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp_min(1)
        return _with(own, share * seen)

    return give


def unmasked(targets: Targets, look: Targets) -> Targets:
    """What the model looked at by itself, `look(ids)`, on the rows that have a target.

    The control for surrogates: the same model, trained on its own attention, without any search.
    """

    def give(ids: Sequence[str]) -> AttentionMap:
        own, seen = targets(ids), look(ids).detach()
        rows = (own.weights.sum(dim=-1, keepdim=True) > 0).any(dim=1, keepdim=True)
        return _with(seen, seen.weights * rows.any(dim=2, keepdim=True))

    return give


def nothing(targets: Targets) -> Targets:
    """No target for anyone: the same training, and no supervision."""

    def give(ids: Sequence[str]) -> AttentionMap:
        own = targets(ids)
        return _with(own, torch.zeros_like(own.weights))

    return give


# --- who swaps with whom


def _round(ids: Sequence[str], seed: int) -> dict[str, str]:
    """A partner for every sample: one round trip through all, in an order that the seed decides."""
    order = sorted(set(ids), key=lambda one: _digest(seed, one))
    if len(order) < 2:
        raise ValueError(f"targets swap among two samples or more, and there are {len(order)}")
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def _handed(targets: Targets, partners: Mapping[str, str]) -> Targets:
    def give(ids: Sequence[str]) -> AttentionMap:
        unknown = [one for one in ids if one not in partners]
        if unknown:
            raise ValueError(
                f"sample {unknown[0]!r} has nobody to swap targets with: it was not among those "
                f"given ({len(unknown)} such)"
            )
        own = targets(ids)
        return _placed(targets([partners[one] for one in ids]), own)

    return give


# --- putting weights where they belong


def _with(own: AttentionMap, weights: Float[Tensor, "b l h q k"]) -> AttentionMap:
    return replace(own, values=weights.to(own.values.dtype), form=Form.PLAIN)


def _placed(other: AttentionMap, own: AttentionMap) -> AttentionMap:
    """The rows of `other` on the keys that `own` sees, stretched where these are more or fewer."""
    flat = len(own.keys.spans) == 1 and len(own.keys.spans[0].shape) == 1
    if not flat and len(other.keys) != len(own.keys):
        raise ValueError(
            f"targets over {len(other.keys)} and {len(own.keys)} cells cannot be swapped"
        )
    first, count = _gathered(other.weights.double(), other.visible)
    rank = own.visible.cumsum(dim=-1) - 1  # b q k
    mine = own.visible.sum(dim=-1, keepdim=True)
    if not flat and (mine != count).any():
        raise ValueError("targets over cells of which some are hidden cannot be swapped")
    # the mass up to a place between two keys, as if each key were spread over its own stretch
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
    return replace(_with(own, found * seen * wanted), kind=other.kind)


def _gathered(
    weights: Float[Tensor, "b l h q k"], visible: Bool[Tensor, "b q k"]
) -> tuple[Float[Tensor, "b l h q k"], Tensor]:
    """The weights of visible keys first, in their order, then zeros; and how many there are."""
    order = (~visible).to(torch.uint8).argsort(dim=-1, stable=True)
    seen = rearrange(visible, "b q k -> b 1 1 q k")
    spread = rearrange(order, "b q k -> b 1 1 q k").expand_as(weights)
    return (weights * seen).gather(-1, spread), visible.sum(dim=-1, keepdim=True)


def _redrawn(
    targets: Targets,
    draw: Callable[[Float[Tensor, " n"], torch.Generator], Float[Tensor, " n"]],
    seed: int,
) -> Targets:
    """Each row of visible weights replaced by a draw that belongs to its sample."""

    def give(ids: Sequence[str]) -> AttentionMap:
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
        return _with(own, found.to(own.values.device))

    return give


def _digest(seed: int, one: str) -> int:
    """A number that belongs to a sample and a seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{one}".encode()).digest()[:7], "big")
