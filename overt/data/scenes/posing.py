"""Scenes made to fit their questions, so that words alone never give an answer away.

The families, the words and the answers of a scene are drawn first, the answers evenly and without
a look at the words (which of two things it is: the first or the second, whatever their names);
then a scene is built in which they are true. Whether a set of questions can share a scene is
decided from their words alone, so as to hold for every combination of answers: rejecting by answer
would make some answers rarer after some words.

That makes words worthless on the average; a sample of questions still leans to one side or another.
The test split does not: each question is put to as many scenes as it has answers, and each of these
is right once. Whoever answers by the words alone is right as often as chance says, exactly.

A set of kinds of things (all values of all attributes) is a bit set, a plain int: what a slot of
the scene may hold is one AND away from what the questions say about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product
from math import lcm
from typing import NamedTuple

import numpy as np

from overt.data.scenes.questions import (
    ALL,
    COMPARISONS,
    COUNTS,
    FAMILIES,
    RELATIONS,
    SPOKEN,
    WHICH,
    YES_NO,
    Description,
    Program,
    Question,
    put_question,
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
    background,
    key,
    places,
    put,
)
from overt.errors import BadInput

GAP = 0.14  # how clearly one thing lies to the left of, or above, another
SINGLE = 0.3  # how often a description has one attribute and not two
# How often each attribute is named: people too say color and shape before size and texture.
NAMED = {"color": 4, "shape": 3, "size": 1, "texture": 1}
NEAR_MISS = 0.5  # how often a thing no question needs shares an attribute with a description
ALIKE = ("color", "texture")  # what two things may have in common
PATIENCE = 200  # how often a scene is built anew before the words are drawn anew
VARIETY = 12  # how many kinds must be left for the things no question needs
STREAM, TURNS = 1, 3  # the purposes of one scene and of a round of test scenes in `world.key`
ROOM = {"exist": 2, "count": 3, "compare": 2, "same": 2, "spatial": 2, "relate": 2}

KINDS = [dict(zip(ATTRIBUTES, values, strict=True)) for values in product(*VALUES.values())]
EVERY = (1 << len(KINDS)) - 1
# Scenes after which every question of every family has had each of its answers: 24.
ROUND = lcm(*map(len, FAMILIES.values()))


def pose(
    split: str, seed: int, index: int, count: int = 4, families: Sequence[str] = ALL
) -> tuple[Scene, tuple[Question, ...]]:
    """A scene and `count` questions about it; of the answers words leave, all are as likely.

    Those are all answers of the family, or the two colors that a choice between two things names.
    Families differ within a scene where enough of them fit. The number of things follows from the
    families alone and so tells nothing about the answers. Test scenes come in rounds, see `turns`.
    """
    check_families(families, count)
    dice = Dice(key(split, seed, index, STREAM))
    if split == "test":
        block, turn = divmod(index, ROUND)
        asked = _round(seed, block, count, tuple(families))[turn]
    else:
        asked = draft(dice, count, families)
    chosen, total = [program.family for program in asked.programs], asked.total
    while True:
        for _ in range(PATIENCE):
            plan = Plan(asked.programs, spare=total - _room(chosen))
            plan.plant(dice, asked.drawn)
            plan.fill(dice, total)
            kinds = [_any(dice, slot) for slot in plan.slots]
            spots = places(dice, [kind["size"] for kind in kinds], plan.apart)
            if spots is not None:
                pairs = dice.sample(list(zip(kinds, spots, strict=True)), total)
                things = tuple(put(dice, kind, spot) for kind, spot in pairs)
                scene = Scene(split, seed, index, things, background(dice))
                questions = tuple(put_question(program, scene) for program in asked.programs)
                assert [question.answer for question in questions] == asked.answers
                return scene, questions
        # no room in all these tries; tests have not seen it (it would cost a round its balance)
        asked = asked._replace(programs=_programs(dice, chosen, {}))


class Draft(NamedTuple):
    """What will be asked and answered, and how many things there will be, before any scene is."""

    programs: list[Program]
    drawn: list[str]
    total: int

    @property
    def answers(self) -> list[str]:
        """The answers in words; which of two things it is was drawn as yes, the first, or no."""
        return [
            dict(program.sides[drawn != "yes"])["color"] if program.family in WHICH else drawn
            for program, drawn in zip(self.programs, self.drawn, strict=True)
        ]


def draft(dice: Dice, count: int = 4, families: Sequence[str] = ALL) -> Draft:
    """Draw families, answers, the number of things and the words: answers never see the words."""
    chosen = _families(dice, count, families)
    drawn = [dice.pick(_outcomes(family)) for family in chosen]
    total = _total(dice, chosen)
    return Draft(_programs(dice, chosen, {}), drawn, total)


def turns(dice: Dice, count: int = 4, families: Sequence[str] = ALL) -> tuple[Draft, ...]:
    """A round of scenes about the same families, in which every question has each answer in turn.

    A question is put to as many scenes in a row as it has answers, which come in random order;
    then its family is asked in new words. So a question of two answers changes twelve times in a
    round, one of eight three times. Words never see answers here either.
    """
    chosen = _families(dice, count, families)
    left: list[list[str]] = [[] for _ in chosen]
    programs: list[Program] = []
    drafts = []
    for _ in range(ROUND):
        kept = {j: program for j, program in enumerate(programs) if left[j]}
        programs = _programs(dice, chosen, kept)
        left = [
            rest or _in_any_order(dice, family) for rest, family in zip(left, chosen, strict=True)
        ]
        drafts.append(Draft(programs, [rest.pop() for rest in left], _total(dice, chosen)))
    return tuple(drafts)


@lru_cache(maxsize=8)
def _round(seed: int, block: int, count: int, families: tuple[str, ...]) -> tuple[Draft, ...]:
    """One round of the test split, kept because its scenes are made one after the other."""
    return turns(Dice(key("test", seed, block, TURNS)), count, families)


def check_families(families: Sequence[str], count: int) -> None:
    """BadInput unless these are families of questions and `count` of them fit into one scene."""
    for family in families:
        if family not in FAMILIES:
            raise BadInput(f"no question family {family!r}: choose of {', '.join(FAMILIES)}")
    if not families or count < 1:
        raise BadInput(f"{count} questions of {len(families)} families: give at least one of each")
    if min(_room([family] * count) for family in families) > MOST:
        raise BadInput(f"{count} questions of {', '.join(families)} need more than {MOST} things")


# --- what is asked --------------------------------------------------------------------------------


def _families(dice: Dice, count: int, families: Sequence[str]) -> list[str]:
    """Families for which there is room, different ones if that is possible."""
    names = [name for name in ALL if name in families]
    distinct = min(count, len(names))
    for attempt in range(1000):
        if attempt < 50:
            chosen = dice.sample(names, distinct)
            chosen += [dice.pick(names) for _ in range(count - distinct)]
        else:
            chosen = [dice.pick(names) for _ in range(count)]
        if _room(chosen) <= MOST:
            return chosen
    return [min(names, key=lambda name: _room([name] * count))] * count


def _outcomes(family: str) -> tuple[str, ...]:
    """What is drawn as its answer; which of two things it is: yes, the first, or no."""
    return YES_NO if family in WHICH else FAMILIES[family]


def _in_any_order(dice: Dice, family: str) -> list[str]:
    """All of them, shuffled."""
    return dice.sample(_outcomes(family), len(_outcomes(family)))


def _total(dice: Dice, families: Sequence[str]) -> int:
    """How many things there will be: the families alone decide how few."""
    least = max(FEWEST, _room(families))
    return least + dice.below(MOST - least + 1)


def _room(families: Sequence[str]) -> int:
    """How many things these questions may need, whatever their answers; two counts share theirs."""
    counts = sum(family == "count" for family in families)
    others = sum(ROOM.get(family, 1) for family in families if family != "count")
    return others + ROOM["count"] * ((counts + 1) // 2)


def _programs(dice: Dice, families: Sequence[str], kept: Mapping[int, Program]) -> list[Program]:
    """Words for every family, drawn again until they can share a scene under all answers.

    `kept` are words that stay, by the place of their family.
    """
    programs = dict(kept)
    failures = 0
    while len(programs) < len(families):
        new = next(j for j in range(len(families)) if j not in programs)
        programs[new] = _program(dice, families[new])
        if not Plan([programs[j] for j in sorted(programs)]).is_possible():
            del programs[new]
            failures += 1
            if failures % 20 == 0:
                programs = dict(kept)
    return [programs[j] for j in sorted(programs)]


def _program(dice: Dice, family: str) -> Program:
    match family:
        case "exist" | "count":
            return Program(family, (_description(dice),))
        case "compare":
            return Program(family, _two_names(dice), dice.pick(tuple(COMPARISONS)))
        case "same":
            about = dice.pick(ALIKE)
            return Program(family, (_description(dice, about),), about)
        case "spatial":
            return Program(family, _two_names(dice), dice.pick(tuple(RELATIONS)))
        case "relate":
            sides = (_description(dice, "color"), _description(dice))
            return Program(family, sides, dice.pick(tuple(RELATIONS)))
        case _:
            about = family.removeprefix("query-")
            return Program(family, (_description(dice, about),), about)


def _description(dice: Dice, hidden: str = "") -> Description:
    """One or two attributes, never the hidden one, in the order of speech."""
    pool = [name for name in SPOKEN if name != hidden for _ in range(NAMED[name])]
    told = {dice.pick(pool)}
    if dice.random() >= SINGLE:
        told.add(dice.pick([name for name in pool if name not in told]))
    return tuple((name, dice.pick(VALUES[name])) for name in SPOKEN if name in told)


def _two_names(dice: Dice) -> tuple[Description, ...]:
    """Two things of different colors, each by color and shape: either color can be the answer."""
    colors, shapes = dice.sample(COLORS, 2), (dice.pick(SHAPES), dice.pick(SHAPES))
    pairs = zip(colors, shapes, strict=True)
    return tuple((("color", color), ("shape", shape)) for color, shape in pairs)


def _open(program: Program, side: int) -> str:
    """The attribute of a described thing whose value follows the answer, if any."""
    match program.family:
        case "exist" | "count" | "spatial":
            return ""
        case "compare":
            return "size"
        case "relate":
            return "" if side else "color"
        case _:
            return program.about


# --- the scene in which it is so ------------------------------------------------------------------


@lru_cache(maxsize=4096)
def fitting_kinds(*description: tuple[str, str]) -> int:
    """The kinds a description fits, as a bit set."""
    return sum(1 << i for i, kind in enumerate(KINDS) if all(kind[n] == v for n, v in description))


@lru_cache(maxsize=8)
def _choices(attribute: str) -> tuple[int, ...]:
    """The kinds that have each value of an attribute; no attribute, no choice."""
    return tuple(fitting_kinds((attribute, value)) for value in VALUES.get(attribute, ()))


LARGE = fitting_kinds(("size", "large"))


def _any(dice: Dice, kinds: int) -> dict[str, str]:
    """One kind of a bit set, all equally likely."""
    raw = np.frombuffer(kinds.to_bytes(len(KINDS) // 8, "little"), np.uint8)
    return KINDS[dice.pick(np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist())]


class Plan:
    """A scene in the making: which kinds each slot may hold, and which slots must lie apart.

    Every thing fits exactly the descriptions it is planted for; `spare` is how many things there
    are beyond those the questions may need.
    """

    def __init__(self, programs: Sequence[Program], spare: int = 0) -> None:
        self.programs = programs
        self.spare = spare
        self.seen = [[fitting_kinds(*side) for side in p.sides] for p in programs]
        self.slots: list[int] = []
        self.apart: list[tuple[int, int, int, float]] = []

    def only(self, *wanted: tuple[int, int]) -> int:
        """The kinds that fit these descriptions, given as (program, side), and no other."""
        kinds = EVERY
        for i, row in enumerate(self.seen):
            for j, fitting in enumerate(row):
                kinds &= fitting if (i, j) in wanted else ~fitting
        return kinds

    def is_possible(self) -> bool:
        """Whether every slot can be filled whatever the answers: the words alone decide."""
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
                if not own or not all(own & value for value in _choices(_open(program, j))):
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
                        self.slots.append(self.only((i, j)) & fitting_kinds(("size", size)))
                case "same":
                    for value in _two_values(dice, program.about, answer == "yes"):
                        self.slots.append(self.only((i, 0)) & fitting_kinds((program.about, value)))
                case _:
                    self.slots.append(self.only((i, 0)) & fitting_kinds((program.about, answer)))

    def fill(self, dice: Dice, total: int) -> None:
        """Add things no description fits, some of which share an attribute with one."""
        free = self.only()
        pairs = [d for program in self.programs for d in program.sides if len(d) > 1]
        while len(self.slots) < total:
            near = 0
            if pairs and dice.random() < NEAR_MISS:
                near = free & fitting_kinds(dice.pick(dice.pick(pairs)))
            self.slots.append(near or free)

    def _counts(self) -> list[int]:
        return [i for i, program in enumerate(self.programs) if program.family == "count"]

    def _exist(self, i: int, yes: bool) -> list[int]:
        """Yes: a thing with both attributes, and one with neither. No: a thing with each.

        Each attribute is then as frequent after yes as after no; only both in one thing decide.
        """
        free, description = self.only(), self.programs[i].sides[0]
        each = [fitting_kinds(pair) for pair in description]
        if len(each) == 1:
            return [self.only((i, 0)) if yes else free, free]
        one, two = each
        return [self.only((i, 0)), free & ~one & ~two] if yes else [free & one, free & two]

    def _plant_counts(self, dice: Dice, pair: Sequence[int], answers: Sequence[str]) -> None:
        """Three slots, of which as many fit as the answer says; two counts share them."""
        room = ROOM["count"]
        chosen = [dice.sample(range(room), COUNTS.index(answers[i])) for i in pair]
        for k in range(room):
            wanted = [(i, 0) for i, slots in zip(pair, chosen, strict=True) if k in slots]
            self.slots.append(self.only(*wanted))

    def _plant_relate(self, dice: Dice, i: int, answer: str) -> None:
        """The anchor, the thing asked for, and where there is room its like on the other side."""
        about = self.programs[i].about
        own = self.only((i, 0))
        anchor = len(self.slots)
        self.slots += [self.only((i, 1)), own & fitting_kinds(("color", answer))]
        self._separate(anchor + 1, anchor, about, holds=True)
        if self.spare:
            self.spare -= 1
            other = dice.pick([color for color in COLORS if color != answer])
            self.slots.append(own & fitting_kinds(("color", other)))
            self._separate(anchor + 2, anchor, about, holds=False)

    def _separate(self, first: int, second: int, relation: str, holds: bool) -> None:
        """Have the first slot stand clearly in the relation to the second, or opposite."""
        axis, side = RELATIONS[relation]
        pair = (first, second) if (side > 0) == holds else (second, first)
        self.apart.append((*pair, axis, GAP))


def _two_sizes(dice: Dice, program: Program, first: bool) -> tuple[str, str]:
    """Sizes of the two things compared, so that the first is the answer, or the second."""
    small, large = dice.pick(list(combinations(SIZES, 2)))
    rising = (COMPARISONS[program.about] > 0) != first
    return (small, large) if rising else (large, small)


def _two_values(dice: Dice, attribute: str, same: bool) -> tuple[str, str]:
    """A value of the attribute for each of two things."""
    values = VALUES[attribute]
    one = dice.pick(values)
    return one, one if same else dice.pick([value for value in values if value != one])
