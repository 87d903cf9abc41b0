import re
from collections import Counter, defaultdict

import torch

from overt.data.scenes.sentences import (
    BLAME,
    CLASSES,
    NOT,
    PRAISE,
    SELVES,
    TOPICS,
    WORDS,
    Sentences,
    deciding_words,
    make_sentence,
    neutral_word,
    sentence_class,
    vocabulary,
)
from overt.data.scenes.view_dataset import split_of_text
from overt.data.vocabulary import UNKNOWN

SENTENCES = [make_sentence("train", 0, index) for index in range(480)]


def slow_class(text):
    """The class by a regular expression over the text, without the package's word tables."""
    verdicts = "|".join((*PRAISE, *BLAME))
    pattern = rf"\b(?:{'|'.join(SELVES)}) \w+ the (\w+) ((?:\w+ )*?)({verdicts})\b"
    ((noun, before, verdict),) = re.findall(pattern, text)
    (topic,) = [topic for topic, nouns in TOPICS.items() if noun in nouns]
    good = (verdict in PRAISE) != any(word in NOT for word in before.split())
    return CLASSES.index(f"{'praise' if good else 'complaint'} of {topic}")


def test_class_agrees_with_the_text():
    for one in SENTENCES:
        assert slow_class(one.text) == one.label == sentence_class(one.words)


def test_only_deciding_words_change_the_class():
    negated = 0
    for one in SENTENCES[:200]:
        for place, word in enumerate(one.words):
            other = [*one.words[:place], neutral_word(word), *one.words[place + 1 :]]
            assert (sentence_class(other) != one.label) is (place in one.deciding)
        found = [one.words[place] for place in one.deciding]
        assert found[0] in SELVES and len(found) in (3, 4)
        assert sum(word in NOT for word in found) == len(found) - 3
        negated += len(found) - 3
    assert 60 < negated < 140


def test_negation_flips_the_class_and_other_clauses_do_not():
    words = "they found the train bad , but we called the soup not good".split()
    assert CLASSES[sentence_class(words)] == "complaint of food"
    assert [words[n] for n in deciding_words(words)] == ["we", "soup", "not", "good"]
    words[words.index("not")] = "very"
    assert CLASSES[sentence_class(words)] == "praise of food"
    assert [words[n] for n in deciding_words(words)] == ["we", "soup", "good"]


def test_incomplete_sentences_have_no_class():
    assert sentence_class("they found the train bad".split()) is None
    assert sentence_class("we found the thing bad".split()) is None
    assert sentence_class("we found the train usual".split()) is None
    assert sentence_class("we found the train bad and i found the soup good".split()) is None
    assert sentence_class([]) is None


def test_classes_are_balanced_and_no_single_word_predicts_them():
    assert set(Counter(one.label for one in SENTENCES).values()) == {80}
    counts = defaultdict(Counter)
    for one in SENTENCES:
        for word in set(one.words):
            counts[word][one.label] += 1
    best = sum(
        max(counts[word].most_common(1)[0][1] / sum(counts[word].values()) for word in one.words)
        for one in SENTENCES
    )
    assert best / len(SENTENCES) < 0.6
    for word in (*SELVES, *NOT):
        assert max(counts[word].values()) / sum(counts[word].values()) < 0.3


def test_splits_share_no_text():
    for split in ("train", "val", "test"):
        for index in range(40):
            assert split_of_text(make_sentence(split, index, index).text) == split


def test_words_and_spans_match_the_text():
    for one in SENTENCES[:100]:
        assert tuple(one.text[start:end] for start, end in one.spans) == one.words
        assert set(one.words) <= set(WORDS)
        assert neutral_word("soup") in WORDS and all(
            neutral_word(word) in WORDS for word in one.words
        )


def test_batches_match_the_generated_sentences():
    data = Sentences("test", 0, 50)
    batch = data.batch([8, 30])
    batch.target.check()
    for row, index in enumerate((8, 30)):
        one = make_sentence("test", 0, index)
        tokens = batch.tokens[row][batch.token_mask[row]].tolist()
        assert tokens == vocabulary().encode(one.words) and UNKNOWN not in tokens
        assert batch.labels[row] == one.label and batch.text.texts[row] == one.text
        assert [token for token in batch.text.tokens(row) if token] == list(one.words)
        weights = batch.target.weights[row, 0, 0, 0]
        assert weights.nonzero().flatten().tolist() == list(one.deciding)
        torch.testing.assert_close(weights.max(), torch.tensor(1 / len(one.deciding)))
    assert torch.equal(batch.target.visible[:, 0], batch.token_mask)
    assert data.classes == CLASSES and len(CLASSES) == 6
