"""Attention-Aligned Transformer: captioned images for training, validation and test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from overt.data.batch import Batch
from overt.data.bottom_up import BottomUpFeatures, coco_image_id, is_bottom_up
from overt.data.captions import FOLDERS, Captions, flickr8k, karpathy
from overt.data.catalog import data_root
from overt.data.feature_cache import FeatureCache
from overt.data.photo_dataset import PhotoDataset
from overt.data.scenes.captions import CaptionScenes
from overt.data.vocabulary import BEGIN, END, Vocabulary, pad
from overt.data.vqa_dataset import PhotoInput, build_vocabulary, open_photos
from overt.experiments.dataset_views import batches_of
from overt.experiments.inference_spec import BackboneSpec, ImageInput, NotInteractive
from overt.experiments.recipe import SPLITS, RunContext
from overt.geometry import PixelGeometry
from overt.metrics.captions import tokenize_caption
from overt.nn.captioning.captioner import CachedRegionEncoder
from overt.nn.vqa.image_encoders import CachedImageEncoder, ImageEncoder
from overt.papers.a2.config import A2Dataset, A2Photos, A2Recipe, A2Scenes
from overt.papers.han.features import cache_cells
from overt.train import processes

PORTION = 256  # images read at a time
MAX_BYTES_IN_MEMORY = 8 << 30  # of features; larger sets are read per batch
KARPATHY_NAMES = {
    A2Dataset.FLICKR8K: "flickr8k",
    A2Dataset.FLICKR30K: "flickr30k",
    A2Dataset.COCO: "coco",
}
CROP = 10  # side of a resampled region in pixels

ImageInputs = Mapping[str, Tensor]  # features, or pixels and boxes


@runtime_checkable
class ImageSource(Protocol):
    """Protocol that returns the inputs of images by their indices in the split."""

    def __call__(self, chosen: Sequence[int]) -> ImageInputs: ...
    def to(self, device: torch.device | str) -> "ImageSource": ...


@dataclass(frozen=True, eq=False)
class ImagesInMemory:
    """All images in memory, one row each; features are stored in half precision."""

    rows: ImageInputs

    def __call__(self, chosen: Sequence[int]) -> ImageInputs:
        """Return the rows of these images."""
        found = {name: one[list(chosen)] for name, one in self.rows.items()}
        return {
            name: one.float() if one.is_floating_point() else one for name, one in found.items()
        }

    def to(self, device: torch.device | str) -> "ImagesInMemory":
        """Move to another device."""
        return ImagesInMemory({name: one.to(device) for name, one in self.rows.items()})


@dataclass(frozen=True, eq=False)
class ImagesOnDisk:
    """Images that are read from disk for each batch."""

    read: Callable[[Sequence[int]], ImageInputs]
    device: torch.device | str = "cpu"

    def __call__(self, chosen: Sequence[int]) -> ImageInputs:
        """Read these images."""
        return {name: one.to(self.device) for name, one in self.read(chosen).items()}

    def to(self, device: torch.device | str) -> "ImagesOnDisk":
        """Read to another device."""
        return ImagesOnDisk(self.read, device)


@dataclass(frozen=True, eq=False)
class CaptionedImages:
    """Images with their captions. An item is an image, and each of its captions is a sample.

    `tokens` holds all captions one after the other, each as begin, words, end; those of image i
    are the rows `first[i]` to `first[i + 1]`. `show` returns the inputs of images, one row
    each. All batches are as wide as the longest caption, so that a captured CUDA graph fits
    every batch.
    """

    name: str
    split: str
    source: str
    ids: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    tokens: Int[Tensor, "n w"]
    lengths: Int[np.ndarray, " n"]
    first: Int[np.ndarray, " p"]
    show: ImageSource

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def each(self) -> int | None:
        """Return the number of captions per image, or None if it varies."""
        counts = np.unique(np.diff(self.first))
        return int(counts[0]) if len(counts) == 1 else None

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return all captions of these images, on the device of the tokens."""
        chosen = [int(one) for one in indices]
        spans = [np.arange(self.first[one], self.first[one + 1]) for one in chosen]
        # All caption rows of these images, and the image of each.
        rows = np.concatenate(spans)
        of = np.repeat(np.arange(len(chosen)), [len(span) for span in spans])
        device = self.tokens.device
        tokens = self.tokens[torch.from_numpy(rows).to(device)]
        numbers = [row - self.first[chosen[at]] for row, at in zip(rows, of, strict=True)]
        return replace(
            _image_batch(self.show(chosen), torch.from_numpy(of).to(device)),
            ids=tuple(f"{self.ids[chosen[at]]}#{n}" for at, n in zip(of, numbers, strict=True)),
            tokens=tokens,
            token_mask=_mask_until_end(tokens),
            references=tuple(self.references[chosen[at]] for at in of),
        )

    def without_captions(self, indices: Sequence[int]) -> Batch:
        """Return these images without captions, one sample each, for generation."""
        chosen = [int(one) for one in indices]
        at = torch.arange(len(chosen), device=self.tokens.device)
        return replace(
            _image_batch(self.show(chosen), at),
            ids=tuple(self.ids[one] for one in chosen),
            references=tuple(self.references[one] for one in chosen),
        )

    def to(self, device: torch.device | str) -> "CaptionedImages":
        """Move tokens and images to another device."""
        return replace(self, tokens=self.tokens.to(device), show=self.show.to(device))

    def texts(self) -> list[list[list[int]]]:
        """Return the captions of every image as ids with the end token, as reward references."""
        rows, lengths = self.tokens.cpu().tolist(), self.lengths.tolist()
        return [
            [rows[at][1 : lengths[at]] for at in range(self.first[one], self.first[one + 1])]
            for one in range(len(self))
        ]

    def digest(self) -> str:
        """Return the hash of the source dataset."""
        return self.source


