"""Maps from other programs: an .npz file of arrays, or a folder of grayscale images.

An .npz file holds one array per sample under its id, or the arrays `ids` and `maps`. An array with
two axes is a map over the whole photo, of any size; one with a single axis has a weight per word. A
folder holds NAME.png, over the whole photo. NAME is the id of a sample, or its part after the last
slash, with or without its suffix.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from overt import io
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.data.vqa_hat import read_map, sum_in_boxes
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

IDS, STACKED = "ids", "maps"  # the arrays of a file with all maps in one
REAL = "biuf"  # NumPy dtype kinds that can be weights: bool, integers, floats
CELLS = (14, 14)  # default grid of a picture without a target

Weights = NDArray[np.float32]


class ExternalMaps:
    """Maps by sample id: call it with a batch. `digest` identifies its content."""

    def __init__(
        self, where: Path, names: Mapping[str, Callable[[], Weights]], digest: str
    ) -> None:
        self.where, self.digest = where, digest
        self._names = names
        self._short: dict[str, str | None] = {}
        for name in names:
            for short in _short_names(name):
                self._short[short] = None if short in self._short else name

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a map of this sample."""
        return isinstance(name, str) and self._lookup(name) is not None

    def check(self, names: Sequence[str]) -> None:
        """Check every map of these samples, and that no other sample has one.

        Raises:
            UserError: A sample has no map, or there is a map of none of them.
            CorruptFileError: A map has the wrong shape or invalid weights.
        """
        used = set()
        for name in names:
            found = self._find(name)
            used.add(found)
            self._checked(name, self._names[found]())
        unknown = [name for name in self._names if name not in used]
        if unknown:
            raise UserError(
                f"{self.where} has {len(unknown)} maps of no sample, such as {unknown[0]!r}: the "
                f"{len(names)} samples have ids such as {names[0]!r}."
            )

    def __call__(self, batch: Batch) -> AttentionMap:
        """Return the maps of the samples; images are transformed as their photos were."""
        found = [self._checked(name, self._names[self._find(name)]()) for name in batch.ids]
        axes = {one.ndim for one in found}
        if len(axes) > 1:
            raise CorruptFileError(
                f"{self.where} holds maps of pictures and of texts: use two files."
            )
        if axes == {1}:
            return self._texts(batch, found)
        return self._pictures(batch, found)

    def _texts(self, batch: Batch, found: list[Weights]) -> AttentionMap:
        if batch.tokens is None or batch.token_mask is None:
            raise UserError(f"{self.where} has weights per word, but the samples are not texts.")
        width = batch.tokens.shape[1]
        weights = torch.zeros(len(found), width)
        for row, one in enumerate(found):
            there = int(batch.token_mask[row].sum())
            if len(one) != there:
                raise UserError(
                    f"{self.where} has {len(one)} weights for {batch.ids[row]!r}, which has "
                    f"{there} words."
                )
            weights[row, batch.token_mask[row].cpu()] = torch.from_numpy(one)
        return AttentionMap.from_cells(
            weights, words(width, geometry=batch.text), batch.token_mask.cpu()
        )

    def _pictures(self, batch: Batch, found: list[Weights]) -> AttentionMap:
        shape, geometry = target_grid(batch), batch.sample_geometry
        geometry = None if geometry is None else geometry.to("cpu")
        # without photos, the arrays are over the model's input
        over = PixelGeometry.identity(len(found), shape) if geometry is None else geometry
        boxes = over.cells(shape)
        rows = [
            sum_in_boxes(torch.from_numpy(one), boxes[row], over.size[row])
            for row, one in enumerate(found)
        ]
        return AttentionMap.from_cells(torch.stack(rows), grid(*shape, geometry=geometry))

    def _lookup(self, name: str) -> str | None:
        if name in self._names:
            return name
        for short in (name, *_short_names(name)):
            found = self._short.get(short)
            if found is None and short in self._names:
                found = short
            if found is not None:
                return found
        return None

    def _find(self, name: str) -> str:
        found = self._lookup(name)
        if found is not None:
            return found
        example = next(iter(self._names))
        raise UserError(
            f"{self.where} has no map of sample {name!r}: its {len(self)} maps have names such as "
            f"{example!r}."
        )

    def _checked(self, name: str, weights: Weights) -> Weights:
        if weights.ndim not in (1, 2) or not weights.size:
            raise CorruptFileError(
                f"{self.where}: the map of {name!r} must have two axes (a picture) or one (words), "
                f"got shape {weights.shape}."
            )
        if not np.isfinite(weights).all() or bool((weights < 0).any()):
            raise CorruptFileError(
                f"{self.where}: the map of {name!r} must have finite weights of at least 0."
            )
        return weights


