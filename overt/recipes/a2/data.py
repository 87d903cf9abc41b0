"""Pictures with captions for captioners: what they are trained, validated and tested on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from overt.data.asked import Look, gallery, words_of
from overt.data.batch import Batch
from overt.data.bottomup import BottomUp, is_bottom_up, photo_number
from overt.data.captions import FOLDERS, Captions, flickr8k, karpathy
from overt.data.features import FeatureCache
from overt.data.photos import PhotoSet
from overt.data.scenes.captions import CaptionScenes
from overt.data.sets import root_of
from overt.data.vocabulary import BEGIN, END, Vocabulary, pad
from overt.geometry import PixelGeometry
from overt.measure.captions import caption_words
from overt.models.answering.eyes import CachedEye, Eye
from overt.models.captioning.captioner import CachedRegions
from overt.recipes.a2.recipe import A2Recipe, Files, Photos, Scenes
from overt.recipes.building import SPLITS
from overt.recipes.recipe import Context
from overt.recipes.spoken import Backbone, Mute, Sees
from overt.train import processes

PORTION = 256  # pictures that are read at a time
HELD = 8 << 30  # bytes of features that are held in memory; of more, a batch is read at a time
NAMED = {Files.FLICKR8K: "flickr8k", Files.FLICKR30K: "flickr30k", Files.COCO: "coco"}
CROP = 10  # a region of a scene is seen as so many pixels a side

Seen = Mapping[str, Tensor]  # what a batch has of pictures: features, or pixels and boxes


@runtime_checkable
class Show(Protocol):
    """What is seen of pictures, by their places in the split."""

    def __call__(self, chosen: Sequence[int]) -> Seen: ...
    def to(self, device: torch.device | str) -> "Show": ...


@dataclass(frozen=True, eq=False)
class Kept:
    """All pictures in memory, a row each; features in half of their bits."""

    rows: Seen

    def __call__(self, chosen: Sequence[int]) -> Seen:
        """The rows of these pictures."""
        found = {name: one[list(chosen)] for name, one in self.rows.items()}
        return {
            name: one.float() if one.is_floating_point() else one for name, one in found.items()
        }

    def to(self, device: torch.device | str) -> "Kept":
        """The same on another device."""
        return Kept({name: one.to(device) for name, one in self.rows.items()})


@dataclass(frozen=True, eq=False)
class Read:
    """Pictures that are read from disk when a batch asks for them."""

    read: Callable[[Sequence[int]], Seen]
    device: torch.device | str = "cpu"

    def __call__(self, chosen: Sequence[int]) -> Seen:
        """What is read of these pictures."""
        return {name: one.to(self.device) for name, one in self.read(chosen).items()}

    def to(self, device: torch.device | str) -> "Read":
        """The same for another device."""
        return Read(self.read, device)


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures and what is said of them. An item is a picture, and each of its captions a sample.

    `tokens` are begin, the caption, end, of one caption after the other; those of picture i stand
    from `first[i]` to `first[i + 1]`. `show` gives what is seen of pictures, a row each. Batches
    are all as wide as the longest caption, so that a step that was recorded fits every one.
    """

    name: str
    split: str
    source: str
    ids: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    tokens: Int[Tensor, "n w"]
    lengths: Int[np.ndarray, " n"]
    first: Int[np.ndarray, " p"]
    show: Show

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def each(self) -> int | None:
        """How many captions a picture has, where all have equally many."""
        counts = np.unique(np.diff(self.first))
        return int(counts[0]) if len(counts) == 1 else None

    def batch(self, indices: Sequence[int]) -> Batch:
        """All captions of these pictures, on the device where the tokens are."""
        chosen = [int(one) for one in indices]
        spans = [np.arange(self.first[one], self.first[one + 1]) for one in chosen]
        rows = np.concatenate(spans)
        of = np.repeat(np.arange(len(chosen)), [len(span) for span in spans])
        device = self.tokens.device
        tokens = self.tokens[torch.from_numpy(rows).to(device)]
        numbers = [row - self.first[chosen[at]] for row, at in zip(rows, of, strict=True)]
        return replace(
            _shown(self.show(chosen), torch.from_numpy(of).to(device)),
            ids=tuple(f"{self.ids[chosen[at]]}#{n}" for at, n in zip(of, numbers, strict=True)),
            tokens=tokens,
            token_mask=_until_end(tokens),
            references=tuple(self.references[chosen[at]] for at in of),
        )

    def pictures(self, indices: Sequence[int]) -> Batch:
        """These pictures without captions, one sample each, to be described."""
        chosen = [int(one) for one in indices]
        at = torch.arange(len(chosen), device=self.tokens.device)
        return replace(
            _shown(self.show(chosen), at),
            ids=tuple(self.ids[one] for one in chosen),
            references=tuple(self.references[one] for one in chosen),
        )

    def to(self, device: torch.device | str) -> "Pictures":
        """The same with what it holds on another device."""
        return replace(self, tokens=self.tokens.to(device), show=self.show.to(device))

    def texts(self) -> list[list[list[int]]]:
        """The captions of every picture as ids, the end among them: what a reward compares with."""
        rows, lengths = self.tokens.cpu().tolist(), self.lengths.tolist()
        return [
            [rows[at][1 : lengths[at]] for at in range(self.first[one], self.first[one + 1])]
            for one in range(len(self))
        ]

    def digest(self) -> str:
        """The hash of the data set that the captions were read from."""
        return self.source


