"""easy-VQA: simple questions about one coloured shape, 5,000 images and 48,248 questions.

https://github.com/vzhou842/easy-VQA. The Python package carries the data; a folder in the same
layout (`answers.txt`, `{train,test}/questions.json`, `{train,test}/images/N.png`) works as well.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.easy_vqa_files import easy_vqa_folder
from overt.data.images import Photo, open_image
from overt.data.splits import Split, parse_split, split_indices
from overt.data.vocabulary import Tokenizer, Vocabulary, pad_texts, tokenize
from overt.errors import CorruptFileError
from overt.geometry import PixelGeometry
from overt.io import digest, read_json

VALIDATION = 400  # images, with all of their questions
SHAPES = ("circle", "rectangle", "triangle")

EasyVqaQuestion = tuple[str, str, int]


def read_questions(folder: Path, answers: Sequence[str]) -> list[EasyVqaQuestion]:
    """Read and check the (question, answer, image) triples of `folder`/questions.json."""
    path = folder / "questions.json"
    found = read_json(path)
    if not isinstance(found, list) or not found:
        raise CorruptFileError(f"{path} is not a list of questions.")
    pictures = {file.name for file in (folder / "images").glob("*.png")}
    for number, entry in enumerate(found):
        match entry:
            case [str(), str(answer), int(picture)]:
                if answer not in answers:
                    raise CorruptFileError(
                        f"{path}: question {number} has the unknown answer {answer!r}."
                    )
                if f"{picture}.png" not in pictures:
                    missing = folder / "images" / f"{picture}.png"
                    raise CorruptFileError(f"{missing} is missing; question {number} needs it.")
            case _:
                raise CorruptFileError(
                    f"{path}: question {number} is not [question, answer, image]."
                )
    return [(entry[0], entry[1], entry[2]) for entry in found]


def read_answers(folder: Path) -> tuple[str, ...]:
    """Read the possible answers, one per line, in the file's order."""
    path = folder / "answers.txt"
    if not path.is_file():
        raise CorruptFileError(f"{path} is missing.")
    answers = tuple(path.read_text(encoding="utf-8").split())
    if not answers or len(set(answers)) != len(answers):
        raise CorruptFileError(f"{path} is empty or names an answer twice.")
    return answers


class EasyVqa:
    """easy-VQA; an item is one question, and questions of a batch about one image share it.

    `val` holds out whole images of the training part. `groups` is the kind of answer: yes or no,
    shape or colour.

    Args:
        root: Data folder; None takes the installed package.
        split: `train`, `val`, `test` or `train+val`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        validation: Number of training images held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> data = EasyVqa(split="test")  # from the installed package
        >>> batch = data.batch([0, 1])
        >>> batch.images.shape, batch.image_of.tolist()
        (torch.Size([1, 3, 64, 64]), [0, 0])
    """

    def __init__(
        self,
        root: Path | str | None = None,
        split: str = Split.TRAIN,
        reader: Tokenizer | None = None,
        validation: int = VALIDATION,
    ) -> None:
        self.name, self.split = "easyvqa", parse_split(split)
        self._validation = validation
        self._whole = easy_vqa_folder(root)
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
        """Return the questions at `indices`; each image once."""
        places = check_indices(self, indices)
        chosen = [self._questions[place] for place in places]
        numbers = list(dict.fromkeys(number for _, _, number in chosen))
        images = [torch.from_numpy(self._picture(number)) for number in numbers]
        texts = [text for text, _, _ in chosen]
        read = [self._tokens(text) for text in texts]
        tokens, mask, text = pad_texts(texts, read, self.reader.padding)
        side = (images[0].shape[0], images[0].shape[1]) if images else (64, 64)
        stacked = torch.stack(images) if images else torch.empty(0, *side, 3, dtype=torch.uint8)
        return Batch(
            ids=tuple(f"easyvqa/{self._folder.name}/{self._rows[place]:05d}" for place in places),
            images=stacked.permute(0, 3, 1, 2).contiguous(),
            image_of=torch.tensor([numbers.index(n) for _, _, n in chosen], dtype=torch.long),
            geometry=PixelGeometry.identity(len(images), side),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([self.classes.index(a) for _, a, _ in chosen], dtype=torch.long),
            groups=tuple(question_family(answer) for _, answer, _ in chosen),
        )

    def digest(self) -> str:
        """Return a hash of answers, questions and every image of the part, and of the split."""
        whole = hashlib.sha256(f"easyvqa {self.split} {self._validation}".encode())
        pictures = sorted((self._folder / "images").glob("*.png"))
        for path in [self._whole / "answers.txt", self._folder / "questions.json", *pictures]:
            whole.update(f"{path.name} {digest(path)}\n".encode())
        return whole.hexdigest()

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if text not in self._read:  # there are only a few hundred different questions
            self._read[text] = self.reader.read(text)
        return self._read[text]

    def _picture(self, number: int) -> Photo:
        if number not in self._pictures:
            path = self._folder / "images" / f"{number}.png"
            picture, size = open_image(path)
            first = next(iter(self._pictures.values()), picture)
            if first.shape != picture.shape:
                raise CorruptFileError(
                    f"{path} has {size} pixels; the others have {first.shape[:2]}."
                )
            self._pictures[number] = picture
        return self._pictures[number]

    def _vocabulary(self, found: list[EasyVqaQuestion]) -> Vocabulary:
        if self.split is Split.TEST:
            found = read_questions(self._whole / "train", self.classes)
        rows = _rows(Split.TRAIN, found, self._validation)
        return Vocabulary.build([word for word, _, _ in tokenize(found[row][0])] for row in rows)


def question_family(answer: str) -> str:
    """Return what a question with this answer asks for."""
    if answer in ("yes", "no"):
        return "yes or no"
    return "shape" if answer in SHAPES else "colour"


def _rows(split: Split, questions: Sequence[EasyVqaQuestion], validation: int) -> list[int]:
    """Return the questions whose image belongs to the split."""
    pictures = sorted({number for _, _, number in questions})
    chosen = {pictures[place] for place in split_indices(split, len(pictures), validation)}
    return [row for row, (_, _, number) in enumerate(questions) if number in chosen]
