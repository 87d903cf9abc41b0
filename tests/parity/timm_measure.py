"""Scorecards of timm's models, saved as timm saves them, as JSON, one row a model.

    python -m tests.parity.timm_measure WORK [FOLDER]

test_timm_measure.py runs it in a process of its own, as test_timm.py does with timm_maps.py.
"""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from PIL import Image

from overt.files import write_json, write_tensors
from overt.recipes import measuring
from tests.parity.timm_maps import load

MODELS = {"vit_tiny_patch16_224": {"img_size": 64, "depth": 2}, "resnet10t": {}}
MEASURES = ("mass_inside", "deletion_area@mask", "deletion_area@mean", "output_change_evened")


def save(timm: ModuleType, folder: Path, name: str, options: dict[str, int]) -> Path:
    """A model of random weights with the config that timm writes beside them."""
    model = timm.create_model(name, num_classes=5, **options)
    known = dict(model.pretrained_cfg)
    numbers = {word: list(known[word]) for word in ("mean", "std")}
    about = {"input_size": [3, 64, 64], "num_classes": 5, **numbers}
    said = {"architecture": name, "num_classes": 5, "model_args": options}
    write_json(folder / name / "config.json", {**said, "pretrained_cfg": about})
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    write_tensors(folder / name / "model.safetensors", weights)
    return folder / name


def main() -> None:
    """Two photos, one model that attends and one that does not."""
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
        wish = measuring.Wish(str(where), str(folder / "photos"), MEASURES)
        card = measuring.score(wish, None)
        found[name] = {"maps": card.maps, "measures": card.keys}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
