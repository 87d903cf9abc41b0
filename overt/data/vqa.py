"""VQA and VQA-CP: questions that people asked about photos of COCO, with ten answers each.

Antol et al. 2015 (v1), Goyal et al. 2017 (v2), https://visualqa.org; Agrawal et al. 2018 (VQA-CP,
the same questions parted so that answers given the question are others at test time),
https://computing.ece.vt.edu/~aish/vqacp/. The official JSON files lie in `vqa/`, the photos in
`coco/train2014/`, `coco/val2014/` and `coco/test2015/`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from overt.data.answers import vqa_scores
from overt.data.asked import Asked, Look, gallery, hold_out, most_common, words_of
from overt.data.batch import Batch
from overt.data.photos import PhotoSet
from overt.data.records import records
from overt.data.splits import Split
from overt.data.vocabulary import Reader
from overt.errors import BadInput, Damaged
from overt.files import digest

FOLDER, PHOTOS = "vqa", "coco"
PEOPLE = 10
ANSWERS = 3_000
VALIDATION = 4_000  # photos of VQA-CP, with all of their questions

Score = Callable[[Float[Tensor, "b c"], int], Float[Tensor, "b c"]]


@dataclass(frozen=True)
class Edition:
    """The files of one data set: names with `{part}` in them, and the parts of each split.

    `wrapped`: the lists stand in an object with other things. `questions` is how many a part has,
    where that is published. `without` are splits whose answers are not public.
    """

    name: str
    questions_file: str
    annotations_file: str
    parts: Mapping[str, tuple[str, ...]]
    wrapped: bool
    questions: Mapping[str, int]
    without: tuple[str, ...] = ()


V1 = Edition(
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
V2 = Edition(
    "vqa2",
    "v2_OpenEnded_mscoco_{part}_questions.json",
    "v2_mscoco_{part}_annotations.json",
    V1.parts,
    True,
    {"train2014": 443_757, "val2014": 214_354, "test2015": 447_793, "test-dev2015": 107_394},
    ("test", "test-dev"),
)
_CP_PARTS = {"train": ("train",), "val": ("train",), "train+val": ("train",), "test": ("test",)}
CP1 = Edition(
    "vqacp1",
    "vqacp_v1_{part}_questions.json",
    "vqacp_v1_{part}_annotations.json",
    _CP_PARTS,
    False,
    {},
)
CP2 = Edition(
    "vqacp2",
    "vqacp_v2_{part}_questions.json",
    "vqacp_v2_{part}_annotations.json",
    _CP_PARTS,
    False,
    {"train": 438_183, "test": 219_928},
)


@dataclass(frozen=True)
class Questions:
    """The questions of a part: ids, photos of COCO and words."""

    ids: NDArray[np.int64]
    photos: tuple[str, ...]
    photo_of: NDArray[np.int64]
    texts: tuple[str, ...]

    def at(self, rows: Sequence[int]) -> "Questions":
        """The questions at these places, with the same list of photos."""
        chosen = np.asarray(rows, dtype=np.int64)
        texts = tuple(self.texts[row] for row in chosen)
        return Questions(self.ids[chosen], self.photos, self.photo_of[chosen], texts)


@dataclass(frozen=True)
class Annotations:
    """The answers to the questions of a part, as places in `words`, and their types."""

    words: tuple[str, ...]
    given: NDArray[np.int32]
    modal: NDArray[np.int32]
    answer_types: tuple[str, ...]
    question_types: tuple[str, ...]

    def at(self, rows: Sequence[int]) -> "Annotations":
        """The answers to the questions at these places."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Annotations(
            self.words,
            self.given[chosen],
            self.modal[chosen],
            tuple(self.answer_types[row] for row in chosen),
            tuple(self.question_types[row] for row in chosen),
        )


def answer_type(answered: Annotations, place: int) -> str:
    """`yes/no`, `number` or `other`, as results are reported by."""
    return answered.answer_types[place]


def question_type(answered: Annotations, place: int) -> str:
    """The first words of the question, one of about 65."""
    return answered.question_types[place]


