"""What a caption claims, and whether it is so.

A claim is checked against the things of a scene, not against how it came to be written. `claims`
reads them back from the words alone, so that a caption made by a model can be checked as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from overt.data.scenes.language import NUMBERS, read
from overt.data.scenes.questions import RELATIONS, Description, fitting_things
from overt.data.scenes.world import Background, Scene, Thing
from overt.data.vocabulary import tokenize
from overt.errors import BadInput

DARK, DIM = 75.0, 85.0  # the mean level of a background below and above which it has a name
CALM, BUSY = 8, 12  # strokes of clutter up to and from which it has a name
SETTINGS = ("dark", "dim", "calm", "busy")


@dataclass(frozen=True, slots=True)
class Exists:
    """At least one thing fits: "a red ring"."""

    what: Description

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        return bool(fitting_things(self.what, scene.things))


@dataclass(frozen=True, slots=True)
class Counts:
    """Exactly so many things fit: "two red rings"."""

    what: Description
    number: int

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        return len(fitting_things(self.what, scene.things)) == self.number


@dataclass(frozen=True, slots=True)
class Is:
    """Exactly one thing fits the subject, and it is also the rest: "the ring is red"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        found = fitting_things(self.what, scene.things)
        return len(found) == 1 and found == fitting_both(self.what, self.also, scene.things)


@dataclass(frozen=True, slots=True)
class Every:
    """Something fits, and all that does is also the rest: "every ring is red"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        found = fitting_things(self.what, scene.things)
        return bool(found) and found == fitting_both(self.what, self.also, scene.things)


@dataclass(frozen=True, slots=True)
class Most:
    """More than half of what fits is also the rest: "most things are striped"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        found = fitting_things(self.what, scene.things)
        return 2 * len(fitting_both(self.what, self.also, scene.things)) > len(found)


@dataclass(frozen=True, slots=True)
class Lies:
    """Some pair lies so, and what is definite is the only one: "the ring is left of a square"."""

    what: Description
    definite: bool
    relation: str
    anchor: Description
    anchor_definite: bool

    def pairs(self, things: tuple[Thing, ...]) -> tuple[tuple[int, int], ...]:
        """The pairs (thing, anchor) of which it is true."""
        first, second = fitting_things(self.what, things), fitting_things(self.anchor, things)
        if (self.definite and len(first) != 1) or (self.anchor_definite and len(second) != 1):
            return ()
        return tuple(
            (i, j)
            for i in first
            for j in second
            if i != j and step(self.relation, things[i], things[j]) > 0
        )

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        return bool(self.pairs(scene.things))


@dataclass(frozen=True, slots=True)
class Setting:
    """The background is so: "a dark background", "a busy picture"."""

    word: str

    def holds(self, scene: Scene) -> bool:
        """Whether it is so."""
        return self.word in settings(scene.background)


Claim = Exists | Counts | Is | Every | Most | Lies | Setting


def fitting_both(
    first: Description, second: Description, things: Sequence[Thing]
) -> tuple[int, ...]:
    """The things that fit two descriptions at once; none where they contradict each other."""
    also = fitting_things(second, things)
    return tuple(i for i in fitting_things(first, things) if i in also)


def step(relation: str, one: Thing, other: Thing) -> float:
    """How far `one` lies on the named side of `other`; negative on the other side."""
    axis, side = RELATIONS[relation]
    return side * ((other.x - one.x) if axis == 0 else (other.y - one.y))


def settings(background: Background) -> tuple[str, ...]:
    """The words that are true of a background; between two words it has neither."""
    level = fmean((*background.near, *background.far))
    strokes = len(background.clutter)
    truth = (level < DARK, level > DIM, strokes <= CALM, strokes >= BUSY)
    return tuple(word for word, true in zip(SETTINGS, truth, strict=True) if true)


# --- reading claims from words --------------------------------------------------------------------

_SIDE = r"(?:to the )?(left|right) of|(above|below)"
_LIES = re.compile(rf"(?P<what>.+) is (?:{_SIDE}) (?P<anchor>.+)")
_LIES_TURNED = re.compile(rf"(?:{_SIDE}) (?P<anchor>.+) is (?P<what>.+)")
_SUBJECT = re.compile(r"(the|every|all|most) (.+?) (?:is|are) (.+)")
_ON = re.compile(r"(.+?) on a (\w+) background")
_WITH = re.compile(r"a (\w+(?: and \w+)?) picture with (.+)")
_LIST = re.compile(r"(?:there is |there are |the picture has |the picture shows )?(.+)")


def claims(text: str) -> tuple[Claim, ...]:
    """What a caption claims, from its words alone; BadInput where it is none of our sentences."""
    words = " ".join(word for word, _, _ in tokenize(text))
    if on := _ON.fullmatch(words):
        return (*claims(on[1]), _setting(on[2], text))
    if held := _WITH.fullmatch(words):
        settings_said = held[1].split(" and ")
        return (*(_setting(word, text) for word in settings_said), *claims(held[2]))
    if lies := _LIES.fullmatch(words) or _LIES_TURNED.fullmatch(words):
        return (_lies(lies),)
    if words.startswith("there ") is False and (subject := _SUBJECT.fullmatch(words)):
        return (_predicated(subject, text),)
    return _listed(words.removesuffix(" can be seen"), text)


def true_of(text: str, scene: Scene) -> bool:
    """Whether everything a caption claims is so; what cannot be read is BadInput."""
    return all(claim.holds(scene) for claim in claims(text))


def _lies(found: re.Match[str]) -> Claim:
    relation = next(side for side in found.groups() if side in RELATIONS)
    what, anchor = found["what"], found["anchor"]
    return Lies(
        read(what), what.startswith("the "), relation, read(anchor), anchor.startswith("the ")
    )


def _predicated(found: re.Match[str], text: str) -> Claim:
    what, also = read(found[2]), read(found[3])
    if not also:
        raise BadInput(f"{text!r} says nothing about {found[2]!r}")
    match found[1]:
        case "the":
            return Is(what, also)
        case "most":
            return Most(what, also)
        case _:
            return Every(what, also)


def _listed(words: str, text: str) -> tuple[Claim, ...]:
    opened = _LIST.fullmatch(words)
    parts = re.split(r" , | and ", opened[1]) if opened else [words]
    found: list[Claim] = []
    for part in parts:
        head = part.split(" ")[0]
        if head in NUMBERS:
            found.append(Counts(read(part), NUMBERS.index(head)))
        elif head in ("a", "an"):
            found.append(Exists(read(part)))
        else:
            raise BadInput(f"{text!r} is not a sentence about scenes")
    return tuple(found)


def _setting(word: str, text: str) -> Setting:
    if word not in SETTINGS:
        raise BadInput(f"{text!r}: a background is {', '.join(SETTINGS)}, not {word!r}")
    return Setting(word)
