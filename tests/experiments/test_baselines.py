"""Experiments of scenes and baselines match their settings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import io
from overt.data.batch import Batch
from overt.data.scenes.dataset import Scenes
from overt.data.scenes.questions import ALL_FAMILIES
from overt.errors import UserError
from overt.experiments.baselines import build_vqa_model
from overt.experiments.recipe import RunContext
from overt.experiments.scenes_recipes import ImagePooling, ScenesVqaModel
from overt.papers.catalog import build
from tests.experiments import tiny


@pytest.fixture
def opened_scenes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Scenes]:
    """Record the scenes that are opened, by split."""
    found: dict[str, Scenes] = {}

    class RecordedScenes(Scenes):
        def __init__(self, split: str, *args: Any, **options: Any) -> None:
            super().__init__(split, *args, **options)
            found[split] = self

    monkeypatch.setattr("overt.experiments.dataset_views.Scenes", RecordedScenes)
    return found


def groups(data: Scenes) -> set[str]:
    return set(data.batch(range(len(data))).groups or ())


@pytest.mark.long
@pytest.mark.parametrize("family", ["relate", "exist"])
def test_the_held_out_family_is_only_in_the_test_split(
    opened_scenes: dict[str, Scenes], tmp_path: Path, family: str
) -> None:
    recipe = tiny.recipe("scenes-soft", f"data.held_out={family}", "data.limit=40")
    experiment = build(recipe, RunContext(tmp_path, device="cpu"))
    assert family not in groups(opened_scenes["train"]) | groups(opened_scenes["val"])
    assert groups(opened_scenes["train"]) <= set(ALL_FAMILIES) - {family}
    assert family in groups(opened_scenes["test"])
    with torch.no_grad():
        ours = experiment.evaluate(None).ours  # type: ignore[arg-type]
    assert ours["accuracy_held_out"].n < ours["accuracy"].n == 160


@pytest.mark.long
def test_without_a_held_out_family_all_families_are_trained(
    opened_scenes: dict[str, Scenes], tmp_path: Path
) -> None:
    build(tiny.recipe("scenes-soft", "data.limit=120"), RunContext(tmp_path, device="cpu"))
    assert groups(opened_scenes["train"]) == groups(opened_scenes["test"]) == set(ALL_FAMILIES)
    ids = [set(one.batch(range(len(one))).ids) for one in opened_scenes.values()]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]


def test_the_limit_applies_to_every_split_and_the_world_is_set(
    opened_scenes: dict[str, Scenes], tmp_path: Path
) -> None:
    sets = ("data.limit=9", "data.val=3", "data.world=5")
    build(tiny.recipe("scenes-soft", *sets), RunContext(tmp_path, device="cpu"))
    assert {split: len(one) for split, one in opened_scenes.items()} == {
        "train": 9,
        "val": 3,
        "test": 9,
    }
    assert {one.spec.seed for one in opened_scenes.values()} == {5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.held_out=colour"], "'colour'.* exist"),
        (["supervise.target=truth", "model.look=mean"], "model.look=soft"),
        (["supervise.target=truth", "model.look=blind"], "model.look=soft"),
    ],
)
def test_incompatible_settings_raise(changes: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        build(tiny.recipe("scenes-soft", *changes), RunContext(tmp_path, device="cpu"))


@pytest.mark.parametrize("size", [32, 50])
def test_scenes_of_any_size_are_evaluated_on_the_cells_of_the_model(
    size: int, tmp_path: Path
) -> None:
    sets = (f"data.size={size}", "data.limit=3", "train.steps=1")
    results = tiny.run(tiny.recipe("scenes-truth", *sets), tmp_path / "a")
    assert results["ours"]["pointing"]["n"] > 0


@pytest.mark.long
def test_supervision_with_weight_zero_changes_nothing(tmp_path: Path) -> None:
    for out, sets in (("a", []), ("b", ["supervise.target=truth", "supervise.weight=0"])):
        tiny.run(tiny.recipe("scenes-soft", *sets), tmp_path / out)
    one, other = (io.read_tensors(tmp_path / out / "model/model.safetensors") for out in "ab")
    for name in one:
        torch.testing.assert_close(one[name], other[name])


@pytest.mark.long
def test_supervision_moves_attention_to_the_truth(tmp_path: Path) -> None:
    sets = ("data.limit=16", "train.steps=40", "train.batch=4", "train.epochs=60")
    found = {}
    for weight in (0, 3):
        more = ("supervise.target=truth", f"supervise.weight={weight}")
        results = tiny.run(tiny.recipe("scenes-soft", *sets, *more), tmp_path / str(weight))
        found[weight] = results["ours"]["mass_inside"]["value"]
    assert found[3] > found[0] + 0.02


@pytest.mark.parametrize("look", list(ImagePooling))
@pytest.mark.parametrize("width", [0.001, 0.25, 1.0])
def test_model_sizes_follow_the_width(look: ImagePooling, width: float) -> None:
    model = build_vqa_model(ScenesVqaModel(width=width, look=look, glimpses=3, dropout=0.2), 11, 7)
    sizes = model.sizes
    assert (sizes.vocabulary, sizes.answers, sizes.dropout) == (11, 7, 0.2)
    assert sizes.cell == max(4, round(64 * width))
    assert sizes.hidden == max(4, round(192 * width))
    assert model.attend.config()["kind"] == look.value
    assert model.attend.glimpses == (3 if look is ImagePooling.SOFT else 1)


# Datasets on disk


@pytest.fixture
def build_on_files(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    tiny.use_small_readers(monkeypatch)
    return lambda name, *sets: build(tiny.recipe(name, *sets), RunContext(tmp_path, 0, "cpu", few))


def test_images_are_augmented_in_training_only(
    build_on_files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, few: Path, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def note(batch: Batch, generator: torch.Generator) -> Batch:
        assert batch.images is not None
        seen.append(batch.images)
        return replace(batch, images=batch.images.flip(-1))

    monkeypatch.setattr("overt.data.random_shift_flip", note)
    for vary, wanted in (("true", 2), ("false", 0)):
        seen.clear()
        recipe = tiny.recipe("cifar10-cnn", f"data.vary={vary}")
        tiny.run(recipe, tmp_path / vary, data_root=few)
        assert len(seen) == wanted  # once per step, never for validation or test


def test_classes_and_hops_match_the_dataset_and_settings(
    build_on_files: Callable[..., Any],
) -> None:
    with torch.no_grad():
        for name, classes in (("cifar10-cnn", 10), ("cifar100-cnn", 100), ("easyvqa-soft", 4)):
            experiment = build_on_files(name)
            assert experiment.model.eval()(experiment.example()).prediction.shape[1] == classes
        experiment = build_on_files("trec-attention", "model.hops=3")
        output = experiment.model.eval()(experiment.example())
    assert output.prediction.shape[1] == 6 and output.attention[0].values.shape[2] == 3


def test_easy_vqa_is_read_from_the_data_root(build_on_files: Callable[..., Any], few: Path) -> None:
    (train, val, test) = build_on_files("easyvqa-soft", "data.limit=100").sources
    assert (train.n, val.n, test.n) == (24, 12, 36)  # from `few` instead of the package


def test_the_penalty_changes_training(few: Path, tmp_path: Path, build_on_files: Any) -> None:
    weights = []
    for penalty in (0.0, 10.0):
        recipe = tiny.recipe("trec-attention", f"model.penalty={penalty}")
        tiny.run(recipe, tmp_path / str(penalty), data_root=few)
        weights.append((tmp_path / str(penalty) / "model/model.safetensors").read_bytes())
    assert weights[0] != weights[1]


def test_datasets_are_hashed(build_on_files: Callable[..., Any]) -> None:
    first, second = (
        build_on_files("trec-attention").sources,
        build_on_files("trec-attention").sources,
    )
    assert first == second and len({one.hash for one in first}) == 3
    assert [one.split for one in first] == ["train", "val", "test"]
