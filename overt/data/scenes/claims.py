"""Claims of captions, and their truth in a scene.

A claim is tested on the things of a scene, independently of how its caption was made.
`parse_claims` recovers claims from words alone, so that captions of a model can be tested too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from overt.data.scenes.noun_phrases import NUMBERS, parse_phrase
from overt.data.scenes.questions import RELATIONS, Description, matching_things, signed_offset
from overt.data.scenes.world import Background, Scene, Thing
from overt.data.vocabulary import tokenize
from overt.errors import UserError

DARK, DIM = 75.0, 85.0  # mean level of a background below and above which it has a word
CALM, BUSY = 8, 12  # number of strokes up to and from which it has a word
SETTINGS = ("dark", "dim", "calm", "busy")


@dataclass(frozen=True, slots=True)
class ExistsClaim:
    """At least one thing matches: "a red ring"."""

    what: Description

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        return bool(matching_things(self.what, scene.things))


@dataclass(frozen=True, slots=True)
class CountClaim:
    """Exactly `number` things match: "two red rings"."""

    what: Description
    number: int

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        return len(matching_things(self.what, scene.things)) == self.number


@dataclass(frozen=True, slots=True)
class IsClaim:
    """Exactly one thing matches the subject, and also the predicate: "the ring is red"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        found = matching_things(self.what, scene.things)
        return len(found) == 1 and found == matching_both(self.what, self.also, scene.things)


@dataclass(frozen=True, slots=True)
class EveryClaim:
    """Something matches, and all of it also the predicate: "every ring is red"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        found = matching_things(self.what, scene.things)
        return bool(found) and found == matching_both(self.what, self.also, scene.things)


@dataclass(frozen=True, slots=True)
class MostClaim:
    """More than half of the matches also match the predicate: "most things are striped"."""

    what: Description
    also: Description

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        found = matching_things(self.what, scene.things)
        return 2 * len(matching_both(self.what, self.also, scene.things)) > len(found)


@dataclass(frozen=True, slots=True)
class SpatialClaim:
    """Some pair has the relation, definite phrases are unique: "the ring is left of a square"."""

    what: Description
    definite: bool
    relation: str
    anchor: Description
    anchor_definite: bool

    def pairs(self, things: tuple[Thing, ...]) -> tuple[tuple[int, int], ...]:
        """Return the pairs (thing, anchor) for which it is true."""
        first, second = matching_things(self.what, things), matching_things(self.anchor, things)
        if (self.definite and len(first) != 1) or (self.anchor_definite and len(second) != 1):
            return ()
        return tuple(
            (i, j)
            for i in first
            for j in second
            if i != j and signed_offset(self.relation, things[i], things[j]) > 0
        )

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        return bool(self.pairs(scene.things))


@dataclass(frozen=True, slots=True)
class BackgroundClaim:
    """The background has a property: "a dark background", "a busy picture"."""

    word: str

    def holds(self, scene: Scene) -> bool:
        """Return whether the claim is true."""
        return self.word in background_words(scene.background)


Claim = ExistsClaim | CountClaim | IsClaim | EveryClaim | MostClaim | SpatialClaim | BackgroundClaim


def matching_both(
    first: Description, second: Description, things: Sequence[Thing]
) -> tuple[int, ...]:
    """Return the things that match both descriptions; none if they contradict each other."""
    also = matching_things(second, things)
    return tuple(i for i in matching_things(first, things) if i in also)


def background_words(background: Background) -> tuple[str, ...]:
    """Return the words that are true of a background; between two thresholds there is none."""
    level = fmean((*background.near, *background.far))
    strokes = len(background.clutter)
    truth = (level < DARK, level > DIM, strokes <= CALM, strokes >= BUSY)
    return tuple(word for word, true in zip(SETTINGS, truth, strict=True) if true)


# --- parsing --------------------------------------------------------------------

_SIDE = r"(?:to the )?(left|right) of|(above|below)"
_LIES = re.compile(rf"(?P<what>.+) is (?:{_SIDE}) (?P<anchor>.+)")
_LIES_TURNED = re.compile(rf"(?:{_SIDE}) (?P<anchor>.+) is (?P<what>.+)")
_SUBJECT = re.compile(r"(the|every|all|most) (.+?) (?:is|are) (.+)")
_ON = re.compile(r"(.+?) on a (\w+) background")
_WITH = re.compile(r"a (\w+(?: and \w+)?) picture with (.+)")
_LIST = re.compile(r"(?:there is |there are |the picture has |the picture shows )?(.+)")


def parse_claims(text: str) -> tuple[Claim, ...]:
    """Parse the claims of a caption; raise `UserError` if it does not fit the templates."""
    words = " ".join(word for word, _, _ in tokenize(text))
    if on := _ON.fullmatch(words):
        return (*parse_claims(on[1]), _background_claim(on[2], text))
    if held := _WITH.fullmatch(words):
        settings_said = held[1].split(" and ")
        return (*(_background_claim(word, text) for word in settings_said), *parse_claims(held[2]))
    if lies := _LIES.fullmatch(words) or _LIES_TURNED.fullmatch(words):
        return (_spatial_claim(lies),)
    if words.startswith("there ") is False and (subject := _SUBJECT.fullmatch(words)):
        return (_predicate_claim(subject, text),)
    return _list_claims(words.removesuffix(" can be seen"), text)


def is_true_caption(text: str, scene: Scene) -> bool:
    """Return whether all claims of a caption are true; raise `UserError` if it cannot be parsed."""
    return all(claim.holds(scene) for claim in parse_claims(text))


def _spatial_claim(found: re.Match[str]) -> Claim:
    relation = next(side for side in found.groups() if side in RELATIONS)
    what, anchor = found["what"], found["anchor"]
    return SpatialClaim(
        parse_phrase(what),
        what.startswith("the "),
        relation,
        parse_phrase(anchor),
        anchor.startswith("the "),
    )


def _predicate_claim(found: re.Match[str], text: str) -> Claim:
    what, also = parse_phrase(found[2]), parse_phrase(found[3])
    if not also:
        raise UserError(f"{text!r} has no attribute of {found[2]!r}.")
    match found[1]:
        case "the":
            return IsClaim(what, also)
        case "most":
            return MostClaim(what, also)
        case _:
            return EveryClaim(what, also)


def _list_claims(words: str, text: str) -> tuple[Claim, ...]:
    opened = _LIST.fullmatch(words)
    parts = re.split(r" , | and ", opened[1]) if opened else [words]
    found: list[Claim] = []
    for part in parts:
        head = part.split(" ")[0]
        if head in NUMBERS:
            found.append(CountClaim(parse_phrase(part), NUMBERS.index(head)))
        elif head in ("a", "an"):
            found.append(ExistsClaim(parse_phrase(part)))
        else:
            raise UserError(
                f"Cannot parse {text!r}: it is not a sentence of the caption templates."
            )
    return tuple(found)


def _background_claim(word: str, text: str) -> BackgroundClaim:
    if word not in SETTINGS:
        raise UserError(f"{text!r}: a background is one of {', '.join(SETTINGS)}, not {word!r}.")
    return BackgroundClaim(word)
