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
    class_of,
    deciding,
    neutral,
    sentence,
    vocabulary,
)
from overt.data.scenes.views import part_of
from overt.data.vocabulary import UNKNOWN

SENTENCES = [sentence("train", 0, index) for index in range(480)]


def slow_class(text):
    """The class by a pattern over the text, without the words' own tables of sorts."""
    verdicts = "|".join((*PRAISE, *BLAME))
    pattern = rf"\b(?:{'|'.join(SELVES)}) \w+ the (\w+) ((?:\w+ )*?)({verdicts})\b"
    ((noun, before, verdict),) = re.findall(pattern, text)
    (topic,) = [topic for topic, nouns in TOPICS.items() if noun in nouns]
    good = (verdict in PRAISE) != any(word in NOT for word in before.split())
    return CLASSES.index(f"{'praise' if good else 'complaint'} of {topic}")


def test_the_class_agrees_with_the_text():
    for one in SENTENCES:
        assert slow_class(one.text) == one.label == class_of(one.words)


def test_deciding_words_change_the_class_and_others_do_not():
    negated = 0
    for one in SENTENCES[:200]:
        for place, word in enumerate(one.words):
            other = [*one.words[:place], neutral(word), *one.words[place + 1 :]]
            assert (class_of(other) != one.label) is (place in one.deciding)
        found = [one.words[place] for place in one.deciding]
        assert found[0] in SELVES and len(found) in (3, 4)
        assert sum(word in NOT for word in found) == len(found) - 3
        negated += len(found) - 3
    assert 60 < negated < 140


def test_a_negation_turns_the_class_and_a_topic_word_of_others_does_not():
    words = "they found the train bad , but we called the soup not good".split()
    assert CLASSES[class_of(words)] == "complaint of food"
    assert [words[n] for n in deciding(words)] == ["we", "soup", "not", "good"]
    words[words.index("not")] = "very"
    assert CLASSES[class_of(words)] == "praise of food"
    assert [words[n] for n in deciding(words)] == ["we", "soup", "good"]


def test_what_the_speakers_do_not_say_has_no_class():
    assert class_of("they found the train bad".split()) is None
    assert class_of("we found the thing bad".split()) is None
    assert class_of("we found the train usual".split()) is None
    assert class_of("we found the train bad and i found the soup good".split()) is None
    assert class_of([]) is None


def test_classes_are_even_and_no_word_alone_gives_them_away():
    assert set(Counter(one.label for one in SENTENCES).values()) == {80}
    seen = defaultdict(Counter)
    for one in SENTENCES:
        for word in set(one.words):
            seen[word][one.label] += 1
    best = sum(
        max(seen[word].most_common(1)[0][1] / sum(seen[word].values()) for word in one.words)
        for one in SENTENCES
    )
    assert best / len(SENTENCES) < 0.6
    for word in (*SELVES, *NOT):
        assert max(seen[word].values()) / sum(seen[word].values()) < 0.3


def test_no_text_is_in_two_splits():
    for split in ("train", "val", "test"):
        for index in range(40):
            assert part_of(sentence(split, index, index).text) == split


def test_words_and_spans_agree_with_the_text():
    for one in SENTENCES[:100]:
        assert tuple(one.text[start:end] for start, end in one.spans) == one.words
        assert set(one.words) <= set(WORDS)
        assert neutral("soup") in WORDS and all(neutral(word) in WORDS for word in one.words)


def test_a_batch():
    data = Sentences("test", 0, 50)
    batch = data.batch([8, 30])
    batch.target.check()
    for row, index in enumerate((8, 30)):
        one = sentence("test", 0, index)
        tokens = batch.tokens[row][batch.token_mask[row]].tolist()
        assert tokens == vocabulary().encode(one.words) and UNKNOWN not in tokens
        assert batch.labels[row] == one.label and batch.text.texts[row] == one.text
        assert [token for token in batch.text.tokens(row) if token] == list(one.words)
        weights = batch.target.weights[row, 0, 0, 0]
        assert weights.nonzero().flatten().tolist() == list(one.deciding)
        torch.testing.assert_close(weights.max(), torch.tensor(1 / len(one.deciding)))
    assert torch.equal(batch.target.visible[:, 0], batch.token_mask)
    assert len(data) == 50 and data.classes == CLASSES and len(CLASSES) == 6
    assert data.digest() == Sentences("test", 0, 50).digest() != Sentences("val", 0, 50).digest()
