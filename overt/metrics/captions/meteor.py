"""METEOR: alignment of words, precision, recall, and a penalty for changed order.

Denkowski and Lavie, "Meteor Universal", WMT 2014, https://aclanthology.org/W14-3348. The published
program is in Java and matches words, stems, synonyms and paraphrases. `meteor_java` runs it.
`meteor` is an approximation without Java and tables: it matches words, and stems by a few rules.

On the test split of Flickr8k, first captions against the other four, it is 0.232 where Java gives
0.250, with a correlation of 0.91 per caption. So it ranks captions alike, but is not comparable
with published scores. With `stem=no_stem` and the same list of function words it is Java's module
"exact": equal for 99.5 % of these captions; the others are aligned differently by the two beams.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.errors import RunError
from overt.metrics.captions.java import find_jar, find_java
from overt.metrics.captions.validation import check_captions
from overt.metrics.metric import SampleScores

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.20, 0.60, 0.75  # for English, tuned by the authors
EXACT, STEM = 1.0, 0.6  # what a match is worth
BEAM = 40

# Function words count 1 - delta, others delta. The published list is by frequency in news; this
# one has articles, prepositions, pronouns and auxiliaries.
FUNCTION_WORDS = frozenset(
    """a an the this that these those some all no other its his her their our my your of to in on at
    by for from with into over out up about after as than and or but if not so is are was were be
    been being has have had do does did can could will would it he she they we i you who which what
    when there 's n't also one two more""".split()
)

Stem = Callable[[str], str]


def no_stem(word: str) -> str:
    """Return the word unchanged: only equal words match."""
    return word


def light_stem(word: str) -> str:
    """Strip the regular endings of English plurals and verbs.

    >>> [light_stem(word) for word in "dogs running jumped puppies grass smiling".split()]
    ['dog', 'run', 'jump', 'puppi', 'grass', 'smile']
    """
    for ending, instead in (("ies", "i"), ("sses", "ss"), ("xes", "x"), ("ches", "ch")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word[: -len(ending)] + instead
    if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        return light_stem(word[:-1])
    for ending in ("ing", "ed"):
        base = word.removesuffix(ending)
        if base != word and len(base) > 2 and any(letter in "aeiouy" for letter in base):
            if base[-1] == base[-2] and base[-1] not in "lsz":
                return base[:-1]
            vowels = [letter in "aeiouy" for letter in base]
            # a consonant, one vowel, a consonant: smil-e, but not jump, and not visit
            return base + "e" if sum(vowels) == 1 and vowels[-2] and base[-1] not in "wx" else base
    return word[:-1] + "i" if word.endswith("y") and len(word) > 2 else word


@dataclass(frozen=True, eq=False)
class Meteor:
    """Statistics of METEOR, one row per caption, against its best reference.

    Columns: weighted matched words of the caption and of the reference, all weighted words of the
    caption and of the reference, number of aligned words, number of chunks (0 for a perfect match).
    METEOR of many captions is computed from the sums of all: `corpus`.

    Args:
        rows: The six columns of each caption.

    Example:
        >>> len(meteor([["a", "cat"]], [[["a", "cat"]]]))
        1
    """

    rows: Float[Tensor, "b 6"]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: Int[Tensor, " m"]) -> "Meteor":
        """Select captions by index, in this order; an index may be repeated."""
        return Meteor(self.rows[rows])

    def each(self) -> Float[Tensor, " b"]:
        """Compute METEOR of every caption."""
        return torch.tensor([_score(row) for row in self.rows.tolist()], dtype=torch.float64)

    def corpus(self) -> float:
        """Compute METEOR of all captions together."""
        return _score(self.rows.sum(dim=0).tolist())


def meteor(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    stem: Stem = light_stem,
    function_words: frozenset[str] = FUNCTION_WORDS,
) -> Meteor:
    """Compute METEOR without Java, by words and stems; synonyms and paraphrases do not match.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.
        stem: The stemmer.
        function_words: Words with a lower weight.

    Returns:
        The statistics; `.corpus()` is METEOR of the set.

    Example:
        >>> meteor([["a", "cat"]], [[["a", "cat"]]]).corpus()
        1.0
    """
    check_captions(candidates, references)
    rows = []
    for words, others in zip(candidates, references, strict=True):
        found = [_compare(words, other, stem, function_words) for other in others]
        rows.append(max(found, key=_score))  # the first of ties
    return Meteor(torch.tensor(rows, dtype=torch.float64).reshape(-1, 6))


def meteor_java(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    modules: Sequence[str] = ("exact", "stem", "synonym", "paraphrase"),
) -> tuple[float, SampleScores]:
    """Compute METEOR 1.5 with the published Java program.

    Loading its tables takes some seconds and two gigabytes of memory.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.
        modules: The matchers.

    Returns:
        The score of all captions together, and of each.

    Raises:
        UserError: Java or the package pycocoevalcap, which contains the program, is missing.
        RunError: The program ended early.

    Example:
        >>> score, each = meteor_java([["a", "cat"]], [[["a", "cat"]]])  # doctest: +SKIP
        >>> score  # doctest: +SKIP
        1.0
    """
    check_captions(candidates, references)
    program = find_jar("meteor", "meteor")
    command = [find_java(), "-Xmx2G", "-jar", str(program), "-", "-", "-stdio", "-l", "en", "-norm"]
    with subprocess.Popen(
        [*command, "-m", " ".join(modules)],
        cwd=program.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    ) as process:
        statistics = [
            _query(process, " ||| ".join(["SCORE", *map(_line, others), _line(words)]))
            for words, others in zip(candidates, references, strict=True)
        ]
        first = _query(process, " ||| ".join(["EVAL", *statistics]))
        rest = [_query(process) for _ in candidates]
    scores = [float(one) for one in (first, *rest)]
    return scores[-1], torch.tensor(scores[:-1], dtype=torch.float64)


def _query(process: subprocess.Popen[str], question: str | None = None) -> str:
    """Send a line to the program, if given, and read a line."""
    assert process.stdin is not None and process.stdout is not None
    if question is not None:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    found = process.stdout.readline()
    if not found:
        raise RunError("METEOR ended early: its tables need two gigabytes of memory.")
    return found.strip()


def _line(words: Sequence[str]) -> str:
    return " ".join(word for word in words if "|||" not in word)


def _compare(
    words: Sequence[str], other: Sequence[str], stem: Stem, function_words: frozenset[str]
) -> list[float]:
    """Compute the row of a caption against one reference."""

    def weigh(word: str) -> float:
        return 1 - DELTA if word in function_words else DELTA

    pairs = _align([stem(word) for word in words], [stem(word) for word in other])
    ours = theirs = 0.0
    for i, j in pairs:
        worth = EXACT if words[i] == other[j] else STEM
        ours, theirs = ours + worth * weigh(words[i]), theirs + worth * weigh(other[j])
    follows = sum(b == (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
    all_ours, all_theirs = (sum(map(weigh, one), 0.0) for one in (words, other))
    whole = len(pairs) == follows + 1 == len(words) == len(other)  # a perfect match
    runs = 0 if whole else len(pairs) - follows
    return [ours, theirs, all_ours, all_theirs, float(len(pairs)), float(runs)]


def _score(row: Sequence[float]) -> float:
    """`F (1 - gamma (chunks / pairs)^beta)` with `F = P R / (alpha P + (1 - alpha) R)`."""
    ours, theirs, all_ours, all_theirs, pairs, chunks = row
    if not pairs:
        return 0.0
    precision, recall = ours / all_ours, theirs / all_theirs
    mean = precision * recall / (ALPHA * precision + (1 - ALPHA) * recall)
    return mean * (1 - GAMMA * (chunks / pairs) ** BETA)


@dataclass(frozen=True)
class _Partial:
    """Alignment of the words so far, with what it is ranked by."""

    missing: int = 0
    chunks: int = 0
    apart: int = 0
    used: int = 0
    pairs: tuple[tuple[int, int], ...] = ()


def _align(words: Sequence[str], other: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Align equal words one to one: as many as possible, in few chunks, near each other."""
    places: dict[str, list[int]] = {}
    for j, word in enumerate(other):
        places.setdefault(word, []).append(j)
    beam = [_Partial()]
    for i, word in enumerate(words):
        grown = []
        for one in beam:
            last = one.pairs[-1] if one.pairs else (-2, -2)
            for j in places.get(word, ()):
                if not one.used >> j & 1:
                    follows = last == (i - 1, j - 1)
                    grown.append(
                        _Partial(
                            *(one.missing, one.chunks + (not follows), one.apart + abs(i - j)),
                            *(one.used | 1 << j, (*one.pairs, (i, j))),
                        )
                    )
            grown.append(_Partial(one.missing + 1, one.chunks, one.apart, one.used, one.pairs))
        beam = sorted(grown, key=lambda one: (one.missing, one.chunks, one.apart))[:BEAM]
    return beam[0].pairs
