"""Vocabulary and document frequencies of a caption corpus, computed once and stored.

Words are those of `tokenize_caption`, as captions are scored. A folder contains its manifest and
`about.json` with its source files. A folder of frequencies also contains the vocabulary whose ids
it counts, so that the two cannot be mixed up.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt.data.caption_files import read_captions
from overt.data.vocabulary import END, FILE, UNKNOWN, BpeVocabulary, Vocabulary, load_vocabulary
from overt.errors import UserError
from overt.io import atomic_folder, digest, verify, write_json
from overt.metrics.captions.cider import DocumentFrequencies, document_frequencies
from overt.metrics.captions.tokenizer import tokenize_caption

ABOUT, COUNTS = "about.json", "frequencies.npz"
AnyVocabulary = Vocabulary | BpeVocabulary


@dataclass(frozen=True)
class CaptionCorpus:
    """Tokenized captions, grouped by image, and their source files.

    Args:
        images: The words of each caption of each image.
        sources: File, checksum, split and counts of each source.

    Example:
        >>> CaptionCorpus(images=((("a", "cat"), ("a", "dog")),), sources=()).texts
        [('a', 'cat'), ('a', 'dog')]
    """

    images: tuple[tuple[tuple[str, ...], ...], ...]
    sources: tuple[dict[str, Any], ...]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The words of every caption."""
        return [text for texts in self.images for text in texts]


def read_corpus(
    paths: Sequence[Path], split: str | None = None, only: Collection[str] | None = None
) -> CaptionCorpus:
    """Read captions from files in any format of `read_captions`.

    Args:
        paths: The files.
        split: The split to read, where files have several.
        only: Names of images to read, such as those of training.

    Returns:
        The corpus.

    Raises:
        UserError: There are no files.

    Example:
        >>> read_corpus([])
        Traceback (most recent call last):
        overt.errors.UserError: Give at least one file of captions.
    """
    if not paths:
        raise UserError("Give at least one file of captions.")
    images: list[tuple[tuple[str, ...], ...]] = []
    sources = []
    for path in paths:
        found = read_captions(path, split, only)
        images += [tuple(tuple(tokenize_caption(text)) for text in texts) for texts in found]
        captions = sum(map(len, found))
        about = {"file": path.name, "sha256": digest(path), "split": split}
        sources.append({**about, "images": len(found), "captions": captions})
    return CaptionCorpus(tuple(images), tuple(sources))


def build_vocabulary(read: CaptionCorpus, minimum: int = 5, limit: int | None = None) -> Vocabulary:
    """Build a vocabulary of the words that occur at least `minimum` times, at most `limit`.

    Args:
        read: The captions.
        minimum: How often a word must occur.
        limit: The largest number of words; None has no limit.

    Returns:
        The vocabulary.

    Example:
        >>> read = CaptionCorpus(images=((("a", "cat"), ("a", "dog")),), sources=())
        >>> build_vocabulary(read, minimum=2).encode(["a", "cat"]) == [5, UNKNOWN]
        True
    """
    return Vocabulary.build(read.texts, minimum, limit)


def build_subwords(read: CaptionCorpus, limit: int = 4_000) -> BpeVocabulary:
    """Build a vocabulary of up to `limit` sub-words.

    Args:
        read: The captions.
        limit: The largest number of sub-words.

    Returns:
        The vocabulary.

    Example:
        >>> read = CaptionCorpus(images=((("a", "cat"), ("a", "dog")),), sources=())
        >>> len(build_subwords(read, limit=300).encode(["a", "cat"])) >= 2
        True
    """
    return BpeVocabulary.build(read.texts, limit)


def vocabulary_coverage(read: CaptionCorpus, known: AnyVocabulary) -> float:
    """Compute the share of all words of the captions that are in the vocabulary."""
    counted = [known.encode(text) for text in read.texts]
    total = sum(map(len, counted))
    return 1 - sum(ids.count(UNKNOWN) for ids in counted) / max(1, total)


