"""Other people's models: found, opened as data, and refused in a sentence."""

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

from overt.errors import BadInput, Damaged
from overt.recipes import opening
from overt.recipes.opening import is_model, lacking, locate, open_model
from tests.recipes import foreign


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture
def bert(shelf: foreign.Shelf, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(shelf["bert"], tmp_path / "bert"))


def test_a_model_is_told_from_a_run(bert: Path, tmp_path: Path) -> None:
    assert is_model("hf:any") and is_model("timm:any") and is_model(str(bert))
    assert not is_model(str(tmp_path)) and not is_model("nowhere")
    (bert / "results.json").write_text("{}")
    assert not is_model(str(bert))


def test_a_text_model_comes_with_its_tokenizer_in_eval_mode(shelf: foreign.Shelf) -> None:
    subject = open_model(locate(str(shelf["bert"])))
    assert type(subject.model).__name__ == "BertModel" and not subject.model.training
    assert subject.tokenizer("a dog")["input_ids"] == [2, 5, 15, 3]
    assert subject.image_processor is None and subject.processor is None and subject.notes == ()


def test_the_class_is_the_one_that_was_saved(shelf: foreign.Shelf) -> None:
    vit = open_model(shelf["vit"])
    assert type(vit.model).__name__ == "ViTForImageClassification"
    assert vit.tokenizer is None and type(vit.image_processor).__name__.startswith("ViTImage")
    clip = open_model(shelf["clip"])
    assert type(clip.processor).__name__ == "CLIPProcessor" and clip.tokenizer is not None


@pytest.mark.parametrize("named", [["os"], ["pipeline"], ["NoSuchModel"], [], None])
def test_a_class_that_is_no_model_is_not_taken(bert: Path, named: list[str] | None) -> None:
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "architectures": named}))
    assert type(open_model(bert).model).__name__ == "BertModel"


def test_no_code_of_a_folder_is_run(bert: Path, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("configuration_own.py", "modeling_own.py", "tokenization_own.py", "__init__.py"):
        (bert / name).write_text(code)
    autos = {"AutoConfig": "configuration_own.C", "AutoModel": "modeling_own.M"}
    for name, extra in (
        ("config.json", {"auto_map": autos}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}}),
    ):
        held = json.loads((bert / name).read_text())
        (bert / name).write_text(json.dumps({**held, **extra}))
    assert open_model(bert).tokenizer is not None  # a known type: as transformers has it
    held = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**held, "model_type": "own"}))
    with pytest.raises(BadInput, match=r"brings Python code of its own, which is not run.*'own'"):
        open_model(bert)
    assert not mark.exists()


