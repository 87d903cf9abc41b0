"""Attention of one layer: head fusion, rows, chunks."""

import pytest
import torch
from torch import Tensor

from overt.attention import Kind, words
from overt.attribution.raw_attention import default_chunk, layer_attention, row_chunks
from overt.capture.trace import AttentionTrace
from tests.capture.encoder import Encoder, inputs, padding, seen_of


def test_layer_attention_is_the_mean_over_heads_of_the_last_layer() -> None:
    trace, _ = seen_of(Encoder(), inputs(), padding())
    found = layer_attention(trace).check()
    torch.testing.assert_close(found.weights, trace.map(-1).weights.mean(dim=2, keepdim=True))
    assert found.kind is Kind.PROBABILITY
    assert layer_attention(trace, 0, fuse=torch.amax).kind is Kind.AMOUNT


def test_selected_rows_equal_full_rows_and_absent_rows_are_hidden() -> None:
    seen, _ = seen_of(Encoder(), inputs(), padding())
    rows = torch.tensor([[3, 0], [6, -1]])
    found = layer_attention(seen, 1, rows).check()
    whole = layer_attention(seen, 1)
    for sample, row in ((0, 0), (0, 1), (1, 0)):
        torch.testing.assert_close(
            found.values[sample, :, :, row], whole.values[sample, :, :, rows[sample, row]]
        )
    assert not found.values[1, :, :, 1].any()
    assert found.rows.tolist() == [[True, True], [True, False]]


def test_rows_may_be_given_by_span_name() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    layout = words(3, "first") + words(4, "rest")
    found = layer_attention(seen.with_layout(layout), -1, "rest")
    torch.testing.assert_close(found.values, layer_attention(seen).values[..., 3:, :])
    assert found.queries.find("rest").shape == (4,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([[9], [0]]), "row 9 .* 7 queries"),
        (torch.tensor([[1]]), "1 samples.* 2"),
    ],
)
def test_invalid_rows_raise(rows: Tensor, message: str) -> None:
    seen, _ = seen_of(Encoder(), inputs())
    with pytest.raises(ValueError, match=message):
        layer_attention(seen, -1, rows)


def test_row_chunks_cover_every_row_once() -> None:
    assert [list(range(10)[part]) for part in row_chunks(10, 4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    for count in range(12):
        for size in range(1, 13):
            parts = [range(count)[part] for part in row_chunks(count, size)]
            assert [one for part in parts for one in part] == list(range(count))
            assert len(parts) == -(-count // size) and all(0 < len(part) <= size for part in parts)
    trace, _ = seen_of(Encoder(), inputs())
    assert default_chunk(trace.calls[0]) >= 8


def test_layer_may_be_given_by_name() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    assert isinstance(seen, AttentionTrace)
    torch.testing.assert_close(
        layer_attention(seen, "blocks.1.attention").values, layer_attention(seen, 1).values
    )
