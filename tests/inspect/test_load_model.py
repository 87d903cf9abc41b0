"""Loading models of the Hub, of timm and of folders, without running their code."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overt.errors import CorruptFileError, UserError
from overt.inspect import load_model as loading
from overt.inspect.load_model import is_model, load_model, locate_model, model_folder_problem
from overt.inspect.look import ModelInput, view_model
from tests.experiments import foreign


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture
def bert(shelf: foreign.Shelf, tmp_path: Path) -> Path:
    """Return a copy of the BERT folder that a test may change."""
    return Path(shutil.copytree(shelf["bert"], tmp_path / "bert"))


def test_is_model_distinguishes_models_from_runs(bert: Path, tmp_path: Path) -> None:
    assert is_model("hf:any") and is_model("timm:any") and is_model(str(bert))
    assert not is_model(str(tmp_path)) and not is_model("nowhere")
    (bert / "results.json").write_text("{}")
    assert not is_model(str(bert))


def test_a_text_model_is_loaded_in_eval_mode_with_its_tokenizer(shelf: foreign.Shelf) -> None:
    loaded = load_model(locate_model(str(shelf["bert"])))
    assert type(loaded.model).__name__ == "BertModel" and not loaded.model.training
    assert loaded.tokenizer("a dog")["input_ids"] == [2, 5, 15, 3]
    assert loaded.image_processor is None and loaded.processor is None and loaded.notes == ()


def test_the_saved_class_is_loaded(shelf: foreign.Shelf) -> None:
    vit = load_model(shelf["vit"])
    assert type(vit.model).__name__ == "ViTForImageClassification"
    assert vit.tokenizer is None and type(vit.image_processor).__name__.startswith("ViTImage")
    clip = load_model(shelf["clip"])
    assert type(clip.processor).__name__ == "CLIPProcessor" and clip.tokenizer is not None


@pytest.mark.parametrize("named", [["os"], ["pipeline"], ["NoSuchModel"], [], None])
def test_an_invalid_architecture_name_is_ignored(bert: Path, named: list[str] | None) -> None:
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "architectures": named}))
    assert type(load_model(bert).model).__name__ == "BertModel"


def test_code_in_a_model_folder_is_not_run(bert: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("configuration_own.py", "modeling_own.py", "tokenization_own.py", "__init__.py"):
        (bert / name).write_text(code)
    autos = {"AutoConfig": "configuration_own.C", "AutoModel": "modeling_own.M"}
    for name, extra in (
        ("config.json", {"auto_map": autos}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}}),
    ):
        config = json.loads((bert / name).read_text())
        (bert / name).write_text(json.dumps({**config, **extra}))
    assert load_model(bert).tokenizer is not None  # a known type: the class of transformers
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    with pytest.raises(UserError, match=r"Python code.*'own'"):
        load_model(bert)
    assert not mark.exists()


def test_missing_weights_are_noted(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors")
    gone = next(name for name in weights if "query.weight" in name)
    save_file({n: w for n, w in weights.items() if n != gone}, bert / "model.safetensors")
    (note,) = load_model(bert).notes
    assert note.startswith("1 weights are missing") and "query" in note


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "model folder.* config.json"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "adapter"),
        (lambda f: (f / "model.safetensors").unlink(), r"no .*\.safetensors"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            r"pytorch_model.bin.*pickle.*save_pretrained",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "tf_model.h5"), r"tf_model\.h5"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            ),
            "model-2.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            "weight_map",
        ),
    ],
)
def test_a_folder_that_is_not_a_model_is_rejected(bert: Path, spoil: Any, message: str) -> None:
    spoil(bert)
    with pytest.raises(UserError, match=message):
        locate_model(str(bert))


def test_a_folder_of_runs_raises_with_an_example_run(tmp_path: Path) -> None:
    for name in ("soft", "hard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"runs.*hard\.$"):
        locate_model(str(tmp_path))


def test_missing_and_corrupt_files_raise_with_their_name(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere'.*hf:NAME.*timm:NAME"):
        locate_model(str(tmp_path / "nowhere"))
    content = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        load_model(bert)
    for text, message in (("[1]", "not a JSON object"), ("{", "config.json")):
        (bert / "config.json").write_text(text)
        with pytest.raises(CorruptFileError, match=message):
            load_model(bert)
    (bert / "config.json").write_text('{"hidden": 3}')
    with pytest.raises(UserError, match=r"model_type.*architecture"):
        load_model(bert)


def test_transformers_logging_settings_are_restored(shelf: foreign.Shelf) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(shelf["bert"])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- the Hub


def _replace_package(patch: pytest.MonkeyPatch, package: str, fake: Any) -> None:
    real = importlib.import_module

    def find(name: str, *others: Any, **more: Any) -> Any:
        return fake if name.split(".", maxsplit=1)[0] == package else real(name, *others, **more)

    patch.setattr(importlib, "import_module", find)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Replace the Hub by one with an empty cache; `asked` lists the calls."""
    fake = SimpleNamespace(asked=[], cached=None, given=None)
    fake.constants = SimpleNamespace(HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path / "hub"))

    def snapshot_download(name: str, local_files_only: bool = False, **others: Any) -> str:
        fake.asked.append((name, local_files_only, others))
        found = fake.cached if local_files_only else fake.given
        if found is None:
            raise OSError("no route to the Hub\nand more lines")
        return str(found)

    fake.snapshot_download = snapshot_download
    _replace_package(monkeypatch, "huggingface_hub", fake)
    return fake


