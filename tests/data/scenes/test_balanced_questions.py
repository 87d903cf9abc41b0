import json
import subprocess
import sys
from collections import Counter, defaultdict
from zlib import crc32

import numpy as np
import pytest

from overt.data.scenes import balanced_questions
from overt.data.scenes.balanced_questions import (
    check_families,
    draft_questions,
    draft_round,
    generate_scene,
    matching_kinds,
)
from overt.data.scenes.dataset import Scenes
from overt.data.scenes.questions import (
    ALL_FAMILIES,
    ANSWERS,
    ATTRIBUTE_ORDER,
    CHOICE_FAMILIES,
    FAMILIES,
    WORDS,
    chance_accuracy,
    matching_things,
    program_words,
    run_program,
)
from overt.data.scenes.world import COLORS, FEWEST, MOST, VALUES, Dice, is_valid_layout, scene_rng
from overt.errors import UserError

# Large enough for five points to be five standard errors in a family of two answers.
TRAIN, TEST = 4000, 6500

# Another process draws them: it has no type checks and is much faster.
DRAW_SCRIPT = """
import json, sys
from overt.data.scenes.balanced_questions import draft_questions
from overt.data.scenes.questions import ALL_FAMILIES, program_words
from overt.data.scenes.world import Dice, scene_rng
split, count = sys.argv[1], int(sys.argv[2])
found = {family: [] for family in ALL_FAMILIES}
for i in range(count):
    draft = draft_questions(Dice(scene_rng(split, 8, i, 1)))
    for program, answer in zip(draft.programs, draft.answers):
        found[program.family].append((program_words(program), answer, draft.total))
print(json.dumps(found))
"""


def draw_questions(split, count):
    """Family -> (bags of words, texts, answers, numbers of objects) of its questions."""
    run = [sys.executable, "-c", DRAW_SCRIPT, split, str(count)]
    drawn = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    return {family: to_arrays(*zip(*rows, strict=True)) for family, rows in drawn.items()}


def to_arrays(texts, answers, things):
    bags = np.array([[text.count(word) for word in WORDS] for text in texts], np.float32)
    numbers = np.array([ANSWERS.index(answer) for answer in answers])
    return bags, [tuple(text) for text in texts], numbers, np.array(things)


@pytest.fixture(scope="module")
def train():
    return draw_questions("train", TRAIN)


@pytest.fixture(scope="module")
def test():
    return draw_questions("test", TEST)


def test_generated_scenes_follow_their_draft():
    """Words and answers of the draft are kept, so its balance holds for the scenes."""
    for i in range(60):
        draft = draft_questions(Dice(scene_rng("train", 8, i, 1)))
        scene, questions = generate_scene("train", 8, i)
        assert [q.program for q in questions] == draft.programs
        assert [q.answer for q in questions] == draft.answers
        assert len(scene.things) == draft.total


def p_value_even(counts):
    from scipy.stats import chisquare

    return chisquare(counts).pvalue


def p_value_uniform(answers, family):
    counts = [int((answers == ANSWERS.index(a)).sum()) for a in FAMILIES[family]]
    assert sum(counts) == len(answers)
    return p_value_even(counts)


def correct_sides(texts, answers):
    """Whether the first (0) or the second (1) of the two colors a text names is the answer."""
    named = [[word for word in text if word in COLORS] for text in texts]
    assert all(len(set(pair)) == len(pair) == 2 for pair in named)
    return np.array([p.index(ANSWERS[a]) for p, a in zip(named, answers.tolist(), strict=True)])


def join_splits(train, test, family):
    """All texts and answers of both splits."""
    return (
        [*train[family][1], *test[family][1]],
        np.concatenate([train[family][2], test[family][2]]),
    )


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_answers_are_uniform(train, test, family):
    _, both = join_splits(train, test, family)
    assert len(both) > 3500
    assert p_value_uniform(both, family) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("family", CHOICE_FAMILIES)
