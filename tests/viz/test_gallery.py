"""Galleries: samples of several runs side by side, embedded images and size limits."""

import base64
import io
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from overt.geometry import PixelGeometry
from overt.viz import gallery as gallery_module
from overt.viz.gallery import (
    build_gallery,
    colour_scale_css,
    dimmed_photo_css,
    evidence_agreement,
    faithfulness,
    peak_location,
    svg_path,
)
from overt.viz.gallery_sample import GallerySample
from overt.viz.packed_maps import unpack_map
from overt.viz.photo_overlay import (
    DEFAULT_STYLE,
    OverlayStyle,
    colour_table,
    heat_levels,
    opacities,
)

Make = Callable[..., list[GallerySample]]


def decode_image(uri: str) -> Image.Image:
    head, data = uri.split(",")
    assert head.startswith("data:image/") and head.endswith(";base64")
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_same_samples_of_several_runs_share_a_card(samples: Make) -> None:
    soft, none = samples("soft attention", 4), samples("no attention", 6)
    found = build_gallery([soft[::-1], none])
    assert [card.id for card in found.cards[:4]] == [sample.id for sample in soft[::-1]]
    assert [len(card.views) for card in found.cards] == [2, 2, 2, 2, 1, 1]
    assert [view.run for view in found.cards[0].views] == [0, 1]
    assert found.cards[4].views[0].run == 1
    assert found.found == 6 and len(build_gallery([soft], max_samples=3).cards) == 3
    assert found.groups == ["count", "exist", "query colour", "spatial"]


def test_photos_are_embedded_once_and_small_ones_losslessly(samples: Make) -> None:
    soft = samples("soft attention", 3)
    found = build_gallery([soft, samples("truth-supervised", 3)])
    assert len(found.photos) == 3
    for card, sample in zip(found.cards, soft, strict=True):
        assert (np.asarray(decode_image(found.photos[card.photo])) == sample.image).all()


def test_embedded_heat_equals_the_overlay() -> None:
    """The decoded layer has the colours and opacities of the overlay."""
    geometry = PixelGeometry.identity(1, (96, 72)).resize((64, 64)).crop(0, 8, 48, 48)
    cells = np.random.default_rng(0).random((4, 4))
    image = np.zeros((96, 72, 3), np.uint8)
    (card,) = build_gallery(
        [[GallerySample(id="a", image=image, geometry=geometry, cells=cells)]]
    ).cards
    layer = np.asarray(decode_image(card.views[0].heat).convert("RGBA")).astype(float)
    levels = heat_levels(cells, geometry)
    np.testing.assert_allclose(
        layer[..., :3], colour_table(DEFAULT_STYLE.colours)[levels], atol=0.51
    )
    np.testing.assert_allclose(layer[..., 3], 255 * opacities()[levels], atol=0.51)