def test_cached_models_need_no_network(hub: SimpleNamespace, bert: Path) -> None:
    hub.cached, hub.constants.HF_HUB_OFFLINE = bert, True
    assert locate_model("hf:some/bert") == bert
    assert hub.asked == [("some/bert", True, {})]


def test_offline_a_missing_model_raises_with_the_download_command(
    hub: SimpleNamespace, bert: Path
) -> None:
    hub.constants.HF_HUB_OFFLINE = True
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE.*`hf download some/bert`"):
        locate_model("hf:some/bert")
    assert [offline for _, offline, _ in hub.asked] == [True]  # no download was tried
    (bert / "model.safetensors").unlink()
    hub.cached = bert
    with pytest.raises(UserError, match=r"some/bert.*\.safetensors"):
        locate_model("hf:some/bert")


def test_downloads_exclude_pickles_and_code(hub: SimpleNamespace, bert: Path) -> None:
    message: list[str] = []
    hub.given = bert
    assert locate_model("hf:some/bert", message.append) == bert and message == [
        "downloading some/bert ..."
    ]
    _, _, others = hub.asked[-1]
    assert others["allow_patterns"] == loading.DOWNLOAD_PATTERNS and others["ignore_patterns"] == [
        "*/*"
    ]
    assert not any(p.endswith(("py", "bin", "pt", "*")) for p in loading.DOWNLOAD_PATTERNS)
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"some/bert.*pickle"):
        locate_model("hf:some/bert")


def test_an_unreachable_hub_raises_a_one_line_error(hub: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"download.*no route") as error:
        locate_model("hf:bert")
    assert "\n" not in str(error.value) and "`hf download bert`" in str(error.value)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a b", "hf:../x/y", "timm:a/b/c"])
def test_invalid_hub_names_are_rejected(name: str) -> None:
    with pytest.raises(UserError, match="not a Hub name"):
        locate_model(name)


def test_a_missing_library_raises_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="pip install timm"):
        locate_model("timm:vit_tiny")


# --- timm, replaced by a stub


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made: list[dict[str, Any]] = []

    def create_model(name: str, **settings: Any) -> torch.nn.Module:
        made.append({"name": name, **settings})
        model = torch.nn.Linear(3, settings["num_classes"])
        size = settings["img_size"]
        model.patch_embed = torch.nn.Module()
        model.patch_embed.img_size = (size, size)  # type: ignore[assignment]
        return model

    fake = SimpleNamespace(
        made=made,
        create_model=create_model,
        is_model=lambda name: name.startswith("vit_tiny"),
        list_models=lambda pattern: ["vit_tiny_patch16"],
        get_pretrained_cfg=lambda name: SimpleNamespace(hf_hub_id=f"timm/{name}.tag"),
        data=SimpleNamespace(
            resolve_model_data_config=lambda model: {"input_size": (3, 224, 224)},
            create_transform=lambda **settings: made.append(settings) or str,
        ),
    )
    _replace_package(monkeypatch, "timm", fake)
    return fake


