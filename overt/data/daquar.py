"""DAQUAR: human questions about photos of rooms, with one or more answers.

Malinowski and Fritz, "A Multi-World Approach to Question Answering about Real-World Scenes based on
Uncertain Input", NeurIPS 2014, https://arxiv.org/abs/1410.0210. `daquar/` has `data.csv`
(question, answer, image_id; several answers separated by commas), the official lists of photos
`train_images_list.txt` and `test_images_list.txt`, and `images/imageN.jpg`. Without the table, the
two files of the first release are read, `qa.894.raw.train.txt` and `qa.894.raw.test.txt`: lines
`what is on the desk in the image3 ?` and lines of answers in turn.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import digest_files
from overt.data.photo_dataset import check_count, iterate_csv, read_lines
from overt.data.splits import Split, parse_split
from overt.data.vocabulary import Tokenizer
from overt.data.vqa_dataset import (
    PhotoInput,
    PhotoQuestions,
    build_vocabulary,
    hold_out_photos,
    most_common_answers,
    one_hot,
)
from overt.errors import CorruptFileError, UserError

FOLDER = "daquar"
TABLE, TRAIN_LIST, TEST_LIST = "data.csv", "train_images_list.txt", "test_images_list.txt"
RAW_TRAIN, RAW_TEST = "qa.894.raw.train.txt", "qa.894.raw.test.txt"
RAW = re.compile(r"(.+?)\s+(?:in|on)?\s*(?:the\s+)?(image\d+)\s*\?")
COLUMNS = ("question", "answer", "image_id")
QUESTIONS = 12_468
VALIDATION = 80  # photos, with all of their questions
COLOUR = re.compile(r"(what|which) (is the |are the )?colou?rs?\b")

Answers = tuple[str, ...]
AnswerFilter = Callable[[Answers], bool]


@dataclass(frozen=True)
class DaquarQuestion:
    """A question, its answers in the given order, and the name of its photo."""

    question: str
    answers: Answers
    photo: str


def single_answer(answers: Answers) -> bool:
    """Keep the questions with one answer: 11,225 of 12,468, as most papers do."""
    return len(answers) == 1


def any_answers(answers: Answers) -> bool:
    """Keep all questions; a list of several answers is then a class of its own."""
    return True


def question_kind(question: str) -> str:
    """Return what a question asks for, by its first words: a number, a colour, or an object."""
    if question.startswith("how many"):
        return "number"
    return "colour" if COLOUR.match(question) else "object"


class Daquar(PhotoQuestions):
    """Questions about photos of rooms; `val` holds out whole photos of the official training part.

    Classes are the answers of `train`. An answer that is not a class has the label -1, which losses
    must ignore, and an `answers` row of zeros, so that `soft_accuracy` counts it as wrong.
    `references` are the true answers in words, for WUPS.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test` or `train+val`.
        keep: Which questions to keep: `single_answer` or `any_answers`.
        limit: Number of classes, the most common answers first; None takes all.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos, or a cache of their features.
        questions: Expected number of questions; None accepts any number.
        validation: Number of training photos held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_text
        >>> lines = "what is on the desk in the image1 ?\\nlamp"
        >>> with TemporaryDirectory() as root:
        ...     for name in (RAW_TRAIN, RAW_TEST):
        ...         write_text(Path(root, FOLDER, name), lines)
        ...     Path(root, FOLDER, "images").mkdir()
        ...     Image.new("RGB", (8, 6)).save(Path(root, FOLDER, "images", "image1.png"))
        ...     batch = Daquar(root, "test", questions=None, validation=0).batch([0])
        >>> batch.text.texts, batch.references
        (('what is on the desk',), (('lamp',),))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        keep: AnswerFilter = single_answer,
        limit: int | None = None,
        reader: Tokenizer | None = None,
        photo_input: PhotoInput | None = None,
        questions: int | None = QUESTIONS,
        validation: int = VALIDATION,
    ) -> None:
        self.split = parse_split(split)
        self._folder, self._validation, self._keep = Path(root) / FOLDER, validation, keep
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
        self.classes = most_common_answers((", ".join(line.answers) for line in learnt), limit)
        self._number = {answer: number for number, answer in enumerate(self.classes)}
        photos = list(dict.fromkeys(line.photo for line in self._lines))
        place = {photo: number for number, photo in enumerate(photos)}
        super().__init__(
            "daquar",
            self.split,
            self._folder / "images",
            _photo_files(self._folder / "images", photos),
            np.array([place[line.photo] for line in self._lines], dtype=np.int64),
            [line.question for line in self._lines],
            [f"daquar/{row:05d}" for row in chosen],
            reader or build_vocabulary(line.question for line in learnt),
            photo_input,
        )
        self._digest: str | None = None

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class of each answer, -1 for an answer that is not in `train`."""
        chosen = [self._lines[place].answers for place in self.places(indices)]
        return torch.tensor([self._number.get(", ".join(one), -1) for one in chosen]).long()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices`; each photo once."""
        found = super().batch(indices)
        chosen = [self._lines[place] for place in self.places(indices)]
        labels = self.labels(indices)
        return replace(
            found,
            labels=labels,
            answers=one_hot(labels, len(self.classes)),
            references=tuple(line.answers for line in chosen),
            groups=tuple(question_kind(line.question) for line in chosen),
        )

    def digest(self) -> str:
        """Return a hash of the table, the lists, the photos of the split, and the settings."""
        if self._digest is None:
            about = f"daquar {self.split} {self._validation} {len(self)} {len(self.classes)}"
            paths = [self._folder / name for name in self._sources]
            self._digest = digest_files(about, paths, super().digest().encode())
        return self._digest

    def _rows(
        self, lines: Sequence[DaquarQuestion], train: list[int], test: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the questions of the split, and those that define classes and vocabulary."""
        numbers: dict[str, int] = {}
        photo_of = np.array([numbers.setdefault(lines[row].photo, len(numbers)) for row in train])
        kept = [row for row in train if self._keep(lines[row].answers)]
        learnt = {
            train[place] for place in hold_out_photos(Split.TRAIN, photo_of, self._validation)
        }
        training = [row for row in kept if row in learnt]
        if self.split is Split.TEST:
            chosen = [row for row in test if self._keep(lines[row].answers)]
        elif self.split is Split.VAL:
            chosen = [row for row in kept if row not in learnt]
        else:
            chosen = training if self.split is Split.TRAIN else kept
        if not chosen or not training:
            raise UserError(
                f"daquar {self.split} has no question that keep={self._keep.__name__} accepts."
            )
        return chosen, training


