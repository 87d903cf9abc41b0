"""Batches from user inputs: pixels, features of a frozen CNN, boxes, one text or two."""

import json

import numpy as np
import pytest
import torch

from overt.data.images import prepare_image, stretch
from overt.data.vocabulary import BEGIN, END, HubTokenizer, Vocabulary
from overt.errors import UserError
from overt.experiments.inference_spec import BackboneSpec, Canvas, ImageInput, InferenceSpec
from overt.inspect import collate
from overt.inspect.collate import make_batch, split_captions, text_reader, tile_boxes
from overt.inspect.inputs import ModelInput
from overt.inspect.loaded_model import LoadedModel
from overt.nn.vlbert.regions import pool_boxes

WORDS = tuple("a red ball on the grass".split())
PHOTO = np.random.default_rng(2).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def make_model(network: str = "VQA", **options) -> LoadedModel:
    spec = InferenceSpec(network, ("yes", "no"), **{"words": WORDS, "pixels": (32, 32), **options})
    return LoadedModel("net", torch.nn.Linear(1, 1), spec=spec)


class MeanColourBackbone:
    """A frozen CNN with known features: the mean colour of each quarter of the image."""

    weights = "w1"

    def cells(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(2).mT


@pytest.fixture
def mean_backbone(monkeypatch) -> BackboneSpec:
    monkeypatch.setattr(collate, "_load_backbone", lambda backbone: MeanColourBackbone())
    return BackboneSpec("means", "w1")


def test_image_and_text_are_prepared_as_in_training():
    batch = make_batch(make_model(), ModelInput("the red ball", PHOTO))
    pixels, _ = prepare_image(PHOTO, (32, 32))
    assert batch.images is not None and batch.images[0].equal(pixels)
    assert batch.tokens is not None and batch.tokens[0].tolist() == [9, 6, 7]
    stretched = make_batch(make_model(canvas=Canvas.STRETCH), ModelInput("the", PHOTO))
    assert stretched.images is not None
    assert stretched.images[0].equal(prepare_image(PHOTO, (32, 32), stretch)[0])


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, ModelInput("a"), "needs.*image"),
        ({}, ModelInput(None, PHOTO), "needs.*text"),
        ({"words": None}, ModelInput("a", PHOTO), "not take.*text"),
        ({"pixels": None}, ModelInput("a", PHOTO), "not take.*image"),
        ({}, ModelInput("a", PHOTO, boxes=((0.0, 0.0, 1.0, 1.0),)), "not take.*boxes"),
        ({}, ModelInput(" \t ", PHOTO), "no words"),
    ],
)
def test_unsupported_and_missing_inputs_raise_a_user_error(options, given, message):
    with pytest.raises(UserError, match=message):
        make_batch(make_model(**options), given)


def test_cells_equal_those_of_the_frozen_backbone(mean_backbone):
    one = make_model(image_input=ImageInput.CELLS, backbone=mean_backbone)
    batch = make_batch(one, ModelInput("a ball", PHOTO))
    pixels, _ = prepare_image(PHOTO, (32, 32))
    assert batch.images is None and batch.features is not None
    torch.testing.assert_close(batch.features, MeanColourBackbone().cells(pixels[None]))


def test_a_frozen_backbone_with_other_weights_is_rejected(mean_backbone):
    one = make_model(image_input=ImageInput.CELLS, backbone=BackboneSpec("means", "w2"))
    with pytest.raises(UserError, match="weights differ"):
        make_batch(one, ModelInput("a ball", PHOTO))


def test_boxes_are_tiles_if_none_are_given():
    assert len(tile_boxes(3)) == 9 and tile_boxes(3)[-1][2:] == (1, 1)
    batch = make_batch(
        make_model("VLBert", image_input=ImageInput.BOXES), ModelInput("a ball", PHOTO)
    )
    assert batch.boxes is not None and batch.boxes.shape == (1, collate.TILES_PER_SIDE**2, 4)
    assert batch.boxes[0, 0].tolist() == [0, 0, 15, 10]
    drawn = ModelInput("a ball", PHOTO, boxes=((0.5, 0.25, 1.0, 0.75),))
    batch = make_batch(make_model("VLBert", image_input=ImageInput.BOXES), drawn)
    assert batch.boxes is not None and batch.boxes.tolist() == [[[30, 10, 60, 30]]]
    assert batch.region_mask is not None and bool(batch.region_mask.all())


