import json
from pathlib import Path

import pytest

from overt.data import json_stream as module
from overt.data.json_stream import iterate_records
from overt.errors import CorruptFileError, UserError

ENTRIES = [
    {"id": n, "text": 'a, ]} \\ " é' * (n % 4), "more": [1.5, None, {"x": []}]} for n in range(50)
]


@pytest.fixture(params=[1, 7, 64, 1 << 22])
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(module, "CHUNK", request.param)
    return request.param


def write_json(path: Path, value: object, indent: int | None = None) -> Path:
    path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 2])
def test_records_equal_those_of_the_whole_file(tmp_path, chunk, indent):
    value = {"info": {"entries": [1]}, "n": 12345, "entries": ENTRIES, "after": 1}
    assert (
        list(iterate_records(write_json(tmp_path / "a.json", value, indent), "entries")) == ENTRIES
    )
    assert list(iterate_records(write_json(tmp_path / "b.json", ENTRIES, indent), None)) == ENTRIES
    assert list(iterate_records(write_json(tmp_path / "c.json", []), None)) == []
    assert list(iterate_records(write_json(tmp_path / "d.json", {"entries": []}), "entries")) == []


def test_read_window_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 256)
    path = write_json(tmp_path / "a.json", ENTRIES)
    found = module._JsonStream(path, path.open(encoding="utf-8"))
    lengths = [len(found._window) for _ in found.entries()]
    assert max(lengths) < 1_000 < path.stat().st_size


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", None, r"expected '\['"),
        ("{}", None, r"expected '\['"),
        ("[1, 2]", None, "entry 0 .*object"),
        ('[{"a": 1}, {"a"', None, "entry 1 .*JSON"),
        ('[{"a": 1}', None, "after entry 0"),
        ('[{"a": 1} {"a": 2}]', None, "after entry 0"),
        ('{"b": 1}', "a", "no list.*'a'"),
        ('{"a": 1}', "a", r"expected '\['"),
        ('{"b": tru, "a": []}', "a", "'b' is not JSON"),
        ("[" * 100_000, None, "nested|entry 0"),
    ],
)
def test_invalid_json_raises_with_the_entry(tmp_path, chunk, text, key, message):
    if chunk == 1 and len(text) > 1_000:
        pytest.skip("reading one character at a time takes too long")
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CorruptFileError, match=message):
        list(iterate_records(tmp_path / "a.json", key))


def test_missing_and_binary_files_raise(tmp_path):
    with pytest.raises(UserError, match=r"a\.json.*missing"):
        list(iterate_records(tmp_path / "a.json", None))
    (tmp_path / "a.json").write_bytes(b"[\xff]")
    with pytest.raises(CorruptFileError, match="not text"):
        list(iterate_records(tmp_path / "a.json", None))


def test_unterminated_entry_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 100)
    monkeypatch.setattr(module, "LONGEST", 300)
    (tmp_path / "a.json").write_text('[{"a": "' + "x" * 100_000)
    with pytest.raises(CorruptFileError, match="entry 0 .*JSON"):
        list(iterate_records(tmp_path / "a.json", None))
