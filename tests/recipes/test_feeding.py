"""What a person gives, as a batch: pixels, features of a frozen CNN, boxes, one text or two."""

import json

import numpy as np
import pytest
import torch

from overt.data.images import prepare, stretch
from overt.data.vocabulary import BEGIN, END, HubTokenizer, Vocabulary
from overt.errors import BadInput
from overt.models.vlbert.regions import box_means
from overt.recipes import feeding
from overt.recipes.asking import Given
from overt.recipes.feeding import batch_of, divided, reader_of, tiles
from overt.recipes.opening import Subject
from overt.recipes.spoken import Backbone, Canvas, Sees, Spoken

WORDS = tuple("a red ball on the grass".split())
PHOTO = np.random.default_rng(2).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def subject(network: str = "VQA", **known) -> Subject:
    spoken = Spoken(network, ("yes", "no"), **{"words": WORDS, "pixels": (32, 32), **known})
    return Subject("net", torch.nn.Linear(1, 1), spoken=spoken)


class Means:
    """A frozen CNN that is known by hand: the mean colour of each quarter of the picture."""

    weights = "w1"

    def cells(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(2).mT


@pytest.fixture
def means(monkeypatch) -> Backbone:
    monkeypatch.setattr(feeding, "_opened", lambda backbone: Means())
    return Backbone("means", "w1")


def test_a_picture_and_a_text_are_read_as_the_network_was_trained():
    batch = batch_of(subject(), Given("the red ball", PHOTO))
    pixels, _ = prepare(PHOTO, (32, 32))
    assert batch.images is not None and batch.images[0].equal(pixels)
    assert batch.tokens is not None and batch.tokens[0].tolist() == [9, 6, 7]
    stretched = batch_of(subject(canvas=Canvas.STRETCH), Given("the", PHOTO))
    assert stretched.images is not None
    assert stretched.images[0].equal(prepare(PHOTO, (32, 32), stretch)[0])


@pytest.mark.parametrize(
    ("known", "given", "said"),
    [
        ({}, Given("a"), "wants a picture"),
        ({}, Given(None, PHOTO), "wants a text"),
        ({"words": None}, Given("a", PHOTO), "takes no text"),
        ({"pixels": None}, Given("a", PHOTO), "takes no picture"),
        ({}, Given("a", PHOTO, boxes=((0.0, 0.0, 1.0, 1.0),)), "looks at no boxes"),
        ({}, Given(" \t ", PHOTO), "no words"),
    ],
)
def test_what_a_network_cannot_take_is_one_sentence(known, given, said):
    with pytest.raises(BadInput, match=said):
        batch_of(subject(**known), given)


def test_cells_are_those_of_the_frozen_network(means):
    one = subject(sees=Sees.CELLS, backbone=means)
    batch = batch_of(one, Given("a ball", PHOTO))
    pixels, _ = prepare(PHOTO, (32, 32))
    assert batch.images is None and batch.features is not None
    torch.testing.assert_close(batch.features, Means().cells(pixels[None]))


def test_a_frozen_network_with_other_weights_is_refused(means):
    one = subject(sees=Sees.CELLS, backbone=Backbone("means", "w2"))
    with pytest.raises(BadInput, match="has other weights"):
        batch_of(one, Given("a ball", PHOTO))


def test_boxes_are_tiles_where_none_are_drawn():
    assert len(tiles(3)) == 9 and tiles(3)[-1][2:] == (1, 1)
    batch = batch_of(subject("VLBert", sees=Sees.BOXES), Given("a ball", PHOTO))
    assert batch.boxes is not None and batch.boxes.shape == (1, feeding.SIDE**2, 4)
    assert batch.boxes[0, 0].tolist() == [0, 0, 15, 10]
    drawn = Given("a ball", PHOTO, boxes=((0.5, 0.25, 1.0, 0.75),))
    batch = batch_of(subject("VLBert", sees=Sees.BOXES), drawn)
    assert batch.boxes is not None and batch.boxes.tolist() == [[[30, 10, 60, 30]]]
    assert batch.region_mask is not None and bool(batch.region_mask.all())


def test_regions_are_means_of_the_cells_under_them(means):
    one = subject("VLBert", sees=Sees.REGIONS, backbone=means, canvas=Canvas.STRETCH)
    left = Given("a ball", PHOTO, boxes=((0.0, 0.0, 0.5, 1.0),))
    batch = batch_of(one, left)
    pixels, geometry = prepare(PHOTO, (32, 32), stretch)
    cells = Means().cells(pixels[None])
    assert batch.features is not None and batch.boxes is not None
    torch.testing.assert_close(batch.features[0, 0], cells[0, [0, 2]].mean(dim=0))
    maps = cells.mT.unflatten(2, (2, 2))
    torch.testing.assert_close(batch.features, box_means(maps, batch.boxes, geometry))


def test_crops_are_cut_where_the_box_lies_on_the_canvas():
    from overt.recipes.a2.data import WIDTH, crops

    one = subject("Captioner", sees=Sees.CROPS, canvas=Canvas.STRETCH, longest=5)
    batch = batch_of(one, Given(None, PHOTO, boxes=((0.5, 0.0, 1.0, 0.5),)))
    pixels, _ = prepare(PHOTO, (32, 32), stretch)
    wanted = crops(pixels[None], torch.tensor([[[16.0, 0.0, 32.0, 16.0]]]))
    assert batch.features is not None and batch.features.shape == (1, 1, WIDTH)
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
def test_two_captions_stand_in_two_lines(text, parts):
    assert divided(text) == parts


def test_three_captions_are_too_many():
    with pytest.raises(BadInput, match="more than two captions"):
        divided("a\nb\nc")


def test_captions_stand_between_their_marks_and_know_their_characters():
    text = "a red ball\nthe grass"
    batch = batch_of(subject("VLBert", sees=Sees.BOXES), Given(text, PHOTO))
    assert batch.tokens is not None and batch.text is not None
    assert batch.tokens[0].tolist() == [BEGIN, 5, 6, 7, END, 9, 10, END]
    said = [text[a:b] if a >= 0 else "" for a, b in batch.text.spans[0].tolist()]
    assert said == ["", "a", "red", "ball", "", "the", "grass", ""]


def test_the_tokenizer_of_others_comes_back_from_its_values():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "ball": 5, "grass": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    theirs = HubTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=made))
    known = Spoken("VLBert", (), tokenizer=json.loads(made.to_str()), sees=Sees.BOXES)
    again = reader_of(known)
    assert again.read("a ball") == theirs.read("a ball") == ([1, 4, 5, 2], again.read("a ball")[1])
    one = subject("VLBert", words=None, tokenizer=known.tokenizer, sees=Sees.BOXES)
    batch = batch_of(one, Given("a ball\ngrass", PHOTO))
    assert batch.tokens is not None and batch.tokens[0].tolist() == [1, 4, 5, 2, 6, 2]
    assert isinstance(reader_of(Spoken("VQA", (), words=("a",))), Vocabulary)
