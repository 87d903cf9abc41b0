"""The view of a map in a notebook: the page in a frame, with the photo and the words."""

from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Layout, Span, grid, words
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.show.notebook import view
from overt.show.panel import Choice

PHOTO = np.zeros((20, 30, 3), dtype=np.uint8)


def seeing(batch: int = 2) -> AttentionMap:
    where = PixelGeometry.identity(batch, (20, 30))
    layout = Layout((Span("class", (1,), slice(0, 1)),), 1) + grid(2, 2, geometry=where)
    return AttentionMap.from_scores(torch.randn(batch, 2, 3, 5, 5), layout, layout)


def test_the_frame_holds_the_whole_page_and_nothing_leaves_it() -> None:
    shown = view(seeing(), PHOTO, row=1)
    text = shown._repr_html_()
    assert text.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')
    assert text.count("<") == 2  # the frame alone: everything else is text of its attribute
    assert unescape(text.split('srcdoc="')[1].split('" style=')[0]) == shown.html()
    assert "data:image/jpeg" in shown.html()


def test_it_is_the_sample_the_layer_and_the_query_asked_for() -> None:
    attention = seeing()
    shown = view(attention, row=1, layer=0, head=2, query="image 1,0")
    torch.testing.assert_close(shown.panel.attention.values, attention.values[[1]])
    assert shown.choice == Choice(0, 2, 3) and shown.panel.photos == {}
    with pytest.raises(BadInput, match="has no query 'dog'"):
        view(attention, query="dog")


def test_tokens_name_both_axes_of_self_attention_and_the_keys_of_cross() -> None:
    own = AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, words(2), words(2))
    assert view(own, tokens=["a", "b"]).panel.queries == ("a", "b")
    cross = AttentionMap(torch.ones(1, 1, 1, 1, 2) / 2, words(2))
    shown = view(cross, tokens=["a", "b"]).panel
    assert shown.queries == ("global",) and shown.keys == ("a", "b")


def test_the_page_can_be_kept(tmp_path: Path) -> None:
    shown = view(seeing(1), PHOTO, title="mine")
    shown.save(str(tmp_path / "mine.html"))
    assert (tmp_path / "mine.html").read_text() == shown.html()
    assert "<title>mine · overt look</title>" in shown.html()
