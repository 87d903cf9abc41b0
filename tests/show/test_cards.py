"""A gallery shows the same samples side by side, each picture where it belongs, in little room."""

import base64
import io
import math
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from overt.geometry import PixelGeometry
from overt.show import cards
from overt.show.cards import agreement, gallery, path, scale_css, under_css, where
from overt.show.overlay import PLAIN, Style, colour_table, heat, opacities
from overt.show.sample import Sample

Make = Callable[..., list[Sample]]


def decoded(uri: str) -> Image.Image:
    head, data = uri.split(",")
    assert head.startswith("data:image/") and head.endswith(";base64")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_same_samples_stand_side_by_side(samples: Make) -> None:
    soft, none = samples("soft attention", 4), samples("no attention", 6)
    found = gallery([soft[::-1], none])
    assert [card.id for card in found.cards[:4]] == [sample.id for sample in soft[::-1]]
    assert [len(card.views) for card in found.cards] == [2, 2, 2, 2, 1, 1]
    assert [view.run for view in found.cards[0].views] == [0, 1]
    assert found.cards[4].views[0].run == 1
    assert found.found == 6 and len(gallery([soft], most=3).cards) == 3
    assert found.groups == ["count", "exist", "query colour", "spatial"]


def test_each_photo_is_embedded_once_and_small_ones_exactly(samples: Make) -> None:
    soft = samples("soft attention", 3)
    found = gallery([soft, samples("truth-supervised", 3)])
    assert len(found.photos) == 3
    for card, sample in zip(found.cards, soft, strict=True):
        assert (np.asarray(decoded(found.photos[card.photo])) == sample.image).all()


def test_the_embedded_heat_is_the_heat_of_an_overlay() -> None:
    """Decoded from the page, the layer has the colours and opacities the overlay mixes."""
    geometry = PixelGeometry.identity(1, (96, 72)).resize((64, 64)).crop(0, 8, 48, 48)
    cells = np.random.default_rng(0).random((4, 4))
    image = np.zeros((96, 72, 3), np.uint8)
    (card,) = gallery([[Sample(id="a", image=image, geometry=geometry, cells=cells)]]).cards
    layer = np.asarray(decoded(card.views[0].heat).convert("RGBA")).astype(float)
    levels = heat(cells, geometry)
    np.testing.assert_allclose(layer[..., :3], colour_table(PLAIN.colours)[levels], atol=0.51)
    np.testing.assert_allclose(layer[..., 3], 255 * opacities()[levels], atol=0.51)


@pytest.mark.parametrize("side", [64, 400], ids=["small", "large"])
def test_photos_and_heat_stay_within_their_share(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is the worst there is to compress. Four photos with a share for four."""
    monkeypatch.setattr(cards, "PHOTO_BYTES", cards.PHOTO_BYTES // 16)
    monkeypatch.setattr(cards, "HEAT_BYTES", cards.HEAT_BYTES // 16)
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            id=str(i),
            image=rng.integers(0, 255, (side, side // 2, 3)).astype(np.uint8),
            cells=rng.random((14, 14)),
        )
        for i in range(4)
    ]
    found = gallery([samples, samples, samples])
    assert len(found.photos) == 4
    assert sum(map(len, found.photos)) < 1.4 * cards.PHOTO_BYTES
    heats = [view.heat for card in found.cards for view in card.views]
    assert all(heats) and sum(map(len, heats)) < 1.4 * cards.HEAT_BYTES


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        (0, 0, "at the top left"),
        (1, 1, "in the centre"),
        (2, 1, "at the bottom"),
        (1, 2, "at the right"),
    ],
)
def test_where_says_it_in_words(row: int, column: int, words: str) -> None:
    cells = np.zeros((3, 3))
    cells[row, column] = 1
    assert where(cells, PixelGeometry.identity(1, (90, 30))) == words


def test_where_is_on_the_photo_not_on_the_canvas() -> None:
    cells = np.zeros((3, 3))
    cells[0, 0] = 1
    assert where(cells, PixelGeometry.identity(1, (90, 90)).flip()) == "at the top right"
    lower = PixelGeometry.identity(1, (90, 90)).crop(60, 60, 30, 30)
    assert where(cells, lower) == "at the bottom right"


def test_what_is_missing_is_said(samples: Make) -> None:
    (view,) = gallery([samples("no attention", 1)]).cards[0].views
    assert (view.heat, view.note) == ("", "no attention over the image")
    image = np.zeros((8, 8, 3), np.uint8)
    broken = Sample(id="a", image=image, cells=np.array([[math.nan, 1.0]]))
    (view,) = gallery([[broken]]).cards[0].views
    assert view.heat == "" and "not finite" in view.note
    text_only = Sample(id="a", text="who?", spans=np.array([[0, 3]]), word_weights=np.ones(1))
    card = gallery([[text_only]]).cards[0]
    assert card.photo is None and card.views[0].note == "" and 'class="word"' in card.views[0].words
    assert gallery([[]]).cards == () and gallery([[], []]).photos == ()


def test_a_gallery_knows_what_it_has_to_explain(samples: Make) -> None:
    everything = {"heat": True, "outline": True, "words": True, "inside": True, "right": True}
    everything["levels"] = False
    assert gallery([samples("soft attention", 1)]).has == everything
    bare = gallery([[Sample(id="a", text="who?", prediction="me")]])
    assert bare.has == dict.fromkeys(everything, False)


def test_outlines_are_paths_in_pixels_of_the_photo() -> None:
    assert (
        path([[(0, 10), (10.5, 10), (10.5, 20), (0, 20), (0, 10)]]) == "M0,10L10.5,10L10.5,20L0,20Z"
    )
    assert path([]) == ""


def test_agreement_is_the_mass_inside_or_else_pointing() -> None:
    assert agreement({"pointing": 1.0, "mass_inside": 0.3}) == 0.3
    assert agreement({"pointing": 1.0, "mass": math.nan}) == 1.0
    assert agreement({"entropy": 2.0}) is None


def test_the_key_runs_through_the_colours_of_the_map() -> None:
    css = scale_css()
    assert css.startswith("linear-gradient(to right, rgb(0 0 4 / 0.00)")
    assert css.endswith("rgb(252 255 164 / 0.85))")


def test_the_photo_under_heat_is_treated_as_in_an_overlay() -> None:
    assert under_css(Style(fade=0.5, dim=0.25)) == "grayscale(0.5) brightness(0.75)"


def test_every_level_is_drawn_small_in_its_order() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    low, high, broken = np.zeros((4, 4)), np.zeros((2, 2)), np.full((2, 2), math.nan)
    low[0, 0] = high[1, 1] = 0.5
    maps = {"4x4": low, "broken": broken, "2x2": high}
    truth = np.eye(2)  # of the grid of the last level
    one = Sample(id="a", image=image, cells=high, truth_cells=truth, levels=maps)
    found = gallery([[one]])
    (view,) = found.cards[0].views
    assert [level.name for level in view.levels] == ["4x4", "2x2"]  # the broken one is left out
    assert view.levels[0].alt == "4x4. Attention: most at the top left, 0.5 in one cell of 4 × 4."
    layer = np.asarray(decoded(view.levels[1].heat).convert("RGBA"))[..., 3].astype(int)
    assert layer[-1, -1] > layer[0, 0] == 0
    assert found.has["levels"]
    without = gallery([[Sample(id="a", text="who?", levels=maps)]])
    assert without.cards[0].views[0].levels == ()
