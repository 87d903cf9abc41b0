"""Every layer and head: the right map in the right place, and nothing more than was asked for."""

import numpy as np
import pytest
import torch
from PIL import Image

from overt import watch
from overt.attention import POINT, AttentionMap, Layout, Span, grid
from overt.capture.call import Call
from overt.show.figure import DPI, save_figure
from overt.show.heads import FINEST, head_maps, head_numbers, own_scale
from tests.show.maps import Attend, region_map, softmaxed, text_map


def tiles(figure) -> list[np.ndarray]:
    """The pictures on a figure, in the order in which they were drawn; the scale is the last."""
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images][:-1]


def strength(picture: np.ndarray) -> np.ndarray:
    return 765 - picture.astype(int).sum(axis=-1)


def test_every_layer_and_head_is_in_its_place():
    weights = torch.zeros(2, 2, 3, 8, 8)
    for layer in range(2):
        for head in range(3):
            weights[1, layer, head, layer, head] = 1.0
    two = torch.tensor([0, 0])
    layout = text_map(weights[:1]).keys.select(two)
    attention = AttentionMap(weights, layout, layout)
    found = tiles(head_maps(attention, row=1))
    assert len(found) == 6
    for number, picture in enumerate(found):
        at = np.unravel_index(strength(picture).argmax(), picture.shape[:2])
        assert at == divmod(number, 3)
    some = tiles(head_maps(attention, row=1, layers=[-1], heads=[2, 0]))
    assert [strength(one).argmax() % 8 for one in some] == [2, 0]


def test_one_scale_for_all_or_one_for_each():
    weights = torch.zeros(1, 1, 2, 8, 8)
    weights[0, 0, 0, 0, 0], weights[0, 0, 1, 0, 0] = 1.0, 0.25
    strong, weak = (strength(one)[0, 0] for one in tiles(head_maps(text_map(weights))))
    assert weak < strong
    first, second = (
        strength(one)[0, 0] for one in tiles(head_maps(text_map(weights), tops=own_scale))
    )
    assert first == second == strong


def test_a_block_between_spans_and_the_picture_of_one_query():
    cells = torch.arange(6.0).view(1, 1, 1, 1, 6)
    (picture,) = tiles(head_maps(AttentionMap(cells / 15, grid(2, 3), POINT)))
    assert picture.shape == (2, 3, 3)
    assert (np.diff(strength(picture).ravel()) > 0).all()
    layout = Layout((Span("class", (1,), slice(0, 1)), Span("image", (2, 2), slice(1, 5))), 5)
    both = AttentionMap(softmaxed(1, 1, 1, 5, 5), layout, layout)
    (seen,) = tiles(head_maps(both, "class", "image"))
    wanted = both.weights[0, 0, 0, 0, 1:].reshape(2, 2).numpy()
    assert (strength(seen).argsort(axis=None) == wanted.argsort(axis=None)).all()
    (regions,) = tiles(head_maps(region_map(softmaxed(1, 1, 1, 8, 3)), "text", "regions"))
    assert regions.shape[:2] == (8, 3)


def test_of_a_watched_model_the_same_is_drawn():
    torch.manual_seed(0)
    model = Attend().eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(2, 7, 8))
    for row in (0, 1):
        one, two = (tiles(head_maps(source, row=row)) for source in (seen, seen.map()))
        assert len(one) == len(two) == 4
        for mine, theirs in zip(one, two, strict=True):
            assert np.abs(mine.astype(int) - theirs.astype(int)).max() <= 1


def test_a_long_input_is_read_a_few_rows_at_a_time(monkeypatch):
    """Of 700 positions no more than 256 rows exist at once, and a single strong one is seen."""
    largest = 0
    plain = Call.log_weights

    def watched(self, *where):
        nonlocal largest
        found = plain(self, *where)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(Call, "log_weights", watched)
    model = Attend().eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 700, 8))
    found = tiles(head_maps(seen, layers=[1], heads=[0]))
    assert largest <= 256 * 700 and max(found[0].shape[:2]) <= FINEST
    weights = torch.full((1, 1, 1, 700, 700), 1e-6)
    weights[0, 0, 0, 650, 33] = 1.0
    layout = Layout((Span("positions", (700,), slice(0, 700)),), 700)
    (picture,) = tiles(head_maps(AttentionMap(weights, layout, layout)))
    rows, columns = picture.shape[:2]
    at = np.unravel_index(strength(picture).argmax(), (rows, columns))
    assert at == (int(650 / 700 * rows), int(33 / 700 * columns))


def test_numbers_stand_on_their_colours(tmp_path):
    values = np.array([[0.0, 0.5], [1.0, np.nan]])
    figure = head_numbers(values, "grounding accuracy")
    found = [int(one[0, 0].astype(int).sum()) for one in tiles(figure)]
    assert found[0] < found[1] < found[2] and found[3] == 765
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    for text in (">.00<", ">.50<", ">1.00<", ">–<", ">grounding accuracy<"):
        assert text in svg


def test_a_picture_of_pixels_can_be_made(tmp_path):
    figure = head_maps(text_map(softmaxed(1, 6, 12, 8, 8)))
    picture = Image.open(save_figure(tmp_path / "a.png", figure))
    assert picture.size[0] == 7 * DPI


def test_what_is_not_there_is_said():
    attention = text_map(softmaxed(1, 2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"layers 0 to 1, not \[2\]"):
        head_maps(attention, layers=[2])
    with pytest.raises(ValueError, match="heads 0 to 2"):
        head_maps(attention, heads=[])
    with pytest.raises(ValueError, match="no span 'image'"):
        head_maps(attention, "text", "image")
