"""Browse pages: embedded weights and photos, escaping, size limits and cell positions."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Kind, Layout, Span, grid, regions, words
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
from overt.viz import browse_page
from overt.viz.attention_figure import save_panels
from overt.viz.browse_page import (
    EmbeddedPhotos,
    grid_placement,
    limit_weights,
    panel_data,
    render_page,
)
from overt.viz.panel import Choice, Panel, default_choice, make_panel
from overt.viz.templates import POLICY

HOSTILE = '</script><img src=x onerror="alert(1)">'


def random_panel(text: str = "a dog", layers: int = 2, heads: int = 3) -> Panel:
    """Two words and a 1 x 2 image grid with random weights."""
    geometry = TextGeometry((text,), torch.tensor([[[0, 1], [2, len(text)]]]))
    layout = words(2, geometry=geometry) + Layout((Span("image", (1, 2), slice(0, 2)),), 2)
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(1, layers, heads, 4, 4, generator=draw)
    photo = np.zeros((8, 16, 3), dtype=np.uint8)
    return make_panel(
        AttentionMap.from_scores(scores, layout, layout), text, photos={"image": photo}
    )


def page_data(text: str) -> dict[str, object]:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_embedded_weights_have_a_relative_error_of_1_in_2000() -> None:
    one = random_panel()
    made = panel_data(one, default_choice(one), EmbeddedPhotos())
    embedded = np.frombuffer(base64.b64decode(made["weights"]), dtype="<f2").reshape(2, 3, 4, 4)
    np.testing.assert_allclose(embedded, one.attention.weights[0].numpy(), rtol=1 / 2000, atol=0)
    assert made["same"] and made["heads"] == 3 and made["rows"] == [True] * 4


def test_axis_data_has_grid_and_text_blocks() -> None:
    made = panel_data(random_panel(), Choice(0), EmbeddedPhotos())["keys"]
    kinds = [(block["kind"], block.get("at")) for block in made["blocks"]]
    assert kinds == [("grid", [2, 3]), ("text", None)]
    assert made["blocks"][1]["parts"] == [["a", 0], [" ", -1], ["dog", 1]]
    assert made["names"] == ["a", "dog", "image 0,0", "image 0,1"]


def test_photo_is_embedded_once() -> None:
    text = render_page([random_panel(), random_panel()], [Choice(0), Choice(1)])
    assert text.count("data:image/jpeg;base64,") == 1


def test_data_is_escaped() -> None:
    text = render_page([random_panel(HOSTILE)], [Choice(0)], title=HOSTILE, notes=[HOSTILE])
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

    Reader().feed(text)
    assert "img" not in tags and tags.count("script") == 2
    assert page_data(text)["panels"][0]["title"] == HOSTILE  # type: ignore[index]


def test_page_makes_no_requests_and_has_a_csp() -> None:
    text = render_page([random_panel()], [Choice(0)])
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)[^"'#]""", text)
    assert not re.search(r"https?://", text)


def test_limit_weights_averages_heads_then_drops_layers() -> None:
    one = random_panel()
    assert limit_weights(one, Choice(1, 2, 3)) == (one, Choice(1, 2, 3))
    fused, choice = limit_weights(one, Choice(1, 2, 3), most=50)
    assert fused.heads == 1 and choice == Choice(1, None, 3)
    assert "96 numbers: this page shows the mean over heads." in fused.about
    torch.testing.assert_close(fused.attention.weights[:, :, 0], one.attention.weights.mean(dim=2))
    single, choice = limit_weights(one, Choice(1, 2, 3), most=20)
    assert single.layers == ("layer 1",) and choice == Choice(0, None, 3)
    assert "only layer 1" in single.about


def test_page_data_has_sinks_and_probabilities_of_words() -> None:
    one = replace(random_panel(), sinks=((), (3,)), chances=(0.5,) * 4, before=(0.6,) * 4)
    data = panel_data(one, Choice(1), EmbeddedPhotos())
    assert data["sinks"] == [[], [3]]
    assert data["chances"] == [0.5] * 4 and data["before"] == [0.6] * 4
    single, _ = limit_weights(one, Choice(1), most=20)
    assert single.sinks == ((3,),)  # of the layer that is left


