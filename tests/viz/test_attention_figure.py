"""Attention figures: colours, positions, labels and valid files."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap, Kind, Layout, Span, words
from overt.errors import UserError
from overt.geometry import PixelGeometry, TextGeometry
from overt.viz.attention_figure import (
    colour_on_white,
    describe_other_keys,
    describe_strongest,
    draw_panels,
    save_panels,
    small_multiples,
    tile_sheet,
)
from overt.viz.panel import (
    Choice,
    Panel,
    choose,
    default_choice,
    make_panel,
    text_weights,
    weight_row,
)
from overt.viz.photo_overlay import white_colour_table

TEXT = "a $x$ <dog> & é"  # characters with a special meaning in SVG, HTML or mathtext
SPANS = torch.tensor([[[-1, -1], [0, 1], [2, 5], [6, 11], [-1, -1]]])


def make_text_panel() -> Panel:
    """Five tokens, the first and last of them special; all queries have the same weights."""
    weights = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.0]).expand(1, 2, 3, 5, 5).clone()
    layout = words(5, geometry=TextGeometry((TEXT,), SPANS))
    names = ["[CLS]", "a", "$x$", "<dog>", "[SEP]"]
    return make_panel(AttentionMap(weights, layout, layout), "words", queries=names, keys=names)


def make_photo_panel(flip: bool = False) -> Panel:
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
    return make_panel(AttentionMap(values, layout, layout), "cells", photos={"image": photo})


def drawn_photo(shown: Panel) -> np.ndarray:
    """The photo as drawn in the figure."""
    axes = next(a for a in draw_panels([shown], [default_choice(shown)]).axes if a.images)
    return np.asarray(axes.images[0].get_array()).astype(float)


@pytest.mark.parametrize("flip", [False, True])
def test_heat_is_drawn_on_the_cell_of_the_photo(flip: bool) -> None:
    picture = drawn_photo(make_photo_panel(flip))
    height, width = picture.shape[:2]
    warm = picture[..., 0] - picture[..., 2]
    y, x = np.unravel_index(warm.argmax(), warm.shape)
    assert 0.5 < y / height <= 1  # the lower half
    assert (0.5 if flip else 0.25) <= x / width <= (0.75 if flip else 0.5)
    beyond = [picture[:, : width // 5], picture[:, -width // 5 :]]
    assert all(np.ptp(part) == 0 for part in beyond)  # pixels outside the crop are unchanged


def test_text_weights_ignore_special_tokens() -> None:
    text, spans, amounts = text_weights(
        make_text_panel().attention.keys.spans[0], np.array([0.4, 0.1, 0.3, 0.2, 0])
    )
    assert text == TEXT and spans.shape == (5, 2)
    np.testing.assert_array_equal(amounts, [0, 0.1, 0.3, 0.2, 0])


def test_weight_outside_image_and_text_is_described() -> None:
    shown = make_photo_panel()
    assert (
        describe_other_keys(shown, weight_row(shown, default_choice(shown)))
        == "outside the image: 0.250 (class 0.250)"
    )
    shown = make_text_panel()
    message = describe_other_keys(shown, weight_row(shown, default_choice(shown)))
    assert message == "outside the text: 0.400 ([CLS] 0.400, [SEP] 0.000)"
    bare = make_panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, *[Layout((), 2)] * 2))
    assert describe_other_keys(bare, np.array([0.5, 0.5])) == ""


def test_strongest_keys_are_listed_with_their_weights() -> None:
    assert describe_strongest(make_text_panel(), np.array([0.4, 0.1, 0.3, 0.2, 0.0]), 2) == (
        "most on [CLS] 0.400, $x$ 0.300"
    )
    assert describe_strongest(make_text_panel(), np.zeros(5)) == "no weight on any key"


def test_small_multiples_show_one_query_on_images_and_all_on_text() -> None:
    shown = make_photo_panel()
    tiles = small_multiples(shown, default_choice(shown))
    assert tiles.shape == (2, 3, 2, 2, 3)
    scale = white_colour_table()
    assert (tiles[:, :, 1, 0] == scale[255]).all() and (tiles[:, :, 0] == scale[0]).all()
    assert small_multiples(make_text_panel(), Choice(0)).shape == (2, 3, 5, 5, 3)


def test_downscaled_map_keeps_a_single_strong_cell() -> None:
    layout = words(200)
    values = torch.zeros(1, 1, 2, 200, 200)
    values[..., 150, 77] = 1.0
    shown = make_panel(AttentionMap(values, layout, layout, kind=Kind.AMOUNT))
    tiles = small_multiples(shown, Choice(0))
    assert tiles.shape[2:4] == (50, 50)
    dark = np.argwhere((tiles[0, 0] != 255).any(axis=-1))
    assert dark.tolist() == [[150 // 4, 77 // 4]]


def test_tile_sheet_places_tiles_in_a_grid() -> None:
    tiles = np.zeros((2, 3, 4, 4, 3), dtype=np.uint8)
    made = tile_sheet(tiles)
    assert made.shape == (2 * (72 + 6), 3 * (72 + 6), 3)
    assert made[0].min() == 255 and made[3 + 36, 3 + 36].max() == 0


def test_zero_weight_is_white_and_the_largest_is_darkest() -> None:
    colours = colour_on_white(np.array([[0.0, -1.0, 1.0, 0.0]]))
    assert colours[0, 0].tolist() == colours[0, 1].tolist() == [255, 255, 255]
    assert colours[0, 2].max() < 64
    even = colour_on_white(np.full((3, 3), 0.1))
    assert even.min() > 128  # a uniform map is pale
    bright = white_colour_table().astype(int).sum(axis=1)
    assert (np.diff(bright) <= 1).all()  # monotonically darker, up to rounding


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_files_are_valid_and_deterministic(tmp_path: Path, kind: str) -> None:
    panels = [make_text_panel(), make_photo_panel()]
    one = save_panels(tmp_path / f"a.{kind}", panels)
    two = save_panels(str(tmp_path / f"b.{kind}"), panels)
    assert one.read_bytes() == two.read_bytes()
    if kind == "png":
        with Image.open(one) as picture:
            assert picture.size[0] == 1296 and picture.size[1] > 1000
    else:
        text = "".join(ET.fromstring(one.read_text()).itertext())
        assert all(word in text for word in ("$x$", "<dog>", "é", "[CLS]", "words", "cells"))


def test_text_with_line_breaks_is_drawn_on_one_line(tmp_path: Path) -> None:
    spans = torch.tensor([[[0, 1], [2, 3]]])
    layout = words(2, geometry=TextGeometry(("a\nb",), spans))
    shown = make_panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, layout, layout))
    drawn = [text.get_text() for text in draw_panels([shown], [default_choice(shown)]).texts]
    assert not any("\n" in text for text in drawn)


@pytest.mark.filterwarnings("error")
def test_missing_glyphs_do_not_warn(tmp_path: Path) -> None:
    layout = words(2, geometry=TextGeometry(("狗 😀",), torch.tensor([[[0, 1], [2, 3]]])))
    shown = make_panel(AttentionMap(torch.ones(1, 1, 1, 2, 2) / 2, layout, layout))
    save_panels(tmp_path / "dog.png", [shown])
    assert "狗" in save_panels(tmp_path / "dog.svg", [shown]).read_text()


def test_too_many_layers_are_not_drawn() -> None:
    layout = words(2)
    shown = make_panel(AttentionMap(torch.ones(1, 60, 1, 2, 2) / 2, layout, layout))
    texts = [text.get_text() for text in draw_panels([shown], [default_choice(shown)]).texts]
    assert any("60 layers of 1 heads do not fit" in text for text in texts)


def test_cell_grid_without_a_photo_is_drawn(tmp_path: Path) -> None:
    shown = make_photo_panel()
    bare = make_panel(shown.attention)
    save_panels(tmp_path / "bare.png", [bare], [choose(bare, query="image 0,1")])


def test_row_of_the_query_is_framed() -> None:
    shown = make_text_panel()
    for query, frames in ((None, 0), ("$x$", 1)):
        made = draw_panels([shown], [choose(shown, query=query)])
        assert sum(len(axes.patches) for axes in made.axes) == frames


def test_unsupported_file_format_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"png.*svg.*html"):
        save_panels(tmp_path / "view.pdf", [make_text_panel()])


@pytest.mark.parametrize("kind", ["png", "html"])
def test_nan_weights_are_reported(tmp_path: Path, kind: str) -> None:
    """The message differs from the one for a row without weight."""
    layout = words(2)
    values = torch.tensor([[0.5, 0.5], [torch.nan, torch.nan]]).reshape(1, 1, 1, 2, 2)
    shown = make_panel(AttentionMap(values, layout, layout), about="Two words.")
    assert shown.about == "Two words. 2 of 4 weights are NaN and drawn as zero."
    messages = [
        describe_strongest(shown, weight_row(shown, choose(shown, query=str(at)))) for at in (0, 1)
    ]
    assert messages == ["most on text 0 0.500, text 1 0.500", "2 of 2 weights are NaN"]
    save_panels(tmp_path / f"view.{kind}", [shown])
    photo = make_photo_panel()
    with_nan = replace(photo.attention, values=torch.full_like(photo.attention.values, torch.nan))
    save_panels(tmp_path / f"photo.{kind}", [make_panel(with_nan, photos=photo.photos)])