def _image_batch(seen: ImageInputs, of: Int[Tensor, " b"]) -> Batch:
    """Build a batch whose n-th sample uses image `of[n]`; the caller sets the ids."""
    names = ("",) * len(of)
    # Features, boxes and masks have one row per caption; pixels are shared by the captions of an
    # image.
    if "images" not in seen:
        rows = {name: one[of] for name, one in seen.items()}
        return Batch(ids=names, image_of=of, **rows)  # type: ignore[arg-type]
    images = seen["images"]
    size = (images.shape[-2], images.shape[-1])
    return Batch(
        ids=names,
        images=images,
        image_of=of,
        geometry=PixelGeometry.identity(len(images), size).to(images.device),
        boxes=seen["boxes"][of],
        features=seen["features"][of],
        region_mask=torch.ones(seen["boxes"][of].shape[:2], dtype=torch.bool, device=of.device),
    )


def _mask_until_end(tokens: Int[Tensor, "b n"]) -> Tensor:
    """Return the mask of all tokens up to and including the end token."""
    ended = (tokens == END).long().cumsum(dim=1)
    return (ended == 0) | ((ended == 1) & (tokens == END))


def unique_images(batch: Batch) -> tuple[Batch, Int[Tensor, " b"]]:
    """Return the images of a batch, one sample each, and the image index of every sample."""
    of = batch.image_index
    first = torch.ones_like(of, dtype=torch.bool)
    first[1:] = of[1:] != of[:-1]  # samples of one image are adjacent
    return batch.select(first.nonzero()[:, 0]), of


