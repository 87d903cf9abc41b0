"""WordNet nouns and their Wu-Palmer similarity.

Fellbaum (ed.), "WordNet: An Electronic Lexical Database", 1998, https://wordnet.princeton.edu; Wu
and Palmer, "Verb Semantics and Lexical Selection", ACL 1994. The database files of version 3.0 are
in `wordnet/`: `index.noun` (senses of each word), `data.noun` (hypernyms of each sense) and
`noun.exc` (irregular plurals).
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from overt.data.download import require_file
from overt.errors import CorruptFileError

FOLDER = "wordnet"
FILES = ("index.noun", "data.noun", "noun.exc")
PLURALS = (
    ("s", ""),
    ("ses", "s"),
    ("ves", "f"),
    ("xes", "x"),
    ("zes", "z"),
    ("ches", "ch"),
    ("shes", "sh"),
    ("men", "man"),
    ("ies", "y"),
)


class WordNet:
    """The nouns of WordNet with `wup_similarity`, the similarity of Wu and Palmer.

    Values are those of NLTK's `wup_similarity`, the largest over all senses of both words, as in
    DAQUAR's own evaluation. They are at most 1, and for a few words with two hypernym paths even
    the word itself has less: compare words for equality first, as `metrics.wups` does.

    Args:
        root: Data folder, see `data_root`.

    Raises:
        UserError: The files are missing.
        CorruptFileError: A file is malformed; the message names file and line.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> animal = "00000001 03 n 01 animal 0 000 | a living being"
        >>> dog = "00000002 03 n 01 dog 0 001 @ 00000001 n 0000 | a pet"
        >>> with TemporaryDirectory() as root:
        ...     write_text(Path(root, FOLDER, "data.noun"), f"{animal}\\n{dog}\\n")
        ...     senses = "animal n 1 0 1 0 00000001\\ndog n 1 1 @ 1 0 00000002\\n"
        ...     write_text(Path(root, FOLDER, "index.noun"), senses)
        ...     write_text(Path(root, FOLDER, "noun.exc"), "men man\\n")
        ...     nouns = WordNet(root)
        >>> nouns.wup_similarity("dogs", "animal")
        0.6666666666666666
    """

    def __init__(self, root: Path | str) -> None:
        root = Path(root)
        folder = root / FOLDER
        self._senses = dict(_senses(folder / FILES[0]))
        self._kinds, self._lemmas = _kinds(folder / FILES[1])
        self._plurals = _exceptions(folder / FILES[2])
        for word, senses in self._senses.items():
            for sense in senses:
                if sense not in self._kinds:
                    raise CorruptFileError(f"{folder / FILES[1]} has no sense {sense} of {word!r}.")
        self._lengths = lru_cache(maxsize=None)(self._lengths_to)
        self._deepest = lru_cache(maxsize=None)(self._longest_to_root)
        self.wup_similarity = lru_cache(maxsize=1 << 16)(self._wup_similarity)

    def senses(self, word: str) -> tuple[int, ...]:
        """Return the senses of a noun, singular or plural; `_` or a space separates words of a
        name.

        A word that is not found is looked up as a plural.
        """
        form = word.lower().replace(" ", "_")
        if form in self._plurals:
            forms = [form, *self._plurals[form]]
        else:
            once = _singular([form])
            forms = [form, *once]
            while once and not any(one in self._senses for one in forms):
                once = forms = _singular(once)
        found = dict.fromkeys(forms)
        return tuple(sense for one in found for sense in self._senses.get(one, ()))

    def _wup_similarity(self, one: str, other: str) -> float:
        """Return the similarity of two nouns: 0 if one is unknown, 1 for one sense."""
        pairs = ((a, b) for a in self.senses(one) for b in self.senses(other))
        return max((self._similar(a, b) for a, b in pairs), default=0.0)

    def _similar(self, one: int, other: int) -> float:
        """Return the Wu-Palmer similarity of two senses, through their deepest common hypernym."""
        ours, theirs = self._lengths(one), self._lengths(other)
        common = ours.keys() & theirs.keys()
        if not common:
            return 0.0
        # deepest by the shortest path to the root; ties by name, as in NLTK
        deepest = max(self._shortest(sense) for sense in common)
        last = [sense for sense in common if self._shortest(sense) == deepest]
        shared = one if one in last else min(last, key=self._name)
        depth = self._deepest(shared) + 1
        steps = self._between(one, shared) + self._between(other, shared)
        return 2 * depth / (steps + 2 * depth)

    def _between(self, one: int, other: int) -> int:
        """Return the fewest steps from a sense to one of its hypernyms."""
        ours, theirs = self._lengths(one), self._lengths(other)
        return min(ours[sense] + theirs[sense] for sense in ours.keys() & theirs.keys())

    def _lengths_to(self, sense: int) -> dict[int, int]:
        """Return the fewest steps from a sense to each of its hypernyms, itself included."""
        found, edge, steps = {sense: 0}, [sense], 0
        while edge:
            steps += 1
            edge = [up for here in edge for up in self._kinds[here] if up not in found]
            found.update(dict.fromkeys(edge, steps))
        return found

    def _shortest(self, sense: int) -> int:
        lengths = self._lengths(sense)
        return min(steps for up, steps in lengths.items() if not self._kinds[up])

    def _longest_to_root(self, sense: int) -> int:
        return max((self._deepest(up) + 1 for up in self._kinds[sense]), default=0)

    def _name(self, sense: int) -> str:
        lemma = self._lemmas[sense]
        return f"{lemma}.n.{self._senses[lemma].index(sense) + 1:02d}"


def _singular(forms: list[str]) -> list[str]:
    return [
        form[: -len(ending)] + new
        for form in forms
        for ending, new in PLURALS
        if form.endswith(ending)
    ]


def _entries(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each line with its number, except the indented licence."""
    require_file(path)
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith("  "):
                    yield number, line.split()
    except UnicodeDecodeError as problem:
        raise CorruptFileError(
            f"{path} is not text ({problem.reason}); download it again."
        ) from problem


