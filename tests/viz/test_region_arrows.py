"""Region arrows: boxes on the photo, selected words and invalid inputs."""

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import words
from overt.viz.figure import CATEGORICAL_COLOURS, DPI, PAGE_WIDTH, save_figure
from overt.viz.region_arrows import MAX_PHOTO_HEIGHT, word_regions
from tests.viz.maps import BOXES, random_weights, region_map, text_map


def grey_photo(height: int = 100, width: int = 160) -> np.ndarray:
    return np.full((height, width, 3), 128, np.uint8)


def make_weights(pairs: dict[int, tuple[int, float]]) -> torch.Tensor:
    weights = torch.zeros(1, 1, 1, 8, 3)
    for word, (region, weight) in pairs.items():
        weights[0, 0, 0, word, region] = weight
    return weights


@pytest.mark.long
@pytest.mark.parametrize("size", [(100, 160), (400, 160)], ids=["wide", "tall"])
def test_box_is_drawn_around_its_pixels(tmp_path, size):
    """The coloured frame in the saved image surrounds the pixels of the region."""
    attention = region_map(make_weights({2: (1, 1.0)}))
    figure = word_regions(grey_photo(*size), attention, words=["ring"])
    picture = np.asarray(Image.open(save_figure(tmp_path / "a.png", figure)).convert("RGB"))
    grey = np.argwhere((picture == 128).all(axis=-1))
    (top, left), (bottom, right) = grey.min(axis=0), grey.max(axis=0) + 1
    scale = min(PAGE_WIDTH / size[1], MAX_PHOTO_HEIGHT / size[0]) * DPI
    assert bottom - top == pytest.approx(size[0] * scale, abs=3)
    assert right - left == pytest.approx(size[1] * scale, abs=3)
    blue = np.array([int(CATEGORICAL_COLOURS[0][at : at + 2], 16) for at in (1, 3, 5)])
    frame = np.argwhere((np.abs(picture.astype(int) - blue) <= 2).all(axis=-1))
    x0, y0, x1, y1 = (scale * side for side in BOXES[1])
    below = frame[frame[:, 0] > top + y0 + 20]  # without the word, its arrow and the weight
    far = frame[frame[:, 1] > left + (x0 + 3 * x1) / 4]
    assert far[:, 0].min() == pytest.approx(top + y0, abs=5)
    found = [below[:, 1].min(), below[:, 0].max() + 1, below[:, 1].max() + 1]
    assert found == pytest.approx([left + x0, top + y1, left + x1], abs=5)


def test_words_come_from_the_truth_or_the_strongest_weights(tmp_path):
    truth = region_map(make_weights({1: (0, 1.0), 7: (1, 1.0)}))
    figure = word_regions(grey_photo(), region_map(random_weights(1, 2, 3, 8, 3)), truth=truth)
    bold = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
    assert bold == ["red", "dog"]
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "dashed: ground truth" in svg
    few = word_regions(grey_photo(), region_map(make_weights({3: (0, 0.4), 5: (2, 0.9)})))
    assert [t.get_text() for t in few.texts if t.get_weight() == "bold"] == ["left", "the"]
    assert [t.get_text() for t in few.axes[0].texts] == ["0.40", "0.90"]


def test_mean_of_heads_or_a_single_head():
    weights = random_weights(2, 2, 3, 8, 3)
    top = weights[1, 0].mean(dim=0)[2].max()
    mean = word_regions(grey_photo(), two_samples(weights), ["ring"], layer=0, row=1)
    assert mean.axes[0].texts[0].get_text() == f"{float(top):.2f}"
    one = word_regions(grey_photo(), two_samples(weights), [2], layer=0, head=2, row=1, top_k=3)
    expected = weights[1, 0, 2, 2].sort(descending=True).values
    assert [t.get_text() for t in one.axes[0].texts] == [f"{float(w):.2f}" for w in expected]


def two_samples(weights: torch.Tensor):
    """Two samples with the same words and boxes."""
    one = region_map(weights[:1])
    return type(one)(
        weights, one.keys.select(torch.tensor([0, 0])), one.queries.select(torch.tensor([0, 0]))
    )


def test_labels_of_two_words_at_one_box_do_not_overlap():
    figure = word_regions(grey_photo(), region_map(make_weights({1: (1, 0.7), 7: (1, 0.6)})))
    one, two = figure.axes[0].texts
    assert one.get_position()[1] == two.get_position()[1]
    assert two.get_position()[0] - one.get_position()[0] > 0.25


def test_long_texts_wrap_to_several_lines():
    text = " ".join(f"word{n}" for n in range(40))
    weights = torch.zeros(1, 1, 1, 40, 3)
    weights[0, 0, 0, 39, 1] = weights[0, 0, 0, 0, 0] = 1.0
    figure = word_regions(grey_photo(), region_map(weights, text))
    placed = {t.get_text(): t.get_position() for t in figure.texts}
    assert placed["word0"][1] > placed["word39"][1]
    assert all(0 <= t.get_position()[0] < 1 for t in figure.texts)


def test_invalid_maps_and_words_raise():
    attention = region_map(random_weights(1, 1, 1, 8, 3))
    photo = grey_photo()
    for wrong, match in (
        (lambda: word_regions(photo, attention, ["cat"]), "'cat'"),
        (lambda: word_regions(photo, text_map(random_weights(1, 1, 1, 8, 8))), "not regions"),
        (lambda: word_regions(photo, type(attention)(attention.values, attention.keys, words(8))),
         "not text"),
        (lambda: word_regions(photo, region_map(make_weights({}))), "positive weight"),
        (lambda: word_regions(photo, attention, truth=text_map(random_weights(1, 1, 1, 8, 8))),
         r"truth .*\(8, 8\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            wrong()
