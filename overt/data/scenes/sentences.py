"""Sentences to classify, whose deciding words are known by intervention.

A sentence reports the opinions of several people. Its class is the opinion of the speakers ("we",
"i"): food, weather or travel, and praise or complaint. The opinions of others are distractors, and
a negation turns praise into complaint. A word decides if replacing it by a neutral word of the same
kind changes the class: the speaker, the topic, the judgement, the negation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from overt.attention import AttentionMap
from overt.attention import words as words_of
from overt.data.batch import Batch
from overt.data.scenes.view_dataset import SceneView, balanced_class, split_of_text
from overt.data.scenes.world import Dice, scene_rng
from overt.data.vocabulary import Vocabulary, pad_texts, tokenize

STREAM, CLASS = 22, 23  # purposes in `world.scene_rng`

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
    """Return all words of sentences, including neutral ones, the same for every split."""
    return Vocabulary(WORDS)


@dataclass(frozen=True)
class LabelledSentence:
    """A text, its words with the characters of each, its class, and the deciding words."""

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    label: int
    deciding: tuple[int, ...]


def sentence_class(words: Sequence[str]) -> int | None:
    """Return the class of a sentence, from the only clause of the speakers.

    None if they have no clause, no topic, or no judgement.
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


def neutral_word(word: str) -> str:
    """Return the neutral word of the same kind."""
    if word in SELVES or word in OTHERS:
        return NEUTRAL_PERSON
    if word in TOPIC_OF:
        return NEUTRAL_TOPIC
    if word in PRAISE or word in BLAME:
        return NEUTRAL_JUDGEMENT
    return NEUTRAL_WORD if word in NOT or word in INTENSE else word


def deciding_words(words: Sequence[str]) -> tuple[int, ...]:
    """Return the words whose neutral replacement, one at a time, changes the class."""
    base = sentence_class(words)
    return tuple(
        place
        for place, word in enumerate(words)
        if sentence_class([*words[:place], neutral_word(word), *words[place + 1 :]]) != base
    )


def make_sentence(split: str, seed: int, index: int) -> LabelledSentence:
    """Return a sentence; classes are balanced, and no text is in two splits."""
    label = balanced_class(len(CLASSES), split, seed, index, CLASS)
    dice = Dice(scene_rng(split, seed, index, STREAM))
    while True:
        text = _write_sentence(label, dice)
        if split_of_text(text) == split:
            found = tokenize(text)
            words = tuple(word for word, _, _ in found)
            assert sentence_class(words) == label
            spans = tuple((start, end) for _, start, end in found)
            return LabelledSentence(text, words, spans, label, deciding_words(words))


def _write_sentence(label: int, dice: Dice) -> str:
    """Write one clause of the speakers and one or two of others, in random order."""
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
    """Return the clauses of a sentence, each starting with its person."""
    clauses: list[list[str]] = []
    for word in words:
        if word in SELVES or word in OTHERS or word == NEUTRAL_PERSON:
            clauses.append([])
        if clauses:
            clauses[-1].append(word)
    return clauses


class Sentences(SceneView[LabelledSentence]):
    """Sentences to classify; `target` is uniform over the deciding words. There are no images.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the items.
        count: Number of items.

    Raises:
        UserError: A setting is invalid.

    Example:
        >>> data = Sentences("train", seed=0, count=3)
        >>> len(data)
        3
    """

    name = "scenes-sentences"

    def __init__(self, split: str, seed: int, count: int) -> None:
        super().__init__(split, seed, count)
        self.classes, self.vocabulary = CLASSES, vocabulary()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sentences at `indices`, one sample each."""
        ids, items = self._items(indices)
        tokens, mask, text = pad_texts(
            [item.text for item in items],
            [(self.vocabulary.encode(item.words), item.spans) for item in items],
        )
        wanted = torch.zeros(tokens.shape)
        for row, item in enumerate(items):
            wanted[row, list(item.deciding)] = 1
        keys = words_of(tokens.shape[1], geometry=text)
        return Batch(
            ids=tuple(ids),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([item.label for item in items]),
            target=AttentionMap.from_cells(wanted, keys, mask).normalize(),
        )

    def _make(self, index: int) -> LabelledSentence:
        return make_sentence(self.split, self.seed, index)