def _senses(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the senses of each word: `lemma n count pointers ... senses tagged offset ...`."""
    for number, parts in _entries(path):
        try:
            count, pointers = int(parts[2]), int(parts[3])
            senses = tuple(map(int, parts[6 + pointers :]))
            if parts[1] != "n" or count != len(senses) or not senses:
                raise ValueError("another number of senses")
        except (IndexError, ValueError) as problem:
            raise CorruptFileError(f"{path}: line {number} is not a noun: {problem}.") from problem
        yield parts[0], senses


def _kinds(path: Path) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Return the hypernyms and instance hypernyms of every sense, and its first word.

    A line is `offset file n words word id ... pointers symbol offset n ids ... | gloss`.
    """
    kinds: dict[int, tuple[int, ...]] = {}
    lemmas: dict[int, str] = {}
    for number, parts in _entries(path):
        try:
            sense, words = int(parts[0]), int(parts[3], 16)
            first = 5 + 2 * words
            pointers = [
                parts[at : at + 4] for at in range(first, first + 4 * int(parts[first - 1]), 4)
            ]
            kinds[sense] = tuple(int(p[1]) for p in pointers if p[0] in ("@", "@i"))
            lemmas[sense] = parts[4].lower()
        except (IndexError, ValueError) as problem:
            raise CorruptFileError(f"{path}: line {number} is not a sense: {problem}.") from problem
    for sense, above in kinds.items():
        for up in above:
            if up not in kinds:
                raise CorruptFileError(
                    f"{path}: sense {sense} has hypernym {up}, which does not exist."
                )
    _acyclic(path, kinds)
    return kinds, lemmas


def _acyclic(path: Path, kinds: dict[int, tuple[int, ...]]) -> None:
    """Raise `CorruptFileError` if a sense is its own hypernym: depth would be undefined."""
    below: dict[int, list[int]] = {}
    open_ways = {sense: len(above) for sense, above in kinds.items()}
    for sense, above in kinds.items():
        for up in above:
            below.setdefault(up, []).append(sense)
    ready = [sense for sense, ways in open_ways.items() if not ways]
    done = 0
    while ready:
        done += 1
        for down in below.get(ready.pop(), ()):
            open_ways[down] -= 1
            if not open_ways[down]:
                ready.append(down)
    if done != len(kinds):
        raise CorruptFileError(f"{path} has a sense that is its own hypernym; download it again.")


def _exceptions(path: Path) -> dict[str, list[str]]:
    """Return the irregular plurals: lines `plural singular ...`."""
    return {parts[0]: parts[1:] for _, parts in _entries(path) if parts}
