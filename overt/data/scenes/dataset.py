"""`Scenes`: the dataset of questions about scenes, generated once and memory-mapped.

The folder is a cache: its name has a hash of everything that decides its contents, including the
generator's output, and a damaged folder is generated again with a warning.
"""

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

from overt import system
from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.generate import Progress, SceneSpec, array_shapes, make_arrays, write_arrays
from overt.data.scenes.questions import ALL_FAMILIES, ANSWERS, WORDS, SceneQuestion, is_content_word
from overt.data.scenes.world import MOST, Scene
from overt.data.vocabulary import PAD, Vocabulary
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry, TextGeometry
from overt.io import atomic_folder, verify

VERSION = 1
PROBES = 4  # scenes that are hashed to detect a change of the generator


class TruthKind(Enum):
    """Which things a target map shows.

    Attributes:
        TARGET: The things the answer is read from.
        MENTIONED: All things the words refer to.
        EVIDENCE: By intervention: the things the answer depends on.

    Example:
        >>> TruthKind("evidence") is TruthKind.EVIDENCE
        True
    """

    TARGET = "target"  # the things the answer is read from
    MENTIONED = "mentioned"  # all things the words refer to
    EVIDENCE = "evidence"  # by intervention: the things the answer depends on


def default_cache() -> Path:
    """Return the cache folder: OVERT_CACHE, or .cache/overt in the home folder."""
    return Path(os.environ.get("OVERT_CACHE") or Path.home() / ".cache" / "overt")


def vocabulary() -> Vocabulary:
    """Return all words of questions, the same for every split, size and choice of families."""
    return Vocabulary(WORDS)


def scenes_digest(spec: SceneSpec) -> str:
    """Return a hash of the settings and of the first scenes.

    Hashing scenes detects a change of the generator without a change of its version.
    """
    whole = hashlib.sha256(json.dumps([VERSION, asdict(spec)], sort_keys=True).encode())
    for array in make_arrays(replace(spec, count=min(spec.count, PROBES))).values():
        whole.update(array.tobytes())
    return whole.hexdigest()


def prepare_scenes(
    spec: SceneSpec, root: Path, workers: int = 1, on_progress: Progress | None = None
) -> Path:
    """Return the folder with these scenes, generated if it is missing or damaged.

    A second process that needs the same folder waits for the first and uses its result.
    """
    spec.check()
    about = f"{spec.split}-{spec.seed}-{spec.count}x{spec.questions}-{spec.size}"
    folder = root / "scenes" / f"{about}-{scenes_digest(spec)[:16]}"
    with _exclusive(folder.with_name(folder.name + ".turn")):
        if folder.exists():
            try:
                verify(folder)
                return folder
            except CorruptFileError as problem:
                warnings.warn(f"{problem} The scenes are generated again.", stacklevel=2)
        with atomic_folder(folder) as temporary:
            write_arrays(temporary, spec, workers, on_progress)
    return folder


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock, which the system releases if the process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = system.open_lock_file(path)
    except OSError as problem:
        raise UserError(
            f"Cannot write scenes to {path.parent} ({problem.strerror}); "
            "set OVERT_CACHE to a writable folder."
        ) from problem
    try:
        system.lock_descriptor(file, wait=True)
        yield
    finally:
        os.close(file)


def cell_coverage(
    owners: UInt8[np.ndarray, "i y x"], cells: tuple[int, int]
) -> Float[np.ndarray, "i m k"]:
    """Return the share of each cell that shows each thing, for up to 8 things per image."""
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
    """Return the share of each cell along a line that each pixel covers, also fractional."""
    edges = np.arange(cells + 1) * (pixels / cells)
    starts = np.arange(pixels, dtype=np.float64)
    low = np.maximum(edges[:-1, None], starts)
    high = np.minimum(edges[1:, None], starts + 1)
    return (np.maximum(high - low, 0) * (cells / pixels)).astype(np.float32)


