"""Scenes as a data set: made once, kept in a folder, read in place.

The folder is a cache: its name holds a hash of everything that decides its contents, the program
included, and one that is damaged is made again, not complained about, because nothing is lost.
"""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.scenes.making import Progress, Wanted, make, make_files, shapes
from overt.data.scenes.posing import pose
from overt.data.scenes.questions import ALL, ANSWERS, WORDS, Question, is_content
from overt.data.scenes.world import MOST, Scene
from overt.data.vocabulary import PAD, Vocabulary
from overt.errors import BadInput, Damaged
from overt.files import verify, writing
from overt.geometry import PixelGeometry, TextGeometry

VERSION = 1
PROBES = 4  # scenes made to see whether the program still makes what it made


class Truth(Enum):
    """Which things a target map shows."""

    TARGET = "target"  # the things the answer is read from
    MENTIONED = "mentioned"  # all things the words refer to
    EVIDENCE = "evidence"  # by intervention: the things the answer depends on


def default_cache() -> Path:
    """Where scenes are kept: OVERT_CACHE, or .cache/overt in the home folder."""
    return Path(os.environ.get("OVERT_CACHE") or Path.home() / ".cache" / "overt")


def vocabulary() -> Vocabulary:
    """All words a question can have, the same for every split, size and choice of families."""
    return Vocabulary(WORDS)


def fingerprint(wanted: Wanted) -> str:
    """A hash of what is wanted and of what the program makes of it.

    The first scenes are made and hashed too: a change of the program is seen without a change of
    its version.
    """
    whole = hashlib.sha256(json.dumps([VERSION, asdict(wanted)], sort_keys=True).encode())
    for array in make(replace(wanted, count=min(wanted.count, PROBES))).values():
        whole.update(array.tobytes())
    return whole.hexdigest()


def prepare(
    wanted: Wanted, root: Path, workers: int = 1, on_progress: Progress | None = None
) -> Path:
    """The folder with these scenes, made if it is missing and made again if it is damaged.

    A second process that wants the same folder waits for the first and uses what it made.
    """
    wanted.check()
    about = f"{wanted.split}-{wanted.seed}-{wanted.count}x{wanted.questions}-{wanted.size}"
    folder = root / "scenes" / f"{about}-{fingerprint(wanted)[:16]}"
    with _turn(folder.with_name(folder.name + ".turn")):
        if folder.exists():
            try:
                verify(folder)
                return folder
            except Damaged as problem:
                warnings.warn(f"{problem} The scenes are made again.", stacklevel=2)
        with writing(folder) as temporary:
            make_files(temporary, wanted, workers, on_progress)
    return folder


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait until no other process is here; the system ends the turn of one that died."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise BadInput(
            f"scenes cannot be kept in {path.parent} ({problem.strerror}); "
            "set OVERT_CACHE to a folder that can be written"
        ) from problem
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def cover(owners: UInt8[np.ndarray, "i y x"], cells: tuple[int, int]) -> Float[np.ndarray, "i m k"]:
    """The share of each cell that shows each thing, for the first 8 things of each image."""
    count, height, width = owners.shape
    if height % cells[0] == 0 and width % cells[1] == 0:
        row = np.arange(height) // (height // cells[0]) * cells[1]
        cell = row[:, None] + np.arange(width) // (width // cells[1])
        k = cells[0] * cells[1]
        place = (np.arange(count)[:, None, None] * (MOST + 1) + owners) * k + cell
        found = np.bincount(place.ravel(), minlength=count * (MOST + 1) * k)
        shares = found.reshape(count, MOST + 1, k)[:, 1:] / (height * width / k)
        return shares.astype(np.float32)
    masks = owners[:, None] == np.arange(1, MOST + 1)[:, None, None]
    down, across = _overlaps(height, cells[0]), _overlaps(width, cells[1])
    shares = down @ masks.astype(np.float32) @ across.T
    return shares.reshape(count, MOST, -1)


@cache
def _overlaps(pixels: int, cells: int) -> Float[np.ndarray, "r y"]:
    """The share of each cell along a line that each pixel makes up, also where a cell cuts it."""
    edges = np.arange(cells + 1) * (pixels / cells)
    starts = np.arange(pixels, dtype=np.float64)
    low = np.maximum(edges[:-1, None], starts)
    high = np.minimum(edges[1:, None], starts + 1)
    return (np.maximum(high - low, 0) * (cells / pixels)).astype(np.float32)