def test_first_and_second_choice_are_equally_often_correct(train, test, family):
    sides = correct_sides(*join_splits(train, test, family))
    assert len(sides) > 3500
    assert p_value_even(np.bincount(sides)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_text_only_classifier_scores_chance(train, test, family):
    """Also not below chance, so that chance is the right baseline."""
    score = score_text_only(train[family][0], train[family][2], test[family][0], test[family][2])
    assert abs(score - chance_accuracy(family)) <= 0.05


def score_text_only(bags, answers, test_bags, test_answers):
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=120).fit(bags, answers)
    return (fitted.predict(test_bags) == test_answers).mean()


@pytest.mark.long
@pytest.mark.parametrize("family", CHOICE_FAMILIES)
def test_word_order_does_not_predict_the_choice(train, test, family):
    """A stronger baseline: one bag of words before the "or" and one after it."""
    halves = {}
    for name, (_, texts, answers, _) in (("train", train[family]), ("test", test[family])):
        before, after = zip(*((t[: t.index("or")], t[t.index("or") :]) for t in texts), strict=True)
        bags = [
            to_arrays(part, ["yes"] * len(part), [0] * len(part))[0] for part in (before, after)
        ]
        halves[name] = np.hstack(bags), correct_sides(texts, answers)
    assert score_text_only(*halves["train"], *halves["test"]) <= chance_accuracy(family) + 0.05


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_majority_answer_of_a_text_scores_chance(train, test, family):
    """The most common answer to the text; for a new text, to its known part."""
    table = defaultdict(Counter)
    for text, a in zip(train[family][1], train[family][2].tolist(), strict=True):
        for known in backoff_keys(text, family):
            table[known][a] += 1
    right = []
    for text, a in zip(test[family][1], test[family][2].tolist(), strict=True):
        counts = next(table[known] for known in backoff_keys(text, family) if known in table)
        right.append(counts.most_common(1)[0][0] == a)
    assert np.mean(right) <= chance_accuracy(family) + 0.05
    if family in CHOICE_FAMILIES:
        assert np.mean(right) >= chance_accuracy(family) - 0.05


def backoff_keys(text, family):
    """The text and shorter keys: the question with its two colors, the colors, nothing."""
    if family not in CHOICE_FAMILIES:
        return [text, ()]
    colors = tuple(word for word in text if word in COLORS)
    return [text, (*text[: text.index("the")], *colors), colors, ()]


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_answers_are_uniform_given_any_word(train, test, family):
    """P(answer | a word is in the question) passes a chi-square test for each word.

    The color that a choice between two things names is the answer in one half of the cases; in the
    other half all other colors are equally frequent.
    """
    texts, answers = join_splits(train, test, family)
    bags = np.concatenate([train[family][0], test[family][0]]) > 0
    sides = correct_sides(texts, answers) if family in CHOICE_FAMILIES else None
    values = []
    for word, contains in zip(WORDS, bags.T, strict=True):
        if contains.sum() < 100:
            continue
        found = answers[contains]
        if sides is not None:
            values.append(p_value_even(np.bincount(sides[contains], minlength=2)))
        if sides is None or word not in COLORS:
            values.append(p_value_uniform(found, family))
        else:
            counts = np.bincount(found, minlength=len(ANSWERS))
            rest = [counts[ANSWERS.index(color)] for color in COLORS if color != word]
            values += [p_value_even([counts[ANSWERS.index(word)], sum(rest)]), p_value_even(rest)]
    assert len(values) > 10 and min(values) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("family", CHOICE_FAMILIES)
