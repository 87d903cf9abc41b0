"""DAQUAR: questions that people asked about photos of rooms, with answers of one word or several.

Malinowski and Fritz, "A Multi-World Approach to Question Answering about Real-World Scenes based on
Uncertain Input", NeurIPS 2014, https://arxiv.org/abs/1410.0210. In `daquar/` lie `data.csv`
(question, answer, image_id; several answers with commas between), the official lists of photos
`train_images_list.txt` and `test_images_list.txt`, and `images/imageN.jpg`. Where there is no
table, the two files of the first release are read, `qa.894.raw.train.txt` and
`qa.894.raw.test.txt`: a line `what is on the desk in the image3 ?` and a line of answers in turn.
"""

import csv
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from overt.data.asked import Asked, Look, gallery, hold_out, most_common, one_hot, words_of
from overt.data.batch import Batch
from overt.data.photos import PhotoSet, read_lines
from overt.data.splits import Split, split_of
from overt.data.vocabulary import Reader
from overt.errors import BadInput, Damaged
from overt.files import digest

FOLDER = "daquar"
TABLE, TRAIN_LIST, TEST_LIST = "data.csv", "train_images_list.txt", "test_images_list.txt"
RAW_TRAIN, RAW_TEST = "qa.894.raw.train.txt", "qa.894.raw.test.txt"
RAW = re.compile(r"(.+?)\s+(?:in|on)?\s*(?:the\s+)?(image\d+)\s*\?")
COLUMNS = ("question", "answer", "image_id")
QUESTIONS = 12_468
VALIDATION = 80  # photos, with all of their questions
COLOUR = re.compile(r"(what|which) (is the |are the )?colou?rs?\b")

Answers = tuple[str, ...]
Keep = Callable[[Answers], bool]


@dataclass(frozen=True)
class Line:
    """One question: its words, its answers in the order given, and the name of its photo."""

    question: str
    answers: Answers
    photo: str


def one_word(answers: Answers) -> bool:
    """Keep the questions with one answer: 11,225 of 12,468, as most papers do."""
    return len(answers) == 1


def any_number(answers: Answers) -> bool:
    """Keep all questions; a list of several answers is then a class of its own."""
    return True


def kind(question: str) -> str:
    """What is asked for, by the first words: a number, a colour, or an object."""
    if question.startswith("how many"):
        return "number"
    return "colour" if COLOUR.match(question) else "object"


class Daquar:
    """Questions about photos of rooms; `val` holds out whole photos of the official training part.

    Classes are the answers to the questions of `train` (all, or the `limit` most common). An answer
    that is no class has the label -1, which no loss should see, and `answers` without a score, so
    that `soft_accuracy` counts it as wrong. `references` are the true answers in words, for WUPS.
    `keep` says which questions count. `questions` is how many the file has, where it is not the
    official one.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        keep: Keep = one_word,
        limit: int | None = None,
        reader: Reader | None = None,
        look: Look | None = None,
        questions: int | None = QUESTIONS,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split = "daquar", split_of(split)
        self._folder, self._validation, self._keep = root / FOLDER, validation, keep
        if (self._folder / RAW_TRAIN).is_file() and not (self._folder / TABLE).is_file():
            self._sources: tuple[str, ...] = (RAW_TRAIN, RAW_TEST)
            lines, train, test = read_raw(self._folder, questions)
        else:
            self._sources = (TABLE, TRAIN_LIST, TEST_LIST)
            lines = read_table(self._folder / TABLE, questions)
            train, test = read_split(self._folder, lines)
        chosen, training = self._rows(lines, train, test)
        self._lines = [lines[row] for row in chosen]
        learnt = [lines[row] for row in training]
        self.classes = most_common((", ".join(line.answers) for line in learnt), limit)
        self._number = {answer: number for number, answer in enumerate(self.classes)}
        self.reader = reader or words_of(line.question for line in learnt)
        self._photos = list(dict.fromkeys(line.photo for line in self._lines))
        place = {photo: number for number, photo in enumerate(self._photos)}
        self._asked = Asked(
            self.name,
            self.split,
            self._folder / "images",
            self._files(),
            np.array([place[line.photo] for line in self._lines], dtype=np.int64),
            [line.question for line in self._lines],
            [f"daquar/{row:05d}" for row in chosen],
            self.reader,
            look or Look(),
        )
        self.files = self._asked.files
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._asked)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class of each answer, -1 for an answer that `train` does not have."""
        chosen = [self._lines[place].answers for place in self._asked.places(indices)]
        return torch.tensor([self._number.get(", ".join(one), -1) for one in chosen]).long()

    def photo_ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of the photos, as in a cache of features over `photos`."""
        return self._asked.photo_ids(indices)

    def photos(self, look: Look | None = None) -> PhotoSet:
        """The photos of the split by themselves, each once, to compute features of."""
        return gallery(self.name, self.split, self._folder / "images", self._files(), look)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places, each photo once."""
        found = self._asked.batch(indices)
        chosen = [self._lines[place] for place in self._asked.places(indices)]
        labels = self.labels(indices)
        return replace(
            found,
            labels=labels,
            answers=one_hot(labels, len(self.classes)),
            references=tuple(line.answers for line in chosen),
            groups=tuple(kind(line.question) for line in chosen),
        )

    def digest(self) -> str:
        """A hash of the table, the lists, the photos of the split, and what was chosen."""
        if self._digest is None:
            about = f"daquar {self.split} {self._validation} {len(self)} {len(self.classes)}"
            found = hashlib.sha256(about.encode())
            for name in self._sources:
                found.update(digest(self._folder / name).encode())
            found.update(self._asked.digest_photos().encode())
            self._digest = found.hexdigest()
        return self._digest

    def _files(self) -> list[str]:
        """The names of the photos; the first release has PNGs."""
        first = self._folder / "images" / f"{self._photos[0]}.png"
        ending = "png" if first.is_file() else "jpg"
        return [f"{photo}.{ending}" for photo in self._photos]

    def _rows(
        self, lines: Sequence[Line], train: list[int], test: list[int]
    ) -> tuple[list[int], list[int]]:
        """The questions of the split, and those that classes and words are learnt from."""
        numbers: dict[str, int] = {}
        photo_of = np.array([numbers.setdefault(lines[row].photo, len(numbers)) for row in train])
        kept = [row for row in train if self._keep(lines[row].answers)]
        learnt = {train[place] for place in hold_out(Split.TRAIN, photo_of, self._validation)}
        training = [row for row in kept if row in learnt]
        if self.split is Split.TEST:
            chosen = [row for row in test if self._keep(lines[row].answers)]
        elif self.split is Split.VAL:
            chosen = [row for row in kept if row not in learnt]
        else:
            chosen = training if self.split is Split.TRAIN else kept
        if not chosen or not training:
            raise BadInput(f"daquar {self.split} has no question of the kind that is kept.")
        return chosen, training


