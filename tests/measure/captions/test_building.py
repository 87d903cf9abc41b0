import json

import numpy as np
import pytest

from overt.data.vocabulary import END, UNKNOWN, Vocabulary, load_words
from overt.errors import BadInput, Damaged
from overt.measure.captions.building import (
    ABOUT,
    corpus,
    coverage,
    frequencies,
    load_frequencies,
    pieces_of_captions,
    words_of_captions,
    write_frequencies,
    write_vocabulary,
)
from overt.measure.captions.cider import Consensus, cider_d, document_frequencies

LINES = "a\tA dog runs.\na\tThe dog, running!\nb\tA cat sits.\nb\tA cat.\nc\tTwo dogs run.\n"


@pytest.fixture
def read(tmp_path):
    (tmp_path / "captions.txt").write_text(LINES, encoding="utf-8")
    return corpus([tmp_path / "captions.txt"])


def test_captions_are_read_as_the_words_they_are_scored_in(read):
    assert len(read.images) == 3 and len(read.texts) == 5
    assert read.texts[1] == ("the", "dog", "running")
    (source,) = read.sources
    assert (source["file"], source["images"], source["captions"]) == ("captions.txt", 3, 5)


def test_words_are_those_said_often_enough(read):
    assert words_of_captions(read, minimum=2).words == ("a", "cat", "dog")
    assert words_of_captions(read, minimum=1, limit=2).words == ("a", "cat")
    known = words_of_captions(read, minimum=2)
    # 14 words, of which a, a, a, cat, cat, dog, dog are known
    assert coverage(read, known) == pytest.approx(7 / 14)
    pytest.importorskip("tokenizers", reason="no tokenizers")
    assert coverage(read, pieces_of_captions(read, 300)) == 1


def test_a_vocabulary_is_kept_with_what_it_was_made_of(read, tmp_path):
    known = words_of_captions(read, minimum=2)
    write_vocabulary(tmp_path / "words", known, read)
    assert load_words(tmp_path / "words") == known
    about = json.loads((tmp_path / "words" / ABOUT).read_text(encoding="utf-8"))
    assert (about["kind"], about["size"], about["coverage"]) == ("words", 8, 0.5)
    write_vocabulary(tmp_path / "words", words_of_captions(read, minimum=1), read)
    assert load_words(tmp_path / "words") != known
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match="holds other files"):
        write_vocabulary(tmp_path / "other", known, read)
    with open(tmp_path / "words" / "vocabulary.json", "a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(Damaged):
        load_words(tmp_path / "words")


def test_frequencies_are_those_of_the_words(read, tmp_path):
    """Counted by ids of all words, they are what evaluation counts on the same references."""
    known = words_of_captions(read, minimum=1)
    counted = frequencies(read, known, ending=())
    write_frequencies(tmp_path / "df", counted, known, read)
    kept = load_frequencies(tmp_path / "df", known)
    assert kept.documents == 3
    references = [[known.encode(text) for text in texts] for texts in read.images]
    candidates = [["a", "dog", "runs"], ["a", "cat"], ["two", "dogs"]]
    scores = Consensus(references, kept)([known.encode(one) for one in candidates])
    expected = cider_d(candidates, [list(texts) for texts in read.images])
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-12)
    one = document_frequencies(references)
    for ours, theirs in zip(kept.images, one.images, strict=True):
        assert np.array_equal(ours, theirs)


def test_frequencies_of_another_vocabulary_are_refused(read, tmp_path):
    known = words_of_captions(read, minimum=2)
    write_frequencies(tmp_path / "df", frequencies(read, known), known, read)
    with pytest.raises(BadInput, match="another vocabulary"):
        load_frequencies(tmp_path / "df", words_of_captions(read, minimum=1))
    write_vocabulary(tmp_path / "words", known, read)
    with pytest.raises(BadInput, match="holds no frequencies"):
        load_frequencies(tmp_path / "words", known)
    with pytest.raises(BadInput, match="no folder of frequencies"):
        load_frequencies(tmp_path / "nothing", known)


def test_what_is_unknown_is_one_word(read):
    known = Vocabulary(("dog",))
    counted = frequencies(read, known, ending=())
    numbers = dict(zip(counted.tables[0].keys.tolist(), counted.images[0].tolist(), strict=True))
    assert numbers == {UNKNOWN: 3, known.encode(["dog"])[0]: 1}


def test_the_end_is_a_word_of_rewards(read):
    known = words_of_captions(read, minimum=1)
    counted = frequencies(read, known)
    keys = counted.tables[0].keys.tolist()
    assert int(counted.images[0][counted.tables[0].numbers[keys.index(END)]]) == 3
    references = [[[*known.encode(text), END] for text in texts] for texts in read.images]
    whole, broken = (known.encode(["a", "dog", "runs"]), known.encode(["a", "dog"]))
    scores = Consensus(references, counted)([[*whole, END], broken], [0, 0])
    assert scores[0] > scores[1]


def test_sub_words_are_kept_alike(read, tmp_path):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    known = pieces_of_captions(read, 280)
    write_frequencies(tmp_path / "df", frequencies(read, known), known, read)
    assert load_frequencies(tmp_path / "df", known).documents == 3
    assert load_words(tmp_path / "df") == known


def test_no_file_is_no_corpus():
    with pytest.raises(BadInput, match="no file of captions"):
        corpus([])
