import pytest
import torch
from torch import Tensor

from overt.attention import Kind, words
from overt.capture.derived.maps import portion_size, portions, raw
from overt.capture.seen import Seen
from tests.capture.encoder import Encoder, inputs, padding, seen_of


def test_raw_is_the_mean_head_of_the_last_layer() -> None:
    seen, _ = seen_of(Encoder(), inputs(), padding())
    found = raw(seen).check()
    torch.testing.assert_close(found.weights, seen.map(-1).weights.mean(dim=2, keepdim=True))
    assert found.kind is Kind.PROBABILITY
    assert raw(seen, 0, fuse=torch.amax).kind is Kind.AMOUNT


def test_raw_of_rows_is_those_rows_and_absent_rows_are_hidden() -> None:
    seen, _ = seen_of(Encoder(), inputs(), padding())
    rows = torch.tensor([[3, 0], [6, -1]])
    found = raw(seen, 1, rows).check()
    whole = raw(seen, 1)
    for sample, row in ((0, 0), (0, 1), (1, 0)):
        torch.testing.assert_close(
            found.values[sample, :, :, row], whole.values[sample, :, :, rows[sample, row]]
        )
    assert not found.values[1, :, :, 1].any()
    assert found.rows.tolist() == [[True, True], [True, False]]


def test_rows_may_be_the_name_of_a_span() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    layout = words(3, "first") + words(4, "rest")
    found = raw(seen.within(layout), -1, "rest")
    torch.testing.assert_close(found.values, raw(seen).values[..., 3:, :])
    assert found.queries.find("rest").shape == (4,)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (torch.tensor([[9], [0]]), "row 9 is beyond the 7 queries"),
        (torch.tensor([[1]]), "rows of 1 samples for a batch of 2"),
    ],
)
def test_rows_that_are_not_there_are_named(rows: Tensor, sentence: str) -> None:
    seen, _ = seen_of(Encoder(), inputs())
    with pytest.raises(ValueError, match=sentence):
        raw(seen, -1, rows)


def test_portions_cover_every_row_once() -> None:
    assert [list(range(10)[part]) for part in portions(10, 4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    for count in range(12):
        for size in range(1, 13):
            parts = [range(count)[part] for part in portions(count, size)]
            assert [one for part in parts for one in part] == list(range(count))
            assert len(parts) == -(-count // size) and all(0 < len(part) <= size for part in parts)
    seen, _ = seen_of(Encoder(), inputs())
    assert portion_size(seen.calls[0]) >= 8


def test_a_layer_is_chosen_by_name_as_well() -> None:
    seen, _ = seen_of(Encoder(), inputs())
    assert isinstance(seen, Seen)
    torch.testing.assert_close(raw(seen, "blocks.1.attention").values, raw(seen, 1).values)
