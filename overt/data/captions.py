"""Photos with several captions each: Flickr8k in its own format, Flickr8k, Flickr30k and COCO in
the splits of Karpathy and Fei-Fei.

Hodosh, Young and Hockenmaier 2013 (https://hockenmaier.cs.illinois.edu/8k-pictures.html), Young et
al. 2014, Lin et al. 2014; Karpathy and Fei-Fei, "Deep Visual-Semantic Alignments", CVPR 2015,
https://cs.stanford.edu/people/karpathy/deepimagesent/. In `flickr8k/` lie `Flickr8k.token.txt`
(`PHOTO#NUMBER<tab>caption`), the lists `Flickr_8k.{train,dev,test}Images.txt`, the judgements
`ExpertAnnotations.txt`, and the photos in `Flicker8k_Dataset/`. Karpathy's files are
`captions/dataset_{flickr8k,flickr30k,coco}.json`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from overt.data.asked import Look, gallery, words_of
from overt.data.batch import Batch
from overt.data.photos import PhotoSet, read_lines
from overt.data.records import records
from overt.data.splits import Split
from overt.data.vocabulary import ABSENT, BEGIN, END, SubWords, Vocabulary, pad
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import TextGeometry

FLICKR8K, KARPATHY = "flickr8k", "captions"
LISTS = {Split.TRAIN: "train", Split.VAL: "dev", Split.TEST: "test"}
SIZES = {Split.TRAIN: 6_000, Split.VAL: 1_000, Split.TEST: 1_000}
FOLDERS = {  # where the photos of Karpathy's sets lie
    "flickr8k": "flickr8k/Flicker8k_Dataset",
    "flickr30k": "flickr30k_entities/images",
    "coco": "coco",
}
PARTS = {  # the splits of Karpathy's files that make one of ours
    Split.TRAIN: ("train", "restval"),
    Split.VAL: ("val",),
    Split.TEST: ("test",),
}

Items = Callable[[Sequence[int]], list[tuple[int, int]]]


@dataclass(frozen=True)
class Captioned:
    """A photo, below the folder of its set, and what people wrote about it."""

    photo: str
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """How well a caption fits a photo, by three experts: 1 not at all, 4 without a mistake."""

    photo: str
    caption: str
    scores: tuple[int, int, int]


def each_caption(counts: Sequence[int]) -> list[tuple[int, int]]:
    """An item for every caption, to train on."""
    return [(photo, number) for photo, count in enumerate(counts) for number in range(count)]


def each_photo(counts: Sequence[int]) -> list[tuple[int, int]]:
    """An item for every photo, with its first caption, to caption it and compare with all."""
    return [(photo, 0) for photo in range(len(counts))]


class Captions:
    """Photos and captions; an item is a caption, or with `items=each_photo` a photo.

    `tokens` are begin, the caption, end; `references` all captions of the photo. Words are those
    that the captions of `train` have at least `minimum` times, or those of a `vocabulary` that is
    given, sub-words perhaps. With `look` the batch has pixels or cached features, without it words
    alone.
    """

    def __init__(
        self,
        name: str,
        split: Split,
        captioned: Sequence[Captioned],
        folder: Path | str,
        sources: Sequence[Path | str],
        vocabulary: Vocabulary | SubWords,
        items: Items = each_caption,
        look: Look | None = None,
    ) -> None:
        if not captioned:
            raise BadInput(f"{name} {split} has no photo.")
        self.name, self.split, self.reader = name, split, vocabulary
        self.photos, self._sources = tuple(captioned), [Path(one) for one in sources]
        self._items = items([len(one.captions) for one in captioned])
        self._features = None if look is None else look.features
        self._shown: PhotoSet | None = None
        if look is not None and look.features is None:
            self._shown = gallery(name, split, Path(folder), [one.photo for one in captioned], look)
        self.files = () if self._shown is None else self._shown.files

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The items at these places, each photo once."""
        chosen = [self._items[place] for place in self._places(indices)]
        texts = [self.photos[photo].captions[number] for photo, number in chosen]
        read = [self.reader.read(text) for text in texts]
        tokens, mask, spans = pad(
            [[BEGIN, *ids, END] for ids, _ in read],
            [[ABSENT, *spans, ABSENT] for _, spans in read],
        )
        found = Batch(
            ids=tuple(
                f"{self.name}/{self.photos[photo].photo}#{number}" for photo, number in chosen
            ),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(tuple(texts), spans),
            references=tuple(self.photos[photo].captions for photo, _ in chosen),
        )
        if self._features is not None:
            names = [f"{self.name}/{self.photos[photo].photo}" for photo, _ in chosen]
            return replace(found, features=self._features.get(names))
        if self._shown is None:
            return found
        photos, of = np.unique([photo for photo, _ in chosen], return_inverse=True)
        shown = self._shown.batch(photos.tolist())
        return replace(
            found,
            images=shown.images,
            image_of=torch.from_numpy(of.reshape(-1).astype(np.int64)),
            geometry=shown.geometry,
        )

    def digest(self) -> str:
        """A hash of the files of captions, of names and sizes of photos, and of the items."""
        about = f"{self.name} {self.split} {len(self)} {len(self.photos)} {self.reader.size}"
        whole = hashlib.sha256(about.encode())
        for path in self._sources:
            whole.update(digest(path).encode())
        for path in self.files:
            whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        if self._features is not None:
            whole.update(self._features.digest().encode())
        return whole.hexdigest()

    def _places(self, indices: Sequence[int]) -> list[int]:
        found = [int(place) for place in indices]
        for place in found:
            if not 0 <= place < len(self):
                raise BadInput(f"{self.name} {self.split} has 0 to {len(self) - 1}, not {place}.")
        return found


