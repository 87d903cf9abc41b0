"""Pairs of phrases and how they are related, decided by which things each can mean.

The five classes are those of natural logic, as in visually grounded paraphrases: equivalent,
forward entailment, backward entailment, alternation, independent. They are not annotated: a phrase
is a conjunction of attributes, and its meaning the set of all things that have them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from overt.data.batch import Batch
from overt.data.scenes.language import entails, excludes, ordered, say, say_after, vocabulary
from overt.data.scenes.questions import SPOKEN, Description
from overt.data.scenes.views import PROBES, TEXTS, Kept, check, even, fingerprint, part_of, rows
from overt.data.scenes.world import VALUES, Dice, key
from overt.data.vocabulary import ABSENT, BEGIN, END, Reader, pad
from overt.geometry import TextGeometry

PHRASES, PHRASE_CLASS = 16, 17  # purposes in `world.key`
BETWEEN = " / "  # stands between two texts where they are shown as one


class Relation(IntEnum):
    """How the things two phrases can mean are related."""

    EQUIVALENT = 0
    FORWARD = 1  # whatever the first means, the second means too
    BACKWARD = 2
    ALTERNATION = 3  # nothing can be meant by both
    INDEPENDENT = 4


SWAPPED = (
    Relation.EQUIVALENT,
    Relation.BACKWARD,
    Relation.FORWARD,
    Relation.ALTERNATION,
    Relation.INDEPENDENT,
)


def relation(first: Description, second: Description) -> Relation:
    """The relation of two descriptions, by the sets of all things that fit them."""
    forward, backward = entails(first, second), entails(second, first)
    if forward and backward:
        return Relation.EQUIVALENT
    if forward or backward:
        return Relation.FORWARD if forward else Relation.BACKWARD
    return Relation.ALTERNATION if excludes(first, second) else Relation.INDEPENDENT


@dataclass(frozen=True)
class PhrasePair:
    """Two phrases, what each describes, and their relation."""

    first: str
    second: str
    what: Description
    other: Description
    relation: Relation

    def swapped(self) -> "PhrasePair":
        """The pair the other way round."""
        return PhrasePair(self.second, self.first, self.other, self.what, SWAPPED[self.relation])


def phrase_pair(split: str, seed: int, index: int) -> PhrasePair:
    """A pair of phrases; the classes are even, and no pair, either way round, is in two splits.

    The wording is drawn in the same way for all five classes.
    """
    wanted = Relation(even(len(Relation), split, seed, index, PHRASE_CLASS))
    dice = Dice(key(split, seed, index, PHRASES))
    while True:
        what, other = _meanings(wanted, dice)
        first, second = _worded(what, dice), _worded(other, dice)
        if first != second and part_of(BETWEEN.join(sorted((first, second)))) == split:
            assert relation(what, other) is wanted
            return PhrasePair(first, second, what, other, wanted)


def _meanings(wanted: Relation, dice: Dice) -> tuple[Description, Description]:
    """Two descriptions in the relation wanted."""
    full = {name: dice.pick(values) for name, values in VALUES.items()}
    size = 1 + dice.below(len(SPOKEN))
    match wanted:
        case Relation.EQUIVALENT:
            what = _part(full, dice.sample(SPOKEN, size))
            return what, what
        case Relation.FORWARD | Relation.BACKWARD:
            names = dice.sample(SPOKEN, 2 + dice.below(len(SPOKEN) - 1))
            long, short = _part(full, names), _part(full, names[: 1 + dice.below(len(names) - 1)])
            return (long, short) if wanted is Relation.FORWARD else (short, long)
        case Relation.ALTERNATION:
            name = dice.pick(SPOKEN)
            changed = full | {name: dice.pick([v for v in VALUES[name] if v != full[name]])}
            return _some_with(full, name, dice), _some_with(changed, name, dice)
        case Relation.INDEPENDENT:
            ours, theirs = dice.sample(SPOKEN, 2)
            return (
                _part(full, [ours, *_others((ours, theirs), dice)]),
                _part(full, [theirs, *_others((ours, theirs), dice)]),
            )


def _part(full: dict[str, str], names: Sequence[str]) -> Description:
    return ordered({name: full[name] for name in names})


def _some_with(full: dict[str, str], name: str, dice: Dice) -> Description:
    """Some of the attributes, `name` among them."""
    return _part(full, [name, *_others((name,), dice)])


def _others(taken: Sequence[str], dice: Dice) -> list[str]:
    """Any number of the attributes not taken."""
    return [name for name in SPOKEN if name not in taken and dice.random() < 0.5]


def _worded(what: Description, dice: Dice) -> str:
    return say(what, dice) if dice.random() < 0.5 else say_after(what, dice)


def side_by_side(
    reader: Reader, first: str, second: str
) -> tuple[str, list[int], list[tuple[int, int]], int]:
    """Two texts as one row: the text, its ids (begin, first, end, second, end), the characters of
    each, and where the words of the second begin.
    """
    (ids, spans), (more, others) = reader.read(first), reader.read(second)
    shift = len(first) + len(BETWEEN)
    moved = [(start + shift, end + shift) for start, end in others]
    return (
        first + BETWEEN + second,
        [BEGIN, *ids, END, *more, END],
        [ABSENT, *spans, ABSENT, *moved, ABSENT],
        len(ids) + 2,
    )


class PhrasePairs:
    """Pairs of phrases to classify: `labels` and `groups` are the `Relation`; there are no images.

    `tokens` are begin, the first phrase, end, the second phrase, end.
    """

    name = "scenes-phrase-pairs"

    def __init__(self, split: str, seed: int, count: int) -> None:
        check(split, seed, count)
        self.split, self.seed, self.count = str(split), seed, count
        self.vocabulary = vocabulary()
        self.classes = tuple(member.name.lower() for member in Relation)
        self._item = Kept(self._make, TEXTS)

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings = (self.name, self.split, self.seed, self.count)
        return fingerprint(self.batch(range(min(PROBES, self.count))), *settings)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The pairs named, one sample each."""
        chosen = rows(indices, self.count)
        pairs = [self._item(index) for index in chosen]
        made = [side_by_side(self.vocabulary, pair.first, pair.second) for pair in pairs]
        tokens, mask, ranges = pad([row[1] for row in made], [row[2] for row in made])
        return Batch(
            ids=tuple(f"{self.name}-{self.split}-{self.seed}-{index:06d}" for index in chosen),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(tuple(row[0] for row in made), ranges),
            labels=torch.tensor([int(pair.relation) for pair in pairs]),
            references=tuple((pair.first, pair.second) for pair in pairs),
            groups=tuple(self.classes[pair.relation] for pair in pairs),
        )

    def _make(self, index: int) -> PhrasePair:
        return phrase_pair(self.split, self.seed, index)
