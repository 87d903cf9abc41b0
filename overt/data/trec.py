"""TREC question classification: 6 coarse or 50 fine classes.

Li and Roth, "Learning Question Classifiers", COLING 2002,
https://cogcomp.seas.upenn.edu/Data/QA/QC/. A line is `COARSE:fine question`, in ISO-8859-1.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.download import require_file
from overt.data.splits import Labels, Split, parse_labels, parse_split, split_indices
from overt.data.vocabulary import Tokenizer, Vocabulary, pad_texts, tokenize
from overt.errors import CorruptFileError
from overt.io import digest

FOLDER = "trec"
TRAIN_FILE, TEST_FILE = "train_5500.label", "TREC_10.label"
OFFICIAL = {TRAIN_FILE: 5_452, TEST_FILE: 500}
VALIDATION = 500
LINE = re.compile(r"([A-Z]+):([a-z]+) (.*\S)\s*")

FINE_OF = {
    "ABBR": "abb exp",
    "DESC": "def desc manner reason",
    "ENTY": "animal body color cremat currency dismed event food instru lang letter other plant "
    "product religion sport substance symbol techmeth termeq veh word",
    "HUM": "desc gr ind title",
    "LOC": "city country mount other state",
    "NUM": "code count date dist money ord other perc period speed temp volsize weight",
}
COARSE_NAMES = tuple(FINE_OF)
FINE_NAMES = tuple(f"{coarse}:{fine}" for coarse in FINE_OF for fine in FINE_OF[coarse].split())


def read_questions(path: Path, records: int) -> list[tuple[str, str]]:
    """Read the (fine label, question) of every line.

    Another number of lines, or a malformed line, raises `CorruptFileError`.
    """
    require_file(path)
    lines = path.read_bytes().decode("iso-8859-1").split("\n")
    questions = []
    for number, line in enumerate(lines[:-1], start=1):
        found = LINE.fullmatch(line)
        label = f"{found[1]}:{found[2]}" if found else ""
        if not found or label not in FINE_NAMES:
            raise CorruptFileError(
                f"{path}: line {number} is not `COARSE:fine question`: {line[:40]!r}."
            )
        questions.append((label, found[3]))
    if lines[-1] or len(questions) != records:
        raise CorruptFileError(
            f"{path} ends in line {len(questions) + 1} of {records}; download the file again."
        )
    return questions


class Trec:
    """Questions and their classes: 4,952 / 500 / 500 in train / val / test.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test` or `train+val`.
        labels: `coarse` or `fine`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        minimum: Count from which a word is in the vocabulary.
        records: Number of lines of each file; None expects the official number.
        validation: Number of training items held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> lines = "HUM:ind Who is the king ?\\nNUM:date When ?\\nLOC:city Which city ?\\n"
        >>> with TemporaryDirectory() as root:
        ...     write_text(Path(root, FOLDER, TRAIN_FILE), lines)
        ...     data = Trec(root, "train+val", records=3, validation=1)
        >>> data.batch([0]).text.texts, data.batch([0]).groups
        (('Who is the king ?',), ('HUM',))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        labels: str = Labels.COARSE,
        reader: Tokenizer | None = None,
        minimum: int = 1,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.kind = "trec6", parse_split(split), parse_labels(labels)
        self.classes = FINE_NAMES if self.kind is Labels.FINE else COARSE_NAMES
        self._path = root / FOLDER / (TEST_FILE if self.split is Split.TEST else TRAIN_FILE)
        self._validation = validation
        found = read_questions(self._path, records or OFFICIAL[self._path.name])
        self._rows = [int(row) for row in split_indices(self.split, len(found), validation)]
        self._questions = [found[row] for row in self._rows]
        if self.split is Split.TEST and reader is None:
            found = read_questions(root / FOLDER / TRAIN_FILE, records or OFFICIAL[TRAIN_FILE])
        self.reader = reader or _vocabulary(found, minimum, validation)
        self._read = [self.reader.read(text) for _, text in self._questions]

    def __len__(self) -> int:
        return len(self._questions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices`; `groups` are the coarse classes."""
        places = check_indices(self, indices)
        part = "test" if self.split is Split.TEST else "train"
        chosen = [self._questions[place] for place in places]
        texts = [text for _, text in chosen]
        read = [self._read[place] for place in places]
        tokens, mask, text = pad_texts(texts, read, self.reader.padding)
        return Batch(
            ids=tuple(f"trec6/{part}/{self._rows[place]:04d}" for place in places),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([self._class(label) for label, _ in chosen], dtype=torch.long),
            groups=tuple(label.partition(":")[0] for label, _ in chosen),
        )

    def digest(self) -> str:
        """Return a hash of the file, the split and the labels; the tokenizer is not part of it."""
        about = f"trec6 {self.split} {self.kind} {self._validation} {digest(self._path)}"
        return hashlib.sha256(about.encode()).hexdigest()

    def _class(self, label: str) -> int:
        return self.classes.index(label if self.kind is Labels.FINE else label.partition(":")[0])


def _vocabulary(train: Sequence[tuple[str, str]], minimum: int, validation: int) -> Vocabulary:
    """Build the vocabulary from the training part without the held-out records."""
    rows = split_indices(Split.TRAIN, len(train), validation)
    words = ([word for word, _, _ in tokenize(train[row][1])] for row in rows)
    return Vocabulary.build(words, minimum)
