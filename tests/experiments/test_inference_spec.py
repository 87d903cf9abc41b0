"""`InferenceSpec`: how a saved model is used interactively, or why it cannot be."""

import json

import pytest
import torch

from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError, UserError
from overt.experiments.inference_spec import (
    FILE,
    BackboneSpec,
    Canvas,
    ImageInput,
    InferenceSpec,
    NotInteractive,
    make_spec,
    read_spec,
    spec_files,
)
from overt.nn import VQA, MeanPooling, SmallCNN, TextClassifier, VQASizes
from overt.papers.catalog import networks
from overt.testing import toy_batch

WORDS = Vocabulary(tuple("what colour is the ball".split()))


def test_make_spec_describes_the_inputs_of_a_model():
    answerer = VQA(VQASizes(WORDS.size, 2, cell=4, word=4, question=4, hidden=4), MeanPooling())
    found = make_spec(answerer, ["red", "blue"], WORDS, toy_batch)
    batch = toy_batch()
    assert found == InferenceSpec(
        "VQA", ("red", "blue"), WORDS.words, tuple(batch.images.shape[-2:])
    )


def test_a_model_without_tokenizer_is_not_interactive():
    reader = TextClassifier(20, 2, width=0.05)
    spec = make_spec(reader, ["a", "b"], None, toy_batch)  # tokens without a tokenizer
    assert spec == NotInteractive("its tokenizer is unknown")
    assert make_spec(reader.embed, ["a", "b"], WORDS, toy_batch) is None  # not a model of overt


def test_a_saved_spec_is_read_back(tmp_path):
    spec = InferenceSpec("SmallCNN", ("cat", "dog"), None, (32, 40))
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", spec_files(spec))
    assert read_spec(tmp_path / "net") == spec
    assert spec_files(None) == {}


def test_a_saved_spec_with_all_fields_is_read_back(tmp_path):
    spec = InferenceSpec(
        *("Captioner", (), None, (64, 48), ImageInput.CELLS, Canvas.STRETCH),
        *(BackboneSpec("efficientnet-lite0", "ab12"), {"model": {"type": "WordLevel"}}, 17),
    )
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", spec_files(spec))
    assert (
        read_spec(tmp_path / "net") == spec
        and spec.generates_text
        and spec.takes_text
        and not spec.uses_boxes
    )


def test_reading_a_non_interactive_spec_raises_with_the_reason(tmp_path):
    not_interactive = NotInteractive("it looks at regions of a detector, which is no part of overt")
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", spec_files(not_interactive))
    with pytest.raises(UserError, match=r"regions .*`overt report`"):
        read_spec(tmp_path / "net")


def test_features_of_an_unknown_backbone_are_not_interactive():
    from dataclasses import replace

    batch = replace(toy_batch(), features=torch.zeros(len(toy_batch()), 4, 8))
    answerer = VQA(VQASizes(WORDS.size, 2, cell=4, word=4, question=4, hidden=4), MeanPooling())
    spec = make_spec(answerer, ["red", "blue"], WORDS, lambda: batch)
    assert isinstance(spec, NotInteractive) and "features" in spec.reason
    cells = make_spec(answerer, ["red"], WORDS, lambda: batch, ImageInput.CELLS, pixels=(64, 64))
    assert isinstance(cells, InferenceSpec) and cells.pixels == (64, 64)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"format": "overt spoken 0"},
        {"format": "overt spoken 1"},
        {"format": "overt spoken 1", "network": "VQA", "answers": 3},
        {"format": "overt spoken 1", "network": "VQA", "answers": [3]},
        {"format": "overt spoken 1", "network": "VQA", "answers": [], "pixels": [1]},
        {"format": "overt spoken 1", "network": "VQA", "answers": [], "colour": "red"},
        {"format": "overt spoken 1", "network": "VQA", "answers": [], "sees": "ghosts"},
        {"format": "overt spoken 1", "network": "VQA", "answers": [], "backbone": "resnet"},
    ],
)
def test_an_invalid_spec_file_raises(tmp_path, value):
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(CorruptFileError, match=r"run.*again"):
        read_spec(tmp_path)


def test_every_model_class_has_from_pretrained():
    assert all(hasattr(kind, "from_pretrained") for kind in networks().values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pixels", [10**9, 10**9]),
        ("pixels", [0, 32]),
        ("pixels", [32, -1]),
        ("pixels", ["32", "32"]),
        ("pixels", [32.5, 32]),
        ("pixels", [True, 32]),
        ("pixels", [32, 32, 32]),
        ("longest", -1),
        ("longest", 10**12),
        ("longest", "17"),
        ("tokenizer", [["model", 1]]),
    ],
)
def test_out_of_range_values_in_a_spec_file_raise(tmp_path, key, value):
    SmallCNN(2, width=0.1).save_pretrained(
        tmp_path / "net", spec_files(InferenceSpec("SmallCNN", ("a", "b")))
    )
    spec = json.loads((tmp_path / "net" / FILE).read_text())
    (tmp_path / "net" / FILE).write_text(json.dumps({**spec, key: value}))
    with pytest.raises(CorruptFileError, match=r"spoken\.json.*read"):
        read_spec(tmp_path / "net")