def caption_frequencies(
    read: CaptionCorpus, known: AnyVocabulary, ending: Sequence[int] = (END,)
) -> DocumentFrequencies:
    """Count in how many images each n-gram occurs, in ids of a vocabulary: the weights of a reward.

    Args:
        read: The corpus.
        known: The vocabulary.
        ending: Tokens that end every caption. With the end as a token, as in public training code,
            incomplete captions ("a dog with a") get a lower reward; evaluation has no end token.

    Returns:
        The frequencies. All unknown words are the same word. With sub-words, n-grams are of
        sub-words: not the CIDEr-D of published tables.

    Example:
        >>> read = CaptionCorpus(images=((("a", "cat"),), (("a", "dog"),)), sources=())
        >>> caption_frequencies(read, build_vocabulary(read, minimum=1)).documents
        2
    """
    return document_frequencies(
        [[[*known.encode(text), *ending] for text in texts] for texts in read.images]
    )


def write_vocabulary(folder: Path, known: AnyVocabulary, read: CaptionCorpus) -> None:
    """Write a vocabulary to a folder; `load_vocabulary(folder)` reads it.

    Args:
        folder: A new folder.
        known: The vocabulary.
        read: The captions it was built from, whose sources are recorded.

    Example:
        >>> import tempfile
        >>> read = CaptionCorpus(images=((("a", "cat"),), (("a", "dog"),)), sources=())
        >>> known = build_vocabulary(read, minimum=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_vocabulary(Path(folder) / "words", known, read)
        ...     load_vocabulary(Path(folder) / "words").encode(["cat"]) == known.encode(["cat"])
        True
    """
    with atomic_folder(_check_free(folder)) as inner:
        known.save(inner / FILE)
        write_json(inner / ABOUT, _about("vocabulary", known, read))


def write_frequencies(
    folder: Path, counted: DocumentFrequencies, known: AnyVocabulary, read: CaptionCorpus
) -> None:
    """Write frequencies and their vocabulary to a folder.

    Args:
        folder: A new folder.
        counted: The frequencies.
        known: The vocabulary of their ids.
        read: The captions they were counted on, whose sources are recorded.

    Example:
        >>> import tempfile
        >>> read = CaptionCorpus(images=((("a", "cat"),), (("a", "dog"),)), sources=())
        >>> known = build_vocabulary(read, minimum=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     counted = caption_frequencies(read, known)
        ...     write_frequencies(Path(folder) / "counts", counted, known, read)
        ...     load_frequencies(Path(folder) / "counts", known).documents
        2
    """
    with atomic_folder(_check_free(folder)) as inner:
        known.save(inner / FILE)
        counted.save(inner / COUNTS)
        images = {"images": counted.documents}
        write_json(inner / ABOUT, {**_about("document frequencies", known, read), **images})


def load_frequencies(folder: Path, known: AnyVocabulary) -> DocumentFrequencies:
    """Load what `write_frequencies` wrote, and check its vocabulary.

    Args:
        folder: The folder.
        known: The vocabulary in use; frequencies of other ids would be meaningless.

    Returns:
        The frequencies.

    Raises:
        UserError: The folder has no frequencies, or they are of another vocabulary.

    Example:
        >>> read = CaptionCorpus(images=((("a", "cat"),), (("a", "dog"),)), sources=())
        >>> load_frequencies(Path("no/such/folder"), build_vocabulary(read, minimum=1))
        Traceback (most recent call last):
        overt.errors.UserError: no/such/folder is not a folder of frequencies: ...
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder of frequencies: make one with `overt data frequencies`."
        )
    verify(folder)
    if not (folder / COUNTS).is_file():
        raise UserError(f"{folder} holds no frequencies: make them with `overt data frequencies`.")
    if load_vocabulary(folder / FILE) != known:
        raise UserError(
            f"{folder} has the frequencies of another vocabulary: count again with this one."
        )
    return DocumentFrequencies.load(folder / COUNTS)


def _check_free(folder: Path) -> Path:
    """Return the folder if it is empty or was written by this module; raise otherwise."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ABOUT).is_file():
        raise UserError(f"{folder} holds other files: choose a new folder.")
    return folder


def _about(what: str, known: AnyVocabulary, read: CaptionCorpus) -> dict[str, Any]:
    return {
        "what": what,
        "kind": "sub-words" if isinstance(known, BpeVocabulary) else "words",
        "size": known.size,
        "coverage": vocabulary_coverage(read, known),
        "sources": list(read.sources),
    }
