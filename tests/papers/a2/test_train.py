"""Training stages of the aligned captioner: rates, losses, the critic, and resume."""

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import io
from overt.errors import RunInterrupted
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.nn.captioning.decoding import DecodingRules, greedy
from overt.nn.mask_perturbation import CAPTIONER, MASKS
from overt.papers.a2 import config as a2
from overt.papers.a2.config import A2Baseline, A2Critic, A2Recipe, A2Sampling
from overt.papers.a2.data import A2Data, load_scenes, unique_images
from overt.papers.a2.model import AlignedCaptioner, build_captioner
from overt.papers.a2.reward import CiderReward, RewardTimer
from overt.papers.a2.train import (
    FINAL_TEMPERATURE,
    build,
    next_word_losses,
    noam_schedule,
    parameter_sets,
    self_critical_step,
)
from overt.papers.catalog import find_recipe
from overt.train import Reporter
from overt.train.cuda_graph import static_copy
from tests.experiments import tiny
from tests.papers.a2.small import SETS, forbid_value_reads

RULES = DecodingRules(max_length=8)


def make_recipe(*changes: str) -> A2Recipe:
    return settings.apply(find_recipe("a2-scenes"), [*SETS, *changes])  # type: ignore[return-value]


@pytest.fixture(scope="module")
def parts() -> A2Data:
    return load_scenes(make_recipe().data)  # type: ignore[arg-type]


def build_model(recipe: A2Recipe, parts: A2Data, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder)


def test_noam_schedule_equals_that_of_attention_is_all_you_need():
    rate = noam_schedule(512, warmup=100, steps=1000)
    assert rate(0.0) == pytest.approx(512**-0.5 * 1 * 100**-1.5)
    assert rate(0.099) == pytest.approx(512**-0.5 * 100**-0.5)
    assert rate(0.399) == pytest.approx(512**-0.5 * 400**-0.5)
    assert max(rate(at / 1000) for at in range(1000)) == pytest.approx(rate(0.099))


@pytest.mark.long
def test_the_coco_recipe_uses_the_noam_schedule(parts: A2Data):
    recipe = settings.apply(find_recipe("a2-coco"), ["model.width=0.0625", "model.layers=1"])
    sets = parameter_sets(build_model(recipe, parts), recipe, pictures=1000)  # type: ignore[arg-type]
    wide = 32
    assert sets[CAPTIONER].schedule(0.0) == pytest.approx(wide**-0.5 * 10_000**-1.5)
    assert sets[CAPTIONER].rates == [1.0] and sets[MASKS].clip == 1.0


@pytest.mark.long
@pytest.mark.parametrize("label", ["none", "gate", "gate-random", "gate-free", "gate-shuffled"])
def test_each_loss_trains_its_own_parameter_set(parts: A2Data, label: str) -> None:
    """T-A2-9 in the recipes: masks have a loss only where they are learned by perturbation."""
    recipe = make_recipe(*a2.table_rows()[label])
    model = build_model(recipe, parts)
    losses = next_word_losses(model, parts.train.batch([0, 1]), recipe)
    assert set(losses) == {CAPTIONER, *([MASKS] if recipe.align.perturbs else [])}
    if isinstance(model, AlignedCaptioner) and recipe.align.perturbs:
        assert set(losses[MASKS]) == {"harm", "penalty"}
        assert losses[MASKS]["penalty"].weight == recipe.align.penalty
    for name, group in losses.items():
        total = sum(one.weight * one.total for one in group.values())
        own = parameter_sets(model, recipe, 12)[name].parameters
        assert isinstance(total, torch.Tensor)
        found = torch.autograd.grad(total, own, retain_graph=True, allow_unused=True)
        assert any(one is not None and bool(one.any()) for one in found)


@pytest.mark.long
def test_encoding_an_image_once_gives_the_loss_of_all_its_captions(parts: A2Data):
    """The loss equals that of encoding the image once per caption."""
    recipe = make_recipe(*a2.table_rows()["none"])
    model = build_model(recipe, parts).eval()
    batch = parts.train.batch([0, 3])
    ours = next_word_losses(model, batch, recipe)[CAPTIONER]["caption"]
    assert batch.tokens is not None and batch.token_mask is not None
    logits = model.decode_captions(model.encode(batch), batch.tokens[:, :-1]).logits.log_softmax(
        dim=-1
    )
    slow = -sum(
        float(logits[row, at - 1, batch.tokens[row, at]].detach())
        for row in range(len(batch))
        for at in range(1, int(batch.token_mask[row].sum()))
    )
    assert float(ours.total.detach()) == pytest.approx(slow, rel=1e-5)
    assert int(ours.count) == int(batch.token_mask[:, 1:].sum())


