"""easy-VQA: simple questions about one coloured shape, 5,000 pictures and 48,248 questions.

https://github.com/vzhou842/easy-VQA. The Python package carries the data; a folder in the same
layout (`answers.txt`, `{train,test}/questions.json`, `{train,test}/images/N.png`) does as well.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from overt.data.batch import Batch
from overt.data.images import Photo, open_image
from overt.data.sets import easyvqa_folder
from overt.data.splits import Split, rows_of, split_of
from overt.data.vocabulary import Reader, Vocabulary, pad, tokenize
from overt.errors import BadInput, Damaged
from overt.files import digest, read_json
from overt.geometry import PixelGeometry, TextGeometry

VALIDATION = 400  # pictures, with all of their questions
SHAPES = ("circle", "rectangle", "triangle")

Question = tuple[str, str, int]


def read_questions(folder: Path, answers: Sequence[str]) -> list[Question]:
    """The (question, answer, picture) triples of `folder`/questions.json, checked one by one."""
    path = folder / "questions.json"
    found = read_json(path)
    if not isinstance(found, list) or not found:
        raise Damaged(f"{path} is not a list of questions.")
    pictures = {file.name for file in (folder / "images").glob("*.png")}
    for number, entry in enumerate(found):
        match entry:
            case [str(), str(answer), int(picture)]:
                if answer not in answers:
                    raise Damaged(f"{path}: question {number} has the unknown answer {answer!r}.")
                if f"{picture}.png" not in pictures:
                    missing = folder / "images" / f"{picture}.png"
                    raise Damaged(f"{missing} is missing; question {number} is about it.")
            case _:
                raise Damaged(f"{path}: question {number} is not [question, answer, picture].")
    return [(entry[0], entry[1], entry[2]) for entry in found]


def read_answers(folder: Path) -> tuple[str, ...]:
    """The possible answers, one a line, in the file's order."""
    path = folder / "answers.txt"
    if not path.is_file():
        raise Damaged(f"{path} is missing.")
    answers = tuple(path.read_text(encoding="utf-8").split())
    if not answers or len(set(answers)) != len(answers):
        raise Damaged(f"{path} is empty or names an answer twice.")
    return answers


class EasyVqa:
    """One item is one question; questions of one batch about one picture share it.

    `val` holds out whole pictures of the training part. Without a reader the words of `train` are
    the vocabulary, whichever split is asked for. `groups` is what is asked: yes or no, shape or
    colour.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        split: str = Split.TRAIN,
        reader: Reader | None = None,
        validation: int = VALIDATION,
    ) -> None:
        self.name, self.split = "easyvqa", split_of(split)
        self._validation = validation
        self._whole = easyvqa_folder(root)
        self._folder = self._whole / ("test" if self.split is Split.TEST else "train")
        self.classes = read_answers(self._whole)
        found = read_questions(self._folder, self.classes)
        self._rows = _rows(self.split, found, validation)
        self._questions = [found[row] for row in self._rows]
        self.reader = reader or self._vocabulary(found)
        self._read: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}
        self._pictures: dict[int, Photo] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places of the split, each picture once."""
        for place in indices:
            if not 0 <= place < len(self):
                raise BadInput(f"easyvqa {self.split} has 0 to {len(self) - 1}, not {place}.")
        chosen = [self._questions[place] for place in indices]
        numbers = list(dict.fromkeys(number for _, _, number in chosen))
        images = [torch.from_numpy(self._picture(number)) for number in numbers]
        read = [self._tokens(text) for text, _, _ in chosen]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        side = (images[0].shape[0], images[0].shape[1]) if images else (64, 64)
        stacked = torch.stack(images) if images else torch.empty(0, *side, 3, dtype=torch.uint8)
        return Batch(
            ids=tuple(f"easyvqa/{self._folder.name}/{self._rows[place]:05d}" for place in indices),
            images=stacked.permute(0, 3, 1, 2).contiguous(),
            image_of=torch.tensor([numbers.index(n) for _, _, n in chosen], dtype=torch.long),
            geometry=PixelGeometry.identity(len(images), side),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(tuple(text for text, _, _ in chosen), spans),
            labels=torch.tensor([self.classes.index(a) for _, a, _ in chosen], dtype=torch.long),
            groups=tuple(family(answer) for _, answer, _ in chosen),
        )

    def digest(self) -> str:
        """A hash of answers, questions and every picture of the part, and of the split."""
        whole = hashlib.sha256(f"easyvqa {self.split} {self._validation}".encode())
        pictures = sorted((self._folder / "images").glob("*.png"))
        for path in [self._whole / "answers.txt", self._folder / "questions.json", *pictures]:
            whole.update(f"{path.name} {digest(path)}\n".encode())
        return whole.hexdigest()

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if text not in self._read:  # a few hundred wordings make all the questions
            self._read[text] = self.reader.read(text)
        return self._read[text]

    def _picture(self, number: int) -> Photo:
        if number not in self._pictures:
            path = self._folder / "images" / f"{number}.png"
            picture, size = open_image(path)
            first = next(iter(self._pictures.values()), picture)
            if first.shape != picture.shape:
                raise Damaged(f"{path} has {size} pixels; the others have {first.shape[:2]}.")
            self._pictures[number] = picture
        return self._pictures[number]

    def _vocabulary(self, found: list[Question]) -> Vocabulary:
        if self.split is Split.TEST:
            found = read_questions(self._whole / "train", self.classes)
        rows = _rows(Split.TRAIN, found, self._validation)
        return Vocabulary.build([word for word, _, _ in tokenize(found[row][0])] for row in rows)


def family(answer: str) -> str:
    """What a question with this answer asks for."""
    if answer in ("yes", "no"):
        return "yes or no"
    return "shape" if answer in SHAPES else "colour"


def _rows(split: Split, questions: Sequence[Question], validation: int) -> list[int]:
    """The questions whose picture belongs to the split."""
    pictures = sorted({number for _, _, number in questions})
    chosen = {pictures[place] for place in rows_of(split, len(pictures), validation)}
    return [row for row, (_, _, number) in enumerate(questions) if number in chosen]
