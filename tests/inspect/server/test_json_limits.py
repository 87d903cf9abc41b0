"""JSON limits of request bodies: depth, scalars, tokens, and bounded work."""

import json

import pytest

from overt.inspect.server import json_limits
from overt.inspect.server.json_limits import MAX_DEPTH, MAX_SCALAR, MAX_TOKENS, check_json
from overt.inspect.server.request_schema import MAX_BODY, MAX_BOXES, MAX_REMOVED


def test_the_largest_valid_request_passes():
    box = [0.123456789012345678, 0.1, 0.9, 1.0]
    question = {
        "model": "m" * 300,
        "text": '"[{\\' * 5_000,
        "picture": "data:image/png;base64," + "A" * 10**6,
        "map": "attention",
        "layer": "1",
        "head": None,
        "query": "ä",
        "boxes": [box] * MAX_BOXES,
        "without": [box] * MAX_REMOVED,
        "unsaid": [[1, 20_000]] * MAX_REMOVED,
    }
    for indent in (None, 2):
        assert check_json(json.dumps(question, indent=indent).encode()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * (MAX_DEPTH + 1), "nested"),
        (b'{"a":' * (MAX_DEPTH + 1), "nested"),
        (b"1" * (MAX_SCALAR + 1), "number"),
        (b'{"a": "b', "unterminated"),
        (b'"\\"', "unterminated"),
        (b"1," * MAX_TOKENS, "tokens"),
    ],
)
def test_json_over_a_limit_is_rejected_with_the_limit(text: bytes, message: str):
    assert message in str(check_json(text))


@pytest.mark.parametrize("text", [b"", b"   ", b"[]", b"1", b"]]]]", b"\xff", b'{"a": "\\u0041"}'])
def test_json_within_the_limits_passes_even_if_malformed(text: bytes):
    assert check_json(text) is None


def test_brackets_inside_strings_do_not_count():
    assert check_json(json.dumps("[" * 10_000 + '"' * 10_000).encode()) is None


@pytest.mark.parametrize(
    "part",
    [b'"k":1,', b'"",', b'"', b'"\\', b"[", b"{", b"1", b"1 ", b" ", b"a" * 64 + b" ", b'\\"', b",",
     b" " * 400 + b"1"],
)  # fmt: skip
def test_any_body_is_checked_in_a_bounded_number_of_steps(part: bytes, monkeypatch):
    """Parsing and validating a million keys took 28 s; the check reads a few thousand tokens."""
    text = b'{"' + part * (MAX_BODY // len(part))
    token, ends = json_limits._TOKEN, []

    class CountingPattern:
        def match(self, text: bytes, at: int):
            found = token.match(text, at)
            ends.append(found.end() if found else len(text))
            return found

    monkeypatch.setattr(json_limits, "_TOKEN", CountingPattern())
    check_json(text)
    assert len(ends) <= MAX_TOKENS + 1
    assert ends == sorted(ends)  # nothing is read twice
