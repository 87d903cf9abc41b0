"""Small runs of grounded supervision, and networks of the configured sizes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from overt import io, nn
from overt.errors import UserError
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.papers.catalog import build, find_recipe
from overt.papers.vgp import model
from overt.papers.vgp.config import VgpModel
from overt.papers.vgp.train import CAPTION_CLASSES
from tests.experiments import tiny, view_checks
from tests.papers.vgp import small


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path_factory.getbasetemp() / "vgp-cache"))


@pytest.mark.long
def test_a_run_writes_all_metrics_and_a_loadable_network(tmp_path: Path) -> None:
    recipe = settings.apply(find_recipe("vgp-scenes"), small.SETS)
    results = tiny.run(recipe, tmp_path / "run")
    io.verify(tmp_path / "run")
    ours = results["ours"]
    assert set(ours) >= {
        *("identification", "paraphrase", "paraphrase_f1", "grounding_accuracy", "reach"),
        *("grounding_mass", "pointing", "answers", "located_true", "located_detected"),
    }
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    assert results["scorecard"] == {"n": 2}  # of the attention of the class token to regions
    samples = io.read_arrays(tmp_path / "run" / "samples.npz")
    elsewhere = io.read_arrays(tmp_path / "run" / "elsewhere.npz")
    for name, one in ours.items():
        known = samples[name] if name in samples else elsewhere.get(name)
        if known is not None:
            values = known[~np.isnan(known)]
            assert one["n"] == len(values)
            assert one["value"] == pytest.approx(values.mean(dtype=np.float64), abs=1e-6)
    assert len(results["groups"]["grounding_accuracy"]) == 2 * 4  # layers and heads
    assert results["paper"]["answers"]["value"] == pytest.approx(0.6709)
    again = nn.VLBert.from_pretrained(tmp_path / "run" / "model")
    assert again.sizes.layers == 2
    answer = view_checks.check_view(tmp_path / "run", "a red circle / a blue square")
    assert {name for name, _ in answer.answers} == set(CAPTION_CLASSES.values())


def test_network_sizes_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = settings.apply(
        find_recipe("vgp-scenes"), [*small.SETS, "model.heads=3", "model.width=0.2"]
    )
    net = build(recipe, RunContext(tmp_path, device="cpu")).model
    assert isinstance(net, nn.VLBert)
    assert (net.sizes.layers, net.sizes.heads, net.sizes.width) == (2, 3, recipe.hidden_width)


def test_drop_upper_layers_gives_a_shorter_network_that_runs() -> None:
    net = model.drop_upper_layers(small.net(), 0.5)
    assert net.sizes.layers == 1 and len(net.encoder.layers) == 1
    assert len(net(small.texts().batch([0])).trace.calls) == 1


def test_a_missing_encoder_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overt.experiments.builders.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"model\.begin=random"):
        model.encoder_folder(VgpModel())
    assert model.encoder_folder(VgpModel(folder="here")) == Path("here")


def test_attention_scores_start_at_one_scale_for_any_width() -> None:
    """The initial weights of a narrow network are larger."""

    def score_scale(width: int) -> float:
        torch.manual_seed(0)
        sizes = nn.VLBertSizes(50, width, 1, 4, width, dropout=0.0)
        net = nn.VLBert(sizes, nn.PrecomputedRegionEncoder(4), nn.ClassificationHead(width, 3))
        query = net.encoder.layers[0].attention.query  # type: ignore[union-attr]
        return float(query(torch.randn(256, width)).std())  # type: ignore[operator]

    assert score_scale(64) == pytest.approx(score_scale(768), rel=0.1)
