"""Phrases: finding runs of tags (wrong in the published code), pooling, pair features."""

import pytest
import torch

from overt.nn.vlbert.phrases import (
    PhraseSpans,
    following_tokens,
    grounded_phrases,
    pair_features,
    pool_phrases,
    tag_runs,
)
from tests.losses.stream import make_target
from tests.nn.vlbert.scenes import pairs


def test_t_vgp_10_tag_runs_have_starts_and_adjacent_phrases_stay_separate():
    found = tag_runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0], [3, 3, 4, 4, 0, 1, 2]]))
    assert found.sample.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.span.tolist() == [[1, 3], [5, 6], [0, 2], [2, 4], [5, 6], [6, 7]]
    assert len(tag_runs(torch.zeros(2, 5, dtype=torch.long))) == 0


def test_t_vgp_10_the_published_bug_pools_the_following_words():
    """For tags [0,2,2,0,0,5,0] it returns (3, length two) and (6, length one)."""
    found = tag_runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0]]))
    assert following_tokens(found, 7).span.tolist() == [[3, 5], [6, 7]]
    touching = tag_runs(torch.tensor([[1, 1, 2, 2, 3]]))
    after = following_tokens(touching, 5).span.tolist()
    assert after[0] == touching.span[1].tolist()  # exactly the next phrase
    assert after == [[2, 4], [4, 5], [4, 5]]  # cut at the end of the text, never empty


def test_grounded_phrases_are_runs_of_one_target():
    target = make_target([{1: [0], 2: [0], 3: [1], 5: [0, 1]}, {}, {0: [1]}], 6, 2)
    found, wanted = grounded_phrases(target)
    assert found.sample.tolist() == [0, 0, 0, 2]
    assert found.span.tolist() == [[1, 3], [3, 4], [5, 6], [0, 1]]
    assert wanted.tolist() == [[True, False], [False, True], [True, True], [False, True]]
    nothing, none = grounded_phrases(make_target([{}, {}], 6, 2))
    assert len(nothing) == 0 and none.shape == (0, 2)


def test_grounded_phrases_of_scenes_equal_the_caption_phrases():
    data = pairs()
    given = data.batch(range(8))
    found, wanted = grounded_phrases(given.target)
    ours = {(int(s), *span) for s, span in zip(found.sample, found.span.tolist(), strict=True)}
    for row in range(8):
        pair = data._item(row).pair
        skip = len(pair.first.words) + 2
        said = []
        if pair.describes.name != "SECOND":
            said += [(p.start_word + 1, p.end_word + 1, p.things) for p in pair.first.phrases]
        if pair.describes.name != "FIRST":
            said += [
                (p.start_word + skip, p.end_word + skip, p.things) for p in pair.second.phrases
            ]
        for start, end, things in said:
            assert ((row, start, end) in ours) is bool(things)
    assert wanted.any(dim=-1).all()


def test_t_vgp_12_pooling_a_phrase_of_one_token_returns_that_token():
    states = torch.randn(2, 5, 3)
    phrases = PhraseSpans(torch.tensor([1, 0]), torch.tensor([[2, 3], [0, 4]]))
    found = pool_phrases(states, phrases)
    torch.testing.assert_close(found[0], states[1, 2])
    slow = [max(states[0, token, d].item() for token in range(4)) for d in range(3)]
    assert found[1].tolist() == pytest.approx(slow)
    assert pool_phrases(
        states, PhraseSpans(torch.zeros(0).long(), torch.zeros(0, 2).long())
    ).shape == (0, 3)


def test_t_vgp_12_pair_features_of_two_phrases():
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    found, other = pair_features(first, second), pair_features(second, first)
    assert found.shape == (4, 12)
    torch.testing.assert_close(found[:, 6:], other[:, 6:])  # product and difference
    torch.testing.assert_close(found[:, :3], other[:, 3:6])
    slow = [
        *first[0].tolist(),
        *second[0].tolist(),
        *(a * b for a, b in zip(first[0].tolist(), second[0].tolist(), strict=True)),
        *(abs(a - b) for a, b in zip(first[0].tolist(), second[0].tolist(), strict=True)),
    ]
    assert found[0].tolist() == pytest.approx(slow)
