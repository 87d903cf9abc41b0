"""Weight blocks of each head: values from maps and watched models, names and memory."""

import numpy as np
import pytest
import torch

from overt import watch
from overt.attention import AttentionMap, Layout, Span, words
from overt.capture.call import Call
from overt.viz.block_grid import CHUNK_ROWS, HeadBlocks, max_pool
from tests.viz.maps import SelfAttention


@pytest.fixture
def trace():
    torch.manual_seed(0)
    model = SelfAttention().eval()
    layout = words(3) + Layout((Span("image", (2, 2), slice(0, 4)),), 4)
    with torch.no_grad(), watch(model, layout=layout) as trace:
        model(torch.randn(2, 7, 8))
    return trace


@pytest.mark.parametrize(
    ("query", "key"), [(None, None), ("text", "image"), (range(1, 6, 2), range(4)), ("text", None)]
)
def test_watched_model_and_its_map_have_the_same_blocks(trace, query, key):
    attention = trace.map()
    one, two = (HeadBlocks(source, query, key, row=1) for source in (trace, attention))
    at, to = one.positions
    for layer in range(2):
        for head in range(2):
            slow = attention.weights[1, layer, head][at][:, to].numpy()
            for blocks in (one, two):
                assert blocks.shape == slow.shape
                np.testing.assert_allclose(blocks.matrix(layer, head), slow, atol=1e-6)
                np.testing.assert_allclose(blocks.rows(layer, head, [1]), slow[[1]], atol=1e-6)


def test_absent_positions_have_no_weight_and_no_name():
    layout = Layout((Span("text", (3,), torch.tensor([[0, 2, -1]])),), 3)
    values = torch.full((1, 1, 1, 3, 3), -1.0)
    for source in (
        AttentionMap(values.exp(), layout, layout),
        AttentionMap.from_scores(values, layout, layout),  # logarithms
    ):
        found = HeadBlocks(source, "text", "text").matrix(0, 0)
        assert (found[:2, :2] > 0).all()
        assert not found[2].any() and not found[:, 2].any()
        assert HeadBlocks(source, "text").names()[0][2] == ""


def test_names_come_from_the_layout_or_are_given(trace):
    assert HeadBlocks(trace, range(2), "image").names() == (
        ("text 0", "text 1"),
        ("image 0,0", "image 0,1", "image 1,0", "image 1,1"),
    )
    assert HeadBlocks(trace, range(2), range(5, 7)).names("abcdefg") == (("a", "b"), ("f", "g"))
    assert HeadBlocks(trace).layer_names == ("layers.0", "layers.1")
    with pytest.raises(ValueError, match=r"3 tokens.*7 pos"):
        HeadBlocks(trace).names("abc")


def test_pooled_matrix_is_the_maximum_of_each_patch(monkeypatch):
    weights = torch.rand(1, 1, 1, 23, 17)
    blocks = HeadBlocks(AttentionMap(weights, words(17), words(23), kind=_amount()))
    slow = np.zeros((6, 4), np.float32)
    for q in range(23):
        for k in range(17):
            slow[q // 4, k // 5] = max(slow[q // 4, k // 5], float(weights[0, 0, 0, q, k]))
    for rows in (256, 8, 5):
        monkeypatch.setattr("overt.viz.block_grid.CHUNK_ROWS", rows)
        np.testing.assert_array_equal(blocks.matrix(0, 0, 4, 5), slow)
    np.testing.assert_array_equal(max_pool(slow, 1, 1), slow)


def test_thumbnail_computes_only_its_rows(monkeypatch):
    counted = []
    log_weights = Call.log_weights

    def counting(self, *where):
        found = log_weights(self, *where)
        counted.append(found.numel())
        return found

    monkeypatch.setattr(Call, "log_weights", counting)
    model = SelfAttention().eval()
    with torch.no_grad(), watch(model) as trace:
        model(torch.randn(1, 700, 8))
    blocks = HeadBlocks(trace)
    thumbnail = blocks.thumbnail(1, 0, side=40)
    assert thumbnail.shape == (39, 39) and sum(counted) == 39 * 700
    counted.clear()
    blocks.matrix(1, 1)
    assert max(counted) <= CHUNK_ROWS * 700


def test_out_of_range_positions_and_samples_raise(trace):
    with pytest.raises(ValueError, match=r"range.*0 to 6"):
        HeadBlocks(trace, range(5, 9))
    with pytest.raises(ValueError, match=r"sample 2 .*range"):
        HeadBlocks(trace, row=2)
    with pytest.raises(ValueError, match="dog"):
        HeadBlocks(trace, "dog").shape  # noqa: B018


def _amount():
    from overt.attention import Kind

    return Kind.AMOUNT