def test_region_features_are_means_of_their_cells(mean_backbone):
    one = make_model(
        "VLBert", image_input=ImageInput.REGIONS, backbone=mean_backbone, canvas=Canvas.STRETCH
    )
    left = ModelInput("a ball", PHOTO, boxes=((0.0, 0.0, 0.5, 1.0),))
    batch = make_batch(one, left)
    pixels, geometry = prepare_image(PHOTO, (32, 32), stretch)
    cells = MeanColourBackbone().cells(pixels[None])
    assert batch.features is not None and batch.boxes is not None
    torch.testing.assert_close(batch.features[0, 0], cells[0, [0, 2]].mean(dim=0))
    maps = cells.mT.unflatten(2, (2, 2))
    torch.testing.assert_close(batch.features, pool_boxes(maps, batch.boxes, geometry))


def test_crops_are_taken_at_the_box_on_the_canvas():
    from overt.papers.a2.data import REGION_WIDTH, crop_features

    one = make_model("Captioner", image_input=ImageInput.CROPS, canvas=Canvas.STRETCH, longest=5)
    batch = make_batch(one, ModelInput(None, PHOTO, boxes=((0.5, 0.0, 1.0, 0.5),)))
    pixels, _ = prepare_image(PHOTO, (32, 32), stretch)
    wanted = crop_features(pixels[None], torch.tensor([[[16.0, 0.0, 32.0, 16.0]]]))
    assert batch.features is not None and batch.features.shape == (1, 1, REGION_WIDTH)
    torch.testing.assert_close(batch.features, wanted)
    assert batch.boxes is not None and batch.boxes.tolist() == [[[30, 0, 60, 20]]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a dog", [(0, "a dog")]),
        ("a dog\na cat", [(0, "a dog"), (6, "a cat")]),
        ("a dog / a cat", [(0, "a dog"), (8, "a cat")]),
        ("and/or", [(0, "and/or")]),
        ("a dog\n", [(0, "a dog\n")]),
    ],
)
def test_captions_are_split_at_lines_and_slashes(text, parts):
    assert split_captions(text) == parts


def test_three_captions_are_rejected():
    with pytest.raises(UserError, match=r"one.*two captions"):
        split_captions("a\nb\nc")


def test_captions_have_special_tokens_and_character_spans():
    text = "a red ball\nthe grass"
    batch = make_batch(make_model("VLBert", image_input=ImageInput.BOXES), ModelInput(text, PHOTO))
    assert batch.tokens is not None and batch.text is not None
    assert batch.tokens[0].tolist() == [BEGIN, 5, 6, 7, END, 9, 10, END]
    words = [text[a:b] if a >= 0 else "" for a, b in batch.text.spans[0].tolist()]
    assert words == ["", "a", "red", "ball", "", "the", "grass", ""]


def test_a_hub_tokenizer_is_restored_from_its_json():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "ball": 5, "grass": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    theirs = HubTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=made))
    options = InferenceSpec(
        "VLBert", (), tokenizer=json.loads(made.to_str()), image_input=ImageInput.BOXES
    )
    again = text_reader(options)
    assert again.read("a ball") == theirs.read("a ball") == ([1, 4, 5, 2], again.read("a ball")[1])
    one = make_model(
        "VLBert", words=None, tokenizer=options.tokenizer, image_input=ImageInput.BOXES
    )
    batch = make_batch(one, ModelInput("a ball\ngrass", PHOTO))
    assert batch.tokens is not None and batch.tokens[0].tolist() == [1, 4, 5, 2, 6, 2]
    assert isinstance(text_reader(InferenceSpec("VQA", (), words=("a",))), Vocabulary)
