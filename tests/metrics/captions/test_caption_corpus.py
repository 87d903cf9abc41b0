"""Caption corpora: vocabularies and document frequencies built from caption files."""

import json

import numpy as np
import pytest

from overt.data.vocabulary import END, UNKNOWN, Vocabulary, load_vocabulary
from overt.errors import CorruptFileError, UserError
from overt.metrics.captions.caption_corpus import (
    ABOUT,
    build_subwords,
    build_vocabulary,
    caption_frequencies,
    load_frequencies,
    read_corpus,
    vocabulary_coverage,
    write_frequencies,
    write_vocabulary,
)
from overt.metrics.captions.cider import CiderDScorer, cider_d, document_frequencies

LINES = "a\tA dog runs.\na\tThe dog, running!\nb\tA cat sits.\nb\tA cat.\nc\tTwo dogs run.\n"


@pytest.fixture
def read(tmp_path):
    (tmp_path / "captions.txt").write_text(LINES, encoding="utf-8")
    return read_corpus([tmp_path / "captions.txt"])


def test_captions_are_tokenized_as_for_scoring(read):
    assert len(read.images) == 3 and len(read.texts) == 5
    assert read.texts[1] == ("the", "dog", "running")
    (source,) = read.sources
    assert (source["file"], source["images"], source["captions"]) == ("captions.txt", 3, 5)


def test_vocabulary_contains_the_frequent_words(read):
    assert build_vocabulary(read, minimum=2).words == ("a", "cat", "dog")
    assert build_vocabulary(read, minimum=1, limit=2).words == ("a", "cat")
    known = build_vocabulary(read, minimum=2)
    # 14 words, of which a, a, a, cat, cat, dog, dog are known
    assert vocabulary_coverage(read, known) == pytest.approx(7 / 14)
    pytest.importorskip("tokenizers", reason="no tokenizers")
    assert vocabulary_coverage(read, build_subwords(read, 300)) == 1


def test_a_vocabulary_is_saved_with_its_sources(read, tmp_path):
    known = build_vocabulary(read, minimum=2)
    write_vocabulary(tmp_path / "words", known, read)
    assert load_vocabulary(tmp_path / "words") == known
    about = json.loads((tmp_path / "words" / ABOUT).read_text(encoding="utf-8"))
    assert (about["kind"], about["size"], about["coverage"]) == ("words", 8, 0.5)
    write_vocabulary(tmp_path / "words", build_vocabulary(read, minimum=1), read)
    assert load_vocabulary(tmp_path / "words") != known
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="holds other files"):
        write_vocabulary(tmp_path / "other", known, read)
    with open(tmp_path / "words" / "vocabulary.json", "a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(CorruptFileError):
        load_vocabulary(tmp_path / "words")


def test_frequencies_equal_document_frequencies_of_the_references(read, tmp_path):
    """Counts by word id equal those that evaluation computes on the same references."""
    known = build_vocabulary(read, minimum=1)
    counted = caption_frequencies(read, known, ending=())
    write_frequencies(tmp_path / "df", counted, known, read)
    kept = load_frequencies(tmp_path / "df", known)
    assert kept.documents == 3
    references = [[known.encode(text) for text in texts] for texts in read.images]
    candidates = [["a", "dog", "runs"], ["a", "cat"], ["two", "dogs"]]
    scores = CiderDScorer(references, kept)([known.encode(one) for one in candidates])
    expected = cider_d(candidates, [list(texts) for texts in read.images])
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-12)
    one = document_frequencies(references)
    for ours, theirs in zip(kept.images, one.images, strict=True):
        assert np.array_equal(ours, theirs)


def test_frequencies_of_another_vocabulary_raise(read, tmp_path):
    known = build_vocabulary(read, minimum=2)
    write_frequencies(tmp_path / "df", caption_frequencies(read, known), known, read)
    with pytest.raises(UserError, match="another vocabulary"):
        load_frequencies(tmp_path / "df", build_vocabulary(read, minimum=1))
    write_vocabulary(tmp_path / "words", known, read)
    with pytest.raises(UserError, match="frequencies"):
        load_frequencies(tmp_path / "words", known)
    with pytest.raises(UserError, match="not a folder"):
        load_frequencies(tmp_path / "nothing", known)


def test_all_unknown_words_share_one_id(read):
    known = Vocabulary(("dog",))
    counted = caption_frequencies(read, known, ending=())
    numbers = dict(zip(counted.tables[0].keys.tolist(), counted.images[0].tolist(), strict=True))
    assert numbers == {UNKNOWN: 3, known.encode(["dog"])[0]: 1}


def test_the_end_token_counts_in_rewards(read):
    known = build_vocabulary(read, minimum=1)
    counted = caption_frequencies(read, known)
    keys = counted.tables[0].keys.tolist()
    assert int(counted.images[0][counted.tables[0].numbers[keys.index(END)]]) == 3
    references = [[[*known.encode(text), END] for text in texts] for texts in read.images]
    whole, broken = (known.encode(["a", "dog", "runs"]), known.encode(["a", "dog"]))
    scores = CiderDScorer(references, counted)([[*whole, END], broken], [0, 0])
    assert scores[0] > scores[1]


def test_subword_vocabularies_are_saved_with_frequencies(read, tmp_path):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    known = build_subwords(read, 280)
    write_frequencies(tmp_path / "df", caption_frequencies(read, known), known, read)
    assert load_frequencies(tmp_path / "df", known).documents == 3
    assert load_vocabulary(tmp_path / "df") == known


def test_an_empty_list_of_files_raises():
    with pytest.raises(UserError, match="least one file"):
        read_corpus([])
