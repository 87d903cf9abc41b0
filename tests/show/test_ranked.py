import math
from dataclasses import replace

import numpy as np
import pytest

from overt.show.contours import contours
from overt.show.figure import save_figure
from overt.show.ranked import most_and_least, ranked


def test_the_best_and_the_worst_from_the_ends(samples):
    found = samples("soft attention", 7)
    scores = [0.3, math.nan, 0.9, 0.1, 0.5, 0.2, 0.7]
    best, worst = most_and_least(found, scores, 2)
    assert [score for _, score in best] == [0.9, 0.7]
    assert [score for _, score in worst] == [0.1, 0.2]
    assert best[0][0] is found[2] and worst[0][0] is found[3]
    best, worst = most_and_least(found, scores, 10)  # six are known: three a side, none in both
    assert len(best) == len(worst) == 3
    assert not {one.id for one, _ in best} & {one.id for one, _ in worst}


def test_a_figure_says_score_text_and_answer(samples, tmp_path):
    found = samples("soft attention", 6)
    scores = [0.11, 0.92, 0.33, 0.74, 0.55, 0.26]
    figure = ranked(found, scores, "mass inside", 2, draw=contours)
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    for text in ("highest mass inside", "lowest mass inside", ">0.92<", ">0.74<", ">0.11<"):
        assert text in svg
    assert ">0.55<" not in svg and ("✓" in svg or "✗" in svg)
    pictures = [axes for axes in figure.axes if axes.images]
    assert len(pictures) == 4 + 1  # and the scale


def test_a_photo_keeps_its_aspect_and_a_model_without_maps_shows_it_plain(samples):
    wide = np.zeros((40, 80, 3), np.uint8)
    found = [replace(one, image=wide, cells=None, truth_cells=None, id=str(n))
             for n, one in enumerate(samples("no attention", 4))]  # fmt: skip
    figure = ranked(found, [1.0, 2.0, 3.0, 4.0], count=1)
    box = figure.axes[0].get_position()
    across, down = figure.get_size_inches()
    assert box.height * down / (box.width * across) == pytest.approx(0.5)


def test_what_cannot_be_ranked_is_said(samples):
    found = samples("soft attention", 2)
    with pytest.raises(ValueError, match="1 scores for 2 samples"):
        most_and_least(found, [1.0])
    with pytest.raises(ValueError, match="1 samples have a score"):
        most_and_least(found, [1.0, math.nan])
    with pytest.raises(ValueError, match="no photo"):
        ranked([replace(one, image=None) for one in found], [1.0, 2.0])
