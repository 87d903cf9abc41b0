"""The five caption templates, each as pieces of a sentence and their claims.

A piece that refers to things is linked to them. Every template has a true instance for every
scene, and chooses among them at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from overt.data.scenes.claims import (
    BackgroundClaim,
    Claim,
    CountClaim,
    EveryClaim,
    ExistsClaim,
    IsClaim,
    MostClaim,
    SpatialClaim,
    background_words,
    matching_both,
)
from overt.data.scenes.noun_phrases import (
    DIRECTIONS,
    descriptions,
    unique_descriptions,
    verbalize,
    with_article,
    with_number,
)
from overt.data.scenes.questions import (
    ATTRIBUTE_ORDER,
    Description,
    matching_things,
    signed_offset,
)
from overt.data.scenes.world import VALUES, Dice, Scene

GAP = 0.14  # preferred distance of two things in a caption about their relation


class Construction(StrEnum):
    """The five constructions of captions."""

    EXISTENCE = "existence"
    PLACE = "place"
    LISTING = "listing"
    ATTRIBUTE = "attribute"
    SETTING = "setting"


@dataclass(frozen=True, slots=True)
class GroundedPiece:
    """A piece of a sentence that refers to things, and its description of them."""

    text: str
    things: tuple[int, ...]
    what: Description = ()


Piece = str | GroundedPiece
Statement = tuple[list[Piece], tuple[Claim, ...]]


def fill_template(scene: Scene, how: Construction, dice: Dice) -> Statement:
    """Return a true statement about a scene in the given construction."""
    return _TEMPLATES[how](scene, dice)


def _existence(scene: Scene, dice: Dice) -> Statement:
    """State that something exists: "there is a large ring and a red square"."""
    i, j = dice.sample(range(len(scene.things)), 2)
    first, second = _short_description(scene, i, dice), _short_description(scene, j, dice)
    alone = dice.random() < 0.5 or _fits(scene, second, i) or _fits(scene, first, j)
    chosen = (first,) if alone else (first, second)
    things = [matching_things(what, scene.things) for what in chosen]
    listed = _join_list(
        [
            GroundedPiece(with_article(verbalize(w, dice)), t, w)
            for w, t in zip(chosen, things, strict=True)
        ]
    )
    openings: list[list[Piece]] = [["there is", *listed], ["the picture shows", *listed]]
    openings.append([*listed, "can be seen"])
    return dice.pick(openings), tuple(ExistsClaim(what) for what in chosen)


def _place(scene: Scene, dice: Dice) -> Statement:
    """State a relation: "the red thing is left of a ring"; "a" is linked to all matches."""
    i, j, relation = _separated_pair(scene, dice)
    what, definite = _refer_to(scene, i, dice)
    anchor, anchor_definite = _refer_to(scene, j, dice)
    claim = SpatialClaim(what, definite, relation, anchor, anchor_definite)
    pairs = claim.pairs(scene.things)
    subject = GroundedPiece(
        _with_determiner(what, definite, dice), tuple(sorted({a for a, _ in pairs})), what
    )
    place = GroundedPiece(
        _with_determiner(anchor, anchor_definite, dice),
        tuple(sorted({b for _, b in pairs})),
        anchor,
    )
    side = dice.pick(DIRECTIONS[relation])
    if dice.random() < 0.3:
        return [DIRECTIONS[relation][-1], place, "is", subject], (claim,)
    return [subject, "is", side, place], (claim,)


def _listing(scene: Scene, dice: Dice) -> Statement:
    """State exact counts: "two red things, one blue thing and one white thing"."""
    return list_counts(scene, dice, dice.pick([n for n in ATTRIBUTE_ORDER if _values(scene, n)]))


def list_counts(scene: Scene, dice: Dice, name: str, needed: str | None = None) -> Statement:
    """State the counts of up to three values of one attribute, `needed` among them."""
    values = [value for value in _values(scene, name) if value != needed]
    chosen = dice.sample(values, min(len(values), (2 if needed else 3) - dice.below(2)))
    chosen = dice.sample([*chosen, *([needed] if needed else [])], len(chosen) + bool(needed))
    kinds: list[Description] = [((name, value),) for value in chosen]
    found = [matching_things(what, scene.things) for what in kinds]
    listed = _join_list(
        [
            GroundedPiece(with_number(len(t), w, dice), t, w)
            for w, t in zip(kinds, found, strict=True)
        ]
    )
    there = "there is" if len(found[0]) == 1 else "there are"
    openings: list[list[Piece]] = [listed, [there, *listed], ["the picture has", *listed]]
    return dice.pick(openings), tuple(
        CountClaim(what, len(t)) for what, t in zip(kinds, found, strict=True)
    )


def _attribute(scene: Scene, dice: Dice) -> Statement:
    """State what one thing is, or all of a kind: "the large ring is red", "every ring is red"."""
    i = dice.below(len(scene.things))
    known = [
        what for what in unique_descriptions(scene.things, i) if len(what) < len(ATTRIBUTE_ORDER)
    ]
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
) -> Statement:
    chosen = dice.sample(rest, min(len(rest), 1 + dice.below(2)))
    also: Description = tuple(fact for fact in rest if fact in chosen)
    subject = GroundedPiece(f"the {verbalize(what, dice)}", things, what)
    claim = (IsClaim(what, also),)
    if dict(also).get("shape"):
        return [
            subject,
            "is",
            GroundedPiece(with_article(verbalize(also, dice)), things, also),
        ], claim
    adjectives = " and ".join(verbalize((fact,), dice).split(" ")[0] for fact in also)
    return [subject, "is", adjectives], claim


def _universal(scene: Scene, i: int, dice: Dice) -> Statement:
    """State what all things like thing i have in common."""
    facts = descriptions(scene.things[i])[-1]
    candidates: list[tuple[Description, tuple[str, str]]] = []
    for what in descriptions(scene.things[i]):
        for fact in facts:
            if fact[0] != "shape" and fact not in what:
                found = matching_things(what, scene.things)
                if found == matching_both(what, (fact,), scene.things):
                    candidates.append((what, fact))
    many = [c for c in candidates if len(matching_things(c[0], scene.things)) > 1]
    what, fact = dice.pick(many or candidates[:3] or [(facts, facts[0])])
    things = matching_things(what, scene.things)
    adjective = verbalize((fact,), dice).split(" ")[0]
    if len(things) == 1:
        return [GroundedPiece(f"the {verbalize(what, dice)}", things, what), "is", adjective], (
            IsClaim(what, (fact,)),
        )
    if dice.random() < 0.5:
        return [GroundedPiece(f"every {verbalize(what, dice)}", things, what), "is", adjective], (
            EveryClaim(what, (fact,)),
        )
    phrase = f"all {verbalize(what, dice, plural=True)}"
    return [GroundedPiece(phrase, things, what), "are", adjective], (EveryClaim(what, (fact,)),)


def _setting(scene: Scene, dice: Dice) -> Statement:
    """Describe the whole: "six things on a dark background", "a busy picture with six things"."""
    words = background_words(scene.background)
    tone = [word for word in words if word in ("dark", "dim")]
    subject, claim, verb = _whole(scene, dice)
    if tone and dice.random() < 0.6:
        ground = GroundedPiece(f"a {tone[0]} background", ())
        return [*subject, *verb, "on", ground], (*claim, BackgroundClaim(tone[0]))
    if words and not verb:
        said = dice.sample(words, len(words))
        picture = GroundedPiece(f"a {' and '.join(said)} picture", ())
        return [picture, "with", *subject], (*(BackgroundClaim(word) for word in said), *claim)
    return [*subject, *verb] if verb else ["the picture has", *subject], claim


def _whole(scene: Scene, dice: Dice) -> tuple[list[Piece], tuple[Claim, ...], list[Piece]]:
    """Return all things at once: their number, or what most of them are (then with a verb)."""
    total = len(scene.things)
    most = [
        fact
        for fact in sorted({f for t in scene.things for f in descriptions(t)[-1]})
        if fact[0] != "shape" and MostClaim((), (fact,)).holds(scene)
    ]
    if most and dice.random() < 0.5:
        fact = dice.pick(most)
        subject = GroundedPiece(
            f"most {verbalize((), dice, plural=True)}", matching_things((fact,), scene.things)
        )
        return [subject], (MostClaim((), (fact,)),), ["are", verbalize((fact,), dice).split(" ")[0]]
    return (
        [GroundedPiece(with_number(total, (), dice), tuple(range(total)))],
        (CountClaim((), total),),
        [],
    )


_TEMPLATES: dict[Construction, Callable[[Scene, Dice], Statement]] = {
    Construction.EXISTENCE: _existence,
    Construction.PLACE: _place,
    Construction.LISTING: _listing,
    Construction.ATTRIBUTE: _attribute,
    Construction.SETTING: _setting,
}


# --- choices --------------------------------------------------------------------------------------


def _short_description(scene: Scene, i: int, dice: Dice) -> Description:
    """Draw two or three attributes of a thing; others may share them."""
    known = descriptions(scene.things[i])
    return dice.pick([what for what in known if len(what) in (2, 3)] or known)


def _fits(scene: Scene, what: Description, i: int) -> bool:
    return i in matching_things(what, scene.things)


def _refer_to(scene: Scene, i: int, dice: Dice) -> tuple[Description, bool]:
    """Return a description of a thing, and whether it is unique."""
    known = unique_descriptions(scene.things, i)
    if known:
        return dice.pick(known[: max(1, len(known) // 2)]), True
    return _short_description(scene, i, dice), False


def _with_determiner(what: Description, definite: bool, dice: Dice) -> str:
    phrase = verbalize(what, dice)
    return f"the {phrase}" if definite else with_article(phrase)


def _separated_pair(scene: Scene, dice: Dice) -> tuple[int, int, str]:
    """Return two things and their relation, clearly apart where possible."""
    things = scene.things
    found = [
        (i, j, relation)
        for i in range(len(things))
        for j in range(len(things))
        for relation in DIRECTIONS
        if i != j and signed_offset(relation, things[i], things[j]) > 0
    ]
    clear = [(i, j, r) for i, j, r in found if signed_offset(r, things[i], things[j]) >= GAP]
    return dice.pick(clear or found)


def _values(scene: Scene, name: str) -> list[str]:
    """Return the values of an attribute that occur and have a word."""
    return [v for v in VALUES[name] if any(getattr(t, name) == v for t in scene.things)]


def _join_list(pieces: list[GroundedPiece]) -> list[Piece]:
    """Join pieces as a list in words: "a", "a and b", "a, b and c"."""
    joined: list[Piece] = []
    for n, piece in enumerate(pieces):
        if n:
            joined.append("and" if n == len(pieces) - 1 else ",")
        joined.append(piece)
    return joined
