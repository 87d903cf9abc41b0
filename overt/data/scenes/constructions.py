"""The five ways to speak of a scene, each as pieces of a sentence and what they claim.

A piece that speaks of things is tied to them. Every way finds something true to say about every
scene, and chooses among what is true by dice alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from overt.data.scenes.claims import (
    Claim,
    Counts,
    Every,
    Exists,
    Is,
    Lies,
    Most,
    Setting,
    fitting_both,
    settings,
    step,
)
from overt.data.scenes.language import DIRECTIONS, descriptions, one, say, several, singling
from overt.data.scenes.questions import SPOKEN, Description, fitting_things
from overt.data.scenes.world import VALUES, Dice, Scene

GAP = 0.14  # how far apart two things lie, where there are such, when a caption says on which side


class Construction(StrEnum):
    """The five ways to speak of a scene."""

    EXISTENCE = "existence"
    PLACE = "place"
    LISTING = "listing"
    ATTRIBUTE = "attribute"
    SETTING = "setting"


@dataclass(frozen=True, slots=True)
class Linked:
    """A piece of a sentence that speaks of things, and how it describes them."""

    text: str
    things: tuple[int, ...]
    what: Description = ()


Piece = str | Linked
Said = tuple[list[Piece], tuple[Claim, ...]]


def express(scene: Scene, how: Construction, dice: Dice) -> Said:
    """Something true about a scene, in the construction asked for."""
    return _WAYS[how](scene, dice)


def _existence(scene: Scene, dice: Dice) -> Said:
    """At least one of each: "there is a large ring and a red square"."""
    i, j = dice.sample(range(len(scene.things)), 2)
    first, second = _some(scene, i, dice), _some(scene, j, dice)
    alone = dice.random() < 0.5 or _fits(scene, second, i) or _fits(scene, first, j)
    chosen = (first,) if alone else (first, second)
    things = [fitting_things(what, scene.things) for what in chosen]
    listed = _joined([Linked(one(say(w, dice)), t, w) for w, t in zip(chosen, things, strict=True)])
    openings: list[list[Piece]] = [["there is", *listed], ["the picture shows", *listed]]
    openings.append([*listed, "can be seen"])
    return dice.pick(openings), tuple(Exists(what) for what in chosen)


def _place(scene: Scene, dice: Dice) -> Said:
    """Where one thing lies: "the red thing is left of a ring"; "a" is tied to all it may mean."""
    i, j, relation = _apart(scene, dice)
    what, definite = _naming(scene, i, dice)
    anchor, anchor_definite = _naming(scene, j, dice)
    claim = Lies(what, definite, relation, anchor, anchor_definite)
    pairs = claim.pairs(scene.things)
    subject = Linked(_determined(what, definite, dice), tuple(sorted({a for a, _ in pairs})), what)
    place = Linked(
        _determined(anchor, anchor_definite, dice), tuple(sorted({b for _, b in pairs})), anchor
    )
    side = dice.pick(DIRECTIONS[relation])
    if dice.random() < 0.3:
        return [DIRECTIONS[relation][-1], place, "is", subject], (claim,)
    return [subject, "is", side, place], (claim,)


def _listing(scene: Scene, dice: Dice) -> Said:
    """Exactly so many of each: "two red things, one blue thing and one white thing"."""
    return listing(scene, dice, dice.pick([n for n in SPOKEN if _values(scene, n)]))


def listing(scene: Scene, dice: Dice, name: str, needed: str | None = None) -> Said:
    """Counts of up to three values of one attribute, `needed` among them."""
    values = [value for value in _values(scene, name) if value != needed]
    chosen = dice.sample(values, min(len(values), (2 if needed else 3) - dice.below(2)))
    chosen = dice.sample([*chosen, *([needed] if needed else [])], len(chosen) + bool(needed))
    kinds: list[Description] = [((name, value),) for value in chosen]
    found = [fitting_things(what, scene.things) for what in kinds]
    listed = _joined(
        [Linked(several(len(t), w, dice), t, w) for w, t in zip(kinds, found, strict=True)]
    )
    there = "there is" if len(found[0]) == 1 else "there are"
    openings: list[list[Piece]] = [listed, [there, *listed], ["the picture has", *listed]]
    return dice.pick(openings), tuple(
        Counts(what, len(t)) for what, t in zip(kinds, found, strict=True)
    )


def _attribute(scene: Scene, dice: Dice) -> Said:
    """What one thing is, or all of a kind: "the large ring is red", "every ring is red"."""
    i = dice.below(len(scene.things))
    known = [what for what in singling(scene.things, i) if len(what) < len(SPOKEN)]
    if known and dice.random() < 0.75:
        what = dice.pick(known[: max(1, len(known) // 2)])
        rest = [fact for fact in descriptions(scene.things[i])[-1] if fact not in what]
        if rest:
            return _predicate(scene, what, rest, (i,), dice)
    return _universal(scene, i, dice)


def _predicate(
    scene: Scene,
    what: Description,
    rest: list[tuple[str, str]],
    things: tuple[int, ...],
    dice: Dice,
) -> Said:
    chosen = dice.sample(rest, min(len(rest), 1 + dice.below(2)))
    also: Description = tuple(fact for fact in rest if fact in chosen)
    subject = Linked(f"the {say(what, dice)}", things, what)
    claim = (Is(what, also),)
    if dict(also).get("shape"):
        return [subject, "is", Linked(one(say(also, dice)), things, also)], claim
    adjectives = " and ".join(say((fact,), dice).split(" ")[0] for fact in also)
    return [subject, "is", adjectives], claim


def _universal(scene: Scene, i: int, dice: Dice) -> Said:
    """What all things like thing i have in common, if need be those like it in all other ways."""
    facts = descriptions(scene.things[i])[-1]
    candidates: list[tuple[Description, tuple[str, str]]] = []
    for what in descriptions(scene.things[i]):
        for fact in facts:
            if fact[0] != "shape" and fact not in what:
                found = fitting_things(what, scene.things)
                if found == fitting_both(what, (fact,), scene.things):
                    candidates.append((what, fact))
    many = [c for c in candidates if len(fitting_things(c[0], scene.things)) > 1]
    what, fact = dice.pick(many or candidates[:3] or [(facts, facts[0])])
    things = fitting_things(what, scene.things)
    adjective = say((fact,), dice).split(" ")[0]
    if len(things) == 1:
        return [Linked(f"the {say(what, dice)}", things, what), "is", adjective], (
            Is(what, (fact,)),
        )
    if dice.random() < 0.5:
        return [Linked(f"every {say(what, dice)}", things, what), "is", adjective], (
            Every(what, (fact,)),
        )
    phrase = f"all {say(what, dice, plural=True)}"
    return [Linked(phrase, things, what), "are", adjective], (Every(what, (fact,)),)


def _setting(scene: Scene, dice: Dice) -> Said:
    """The whole: "six things on a dark background", "a busy picture with six things"."""
    words = settings(scene.background)
    tone = [word for word in words if word in ("dark", "dim")]
    subject, claim, verb = _whole(scene, dice)
    if tone and dice.random() < 0.6:
        ground = Linked(f"a {tone[0]} background", ())
        return [*subject, *verb, "on", ground], (*claim, Setting(tone[0]))
    if words and not verb:
        said = dice.sample(words, len(words))
        picture = Linked(f"a {' and '.join(said)} picture", ())
        return [picture, "with", *subject], (*(Setting(word) for word in said), *claim)
    return [*subject, *verb] if verb else ["the picture has", *subject], claim


def _whole(scene: Scene, dice: Dice) -> tuple[list[Piece], tuple[Claim, ...], list[Piece]]:
    """All things at once: their number, or what most of them are (then with a verb)."""
    total = len(scene.things)
    most = [
        fact
        for fact in sorted({f for t in scene.things for f in descriptions(t)[-1]})
        if fact[0] != "shape" and Most((), (fact,)).holds(scene)
    ]
    if most and dice.random() < 0.5:
        fact = dice.pick(most)
        subject = Linked(
            f"most {say((), dice, plural=True)}", fitting_things((fact,), scene.things)
        )
        return [subject], (Most((), (fact,)),), ["are", say((fact,), dice).split(" ")[0]]
    return [Linked(several(total, (), dice), tuple(range(total)))], (Counts((), total),), []


_WAYS: dict[Construction, Callable[[Scene, Dice], Said]] = {
    Construction.EXISTENCE: _existence,
    Construction.PLACE: _place,
    Construction.LISTING: _listing,
    Construction.ATTRIBUTE: _attribute,
    Construction.SETTING: _setting,
}


# --- choices --------------------------------------------------------------------------------------


def _some(scene: Scene, i: int, dice: Dice) -> Description:
    """Two or three attributes of a thing, whoever else has them."""
    known = descriptions(scene.things[i])
    return dice.pick([what for what in known if len(what) in (2, 3)] or known)


def _fits(scene: Scene, what: Description, i: int) -> bool:
    return i in fitting_things(what, scene.things)


def _naming(scene: Scene, i: int, dice: Dice) -> tuple[Description, bool]:
    """A description of a thing, and whether it fits that thing alone."""
    known = singling(scene.things, i)
    if known:
        return dice.pick(known[: max(1, len(known) // 2)]), True
    return _some(scene, i, dice), False


def _determined(what: Description, definite: bool, dice: Dice) -> str:
    phrase = say(what, dice)
    return f"the {phrase}" if definite else one(phrase)


def _apart(scene: Scene, dice: Dice) -> tuple[int, int, str]:
    """Two things and on which side of the second the first lies: clearly so where possible."""
    things = scene.things
    found = [
        (i, j, relation)
        for i in range(len(things))
        for j in range(len(things))
        for relation in DIRECTIONS
        if i != j and step(relation, things[i], things[j]) > 0
    ]
    clear = [(i, j, r) for i, j, r in found if step(r, things[i], things[j]) >= GAP]
    return dice.pick(clear or found)


def _values(scene: Scene, name: str) -> list[str]:
    """The values of an attribute that are there and have a word."""
    return [v for v in VALUES[name] if any(getattr(t, name) == v for t in scene.things)]


def _joined(pieces: list[Linked]) -> list[Piece]:
    """As a list in words: "a", "a and b", "a, b and c"."""
    joined: list[Piece] = []
    for n, piece in enumerate(pieces):
        if n:
            joined.append("and" if n == len(pieces) - 1 else ",")
        joined.append(piece)
    return joined
