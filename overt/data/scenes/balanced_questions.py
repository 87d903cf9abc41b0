"""Scenes generated for given questions and answers, so that words alone do not predict an answer.

Families, words and answers of a scene are drawn first, the answers uniformly and independently of
the words (for a choice between two things: the first or the second); then a scene is built in which
they are true. Whether a set of questions can share a scene is decided from their words alone, for
every combination of answers: rejecting by answer would make some answers rarer after some words.

This makes words uninformative on average; a finite sample of questions still has some bias. The
test split has none: each question is put to as many scenes as it has answers, and each answer is
right once. The accuracy of any predictor without the image is exactly chance.

A set of kinds of things (all values of all attributes) is a bit set, a plain int: the kinds that a
slot of the scene may hold are one AND away from the constraints of the questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import lcm
from typing import NamedTuple

import numpy as np

from overt.data.scenes.questions import (
    ALL_FAMILIES,
    ATTRIBUTE_ORDER,
    CHOICE_FAMILIES,
    COMPARISONS,
    COUNTS,
    FAMILIES,
    RELATIONS,
    YES_NO,
    Description,
    QuestionProgram,
    SceneQuestion,
    make_question,
)
from overt.data.scenes.world import (
    ATTRIBUTES,
    COLORS,
    FEWEST,
    MOST,
    SHAPES,
    SIZES,
    VALUES,
    Dice,
    Scene,
    make_thing,
    place_things,
    random_background,
    scene_rng,
)
from overt.errors import UserError

GAP = 0.14  # smallest distance between two things along the axis of a relation
SINGLE = 0.3  # probability of a description with one attribute instead of two
# Weight of each attribute in descriptions: people also prefer color and shape.
NAMED = {"color": 4, "shape": 3, "size": 1, "texture": 1}
NEAR_MISS = 0.5  # probability that a distractor shares an attribute with a description
ALIKE = ("color", "texture")  # attributes that two things may share
MAX_ATTEMPTS = 200  # attempts to build a scene before the words are drawn again
VARIETY = 12  # number of kinds that must remain for distractors
STREAM, TURNS = 1, 3  # purposes of one scene and of a round of test scenes in `world.scene_rng`
ROOM = {"exist": 2, "count": 3, "compare": 2, "same": 2, "spatial": 2, "relate": 2}

KINDS = [dict(zip(ATTRIBUTES, values, strict=True)) for values in product(*VALUES.values())]
EVERY = (1 << len(KINDS)) - 1
# Scenes after which every question of every family had each of its answers: 24.
ROUND = lcm(*map(len, FAMILIES.values()))


def generate_scene(
    split: str, seed: int, index: int, count: int = 4, families: Sequence[str] = ALL_FAMILIES
) -> tuple[Scene, tuple[SceneQuestion, ...]]:
    """Generate a scene and `count` questions about it; all answers that the words allow are equally
    likely.

    These are all answers of the family, or the two colors named in a choice between two things.
    Families differ within a scene where enough of them fit. The number of things follows from the
    families alone and so does not depend on the answers. Test scenes come in rounds, see
    `draft_round`.
    """
    check_families(families, count)
    dice = Dice(scene_rng(split, seed, index, STREAM))
    if split == "test":
        block, turn = divmod(index, ROUND)
        draft = _test_round(seed, block, count, tuple(families))[turn]
    else:
        draft = draft_questions(dice, count, families)
    chosen, total = [program.family for program in draft.programs], draft.total
    while True:
        for _ in range(MAX_ATTEMPTS):
            plan = ScenePlan(draft.programs, spare=total - _things_needed(chosen))
            plan.plant(dice, draft.drawn)
            plan.fill(dice, total)
            kinds = [_random_kind(dice, slot) for slot in plan.slots]
            spots = place_things(dice, [kind["size"] for kind in kinds], plan.apart)
            if spots is not None:
                pairs = dice.sample(list(zip(kinds, spots, strict=True)), total)
                things = tuple(make_thing(dice, kind, spot) for kind, spot in pairs)
                scene = Scene(split, seed, index, things, random_background(dice))
                questions = tuple(make_question(program, scene) for program in draft.programs)
                assert [question.answer for question in questions] == draft.answers
                return scene, questions
        # no room in all attempts; never seen in tests (it would unbalance a round)
        draft = draft._replace(programs=_programs(dice, chosen, {}))


class QuestionDraft(NamedTuple):
    """Programs, answers and number of things, drawn before the scene is built."""

    programs: list[QuestionProgram]
    drawn: list[str]
    total: int

    @property
    def answers(self) -> list[str]:
        """Answers in words; a choice between two things was drawn as yes (first) or no."""
        return [
            dict(program.sides[drawn != "yes"])["color"]
            if program.family in CHOICE_FAMILIES
            else drawn
            for program, drawn in zip(self.programs, self.drawn, strict=True)
        ]


def draft_questions(
    dice: Dice, count: int = 4, families: Sequence[str] = ALL_FAMILIES
) -> QuestionDraft:
    """Draw families, answers, the number of things and the words, answers before words."""
    chosen = _families(dice, count, families)
    drawn = [dice.pick(_outcomes(family)) for family in chosen]
    total = _total(dice, chosen)
    return QuestionDraft(_programs(dice, chosen, {}), drawn, total)


def draft_round(
    dice: Dice, count: int = 4, families: Sequence[str] = ALL_FAMILIES
) -> tuple[QuestionDraft, ...]:
    """Draw a round of scenes about the same families, in which every question has each answer once.

    A question is put to as many scenes in a row as it has answers, in random order; then its family
    gets new words. So a question with two answers changes twelve times in a round, one with eight
    three times. Words are independent of answers here too.
    """
    chosen = _families(dice, count, families)
    left: list[list[str]] = [[] for _ in chosen]
    programs: list[QuestionProgram] = []
    drafts = []
    for _ in range(ROUND):
        kept = {j: program for j, program in enumerate(programs) if left[j]}
        programs = _programs(dice, chosen, kept)
        left = [
            rest or _shuffled_outcomes(dice, family)
            for rest, family in zip(left, chosen, strict=True)
        ]
        drafts.append(QuestionDraft(programs, [rest.pop() for rest in left], _total(dice, chosen)))
    return tuple(drafts)


@lru_cache(maxsize=8)
def _test_round(
    seed: int, block: int, count: int, families: tuple[str, ...]
) -> tuple[QuestionDraft, ...]:
    """Return one round of the test split; cached because its scenes are made one by one."""
    return draft_round(Dice(scene_rng("test", seed, block, TURNS)), count, families)


def check_families(families: Sequence[str], count: int) -> None:
    """Raise `UserError` if a family is unknown or `count` questions do not fit into a scene."""
    for family in families:
        if family not in FAMILIES:
            raise UserError(
                f"Unknown question family {family!r}: choose from {', '.join(FAMILIES)}."
            )
    if not families or count < 1:
        raise UserError(
            f"Expected at least one question and one family, got {count} and {len(families)}."
        )
    if min(_things_needed([family] * count) for family in families) > MOST:
        raise UserError(f"{count} questions of {', '.join(families)} need more than {MOST} things.")


# --- questions --------------------------------------------------------------------------------


def _families(dice: Dice, count: int, families: Sequence[str]) -> list[str]:
    """Draw families that fit into a scene, different ones if possible."""
    names = [name for name in ALL_FAMILIES if name in families]
    distinct = min(count, len(names))
    for attempt in range(1000):
        if attempt < 50:
            chosen = dice.sample(names, distinct)
            chosen += [dice.pick(names) for _ in range(count - distinct)]
        else:
            chosen = [dice.pick(names) for _ in range(count)]
        if _things_needed(chosen) <= MOST:
            return chosen
    return [min(names, key=lambda name: _things_needed([name] * count))] * count


def _outcomes(family: str) -> tuple[str, ...]:
    """Return the values that an answer is drawn from; for a choice: yes (first) or no (second)."""
    return YES_NO if family in CHOICE_FAMILIES else FAMILIES[family]


def _shuffled_outcomes(dice: Dice, family: str) -> list[str]:
    """Return all outcomes in random order."""
    return dice.sample(_outcomes(family), len(_outcomes(family)))


def _total(dice: Dice, families: Sequence[str]) -> int:
    """Draw the number of things; its minimum depends on the families only."""
    least = max(FEWEST, _things_needed(families))
    return least + dice.below(MOST - least + 1)


def _things_needed(families: Sequence[str]) -> int:
    """Return how many things these questions may need for any answers; two counts share theirs."""
    counts = sum(family == "count" for family in families)
    others = sum(ROOM.get(family, 1) for family in families if family != "count")
    return others + ROOM["count"] * ((counts + 1) // 2)


def _programs(
    dice: Dice, families: Sequence[str], kept: Mapping[int, QuestionProgram]
) -> list[QuestionProgram]:
    """Draw words for every family until the questions can share a scene under all answers.

    `kept` are programs that stay, by the index of their family.
    """
    programs = dict(kept)
    failures = 0
    while len(programs) < len(families):
        new = next(j for j in range(len(families)) if j not in programs)
        programs[new] = _program(dice, families[new])
        if not ScenePlan([programs[j] for j in sorted(programs)]).is_possible():
            del programs[new]
            failures += 1
            if failures % 20 == 0:
                programs = dict(kept)
    return [programs[j] for j in sorted(programs)]


def _program(dice: Dice, family: str) -> QuestionProgram:
    match family:
        case "exist" | "count":
            return QuestionProgram(family, (_description(dice),))
        case "compare":
            return QuestionProgram(family, _two_names(dice), dice.pick(tuple(COMPARISONS)))
        case "same":
            about = dice.pick(ALIKE)
            return QuestionProgram(family, (_description(dice, about),), about)
        case "spatial":
            return QuestionProgram(family, _two_names(dice), dice.pick(tuple(RELATIONS)))
        case "relate":
            sides = (_description(dice, "color"), _description(dice))
            return QuestionProgram(family, sides, dice.pick(tuple(RELATIONS)))
        case _:
            about = family.removeprefix("query-")
            return QuestionProgram(family, (_description(dice, about),), about)


def _description(dice: Dice, hidden: str = "") -> Description:
    """Draw one or two attributes, never the hidden one, in word order."""
    pool = [name for name in ATTRIBUTE_ORDER if name != hidden for _ in range(NAMED[name])]
    named = {dice.pick(pool)}
    if dice.random() >= SINGLE:
        named.add(dice.pick([name for name in pool if name not in named]))
    return tuple((name, dice.pick(VALUES[name])) for name in ATTRIBUTE_ORDER if name in named)


def _two_names(dice: Dice) -> tuple[Description, ...]:
    """Draw two things of different colors, each by color and shape."""
    colors, shapes = dice.sample(COLORS, 2), (dice.pick(SHAPES), dice.pick(SHAPES))
    pairs = zip(colors, shapes, strict=True)
    return tuple((("color", color), ("shape", shape)) for color, shape in pairs)


def _free_attribute(program: QuestionProgram, side: int) -> str:
    """Return the attribute of a described thing whose value depends on the answer, if any."""
    match program.family:
        case "exist" | "count" | "spatial":
            return ""
        case "compare":
            return "size"
        case "relate":
            return "" if side else "color"
        case _:
            return program.about


# --- scenes ------------------------------------------------------------------


@lru_cache(maxsize=4096)
def matching_kinds(*description: tuple[str, str]) -> int:
    """Return the kinds that match a description, as a bit set."""
    return sum(1 << i for i, kind in enumerate(KINDS) if all(kind[n] == v for n, v in description))


@lru_cache(maxsize=8)
def _choices(attribute: str) -> tuple[int, ...]:
    """Return the kinds that have each value of an attribute; empty without an attribute."""
    return tuple(matching_kinds((attribute, value)) for value in VALUES.get(attribute, ()))


LARGE = matching_kinds(("size", "large"))


def _random_kind(dice: Dice, kinds: int) -> dict[str, str]:
    """Draw one kind of a bit set, uniformly."""
    raw = np.frombuffer(kinds.to_bytes(len(KINDS) // 8, "little"), np.uint8)
    return KINDS[dice.pick(np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist())]


class ScenePlan:
    """A scene under construction: which kinds each slot may hold, and which slots must be apart.

    Every thing fits exactly the descriptions it is planted for; `spare` is the number of things
    beyond those the questions may need.
    """

    def __init__(self, programs: Sequence[QuestionProgram], spare: int = 0) -> None:
        self.programs = programs
        self.spare = spare
        self.seen = [[matching_kinds(*side) for side in p.sides] for p in programs]
        self.slots: list[int] = []
        self.apart: list[tuple[int, int, int, float]] = []

    def only(self, *wanted: tuple[int, int]) -> int:
        """Return the kinds that match exactly these descriptions, given as (program, side)."""
        kinds = EVERY
        for i, row in enumerate(self.seen):
            for j, fitting in enumerate(row):
                kinds &= fitting if (i, j) in wanted else ~fitting
        return kinds

    def is_possible(self) -> bool:
        """Return whether every slot can be filled for all answers; only the words decide."""
        some = twice = 0
        for row in self.seen:
            for fitting in row:
                twice |= some & fitting
                some |= fitting
        free = EVERY & ~some
        if free.bit_count() < VARIETY or not free & ~LARGE:
            return False
        for program, row in zip(self.programs, self.seen, strict=True):
            for j, fitting in enumerate(row):
                own = fitting & ~twice
                if not own or not all(
                    own & value for value in _choices(_free_attribute(program, j))
                ):
                    return False
        counts = self._counts()
        pairs = zip(counts[::2], counts[1::2], strict=False)
        exists = [i for i, program in enumerate(self.programs) if program.family == "exist"]
        return all(self.only((i, 0), (j, 0)) for i, j in pairs) and all(
            all(self._exist(i, yes)) for i in exists for yes in (True, False)
        )

    def plant(self, dice: Dice, answers: Sequence[str]) -> None:
        """Add the slots that make the answers true."""
        counts = self._counts()
        for k in range(0, len(counts), 2):
            self._plant_counts(dice, counts[k : k + 2], answers)
        for i, (program, answer) in enumerate(zip(self.programs, answers, strict=True)):
            match program.family:
                case "count":
                    continue
                case "exist":
                    self.slots += self._exist(i, answer == "yes")
                case "relate":
                    self._plant_relate(dice, i, answer)
                case "spatial":
                    self.slots += [self.only((i, 0)), self.only((i, 1))]
                    last = len(self.slots) - 1
                    self._separate(last - 1, last, program.about, answer == "yes")
                case "compare":
                    for j, size in enumerate(_two_sizes(dice, program, answer == "yes")):
                        self.slots.append(self.only((i, j)) & matching_kinds(("size", size)))
                case "same":
                    for value in _two_values(dice, program.about, answer == "yes"):
                        self.slots.append(
                            self.only((i, 0)) & matching_kinds((program.about, value))
                        )
                case _:
                    self.slots.append(self.only((i, 0)) & matching_kinds((program.about, answer)))

    def fill(self, dice: Dice, total: int) -> None:
        """Add distractors, some of which share an attribute with a description."""
        free = self.only()
        pairs = [d for program in self.programs for d in program.sides if len(d) > 1]
        while len(self.slots) < total:
            near = 0
            if pairs and dice.random() < NEAR_MISS:
                near = free & matching_kinds(dice.pick(dice.pick(pairs)))
            self.slots.append(near or free)

    def _counts(self) -> list[int]:
        return [i for i, program in enumerate(self.programs) if program.family == "count"]

    def _exist(self, i: int, yes: bool) -> list[int]:
        """Yes: a thing with both attributes, and one with neither. No: a thing with each.

        Each attribute is then as frequent after yes as after no; only both in one thing decide.
        """
        free, description = self.only(), self.programs[i].sides[0]
        each = [matching_kinds(pair) for pair in description]
        if len(each) == 1:
            return [self.only((i, 0)) if yes else free, free]
        one, two = each
        return [self.only((i, 0)), free & ~one & ~two] if yes else [free & one, free & two]

    def _plant_counts(self, dice: Dice, pair: Sequence[int], answers: Sequence[str]) -> None:
        """Add three slots, of which as many match as the answer says; two counts share them."""
        room = ROOM["count"]
        chosen = [dice.sample(range(room), COUNTS.index(answers[i])) for i in pair]
        for k in range(room):
            wanted = [(i, 0) for i, slots in zip(pair, chosen, strict=True) if k in slots]
            self.slots.append(self.only(*wanted))

    def _plant_relate(self, dice: Dice, i: int, answer: str) -> None:
        """Add the anchor, the target, and if there is room a similar thing on the other side."""
        about = self.programs[i].about
        own = self.only((i, 0))
        anchor = len(self.slots)
        self.slots += [self.only((i, 1)), own & matching_kinds(("color", answer))]
        self._separate(anchor + 1, anchor, about, holds=True)
        if self.spare:
            self.spare -= 1
            other = dice.pick([color for color in COLORS if color != answer])
            self.slots.append(own & matching_kinds(("color", other)))
            self._separate(anchor + 2, anchor, about, holds=False)

    def _separate(self, first: int, second: int, relation: str, holds: bool) -> None:
        """Require a clear relation between two slots, or its opposite."""
        axis, side = RELATIONS[relation]
        pair = (first, second) if (side > 0) == holds else (second, first)
        self.apart.append((*pair, axis, GAP))


def _two_sizes(dice: Dice, program: QuestionProgram, first: bool) -> tuple[str, str]:
    """Draw the sizes of two compared things, so that the first or the second is the answer."""
    small, large = dice.pick(list(combinations(SIZES, 2)))
    rising = (COMPARISONS[program.about] > 0) != first
    return (small, large) if rising else (large, small)


def _two_values(dice: Dice, attribute: str, same: bool) -> tuple[str, str]:
    """Draw a value of the attribute for each of two things."""
    values = VALUES[attribute]
    one = dice.pick(values)
    return one, one if same else dice.pick([value for value in values if value != one])
