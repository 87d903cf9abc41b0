"""How the world is put into words: descriptions become noun phrases, and noun phrases descriptions.

A description is a conjunction of attributes (`questions.Description`); its meaning is the set of
things that have them all. Everything said about scenes is built from these phrases, so that what
is said can be read back and checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from overt.data.scenes.questions import PLURALS, RELATIONS, SPOKEN, Description, fitting_things
from overt.data.scenes.world import VALUES, Dice, Thing
from overt.data.vocabulary import Vocabulary, tokenize
from overt.errors import BadInput

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
_GLUE = """a all an and are background be busy calm can dark dim every has is most of on picture
    seen shows that the there to with ,""".split()

# Every word for an attribute, singular and plural, and what it says.
MEANS: dict[str, tuple[str, str]] = {
    value: (name, value) for name, values in VALUES.items() for value in values
}
MEANS |= {plural: ("shape", shape) for shape, plural in PLURALS.items()}
MEANS |= {word: MEANS[known] for known, word in SYNONYMS.items() if known in MEANS}
EMPTY = {"thing", "things", "object", "objects"}
WORDS: tuple[str, ...] = tuple(
    sorted({*MEANS, *EMPTY, *NUMBERS[1:], *RELATIONS, *_GLUE} - {"zero"})
)


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The words of captions and referring expressions, the same for every split and seed."""
    return Vocabulary(WORDS)


# --- descriptions ---------------------------------------------------------------------------------


def ordered(attributes: dict[str, str]) -> Description:
    """A description in the order of speech: size, texture, colour, shape."""
    return tuple((name, attributes[name]) for name in SPOKEN if name in attributes)


def descriptions(thing: Thing) -> tuple[Description, ...]:
    """All conjunctions of attributes a thing has, the short ones first, the empty one left out.

    A neutral value has no word and takes no part.
    """
    facts = [(n, getattr(thing, n)) for n in SPOKEN if getattr(thing, n) in VALUES[n]]
    return tuple(part for n in range(1, len(facts) + 1) for part in combinations(facts, n))


def singling(things: Sequence[Thing], i: int) -> tuple[Description, ...]:
    """The descriptions that fit thing i and no other, the short ones first."""
    return tuple(d for d in descriptions(things[i]) if fitting_things(d, things) == (i,))


def entails(first: Description, second: Description) -> bool:
    """Whether whatever fits the first fits the second."""
    return set(second) <= set(first)


def excludes(first: Description, second: Description) -> bool:
    """Whether nothing can fit both: some attribute has two different values."""
    values = dict(first)
    return any(values.get(name, value) != value for name, value in second)


# --- noun phrases ---------------------------------------------------------------------------------


def say(what: Description, dice: Dice | None = None, plural: bool = False) -> str:
    """The noun phrase of a description, without article; with dice, now and then a synonym.

    >>> say((("size", "large"), ("color", "red"), ("shape", "cross")), plural=True)
    'large red crosses'
    """
    facts = dict(what)
    shape = facts.pop("shape", "thing")
    noun = (PLURALS.get(shape, "things")) if plural else shape
    return " ".join(_varied([*facts.values(), noun], dice))


def say_after(what: Description, dice: Dice, plural: bool = False) -> str:
    """The same description with some adjectives after the noun: "circle that is large and red"."""
    facts = [fact for fact in what if fact[0] != "shape"]
    if not facts:
        return say(what, dice, plural)
    later = dice.sample(facts, 1 + dice.below(len(facts)))
    before = tuple(fact for fact in what if fact not in later)
    adjectives = " and ".join(_varied([value for _, value in later], dice))
    return f"{say(before, dice, plural)} that {'are' if plural else 'is'} {adjectives}"


def one(phrase: str) -> str:
    """The phrase with its indefinite article.

    >>> one("orange ring")
    'an orange ring'
    """
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def several(number: int, what: Description, dice: Dice | None = None) -> str:
    """The phrase with its number: "one ring", "two red things"."""
    return f"{NUMBERS[number]} {say(what, dice, plural=number != 1)}"


def read(phrase: str) -> Description:
    """The description behind a noun phrase or a list of adjectives; the inverse of all above.

    >>> read("a disc that is big and red")
    (('size', 'large'), ('color', 'red'), ('shape', 'circle'))
    """
    facts: dict[str, str] = {}
    for word, _, _ in tokenize(phrase):
        if word in MEANS:
            name, value = MEANS[word]
            if facts.setdefault(name, value) != value:
                raise BadInput(f"{phrase!r} says two things about the {name}")
        elif word not in EMPTY and word not in _GLUE and word not in NUMBERS:
            raise BadInput(f"{phrase!r} has a word that describes nothing here: {word!r}")
    return ordered(facts)


def _varied(words: Sequence[str], dice: Dice | None) -> list[str]:
    if dice is None:
        return list(words)
    return [
        SYNONYMS[word] if word in SYNONYMS and dice.random() < SYNONYM_RATE else word
        for word in words
    ]
