import itertools
import math

import numpy as np
import pytest

from overt.data.sort_of_clevr_world import (
    APART,
    COLOURS,
    HALF,
    KINDS,
    NON_RELATIONAL,
    RELATIONAL,
    SIDE,
    TERNARY,
    TERNARY_ANSWERS,
    ShapeQuestions,
    ShapeScenes,
    generate_questions,
    generate_scenes,
    is_ambiguous,
    relation_of,
    render,
)


@pytest.fixture(scope="module")
def scenes() -> ShapeScenes:
    return generate_scenes(60, np.random.RandomState(3))


@pytest.fixture(scope="module")
def questions(scenes) -> ShapeQuestions:
    return generate_questions(
        scenes, np.random.RandomState(4), [NON_RELATIONAL, RELATIONAL, TERNARY]
    )


def slow_answer(kind: str, a: int, b: int, objects: list[tuple[int, int, bool]]) -> tuple[str, set]:
    """The answer and the deciding objects, object by object, with exact angles and lengths."""
    y, x, disc = objects[a]
    others = [number for number in range(6) if number != a]
    third = [number for number in others if number != b]

    def distance(one: int, other: int) -> float:
        return math.dist(objects[one][:2], objects[other][:2])

    def shape(one: int) -> str:
        return "circle" if objects[one][2] else "rectangle"

    def angle(at: int, one: int, other: int) -> float:
        p, q, r = distance(at, one), distance(at, other), distance(one, other)
        return math.degrees(math.acos(max(-1.0, min(1.0, (p * p + q * q - r * r) / (2 * p * q)))))

    if kind == "shape":
        return shape(a), {a}
    if kind == "left":
        return ("yes" if x < 37.5 else "no"), {a}
    if kind == "top":
        return ("yes" if y < 37.5 else "no"), {a}
    if kind == "closest":
        best = min(others, key=lambda one: distance(a, one))
        return shape(best), {a, best}
    if kind == "furthest":
        best = max(others, key=lambda one: distance(a, one))
        return shape(best), {a, best}
    if kind == "count":
        alike = {one for one in range(6) if objects[one][2] == disc}
        return str(len(alike)), alike
    if kind == "between":
        found = {
            c
            for c in third
            if min(y, objects[b][0]) <= objects[c][0] <= max(y, objects[b][0])
            and min(x, objects[b][1]) <= objects[c][1] <= max(x, objects[b][1])
        }
        return str(len(found)), found | {a, b}
    if kind == "in line":
        found = set()
        for c in third:  # walk along the segment without its ends
            t = sum(
                (objects[c][i] - objects[a][i]) * (objects[b][i] - objects[a][i]) for i in (0, 1)
            ) / (distance(a, b) ** 2)
            foot = [objects[a][i] + t * (objects[b][i] - objects[a][i]) for i in (0, 1)]
            if 0 < t < 1 and math.dist(foot, objects[c][:2]) <= HALF + 1e-9:
                found.add(c)
        return ("yes" if found else "no"), found | {a, b}
    found = set()
    for c in third:
        largest = max(angle(a, b, c), angle(b, a, c), angle(c, a, b))
        if 90 + 1e-6 < largest < 180 - 1e-6:
            found.add(c)
    return str(len(found)), found | {a, b}


def test_answers_and_deciding_objects_agree_with_a_slow_copy(scenes, questions):
    for scene in range(len(scenes)):
        one = [
            (int(y), int(x), bool(disc))
            for (y, x), disc in zip(scenes.centres[scene], scenes.circles[scene], strict=True)
        ]
        for at in range(30):
            kind = KINDS[questions.kinds[scene, at]]
            a, b = questions.first[scene, at], questions.second[scene, at]
            answer, deciding = slow_answer(kind, int(a), int(b), one)
            assert TERNARY_ANSWERS[questions.answers[scene, at]] == answer
            assert set(np.flatnonzero(questions.deciding[scene, at])) == deciding


def midpoint_disc(radius: int) -> set[tuple[int, int]]:
    """The pixels that the midpoint algorithm's circle fills, line by line."""
    filled = set()
    x, y, error = 0, radius, 1 - radius
    while x <= y:
        for dy, dx in ((y, x), (x, y), (-y, x), (-x, y)):
            filled |= {(dy, at) for at in range(-dx, dx + 1)}
        if error < 0:
            error += 2 * x + 3
        else:
            error += 2 * (x - y) + 5
            y -= 1
        x += 1
    return filled


def test_images_agree_with_a_slow_copy(scenes):
    scenes = scenes.at(np.arange(5))
    disc = midpoint_disc(HALF)
    square = set(itertools.product(range(-HALF, HALF + 1), repeat=2))
    for scene, image in enumerate(render(scenes)):
        expected = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
        for number, colour in enumerate(COLOURS.values()):
            y, x = scenes.centres[scene, number]
            for dy, dx in disc if scenes.circles[scene, number] else square:
                expected[y + dy, x + dx] = colour
        assert np.array_equal(image.transpose(1, 2, 0), expected)


def test_objects_do_not_overlap_and_lie_inside_the_image():
    found = generate_scenes(300, np.random.RandomState(0))
    centres = found.centres
    assert centres.min() >= HALF and centres.max() < SIDE - HALF
    distances = np.sqrt(((centres[:, :, None] - centres[:, None]) ** 2).sum(-1))
    assert distances[:, ~np.eye(6, dtype=bool)].min() >= APART
    assert not is_ambiguous(found).any()


def test_equally_close_objects_of_different_shapes_are_ambiguous():
    centres = np.array([[[35, 35], [35, 20], [35, 50], [60, 8], [66, 66], [8, 60]]])
    for disc, expected in ((True, True), (False, False)):
        circles = np.array([[False, disc, False, False, False, False]])
        assert bool(is_ambiguous(ShapeScenes(centres, circles))[0]) == expected


def test_relation_of_every_kind():
    assert [relation_of(kind) for kind in KINDS] == [NON_RELATIONAL] * 3 + [RELATIONAL] * 3 + [
        TERNARY
    ] * 3