def test_weights_that_are_missing_are_said_to_be_random(bert: Path) -> None:
    weights = load_file(bert / "model.safetensors")
    gone = next(name for name in weights if "query.weight" in name)
    save_file({n: w for n, w in weights.items() if n != gone}, bert / "model.safetensors")
    (note,) = open_model(bert).notes
    assert note.startswith("1 weights are not in the folder and are random") and "query" in note


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "holds no model: it has no config.json"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "holds an adapter"),
        (lambda f: (f / "model.safetensors").unlink(), "no file ends in .safetensors"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            r"pytorch_model.bin, a pickle, which runs code .*save_pretrained",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "tf_model.h5"), r"weights in tf_model.h5;"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            ),
            "lacks model-2.safetensors, which its index names",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            "does not say which file holds which weights",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(bert: Path, spoil: Any, said: str) -> None:
    spoil(bert)
    with pytest.raises(BadInput, match=said):
        locate(str(bert))


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    for name in ("soft", "hard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text("{}")
    with pytest.raises(BadInput, match=r"holds runs and no model; name one .*, such as .*hard\.$"):
        locate(str(tmp_path))


def test_broken_files_are_named(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'.*nowhere' is not a folder.*hf:NAME or timm:NAME"):
        locate(str(tmp_path / "nowhere"))
    whole = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match=r"bert cannot be opened as a model"):
        open_model(bert)
    for text, said in (("[1]", "not the description of a model"), ("{", "config.json")):
        (bert / "config.json").write_text(text)
        with pytest.raises(Damaged, match=said):
            open_model(bert)
    (bert / "config.json").write_text('{"hidden": 3}')
    with pytest.raises(BadInput, match="neither a Hugging Face nor a timm model"):
        open_model(bert)


def test_transformers_is_left_as_talkative_as_it_was(shelf: foreign.Shelf) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    open_model(shelf["bert"])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- the Hub


def _stand_in(patch: pytest.MonkeyPatch, package: str, fake: Any) -> None:
    real = importlib.import_module

    def find(name: str, *others: Any, **more: Any) -> Any:
        return fake if name.split(".", maxsplit=1)[0] == package else real(name, *others, **more)

    patch.setattr(importlib, "import_module", find)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A Hub with an empty cache; `asked` are the calls."""
    fake = SimpleNamespace(asked=[], cached=None, given=None)
    fake.constants = SimpleNamespace(HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path / "hub"))

    def snapshot_download(name: str, local_files_only: bool = False, **others: Any) -> str:
        fake.asked.append((name, local_files_only, others))
        found = fake.cached if local_files_only else fake.given
        if found is None:
            raise OSError("no route to the Hub\nand more lines")
        return str(found)

    fake.snapshot_download = snapshot_download
    _stand_in(monkeypatch, "huggingface_hub", fake)
    return fake


def test_what_is_in_the_cache_needs_no_network(hub: SimpleNamespace, bert: Path) -> None:
    hub.cached, hub.constants.HF_HUB_OFFLINE = bert, True
    assert locate("hf:some/bert") == bert
    assert hub.asked == [("some/bert", True, {})]


def test_offline_it_is_said_what_to_download(hub: SimpleNamespace, bert: Path) -> None:
    hub.constants.HF_HUB_OFFLINE = True
    with pytest.raises(BadInput, match=r"HF_HUB_OFFLINE forbids .*run `hf download some/bert`"):
        locate("hf:some/bert")
    assert [offline for _, offline, _ in hub.asked] == [True]  # nobody was asked
    (bert / "model.safetensors").unlink()
    hub.cached = bert
    with pytest.raises(BadInput, match=r"of some/bert the cache holds only a part \(.*no weights"):
        locate("hf:some/bert")


def test_a_download_takes_no_pickle_and_no_code(hub: SimpleNamespace, bert: Path) -> None:
    said: list[str] = []
    hub.given = bert
    assert locate("hf:some/bert", said.append) == bert and said == ["downloading some/bert ..."]
    _, _, others = hub.asked[-1]
    assert others["allow_patterns"] == opening.WANTED and others["ignore_patterns"] == ["*/*"]
    assert not any(p.endswith(("py", "bin", "pt", "*")) for p in opening.WANTED)
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"some/bert cannot be used: .*a pickle"):
        locate("hf:some/bert")


def test_a_hub_that_does_not_answer_is_one_sentence(hub: SimpleNamespace) -> None:
    with pytest.raises(BadInput, match=r"the Hub did not give it \(no route to the Hub\)") as error:
        locate("hf:bert")
    assert "\n" not in str(error.value) and "`hf download bert`" in str(error.value)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a b", "hf:../x/y", "timm:a/b/c"])
def test_what_is_no_name_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="is no name on the Hub"):
        locate(name)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BadInput, match=r"timm cannot be imported .*pip install timm"):
        locate("timm:vit_tiny")


# --- timm, by a stand-in with the functions that are used


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
    _stand_in(monkeypatch, "timm", fake)
    return fake


def test_a_timm_folder_is_made_without_its_pretrained_weights_and_then_filled(
    timm: SimpleNamespace, tmp_path: Path
) -> None:
    config = {"architecture": "vit_tiny", "num_classes": 2, "model_args": {"img_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    save_file(weights, tmp_path / "model.safetensors")
    subject = open_model(locate(str(tmp_path)))
    torch.testing.assert_close(subject.model.weight, weights["weight"])
    assert timm.made[0]["pretrained"] is False and timm.made[0]["img_size"] == 8
    assert timm.made[1] == {"input_size": (3, 8, 8), "is_training": False}  # that of the model
    assert subject.transform is str and not subject.model.training


def test_a_timm_name_leads_to_its_repository(
    timm: SimpleNamespace, hub: SimpleNamespace, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cached = bert
    assert locate("timm:vit_tiny") == bert and hub.asked[0][0] == "timm/vit_tiny.tag"
    with pytest.raises(BadInput, match="timm has no model 'resnet'; near it: vit_tiny_patch16"):
        locate("timm:resnet")
    timm.get_pretrained_cfg = lambda name: None
    with pytest.raises(BadInput, match="no weights on the Hub"):
        locate("timm:vit_tiny")


def test_nothing_lacks_in_a_whole_folder(bert: Path) -> None:
    assert lacking(bert) is None


def test_timm_itself_saves_what_we_open(tmp_path: Path) -> None:
    """In a process of its own: beside a CPU build of torch, torchvision needs two stand-ins."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: only its stand-in was tried")
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
    assert "2 of 2 attention modules ran and were seen; 2 compared with eager" in done.stdout
