"""The supervised step of VGP: every method, placebo targets, and regularization."""

from dataclasses import replace

import pytest
import torch

from overt.losses import Loss, SupervisedModel, grounding
from overt.losses.head_selection import heads_of_layers
from overt.nn.vlbert.phrases import PhraseSpans
from overt.papers.vgp import supervision
from overt.papers.vgp.config import (
    VgpForgetting,
    VgpMatcher,
    VgpMethod,
    VgpRegionLoss,
    VgpRegularizer,
    VgpSupervise,
    VgpTarget,
)
from overt.papers.vgp.in_memory import PhraseLinksInMemory
from overt.papers.vgp.supervision import VgpStep, supervision_modules, with_targets
from overt.train import Progress
from tests.papers.vgp import small

PROGRESS = Progress(0, 10, 0)


def make_supervised_model(plan: VgpSupervise, against: VgpForgetting) -> SupervisedModel:
    net = small.net()
    return SupervisedModel(
        net, **supervision_modules(net, plan, against, lambda: [small.texts().batch(range(4))])
    )


def step_losses(plan: VgpSupervise) -> dict[str, Loss]:
    which = heads_of_layers([1], (2, 3)) if plan.way is VgpMethod.CHOSEN else None
    step = VgpStep(plan, PhraseLinksInMemory.of(small.texts()), VgpForgetting(), which)
    return dict(
        step(make_supervised_model(plan, VgpForgetting()), small.texts().batch(range(8)), PROGRESS)[
            "model"
        ]
    )


ATTENTION_METHODS = (
    VgpMethod.DIRECT,
    VgpMethod.SEMI_DIRECT,
    VgpMethod.CHOSEN,
    VgpMethod.ANY,
    VgpMethod.LEARNED,
)
EXPECTED: dict[VgpMethod, set[str]] = {
    VgpMethod.NONE: set(),
    VgpMethod.INDIRECT: {"match"},
    VgpMethod.SLIP: {"match"},
    **{way: {"to_regions", "to_text"} for way in ATTENTION_METHODS},
}


@pytest.mark.parametrize("way", list(EXPECTED), ids=lambda way: way.value)
def test_each_method_has_its_losses(way: VgpMethod) -> None:
    found = step_losses(VgpSupervise(way))
    assert set(found) == {"identify", "relate"} | EXPECTED[way]
    assert all(float(one.total.detach()) > 0 and float(one.count) > 0 for one in found.values())


def test_direct_supervision_is_eq_8_times_the_weight() -> None:
    net, batch = small.net(), small.texts().batch(range(8))
    output = net(batch)
    plain = grounding.direct_supervision(
        output.trace.log_block, batch.target, words=output.features.words
    )
    found = step_losses(VgpSupervise(weight=3.0))
    for name, one in plain.items():
        torch.testing.assert_close(found[name].mean(), 3 * one.mean())
        assert float(found[name].count) == float(one.count)


def test_the_slip_method_pools_other_words_than_the_phrase() -> None:
    right, wrong = (
        step_losses(VgpSupervise(VgpMethod.INDIRECT)),
        step_losses(VgpSupervise(VgpMethod.SLIP)),
    )
    assert right["match"].count == wrong["match"].count
    assert float(right["match"].total.detach()) != float(wrong["match"].total.detach())


def test_each_matcher_has_its_own_module() -> None:
    kinds = set()
    for matcher in VgpMatcher:
        plan = VgpSupervise(VgpMethod.INDIRECT, matcher=matcher)
        kinds.add(type(make_supervised_model(plan, VgpForgetting()).matcher))
        assert float(step_losses(plan)["match"].total.detach()) > 0
    assert len(kinds) == len(VgpMatcher)


def make_linear_indirect_step() -> tuple[SupervisedModel, VgpStep]:
    plan = VgpSupervise(VgpMethod.INDIRECT)
    torch.manual_seed(0)
    net = make_supervised_model(plan, VgpForgetting())
    return net, VgpStep(plan, PhraseLinksInMemory.of(small.texts()), VgpForgetting())


