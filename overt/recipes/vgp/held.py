"""Texts about pictures with boxes, held whole in memory on any device.

Drawing a pair of captions takes longer than a small network's step, and rows of a table draw the
same pairs again and again. What only people look at is left out: this is for training.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from overt import files
from overt.attention import AttentionMap, Kind, regions, words
from overt.data.batch import Batch
from overt.data.scenes.pairs import PhraseLinks
from overt.data.scenes.store import default_cache
from overt.data.source import Source
from overt.errors import BadInput
from overt.geometry import PixelGeometry, RegionGeometry

PORTION = 64
VERSION = 1  # of what is kept on disk
_TENSORS = (
    "tokens",
    "lengths",
    "boxes",
    "there",
    "wanted",
    "labels",
    "picture",
    "images",
    "features",
    "links",
)


@dataclass(frozen=True, eq=False)
class HeldTexts:
    """All samples of a data set as tensors; a data set itself, whose items are single samples.

    `wanted` says how much each token should look at each region. Texts are cut to the longest of a
    batch, as they are in a batch that is made anew. `features` are those of the regions of each
    picture, where they were computed before. `links` are pairs of phrases where there are
    any: the sample, from and to of the first, of the second, and the relation.
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
    def of(cls, data: Source) -> "HeldTexts":
        """The whole of `data`."""
        every = range(0, len(data), PORTION)
        parts = [data.batch(range(start, min(start + PORTION, len(data)))) for start in every]
        return cls.joined(data.name, str(data.split), data.digest(), parts)

    @classmethod
    def joined(
        cls,
        name: str,
        split: str,
        source: str,
        parts: Sequence[Batch],
    ) -> "HeldTexts":
        """Batches that were made already, one after the other; samples without a label have -1."""
        if not parts:
            raise BadInput(f"{name} {split} is empty.")
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
                seen = one.target.visible[:, None, None]
                wanted[rows, :w, :m] = (one.target.weights * seen)[:, 0, 0]
            picture[rows] = one.image_index + before
            images += [] if one.images is None else [one.images]
            geometries.append(one.geometry)
            at, before = at + len(one), before + len(one.geometry)
        return cls(
            name,
            split,
            source,
            tuple(name for one in parts for name in one.ids),
            tokens,
            lengths,
            boxes,
            there,
            wanted,
            labels,
            picture,
            PixelGeometry.join(geometries),
            torch.cat(images) if images else None,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples, on the device where the tensors are."""
        chosen = [int(place) for place in indices]
        if any(not 0 <= place < len(self) for place in chosen):
            raise BadInput(f"{self.name} {self.split} has samples 0 to {len(self) - 1} alone.")
        some = torch.tensor(chosen, dtype=torch.long)
        wide = max(1, int(self.lengths[some].max())) if chosen else 1
        seen, image_of = self.picture[some].unique(return_inverse=True)
        device = self.labels.device
        rows, seen, image_of = some.to(device), seen.to(device), image_of.to(device)
        boxes, wanted = self.boxes[rows], self.wanted[rows, :wide]
        m = boxes.shape[1]
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

    def to(self, device: torch.device | str) -> "HeldTexts":
        """The same on another device; what says how large a batch will be stays where it is."""
        names = ("tokens", "boxes", "there", "wanted", "labels", "geometry", "images", "features")
        moved = {name: one.to(device) for name in names if (one := getattr(self, name)) is not None}
        return replace(self, **moved)

    def digest(self) -> str:
        """The hash of the data set the tensors were read from."""
        return self.source


@dataclass(frozen=True, eq=False)
class HeldLinks:
    """The pairs of phrases of many samples, found by the ids of samples."""

    place: dict[str, int]
    start: Int[Tensor, " n"]  # where the pairs of a sample begin, one more at the end
    first: Int[Tensor, "p 2"]
    second: Int[Tensor, "p 2"]
    relation: Int[Tensor, " p"]

    @classmethod
    def of(cls, texts: HeldTexts) -> "HeldLinks":
        """The pairs of the phrases of these texts."""
        if texts.links is None:
            raise BadInput(f"{texts.name} {texts.split} has no pairs of phrases.")
        links = texts.links.cpu()
        links = links[links[:, 0].argsort(stable=True)]
        count = torch.bincount(links[:, 0], minlength=len(texts))
        start = torch.nn.functional.pad(count.cumsum(dim=0), (1, 0))
        place = {one: row for row, one in enumerate(texts.ids)}
        return cls(place, start, links[:, 1:3], links[:, 3:5], links[:, 5])

    def to(self, device: torch.device | str) -> "HeldLinks":
        """The same on another device; where pairs begin stays where it is."""
        names = ("first", "second", "relation")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __call__(self, ids: Sequence[str]) -> PhraseLinks:
        """The pairs of the samples of a batch."""
        rows = torch.tensor([self.place[one] for one in ids], dtype=torch.long)
        begin, count = self.start[rows], self.start[rows + 1] - self.start[rows]
        sample = torch.arange(len(rows)).repeat_interleave(count)
        within = torch.arange(len(sample)) - (count.cumsum(dim=0) - count)[sample]
        at = (begin[sample] + within).to(self.relation.device)
        return PhraseLinks(sample.to(at.device), self.first[at], self.second[at], self.relation[at])


def as_table(links: PhraseLinks, before: int = 0) -> Int[Tensor, "p 6"]:
    """Pairs of phrases as rows of numbers; `before` samples stand before those of the batch."""
    sample, relation = links.sample[:, None] + before, links.relation[:, None]
    return torch.cat([sample, links.first, links.second, relation], dim=1)


# --- on disk


def kept(name: str, split: str, key: str, make: Callable[[], HeldTexts]) -> HeldTexts:
    """What `make` gives, made once and kept in the user's cache under a hash of `key`.

    Drawing takes minutes that a table of many rows would spend again and again. A folder that is
    damaged is made again: nothing is lost.
    """
    folder = place_of(name, split, key)
    if files.is_whole(folder):
        return read(folder)
    made = make()
    write(folder, made)
    return made


def place_of(name: str, split: str, key: str) -> Path:
    """The folder of the cache for texts of this name and key."""
    whole = hashlib.sha256(f"{VERSION}/{name}/{split}/{key}".encode()).hexdigest()
    return default_cache() / "texts" / f"{name}-{split}-{whole[:16]}"


def write(folder: Path, held: HeldTexts) -> None:
    """Write all tensors and names of a set of texts into a folder."""
    tensors = {one: getattr(held, one) for one in _TENSORS if getattr(held, one) is not None}
    of = held.geometry
    tensors |= {"size": of.size, "scale": of.scale, "offset": of.offset}
    if of.kept is not None:
        tensors["kept"] = of.kept
    about = {"name": held.name, "split": held.split, "source": held.source}
    with files.writing(folder) as place:
        arrays = {one: value.cpu().contiguous().numpy() for one, value in tensors.items()}
        files.write_arrays(place / "tensors.npz", arrays)
        files.write_json(place / "about.json", {**about, "ids": held.ids, "canvas": of.canvas})


def read(folder: Path) -> HeldTexts:
    """Read what `write` wrote."""
    about = files.read_json(folder / "about.json")
    found = {
        name: torch.from_numpy(one)
        for name, one in files.read_arrays(folder / "tensors.npz").items()
    }
    geometry = PixelGeometry(
        found.pop("size"),
        found.pop("scale"),
        found.pop("offset"),
        (int(about["canvas"][0]), int(about["canvas"][1])),
        found.pop("kept", None),
    )
    return HeldTexts(
        str(about["name"]),
        str(about["split"]),
        str(about["source"]),
        tuple(about["ids"]),
        geometry=geometry,
        **found,
    )


def _tokens(batch: Batch) -> Tensor:
    if batch.tokens is None or batch.token_mask is None:
        raise BadInput("Texts to be held need tokens.")
    return batch.tokens


def _boxes(batch: Batch) -> Tensor:
    if batch.boxes is None or batch.geometry is None:
        raise BadInput("Texts to be held need boxes, and the geometry of their pictures.")
    return batch.boxes
