import itertools
from collections import Counter

import numpy as np

from overt.data.scenes.language import read, vocabulary
from overt.data.scenes.relations import (
    BETWEEN,
    SWAPPED,
    PhrasePairs,
    Relation,
    phrase_pair,
    relation,
    side_by_side,
)
from overt.data.scenes.views import part_of
from overt.data.scenes.world import VALUES
from overt.data.vocabulary import BEGIN, END, UNKNOWN

KINDS = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def meaning(what):
    """All of the 288 possible kinds of things a description fits."""
    return {n for n, kind in enumerate(KINDS) if all(kind[name] == v for name, v in what)}


def slow_relation(first, second):
    """The relation of two sets."""
    if first == second:
        return Relation.EQUIVALENT
    if first < second:
        return Relation.FORWARD
    if first > second:
        return Relation.BACKWARD
    return Relation.INDEPENDENT if first & second else Relation.ALTERNATION


def test_relations_agree_with_sets_of_things():
    names = list(VALUES)
    rng = np.random.default_rng(0)
    seen = Counter()
    descriptions = []
    for _ in range(90):
        chosen = [name for name in names if rng.random() < 0.5]
        descriptions.append(
            tuple((n, VALUES[n][rng.integers(min(2, len(VALUES[n])))]) for n in chosen)
        )
    sets = [meaning(what) for what in descriptions]
    for i, j in itertools.product(range(len(descriptions)), repeat=2):
        found = relation(descriptions[i], descriptions[j])
        assert found is slow_relation(sets[i], sets[j])
        assert relation(descriptions[j], descriptions[i]) is SWAPPED[found]
        seen[found] += 1
    assert min(seen[r] for r in Relation) > 50


def test_pairs_of_phrases_have_the_relation_their_words_have():
    pairs = [phrase_pair("train", 0, index) for index in range(300)]
    for pair in pairs:
        assert pair.first != pair.second
        assert (read(pair.first), read(pair.second)) == (pair.what, pair.other)
        assert slow_relation(meaning(pair.what), meaning(pair.other)) is pair.relation
        back = pair.swapped()
        assert slow_relation(meaning(back.what), meaning(back.other)) is back.relation
        assert back.swapped() == pair
    assert set(Counter(pair.relation for pair in pairs).values()) == {60}
    turned = [
        sum(" that is " in pair.first for pair in pairs if pair.relation is r) for r in Relation
    ]
    assert min(turned) > 10  # every class has both word orders


def test_no_pair_is_in_two_splits():
    for split in ("train", "val", "test"):
        for index in range(40):
            pair = phrase_pair(split, index, index)
            assert part_of(BETWEEN.join(sorted((pair.first, pair.second)))) == split


def test_two_texts_in_one_row():
    text, ids, spans, skip = side_by_side(vocabulary(), "red ring", "a disc")
    assert text == "red ring / a disc" and skip == 4
    assert (ids[0], ids[3], ids[6]) == (BEGIN, END, END) and len(ids) == 7
    assert [text[max(a, 0) : max(b, 0)] for a, b in spans] == [
        "",
        "red",
        "ring",
        "",
        "a",
        "disc",
        "",
    ]


def test_a_batch_of_pairs():
    data = PhrasePairs("test", 0, 40)
    batch = data.batch([3, 11])
    pair = phrase_pair("test", 0, 11)
    assert batch.labels[1] == int(pair.relation) and batch.groups[1] == pair.relation.name.lower()
    assert batch.references[1] == (pair.first, pair.second) and batch.images is None
    assert UNKNOWN not in batch.tokens
    words = [token for token in batch.text.tokens(1) if token]
    assert words == f"{pair.first} {pair.second}".split()
    assert (
        data.digest() == PhrasePairs("test", 0, 40).digest() != PhrasePairs("val", 0, 40).digest()
    )
    assert len(data) == 40 and data.classes[data.batch([0]).labels[0]] == data.batch([0]).groups[0]
