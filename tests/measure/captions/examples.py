"""Captions with references for the tests of measures."""

import random
from pathlib import Path

import pytest

from overt.data.captions import read_tokens
from overt.measure.captions.tokens import caption_words

Words = list[str]

NOUNS = "dog cat man woman child ball bike horse boat tree".split()
VERBS = "runs sits jumps plays stands sleeps".split()
PLACES = "in on near under behind".split()


def sentence(dice: random.Random) -> Words:
    words = ["a", dice.choice(NOUNS), dice.choice(VERBS)]
    for _ in range(dice.randrange(3)):
        words += [dice.choice(PLACES), dice.choice(["a", "the"]), dice.choice(NOUNS)]
    return words


def many(count: int, seed: int = 0) -> tuple[list[Words], list[list[Words]]]:
    """Candidates that share some words with their references, 1 to 5 each, and some bad ones."""
    dice = random.Random(seed)
    candidates, references = [], []
    for at in range(count):
        others = [sentence(dice) for _ in range(1 + dice.randrange(5))]
        words = list(dice.choice(others))
        for _ in range(dice.randrange(4)):
            words[dice.randrange(len(words))] = dice.choice([*NOUNS, "the", "the", "zebra"])
        if at % 7 == 3:
            words = words[: dice.randrange(1, 4)]
        if at % 11 == 5:
            words = words + words
        candidates.append(words)
        references.append(others)
    return candidates, references


def as_published(candidates, references):
    """The two dictionaries of texts that pycocoevalcap takes."""
    theirs = {at: [" ".join(words) for words in many] for at, many in enumerate(references)}
    return theirs, {at: [" ".join(words)] for at, words in enumerate(candidates)}


def of_photos(data_root: Path, count: int) -> tuple[list[Words], list[list[Words]]]:
    """The first captions of some photos of Flickr8k, and the other four of each."""
    path = data_root / "flickr8k" / "Flickr8k.token.txt"
    if not path.exists():
        pytest.skip("the captions of Flickr8k are not under OVERT_DATA")
    photos = list(read_tokens(path).values())[:count]
    words = [[caption_words(text) for text in texts] for texts in photos]
    return [texts[0] for texts in words], [texts[1:] for texts in words]
