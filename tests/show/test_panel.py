"""Panels: names of positions, the usual choice, words that mean a position, and the right row."""

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, regions, words
from overt.errors import BadInput
from overt.geometry import RegionGeometry, TextGeometry
from overt.show.panel import (
    Choice,
    block,
    boxed,
    caption,
    cells,
    choose,
    find,
    is_hard,
    labels,
    others,
    panel,
    plainly,
    row,
    usual,
)

TEXT = "a grassland dog"
SPANS = torch.tensor([[[0, 1], [2, 7], [7, 11], [12, 15]]])
LAYOUT = Layout(
    (
        Span("class", (1,), slice(0, 1)),
        Span("image", (2, 2), slice(1, 5)),
        Span("text", (4,), torch.tensor([[5, 6, 7, 8]]), TextGeometry((TEXT,), SPANS)),
    ),
    10,
)


def attend(layers: int = 2, heads: int = 3, layout: Layout = LAYOUT) -> AttentionMap:
    draw = torch.Generator().manual_seed(0)
    n = len(layout)
    values = torch.rand(1, layers, heads, n, n, generator=draw)
    return AttentionMap(values, layout, layout, kind=Kind.AMOUNT).normalize()


def test_positions_are_named_by_text_cell_or_span() -> None:
    assert labels(LAYOUT) == (
        "class", "image 0,0", "image 0,1", "image 1,0", "image 1,1", "a", "grass", "land", "dog",
        "9",
    )  # fmt: skip


def test_a_panel_is_of_one_sample_and_names_everything_once() -> None:
    shown = panel(attend())
    assert shown.same and shown.heads == 3 and shown.layers == ("layer 0", "layer 1")
    two = AttentionMap(torch.ones(2, 1, 1, 1, 4), words(4), kind=Kind.AMOUNT)
    with pytest.raises(ValueError, match="one sample, and this map has 2"):
        panel(two)
    with pytest.raises(ValueError, match="2 names for 10 keys"):
        panel(attend(), keys=["a", "b"])
    with pytest.raises(ValueError, match="1 names for 2 layers"):
        panel(attend(), layers=["a"])


def test_the_usual_query_is_the_class_token_or_the_last_of_a_causal_model() -> None:
    assert usual(panel(attend())) == Choice(1, None, 0)
    plain = attend(layout=words(4))
    assert usual(panel(plain)) == Choice(1, None, None)
    assert usual(panel(plain, causal=True)) == Choice(1, None, 3)
    one = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    assert usual(panel(one)) == Choice(0, None, 0)


@pytest.mark.parametrize(
    ("query", "at"),
    [("dog", 8), ("DOG", 8), ("grassland", 6), ("land", 7), ("class", 0), ("image 1,0", 3),
     ("4", 4), ("-1", 9)],
)  # fmt: skip
def test_a_word_a_name_or_a_number_is_a_position(query: str, at: int) -> None:
    assert find(LAYOUT, labels(LAYOUT), query, "it") == at


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"query": "cat"}, "has no query 'cat'; there are 'class', 'image 0,0'"),
        ({"query": "10"}, "has queries 0 to 9, not 10"),
        ({"query": " "}, "has no query"),
        ({"layer": 2}, "has layers 0 to 1, not 2"),
        ({"head": -4}, "has heads 0 to 2, not -4"),
    ],
)
def test_what_does_not_exist_is_bad_input(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        choose(panel(attend(), "it"), **given)  # type: ignore[arg-type]


def test_what_is_chosen_is_what_is_read() -> None:
    attention = attend()
    shown = panel(attention)
    weights = attention.weights[0].double().numpy()
    choice = choose(shown, layer=-2, head=1, query="dog")
    assert choice == Choice(0, 1, 8)
    np.testing.assert_array_equal(row(shown, choice), weights[0, 1, 8])
    np.testing.assert_allclose(row(shown, Choice(1)), weights[1].mean(axis=(0, 1)), atol=1e-12)
    np.testing.assert_array_equal(block(shown, Choice(0, 2)), weights[0, 2])
    assert choose(shown, query="mean").query is None


def test_the_mean_of_queries_counts_those_that_see_something() -> None:
    mask = torch.tensor([[[True, True, False], [False, False, False], [True, True, False]]])
    scores = torch.randn(1, 1, 1, 3, 3)
    shown = panel(AttentionMap.from_scores(scores, words(3), words(3), mask))
    assert shown.attention.form is Form.LOG
    np.testing.assert_allclose(row(shown, Choice(0)).sum(), 1, atol=1e-6)


def test_a_caption_says_layer_head_and_query() -> None:
    shown = panel(attend(), layers=["one", "two"])
    assert caption(shown, Choice(0, 2, 8)) == "one, head 2 of 3, from 'dog'"
    assert caption(shown, Choice(1)) == "two, mean of 3 heads, mean of all queries"
    twice = panel(attend(1, 1, words(2)), queries=["is", "is"], keys=["is", "is"])
    assert caption(twice, Choice(0, None, 1)) == "layer 0, from 'is' at position 1"


def test_cells_stand_in_their_grid_and_absent_ones_are_empty() -> None:
    span = Span("image", (2, 2), torch.tensor([[3, -1, 1, 0]]))
    expected = np.array([[13.0, 0.0], [11.0, 10.0]])
    np.testing.assert_array_equal(cells(span, np.array([10.0, 11, 12, 13])), expected)


def test_what_stands_in_no_picture_and_no_text_is_listed() -> None:
    assert others(LAYOUT) == [0, 9]
    empty = TextGeometry(("a",), torch.tensor([[[-1, -1], [0, 1]]]))
    assert others(words(2, geometry=empty)) == [0]  # a special token inside the span of a text


@pytest.mark.parametrize(("token", "plain"), [("▁The", "the"), ("end</w>", "end"), ("##", "")])
def test_signs_for_joints_and_spaces_are_left_out(token: str, plain: str) -> None:
    assert plainly(token) == plain


def test_boxes_are_a_kind_of_their_own() -> None:
    where = RegionGeometry(torch.tensor([[[0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 8.0, 4.0]]]))
    layout = regions(2, geometry=where) + grid(1, 2)
    assert [span.name for span in boxed(layout)] == ["regions"] and others(layout) == []
    assert boxed(grid(2, 2)) == []


def test_hard_maps_keep_or_drop_and_weigh_nothing() -> None:
    kept = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    hard = AttentionMap.from_cells(kept, grid(2, 2))
    as_amount = AttentionMap(hard.values, hard.keys, kind=Kind.AMOUNT)
    assert is_hard(as_amount)
    assert not is_hard(AttentionMap(0.5 * hard.values, hard.keys, kind=Kind.AMOUNT))
    assert not is_hard(AttentionMap(torch.ones_like(hard.values), hard.keys, kind=Kind.AMOUNT))
    assert not is_hard(hard.normalize())
