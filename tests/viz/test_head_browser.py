"""Head views: embedded weights, size budget, kernel requests and saved pages."""

import base64
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, words
from overt.errors import UserError
from overt.viz.head_browser import HeadView, head_view
from overt.viz.templates import POLICY

HOSTILE = '</script><img src=x onerror="alert(1)">'


def random_map(layers: int = 3, heads: int = 4, count: int = 6, seed: int = 0) -> AttentionMap:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, layers, heads, count, count, generator=draw)
    return AttentionMap.from_scores(scores, words(count), words(count))


def page_data(view: HeadView) -> dict:
    found = re.search(r'id="data">(.*?)</script>', view.html(), re.DOTALL)
    assert found
    return json.loads(found[1])


def decode_block(block: dict) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(block["weights"]), dtype="<f2")
    return flat.reshape(block["shape"])


def test_small_map_is_embedded_completely():
    attention = random_map()
    view = head_view(attention, layer=1, head=2, token="3")
    data = page_data(view)
    assert view.about == "" == data["about"] and len(data["blocks"]) == 12
    assert data["start"] == {"layer": 1, "head": 2, "query": 3} and data["same"]
    for where, block in data["blocks"].items():
        layer, head = map(int, where.split())
        expected = attention.weights[0, layer, head].numpy()
        np.testing.assert_allclose(decode_block(block), expected, rtol=1 / 2000)
        assert block["step"] == [1, 1]


def test_thumbnails_are_scaled_per_head():
    attention = random_map()
    small = page_data(head_view(attention))["small"]
    for layer in range(3):
        pixels = np.frombuffer(base64.b64decode(small[layer]["pixels"]), np.uint8)
        pixels = pixels.reshape(4, *small[layer]["shape"])
        weights = attention.weights[0, layer].numpy()
        tops = weights.max(axis=(1, 2), keepdims=True)
        np.testing.assert_array_equal(pixels, np.rint(255 * weights / tops))
        np.testing.assert_allclose(small[layer]["tops"], tops.ravel(), rtol=1e-6)


def test_budget_keeps_the_open_head_and_its_neighbours():
    attention = random_map(layers=6, heads=12, count=64)
    view = head_view(attention, layer=2, head=5, budget=0.1)
    assert view.complete_heads[0] == (2, 5) and {(2, 4), (2, 6)} <= set(view.complete_heads)
    assert "6 of 72 heads in full, in 0.1 MB" in view.about
    assert "one query in" in view.about
    assert len(view.html()) < 0.1e6 + 60_000  # the weights and the page
    assert set(page_data(view)["blocks"]) == {f"{l} {h}" for l, h in view.complete_heads}


def test_large_head_is_pooled_and_a_part_of_it_is_exact():
    attention = random_map(layers=2, heads=2, count=200)
    view = head_view(attention, budget=0.02)
    (block,) = page_data(view)["blocks"].values()
    down, across = block["step"]
    assert down > 1 and across > 1 and block["shape"] == [-(-200 // down), -(-200 // across)]
    assert f"the largest of {down} x {across} weights" in view.about
    expected = attention.weights[0, 1, 0, :down, :across].max()
    np.testing.assert_allclose(decode_block(block)[0, 0], float(expected), rtol=1 / 2000)
    part = head_view(attention, range(20), range(30, 60), budget=0.02)
    block = page_data(part)["blocks"]["1 0"]
    np.testing.assert_allclose(
        decode_block(block), attention.weights[0, 1, 0, :20, 30:60].numpy(), rtol=1 / 2000
    )


def test_respond_serves_heads_and_layers_and_rejects_others():
    view = head_view(random_map())
    initial_data = view.initial_data()
    assert initial_data["blocks"] == {} and initial_data["small"] == [None] * 3
    reply = view.respond({"id": 7, "layer": 1, "head": 2})
    assert reply["id"] == 7 and reply["block"] == view.block(1, 2)
    assert view.respond({"id": 8, "layer": 0})["small"] == view.thumbnails(0)
    for request, message in (
        ({"layer": 3}, "unknown layer 3"),
        ({"layer": 0, "head": -1}, "unknown head -1"),
        ({"layer": "0"}, "unknown layer '0'"),
        ({}, "unknown layer None"),
    ):
        assert message in view.respond(request)["wrong"]


def test_notebook_frame_is_sandboxed_and_makes_no_requests(tmp_path: Path):
    view = head_view(random_map(), title=HOSTILE, tokens=[HOSTILE] * 6)
    text = view.html()
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    assert "<img" not in text and text.count("<script") == 2
    assert not re.search(r"""(?:src|href)=["'](?!data:)[^"'#]""", text)
    frame = view._repr_html_()
    assert frame.count("<") == 2 and 'sandbox="allow-scripts"' in frame
    assert unescape(frame.split('srcdoc="')[1].split('" style=')[0]) == text
    assert view.save(str(tmp_path / "heads.html")).read_text() == text


def test_tokens_are_found_without_subword_markers():
    names = ["[CLS]", "##ing", "Ġcat", "dog", "dog", "5"]
    for token, at in (("ing", 1), ("cat", 2), ("dog", 3), ("4", 4), ("5", 5), ("[CLS]", 0)):
        assert head_view(random_map(), tokens=names, token=token).query == at
    with pytest.raises(ValueError, match="token 'bird'"):
        head_view(random_map(), tokens=names, token="bird")


def test_out_of_range_arguments_and_nan_maps_raise():
    with pytest.raises(ValueError, match=r"layer 3.*0 to 2"):
        head_view(random_map(), layer=3)
    with pytest.raises(ValueError, match=r"head -5 .*range"):
        head_view(random_map(), head=-5)
    with pytest.raises(ValueError, match="must be positive"):
        head_view(random_map(), budget=0.0)
    values = torch.full((1, 1, 1, 2, 2), torch.nan)
    broken = AttentionMap(values, words(2), words(2))
    with pytest.raises(ValueError, match="not finite"):
        head_view(broken).html()


def test_live_is_a_widget_or_raises_without_anywidget():
    view = head_view(random_map())
    try:
        import anywidget  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="install anywidget"):
            view.live()
        return
    made, sent = view.live(), []
    made.send = sent.append
    made._handle_custom_msg({"id": 1, "layer": 0, "head": 0}, [])
    assert sent[0]["block"] == view.block(0, 0)


def test_saving_as_pdf_raises_and_writes_nothing(tmp_path: Path):
    with pytest.raises(UserError, match=r"heads\.pdf.*\.html"):
        head_view(random_map()).save(tmp_path / "heads.pdf")
    assert not list(tmp_path.iterdir())


def test_tuple_of_layers_raises_with_the_from_layers_hint(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"tuple.*from_layers"):
        head_view(tuple(random_map().weights.unbind(1)))
