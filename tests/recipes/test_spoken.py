import json

import pytest
import torch

from overt.data.vocabulary import Vocabulary
from overt.errors import BadInput, Damaged
from overt.models import VQA, MeanPool, Sizes, SmallCNN, TextClassifier
from overt.recipes.spoken import (
    FILE,
    Backbone,
    Canvas,
    Mute,
    Sees,
    Spoken,
    beside,
    networks,
    read,
    spoken,
)
from overt.testing import toy_batch

WORDS = Vocabulary(tuple("what colour is the ball".split()))


def test_what_is_said_of_a_network_is_what_it_takes():
    answerer = VQA(Sizes(WORDS.size, 2, cell=4, word=4, question=4, hidden=4), MeanPool())
    found = spoken(answerer, ["red", "blue"], WORDS, toy_batch)
    batch = toy_batch()
    assert found == Spoken("VQA", ("red", "blue"), WORDS.words, tuple(batch.images.shape[-2:]))


def test_a_network_that_people_cannot_feed_is_not_spoken():
    reader = TextClassifier(20, 2, width=0.05)
    told = spoken(reader, ["a", "b"], None, toy_batch)  # tokens, and nobody to read them
    assert told == Mute("nothing is known of how it reads")
    assert spoken(reader.embed, ["a", "b"], WORDS, toy_batch) is None  # no network of ours


def test_what_was_written_is_read_again(tmp_path):
    known = Spoken("SmallCNN", ("cat", "dog"), None, (32, 40))
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", beside(known))
    assert read(tmp_path / "net") == known
    assert beside(None) == {}


def test_all_that_can_be_said_is_read_again(tmp_path):
    known = Spoken(
        *("Captioner", (), None, (64, 48), Sees.CELLS, Canvas.STRETCH),
        *(Backbone("efficientnet-lite0", "ab12"), {"model": {"type": "WordLevel"}}, 17),
    )
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", beside(known))
    assert read(tmp_path / "net") == known and known.writes and known.reads and not known.boxed


def test_why_a_network_cannot_be_asked_is_told_when_it_is(tmp_path):
    mute = Mute("it looks at regions of a detector, which is no part of overt")
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", beside(mute))
    with pytest.raises(BadInput, match=r"cannot be asked: it looks at regions .* `overt report`"):
        read(tmp_path / "net")


def test_features_of_an_unknown_network_cannot_be_handed_to_it():
    from dataclasses import replace

    batch = replace(toy_batch(), features=torch.zeros(len(toy_batch()), 4, 8))
    answerer = VQA(Sizes(WORDS.size, 2, cell=4, word=4, question=4, hidden=4), MeanPool())
    told = spoken(answerer, ["red", "blue"], WORDS, lambda: batch)
    assert isinstance(told, Mute) and "made elsewhere" in told.why
    cells = spoken(answerer, ["red"], WORDS, lambda: batch, Sees.CELLS, pixels=(64, 64))
    assert isinstance(cells, Spoken) and cells.pixels == (64, 64)


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
def test_a_file_that_says_something_else_is_damaged(tmp_path, value):
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(Damaged, match="run the recipe again"):
        read(tmp_path)


def test_a_network_that_is_not_known_is_named(tmp_path):
    value = {"format": "overt spoken 1", "network": "GPT-9", "answers": []}
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(BadInput, match="GPT-9"):
        read(tmp_path)


def test_every_network_can_be_read_from_its_folder():
    assert all(hasattr(kind, "from_pretrained") for kind in networks().values())