def load_external_maps(where: Path | str) -> ExternalMaps:
    """Load maps from an .npz file or a folder of PNG images.

    Args:
        where: The file or folder.

    Returns:
        The maps, to be called with a batch.

    Raises:
        UserError: There are no maps at this path.
        CorruptFileError: The file is damaged, or ids and maps do not match.

    Example:
        >>> load_external_maps("no/such/file.npz")
        Traceback (most recent call last):
        overt.errors.UserError: no/such/file.npz does not exist: ...
    """
    where = Path(where)
    if where.is_dir():
        pictures = sorted(where.glob("*.png"))
        if not pictures:
            raise UserError(f"{where} holds no maps: expected .png files.")
        whole = hashlib.sha256()
        for path in pictures:
            whole.update(f"{path.name} {io.digest(path)}\n".encode())
        return ExternalMaps(
            where, {path.stem: _image_reader(path) for path in pictures}, whole.hexdigest()
        )
    if not where.exists():
        raise UserError(
            f"{where} does not exist: give an .npz file of maps or a folder of PNG images."
        )
    if where.suffix != ".npz" or not where.is_file():
        raise UserError(f"{where} is neither an .npz file of maps nor a folder of PNG images.")
    arrays = io.read_arrays(where)
    if set(arrays) == {IDS, STACKED}:
        names, maps = [str(one) for one in arrays[IDS]], arrays[STACKED]
        if len(names) != len(maps) or len(set(names)) < len(names):
            raise CorruptFileError(
                f"{where} must have a unique id per map, got {len(names)} ids for {len(maps)} maps."
            )
        arrays = dict(zip(names, maps, strict=True))
    elif STACKED in arrays and arrays[STACKED].ndim == 3:
        raise UserError(
            f"{where} has {len(arrays[STACKED])} maps in one array `{STACKED}` without ids: add an "
            f"array `{IDS}` with the sample id of each, and nothing else."
        )
    if not arrays:
        raise UserError(f"{where} holds no maps.")
    known = {name: _array_reader(where, name, values) for name, values in arrays.items()}
    return ExternalMaps(where, known, io.digest(where))


def target_grid(batch: Batch) -> tuple[int, int]:
    """Return the grid of the target if it is over a picture, else 14 x 14."""
    if batch.target is not None and len(batch.target.keys.spans[0].shape) == 2:
        height, width = batch.target.keys.spans[0].shape
        return height, width
    return CELLS


def _image_reader(path: Path) -> Callable[[], Weights]:
    return lambda: read_map(path).numpy()


def _array_reader(where: Path, name: str, values: NDArray[np.generic]) -> Callable[[], Weights]:
    def read() -> Weights:
        if values.dtype.kind not in REAL:
            raise CorruptFileError(
                f"{where}: the map of {name!r} must hold numbers of at least 0, got {values.dtype}."
            )
        return values.astype(np.float32)

    return read


def _short_names(name: str) -> list[str]:
    """List other spellings of a name: after the last slash, without suffix, with underscores."""
    end = name.rpartition("/")[2]
    return list(dict.fromkeys([end, end.rpartition(".")[0] or end, name.replace("/", "_")]))
