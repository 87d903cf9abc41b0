"""The page to look around in: what it holds is what was captured, and it says what it left out."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Kind, Layout, Span, grid, regions, words
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
from overt.show import browse
from overt.show.browse import Photos, described, fitted, page, placed
from overt.show.look import save
from overt.show.page import POLICY
from overt.show.panel import Choice, Panel, panel, usual

HOSTILE = '</script><img src=x onerror="alert(1)">'


def shown(text: str = "a dog", layers: int = 2, heads: int = 3) -> Panel:
    """Two words and a 1 x 2 picture, with random weights."""
    geometry = TextGeometry((text,), torch.tensor([[[0, 1], [2, len(text)]]]))
    layout = words(2, geometry=geometry) + Layout((Span("image", (1, 2), slice(0, 2)),), 2)
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(1, layers, heads, 4, 4, generator=draw)
    photo = np.zeros((8, 16, 3), dtype=np.uint8)
    return panel(AttentionMap.from_scores(scores, layout, layout), text, photos={"image": photo})


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_the_weights_to_one_part_in_two_thousand() -> None:
    one = shown()
    made = described(one, usual(one), Photos())
    held = np.frombuffer(base64.b64decode(made["weights"]), dtype="<f2").reshape(2, 3, 4, 4)
    np.testing.assert_allclose(held, one.attention.weights[0].numpy(), rtol=1 / 2000, atol=0)
    assert made["same"] and made["heads"] == 3 and made["rows"] == [True] * 4


def test_an_axis_is_pictures_texts_and_the_rest() -> None:
    made = described(shown(), Choice(0), Photos())["keys"]
    kinds = [(block["kind"], block.get("at")) for block in made["blocks"]]
    assert kinds == [("grid", [2, 3]), ("text", None)]
    assert made["blocks"][1]["parts"] == [["a", 0], [" ", -1], ["dog", 1]]
    assert made["names"] == ["a", "dog", "image 0,0", "image 0,1"]


def test_a_photo_is_there_once() -> None:
    text = page([shown(), shown()], [Choice(0), Choice(1)])
    assert text.count("data:image/jpeg;base64,") == 1


def test_nothing_that_comes_from_data_is_code() -> None:
    text = page([shown(HOSTILE)], [Choice(0)], title=HOSTILE, notes=[HOSTILE])
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

    Reader().feed(text)
    assert "img" not in tags and tags.count("script") == 2
    assert data_of(text)["panels"][0]["title"] == HOSTILE  # type: ignore[index]


def test_the_page_asks_nobody_and_says_so_to_the_browser() -> None:
    text = page([shown()], [Choice(0)])
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)[^"'#]""", text)
    assert not re.search(r"https?://", text)


def test_too_many_weights_lose_their_heads_then_their_layers_and_it_is_said() -> None:
    one = shown()
    assert fitted(one, Choice(1, 2, 3)) == (one, Choice(1, 2, 3))
    fused, choice = fitted(one, Choice(1, 2, 3), most=50)
    assert fused.heads == 1 and choice == Choice(1, None, 3)
    assert "96 numbers: this page has the mean of the heads." in fused.about
    torch.testing.assert_close(fused.attention.weights[:, :, 0], one.attention.weights.mean(dim=2))
    single, choice = fitted(one, Choice(1, 2, 3), most=20)
    assert single.layers == ("layer 1",) and choice == Choice(0, None, 3)
    assert "it has layer 1 alone" in single.about


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
def test_the_grid_is_placed_where_its_cells_are(where: PixelGeometry) -> None:
    """The box of each cell, from shares of the photo, is that of the geometry."""
    made = placed(where, (40, 80))
    left, top, wide, tall = made["place"]
    x, y, w, h = made["kept"]
    shape = (2, 4)
    boxes = where.cells(shape)[0].reshape(2, 4, 4).numpy()
    for r in range(2):
        for c in range(4):
            across = 3 - c if made["flip"] else c
            x0, x1 = (80 * (left + wide * (across + n) / 4) for n in (0, 1))
            y0, y1 = (40 * (top + tall * (r + n) / 2) for n in (0, 1))
            box = np.array([x0, y0, x1, y1])
            low, high = np.array([x, y] * 2), np.array([x + w, y + h] * 2)
            box = np.clip(box, low * [80, 40, 80, 40], high * [80, 40, 80, 40])
            np.testing.assert_allclose(box, boxes[r, c], atol=1e-9)


def test_save_writes_the_page(tmp_path: Path) -> None:
    path = save(tmp_path / "view.html", [shown()])
    assert data_of(path.read_text())["panels"][0]["start"] == {  # type: ignore[index]
        "layer": 1, "head": None, "query": None,
    }  # fmt: skip
    assert path.stat().st_size < 60_000


def test_half_a_surrogate_pair_is_no_error() -> None:
    assert page([shown()], [Choice(0)], title="\ud83d").encode()


def test_the_limit_is_what_a_browser_opens_at_once() -> None:
    assert browse.MOST_WEIGHTS * 2 * 4 / 3 <= 16_000_000  # base64 of two bytes a weight


@pytest.mark.parametrize("photo", [True, False], ids=["photo", "bare"])
def test_boxes_are_told_as_shares_of_their_photo(photo: bool, tmp_path: Path) -> None:
    where = RegionGeometry(torch.tensor([[[0.0, 0.0, 8.0, 4.0], [8.0, 4.0, 16.0, 8.0]]]))
    attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), regions(2, geometry=where))
    photos = {"regions": np.zeros((8, 16, 3), dtype=np.uint8)} if photo else {}
    made = panel(attention, "boxes", photos=photos)
    [block] = described(made, usual(made), Photos())["keys"]["blocks"]
    assert block["kind"] == "boxes" and block["at"] == [0, 1] and block["size"] == [16, 8]
    assert block["boxes"] == [[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]] and ("photo" in block) == photo
    assert save(tmp_path / "boxes.png", [made]).stat().st_size > 1000


def test_kept_cells_are_told_apart_from_weights(tmp_path: Path) -> None:
    kept = AttentionMap.from_cells(torch.tensor([[1.0, 0.0]]), grid(1, 2))
    hard = AttentionMap(kept.values, kept.keys, kind=Kind.AMOUNT)
    photo = {"image": np.full((8, 16, 3), 90, dtype=np.uint8)}
    made = panel(hard, "kept", photos=photo)
    assert described(made, usual(made), Photos())["hard"]
    soft = panel(kept.normalize(), "soft", photos=photo)
    assert not described(soft, usual(soft), Photos())["hard"]
    pictures = [save(tmp_path / f"{one.title}.png", [one]).read_bytes() for one in (made, soft)]
    assert pictures[0] != pictures[1]
