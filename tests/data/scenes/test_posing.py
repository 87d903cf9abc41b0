import json
import subprocess
import sys
from collections import Counter, defaultdict
from zlib import crc32

import numpy as np
import pytest

from overt.data.scenes import posing
from overt.data.scenes.posing import check_families, draft, fitting_kinds, pose, turns
from overt.data.scenes.questions import (
    ALL,
    ANSWERS,
    FAMILIES,
    SPOKEN,
    WHICH,
    WORDS,
    answer,
    chance,
    fitting_things,
    words,
)
from overt.data.scenes.store import Scenes
from overt.data.scenes.world import COLORS, FEWEST, MOST, VALUES, Dice, fits, key
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


def p_even(counts):
    from scipy.stats import chisquare

    return chisquare(counts).pvalue


def p_uniform(answers, family):
    counts = [int((answers == ANSWERS.index(a)).sum()) for a in FAMILIES[family]]
    assert sum(counts) == len(answers)
    return p_even(counts)


def sides_right(texts, answers):
    """Whether the first (0) or the second (1) of the two colors a text names is the answer."""
    named = [[word for word in text if word in COLORS] for text in texts]
    assert all(len(set(pair)) == len(pair) == 2 for pair in named)
    return np.array([p.index(ANSWERS[a]) for p, a in zip(named, answers.tolist(), strict=True)])


def all_of(train, test, family):
    """Texts and answers of both splits, as many as there are."""
    return (
        [*train[family][1], *test[family][1]],
        np.concatenate([train[family][2], test[family][2]]),
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ALL)
def test_answers_are_uniform(train, test, family):
    _, both = all_of(train, test, family)
    assert len(both) > 3500
    assert p_uniform(both, family) > 1e-3


@pytest.mark.parametrize("family", WHICH)
def test_the_first_and_the_second_are_equally_often_right(train, test, family):
    sides = sides_right(*all_of(train, test, family))
    assert len(sides) > 3500
    assert p_even(np.bincount(sides)) > 1e-3


@pytest.mark.parametrize("family", ALL)
def test_words_alone_are_no_better_than_chance(train, test, family):
    """And no worse, which is what makes it the number to compare with."""
    score = blind(train[family][0], train[family][2], test[family][0], test[family][2])
    assert abs(score - chance(family)) <= 0.05


def blind(bags, answers, test_bags, test_answers):
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=120).fit(bags, answers)
    return (fitted.predict(test_bags) == test_answers).mean()


@pytest.mark.parametrize("family", WHICH)
def test_words_and_their_order_do_not_tell_which_of_two(train, test, family):
    """The words before and after the "or" each in a bag of their own, a harder rival."""
    halves = {}
    for name, (_, texts, answers, _) in (("train", train[family]), ("test", test[family])):
        before, after = zip(*((t[: t.index("or")], t[t.index("or") :]) for t in texts), strict=True)
        bags = [arrays(part, ["yes"] * len(part), [0] * len(part))[0] for part in (before, after)]
        halves[name] = np.hstack(bags), sides_right(texts, answers)
    assert blind(*halves["train"], *halves["test"]) <= chance(family) + 0.05


@pytest.mark.parametrize("family", ALL)
def test_the_majority_answer_to_a_text_is_no_better_than_chance(train, test, family):
    """The usual answer to the text; to a new one, the usual one to what of it is known."""
    table = defaultdict(Counter)
    for text, a in zip(train[family][1], train[family][2].tolist(), strict=True):
        for known in known_as(text, family):
            table[known][a] += 1
    right = [
        next(table[known] for known in known_as(text, family) if known in table).most_common(1)[0][
            0
        ]
        == a
        for text, a in zip(test[family][1], test[family][2].tolist(), strict=True)
    ]
    assert np.mean(right) <= chance(family) + 0.05
    if family in WHICH:
        assert np.mean(right) >= chance(family) - 0.05


def known_as(text, family):
    """The text, and ever less of it: what is asked of which two colors, the colors, nothing."""
    if family not in WHICH:
        return [text, ()]
    colors = tuple(word for word in text if word in COLORS)
    return [text, (*text[: text.index("the")], *colors), colors, ()]


