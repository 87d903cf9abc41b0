"""Attending Self-Attention: texts about images with boxes, kept in memory on any device.

Generating a pair of captions takes longer than a training step of a small network, and the rows of
a table use the same pairs. Fields that are only displayed are left out.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from overt import io
from overt.attention import AttentionMap, Kind, regions, words
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.global_rng import preserve_global_rng
from overt.data.scenes.caption_pairs import PhraseLinks
from overt.data.scenes.dataset import default_cache
from overt.errors import UserError
from overt.experiments.dataset_views import batches_of
from overt.geometry import PixelGeometry, RegionGeometry

PORTION = 64
VERSION = 1  # of the format on disk
_MOVED = ("tokens", "boxes", "there", "wanted", "labels", "images", "features")
_TENSORS = (*_MOVED, "lengths", "picture", "links")


@dataclass(frozen=True, eq=False)
class TextsInMemory:
    """All samples of a dataset as tensors; itself a dataset with one sample per item.

    `wanted` is the target attention of each token over the regions. Texts are cut to the longest of
    a batch. `features` are those of the regions of each image, if precomputed. `links` are pairs of
    phrases, if any: the sample, start and end of the first, of the second, and the relation.
    """

    name: str
    split: str
    source: str
    ids: tuple[str, ...]
    tokens: Int[Tensor, "n w"]
    lengths: Int[Tensor, " n"]
    boxes: Float[Tensor, "n m 4"]
    there: Bool[Tensor, "n m"]
    wanted: Float[Tensor, "n w m"]
    labels: Int[Tensor, " n"]
    picture: Int[Tensor, " n"]
    geometry: PixelGeometry
    images: Shaped[Tensor, "i 3 y x"] | None = None
    features: Float[Tensor, "i m d"] | None = None
    links: Int[Tensor, "p 6"] | None = None

    @classmethod
    def of(cls, data: Dataset) -> "TextsInMemory":
        """Load all of `data`."""
        parts = list(batches_of(data, PORTION))
        return cls.joined(data.name, str(data.split), data.digest(), parts)

    @classmethod
    def joined(cls, name: str, split: str, source: str, parts: Sequence[Batch]) -> "TextsInMemory":
        """Concatenate batches; samples without a label have -1."""
        if not parts:
            raise UserError(f"{name} {split} is empty.")
        # Every batch is padded to its own longest text and largest number of regions: find the
        # common widths.
        wide = max(_tokens(one).shape[1] for one in parts)
        most = max(_boxes(one).shape[1] for one in parts)
        n = sum(len(one) for one in parts)
        tokens = torch.zeros(n, wide, dtype=torch.long)
        lengths, labels = torch.zeros(n, dtype=torch.long), torch.full((n,), -1)
        boxes, there = torch.zeros(n, most, 4), torch.zeros(n, most, dtype=torch.bool)
        wanted = torch.zeros(n, wide, most)
        picture, at, before = torch.zeros(n, dtype=torch.long), 0, 0
        images, geometries = [], []
        for one in parts:
            rows, w, m = slice(at, at + len(one)), _tokens(one).shape[1], _boxes(one).shape[1]
            assert one.token_mask is not None and one.geometry is not None
            tokens[rows, :w], lengths[rows] = _tokens(one), one.token_mask.sum(dim=1)
            boxes[rows, :m] = _boxes(one)
            there[rows, :m] = True if one.region_mask is None else one.region_mask
            if one.labels is not None:
                labels[rows] = one.labels
            if one.target is not None and one.target.keys.spans[0].name == "regions":
                # A row without a target becomes zero.
                seen = one.target.visible[:, None, None]
                wanted[rows, :w, :m] = (one.target.weights * seen)[:, 0, 0]
            # Each batch numbers its images from 0.
            picture[rows] = one.image_index + before
            images += [] if one.images is None else [one.images]
            geometries.append(one.geometry)
            at, before = at + len(one), before + len(one.geometry)
        ids = tuple(name for one in parts for name in one.ids)
        return cls(
            *(name, split, source, ids, tokens, lengths, boxes, there, wanted, labels, picture),
            PixelGeometry.join(geometries),
            torch.cat(images) if images else None,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples, on the device of the tensors."""
        chosen = [int(place) for place in indices]
        # Negative indices would count from the end instead of failing.
        if any(not 0 <= place < len(self) for place in chosen):
            raise UserError(
                f"{self.name} {self.split} has {len(self)} samples: indices must be below that."
            )
        some = torch.tensor(chosen, dtype=torch.long)
        # Lengths stay on the CPU, so that the width of a batch is known without synchronizing the
        # GPU.
        wide = max(1, int(self.lengths[some].max())) if chosen else 1
        seen, image_of = self.picture[some].unique(return_inverse=True)
        device = self.labels.device
        rows, seen, image_of = some.to(device), seen.to(device), image_of.to(device)
        boxes, wanted = self.boxes[rows], self.wanted[rows, :wide]
        m = boxes.shape[1]
        # Words without a target are not visible, so that losses skip them.
        target = AttentionMap(
            wanted[:, None, None],
            regions(m, geometry=RegionGeometry(boxes)),
            words(wide),
            (wanted > 0).any(dim=-1, keepdim=True).expand_as(wanted),
            Kind.PROBABILITY,
        )
        there = torch.arange(wide)[None] < self.lengths[some][:, None]
        return Batch(
            ids=tuple(self.ids[place] for place in chosen),
            images=None if self.images is None else self.images[seen],
            image_of=image_of,
            geometry=self.geometry[seen],
            tokens=self.tokens[rows, :wide],
            token_mask=there.to(device),
            boxes=boxes,
            features=None if self.features is None else self.features[seen][image_of],
            region_mask=self.there[rows],
            labels=self.labels[rows],
            target=target,
        )

    def to(self, device: torch.device | str) -> "TextsInMemory":
        """Move to another device; lengths and image indices stay on the CPU."""
        names = (*_MOVED, "geometry")
        moved = {name: one.to(device) for name in names if (one := getattr(self, name)) is not None}
        return replace(self, **moved)

    def digest(self) -> str:
        """Return the hash of the source dataset."""
        return self.source


