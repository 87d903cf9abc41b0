"""What a network of Learn to Pay Attention is asked after its training, besides its error.

Attacks (figure 6), other images' queries (figure 10 and A.5), shapes from maps (figure 9), and
attention under crops; `ltpa_probes` has features for other data sets (Table 3). Everything is asked
in the run that trains, of as many items as the section `judge` of the recipe says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt import measure
from overt.data.batch import Batch
from overt.data.resident import shift
from overt.measure.measured import Measure
from overt.measure.robustness import LEVELS, Attack, Classify
from overt.models.paying.attention import Levels
from overt.recipes.evaluation import FLIPS, Noted, noted
from overt.recipes.ltpa.maps import classifier, found_by, from_0_to_1, labels_of, maps_of, name_of
from overt.recipes.ltpa.recipe import Judging

PORTION = 256  # images at a time
SEED = 21  # of what is drawn: starts of attacks, crops, partners
BYTES = tuple(round(255 * eps) for eps in LEVELS)

CHANGED = replace(FLIPS, low=0.0, higher_is_better=None)
GAIN = Measure("gain", "share", None, -1.0, 1.0)

Masks = Callable[[Sequence[int]], Bool[Tensor, "b y x"]]


@dataclass(frozen=True)
class Asked:
    """A network, the test items that it is asked of, as it is judged, and the masks if any.

    `looks` is the network with one map, the one by which it is judged.
    """

    model: nn.Module
    looks: Callable[[Batch], Any]
    batches: Sequence[Batch]
    masks: Masks | None = None

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def first(self, count: int) -> Float[Tensor, "n 3 y x"]:
        """The first images, from 0 to 1."""
        return torch.cat([from_0_to_1(batch) for batch in self.batches])[:count]


def everything(asked: Asked, judging: Judging) -> Noted:
    """All that the settings ask for, one number an item each."""
    if not len(asked):
        return {}
    found: Noted = {}
    if judging.fgsm:
        found |= fooled_by_fgsm(asked.model, asked.first(judging.fgsm))
    if judging.pgd:
        found |= fooled_by_pgd(asked.model, asked.first(judging.pgd), judging.restarts)
    if judging.views:
        found |= under_crops(asked, judging.views)
    if judging.swap:
        found |= other_queries(asked.model, asked.batches)
    if judging.segment and asked.masks is not None:
        found |= segmented(asked)
    return found


# --- figure 6: attacks


def fooled_by_fgsm(model: nn.Module, images: Float[Tensor, "n 3 y x"]) -> Noted:
    """`fooled_fgsm_1` and so on: 1 where one step of so many 255ths changes the prediction."""
    with measure.still(model):
        found = measure.attacked(classifier(model), images, LEVELS, portion=PORTION)
    return _by_strength("fgsm", found.fooled)


def fooled_by_pgd(model: nn.Module, images: Float[Tensor, "n 3 y x"], restarts: int = 1) -> Noted:
    """`fooled_pgd_1` and so on: the same for 20 steps from a random start, or from several."""
    generator = torch.Generator().manual_seed(SEED)
    attack = partial(measure.pgd, generator=generator, restarts=restarts)
    with measure.still(model):
        return _by_strength("pgd", growing(classifier(model), images, attack))


def growing(
    classify: Classify, images: Float[Tensor, "n 3 y x"], attack: Attack
) -> Float[Tensor, "e n"]:
    """Which images are fooled at each strength, when only those that are left are attacked anew.

    An image that is fooled within a small distance is fooled within any larger one.
    """
    fooled = torch.zeros(len(images), device=images.device)
    rows = []
    for eps in LEVELS:
        left = (fooled == 0).nonzero()[:, 0]
        if len(left):
            found = measure.attacked(classify, images[left], (eps,), attack, PORTION)
            fooled = fooled.index_copy(0, left, found.fooled[0])
        rows.append(fooled)
    return torch.stack(rows)


def _by_strength(name: str, fooled: Float[Tensor, "e n"]) -> Noted:
    declared = measure.fooling.measure
    return {
        f"fooled_{name}_{steps}": (declared, row) for steps, row in zip(BYTES, fooled, strict=True)
    }


# --- attention under crops


def under_crops(asked: Asked, views: int) -> Noted:
    """`consistency` of the judged map over crops, and that of other samples' maps, a control."""
    generator = torch.Generator().manual_seed(SEED)
    return noted(_crops_of(asked.looks, batch, views, generator) for batch in asked.batches)


