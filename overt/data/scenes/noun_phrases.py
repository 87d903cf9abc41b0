"""Conversion between descriptions and noun phrases.

A description is a conjunction of attributes (`questions.Description`); its meaning is the set of
things that have them all. All texts about scenes are built from these phrases, so that they can be
parsed and tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from overt.data.scenes.questions import (
    ATTRIBUTE_ORDER,
    PLURALS,
    RELATIONS,
    Description,
    matching_things,
)
from overt.data.scenes.world import VALUES, Dice, Thing
from overt.data.vocabulary import Vocabulary, tokenize
from overt.errors import UserError

SYNONYMS = {
    "large": "big",
    "small": "little",
    "solid": "plain",
    "purple": "violet",
    "cyan": "turquoise",
    "circle": "disc",
    "circles": "discs",
    "ring": "hoop",
    "rings": "hoops",
    "diamond": "lozenge",
    "diamonds": "lozenges",
    "thing": "object",
    "things": "objects",
}
SYNONYM_RATE = 1 / 6
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
DIRECTIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above",),
    "below": ("below",),
}
_FUNCTION_WORDS = """a all an and are background be busy calm can dark dim every has is most of on
    picture seen shows that the there to with ,""".split()

# Every word for an attribute, singular and plural, and its meaning.
MEANINGS: dict[str, tuple[str, str]] = {
    value: (name, value) for name, values in VALUES.items() for value in values
}
MEANINGS |= {plural: ("shape", shape) for shape, plural in PLURALS.items()}
MEANINGS |= {word: MEANINGS[known] for known, word in SYNONYMS.items() if known in MEANINGS}
GENERIC_NOUNS = {"thing", "things", "object", "objects"}
WORDS: tuple[str, ...] = tuple(
    sorted({*MEANINGS, *GENERIC_NOUNS, *NUMBERS[1:], *RELATIONS, *_FUNCTION_WORDS} - {"zero"})
)


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Return the vocabulary of captions and referring expressions, the same for every split."""
    return Vocabulary(WORDS)


# --- descriptions ---------------------------------------------------------------------------------


def order_attributes(attributes: dict[str, str]) -> Description:
    """Return a description in word order: size, texture, colour, shape."""
    return tuple((name, attributes[name]) for name in ATTRIBUTE_ORDER if name in attributes)


def descriptions(thing: Thing) -> tuple[Description, ...]:
    """Return all conjunctions of attributes of a thing, short ones first, without the empty one.

    Neutral values have no word and are left out.
    """
    facts = [(n, getattr(thing, n)) for n in ATTRIBUTE_ORDER if getattr(thing, n) in VALUES[n]]
    return tuple(part for n in range(1, len(facts) + 1) for part in combinations(facts, n))


def unique_descriptions(things: Sequence[Thing], i: int) -> tuple[Description, ...]:
    """Return the descriptions that match thing i and no other, short ones first."""
    return tuple(d for d in descriptions(things[i]) if matching_things(d, things) == (i,))


def entails(first: Description, second: Description) -> bool:
    """Return whether everything that matches the first matches the second."""
    return set(second) <= set(first)


def excludes(first: Description, second: Description) -> bool:
    """Return whether nothing can match both: some attribute has two different values."""
    values = dict(first)
    return any(values.get(name, value) != value for name, value in second)


# --- noun phrases ---------------------------------------------------------------------------------


def verbalize(what: Description, dice: Dice | None = None, plural: bool = False) -> str:
    """Return the noun phrase of a description, without article; with dice, sometimes with synonyms.

    >>> verbalize((("size", "large"), ("color", "red"), ("shape", "cross")), plural=True)
    'large red crosses'
    """
    facts = dict(what)
    shape = facts.pop("shape", "thing")
    noun = (PLURALS.get(shape, "things")) if plural else shape
    return " ".join(_with_synonyms([*facts.values(), noun], dice))


def verbalize_with_clause(what: Description, dice: Dice, plural: bool = False) -> str:
    """Return a noun phrase with some adjectives in a clause: "circle that is large and red"."""
    facts = [fact for fact in what if fact[0] != "shape"]
    if not facts:
        return verbalize(what, dice, plural)
    later = dice.sample(facts, 1 + dice.below(len(facts)))
    before = tuple(fact for fact in what if fact not in later)
    adjectives = " and ".join(_with_synonyms([value for _, value in later], dice))
    return f"{verbalize(before, dice, plural)} that {'are' if plural else 'is'} {adjectives}"


def with_article(phrase: str) -> str:
    """Return the phrase with its indefinite article.

    >>> with_article("orange ring")
    'an orange ring'
    """
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def with_number(number: int, what: Description, dice: Dice | None = None) -> str:
    """Return the phrase with its number: "one ring", "two red things"."""
    return f"{NUMBERS[number]} {verbalize(what, dice, plural=number != 1)}"


def parse_phrase(phrase: str) -> Description:
    """Parse a noun phrase or a list of adjectives to a description, the inverse of the functions
    above.

    >>> parse_phrase("a disc that is big and red")
    (('size', 'large'), ('color', 'red'), ('shape', 'circle'))
    """
    facts: dict[str, str] = {}
    for word, _, _ in tokenize(phrase):
        if word in MEANINGS:
            name, value = MEANINGS[word]
            if facts.setdefault(name, value) != value:
                raise UserError(f"{phrase!r} has two values of the {name}.")
        elif word not in GENERIC_NOUNS and word not in _FUNCTION_WORDS and word not in NUMBERS:
            raise UserError(f"{phrase!r} has an unknown word: {word!r}.")
    return order_attributes(facts)


def _with_synonyms(words: Sequence[str], dice: Dice | None) -> list[str]:
    if dice is None:
        return list(words)
    return [
        SYNONYMS[word] if word in SYNONYMS and dice.random() < SYNONYM_RATE else word
        for word in words
    ]
