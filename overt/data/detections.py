"""Detected boxes on photos, as published for RefCOCO.

Yu et al., "MAttNet", CVPR 2018, https://github.com/lichengunc/MAttNet, whose file
`res101_coco_minus_refer_notime_dets.json` VL-BERT uses for detected boxes: a list of objects with
`image_id`, a COCO image id, and `box`: left, top, width, height. Lists with `bbox`, the result
format of COCO's tools, are read as well.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.json_stream import iterate_records
from overt.errors import CorruptFileError


def read_detections(
    path: Path, least: float = 0.0, part: str = "train2014"
) -> dict[str, Float[Tensor, "_ 4"]]:
    """Read the boxes of each photo, by its COCO file name: left, top, right, bottom, in file order.

    Boxes with a `score` below `least` and boxes without area are left out.
    """
    found: dict[str, list[list[float]]] = {}
    for number, entry in enumerate(iterate_records(path, None)):
        try:
            photo = f"COCO_{part}_{int(entry['image_id']):012d}.jpg"
            left, top, width, height = map(float, entry["box" if "box" in entry else "bbox"])
            score = float(entry.get("score", 1.0))
        except (KeyError, TypeError, ValueError) as problem:
            raise CorruptFileError(
                f"{path}: entry {number} has no image_id and box ({problem!r:.50}); "
                "download it again."
            ) from problem
        if score >= least and width > 0 and height > 0:
            found.setdefault(photo, []).append([left, top, left + width, top + height])
    return {photo: torch.tensor(boxes) for photo, boxes in found.items()}