def test_answers_are_uniform_given_the_color_pair(train, test, family):
    """The answer is one of the two named colors; given both in order, each is as likely."""
    from scipy.stats import binomtest, chi2

    pairs = defaultdict(lambda: [0, 0])
    texts, answers = join_splits(train, test, family)
    for text, side in zip(texts, correct_sides(texts, answers).tolist(), strict=True):
        pairs[tuple(word for word in text if word in COLORS)][side] += 1
    assert len(pairs) == 8 * 7 and min(sum(pair) for pair in pairs.values()) > 30
    assert min(binomtest(one, one + two).pvalue for one, two in pairs.values()) > 1e-4
    statistic = sum((one - two) ** 2 / (one + two) for one, two in pairs.values())
    assert chi2.sf(statistic, len(pairs)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_answers_do_not_depend_on_the_number_of_objects(train, test, family):
    from scipy.stats import chi2_contingency

    texts, answers = join_splits(train, test, family)
    things = np.concatenate([train[family][3], test[family][3]])
    numbers = [n for n in range(FEWEST, MOST + 1) if (things == n).sum() >= 40]
    for found in [answers, *([correct_sides(texts, answers)] if family in CHOICE_FAMILIES else [])]:
        table = [
            [int(((things == n) & (found == a)).sum()) for a in set(found.tolist())]
            for n in numbers
        ]
        assert chi2_contingency(table).pvalue > 1e-3


# --- the rounds of the test split -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("families", "count"), [(ALL_FAMILIES, 4), (ALL_FAMILIES, 1), (("count", "relate"), 3)]
)
def test_each_question_of_a_round_has_uniform_answers(families, count):
    for block in range(6):
        drafts = draft_round(
            Dice(scene_rng("test", 9, block, balanced_questions.TURNS)), count, families
        )
        assert len(drafts) == balanced_questions.ROUND == 24
        assert len({tuple(p.family for p in draft.programs) for draft in drafts}) == 1
        answers, possible = defaultdict(Counter), {}
        for draft in drafts:
            assert balanced_questions.ScenePlan(draft.programs).is_possible()
            for program, found in zip(draft.programs, draft.answers, strict=True):
                answers[program_words(program)][found] += 1
                possible[program_words(program)] = round(1 / chance_accuracy(program.family))
        for text, found in answers.items():
            assert len(found) == possible[text] and len(set(found.values())) == 1


def test_round_repeats_each_text_as_rarely_as_possible():
    """Twelve texts for two answers, three for eight answers, unless one is drawn twice."""
    rounds = Counter()
    for block in range(20):
        drafts = draft_round(Dice(scene_rng("test", 9, block, balanced_questions.TURNS)))
        for family in {p.family for p in drafts[0].programs}:
            texts = {program_words(p) for one in drafts for p in one.programs if p.family == family}
            most = balanced_questions.ROUND * chance_accuracy(family)
            assert 0.6 * most < len(texts) <= most
            rounds[family] += 1
    assert set(rounds) == set(ALL_FAMILIES)


def test_no_text_rule_beats_chance_in_test_scenes():
    """The accuracy is exactly chance: 24 generated scenes, any rule, every family."""
    samples = [generate_scene("test", 1, i) for i in range(balanced_questions.ROUND)]
    for rule in range(20):
        right, total = Counter(), Counter()
        for _, questions in samples:
            for question in questions:
                named = [word for word in question.words if word in COLORS]
                choices = named if question.family in CHOICE_FAMILIES else FAMILIES[question.family]
                guess = choices[crc32(f"{rule} {question.words}".encode()) % len(choices)]
                right[question.family] += guess == question.answer
                total[question.family] += 1
        assert {f: right[f] / total[f] for f in total} == {f: chance_accuracy(f) for f in total}


def test_test_scenes_follow_their_round():
    drafts = draft_round(Dice(scene_rng("test", 1, 1, balanced_questions.TURNS)))
    for i, draft in enumerate(drafts):
        scene, questions = generate_scene("test", 1, balanced_questions.ROUND + i)
        assert [q.program for q in questions] == draft.programs
        assert [q.answer for q in questions] == draft.answers
        assert len(scene.things) == draft.total


