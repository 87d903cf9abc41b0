"""Arcs lead from the right query to the right key, and the figure says what it leaves out."""

import numpy as np
import pytest
import torch

from overt.show.arcs import MOST, arcs, strongest
from overt.show.figure import save_figure
from tests.show.maps import region_map, softmaxed, text_map


def curves(figure) -> list[tuple[np.ndarray, float]]:
    """The ends and widths of the arcs."""
    return [
        (patch.get_path().vertices[[0, -1], 0], patch.get_linewidth())
        for axes in figure.axes
        for patch in axes.patches
        if len(patch.get_path().vertices) == 4
    ]


def middles(figure, words: list[str]) -> list[float]:
    placed = {text.get_text(): text.get_position()[0] * 7.0 for text in figure.texts}
    return [placed[word] for word in words]


def test_an_arc_goes_from_its_query_to_its_key(tmp_path):
    weights = torch.zeros(1, 1, 1, 8, 8)
    weights[0, 0, 0, 2, 7], weights[0, 0, 0, 4, 1], weights[0, 0, 0, 3, 3] = 0.9, 0.4, 0.6
    figure = arcs(text_map(weights))
    ring, dog, of, red = middles(figure, ["ring", "dog", "of", "red"])
    (weak, thin), (strong, thick) = curves(figure)
    assert strong == pytest.approx((ring, dog)) and weak == pytest.approx((of, red))
    assert thick > thin
    dots = [line for axes in figure.axes for line in axes.lines]
    assert len(dots) == 1  # what a token keeps for itself
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "3 strongest of 64; 0 % of the weight is not drawn" in svg


def test_arcs_to_earlier_tokens_are_above():
    weights = torch.zeros(1, 1, 1, 8, 8)
    weights[0, 0, 0, 5, 1] = weights[0, 0, 0, 1, 5] = 0.5
    figure = arcs(text_map(weights))
    bent = {}
    for axes in figure.axes:
        for patch in axes.patches:
            points = patch.get_path().vertices
            if len(points) == 4:
                bent[points[0, 0] > points[-1, 0]] = points[1, 1] - points[0, 1]
    assert bent[True] < 0 < bent[False]  # y grows downwards


def test_one_query_alone_and_the_mean_of_heads(tmp_path):
    weights = softmaxed(1, 2, 3, 8, 8)
    figure = arcs(text_map(weights), layer=0, query="ring", least=0.0)
    kept = curves(figure)
    (ring,) = middles(figure, ["ring"])
    assert len(kept) == 7 and all(ends[0] == pytest.approx(ring) for ends, _ in kept)
    mean = weights[0, 0].mean(dim=0)[2]
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "8 strongest of 8" in svg and f">{float(mean.max()):.2g}<" in svg
    with pytest.raises(ValueError, match="no token 'cat'; there are a, red, ring"):
        arcs(text_map(weights), query="cat")


def test_two_kinds_of_tokens_stand_in_two_lines():
    weights = torch.zeros(1, 1, 1, 8, 3)
    weights[0, 0, 0, 1, 2] = 1.0
    figure = arcs(region_map(weights))
    (line,) = [line for axes in figure.axes for line in axes.lines]
    red, region = middles(figure, ["red", "regions 2"])
    assert line.get_xdata() == pytest.approx([red, region])


def test_names_may_be_given():
    figure = arcs(text_map(softmaxed(1, 1, 1, 8, 8)), tokens=[*"abcdefgh"])
    assert {*"abcdefgh"} <= {text.get_text() for text in figure.texts}
    with pytest.raises(ValueError, match=r"2 tokens for a map of \(8, 8\)"):
        arcs(text_map(softmaxed(1, 1, 1, 8, 8)), tokens=["a", "b"])


def test_the_strongest_come_last_and_are_not_too_many():
    weights = np.random.default_rng(0).random((20, 20))
    kept = strongest(weights, 0.1)
    assert len(kept) == MOST and [weights[at] for at in kept] == sorted(weights[at] for at in kept)
    assert weights[kept[0]] >= np.sort(weights.ravel())[-MOST]
    assert strongest(np.zeros((2, 2)), 0.0) == []


def test_a_long_text_is_refused_in_a_sentence():
    text = " ".join(["word"] * 60)
    with pytest.raises(ValueError, match="60 tokens do not fit into a line"):
        arcs(text_map(softmaxed(1, 1, 1, 60, 60), text))