def every_nth_image(batch: Batch, each: int) -> Batch:
    """Return the images that `unique_images` gives, for `each` samples per image, without texts.

    It neither reads texts nor synchronizes the device, as a CUDA graph capture requires.
    """
    # All captions of an image are adjacent, `each` of them.
    rows = {
        name: None if (value := getattr(batch, name)) is None else value[::each]
        for name in ("boxes", "features", "region_mask")
    }
    of = batch.image_index
    names = ("",) * (len(batch) // each)
    return Batch(names, batch.images, image_of=of[::each], geometry=batch.geometry, **rows)


def tokenize_captions(
    captions: Sequence[Sequence[str]], encode: Callable[[str], list[int]], longest: int
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Return the token rows, their lengths, and the first row of each image."""
    ids = [[BEGIN, *encode(text)[:longest], END] for many in captions for text in many]
    lengths = np.array([len(one) for one in ids])
    first = np.cumsum([0, *(len(many) for many in captions)])
    return pad(ids)[0], lengths, first


# --- loading


@dataclass(frozen=True)
class CaptionerInput:
    """How an image is turned into captioner inputs at inference."""

    kind: ImageInput
    pixels: tuple[int, int]
    backbone: BackboneSpec | None = None


@dataclass(frozen=True)
class A2Data:
    """Three splits, the vocabulary, the image encoder, and what evaluation needs.

    `truth` and `val_truth` are the test and validation scenes with the regions of every word,
    if known. `photos` opens the test photos for the gallery; `longest` is the maximum caption
    length in tokens; `image_input` describes the image inputs at inference.
    """

    train: CaptionedImages
    val: CaptionedImages
    test: CaptionedImages
    words: Vocabulary
    encoder: ImageEncoder
    longest: int
    truth: CaptionScenes | None = None
    val_truth: CaptionScenes | None = None
    photos: PhotoDataset | None = None
    image_input: CaptionerInput | NotInteractive | None = None

    def to(self, device: torch.device | str) -> "A2Data":
        """Move the three splits to another device."""
        moved = {name: getattr(self, name).to(device) for name in SPLITS}
        return replace(self, **moved)


def load_data(recipe: A2Recipe, context: RunContext) -> A2Data:
    """Load the three splits of a recipe on the device of the run."""
    device = processes(context.device).device
    match recipe.data:
        case A2Scenes() as data:
            found = load_scenes(data)
        case A2Photos() as data:
            found = load_photos(data, data_root(context.data_root), device)
    return found.to(device)


def load_scenes(data: A2Scenes) -> A2Data:
    """Generate scenes with the regions a detector might propose."""
    drawn = {
        split: CaptionScenes(split, data.world, count, size=data.size, regions=data.regions)
        for split, count in data.counts().items()
    }
    train, val, test = (_render_scenes(drawn[split]) for split in SPLITS)
    longest = int(max(part.lengths.max() for part in (train, val, test)))
    words = drawn["train"].vocabulary
    image_input = CaptionerInput(ImageInput.CROPS, (data.size, data.size))
    encoder = CachedRegionEncoder(REGION_WIDTH)
    truths = (drawn["test"], drawn["val"])
    return A2Data(train, val, test, words, encoder, longest, *truths, image_input=image_input)


def _render_scenes(data: CaptionScenes) -> CaptionedImages:
    """Render all scenes of a split into memory."""
    images, boxes, cut, tokens, ids = [], [], [], [], []
    references: list[tuple[str, ...]] = []
    for batch in batches_of(data, PORTION):
        assert batch.images is not None and batch.boxes is not None
        assert batch.tokens is not None and batch.token_mask is not None
        assert batch.references is not None
        images.append(batch.images)
        # The captions of a scene repeat its boxes, references and id.
        boxes.append(batch.boxes[:: data.each])
        cut.append(crop_features(batch.images, boxes[-1]).half())
        tokens += [
            row[mask].tolist() for row, mask in zip(batch.tokens, batch.token_mask, strict=True)
        ]
        references += batch.references[:: data.each]
        ids += [name.rpartition("-")[0] for name in batch.ids[:: data.each]]
    return CaptionedImages(
        data.name,
        str(data.split),
        data.digest(),
        tuple(ids),
        tuple(references),
        pad(tokens)[0],
        np.array([len(one) for one in tokens]),
        np.arange(0, len(tokens) + 1, data.each),
        ImagesInMemory(
            {"images": torch.cat(images), "boxes": torch.cat(boxes), "features": torch.cat(cut)}
        ),
    )


REGION_WIDTH = 3 * CROP * CROP + 6  # features per region of a scene


def crop_features(
    images: UInt8[Tensor, "i 3 y x"], boxes: Float[Tensor, "i m 4"]
) -> Float[Tensor, "i m d"]:
    """Return features of the regions of scenes as a detector might: their pixels and position.

    Each box is resampled to the same number of pixels, scaled to [-1, 1]. Its corners, width
    and height follow, relative to the image size. As in the paper, whose detector is trained
    beforehand, these features are not learned.
    """
    height, width = images.shape[-2:]
    # Centres of the resampled pixels, as shares of a box.
    steps = (torch.arange(CROP, device=boxes.device) + 0.5) / CROP
    x0, y0, x1, y1 = boxes.float().unbind(dim=-1)
    # Without `align_corners`, -1 and 1 are the outer edges of the image.
    xs = (x0[..., None] + (x1 - x0)[..., None] * steps) / width * 2 - 1
    ys = (y0[..., None] + (y1 - y0)[..., None] * steps) / height * 2 - 1
    # `grid_sample` takes one grid per image: its boxes are stacked along the rows.
    grid = torch.stack(
        [
            repeat(xs, "i m c -> i (m r) c", r=CROP),
            repeat(ys, "i m r -> i (m r) c", c=CROP),
        ],
        dim=-1,
    )
    pixels = images.float() / 127.5 - 1
    seen = torch.nn.functional.grid_sample(pixels, grid, align_corners=False)
    flat = rearrange(seen, "i c (m r) s -> i m (c r s)", r=CROP)
    size = torch.tensor([width, height] * 2, device=boxes.device)
    where = boxes.float() / size
    return torch.cat([flat, where, where[..., 2:] - where[..., :2]], dim=-1)


def load_photos(data: A2Photos, root: Path, device: torch.device | str = "cpu") -> A2Data:
    """Load photos with captions: cells of a backbone, or detector regions from the official files.

    Cells that are not cached yet are computed on `device`.
    """
    raw = [_read_captions(data, root, split) for split in SPLITS]
    # Only words of training captions are in the vocabulary.
    texts = (text for one in raw[0].photos for text in one.captions)
    words = Vocabulary.build(map(tokenize_caption, texts), data.minimum)
    folder = None if data.features is None else Path(data.features)
    if folder is not None and is_bottom_up(folder):
        detected = BottomUpFeatures(folder)
        encoder: ImageEncoder = CachedRegionEncoder(detected.width)
        image_input: CaptionerInput | NotInteractive = NotInteractive(
            "it needs the regions of a detector, which overt does not include"
        )
        shows: list[ImageSource] = [_detected_regions(detected, one, data) for one in raw]
    else:
        cache = (
            FeatureCache(folder) if folder is not None else _backbone_cache(data, root, raw, device)
        )
        side = round(cache.shape[0] ** 0.5)
        encoder = CachedImageEncoder(cache.shape[1], (side, side))
        name = data.backbone if folder is None else cache.key.backbone
        made = BackboneSpec(name, cache.key.weights)
        image_input = CaptionerInput(ImageInput.CELLS, (data.size, data.size), made)
        shows = [_cached_features(cache, photo_ids(one, data)) for one in raw]
    train, val, test = (
        _captioned_photos(one, data, words, show) for one, show in zip(raw, shows, strict=True)
    )
    shown = _open_photos(data, root, raw[2])
    # `longest` counts words; a generated caption also has an end token.
    return A2Data(
        train, val, test, words, encoder, data.longest + 1, photos=shown, image_input=image_input
    )


def photo_ids(captions: Captions, data: A2Photos) -> list[str]:
    """Return the cache keys of the photos of a split that a run uses."""
    return [f"{captions.name}/{one.photo}" for one in captions.photos[: data.limit]]


def _read_captions(data: A2Photos, root: Path, split: str) -> Captions:
    if data.name is A2Dataset.FLICKR8K:
        return flickr8k(root, split)
    # words are counted here
    return karpathy(root, split, KARPATHY_NAMES[data.name], vocabulary=build_vocabulary([]))


def _open_photos(data: A2Photos, root: Path, captions: Captions) -> PhotoDataset | None:
    """Open the photos themselves; None if only their features are available."""
    folder = root / FOLDERS[KARPATHY_NAMES[data.name]]
    if not folder.is_dir():
        return None
    wanted = [one.photo for one in captions.photos[: data.limit]]
    return open_photos(
        captions.name, captions.split, folder, wanted, PhotoInput((data.size, data.size))
    )


def _captioned_photos(
    captions: Captions, data: A2Photos, words: Vocabulary, show: ImageSource
) -> CaptionedImages:
    chosen = captions.photos[: data.limit]
    texts = [one.captions for one in chosen]
    tokens, lengths, first = tokenize_captions(
        texts, lambda text: words.encode(tokenize_caption(text)), data.longest
    )
    ids = tuple(photo_ids(captions, data))
    split = str(captions.split)
    return CaptionedImages(
        *(captions.name, split, captions.digest(), ids, tuple(texts)),
        *(tokens, lengths, first, show),
    )


def _cached_features(cache: FeatureCache, wanted: Sequence[str]) -> ImageSource:
    """Return cached features, in memory if they fit, else read per batch."""
    cells, width = cache.shape
    # Two bytes per feature: in memory they are in half precision.
    if len(wanted) * cells * width * 2 > MAX_BYTES_IN_MEMORY:
        return ImagesOnDisk(
            lambda chosen: {"features": cache.get([wanted[one] for one in chosen]).float()}
        )
    portions = [
        cache.get(wanted[start : start + PORTION]).half()
        for start in range(0, len(wanted), PORTION)
    ]
    return ImagesInMemory({"features": torch.cat(portions)})


def _detected_regions(
    detected: BottomUpFeatures, captions: Captions, data: A2Photos
) -> ImageSource:
    """Return bottom-up features of detected regions, read per batch."""
    numbers = [coco_image_id(one.photo) for one in captions.photos[: data.limit]]

    def read(chosen: Sequence[int]) -> ImageInputs:
        found = detected.get([numbers[one] for one in chosen])
        return {"features": found.features, "region_mask": found.present, "boxes": found.boxes}

    return ImagesOnDisk(read)


def _backbone_cache(
    data: A2Photos, root: Path, raw: Sequence[Captions], device: torch.device | str
) -> FeatureCache:
    """Return the feature cache of a backbone over all photos, building it if needed."""
    folder = root / FOLDERS[KARPATHY_NAMES[data.name]]
    photos = [one.photo for captions in raw for one in captions.photos]
    shown = open_photos(raw[0].name, "all", folder, photos, PhotoInput((data.size, data.size)))
    return cache_cells(shown, data.backbone, data.size, device)
