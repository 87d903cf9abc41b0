"""`overt data vocabulary` and `overt data frequencies` of a user's captions."""

import contextlib
import io
from pathlib import Path

import pytest

from overt import cli
from overt import io as overt_io
from overt.data.vocabulary import BpeVocabulary, load_vocabulary
from overt.metrics.captions.caption_corpus import load_frequencies

LINES = "a\tA dog runs.\na\tThe dog, running!\nb\tA cat sits.\nb\tA cat.\nc\tTwo dogs run.\n"


def run_command(*args: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(one) for one in args])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    (tmp_path / "captions.txt").write_text(LINES, encoding="utf-8")
    return tmp_path / "captions.txt"


def test_vocabulary_and_frequencies_are_written(captions: Path, tmp_path: Path) -> None:
    words, counts = tmp_path / "words", tmp_path / "df"
    code, out, err = run_command("data", "vocabulary", captions, "--out", words, "--minimum", 2)
    assert code == 0, err
    assert "3 words cover 50.00 % of the captions" in out and "captions.txt  3       5" in out
    code, out, err = run_command(
        "data", "frequencies", captions, "--vocabulary", words, "--out", counts
    )
    assert code == 0, err
    assert "in 3 images" in out
    assert load_frequencies(counts, load_vocabulary(words)).documents == 3
    for made in (words, counts):
        overt_io.verify(made)


def test_only_listed_images_are_counted(captions: Path, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("b\n", encoding="utf-8")
    args = (captions, "--images", tmp_path / "train.txt")
    code, out, err = run_command(
        "data", "vocabulary", *args, "--out", tmp_path / "w", "--minimum", 1
    )
    assert code == 0 and "captions.txt  1       2" in out, err
    words = load_vocabulary(tmp_path / "w")
    assert words.size == 5 + 3 and "dog" not in words.decode(range(words.size))
    end = ("--vocabulary", tmp_path / "w", "--out", tmp_path / "df")
    code, out, err = run_command("data", "frequencies", *args, *end)
    assert code == 0 and "in 1 images" in out, err


def test_a_subword_vocabulary_is_written(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers")
    code, out, err = run_command(
        "data", "vocabulary", captions, "--out", tmp_path / "w", "--pieces", 270
    )
    assert code == 0, err
    assert "sub-words cover 100.00 %" in out
    assert isinstance(load_vocabulary(tmp_path / "w"), BpeVocabulary)


def test_bad_input_prints_one_line_and_exits_with_2(captions: Path, tmp_path: Path) -> None:
    vocabulary, out = ("data", "vocabulary"), ("--out", tmp_path / "w")
    cases = [
        ((*vocabulary, tmp_path / "none.txt", *out), "does not exist"),
        ((*vocabulary, captions, *out, "--split", "train"), "has no split"),
        ((*vocabulary, captions, *out, "--limit", 3, "--pieces", 300), "give one"),
        ((*vocabulary, captions, "--out", captions), "is a file"),
        ((*vocabulary, captions, "--out", tmp_path), "holds other files"),
        (("data", "frequencies", captions, "--vocabulary", captions, *out), "captions.txt"),
    ]
    for args, message in cases:
        code, _, err = run_command(*args)
        assert code == 2 and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "w").exists()
