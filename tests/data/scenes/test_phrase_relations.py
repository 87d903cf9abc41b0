import itertools
from collections import Counter

import numpy as np

from overt.data.scenes.noun_phrases import parse_phrase, vocabulary
from overt.data.scenes.phrase_relations import (
    SEPARATOR,
    SWAPPED,
    PhrasePairs,
    PhraseRelation,
    encode_pair,
    make_phrase_pair,
    phrase_relation,
)
from overt.data.scenes.view_dataset import split_of_text
from overt.data.scenes.world import VALUES
from overt.data.vocabulary import BEGIN, END, UNKNOWN

KINDS = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def matching_kinds(what):
    """Those of the 288 possible kinds of objects that a description matches."""
    return {n for n, kind in enumerate(KINDS) if all(kind[name] == v for name, v in what)}


def slow_relation(first, second):
    """The relation of two sets."""
    if first == second:
        return PhraseRelation.EQUIVALENT
    if first < second:
        return PhraseRelation.FORWARD
    if first > second:
        return PhraseRelation.BACKWARD
    return PhraseRelation.INDEPENDENT if first & second else PhraseRelation.ALTERNATION


def test_relations_agree_with_sets_of_matching_kinds():
    names = list(VALUES)
    rng = np.random.default_rng(0)
    counts = Counter()
    descriptions = []
    for _ in range(90):
        chosen = [name for name in names if rng.random() < 0.5]
        descriptions.append(
            tuple((n, VALUES[n][rng.integers(min(2, len(VALUES[n])))]) for n in chosen)
        )
    sets = [matching_kinds(what) for what in descriptions]
    for i, j in itertools.product(range(len(descriptions)), repeat=2):
        found = phrase_relation(descriptions[i], descriptions[j])
        assert found is slow_relation(sets[i], sets[j])
        assert phrase_relation(descriptions[j], descriptions[i]) is SWAPPED[found]
        counts[found] += 1
    assert min(counts[r] for r in PhraseRelation) > 50


def test_phrase_pairs_have_the_relation_of_their_words():
    pairs = [make_phrase_pair("train", 0, index) for index in range(300)]
    for pair in pairs:
        assert pair.first != pair.second
        assert (parse_phrase(pair.first), parse_phrase(pair.second)) == (pair.what, pair.other)
        assert slow_relation(matching_kinds(pair.what), matching_kinds(pair.other)) is pair.relation
        back = pair.swapped()
        assert slow_relation(matching_kinds(back.what), matching_kinds(back.other)) is back.relation
        assert back.swapped() == pair
    assert set(Counter(pair.relation for pair in pairs).values()) == {60}
    clauses = [
        sum(" that is " in pair.first for pair in pairs if pair.relation is r)
        for r in PhraseRelation
    ]
    assert min(clauses) > 10  # every class has both word orders


def test_splits_share_no_pair():
    for split in ("train", "val", "test"):
        for index in range(40):
            pair = make_phrase_pair(split, index, index)
            assert split_of_text(SEPARATOR.join(sorted((pair.first, pair.second)))) == split


def test_encode_pair_joins_two_texts():
    text, ids, spans, skip = encode_pair(vocabulary(), "red ring", "a disc")
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


def test_batches_match_the_generated_pairs():
    data = PhrasePairs("test", 0, 40)
    batch = data.batch([3, 11])
    pair = make_phrase_pair("test", 0, 11)
    assert batch.labels[1] == int(pair.relation) and batch.groups[1] == pair.relation.name.lower()
    assert batch.references[1] == (pair.first, pair.second) and batch.images is None
    assert UNKNOWN not in batch.tokens
    words = [token for token in batch.text.tokens(1) if token]
    assert words == f"{pair.first} {pair.second}".split()
    assert data.classes[data.batch([0]).labels[0]] == data.batch([0]).groups[0]
