import re
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest
from PIL import Image

from overt.errors import UserError
from overt.viz.figure import (
    CATEGORICAL_COLOURS,
    PAGE_WIDTH,
    add_axes,
    add_colour_bar,
    add_text,
    colour_weights,
    new_figure,
    save_figure,
    show_image,
)
from overt.viz.photo_overlay import white_colour_table


def make_figure():
    figure = new_figure(PAGE_WIDTH, 1.0)
    show_image(add_axes(figure, 1.0, 0.25, 0.5, 0.5), np.full((2, 2, 3), (10, 200, 30), np.uint8))
    add_text(figure, 2.0, 0.5, "no $sign$ means <anything>")
    add_colour_bar(figure, (3.0, 0.4, 1.0, 0.1), white_colour_table(), ("0", "0.5"), "weight")
    return figure


def test_positions_in_inches_match_the_pixels(tmp_path):
    picture = np.asarray(Image.open(save_figure(tmp_path / "a.png", make_figure())).convert("RGB"))
    assert picture.shape[:2] == (300, 2100)
    green = np.argwhere((picture == (10, 200, 30)).all(axis=-1))
    assert np.abs(green.min(axis=0) - (75, 300)).max() <= 1
    assert np.abs(green.max(axis=0) - (224, 449)).max() <= 1


def test_pages_make_no_requests_and_keep_text_as_text(tmp_path):
    svg = save_figure(str(tmp_path / "a.svg"), make_figure(), "a map & more").read_text()
    minidom.parseString(svg)
    assert "no $sign$ means &lt;anything&gt;" in svg and "a map &amp; more" in svg
    html = save_figure(tmp_path / "a.html", make_figure(), "a map & more").read_text()
    assert 'aria-label="a map &amp; more"' in html and "prefers-color-scheme: dark" in html
    urls = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#|data:)([^"\')\s>]+)', html)
    assert [one for one in urls if one.startswith(("http", "//", "file"))] == []
    assert "<script" not in html


def test_saved_figures_are_deterministic(tmp_path):
    for kind in ("png", "svg", "html"):
        one, two = (save_figure(tmp_path / f"{n}.{kind}", make_figure()).read_bytes() for n in "ab")
        assert one == two


def test_unsupported_file_format_raises(tmp_path):
    with pytest.raises(UserError, match=r"png.*svg.*html"):
        save_figure(Path("a.gif"), make_figure())


def lightness(colours: np.ndarray) -> np.ndarray:
    """CIE L* of colours from 0 to 255."""
    linear = np.where(colours / 255 <= 0.04045, colours / 255 / 12.92,
                      ((colours / 255 + 0.055) / 1.055) ** 2.4)  # fmt: skip
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


def as_deuteranope(colours: np.ndarray) -> np.ndarray:
    """The colours as perceived with deuteranopia (Machado, Oliveira and Fernandes 2009)."""
    matrix = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    return (colours @ matrix.T).clip(0, 255)


def test_colour_scale_is_monotone_also_with_deuteranopia():
    for perceived in (
        white_colour_table().astype(float),
        as_deuteranope(white_colour_table().astype(float)),
    ):
        assert (np.diff(lightness(perceived)) <= 0.35).all()  # rounding to whole numbers
        assert lightness(perceived)[0] - lightness(perceived)[-1] > 75


def test_categorical_colours_differ_also_with_deuteranopia():
    colours = np.array(
        [[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in CATEGORICAL_COLOURS], float
    )
    for perceived in (colours, as_deuteranope(colours)):
        distances = np.linalg.norm(perceived[:, None] - perceived[None], axis=-1)
        assert distances[~np.eye(len(CATEGORICAL_COLOURS), dtype=bool)].min() > 25


def test_colour_weights_saturates_at_the_maximum():
    found = colour_weights(np.array([[0.0, 0.5, 1.0, 2.0, -1.0]]), 1.0)
    assert (found[0, 0] == 255).all() and (found[0, 4] == 255).all()
    assert (found[0, 2] == white_colour_table()[-1]).all() and (found[0, 3] == found[0, 2]).all()
    assert (colour_weights(np.ones((1, 1)), 0.0) == 255).all()