@dataclass(frozen=True, eq=False)
class PhraseLinksInMemory:
    """The pairs of phrases of many samples, looked up by sample ids."""

    place: dict[str, int]
    start: Int[Tensor, " n"]  # first pair of each sample, and the total
    first: Int[Tensor, "p 2"]
    second: Int[Tensor, "p 2"]
    relation: Int[Tensor, " p"]

    @classmethod
    def of(cls, texts: TextsInMemory) -> "PhraseLinksInMemory":
        """Index the pairs of phrases of these texts."""
        if texts.links is None:
            raise UserError(f"{texts.name} {texts.split} has no pairs of phrases.")
        links = texts.links.cpu()
        links = links[links[:, 0].argsort(stable=True)]
        count = torch.bincount(links[:, 0], minlength=len(texts))
        # The pairs of sample i are the rows `start[i]` to `start[i + 1]`.
        start = torch.nn.functional.pad(count.cumsum(dim=0), (1, 0))
        place = {one: row for row, one in enumerate(texts.ids)}
        return cls(place, start, links[:, 1:3], links[:, 3:5], links[:, 5])

    def to(self, device: torch.device | str) -> "PhraseLinksInMemory":
        """Move to another device; the offsets stay on the CPU."""
        names = ("first", "second", "relation")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __call__(self, ids: Sequence[str]) -> PhraseLinks:
        """Return the pairs of the samples of a batch."""
        rows = torch.tensor([self.place[one] for one in ids], dtype=torch.long)
        begin, count = self.start[rows], self.start[rows + 1] - self.start[rows]
        # Samples have different numbers of pairs: `within` counts from 0 in each of them.
        sample = torch.arange(len(rows)).repeat_interleave(count)
        within = torch.arange(len(sample)) - (count.cumsum(dim=0) - count)[sample]
        at = (begin[sample] + within).to(self.relation.device)
        return PhraseLinks(sample.to(at.device), self.first[at], self.second[at], self.relation[at])


def link_table(links: PhraseLinks, before: int = 0) -> Int[Tensor, "p 6"]:
    """Return pairs of phrases as rows of numbers, with `before` added to the sample index."""
    sample, relation = links.sample[:, None] + before, links.relation[:, None]
    return torch.cat([sample, links.first, links.second, relation], dim=1)


# --- on disk


def cached_texts(
    name: str, split: str, key: str, make: Callable[[], TextsInMemory]
) -> TextsInMemory:
    """Return the result of `make`, stored in the user cache under a hash of `key`.

    Generation takes minutes, which a table of many rows would otherwise spend for each. A corrupt
    folder is built again. A run that builds the texts gives the same numbers as one that finds
    them: both read them from disk, and building leaves the global random generators as they were.
    """
    folder = cache_folder(name, split, key)
    if not io.is_intact(folder):
        with io.lock(folder.parent, wait=True):  # another process may be building them
            if not io.is_intact(folder):
                with preserve_global_rng():
                    write_texts(folder, make())
    return read_texts(folder)


def cache_folder(name: str, split: str, key: str) -> Path:
    """Return the cache folder for texts of this name and key."""
    whole = hashlib.sha256(f"{VERSION}/{name}/{split}/{key}".encode()).hexdigest()
    return default_cache() / "texts" / f"{name}-{split}-{whole[:16]}"


def write_texts(folder: Path, held: TextsInMemory) -> None:
    """Write all tensors and names of a set of texts into a folder."""
    tensors = {one: getattr(held, one) for one in _TENSORS if getattr(held, one) is not None}
    of = held.geometry
    tensors |= {"size": of.size, "scale": of.scale, "offset": of.offset}
    if of.kept is not None:
        tensors["kept"] = of.kept
    about = {"name": held.name, "split": held.split, "source": held.source}
    with io.atomic_folder(folder) as place:
        arrays = {one: value.cpu().contiguous().numpy() for one, value in tensors.items()}
        io.write_arrays(place / "tensors.npz", arrays)
        io.write_json(place / "about.json", {**about, "ids": held.ids, "canvas": of.canvas})


def read_texts(folder: Path) -> TextsInMemory:
    """Read what `write_texts` wrote."""
    about = io.read_json(folder / "about.json")
    found = {
        name: torch.from_numpy(one) for name, one in io.read_arrays(folder / "tensors.npz").items()
    }
    geometry = PixelGeometry(
        found.pop("size"),
        found.pop("scale"),
        found.pop("offset"),
        (int(about["canvas"][0]), int(about["canvas"][1])),
        found.pop("kept", None),
    )
    return TextsInMemory(
        str(about["name"]),
        str(about["split"]),
        str(about["source"]),
        tuple(about["ids"]),
        geometry=geometry,
        **found,
    )


def _tokens(batch: Batch) -> Tensor:
    if batch.tokens is None or batch.token_mask is None:
        raise UserError("TextsInMemory needs batch.tokens and batch.token_mask, got None.")
    return batch.tokens


def _boxes(batch: Batch) -> Tensor:
    if batch.boxes is None or batch.geometry is None:
        raise UserError("TextsInMemory needs batch.boxes and batch.geometry, got None.")
    return batch.boxes
