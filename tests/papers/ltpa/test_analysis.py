"""Analyses of a trained network: attacks, crops, swapped queries, segmentation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.data.batch import Batch
from overt.data.scenes.classification import DominantScenes
from overt.experiments.evaluate import PerItemMetrics
from overt.metrics import robustness
from overt.metrics.query_swap import different_class_mask, draw_partners, same_class_mask
from overt.metrics.robustness import evaluate_attack, fooling_rate
from overt.papers.ltpa.analysis import (
    BYTES,
    AnalysisInputs,
    crop_consistency,
    fgsm_fooling,
    fooled_per_level,
    pgd_fooling,
    query_swap_metrics,
    run_analysis,
    segmentation_metrics,
)
from overt.papers.ltpa.config import LtpaEvaluation, LtpaModel, LtpaNetwork, LtpaScore
from overt.papers.ltpa.evaluate import LastLevel
from overt.papers.ltpa.maps import all_maps, image_classifier, mask_metrics
from overt.papers.ltpa.model import build_network

SCENES = DominantScenes("test", 1, 10, size=32, cells=(8, 8))
BATCHES = (SCENES.batch(range(6)), SCENES.batch(range(6, 10)))


def make_network(kind: LtpaNetwork = LtpaNetwork.VGG_ATTENTION, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_network(LtpaModel(kind, width=0.05, **options), 6).eval()


def load_masks(rows: Any) -> torch.Tensor:
    return torch.stack([SCENES.mask(row) for row in rows])


def analysis_inputs(model: Any) -> AnalysisInputs:
    return AnalysisInputs(model, LastLevel(model), BATCHES, load_masks)


def metric_values(metrics: PerItemMetrics) -> dict[str, torch.Tensor]:
    return {name: found for name, (_, found) in metrics.items()}


def linear_classifier(weight: torch.Tensor) -> Any:
    return lambda images: images.flatten(1) @ weight.T


def test_attack_strengths_are_those_of_figure_6() -> None:
    assert BYTES == (1, 2, 4, 8, 16)


def test_fgsm_fooling_equals_the_fooling_rate() -> None:
    model = make_network(LtpaNetwork.GAP)
    images = analysis_inputs(model).first(5)
    assert len(images) == 5
    found = metric_values(fgsm_fooling(model, images))
    for steps in BYTES:
        wanted = fooling_rate(image_classifier(model), images, steps / 255)
        assert torch.equal(found[f"fooled_fgsm_{steps}"], wanted)


def test_only_images_not_yet_fooled_are_attacked_again() -> None:
    """The attack fools image `i` at every strength of at least `reach[i]`."""
    reach = torch.tensor([0.5, 1.5, 3.0, 20.0]) / 255
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 2, 2) / 8
    calls: list[tuple[float, int]] = []

    def attack(classify: Any, images: Any, labels: Any, eps: float) -> Any:
        calls.append((round(eps * 255), len(images)))
        place = (images[:, 0, 0, 0] * 8).round().long()
        return torch.where((reach[place] <= eps)[:, None, None, None], 1.0, images)

    def classify(images: Any) -> Any:
        high = (images.flatten(1).amin(dim=1) > 0.9).float()
        return torch.stack([1 - high, high], dim=1)

    found = fooled_per_level(classify, images, attack)
    assert found.tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 0],
    ]
    assert calls == [(1, 4), (2, 3), (4, 2), (8, 1), (16, 1)]


def test_pgd_fools_at_least_as_many_as_one_step_on_a_linear_classifier() -> None:
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    images = torch.rand(16, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    attack = evaluate_attack(linear_classifier(weight), images).fooled
    generator = torch.Generator().manual_seed(0)

    def pgd(classify: Any, images: Any, labels: Any, eps: float) -> Any:
        return robustness.pgd(classify, images, labels, eps, generator=generator, restarts=3)

    found = fooled_per_level(linear_classifier(weight), images, pgd)
    assert found.sum() >= attack.sum() and found.sum() > 0
    assert (found[1:] >= found[:-1]).all()


@pytest.mark.long
def test_attacks_are_reproducible_and_do_not_change_the_network() -> None:
    model = make_network(LtpaNetwork.GAP).train()
    images = analysis_inputs(model).first(3)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    first, second = (metric_values(pgd_fooling(model, images, restarts=2)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert model.training and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_crops_are_compared_with_the_full_image_and_with_others() -> None:
    found = metric_values(crop_consistency(analysis_inputs(make_network()), views=2))
    assert {len(one) for one in found.values()} == {10}
    again = metric_values(crop_consistency(analysis_inputs(make_network()), views=2))
    assert torch.equal(found["consistency"], again["consistency"])
    assert float(found["consistency"].mean()) > float(found["consistency_others"].mean())


def test_uniform_and_missing_maps_have_no_consistency() -> None:
    assert crop_consistency(analysis_inputs(make_network(LtpaNetwork.VGG)), 1) == {}
    found = metric_values(
        crop_consistency(analysis_inputs(make_network(score=LtpaScore.UNIFORM)), 1)
    )
    assert found["consistency"].isnan().all()


@pytest.mark.parametrize("score", [LtpaScore.DOT, LtpaScore.SCALED_DOT, LtpaScore.ADDITIVE])
def test_swapped_queries_change_attention_that_depends_on_the_query(score: LtpaScore) -> None:
    found = metric_values(query_swap_metrics(make_network(score=score, levels=3), BATCHES))
    for name in ("alike", "unlike"):
        for grid in ("8x8", "16x16", "32x32"):
            moved = found[f"moved_{name}_{grid}"]
            assert len(moved) == 10 and moved[~moved.isnan()].gt(0).all()
        assert len(found[f"gain_{name}"]) == len(found[f"swapped_{name}"]) == 10


def test_parametrised_attention_does_not_depend_on_its_query() -> None:
    """T-LT-2 in numbers: the share that changes is rounding error."""
    found = metric_values(query_swap_metrics(make_network(score=LtpaScore.PARAMETRISED), BATCHES))
    assert max(float(found[name].nan_to_num().max()) for name in found) < 1e-5


def test_partner_queries_come_from_all_batches() -> None:
    """Compared with a slow loop that swaps in the query of another image, pair by pair."""
    model = make_network(score=LtpaScore.DOT, levels=1)
    found = metric_values(query_swap_metrics(model, BATCHES))
    labels = torch.cat([batch.labels for batch in BATCHES if batch.labels is not None])
    full = SCENES.batch(range(10))
    with torch.no_grad():
        features = model.encode(full)
    own = model.decide(features).attention[0]
    generator = torch.Generator().manual_seed(21)
    for name, allowed in (
        ("alike", same_class_mask),
        ("unlike", different_class_mask),
    ):
        partner = draw_partners(allowed(labels), generator).tolist()
        for row, other in enumerate(partner):
            one = found[f"moved_{name}_8x8"][row]
            if other < 0:
                assert one.isnan()
                continue
            query = features.query.clone()
            query[row] = features.query[other]
            after = model.decide(replace(features, query=query)).attention[0]
            wanted = (after.weights[row] - own.weights[row]).abs().sum().detach() / 2
            assert float(one) == pytest.approx(float(wanted), abs=1e-5)
    crossing = [other for row, other in enumerate(partner) if (row < 6) != (other < 6)]
    assert crossing


def test_networks_without_a_query_have_no_query_swap_metrics() -> None:
    for model in (
        make_network(LtpaNetwork.VGG),
        make_network(LtpaNetwork.PAN),
        make_network(score=LtpaScore.UNIFORM),
    ):
        assert query_swap_metrics(model, BATCHES) == {}


def test_segmentation_over_batches_equals_that_over_all_items() -> None:
    model = make_network()
    found = metric_values(segmentation_metrics(analysis_inputs(model)))
    full = metric_values(
        mask_metrics(all_maps(model, SCENES.batch(range(10))), load_masks(range(10)))
    )
    assert found.keys() == full.keys()
    for name in ("jaccard_joined", "pointing_centre", "mass_uniform"):
        torch.testing.assert_close(found[name], full[name].float())


def test_settings_select_the_analyses() -> None:
    model = make_network()
    nothing = LtpaEvaluation(fgsm=0, pgd=0, views=0, swap=False, segment=False)
    assert run_analysis(analysis_inputs(model), nothing) == {}
    only = run_analysis(analysis_inputs(model), replace(nothing, segment=True))
    assert only and all(name.split("_")[0] in ("pointing", "mass", "jaccard") for name in only)
    assert run_analysis(replace(analysis_inputs(model), batches=()), LtpaEvaluation()) == {}
    unmasked = replace(analysis_inputs(model), masks=None)
    assert run_analysis(unmasked, replace(nothing, segment=True)) == {}
    few = run_analysis(analysis_inputs(model), replace(nothing, fgsm=3))
    assert {len(found) for found in metric_values(few).values()} == {3}


def test_batches_without_ground_truth_have_no_gain() -> None:
    bare = [Batch(one.ids, one.images, geometry=one.geometry, labels=one.labels) for one in BATCHES]
    found = query_swap_metrics(make_network(score=LtpaScore.DOT), bare)
    assert found and not [name for name in found if name.startswith("gain")]
