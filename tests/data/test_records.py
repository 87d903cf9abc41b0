import json
from pathlib import Path

import pytest

from overt.data import records as module
from overt.data.records import records
from overt.errors import BadInput, Damaged

ENTRIES = [
    {"id": n, "text": 'a, ]} \\ " é' * (n % 4), "more": [1.5, None, {"x": []}]} for n in range(50)
]


@pytest.fixture(params=[1, 7, 64, 1 << 22])
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(module, "CHUNK", request.param)
    return request.param


def write(path: Path, value: object, indent: int | None = None) -> Path:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 2])
def test_agrees_with_the_whole_file_read_at_once(tmp_path, chunk, indent):
    whole = {"info": {"entries": [1]}, "n": 12345, "entries": ENTRIES, "after": 1}
    assert list(records(write(tmp_path / "a.json", whole, indent), "entries")) == ENTRIES
    assert list(records(write(tmp_path / "b.json", ENTRIES, indent), None)) == ENTRIES
    assert list(records(write(tmp_path / "c.json", []), None)) == []
    assert list(records(write(tmp_path / "d.json", {"entries": []}), "entries")) == []


def test_the_window_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 256)
    path = write(tmp_path / "a.json", ENTRIES)
    found = module._Text(path, path.open(encoding="utf-8"))
    seen = [len(found._window) for _ in found.entries()]
    assert max(seen) < 1_000 < path.stat().st_size


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("", None, r"no '\['"),
        ("{}", None, r"no '\['"),
        ("[1, 2]", None, "entry 0 is no object"),
        ('[{"a": 1}, {"a"', None, "entry 1 is not JSON"),
        ('[{"a": 1}', None, "breaks off after entry 0"),
        ('[{"a": 1} {"a": 2}]', None, "breaks off after entry 0"),
        ('{"b": 1}', "a", "no list called 'a'"),
        ('{"a": 1}', "a", r"no '\['"),
        ('{"b": tru, "a": []}', "a", "'b' is not JSON"),
        ("[" * 100_000, None, "nested too deeply|entry 0"),
    ],
)
def test_what_is_broken_is_named(tmp_path, chunk, text, key, said):
    if chunk == 1 and len(text) > 1_000:
        pytest.skip("one letter at a time takes too long")
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(Damaged, match=said):
        list(records(tmp_path / "a.json", key))


def test_missing_files_and_files_that_are_no_text(tmp_path):
    with pytest.raises(BadInput, match=r"a\.json is missing"):
        list(records(tmp_path / "a.json", None))
    (tmp_path / "a.json").write_bytes(b"[\xff]")
    with pytest.raises(Damaged, match="not text"):
        list(records(tmp_path / "a.json", None))


def test_an_entry_without_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    monkeypatch.setattr(module, "LONGEST", 300)
    (tmp_path / "a.json").write_text('[{"a": "' + "x" * 100_000)
    with pytest.raises(Damaged, match="entry 0 is not JSON"):
        list(records(tmp_path / "a.json", None))
