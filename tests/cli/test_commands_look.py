"""`overt look` and `overt doctor MODEL`: what is printed, what is written, what is refused."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.recipes import foreign

pytestmark = pytest.mark.usefixtures("no_folders")

TEXT = "the small red ball lies on the grassland"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


def test_look_says_what_it_drew_and_where_it_is(
    call: Call, shelf: foreign.Shelf, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "view.png"
    code, said, err = call(
        "look", shelf["bert"], TEXT, "--out", out, "--layer", 0, "--head", 1, "--query", "ball"
    )
    assert code == 0 and err == "", err
    assert said.startswith("Where bert (BertModel) looks\n")
    assert "encoder.layer.0.attention.self, head 1 of 4, from 'ball'; most on" in said
    assert said.endswith(f"\nThe view is in {out}.\n") and out.stat().st_size > 5000


def test_look_without_out_writes_a_page_here(
    call: Call, shelf: foreign.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo = foreign.photo(tmp_path / "p.png")
    code, said, _ = call("look", shelf["vit"], photo, "--map", "relevance")
    assert code == 0 and "It answers " in said
    assert (tmp_path / "look.html").read_text().startswith("<!doctype html>")


def test_a_long_text_is_one_note_and_no_noise(
    call: Call, shelf: foreign.Shelf, tmp_path: Path
) -> None:
    code, said, err = call("look", shelf["gpt2"], "dog " * 99, "--out", tmp_path / "v.html")
    assert code == 0 and err == "" and said.count("40 tokens: what comes after them was cut") == 1


def test_doctor_tells_a_model_from_a_run(call: Call, shelf: foreign.Shelf) -> None:
    code, said, err = call("doctor", shelf["gpt2"])
    assert code == 0 and err == ""
    row = next(line for line in said.splitlines() if line.startswith("1  transformer.h.1.attn"))
    assert row.split()[2:5] == ["causal", "scaled_dot_product_attention", "4"]
    assert "2 of 2 attention modules ran and were seen; 2 compared with eager" in said


def test_doctor_ends_with_1_when_a_module_is_unseen(
    call: Call, shelf: foreign.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.recipes import checkup

    broken = checkup.Checkup([], [checkup.Module(0, "odd")], 1e-4, "1 of 1 was not seen: 'odd'.")
    monkeypatch.setattr(checkup, "model", lambda name, say: broken)
    code, said, err = call("doctor", shelf["bert"])
    assert code == 1 and err == "overt: 1 of 1 was not seen: 'odd'.\n" and "odd" in said


def spoiled(shelf: foreign.Shelf, tmp_path: Path) -> dict[str, Path]:
    """Folders with one thing wrong in each."""
    made = {name: tmp_path / name for name in ("pickled", "cut", "json", "empty")}
    for name in ("pickled", "cut", "json"):
        shutil.copytree(shelf["bert"], made[name])
    (made["pickled"] / "model.safetensors").rename(made["pickled"] / "pytorch_model.bin")
    (made["cut"] / "model.safetensors").write_bytes(b"\x08")
    (made["json"] / "config.json").write_text('{"model_type": ')
    made["empty"].mkdir()
    return made


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["look"], "Missing argument 'MODEL'"),
        (["look", "{bert}"], "Missing argument 'INPUT'"),
        (["look", "nowhere", "x"], "'nowhere' is not a folder"),
        (["look", "", "x"], "the name of the model is empty"),
        (["look", "{empty}", "x"], "holds no model: it has no config.json"),
        (["look", "{pickled}", "x"], "a pickle, which runs code when it is read"),
        (["look", "{cut}", "x"], "cannot be opened as a model"),
        (["look", "{json}", "x"], "config.json"),
        (["look", "hf:no/such-model", "x"], "run `hf download no/such-model`"),
        (["look", "hf:not a name", "x"], "is no name on the Hub"),
        (["look", "{bert}", "a", "dog"], "put one text into quotes"),
        (["look", "{bert}", " "], "the text is empty"),
        (["look", "{bert}", "a \udcff"], "the text is not UTF-8"),
        (["look", "{bert}", "gone.png"], "gone.png cannot be read"),
        (["look", "{bert}", "{photo}"], "does not look at pictures"),
        (["look", "{vit}", "a dog"], "does not read"),
        (["look", "{vit}", "{bert}/config.json"], "is not a JPEG, PNG or WEBP picture"),
        (["look", "{bert}", "x", "--out", "view.gif"], "ends in .png, .svg or .html"),
        (["look", "{bert}", "x", "--out", "{photo}/view.png"], "is a file"),
        (["look", "{bert}", "x", "--map", "saliency"], "there is no map 'saliency'"),
        (["look", "{bert}", "x", "--map", "gradient"], "gives no scores"),
        (["look", "{bert}", "x", "--layer", "7"], "has no layer '7'"),
        (["look", "{bert}", "x", "--head", "9"], "has heads 0 to 3, not 9"),
        (["look", "{bert}", "x", "--head", "one"], "--head"),
        (["look", "{bert}", "x", "--query", "elephant"], "has no query 'elephant'"),
        (["look", "{bert}", "x", "--device", "gpu"], "there is no device 'gpu'"),
        (["doctor", "hf:no/such-model"], "run `hf download no/such-model`"),
        (["doctor", ""], "the name of the run or model is empty"),
        (["doctor", "{pickled}"], "a pickle"),
        (["doctor", "{empty}"], "holds no run"),
        (["doctor", "{cut}"], "cannot be opened as a model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_exit_2(
    call: Call, shelf: foreign.Shelf, tmp_path: Path, args: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {"photo": foreign.photo(tmp_path / "p.png"), **spoiled(shelf, tmp_path)}
    places |= {name: shelf[name] for name in ("bert", "vit")}
    before = set(tmp_path.rglob("*"))
    code, _, err = call(*(one.format(**places) for one in args))
    assert code == 2 and said in err, err
    assert err.startswith("overt: ") and err.count("\n") == 1 and "Traceback" not in err
    assert set(tmp_path.rglob("*")) == before  # nothing was written


def test_every_map_is_in_the_help(call: Call) -> None:
    from overt.recipes.seeing import MAPS

    _, out, _ = call("look", "--help")
    told = out.partition("--map ")[2].partition("--device")[0]
    assert [name for name in MAPS if not re.search(rf"\b{name}\b", told)] == []


@pytest.mark.parametrize("args", [["look", "--help"], ["doctor", "--help"]])
def test_help_and_mistakes_import_nothing_heavy(args: list[str]) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from overt import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    cli.main({args!r})\n"
        "heavy = {'torch', 'numpy', 'transformers', 'PIL', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
