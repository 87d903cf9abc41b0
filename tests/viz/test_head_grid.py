"""Head grids: maps by layer and head, colour scales, spans and memory."""

import numpy as np
import pytest
import torch
from PIL import Image

from overt import watch
from overt.attention import GLOBAL_QUERY, AttentionMap, Layout, Span, grid
from overt.capture.call import Call
from overt.viz.figure import DPI, save_figure
from overt.viz.head_grid import MAX_TILE, head_maps, head_scores, per_head_scale
from tests.viz.maps import SelfAttention, random_weights, region_map, text_map


def drawn_tiles(figure) -> list[np.ndarray]:
    """The images of a figure in drawing order, without the colour scale, which is last."""
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images][:-1]


def darkness(tile: np.ndarray) -> np.ndarray:
    return 765 - tile.astype(int).sum(axis=-1)


def test_each_layer_and_head_has_its_position():
    weights = torch.zeros(2, 2, 3, 8, 8)
    for layer in range(2):
        for head in range(3):
            weights[1, layer, head, layer, head] = 1.0
    two = torch.tensor([0, 0])
    layout = text_map(weights[:1]).keys.select(two)
    attention = AttentionMap(weights, layout, layout)
    found = drawn_tiles(head_maps(attention, row=1))
    assert len(found) == 6
    for number, tile in enumerate(found):
        at = np.unravel_index(darkness(tile).argmax(), tile.shape[:2])
        assert at == divmod(number, 3)
    some = drawn_tiles(head_maps(attention, row=1, layers=[-1], heads=[2, 0]))
    assert [darkness(one).argmax() % 8 for one in some] == [2, 0]


def test_colour_scale_is_shared_or_per_head():
    weights = torch.zeros(1, 1, 2, 8, 8)
    weights[0, 0, 0, 0, 0], weights[0, 0, 1, 0, 0] = 1.0, 0.25
    strong, weak = (darkness(one)[0, 0] for one in drawn_tiles(head_maps(text_map(weights))))
    assert weak < strong
    first, second = (
        darkness(one)[0, 0]
        for one in drawn_tiles(head_maps(text_map(weights), limits=per_head_scale))
    )
    assert first == second == strong


def test_block_between_spans_and_grid_of_a_single_query():
    cells = torch.arange(6.0).view(1, 1, 1, 1, 6)
    (tile,) = drawn_tiles(head_maps(AttentionMap(cells / 15, grid(2, 3), GLOBAL_QUERY)))
    assert tile.shape == (2, 3, 3)
    assert (np.diff(darkness(tile).ravel()) > 0).all()
    layout = Layout((Span("class", (1,), slice(0, 1)), Span("image", (2, 2), slice(1, 5))), 5)
    both = AttentionMap(random_weights(1, 1, 1, 5, 5), layout, layout)
    (drawn,) = drawn_tiles(head_maps(both, "class", "image"))
    expected = both.weights[0, 0, 0, 0, 1:].reshape(2, 2).numpy()
    assert (darkness(drawn).argsort(axis=None) == expected.argsort(axis=None)).all()
    (regions,) = drawn_tiles(
        head_maps(region_map(random_weights(1, 1, 1, 8, 3)), "text", "regions")
    )
    assert regions.shape[:2] == (8, 3)


def test_watched_model_is_drawn_like_its_map():
    torch.manual_seed(0)
    model = SelfAttention().eval()
    with torch.no_grad(), watch(model) as trace:
        model(torch.randn(2, 7, 8))
    for row in (0, 1):
        one, two = (drawn_tiles(head_maps(source, row=row)) for source in (trace, trace.map()))
        assert len(one) == len(two) == 4
        for a, b in zip(one, two, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


def test_long_inputs_are_computed_in_chunks_of_rows(monkeypatch):
    """At most 256 of 700 rows exist at once, and a single strong weight is kept."""
    largest = 0
    log_weights = Call.log_weights

    def measuring(self, *where):
        nonlocal largest
        found = log_weights(self, *where)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(Call, "log_weights", measuring)
    model = SelfAttention().eval()
    with torch.no_grad(), watch(model) as trace:
        model(torch.randn(1, 700, 8))
    found = drawn_tiles(head_maps(trace, layers=[1], heads=[0]))
    assert largest <= 256 * 700 and max(found[0].shape[:2]) <= MAX_TILE
    weights = torch.full((1, 1, 1, 700, 700), 1e-6)
    weights[0, 0, 0, 650, 33] = 1.0
    layout = Layout((Span("positions", (700,), slice(0, 700)),), 700)
    (tile,) = drawn_tiles(head_maps(AttentionMap(weights, layout, layout)))
    rows, columns = tile.shape[:2]
    at = np.unravel_index(darkness(tile).argmax(), (rows, columns))
    assert at == (int(650 / 700 * rows), int(33 / 700 * columns))


def test_head_scores_are_printed_on_their_colours(tmp_path):
    values = np.array([[0.0, 0.5], [1.0, np.nan]])
    figure = head_scores(values, "grounding accuracy")
    found = [int(one[0, 0].astype(int).sum()) for one in drawn_tiles(figure)]
    assert found[0] < found[1] < found[2] and found[3] == 765
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    for text in (">.00<", ">.50<", ">1.00<", ">–<", ">grounding accuracy<"):
        assert text in svg


def test_figure_is_saved_as_png(tmp_path):
    figure = head_maps(text_map(random_weights(1, 6, 12, 8, 8)))
    tile = Image.open(save_figure(tmp_path / "a.png", figure))
    assert tile.size[0] == 7 * DPI


def test_unknown_layers_heads_and_spans_raise():
    attention = text_map(random_weights(1, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"layers.*2.*0 to 1"):
        head_maps(attention, layers=[2])
    with pytest.raises(ValueError, match="heads are 0 to 2"):
        head_maps(attention, heads=[])
    with pytest.raises(ValueError, match="no span 'image'"):
        head_maps(attention, "text", "image")
