from collections import Counter

import numpy as np
import torch

from overt.data.scenes.captions import CaptionScenes
from overt.data.scenes.claims import true_of
from overt.data.scenes.constructions import Construction
from overt.data.scenes.language import read
from overt.data.scenes.pairs import CaptionPairScenes, Describes, _telling, caption_pair
from overt.data.scenes.relations import relation
from overt.data.scenes.world import ATTRIBUTES, Dice, changed, scene
from overt.data.vocabulary import BEGIN, END

PAIRS = [caption_pair("train", 0, index) for index in range(240)]
DATA = CaptionPairScenes("val", 0, 30)


def test_the_label_says_which_captions_are_true_by_their_words():
    for pair in PAIRS:
        true = (true_of(pair.first.text, pair.scene), true_of(pair.second.text, pair.scene))
        expected = {
            Describes.BOTH: (True, True),
            Describes.FIRST: (True, False),
            Describes.SECOND: (False, True),
        }
        assert true == expected[pair.describes]
        assert pair.first.text != pair.second.text
        for said, so in zip((pair.first, pair.second), true, strict=True):
            assert true_of(said.text, pair.other) is not so


def test_the_other_scene_differs_in_one_attribute_of_one_thing():
    for pair in PAIRS:
        different = [
            (i, name)
            for i, (ours, theirs) in enumerate(
                zip(pair.scene.things, pair.other.things, strict=True)
            )
            for name in (*ATTRIBUTES, "x", "y", "shade")
            if getattr(ours, name) != getattr(theirs, name)
        ]
        assert [name for _, name in different] == [pair.attribute]
        assert pair.scene.background == pair.other.background


def test_labels_are_even():
    assert set(Counter(pair.describes for pair in PAIRS).values()) == {80}


def test_a_caption_alone_does_not_tell_that_it_is_false():
    """False captions speak in the same ways, and are as long, as the true ones."""
    one_true = [pair for pair in PAIRS if pair.describes is not Describes.BOTH]
    true, false = [], []
    for pair in one_true:
        both = (pair.first, pair.second)
        first = pair.describes is Describes.FIRST
        true.append(both[not first])
        false.append(both[first])
    for how in Construction:
        ours, theirs = (sum(c.construction is how for c in said) for said in (true, false))
        assert abs(ours - theirs) < 4 * np.sqrt(ours + theirs + 1)
    lengths = [np.mean([len(c.words) for c in said]) for said in (true, false)]
    assert abs(lengths[0] - lengths[1]) < 1


def test_a_telling_caption_is_found_where_only_a_count_tells():
    shown = scene("train", 0, 0)
    twin = shown.things[0]
    for i in range(1, len(shown.things)):
        alike = {name: getattr(twin, name) for name in ("shape", "size", "texture")}
        shown = changed(shown, i, **alike)
    color = "red" if twin.color != "red" else "blue"
    other = changed(shown, 0, color=color)
    for n in range(5):
        said = _telling(shown, other, 0, "color", Dice(np.random.default_rng(n)))
        assert said.holds(shown) and not said.holds(other)


def test_a_batch_of_pairs():
    batch = DATA.batch(range(30))
    batch.target.check()
    for row in range(30):
        pair = caption_pair("val", 0, row)
        assert batch.labels[row] == int(pair.describes) and batch.groups[row] == pair.attribute
        assert batch.references[row] == (pair.first.text, pair.second.text)
        encode = DATA.vocabulary.encode
        tokens = [BEGIN, *encode(pair.first.words), END, *encode(pair.second.words), END]
        assert batch.tokens[row][batch.token_mask[row]].tolist() == tokens
        said = [token for token in batch.text.tokens(row) if token]
        assert said == [*pair.first.words, *pair.second.words]
        cut = len(pair.first.words) + 2
        grounded = batch.target.rows[row]
        things = [any(p.things for p in one.phrases) for one in (pair.first, pair.second)]
        assert bool(grounded[:cut].any()) is (things[0] and pair.describes != Describes.SECOND)
        assert bool(grounded[cut:].any()) is (things[1] and pair.describes != Describes.FIRST)
        for phrase in pair.second.phrases if pair.describes == Describes.BOTH else ():
            words = slice(cut + phrase.start_word, cut + phrase.end_word)
            assert grounded[words].all() == bool(phrase.things)


def test_phrases_of_two_true_captions_with_their_relation():
    batch, found = DATA.batch(range(30)), DATA.phrases(range(30))
    assert len(found.sample) > 5
    for row, first, second, label in zip(
        found.sample.tolist(), found.first, found.second, found.relation.tolist(), strict=True
    ):
        assert batch.labels[row] == Describes.BOTH
        tokens = batch.text.tokens(row)
        ours, theirs = (" ".join(tokens[a:b]) for a, b in (first.tolist(), second.tolist()))
        assert relation(read(ours), read(theirs)) == label
        assert ours in batch.references[row][0] and theirs in batch.references[row][1]
    samples = {row for row in range(30) if batch.labels[row] == Describes.BOTH}
    assert set(found.sample.tolist()) <= samples
    none = DATA.phrases([row for row in range(30) if row not in samples])
    assert none.first.shape == (0, 2) and none.relation.shape == (0,)


def test_batches_are_pure_and_the_digest_knows_the_settings():
    again = CaptionPairScenes("val", 0, 30)
    assert torch.equal(again.batch([7, 2]).images, DATA.batch([2, 7]).images.flip(0))
    assert again.digest() == DATA.digest() != CaptionPairScenes("val", 0, 30, regions=20).digest()
    assert len(again) == 30 and again.classes == ("both", "first", "second")
    assert DATA.digest() != CaptionScenes("val", 0, 30).digest()
