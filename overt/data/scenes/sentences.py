"""Sentences to classify, whose deciding words are known by intervention.

A sentence reports what several people said. Its class is what the speakers themselves ("we", "i")
said: of food, weather or travel, and whether they praised it. What others said is there to
mislead, and a negation turns praise into complaint. A word decides when putting a neutral word of
the same sort in its place changes the class: the speaker, the topic, the judgement, the negation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from overt.attention import AttentionMap
from overt.attention import words as words_of
from overt.data.batch import Batch
from overt.data.scenes.views import (
    PROBES,
    TEXTS,
    Kept,
    check,
    even,
    fingerprint,
    part_of,
    rows,
)
from overt.data.scenes.world import Dice, key
from overt.data.vocabulary import Vocabulary, pad, tokenize
from overt.geometry import TextGeometry

STREAM, CLASS = 22, 23  # purposes in `world.key`

SELVES = ("we", "i")
OTHERS = ("they", "critics", "neighbours", "visitors", "children", "friends", "strangers")
TOPICS = {
    "food": ("soup", "bread", "cheese", "dinner", "salad", "cake", "coffee", "rice"),
    "weather": ("rain", "wind", "sunshine", "snow", "storm", "fog", "heat", "frost"),
    "travel": ("train", "flight", "ferry", "road", "bus", "journey", "taxi", "station"),
}
PRAISE = ("good", "lovely", "great", "pleasant", "fine", "excellent", "charming", "splendid")
BLAME = ("bad", "awful", "poor", "dreadful", "dull", "terrible", "nasty", "horrid")
NOT = ("not", "never", "hardly")
INTENSE = ("very", "quite", "rather", "really", "truly")
VERBS = ("found", "called", "thought", "considered", "judged")
WHEN = ("today", "yesterday", "again", "this morning", "last week", "at noon", "as always")
LINKS = ("but", "while", "and", "though")
NEUTRAL_PERSON, NEUTRAL_TOPIC, NEUTRAL_JUDGEMENT, NEUTRAL_WORD = "somebody", "thing", "usual", "so"

TOPIC_OF = {word: topic for topic, nouns in TOPICS.items() for word in nouns}
CLASSES = tuple(f"{verdict} of {topic}" for topic in TOPICS for verdict in ("praise", "complaint"))
_PLAIN = ("the", ",", NEUTRAL_PERSON, NEUTRAL_TOPIC, NEUTRAL_JUDGEMENT, NEUTRAL_WORD)
WORDS: tuple[str, ...] = tuple(
    sorted(
        {*SELVES, *OTHERS, *TOPIC_OF, *PRAISE, *BLAME, *NOT, *INTENSE, *VERBS, *LINKS, *_PLAIN}
        | {word for when in WHEN for word in when.split()}
    )
)


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """All words a sentence can have, the neutral ones included, the same for every split."""
    return Vocabulary(WORDS)


@dataclass(frozen=True)
class Sentence:
    """A text, its words with the characters of each, its class, and the words that decide it."""

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    label: int
    deciding: tuple[int, ...]


def class_of(words: Sequence[str]) -> int | None:
    """The class of a sentence: what the only clause of the speakers themselves says.

    None where they say nothing, or nothing about a topic, or pass no judgement.
    """
    own = [clause for clause in _clauses(words) if clause[0] in SELVES]
    if len(own) != 1:
        return None
    topics = [TOPIC_OF[word] for word in own[0] if word in TOPIC_OF]
    verdicts = [word in PRAISE for word in own[0] if word in PRAISE or word in BLAME]
    if len(topics) != 1 or len(verdicts) != 1:
        return None
    turned = sum(word in NOT for word in own[0]) % 2 == 1
    return CLASSES.index(f"{'praise' if verdicts[0] != turned else 'complaint'} of {topics[0]}")


def neutral(word: str) -> str:
    """The neutral word of the same sort."""
    if word in SELVES or word in OTHERS:
        return NEUTRAL_PERSON
    if word in TOPIC_OF:
        return NEUTRAL_TOPIC
    if word in PRAISE or word in BLAME:
        return NEUTRAL_JUDGEMENT
    return NEUTRAL_WORD if word in NOT or word in INTENSE else word


def deciding(words: Sequence[str]) -> tuple[int, ...]:
    """The words whose neutral replacement, one at a time, changes the class."""
    base = class_of(words)
    return tuple(
        place
        for place, word in enumerate(words)
        if class_of([*words[:place], neutral(word), *words[place + 1 :]]) != base
    )


def sentence(split: str, seed: int, index: int) -> Sentence:
    """A sentence; the classes are even, and no text is in two splits."""
    label = even(len(CLASSES), split, seed, index, CLASS)
    dice = Dice(key(split, seed, index, STREAM))
    while True:
        text = _written(label, dice)
        if part_of(text) == split:
            found = tokenize(text)
            words = tuple(word for word, _, _ in found)
            assert class_of(words) == label
            spans = tuple((start, end) for _, start, end in found)
            return Sentence(text, words, spans, label, deciding(words))


def _written(label: int, dice: Dice) -> str:
    """One clause of our own among one or two of others, in any order."""
    verdict, _, topic = CLASSES[label].partition(" of ")
    clauses = [_clause(dice.pick(SELVES), topic, verdict == "praise", dice)]
    clauses += [
        _clause(person, dice.pick(tuple(TOPICS)), dice.random() < 0.5, dice)
        for person in dice.sample(OTHERS, 1 + dice.below(2))
    ]
    first, *later = dice.sample(clauses, len(clauses))
    return first + "".join(f", {dice.pick(LINKS)} {clause}" for clause in later)


def _clause(person: str, topic: str, praise: bool, dice: Dice) -> str:
    turned = dice.random() < 0.5
    judgement = [dice.pick(PRAISE if praise != turned else BLAME)]
    if dice.random() < 0.5:
        judgement.insert(0, dice.pick(INTENSE))
    if turned:
        judgement.insert(0, dice.pick(NOT))
    when = [dice.pick(WHEN)] if dice.random() < 0.4 else []
    clause = [person, dice.pick(VERBS), "the", dice.pick(TOPICS[topic]), *judgement, *when]
    return " ".join(clause)


def _clauses(words: Sequence[str]) -> list[list[str]]:
    """The clauses of a sentence, each from its person on."""
    clauses: list[list[str]] = []
    for word in words:
        if word in SELVES or word in OTHERS or word == NEUTRAL_PERSON:
            clauses.append([])
        if clauses:
            clauses[-1].append(word)
    return clauses


class Sentences:
    """Sentences to classify; `target` says evenly which words decide. There are no images."""

    name = "scenes-sentences"

    def __init__(self, split: str, seed: int, count: int) -> None:
        check(split, seed, count)
        self.split, self.seed, self.count = str(split), seed, count
        self.classes, self.vocabulary = CLASSES, vocabulary()
        self._item = Kept(self._make, TEXTS)

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """A hash of every setting and of the first items."""
        settings = (self.name, self.split, self.seed, self.count)
        return fingerprint(self.batch(range(min(PROBES, self.count))), *settings)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The sentences named, one sample each."""
        chosen = rows(indices, self.count)
        items = [self._item(index) for index in chosen]
        tokens, mask, spans = pad(
            [self.vocabulary.encode(item.words) for item in items],
            [item.spans for item in items],
        )
        wanted = torch.zeros(tokens.shape)
        for row, item in enumerate(items):
            wanted[row, list(item.deciding)] = 1
        text = TextGeometry(tuple(item.text for item in items), spans)
        keys = words_of(tokens.shape[1], geometry=text)
        return Batch(
            ids=tuple(f"{self.name}-{self.split}-{self.seed}-{index:06d}" for index in chosen),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([item.label for item in items]),
            target=AttentionMap.from_cells(wanted, keys, mask).normalize(),
        )

    def _make(self, index: int) -> Sentence:
        return sentence(self.split, self.seed, index)
