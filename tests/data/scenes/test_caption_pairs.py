from collections import Counter

import numpy as np

from overt.data.scenes.caption_pairs import (
    CaptionPairScenes,
    MatchingCaption,
    _distinguishing_caption,
    make_caption_pair,
)
from overt.data.scenes.caption_templates import Construction
from overt.data.scenes.claims import is_true_caption
from overt.data.scenes.noun_phrases import parse_phrase
from overt.data.scenes.phrase_relations import phrase_relation
from overt.data.scenes.world import ATTRIBUTES, Dice, change_thing, random_scene
from overt.data.vocabulary import BEGIN, END

PAIRS = [make_caption_pair("train", 0, index) for index in range(240)]
DATA = CaptionPairScenes("val", 0, 30)


def test_label_matches_the_truth_of_the_captions():
    for pair in PAIRS:
        true = (
            is_true_caption(pair.first.text, pair.scene),
            is_true_caption(pair.second.text, pair.scene),
        )
        expected = {
            MatchingCaption.BOTH: (True, True),
            MatchingCaption.FIRST: (True, False),
            MatchingCaption.SECOND: (False, True),
        }
        assert true == expected[pair.describes]
        assert pair.first.text != pair.second.text
        for caption, expected in zip((pair.first, pair.second), true, strict=True):
            assert is_true_caption(caption.text, pair.other) is not expected


def test_other_scene_differs_in_one_attribute_of_one_object():
    for pair in PAIRS:
        different = [
            (i, name)
            for i, (first, second) in enumerate(
                zip(pair.scene.things, pair.other.things, strict=True)
            )
            for name in (*ATTRIBUTES, "x", "y", "shade")
            if getattr(first, name) != getattr(second, name)
        ]
        assert [name for _, name in different] == [pair.attribute]
        assert pair.scene.background == pair.other.background


def test_labels_are_balanced():
    assert set(Counter(pair.describes for pair in PAIRS).values()) == {80}


def test_true_and_false_captions_have_the_same_style():
    """False captions have the same constructions and lengths as true ones."""
    one_true = [pair for pair in PAIRS if pair.describes is not MatchingCaption.BOTH]
    true, false = [], []
    for pair in one_true:
        both = (pair.first, pair.second)
        first = pair.describes is MatchingCaption.FIRST
        true.append(both[not first])
        false.append(both[first])
    for how in Construction:
        n_true, n_false = (
            sum(c.construction is how for c in captions) for captions in (true, false)
        )
        assert abs(n_true - n_false) < 4 * np.sqrt(n_true + n_false + 1)
    lengths = [np.mean([len(c.words) for c in captions]) for captions in (true, false)]
    assert abs(lengths[0] - lengths[1]) < 1


def test_distinguishing_caption_can_use_a_count():
    shown = random_scene("train", 0, 0)
    twin = shown.things[0]
    for i in range(1, len(shown.things)):
        alike = {name: getattr(twin, name) for name in ("shape", "size", "texture")}
        shown = change_thing(shown, i, **alike)
    color = "red" if twin.color != "red" else "blue"
    other = change_thing(shown, 0, color=color)
    for n in range(5):
        caption = _distinguishing_caption(shown, other, 0, "color", Dice(np.random.default_rng(n)))
        assert caption.holds(shown) and not caption.holds(other)


def test_batches_match_the_generated_pairs():
    batch = DATA.batch(range(30))
    batch.target.check()
    assert DATA.classes == ("both", "first", "second")
    for row in range(30):
        pair = make_caption_pair("val", 0, row)
        assert batch.labels[row] == int(pair.describes) and batch.groups[row] == pair.attribute
        assert batch.references[row] == (pair.first.text, pair.second.text)
        encode = DATA.vocabulary.encode
        tokens = [BEGIN, *encode(pair.first.words), END, *encode(pair.second.words), END]
        assert batch.tokens[row][batch.token_mask[row]].tolist() == tokens
        words = [token for token in batch.text.tokens(row) if token]
        assert words == [*pair.first.words, *pair.second.words]
        cut = len(pair.first.words) + 2
        grounded = batch.target.rows[row]
        things = [any(p.things for p in one.phrases) for one in (pair.first, pair.second)]
        assert bool(grounded[:cut].any()) is (
            things[0] and pair.describes != MatchingCaption.SECOND
        )
        assert bool(grounded[cut:].any()) is (things[1] and pair.describes != MatchingCaption.FIRST)
        for phrase in pair.second.phrases if pair.describes == MatchingCaption.BOTH else ():
            span = slice(cut + phrase.start_word, cut + phrase.end_word)
            assert grounded[span].all() == bool(phrase.things)


def test_phrases_of_two_true_captions_have_their_relation():
    batch, found = DATA.batch(range(30)), DATA.phrases(range(30))
    assert len(found.sample) > 5
    for row, first, second, label in zip(
        found.sample.tolist(), found.first, found.second, found.relation.tolist(), strict=True
    ):
        assert batch.labels[row] == MatchingCaption.BOTH
        tokens = batch.text.tokens(row)
        one, other = (" ".join(tokens[a:b]) for a, b in (first.tolist(), second.tolist()))
        assert phrase_relation(parse_phrase(one), parse_phrase(other)) == label
        assert one in batch.references[row][0] and other in batch.references[row][1]
    samples = {row for row in range(30) if batch.labels[row] == MatchingCaption.BOTH}
    assert set(found.sample.tolist()) <= samples
    none = DATA.phrases([row for row in range(30) if row not in samples])
    assert none.first.shape == (0, 2) and none.relation.shape == (0,)
