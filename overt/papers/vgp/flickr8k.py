"""Attending Self-Attention: captions of Flickr8k, to pretrain on before Flickr30k Entities.

Nearly all photos of Flickr30k Entities that are available here are in Flickr8k too. They are left
out by their id, whatever their split, so that no photo of fine-tuning or test is seen before.
Captions are those of all three official splits: nothing is evaluated on Flickr8k here.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.batch import Batch
from overt.data.captions import FLICKR8K, LISTS, read_tokens
from overt.data.flickr30k_entities import FOLDER, read_pairs
from overt.data.images import stretch
from overt.data.photo_dataset import read_lines
from overt.data.referring_expressions import read_sizes
from overt.data.vocabulary import Tokenizer, read_texts
from overt.data.vqa_dataset import PhotoInput, open_photos
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.io import digest
from overt.nn.vlbert.regions import pool_boxes
from overt.papers.han.features import frozen_backbone
from overt.papers.vgp.config import VgpPhotos
from overt.papers.vgp.in_memory import PORTION, TextsInMemory, cached_texts

NAME, TOKENS, PHOTOS = "flickr8k-pretraining", "Flickr8k.token.txt", "Flicker8k_Dataset"
PAIRS, SIZES = "vgp_pairs.json", "images.json"  # the photos of Flickr30k Entities
GRID = 3  # regions are the cells of a grid: there are no boxes
LONGEST = 60  # tokens of a caption; the longest of Flickr8k has 45


def entity_photos(root: Path) -> set[str]:
    """Return the ids of all photos of Flickr30k Entities that are available."""
    folder = root / FOLDER
    sized = {Path(name).stem for name in read_sizes(folder / SIZES)}
    listed = {name for name, _, shown, _ in read_pairs(folder / PAIRS) if shown}
    return sized | listed


def pretraining_photos(root: Path) -> list[str]:
    """Return the photos of Flickr8k whose id is not that of a photo of Flickr30k Entities."""
    folder = root / FLICKR8K
    used = entity_photos(root)
    names = [
        name
        for part in LISTS.values()
        for name in read_lines(folder / f"Flickr_8k.{part}Images.txt")
    ]
    return [name for name in names if photo_id(name) not in used]


def photo_id(name: str) -> str:
    """Return the id of a photo of Flickr: the number at the start of its file name."""
    return Path(name).stem.partition("_")[0]


def load_flickr8k(
    data: VgpPhotos,
    root: Path,
    reader: Tokenizer,
    device: torch.device,
    hashes: Sequence[str] = (),
) -> TextsInMemory:
    """Load captions of photos that are not in Flickr30k Entities, with features of a grid.

    `hashes` identify a backbone and a tokenizer that are not the standard ones.
    """
    folder = root / FLICKR8K
    names = pretraining_photos(root)
    captions = read_tokens(folder / TOKENS)
    names = [name for name in names if name in captions]
    if data.limit is not None:
        names = names[: data.limit]
    if len(names) < 2:
        raise UserError(f"{folder} has {len(names)} photos to pretrain on: at least 2 are needed.")
    listed = hashlib.sha256("\n".join(names).encode()).hexdigest()
    key = "/".join([digest(folder / TOKENS), listed, str(data.size), data.backbone, *hashes])
    make = partial(grid_texts, data, folder, names, captions, reader, device)
    found = cached_texts(NAME, "train", key, make)
    return replace(found, source=hashlib.sha256(key.encode()).hexdigest())


def grid_texts(
    data: VgpPhotos,
    folder: Path,
    names: list[str],
    captions: dict[str, list[str]],
    reader: Tokenizer,
    device: torch.device,
) -> TextsInMemory:
    """Encode each photo once by the frozen CNN, and tokenize its captions."""
    look = PhotoInput((data.size, data.size), stretch)
    shown = open_photos(NAME, "train", folder / PHOTOS, names, look)
    net = frozen_backbone(data.backbone, device)
    features, geometries, parts = [], [], []
    for start in range(0, len(names), PORTION):
        rows = range(start, min(start + PORTION, len(names)))
        batch = shown.batch(rows)
        assert batch.images is not None and batch.geometry is not None
        boxes = grid_boxes(batch.geometry)
        with torch.no_grad():
            cells = net.cells(batch.images.to(device)).cpu().float()
        side = round(cells.shape[1] ** 0.5)
        # From (photos, cells, features) to (photos, features, rows, columns).
        features.append(pool_boxes(cells.mT.unflatten(2, (side, side)), boxes, batch.geometry))
        geometries.append(batch.geometry)
        parts.append(_captions_of(names[rows.start : rows.stop], captions, reader, batch, boxes))
    found = TextsInMemory.joined(NAME, "train", "", parts)
    # Features are those of a photo, which its captions share.
    return replace(found, geometry=PixelGeometry.join(geometries), features=torch.cat(features))


def grid_boxes(geometry: PixelGeometry) -> Float[Tensor, "i m 4"]:
    """Return the boxes of a grid over each stored photo, in its pixels, row by row."""
    edges = torch.arange(GRID + 1) / GRID
    places = [
        (edges[x], edges[y], edges[x + 1], edges[y + 1]) for y in range(GRID) for x in range(GRID)
    ]
    size = geometry.size.flip(-1).repeat(1, 2)  # (height, width) to (x, y, x, y)
    return torch.tensor(places) * size[:, None]


def _captions_of(
    names: list[str],
    captions: dict[str, list[str]],
    reader: Tokenizer,
    batch: Batch,
    boxes: Float[Tensor, "i m 4"],
) -> Batch:
    """Return all captions of some photos, each with the regions of its photo."""
    said = [
        (row, number) for row, name in enumerate(names) for number in range(len(captions[name]))
    ]
    tokens, mask, _ = read_texts(reader, [captions[names[row]][number] for row, number in said])
    rows = torch.tensor([row for row, _ in said])
    return Batch(
        ids=tuple(f"flickr8k/{names[row]}#{number}" for row, number in said),
        image_of=rows,
        geometry=batch.geometry,
        tokens=tokens[:, :LONGEST],
        token_mask=mask[:, :LONGEST],
        boxes=boxes[rows],
    )
