"""Random and real captions with references for the tests of caption metrics."""

import random
from pathlib import Path

import pytest

from overt.data.captions import read_tokens
from overt.metrics.captions.tokenizer import tokenize_caption

Words = list[str]

NOUNS = "dog cat man woman child ball bike horse boat tree".split()
VERBS = "runs sits jumps plays stands sleeps".split()
PLACES = "in on near under behind".split()


def sentence(dice: random.Random) -> Words:
    words = ["a", dice.choice(NOUNS), dice.choice(VERBS)]
    for _ in range(dice.randrange(3)):
        words += [dice.choice(PLACES), dice.choice(["a", "the"]), dice.choice(NOUNS)]
    return words


def random_captions(count: int, seed: int = 0) -> tuple[list[Words], list[list[Words]]]:
    """Return candidates that share words with their 1 to 5 references, and some bad ones."""
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


def to_pycocoevalcap(candidates, references):
    """Convert to the two dictionaries of texts that pycocoevalcap takes."""
    theirs = {at: [" ".join(words) for words in many] for at, many in enumerate(references)}
    return theirs, {at: [" ".join(words)] for at, words in enumerate(candidates)}


def flickr8k_captions(data_root: Path, count: int) -> tuple[list[Words], list[list[Words]]]:
    """Return the first caption of `count` Flickr8k photos and the other four of each."""
    path = data_root / "flickr8k" / "Flickr8k.token.txt"
    if not path.exists():
        pytest.skip("the captions of Flickr8k are not under OVERT_DATA")
    photos = list(read_tokens(path).values())[:count]
    words = [[tokenize_caption(text) for text in texts] for texts in photos]
    return [texts[0] for texts in words], [texts[1:] for texts in words]