@pytest.mark.parametrize(
    "where",
    [
        PixelGeometry.identity(1, (40, 80)),
        PixelGeometry.identity(1, (40, 80)).resize((30, 60)).crop(3, 10, 24, 32),
        PixelGeometry.identity(1, (40, 80)).pad(20, 0, 20, 0).resize((32, 32)),
        PixelGeometry.identity(1, (40, 80)).crop(0, 20, 40, 40).flip(),
    ],
    ids=["whole", "crop", "pad", "flip"],
)
def test_grid_placement_agrees_with_the_geometry(where: PixelGeometry) -> None:
    """The box of each cell, computed from shares of the photo, equals the geometry's."""
    made = grid_placement(where, (40, 80))
    left, top, width, height = made["place"]
    x, y, w, h = made["kept"]
    shape = (2, 4)
    boxes = where.cells(shape)[0].reshape(2, 4, 4).numpy()
    for r in range(2):
        for c in range(4):
            across = 3 - c if made["flip"] else c
            x0, x1 = (80 * (left + width * (across + n) / 4) for n in (0, 1))
            y0, y1 = (40 * (top + height * (r + n) / 2) for n in (0, 1))
            box = np.array([x0, y0, x1, y1])
            low, high = np.array([x, y] * 2), np.array([x + w, y + h] * 2)
            box = np.clip(box, low * [80, 40, 80, 40], high * [80, 40, 80, 40])
            np.testing.assert_allclose(box, boxes[r, c], atol=1e-9)


def test_save_panels_writes_the_page(tmp_path: Path) -> None:
    path = save_panels(tmp_path / "view.html", [random_panel()])
    assert page_data(path.read_text())["panels"][0]["start"] == {  # type: ignore[index]
        "layer": 1, "head": None, "query": None,
    }  # fmt: skip
    assert path.stat().st_size < 60_000


def test_lone_surrogate_can_be_encoded() -> None:
    assert render_page([random_panel()], [Choice(0)], title="\ud83d").encode()


def test_weight_limit_is_16_mb_of_base64() -> None:
    assert browse_page.MAX_WEIGHTS * 2 * 4 / 3 <= 16_000_000  # base64 of two bytes per weight


@pytest.mark.parametrize("photo", [True, False], ids=["photo", "bare"])
def test_boxes_are_stored_as_shares_of_their_photo(photo: bool, tmp_path: Path) -> None:
    where = RegionGeometry(torch.tensor([[[0.0, 0.0, 8.0, 4.0], [8.0, 4.0, 16.0, 8.0]]]))
    attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), regions(2, geometry=where))
    photos = {"regions": np.zeros((8, 16, 3), dtype=np.uint8)} if photo else {}
    made = make_panel(attention, "boxes", photos=photos)
    [block] = panel_data(made, default_choice(made), EmbeddedPhotos())["keys"]["blocks"]
    assert block["kind"] == "boxes" and block["at"] == [0, 1] and block["size"] == [16, 8]
    assert block["boxes"] == [[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]] and ("photo" in block) == photo
    assert save_panels(tmp_path / "boxes.png", [made]).stat().st_size > 1000


def test_hard_maps_are_marked_in_the_page_data(tmp_path: Path) -> None:
    kept = AttentionMap.from_cells(torch.tensor([[1.0, 0.0]]), grid(1, 2))
    hard = AttentionMap(kept.values, kept.keys, kind=Kind.AMOUNT)
    photo = {"image": np.full((8, 16, 3), 90, dtype=np.uint8)}
    made = make_panel(hard, "kept", photos=photo)
    assert panel_data(made, default_choice(made), EmbeddedPhotos())["hard"]
    soft = make_panel(kept.normalize(), "soft", photos=photo)
    assert not panel_data(soft, default_choice(soft), EmbeddedPhotos())["hard"]
    pictures = [
        save_panels(tmp_path / f"{one.title}.png", [one]).read_bytes() for one in (made, soft)
    ]
    assert pictures[0] != pictures[1]
