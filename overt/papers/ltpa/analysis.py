"""Learn to Pay Attention: analyses of a trained network besides its error.

Adversarial attacks (figure 6), queries of other images (figure 10 and A.5), segmentation from maps
(figure 9), and consistency under crops; `transfer_probes` has features for other datasets (Table
3). All run at the end of training, on as many items as the section `judge` of the recipe says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt import metrics
from overt.capture.eval_mode import eval_mode
from overt.data.batch import Batch
from overt.data.in_memory_images import random_shift
from overt.experiments.evaluate import FLIPS, PerItemMetrics, concatenate_metrics
from overt.metrics.consistency import weights_of_next_sample
from overt.metrics.metric import MetricInfo
from overt.metrics.query_swap import (
    QuerySwap,
    different_class_mask,
    draw_partners,
    same_class_mask,
    total_variation,
)
from overt.metrics.robustness import LEVELS, Attack, Classify, evaluate_attack, fooling_rate, pgd
from overt.nn.learned_attention.attention import MultiLevelFeatures
from overt.papers.ltpa.config import LtpaEvaluation
from overt.papers.ltpa.maps import (
    all_labels,
    all_maps,
    image_classifier,
    level_name,
    mask_metrics,
    unit_images,
)

PORTION = 256  # images per batch
SEED = 21  # of attack starts, crops and swap partners
BYTES = tuple(round(255 * eps) for eps in LEVELS)

CHANGED = replace(FLIPS, low=0.0, higher_is_better=None)
GAIN = MetricInfo("gain", "share", None, -1.0, 1.0, version=metrics.mass_inside.info.version)

MaskFn = Callable[[Sequence[int]], Bool[Tensor, "b y x"]]


@dataclass(frozen=True)
class AnalysisInputs:
    """A network, the test batches to analyse, and object masks if there are any.

    `last_level` is the network reduced to one map, the map it is evaluated by.
    """

    model: nn.Module
    last_level: Callable[[Batch], Any]
    batches: Sequence[Batch]
    masks: MaskFn | None = None

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def first(self, count: int) -> Float[Tensor, "n 3 y x"]:
        """Return the first images, scaled to [0, 1]."""
        return torch.cat([unit_images(batch) for batch in self.batches])[:count]


def run_analysis(inputs: AnalysisInputs, settings: LtpaEvaluation) -> PerItemMetrics:
    """Run all analyses that the settings name; each returns one value per item."""
    if not len(inputs):
        return {}
    found: PerItemMetrics = {}
    if settings.fgsm:
        found |= fgsm_fooling(inputs.model, inputs.first(settings.fgsm))
    if settings.pgd:
        found |= pgd_fooling(inputs.model, inputs.first(settings.pgd), settings.restarts)
    if settings.views:
        found |= crop_consistency(inputs, settings.views)
    if settings.swap:
        found |= query_swap_metrics(inputs.model, inputs.batches)
    if settings.segment and inputs.masks is not None:
        found |= segmentation_metrics(inputs)
    return found


# --- figure 6: attacks


def fgsm_fooling(model: nn.Module, images: Float[Tensor, "n 3 y x"]) -> PerItemMetrics:
    """Return `fooled_fgsm_<n>`: 1 where an FGSM step of n / 255 changes the prediction."""
    with eval_mode(model):
        found = evaluate_attack(image_classifier(model), images, LEVELS, portion=PORTION)
    return _by_strength("fgsm", found.fooled)


def pgd_fooling(
    model: nn.Module, images: Float[Tensor, "n 3 y x"], restarts: int = 1
) -> PerItemMetrics:
    """Return `fooled_pgd_<n>`: the same for 20 steps of PGD from one or more random starts."""
    # A fixed seed, so that all networks are attacked from the same starts.
    generator = torch.Generator().manual_seed(SEED)
    attack = partial(pgd, generator=generator, restarts=restarts)
    with eval_mode(model):
        return _by_strength("pgd", fooled_per_level(image_classifier(model), images, attack))


def fooled_per_level(
    classify: Classify, images: Float[Tensor, "n 3 y x"], attack: Attack
) -> Float[Tensor, "e n"]:
    """Return which images are fooled at each strength, attacking only those not fooled before.

    An image that is fooled within a small distance is fooled within any larger one.
    """
    fooled = torch.zeros(len(images), device=images.device)
    rows = []
    for eps in LEVELS:
        left = (fooled == 0).nonzero()[:, 0]
        if len(left):
            found = evaluate_attack(classify, images[left], (eps,), attack, PORTION)
            fooled = fooled.index_copy(0, left, found.fooled[0])
        rows.append(fooled)
    return torch.stack(rows)


def _by_strength(name: str, fooled: Float[Tensor, "e n"]) -> PerItemMetrics:
    declared = fooling_rate.info
    return {
        f"fooled_{name}_{steps}": (declared, row) for steps, row in zip(BYTES, fooled, strict=True)
    }


# --- attention under crops


def crop_consistency(inputs: AnalysisInputs, views: int) -> PerItemMetrics:
    """Return `consistency` of the map over crops, and that of other samples' maps as a control."""
    generator = torch.Generator().manual_seed(SEED)
    return concatenate_metrics(
        _batch_crop_consistency(inputs.last_level, batch, views, generator)
        for batch in inputs.batches
    )


