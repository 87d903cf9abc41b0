"""What the settings of Learn to Pay Attention become, and how its networks are judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overt import files, models
from overt.data.batch import Batch
from overt.data.resident import Resident, shift, vary
from overt.errors import BadInput
from overt.recipes import tables
from overt.recipes.ltpa import building as ltpa_building
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.ltpa.building import (
    begin_from,
    changed_by,
    first_pool,
    network,
    sgd,
    start_of,
    warm_then_halves,
)
from overt.recipes.ltpa.recipe import Decision, Fall, Model, Net, Sgd
from overt.recipes.recipe import Context, Train
from overt.recipes.tables import made
from overt.testing import toy_batch
from tests.recipes import tiny

SMALL = ("model.width=0.05", "model.blocks=1", "train.precision=fp32", "judge.items=0")


@pytest.fixture
def run(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`run("ltpa-cifar10", ...)` runs a recipe, tiny, and gives its folder and results."""
    tiny.expect_few(monkeypatch)

    def run(name: str, *sets: str, out: str = "run") -> tuple[Path, dict[str, Any]]:
        place = tmp_path / out
        return place, tiny.run(tiny.recipe(name, *SMALL, *sets), place, data_root=few)

    return run


@pytest.mark.parametrize("label", list(ltpa.models()))
def test_every_row_runs(run: Callable[..., Any], label: str) -> None:
    """On both data sets the rows are the same; here one of them, in turn."""
    data = ("cifar10", "cifar100")[list(ltpa.models()).index(label) % 2]
    row = next(r for r in tables.find("ltpa-1").rows if r.label == f"{data}-{label}")
    recipe = made(row, [*tiny.SETS, *SMALL])
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
    if label == "vgg-gap":  # class activations are no attention of the network's own
        wanted = []
    assert sorted(name for name in ours if name.startswith("entropy_")) == sorted(wanted)


def test_numbers_are_the_means_of_the_samples(run: Callable[..., Any]) -> None:
    place, results = run("ltpa-cifar10", "model.levels=3")
    samples = files.read_arrays(place / "samples.npz")
    np.testing.assert_array_equal(samples["error"], 1 - samples["accuracy"])
    for name, one in results["ours"].items():
        assert one["value"] == pytest.approx(float(np.nanmean(samples[name])), abs=1e-6)
        assert one["low"] <= one["value"] <= one["high"]
    np.testing.assert_allclose(samples["entropy"], samples["entropy_8x8"])


def test_the_control_spreads_attention_evenly(run: Callable[..., Any]) -> None:
    _, results = run("ltpa-cifar10", "model.score=uniform")
    assert "ece" not in results["ours"]  # nothing more was asked
    assert results["ours"]["entropy_8x8"]["value"] == pytest.approx(np.log(64))
    assert results["ours"]["entropy_16x16"]["value"] == pytest.approx(np.log(256))


def test_a_final_run_trains_on_what_was_held_out(run: Callable[..., Any]) -> None:
    sets = ("data.limit=100", "train.steps=1")
    place, results = run("ltpa-cifar10", "data.held_out=false", *sets)
    assert [(one["split"], one["n"]) for one in results["data"]] == [("train+val", 40), ("test", 8)]
    assert '"val"' not in (place / "log.jsonl").read_text()
    _, held = run("ltpa-cifar10", *sets, out="held")
    assert [one["n"] for one in held["data"]] == [32, 8, 8]


def test_scenes_are_judged_on_the_cells_of_the_last_level(run: Callable[..., Any]) -> None:
    for label in ("vgg-gap", "vgg-pan", "att3-concat-pc"):
        model = ltpa.models()[label]
        _, results = run("ltpa-scenes", *ltpa.changes(model), out=label)
        ours = results["ours"]
        assert ours["pointing"]["n"] == ours["mass_inside"]["n"] == 16
        assert results["paper"] == {}


def test_scenes_of_another_size_have_their_own_cells(run: Callable[..., Any]) -> None:
    _, results = run("ltpa-scenes", "data.size=40", "model.levels=1")
    assert "entropy_10x10" in results["ours"] and results["ours"]["pointing"]["n"] == 16


@pytest.mark.parametrize("name", ["ltpa-svhn", "ltpa-cub"])
def test_the_sets_of_table_2_run(run: Callable[..., Any], name: str) -> None:
    _, results = run(name, "model.levels=1", "data.limit=8")
    assert [one["n"] for one in results["data"]] == [8, 8, 8]
    ours = results["ours"]
    assert {"error", "entropy_8x8"} <= ours.keys() and ours["error"]["n"] == 8
    assert "pointing" not in ours  # a bird's box is all of its picture


def test_digits_are_not_mirrored() -> None:
    assert changed_by(ltpa.ltpa_svhn().data) is shift
    for make in (ltpa.ltpa_cifar10, ltpa.ltpa_cub, ltpa.ltpa_scenes):
        assert changed_by(make().data) is vary


def test_birds_are_pooled_by_five() -> None:
    assert [first_pool(make().data) for make in (ltpa.ltpa_cub, ltpa.ltpa_svhn)] == [5, 2]
    net: Any = network(Model(width=0.05), 3, 5)
    images = torch.zeros(2, 3, 80, 80, dtype=torch.uint8)
    grids = [one.keys.find("image").shape for one in net(Batch(("a", "b"), images)).attention]
    assert grids == [(16, 16), (8, 8)]


