"""VQA and VQA-CP: human questions about photos of COCO, with ten answers each.

Antol et al. 2015 (v1), Goyal et al. 2017 (v2), https://visualqa.org; Agrawal et al. 2018 (VQA-CP,
the same questions split so that the answer prior given the question differs at test time),
https://computing.ece.vt.edu/~aish/vqacp/. The official JSON files are in `vqa/`, the photos in
`coco/train2014/`, `coco/val2014/` and `coco/test2015/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import digest_files
from overt.data.json_stream import iterate_records
from overt.data.splits import Split
from overt.data.vocabulary import Tokenizer
from overt.data.vqa_answers import vqa_scores
from overt.data.vqa_dataset import (
    PhotoInput,
    PhotoQuestions,
    build_vocabulary,
    hold_out_photos,
    most_common_answers,
)
from overt.errors import CorruptFileError, UserError

FOLDER, PHOTOS = "vqa", "coco"
PEOPLE = 10
ANSWERS = 3_000
VALIDATION = 4_000  # photos of VQA-CP, with all of their questions

AnswerScore = Callable[[Float[Tensor, "b c"], int], Float[Tensor, "b c"]]


@dataclass(frozen=True)
class VqaEdition:
    """File names of one edition, with `{part}` in them, and the parts of each split.

    `wrapped`: the lists are inside an object with other entries. `questions` is the published
    number of questions per part. `without` are splits whose answers are not public.
    """

    name: str
    questions_file: str
    annotations_file: str
    parts: Mapping[str, tuple[str, ...]]
    wrapped: bool
    questions: Mapping[str, int]
    without: tuple[str, ...] = ()


V1 = VqaEdition(
    "vqa1",
    "OpenEnded_mscoco_{part}_questions.json",
    "mscoco_{part}_annotations.json",
    {
        "train": ("train2014",),
        "val": ("val2014",),
        "train+val": ("train2014", "val2014"),
        "test": ("test2015",),
        "test-dev": ("test-dev2015",),
    },
    True,
    {"train2014": 248_349, "val2014": 121_512, "test2015": 244_302, "test-dev2015": 60_864},
    ("test", "test-dev"),
)
V2 = VqaEdition(
    "vqa2",
    "v2_OpenEnded_mscoco_{part}_questions.json",
    "v2_mscoco_{part}_annotations.json",
    V1.parts,
    True,
    {"train2014": 443_757, "val2014": 214_354, "test2015": 447_793, "test-dev2015": 107_394},
    ("test", "test-dev"),
)
_CP_PARTS = {"train": ("train",), "val": ("train",), "train+val": ("train",), "test": ("test",)}
CP1 = VqaEdition(
    "vqacp1",
    "vqacp_v1_{part}_questions.json",
    "vqacp_v1_{part}_annotations.json",
    _CP_PARTS,
    False,
    {},
)
CP2 = VqaEdition(
    "vqacp2",
    "vqacp_v2_{part}_questions.json",
    "vqacp_v2_{part}_annotations.json",
    _CP_PARTS,
    False,
    {"train": 438_183, "test": 219_928},
)


@dataclass(frozen=True)
class VqaQuestions:
    """Questions of a part: ids, COCO photos and texts."""

    ids: NDArray[np.int64]
    photos: tuple[str, ...]
    photo_of: NDArray[np.int64]
    texts: tuple[str, ...]

    def at(self, rows: Sequence[int]) -> "VqaQuestions":
        """Return the questions at `rows`, with the same list of photos."""
        chosen = np.asarray(rows, dtype=np.int64)
        texts = tuple(self.texts[row] for row in chosen)
        return VqaQuestions(self.ids[chosen], self.photos, self.photo_of[chosen], texts)


@dataclass(frozen=True)
class VqaAnnotations:
    """Answers to the questions of a part, as indices into `words`, and their types."""

    words: tuple[str, ...]
    given: NDArray[np.int32]
    modal: NDArray[np.int32]
    answer_types: tuple[str, ...]
    question_types: tuple[str, ...]

    def at(self, rows: Sequence[int]) -> "VqaAnnotations":
        """Return the answers to the questions at `rows`."""
        chosen = np.asarray(rows, dtype=np.int64)
        return VqaAnnotations(
            self.words,
            self.given[chosen],
            self.modal[chosen],
            tuple(self.answer_types[row] for row in chosen),
            tuple(self.question_types[row] for row in chosen),
        )


def answer_type(answered: VqaAnnotations, place: int) -> str:
    """Return the answer type by which results are reported: `yes/no`, `number` or `other`."""
    return answered.answer_types[place]


def question_type(answered: VqaAnnotations, place: int) -> str:
    """Return the first words of the question, one of about 65 types."""
    return answered.question_types[place]


class Vqa(PhotoQuestions):
    """One split of an edition of VQA; an item is one question.

    Classes are the most common answers of `train`, counted by the majority answer. `labels` is the
    class of the majority answer, -1 if it is not a class; `references` are the ten answers. Splits
    without public answers have none of these.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the edition.
        edition: `V1`, `V2`, `CP1` or `CP2`.
        limit: Number of classes; None takes all answers.
        score: Soft scores of the ten answers: `vqa_scores` (the official accuracy) or
            `people_share`.
        group: Group of a question: `answer_type` or `question_type`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        classes: Classes; None takes the most common answers of `train`.
        photo_input: Canvas of the photos, or a cache of their features.
        keep: Which questions to keep, by id; None keeps all.
        validation: Number of VQA-CP training photos held out as `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from dataclasses import replace
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.data.vqa_answers import people_share
        >>> from overt.io import write_json
        >>> about = {"image_id": 9, "question_id": 90}
        >>> asked = {"questions": [{**about, "question": "Colour?"}]}
        >>> answers = [{"answer": "red"}] * 8 + [{"answer": "blue"}] * 2
        >>> said = {"annotations": [{**about, "multiple_choice_answer": "red", "answers": answers}]}
        >>> few = replace(V2, questions={})  # V2 expects the official number of questions
        >>> with TemporaryDirectory() as root:
        ...     files = Path(root, FOLDER)
        ...     write_json(files / V2.questions_file.format(part="train2014"), asked)
        ...     write_json(files / V2.annotations_file.format(part="train2014"), said)
        ...     photo = Path(root, PHOTOS, "train2014", "COCO_train2014_000000000009.jpg")
        ...     photo.parent.mkdir(parents=True)
        ...     Image.new("RGB", (8, 6)).save(photo)
        ...     data = Vqa(root, "train", few, score=people_share)
        ...     data.classes, data.batch([0]).answers
        (('red',), tensor([[0.8000]]))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        edition: VqaEdition = V2,
        limit: int | None = ANSWERS,
        score: AnswerScore = vqa_scores,
        group: Callable[[VqaAnnotations, int], str] = answer_type,
        reader: Tokenizer | None = None,
        classes: tuple[str, ...] | None = None,
        photo_input: PhotoInput | None = None,
        keep: Callable[[int], bool] | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        if split not in edition.parts:
            known = ", ".join(edition.parts)
            raise UserError(f"{edition.name} has no split {split!r}: choose from {known}.")
        self.name, self.edition = edition.name, edition
        self._folder, self._validation = root / FOLDER, validation
        self._score, self._group = score, group
        asked, answered = self._read(split)
        if reader is None or classes is None:
            learnt = (asked, answered) if split == Split.TRAIN else self._read(Split.TRAIN)
            assert learnt[1] is not None
            reader = reader or build_vocabulary(learnt[0].texts)
            modal = (learnt[1].words[word] for word in learnt[1].modal)
            classes = classes or most_common_answers(modal, limit)
        self.classes = classes
        if keep is not None:
            rows = [row for row, number in enumerate(asked.ids.tolist()) if keep(number)]
            if not rows:
                raise UserError(f"{self.name} {split} has no question that `keep` accepts.")
            asked, answered = asked.at(rows), None if answered is None else answered.at(rows)
        self.ids, self.annotations = asked.ids, answered
        self._class_of = _class_of(answered, classes)
        used, photo_of = np.unique(asked.photo_of, return_inverse=True)
        super().__init__(
            edition.name,
            str(split),
            root / PHOTOS,
            [asked.photos[photo] for photo in used],
            photo_of.reshape(-1).astype(np.int64),
            asked.texts,
            [f"{self.name}/{number}" for number in asked.ids],
            reader,
            photo_input,
        )

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """Return the class of the majority answer, -1 where it is not a class."""
        modal = self._answered().modal[self.places(indices)]
        return torch.from_numpy(self._class_of[modal])

    def answers(self, indices: Sequence[int]) -> Float[Tensor, "b c"]:
        """Return the soft score of each class."""
        given = self._class_of[self._answered().given[self.places(indices)]]
        counts = torch.zeros(len(given), len(self.classes) + 1)
        at = torch.from_numpy(np.where(given < 0, len(self.classes), given))
        counts.scatter_add_(1, at, torch.ones(at.shape))
        return self._score(counts[:, :-1], given.shape[1])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices`; each photo once."""
        found = super().batch(indices)
        answered, places = self.annotations, self.places(indices)
        if answered is None:
            return found
        return replace(
            found,
            labels=self.labels(indices),
            answers=self.answers(indices),
            references=tuple(
                tuple(answered.words[word] for word in answered.given[place]) for place in places
            ),
            groups=tuple(self._group(answered, place) for place in places),
        )

    def digest(self) -> str:
        """Return a hash of the JSON files, the names and sizes of the photos, and the settings.

        Photo contents are left out: COCO has 19 GB of them.
        """
        about = f"{self.name} {self.split} {self._validation} {self._score.__name__} {len(self)}"
        paths = (path for part in self.edition.parts[self.split] for path in self._paths(part))
        more = "\n".join(self.classes).encode() + self.ids.tobytes() + self.digest_names().encode()
        return digest_files(about, filter(Path.is_file, paths), more)

    def _answered(self) -> VqaAnnotations:
        if self.annotations is None:
            raise UserError(f"The answers of {self.name} {self.split} are not public.")
        return self.annotations

    def _paths(self, part: str) -> tuple[Path, Path]:
        return (
            self._folder / self.edition.questions_file.format(part=part),
            self._folder / self.edition.annotations_file.format(part=part),
        )

    def _read(self, split: str) -> tuple[VqaQuestions, VqaAnnotations | None]:
        """Return the questions and answers of a split: several parts, or a share of one."""
        parts = [self._read_part(part, split) for part in self.edition.parts[split]]
        asked, answered = parts[0]
        if len(parts) > 1:
            asked = _join_questions([part for part, _ in parts])
            answered = _join_annotations([part for _, part in parts if part is not None])
        if self.edition.wrapped or split == Split.TEST:
            return asked, answered
        rows = hold_out_photos(Split(split), asked.photo_of, self._validation)
        return asked.at(rows), None if answered is None else answered.at(rows)

    def _read_part(self, part: str, split: str) -> tuple[VqaQuestions, VqaAnnotations | None]:
        questions, annotations = self._paths(part)
        asked = read_questions(questions, self.edition, part)
        if split in self.edition.without:
            return asked, None
        return asked, read_annotations(annotations, self.edition, asked.ids)


def vqa1(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """Open VQA v1: 248,349 / 121,512 / 244,302 questions in train / val / test.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the edition.
        **options: Further arguments of `Vqa`.

    Returns:
        The questions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> data = vqa1(root, "val", limit=1_000)  # doctest: +SKIP
        >>> len(data), len(data.classes)  # doctest: +SKIP
        (121512, 1000)
    """
    return Vqa(root, split, V1, **options)


def vqa2(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """Open VQA v2: 443,757 / 214,354 / 447,793 questions in train / val / test.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the edition.
        **options: Further arguments of `Vqa`.

    Returns:
        The questions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> data = vqa2(root, "val")  # doctest: +SKIP
        >>> len(data), len(data.classes)  # doctest: +SKIP
        (214354, 3000)
    """
    return Vqa(root, split, V2, **options)


def vqacp1(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """Open VQA-CP v1, made of train and val of v1; `val` holds out whole photos of its `train`.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the edition.
        **options: Further arguments of `Vqa`.

    Returns:
        The questions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from overt.io import write_json
        >>> about = {"image_id": 9, "question_id": 90, "coco_split": "val2014"}
        >>> asked = {"question": "Colour?"}
        >>> said = {"multiple_choice_answer": "red", "answers": [{"answer": "red"}] * 10}
        >>> with TemporaryDirectory() as root:
        ...     files = Path(root, FOLDER)
        ...     write_json(files / "vqacp_v1_train_questions.json", [{**about, **asked}])
        ...     write_json(files / "vqacp_v1_train_annotations.json", [{**about, **said}])
        ...     Path(root, PHOTOS, "val2014").mkdir(parents=True)
        ...     photo = Path(root, PHOTOS, "val2014", "COCO_val2014_000000000009.jpg")
        ...     Image.new("RGB", (8, 6)).save(photo)
        ...     batch = vqacp1(root, "train", validation=0).batch([0])
        >>> batch.text.texts, batch.answers
        (('Colour?',), tensor([[1.]]))
    """
    return Vqa(root, split, CP1, **options)


def vqacp2(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """Open VQA-CP v2, made of train and val of v2: 438,183 / 219,928 questions in train / test.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the edition.
        **options: Further arguments of `Vqa`.

    Returns:
        The questions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> data = vqacp2(root, "test")  # doctest: +SKIP
        >>> len(data)  # the number is checked; with a few questions: see `Vqa`  # doctest: +SKIP
        219928
    """
    return Vqa(root, split, CP2, **options)


def read_questions(path: Path, edition: VqaEdition, part: str) -> VqaQuestions:
    """Read the questions of one official file, with the photo of each."""
    ids, texts, photo_of = [], [], []
    photos: dict[str, int] = {}
    for number, entry in enumerate(iterate_records(path, "questions" if edition.wrapped else None)):
        match entry:
            case {"question_id": int(own), "image_id": int(photo), "question": str(text)}:
                where = entry.get("coco_split", part)
                if where not in ("train2014", "val2014", "test2015", "test-dev2015"):
                    raise CorruptFileError(
                        f"{path}: entry {number} has an unknown coco_split {where!r:.40}."
                    )
                where = "test2015" if where == "test-dev2015" else where
                name = f"{where}/COCO_{where}_{photo:012d}.jpg"
                ids.append(own)
                texts.append(text)
                photo_of.append(photos.setdefault(name, len(photos)))
            case _:
                raise CorruptFileError(
                    f"{path}: entry {number} has no question_id, image_id and question; "
                    "download it again."
                )
    wanted = edition.questions.get(part)
    if not ids or (wanted is not None and len(ids) != wanted):
        raise CorruptFileError(
            f"{path} has {len(ids)} questions, expected {wanted or 'any'}; download it again."
        )
    if len(set(ids)) != len(ids):
        raise CorruptFileError(f"{path} has a question_id twice; download it again.")
    return VqaQuestions(np.array(ids), tuple(photos), np.array(photo_of), tuple(texts))


def read_annotations(path: Path, edition: VqaEdition, ids: NDArray[np.int64]) -> VqaAnnotations:
    """Read the answers to the questions with these ids, in their order.

    A question without answers, an answer to an unknown question, or a different number of people
    than in the first question raises `CorruptFileError`.
    """
    place = {number: row for row, number in enumerate(ids.tolist())}
    words: dict[str, int] = {}
    given: NDArray[np.int32] | None = None
    modal = np.full(len(ids), -1, dtype=np.int32)
    kinds = [""] * len(ids), [""] * len(ids)
    types: dict[str, str] = {}
    for number, entry in enumerate(
        iterate_records(path, "annotations" if edition.wrapped else None)
    ):
        own, common, answers = _answers_of(path, number, entry)
        row = place.get(own)
        if row is None or modal[row] >= 0:
            raise CorruptFileError(
                f"{path}: entry {number} answers question {own}, which is unknown or "
                "already answered; download both files again."
            )
        if given is None:
            given = np.zeros((len(ids), len(answers)), dtype=np.int32)
        if len(answers) != given.shape[1]:
            raise CorruptFileError(
                f"{path}: entry {number} has {len(answers)} answers, expected {given.shape[1]}."
            )
        given[row] = [words.setdefault(answer, len(words)) for answer in answers]
        modal[row] = words.setdefault(common, len(words))
        for kind, name in zip(kinds, ("answer_type", "question_type"), strict=True):
            found = str(entry.get(name, ""))
            kind[row] = types.setdefault(found, found)  # share equal strings, which saves memory
    missing = np.flatnonzero(modal < 0)
    if given is None or len(missing):
        at = int(missing[0]) if len(missing) else 0
        raise CorruptFileError(
            f"{path} has no answers to question {int(ids[at])}; download both files again."
        )
    return VqaAnnotations(tuple(words), given, modal, tuple(kinds[0]), tuple(kinds[1]))


def _answers_of(path: Path, number: int, entry: dict[str, Any]) -> tuple[int, str, list[str]]:
    match entry:
        case {
            "question_id": int(own),
            "multiple_choice_answer": str(common),
            "answers": [_, *_] as people,
        }:
            answers = [one.get("answer") if isinstance(one, dict) else None for one in people]
            if all(isinstance(answer, str) for answer in answers):
                return own, common, [str(answer) for answer in answers]
    raise CorruptFileError(
        f"{path}: entry {number} has no question_id, multiple_choice_answer and answers; "
        "download it again."
    )


def _class_of(answered: VqaAnnotations | None, classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the class of each word of the annotations; -1 if it is not a class."""
    numbers = {answer: number for number, answer in enumerate(classes)}
    words = () if answered is None else answered.words
    return np.array([numbers.get(word, -1) for word in words], dtype=np.int64)


def _join_questions(parts: Sequence[VqaQuestions]) -> VqaQuestions:
    starts = np.cumsum([0, *(len(part.photos) for part in parts)])
    return VqaQuestions(
        np.concatenate([part.ids for part in parts]),
        tuple(photo for part in parts for photo in part.photos),
        np.concatenate([part.photo_of + start for part, start in zip(parts, starts, strict=False)]),
        tuple(text for part in parts for text in part.texts),
    )


def _join_annotations(parts: Sequence[VqaAnnotations]) -> VqaAnnotations:
    words: dict[str, int] = {}
    moved = [
        np.array([words.setdefault(word, len(words)) for word in part.words], dtype=np.int32)
        for part in parts
    ]
    return VqaAnnotations(
        tuple(words),
        np.concatenate([at[part.given] for at, part in zip(moved, parts, strict=True)]),
        np.concatenate([at[part.modal] for at, part in zip(moved, parts, strict=True)]),
        tuple(kind for part in parts for kind in part.answer_types),
        tuple(kind for part in parts for kind in part.question_types),
    )
