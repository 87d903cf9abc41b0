"""The step that teaches: every way, its placebos, and what is kept."""

from dataclasses import replace

import pytest
import torch

from overt import supervise
from overt.models.vlbert.phrases import Phrases
from overt.recipes.vgp import teaching
from overt.recipes.vgp.held import HeldLinks
from overt.recipes.vgp.recipe import Against, Keep, Supervise, Target, Way
from overt.recipes.vgp.teaching import Lesson, aimed, teachers_of
from overt.supervise import Taught, grounding
from overt.supervise.heads import of_layers
from overt.train import Progress
from tests.recipes.vgp import small

NOW = Progress(0, 10, 0)


def taught(plan: Supervise, against: Against) -> Taught:
    net = small.net()
    return Taught(net, **teachers_of(net, plan, against, lambda: [small.texts().batch(range(4))]))


def losses(plan: Supervise) -> dict[str, supervise.Loss]:
    which = of_layers([1], (2, 3)) if plan.way is Way.CHOSEN else None
    lesson = Lesson(plan, HeldLinks.of(small.texts()), Against(), which)
    return dict(lesson(taught(plan, Against()), small.texts().batch(range(8)), NOW)["model"])


LOOKED = (Way.DIRECT, Way.SEMI_DIRECT, Way.CHOSEN, Way.ANY, Way.LEARNED)
EXPECTED: dict[Way, set[str]] = {
    Way.NONE: set(),
    Way.INDIRECT: {"match"},
    Way.SLIP: {"match"},
    **{way: {"to_regions", "to_text"} for way in LOOKED},
}


@pytest.mark.parametrize("way", list(EXPECTED), ids=lambda way: way.value)
def test_every_way_has_its_losses_and_a_gradient(way: Way) -> None:
    found = losses(Supervise(way))
    assert set(found) == {"identify", "relate"} | EXPECTED[way]
    assert all(float(one.total.detach()) > 0 and float(one.count) > 0 for one in found.values())


def test_direct_is_eq_8_and_weight_multiplies_it() -> None:
    net, batch = small.net(), small.texts().batch(range(8))
    output = net(batch)
    plain = grounding.direct(output.seen.log_block, batch.target, words=output.features.words)
    found = losses(Supervise(weight=3.0))
    for name, one in plain.items():
        torch.testing.assert_close(found[name].mean(), 3 * one.mean())
        assert float(found[name].count) == float(one.count)


def test_the_slip_reads_other_words_than_the_phrase() -> None:
    right, wrong = losses(Supervise(Way.INDIRECT)), losses(Supervise(Way.SLIP))
    assert right["match"].count == wrong["match"].count
    assert float(right["match"].total.detach()) != float(wrong["match"].total.detach())


def test_a_batch_without_pairs_of_phrases_has_no_such_loss() -> None:
    texts = small.texts()
    links = HeldLinks.of(texts)
    alone = [row for row, one in enumerate(texts.ids) if not len(links([one]).relation)][:2]
    lesson = Lesson(Supervise(), links, Against())
    found = lesson(taught(Supervise(), Against()), texts.batch(alone), NOW)["model"]
    assert "relate" not in found and "identify" in found


# --- placebos


@pytest.mark.parametrize("target", [Target.SHUFFLED, Target.RANDOM, Target.UNIFORM])
def test_placebos_have_a_target_on_the_same_rows_over_the_regions_there_are(
    target: Target,
) -> None:
    there = small.texts().there.clone()
    spoken = (small.texts().wanted > 0).any(dim=1)
    there[:, -4:] &= spoken[:, -4:]
    texts = replace(small.texts(), there=there)
    found = aimed(texts, target).wanted
    rows = texts.wanted.sum(dim=-1) > 0
    assert torch.equal(found.sum(dim=-1) > 0, rows)
    torch.testing.assert_close(found.sum(dim=-1)[rows], torch.ones(int(rows.sum())))
    assert not (found * ~there[:, None]).any()
    assert torch.equal(found, aimed(texts, target).wanted)  # the same for every run


def test_shuffled_moves_all_words_of_a_picture_alike() -> None:
    texts = small.texts()
    found = aimed(texts, Target.SHUFFLED).wanted
    for own, other in zip(texts.wanted, found, strict=True):
        columns = sorted(map(tuple, own.T.tolist()))
        assert columns == sorted(map(tuple, other.T.tolist()))
    assert not torch.equal(found, texts.wanted)


def test_uniform_is_even_and_random_is_not() -> None:
    texts = small.texts()
    even, drawn = (aimed(texts, one).wanted for one in (Target.UNIFORM, Target.RANDOM))
    rows = texts.wanted.sum(dim=-1) > 0
    torch.testing.assert_close(even[rows], torch.full_like(even[rows], 0.1))
    assert (drawn[rows].amax(dim=-1) > 0.15).all()
    assert aimed(texts, Target.TRUTH) is texts


# --- what is kept


@pytest.mark.parametrize("keep", [Keep.DISTIL, Keep.EWC], ids=lambda keep: keep.value)
def test_a_network_that_has_not_moved_has_nothing_to_keep(keep: Keep) -> None:
    plan, against = Supervise(Way.NONE), Against(keep)
    lesson = Lesson(plan, HeldLinks.of(small.texts()), against)
    net = taught(plan, against).eval()  # in training, norms of a batch are those of the batch
    found = lesson(net, small.texts().batch(range(4)), NOW)["model"]["keep"]
    torch.testing.assert_close(found.total, torch.tensor(0.0))


@pytest.mark.parametrize("keep", [Keep.DISTIL, Keep.EWC], ids=lambda keep: keep.value)
def test_a_network_that_moves_is_held(keep: Keep) -> None:
    plan, against = Supervise(Way.NONE), Against(keep, weight=2.0)
    net = taught(plan, against)
    with torch.no_grad():
        for one in net.model.parameters():
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(1)))
    lesson = Lesson(plan, HeldLinks.of(small.texts()), against)
    found = lesson(net, small.texts().batch(range(4)), NOW)["model"]["keep"]
    assert float(found.total.detach()) > 0
    found.total.backward()
    assert not any(one.grad is not None for name, one in net.named_parameters() if "before" in name)


def test_the_network_that_was_stays_at_rest() -> None:
    net = taught(Supervise(Way.NONE), Against(Keep.DISTIL)).train()
    assert net.model.training
    assert not any(one.training for one in net.before.modules())


def test_pooled_phrases_of_the_matcher_are_those_of_the_target() -> None:
    net, batch = small.net(), small.texts().batch(range(4))
    asked = []

    def match(phrases: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        asked.append((phrases, regions))
        return (phrases[:, None] * regions).sum(dim=-1)

    output = net(batch)
    found = teaching.matched(match, output, batch, slip=False)
    phrases, _ = asked[0]
    own, _ = teaching.grounded_phrases(batch.target)
    assert int(found.count) == len(own) == len(phrases)
    first = Phrases(own.sample[:1], own.span[:1])
    start, end = first.span[0].tolist()
    torch.testing.assert_close(phrases[0], output.text()[first.sample[0], start:end].amax(dim=0))
