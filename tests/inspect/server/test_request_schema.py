"""Inspection requests: images, removals, limits, and validation errors."""

import base64

import pytest
from pydantic import ValidationError

from overt.errors import CorruptFileError, UserError
from overt.inspect.server import request_schema
from overt.inspect.server.request_schema import InspectRequest, decode_image
from tests.inspect.server.conftest import PHOTO, encode_png


def test_an_image_may_have_a_data_url_prefix():
    plain = encode_png()
    for sent in (plain, f"data:image/png;base64,{plain}"):
        given = InspectRequest(model="m", picture=sent, text="what").model_input()
        assert (given.photo == PHOTO).all() and given.text == "what"


def test_removals_and_view_options_are_passed_on():
    request = InspectRequest(
        model="m", text="a b", unsaid=[(0, 1)], without=[(0, 0, 0.5, 1)], head=1, query="b"
    )
    given, options = request.model_input(), request.view_options()
    assert given.removed_ranges == ((0, 1),) and given.removed_boxes == ((0.0, 0.0, 0.5, 1.0),)
    assert (options.head, options.query, options.method, options.max_weights) == (
        1,
        "b",
        "attention",
        request_schema.MAX_WEIGHTS,
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "(?i)no input"),
        ({"text": "  \n "}, "(?i)no input"),
        ({"text": "a", "without": [(0.5, 0.1, 0.2, 0.4)]}, "left < right"),
        ({"text": "a", "boxes": [(0.1, 0.1, 0.1, 0.4)]}, "left < right"),
        ({"picture": "@@"}, "not valid base64"),
        ({"picture": "data:image/png,@@"}, "not valid base64"),
        ({"picture": base64.b64encode(b"<svg/>").decode()}, "JPEG, PNG or WEBP"),
    ],
)
def test_unusable_inputs_raise_a_user_error(body: dict, message: str):
    with pytest.raises(UserError, match=message):
        InspectRequest(model="m", **body).model_input()


def test_a_truncated_image_raises_a_corrupt_file_error():
    data = base64.b64decode(encode_png())
    with pytest.raises(CorruptFileError, match="decoded"):
        InspectRequest(model="m", picture=base64.b64encode(data[:-900]).decode()).model_input()


def test_too_large_images_are_rejected(monkeypatch):
    monkeypatch.setattr(request_schema, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(UserError, match="smaller"):
        decode_image(encode_png())
    monkeypatch.setattr(request_schema, "MAX_PIXELS", 100)
    monkeypatch.setattr(request_schema, "MAX_IMAGE_BYTES", 10**6)
    with pytest.raises(UserError, match="pixels"):
        InspectRequest(model="m", picture=encode_png()).model_input()


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
def test_values_out_of_bounds_are_rejected(body: dict):
    with pytest.raises(ValidationError):
        InspectRequest(model="m", **body)


def test_rollout_with_a_head_is_rejected():
    with pytest.raises(UserError, match="all layers"):
        InspectRequest(model="m", text="a", map="rollout", head=1).view_options()
