"""`overt measure`: output, files and bad input."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.io import read_json, write_arrays
from tests.cli.conftest import Call
from tests.experiments import foreign

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    (folder / "maps").mkdir()
    for at in range(4):
        foreign.photo(folder / f"p{at}.png")
        heat = np.zeros((60, 90), dtype=np.uint8)
        heat[20:40, 40:60] = 255
        Image.fromarray(heat).save(folder / "maps" / f"p{at}.png")
    return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.mark.long
def test_measure_prints_a_table_and_writes_all_files(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "card"
    names = "mass_inside,entropy,flips@mask"
    arguments = ("measure", shelf["vit"], photos, "--measures", names, "--out", out, "--limit", 3)
    code, output, err = call(*arguments)
    assert code == 0, err
    assert output.startswith("vit on photos")
    assert "mass_inside" in output and "attention beats" in output
    assert "measuring vit: attention: " in err and "; about " in err  # before the evaluation starts
    assert "\nevaluated: attention: " in output and "(definition 2)." in output
    assert output.endswith(f"Wrote {out}; open {out / 'scorecard.html'} in a browser.\n")
    files = {path.name for path in out.iterdir()}
    assert {"scorecard.json", "scorecard.csv", "samples.npz", "scorecard.html"} <= files
    card = read_json(out / "scorecard.json")
    assert card["n"] == 3 and [one["key"] for one in card["measures"]] == sorted(
        names.split(","), key=["mass_inside", "flips@mask", "entropy"].index
    )
    before = (out / "scorecard.json").read_bytes()
    code, _, err = call(*arguments)
    assert code == 0 and (out / "scorecard.json").read_bytes() == before
    assert "; everything is cached." in err


@pytest.mark.long
def test_measure_compares_two_sets_of_maps(call: Call, photos: Path, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    write_arrays(tmp_path / "one.npz", {f"p{at}": dice.random((6, 6)) for at in range(4)})
    code, output, err = call(
        "measure", photos / "maps", photos, "--compare", tmp_path / "one.npz",
        "--measures", "sim", "--measures", "cc", "--out", tmp_path / "card",
    )  # fmt: skip
    assert code == 0, err
    assert "maps minus one" in output and "Holm" in output
    gaps = read_json(tmp_path / "card" / "compared.json")
    assert [one["key"] for one in gaps] == ["cc", "sim"] and gaps[1]["mean"] > 0.5
    assert "maps minus one" in (tmp_path / "card" / "scorecard.html").read_text()


@pytest.mark.long
def test_concentration_on_different_grids_is_not_compared(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path
) -> None:
    write_arrays(tmp_path / "one.npz", {f"p{at}": np.ones((6, 6)) for at in range(4)})
    code, output, err = call(
        "measure", shelf["vit"], photos, "--compare", tmp_path / "one.npz",
        "--measures", "entropy", "--out", tmp_path / "card",
    )  # fmt: skip
    assert code == 0, err
    assert "not compared: entropy (they depend on the number of keys" in output
    assert read_json(tmp_path / "card" / "compared.json") == []


def test_the_list_has_every_metric_with_its_limitation(call: Call) -> None:
    code, output, err = call("measure", "--list")
    assert code == 0 and err == ""
    assert "deletion_area@imputed" in output and "plausible is not faithful" in output
    assert "Spearman's rank correlation of two maps" in output


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "a run, a model or maps"),
        (["nowhere"], "'nowhere'"),
        (["{vit}"], "dataset after the model"),
        (["nowhere", "{photos}"], "'nowhere'"),
        (["{photos}/maps", "osy"], "dataset 'osy'"),
        (["{photos}/maps", "osie"], "osie .*--data.*OVERT_DATA"),
        (["{photos}/maps", "osie", "--data", "{photos}"], "dataset osie is not in"),
        (["{photos}/maps", "{photos}", "--measures", "speerman"], "speerman.* spearman"),
        (["{photos}/maps", "{photos}", "--limit", "0"], "--limit"),
        (["{photos}/maps", "{photos}", "--device", "tpu"], "device 'tpu'"),
        (["{photos}/maps", "{photos}", "--out", "{photos}/p0.png/x"], "is a file"),
        (["{photos}/maps", "{photos}", "--maps", "gone.npz"], r"gone\.npz"),
        (["gone.npz", "{photos}"], r"gone\.npz"),
        (["{photos}/maps", "{photos}", "--measures", ""], "--measures.*empty"),
        (["{photos}/maps", "{photos}/maps/p0.png"], "Unknown dataset"),
        (["{photos}", "{photos}", "--compare", "gone"], "'gone'"),
        (["{vit}", "yelp_hat"], "yelp_hat.*--data"),
        (["{bert}", "{photos}"], "bert.* text.*photos"),
        (["", "{photos}"], "name of the model or run.*empty"),
        (["{photos}/maps", ""], "name of the dataset.*empty"),
        (["{photos}/maps", "{photos}", "--compare", ""], "name of the other model.*empty"),
        (["{photos}/maps", "{photos}", "--over", "sound"], "over 'sound'"),
    ],
)
def test_bad_input_prints_one_line_and_exits_with_2(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    places = {"photos": photos, "vit": shelf["vit"], "bert": shelf["bert"]}
    arguments = [word.format(**places) for word in args]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "card")]
    code, out, err = call("measure", *arguments)
    assert code == 2, (out, err)
    assert re.search(message, err) and err.startswith("overt: ") and err.count("\n") == 1


@pytest.mark.long
def test_the_name_of_the_dataset_is_checked_before_the_model_is_loaded(
    call: Call, shelf: foreign.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "overt.inspect.measure.load_model", lambda *a: pytest.fail("the model was loaded")
    )
    code, _, err = call("measure", shelf["vit"], "osy", "--out", tmp_path / "card")
    assert code == 2 and "osy" in err


@pytest.mark.long
def test_the_other_maps_are_checked_before_metrics_are_computed(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "overt.metrics.scorecard", lambda *a, **k: pytest.fail("metrics were computed")
    )
    (tmp_path / "empty").mkdir()
    for other in ("nope", tmp_path / "empty", tmp_path / "gone.npz"):
        code, _, err = call(
            "measure", photos / "maps", photos, "--compare", other, "--out", tmp_path / "card"
        )
        assert code == 2 and not (tmp_path / "card").exists(), err


@pytest.mark.long
def test_a_scorecard_is_not_written_into_its_input_folder(call: Call, photos: Path) -> None:
    before = sorted(photos.rglob("*"))
    code, _, err = call("measure", photos / "maps", photos, "--out", photos / "maps")
    assert code == 2 and "choose another folder for --out" in err
    assert sorted(photos.rglob("*")) == before