def test_finding_22_the_published_matcher_ranks_regions_alike_after_training_the_network() -> None:
    net, step = make_linear_indirect_step()
    batch = small.texts().batch(range(8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(5):
        losses = step(net, batch, PROGRESS)["model"]
        optimizer.zero_grad()
        sum(one.mean() for one in losses.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    output = net.model.eval()(batch)
    phrases, _ = supervision.grounded_phrases(batch.target)
    # in float64: equal logits would be ordered by rounding
    pooled = supervision.pool_phrases(output.text(), phrases).double()
    logits = net.matcher.double()(pooled, output.regions()[phrases.sample].double())
    assert int(phrases.sample.bincount().max()) > 2
    for sample in range(8):
        order = logits[phrases.sample == sample].argsort(dim=1)
        assert (order == order[:1]).all()


def test_the_choices_of_the_published_code_change_the_loss() -> None:
    links = PhraseLinksInMemory.of(small.texts())

    def found(plan: VgpSupervise, dropout: float = 0.0) -> dict[str, float]:
        which = heads_of_layers([1], (2, 3)) if plan.way is VgpMethod.CHOSEN else None
        step = VgpStep(plan, links, VgpForgetting(), which, dropout)
        net = make_supervised_model(plan, VgpForgetting())
        losses = step(net, small.texts().batch(range(8)), PROGRESS)["model"]
        return {name: float(one.mean().detach()) for name, one in losses.items()}

    for way in (VgpMethod.DIRECT, VgpMethod.SEMI_DIRECT, VgpMethod.CHOSEN):
        plain = found(VgpSupervise(way))
        bce = found(VgpSupervise(way, region_loss=VgpRegionLoss.BCE))
        assert bce["to_regions"] == plain["to_regions"] and bce["to_text"] != plain["to_text"]
        assert found(VgpSupervise(way, dropped=True), 0.4)["to_regions"] > plain["to_regions"]


def test_a_batch_without_phrase_pairs_has_no_relation_loss() -> None:
    texts = small.texts()
    links = PhraseLinksInMemory.of(texts)
    alone = [row for row, one in enumerate(texts.ids) if not len(links([one]).relation)][:2]
    step = VgpStep(VgpSupervise(), links, VgpForgetting())
    found = step(
        make_supervised_model(VgpSupervise(), VgpForgetting()), texts.batch(alone), PROGRESS
    )["model"]
    assert "relate" not in found and "identify" in found


# --- placebos


@pytest.mark.parametrize("target", [VgpTarget.SHUFFLED, VgpTarget.RANDOM, VgpTarget.UNIFORM])
def test_placebo_targets_have_the_same_rows_and_visible_regions(
    target: VgpTarget,
) -> None:
    there = small.texts().there.clone()
    spoken = (small.texts().wanted > 0).any(dim=1)
    there[:, -4:] &= spoken[:, -4:]
    texts = replace(small.texts(), there=there)
    found = with_targets(texts, target).wanted
    rows = texts.wanted.sum(dim=-1) > 0
    assert torch.equal(found.sum(dim=-1) > 0, rows)
    torch.testing.assert_close(found.sum(dim=-1)[rows], torch.ones(int(rows.sum())))
    assert not (found * ~there[:, None]).any()
    assert torch.equal(found, with_targets(texts, target).wanted)  # equal in every run


def test_shuffled_targets_permute_all_words_of_an_image_equally() -> None:
    texts = small.texts()
    found = with_targets(texts, VgpTarget.SHUFFLED).wanted
    for own, other in zip(texts.wanted, found, strict=True):
        columns = sorted(map(tuple, own.T.tolist()))
        assert columns == sorted(map(tuple, other.T.tolist()))
    assert not torch.equal(found, texts.wanted)


def test_uniform_targets_are_constant_and_random_ones_are_not() -> None:
    texts = small.texts()
    even, drawn = (with_targets(texts, one).wanted for one in (VgpTarget.UNIFORM, VgpTarget.RANDOM))
    rows = texts.wanted.sum(dim=-1) > 0
    torch.testing.assert_close(even[rows], torch.full_like(even[rows], 0.1))
    assert (drawn[rows].amax(dim=-1) > 0.15).all()
    assert with_targets(texts, VgpTarget.TRUTH) is texts


# --- regularization


@pytest.mark.parametrize(
    "keep", [VgpRegularizer.DISTIL, VgpRegularizer.EWC], ids=lambda keep: keep.value
)
def test_an_unchanged_network_has_no_regularization_loss(keep: VgpRegularizer) -> None:
    plan, against = VgpSupervise(VgpMethod.NONE), VgpForgetting(keep)
    step = VgpStep(plan, PhraseLinksInMemory.of(small.texts()), against)
    net = make_supervised_model(
        plan, against
    ).eval()  # in training mode, batch norm depends on the batch
    found = step(net, small.texts().batch(range(4)), PROGRESS)["model"]["keep"]
    torch.testing.assert_close(found.total, torch.tensor(0.0))


@pytest.mark.parametrize(
    "keep", [VgpRegularizer.DISTIL, VgpRegularizer.EWC], ids=lambda keep: keep.value
)
def test_a_changed_network_has_a_regularization_loss(keep: VgpRegularizer) -> None:
    plan, against = VgpSupervise(VgpMethod.NONE), VgpForgetting(keep, weight=2.0)
    net = make_supervised_model(plan, against)
    with torch.no_grad():
        for one in net.model.parameters():
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(1)))
    step = VgpStep(plan, PhraseLinksInMemory.of(small.texts()), against)
    found = step(net, small.texts().batch(range(4)), PROGRESS)["model"]["keep"]
    assert float(found.total.detach()) > 0
    found.total.backward()
    assert not any(one.grad is not None for name, one in net.named_parameters() if "before" in name)


def test_the_previous_network_stays_in_eval_mode() -> None:
    net = make_supervised_model(
        VgpSupervise(VgpMethod.NONE), VgpForgetting(VgpRegularizer.DISTIL)
    ).train()
    assert net.model.training
    assert not any(one.training for one in net.before.modules())


def test_the_matcher_pools_the_phrases_of_the_target() -> None:
    net, batch = small.net(), small.texts().batch(range(4))
    calls = []

    def match(phrases: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        calls.append((phrases, regions))
        return (phrases[:, None] * regions).sum(dim=-1)

    output = net(batch)
    found = supervision.match_loss(match, output, batch, slip=False)
    phrases, _ = calls[0]
    own, _ = supervision.grounded_phrases(batch.target)
    assert int(found.count) == len(own) == len(phrases)
    first = PhraseSpans(own.sample[:1], own.span[:1])
    start, end = first.span[0].tolist()
    torch.testing.assert_close(phrases[0], output.text()[first.sample[0], start:end].amax(dim=0))
