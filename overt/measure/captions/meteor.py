"""METEOR: words aligned one to one, precision, recall, and how much order was lost.

Denkowski and Lavie, "Meteor Universal", WMT 2014, https://aclanthology.org/W14-3348. The published
program is in Java and matches by word, stem, synonym and paraphrase. `meteor_java` is that program.
`meteor` is an approximation without Java and without tables: words and stems alone, with stems by
a few rules.

Measured on the test split of Flickr8k, first captions against the other four: 0.232 where Java
gives 0.250, correlated with it at 0.91 a caption. So it ranks captions alike, and is no number to
put beside published ones. With `stem=as_it_is` and one list of function words it is Java's module
"exact": equal for 99.5 % of these captions, the others being aligned differently by two beams.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.errors import Failed
from overt.measure.captions.java import jar, java
from overt.measure.measured import Measured

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.20, 0.60, 0.75  # of English, tuned by the authors to ranks
EXACT, STEM = 1.0, 0.6  # what a match is worth
BEAM = 40

# Words of little meaning of their own: they count 1 - delta, others delta. The published list is
# made by frequency in news; ours is articles, prepositions, pronouns and auxiliaries.
FUNCTION_WORDS = frozenset(
    """a an the this that these those some all no other its his her their our my your of to in on at
    by for from with into over out up about after as than and or but if not so is are was were be
    been being has have had do does did can could will would it he she they we i you who which what
    when there 's n't also one two more""".split()
)

Stem = Callable[[str], str]


def as_it_is(word: str) -> str:
    """No stem: only equal words match."""
    return word


def light_stem(word: str) -> str:
    """A word without the regular endings of English plurals and verbs.

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
    """What METEOR is made of, one row a caption, against the reference that suits it best.

    The columns are, of the caption and of the reference: the weighted words that are matched, all
    weighted words; then how many words are aligned, and in how many runs, 0 of a perfect match.
    METEOR of many captions is made of the sums of all: `corpus`.
    """

    rows: Float[Tensor, "b 6"]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: Int[Tensor, " m"]) -> "Meteor":
        """The captions named, in their order; one may be named twice."""
        return Meteor(self.rows[rows])

    def each(self) -> Float[Tensor, " b"]:
        """METEOR of every caption."""
        return torch.tensor([_score(row) for row in self.rows.tolist()], dtype=torch.float64)

    def corpus(self) -> float:
        """METEOR of all captions together."""
        return _score(self.rows.sum(dim=0).tolist())


def meteor(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    stem: Stem = light_stem,
    function_words: frozenset[str] = FUNCTION_WORDS,
) -> Meteor:
    """METEOR without Java, by words and stems; synonyms and paraphrases do not count here."""
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    rows = []
    for words, others in zip(candidates, references, strict=True):
        if not others:
            raise ValueError("a candidate needs at least one reference")
        found = [_compare(words, other, stem, function_words) for other in others]
        rows.append(max(found, key=_score))  # the first of equals
    return Meteor(torch.tensor(rows, dtype=torch.float64).reshape(-1, 6))


def meteor_java(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    modules: Sequence[str] = ("exact", "stem", "synonym", "paraphrase"),
) -> tuple[float, Measured]:
    """METEOR 1.5 itself: the score of all captions together, and of each.

    Needs Java and the package pycocoevalcap, which brings the program along. Loading its tables
    takes some seconds and two gigabytes.
    """
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    program = jar("meteor", "meteor")
    command = [java(), "-Xmx2G", "-jar", str(program), "-", "-", "-stdio", "-l", "en", "-norm"]
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
            _answer(process, " ||| ".join(["SCORE", *map(_line, others), _line(words)]))
            for words, others in zip(candidates, references, strict=True)
        ]
        first = _answer(process, " ||| ".join(["EVAL", *statistics]))
        rest = [_answer(process) for _ in candidates]
    scores = [float(one) for one in (first, *rest)]
    return scores[-1], torch.tensor(scores[:-1], dtype=torch.float64)


def _answer(process: subprocess.Popen[str], question: str | None = None) -> str:
    """A line of the program, after a question if there is one."""
    assert process.stdin is not None and process.stdout is not None
    if question is not None:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    found = process.stdout.readline()
    if not found:
        raise Failed("METEOR ended early: is there memory for its two gigabytes of tables?")
    return found.strip()


def _line(words: Sequence[str]) -> str:
    return " ".join(word for word in words if "|||" not in word)


def _compare(
    words: Sequence[str], other: Sequence[str], stem: Stem, function_words: frozenset[str]
) -> list[float]:
    """The row of a caption beside one reference."""

    def weigh(word: str) -> float:
        return 1 - DELTA if word in function_words else DELTA

    pairs = _align([stem(word) for word in words], [stem(word) for word in other])
    ours = theirs = 0.0
    for i, j in pairs:
        worth = EXACT if words[i] == other[j] else STEM
        ours, theirs = ours + worth * weigh(words[i]), theirs + worth * weigh(other[j])
    follows = sum(b == (a[0] + 1, a[1] + 1) for a, b in pairwise(pairs))
    all_ours, all_theirs = (sum(map(weigh, one), 0.0) for one in (words, other))
    whole = len(pairs) == follows + 1 == len(words) == len(other)  # then no order is lost
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
    """An alignment of the words so far, by what it is judged by, best first."""

    missing: int = 0
    chunks: int = 0
    apart: int = 0
    used: int = 0
    pairs: tuple[tuple[int, int], ...] = ()


def _align(words: Sequence[str], other: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Pairs of equal words, each word once: as many as can be, in few runs, near each other."""
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
