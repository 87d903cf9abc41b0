"""`AttentionMap` in a notebook and shell: HTML with an image, and one-line repr."""

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, words
from overt.geometry import PixelGeometry


def embedded_image(text: str) -> np.ndarray:
    found = re.search(r'src="data:image/png;base64,([^"]*)"', text)
    assert found
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))


def test_one_query_over_a_grid_is_drawn_as_the_grid() -> None:
    cells = torch.tensor([[0.0, 0.2, 0.4, 0.4, 0.0, 0.0]])
    text = AttentionMap.from_cells(cells, grid(2, 3))._repr_html_()
    assert "1 samples, 1 layers, 1 heads, 1 queries, 6 keys; amount" in text
    assert "queries: global 1; keys: image 2×3" in text
    assert embedded_image(text).tolist() == [[255, 127, 0], [0, 255, 255]]


def test_many_queries_are_drawn_as_fused_heads_of_the_last_layer() -> None:
    values = torch.rand(2, 3, 4, 5, 6)
    attention = AttentionMap(values, words(6), words(5), kind=Kind.AMOUNT)
    expected = values[0, -1].mean(dim=0)
    expected = 255 - (255 * expected / expected.max()).round()
    assert embedded_image(attention._repr_html_()).tolist() == expected.tolist()


def test_html_escapes_names_and_loads_nothing_external() -> None:
    layout = Layout((Span("<script>", (2,), slice(0, 2)),), 2)
    text = AttentionMap(torch.ones(1, 1, 1, 1, 2) / 2, layout)._repr_html_()
    assert "<script>" not in text and "&lt;script&gt; 2" in text and "http" not in text


@pytest.mark.parametrize("kind", [Kind.SIGNED, Kind.AMOUNT])
def test_negative_and_zero_weights_are_white(kind: Kind) -> None:
    values = torch.full((1, 1, 1, 2, 2), -1.0 if kind is Kind.SIGNED else 0.0)
    text = AttentionMap(values, words(2), words(2), kind=kind)._repr_html_()
    assert embedded_image(text).min() == 255


def test_log_weights_with_gradient_and_half_precision_are_drawn() -> None:
    scores = torch.randn(1, 2, 2, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(3), words(3))
    assert attention.form is Form.LOG
    assert embedded_image(attention._repr_html_()).shape == (3, 3)


def test_an_empty_map_is_described_without_an_image() -> None:
    text = AttentionMap(torch.zeros(0, 1, 1, 1, 2), words(2))._repr_html_()
    assert "0 samples" in text and "img" not in text


def test_repr_is_one_line_without_weights() -> None:
    layout = Layout((Span("text", (3,), slice(0, 3)), Span("image", (2, 2), slice(3, 7))), 8)
    mask = torch.ones(2, 1, 8, dtype=torch.bool)
    shown = repr(AttentionMap(torch.rand(2, 3, 4, 8, 8), layout, layout, mask, Kind.AMOUNT))
    assert shown == (
        "AttentionMap(b=2 l=3 h=4 q=8 k=8, amount, queries: text 3, image 2×2, "
        "keys: text 3, image 2×2, masked)"
    )
    assert repr(layout) == "Layout(8: text 3, image 2×2)"
    assert repr(layout.spans[1]) == "Span(image 2×2 at 3:7)"
    with_geometry = replace(layout.spans[0], geometry=PixelGeometry.identity(1, (4, 4)))
    assert repr(with_geometry) == "Span(text 3 at 0:3, PixelGeometry)"
    varying = Span("text", (2,), torch.tensor([[0, 1], [4, 5]]))
    assert repr(varying) == "Span(text 2 at per-sample positions)"