def test_a_start_finds_the_run_of_its_row_and_seed() -> None:
    plan = Model(levels=3, start="runs/cifar100-{row}/seed-{seed}")
    assert start_of(plan, 2) == Path("runs/cifar100-att3-concat-pc/seed-2")
    assert start_of(Model(start="runs/mine"), 2) == Path("runs/mine")
    with pytest.raises(BadInput, match="no row of Table 1"):
        start_of(Model(decision=Decision.PRODUCT, start="{row}"), 0)


def test_pictures_lie_on_the_device_and_are_varied(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.expect_few(monkeypatch)
    seen: list[Any] = []

    def note(model: Any, train: Any, *rest: Any, **options: Any) -> Any:
        seen.append((model, train, options["vary"]))
        raise RuntimeError("enough")

    monkeypatch.setattr(ltpa_building, "experiment", note)
    batch = toy_batch()
    for wanted in ("true", "false"):
        recipe = tiny.recipe("ltpa-cifar10", *SMALL, f"data.vary={wanted}")
        with pytest.raises(RuntimeError, match="enough"):
            recipe.build(Context(tmp_path, 0, "cpu", few))
    (model, train, varied), (_, _, plain) = seen
    assert isinstance(train, Resident) and len(train) == 16
    assert plain(batch) is batch
    torch.manual_seed(0)
    assert not torch.equal(varied(batch).images, batch.images)
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d)]
    assert convolutions[1].weight.is_contiguous(memory_format=torch.channels_last)


# --- parts


@pytest.mark.parametrize(
    ("net", "kind"),
    [
        (Net.VGG, models.VGG),
        (Net.GAP, models.VGGGap),
        (Net.PAN, models.VGGProgressive),
        (Net.RESNET, models.ResNet),
        (Net.VGG_ATTENTION, models.VGGAttention),
        (Net.RESNET_ATTENTION, models.ResNetAttention),
    ],
)
def test_a_network_is_what_was_asked_for(net: Net, kind: type[nn.Module]) -> None:
    made_ = network(Model(net, levels=3, width=0.05, blocks=1, dropout=0.1), 7)
    assert isinstance(made_, kind)
    assert made_(toy_batch()).prediction.shape == (4, 7)
    config: dict[str, Any] = made_.config()  # type: ignore[operator]
    if "sizes" in config:
        assert config["sizes"]["dropout"] == {"first": 0.0, "inside": 0.0, "linear": 0.1}
    else:
        assert config["depth"]["blocks"] == 1
    if "levels" in config:
        assert (config["levels"], config["score"], config["decision"]) == (
            3,
            "parametrised",
            "concat",
        )


@pytest.mark.parametrize("kind", list(Net))
def test_a_network_begins_where_another_ended(kind: Net, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = Model(kind, width=0.05, blocks=1)
    before: Any = network(plan, 7)
    before.save_pretrained(tmp_path / "run" / "model")
    torch.manual_seed(1)
    after = network(plan, 3)
    own = {name: one.clone() for name, one in after.state_dict().items()}
    begin_from(after, tmp_path / "run")
    theirs, kept = before.state_dict(), 0
    for name, one in after.state_dict().items():
        if "decision" in name.split("."):
            assert torch.equal(one, own[name])
            kept += 1
        else:
            assert torch.equal(one, theirs[name]), name
    assert kept == 2
    again = network(plan, 3)
    begin_from(again, tmp_path / "run" / "model")  # a saved network will do as well


def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no network; name the folder of a finished run"):
        begin_from(network(Model(width=0.05), 3), tmp_path)
    saved: Any = network(Model(width=0.05), 3)
    saved.save_pretrained(tmp_path / "model")
    for other in (Model(width=0.1), Model(Net.VGG, width=0.05), Model(levels=3, width=0.05)):
        with pytest.raises(BadInput, match="holds another network"):
            begin_from(network(other, 3), tmp_path)


def test_a_run_starts_from_a_finished_one(run: Callable[..., Any], tmp_path: Path) -> None:
    place, _ = run("ltpa-cifar10", "train.steps=1")
    sets = ("train.steps=1", "train.rate=0", f"model.start={place}")
    _, results = run("ltpa-cifar100", *sets, out="second")
    assert results["settings"]["model.start"] == str(place)
    weights = "model/model.safetensors"
    first, second = (files.read_tensors(tmp_path / one / weights) for one in ("run", "second"))
    assert torch.equal(first["trunk.stages.0.0.weight"], second["trunk.stages.0.0.weight"])


def test_the_optimizer_is_the_one_asked_for() -> None:
    net = nn.Linear(2, 2)
    plan = Train(rate=0.3, decay=0.01, clip=None, warmup=0.5)
    found = sgd(net, plan, Sgd())
    (group,) = found.optimizer.param_groups
    assert isinstance(found.optimizer, torch.optim.SGD) and found.clip is None
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.3, 0.01, 0.9)
    assert group["nesterov"] and len(group["params"]) == 2
    assert found.schedule(0.25) == 0.5 and found.schedule(0.75) == pytest.approx(0.5)
    published = sgd(net, plan, Sgd(dampening=0.9, nesterov=False, fall=Fall.HALVES))
    assert published.optimizer.param_groups[0]["dampening"] == 0.9
    assert published.schedule(0.999) == 0.5**11


def test_the_rate_is_halved_every_twelfth() -> None:
    factor = warm_then_halves(0.0)
    assert [factor(epoch / 300) for epoch in (0, 24, 25, 49, 50, 299)] == [
        1,
        1,
        0.5,
        0.5,
        0.25,
        0.5**11,
    ]
    assert warm_then_halves(0.1)(0.05) == 0.5
