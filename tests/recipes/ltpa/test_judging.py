"""What a trained network is asked: attacks, crops, queries of others, shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt import measure
from overt.data.batch import Batch
from overt.data.scenes.classify import DominantScenes
from overt.recipes.evaluation import Noted
from overt.recipes.ltpa.building import network
from overt.recipes.ltpa.evaluation import Judged
from overt.recipes.ltpa.judging import (
    BYTES,
    Asked,
    everything,
    fooled_by_fgsm,
    fooled_by_pgd,
    growing,
    other_queries,
    segmented,
    under_crops,
)
from overt.recipes.ltpa.maps import classifier, found_by, maps_of
from overt.recipes.ltpa.recipe import Judging, Model, Net, Score

SCENES = DominantScenes("test", 1, 10, size=32, cells=(8, 8))
BATCHES = (SCENES.batch(range(6)), SCENES.batch(range(6, 10)))


def net(kind: Net = Net.VGG_ATTENTION, **options: Any) -> Any:
    torch.manual_seed(0)
    return network(Model(kind, width=0.05, **options), 6).eval()


def masks(rows: Any) -> torch.Tensor:
    return torch.stack([SCENES.mask(row) for row in rows])


def asked(model: Any) -> Asked:
    return Asked(model, Judged(model), BATCHES, masks)


def values(noted: Noted) -> dict[str, torch.Tensor]:
    return {name: found for name, (_, found) in noted.items()}


def linear(weight: torch.Tensor) -> Any:
    return lambda images: images.flatten(1) @ weight.T


def test_strengths_are_those_of_the_figure() -> None:
    assert BYTES == (1, 2, 4, 8, 16)


def test_fgsm_is_that_of_the_measure() -> None:
    model = net(Net.GAP)
    images = asked(model).first(5)
    assert len(images) == 5
    found = values(fooled_by_fgsm(model, images))
    for steps in BYTES:
        wanted = measure.fooling(classifier(model), images, steps / 255)
        assert torch.equal(found[f"fooled_fgsm_{steps}"], wanted)


def test_only_what_is_left_is_attacked_again() -> None:
    """An attack that fools whatever is at most `reach` away from it."""
    reach = torch.tensor([0.5, 1.5, 3.0, 20.0]) / 255
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 2, 2) / 8
    seen: list[tuple[float, int]] = []

    def attack(classify: Any, images: Any, labels: Any, eps: float) -> Any:
        seen.append((round(eps * 255), len(images)))
        place = (images[:, 0, 0, 0] * 8).round().long()
        return torch.where((reach[place] <= eps)[:, None, None, None], 1.0, images)

    def classify(images: Any) -> Any:
        high = (images.flatten(1).amin(dim=1) > 0.9).float()
        return torch.stack([1 - high, high], dim=1)

    found = growing(classify, images, attack)
    assert found.tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 0],
    ]
    assert seen == [(1, 4), (2, 3), (4, 2), (8, 1), (16, 1)]


def test_pgd_is_no_weaker_than_one_step_on_a_linear_classifier() -> None:
    weight = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    images = torch.rand(16, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    attack = measure.attacked(linear(weight), images).fooled
    generator = torch.Generator().manual_seed(0)

    def pgd(classify: Any, images: Any, labels: Any, eps: float) -> Any:
        return measure.pgd(classify, images, labels, eps, generator=generator, restarts=3)

    found = growing(linear(weight), images, pgd)
    assert found.sum() >= attack.sum() and found.sum() > 0
    assert (found[1:] >= found[:-1]).all()


def test_attacks_repeat_and_leave_the_network_as_found() -> None:
    model = net(Net.GAP).train()
    images = asked(model).first(3)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    first, second = (values(fooled_by_pgd(model, images, restarts=2)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert model.training and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_crops_are_compared_with_the_whole_and_with_others() -> None:
    found = values(under_crops(asked(net()), views=2))
    assert {len(one) for one in found.values()} == {10}
    again = values(under_crops(asked(net()), views=2))
    assert torch.equal(found["consistency"], again["consistency"])
    assert float(found["consistency"].mean()) > float(found["consistency_others"].mean())


def test_a_uniform_map_and_no_map_have_no_consistency() -> None:
    assert under_crops(asked(net(Net.VGG)), 1) == {}
    found = values(under_crops(asked(net(score=Score.UNIFORM)), 1))
    assert found["consistency"].isnan().all()


@pytest.mark.parametrize("score", [Score.DOT, Score.SCALED_DOT, Score.ADDITIVE])
def test_queries_of_others_move_attention_that_asks(score: Score) -> None:
    found = values(other_queries(net(score=score, levels=3), BATCHES))
    for name in ("alike", "unlike"):
        for grid in ("8x8", "16x16", "32x32"):
            moved = found[f"moved_{name}_{grid}"]
            assert len(moved) == 10 and moved[~moved.isnan()].gt(0).all()
        assert len(found[f"gain_{name}"]) == len(found[f"swapped_{name}"]) == 10


def test_pc_does_not_follow_its_query() -> None:
    """T-LT-2 in numbers: the share that moves is rounding."""
    found = values(other_queries(net(score=Score.PARAMETRISED), BATCHES))
    assert max(float(found[name].nan_to_num().max()) for name in found) < 1e-5


def test_partners_come_from_all_batches_and_are_asked_in_their_place() -> None:
    """Against a slow copy that asks one image with the query of another, pair by pair."""
    model = net(score=Score.DOT, levels=1)
    found = values(other_queries(model, BATCHES))
    labels = torch.cat([batch.labels for batch in BATCHES if batch.labels is not None])
    whole = SCENES.batch(range(10))
    with torch.no_grad():
        features = model.encode(whole)
    own = model.decide(features).attention[0]
    generator = torch.Generator().manual_seed(21)
    for name, allowed in (("alike", measure.alike), ("unlike", measure.unlike)):
        partner = measure.partners(allowed(labels), generator).tolist()
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


def test_networks_without_a_query_are_not_asked() -> None:
    for model in (net(Net.VGG), net(Net.PAN), net(score=Score.UNIFORM)):
        assert other_queries(model, BATCHES) == {}


def test_shapes_meet_the_masks_of_their_own_items() -> None:
    model = net()
    found = values(segmented(asked(model)))
    whole = values(found_by(maps_of(model, SCENES.batch(range(10))), masks(range(10))))
    assert found.keys() == whole.keys()
    for name in ("jaccard_joined", "pointing_centre", "mass_uniform"):
        torch.testing.assert_close(found[name], whole[name].float())


def test_settings_say_what_is_asked() -> None:
    model = net()
    nothing = Judging(fgsm=0, pgd=0, views=0, swap=False, segment=False)
    assert everything(asked(model), nothing) == {}
    only = everything(asked(model), replace(nothing, segment=True))
    assert only and all(name.split("_")[0] in ("pointing", "mass", "jaccard") for name in only)
    assert everything(replace(asked(model), batches=()), Judging()) == {}
    unmasked = replace(asked(model), masks=None)
    assert everything(unmasked, replace(nothing, segment=True)) == {}
    few = everything(asked(model), replace(nothing, fgsm=3))
    assert {len(found) for found in values(few).values()} == {3}


def test_batches_without_a_truth_have_no_gain() -> None:
    bare = [Batch(one.ids, one.images, geometry=one.geometry, labels=one.labels) for one in BATCHES]
    found = other_queries(net(score=Score.DOT), bare)
    assert found and not [name for name in found if name.startswith("gain")]
