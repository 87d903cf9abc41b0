"""Pairs of phrases and their semantic relation, decided by the things that each can mean.

The five classes are those of natural logic, as in visually grounded paraphrases: equivalent,
forward entailment, backward entailment, alternation, independent. They are computed, not
annotated: the meaning of a phrase is the set of all things that have its attributes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from overt.data.batch import Batch
from overt.data.scenes.noun_phrases import (
    entails,
    excludes,
    order_attributes,
    verbalize,
    verbalize_with_clause,
    vocabulary,
)
from overt.data.scenes.questions import ATTRIBUTE_ORDER, Description
from overt.data.scenes.view_dataset import SceneView, balanced_class, split_of_text
from overt.data.scenes.world import VALUES, Dice, random_attributes, scene_rng
from overt.data.vocabulary import ABSENT, BEGIN, END, Tokenizer, pad_texts

PHRASES, PHRASE_CLASS = 16, 17  # purposes in `world.scene_rng`
SEPARATOR = " / "  # between two texts that are shown as one


class PhraseRelation(IntEnum):
    """Relation between the sets of things that two phrases can mean."""

    EQUIVALENT = 0
    FORWARD = 1  # the first entails the second
    BACKWARD = 2
    ALTERNATION = 3  # no thing matches both
    INDEPENDENT = 4


SWAPPED = (
    PhraseRelation.EQUIVALENT,
    PhraseRelation.BACKWARD,
    PhraseRelation.FORWARD,
    PhraseRelation.ALTERNATION,
    PhraseRelation.INDEPENDENT,
)


def phrase_relation(first: Description, second: Description) -> PhraseRelation:
    """Return the relation of two descriptions, by the sets of all things that match them."""
    forward, backward = entails(first, second), entails(second, first)
    if forward and backward:
        return PhraseRelation.EQUIVALENT
    if forward or backward:
        return PhraseRelation.FORWARD if forward else PhraseRelation.BACKWARD
    return PhraseRelation.ALTERNATION if excludes(first, second) else PhraseRelation.INDEPENDENT


@dataclass(frozen=True)
class PhrasePair:
    """Two phrases, their descriptions, and their relation."""

    first: str
    second: str
    what: Description
    other: Description
    relation: PhraseRelation

    def swapped(self) -> "PhrasePair":
        """Return the pair in reverse order."""
        return PhrasePair(self.second, self.first, self.other, self.what, SWAPPED[self.relation])


def make_phrase_pair(split: str, seed: int, index: int) -> PhrasePair:
    """Return a pair of phrases; classes are balanced, and no pair is in two splits in either order.

    The wording is drawn in the same way for all five classes.
    """
    wanted = PhraseRelation(balanced_class(len(PhraseRelation), split, seed, index, PHRASE_CLASS))
    dice = Dice(scene_rng(split, seed, index, PHRASES))
    while True:
        what, other = _meanings(wanted, dice)
        first, second = _verbalize_any(what, dice), _verbalize_any(other, dice)
        if first != second and split_of_text(SEPARATOR.join(sorted((first, second)))) == split:
            assert phrase_relation(what, other) is wanted
            return PhrasePair(first, second, what, other, wanted)


def _meanings(wanted: PhraseRelation, dice: Dice) -> tuple[Description, Description]:
    """Draw two descriptions in the given relation."""
    full = random_attributes(dice)
    size = 1 + dice.below(len(ATTRIBUTE_ORDER))
    match wanted:
        case PhraseRelation.EQUIVALENT:
            what = _part(full, dice.sample(ATTRIBUTE_ORDER, size))
            return what, what
        case PhraseRelation.FORWARD | PhraseRelation.BACKWARD:
            names = dice.sample(ATTRIBUTE_ORDER, 2 + dice.below(len(ATTRIBUTE_ORDER) - 1))
            long, short = _part(full, names), _part(full, names[: 1 + dice.below(len(names) - 1)])
            return (long, short) if wanted is PhraseRelation.FORWARD else (short, long)
        case PhraseRelation.ALTERNATION:
            name = dice.pick(ATTRIBUTE_ORDER)
            changed = full | {name: dice.pick([v for v in VALUES[name] if v != full[name]])}
            return _some_with(full, name, dice), _some_with(changed, name, dice)
        case PhraseRelation.INDEPENDENT:
            ours, theirs = dice.sample(ATTRIBUTE_ORDER, 2)
            return (
                _part(full, [ours, *_others((ours, theirs), dice)]),
                _part(full, [theirs, *_others((ours, theirs), dice)]),
            )


def _part(full: dict[str, str], names: Sequence[str]) -> Description:
    return order_attributes({name: full[name] for name in names})


def _some_with(full: dict[str, str], name: str, dice: Dice) -> Description:
    """Draw some of the attributes, `name` among them."""
    return _part(full, [name, *_others((name,), dice)])


def _others(taken: Sequence[str], dice: Dice) -> list[str]:
    """Draw any number of the attributes not taken."""
    return [name for name in ATTRIBUTE_ORDER if name not in taken and dice.random() < 0.5]


def _verbalize_any(what: Description, dice: Dice) -> str:
    return verbalize(what, dice) if dice.random() < 0.5 else verbalize_with_clause(what, dice)


def encode_pair(
    reader: Tokenizer, first: str, second: str
) -> tuple[str, list[int], list[tuple[int, int]], int]:
    """Encode two texts as one row.

    Returns:
        The text, its ids (begin, first, end, second, end), the characters of each, and the index of
        the first token of the second text.
    """
    (ids, spans), (more, others) = reader.read(first), reader.read(second)
    shift = len(first) + len(SEPARATOR)
    moved = [(start + shift, end + shift) for start, end in others]
    return (
        first + SEPARATOR + second,
        [BEGIN, *ids, END, *more, END],
        [ABSENT, *spans, ABSENT, *moved, ABSENT],
        len(ids) + 2,
    )


class PhrasePairs(SceneView[PhrasePair]):
    """Pairs of phrases to classify: `labels` and `groups` are the `PhraseRelation`; there are no
    images.

    `tokens` are begin, the first phrase, end, the second phrase, end.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = PhrasePairs("train", seed=0, count=4)
        >>> batch = data.batch([0])
        >>> batch.references, batch.groups
        ((('striped object that is cyan', 'thing that is striped'),), ('forward',))
    """

    name = "scenes-phrase-pairs"

    def __init__(self, split: str, seed: int, count: int) -> None:
        super().__init__(split, seed, count)
        self.vocabulary = vocabulary()
        self.classes = tuple(member.name.lower() for member in PhraseRelation)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the pairs at `indices`, one sample each."""
        ids, pairs = self._items(indices)
        made = [encode_pair(self.vocabulary, pair.first, pair.second) for pair in pairs]
        tokens, mask, text = pad_texts([row[0] for row in made], [row[1:3] for row in made])
        return Batch(
            ids=tuple(ids),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([int(pair.relation) for pair in pairs]),
            references=tuple((pair.first, pair.second) for pair in pairs),
            groups=tuple(self.classes[pair.relation] for pair in pairs),
        )

    def _make(self, index: int) -> PhrasePair:
        return make_phrase_pair(self.split, self.seed, index)
