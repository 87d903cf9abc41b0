"""Tiny settings of captioners, and Flickr8k, Flickr30k and COCO files with a few photos."""

import base64
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

SETS = (
    *("data.limit=12", "data.train=12", "data.val=4", "data.test=4"),
    *("model.width=0.0625", "model.layers=2", "train.batch=4", "train.epochs=1"),
    *("critic.batch=4", "train.card=0"),
)
PHOTO_SETS = tuple(one for one in SETS if not one.startswith(("data.tr", "data.v", "data.te")))
CAPTIONS = (
    "A dog runs .",
    "A brown dog is running !",
    "The dog runs on grass",
    "a dog",
    "dog , grass",
)


def forbid_value_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors on the "meta" device behave like GPU tensors during CUDA graph capture.

    Reading a value of a meta tensor raises anyway; assigning a number would copy it
    from the host, which graph capture rejects.
    """
    given = torch.Tensor.__setitem__

    def assign(ours: torch.Tensor, at: object, value: object) -> None:
        assert isinstance(value, torch.Tensor), "a number is copied to the GPU"
        given(ours, at, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", assign)
    # autocast does not support meta tensors
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def write_flickr8k(root: Path, photos: int = 12) -> Path:
    """Write Flickr8k in its original format: half train, the rest validation and test."""
    folder = root / "flickr8k"
    (folder / "Flicker8k_Dataset").mkdir(parents=True)
    dice = np.random.default_rng(1)
    names = [f"{number}.jpg" for number in range(photos)]
    for name in names:
        pixels = dice.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "Flicker8k_Dataset" / name)
    lines = [f"{name}#{n}\t{text}" for name in names for n, text in enumerate(CAPTIONS)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    half, rest = photos // 2, 3 * photos // 4
    parts = {"train": names[:half], "dev": names[half:rest], "test": names[rest:]}
    for part, some in parts.items():
        (folder / f"Flickr_8k.{part}Images.txt").write_text("\n".join(some) + "\n")
    return root


def write_flickr30k(root: Path, photos: int = 12) -> Path:
    """Write Karpathy's file of Flickr30k and its photos; half of them are for training."""
    folder = root / "flickr30k_entities/images"
    folder.mkdir(parents=True)
    names = [f"{number}.jpg" for number in range(photos)]
    dice = np.random.default_rng(1)
    for name in names:
        pixels = dice.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    _write_karpathy(root, "flickr30k", [{"filename": name} for name in names])
    return root


def _write_karpathy(root: Path, name: str, images: list[dict[str, str]]) -> None:
    parts = ["train", "restval", "val", "test"]
    captions = {"sentences": [{"raw": text} for text in CAPTIONS]}
    entries = [{**one, "split": parts[at % 4], **captions} for at, one in enumerate(images)]
    (root / "captions").mkdir(parents=True)
    (root / "captions" / f"dataset_{name}.json").write_text(json.dumps({"images": entries}))


def write_coco(root: Path, photos: int = 12) -> Path:
    """Write Karpathy's file without its photos; return the folder of bottom-up features."""
    names = [f"COCO_val2014_{number:012d}.jpg" for number in range(photos)]
    _write_karpathy(root, "coco", [{"filename": one, "filepath": "val2014"} for one in names])
    folder = root / "bottom-up"
    folder.mkdir()
    write_bottom_up(folder / "karpathy.tsv", range(photos))
    return folder


def write_bottom_up(path: Path, numbers: range, width: int = 8) -> None:
    """Write lines in the official format; photo n has 2 + n % 3 regions."""
    dice = np.random.default_rng(2)
    lines = []
    for number in numbers:
        count = 2 + number % 3
        boxes = dice.random((count, 4), np.float32) * 100
        features = dice.standard_normal((count, width), np.float32)
        packed = [base64.b64encode(one.tobytes()).decode() for one in (boxes, features)]
        lines.append("\t".join([str(number), "640", "480", str(count), *packed]))
    path.write_text("\n".join(lines) + "\n")
