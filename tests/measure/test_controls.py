import torch

from overt.attention import AttentionMap, words
from overt.measure import entropy, shuffled, uniform


def test_uniform_spreads_over_visible_keys(generator):
    seen = torch.rand(5, 4, 6, generator=generator) > 0.4
    seen[0, 0] = False
    scores = torch.randn(5, 2, 3, 4, 6, generator=generator)
    even = uniform(AttentionMap.from_scores(scores, words(6), words(4), seen)).check()
    for b in range(5):
        for q in range(4):
            count = int(seen[b, q].sum())
            expected = torch.where(seen[b, q], 1 / max(count, 1), 0.0)
            torch.testing.assert_close(even.weights[b, 1, 2, q], expected)


def test_shuffled_moves_the_weights_of_each_row_among_visible_keys(generator):
    seen = torch.rand(30, 8, generator=generator) > 0.3
    scores = torch.randn(30, 1, 1, 1, 8, generator=generator)
    made = AttentionMap.from_scores(scores, words(8), mask=seen[:, None])
    moved = shuffled(made, generator).check()
    assert torch.equal(moved.weights.sort(dim=-1).values, made.weights.sort(dim=-1).values)
    torch.testing.assert_close(entropy(moved), entropy(made))
    assert not torch.equal(moved.weights, made.weights)
    again = shuffled(made, torch.Generator().manual_seed(3))
    same = shuffled(made, torch.Generator().manual_seed(3))
    assert torch.equal(again.weights, same.weights)


def test_every_visible_place_is_reached_alike(generator):
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(4000, 4)
    seen = torch.tensor([True, False, True, True]).expand(4000, 4)
    moved = shuffled(AttentionMap.from_cells(weights, words(4), seen), generator)
    share = moved.weights.mean(dim=0).flatten()
    assert share[1] == 0
    torch.testing.assert_close(share[[0, 2, 3]], torch.full((3,), 1 / 3), atol=0.03, rtol=0)