class Scenes:
    """Questions about scenes; an item is one scene with all its questions, a sample one question.

    Scenes are generated on first use and then read from the cache.

    Args:
        split: `train`, `val` or `test`.
        seed: Seed of the scenes.
        count: Number of scenes.
        size: Side of the images in pixels.
        questions: Number of questions per scene.
        families: Families of questions; their order does not matter.
        cache: Cache folder; None takes `default_cache`.
        truth: Which things the target shows; not part of the cache.
        cells: Grid (rows, columns) of the target; not part of the cache.
        workers: Number of processes that generate scenes; None takes two if there are two cores.
        on_progress: Called with the number of scenes done and the total.

    Raises:
        UserError: A setting is invalid, or the cache cannot be written.

    Example:
        >>> data = Scenes("train", seed=0, count=4, size=32)
        >>> batch = data.batch([0, 1])
        >>> len(data), batch.images.shape, batch.target.shape
        (4, torch.Size([2, 3, 32, 32]), (8, 1, 1, 1, 64))
    """

    name = "scenes"

    def __init__(
        self,
        split: str,
        seed: int,
        count: int,
        size: int = 64,
        questions: int = 4,
        families: Sequence[str] = ALL_FAMILIES,
        cache: Path | str | None = None,
        truth: TruthKind = TruthKind.EVIDENCE,
        cells: tuple[int, int] = (8, 8),
        workers: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        chosen = tuple(name for name in ALL_FAMILIES if name in families)
        if unknown := [name for name in families if name not in ALL_FAMILIES]:
            raise UserError(
                f"Unknown question family {unknown[0]!r}: choose from {', '.join(ALL_FAMILIES)}."
            )
        if min(cells) < 1 or max(cells) > size:
            raise UserError(
                f"A grid of {cells[0]} x {cells[1]} cells does not fit into {size} pixels."
            )
        self.spec = SceneSpec(str(split), seed, count, size, questions, chosen)
        self.split, self.truth, self.cells = str(split), truth, cells
        self.vocabulary, self.answers = vocabulary(), ANSWERS
        if workers is None:
            workers = min(2, os.cpu_count() or 1)
        self.folder = prepare_scenes(
            self.spec, Path(cache or default_cache()), workers, on_progress
        )
        self._arrays = {
            name: np.load(self.folder / f"{name}.npy", mmap_mode="r")
            for name in array_shapes(self.spec)
        }
        self._ids = np.array([PAD, *self.vocabulary.encode(WORDS)])
        self._lengths = np.array([0, *(len(word) for word in WORDS)])
        self._content = np.array([False, *(is_content_word(word) for word in WORDS)])

    def __len__(self) -> int:
        return self.spec.count

    def digest(self) -> str:
        """Return a hash of the settings and the first scenes."""
        return scenes_digest(self.spec)

    def scene_and_questions(self, index: int) -> tuple[Scene, tuple[SceneQuestion, ...]]:
        """Return one scene and its questions as objects, generated again."""
        self._rows([index])
        spec = self.spec
        return generate_scene(spec.split, spec.seed, index, spec.questions, spec.families)

    def masks(self, index: int) -> Bool[Tensor, "m y x"]:
        """Return the visible pixels of each thing of one scene."""
        rows = self._rows([index])
        things = torch.arange(1, int(self._arrays["things"][rows[0]]) + 1)
        return torch.from_numpy(self._take("owners", rows)) == things[:, None, None]

    def boxes(self, index: int) -> Float[Tensor, "m 4"]:
        """Return the box around the visible pixels of each thing of one scene, in pixels."""
        rows = self._rows([index])
        return torch.from_numpy(self._take("boxes", rows)[0, : self._arrays["things"][rows[0]]])

    def coverage(self, indices: Sequence[int]) -> Float[Tensor, "i m k"]:
        """Return the share of each grid cell that shows each of up to 8 things of these scenes."""
        return torch.from_numpy(
            cell_coverage(self._take("owners", self._rows(indices)), self.cells)
        )

    def content(self, indices: Sequence[int]) -> Bool[Tensor, "b n"]:
        """Return which words of each question carry an argument of its program."""
        return torch.from_numpy(self._content[self._words(self._rows(indices))])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return all questions about these scenes; each image once.

        The target is the share of each cell that shows the things of `truth`, normalised. Where no
        thing decides the answer its row is zero and sees no cell, so that it counts nowhere.
        """
        rows = self._rows(indices)
        asked = self.spec.questions
        side = self.spec.size
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
            groups=tuple(
                ALL_FAMILIES[family] for family in self._take("families", rows).reshape(-1)
            ),
            target=self._target(rows),
        )

    def _target(self, rows: NDArray[np.int64]) -> AttentionMap:
        which = list(TruthKind).index(self.truth)
        bits = self._take("truths", rows)[:, :, which, None] >> np.arange(MOST) & 1
        shares = cell_coverage(self._take("owners", rows), self.cells)
        weights = torch.from_numpy(bits.astype(np.float32) @ shares).flatten(0, 1)
        side = self.spec.size
        keys = grid(*self.cells, geometry=PixelGeometry.identity(len(weights), (side, side)))
        seen = (weights.sum(dim=-1, keepdim=True) > 0).expand(weights.shape)
        return AttentionMap.from_coverage(weights, keys, seen)

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
        return f"scenes-{self.split}-{self.spec.seed}-{row:06d}-{question}"

    def _rows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        rows = np.asarray(list(indices), dtype=np.int64)
        if wrong := [row for row in rows.tolist() if not 0 <= row < len(self)]:
            raise UserError(
                f"scenes {self.split} has {len(self)} items: {wrong[0]} is out of range."
            )
        return rows
