import pytest
import torch

from overt.attention import Kind
from overt.data.scenes.caption_templates import Construction
from overt.data.scenes.captions import CAPTIONS_PER_SCENE, CaptionScenes, make_captions
from overt.data.scenes.claims import parse_claims
from overt.data.scenes.noun_phrases import parse_phrase
from overt.data.scenes.render import render
from overt.data.scenes.world import random_scene, remove_thing
from overt.data.vocabulary import BEGIN, END, PAD, UNKNOWN
from overt.errors import UserError
from overt.geometry import RegionGeometry

SCENES = [random_scene("train", 0, index) for index in range(60)]
DATA = CaptionScenes("val", 0, 12)


def test_each_scene_has_five_true_captions_of_five_constructions():
    for shown in SCENES:
        captions = make_captions(shown)
        assert {one.construction for one in captions} == set(Construction)
        assert len({one.text for one in captions}) == CAPTIONS_PER_SCENE == 5
        for one in captions:
            assert one.holds(shown)
            assert parse_claims(one.text) == one.claims  # parsed from the words only


def test_words_spans_and_phrases_match_the_text():
    for shown in SCENES:
        for one in make_captions(shown):
            cut = tuple(one.text[start:end] for start, end in one.spans)
            assert cut == one.words
            for phrase in one.phrases:
                words = one.words[phrase.start_word : phrase.end_word]
                assert words and words[0] in "a an the every all most".split() + NUMBERS
                if phrase.what:
                    assert parse_phrase(" ".join(words)) == phrase.what
                for i in phrase.things:
                    thing = shown.things[i]
                    assert all(getattr(thing, name) == value for name, value in phrase.what)
                if words[0] == "the":
                    assert len(phrase.things) == 1


NUMBERS = "one two three four five six seven eight".split()


def test_caption_is_false_without_the_objects_of_a_phrase():
    tried = 0
    for shown in SCENES:
        for one in make_captions(shown):
            for phrase in one.phrases:
                if not phrase.things:
                    assert {"background", "picture"} & {*one.words}
                    continue
                bare = shown
                for i in sorted(phrase.things, reverse=True):
                    bare = remove_thing(bare, i)
                assert not one.holds(bare)
                tried += 1
    assert tried > 300


def test_captions_depend_only_on_the_scene_and_differ_by_split():
    again = random_scene("train", 0, 7)
    assert make_captions(again) == make_captions(SCENES[7])
    texts = [
        {one.text for one in make_captions(random_scene(s, 0, 7))} for s in ("train", "val", "test")
    ]
    assert texts[0] != texts[1] != texts[2]


def test_batches_have_one_sample_per_caption():
    batch = DATA.batch([2, 5])
    assert len(batch) == 10 and batch.images.shape == (2, 3, 64, 64)
    assert batch.image_of.tolist() == [0] * 5 + [1] * 5
    assert batch.ids[6] == "scenes-captions-val-0-000005-1"
    captions = make_captions(DATA.scene(5))
    assert batch.references[7] == tuple(one.text for one in captions)
    assert batch.text.texts[5:] == batch.references[7]
    assert batch.groups[5:] == tuple(one.construction.value for one in captions)
    assert torch.equal(
        batch.images[1], torch.from_numpy(render(DATA.scene(5), 64).image).permute(2, 0, 1)
    )
    for row, one in enumerate(captions, start=5):
        tokens = batch.tokens[row][batch.token_mask[row]].tolist()
        assert tokens == [BEGIN, *DATA.vocabulary.encode(one.words), END]
        assert UNKNOWN not in tokens and (batch.tokens[row][~batch.token_mask[row]] == PAD).all()
        shown = [token for token in batch.text.tokens(row) if token]
        assert shown == list(one.words)


def test_target_marks_the_regions_of_each_word():
    batch = DATA.batch(range(12))
    target = batch.target.check()
    assert target.kind is Kind.PROBABILITY
    row = 0
    for index in range(12):
        boxes = torch.from_numpy(render(DATA.scene(index), 64).boxes)
        overlap = RegionGeometry(boxes[None]).overlap(batch.boxes[row : row + 1])[0]
        for one in make_captions(DATA.scene(index)):
            expected = torch.zeros(target.values.shape[-2:])
            for phrase in one.phrases:
                for word in range(phrase.start_word, phrase.end_word):
                    for region in range(overlap.shape[0]):
                        if any(overlap[region, thing] >= 0.5 for thing in phrase.things):
                            expected[word + 1, region] = 1
            assert torch.equal(target.rows[row], expected.any(dim=-1))
            expected = expected / expected.sum(dim=-1, keepdim=True).clamp_min(1)
            torch.testing.assert_close(target.weights[row, 0, 0], expected)
            row += 1
    assert row == len(batch)


def test_fewer_captions_keep_all_references():
    batch = CaptionScenes("val", 0, 12, each=1).batch([3, 4])
    assert len(batch) == 2 and all(len(texts) == 5 for texts in batch.references)
    assert batch.text.texts[0] == batch.references[0][0]


@pytest.mark.parametrize("wrong", [{"each": 6}, {"each": 0}, {"size": 8}])
def test_invalid_settings_raise(wrong):
    with pytest.raises(UserError):
        CaptionScenes("val", 0, 3, **wrong)
