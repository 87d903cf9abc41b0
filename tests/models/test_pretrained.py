"""Models on disk: bit for bit, whole or not at all, and nothing foreign gets in."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import files
from overt.errors import BadInput, Damaged
from overt.models import (
    VQA,
    Blind,
    MeanPool,
    Sizes,
    SmallCNN,
    SoftAttention,
    TextClassifier,
    pretrained,
)
from overt.testing import toy_batch

SIZES = Sizes(vocabulary=10, answers=3, cell=6, word=5, question=7, hidden=8)
MODELS = {
    "cnn": lambda: SmallCNN(classes=3, width=0.1, dropout=0.25),
    "text": lambda: TextClassifier(vocabulary=10, classes=3, width=0.05, hops=2, dropout=0.5),
    "blind": lambda: VQA(SIZES, Blind()),
    "mean": lambda: VQA(SIZES, MeanPool()),
    "product": lambda: VQA(SIZES, SoftAttention(8, 7, 4, glimpses=3)),
    "sum": lambda: VQA(SIZES, SoftAttention(8, 7, 4, glimpses=1, join=torch.add)),
}


def moved(name: str) -> nn.Module:
    """A model whose weights and buffers are not those of any fresh one."""
    model = MODELS[name]()
    for _ in range(2):
        model.train()(toy_batch())
    return model


def sealed(folder: Path, config: object, weights: dict[str, torch.Tensor]) -> Path:
    """A folder that is whole, whatever is in it."""
    with files.writing(folder) as temporary:
        files.write_json(temporary / "config.json", config)
        files.write_tensors(temporary / "model.safetensors", weights)
    return folder


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_for_bit(tmp_path, name, kind):
    model = moved(name).to(kind)
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
def test_the_same_model_always_gives_the_same_bytes(tmp_path, name):
    model = moved(name)
    model.save_pretrained(tmp_path / "a")
    type(model).from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for file in ("config.json", "model.safetensors", files.MANIFEST):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        ["config.json", "model.safetensors", files.MANIFEST]
    )


def test_saving_twice_replaces_and_leaves_nothing_behind(tmp_path):
    for seed in range(2):
        torch.manual_seed(seed)
        model = MODELS["cnn"]()
        model.save_pretrained(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = SmallCNN.from_pretrained(tmp_path / "model")
    assert torch.equal(again.decision[1].weight, model.decision[1].weight)


def test_a_changed_folder_never_loads(tmp_path):
    moved("text").save_pretrained(tmp_path / "model")
    for seed in range(60):
        rng = random.Random(seed)
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "model", broken)
        path = broken / rng.choice(["config.json", "model.safetensors", files.MANIFEST])
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data))
        if seed % 3 == 0:
            del data[place:]
        elif seed % 3 == 1:
            data[place] ^= 1 << rng.randrange(8)
        else:
            data[place:place] = data[:7]
        path.write_bytes(bytes(data))
        with pytest.raises(Damaged, match=str(broken)):
            TextClassifier.from_pretrained(broken)
        shutil.rmtree(broken)


def test_a_folder_without_a_model_is_bad_input(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInput, match=r"holds no saved model: config\.json is missing"):
            SmallCNN.from_pretrained(folder)


def test_a_model_of_another_library_is_refused(tmp_path):
    """config.json and weights, but no manifest: nobody knows whether they are whole."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    files.write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    with pytest.raises(Damaged, match=r"manifest\.json is missing"):
        SmallCNN.from_pretrained(tmp_path)


def test_a_model_of_another_kind_is_refused(tmp_path):
    for name in MODELS:
        moved(name).save_pretrained(tmp_path / name)
    kinds = {"cnn": SmallCNN, "text": TextClassifier, "sum": VQA}
    for name, kind in kinds.items():
        for other in kinds:
            if other != name:
                with pytest.raises(
                    Damaged, match=f"{tmp_path / other} is not a model of this kind"
                ):
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
def test_a_config_that_makes_no_such_model_is_damaged(tmp_path, config):
    folder = sealed(tmp_path / "model", config, moved("cnn").state_dict())
    with pytest.raises(Damaged, match=r"is not a model of this kind: \S"):
        SmallCNN.from_pretrained(folder)


def test_a_config_of_a_question_answerer_is_checked_too(tmp_path):
    good = moved("product").config()
    weights = moved("product").state_dict()
    for part, values in (
        ("attend", {**good["attend"], "join": "maximum"}),
        ("attend", {**good["attend"], "glimpses": 2}),
        ("attend", []),
        ("sizes", {}),
    ):
        folder = sealed(tmp_path / "model", {**good, part: values}, weights)
        with pytest.raises(Damaged, match="is not a model of this kind"):
            VQA.from_pretrained(folder)
    with pytest.raises(BadInput, match="not one of blind, mean, soft"):
        VQA.from_pretrained(sealed(tmp_path / "model", {**good, "attend": {"kind": "x"}}, weights))


def test_weights_that_are_missing_or_too_many_are_damaged(tmp_path):
    model = moved("cnn")
    weights = model.state_dict()
    fewer = {name: tensor for name, tensor in weights.items() if name != "decision.1.bias"}
    for changed in (fewer, {**weights, "more": torch.ones(1)}, {}):
        folder = sealed(tmp_path / "model", model.config(), changed)
        with pytest.raises(Damaged, match="is not a model of this kind"):
            SmallCNN.from_pretrained(folder)
    with files.writing(tmp_path / "model") as temporary:
        files.write_json(temporary / "config.json", model.config())
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        SmallCNN.from_pretrained(tmp_path / "model")


def test_an_error_without_words_is_still_told(tmp_path):
    folder = sealed(tmp_path / "model", {}, {})

    def build(config):
        raise AssertionError

    with pytest.raises(Damaged, match="not a model of this kind: AssertionError"):
        pretrained.load(build, folder)


def test_models_can_say_what_they_were_made_with():
    for make in MODELS.values():
        model = make()
        assert isinstance(model, pretrained.Configured)
        assert json.loads(json.dumps(model.config())) == model.config()
    assert not isinstance(nn.Linear(1, 1), pretrained.Configured)
