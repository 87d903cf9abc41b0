"""Gallery samples: inputs, prediction and attention of one sample, saved as arrays and JSON.

A saved gallery can be drawn again without the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from overt import io
from overt.errors import CorruptFileError
from overt.geometry import PixelGeometry

SCHEMA = 1
_ARRAYS = ("cells", "truth_cells", "spans", "word_weights", "word_cells", "answer_cells", "boxes")


@dataclass(frozen=True, eq=False)
class GallerySample:
    """A sample with the prediction and attention of one model.

    Fields that do not apply are None or empty.

    Args:
        id: identifier, equal across runs.
        image: original photo.
        geometry: maps the photo to the grid of `cells`; None: the grid covers the photo.
        text: question or text.
        spans: character spans of the words of `text`.
        group: group of samples, such as a question family.
        prediction: predicted answer.
        confidence: probability of the prediction.
        truth: correct answer.
        cells: attention on the grid.
        word_weights: attention on the words of `spans`.
        truth_cells: evidence per cell.
        scores: metrics of this sample, such as pointing and mass inside.
        levels: further maps of the same model by name, each with its own grid on the photo.
        word_cells: map of each word of `spans`.
        answer_cells: map of each word of the prediction.
        boxes: regions offered to the model, in pixels: left, top, right, bottom.

    Raises:
        ValueError: if the geometry, weights or maps do not match the other fields.

    Example:
        >>> GallerySample(id="q0", prediction="yes", truth="yes").right
        True
    """

    id: str
    image: UInt8[np.ndarray, "y x 3"] | None = None
    geometry: PixelGeometry | None = None
    text: str = ""
    spans: Int[np.ndarray, "n 2"] | None = None
    group: str = ""
    prediction: str = ""
    confidence: float = math.nan
    truth: str = ""
    cells: Float[np.ndarray, "r c"] | None = None
    word_weights: Float[np.ndarray, " n"] | None = None
    truth_cells: Float[np.ndarray, "r c"] | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, Float[np.ndarray, "_ _"]] = field(default_factory=dict)
    word_cells: Float[np.ndarray, "n r2 c2"] | None = None
    answer_cells: Float[np.ndarray, "m r3 c3"] | None = None
    boxes: Float[np.ndarray, "o 4"] | None = None

    def __post_init__(self) -> None:
        if self.geometry is not None:
            if len(self.geometry) != 1:
                raise ValueError(
                    f"sample {self.id!r}: expected one geometry, got {len(self.geometry)}"
                )
            size = tuple(self.geometry.size[0].tolist())
            if self.image is not None and size != self.image.shape[:2]:
                raise ValueError(
                    f"sample {self.id!r}: the image is {self.image.shape[:2]} (height, width), "
                    f"its geometry has {size}"
                )
        words = 0 if self.word_weights is None else len(self.word_weights)
        spans = 0 if self.spans is None else len(self.spans)
        if words and words != spans:
            raise ValueError(f"sample {self.id!r}: got {words} word weights for {spans} spans")
        for maps, count, what in (
            (self.word_cells, spans, "spans"),
            (self.answer_cells, len(self.prediction.split()), "words of its answer"),
        ):
            if maps is not None and len(maps) != count:
                raise ValueError(f"sample {self.id!r}: got {len(maps)} maps for {count} {what}")

    @property
    def right(self) -> bool | None:
        """Whether the prediction equals the truth; None if the truth is unknown."""
        return self.prediction == self.truth if self.truth else None


def save_gallery(folder: Path, samples: Sequence[GallerySample]) -> None:
    """Write a gallery folder atomically; equal images are stored once.

    Args:
        folder: folder to write.
        samples: samples of one run.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> samples = [GallerySample(id=word, prediction=word) for word in ("yes", "no")]
        >>> with TemporaryDirectory() as folder:
        ...     save_gallery(Path(folder, "gallery"), samples)
        ...     [sample.prediction for sample in load_gallery(Path(folder, "gallery"))]
        ['yes', 'no']
    """
    arrays: dict[str, np.ndarray] = {}
    images: dict[tuple[tuple[int, ...], bytes], int] = {}
    rows = []
    for i, sample in enumerate(samples):
        row: dict[str, Any] = {
            "id": sample.id,
            "text": sample.text,
            "group": sample.group,
            "prediction": sample.prediction,
            "confidence": _or_none(sample.confidence),
            "truth": sample.truth,
            "scores": {name: _or_none(score) for name, score in sample.scores.items()},
            "image": None,
            "geometry": None if sample.geometry is None else _geometry_to_json(sample.geometry),
            "arrays": [name for name in _ARRAYS if getattr(sample, name) is not None],
            "levels": list(sample.levels),
        }
        if sample.image is not None:
            key = (sample.image.shape, sample.image.tobytes())
            row["image"] = images.setdefault(key, len(images))
            arrays[f"image.{row['image']}"] = sample.image
        for name in row["arrays"]:
            arrays[f"{name}.{i}"] = getattr(sample, name)
        for number, level in enumerate(sample.levels.values()):
            arrays[f"level.{i}.{number}"] = level
        rows.append(row)
    with io.atomic_folder(folder) as new:
        io.write_json(new / "samples.json", {"schema": SCHEMA, "samples": rows})
        io.write_arrays(new / "arrays.npz", arrays)


def load_gallery(folder: Path) -> list[GallerySample]:
    """Read a gallery that `save_gallery` wrote.

    Args:
        folder: folder of the gallery.

    Returns:
        The samples.

    Raises:
        CorruptFileError: if the folder is not a gallery, or has another format version.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> sample = GallerySample(id="q0", image=np.zeros((8, 8, 3), np.uint8), cells=np.eye(4))
        >>> with TemporaryDirectory() as folder:
        ...     save_gallery(Path(folder, "gallery"), [sample])
        ...     load_gallery(Path(folder, "gallery"))[0].cells.shape
        (4, 4)
    """
    io.verify(folder)
    about = io.read_json(folder / "samples.json")
    arrays = io.read_arrays(folder / "arrays.npz")
    try:
        if about["schema"] != SCHEMA:
            raise CorruptFileError(
                f"{folder} has format {about['schema']}, expected {SCHEMA}: create it again."
            )
        return [_sample(i, row, arrays) for i, row in enumerate(about["samples"])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{folder} is not a gallery: {error!r}; create it again.") from error


def _sample(i: int, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> GallerySample:
    geometry = row["geometry"]
    return GallerySample(
        id=row["id"],
        image=None if row["image"] is None else arrays[f"image.{row['image']}"],
        geometry=None if geometry is None else _geometry_from_json(geometry),
        text=row["text"],
        group=row["group"],
        prediction=row["prediction"],
        confidence=_or_nan(row["confidence"]),
        truth=row["truth"],
        scores={name: _or_nan(score) for name, score in row["scores"].items()},
        levels={  # absent in older galleries
            str(name): arrays[f"level.{i}.{number}"]
            for number, name in enumerate(row.get("levels", []))
        },
        **{name: arrays[f"{name}.{i}"] for name in row["arrays"] if name in _ARRAYS},
    )


def _geometry_to_json(geometry: PixelGeometry) -> dict[str, Any]:
    return {
        "size": geometry.size[0].tolist(),
        "scale": geometry.scale[0].tolist(),
        "offset": geometry.offset[0].tolist(),
        "canvas": list(geometry.canvas),
        "kept": None if geometry.kept is None else geometry.kept[0].tolist(),
    }


def _geometry_from_json(value: Mapping[str, Any]) -> PixelGeometry:
    kept = value["kept"]
    return PixelGeometry(
        size=torch.tensor([value["size"]], dtype=torch.long),
        scale=torch.tensor([value["scale"]], dtype=torch.float64),
        offset=torch.tensor([value["offset"]], dtype=torch.float64),
        canvas=(int(value["canvas"][0]), int(value["canvas"][1])),
        kept=None if kept is None else torch.tensor([kept], dtype=torch.float64),
    )


def _or_none(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
