"""Views as pictures: the right colours at the right places, and files that open."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap, Kind, Layout, Span, words
from overt.errors import BadInput
from overt.geometry import PixelGeometry, TextGeometry
from overt.show.look import (
    coloured,
    elsewhere,
    figure,
    marked,
    multiples,
    save,
    sheet,
    strongest,
    white_scale,
)
from overt.show.panel import Choice, Panel, choose, panel, row, usual

TEXT = "a $x$ <dog> & é"  # signs that mean something to one drawing program or another
SPANS = torch.tensor([[[-1, -1], [0, 1], [2, 5], [6, 11], [-1, -1]]])


def reading() -> Panel:
    """Five tokens, the first and last of them special; every query looks at the third most."""
    weights = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.0]).expand(1, 2, 3, 5, 5).clone()
    layout = words(5, geometry=TextGeometry((TEXT,), SPANS))
    names = ["[CLS]", "a", "$x$", "<dog>", "[SEP]"]
    return panel(AttentionMap(weights, layout, layout), "words", queries=names, keys=names)


def looking(flip: bool = False) -> Panel:
    """A 2 x 2 grid over the middle of a photo of 40 x 80; all weight is on its lower left cell."""
    where = PixelGeometry.identity(1, (40, 80)).crop(0, 20, 40, 40)
    where = where.flip() if flip else where
    layout = Layout(
        (Span("class", (1,), slice(0, 1)), Span("image", (2, 2), slice(1, 5), where)), 5
    )
    values = torch.zeros(1, 2, 3, 5, 5)
    values[..., 0] = 0.25
    values[..., 3] = 0.75
    photo = np.full((40, 80, 3), 120, dtype=np.uint8)
    return panel(AttentionMap(values, layout, layout), "cells", photos={"image": photo})


def drawn(shown: Panel) -> np.ndarray:
    """The photo as it is in the figure."""
    axes = next(a for a in figure([shown], [usual(shown)]).axes if a.images)
    return np.asarray(axes.images[0].get_array()).astype(float)


@pytest.mark.parametrize("flip", [False, True])
def test_the_heat_is_on_the_cell_of_the_photo(flip: bool) -> None:
    picture = drawn(looking(flip))
    height, width = picture.shape[:2]
    warm = picture[..., 0] - picture[..., 2]
    y, x = np.unravel_index(warm.argmax(), warm.shape)
    assert 0.5 < y / height <= 1  # the lower half
    assert (0.5 if flip else 0.25) <= x / width <= (0.75 if flip else 0.5)
    beyond = [picture[:, : width // 5], picture[:, -width // 5 :]]
    assert all(np.ptp(part) == 0 for part in beyond)  # what the model never saw is left as it is


def test_words_are_marked_among_words_whatever_a_separator_takes() -> None:
    text, spans, amounts = marked(
        reading().attention.keys.spans[0], np.array([0.4, 0.1, 0.3, 0.2, 0])
    )
    assert text == TEXT and spans.shape == (5, 2)
    np.testing.assert_array_equal(amounts, [0, 0.1, 0.3, 0.2, 0])


def test_the_weight_beside_picture_and_words_is_said() -> None:
    shown = looking()
    assert elsewhere(shown, row(shown, usual(shown))) == "beside the picture: 0.250 (class 0.250)"
    shown = reading()
    said = elsewhere(shown, row(shown, usual(shown)))
    assert said == "beside the words: 0.400 ([CLS] 0.400, [SEP] 0.000)"
    bare = panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, *[Layout((), 2)] * 2))
    assert elsewhere(bare, np.array([0.5, 0.5])) == ""


def test_the_strongest_keys_are_named_with_their_weights() -> None:
    assert strongest(reading(), np.array([0.4, 0.1, 0.3, 0.2, 0.0]), 2) == (
        "most on [CLS] 0.400, $x$ 0.300"
    )
    assert strongest(reading(), np.zeros(5)) == "no weight on any key"


def test_multiples_show_the_query_on_a_picture_and_all_queries_on_text() -> None:
    shown = looking()
    tiles = multiples(shown, usual(shown))
    assert tiles.shape == (2, 3, 2, 2, 3)
    scale = white_scale()
    assert (tiles[:, :, 1, 0] == scale[255]).all() and (tiles[:, :, 0] == scale[0]).all()
    assert multiples(reading(), Choice(0)).shape == (2, 3, 5, 5, 3)


def test_a_large_map_keeps_its_single_strong_cell() -> None:
    layout = words(200)
    values = torch.zeros(1, 1, 2, 200, 200)
    values[..., 150, 77] = 1.0
    shown = panel(AttentionMap(values, layout, layout, kind=Kind.AMOUNT))
    tiles = multiples(shown, Choice(0))
    assert tiles.shape[2:4] == (50, 50)
    dark = np.argwhere((tiles[0, 0] != 255).any(axis=-1))
    assert dark.tolist() == [[150 // 4, 77 // 4]]


def test_tiles_stand_side_by_side() -> None:
    tiles = np.zeros((2, 3, 4, 4, 3), dtype=np.uint8)
    made = sheet(tiles)
    assert made.shape == (2 * (72 + 6), 3 * (72 + 6), 3)
    assert made[0].min() == 255 and made[3 + 36, 3 + 36].max() == 0


def test_no_weight_is_white_and_the_largest_the_darkest() -> None:
    colours = coloured(np.array([[0.0, -1.0, 1.0, 0.0]]))
    assert colours[0, 0].tolist() == colours[0, 1].tolist() == [255, 255, 255]
    assert colours[0, 2].max() < 64
    even = coloured(np.full((3, 3), 0.1))
    assert even.min() > 128  # a map that prefers nothing is pale
    bright = white_scale().astype(int).sum(axis=1)
    assert (np.diff(bright) <= 1).all()  # darker all the way, but for rounding


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_files_open_and_are_the_same_each_time(tmp_path: Path, kind: str) -> None:
    panels = [reading(), looking()]
    one = save(tmp_path / f"a.{kind}", panels)
    two = save(str(tmp_path / f"b.{kind}"), panels)
    assert one.read_bytes() == two.read_bytes()
    if kind == "png":
        with Image.open(one) as picture:
            assert picture.size[0] == 1296 and picture.size[1] > 1000
    else:
        text = "".join(ET.fromstring(one.read_text()).itertext())
        assert all(word in text for word in ("$x$", "<dog>", "é", "[CLS]", "words", "cells"))


def test_a_text_with_line_breaks_stays_on_its_lines(tmp_path: Path) -> None:
    spans = torch.tensor([[[0, 1], [2, 3]]])
    layout = words(2, geometry=TextGeometry(("a\nb",), spans))
    shown = panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, layout, layout))
    drawn = [text.get_text() for text in figure([shown], [usual(shown)]).texts]
    assert not any("\n" in text for text in drawn)


@pytest.mark.filterwarnings("error")
def test_letters_that_a_font_lacks_are_no_noise(tmp_path: Path) -> None:
    layout = words(2, geometry=TextGeometry(("狗 😀",), torch.tensor([[[0, 1], [2, 3]]])))
    shown = panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, layout, layout))
    save(tmp_path / "dog.png", [shown])
    assert "狗" in save(tmp_path / "dog.svg", [shown]).read_text()


def test_many_layers_are_left_to_the_page() -> None:
    layout = words(2)
    shown = panel(AttentionMap(torch.ones(1, 60, 1, 2, 2) / 2, layout, layout))
    texts = [text.get_text() for text in figure([shown], [usual(shown)]).texts]
    assert any("60 layers of 1 heads are too many" in text for text in texts)


def test_a_cell_grid_without_its_photo_is_still_shown(tmp_path: Path) -> None:
    shown = looking()
    bare = panel(shown.attention)
    save(tmp_path / "bare.png", [bare], [choose(bare, query="image 0,1")])


def test_the_row_of_the_query_is_framed_in_the_table() -> None:
    shown = reading()
    for query, frames in ((None, 0), ("$x$", 1)):
        made = figure([shown], [choose(shown, query=query)])
        assert sum(len(axes.patches) for axes in made.axes) == frames


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ends in .png, .svg or .html"):
        save(tmp_path / "view.pdf", [reading()])


@pytest.mark.parametrize("kind", ["png", "html"])
def test_a_map_that_is_not_a_number_is_said_to_be_none(tmp_path: Path, kind: str) -> None:
    """Not that its weight is on no key, as that of a row that sees nothing."""
    layout = words(2)
    values = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]]).reshape(1, 1, 1, 2, 2)
    shown = panel(AttentionMap(values, layout, layout), about="Two words.")
    assert shown.about == "Two words. 2 of its 4 weights are NaN, and drawn as none."
    told = [strongest(shown, row(shown, choose(shown, query=str(at)))) for at in (0, 1)]
    assert told == ["most on text 0 0.500, text 1 0.500", "2 of 2 weights are NaN"]
    save(tmp_path / f"view.{kind}", [shown])
    photo = looking()
    spoilt = replace(photo.attention, values=torch.full_like(photo.attention.values, torch.nan))
    save(tmp_path / f"photo.{kind}", [panel(spoilt, photos=photo.photos)])
