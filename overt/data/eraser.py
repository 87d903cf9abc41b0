"""ERASER: texts to classify, with human rationales.

DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", ACL 2020,
https://www.eraserbenchmark.com. `eraser/NAME/` has `{train,val,test}.jsonl`, one sample per line
with its query, class and evidences (document, first token, end token), and the documents: either
`docs/ID` with one sentence per line and spaces between tokens, or `docs.jsonl`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.dataset import check_indices, digest_files
from overt.data.download import require_file, require_folder, safe_join
from overt.data.splits import Split, parse_official_split
from overt.data.vocabulary import Tokenizer, read_texts
from overt.data.vqa_dataset import build_vocabulary
from overt.errors import CorruptFileError, UserError
from overt.io import read_error

FOLDER = "eraser"
NAMES = ("boolq", "cose", "esnli", "evidence_inference", "fever", "movies", "multirc")

Evidence = tuple[str, int, int]  # document, first token, end token
Range = tuple[int, int]


@dataclass(frozen=True)
class EraserSample:
    """One sample: query, documents, class and evidences."""

    id: str
    query: str
    kind: str
    label: str
    documents: tuple[str, ...]
    evidences: tuple[Evidence, ...]


class Eraser:
    """One of the seven datasets of ERASER: texts with rationales.

    A text is the documents of a sample joined, one line per sentence. The target is uniform over
    the tokens of the evidences, for any tokenizer. A sample without evidence, or with empty spans
    only (14 reviews of the movies test split), has a row of zeros that sees no token; `samples`
    keeps empty spans as annotated. `references` are the queries, `groups` their types. Classes are
    those of `train`, sorted. Documents are read on demand.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        name: One of `NAMES`, such as `movies`.
        reader: Tokenizer; None builds a vocabulary from the training part.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> evidence = {"docid": "1", "start_token": 1, "end_token": 2}
        >>> sample = {"annotation_id": "1", "classification": "POS", "evidences": [[evidence]]}
        >>> with TemporaryDirectory() as root:
        ...     write_text(Path(root, FOLDER, "movies", "train.jsonl"), json.dumps(sample))
        ...     write_text(Path(root, FOLDER, "movies", "docs", "1"), "a great film")
        ...     batch = Eraser(root, "train", "movies").batch([0])
        >>> batch.target.weights.flatten()
        tensor([0., 1., 0.])
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        name: str = "movies",
        reader: Tokenizer | None = None,
    ) -> None:
        if name not in NAMES:
            raise UserError(f"Unknown dataset {name!r}: choose from {', '.join(NAMES)}.")
        self.name, self.split = f"eraser-{name}", parse_official_split("eraser", split)
        self._folder = Path(root) / FOLDER / name
        self.samples = read_samples(self._folder / f"{split}.jsonl")
        train = self.samples
        if self.split is not Split.TRAIN:
            train = read_samples(self._folder / "train.jsonl")
        self.classes = tuple(sorted({sample.label for sample in train}))
        self._documents = _Documents(self._folder)
        for sample in self.samples:
            for document in sample.documents:
                self._documents.check(document, sample.id)
        self.reader = reader or build_vocabulary(self._text(sample)[0] for sample in train)

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at `indices`, with their rationales as target."""
        chosen = [self.samples[place] for place in check_indices(self, indices)]
        found = [self._text(sample) for sample in chosen]
        tokens, mask, geometry = read_texts(self.reader, [text for text, _ in found])
        decides = (geometry.cover([ranges for _, ranges in found]) >= 0.5) & mask
        seen = mask & decides.any(dim=-1, keepdim=True)
        keys = words(tokens.shape[1], geometry=geometry)
        numbers = {label: number for number, label in enumerate(self.classes)}
        return Batch(
            ids=tuple(f"{self.name}/{sample.id}" for sample in chosen),
            tokens=tokens,
            token_mask=mask,
            text=geometry,
            labels=torch.tensor([numbers.get(one.label, -1) for one in chosen], dtype=torch.long),
            references=tuple((sample.query,) for sample in chosen),
            groups=tuple(sample.kind for sample in chosen),
            target=AttentionMap.from_cells(decides.float(), keys, seen).normalize(),
        )

    def digest(self) -> str:
        """Return a hash of the samples and of their documents."""
        about = f"{self.name} {self.split} {len(self.classes)}"
        names = sorted({name for sample in self.samples for name in sample.documents})
        texts = ("\n".join(map(" ".join, self._documents.lines(name))) for name in names)
        return digest_files(about, [self._folder / f"{self.split}.jsonl"], "".join(texts).encode())

    def _text(self, sample: EraserSample) -> tuple[str, list[Range]]:
        """Return the text of a sample, and the character ranges of its evidences."""
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
                        raise CorruptFileError(
                            f"{self._folder}: sample {sample.id} has tokens up to {end} as "
                            f"evidence, but {name} has {len(spans)}; download both again."
                        )
                    marked += spans[start:end]
        return text, marked


class _Documents:
    """Sentences of each document, from a folder of files or from one file."""

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
                        raise CorruptFileError(f"{path}: line {number} has no docid and document.")
        else:
            require_folder(self._folder)

    def check(self, name: str, sample: str) -> None:
        """Raise `CorruptFileError` if the document does not exist."""
        there = name in self._all if self._all is not None else self._path(name).is_file()
        if not there:
            raise CorruptFileError(
                f"{self._folder}: document {name!r} of sample {sample} is missing."
            )

    def lines(self, name: str) -> list[list[str]]:
        """Return the tokens of each sentence."""
        if self._all is not None:
            text = self._all[name]
        else:
            try:
                text = self._path(name).read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise read_error(self._path(name), "cannot be read", problem) from problem
        return [line.split() for line in text.split("\n")]

    def _path(self, name: str) -> Path:
        try:
            return safe_join(self._folder, name)
        except UserError as problem:
            raise CorruptFileError(
                f"{self._folder}: {name!r:.40} points outside of it."
            ) from problem


def read_samples(path: Path) -> list[EraserSample]:
    """Read the samples of a file; raise `CorruptFileError` with the line if one is malformed."""
    found = []
    for number, entry in _entries(path):
        try:
            evidences = tuple(_evidence(one) for group in entry["evidences"] for one in group)
            if not isinstance(entry["classification"], str):
                raise TypeError("the class is not a string")
            named = entry.get("docids") or [name for name, _, _ in evidences]
            documents = tuple(dict.fromkeys(named)) or (entry["annotation_id"],)
            found.append(
                EraserSample(
                    str(entry["annotation_id"]),
                    str(entry.get("query") or ""),
                    str(entry.get("query_type") or ""),
                    entry["classification"],
                    tuple(str(name) for name in documents),
                    evidences,
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise CorruptFileError(
                f"{path}: line {number} is not a sample: {problem!r:.50}."
            ) from problem
    if not found:
        raise CorruptFileError(f"{path} has no samples; download it again.")
    return found


def _evidence(one: dict[str, Any]) -> Evidence:
    name, start, end = str(one["docid"]), int(one["start_token"]), int(one["end_token"])
    if not 0 <= start <= end:  # equal is allowed: the official files have empty spans
        raise ValueError(f"evidence from {start} to {end}")
    return name, start, end


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON-lines file, numbered from 1."""
    require_file(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as problem:
                raise CorruptFileError(
                    f"{path}: line {number} is not JSON; download it again."
                ) from problem
            if not isinstance(entry, dict):
                raise CorruptFileError(
                    f"{path}: line {number} is not an object; download it again."
                )
            yield number, entry
