"""Panels: position labels, default choice, lookup of positions and selected weights."""

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, regions, words
from overt.errors import UserError
from overt.geometry import RegionGeometry, TextGeometry
from overt.viz.panel import (
    Choice,
    choose,
    default_choice,
    describe_choice,
    find_position,
    grid_weights,
    is_hard_attention,
    make_panel,
    other_positions,
    plain_token,
    position_labels,
    region_spans,
    weight_matrix,
    weight_row,
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


def make_map(layers: int = 2, heads: int = 3, layout: Layout = LAYOUT) -> AttentionMap:
    draw = torch.Generator().manual_seed(0)
    n = len(layout)
    values = torch.rand(1, layers, heads, n, n, generator=draw)
    return AttentionMap(values, layout, layout, kind=Kind.AMOUNT).normalize()


def test_position_labels_come_from_text_cells_or_spans() -> None:
    assert position_labels(LAYOUT) == (
        "class", "image 0,0", "image 0,1", "image 1,0", "image 1,1", "a", "grass", "land", "dog",
        "9",
    )  # fmt: skip


def test_panel_needs_one_sample_and_matching_names() -> None:
    shown = make_panel(make_map())
    assert shown.same and shown.heads == 3 and shown.layers == ("layer 0", "layer 1")
    two = AttentionMap(torch.ones(2, 1, 1, 1, 4), words(4), kind=Kind.AMOUNT)
    with pytest.raises(ValueError, match="sample.*2"):
        make_panel(two)
    with pytest.raises(ValueError, match="2 names.*10 keys"):
        make_panel(make_map(), keys=["a", "b"])
    with pytest.raises(ValueError, match=r"1 names.*2 layers"):
        make_panel(make_map(), layers=["a"])


def test_default_query_is_the_class_token_or_the_last_one() -> None:
    assert default_choice(make_panel(make_map())) == Choice(1, None, 0)
    plain = make_map(layout=words(4))
    assert default_choice(make_panel(plain)) == Choice(1, None, None)
    assert default_choice(make_panel(plain, causal=True)) == Choice(1, None, 3)
    one = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    assert default_choice(make_panel(one)) == Choice(0, None, 0)


@pytest.mark.parametrize(
    ("query", "at"),
    [("dog", 8), ("DOG", 8), ("grassland", 6), ("land", 7), ("class", 0), ("image 1,0", 3),
     ("4", 4), ("-1", 9)],
)  # fmt: skip
def test_position_is_found_by_word_name_or_number(query: str, at: int) -> None:
    assert find_position(LAYOUT, position_labels(LAYOUT), query, "it") == at


def test_query_is_also_an_integer() -> None:
    shown = make_panel(make_map(), "it")
    assert [choose(shown, query=at).query for at in (3, -1)] == [3, 9]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"query": 10}, "queries.*9.* 10"),
        ({"query": "cat"}, "query 'cat'.* 'class', 'image 0,0'"),
        ({"query": "10"}, "queries.*9.* 10"),
        ({"query": " "}, "no query"),
        ({"layer": 2}, "layers.*1.* 2"),
        ({"head": -4}, "heads.*2.* -4"),
    ],
)
def test_unknown_layers_heads_and_queries_raise(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(make_panel(make_map(), "it"), **given)  # type: ignore[arg-type]


def test_choice_selects_the_matching_weights() -> None:
    attention = make_map()
    shown = make_panel(attention)
    weights = attention.weights[0].double().numpy()
    choice = choose(shown, layer=-2, head=1, query="dog")
    assert choice == Choice(0, 1, 8)
    np.testing.assert_array_equal(weight_row(shown, choice), weights[0, 1, 8])
    np.testing.assert_allclose(
        weight_row(shown, Choice(1)), weights[1].mean(axis=(0, 1)), atol=1e-12
    )
    np.testing.assert_array_equal(weight_matrix(shown, Choice(0, 2)), weights[0, 2])
    assert choose(shown, query="mean").query is None


def test_mean_over_queries_skips_empty_rows() -> None:
    mask = torch.tensor([[[True, True, False], [False, False, False], [True, True, False]]])
    scores = torch.randn(1, 1, 1, 3, 3)
    shown = make_panel(AttentionMap.from_scores(scores, words(3), words(3), mask))
    assert shown.attention.form is Form.LOG
    np.testing.assert_allclose(weight_row(shown, Choice(0)).sum(), 1, atol=1e-6)


def test_description_contains_layer_head_and_query() -> None:
    shown = make_panel(make_map(), layers=["one", "two"])
    assert describe_choice(shown, Choice(0, 2, 8)) == "one, head 2 of 3, from 'dog'"
    assert describe_choice(shown, Choice(1)) == "two, mean of 3 heads, mean of all queries"
    twice = make_panel(make_map(1, 1, words(2)), queries=["is", "is"], keys=["is", "is"])
    assert describe_choice(twice, Choice(0, None, 1)) == "layer 0, from 'is' at position 1"


def test_grid_weights_are_zero_for_absent_cells() -> None:
    span = Span("image", (2, 2), torch.tensor([[3, -1, 1, 0]]))
    expected = np.array([[13.0, 0.0], [11.0, 10.0]])
    np.testing.assert_array_equal(grid_weights(span, np.array([10.0, 11, 12, 13])), expected)


def test_other_positions_are_outside_image_and_text() -> None:
    assert other_positions(LAYOUT) == [0, 9]
    empty = TextGeometry(("a",), torch.tensor([[[-1, -1], [0, 1]]]))
    # a special token inside the span of a text
    assert other_positions(words(2, geometry=empty)) == [0]


@pytest.mark.parametrize(("token", "plain"), [("▁The", "the"), ("end</w>", "end"), ("##", "")])
def test_plain_token_removes_subword_markers(token: str, plain: str) -> None:
    assert plain_token(token) == plain


def test_region_spans_contain_boxes_only() -> None:
    where = RegionGeometry(torch.tensor([[[0.0, 0.0, 4.0, 4.0], [4.0, 0.0, 8.0, 4.0]]]))
    layout = regions(2, geometry=where) + grid(1, 2)
    assert [span.name for span in region_spans(layout)] == ["regions"] and other_positions(
        layout
    ) == []
    assert region_spans(grid(2, 2)) == []


def test_hard_attention_has_only_zeros_and_ones() -> None:
    kept = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    hard = AttentionMap.from_cells(kept, grid(2, 2))
    as_amount = AttentionMap(hard.values, hard.keys, kind=Kind.AMOUNT)
    assert is_hard_attention(as_amount)
    assert not is_hard_attention(AttentionMap(0.5 * hard.values, hard.keys, kind=Kind.AMOUNT))
    assert not is_hard_attention(
        AttentionMap(torch.ones_like(hard.values), hard.keys, kind=Kind.AMOUNT)
    )
    assert not is_hard_attention(hard.normalize())