@pytest.mark.parametrize("side", [64, 400], ids=["small", "large"])
def test_photos_and_heat_stay_within_their_size_limit(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is the worst case for compression; the limit is scaled to four photos."""
    monkeypatch.setattr(gallery_module, "PHOTO_BYTES", gallery_module.PHOTO_BYTES // 16)
    monkeypatch.setattr(gallery_module, "HEAT_BYTES", gallery_module.HEAT_BYTES // 16)
    rng = np.random.default_rng(0)
    samples = [
        GallerySample(
            id=str(i),
            image=rng.integers(0, 255, (side, side // 2, 3)).astype(np.uint8),
            cells=rng.random((14, 14)),
        )
        for i in range(4)
    ]
    found = build_gallery([samples, samples, samples])
    assert len(found.photos) == 4
    assert sum(map(len, found.photos)) < 1.4 * gallery_module.PHOTO_BYTES
    heats = [view.heat for card in found.cards for view in card.views]
    assert all(heats) and sum(map(len, heats)) < 1.4 * gallery_module.HEAT_BYTES


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        (0, 0, "at the top left"),
        (1, 1, "in the centre"),
        (2, 1, "at the bottom"),
        (1, 2, "at the right"),
    ],
)
def test_peak_location_is_described_in_words(row: int, column: int, words: str) -> None:
    cells = np.zeros((3, 3))
    cells[row, column] = 1
    assert peak_location(cells, PixelGeometry.identity(1, (90, 30))) == words


def test_peak_location_is_relative_to_the_photo() -> None:
    cells = np.zeros((3, 3))
    cells[0, 0] = 1
    assert peak_location(cells, PixelGeometry.identity(1, (90, 90)).flip()) == "at the top right"
    lower = PixelGeometry.identity(1, (90, 90)).crop(60, 60, 30, 30)
    assert peak_location(cells, lower) == "at the bottom right"


def test_missing_attention_is_noted(samples: Make) -> None:
    (view,) = build_gallery([samples("no attention", 1)]).cards[0].views
    assert (view.heat, view.note) == ("", "no attention over the image")
    image = np.zeros((8, 8, 3), np.uint8)
    broken = GallerySample(id="a", image=image, cells=np.array([[math.nan, 1.0]]))
    (view,) = build_gallery([[broken]]).cards[0].views
    assert view.heat == "" and "not finite" in view.note
    text_only = GallerySample(
        id="a", text="who?", spans=np.array([[0, 3]]), word_weights=np.ones(1)
    )
    card = build_gallery([[text_only]]).cards[0]
    assert card.photo is None and card.views[0].note == "" and 'class="word"' in card.views[0].words
    assert build_gallery([[]]).cards == () and build_gallery([[], []]).photos == ()


def test_has_lists_the_elements_of_the_gallery(samples: Make) -> None:
    expected = {"heat", "outline", "words", "inside", "right", "cells"}
    has = build_gallery([samples("soft attention", 1)]).has
    assert {name for name, present in has.items() if present} == expected
    both = build_gallery([samples("soft attention", 1), samples("truth-supervised", 1)]).has
    more = {"change", "changed words", "several"}
    assert {name for name, present in both.items() if present} == expected | more
    bare = build_gallery([[GallerySample(id="a", text="who?", prediction="me")]])
    assert not any(bare.has.values())


def test_embedded_cells_decode_to_the_map(samples: Make) -> None:
    (sample,) = samples("soft attention", 1)
    (view,) = build_gallery([[sample]]).cards[0].views
    np.testing.assert_allclose(
        unpack_map(view.cells), sample.cells, atol=sample.cells.max() / 60000
    )
    pairs = [pair.split() for pair in view.columns.split(",")]
    assert len(pairs) == 8 and pairs[0] == ["0", "12.5"] and pairs[-1] == ["87.5", "100"]


def test_each_word_of_a_caption_has_its_map() -> None:
    maps = np.stack([np.eye(4), np.ones((4, 4))]) / 4
    image = np.zeros((8, 8, 3), np.uint8)
    boxes = np.array([[0.0, 1.0, 4.0, 8.0]])
    one = GallerySample(
        id="a", image=image, prediction="red dog", answer_cells=maps, cells=maps[0], boxes=boxes
    )
    found = build_gallery([[one]])
    (view,) = found.cards[0].views
    assert view.answer.count("data-cells=") == 2 and view.answer.count("<button") == 2
    assert found.has["word maps"] and found.cards[0].boxes == ((0.0, 1.0, 4.0, 7.0),)
    first = re.search('data-cells="([^"]*)"', view.answer)
    assert first is not None
    np.testing.assert_allclose(unpack_map(first[1]), maps[0], atol=1e-5)


def test_cell_size_limit_drops_maps_and_keeps_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gallery_module, "CELL_BYTES", 10)
    maps = np.random.default_rng(0).random((2, 4, 4))
    text = "a dog"
    spans = np.array([[0, 1], [2, 5]])
    image = np.zeros((8, 8, 3), np.uint8)
    one = GallerySample(id="a", image=image, text=text, spans=spans, word_cells=maps, cells=maps[0])
    (view,) = build_gallery([[one]]).cards[0].views
    assert view.heat and not view.words and not view.cells and not view.columns


@pytest.mark.parametrize(
    ("words", "bits"),
    [(2, (16, 16)), (25, (16, 8)), (200, (16, 0))],
    ids=["few", "many", "too many"],
)
def test_cell_precision_depends_on_the_number_of_words(words: int, bits: tuple[int, int]) -> None:
    """With 25 words, all maps are stored in 8 bits; with 200, only the map of the sample."""
    maps = np.random.default_rng(0).random((words, 16, 16)).astype(np.float32)
    spans = np.stack([np.arange(words), np.arange(words) + 1], axis=1)
    one = GallerySample(id="a", text="x" * words, spans=spans, word_cells=maps, cells=maps[0])
    assert gallery_module._bits([one] * 64) == bits


def test_hard_attention_is_drawn_as_a_mask_with_sharp_edges() -> None:
    cells = np.zeros((4, 4))
    cells[0, :2] = 1
    one = GallerySample(id="a", image=np.zeros((64, 64, 3), np.uint8), cells=cells)
    found = build_gallery([[one]])
    (view,) = found.cards[0].views
    assert view.kept == "kept 2 of 16 cells" and "Hard attention" in view.alt
    assert found.has["kept"] and not found.has["heat"]
    opacity = np.asarray(decode_image(view.heat).convert("RGBA"))[..., 3]
    clear = np.zeros((96, 96), bool)
    clear[:24, :48] = True
    np.testing.assert_array_equal(opacity == 0, clear)


def test_change_from_the_first_run_is_drawn() -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    left, right = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    pair = [[GallerySample(id="a", image=image, cells=cells)] for cells in (left, right)]
    first, second = build_gallery(pair).cards[0].views
    assert first.change is None and second.change is not None and second.change.most == "2"
    layer = np.asarray(decode_image(second.change.heat).convert("RGBA")).astype(int)
    assert layer[20, 2, 2] > layer[20, 2, 0] and layer[20, -3, 0] > layer[20, -3, 2]


def test_faithfulness_prefers_deletion_over_flips() -> None:
    assert faithfulness({"flips": 0.5, "deletion": 0.2}) == 0.2
    assert faithfulness({"flips": 0.5, "deletion": math.nan}) == 0.5
    assert faithfulness({"accuracy": 1.0}) is None


def test_svg_path_of_outlines() -> None:
    assert (
        svg_path([[(0, 10), (10.5, 10), (10.5, 20), (0, 20), (0, 10)]])
        == "M0,10L10.5,10L10.5,20L0,20Z"
    )
    assert svg_path([]) == ""


def test_evidence_agreement_prefers_mass_inside_over_pointing() -> None:
    assert evidence_agreement({"pointing": 1.0, "mass_inside": 0.3}) == 0.3
    assert evidence_agreement({"pointing": 1.0, "mass": math.nan}) == 1.0
    assert evidence_agreement({"entropy": 2.0}) is None


def test_colour_scale_css_covers_the_colour_table() -> None:
    css = colour_scale_css()
    assert css.startswith("linear-gradient(to right, rgb(0 0 4 / 0.00)")
    assert css.endswith("rgb(252 255 164 / 0.85))")


def test_dimmed_photo_css_matches_the_overlay_style() -> None:
    assert dimmed_photo_css(OverlayStyle(fade=0.5, dim=0.25)) == "grayscale(0.5) brightness(0.75)"


def test_levels_are_drawn_as_thumbnails_in_order() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    low, high, broken = np.zeros((4, 4)), np.zeros((2, 2)), np.full((2, 2), math.nan)
    low[0, 0] = high[1, 1] = 0.5
    maps = {"4x4": low, "broken": broken, "2x2": high}
    truth = np.eye(2)  # on the grid of the last level
    one = GallerySample(id="a", image=image, cells=high, truth_cells=truth, levels=maps)
    found = build_gallery([[one]])
    (view,) = found.cards[0].views
    assert [level.name for level in view.levels] == ["4x4", "2x2"]  # the level with NaN is left out
    assert view.levels[0].alt == "4x4. Attention: most at the top left, 0.5 in one cell of 4 × 4."
    layer = np.asarray(decode_image(view.levels[1].heat).convert("RGBA"))[..., 3].astype(int)
    assert layer[-1, -1] > layer[0, 0] == 0
    assert found.has["levels"]
    without = build_gallery([[GallerySample(id="a", text="who?", levels=maps)]])
    assert without.cards[0].views[0].levels == ()
