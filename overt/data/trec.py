"""TREC questions and what they ask for: 6 coarse or 50 fine classes.

Li and Roth, "Learning Question Classifiers", COLING 2002,
https://cogcomp.seas.upenn.edu/Data/QA/QC/. A line is `COARSE:fine question`, in ISO-8859-1.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from overt.data.batch import Batch
from overt.data.splits import Labels, Split, labels_of, rows_of, split_of
from overt.data.vocabulary import Reader, Vocabulary, pad, tokenize
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import TextGeometry

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
    """The (fine label, question) of every line.

    A file with another number of lines, or a line in another form, is `Damaged`; the sentence
    names the file and the line.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    lines = path.read_bytes().decode("iso-8859-1").split("\n")
    questions = []
    for number, line in enumerate(lines[:-1], start=1):
        found = LINE.fullmatch(line)
        label = f"{found[1]}:{found[2]}" if found else ""
        if not found or label not in FINE_NAMES:
            raise Damaged(f"{path}: line {number} is not `COARSE:fine question`: {line[:40]!r}.")
        questions.append((label, found[3]))
    if lines[-1] or len(questions) != records:
        raise Damaged(f"{path} ends in line {len(questions) + 1} of {records}; get the file again.")
    return questions


class Trec:
    """Questions and their classes: 4,952 / 500 / 500 in train / val / test.

    Without a reader the words of `train` are the vocabulary, whichever split is asked for.
    `records` says how many lines the files have, where they are not the official ones.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        labels: str = Labels.COARSE,
        reader: Reader | None = None,
        minimum: int = 1,
        records: int | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.kind = "trec6", split_of(split), labels_of(labels)
        self.classes = FINE_NAMES if self.kind is Labels.FINE else COARSE_NAMES
        self._path = root / FOLDER / (TEST_FILE if self.split is Split.TEST else TRAIN_FILE)
        self._validation = validation
        found = read_questions(self._path, records or OFFICIAL[self._path.name])
        self._rows = [int(row) for row in rows_of(self.split, len(found), validation)]
        self._questions = [found[row] for row in self._rows]
        if self.split is Split.TEST and reader is None:
            found = read_questions(root / FOLDER / TRAIN_FILE, records or OFFICIAL[TRAIN_FILE])
        self.reader = reader or _vocabulary(found, minimum, validation)
        self._read = [self.reader.read(text) for _, text in self._questions]

    def __len__(self) -> int:
        return len(self._questions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places of the split; `groups` are the coarse classes."""
        for place in indices:
            if not 0 <= place < len(self):
                raise BadInput(f"trec6 {self.split} has 0 to {len(self) - 1}, not {place}.")
        part = "test" if self.split is Split.TEST else "train"
        chosen = [self._questions[place] for place in indices]
        read = [self._read[place] for place in indices]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        return Batch(
            ids=tuple(f"trec6/{part}/{self._rows[place]:04d}" for place in indices),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(tuple(text for _, text in chosen), spans),
            labels=torch.tensor([self._class(label) for label, _ in chosen], dtype=torch.long),
            groups=tuple(label.partition(":")[0] for label, _ in chosen),
        )

    def digest(self) -> str:
        """A hash of the file, the split and the labels chosen; the reader is not part of it."""
        about = f"trec6 {self.split} {self.kind} {self._validation} {digest(self._path)}"
        return hashlib.sha256(about.encode()).hexdigest()

    def _class(self, label: str) -> int:
        return self.classes.index(label if self.kind is Labels.FINE else label.partition(":")[0])


def _vocabulary(train: Sequence[tuple[str, str]], minimum: int, validation: int) -> Vocabulary:
    """The words of the training part without what is held out."""
    rows = rows_of(Split.TRAIN, len(train), validation)
    words = ([word for word, _, _ in tokenize(train[row][1])] for row in rows)
    return Vocabulary.build(words, minimum)
