"""The vision-language experiment: rules, losses, rows that share a model, and its results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.data.scenes.dataset import Scenes
from overt.errors import UserError
from overt.experiments import runner
from overt.experiments.recipe import RunContext, TrainConfig
from overt.experiments.vision_language import (
    build_vision_language,
    evidence_kept,
    make_pruned,
    pad_left,
    training_losses,
)
from overt.experiments.vision_language_recipes import (
    BoxSupervision,
    BoxTarget,
    ImageTokenPruning,
    PruningRule,
    VisionLanguageModel,
    VisionLanguageRecipe,
    scenes_vlm,
)
from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
from overt.papers.catalog import build

TINY = VisionLanguageModel(width=0.125, vision_layers=1, layers=5, heads=2)


def tiny(**changes: object) -> VisionLanguageRecipe:
    whole = scenes_vlm()
    data = replace(whole.data, limit=24, size=32)
    train = TrainConfig(steps=2, batch=4, card=0)
    return replace(whole, data=data, model=TINY, train=train, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data() -> Scenes:
    return Scenes("val", seed=0, count=3, size=32, questions=2, cells=(4, 4))


@pytest.fixture(scope="module")
def model(data: Scenes) -> VisionLanguageVQA:
    torch.manual_seed(0)
    sizes = VisionLanguageSizes(
        data.vocabulary.words, data.answers, side=32, width=16, vision_layers=1, layers=5, heads=2
    )
    return VisionLanguageVQA(sizes).eval()


KEPT = {
    PruningRule.LAST_QUERY: 4, PruningRule.PYRAMID: 4, PruningRule.IMAGE_ENCODER: 4,
    PruningRule.ZIP: 4, PruningRule.MERGE: 4, PruningRule.RANDOM: 4, PruningRule.GRID: 4,
    PruningRule.CENTRE: 4,
}  # fmt: skip


@pytest.mark.parametrize("rule", KEPT)
@torch.no_grad()
def test_every_rule_leaves_a_quarter(
    rule: PruningRule, model: VisionLanguageVQA, data: Scenes
) -> None:
    pruned = make_pruned(model, ImageTokenPruning(rule, share=0.25, layer=1), seed=0)
    assert pruned is not None
    prompts = model.encode(data.batch([0, 1]))
    pruned(**prompts.as_kwargs(), use_cache=False)
    text = prompts.attention_mask.sum(dim=1) - 16
    assert (pruned.steps[-1].count - text).tolist() == [KEPT[rule]] * 4


def test_the_evidence_that_is_kept_is_a_share_of_it() -> None:
    kept = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    target = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    found = evidence_kept(kept, target)
    assert found[0] == 0.5 and found[1].isnan()


@torch.no_grad()
def test_padding_on_the_left_changes_no_answer(model: VisionLanguageVQA, data: Scenes) -> None:
    prompts = model.encode(data.batch([0, 1]))
    moved = pad_left(model, prompts)
    assert moved.input_ids[:, -1].tolist() == [model.mark_id] * 4
    for row in range(4):
        before = prompts.input_ids[row, prompts.attention_mask[row].bool()]
        assert torch.equal(before, moved.input_ids[row, moved.attention_mask[row].bool()])
    written = model.vlm.generate(**moved.as_kwargs(), max_new_tokens=1, do_sample=False)
    logits = model.vlm(**prompts.as_kwargs()).logits
    expected = logits[torch.arange(4), prompts.last].argmax(dim=-1)
    assert torch.equal(written[:, -1], expected)


def test_boxes_supervise_the_last_token_and_the_placebo_has_other_boxes(
    model: VisionLanguageVQA, data: Scenes
) -> None:
    batch = data.batch([0, 1, 2])
    found = {}
    for target in BoxTarget:
        plan = BoxSupervision(target, weight=2.0, first_layer=3)
        found[target] = training_losses(model, batch, tiny(supervise=plan))
    assert set(found[BoxTarget.NOTHING]) == {"task"}
    assert batch.target is not None
    maps = model.attend(model.encode(batch))[1].weights[:, 3:, :, 0]
    wanted = batch.target.weights[:, :, :, 0]
    for target, order in ((BoxTarget.TRUTH, range(6)), (BoxTarget.SWAPPED, [4, 5, 0, 1, 2, 3])):
        loss = found[target]["attention"]
        rows = wanted[list(order)]
        by_hand = -(rows * maps.log()).sum(-1).mean(dim=(1, 2))
        seen = rows[:, 0, 0].sum(-1) > 0
        torch.testing.assert_close(loss.mean(), 2 * by_hand[seen].mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"prune": ImageTokenPruning(share=0.0)},
        {"prune": ImageTokenPruning(PruningRule.MERGE, layer=4)},
        {"supervise": BoxSupervision(BoxTarget.TRUTH, first_layer=9)},
        {"supervise": BoxSupervision(BoxTarget.SWAPPED), "train": TrainConfig(batch=1)},
    ],
)
def test_settings_out_of_range_are_rejected(changes: dict[str, object], tmp_path: Path) -> None:
    recipe = replace(tiny(), **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError):
        build_vision_language(recipe, RunContext(tmp_path))


@pytest.mark.long
def test_a_pruned_row_starts_from_the_model_of_the_whole_one(tmp_path: Path) -> None:
    whole, part = (tmp_path / row / "seed-0" for row in ("all", "random"))
    first = runner.run(tiny(), whole, build, seed=0, device="cpu", show_progress=False)
    assert {"accuracy", "pointing", "mass_inside", "prefill", "decode", "cache"} <= set(
        first["ours"]
    )
    plan = ImageTokenPruning(PruningRule.RANDOM, layer=1)
    second = runner.run(tiny(prune=plan), part, build, seed=0, device="cpu", show_progress=False)
    assert second["steps"] == 0 and second["ours"]["image_tokens"]["value"] == 4
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (whole, part)]
    assert weights[0] == weights[1]
    assert second["ours"]["cache"]["value"] < first["ours"]["cache"]["value"]
    assert 0 <= second["ours"]["evidence_kept"]["value"] <= 1
    samples = np.load(part / "samples.npz")
    assert len(samples["evidence_kept"]) == len(samples["accuracy"])


@pytest.mark.long
def test_one_question_about_a_few_scenes_is_learned_by_heart_from_the_images() -> None:
    scenes = Scenes("train", seed=0, count=24, size=32, questions=1, cells=(4, 4))
    torch.manual_seed(0)
    sizes = VisionLanguageSizes(
        scenes.vocabulary.words, scenes.answers, side=32, width=64, vision_layers=1, layers=2
    )
    model = VisionLanguageVQA(sizes)
    batch = scenes.batch(range(24))
    assert batch.tokens is not None and batch.token_mask is not None and batch.labels is not None
    same = torch.zeros(24, dtype=torch.long)  # the words say nothing, so the answers need images
    batch = replace(batch, tokens=batch.tokens[same], token_mask=batch.token_mask[same])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(120):
        loss = training_losses(model, batch, scenes_vlm())["task"].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.maps = False
    own = model.eval().encode(batch)
    other = replace(own, pixel_values=own.pixel_values.roll(1, 0))  # images of other scenes
    with torch.no_grad():
        found = [
            float((model.decide(one).prediction.argmax(dim=1) == batch.labels).float().mean())
            for one in (own, other)
        ]
    assert found[0] > 0.95 and found[1] < 0.5