def _batch_crop_consistency(
    last_level: Callable[[Batch], Any], batch: Batch, views: int, generator: torch.Generator
) -> PerItemMetrics:
    own = last_level(batch).attention
    # The control needs the map of another sample.
    if not own or len(batch) < 2:
        return {}
    # the metric loops over photos in many small steps, which are faster on a CPU
    crops = [
        last_level(random_shift(batch, generator)).attention[0].to("cpu") for _ in range(views)
    ]
    whole, declared = own[0].to("cpu"), metrics.view_consistency.info
    others = [weights_of_next_sample(one) for one in crops]
    return {
        "consistency": (declared, metrics.view_consistency(whole, crops)),
        "consistency_others": (declared, metrics.view_consistency(whole, others)),
    }


# --- figure 10 and A.5: the query of another image


def query_swap_metrics(model: Any, batches: Sequence[Batch]) -> PerItemMetrics:
    """Measure the effect of the query of another image, of the same class and of another class.

    One name per level: `moved_alike_8x8` is the share of the attention that moves. `swapped_*` is 1
    where the prediction changes. With ground truth, `gain_*` is the change in the mass of the last
    level inside it. Empty for a network without a query (figure 10 and A.5).
    """
    queries = [_query(model.encode(batch)) for batch in batches]
    if any(query is None for query in queries):
        return {}
    every = torch.cat([query for query in queries if query is not None])
    labels = all_labels(batches)
    generator = torch.Generator().manual_seed(SEED)
    found: PerItemMetrics = {}
    for name, allowed in (
        ("alike", same_class_mask),
        ("unlike", different_class_mask),
    ):
        partner = draw_partners(allowed(labels), generator)
        chosen = partner.split([len(batch) for batch in batches])
        found |= concatenate_metrics(
            _swap_metrics(model, batch, every, rows, name)
            for batch, rows in zip(batches, chosen, strict=True)
        )
    return found


def _query(features: Any) -> Tensor | None:
    return features.query if isinstance(features, MultiLevelFeatures) else None


def _swap_metrics(
    model: Any,
    batch: Batch,
    every: Float[Tensor, "n e"],
    partner: Int[Tensor, " b"],
    name: str,
) -> PerItemMetrics:
    features = model.encode(batch)
    # the batch's own queries first, then those of all items, so that rows can index either
    table = torch.cat([features.query, every])
    rows = torch.where(partner >= 0, partner + len(batch), -1)

    def decide(wanted: Tensor) -> Any:
        return model.decide(replace(features, query=table[wanted]))

    # A sample without a partner keeps its own query, and its result becomes NaN.
    there = rows >= 0
    itself = torch.arange(len(batch), device=rows.device)
    before, after = decide(itself), decide(torch.where(there, rows, itself))
    changed = (before.prediction.argmax(dim=-1) != after.prediction.argmax(dim=-1)).float()
    found: PerItemMetrics = {f"swapped_{name}": (CHANGED, torch.where(there, changed, torch.nan))}
    for own, other in zip(before.attention, after.attention, strict=True):
        swap = QuerySwap(own, other, there)
        found[f"moved_{name}_{level_name(own)}"] = total_variation.info, swap.moved
        if batch.target is not None and len(batch.target.keys) == len(own.keys):
            found[f"gain_{name}"] = GAIN, swap.gain(batch.target)
    return found


# --- figure 9: segmentation


def segmentation_metrics(inputs: AnalysisInputs) -> PerItemMetrics:
    """Compare every map of the network, and the controls, with the masks; see `mask_metrics`."""
    assert inputs.masks is not None
    parts, start = [], 0
    with eval_mode(inputs.model):
        for batch in inputs.batches:
            masks = inputs.masks(range(start, start + len(batch)))
            assert batch.images is not None
            maps = all_maps(inputs.model, batch)
            parts.append(mask_metrics(maps, masks.to(batch.images.device)))
            start += len(batch)
    return concatenate_metrics(parts)
