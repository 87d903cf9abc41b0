"""Caption pairs of a few small scenes, a network of two layers, and a few photos on disk."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from overt.data.scenes.caption_pairs import CaptionPairScenes
from overt.nn.vlbert.model import ClassificationHead, VLBert, VLBertSizes
from overt.nn.vlbert.regions import PooledRegionEncoder
from overt.papers.vgp.data import pairs_in_memory
from overt.papers.vgp.in_memory import TextsInMemory

SETS = (
    *("data.limit=8", "data.size=32", "model.width=0.1", "model.layers=2", "train.steps=2"),
    *("train.batch=4", "after.epochs=1", "train.card=2"),
)


def drawn(count: int = 8) -> CaptionPairScenes:
    return CaptionPairScenes("train", 0, count, size=32, regions=10)


@lru_cache(maxsize=1)
def texts() -> TextsInMemory:
    return pairs_in_memory(drawn())


def net(dropout: float = 0.0) -> VLBert:
    torch.manual_seed(0)
    sizes = VLBertSizes(
        drawn(1).vocabulary.size, 12, 2, 3, 16, positions=80, dropout=dropout, gain=1.0
    )
    return VLBert(
        sizes, PooledRegionEncoder([4, 6], [2, 2]), ClassificationHead(12, 3, dropout), relations=5
    )


def write_photos(root: Path, each: int = 2) -> Path:
    """Write photos of three splits, two captions each, in the format of Flickr30k Entities."""
    folder = root / "flickr30k_entities"
    (folder / "images").mkdir(parents=True)
    dice = np.random.default_rng(0)
    phrases, pairs, sizes = [], [], {}
    for at, split in enumerate(["train", "val", "test"] * each):
        photo = str(100 + at)
        shown = dice.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(shown).save(folder / "images" / f"{photo}.jpg")
        sizes[photo] = {"file": f"{photo}.jpg", "original_size": [80, 60]}
        pairs.append({"image": photo, "split": split, "has_image": True, "pos": [], "neg": []})
        for number, phrase_texts in enumerate(
            (("A dog", "the grass"), ("A small dog", "a red ball"))
        ):
            for place, (text, entity) in enumerate(
                zip(phrase_texts, ("1", str(2 + number)), strict=True)
            ):
                phrases.append(
                    {
                        "image": f"{photo}#{number}",
                        "phrase": text.split(),
                        "box": [4 * int(entity), 6, 30, 40],
                        "entity": entity,
                        "start": 5 * place,
                        "end": 5 * place + 2,
                        "categories": ["other"],
                    }
                )
    for name, value in (
        ("annotation_test.json", phrases),
        ("vgp_pairs.json", pairs),
        ("images.json", sizes),
    ):
        (folder / name).write_text(json.dumps(value))
    return root