class Vqa:
    """One split of an edition of VQA; an item is one question.

    Classes are the `limit` most common answers of `train`, counted by the answer that most people
    gave. `answers` are what `score` makes of the ten answers (`vqa_scores`, the official accuracy,
    or `people_share`); `labels` the class of the most common answer, -1 if it is none;
    `references` the ten answers. `groups` is what `group` says: the answer's or the question's
    type. Splits without public answers have none of these. `keep` chooses questions by id. Parts
    with another number of questions than the edition says are refused.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        edition: Edition = V2,
        limit: int | None = ANSWERS,
        score: Score = vqa_scores,
        group: Callable[[Annotations, int], str] = answer_type,
        reader: Reader | None = None,
        classes: tuple[str, ...] | None = None,
        look: Look | None = None,
        keep: Callable[[int], bool] | None = None,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        if split not in edition.parts:
            known = ", ".join(edition.parts)
            raise BadInput(f"{edition.name} has no split {split!r}; choose one of: {known}.")
        self.name, self.split, self.edition = edition.name, str(split), edition
        self._folder, self._photos_at, self._validation = root / FOLDER, root / PHOTOS, validation
        self._score, self._group = score, group
        asked, answered = self._read(split)
        if reader is None or classes is None:
            learnt = (asked, answered) if split == Split.TRAIN else self._read(Split.TRAIN)
            assert learnt[1] is not None
            reader = reader or words_of(learnt[0].texts)
            modal = (learnt[1].words[word] for word in learnt[1].modal)
            classes = classes or most_common(modal, limit)
        self.reader, self.classes = reader, classes
        if keep is not None:
            rows = [row for row, number in enumerate(asked.ids.tolist()) if keep(number)]
            if not rows:
                raise BadInput(f"{self.name} {split} has none of the questions that are kept.")
            asked, answered = asked.at(rows), None if answered is None else answered.at(rows)
        self.ids, self.annotations = asked.ids, answered
        self._class_of = _class_of(answered, classes)
        used, photo_of = np.unique(asked.photo_of, return_inverse=True)
        self._photos = [asked.photos[photo] for photo in used]
        self._asked = Asked(
            self.name,
            self.split,
            self._photos_at,
            self._photos,
            photo_of.reshape(-1).astype(np.int64),
            asked.texts,
            [f"{self.name}/{number}" for number in asked.ids],
            reader,
            look or Look(),
        )
        self.files = self._asked.files

    def __len__(self) -> int:
        return len(self._asked)

    def photo_ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The names of the photos, as in a cache of features over `photos`."""
        return self._asked.photo_ids(indices)

    def photos(self, look: Look | None = None) -> PhotoSet:
        """The photos of the split by themselves, each once, to compute features of."""
        return gallery(self.name, self.split, self._photos_at, self._photos, look)

    def labels(self, indices: Sequence[int]) -> Int[Tensor, " b"]:
        """The class of the answer that most people gave, -1 where it is no class."""
        answered = self._answered()
        places = self._asked.places(indices)
        return torch.from_numpy(self._class_of[answered.modal[places]])

    def answers(self, indices: Sequence[int]) -> Float[Tensor, "b c"]:
        """What each class is worth to the people who answered."""
        given = self._class_of[self._answered().given[self._asked.places(indices)]]
        counts = torch.zeros(len(given), len(self.classes) + 1)
        at = torch.from_numpy(np.where(given < 0, len(self.classes), given))
        counts.scatter_add_(1, at, torch.ones(at.shape))
        return self._score(counts[:, :-1], given.shape[1])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places, each photo once."""
        found = self._asked.batch(indices)
        answered, places = self.annotations, self._asked.places(indices)
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
        """A hash of the JSON files, the names and sizes of the photos, and what was chosen.

        Not of the contents of photos: COCO has 19 GB of them.
        """
        about = f"{self.name} {self.split} {self._validation} {self._score.__name__} {len(self)}"
        whole = hashlib.sha256(about.encode())
        for part in self.edition.parts[self.split]:
            for path in self._paths(part):
                if path.is_file():
                    whole.update(digest(path).encode())
        whole.update("\n".join(self.classes).encode() + self.ids.tobytes())
        whole.update(self._asked.digest_names().encode())
        return whole.hexdigest()

    def _answered(self) -> Annotations:
        if self.annotations is None:
            raise BadInput(f"The answers of {self.name} {self.split} are not public.")
        return self.annotations

    def _paths(self, part: str) -> tuple[Path, Path]:
        return (
            self._folder / self.edition.questions_file.format(part=part),
            self._folder / self.edition.annotations_file.format(part=part),
        )

    def _read(self, split: str) -> tuple[Questions, Annotations | None]:
        """The questions and answers of a split, whose parts may be several or a share of one."""
        parts = [self._read_part(part, split) for part in self.edition.parts[split]]
        asked, answered = parts[0]
        if len(parts) > 1:
            asked = _joined([part for part, _ in parts])
            answered = _joined_answers([part for _, part in parts if part is not None])
        if self.edition.wrapped or split == Split.TEST:
            return asked, answered
        rows = hold_out(Split(split), asked.photo_of, self._validation)
        return asked.at(rows), None if answered is None else answered.at(rows)

    def _read_part(self, part: str, split: str) -> tuple[Questions, Annotations | None]:
        questions, annotations = self._paths(part)
        asked = read_questions(questions, self.edition, part)
        if split in self.edition.without:
            return asked, None
        return asked, read_annotations(annotations, self.edition, asked.ids)


def vqa1(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """VQA v1: 248,349 / 121,512 / 244,302 questions in train / val / test."""
    return Vqa(root, split, V1, **options)


def vqa2(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """VQA v2, with a photo for each answer: 443,757 / 214,354 / 447,793 questions."""
    return Vqa(root, split, V2, **options)


def vqacp1(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """VQA-CP v1, made of train and val of v1; `val` holds out whole photos of its `train`."""
    return Vqa(root, split, CP1, **options)


def vqacp2(root: Path | str, split: str = Split.TRAIN, **options: Any) -> Vqa:
    """VQA-CP v2, made of train and val of v2: 438,183 / 219,928 questions in train / test."""
    return Vqa(root, split, CP2, **options)


def read_questions(path: Path, edition: Edition, part: str) -> Questions:
    """The questions of one official file, with the photo of each."""
    ids, texts, photo_of = [], [], []
    photos: dict[str, int] = {}
    for number, entry in enumerate(records(path, "questions" if edition.wrapped else None)):
        match entry:
            case {"question_id": int(own), "image_id": int(photo), "question": str(text)}:
                where = entry.get("coco_split", part)
                if where not in ("train2014", "val2014", "test2015", "test-dev2015"):
                    raise Damaged(f"{path}: entry {number} names no folder of COCO: {where!r:.40}.")
                where = "test2015" if where == "test-dev2015" else where
                name = f"{where}/COCO_{where}_{photo:012d}.jpg"
                ids.append(own)
                texts.append(text)
                photo_of.append(photos.setdefault(name, len(photos)))
            case _:
                raise Damaged(
                    f"{path}: entry {number} has no question_id, image_id and question; get it "
                    "again."
                )
    wanted = edition.questions.get(part)
    if not ids or (wanted is not None and len(ids) != wanted):
        raise Damaged(f"{path} has {len(ids)} questions, not {wanted or 'any'}; get it again.")
    if len(set(ids)) != len(ids):
        raise Damaged(f"{path} has two questions of one question_id; get it again.")
    return Questions(np.array(ids), tuple(photos), np.array(photo_of), tuple(texts))


def read_annotations(path: Path, edition: Edition, ids: NDArray[np.int64]) -> Annotations:
    """The answers to the questions with these ids, in their order.

    A question without answers, an answer to no question, and another number of people than the
    first question has are `Damaged`.
    """
    place = {number: row for row, number in enumerate(ids.tolist())}
    words: dict[str, int] = {}
    given: NDArray[np.int32] | None = None
    modal = np.full(len(ids), -1, dtype=np.int32)
    kinds = [""] * len(ids), [""] * len(ids)
    types: dict[str, str] = {}
    for number, entry in enumerate(records(path, "annotations" if edition.wrapped else None)):
        own, common, answers = _answers_of(path, number, entry)
        row = place.get(own)
        if row is None or modal[row] >= 0:
            raise Damaged(
                f"{path}: entry {number} answers question {own}, which is not asked or is "
                "answered before; get both files again."
            )
        if given is None:
            given = np.zeros((len(ids), len(answers)), dtype=np.int32)
        if len(answers) != given.shape[1]:
            raise Damaged(f"{path}: entry {number} has {len(answers)} answers, not as the first.")
        given[row] = [words.setdefault(answer, len(words)) for answer in answers]
        modal[row] = words.setdefault(common, len(words))
        for kind, name in zip(kinds, ("answer_type", "question_type"), strict=True):
            found = str(entry.get(name, ""))
            kind[row] = types.setdefault(found, found)  # one string for all that are equal
    missing = np.flatnonzero(modal < 0)
    if given is None or len(missing):
        at = int(missing[0]) if len(missing) else 0
        raise Damaged(f"{path} has no answers to question {int(ids[at])}; get both files again.")
    return Annotations(tuple(words), given, modal, tuple(kinds[0]), tuple(kinds[1]))


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
    raise Damaged(
        f"{path}: entry {number} has no question_id, multiple_choice_answer and answers; get it "
        "again."
    )


def _class_of(answered: Annotations | None, classes: Sequence[str]) -> NDArray[np.int64]:
    """The class of each word of the annotations; -1 for one that is none."""
    numbers = {answer: number for number, answer in enumerate(classes)}
    words = () if answered is None else answered.words
    return np.array([numbers.get(word, -1) for word in words], dtype=np.int64)


def _joined(parts: Sequence[Questions]) -> Questions:
    starts = np.cumsum([0, *(len(part.photos) for part in parts)])
    return Questions(
        np.concatenate([part.ids for part in parts]),
        tuple(photo for part in parts for photo in part.photos),
        np.concatenate([part.photo_of + start for part, start in zip(parts, starts, strict=False)]),
        tuple(text for part in parts for text in part.texts),
    )


def _joined_answers(parts: Sequence[Annotations]) -> Annotations:
    words: dict[str, int] = {}
    moved = [
        np.array([words.setdefault(word, len(words)) for word in part.words], dtype=np.int32)
        for part in parts
    ]
    return Annotations(
        tuple(words),
        np.concatenate([at[part.given] for at, part in zip(moved, parts, strict=True)]),
        np.concatenate([at[part.modal] for at, part in zip(moved, parts, strict=True)]),
        tuple(kind for part in parts for kind in part.answer_types),
        tuple(kind for part in parts for kind in part.question_types),
    )
