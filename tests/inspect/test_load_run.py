"""Runs of a recipe in a Python file: rebuilt, looked at, measured and served."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import cli, io
from overt.errors import UserError
from overt.experiments.inference_spec import NotInteractive
from overt.experiments.recipe_file import RecipeFile
from overt.inspect import load_run as load_run_module
from overt.inspect import measure
from overt.inspect.load_run import is_custom_run, load_custom_model, load_run
from overt.inspect.look import ViewOptions, look
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.papers.catalog import load_recipe_files

DOTS = Path(__file__).resolve().parents[2] / "examples" / "dots.py"
WORD = f"{DOTS}:experiment"


@pytest.fixture(scope="module")
def custom_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example of the documentation, trained by the command line for a few steps."""
    paths = list(sys.path)
    out = tmp_path_factory.mktemp("runs") / "dots"
    changes = ["train.epochs=2", "train.card=0", "model.width=0.5", "data.limit=32"]
    sets = [word for change in changes for word in ("--set", change)]
    line = ["run", WORD, "--out", str(out), "--device", "cpu", "--seed", "3", *sets]
    assert cli.main(line) == 0
    yield out
    sys.path[:] = paths
    sys.modules.pop("dots", None)


@pytest.fixture
def files(custom_run: Path) -> tuple[RecipeFile, ...]:
    return load_recipe_files([WORD])


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.full((32, 32, 3), 60, dtype=np.uint8)
    pixels[4:8, 20:24] = 250
    Image.fromarray(pixels).save(tmp_path / "dot.png")
    return tmp_path / "dot.png"


def test_results_have_the_metric_of_the_file(custom_run: Path) -> None:
    results = io.read_json(custom_run / "results.json")
    found = results["ours"]["distance"]
    assert found["unit"] == "cells" and found["direction"] == "lower" and found["n"] == 32
    assert results["settings"]["model.supervise"] == 1.0
    assert "distance" in io.read_arrays(custom_run / "samples.npz")


def test_a_run_is_rebuilt_with_its_settings_and_weights(
    custom_run: Path, files: tuple[RecipeFile, ...]
) -> None:
    run = load_run(custom_run, None, "cpu", files)
    assert run.label == "dots, seed 3" and run.recipe.model.width == 0.5
    saved = io.read_tensors(custom_run / "model" / "model.safetensors")
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, saved[name], atol=0, rtol=0)


def test_without_its_file_no_command_loads_the_model(custom_run: Path, photo: Path) -> None:
    """The path of the code is not in the folder: each message says how to name it."""
    with pytest.raises(UserError, match=r"FILE.*never read"):
        load_run(custom_run, None, "cpu")
    for line in (
        ["look", custom_run, photo, "--out", photo.with_suffix(".html")],
        ["measure", custom_run, "--out", photo.parent / "card"],
        ["serve", custom_run, "--port", 0],
    ):
        assert cli.main([str(word) for word in line]) == 2
    with pytest.raises(UserError, match=r"FILE\.py:NAME"):
        find_models([str(custom_run)])


def test_changed_networks_and_damaged_weights_are_refused(
    custom_run: Path, files: tuple[RecipeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    dots = sys.modules["dots"]
    monkeypatch.setattr(dots, "QUADRANTS", (*dots.QUADRANTS, "middle"))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"size mismatch"):
        load_run(custom_run, None, "cpu", files)


def test_look_draws_the_map_of_a_run(
    custom_run: Path, files: tuple[RecipeFile, ...], photo: Path, tmp_path: Path
) -> None:
    for method in ("attention", "gradient"):
        out = tmp_path / f"{method}.html"
        options = ViewOptions(method=method)
        viewed = look(str(custom_run), [str(photo)], out, options, "cpu", files=files)
        assert out.is_file() and len(viewed.panels) == 1
        assert "From a run of dots: find the quadrant of a dot." in viewed.notes
        assert viewed.answers[0][0] in ("top left", "top right", "bottom left", "bottom right")


def test_the_command_look_takes_the_file(custom_run: Path, photo: Path, tmp_path: Path) -> None:
    line = ["look", custom_run, photo, "--out", tmp_path / "a.png", "--recipe", WORD]
    assert cli.main([str(word) for word in line]) == 0 and (tmp_path / "a.png").is_file()
    assert cli.main([str(word) for word in [*line[:-1], "dots"]]) == 2  # no Python file


def test_measure_uses_the_test_set_of_the_run(
    custom_run: Path, files: tuple[RecipeFile, ...]
) -> None:
    opened = measure.open_measured(str(custom_run), None, "cpu", lambda line: None, files)
    assert opened.name == "dots, seed 3" and opened.judged is not None
    assert len(opened.judged) == 32 and opened.size == (32, 32)
    request = measure.MeasureRequest(
        str(custom_run), measures=("mass_inside",), limit=4, files=files
    )
    card = measure.compute_scorecard(request, None)
    assert "mass_inside" in card.keys and len(card) == 4


def test_serve_offers_a_run_with_its_file(custom_run: Path, files: tuple[RecipeFile, ...]) -> None:
    found = find_models([str(custom_run.parent)], files)
    cache = ModelCache(found, "cpu", files)
    (about,) = cache.describe_all()
    assert about["name"] == "dots" and about["looks"] and not about["reads"]
    assert set(about["maps"]) == {"attention", "gradient", "search"}
    assert cache.load("dots").spec is not None and cache.examples("dots")


def test_models_that_cannot_be_used_by_hand_say_why(
    custom_run: Path, files: tuple[RecipeFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(custom_run, None, "cpu", files)
    example = run.experiment.example()

    def refused(**changes: object) -> str:
        monkeypatch.setattr(
            load_run_module, "load_run",
            lambda *given: load_run_module.LoadedRun(
                run.recipe, run.results, load_run_module.replace(run.experiment, **changes)
            ),
        )  # fmt: skip
        with pytest.raises(UserError, match="cannot be used") as failed:
            load_custom_model(custom_run, "dots", files)
        return str(failed.value)

    floats = load_run_module.replace(example, images=example.images.float())
    assert "images are floats" in refused(example=lambda: floats)
    assert "has no method `encode`" in refused(model=torch.nn.Linear(2, 2))
    assert "no `inference_spec`" in refused(inference_spec=None)
    assert "by order" in refused(inference_spec=NotInteractive("by order"))


def test_only_finished_runs_of_the_files_are_custom(
    custom_run: Path, files: tuple[RecipeFile, ...], tmp_path: Path
) -> None:
    assert is_custom_run(custom_run, files)
    assert not is_custom_run(custom_run, ()) and not is_custom_run(tmp_path, files)


@pytest.mark.long
def test_a_table_of_the_file_runs_in_worker_processes(custom_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    sets = ["--set", "train.epochs=1", "--set", "train.card=0", "--set", "data.limit=16"]
    line = ["table", f"{DOTS}:table", "--out", str(out), "--seeds", "1", "--jobs", "2", *sets]
    assert cli.main([*line, "--device", "cpu"]) == 0
    table = io.read_json(out / "table.json")
    assert [row["row"] for row in table["rows"]] == ["plain", "supervised"]
    assert all(row["ours"]["distance"]["seeds"] == 1 for row in table["rows"])
    settings = [row["settings"]["model.supervise"] for row in table["rows"]]
    assert settings == [0.0, 1.0]
