"""ERASER: texts to classify, with the words that people say decide the class.

DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020,
https://www.eraserbenchmark.com. In `eraser/NAME/` lie `{train,val,test}.jsonl`, a sample a line
with its query, class and evidences (document, first token, token behind the last), and the
documents, either `docs/ID`, a sentence a line with spaces between tokens, or `docs.jsonl`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overt.attention import AttentionMap, words
from overt.data.asked import words_of
from overt.data.batch import Batch
from overt.data.download import safe_join
from overt.data.splits import Split
from overt.data.vocabulary import Reader, pad
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import TextGeometry

FOLDER = "eraser"
NAMES = ("boolq", "cose", "esnli", "evidence_inference", "fever", "movies", "multirc")

Evidence = tuple[str, int, int]  # document, first token, token behind the last
Range = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    """One line: what is asked of which documents, the class, and the evidences."""

    id: str
    query: str
    kind: str
    label: str
    documents: tuple[str, ...]
    evidences: tuple[Evidence, ...]


class Eraser:
    """Texts with rationales, of one of the seven sets of ERASER.

    A text is the documents of a sample one after the other, a line each sentence. The target is
    even over the tokens of the evidences, whatever the tokenizer; a sample without evidence has a
    row of zeros that sees no token. `references` are the queries, `groups` their types. Classes are
    those of `train`, by alphabet. Documents are read when a batch asks for them.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        name: str = "movies",
        reader: Reader | None = None,
    ) -> None:
        root = Path(root)
        if name not in NAMES:
            raise BadInput(f"There is no {name!r}; choose from {', '.join(NAMES)}.")
        if split not in (Split.TRAIN, Split.VAL, Split.TEST):
            raise BadInput(f"eraser has train, val and test, not {split!r}.")
        self.name, self.split = f"eraser-{name}", Split(split)
        self._folder = root / FOLDER / name
        self.samples = read_samples(self._folder / f"{split}.jsonl")
        train = self.samples
        if self.split is not Split.TRAIN:
            train = read_samples(self._folder / "train.jsonl")
        self.classes = tuple(sorted({sample.label for sample in train}))
        self._documents = _Documents(self._folder)
        for sample in self.samples:
            for document in sample.documents:
                self._documents.check(document, sample.id)
        self.reader = reader or words_of(self._text(sample)[0] for sample in train)

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples at these places, with their rationales as target."""
        places = [int(place) for place in indices]
        for place in places:
            if not 0 <= place < len(self):
                raise BadInput(f"{self.name} {self.split} has 0 to {len(self) - 1}, not {place}.")
        chosen = [self.samples[place] for place in places]
        texts, marked = [], []
        for sample in chosen:
            text, ranges = self._text(sample)
            texts.append(text)
            marked.append(ranges)
        read = [self.reader.read(text) for text in texts]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        geometry = TextGeometry(tuple(texts), spans)
        decides = (geometry.cover(marked) >= 0.5) & mask
        seen = mask & decides.any(dim=-1, keepdim=True)
        keys = words(tokens.shape[1], geometry=geometry)
        return Batch(
            ids=tuple(f"{self.name}/{sample.id}" for sample in chosen),
            tokens=tokens,
            token_mask=mask,
            text=geometry,
            labels=torch.tensor(
                [
                    self.classes.index(sample.label) if sample.label in self.classes else -1
                    for sample in chosen
                ],
                dtype=torch.long,
            ),
            references=tuple((sample.query,) for sample in chosen),
            groups=tuple(sample.kind for sample in chosen),
            target=AttentionMap.from_cells(decides.float(), keys, seen).normalize(),
        )

    def digest(self) -> str:
        """A hash of the samples, and of the documents they name."""
        whole = hashlib.sha256(f"{self.name} {self.split} {len(self.classes)}".encode())
        whole.update(digest(self._folder / f"{self.split}.jsonl").encode())
        names = sorted({name for sample in self.samples for name in sample.documents})
        for name in names:
            whole.update("\n".join(map(" ".join, self._documents.lines(name))).encode())
        return whole.hexdigest()

    def _text(self, sample: Sample) -> tuple[str, list[Range]]:
        """The text of a sample, and the characters of its evidences."""
        text, marked = "", []
        for name in sample.documents:
            spans: list[Range] = []
            for line in self._documents.lines(name):
                for token in line:
                    spans.append((len(text), len(text) + len(token)))
                    text += f"{token} "
                text = f"{text[:-1]}\n" if line else text
            for document, start, end in sample.evidences:
                if document == name:
                    if end > len(spans):
                        raise Damaged(
                            f"{self._folder}: sample {sample.id} has tokens up to {end} as "
                            f"evidence, but {name} has {len(spans)}; get both again."
                        )
                    marked += spans[start:end]
        return text, marked


class _Documents:
    """The sentences of each document, from a folder of files or from one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "docs"
        self._all: dict[str, str] | None = None
        if (folder / "docs.jsonl").is_file():
            self._all = {}
            for number, entry in _entries(folder / "docs.jsonl"):
                match entry:
                    case {"docid": str(name), "document": str(text)}:
                        self._all[name] = text
                    case _:
                        path = folder / "docs.jsonl"
                        raise Damaged(f"{path}: line {number} has no docid and document.")
        elif not self._folder.is_dir():
            raise BadInput(f"{self._folder} is missing; `overt data list` says how to get it.")

    def check(self, name: str, sample: str) -> None:
        """Refuse a name that no document has."""
        there = name in self._all if self._all is not None else self._path(name).is_file()
        if not there:
            raise Damaged(f"{self._folder}: sample {sample} is about {name!r}, which is not there.")

    def lines(self, name: str) -> list[list[str]]:
        """The tokens of each sentence."""
        if self._all is not None:
            text = self._all[name]
        else:
            try:
                text = self._path(name).read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise Damaged(f"{self._path(name)} cannot be read: {problem}.") from problem
        return [line.split() for line in text.split("\n")]

    def _path(self, name: str) -> Path:
        try:
            return safe_join(self._folder, name)
        except BadInput as problem:
            raise Damaged(f"{self._folder}: {name!r:.40} leads out of it.") from problem


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file; one in another form is `Damaged` and named by its line."""
    found = []
    for number, entry in _entries(path):
        try:
            evidences = tuple(_evidence(one) for group in entry["evidences"] for one in group)
            if not isinstance(entry["classification"], str):
                raise TypeError("the class is no word")
            named = entry.get("docids") or [name for name, _, _ in evidences]
            documents = tuple(dict.fromkeys(named)) or (entry["annotation_id"],)
            found.append(
                Sample(
                    str(entry["annotation_id"]),
                    str(entry.get("query") or ""),
                    str(entry.get("query_type") or ""),
                    entry["classification"],
                    tuple(str(name) for name in documents),
                    evidences,
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise Damaged(f"{path}: line {number} is no sample: {problem!r:.50}.") from problem
    if not found:
        raise Damaged(f"{path} has no samples; get it again.")
    return found


def _evidence(one: dict[str, Any]) -> Evidence:
    name, start, end = str(one["docid"]), int(one["start_token"]), int(one["end_token"])
    if not 0 <= start < end:
        raise ValueError(f"evidence from {start} to {end}")
    return name, start, end


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, numbered from 1."""
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as problem:
                raise Damaged(f"{path}: line {number} is not JSON; get it again.") from problem
            if not isinstance(entry, dict):
                raise Damaged(f"{path}: line {number} is no object; get it again.")
            yield number, entry
