"""Words and frequencies of a user's own captions, through the command line."""

import contextlib
import io
from pathlib import Path

import pytest

from overt import cli, files
from overt.data.vocabulary import SubWords, load_words
from overt.measure.captions.building import load_frequencies

LINES = "a\tA dog runs.\na\tThe dog, running!\nb\tA cat sits.\nb\tA cat.\nc\tTwo dogs run.\n"


def ended(*args: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(one) for one in args])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    (tmp_path / "captions.txt").write_text(LINES, encoding="utf-8")
    return tmp_path / "captions.txt"


def test_words_and_frequencies_by_one_command_each(captions: Path, tmp_path: Path) -> None:
    words, counts = tmp_path / "words", tmp_path / "df"
    code, out, err = ended("data", "vocabulary", captions, "--out", words, "--minimum", 2)
    assert code == 0, err
    assert "3 words cover 50.00 % of the captions" in out and "captions.txt  3       5" in out
    code, out, err = ended("data", "frequencies", captions, "--vocabulary", words, "--out", counts)
    assert code == 0, err
    assert "in 3 images" in out
    assert load_frequencies(counts, load_words(words)).documents == 3
    for made in (words, counts):
        files.verify(made)


def test_only_the_images_of_a_list_are_counted(captions: Path, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("b\n", encoding="utf-8")
    args = (captions, "--images", tmp_path / "train.txt")
    code, out, err = ended("data", "vocabulary", *args, "--out", tmp_path / "w", "--minimum", 1)
    assert code == 0 and "captions.txt  1       2" in out, err
    words = load_words(tmp_path / "w")
    assert words.size == 5 + 3 and "dog" not in words.decode(range(words.size))
    end = ("--vocabulary", tmp_path / "w", "--out", tmp_path / "df")
    code, out, err = ended("data", "frequencies", *args, *end)
    assert code == 0 and "in 1 images" in out, err


def test_sub_words_by_one_command(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers")
    code, out, err = ended("data", "vocabulary", captions, "--out", tmp_path / "w", "--pieces", 270)
    assert code == 0, err
    assert "sub-words cover 100.00 %" in out
    assert isinstance(load_words(tmp_path / "w"), SubWords)


def test_bad_input_is_said_in_a_sentence(captions: Path, tmp_path: Path) -> None:
    vocabulary, out = ("data", "vocabulary"), ("--out", tmp_path / "w")
    cases = [
        ((*vocabulary, tmp_path / "none.txt", *out), "is not there"),
        ((*vocabulary, captions, *out, "--split", "train"), "has no splits"),
        ((*vocabulary, captions, *out, "--limit", 3, "--pieces", 300), "give one of them"),
        ((*vocabulary, captions, "--out", captions), "is a file"),
        ((*vocabulary, captions, "--out", tmp_path), "holds other files"),
        (("data", "frequencies", captions, "--vocabulary", captions, *out), "captions.txt"),
    ]
    for args, sentence in cases:
        code, _, err = ended(*args)
        assert code == 2 and sentence in err and err.count("\n") == 1, err
    assert not (tmp_path / "w").exists()
