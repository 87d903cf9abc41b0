"""Words point at the pixels of their boxes, on the photo's own aspect."""

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import words
from overt.show.figure import APART, DPI, PAGE, save_figure
from overt.show.pointing import TALLEST, word_regions
from tests.show.maps import BOXES, region_map, softmaxed, text_map


def photo(height: int = 100, width: int = 160) -> np.ndarray:
    return np.full((height, width, 3), 128, np.uint8)


def looking(pairs: dict[int, tuple[int, float]]) -> torch.Tensor:
    weights = torch.zeros(1, 1, 1, 8, 3)
    for word, (region, weight) in pairs.items():
        weights[0, 0, 0, word, region] = weight
    return weights


@pytest.mark.parametrize("size", [(100, 160), (400, 160)], ids=["wide", "tall"])
def test_the_box_lies_on_its_pixels(tmp_path, size):
    """The coloured frame surrounds the very pixels of the region, found in the written picture."""
    attention = region_map(looking({2: (1, 1.0)}))
    figure = word_regions(photo(*size), attention, words=["ring"])
    picture = np.asarray(Image.open(save_figure(tmp_path / "a.png", figure)).convert("RGB"))
    grey = np.argwhere((picture == 128).all(axis=-1))
    (top, left), (bottom, right) = grey.min(axis=0), grey.max(axis=0) + 1
    scale = min(PAGE / size[1], TALLEST / size[0]) * DPI
    assert bottom - top == pytest.approx(size[0] * scale, abs=3)
    assert right - left == pytest.approx(size[1] * scale, abs=3)
    blue = np.array([int(APART[0][at : at + 2], 16) for at in (1, 3, 5)])
    frame = np.argwhere((np.abs(picture.astype(int) - blue) <= 2).all(axis=-1))
    x0, y0, x1, y1 = (scale * side for side in BOXES[1])
    below = frame[frame[:, 0] > top + y0 + 20]  # neither the word, nor its arrow, nor the weight
    far = frame[frame[:, 1] > left + (x0 + 3 * x1) / 4]
    assert far[:, 0].min() == pytest.approx(top + y0, abs=5)
    found = [below[:, 1].min(), below[:, 0].max() + 1, below[:, 1].max() + 1]
    assert found == pytest.approx([left + x0, top + y1, left + x1], abs=5)


def test_words_are_those_of_the_truth_else_the_strongest(tmp_path):
    truth = region_map(looking({1: (0, 1.0), 7: (1, 1.0)}))
    figure = word_regions(photo(), region_map(softmaxed(1, 2, 3, 8, 3)), truth=truth)
    bold = [text.get_text() for text in figure.texts if text.get_weight() == "bold"]
    assert bold == ["red", "dog"]
    written = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "dashed: what it means" in written
    few = word_regions(photo(), region_map(looking({3: (0, 0.4), 5: (2, 0.9)})))
    assert [t.get_text() for t in few.texts if t.get_weight() == "bold"] == ["left", "the"]
    assert [t.get_text() for t in few.axes[0].texts] == ["0.40", "0.90"]


def test_the_mean_of_heads_or_one_of_them():
    weights = softmaxed(2, 2, 3, 8, 3)
    top = weights[1, 0].mean(dim=0)[2].max()
    mean = word_regions(photo(), both(weights), ["ring"], layer=0, row=1)
    assert mean.axes[0].texts[0].get_text() == f"{float(top):.2f}"
    one = word_regions(photo(), both(weights), [2], layer=0, head=2, row=1, most=3)
    wanted = weights[1, 0, 2, 2].sort(descending=True).values
    assert [t.get_text() for t in one.axes[0].texts] == [f"{float(w):.2f}" for w in wanted]


def both(weights: torch.Tensor):
    """Two samples with the same words and boxes."""
    one = region_map(weights[:1])
    return type(one)(
        weights, one.keys.select(torch.tensor([0, 0])), one.queries.select(torch.tensor([0, 0]))
    )


def test_two_words_at_one_box_are_both_to_be_read():
    figure = word_regions(photo(), region_map(looking({1: (1, 0.7), 7: (1, 0.6)})))
    one, two = figure.axes[0].texts
    assert one.get_position()[1] == two.get_position()[1]
    assert two.get_position()[0] - one.get_position()[0] > 0.25


def test_long_texts_run_over_several_lines():
    text = " ".join(f"word{n}" for n in range(40))
    weights = torch.zeros(1, 1, 1, 40, 3)
    weights[0, 0, 0, 39, 1] = weights[0, 0, 0, 0, 0] = 1.0
    figure = word_regions(photo(), region_map(weights, text))
    placed = {t.get_text(): t.get_position() for t in figure.texts}
    assert placed["word0"][1] > placed["word39"][1]
    assert all(0 <= t.get_position()[0] < 1 for t in figure.texts)


def test_what_does_not_fit_is_said():
    attention = region_map(softmaxed(1, 1, 1, 8, 3))
    for wrong, match in (
        (lambda: word_regions(photo(), attention, ["cat"]), "no word 'cat' in this text"),
        (lambda: word_regions(photo(), text_map(softmaxed(1, 1, 1, 8, 8))), "no regions"),
        (lambda: word_regions(photo(), type(attention)(attention.values, attention.keys, words(8))),
         "no text"),
        (lambda: word_regions(photo(), region_map(looking({}))), "no word of this text looks"),
        (lambda: word_regions(photo(), attention, truth=text_map(softmaxed(1, 1, 1, 8, 8))),
         "a truth of"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            wrong()
