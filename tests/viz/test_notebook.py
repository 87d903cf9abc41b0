"""Notebook views: the sandboxed frame, the selected sample and token names."""

from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Layout, Span, grid, words
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.viz.notebook import view
from overt.viz.panel import Choice

PHOTO = np.zeros((20, 30, 3), dtype=np.uint8)


def make_map(batch: int = 2) -> AttentionMap:
    where = PixelGeometry.identity(batch, (20, 30))
    layout = Layout((Span("class", (1,), slice(0, 1)),), 1) + grid(2, 2, geometry=where)
    return AttentionMap.from_scores(torch.randn(batch, 2, 3, 5, 5), layout, layout)


def test_notebook_frame_is_sandboxed_and_contains_the_page() -> None:
    shown = view(make_map(), PHOTO, row=1)
    text = shown._repr_html_()
    assert text.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')
    assert text.count("<") == 2  # only the frame: the rest is the text of its attribute
    assert unescape(text.split('srcdoc="')[1].split('" style=')[0]) == shown.html()
    assert "data:image/jpeg" in shown.html()


def test_view_selects_sample_layer_head_and_query() -> None:
    attention = make_map()
    shown = view(attention, row=1, layer=0, head=2, query="image 1,0")
    torch.testing.assert_close(shown.panel.attention.values, attention.values[[1]])
    assert shown.choice == Choice(0, 2, 3) and shown.panel.photos == {}
    with pytest.raises(UserError, match="query 'dog'"):
        view(attention, query="dog")


def test_tokens_name_both_axes_or_the_keys_of_cross_attention() -> None:
    self_attention = AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, words(2), words(2))
    assert view(self_attention, tokens=["a", "b"]).panel.queries == ("a", "b")
    cross = AttentionMap(torch.ones(1, 1, 1, 1, 2) / 2, words(2))
    shown = view(cross, tokens=["a", "b"]).panel
    assert shown.queries == ("global",) and shown.keys == ("a", "b")


def test_view_can_be_saved(tmp_path: Path) -> None:
    shown = view(make_map(1), PHOTO, title="mine")
    shown.save(str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_text() == shown.html()
    assert "<title>mine · overt look</title>" in shown.html()
