"""Maps that somebody else has made: an .npz of arrays, or a folder of grey pictures.

An .npz holds one array a sample under its id, or `ids` and `maps` beside each other. An array of
two axes is a picture of weights over the whole photo, of any size; one of a single axis has a
weight a word. A folder holds NAME.png, over the whole photo. NAME is the id of a sample, or the end
of it behind the last slash, with its ending or without.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt import files
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.data.hat import gathered, read_map
from overt.errors import BadInput, Damaged

IDS, STACKED = "ids", "maps"  # the arrays of a file that has all maps in one
REAL = "biuf"  # kinds of numpy numbers that can be weights: truth values, whole and real ones
CELLS = (14, 14)  # of a picture, where no truth says otherwise

Weights = NDArray[np.float32]


class OutsideMaps:
    """Maps by the id of a sample: call it with a batch. `digest` tells them from others."""

    def __init__(
        self, where: Path, names: Mapping[str, Callable[[], Weights]], digest: str
    ) -> None:
        self.where, self.digest = where, digest
        self._names = names
        self._short: dict[str, str | None] = {}
        for name in names:
            for short in _shorter(name):
                self._short[short] = None if short in self._short else name

    def __len__(self) -> int:
        return len(self._names)

    def __call__(self, batch: Batch) -> AttentionMap:
        """The maps of the samples; pictures are brought to the canvas as their photos were."""
        found = [self._checked(name, self._names[self._find(name)]()) for name in batch.ids]
        axes = {one.ndim for one in found}
        if len(axes) > 1:
            raise Damaged(f"{self.where} holds pictures and texts; keep them in two files.")
        if axes == {1}:
            return self._texts(batch, found)
        return self._pictures(batch, found)

    def _texts(self, batch: Batch, found: list[Weights]) -> AttentionMap:
        if batch.tokens is None or batch.token_mask is None:
            raise BadInput(f"{self.where} has a weight a word, and the samples are no texts.")
        width = batch.tokens.shape[1]
        weights = torch.zeros(len(found), width)
        for row, one in enumerate(found):
            there = int(batch.token_mask[row].sum())
            if len(one) != there:
                raise BadInput(
                    f"{self.where} has {len(one)} weights for {batch.ids[row]!r}, which is read as "
                    f"{there} words."
                )
            weights[row, batch.token_mask[row].cpu()] = torch.from_numpy(one)
        return AttentionMap.from_cells(
            weights, words(width, geometry=batch.text), batch.token_mask.cpu()
        )

    def _pictures(self, batch: Batch, found: list[Weights]) -> AttentionMap:
        geometry = batch.sample_geometry
        shape = cells_of(batch)
        if geometry is None:  # nothing is known of photos: the arrays are what the model sees
            rows = [_area(torch.from_numpy(one), shape) for one in found]
            return AttentionMap.from_cells(torch.stack(rows), grid(*shape))
        geometry = geometry.to("cpu")
        boxes = geometry.cells(shape)
        rows = [
            gathered(torch.from_numpy(one), boxes[row], geometry.size[row])
            for row, one in enumerate(found)
        ]
        return AttentionMap.from_cells(torch.stack(rows), grid(*shape, geometry=geometry))

    def _find(self, name: str) -> str:
        if name in self._names:
            return name
        for short in (name, *_shorter(name)):
            found = self._short.get(short)
            if found is None and short in self._names:
                found = short
            if found is not None:
                return found
        example = next(iter(self._names))
        raise BadInput(
            f"{self.where} has no map of the sample {name!r}; its {len(self)} maps are called like "
            f"{example!r}."
        )

    def _checked(self, name: str, weights: Weights) -> Weights:
        if weights.ndim not in (1, 2) or not weights.size:
            raise Damaged(
                f"{self.where}: the map of {name!r} has the shape {weights.shape}; it is a picture "
                "of two axes, or a weight a word."
            )
        if not np.isfinite(weights).all() or bool((weights < 0).any()):
            raise Damaged(f"{self.where}: the map of {name!r} has numbers that are no weights.")
        return weights


def outside_maps(where: Path | str) -> OutsideMaps:
    """The maps in an .npz file or in a folder of PNG pictures; anything else is `BadInput`."""
    where = Path(where)
    if where.is_dir():
        pictures = sorted(where.glob("*.png"))
        if not pictures:
            raise BadInput(f"{where} holds no maps: there is no .png in it.")
        whole = hashlib.sha256()
        for path in pictures:
            whole.update(f"{path.name} {files.digest(path)}\n".encode())
        return OutsideMaps(
            where, {path.stem: _reader(path) for path in pictures}, whole.hexdigest()
        )
    if not where.exists():
        raise BadInput(f"{where} does not exist; name an .npz of maps or a folder of PNG pictures.")
    if where.suffix != ".npz" or not where.is_file():
        raise BadInput(f"{where} is neither an .npz of maps nor a folder of PNG pictures.")
    arrays = files.read_arrays(where)
    if set(arrays) == {IDS, STACKED}:
        names, maps = [str(one) for one in arrays[IDS]], arrays[STACKED]
        if len(names) != len(maps) or len(set(names)) < len(names):
            raise Damaged(f"{where} has {len(names)} ids for {len(maps)} maps, or one twice.")
        arrays = dict(zip(names, maps, strict=True))
    elif STACKED in arrays and arrays[STACKED].ndim == 3:
        raise BadInput(
            f"{where} has {len(arrays[STACKED])} maps in one array `{STACKED}` and does not say of "
            f"which samples; put an array `{IDS}` beside it with the id of each, and nothing else."
        )
    if not arrays:
        raise BadInput(f"{where} holds no maps.")
    known = {name: _kept(where, name, values) for name, values in arrays.items()}
    return OutsideMaps(where, known, files.digest(where))


def cells_of(batch: Batch) -> tuple[int, int]:
    """The grid of the truth where there is one over a picture, else 14 x 14."""
    if batch.target is not None and len(batch.target.keys.spans[0].shape) == 2:
        height, width = batch.target.keys.spans[0].shape
        return height, width
    return CELLS


def _reader(path: Path) -> Callable[[], Weights]:
    return lambda: read_map(path).numpy()


def _kept(where: Path, name: str, values: NDArray[np.generic]) -> Callable[[], Weights]:
    def read() -> Weights:
        if values.dtype.kind not in REAL:
            raise Damaged(
                f"{where}: the map of {name!r} holds {values.dtype} and no plain numbers; a weight "
                "is one number of at least 0."
            )
        return values.astype(np.float32)

    return read


def _shorter(name: str) -> list[str]:
    """Other ways to say a name: its end behind the last slash, without an ending."""
    end = name.rpartition("/")[2]
    return list(dict.fromkeys([end, end.rpartition(".")[0] or end, name.replace("/", "_")]))


def _area(picture: Float[Tensor, "y x"], shape: tuple[int, int]) -> Float[Tensor, " k"]:
    return torch.nn.functional.interpolate(picture[None, None], shape, mode="area").flatten()
