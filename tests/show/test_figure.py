import re
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest
from PIL import Image

from overt.errors import BadInput
from overt.show.figure import (
    APART,
    PAGE,
    blank,
    finite,
    place,
    save_figure,
    say,
    scale,
    shaded,
    show,
)
from overt.show.look import white_scale


def drawn():
    figure = blank(PAGE, 1.0)
    show(place(figure, 1.0, 0.25, 0.5, 0.5), np.full((2, 2, 3), (10, 200, 30), np.uint8))
    say(figure, 2.0, 0.5, "no $sign$ means <anything>")
    scale(figure, (3.0, 0.4, 1.0, 0.1), white_scale(), ("0", "0.5"), "weight")
    return figure


def test_a_place_in_inches_is_where_the_pixels_are(tmp_path):
    picture = np.asarray(Image.open(save_figure(tmp_path / "a.png", drawn())).convert("RGB"))
    assert picture.shape[:2] == (300, 2100)
    green = np.argwhere((picture == (10, 200, 30)).all(axis=-1))
    assert np.abs(green.min(axis=0) - (75, 300)).max() <= 1
    assert np.abs(green.max(axis=0) - (224, 449)).max() <= 1


def test_pages_ask_for_nothing_and_letters_stay_letters(tmp_path):
    svg = save_figure(str(tmp_path / "a.svg"), drawn(), "a map & more").read_text()
    minidom.parseString(svg)
    assert "no $sign$ means &lt;anything&gt;" in svg and "a map &amp; more" in svg
    html = save_figure(tmp_path / "a.html", drawn(), "a map & more").read_text()
    assert 'aria-label="a map &amp; more"' in html and "prefers-color-scheme: dark" in html
    asked = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?!#|data:)([^"\')\s>]+)', html)
    assert [one for one in asked if one.startswith(("http", "//", "file"))] == []
    assert "<script" not in html


def test_the_same_figure_is_the_same_bytes(tmp_path):
    for kind in ("png", "svg", "html"):
        one, two = (save_figure(tmp_path / f"{n}.{kind}", drawn()).read_bytes() for n in "ab")
        assert one == two


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"ends in \.png, \.svg or \.html"):
        save_figure(Path("a.gif"), drawn())


def lightness(colours: np.ndarray) -> np.ndarray:
    """CIE L* of colours from 0 to 255."""
    linear = np.where(colours / 255 <= 0.04045, colours / 255 / 12.92,
                      ((colours / 255 + 0.055) / 1.055) ** 2.4)  # fmt: skip
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


def as_deuteranope(colours: np.ndarray) -> np.ndarray:
    """What a person without green cones sees (Machado, Oliveira and Fernandes 2009)."""
    matrix = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    return (colours @ matrix.T).clip(0, 255)


def test_the_scale_grows_darker_all_the_way_for_everybody():
    for seen in (white_scale().astype(float), as_deuteranope(white_scale().astype(float))):
        assert (np.diff(lightness(seen)) <= 0.35).all()  # rounding to whole numbers
        assert lightness(seen)[0] - lightness(seen)[-1] > 75


def test_colours_that_tell_things_apart_do_so_for_everybody():
    colours = np.array([[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in APART], float)
    for seen in (colours, as_deuteranope(colours)):
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1)
        assert apart[~np.eye(len(APART), dtype=bool)].min() > 25


def test_weights_are_shaded_up_to_the_top():
    found = shaded(np.array([[0.0, 0.5, 1.0, 2.0, -1.0]]), 1.0)
    assert (found[0, 0] == 255).all() and (found[0, 4] == 255).all()
    assert (found[0, 2] == white_scale()[-1]).all() and (found[0, 3] == found[0, 2]).all()
    assert (shaded(np.ones((1, 1)), 0.0) == 255).all()


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="2 weights of the map are not finite"):
        finite(np.array([np.nan, np.inf, 1.0]))
