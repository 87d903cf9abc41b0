"""One thing a gallery shows: what was asked, what was answered, and where the model looked.

A gallery is a folder of plain arrays and JSON, so that a page or a picture can be made again long
after the model is gone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from overt import files
from overt.errors import Damaged
from overt.geometry import PixelGeometry

SCHEMA = 1
_ARRAYS = ("cells", "truth_cells", "spans", "word_weights", "word_cells", "answer_cells", "boxes")


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample with one answer to it. What a task or a model does not have is None or empty.

    `image` is the original photo and `geometry`, of one photo, leads from it to the grid of
    `cells`, the attention; without a geometry the grid spans the photo. `truth_cells` says how
    much of each cell is evidence. `word_weights` are the attention on the words whose characters
    in `text` are `spans`. `scores` are measures of this sample, such as pointing and mass. `levels`
    are more maps of the same model by name, each with a grid of its own over the same photo.
    `word_cells` are maps of the words in `spans`, where each word looks, and `answer_cells` those
    of the words of the prediction. `boxes` are the regions that the model chose among, in pixels of
    the photo: left, top, right, bottom.
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
                    f"sample {self.id!r} needs the geometry of one, not of {len(self.geometry)}"
                )
            size = tuple(self.geometry.size[0].tolist())
            if self.image is not None and size != self.image.shape[:2]:
                raise ValueError(
                    f"sample {self.id!r}: the image is {self.image.shape[:2]} (height, width), "
                    f"but its geometry says {size}"
                )
        words = 0 if self.word_weights is None else len(self.word_weights)
        spans = 0 if self.spans is None else len(self.spans)
        if words and words != spans:
            raise ValueError(f"sample {self.id!r} has {words} word weights for {spans} spans")
        for maps, count, what in (
            (self.word_cells, spans, "spans"),
            (self.answer_cells, len(self.prediction.split()), "words of its answer"),
        ):
            if maps is not None and len(maps) != count:
                raise ValueError(f"sample {self.id!r} has {len(maps)} maps for {count} {what}")

    @property
    def right(self) -> bool | None:
        """Whether the prediction is the truth; None where the truth is not known."""
        return self.prediction == self.truth if self.truth else None


def save_gallery(folder: Path, samples: Sequence[Sample]) -> None:
    """Write a gallery, whole or not at all. Samples that share one image share it on disk."""
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
    with files.writing(folder) as new:
        files.write_json(new / "samples.json", {"schema": SCHEMA, "samples": rows})
        files.write_arrays(new / "arrays.npz", arrays)


def load_gallery(folder: Path) -> list[Sample]:
    """Read a gallery back as it was written; a folder that is not one raises `Damaged`."""
    files.verify(folder)
    about = files.read_json(folder / "samples.json")
    arrays = files.read_arrays(folder / "arrays.npz")
    try:
        if about["schema"] != SCHEMA:
            raise Damaged(
                f"{folder} is a gallery of format {about['schema']}, and this version reads "
                f"{SCHEMA}; make it again."
            )
        return [_sample(i, row, arrays) for i, row in enumerate(about["samples"])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{folder} is not a gallery: {error!r}; make it again.") from error


def _sample(i: int, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Sample:
    geometry = row["geometry"]
    return Sample(
        id=row["id"],
        image=None if row["image"] is None else arrays[f"image.{row['image']}"],
        geometry=None if geometry is None else _geometry_from_json(geometry),
        text=row["text"],
        group=row["group"],
        prediction=row["prediction"],
        confidence=_or_nan(row["confidence"]),
        truth=row["truth"],
        scores={name: _or_nan(score) for name, score in row["scores"].items()},
        levels={  # galleries of earlier versions have none
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
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