def read_table(path: Path, questions: int | None = QUESTIONS) -> list[Line]:
    """The lines of `data.csv`; one in another form is `Damaged` and named by its number."""
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.reader(file, strict=True)
            if tuple(next(table, ())) != COLUMNS:
                raise Damaged(f"{path} does not start with {','.join(COLUMNS)}; get it again.")
            found = [_line(path, table.line_num, row) for row in table]
    except (csv.Error, UnicodeDecodeError) as problem:
        raise Damaged(f"{path} is not a table of text: {problem}; get it again.") from problem
    if questions is not None and len(found) != questions:
        raise Damaged(f"{path} has {len(found)} questions, not {questions}; get it again.")
    return found


def read_raw(
    folder: Path, questions: int | None = QUESTIONS
) -> tuple[list[Line], list[int], list[int]]:
    """The lines of the first release, and the rows of the training and of the test part."""
    lines: list[Line] = []
    parts: list[list[int]] = []
    for name in (RAW_TRAIN, RAW_TEST):
        found = read_lines(folder / name)
        parts.append(list(range(len(lines), len(lines) + len(found) // 2)))
        for number in range(0, len(found), 2):
            asked = RAW.fullmatch(found[number])
            if asked is None or number + 1 == len(found):
                raise Damaged(
                    f"{folder / name}: line {number + 1} is not a question about an image with an "
                    f"answer below it: {found[number]!r:.40}."
                )
            row = (asked[1], found[number + 1], asked[2])
            lines.append(_line(folder / name, number + 2, row))
    if questions is not None and len(lines) != questions:
        raise Damaged(f"{folder} has {len(lines)} questions, not {questions}; get it again.")
    return lines, parts[0], parts[1]


def read_split(folder: Path, lines: Sequence[Line]) -> tuple[list[int], list[int]]:
    """The rows of the official training and test parts; every photo belongs to exactly one."""
    train, test = (set(read_lines(folder / name)) for name in (TRAIN_LIST, TEST_LIST))
    both = sorted(train & test)
    if both:
        raise Damaged(f"{folder}: {both[0]} is in {TRAIN_LIST} and in {TEST_LIST}.")
    for row, line in enumerate(lines):
        if line.photo not in train and line.photo not in test:
            raise Damaged(f"{folder / TABLE}: {line.photo} of question {row} is in neither list.")
    rows = range(len(lines))
    return (
        [row for row in rows if lines[row].photo in train],
        [row for row in rows if lines[row].photo in test],
    )


def _line(path: Path, number: int, row: Sequence[str]) -> Line:
    answers = tuple(answer.strip() for answer in row[1].split(",")) if len(row) == 3 else ()
    if not answers or not all(answers) or not row[0].strip() or not row[2].strip():
        raise Damaged(f"{path}: line {number} is not question, answer and image_id: {row!r:.60}.")
    return Line(row[0].strip(), answers, row[2].strip())
