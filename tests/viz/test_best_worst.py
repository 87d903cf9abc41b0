import math
from dataclasses import replace

import numpy as np
import pytest

from overt.viz.best_worst import plot_best_worst, select_best_worst
from overt.viz.contours import contours
from overt.viz.figure import save_figure


def test_best_and_worst_are_selected_by_score(samples):
    found = samples("soft attention", 7)
    scores = [0.3, math.nan, 0.9, 0.1, 0.5, 0.2, 0.7]
    best, worst = select_best_worst(found, scores, 2)
    assert [score for _, score in best] == [0.9, 0.7]
    assert [score for _, score in worst] == [0.1, 0.2]
    assert best[0][0] is found[2] and worst[0][0] is found[3]
    # six finite scores: three per side, none in both
    best, worst = select_best_worst(found, scores, 10)
    assert len(best) == len(worst) == 3
    assert not {one.id for one, _ in best} & {one.id for one, _ in worst}


def test_figure_contains_score_text_and_answer(samples, tmp_path):
    found = samples("soft attention", 6)
    scores = [0.11, 0.92, 0.33, 0.74, 0.55, 0.26]
    figure = plot_best_worst(found, scores, "mass inside", 2, draw=contours)
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    for text in ("highest mass inside", "lowest mass inside", ">0.92<", ">0.74<", ">0.11<"):
        assert text in svg
    assert ">0.55<" not in svg and ("✓" in svg or "✗" in svg)
    pictures = [axes for axes in figure.axes if axes.images]
    assert len(pictures) == 4 + 1  # plus the scale


def test_photo_without_maps_keeps_its_aspect(samples):
    wide = np.zeros((40, 80, 3), np.uint8)
    found = [replace(one, image=wide, cells=None, truth_cells=None, id=str(n))
             for n, one in enumerate(samples("no attention", 4))]  # fmt: skip
    figure = plot_best_worst(found, [1.0, 2.0, 3.0, 4.0], count=1)
    box = figure.axes[0].get_position()
    across, down = figure.get_size_inches()
    assert box.height * down / (box.width * across) == pytest.approx(0.5)


def test_samples_that_cannot_be_ranked_raise(samples):
    found = samples("soft attention", 2)
    with pytest.raises(ValueError, match=r"1 scores.*2 samples"):
        select_best_worst(found, [1.0])
    with pytest.raises(ValueError, match=r"1 samples.*finite"):
        select_best_worst(found, [1.0, math.nan])
    with pytest.raises(ValueError, match="no photo"):
        plot_best_worst([replace(one, image=None) for one in found], [1.0, 2.0])