def flickr8k(
    root: Path | str,
    split: str = Split.TRAIN,
    items: Items = each_caption,
    look: Look | None = None,
    vocabulary: Vocabulary | SubWords | None = None,
    minimum: int = 5,
    sizes: dict[Split, int] | None = SIZES,
) -> Captions:
    """Flickr8k in the official split: 6,000 / 1,000 / 1,000 photos with five captions each."""
    root = Path(root)
    chosen = _split(split, "flickr8k")
    folder = root / FLICKR8K
    captions = read_tokens(folder / "Flickr8k.token.txt")
    parts = {
        part: read_lines(folder / f"Flickr_8k.{LISTS[part]}Images.txt")
        for part in {chosen, Split.TRAIN}
    }
    if sizes is not None and len(parts[chosen]) != sizes[chosen]:
        raise Damaged(
            f"{folder}: the list of {chosen} has {len(parts[chosen])} photos, not {sizes[chosen]}."
        )
    for photo in {photo for names in parts.values() for photo in names}:
        if photo not in captions:
            raise Damaged(f"{folder / 'Flickr8k.token.txt'} has no caption of {photo}.")
    words = vocabulary or words_of(
        (text for photo in parts[Split.TRAIN] for text in captions[photo]), minimum
    )
    found = [Captioned(photo, tuple(captions[photo])) for photo in parts[chosen]]
    sources = [folder / "Flickr8k.token.txt", folder / f"Flickr_8k.{LISTS[chosen]}Images.txt"]
    return Captions(
        *("flickr8k", chosen, found, folder / "Flicker8k_Dataset", sources, words, items, look)
    )


def karpathy(
    root: Path | str,
    split: str = Split.TRAIN,
    name: str = "coco",
    items: Items = each_caption,
    look: Look | None = None,
    vocabulary: Vocabulary | SubWords | None = None,
    minimum: int = 5,
) -> Captions:
    """Flickr8k, Flickr30k or COCO as parted by Karpathy; `train` has what he calls restval too.

    COCO: 113,287 / 5,000 / 5,000 photos; Flickr30k: 29,000 / 1,014 / 1,000.
    """
    root = Path(root)
    if name not in FOLDERS:
        raise BadInput(f"There is no {name!r}; choose from {', '.join(FOLDERS)}.")
    chosen = _split(split, name)
    path = root / KARPATHY / f"dataset_{name}.json"
    found: list[Captioned] = []
    train: list[str] = []
    for number, entry in enumerate(records(path, "images")):
        match entry:
            case {"filename": str(file), "split": str(part), "sentences": [_, *_] as said}:
                raw = [one.get("raw") if isinstance(one, dict) else None for one in said]
                texts = [text.strip() for text in raw if isinstance(text, str) and text.strip()]
            case _:
                raw, texts = [None], []
        if len(texts) != len(raw):
            raise Damaged(f"{path}: entry {number} has no filename, split and sentences.")
        if vocabulary is None and part in PARTS[Split.TRAIN]:
            train += texts
        if part in PARTS[chosen]:
            where = f"{entry['filepath']}/{file}" if entry.get("filepath") else file
            found.append(Captioned(where, tuple(texts)))
    words = vocabulary or words_of(train, minimum)
    return Captions(
        *(f"{name}-captions", chosen, found, root / FOLDERS[name], [path], words, items, look)
    )


def flickr30k(root: Path | str, split: str = Split.TRAIN) -> Captions:
    """Flickr30k as parted by Karpathy: 29,000, 1,014 and 1,000 photos with five captions each."""
    return karpathy(root, split, "flickr30k")


def read_tokens(path: Path) -> dict[str, list[str]]:
    """The captions of every photo in a file of `PHOTO#NUMBER<tab>caption`, in order."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        name, _, text = line.partition("\t")
        photo, _, place = name.rpartition("#")
        if not photo or not text.strip() or place != str(len(found.setdefault(photo, []))):
            raise Damaged(
                f"{path}: line {number} is not `PHOTO#NUMBER<tab>caption`: {line[:40]!r}."
            )
        found[photo].append(text.strip())
    return found


def read_judgements(root: Path | str) -> list[Judgement]:
    """What three experts thought of captions of other photos and of the same: 5,822 lines."""
    root = Path(root)
    path = root / FLICKR8K / "ExpertAnnotations.txt"
    captions = read_tokens(root / FLICKR8K / "Flickr8k.token.txt")
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        try:
            photo, name, one, two, three = parts
            about, _, place = name.rpartition("#")
            scores = (int(one), int(two), int(three))
            if not all(1 <= score <= 4 for score in scores):
                raise ValueError("scores go from 1 to 4")
            found.append(Judgement(photo, captions[about][int(place)], scores))
        except (ValueError, KeyError, IndexError) as problem:
            raise Damaged(f"{path}: line {number} is no judgement ({problem}).") from problem
    return found


def _split(name: str, of: str) -> Split:
    if name not in LISTS:
        raise BadInput(f"{of} has train, val and test, not {name!r}.")
    return Split(name)