def test_answers_within_a_scene_are_independent():
    """Two questions with two answers each vary independently over the scenes."""
    from scipy.stats import binomtest

    agree = []
    for block in range(60):
        drafts = draft_round(
            Dice(scene_rng("test", 9, block, balanced_questions.TURNS)), 2, ("exist", "same")
        )
        agree += [draft.drawn[0] == draft.drawn[1] for draft in drafts[::2]]
    assert binomtest(sum(agree), len(agree)).pvalue > 1e-3


def test_order_of_the_families_does_not_matter():
    assert generate_scene("test", 1, 30, families=ALL_FAMILIES[::-1]) == generate_scene(
        "test", 1, 30
    )


# --- drafts and the scenes for them ---------------------------------------------------------------


def test_descriptions_follow_the_attribute_weights():
    """Attributes follow the word order; the frequency of a single one is its weight."""
    rng = Dice(scene_rng("train", 5, 0, 9))
    alone, values, single = Counter(), Counter(), 0
    for _ in range(4000):
        description = balanced_questions._description(rng)
        names = [name for name, _ in description]
        assert 1 <= len(names) <= 2 and names == [name for name in ATTRIBUTE_ORDER if name in names]
        single += len(names) == 1
        alone.update(names if len(names) == 1 else ())
        values.update(value for name, value in description if name == "color")
    from scipy.stats import binomtest, chisquare

    assert binomtest(single, 4000, balanced_questions.SINGLE).pvalue > 1e-3
    expected = [
        single * balanced_questions.NAMED[name] / sum(balanced_questions.NAMED.values())
        for name in ATTRIBUTE_ORDER
    ]
    assert chisquare([alone[name] for name in ATTRIBUTE_ORDER], expected).pvalue > 1e-3
    assert set(values) == set(VALUES["color"]) and p_value_even(list(values.values())) > 1e-3
    assert all(
        "color" not in dict(balanced_questions._description(rng, "color")) for _ in range(100)
    )


@pytest.mark.parametrize("family", ["exist"])
def test_single_attributes_do_not_predict_existence(family):
    """Each attribute is on equally many objects for yes and for no."""
    near = defaultdict(list)
    for i in range(150):
        scene, questions = generate_scene("train", 21, i, families=[family])
        for question in questions:
            if len(question.program.sides[0]) == 2:
                for pair in question.program.sides[0]:
                    near[question.answer].append(len(matching_things((pair,), scene.things)))
    means = {a: np.mean(counts) for a, counts in near.items()}
    errors = np.sqrt(sum(np.var(counts) / len(counts) for counts in near.values()))
    assert abs(means["yes"] - means["no"]) < 4 * errors


def test_scenes_match_their_questions():
    for i in range(60):
        scene, questions = generate_scene("val", 4, i)
        assert len(questions) == 4 and len({q.family for q in questions}) == 4
        assert FEWEST <= len(scene.things) <= MOST
        assert is_valid_layout(sorted(scene.things, key=lambda thing: -thing.radius))
        assert [run_program(q.program, scene) for q in questions] == [q.answer for q in questions]
        for question in questions:
            for side in question.program.sides:
                names = {name for name, _ in side}
                assert 1 <= len(names) <= 2 and question.program.about not in names
            if question.family in CHOICE_FAMILIES:
                one, two = (dict(side) for side in question.program.sides)
                assert set(one) == set(two) == {"color", "shape"} and one["color"] != two["color"]
                assert question.answer in (one["color"], two["color"])
        for question in questions:
            if question.family == "spatial":
                a, b = (
                    scene.things[matching_things(s, scene.things)[0]]
                    for s in question.program.sides
                )
                axis = "x" if question.program.about in ("left", "right") else "y"
                assert abs(getattr(a, axis) - getattr(b, axis)) >= balanced_questions.GAP


def test_relate_questions_need_the_relation():
    needed = 0
    for i in range(40):
        scene, (question,) = generate_scene("val", 6, i, count=1, families=["relate"])
        needed += len(matching_things(question.program.sides[0], scene.things)) == 2
    assert needed == 40


