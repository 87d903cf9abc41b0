"""`overt bench`: methods ranked on a model whose deciding cell is known, resuming, submissions."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overt import io, metrics
from overt.errors import UserError
from overt.inspect import benchmark
from overt.inspect.benchmark import BenchmarkRequest, benchmark_pairs, run_benchmark
from overt.metrics.scorecard.benchmark import Benchmark

FILE = Path(__file__).with_name("bench_squares.py")
METHODS = ("saliency", "inputxgradient", "occlusion", "rollout")
MEASURES = ("mass_inside", "spearman", "deletion_area@mean", "accuracy")


REQUEST = BenchmarkRequest((f"corner={FILE}:model",), (f"{FILE}:data",), METHODS, MEASURES)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench")
    run_benchmark(REQUEST, out, command="overt bench")
    return out


def again(request: BenchmarkRequest, out: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Run on a folder where nothing may be computed again."""

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(metrics, "scorecard", fail)
    found = run_benchmark(request, out)
    assert found is not None
    return found


def test_methods_are_ranked_beside_controls_and_the_target(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = again(REQUEST, done, monkeypatch).results[0]
    assert (found.model, found.data, len(found.cards[0])) == ("corner", "squares test", 8)
    assert set(METHODS[:3]) <= set(found.methods) and "rollout" in found.unavailable
    assert {"random", "centre", "uniform", "shuffled"} <= set(found.controls)
    assert found.ceilings == ("target",) and "accuracy" not in found.keys
    standings = {one.method: one for one in found.standings("mass_inside")}
    assert standings["occlusion"].first == 1 and standings["occlusion"].interval.mean == 1
    # The evidence is in the same cell of every image: the map of another one is as good.
    assert not any(one.beats_controls for one in standings.values())
    inside = found.interval("mass_inside", "target")
    assert inside is not None and inside.mean == 1  # on its own grid, not on that of the methods


def test_results_are_written_as_json_csv_npz_and_a_page(done: Path) -> None:
    said = io.read_json(done / "benchmark.json")
    assert said["format"] == "overt benchmark 1" and said["results"][0]["n"] == 8
    with (done / "benchmark.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(said["records"]) and float(rows[0]["trust"]) > 0
    (folder,) = (done / "scorecards").iterdir()
    assert "square-0" in io.read_arrays(folder / "samples.npz")["id"]
    page = (done / "index.html").read_text()
    assert "corner on squares test" in page


def test_a_folder_of_other_settings_is_refused(done: Path) -> None:
    with pytest.raises(UserError, match="methods, limit"):
        run_benchmark(replace(REQUEST, limit=4, methods=("ig",)), done)


def test_submitted_maps_are_added_without_computing_the_rest(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    about = {"format": "overt maps 1", "method": "LRP", "model": "corner"}
    (folder / "maps.json").write_text(json.dumps(about))
    heat = np.zeros((4, 4))
    heat[1, 1] = 1
    np.savez(folder / "maps.npz", **{f"square-{at}": heat for at in range(8)})
    request = replace(REQUEST, maps=(folder,))
    seen = []
    whole = metrics.scorecard
    monkeypatch.setattr(
        metrics,
        "scorecard",
        lambda model, data, names, looks, **rest: (
            seen.append(list(looks)) or whole(model, data, names, looks, **rest)
        ),
    )
    found = run_benchmark(request, done)
    assert found is not None and seen == [["saliency", "LRP"]]
    result = found.results[0]
    assert "LRP" in result.methods
    best = result.interval("mass_inside", "LRP")
    target = result.interval("mass_inside", "target")
    assert best is not None and target is not None and best.mean == target.mean == 1
    assert "LRP" in again(request, done, monkeypatch).results[0].methods
    (folder / "maps.json").write_text(json.dumps(about | {"method": "ig"}))
    with pytest.raises(UserError, match="'ig'"):
        run_benchmark(request, done)
    (folder / "maps.json").unlink()
    np.savez(folder / "maps.npz", other=heat)
    with pytest.raises(UserError, match="no map"):
        run_benchmark(request, done)


@pytest.mark.parametrize(
    "names", [["ig"], ["target"], ["random"], ["class activation"], ["my LRP", "My-LRP"]]
)
def test_submitted_maps_need_names_of_their_own(names: list[str]) -> None:
    """A map named as a control would be left out, or be taken for one."""
    benchmark.check_submitted_names(["my LRP", "yours"])
    with pytest.raises(UserError, match=names[0]):
        benchmark.check_submitted_names(names)


@pytest.mark.parametrize(
    ("models", "data", "message"),
    [
        ((), (), "--model"),
        (("{file}:model",), (), "dataset"),
        (("={file}:model",), (), "NAME=MODEL"),
        (("{file}:model",) * 2, ("{file}:data",), "twice"),
        (("no.npz",), ("{file}:data",), "no.npz"),
        (("{file}:model",), ("osiris",), "osi"),
    ],
)
def test_wrong_arguments_are_found_before_any_work(
    models: tuple[str, ...], data: tuple[str, ...], message: str
) -> None:
    words = [tuple(one.format(file=FILE) for one in some) for some in (models, data)]
    with pytest.raises(UserError, match=message):
        benchmark_pairs(BenchmarkRequest(words[0], words[1]))


def test_a_file_that_makes_no_model_is_an_error(tmp_path: Path) -> None:
    for model, data, message in (
        ("nothing", "data", "torch.nn.Module"),
        ("model", "nothing", "a dataset"),
        ("neither", "data", "'neither'"),
    ):
        request = BenchmarkRequest((f"{FILE}:{model}",), (f"{FILE}:{data}",))
        with pytest.raises(UserError, match=message):
            run_benchmark(request, tmp_path / model)


@pytest.mark.long
def test_processes_compute_the_same_as_one(done: Path, tmp_path: Path) -> None:
    two = replace(REQUEST, models=(*REQUEST.models, f"twin={FILE}:model"))
    found = run_benchmark(two, tmp_path, jobs=2)
    assert found is not None and [one.model for one in found.results] == ["corner", "twin"]
    folder = benchmark_pairs(REQUEST)[0].folder
    for name in ("scorecard.json", "samples.npz"):
        mine = tmp_path / benchmark.SCORECARDS / folder / name
        assert mine.read_bytes() == (done / benchmark.SCORECARDS / folder / name).read_bytes()
