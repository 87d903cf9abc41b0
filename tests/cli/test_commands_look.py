"""`overt look` and `overt doctor MODEL`: output, files and bad input."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.experiments import foreign

pytestmark = pytest.mark.usefixtures("clean_environment")

TEXT = "the small red ball lies on the grassland"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


def test_look_prints_what_it_drew_and_the_path(
    call: Call, shelf: foreign.Shelf, tmp_path: Path
) -> None:
    out = tmp_path / "view.png"
    code, output, err = call(
        "look", shelf["bert"], TEXT, "--out", out, "--layer", 0, "--head", 1, "--query", "ball"
    )
    assert code == 0 and err == "", err
    assert output.startswith("Where bert (BertModel) looks\n")
    assert "encoder.layer.0.attention.self, head 1 of 4, from 'ball'; most on" in output
    assert output.endswith(f"\nWrote {out}.\n") and out.stat().st_size > 5000


def test_look_without_out_writes_a_page_to_the_current_folder(
    call: Call, shelf: foreign.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo = foreign.photo(tmp_path / "p.png")
    code, output, _ = call("look", shelf["vit"], photo, "--map", "relevance")
    assert code == 0 and "It answers " in output
    assert (tmp_path / "look.html").read_text().startswith("<!doctype html>")


def test_a_truncated_text_prints_one_note(call: Call, shelf: foreign.Shelf, tmp_path: Path) -> None:
    code, output, err = call("look", shelf["gpt2"], "dog " * 99, "--out", tmp_path / "v.html")
    assert code == 0 and err == "" and output.count("truncated to 40 tokens") == 1


def test_doctor_checks_a_model_folder(call: Call, shelf: foreign.Shelf) -> None:
    code, output, err = call("doctor", shelf["gpt2"])
    assert code == 0 and err == ""
    row = next(line for line in output.splitlines() if line.startswith("1  transformer.h.1.attn"))
    assert row.split()[2:5] == ["causal", "scaled_dot_product_attention", "4"]
    assert "2 of 2 attention modules ran and were captured; 2 compared with eager" in output


def test_doctor_compares_implementations(call: Call, shelf: foreign.Shelf) -> None:
    code, output, err = call("doctor", shelf["vit"], "--compare", "--dtype", "bfloat16,float32")
    assert code == 0 and err == ""
    table = output.partition("Attention implementations\n")[2].splitlines()
    assert [line.split()[:2] for line in table[1:5]] == [
        ["eager", "float32"], ["sdpa", "float32"],
        ["flash_attention_2", "float32"], ["sdpa", "bfloat16"],
    ]  # fmt: skip
    assert "Under eager and sdpa in float32, maps differ by at most" in output


def test_doctor_exits_with_1_if_a_module_is_not_captured(
    call: Call, shelf: foreign.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.inspect import model_check

    broken = model_check.ModelReport(
        [], [model_check.ModuleReport(0, "odd")], 1e-4, "1 of 1 was not seen: 'odd'."
    )
    monkeypatch.setattr(model_check, "check_model", lambda *given: broken)
    code, output, err = call("doctor", shelf["bert"])
    assert code == 1 and err == "overt: 1 of 1 was not seen: 'odd'.\n" and "odd" in output


def write_corrupt_models(shelf: foreign.Shelf, tmp_path: Path) -> dict[str, Path]:
    """Make folders with one error each."""
    made = {name: tmp_path / name for name in ("pickled", "cut", "json", "empty")}
    for name in ("pickled", "cut", "json"):
        shutil.copytree(shelf["bert"], made[name])
    (made["pickled"] / "model.safetensors").rename(made["pickled"] / "pytorch_model.bin")
    (made["cut"] / "model.safetensors").write_bytes(b"\x08")
    (made["json"] / "config.json").write_text('{"model_type": ')
    made["empty"].mkdir()
    return made


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["look"], "Missing argument 'MODEL'"),
        (["look", "{bert}"], "No input"),
        (["look", "nowhere", "x"], "'nowhere'.*folder"),
        (["look", "", "x"], "name of the model.*empty"),
        (["look", "{empty}", "x"], r"config\.json"),
        (["look", "{pickled}", "x"], "pickle"),
        (["look", "{cut}", "x"], "complete safetensors"),
        (["look", "{json}", "x"], "config.json"),
        (["look", "hf:no/such-model", "x"], "`hf download no/such-model`"),
        (["look", "hf:not a name", "x"], "Hub name"),
        (["look", "{bert}", "a", "dog"], "quotes"),
        (["look", "{bert}", " "], "text is empty"),
        (["look", "{bert}", "a \udcff"], "UTF-8"),
        (["look", "{bert}", "gone.png"], r"gone\.png"),
        (["look", "{bert}", "{photo}"], "takes text, not images"),
        (["look", "{vit}", "a dog"], "takes images, not text"),
        (["look", "{vit}", "{bert}/config.json"], "JPEG.*PNG.*WEBP"),
        (["look", "{bert}", "x", "--out", "view.gif"], r"\.png.*\.svg.*\.html"),
        (["look", "{bert}", "x", "--out", "{photo}/view.png"], "is a file"),
        (["look", "{bert}", "x", "--map", "saliency"], "'saliency'"),
        (["look", "{bert}", "x", "--map", "gradient"], "no output scores"),
        (["look", "{bert}", "x", "--layer", "7"], "layer.*'7'"),
        (["look", "{bert}", "x", "--head", "9"], "heads 0 to 3.* 9"),
        (["look", "{bert}", "x", "--head", "one"], "--head"),
        (["look", "{bert}", "x", "--query", "elephant"], "query 'elephant'"),
        (["look", "{bert}", "x", "--device", "gpu"], "device 'gpu'"),
        (["doctor", "hf:no/such-model"], "`hf download no/such-model`"),
        (["doctor", ""], "name of the run or model.*empty"),
        (["doctor", "--compare"], "--compare.*model"),
        (["doctor", "{empty}", "--compare"], "--compare.*model"),
        (["doctor", "hf:a/b", "--dtype", "float16"], "--dtype.*--compare"),
        (["doctor", "hf:a/b", "--compile"], "--compile.*--compare"),
        (["doctor", "hf:a/b", "--compare", "--dtype", "int8"], "type 'int8'"),
        (["doctor", "hf:a/b", "--device", "tpu"], "device 'tpu'"),
        (["doctor", "{pickled}"], "pickle"),
        (["doctor", "{empty}"], "run folder"),
        (["doctor", "{cut}"], "complete safetensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_prints_one_line_and_exits_with_2(
    call: Call, shelf: foreign.Shelf, tmp_path: Path, args: list[str], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {"photo": foreign.photo(tmp_path / "p.png"), **write_corrupt_models(shelf, tmp_path)}
    places |= {name: shelf[name] for name in ("bert", "vit")}
    before = set(tmp_path.rglob("*"))
    code, _, err = call(*(one.format(**places) for one in args))
    assert code == 2 and re.search(message, err), err
    assert err.startswith("overt: ") and err.count("\n") == 1 and "Traceback" not in err
    assert set(tmp_path.rglob("*")) == before  # no file was written


def test_help_lists_every_map(call: Call) -> None:
    from overt.inspect.panels import MAPS

    _, out, _ = call("look", "--help")
    listed = out.partition("--map ")[2].partition("--device")[0]
    assert [name for name in MAPS if not re.search(rf"\b{name}\b", listed)] == []


@pytest.mark.parametrize("args", [["look", "--help"], ["doctor", "--help"]])
def test_help_imports_no_heavy_packages(args: list[str]) -> None:
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


def test_the_input_image_is_not_overwritten(
    call: Call, shelf: foreign.Shelf, tmp_path: Path
) -> None:
    photo = foreign.photo(tmp_path / "photo.png")
    before = photo.read_bytes()
    (tmp_path / "same.png").symlink_to(photo)
    (tmp_path / "also.png").hardlink_to(photo)
    for out in (photo, tmp_path / "x" / ".." / "photo.png", tmp_path / "same.png"):
        (tmp_path / "x").mkdir(exist_ok=True)
        code, _, err = call("look", shelf["vit"], photo, "--out", out)
        assert code == 2 and "choose another file for --out" in err
    code, _, err = call("look", shelf["vit"], tmp_path / "also.png", "--out", photo)
    assert code == 2 and "is the input image" in err
    assert photo.read_bytes() == before


def test_look_does_not_create_parent_folders(
    call: Call, shelf: foreign.Shelf, tmp_path: Path
) -> None:
    code, _, err = call("look", shelf["bert"], TEXT, "--out", tmp_path / "no" / "view.html")
    assert code == 2 and "does not exist" in err and list(tmp_path.iterdir()) == []
