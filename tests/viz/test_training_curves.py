"""Training curves: point positions, labels, ticks and curves from logs."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.viz.training_curves import (
    COLOURS,
    Curve,
    axis_ticks,
    curves_from_log,
    downsample,
    plot_curves,
)

SVG = "{http://www.w3.org/2000/svg}"


def polyline_points(drawing: str) -> list[list[tuple[float, float]]]:
    tree = ElementTree.fromstring(drawing)
    return [
        [tuple(map(float, pair.split(","))) for pair in one.get("points").split()]
        for one in tree.iter(f"{SVG}polyline")
    ]


def test_points_are_linear_between_the_axis_ticks() -> None:
    """Read the curve values back with the labels of the axes."""
    values = [(0, 0.1), (250, 0.9), (1000, 0.4)]
    drawing = plot_curves([Curve("a", tuple(values))], "accuracy")
    tree = ElementTree.fromstring(drawing)
    texts = [
        (one.text, float(one.get("x")), float(one.get("y"))) for one in tree.iter(f"{SVG}text")
    ]
    x = {text: a for text, a, b in texts}
    y = {text: b - 3.5 for text, a, b in texts}
    for (step, value), (a, b) in zip(values, polyline_points(drawing)[0], strict=True):
        across = x["0"] + (x["1k"] - x["0"]) * step / 1000
        down = y["0.2"] + (y["0.8"] - y["0.2"]) * (value - 0.2) / 0.6
        assert (a, b) == (pytest.approx(across, abs=0.2), pytest.approx(down, abs=0.2))


def test_chart_has_line_labels_and_a_description() -> None:
    lines = [
        Curve("soft, val", ((0, 0.25), (10, 0.5)), 0),
        Curve("soft, train", ((0, 0.3), (10, 0.7)), 0, faint=True),
        Curve("hard <b>", ((0, 0.1), (10, 0.2)), 9),
    ]
    drawing = plot_curves(lines, "accuracy")
    tree = ElementTree.fromstring(drawing)
    assert tree.get("role") == "img" and tree.find(f"{SVG}title").text == "accuracy"
    assert "soft, val goes from 0.25 to 0.5 at step 10" in tree.find(f"{SVG}desc").text
    labels = [one.text for one in tree.iter(f"{SVG}text")]
    assert {"soft, val", "soft, train", "hard <b>", "step"} <= set(labels)
    strokes = [one.get("stroke") for one in tree.iter(f"{SVG}polyline")]
    assert strokes.count(f"var(--run-0,{COLOURS[0]})") == 2  # one colour per run
    assert f"var(--run-1,{COLOURS[1]})" in strokes  # colours repeat after the last
    assert sum(one.get("stroke-dasharray") is not None for one in tree.iter(f"{SVG}polyline")) == 1


@pytest.mark.parametrize(
    "points", [(), ((0, math.nan),), ((5, 2.0),), ((0, 0.0), (1, 0.0)), ((3, -1e9), (4, 1e9))]
)
def test_empty_and_extreme_curves_are_drawn(points: tuple) -> None:
    drawing = plot_curves([Curve("a", points)], "loss")
    ElementTree.fromstring(drawing)
    assert "nan" not in drawing.replace("finance", "") and "inf" not in drawing
    assert ("no data" in drawing) == (not downsample(points))


def test_downsample_averages_long_curves() -> None:
    points = [(i, float(i % 2)) for i in range(1600)]
    few = downsample(points, 160)
    assert len(few) == 160 and all(value == 0.5 for _, value in few)
    assert sum(step for step, _ in few) / 160 == pytest.approx(799.5)
    assert downsample([(0, 1.0), (1, math.inf), (2, math.nan), (3, 2.0)]) == ((0, 1.0), (3, 2.0))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_axis_ticks_are_few_equidistant_and_inside(low: float, width: float) -> None:
    found = axis_ticks(low, low + width)
    assert 3 <= len(found) <= 9
    steps = {round((b - a) / (found[1] - found[0]), 3) for a, b in pairwise(found)}
    assert steps == {1}
    assert low - 1e-6 * width <= found[0] and found[-1] <= low + width * (1 + 1e-6)


# --- from a log


def row(step: int, stage: str = "train", split: str = "train", **more: object) -> dict:
    return {"stage": stage, "step": step, "split": split, **more}


def test_each_loss_and_metric_has_a_chart() -> None:
    log = [
        row(1, losses={"task": 2.0, "attention": 1.0}, rate=0.1),
        row(2, losses={"task": 1.0, "attention": 0.5}),
        row(2, split="val", measures={"accuracy": 0.5}),
    ]
    charts = curves_from_log({"a": log, "b": log[:1]})
    assert list(charts) == ["accuracy", "task loss", "attention loss"]
    assert charts["accuracy"] == [Curve("a", ((2, 0.5),))]
    assert charts["task loss"] == [
        Curve("a", ((1, 2.0), (2, 1.0)), 0),
        Curve("b", ((1, 2.0),), 1),
    ]


def test_training_and_validation_share_a_chart() -> None:
    log = [row(1, measures={"accuracy": 0.4}), row(1, split="val", measures={"accuracy": 0.3})]
    lines = {line.name: line.faint for line in curves_from_log({"a": log})["accuracy"]}
    assert lines == {"a, train": True, "a, val": False}


def test_stages_are_concatenated_and_resumed_steps_replaced() -> None:
    log = [row(10, losses={"x": 1.0}), row(20, losses={"x": 2.0}), row(30, losses={"x": 9.0})]
    log += [row(25, losses={"x": 3.0}), row(30, losses={"x": 4.0})]
    log += [row(10, stage="retrain", losses={"x": 5.0})]
    points = curves_from_log({"a": log})["x loss"][0].points
    assert points == ((10, 1.0), (20, 2.0), (25, 3.0), (30, 4.0), (40, 5.0))


def test_rows_without_values_are_skipped() -> None:
    log = [{}, {"step": "x"}, row(1, losses=[1]), row(2, losses={"x": None, "y": "bad", "z": 1})]
    log += [row(3, losses={"z": math.nan})]
    assert curves_from_log({"a": log}) == {"z loss": [Curve("a", ((2, 1.0),))]}