def test_words_are_never_redrawn_because_of_answers(monkeypatch):
    """Redrawing would make some answers rarer for some words."""
    drawn = []
    programs = balanced_questions._programs
    monkeypatch.setattr(balanced_questions, "_programs", lambda *a: drawn.append(1) or programs(*a))
    for i in range(120):
        generate_scene("train", 13, i)
    for family in ALL_FAMILIES:
        for i in range(8):
            generate_scene("train", 13, i, families=[family])
    assert len(drawn) == 120 + 8 * len(ALL_FAMILIES)


def test_layout_failure_redraws_words_and_keeps_the_drawn_answers(monkeypatch):
    place_things, tries = balanced_questions.place_things, []

    def fail_at_first(*given):
        tries.append(1)
        return place_things(*given) if len(tries) > balanced_questions.MAX_ATTEMPTS else None

    for i in range(4):
        draft = draft_questions(Dice(scene_rng("train", 8, i, 1)), families=CHOICE_FAMILIES)
        tries.clear()
        monkeypatch.setattr(balanced_questions, "place_things", fail_at_first)
        scene, questions = generate_scene("train", 8, i, families=CHOICE_FAMILIES)
        assert len(tries) > balanced_questions.MAX_ATTEMPTS and len(scene.things) == draft.total
        assert [q.program for q in questions] != draft.programs
        assert [q.family for q in questions] == [p.family for p in draft.programs]
        sides = [dict(q.program.sides[1])["color"] == q.answer for q in questions]
        assert sides == [drawn == "no" for drawn in draft.drawn]


def test_same_seed_gives_the_same_questions():
    assert generate_scene("test", 1, 2) == generate_scene("test", 1, 2)
    assert generate_scene("test", 1, 2) != generate_scene("val", 1, 2)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_single_family_can_be_selected(family):
    for i in range(5):
        _, questions = generate_scene("test", 2, i, families=[family])
        assert [q.family for q in questions] == [family] * 4
        assert len({q.words for q in questions}) == 4


def test_family_can_be_left_out():
    kept = [family for family in ALL_FAMILIES if family != "count"]
    found = {q.family for i in range(60) for q in generate_scene("train", 2, i, families=kept)[1]}
    assert found == set(kept)


def test_families_that_do_not_fit_together_are_all_drawn():
    families = ["exist", "count", "same", "spatial"]
    found = Counter(
        q.family for i in range(40) for q in generate_scene("train", 2, i, families=families)[1]
    )
    assert set(found) == set(families)


@pytest.mark.parametrize(
    ("families", "count"), [(["riddle"], 4), ([], 4), (["exist"], 0), (["same"], 5)]
)
def test_invalid_families_and_counts_raise(families, count):
    with pytest.raises(UserError):
        check_families(families, count)
    with pytest.raises(UserError):
        generate_scene("train", 0, 0, count, families)


def test_matching_kinds_are_bit_sets():
    assert matching_kinds().bit_count() == 6 * 8 * 3 * 2
    assert matching_kinds(("color", "red")).bit_count() == 36
    red, ring = matching_kinds(("color", "red")), matching_kinds(("shape", "ring"))
    assert red & ring == matching_kinds(("color", "red"), ("shape", "ring"))


@pytest.mark.long
def test_generated_scenes_are_balanced(tmp_path):
    """Checks answers stored with their images, four thousand per family, not drafts."""
    data = Scenes("val", 8, 11_000, size=32, cache=tmp_path)
    rows = [data.batch(range(start, start + 1000)) for start in range(0, 11_000, 1000)]
    labels = np.concatenate([one.labels.numpy() for one in rows])
    groups = np.array([group for one in rows for group in one.groups])
    texts = np.array([text for one in rows for text in one.text.texts])
    for family in ALL_FAMILIES:
        selected = groups == family
        assert selected.sum() >= 4000
        assert p_value_uniform(labels[selected], family) > 1e-3
        if family in CHOICE_FAMILIES:
            sides = correct_sides([text.split() for text in texts[selected]], labels[selected])
            assert p_value_even(np.bincount(sides)) > 1e-3