class Scenes:
    """A data set of scenes; an item is one scene with all its questions, a sample one question."""

    name = "scenes"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        questions: int = 4,
        families: Sequence[str] = ALL,
        cache: Path | str | None = None,
        truth: Truth = Truth.EVIDENCE,
        cells: tuple[int, int] = (8, 8),
        workers: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Make the scenes, or open them where they have been made.

        `truth` and `cells` choose the target maps and are not part of what is kept. `workers` is
        how many processes make scenes, two where there are as many cores. The order in which
        families are named does not matter.
        """
        chosen = tuple(name for name in ALL if name in families)
        if unknown := [name for name in families if name not in ALL]:
            raise BadInput(f"no question family {unknown[0]!r}: choose of {', '.join(ALL)}")
        if min(cells) < 1 or max(cells) > size:
            raise BadInput(f"a grid of {cells[0]} x {cells[1]} cells does not fit {size} pixels")
        self.wanted = Wanted(str(split), seed, count, size, questions, chosen)
        self.split, self.truth, self.cells = str(split), truth, cells
        self.vocabulary, self.answers = vocabulary(), ANSWERS
        if workers is None:
            workers = min(2, os.cpu_count() or 1)
        self.folder = prepare(self.wanted, Path(cache or default_cache()), workers, on_progress)
        self._arrays = {
            name: np.load(self.folder / f"{name}.npy", mmap_mode="r")
            for name in shapes(self.wanted)
        }
        self._ids = np.array([PAD, *self.vocabulary.encode(WORDS)])
        self._lengths = np.array([0, *(len(word) for word in WORDS)])
        self._content = np.array([False, *(is_content(word) for word in WORDS)])

    def __len__(self) -> int:
        return self.wanted.count

    def digest(self) -> str:
        """A hash of the settings, the program and its first scenes."""
        return fingerprint(self.wanted)

    def pose(self, index: int) -> tuple[Scene, tuple[Question, ...]]:
        """One scene and its questions as values, made again."""
        self._rows([index])
        wanted = self.wanted
        return pose(wanted.split, wanted.seed, index, wanted.questions, wanted.families)

    def masks(self, index: int) -> Bool[Tensor, "m y x"]:
        """The visible pixels of each thing of one scene."""
        rows = self._rows([index])
        things = torch.arange(1, int(self._arrays["things"][rows[0]]) + 1)
        return torch.from_numpy(self._take("owners", rows)) == things[:, None, None]

    def boxes(self, index: int) -> Float[Tensor, "m 4"]:
        """The box around the visible pixels of each thing of one scene, in pixels."""
        rows = self._rows([index])
        return torch.from_numpy(self._take("boxes", rows)[0, : self._arrays["things"][rows[0]]])

    def content(self, indices: Sequence[int]) -> Bool[Tensor, "b n"]:
        """Which words of each question matter: those that carry an argument of its program."""
        return torch.from_numpy(self._content[self._words(self._rows(indices))])

    def batch(self, indices: Sequence[int]) -> Batch:
        """All questions about these scenes; each scene's image once.

        The target is the share of each cell that shows the things of `truth`, normalised. Where no
        thing decides the answer its row is zero and sees no cell, so that nothing counts it.
        """
        rows = self._rows(indices)
        asked = self.wanted.questions
        side = self.wanted.size
        words = self._words(rows)
        return Batch(
            ids=tuple(self._name(int(row), j) for row in rows for j in range(asked)),
            images=torch.from_numpy(self._take("images", rows)),
            image_of=torch.arange(len(rows)).repeat_interleave(asked),
            geometry=PixelGeometry.identity(len(rows), (side, side)),
            tokens=torch.from_numpy(self._ids[words]),
            token_mask=torch.from_numpy(words > 0),
            text=self._text(words),
            labels=torch.from_numpy(self._take("answers", rows).reshape(-1).astype(np.int64)),
            groups=tuple(ALL[family] for family in self._take("families", rows).reshape(-1)),
            target=self._target(rows),
        )

    def _target(self, rows: NDArray[np.int64]) -> AttentionMap:
        which = list(Truth).index(self.truth)
        bits = self._take("truths", rows)[:, :, which, None] >> np.arange(MOST) & 1
        shares = cover(self._take("owners", rows), self.cells)
        weights = torch.from_numpy(bits.astype(np.float32) @ shares).flatten(0, 1)
        side = self.wanted.size
        keys = grid(*self.cells, geometry=PixelGeometry.identity(len(weights), (side, side)))
        seen = (weights.sum(dim=-1, keepdim=True) > 0).expand(weights.shape)
        return AttentionMap.from_cells(weights, keys, seen).normalize()

    def _text(self, words: NDArray[np.uint8]) -> TextGeometry:
        ends = np.cumsum(self._lengths[words] + 1, axis=1) - 1  # one space between words
        spans = np.stack([ends - self._lengths[words], ends], axis=-1)
        spans[words == 0] = -1
        texts = tuple(" ".join(WORDS[word - 1] for word in row if word) for row in words.tolist())
        return TextGeometry(texts, torch.from_numpy(spans))

    def _words(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        tokens = self._take("tokens", rows)
        return tokens.reshape(-1, tokens.shape[-1])

    def _take(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        return np.asarray(self._arrays[name][rows])

    def _name(self, row: int, question: int) -> str:
        return f"scenes-{self.split}-{self.wanted.seed}-{row:06d}-{question}"

    def _rows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        rows = np.asarray(list(indices), dtype=np.int64)
        if wrong := [row for row in rows.tolist() if not 0 <= row < len(self)]:
            raise BadInput(f"scenes {self.split} has items 0 to {len(self) - 1}, not {wrong[0]}")
        return rows
