"""Stages of the aligned captioner: rates, losses, the critic, and going on after a stop."""

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import files
from overt.errors import Stopped
from overt.models.captioning.decoding import Rules, greedy
from overt.recipes import find, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.a2.building import (
    ELAPSED,
    build,
    critical,
    next_word_losses,
    noam,
    parameter_sets,
)
from overt.recipes.a2.data import Parts, one_each, scenes
from overt.recipes.a2.networks import AlignedCaptioner, network
from overt.recipes.a2.recipe import A2Recipe, Baseline, Critic, Written
from overt.recipes.a2.rewarding import Clock, Reward
from overt.recipes.recipe import Context
from overt.supervise.perturb import CAPTIONER, MASKS
from overt.train import Reporter
from overt.train.recording import sealed
from tests.recipes import tiny
from tests.recipes.a2.small import SETS, without_numbers

RULES = Rules(longest=8)


def made(*changes: str) -> A2Recipe:
    return settings.apply(find("a2-scenes"), [*SETS, *changes])  # type: ignore[return-value]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return scenes(made().data)  # type: ignore[arg-type]


def net(recipe: A2Recipe, parts: Parts, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return network(recipe.model, recipe.align, parts.words.size, parts.eye)


def test_noam_is_the_rate_of_attention_is_all_you_need():
    rate = noam(512, warmup=100, steps=1000)
    assert rate(0.0) == pytest.approx(512**-0.5 * 1 * 100**-1.5)
    assert rate(0.099) == pytest.approx(512**-0.5 * 100**-0.5)
    assert rate(0.399) == pytest.approx(512**-0.5 * 400**-0.5)
    assert max(rate(at / 1000) for at in range(1000)) == pytest.approx(rate(0.099))


def test_coco_learns_by_it(parts: Parts):
    recipe = settings.apply(find("a2-coco"), ["model.width=0.0625", "model.layers=1"])
    sets = parameter_sets(net(recipe, parts), recipe, pictures=1000)  # type: ignore[arg-type]
    wide = 32
    assert sets[CAPTIONER].schedule(0.0) == pytest.approx(wide**-0.5 * 10_000**-1.5)
    assert sets[CAPTIONER].rates == [1.0] and sets[MASKS].clip == 1.0


@pytest.mark.parametrize("label", ["none", "gate", "gate-random", "gate-free", "gate-shuffled"])
def test_two_sets_of_parameters_never_touch(parts: Parts, label: str) -> None:
    """T-A2-9 in the recipes: each loss moves its own set, and masks are only where they learn."""
    recipe = made(*a2.rows()[label])
    model = net(recipe, parts)
    losses = next_word_losses(model, parts.train.batch([0, 1]), recipe)
    assert set(losses) == {CAPTIONER, *([MASKS] if recipe.align.disturbs else [])}
    if isinstance(model, AlignedCaptioner) and recipe.align.disturbs:
        assert set(losses[MASKS]) == {"harm", "penalty"}
        assert losses[MASKS]["penalty"].weight == recipe.align.penalty
    for name, group in losses.items():
        total = sum(one.weight * one.total for one in group.values())
        own = parameter_sets(model, recipe, 12)[name].parameters
        assert isinstance(total, torch.Tensor)
        found = torch.autograd.grad(total, own, retain_graph=True, allow_unused=True)
        assert any(one is not None and bool(one.any()) for one in found)


def test_a_picture_with_five_captions_costs_as_one_loss_of_all(parts: Parts):
    """Encoding a picture once gives the loss of encoding it for every caption."""
    recipe = made(*a2.rows()["none"])
    model = net(recipe, parts).eval()
    batch = parts.train.batch([0, 3])
    ours = next_word_losses(model, batch, recipe)[CAPTIONER]["caption"]
    assert batch.tokens is not None and batch.token_mask is not None
    logits = model.write(model.encode(batch), batch.tokens[:, :-1]).logits.log_softmax(dim=-1)
    slow = -sum(
        float(logits[row, at - 1, batch.tokens[row, at]].detach())
        for row in range(len(batch))
        for at in range(1, int(batch.token_mask[row].sum()))
    )
    assert float(ours.total.detach()) == pytest.approx(slow, rel=1e-5)
    assert int(ours.count) == int(batch.token_mask[:, 1:].sum())


@pytest.mark.parametrize("label", list(a2.rows()))
def test_no_step_waits_for_the_device(
    parts: Parts, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is recorded on a card: on tensors without numbers, every look at one would raise."""
    without_numbers(monkeypatch)
    recipe = made(*a2.rows()[label])
    model = net(recipe, parts).to("meta")
    sets = parameter_sets(model, recipe, 12)
    batch = sealed(parts.train.batch([0, 1, 2, 3]).to("meta"))
    losses = next_word_losses(model, batch, recipe, each=5)
    for name, group in losses.items():
        total = sum(one.weight * one.total / one.count for one in group.values())
        assert isinstance(total, torch.Tensor) and total.is_meta
        total.backward(inputs=sets[name].parameters, retain_graph=True)


@pytest.mark.parametrize("label", ["none", "gate"])
def test_what_need_not_wait_is_the_same(parts: Parts, label: str) -> None:
    recipe = made(*a2.rows()[label])
    model, batch = net(recipe, parts).eval(), parts.train.batch([0, 3])
    assert parts.train.each == 5
    several = []
    for each in (None, 5):
        losses = next_word_losses(model, batch, recipe, each)
        several.append({(a, b): one.total for a, c in losses.items() for b, one in c.items()})
    torch.testing.assert_close(several[0], several[1])


def test_what_decay_has_come_to_is_said_ahead_of_a_step(tmp_path: Path):
    """Steps themselves do not read their progress, or they could not be replayed."""
    recipe = made("align.fuse=decay", "model.layers=1")
    built = build(recipe, Context(tmp_path, device="cpu"))
    built.stages[0].run(False, Reporter(enabled=False))
    (elapsed,) = (one for name, one in built.model.named_buffers() if name.endswith("elapsed"))
    assert float(elapsed) == pytest.approx(ELAPSED * 2 / 3)  # ahead of the last of three steps


@pytest.mark.parametrize("written", list(Written))
@pytest.mark.parametrize("baseline", list(Baseline))
def test_a_critical_step_pushes_by_reward_less_baseline(
    parts: Parts, baseline: Baseline, written: Written
) -> None:
    recipe = made()
    model = net(recipe, parts).eval()
    clock = Clock()
    clock.step()
    judge = Reward(parts.train, clock)
    critic = replace(Critic(), draws=3, baseline=baseline, written=written)
    batch = parts.train.batch([1, 4])
    torch.manual_seed(5)
    found = critical(model, batch, judge, critic, RULES)
    assert float(found.loss.count) == 6
    found.loss.mean().backward()
    moved = [one for one in model.captioner_parameters() if one.grad is not None]
    assert moved and all(one.grad is None for one in model.mask_parameters())
    pictures, _ = one_each(batch)
    usual = float(torch.cat(judge([greedy(model, pictures, RULES)], pictures)).mean())
    if baseline is Baseline.GREEDY:
        assert found.baseline == pytest.approx(usual)
    else:
        assert found.baseline == pytest.approx(found.reward)
    clock.step()
    assert 0 < clock.marks()["reward"] < clock.marks()["critic"]


@pytest.mark.parametrize("label", ["gate", "gate-random", "gate-free"])
def test_a_step_leaves_nothing_behind_for_the_collector(parts: Parts, label: str) -> None:
    """Python searches by the number of its objects: a card is full of a few large ones before."""
    recipe = made(*a2.rows()[label])
    model = net(recipe, parts)
    batch = parts.train.batch([0, 1])

    def living() -> int:
        for losses in next_word_losses(model, batch, recipe).values():
            sum(one.mean() for one in losses.values()).backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    living()
    gc.collect()
    gc.disable()
    try:
        first = living()
        assert [living() for _ in range(3)] == [first] * 3
    finally:
        gc.enable()


@pytest.mark.long
def test_both_stages_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    """A run that is stopped in its first stage and again in its second ends as one that was not."""
    recipe = made("align.fuse=decay", "critic.epochs=1", "critic.draws=2", "model.layers=1")
    whole = tiny.run(recipe, tmp_path / "whole")
    step = Reporter.step
    asked: list[str] = []

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        name = next(iter(means)).split("/")[-1]
        if name not in asked:
            asked.append(name)
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        for again in (False, True):
            with pytest.raises(Stopped):
                tiny.run(recipe, tmp_path / "again", resume=again)
    same = tiny.run(recipe, tmp_path / "again", resume=True)
    assert len(asked) == 2 and same["ours"] == whole["ours"]
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    log = (tmp_path / "whole" / "log.jsonl").read_text()
    for name in ("critic/", "captioner/reward", "captioner/idle", "captioner/length"):
        assert name.removesuffix("/") in log
    assert whole["steps"] == 6 and set(whole["clock"]) == {"critic", "reward"}
    files.verify(tmp_path / "again")
