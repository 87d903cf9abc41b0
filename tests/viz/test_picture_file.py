"""Pictures of maps in one call."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import AttentionMap, PixelGeometry, TextGeometry, grid, words
from overt.attention import Kind
from overt.errors import UserError
from overt.viz import overlay, save_picture

PHOTO = np.full((40, 60, 3), 128, np.uint8)
HEAT = AttentionMap.from_cells(
    torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.9]]),
    grid(2, 3, geometry=PixelGeometry.identity(1, (40, 60))),
)


def test_png_is_the_overlay(tmp_path: Path) -> None:
    assert HEAT.save(tmp_path / "heat.PNG", PHOTO) == tmp_path / "heat.PNG"
    assert (np.asarray(Image.open(tmp_path / "heat.PNG")) == overlay(PHOTO, HEAT)).all()
    HEAT.save(str(tmp_path / "pil.png"), Image.fromarray(PHOTO))
    assert (tmp_path / "pil.png").read_bytes() == (tmp_path / "heat.PNG").read_bytes()


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_a_map_without_geometry_warns(tmp_path: Path, suffix: str) -> None:
    attention = AttentionMap.from_cells(torch.rand(1, 49), grid(7, 7))
    with pytest.warns(UserWarning, match="processor="):
        save_picture(tmp_path / f"heat{suffix}", attention, np.zeros((64, 96, 3), np.uint8))


def test_png_without_a_photo_has_square_cells(tmp_path: Path) -> None:
    width, height = Image.open(save_picture(tmp_path / "heat.png", HEAT)).size
    assert width / 3 == height / 2


def test_svg_shades_the_text(tmp_path: Path) -> None:
    text = TextGeometry(("a red ring",), torch.tensor([[[0, 1], [2, 5], [6, 10]]]))
    heat = AttentionMap.from_cells(torch.tensor([[0.0, 0.25, 0.75]]), words(3, geometry=text))
    assert "<title>ring: 0.750</title>" in heat.save(tmp_path / "words.svg").read_text()
    with pytest.raises(ValueError, match="image"):
        heat.save(tmp_path / "words.png", PHOTO)


def test_maps_without_a_place_are_figures(tmp_path: Path) -> None:
    text = TextGeometry(("a red ring",), torch.tensor([[[0, 1], [2, 5], [6, 10]]]))
    among = torch.full((1, 2, 2, 2, 3), 1 / 3)
    for keys in (words(3), words(3, geometry=text)):
        attention = AttentionMap(among, keys, words(2, "new"))
        assert min(Image.open(attention.save(tmp_path / "all.png", query=1)).size) > 300
    drawn = AttentionMap(among, words(3), words(2, "new")).save(tmp_path / "all.svg").read_text()
    assert "every layer (down) and head (across)" in drawn
    assert "<image" in HEAT.save(tmp_path / "photo.svg", PHOTO).read_text()


def test_several_samples_are_refused(tmp_path: Path) -> None:
    two = HEAT.select(torch.tensor([0, 0]))
    for name in ("two.png", "two.svg", "two.html"):
        with pytest.raises(ValueError, match=r"sample\(0\)"):
            two.save(tmp_path / name)


def test_html_is_a_page_with_the_photo(tmp_path: Path) -> None:
    page = HEAT.save(tmp_path / "heat.html", PHOTO).read_text()
    assert page.startswith("<!doctype html>")
    assert "data:image" in page


def test_show_is_displayed_by_notebooks():
    assert "<iframe" in HEAT.show(PHOTO)._repr_html_()


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("heat.gif", {}, ValueError, "gif.*png"),
        ("heat", {}, ValueError, "png"),
        ("heat.png", {"layer": 3}, UserError, "layers.* 0 .*3"),
        ("heat.svg", {"head": 3}, UserError, "heads.* 0 .*3"),
    ],
)
def test_bad_requests_write_nothing(
    name: str, change: dict[str, int], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        HEAT.save(tmp_path / name, PHOTO, **change)
    assert not list(tmp_path.iterdir())


def test_signed_maps_are_not_drawn_as_heat(tmp_path: Path) -> None:
    signed = AttentionMap(HEAT.values - 0.3, HEAT.keys, kind=Kind.SIGNED)
    for name in ("heat.png", "heat.svg"):
        with pytest.raises(ValueError, match="positive"):
            signed.save(tmp_path / name)
    signed.positive().save(tmp_path / "heat.png")


def test_a_map_without_a_grid_names_the_layouts_that_make_one(tmp_path: Path) -> None:
    photo = np.zeros((8, 8, 3), np.uint8)
    axis = words(5)
    attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 5, 5), axis, axis)
    with pytest.raises(ValueError, match=r"layout_of.*grid\("):
        save_picture(tmp_path / "heat.png", attention, photo)
    two = grid(2, 2, name="left") + grid(2, 2, name="right")
    attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 8), two)
    with pytest.raises(ValueError, match=r"2 .*\.block"):
        save_picture(tmp_path / "heat.png", attention, photo)
