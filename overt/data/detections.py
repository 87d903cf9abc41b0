"""Boxes that a detector found on photos, as they are published for RefCOCO.

Yu et al., "MAttNet", CVPR 2018, https://github.com/lichengunc/MAttNet, whose file
`res101_coco_minus_refer_notime_dets.json` VL-BERT takes for detected boxes: a list of objects with
`image_id`, a number of COCO, and `box`: left, top, width, height. Lists of `bbox`, as COCO's own
tools write results, are read as well.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.records import records
from overt.errors import Damaged


def read_detections(
    path: Path, least: float = 0.0, part: str = "train2014"
) -> dict[str, Float[Tensor, "_ 4"]]:
    """The boxes found on each photo, by its file name in COCO: left, top, right, bottom.

    Boxes with a `score` below `least` are left out, and those of no area. The order is that of the
    file.
    """
    found: dict[str, list[list[float]]] = {}
    for number, entry in enumerate(records(path, None)):
        try:
            photo = f"COCO_{part}_{int(entry['image_id']):012d}.jpg"
            left, top, width, height = map(float, entry["box" if "box" in entry else "bbox"])
            score = float(entry.get("score", 1.0))
        except (KeyError, TypeError, ValueError) as problem:
            raise Damaged(
                f"{path}: entry {number} is no box on a photo ({problem!r:.50}); get it again."
            ) from problem
        if score >= least and width > 0 and height > 0:
            found.setdefault(photo, []).append([left, top, left + width, top + height])
    return {photo: torch.tensor(boxes) for photo, boxes in found.items()}