@pytest.mark.parametrize("family", ALL)
def test_each_word_leaves_the_answers_even(train, test, family):
    """P(answer | a word is in the question), word by word: no chi-square out of line.

    The color that a choice between two things names is the answer in one half of the cases; in the
    other half all other colors are equally frequent.
    """
    texts, answers = all_of(train, test, family)
    bags = np.concatenate([train[family][0], test[family][0]]) > 0
    sides = sides_right(texts, answers) if family in WHICH else None
    values = []
    for word, asked in zip(WORDS, bags.T, strict=True):
        if asked.sum() < 100:
            continue
        found = answers[asked]
        if sides is not None:
            values.append(p_even(np.bincount(sides[asked], minlength=2)))
        if sides is None or word not in COLORS:
            values.append(p_uniform(found, family))
        else:
            counts = np.bincount(found, minlength=len(ANSWERS))
            rest = [counts[ANSWERS.index(color)] for color in COLORS if color != word]
            values += [p_even([counts[ANSWERS.index(word)], sum(rest)]), p_even(rest)]
    assert len(values) > 10 and min(values) > 1e-4


@pytest.mark.parametrize("family", WHICH)
def test_given_the_pair_the_answer_is_even(train, test, family):
    """The answer is one of the two named; given both, in their order, each is as likely."""
    from scipy.stats import binomtest, chi2

    pairs = defaultdict(lambda: [0, 0])
    texts, answers = all_of(train, test, family)
    for text, side in zip(texts, sides_right(texts, answers).tolist(), strict=True):
        pairs[tuple(word for word in text if word in COLORS)][side] += 1
    assert len(pairs) == 8 * 7 and min(sum(pair) for pair in pairs.values()) > 30
    assert min(binomtest(one, one + two).pvalue for one, two in pairs.values()) > 1e-4
    off = sum((one - two) ** 2 / (one + two) for one, two in pairs.values())
    assert chi2.sf(off, len(pairs)) > 1e-3


@pytest.mark.parametrize("family", ALL)
def test_the_number_of_things_tells_nothing(train, test, family):
    from scipy.stats import chi2_contingency

    texts, answers = all_of(train, test, family)
    things = np.concatenate([train[family][3], test[family][3]])
    seen = [n for n in range(FEWEST, MOST + 1) if (things == n).sum() >= 40]
    for found in [answers, *([sides_right(texts, answers)] if family in WHICH else [])]:
        table = [
            [int(((things == n) & (found == a)).sum()) for a in set(found.tolist())] for n in seen
        ]
        assert chi2_contingency(table).pvalue > 1e-3


# --- the rounds of the test split -----------------------------------------------------------------


@pytest.mark.parametrize(("families", "count"), [(ALL, 4), (ALL, 1), (("count", "relate"), 3)])
def test_every_question_of_a_round_has_each_answer_equally_often(families, count):
    for block in range(6):
        drafts = turns(Dice(key("test", 9, block, posing.TURNS)), count, families)
        assert len(drafts) == posing.ROUND == 24
        assert len({tuple(p.family for p in asked.programs) for asked in drafts}) == 1
        answers, possible = defaultdict(Counter), {}
        for asked in drafts:
            assert posing.Plan(asked.programs).is_possible()
            for program, found in zip(asked.programs, asked.answers, strict=True):
                answers[words(program)][found] += 1
                possible[words(program)] = round(1 / chance(program.family))
        for text, found in answers.items():
            assert len(found) == possible[text] and len(set(found.values())) == 1


def test_a_round_keeps_no_words_for_longer_than_it_must():
    """Of two answers twelve questions, of eight answers three, unless one is drawn twice."""
    asked = Counter()
    for block in range(20):
        drafts = turns(Dice(key("test", 9, block, posing.TURNS)))
        for family in {p.family for p in drafts[0].programs}:
            texts = {words(p) for one in drafts for p in one.programs if p.family == family}
            most = posing.ROUND * chance(family)
            assert 0.6 * most < len(texts) <= most
            asked[family] += 1
    assert set(asked) == set(ALL)


