"""Runs of grounded supervision, tiny: what they leave; and networks of the sizes asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from overt import files, models
from overt.errors import BadInput
from overt.recipes import find, settings
from overt.recipes.recipe import Context
from overt.recipes.vgp import building
from overt.recipes.vgp.recipe import Model
from tests.recipes import askable, tiny
from tests.recipes.vgp import small


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "vgp-cache"))


def test_a_run_leaves_every_number_and_a_network_to_open(tmp_path: Path) -> None:
    recipe = settings.apply(find("vgp-scenes"), small.SETS)
    results = tiny.run(recipe, tmp_path / "run")
    files.verify(tmp_path / "run")
    ours = results["ours"]
    assert set(ours) >= {
        *("identification", "paraphrase", "paraphrase_f1", "grounding_accuracy", "reach"),
        *("grounding_mass", "pointing", "answers", "located_true", "located_detected"),
    }
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    assert results["scorecard"] == {"n": 2}  # of what the class token takes from regions
    samples = files.read_arrays(tmp_path / "run" / "samples.npz")
    elsewhere = files.read_arrays(tmp_path / "run" / "elsewhere.npz")
    for name, one in ours.items():
        known = samples[name] if name in samples else elsewhere.get(name)
        if known is not None:
            values = known[~np.isnan(known)]
            assert one["n"] == len(values)
            assert one["value"] == pytest.approx(values.mean(dtype=np.float64), abs=1e-6)
    assert len(results["groups"]["grounding_accuracy"]) == 2 * 4  # layers and heads
    assert results["paper"]["answers"]["value"] == pytest.approx(0.6709)
    again = models.VLBert.from_pretrained(tmp_path / "run" / "model")
    assert again.sizes.layers == 2
    asked = askable.ask(tmp_path / "run", "a red circle / a blue square")
    assert {name for name, _ in asked.answers} == set(building.KINDS.values())


def test_sizes_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = settings.apply(find("vgp-scenes"), [*small.SETS, "model.heads=3", "model.width=0.2"])
    net = recipe.build(Context(tmp_path, device="cpu")).model
    assert isinstance(net, models.VLBert)
    assert (net.sizes.layers, net.sizes.heads, net.sizes.width) == (2, 3, recipe.wide)


def test_a_shortened_network_still_runs_and_says_so() -> None:
    net = building.shortened(small.net(), 0.5)
    assert net.sizes.layers == 1 and len(net.encoder.layers) == 1
    assert len(net(small.texts().batch([0])).seen.calls) == 1


def test_a_missing_encoder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"model\.begin=random"):
        building.encoder_folder(Model())
    assert building.encoder_folder(Model(folder="here")) == Path("here")


def test_first_weights_of_a_narrow_network_are_larger() -> None:
    """Scores of attention start at one size, whatever the width."""

    def scores(width: int) -> float:
        torch.manual_seed(0)
        sizes = models.VLSizes(50, width, 1, 4, width, dropout=0.0)
        net = models.VLBert(sizes, models.GivenRegions(4), models.Classify(width, 3))
        query = net.encoder.layers[0].attention.query  # type: ignore[union-attr]
        return float(query(torch.randn(256, width)).std())  # type: ignore[operator]

    assert scores(64) == pytest.approx(scores(768), rel=0.1)