@pytest.mark.long
@pytest.mark.parametrize("label", list(a2.table_rows()))
def test_no_step_synchronizes_the_device(
    parts: A2Data, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step must not read values: on meta tensors every read would raise."""
    forbid_value_reads(monkeypatch)
    recipe = make_recipe(*a2.table_rows()[label])
    model = build_model(recipe, parts).to("meta")
    sets = parameter_sets(model, recipe, 12)
    batch = static_copy(parts.train.batch([0, 1, 2, 3]).to("meta"))
    losses = next_word_losses(model, batch, recipe, each=5)
    for name, group in losses.items():
        total = sum(one.weight * one.total / one.count for one in group.values())
        assert isinstance(total, torch.Tensor) and total.is_meta
        total.backward(inputs=sets[name].parameters, retain_graph=True)


@pytest.mark.long
@pytest.mark.parametrize("label", ["none", "gate"])
def test_losses_with_known_caption_counts_are_the_same(parts: A2Data, label: str) -> None:
    recipe = make_recipe(*a2.table_rows()[label])
    model, batch = build_model(recipe, parts).eval(), parts.train.batch([0, 3])
    assert parts.train.each == 5
    several = []
    for each in (None, 5):
        losses = next_word_losses(model, batch, recipe, each)
        several.append({(a, b): one.total for a, c in losses.items() for b, one in c.items()})
    torch.testing.assert_close(several[0], several[1])


@pytest.mark.long
def test_decay_progress_is_set_before_each_step(tmp_path: Path):
    """Steps must not read their progress, so that a CUDA graph can replay them."""
    recipe = make_recipe("align.fuse=decay", "model.layers=1")
    built = build(recipe, RunContext(tmp_path, device="cpu"))
    built.stages[0].run(False, Reporter(enabled=False))
    (elapsed,) = (one for name, one in built.model.named_buffers() if name.endswith("elapsed"))
    assert float(elapsed) == pytest.approx(
        FINAL_TEMPERATURE * 2 / 3
    )  # ahead of the last of three steps


@pytest.mark.long
@pytest.mark.parametrize("written", list(A2Sampling))
@pytest.mark.parametrize("baseline", list(A2Baseline))
def test_a_self_critical_step_uses_reward_minus_baseline(
    parts: A2Data, baseline: A2Baseline, written: A2Sampling
) -> None:
    recipe = make_recipe()
    model = build_model(recipe, parts).eval()
    timer = RewardTimer()
    timer.step()
    reward = CiderReward(parts.train, timer)
    critic = replace(A2Critic(), draws=3, baseline=baseline, written=written)
    batch = parts.train.batch([1, 4])
    torch.manual_seed(5)
    found = self_critical_step(model, batch, reward, critic, RULES)
    assert float(found.loss.count) == 6
    found.loss.mean().backward()
    moved = [one for one in model.captioner_parameters() if one.grad is not None]
    assert moved and all(one.grad is None for one in model.mask_parameters())
    pictures, _ = unique_images(batch)
    usual = float(torch.cat(reward([greedy(model, pictures, RULES)], pictures)).mean())
    if baseline is A2Baseline.GREEDY:
        assert found.baseline == pytest.approx(usual)
    else:
        assert found.baseline == pytest.approx(found.reward)
    timer.step()
    assert 0 < timer.summary()["reward"] < timer.summary()["critic"]


@pytest.mark.long
@pytest.mark.parametrize("label", ["gate", "gate-random", "gate-free"])
def test_a_step_leaves_no_tensors_for_the_garbage_collector(parts: A2Data, label: str) -> None:
    """Garbage collection counts objects, and a few large tensors fill a GPU before it runs."""
    recipe = make_recipe(*a2.table_rows()[label])
    model = build_model(recipe, parts)
    batch = parts.train.batch([0, 1])

    def count_tensors() -> int:
        for losses in next_word_losses(model, batch, recipe).values():
            sum(one.mean() for one in losses.values()).backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    count_tensors()
    gc.collect()
    gc.disable()
    try:
        first = count_tensors()
        assert [count_tensors() for _ in range(3)] == [first] * 3
    finally:
        gc.enable()


@pytest.mark.long
def test_both_stages_resume_to_the_same_bytes(tmp_path: Path) -> None:
    """A run stopped in its first stage and again in its second ends like an uninterrupted one."""
    recipe = make_recipe("align.fuse=decay", "critic.epochs=1", "critic.draws=2", "model.layers=1")
    full = tiny.run(recipe, tmp_path / "full")
    step = Reporter.step
    interrupted: list[str] = []

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        name = next(iter(means)).split("/")[-1]
        if name not in interrupted:
            interrupted.append(name)
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        for again in (False, True):
            with pytest.raises(RunInterrupted):
                tiny.run(recipe, tmp_path / "again", resume=again)
    same = tiny.run(recipe, tmp_path / "again", resume=True)
    assert len(interrupted) == 2 and same["ours"] == full["ours"]
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    log = (tmp_path / "full" / "log.jsonl").read_text()
    for name in ("critic/", "captioner/reward", "captioner/idle", "captioner/length"):
        assert name.removesuffix("/") in log
    assert full["steps"] == 6 and set(full["clock"]) == {"critic", "reward"}
    io.verify(tmp_path / "again")