def test_no_rule_about_words_beats_chance_in_test_scenes():
    """Not on the average but to the question: 24 finished scenes, any rule, every family."""
    posed = [pose("test", 1, i) for i in range(posing.ROUND)]
    for rule in range(20):
        right, total = Counter(), Counter()
        for _, questions in posed:
            for question in questions:
                named = [word for word in question.words if word in COLORS]
                left = named if question.family in WHICH else FAMILIES[question.family]
                guess = left[crc32(f"{rule} {question.words}".encode()) % len(left)]
                right[question.family] += guess == question.answer
                total[question.family] += 1
        assert {f: right[f] / total[f] for f in total} == {f: chance(f) for f in total}


def test_test_scenes_are_built_to_their_round():
    drafts = turns(Dice(key("test", 1, 1, posing.TURNS)))
    for i, asked in enumerate(drafts):
        scene, questions = pose("test", 1, posing.ROUND + i)
        assert [q.program for q in questions] == asked.programs
        assert [q.answer for q in questions] == asked.answers
        assert len(scene.things) == asked.total


def test_answers_to_questions_of_one_scene_are_independent():
    """Two questions of two answers each change in the same scenes, but not in step."""
    from scipy.stats import binomtest

    agree = []
    for block in range(60):
        drafts = turns(Dice(key("test", 9, block, posing.TURNS)), 2, ("exist", "same"))
        agree += [asked.drawn[0] == asked.drawn[1] for asked in drafts[::2]]
    assert binomtest(sum(agree), len(agree)).pvalue > 1e-3


def test_the_order_in_which_families_are_named_does_not_matter():
    assert pose("test", 1, 30, families=ALL[::-1]) == pose("test", 1, 30)


# --- what is drawn, and the scene for it ----------------------------------------------------------


def test_colors_and_shapes_are_named_more_often():
    """Attributes in the order of speech, one told alone as often as its weight says."""
    dice = Dice(key("train", 5, 0, 9))
    alone, values, single = Counter(), Counter(), 0
    for _ in range(4000):
        said = posing._description(dice)
        names = [name for name, _ in said]
        assert 1 <= len(names) <= 2 and names == [name for name in SPOKEN if name in names]
        single += len(names) == 1
        alone.update(names if len(names) == 1 else ())
        values.update(value for name, value in said if name == "color")
    from scipy.stats import binomtest, chisquare

    assert binomtest(single, 4000, posing.SINGLE).pvalue > 1e-3
    wanted = [single * posing.NAMED[name] / sum(posing.NAMED.values()) for name in SPOKEN]
    assert chisquare([alone[name] for name in SPOKEN], wanted).pvalue > 1e-3
    assert set(values) == set(VALUES["color"]) and p_even(list(values.values())) > 1e-3
    assert all("color" not in dict(posing._description(dice, "color")) for _ in range(100))


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
            if question.family in WHICH:
                one, two = (dict(side) for side in question.program.sides)
                assert set(one) == set(two) == {"color", "shape"} and one["color"] != two["color"]
                assert question.answer in (one["color"], two["color"])
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


def test_a_scene_without_room_gets_new_words_and_keeps_what_was_drawn(monkeypatch):
    places, tries = posing.places, []

    def no_room_at_first(*given):
        tries.append(1)
        return places(*given) if len(tries) > posing.PATIENCE else None

    for i in range(4):
        asked = draft(Dice(key("train", 8, i, 1)), families=WHICH)
        tries.clear()
        monkeypatch.setattr(posing, "places", no_room_at_first)
        scene, questions = pose("train", 8, i, families=WHICH)
        assert len(tries) > posing.PATIENCE and len(scene.things) == asked.total
        assert [q.program for q in questions] != asked.programs
        assert [q.family for q in questions] == [p.family for p in asked.programs]
        sides = [dict(q.program.sides[1])["color"] == q.answer for q in questions]
        assert sides == [drawn == "no" for drawn in asked.drawn]


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
    texts = np.array([text for one in rows for text in one.text.texts])
    for family in ALL:
        asked = groups == family
        assert asked.sum() >= 4000
        assert p_uniform(labels[asked], family) > 1e-3
        if family in WHICH:
            sides = sides_right([text.split() for text in texts[asked]], labels[asked])
            assert p_even(np.bincount(sides)) > 1e-3
