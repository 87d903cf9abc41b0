import base64

import pytest
from pydantic import ValidationError

from overt.errors import BadInput, Damaged
from overt.serve import questions
from overt.serve.questions import Question, decoded
from tests.serve.conftest import PHOTO, encoded


def test_a_picture_comes_with_or_without_its_head():
    plain = encoded()
    for sent in (plain, f"data:image/png;base64,{plain}"):
        given = Question(model="m", picture=sent, text="what").given()
        assert (given.photo == PHOTO).all() and given.text == "what"


def test_what_is_removed_and_wanted_is_passed_on():
    asked = Question(
        model="m", text="a b", unsaid=[(0, 1)], without=[(0, 0, 0.5, 1)], head=1, query="b"
    )
    given, wish = asked.given(), asked.wish()
    assert given.unsaid == ((0, 1),) and given.without == ((0.0, 0.0, 0.5, 1.0),)
    assert (wish.head, wish.query, wish.way, wish.most) == (1, "b", "raw", questions.MOST_WEIGHTS)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "nothing to look at"),
        ({"text": "  \n "}, "nothing to look at"),
        ({"picture": "@@"}, "not base64"),
        ({"picture": "data:image/png,@@"}, "not base64"),
        ({"picture": base64.b64encode(b"<svg/>").decode()}, "not a JPEG, PNG or WEBP"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(body: dict, said: str):
    with pytest.raises(BadInput, match=said):
        Question(model="m", **body).given()


def test_a_cut_off_picture_is_damaged():
    data = base64.b64decode(encoded())
    with pytest.raises(Damaged, match="cannot be decoded"):
        Question(model="m", picture=base64.b64encode(data[:-900]).decode()).given()


def test_pictures_above_a_size_are_not_opened(monkeypatch):
    monkeypatch.setattr(questions, "MOST_BYTES", 1000)
    with pytest.raises(BadInput, match="make it smaller"):
        decoded(encoded())
    monkeypatch.setattr(questions, "MOST_PIXELS", 100)
    monkeypatch.setattr(questions, "MOST_BYTES", 10**6)
    with pytest.raises(BadInput, match="pixels"):
        Question(model="m", picture=encoded()).given()


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a" * 20_001},
        {"text": "a \ud800"},
        {"without": [(0, 0, 2, 1)]},
        {"without": [(0, 0, float("nan"), 1)]},
        {"without": [(0, 0, 1)]},
        {"unsaid": [(-1, 2)]},
        {"map": "everything"},
        {"head": 10**9},
        {"folder": "/etc"},
        {"query": "a" * 301},
    ],
)
def test_what_is_out_of_bounds_is_refused(body: dict):
    with pytest.raises(ValidationError):
        Question(model="m", **body)


def test_a_map_through_all_layers_has_no_layer():
    with pytest.raises(BadInput, match="goes through all layers"):
        Question(model="m", text="a", map="rollout", head=1).wish()
