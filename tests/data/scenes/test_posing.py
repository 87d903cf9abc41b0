import json
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from overt.data.scenes import posing
from overt.data.scenes.posing import check_families, draft, fitting_kinds, pose
from overt.data.scenes.questions import ALL, ANSWERS, FAMILIES, WORDS, answer, fitting_things
from overt.data.scenes.store import Scenes
from overt.data.scenes.world import FEWEST, MOST, Dice, fits, key
from overt.errors import BadInput

# Large enough for five points to be five standard errors in a family of two answers.
TRAIN, TEST = 4000, 6500

# Another process draws them, which is much faster than this one with all its checks of types.
DRAW = """
import json, sys
from overt.data.scenes.posing import draft
from overt.data.scenes.questions import ALL, words
from overt.data.scenes.world import Dice, key
split, count = sys.argv[1], int(sys.argv[2])
found = {family: [] for family in ALL}
for i in range(count):
    asked = draft(Dice(key(split, 8, i, 1)))
    for program, answer in zip(asked.programs, asked.answers):
        found[program.family].append((words(program), answer, asked.total))
print(json.dumps(found))
"""


def read(split, count):
    """Family -> (bags of words, texts, answers, numbers of things) of all its questions."""
    run = [sys.executable, "-c", DRAW, split, str(count)]
    drawn = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    return {family: arrays(*zip(*rows, strict=True)) for family, rows in drawn.items()}


def arrays(texts, answers, things):
    bags = np.array([[text.count(word) for word in WORDS] for text in texts], np.float32)
    numbers = np.array([ANSWERS.index(answer) for answer in answers])
    return bags, [tuple(text) for text in texts], numbers, np.array(things)


@pytest.fixture(scope="module")
def train():
    return read("train", TRAIN)


@pytest.fixture(scope="module")
def test():
    return read("test", TEST)


def test_scenes_are_built_to_the_draft():
    """What the balance of drafts says holds for scenes: words and answers are not touched again."""
    for i in range(60):
        asked = draft(Dice(key("train", 8, i, 1)))
        scene, questions = pose("train", 8, i)
        assert [q.program for q in questions] == asked.programs
        assert [q.answer for q in questions] == asked.answers
        assert len(scene.things) == asked.total


def p_uniform(answers, family):
    from scipy.stats import chisquare

    counts = [int((answers == ANSWERS.index(a)).sum()) for a in FAMILIES[family]]
    assert sum(counts) == len(answers)
    return chisquare(counts).pvalue


@pytest.mark.parametrize("family", ALL)
def test_answers_are_uniform(train, test, family):
    both = np.concatenate([train[family][2], test[family][2]])
    assert len(both) > 3500
    assert p_uniform(both, family) > 1e-3


@pytest.mark.parametrize("family", ALL)
def test_words_alone_are_no_better_than_chance(train, test, family):
    from sklearn.linear_model import LogisticRegression

    (bags, _, answers, _), (test_bags, _, test_answers, _) = train[family], test[family]
    blind = LogisticRegression(max_iter=120).fit(bags, answers)
    score = (blind.predict(test_bags) == test_answers).mean()
    assert score <= 1 / len(FAMILIES[family]) + 0.05


@pytest.mark.parametrize("family", ALL)
def test_the_majority_answer_to_a_text_is_no_better_than_chance(train, test, family):
    table = defaultdict(Counter)
    for text, a in zip(train[family][1], train[family][2].tolist(), strict=True):
        table[text][a] += 1
    usual = Counter(train[family][2].tolist()).most_common(1)[0][0]
    right = [
        (table[text].most_common(1)[0][0] if text in table else usual) == a
        for text, a in zip(test[family][1], test[family][2].tolist(), strict=True)
    ]
    assert np.mean(right) <= 1 / len(FAMILIES[family]) + 0.05


@pytest.mark.parametrize("family", ALL)
def test_each_word_leaves_the_answers_even(train, test, family):
    """P(answer | a word is in the question), word by word: no chi-square out of line."""
    bags = np.concatenate([train[family][0], test[family][0]]) > 0
    answers = np.concatenate([train[family][2], test[family][2]])
    values = [
        p_uniform(answers[bags[:, word]], family)
        for word in range(bags.shape[1])
        if bags[:, word].sum() >= 100
    ]
    assert len(values) > 10 and min(values) > 1e-4