def _crops_of(
    looks: Callable[[Batch], Any], batch: Batch, views: int, generator: torch.Generator
) -> Noted:
    own = looks(batch).attention
    if not own or len(batch) < 2:
        return {}
    # photo by photo: many small steps, which a CPU takes faster
    crops = [looks(shift(batch, generator)).attention[0].to("cpu") for _ in range(views)]
    whole, declared = own[0].to("cpu"), measure.view_consistency.measure
    others = [measure.of_others(one) for one in crops]
    return {
        "consistency": (declared, measure.view_consistency(whole, crops)),
        "consistency_others": (declared, measure.view_consistency(whole, others)),
    }


# --- figure 10 and A.5: the query of another image


def other_queries(model: Any, batches: Sequence[Batch]) -> Noted:
    """What the query of another image of the same class, and of another class, changes.

    A level a name: `moved_alike_8x8` is the share of the attention that goes elsewhere. `swapped_*`
    is 1 where the prediction changes. Where the truth is known, `gain_*` is how much more of the
    last level falls on it. Nothing for a network without a query.
    """
    queries = [_query(model.encode(batch)) for batch in batches]
    if any(query is None for query in queries):
        return {}
    every = torch.cat([query for query in queries if query is not None])
    labels = labels_of(batches)
    generator = torch.Generator().manual_seed(SEED)
    found: Noted = {}
    for name, allowed in (("alike", measure.alike), ("unlike", measure.unlike)):
        partner = measure.partners(allowed(labels), generator)
        chosen = partner.split([len(batch) for batch in batches])
        found |= noted(
            _swapped(model, batch, every, rows, name)
            for batch, rows in zip(batches, chosen, strict=True)
        )
    return found


def _query(features: Any) -> Tensor | None:
    return features.query if isinstance(features, Levels) else None


def _swapped(
    model: Any,
    batch: Batch,
    every: Float[Tensor, "n e"],
    partner: Int[Tensor, " b"],
    name: str,
) -> Noted:
    features = model.encode(batch)
    # the batch's own queries first, then those of all items: rows of either can be asked for
    table = torch.cat([features.query, every])
    rows = torch.where(partner >= 0, partner + len(batch), -1)

    def decide(wanted: Tensor) -> Any:
        return model.decide(replace(features, query=table[wanted]))

    there = rows >= 0
    itself = torch.arange(len(batch), device=rows.device)
    before, after = decide(itself), decide(torch.where(there, rows, itself))
    changed = (before.prediction.argmax(dim=-1) != after.prediction.argmax(dim=-1)).float()
    found: Noted = {f"swapped_{name}": (CHANGED, torch.where(there, changed, torch.nan))}
    for own, other in zip(before.attention, after.attention, strict=True):
        swap = measure.Swap(own, other, there)
        found[f"moved_{name}_{name_of(own)}"] = measure.moved.measure, swap.moved
        if batch.target is not None and len(batch.target.keys) == len(own.keys):
            found[f"gain_{name}"] = GAIN, swap.gain(batch.target)
    return found


# --- figure 9: shapes


def segmented(asked: Asked) -> Noted:
    """Every map of the network, and the controls, held against the masks; see `found_by`."""
    assert asked.masks is not None
    parts, start = [], 0
    with measure.still(asked.model):
        for batch in asked.batches:
            masks = asked.masks(range(start, start + len(batch)))
            assert batch.images is not None
            maps = maps_of(asked.model, batch)
            parts.append(found_by(maps, masks.to(batch.images.device)))
            start += len(batch)
    return noted(parts)
