"""Arc diagrams: arcs from query to key, and the weight that is not drawn."""

import numpy as np
import pytest
import torch

from overt.viz.attention_arcs import MAX_ARCS, arc_diagram, strongest_weights
from overt.viz.figure import save_figure
from tests.viz.maps import random_weights, region_map, text_map


def find_arcs(figure) -> list[tuple[np.ndarray, float]]:
    """The ends and widths of the arcs."""
    return [
        (patch.get_path().vertices[[0, -1], 0], patch.get_linewidth())
        for axes in figure.axes
        for patch in axes.patches
        if len(patch.get_path().vertices) == 4
    ]


def word_centers(figure, words: list[str]) -> list[float]:
    placed = {text.get_text(): text.get_position()[0] * 7.0 for text in figure.texts}
    return [placed[word] for word in words]


def test_arc_goes_from_query_to_key(tmp_path):
    weights = torch.zeros(1, 1, 1, 8, 8)
    weights[0, 0, 0, 2, 7], weights[0, 0, 0, 4, 1], weights[0, 0, 0, 3, 3] = 0.9, 0.4, 0.6
    figure = arc_diagram(text_map(weights))
    ring, dog, of, red = word_centers(figure, ["ring", "dog", "of", "red"])
    (weak, thin), (strong, thick) = find_arcs(figure)
    assert strong == pytest.approx((ring, dog)) and weak == pytest.approx((of, red))
    assert thick > thin
    dots = [line for axes in figure.axes for line in axes.lines]
    assert len(dots) == 1  # the weight of a token on itself
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "3 strongest of 64; 0 % of the weight is not drawn" in svg


def test_arcs_to_earlier_tokens_are_above():
    weights = torch.zeros(1, 1, 1, 8, 8)
    weights[0, 0, 0, 5, 1] = weights[0, 0, 0, 1, 5] = 0.5
    figure = arc_diagram(text_map(weights))
    heights = {}
    for axes in figure.axes:
        for patch in axes.patches:
            points = patch.get_path().vertices
            if len(points) == 4:
                heights[points[0, 0] > points[-1, 0]] = points[1, 1] - points[0, 1]
    assert heights[True] < 0 < heights[False]  # y grows downwards


def test_single_query_and_mean_of_heads(tmp_path):
    weights = random_weights(1, 2, 3, 8, 8)
    figure = arc_diagram(text_map(weights), layer=0, query="ring", min_weight=0.0)
    kept = find_arcs(figure)
    (ring,) = word_centers(figure, ["ring"])
    assert len(kept) == 7 and all(ends[0] == pytest.approx(ring) for ends, _ in kept)
    mean = weights[0, 0].mean(dim=0)[2]
    svg = save_figure(tmp_path / "a.svg", figure).read_text()
    assert "8 strongest of 8" in svg and f">{float(mean.max()):.2g}<" in svg
    with pytest.raises(ValueError, match=r"'cat'.*a, red, ring"):
        arc_diagram(text_map(weights), query="cat")


def test_two_kinds_of_tokens_have_two_lines():
    weights = torch.zeros(1, 1, 1, 8, 3)
    weights[0, 0, 0, 1, 2] = 1.0
    figure = arc_diagram(region_map(weights))
    (line,) = [line for axes in figure.axes for line in axes.lines]
    red, region = word_centers(figure, ["red", "regions 2"])
    assert line.get_xdata() == pytest.approx([red, region])


def test_token_names_can_be_given():
    figure = arc_diagram(text_map(random_weights(1, 1, 1, 8, 8)), tokens=[*"abcdefgh"])
    assert {*"abcdefgh"} <= {text.get_text() for text in figure.texts}
    with pytest.raises(ValueError, match=r"2 tokens.*\(8, 8\)"):
        arc_diagram(text_map(random_weights(1, 1, 1, 8, 8)), tokens=["a", "b"])


def test_strongest_weights_are_sorted_and_limited():
    weights = np.random.default_rng(0).random((20, 20))
    kept = strongest_weights(weights, 0.1)
    assert len(kept) == MAX_ARCS and [weights[at] for at in kept] == sorted(
        weights[at] for at in kept
    )
    assert weights[kept[0]] >= np.sort(weights.ravel())[-MAX_ARCS]
    assert strongest_weights(np.zeros((2, 2)), 0.0) == []


def test_long_text_raises_with_its_length():
    text = " ".join(["word"] * 60)
    with pytest.raises(ValueError, match="60 tokens"):
        arc_diagram(text_map(random_weights(1, 1, 1, 60, 60), text))
