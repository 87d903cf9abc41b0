"""The head view: a file holds what the model used, within its budget, and says what is missing."""

import base64
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, words
from overt.errors import BadInput
from overt.show.headview import HeadView, head_view
from overt.show.page import POLICY

HOSTILE = '</script><img src=x onerror="alert(1)">'


def some(layers: int = 3, heads: int = 4, count: int = 6, seed: int = 0) -> AttentionMap:
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, layers, heads, count, count, generator=draw)
    return AttentionMap.from_scores(scores, words(count), words(count))


def data_of(view: HeadView) -> dict:
    found = re.search(r'id="data">(.*?)</script>', view.html(), re.DOTALL)
    assert found
    return json.loads(found[1])


def read(block: dict) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(block["weights"]), dtype="<f2")
    return flat.reshape(block["shape"])


def test_a_small_map_is_held_in_full():
    attention = some()
    view = head_view(attention, layer=1, head=2, token="3")
    data = data_of(view)
    assert view.about == "" == data["about"] and len(data["blocks"]) == 12
    assert data["start"] == {"layer": 1, "head": 2, "query": 3} and data["same"]
    for where, block in data["blocks"].items():
        layer, head = map(int, where.split())
        wanted = attention.weights[0, layer, head].numpy()
        np.testing.assert_allclose(read(block), wanted, rtol=1 / 2000)
        assert block["step"] == [1, 1]


def test_small_pictures_are_the_map_each_on_its_own_scale():
    attention = some()
    small = data_of(head_view(attention))["small"]
    for layer in range(3):
        pixels = np.frombuffer(base64.b64decode(small[layer]["pixels"]), np.uint8)
        pixels = pixels.reshape(4, *small[layer]["shape"])
        weights = attention.weights[0, layer].numpy()
        tops = weights.max(axis=(1, 2), keepdims=True)
        np.testing.assert_array_equal(pixels, np.rint(255 * weights / tops))
        np.testing.assert_allclose(small[layer]["tops"], tops.ravel(), rtol=1e-6)


def test_a_budget_keeps_the_open_head_and_its_neighbours_and_says_so():
    attention = some(layers=6, heads=12, count=64)
    view = head_view(attention, layer=2, head=5, budget=0.1)
    assert view.held[0] == (2, 5) and {(2, 4), (2, 6)} <= set(view.held)
    assert "holds 6 of 72 heads in full, in 0.1 MB" in view.about
    assert "one query in" in view.about
    assert len(view.html()) < 0.1e6 + 60_000  # the weights, and the page itself
    assert set(data_of(view)["blocks"]) == {f"{l} {h}" for l, h in view.held}


def test_a_head_that_is_too_large_is_coarse_and_a_part_of_it_is_not():
    attention = some(layers=2, heads=2, count=200)
    view = head_view(attention, budget=0.02)
    (block,) = data_of(view)["blocks"].values()
    down, across = block["step"]
    assert down > 1 and across > 1 and block["shape"] == [-(-200 // down), -(-200 // across)]
    assert f"the largest of {down} x {across} weights" in view.about
    wanted = attention.weights[0, 1, 0, :down, :across].max()
    np.testing.assert_allclose(read(block)[0, 0], float(wanted), rtol=1 / 2000)
    part = head_view(attention, range(20), range(30, 60), budget=0.02)
    block = data_of(part)["blocks"]["1 0"]
    np.testing.assert_allclose(
        read(block), attention.weights[0, 1, 0, :20, 30:60].numpy(), rtol=1 / 2000
    )


def test_a_kernel_is_asked_for_a_head_or_a_layer_and_nothing_else():
    view = head_view(some())
    begun = view.begun()
    assert begun["blocks"] == {} and begun["small"] == [None] * 3
    reply = view.answer({"id": 7, "layer": 1, "head": 2})
    assert reply["id"] == 7 and reply["block"] == view.block(1, 2)
    assert view.answer({"id": 8, "layer": 0})["small"] == view.small(0)
    for asked, said in (
        ({"layer": 3}, "no layer 3"),
        ({"layer": 0, "head": -1}, "no head -1"),
        ({"layer": "0"}, "no layer '0'"),
        ({}, "no layer None"),
    ):
        assert said in view.answer(asked)["wrong"]


def test_the_frame_holds_the_page_and_nothing_leaves_it(tmp_path: Path):
    view = head_view(some(), title=HOSTILE, tokens=[HOSTILE] * 6)
    text = view.html()
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    assert "<img" not in text and text.count("<script") == 2
    assert not re.search(r"""(?:src|href)=["'](?!data:)[^"'#]""", text)
    frame = view._repr_html_()
    assert frame.count("<") == 2 and 'sandbox="allow-scripts"' in frame
    assert unescape(frame.split('srcdoc="')[1].split('" style=')[0]) == text
    assert view.save(str(tmp_path / "heads.html")).read_text() == text


def test_tokens_are_found_as_people_write_them():
    names = ["[CLS]", "##ing", "Ġcat", "dog", "dog", "5"]
    for token, at in (("ing", 1), ("cat", 2), ("dog", 3), ("4", 4), ("5", 5), ("[CLS]", 0)):
        assert head_view(some(), tokens=names, token=token).query == at
    with pytest.raises(ValueError, match="no token 'bird'; there are"):
        head_view(some(), tokens=names, token="bird")


def test_what_is_not_there_is_said():
    with pytest.raises(ValueError, match="layers 0 to 2, not 3"):
        head_view(some(), layer=3)
    with pytest.raises(ValueError, match="heads 0 to 3, not -5"):
        head_view(some(), head=-5)
    with pytest.raises(ValueError, match="holds nothing"):
        head_view(some(), budget=0.0)
    values = torch.full((1, 1, 1, 2, 2), torch.nan)
    broken = AttentionMap(values, words(2), words(2))
    with pytest.raises(ValueError, match="not finite"):
        head_view(broken).html()


def test_live_names_what_is_missing_or_is_a_widget_that_answers():
    view = head_view(some())
    try:
        import anywidget  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install anywidget"):
            view.live()
        return
    made, sent = view.live(), []
    made.send = sent.append
    made._handle_custom_msg({"id": 1, "layer": 0, "head": 0}, [])
    assert sent[0]["block"] == view.block(0, 0)


def test_a_page_is_not_written_under_the_name_of_another_kind(tmp_path: Path):
    with pytest.raises(BadInput, match=r"heads.pdf is to hold a page: .* ends in .html"):
        head_view(some()).save(tmp_path / "heads.pdf")
    assert not list(tmp_path.iterdir())


def test_layers_of_a_model_are_told_how_to_become_a_map(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"show.from_layers\(attentions\) .* type tuple"):
        head_view(tuple(some().weights.unbind(1)))
