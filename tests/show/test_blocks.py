"""Blocks of every head: the right weights, of maps and watched models, and no more than asked."""

import numpy as np
import pytest
import torch

from overt import watch
from overt.attention import AttentionMap, Layout, Span, words
from overt.capture.call import Call
from overt.show.blocks import ROWS, Blocks, shrunk
from tests.show.maps import Attend


@pytest.fixture
def seen():
    torch.manual_seed(0)
    model = Attend().eval()
    layout = words(3) + Layout((Span("image", (2, 2), slice(0, 4)),), 4)
    with torch.no_grad(), watch(model, layout=layout) as seen:
        model(torch.randn(2, 7, 8))
    return seen


@pytest.mark.parametrize(
    ("query", "key"), [(None, None), ("text", "image"), (range(1, 6, 2), range(4)), ("text", None)]
)
def test_a_watched_model_and_its_map_have_the_same_blocks(seen, query, key):
    whole = seen.map()
    one, two = (Blocks(source, query, key, row=1) for source in (seen, whole))
    at, to = one.places
    for layer in range(2):
        for head in range(2):
            slow = whole.weights[1, layer, head][at][:, to].numpy()
            for blocks in (one, two):
                assert blocks.shape == slow.shape
                np.testing.assert_allclose(blocks.whole(layer, head), slow, atol=1e-6)
                np.testing.assert_allclose(blocks.rows(layer, head, [1]), slow[[1]], atol=1e-6)


def test_positions_that_a_sample_lacks_have_no_weight_and_no_name():
    layout = Layout((Span("text", (3,), torch.tensor([[0, 2, -1]])),), 3)
    values = torch.full((1, 1, 1, 3, 3), -1.0)
    for source in (
        AttentionMap(values.exp(), layout, layout),
        AttentionMap.from_scores(values, layout, layout),  # logarithms
    ):
        found = Blocks(source, "text", "text").whole(0, 0)
        assert (found[:2, :2] > 0).all()
        assert not found[2].any() and not found[:, 2].any()
        assert Blocks(source, "text").names()[0][2] == ""


def test_names_come_from_the_layout_or_are_given(seen):
    assert Blocks(seen, range(2), "image").names() == (
        ("text 0", "text 1"),
        ("image 0,0", "image 0,1", "image 1,0", "image 1,1"),
    )
    assert Blocks(seen, range(2), range(5, 7)).names("abcdefg") == (("a", "b"), ("f", "g"))
    assert Blocks(seen).layer_names == ("layers.0", "layers.1")
    with pytest.raises(ValueError, match="3 tokens for 7 positions"):
        Blocks(seen).names("abc")


def test_coarse_is_the_largest_of_each_patch_whatever_the_portion(monkeypatch):
    weights = torch.rand(1, 1, 1, 23, 17)
    blocks = Blocks(AttentionMap(weights, words(17), words(23), kind=_amount()))
    slow = np.zeros((6, 4), np.float32)
    for q in range(23):
        for k in range(17):
            slow[q // 4, k // 5] = max(slow[q // 4, k // 5], float(weights[0, 0, 0, q, k]))
    for rows in (256, 8, 5):
        monkeypatch.setattr("overt.show.blocks.ROWS", rows)
        np.testing.assert_array_equal(blocks.whole(0, 0, 4, 5), slow)
    np.testing.assert_array_equal(shrunk(slow, 1, 1), slow)


def test_a_small_picture_costs_its_own_rows(monkeypatch):
    counted = []
    plain = Call.log_weights

    def watched(self, *where):
        found = plain(self, *where)
        counted.append(found.numel())
        return found

    monkeypatch.setattr(Call, "log_weights", watched)
    model = Attend().eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 700, 8))
    blocks = Blocks(seen)
    picture = blocks.sample(1, 0, side=40)
    assert picture.shape == (39, 39) and sum(counted) == 39 * 700
    counted.clear()
    blocks.whole(1, 1)
    assert max(counted) <= ROWS * 700


def test_what_is_not_there_is_said(seen):
    with pytest.raises(ValueError, match="positions 0 to 6, not all of"):
        Blocks(seen, range(5, 9))
    with pytest.raises(ValueError, match="samples 0 to 1, not 2"):
        Blocks(seen, row=2)
    with pytest.raises(ValueError, match="dog"):
        Blocks(seen, "dog").shape  # noqa: B018


def _amount():
    from overt.attention import Kind

    return Kind.AMOUNT
