"""Curves stand where their numbers say, and read without eyes or script."""

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.show.curves import COLOURS, Line, curves, from_log, thinned, ticks

SVG = "{http://www.w3.org/2000/svg}"


def points_of(drawing: str) -> list[list[tuple[float, float]]]:
    tree = ElementTree.fromstring(drawing)
    return [
        [tuple(map(float, pair.split(","))) for pair in one.get("points").split()]
        for one in tree.iter(f"{SVG}polyline")
    ]


def test_points_stand_in_proportion_between_the_marks() -> None:
    """Read a curve back with the marks of the axes, as an eye would."""
    values = [(0, 0.1), (250, 0.9), (1000, 0.4)]
    drawing = curves([Line("a", tuple(values))], "accuracy")
    tree = ElementTree.fromstring(drawing)
    texts = [
        (one.text, float(one.get("x")), float(one.get("y"))) for one in tree.iter(f"{SVG}text")
    ]
    x = {text: a for text, a, b in texts}
    y = {text: b - 3.5 for text, a, b in texts}
    for (step, value), (a, b) in zip(values, points_of(drawing)[0], strict=True):
        across = x["0"] + (x["1k"] - x["0"]) * step / 1000
        down = y["0.2"] + (y["0.8"] - y["0.2"]) * (value - 0.2) / 0.6
        assert (a, b) == (pytest.approx(across, abs=0.2), pytest.approx(down, abs=0.2))


def test_a_chart_names_its_lines_and_says_where_they_go() -> None:
    lines = [
        Line("soft, val", ((0, 0.25), (10, 0.5)), 0),
        Line("soft, train", ((0, 0.3), (10, 0.7)), 0, faint=True),
        Line("hard <b>", ((0, 0.1), (10, 0.2)), 9),
    ]
    drawing = curves(lines, "accuracy")
    tree = ElementTree.fromstring(drawing)
    assert tree.get("role") == "img" and tree.find(f"{SVG}title").text == "accuracy"
    assert "soft, val goes from 0.25 to 0.5 at step 10" in tree.find(f"{SVG}desc").text
    written = [one.text for one in tree.iter(f"{SVG}text")]
    assert {"soft, val", "soft, train", "hard <b>", "step"} <= set(written)
    strokes = [one.get("stroke") for one in tree.iter(f"{SVG}polyline")]
    assert strokes.count(f"var(--run-0,{COLOURS[0]})") == 2  # a colour a run
    assert f"var(--run-1,{COLOURS[1]})" in strokes  # and round again after the last
    assert sum(one.get("stroke-dasharray") is not None for one in tree.iter(f"{SVG}polyline")) == 1


@pytest.mark.parametrize(
    "points", [(), ((0, math.nan),), ((5, 2.0),), ((0, 0.0), (1, 0.0)), ((3, -1e9), (4, 1e9))]
)
def test_any_numbers_give_a_drawing(points: tuple) -> None:
    drawing = curves([Line("a", points)], "loss")
    ElementTree.fromstring(drawing)
    assert "nan" not in drawing.replace("finance", "") and "inf" not in drawing
    assert ("nothing was logged" in drawing) == (not thinned(points))


def test_long_curves_are_thinned_to_means() -> None:
    points = [(i, float(i % 2)) for i in range(1600)]
    few = thinned(points, 160)
    assert len(few) == 160 and all(value == 0.5 for _, value in few)
    assert sum(step for step, _ in few) / 160 == pytest.approx(799.5)
    assert thinned([(0, 1.0), (1, math.inf), (2, math.nan), (3, 2.0)]) == ((0, 1.0), (3, 2.0))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_even_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 3 <= len(found) <= 9
    steps = {round((b - a) / (found[1] - found[0]), 3) for a, b in pairwise(found)}
    assert steps == {1}
    assert low - 1e-6 * width <= found[0] and found[-1] <= low + width * (1 + 1e-6)


# --- from a log


def row(step: int, stage: str = "train", split: str = "train", **more: object) -> dict:
    return {"stage": stage, "step": step, "split": split, **more}


def test_each_loss_and_each_measure_has_a_chart() -> None:
    log = [
        row(1, losses={"task": 2.0, "attention": 1.0}, rate=0.1),
        row(2, losses={"task": 1.0, "attention": 0.5}),
        row(2, split="val", measures={"accuracy": 0.5}),
    ]
    charts = from_log({"a": log, "b": log[:1]})
    assert list(charts) == ["accuracy", "task loss", "attention loss"]
    assert charts["accuracy"] == [Line("a", ((2, 0.5),))]
    assert charts["task loss"] == [
        Line("a", ((1, 2.0), (2, 1.0)), 0),
        Line("b", ((1, 2.0),), 1),
    ]


def test_training_stands_behind_validation_in_one_chart() -> None:
    log = [row(1, measures={"accuracy": 0.4}), row(1, split="val", measures={"accuracy": 0.3})]
    lines = {line.name: line.faint for line in from_log({"a": log})["accuracy"]}
    assert lines == {"a, train": True, "a, val": False}


def test_stages_follow_one_another_and_a_resumed_run_replaces_what_it_repeats() -> None:
    log = [row(10, losses={"x": 1.0}), row(20, losses={"x": 2.0}), row(30, losses={"x": 9.0})]
    log += [row(25, losses={"x": 3.0}), row(30, losses={"x": 4.0})]
    log += [row(10, stage="retrain", losses={"x": 5.0})]
    points = from_log({"a": log})["x loss"][0].points
    assert points == ((10, 1.0), (20, 2.0), (25, 3.0), (30, 4.0), (40, 5.0))


def test_rows_that_say_nothing_are_passed_over() -> None:
    log = [{}, {"step": "x"}, row(1, losses=[1]), row(2, losses={"x": None, "y": "bad", "z": 1})]
    log += [row(3, losses={"z": math.nan})]
    assert from_log({"a": log}) == {"z loss": [Line("a", ((2, 1.0),))]}
