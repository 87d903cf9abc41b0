"""Phrases: the finder that the published code gets wrong, pooling, and comparing."""

import pytest
import torch

from overt.models.vlbert.phrases import (
    Phrases,
    compare,
    grounded_phrases,
    pool,
    runs,
    words_after,
)
from tests.models.vlbert.scenes import pairs
from tests.supervise.stream import truth


def test_t_vgp_10_runs_have_their_starts_and_touching_phrases_stay_apart():
    found = runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0], [3, 3, 4, 4, 0, 1, 2]]))
    assert found.sample.tolist() == [0, 0, 1, 1, 1, 1]
    assert found.span.tolist() == [[1, 3], [5, 6], [0, 2], [2, 4], [5, 6], [6, 7]]
    assert len(runs(torch.zeros(2, 5, dtype=torch.long))) == 0


def test_t_vgp_10_the_published_slip_pools_the_words_after():
    """Tags [0,2,2,0,0,5,0]: it answers (3, two long) and (6, one long)."""
    found = runs(torch.tensor([[0, 2, 2, 0, 0, 5, 0]]))
    assert words_after(found, 7).span.tolist() == [[3, 5], [6, 7]]
    touching = runs(torch.tensor([[1, 1, 2, 2, 3]]))
    after = words_after(touching, 5).span.tolist()
    assert after[0] == touching.span[1].tolist()  # exactly the next phrase
    assert after == [[2, 4], [4, 5], [4, 5]]  # cut at the end of the text, never empty


def test_grounded_phrases_are_runs_of_one_target():
    target = truth([{1: [0], 2: [0], 3: [1], 5: [0, 1]}, {}, {0: [1]}], 6, 2)
    found, wanted = grounded_phrases(target)
    assert found.sample.tolist() == [0, 0, 0, 2]
    assert found.span.tolist() == [[1, 3], [3, 4], [5, 6], [0, 1]]
    assert wanted.tolist() == [[True, False], [False, True], [True, True], [False, True]]
    nothing, none = grounded_phrases(truth([{}, {}], 6, 2))
    assert len(nothing) == 0 and none.shape == (0, 2)


def test_phrases_of_scenes_are_those_that_were_said():
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


def test_t_vgp_12_a_phrase_of_one_token_is_that_token():
    states = torch.randn(2, 5, 3)
    phrases = Phrases(torch.tensor([1, 0]), torch.tensor([[2, 3], [0, 4]]))
    found = pool(states, phrases)
    torch.testing.assert_close(found[0], states[1, 2])
    slow = [max(states[0, token, d].item() for token in range(4)) for d in range(3)]
    assert found[1].tolist() == pytest.approx(slow)
    assert pool(states, Phrases(torch.zeros(0).long(), torch.zeros(0, 2).long())).shape == (0, 3)


def test_t_vgp_12_two_phrases_compared():
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    found, other = compare(first, second), compare(second, first)
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
