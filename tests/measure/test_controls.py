import pytest
import torch

from overt.attention import AttentionMap, Form, grid, words
from overt.measure import centre, entropy, mean_of_others, random_map, shuffled, uniform


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


def test_the_centre_is_a_gaussian_over_the_picture():
    like = AttentionMap.from_cells(torch.rand(2, 15), grid(3, 5))
    made = centre(like, spread=0.3).check()
    picture = made.weights[0, 0, 0, 0].reshape(3, 5)
    torch.testing.assert_close(picture, picture.flip(0))
    torch.testing.assert_close(picture, picture.flip(1))
    assert int(picture.argmax()) == 7
    y, x = (torch.arange(3) - 1) / 3, (torch.arange(5) - 2) / 5
    expected = (-(y[:, None] ** 2 + x[None] ** 2) / (2 * 0.3**2)).exp()
    torch.testing.assert_close(picture, expected / expected.sum())


def test_the_middle_of_a_text_is_that_of_its_words():
    """Padding behind a text, as long as it may be, moves nothing."""
    seen = torch.tensor([[True, True, True, False, False]])
    padded = centre(AttentionMap.from_cells(torch.rand(1, 5), words(5), seen)).weights
    alone = centre(AttentionMap.from_cells(torch.rand(1, 3), words(3))).weights
    torch.testing.assert_close(padded[..., :3], alone)
    assert float(alone.flatten()[1]) > float(alone.flatten()[0]) == float(alone.flatten()[2])


def test_the_centre_keeps_off_what_may_not_be_seen():
    seen = torch.tensor([[True, True, False]])
    made = centre(AttentionMap.from_cells(torch.rand(1, 3), words(3), seen)).check()
    assert made.weights[0, 0, 0, 0, 2] == 0
    with pytest.raises(ValueError, match="have a middle"):
        centre(AttentionMap.from_cells(torch.rand(1, 5), words(3) + grid(1, 2)))
    with pytest.raises(ValueError, match="no width"):
        centre(made, spread=0.0)


def test_random_maps_are_even_in_the_mean_and_seeded(generator):
    seen = torch.tensor([True, False, True, True]).expand(6000, 4)
    like = AttentionMap.from_scores(torch.zeros(6000, 1, 1, 1, 4), words(4), mask=seen[:, None])
    made = random_map(like, generator).check()
    assert made.form is Form.PLAIN
    share = made.weights.mean(dim=0).flatten()
    torch.testing.assert_close(share, torch.tensor([1, 0, 1, 1]) / 3, atol=0.02, rtol=0)
    # uniform on the simplex of three: a share has the variance of Beta(1, 2)
    assert float(made.weights[..., 0].var()) == pytest.approx(1 / 18, abs=0.003)
    one, two = (random_map(like, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one.weights, two.weights)


def test_the_mean_of_others_leaves_oneself_out(generator):
    weights = torch.rand(4, 6, generator=generator)
    maps = AttentionMap.from_cells(weights, words(6))
    found = mean_of_others(maps).weights[:, 0, 0, 0]
    each = weights / weights.sum(dim=-1, keepdim=True)
    for b in range(4):
        others = torch.cat([each[:b], each[b + 1 :]]).mean(dim=0)
        torch.testing.assert_close(found[b], others)
    with pytest.raises(ValueError, match="two samples"):
        mean_of_others(maps.select(torch.tensor([0])))
