"""Saved models: exact round trip, atomic writes, and errors for corrupt or foreign folders."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.nn import (
    VQA,
    MeanPooling,
    QuestionOnly,
    SmallCNN,
    SoftAttention,
    TextClassifier,
    VQASizes,
    checkpoint,
)
from overt.testing import toy_batch

SIZES = VQASizes(vocabulary=10, answers=3, cell=6, word=5, question=7, hidden=8)
MODELS = {
    "cnn": lambda: SmallCNN(classes=3, width=0.1, dropout=0.25),
    "text": lambda: TextClassifier(vocabulary=10, classes=3, width=0.05, hops=2, dropout=0.5),
    "blind": lambda: VQA(SIZES, QuestionOnly()),
    "mean": lambda: VQA(SIZES, MeanPooling()),
    "product": lambda: VQA(SIZES, SoftAttention(8, 7, 4, glimpses=3)),
    "sum": lambda: VQA(SIZES, SoftAttention(8, 7, 4, glimpses=1, join=torch.add)),
}


def trained_model(name: str) -> nn.Module:
    """A model whose buffers differ from those of a new one."""
    model = MODELS[name]()
    for _ in range(2):
        model.train()(toy_batch())
    return model


def write_model_folder(folder: Path, config: object, weights: dict[str, torch.Tensor]) -> Path:
    """Write a folder with a valid manifest and any content."""
    with io.atomic_folder(folder) as temporary:
        io.write_json(temporary / "config.json", config)
        io.write_tensors(temporary / "model.safetensors", weights)
    return folder


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_loaded_model_is_bit_identical(tmp_path, name, kind):
    model = trained_model(name).to(kind)
    model.save_pretrained(tmp_path / "model")
    other = type(model).from_pretrained(str(tmp_path / "model"))
    assert not other.training
    assert other.config() == model.config()
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key
    expected, found = model.eval()(toy_batch()), other(toy_batch())
    assert torch.equal(expected.prediction, found.prediction)
    for one, two in zip(expected.attention, found.attention, strict=True):
        assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize("name", MODELS)
def test_saving_is_deterministic(tmp_path, name):
    model = trained_model(name)
    model.save_pretrained(tmp_path / "a")
    type(model).from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for file in ("config.json", "model.safetensors", io.MANIFEST):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        ["config.json", "model.safetensors", io.MANIFEST]
    )


def test_saving_twice_replaces_the_folder(tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        model = MODELS["cnn"]()
        model.save_pretrained(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = SmallCNN.from_pretrained(tmp_path / "model")
    assert torch.equal(again.decision[1].weight, model.decision[1].weight)


def test_changed_files_raise_corrupt_file_error(tmp_path):
    trained_model("text").save_pretrained(tmp_path / "model")
    for seed in range(60):
        rng = random.Random(seed)
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "model", broken)
        path = broken / rng.choice(["config.json", "model.safetensors", io.MANIFEST])
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        if seed % 3 == 0:
            del data[place:]
        elif seed % 3 == 1:
            data[place] ^= 1 << rng.randrange(8)
        else:
            data[place:place] = data[:7]
        path.write_bytes(bytes(data))
        with pytest.raises(CorruptFileError, match=str(broken)):
            TextClassifier.from_pretrained(broken)
        shutil.rmtree(broken)


def test_folder_without_a_model_raises_user_error(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"config.*missing"):
            SmallCNN.from_pretrained(folder)


def test_folder_without_a_manifest_raises(tmp_path):
    """Without a manifest, config.json and weights cannot be verified."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    io.write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with pytest.raises(CorruptFileError, match=r"manifest.*missing"):
        SmallCNN.from_pretrained(tmp_path)


def test_model_of_another_class_raises(tmp_path):
    for name in MODELS:
        trained_model(name).save_pretrained(tmp_path / name)
    kinds = {"cnn": SmallCNN, "text": TextClassifier, "sum": VQA}
    for name, kind in kinds.items():
        for other in kinds:
            if other != name:
                with pytest.raises(CorruptFileError, match=rf"{tmp_path / other}.*model.*kind"):
                    kind.from_pretrained(tmp_path / other)


@pytest.mark.parametrize(
    "config",
    [
        [],
        None,
        "cnn",
        {},
        {"classes": 3, "width": 0.1, "dropout": 0.25, "more": 1},
        {"classes": -1, "width": 0.1, "dropout": 0.25},
        {"classes": "three", "width": 0.1, "dropout": 0.25},
        {"classes": 3, "width": 0.1, "dropout": 2.0},
        {"classes": 3, "width": 0.2, "dropout": 0.25},
        {"classes": 10**30, "width": 0.1, "dropout": 0.25},
        {"classes": 10**13, "width": 0.1, "dropout": 0.25},
    ],
    ids=str,
)
def test_invalid_config_raises_corrupt_file_error(tmp_path, config):
    folder = write_model_folder(tmp_path / "model", config, trained_model("cnn").state_dict())
    with pytest.raises(CorruptFileError, match=r"model.*kind: \S"):
        SmallCNN.from_pretrained(folder)


def test_invalid_vqa_config_raises(tmp_path):
    good = trained_model("product").config()
    weights = trained_model("product").state_dict()
    for part, values in (
        ("attend", {**good["attend"], "join": "maximum"}),
        ("attend", {**good["attend"], "glimpses": 2}),
        ("attend", []),
        ("sizes", {}),
    ):
        folder = write_model_folder(tmp_path / "model", {**good, part: values}, weights)
        with pytest.raises(CorruptFileError, match=r"model.*kind"):
            VQA.from_pretrained(folder)
    with pytest.raises(UserError, match="blind.*soft"):
        VQA.from_pretrained(
            write_model_folder(tmp_path / "model", {**good, "attend": {"kind": "x"}}, weights)
        )


def test_missing_or_extra_weights_raise_corrupt_file_error(tmp_path):
    model = trained_model("cnn")
    weights = model.state_dict()
    fewer = {name: tensor for name, tensor in weights.items() if name != "decision.1.bias"}
    for changed in (fewer, {**weights, "more": torch.ones(1)}, {}):
        folder = write_model_folder(tmp_path / "model", model.config(), changed)
        with pytest.raises(CorruptFileError, match=r"model.*kind"):
            SmallCNN.from_pretrained(folder)
    with io.atomic_folder(tmp_path / "model") as temporary:
        io.write_json(temporary / "config.json", model.config())
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        SmallCNN.from_pretrained(tmp_path / "model")


def test_error_without_a_message_is_reported_by_its_type(tmp_path):
    folder = write_model_folder(tmp_path / "model", {}, {})

    def build(config):
        raise AssertionError

    with pytest.raises(CorruptFileError, match=": AssertionError"):
        checkpoint.load(build, folder)


def test_models_return_their_config():
    for make in MODELS.values():
        model = make()
        assert isinstance(model, checkpoint.HasConfig)
        assert json.loads(json.dumps(model.config())) == model.config()
    assert not isinstance(nn.Linear(1, 1), checkpoint.HasConfig)