@pytest.mark.parametrize("family", ALL)
def test_the_number_of_things_tells_nothing(train, test, family):
    from scipy.stats import chi2_contingency

    answers = np.concatenate([train[family][2], test[family][2]])
    things = np.concatenate([train[family][3], test[family][3]])
    seen = [n for n in range(FEWEST, MOST + 1) if (things == n).sum() >= 40]
    table = [
        [int(((things == n) & (answers == a)).sum()) for a in set(answers.tolist())] for n in seen
    ]
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("family", ["exist"])
def test_single_attributes_tell_nothing_about_existence(family):
    """Each attribute of the description is on as many things after yes as after no."""
    near = defaultdict(list)
    for i in range(150):
        scene, questions = pose("train", 21, i, families=[family])
        for question in questions:
            if len(question.program.sides[0]) == 2:
                for pair in question.program.sides[0]:
                    near[question.answer].append(len(fitting_things((pair,), scene.things)))
    means = {a: np.mean(counts) for a, counts in near.items()}
    errors = np.sqrt(sum(np.var(counts) / len(counts) for counts in near.values()))
    assert abs(means["yes"] - means["no"]) < 4 * errors


def test_scenes_fit_their_questions():
    for i in range(60):
        scene, questions = pose("val", 4, i)
        assert len(questions) == 4 and len({q.family for q in questions}) == 4
        assert FEWEST <= len(scene.things) <= MOST
        assert fits(sorted(scene.things, key=lambda thing: -thing.radius))
        assert [answer(q.program, scene) for q in questions] == [q.answer for q in questions]
        for question in questions:
            for side in question.program.sides:
                names = {name for name, _ in side}
                assert 1 <= len(names) <= 2 and question.program.about not in names
        for question in questions:
            if question.family == "spatial":
                a, b = (
                    scene.things[fitting_things(s, scene.things)[0]] for s in question.program.sides
                )
                axis = "x" if question.program.about in ("left", "right") else "y"
                assert abs(getattr(a, axis) - getattr(b, axis)) >= posing.GAP


def test_a_relation_is_needed_to_find_the_thing_related():
    needed = 0
    for i in range(40):
        scene, (question,) = pose("val", 6, i, count=1, families=["relate"])
        needed += len(fitting_things(question.program.sides[0], scene.things)) == 2
    assert needed == 40


def test_words_are_never_drawn_again_for_the_sake_of_answers(monkeypatch):
    """Were they, some answers would be rarer after some words."""
    drawn = []
    programs = posing._programs
    monkeypatch.setattr(posing, "_programs", lambda *a: drawn.append(1) or programs(*a))
    for i in range(120):
        pose("train", 13, i)
    for family in ALL:
        for i in range(8):
            pose("train", 13, i, families=[family])
    assert len(drawn) == 120 + 8 * len(ALL)


def test_the_same_key_gives_the_same_questions():
    assert pose("test", 1, 2) == pose("test", 1, 2)
    assert pose("test", 1, 2) != pose("val", 1, 2)


@pytest.mark.parametrize("family", ALL)
def test_one_family_alone(family):
    for i in range(5):
        _, questions = pose("test", 2, i, families=[family])
        assert [q.family for q in questions] == [family] * 4
        assert len({q.words for q in questions}) == 4


def test_a_family_left_out():
    kept = [family for family in ALL if family != "count"]
    seen = {q.family for i in range(60) for q in pose("train", 2, i, families=kept)[1]}
    assert seen == set(kept)


def test_families_that_do_not_all_fit_at_once():
    asked = ["exist", "count", "same", "spatial"]
    seen = Counter(q.family for i in range(40) for q in pose("train", 2, i, families=asked)[1])
    assert set(seen) == set(asked)


@pytest.mark.parametrize(
    ("families", "count"), [(["riddle"], 4), ([], 4), (["exist"], 0), (["same"], 5)]
)
def test_what_cannot_be_asked_is_refused(families, count):
    with pytest.raises(BadInput):
        check_families(families, count)
    with pytest.raises(BadInput):
        pose("train", 0, 0, count, families)


def test_kinds_are_bit_sets():
    assert fitting_kinds().bit_count() == 6 * 8 * 3 * 2
    assert fitting_kinds(("color", "red")).bit_count() == 36
    red, ring = fitting_kinds(("color", "red")), fitting_kinds(("shape", "ring"))
    assert red & ring == fitting_kinds(("color", "red"), ("shape", "ring"))


@pytest.mark.long
def test_finished_scenes_are_balanced_too(tmp_path):
    """Answers as stored with their images, four thousand a family, not as drafted."""
    data = Scenes("val", 8, 11_000, size=32, cache=tmp_path)
    rows = [data.batch(range(start, start + 1000)) for start in range(0, 11_000, 1000)]
    labels = np.concatenate([one.labels.numpy() for one in rows])
    groups = np.array([group for one in rows for group in one.groups])
    for family in ALL:
        assert (groups == family).sum() >= 4000
        assert p_uniform(labels[groups == family], family) > 1e-3