def test_a_timm_folder_is_built_without_pretrained_weights_and_loaded(
    timm: SimpleNamespace, tmp_path: Path
) -> None:
    config = {"architecture": "vit_tiny", "num_classes": 2, "model_args": {"img_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_model(locate_model(str(tmp_path)))
    torch.testing.assert_close(loaded.model.weight, weights["weight"])
    assert timm.made[0]["pretrained"] is False and timm.made[0]["img_size"] == 8
    assert timm.made[1] == {
        "input_size": (3, 8, 8),
        "is_training": False,
    }  # the image size of the model
    assert loaded.transform is str and not loaded.model.training


def test_a_timm_name_is_located_in_its_repository(
    timm: SimpleNamespace, hub: SimpleNamespace, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cached = bert
    assert locate_model("timm:vit_tiny") == bert and hub.asked[0][0] == "timm/vit_tiny.tag"
    with pytest.raises(UserError, match=r"'resnet'.* vit_tiny_patch16"):
        locate_model("timm:resnet")
    timm.get_pretrained_cfg = lambda name: None
    with pytest.raises(UserError, match="no Hub weights"):
        locate_model("timm:vit_tiny")


def test_a_complete_folder_has_no_problem(bert: Path) -> None:
    assert model_folder_problem(bert) is None


def test_models_saved_by_timm_are_loaded(tmp_path: Path) -> None:
    """Run in a subprocess: with a CPU build of torch, torchvision needs two stub operators."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: only its stub was tested")
    photo = foreign.photo(tmp_path / "p.png")
    code = f"""
import torch
try:
    import torchvision
except (ImportError, RuntimeError):
    lib = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        lib.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm
from overt import cli
sizes = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, patch_size=8)
model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=3, **sizes)
timm.models.save_for_hf(model, {str(tmp_path / "vit")!r}, model_args=sizes, safe_serialization=True)
view = {str(tmp_path / "view.html")!r}
assert cli.main(["look", {str(tmp_path / "vit")!r}, {str(photo)!r}, "--out", view]) == 0
assert cli.main(["doctor", {str(tmp_path / "vit")!r}]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "torchvision" in done.stderr and done.returncode:
        pytest.skip("timm cannot be imported here: torchvision does not fit this torch")
    assert done.returncode == 0, done.stderr
    assert "from 'class'; most on" in done.stdout
    assert "2 of 2 attention modules ran and were captured; 2 compared with eager" in done.stdout


# --- hostile configs


def change_config(folder: Path, name: str = "config.json", **values: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("kind", [["bert"], {"a": 1}, None, 3, True])
def test_a_model_type_that_is_not_a_string_is_rejected(bert: Path, kind: Any) -> None:
    with pytest.raises(UserError, match=r"model_type '.*'"):
        load_model(change_config(bert, model_type=kind))


def test_remote_kernels_in_a_mapping_are_rejected(bert: Path) -> None:
    with pytest.raises(UserError, match=r"attn_implementation.*'kernels-community/x'"):
        load_model(change_config(bert, attn_implementation={"": "kernels-community/x"}))


@pytest.mark.long
@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 20_000},
        {"num_hidden_layers": 9_999},
        {"vocab_size": 10**9},
        {"max_position_embeddings": 10**10},
        {"num_labels": 10**9},
    ],
    ids=str,
)
def test_a_config_with_huge_sizes_raises_a_corrupt_file_error(
    bert: Path, values: dict[str, int]
) -> None:
    """Each of these would need gigabytes or minutes."""
    with pytest.raises(CorruptFileError, match=r"at most|more than"):
        load_model(change_config(bert, **values))


def test_a_tokenizer_panic_raises_a_corrupt_file_error(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    panic = type("PanicException", (BaseException,), {})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise panic("index out of bounds")

    loaded = load_model(bert)
    monkeypatch.setattr(type(loaded.tokenizer), "__call__", fail)
    with pytest.raises(CorruptFileError, match=r"index.*bounds"):
        view_model(loaded, ModelInput("a dog"))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(CorruptFileError, match=r"index.*bounds"):
        load_model(bert)


def test_a_processor_with_a_huge_image_size_is_rejected(
    shelf: foreign.Shelf, tmp_path: Path
) -> None:
    vit = Path(shutil.copytree(shelf["vit"], tmp_path / "vit"))
    change_config(vit, "preprocessor_config.json", size={"height": 10**6, "width": 10**6})
    with pytest.raises(CorruptFileError, match=r"preprocessor_config\.json.*1e\+06.*16384"):
        load_model(vit)