def _photo_files(folder: Path, photos: Sequence[str]) -> list[str]:
    """Return the file names of the photos; the first release has PNGs."""
    ending = "png" if (folder / f"{photos[0]}.png").is_file() else "jpg"
    return [f"{photo}.{ending}" for photo in photos]


def read_table(path: Path, questions: int | None = QUESTIONS) -> list[DaquarQuestion]:
    """Read `data.csv`; raise `CorruptFileError` with the line number if a line is malformed."""
    found = [_line(path, number, row) for number, row in iterate_csv(path, COLUMNS)]
    check_count(path, len(found), questions, "questions")
    return found


def read_raw(
    folder: Path, questions: int | None = QUESTIONS
) -> tuple[list[DaquarQuestion], list[int], list[int]]:
    """Read the first release: questions, and the rows of the training and test parts."""
    lines: list[DaquarQuestion] = []
    parts: list[list[int]] = []
    for name in (RAW_TRAIN, RAW_TEST):
        found = read_lines(folder / name)
        parts.append(list(range(len(lines), len(lines) + len(found) // 2)))
        for number in range(0, len(found), 2):
            asked = RAW.fullmatch(found[number])
            if asked is None or number + 1 == len(found):
                raise CorruptFileError(
                    f"{folder / name}: line {number + 1} is not a question about an image with an "
                    f"answer below it: {found[number]!r:.40}."
                )
            row = (asked[1], found[number + 1], asked[2])
            lines.append(_line(folder / name, number + 2, row))
    check_count(folder, len(lines), questions, "questions")
    return lines, parts[0], parts[1]


def read_split(folder: Path, lines: Sequence[DaquarQuestion]) -> tuple[list[int], list[int]]:
    """Return the rows of the training and test parts; every photo belongs to exactly one."""
    train, test = (set(read_lines(folder / name)) for name in (TRAIN_LIST, TEST_LIST))
    both = sorted(train & test)
    if both:
        raise CorruptFileError(f"{folder}: {both[0]} is in {TRAIN_LIST} and in {TEST_LIST}.")
    for row, line in enumerate(lines):
        if line.photo not in train and line.photo not in test:
            raise CorruptFileError(
                f"{folder / TABLE}: {line.photo} of question {row} is in neither list."
            )
    rows = range(len(lines))
    return (
        [row for row in rows if lines[row].photo in train],
        [row for row in rows if lines[row].photo in test],
    )


def _line(path: Path, number: int, row: Sequence[str]) -> DaquarQuestion:
    answers = tuple(answer.strip() for answer in row[1].split(",")) if len(row) == 3 else ()
    if not answers or not all(answers) or not row[0].strip() or not row[2].strip():
        raise CorruptFileError(
            f"{path}: line {number} is not question, answer and image_id: {row!r:.60}."
        )
    return DaquarQuestion(row[0].strip(), answers, row[2].strip())
