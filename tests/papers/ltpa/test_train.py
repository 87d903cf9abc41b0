"""Training of Learn to Pay Attention: small runs, resume weights, and the optimizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overt import io
from overt.data.in_memory_images import InMemoryImages
from overt.experiments.recipe import RunContext, TrainConfig
from overt.experiments.table_runner import row_recipe
from overt.papers import catalog
from overt.papers.catalog import build
from overt.papers.ltpa import config as ltpa
from overt.papers.ltpa import train as ltpa_building
from overt.papers.ltpa.config import LtpaSchedule, LtpaSgd
from overt.papers.ltpa.train import build_optimizer, warm_then_halving
from overt.testing import toy_batch
from tests.experiments import tiny
from tests.papers.ltpa.conftest import SMALL


@pytest.mark.long
@pytest.mark.parametrize("label", list(ltpa.table_models()))
def test_each_row_runs(run: Callable[..., Any], label: str) -> None:
    """Both datasets have the same rows; each row runs on one of them, alternately."""
    data = ("cifar10", "cifar100")[list(ltpa.table_models()).index(label) % 2]
    row = next(r for r in catalog.find_table("ltpa-1").rows if r.label == f"{data}-{label}")
    recipe = row_recipe(row, [*tiny.SETS, *SMALL])
    _, results = run(recipe.name, *row.changes)
    ours = results["ours"]
    assert ours["error"]["value"] == pytest.approx(1 - ours["accuracy"]["value"])
    assert ours["error"]["direction"] == "lower"
    assert results["paper"] == {
        name: {
            "value": one.value,
            "unit": "share",
            "direction": "higher" if one.higher_is_better else "lower",
            "source": one.source,
        }
        for name, one in recipe.paper.items()
    }
    attends = label not in ("vgg", "resnet-164")
    assert ("deletion" in ours) is attends
    grids = {"att3": 3, "att2": 2, "rn16": 2, "att-": 1, "vgg-": 1}.get(label[:4], 0)
    wanted = [f"entropy_{side}x{side}" for side in (8, 16, 32)[:grids]]
    if label == "vgg-gap":  # class activation maps are not attention of the network
        wanted = []
    assert sorted(name for name in ours if name.startswith("entropy_")) == sorted(wanted)


def test_metrics_are_the_means_of_the_samples(run: Callable[..., Any]) -> None:
    place, results = run("ltpa-cifar10", "model.levels=3")
    samples = io.read_arrays(place / "samples.npz")
    np.testing.assert_array_equal(samples["error"], 1 - samples["accuracy"])
    for name, one in results["ours"].items():
        assert one["value"] == pytest.approx(float(np.nanmean(samples[name])), abs=1e-6)
        if one["low"] is None:  # constant values have no confidence interval
            assert len(set(samples[name][~np.isnan(samples[name])].tolist())) == 1
        else:
            assert one["low"] <= one["value"] <= one["high"]
    np.testing.assert_allclose(samples["entropy"], samples["entropy_8x8"])


def test_the_control_has_uniform_attention(run: Callable[..., Any]) -> None:
    _, results = run("ltpa-cifar10", "model.score=uniform")
    assert "ece" not in results["ours"]  # no further analysis is enabled
    assert results["ours"]["entropy_8x8"]["value"] == pytest.approx(np.log(64))
    assert results["ours"]["entropy_16x16"]["value"] == pytest.approx(np.log(256))


def test_a_final_run_trains_on_the_validation_split_too(run: Callable[..., Any]) -> None:
    sets = ("data.limit=100", "train.steps=1")
    place, results = run("ltpa-cifar10", "data.held_out=false", *sets)
    assert [(one["split"], one["n"]) for one in results["data"]] == [("train+val", 40), ("test", 8)]
    assert '"val"' not in (place / "log.jsonl").read_text()
    _, split = run("ltpa-cifar10", *sets, out="split")
    assert [one["n"] for one in split["data"]] == [32, 8, 8]


@pytest.mark.long
def test_scenes_are_evaluated_on_the_cells_of_the_last_level(run: Callable[..., Any]) -> None:
    for label in ("vgg-gap", "vgg-pan", "att3-concat-pc"):
        model = ltpa.table_models()[label]
        _, results = run("ltpa-scenes", *ltpa.model_changes(model), out=label)
        ours = results["ours"]
        assert ours["pointing"]["n"] == ours["mass_inside"]["n"] == 16
        assert results["paper"] == {}


def test_scenes_of_another_size_have_another_grid(run: Callable[..., Any]) -> None:
    _, results = run("ltpa-scenes", "data.size=40", "model.levels=1")
    assert "entropy_10x10" in results["ours"] and results["ours"]["pointing"]["n"] == 16


@pytest.mark.parametrize("name", ["ltpa-svhn", "ltpa-cub"])
def test_datasets_of_table_2_run(run: Callable[..., Any], name: str) -> None:
    _, results = run(name, "model.levels=1", "data.limit=8")
    assert [one["n"] for one in results["data"]] == [8, 8, 8]
    ours = results["ours"]
    assert {"error", "entropy_8x8"} <= ours.keys() and ours["error"]["n"] == 8
    assert "pointing" not in ours  # the box of a bird is the full image


def test_images_are_in_memory_and_augmented_if_enabled(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.use_small_readers(monkeypatch)
    calls: list[Any] = []

    def record_call(model: Any, train: Any, *rest: Any, **options: Any) -> Any:
        calls.append((model, train, options["augment"]))
        raise RuntimeError("enough")

    monkeypatch.setattr(ltpa_building, "classification_experiment", record_call)
    batch = toy_batch()
    for wanted in ("true", "false"):
        recipe = tiny.recipe("ltpa-cifar10", *SMALL, f"data.vary={wanted}")
        with pytest.raises(RuntimeError, match="enough"):
            build(recipe, RunContext(tmp_path, 0, "cpu", few))
    (model, train, varied), (_, _, plain) = calls
    assert isinstance(train, InMemoryImages) and len(train) == 16
    assert plain(batch) is batch
    torch.manual_seed(0)
    assert not torch.equal(varied(batch).images, batch.images)
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d)]
    assert convolutions[1].weight.is_contiguous(memory_format=torch.channels_last)


# --- functions


def test_a_run_starts_from_the_weights_of_a_finished_run(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    place, _ = run("ltpa-cifar10", "train.steps=1")
    sets = ("train.steps=1", "train.rate=0", f"model.start={place}")
    _, results = run("ltpa-cifar100", *sets, out="second")
    assert results["settings"]["model.start"] == str(place)
    weights = "model/model.safetensors"
    first, second = (io.read_tensors(tmp_path / one / weights) for one in ("run", "second"))
    assert torch.equal(first["trunk.stages.0.0.weight"], second["trunk.stages.0.0.weight"])


def test_build_optimizer_uses_the_settings() -> None:
    net = nn.Linear(2, 2)
    plan = TrainConfig(rate=0.3, decay=0.01, clip=None, warmup=0.5)
    found = build_optimizer(net, plan, LtpaSgd())
    (group,) = found.optimizer.param_groups
    assert isinstance(found.optimizer, torch.optim.SGD) and found.clip is None
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.3, 0.01, 0.9)
    assert group["nesterov"] and len(group["params"]) == 2
    assert found.schedule(0.25) == 0.5 and found.schedule(0.75) == pytest.approx(0.5)
    published = build_optimizer(
        net, plan, LtpaSgd(dampening=0.9, nesterov=False, fall=LtpaSchedule.HALVES)
    )
    assert published.optimizer.param_groups[0]["dampening"] == 0.9
    assert published.schedule(0.999) == 0.5**11


def test_the_learning_rate_is_halved_every_twelfth_of_training() -> None:
    factor = warm_then_halving(0.0)
    assert [factor(epoch / 300) for epoch in (0, 24, 25, 49, 50, 299)] == [
        1,
        1,
        0.5,
        0.5,
        0.25,
        0.5**11,
    ]
    assert warm_then_halving(0.1)(0.05) == 0.5
