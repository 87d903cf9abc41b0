import pickle

import pytest
import torch

from overt.attention import Kind
from overt.data.scenes.captions import CAPTIONS, CaptionScenes, captions
from overt.data.scenes.claims import claims
from overt.data.scenes.constructions import Construction
from overt.data.scenes.language import read
from overt.data.scenes.render import render
from overt.data.scenes.world import scene, without
from overt.data.vocabulary import BEGIN, END, PAD, UNKNOWN
from overt.errors import BadInput
from overt.geometry import RegionGeometry

SCENES = [scene("train", 0, index) for index in range(60)]
DATA = CaptionScenes("val", 0, 12)


def test_five_captions_of_five_constructions_all_true():
    for shown in SCENES:
        said = captions(shown)
        assert {one.construction for one in said} == set(Construction)
        assert len({one.text for one in said}) == CAPTIONS == 5
        for one in said:
            assert one.holds(shown)
            assert claims(one.text) == one.claims  # read from the words alone


def test_words_spans_and_phrases_agree_with_the_text():
    for shown in SCENES:
        for one in captions(shown):
            cut = tuple(one.text[start:end] for start, end in one.spans)
            assert cut == one.words
            for phrase in one.phrases:
                words = one.words[phrase.start_word : phrase.end_word]
                assert words and words[0] in "a an the every all most".split() + NUMBERS
                if phrase.what:
                    assert read(" ".join(words)) == phrase.what
                for i in phrase.things:
                    thing = shown.things[i]
                    assert all(getattr(thing, name) == value for name, value in phrase.what)
                if words[0] == "the":
                    assert len(phrase.things) == 1


NUMBERS = "one two three four five six seven eight".split()


def test_without_the_things_of_a_phrase_the_caption_is_false():
    tried = 0
    for shown in SCENES:
        for one in captions(shown):
            for phrase in one.phrases:
                if not phrase.things:
                    assert {"background", "picture"} & {*one.words}
                    continue
                bare = shown
                for i in sorted(phrase.things, reverse=True):
                    bare = without(bare, i)
                assert not one.holds(bare)
                tried += 1
    assert tried > 300


def test_captions_follow_from_the_scene_alone_and_splits_differ():
    again = scene("train", 0, 7)
    assert captions(again) == captions(SCENES[7])
    texts = [{one.text for one in captions(scene(s, 0, 7))} for s in ("train", "val", "test")]
    assert texts[0] != texts[1] != texts[2]


def test_a_batch_has_one_sample_a_caption():
    batch = DATA.batch([2, 5])
    assert len(batch) == 10 and batch.images.shape == (2, 3, 64, 64)
    assert batch.image_of.tolist() == [0] * 5 + [1] * 5
    assert batch.ids[6] == "scenes-captions-val-0-000005-1"
    said = captions(DATA.scene(5))
    assert batch.references[7] == tuple(one.text for one in said)
    assert batch.text.texts[5:] == batch.references[7]
    assert batch.groups[5:] == tuple(one.construction.value for one in said)
    assert torch.equal(
        batch.images[1], torch.from_numpy(render(DATA.scene(5), 64).image).permute(2, 0, 1)
    )
    for row, one in enumerate(said, start=5):
        tokens = batch.tokens[row][batch.token_mask[row]].tolist()
        assert tokens == [BEGIN, *DATA.vocabulary.encode(one.words), END]
        assert UNKNOWN not in tokens and (batch.tokens[row][~batch.token_mask[row]] == PAD).all()
        shown = [token for token in batch.text.tokens(row) if token]
        assert shown == list(one.words)


def test_the_target_says_which_regions_each_word_speaks_of():
    batch = DATA.batch(range(12))
    target = batch.target.check()
    assert target.kind is Kind.PROBABILITY
    row = 0
    for index in range(12):
        boxes = torch.from_numpy(render(DATA.scene(index), 64).boxes)
        overlap = RegionGeometry(boxes[None]).overlap(batch.boxes[row : row + 1])[0]
        for one in captions(DATA.scene(index)):
            wanted = torch.zeros(target.values.shape[-2:])
            for phrase in one.phrases:
                for word in range(phrase.start_word, phrase.end_word):
                    for region in range(overlap.shape[0]):
                        if any(overlap[region, thing] >= 0.5 for thing in phrase.things):
                            wanted[word + 1, region] = 1
            assert torch.equal(target.rows[row], wanted.any(dim=-1))
            wanted = wanted / wanted.sum(dim=-1, keepdim=True).clamp_min(1)
            torch.testing.assert_close(target.weights[row, 0, 0], wanted)
            row += 1
    assert row == len(batch)


def test_batches_are_pure():
    one, other = DATA.batch([1, 4]), CaptionScenes("val", 0, 12).batch([4, 1])
    assert torch.equal(one.images, other.images.flip(0))
    assert one.references[0] == other.references[5]
    copy = pickle.loads(pickle.dumps(DATA))  # noqa: S301
    assert torch.equal(copy.batch([4]).images, DATA.batch([4]).images)


def test_fewer_captions_keep_all_references():
    batch = CaptionScenes("val", 0, 12, each=1).batch([3, 4])
    assert len(batch) == 2 and all(len(texts) == 5 for texts in batch.references)
    assert batch.text.texts[0] == batch.references[0][0]


def test_the_digest_knows_every_setting():
    made = [
        DATA,
        CaptionScenes("test", 0, 12),
        CaptionScenes("val", 1, 12),
        CaptionScenes("val", 0, 13),
        CaptionScenes("val", 0, 12, size=48),
        CaptionScenes("val", 0, 12, regions=10),
        CaptionScenes("val", 0, 12, each=2),
    ]
    assert len({data.digest() for data in made}) == len(made)
    assert CaptionScenes("val", 0, 12).digest() == DATA.digest()


@pytest.mark.parametrize(
    "wrong",
    [{"split": "dev"}, {"seed": -1}, {"count": 0}, {"each": 6}, {"each": 0}, {"size": 8}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(BadInput):
        CaptionScenes(**({"split": "val", "seed": 0, "count": 3} | wrong))


def test_an_item_that_is_not_there_is_refused():
    with pytest.raises(BadInput, match="item 12 is not one of"):
        DATA.batch([12])
