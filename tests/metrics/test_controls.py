"""Control maps: uniform, shuffled, center, random and those of other samples."""

import pytest
import torch

from overt.attention import AttentionMap, Form, grid, words
from overt.metrics import (
    center_map,
    entropy,
    other_sample_map,
    random_map,
    shuffled_map,
    uniform_map,
)
from overt.metrics.controls import mean_of_other_maps, transfer_to_keys


def test_uniform_map_covers_visible_keys_equally(generator):
    seen = torch.rand(5, 4, 6, generator=generator) > 0.4
    seen[0, 0] = False
    scores = torch.randn(5, 2, 3, 4, 6, generator=generator)
    even = uniform_map(AttentionMap.from_scores(scores, words(6), words(4), seen)).check()
    for b in range(5):
        for q in range(4):
            count = int(seen[b, q].sum())
            expected = torch.where(seen[b, q], 1 / max(count, 1), 0.0)
            torch.testing.assert_close(even.weights[b, 1, 2, q], expected)


def test_shuffled_map_permutes_the_weights_of_visible_keys(generator):
    seen = torch.rand(30, 8, generator=generator) > 0.3
    scores = torch.randn(30, 1, 1, 1, 8, generator=generator)
    made = AttentionMap.from_scores(scores, words(8), mask=seen[:, None])
    moved = shuffled_map(made, generator).check()
    assert torch.equal(moved.weights.sort(dim=-1).values, made.weights.sort(dim=-1).values)
    torch.testing.assert_close(entropy(moved), entropy(made))
    assert not torch.equal(moved.weights, made.weights)
    again = shuffled_map(made, torch.Generator().manual_seed(3))
    same = shuffled_map(made, torch.Generator().manual_seed(3))
    assert torch.equal(again.weights, same.weights)


def test_shuffling_reaches_every_visible_key_equally_often(generator):
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(4000, 4)
    seen = torch.tensor([True, False, True, True]).expand(4000, 4)
    moved = shuffled_map(AttentionMap.from_cells(weights, words(4), seen), generator)
    share = moved.weights.mean(dim=0).flatten()
    assert share[1] == 0
    torch.testing.assert_close(share[[0, 2, 3]], torch.full((3,), 1 / 3), atol=0.03, rtol=0)


def test_center_map_is_a_gaussian_over_the_image():
    like = AttentionMap.from_cells(torch.rand(2, 15), grid(3, 5))
    made = center_map(like, spread=0.3).check()
    picture = made.weights[0, 0, 0, 0].reshape(3, 5)
    torch.testing.assert_close(picture, picture.flip(0))
    torch.testing.assert_close(picture, picture.flip(1))
    assert int(picture.argmax()) == 7
    y, x = (torch.arange(3) - 1) / 3, (torch.arange(5) - 2) / 5
    expected = (-(y[:, None] ** 2 + x[None] ** 2) / (2 * 0.3**2)).exp()
    torch.testing.assert_close(picture, expected / expected.sum())


def test_center_map_of_a_text_ignores_padding():
    """Padding after a text does not move its center."""
    seen = torch.tensor([[True, True, True, False, False]])
    padded = center_map(AttentionMap.from_cells(torch.rand(1, 5), words(5), seen)).weights
    alone = center_map(AttentionMap.from_cells(torch.rand(1, 3), words(3))).weights
    torch.testing.assert_close(padded[..., :3], alone)
    assert float(alone.flatten()[1]) > float(alone.flatten()[0]) == float(alone.flatten()[2])


def test_center_map_is_zero_at_hidden_keys():
    seen = torch.tensor([[True, True, False]])
    made = center_map(AttentionMap.from_cells(torch.rand(1, 3), words(3), seen)).check()
    assert made.weights[0, 0, 0, 0, 2] == 0
    with pytest.raises(ValueError, match="center|keys of"):
        center_map(AttentionMap.from_cells(torch.rand(1, 5), words(3) + grid(1, 2)))
    with pytest.raises(ValueError, match="spread"):
        center_map(made, spread=0.0)


def test_random_maps_are_seeded_and_uniform_on_average(generator):
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


def test_mean_of_other_maps_leaves_out_the_sample_itself(generator):
    weights = torch.rand(4, 6, generator=generator)
    maps = AttentionMap.from_cells(weights, words(6))
    found = mean_of_other_maps(maps).weights[:, 0, 0, 0]
    each = weights / weights.sum(dim=-1, keepdim=True)
    for b in range(4):
        others = torch.cat([each[:b], each[b + 1 :]]).mean(dim=0)
        torch.testing.assert_close(found[b], others)
    with pytest.raises(ValueError, match="2 samples, got 1"):
        mean_of_other_maps(maps.select(torch.tensor([0])))


def test_each_sample_gets_the_map_of_another(generator):
    made = AttentionMap.from_cells(torch.rand(9, 6, generator=generator), grid(2, 3)).normalize()
    moved = other_sample_map(made, generator).check()
    alike = (moved.weights[:, None] - made.weights[None]).abs().flatten(2).amax(dim=-1) < 1e-6
    assert alike.sum(dim=0).tolist() == [1] * 9  # every map is used once
    assert not alike.diagonal().any()  # and never on its own sample
    same = other_sample_map(made, torch.Generator().manual_seed(3))
    assert torch.equal(
        other_sample_map(made, torch.Generator().manual_seed(3)).weights, same.weights
    )
    with pytest.raises(ValueError, match="2 samples, got 1"):
        other_sample_map(made.select(torch.tensor([0])), generator)


def test_words_are_transferred_by_order():
    """The first word goes to the first, independent of padding; missing words get no weight."""
    weights = torch.tensor([[0.0, 0.5, 0.3, 0.2], [0.6, 0.4, 0.0, 0.0]])
    seen = torch.tensor([[False, True, True, True], [True, True, False, False]])
    maps = AttentionMap.from_cells(weights, words(4), seen)
    like = AttentionMap.from_cells(
        torch.ones(2, 5),
        words(5),
        torch.tensor([[True, True, False, False, False], [False, True, True, True, True]]),
    )
    found = transfer_to_keys(maps, like).check().weights[:, 0, 0, 0]
    expected = torch.tensor([[0.625, 0.375, 0, 0, 0], [0, 0.6, 0.4, 0, 0]])
    torch.testing.assert_close(found, expected)


def test_cells_are_transferred_to_the_same_cell():
    maps = AttentionMap.from_cells(torch.tensor([[1.0, 2, 3, 4]]), grid(2, 2)).normalize()
    like = AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2))
    torch.testing.assert_close(transfer_to_keys(maps, like).weights, maps.weights)
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(2, 3\)"):
        transfer_to_keys(maps, AttentionMap.from_cells(torch.ones(1, 6), grid(2, 3)))
    with pytest.raises(ValueError, match="1 and 2"):
        transfer_to_keys(maps, AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2)))


def test_keys_at_the_same_distance_from_the_center_tie():
    """Rounding must not order them, or ranks of the control would be noise."""
    for shape in ((3, 3), (5, 6), (7, 3)):
        found = center_map(
            AttentionMap.from_cells(torch.ones(1, shape[0] * shape[1]), grid(*shape))
        )
        drawn = found.weights.reshape(shape)
        assert torch.equal(drawn, drawn.flip(0)) and torch.equal(drawn, drawn.flip(1))
    for count in range(1, 20):
        text = center_map(
            AttentionMap.from_cells(torch.ones(1, count), words(count))
        ).weights.flatten()
        assert torch.equal(text, text.flip(0))
