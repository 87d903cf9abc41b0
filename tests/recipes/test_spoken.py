import json

import pytest

from overt.data.vocabulary import Vocabulary
from overt.errors import BadInput, Damaged
from overt.models import VQA, MeanPool, Sizes, SmallCNN, TextClassifier
from overt.recipes.spoken import FILE, Spoken, beside, networks, read, spoken
from overt.testing import toy_batch

WORDS = Vocabulary(tuple("what colour is the ball".split()))


def test_what_is_said_of_a_network_is_what_it_takes():
    answerer = VQA(Sizes(WORDS.size, 2, cell=4, word=4, question=4, hidden=4), MeanPool())
    found = spoken(answerer, ["red", "blue"], WORDS, toy_batch)
    batch = toy_batch()
    assert found == Spoken("VQA", ("red", "blue"), WORDS.words, tuple(batch.images.shape[-2:]))


def test_a_network_that_people_cannot_feed_is_not_spoken():
    reader = TextClassifier(20, 2, width=0.05)
    assert spoken(reader, ["a", "b"], None, toy_batch) is None  # tokens, and nobody to read them
    assert spoken(reader.embed, ["a", "b"], WORDS, toy_batch) is None  # no network of ours


def test_what_was_written_is_read_again(tmp_path):
    known = Spoken("SmallCNN", ("cat", "dog"), None, (32, 40))
    SmallCNN(2, width=0.1).save_pretrained(tmp_path / "net", beside(known))
    assert read(tmp_path / "net") == known
    assert beside(None) == {}


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
