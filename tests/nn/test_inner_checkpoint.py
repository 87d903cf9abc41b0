"""Checkpoints of wrapped models: saving and loading the inner model, errors."""

from pathlib import Path

import pytest
import torch
from torch import nn

from overt import io
from overt.errors import CorruptFileError, RunError, UserError
from overt.nn import SmallCNN
from overt.nn.inner_checkpoint import KIND, load_inner_weights, load_saved_model, save_inner_model
from tests.nn import tiny


class CustomModule(nn.Module):
    """A custom module in which two names share one weight."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(3, width)
        self.second.weight = self.first.weight


def assert_same_weights(one: nn.Module, two: nn.Module) -> None:
    theirs = two.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_hugging_face_model_is_saved_in_its_own_format(tmp_path: Path) -> None:
    model = tiny.bert()
    save_inner_model(model, tmp_path / "kept", extra_files={"more.json": {"a": 1}})
    assert io.read_json(tmp_path / "kept/config.json")["model_type"] == "bert"
    assert io.read_json(tmp_path / "kept/more.json") == {"a": 1}
    again = type(model).from_pretrained(tmp_path / "kept")
    assert_same_weights(again, model)
    assert_same_weights(load_saved_model(tmp_path / "kept"), model)
    other = type(model)(model.config)
    load_inner_weights(other, tmp_path / "kept")
    assert_same_weights(other, model)


def test_tied_weights_of_hugging_face_are_saved_once(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    save_inner_model(model, tmp_path / "kept")
    other = transformers.GPT2LMHeadModel(config)
    load_inner_weights(other, tmp_path / "kept")
    assert_same_weights(other, model)
    assert other.lm_head.weight is other.transformer.wte.weight


def test_overt_network_is_rebuilt(tmp_path: Path) -> None:
    model = SmallCNN(classes=3)
    save_inner_model(model, tmp_path / "kept")
    config = io.read_json(tmp_path / "kept/config.json")
    assert config["kind"] == KIND and config["model"]["library"] == "overt"
    again = load_saved_model(tmp_path / "kept")
    assert isinstance(again, SmallCNN)
    assert_same_weights(again, model)


def test_custom_module_must_be_built_by_the_caller(tmp_path: Path) -> None:
    model, other = CustomModule(), CustomModule()
    save_inner_model(model, tmp_path / "kept")
    with pytest.raises(UserError, match=r"custom .*CustomModule"):
        load_saved_model(tmp_path / "kept")
    load_inner_weights(other, tmp_path / "kept")
    assert_same_weights(other, model)
    with pytest.raises(UserError, match="weights of a Linear"):
        load_inner_weights(nn.Linear(3, 4), tmp_path / "kept")
    with pytest.raises(UserError, match="size mismatch"):
        load_inner_weights(CustomModule(5), tmp_path / "kept")


def test_folder_without_a_known_model_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.*missing"):
        load_saved_model(tmp_path)
    for values, kind, message in (
        ({"model_type": "bert"}, UserError, "known model class"),
        ({"architectures": ["Trainer"]}, UserError, "known model class"),
        ([], CorruptFileError, "describe"),
        (
            {"kind": KIND, "model": {"library": "overt", "name": "os.path.join", "settings": {}}},
            UserError,
            "has no network",
        ),
    ):
        with io.atomic_folder(tmp_path / "kept") as temporary:
            io.write_json(temporary / "config.json", values)
            io.write_tensors(temporary / "model.safetensors", {"a": torch.zeros(1)})
        with pytest.raises(kind, match=message):
            load_saved_model(tmp_path / "kept")


def test_failed_allocation_raises_run_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    save_inner_model(SmallCNN(3, width=0.1), tmp_path / "m")
    SmallCNN(3, width=0.1).save_pretrained(tmp_path / "own")
    monkeypatch.setattr(nn.Module, "load_state_dict", short)
    with pytest.raises(RunError, match="not enough memory"):
        load_inner_weights(SmallCNN(3, width=0.1), tmp_path / "m")
    with pytest.raises(RunError, match="not enough memory"):
        SmallCNN.from_pretrained(tmp_path / "own")


def test_cuda_out_of_memory_raises_run_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    save_inner_model(CustomModule(), tmp_path / "kept")
    monkeypatch.setattr(nn.Module, "load_state_dict", full)
    with pytest.raises(RunError, match="not be loaded"):
        load_inner_weights(CustomModule(), tmp_path / "kept")