def _shown(seen: Seen, of: Int[Tensor, " b"]) -> Batch:
    """Samples that look at pictures, the n-th at picture of[n]; their ids are still to come."""
    names = ("",) * len(of)
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


def _until_end(tokens: Int[Tensor, "b n"]) -> Tensor:
    """Everything up to the end of each caption."""
    ended = (tokens == END).long().cumsum(dim=1)
    return (ended == 0) | ((ended == 1) & (tokens == END))


def one_each(batch: Batch) -> tuple[Batch, Int[Tensor, " b"]]:
    """The pictures of a batch, a sample each, and which of them every sample looks at."""
    of = batch.image_index
    first = torch.ones_like(of, dtype=torch.bool)
    first[1:] = of[1:] != of[:-1]  # samples of one picture stand together
    return batch.select(first.nonzero()[:, 0]), of


def every(batch: Batch, each: int) -> Batch:
    """The pictures that `one_each` gives of a batch with `each` samples a picture, without texts.

    Nothing is read, neither texts nor numbers on a device: steps that are recorded must not.
    """
    rows = {
        name: None if (value := getattr(batch, name)) is None else value[::each]
        for name in ("boxes", "features", "region_mask")
    }
    of = batch.image_index
    names = ("",) * (len(batch) // each)
    return Batch(names, batch.images, image_of=of[::each], geometry=batch.geometry, **rows)


def said(
    captions: Sequence[Sequence[str]], encode: Callable[[str], list[int]], longest: int
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Captions as tokens, the length of each, and where those of each picture begin."""
    ids = [[BEGIN, *encode(text)[:longest], END] for many in captions for text in many]
    lengths = np.array([len(one) for one in ids])
    first = np.cumsum([0, *(len(many) for many in captions)])
    return pad(ids)[0], lengths, first


# --- the parts of a recipe


@dataclass(frozen=True)
class Sight:
    """What of a picture a captioner is given, for whoever asks it later."""

    sees: Sees
    pixels: tuple[int, int]
    backbone: Backbone | None = None


@dataclass(frozen=True)
class Parts:
    """Three splits, the words of the captioner, its eye, and what the test is looked at with.

    `truth` and `val_truth` are test and validation with the regions of every word, where they are
    known; `photos` opens the test's photos, to show them; `longest` is the most tokens that are
    written; `seen` is what of pictures it is given.
    """

    train: Pictures
    val: Pictures
    test: Pictures
    words: Vocabulary
    eye: Eye
    longest: int
    truth: CaptionScenes | None = None
    val_truth: CaptionScenes | None = None
    photos: PhotoSet | None = None
    seen: Sight | Mute | None = None

    def to(self, device: torch.device | str) -> "Parts":
        """The same with what is held of pictures on another device."""
        moved = {name: getattr(self, name).to(device) for name in SPLITS}
        return replace(self, **moved)


def opened(recipe: A2Recipe, context: Context) -> Parts:
    """The three parts of the data that a recipe is about."""
    device = processes(context.device).device
    match recipe.data:
        case Scenes() as data:
            found = scenes(data)
        case Photos() as data:
            found = photos(data, root_of(context.data_root), device)
    return found.to(device)


def scenes(data: Scenes) -> Parts:
    """Scenes with the regions a detector might have proposed, each drawn once."""
    counts = dict(zip(SPLITS, (data.train, data.val, data.test), strict=True))
    drawn = {
        split: CaptionScenes(
            split,
            data.world,
            count if data.limit is None else min(count, data.limit),
            size=data.size,
            regions=data.regions,
        )
        for split, count in counts.items()
    }
    train, val, test = (_drawn(drawn[split]) for split in SPLITS)
    longest = int(max(part.lengths.max() for part in (train, val, test)))
    words = drawn["train"].vocabulary
    seen = Sight(Sees.CROPS, (data.size, data.size))
    eye = CachedRegions(WIDTH)
    truths = (drawn["test"], drawn["val"])
    return Parts(train, val, test, words, eye, longest, *truths, seen=seen)


def _drawn(data: CaptionScenes) -> Pictures:
    images, boxes, cut, tokens, ids = [], [], [], [], []
    references: list[tuple[str, ...]] = []
    for start in range(0, len(data), PORTION):
        batch = data.batch(range(start, min(start + PORTION, len(data))))
        assert batch.images is not None and batch.boxes is not None
        assert batch.tokens is not None and batch.token_mask is not None
        assert batch.references is not None
        images.append(batch.images)
        boxes.append(batch.boxes[:: data.each])
        cut.append(crops(batch.images, boxes[-1]).half())
        tokens += [
            row[mask].tolist() for row, mask in zip(batch.tokens, batch.token_mask, strict=True)
        ]
        references += batch.references[:: data.each]
        ids += [name.rpartition("-")[0] for name in batch.ids[:: data.each]]
    return Pictures(
        data.name,
        str(data.split),
        data.digest(),
        tuple(ids),
        tuple(references),
        pad(tokens)[0],
        np.array([len(one) for one in tokens]),
        np.arange(0, len(tokens) + 1, data.each),
        Kept({"images": torch.cat(images), "boxes": torch.cat(boxes), "features": torch.cat(cut)}),
    )


WIDTH = 3 * CROP * CROP + 6  # numbers a region of a scene


def crops(
    images: UInt8[Tensor, "i 3 y x"], boxes: Float[Tensor, "i m 4"]
) -> Float[Tensor, "i m d"]:
    """Regions of scenes as a detector might hand them on: their pixels, and where they lie.

    A box is brought to the same few pixels whatever its size, from -1 to 1; its corners, width and
    height follow, as shares of the picture. Features are no part of what a captioner learns, as in
    the paper, whose detector was trained before.
    """
    height, width = images.shape[-2:]
    steps = (torch.arange(CROP, device=boxes.device) + 0.5) / CROP
    x0, y0, x1, y1 = boxes.float().unbind(dim=-1)
    xs = (x0[..., None] + (x1 - x0)[..., None] * steps) / width * 2 - 1
    ys = (y0[..., None] + (y1 - y0)[..., None] * steps) / height * 2 - 1
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


def photos(data: Photos, root: Path, device: torch.device | str = "cpu") -> Parts:
    """Photos with captions: cells of a backbone, or regions of a detector from official files.

    Cells that are not kept yet are made on `device`.
    """
    raw = [_read(data, root, split) for split in SPLITS]
    texts = (text for one in raw[0].photos for text in one.captions)
    words = Vocabulary.build(map(caption_words, texts), data.minimum)
    folder = None if data.features is None else Path(data.features)
    if folder is not None and is_bottom_up(folder):
        detected = BottomUp(folder)
        eye: Eye = CachedRegions(detected.width)
        seen: Sight | Mute = Mute("it looks at regions of a detector, which is no part of overt")
        shows: list[Show] = [_detections(detected, one, data) for one in raw]
    else:
        cache = FeatureCache(folder) if folder is not None else _cells(data, root, raw, device)
        side = round(cache.shape[0] ** 0.5)
        eye = CachedEye(cache.shape[1], (side, side))
        name = data.backbone if folder is None else cache.key.backbone
        made = Backbone(name, cache.key.weights)
        seen = Sight(Sees.CELLS, (data.size, data.size), made)
        shows = [_cached(cache, names(one, data)) for one in raw]
    train, val, test = (
        _photos(one, data, words, show) for one, show in zip(raw, shows, strict=True)
    )
    shown = _opened(data, root, raw[2])
    return Parts(train, val, test, words, eye, data.longest + 1, photos=shown, seen=seen)


def names(captions: Captions, data: Photos) -> list[str]:
    """The photos of a split that a run uses, as features go by."""
    return [f"{captions.name}/{one.photo}" for one in captions.photos[: data.limit]]


def _read(data: Photos, root: Path, split: str) -> Captions:
    if data.name is Files.FLICKR8K:
        return flickr8k(root, split)
    return karpathy(root, split, NAMED[data.name], vocabulary=words_of([]))  # we count words


def _opened(data: Photos, root: Path, captions: Captions) -> PhotoSet | None:
    """The photos themselves; none where features were made elsewhere and photos are not there."""
    folder = root / FOLDERS[NAMED[data.name]]
    if not folder.is_dir():
        return None
    wanted = [one.photo for one in captions.photos[: data.limit]]
    return gallery(captions.name, captions.split, folder, wanted, Look((data.size, data.size)))


def _photos(captions: Captions, data: Photos, words: Vocabulary, show: Show) -> Pictures:
    chosen = captions.photos[: data.limit]
    texts = [one.captions for one in chosen]
    tokens, lengths, first = said(
        texts, lambda text: words.encode(caption_words(text)), data.longest
    )
    ids = tuple(names(captions, data))
    split = str(captions.split)
    return Pictures(
        *(captions.name, split, captions.digest(), ids, tuple(texts)),
        *(tokens, lengths, first, show),
    )


def _cached(cache: FeatureCache, wanted: Sequence[str]) -> Show:
    """Features of photos: in memory where they fit, else read from the cache by the batch."""
    cells, width = cache.shape
    if len(wanted) * cells * width * 2 > HELD:
        return Read(lambda chosen: {"features": cache.get([wanted[one] for one in chosen]).float()})
    portions = [
        cache.get(wanted[start : start + PORTION]).half()
        for start in range(0, len(wanted), PORTION)
    ]
    return Kept({"features": torch.cat(portions)})


def _detections(detected: BottomUp, captions: Captions, data: Photos) -> Show:
    numbers = [photo_number(one.photo) for one in captions.photos[: data.limit]]

    def read(chosen: Sequence[int]) -> Seen:
        found = detected.get([numbers[one] for one in chosen])
        return {
            "features": found.features,
            "region_mask": found.present,
            "boxes": found.boxes,
        }

    return Read(read)


def _cells(
    data: Photos, root: Path, raw: Sequence[Captions], device: torch.device | str
) -> FeatureCache:
    """The cache of a backbone over all photos of a set, made where it is not there yet."""
    from overt.recipes.han import features as kept

    folder = root / FOLDERS[NAMED[data.name]]
    photos = [one.photo for captions in raw for one in captions.photos]
    shown = gallery(raw[0].name, "all", folder, photos, Look((data.size, data.size)))
    return kept.cells_of(shown, data.backbone, data.size, device)
