"""Print scorecards of models saved by timm as JSON, one row per model.

    python -m tests.parity.timm_measure WORK [FOLDER]

test_timm_measure.py runs it in a subprocess, as test_timm.py does with timm_maps.py.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image

from overt.inspect import measure
from overt.io import write_json, write_tensors
from tests.parity.timm_maps import load

MODELS = {"vit_tiny_patch16_224": {"img_size": 64, "depth": 2}, "resnet10t": {}}
MEASURES = ("mass_inside", "deletion_area@mask", "deletion_area@mean", "output_change_evened")


def save(timm: ModuleType, folder: Path, name: str, options: dict[str, int]) -> Path:
    """Save a model of random weights with the config that timm writes."""
    model = timm.create_model(name, num_classes=5, **options)
    defaults = dict(model.pretrained_cfg)
    numbers = {word: list(defaults[word]) for word in ("mean", "std")}
    pretrained_cfg = {"input_size": [3, 64, 64], "num_classes": 5, **numbers}
    config = {"architecture": name, "num_classes": 5, "model_args": options}
    write_json(folder / name / "config.json", {**config, "pretrained_cfg": pretrained_cfg})
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    write_tensors(folder / name / "model.safetensors", weights)
    return folder / name


def main() -> None:
    """Measure one model with attention and one without on two photos."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path[:0] = sys.argv[2:]
    timm, folder = load(), Path(sys.argv[1])
    (folder / "photos" / "maps").mkdir(parents=True)
    dice = np.random.default_rng(0)
    for at in range(2):
        photo = dice.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(photo).save(folder / "photos" / f"p{at}.png")
        Image.fromarray(photo[..., 0]).save(folder / "photos" / "maps" / f"p{at}.png")
    found = {}
    for name, options in MODELS.items():
        where = save(timm, folder, name, options)
        request = measure.MeasureRequest(str(where), str(folder / "photos"), MEASURES)
        scorecard = measure.compute_scorecard(request, None)
        found[name] = {"maps": scorecard.maps, "measures": scorecard.keys}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
