"""`overt measure`: what is printed, what is written, what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.files import read_json, write_arrays
from tests.cli.conftest import Call
from tests.recipes import foreign

pytestmark = pytest.mark.usefixtures("no_folders")


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


def test_a_table_is_printed_and_everything_is_written(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "card"
    names = "mass_inside,entropy,flips@mask"
    given = ("measure", shelf["vit"], photos, "--measures", names, "--out", out, "--limit", 3)
    code, said, err = call(*given)
    assert code == 0, err
    assert said.startswith("vit on photos")
    assert "mass_inside" in said and "attention beats" in said
    assert said.endswith(f"Everything is in {out}; open {out / 'scorecard.html'} in a browser.\n")
    written = {path.name for path in out.iterdir()}
    assert {"scorecard.json", "scorecard.csv", "samples.npz", "scorecard.html"} <= written
    card = read_json(out / "scorecard.json")
    assert card["n"] == 3 and [one["key"] for one in card["measures"]] == sorted(
        names.split(","), key=["mass_inside", "flips@mask", "entropy"].index
    )
    before = (out / "scorecard.json").read_bytes()
    assert call(*given)[0] == 0 and (out / "scorecard.json").read_bytes() == before


def test_two_sets_of_maps_are_compared(call: Call, photos: Path, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    write_arrays(tmp_path / "one.npz", {f"p{at}": dice.random((6, 6)) for at in range(4)})
    code, said, err = call(
        "measure", photos / "maps", photos, "--compare", tmp_path / "one.npz",
        "--measures", "sim", "--measures", "cc", "--out", tmp_path / "card",
    )  # fmt: skip
    assert code == 0, err
    assert "maps less one" in said and "Holm" in said
    gaps = read_json(tmp_path / "card" / "compared.json")
    assert [one["key"] for one in gaps] == ["cc", "sim"] and gaps[1]["mean"] > 0.5
    assert "maps less one" in (tmp_path / "card" / "scorecard.html").read_text()


def test_what_another_grid_makes_of_a_shape_is_not_compared(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path
) -> None:
    write_arrays(tmp_path / "one.npz", {f"p{at}": np.ones((6, 6)) for at in range(4)})
    code, said, err = call(
        "measure", shelf["vit"], photos, "--compare", tmp_path / "one.npz",
        "--measures", "entropy", "--out", tmp_path / "card",
    )  # fmt: skip
    assert code == 0, err
    assert "not compared: entropy (they depend on the number of keys, and of " in said
    assert read_json(tmp_path / "card" / "compared.json") == []


def test_the_list_has_every_measure_and_what_it_cannot_say(call: Call) -> None:
    code, said, err = call("measure", "--list")
    assert code == 0 and err == ""
    assert "deletion_area@imputed" in said and "plausible is not faithful" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name what to measure"),
        (["nowhere"], "'nowhere' is not a folder or a file; name a run, a model or maps"),
        (["{vit}"], "name a data set behind the model"),
        (["nowhere", "{photos}"], "'nowhere' is not a folder"),
        (["{photos}/maps", "osy"], "There is no data set 'osy'"),
        (["{photos}/maps", "osie"], "name the folder that holds osie with --data or OVERT_DATA"),
        (["{photos}/maps", "osie", "--data", "{photos}"], "the data set osie is not found in"),
        (["{photos}/maps", "{photos}", "--measures", "speerman"], "near it: spearman"),
        (["{photos}/maps", "{photos}", "--limit", "0"], "--limit"),
        (["{photos}/maps", "{photos}", "--device", "tpu"], "there is no device 'tpu'"),
        (["{photos}/maps", "{photos}", "--out", "{photos}/p0.png/x"], "is a file"),
        (["{photos}/maps", "{photos}", "--maps", "gone.npz"], "gone.npz does not exist"),
        (["gone.npz", "{photos}"], "gone.npz does not exist; name an .npz of maps"),
        (["{photos}/maps", "{photos}", "--measures", ""], "--measures names nothing; leave it out"),
        (["{photos}/maps", "{photos}/maps/p0.png"], "There is no data set"),
        (["{photos}", "{photos}", "--compare", "gone"], "'gone' is not a folder"),
        (["{vit}", "yelp_hat"], "name the folder that holds yelp_hat"),
        (["{bert}", "{photos}"], "bert reads texts, and photos"),
        (["", "{photos}"], "the name of the model or run is empty"),
        (["{photos}/maps", ""], "the name of the data set is empty"),
        (["{photos}/maps", "{photos}", "--compare", ""], "the name of the other model is empty"),
        (
            ["{photos}/maps", "{photos}", "--over", "sound"],
            "gives a map of these samples over 'sound'",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    call: Call, shelf: foreign.Shelf, photos: Path, tmp_path: Path, args: list[str], said: str
) -> None:
    places = {"photos": photos, "vit": shelf["vit"], "bert": shelf["bert"]}
    given = [word.format(**places) for word in args]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "card")]
    code, out, err = call("measure", *given)
    assert code == 2, (out, err)
    assert said in err and err.startswith("overt: ") and err.count("\n") == 1
