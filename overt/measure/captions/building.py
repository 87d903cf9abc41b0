"""The words a captioner knows, and how rare what it says is: built once from captions, and kept.

Everything is in words of `caption_words`, as captions are scored. A folder that is written here
holds its manifest and `about.json`, which says from which files it was made; one of frequencies
also holds the vocabulary whose ids they count, so that the two cannot be mixed up.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt.data.sentences import read_captions
from overt.data.vocabulary import END, FILE, UNKNOWN, SubWords, Vocabulary, load_words
from overt.errors import BadInput
from overt.files import digest, verify, write_json, writing
from overt.measure.captions.cider import Frequencies, document_frequencies
from overt.measure.captions.tokens import caption_words

ABOUT, COUNTS = "about.json", "frequencies.npz"
Known = Vocabulary | SubWords


@dataclass(frozen=True)
class Corpus:
    """Captions as words, those of one image together, and where they were read."""

    images: tuple[tuple[tuple[str, ...], ...], ...]
    sources: tuple[dict[str, Any], ...]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The words of every caption."""
        return [text for texts in self.images for text in texts]


def corpus(
    paths: Sequence[Path], split: str | None = None, only: Collection[str] | None = None
) -> Corpus:
    """The captions of files in any of the formats of `read_captions`, file after file.

    `only` are names of images: those of training, where a file has others too.
    """
    if not paths:
        raise BadInput("There is no file of captions to read.")
    images: list[tuple[tuple[str, ...], ...]] = []
    sources = []
    for path in paths:
        found = read_captions(path, split, only)
        images += [tuple(tuple(caption_words(text)) for text in texts) for texts in found]
        captions = sum(map(len, found))
        about = {"file": path.name, "sha256": digest(path), "split": split}
        sources.append({**about, "images": len(found), "captions": captions})
    return Corpus(tuple(images), tuple(sources))


def words_of_captions(read: Corpus, minimum: int = 5, limit: int | None = None) -> Vocabulary:
    """The words that captions have at least `minimum` times, at most `limit` of them."""
    return Vocabulary.build(read.texts, minimum, limit)


def pieces_of_captions(read: Corpus, limit: int = 4_000) -> SubWords:
    """Up to `limit` pieces of the words of captions."""
    return SubWords.build(read.texts, limit)


def coverage(read: Corpus, known: Known) -> float:
    """The share of all words of the captions that no unknown stands for."""
    counted = [known.encode(text) for text in read.texts]
    total = sum(map(len, counted))
    return 1 - sum(ids.count(UNKNOWN) for ids in counted) / max(1, total)


def frequencies(read: Corpus, known: Known, ending: Sequence[int] = (END,)) -> Frequencies:
    """In how many images each n-gram is said, in ids of `known`: what a reward is weighted by.

    `ending` closes every caption. With the end as a word, as in public training code, captions that
    break off ("a dog with a") do not pay; evaluation knows no end. What is unknown is one and the
    same word. In sub-words n-grams are of pieces: no CIDEr-D of words that tables print.
    """
    return document_frequencies(
        [[[*known.encode(text), *ending] for text in texts] for texts in read.images]
    )


def write_vocabulary(folder: Path, known: Known, read: Corpus) -> None:
    """Keep a vocabulary in a folder; `load_words(folder)` reads it."""
    with writing(_free(folder)) as inner:
        known.save(inner / FILE)
        write_json(inner / ABOUT, _about("vocabulary", known, read))


def write_frequencies(folder: Path, counted: Frequencies, known: Known, read: Corpus) -> None:
    """Keep frequencies, and the vocabulary they are counted in, in a folder."""
    with writing(_free(folder)) as inner:
        known.save(inner / FILE)
        counted.save(inner / COUNTS)
        images = {"images": counted.documents}
        write_json(inner / ABOUT, {**_about("document frequencies", known, read), **images})


def load_frequencies(folder: Path, known: Known) -> Frequencies:
    """What `write_frequencies` wrote, checked; ids of another vocabulary than `known` are refused.

    Weighted by the counts of other words, a reward would be a number about nothing.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder of frequencies; `overt data frequencies` makes one.")
    verify(folder)
    if not (folder / COUNTS).is_file():
        raise BadInput(f"{folder} holds no frequencies; `overt data frequencies` makes them.")
    if load_words(folder / FILE) != known:
        raise BadInput(
            f"{folder} counts the ids of another vocabulary; count again with the one in use."
        )
    return Frequencies.load(folder / COUNTS)


def _free(folder: Path) -> Path:
    """The folder, if nothing lies there but what was written here before."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ABOUT).is_file():
        raise BadInput(f"{folder} holds other files; choose a folder that is not there yet.")
    return folder


def _about(what: str, known: Known, read: Corpus) -> dict[str, Any]:
    return {
        "what": what,
        "kind": "sub-words" if isinstance(known, SubWords) else "words",
        "size": known.size,
        "coverage": coverage(read, known),
        "sources": list(read.sources),
    }
