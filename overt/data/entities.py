"""Flickr30k Entities: captions whose phrases are tied to boxes on the photo; and pairs of phrases.

Plummer et al., "Flickr30k Entities", ICCV 2015, https://github.com/BryanPlummer/flickr30k_entities.
In `flickr30k_entities/` lie `Sentences/ID.txt`, five lines such as `[/EN#1/people A man] waves .`,
`Annotations/ID.xml` with the boxes of each entity, the lists `train.txt`, `val.txt`, `test.txt` of
ids, and the photos `images/ID.jpg`. `vgp_pairs.json` has pairs of phrases about one photo that mean
one entity or two (Chu, Otani and Nakashima, "iParaphrasing", COLING 2018).
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.asked import Look, gallery, words_of
from overt.data.batch import Batch
from overt.data.photos import Box, PhotoSet, read_lines
from overt.data.records import records
from overt.data.scenes.relations import side_by_side
from overt.data.scenes.views import grounding
from overt.data.splits import Split
from overt.data.vocabulary import Reader, Vocabulary, pad
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import TextGeometry

FOLDER = "flickr30k_entities"
PHOTOS = {Split.TRAIN: 29_783, Split.VAL: 1_000, Split.TEST: 1_000}
MARK = re.compile(r"\[/EN#(\d+)((?:/[^\s/\]]+)+) ([^\[\]]+)\]")
MOST_BYTES = 1_000_000  # of the boxes of one photo


@dataclass(frozen=True)
class Phrase:
    """The characters of a phrase in its sentence, its entity, and what kinds of thing that is."""

    start: int
    end: int
    entity: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Sentence:
    """One caption without its marks, and the phrases in it."""

    text: str
    phrases: tuple[Phrase, ...]


@dataclass(frozen=True)
class Boxes:
    """The size (height, width) of a photo and the boxes of each entity on it."""

    size: tuple[int, int]
    of: dict[str, tuple[Box, ...]]


class Flickr30kEntities:
    """Captions with grounded phrases: an item is one sentence.

    `boxes` are all boxes of the photo, `target` has the words of each phrase look evenly at the
    boxes of its entity; words of phrases without a box, and of none, do not count. With `look` the
    batch has the photos. `photos` says how many each split has; None takes any number.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        reader: Reader | None = None,
        look: Look | None = None,
        photos: dict[Split, int] | None = PHOTOS,
    ) -> None:
        root = Path(root)
        if split not in PHOTOS:
            raise BadInput(f"flickr30k_entities has train, val and test, not {split!r}.")
        self.name, self.split = "flickr30k_entities", Split(split)
        self._folder = root / FOLDER
        ids = read_lines(self._folder / f"{split}.txt")
        if photos is not None and len(ids) != photos[self.split]:
            path = self._folder / f"{split}.txt"
            raise Damaged(f"{path} has {len(ids)} photos, not {photos[self.split]}; get it again.")
        self._ids = ids
        sentences = [read_sentences(self._path("Sentences", photo, "txt")) for photo in ids]
        self.sentences = [one for each in sentences for one in each]
        self._photo_of = [row for row, each in enumerate(sentences) for _ in each]
        self._number = [number for each in sentences for number in range(len(each))]
        self._boxes = [read_boxes(self._path("Annotations", photo, "xml")) for photo in ids]
        if reader is None:
            train = self.sentences
            if self.split is not Split.TRAIN:
                listed = read_lines(self._folder / "train.txt")
                every = [read_sentences(self._path("Sentences", photo, "txt")) for photo in listed]
                train = [one for each in every for one in each]
            reader = words_of(one.text for one in train)
        self.reader = reader
        self._photos = _shown(self.name, self.split, self._folder, ids, look)
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self.sentences)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The sentences at these places, each photo once."""
        places = _places(self, indices)
        chosen = [self.sentences[place] for place in places]
        read = [self.reader.read(one.text) for one in chosen]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        text = TextGeometry(tuple(one.text for one in chosen), spans)
        found = Batch(
            ids=tuple(
                f"flickr30k/{self._ids[self._photo_of[place]]}#{self._number[place]}"
                for place in places
            ),
            tokens=tokens,
            token_mask=mask,
            text=text,
        )
        photos = [self._photo_of[place] for place in places]
        if self._photos is not None:
            found = _with_photos(found, self._photos, photos)
        boxes = [self._boxes[photo] for photo in photos]
        most = max([1, *(sum(map(len, one.of.values())) for one in boxes)])
        stacked = torch.zeros(len(places), most, 4)
        there = torch.zeros(len(places), most, dtype=torch.bool)
        linked = []
        for row, (sentence, one) in enumerate(zip(chosen, boxes, strict=True)):
            flat = [(entity, box) for entity, some in one.of.items() for box in some]
            if flat:
                stacked[row, : len(flat)] = torch.tensor([box for _, box in flat])
                there[row, : len(flat)] = True
            linked.append(_linked(text[row], sentence, [entity for entity, _ in flat], most))
        if found.sample_geometry is not None:  # boxes of a photo that was stored smaller
            stored = found.sample_geometry.size.flip(-1).repeat(1, 2)
            drawn = torch.tensor([one.size for one in boxes]).flip(-1).repeat(1, 2)
            stacked = stacked * (stored / drawn)[:, None]
        return replace(
            found,
            boxes=stacked,
            region_mask=there,
            target=grounding(linked, stacked, text),
        )

    def digest(self) -> str:
        """A hash of the list, of every sentence and box of the split, and of the photos shown."""
        whole = hashlib.sha256(f"flickr30k_entities {self.split} {len(self)}".encode())
        for photo in self._ids:
            for kind, ending in (("Sentences", "txt"), ("Annotations", "xml")):
                whole.update(digest(self._path(kind, photo, ending)).encode())
        for path in self.files:
            whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        return whole.hexdigest()

    def _path(self, kind: str, photo: str, ending: str) -> Path:
        if not photo.isdecimal():
            raise Damaged(
                f"{self._folder}: a list names {photo!r:.40}, which is no photo's number."
            )
        return self._folder / kind / f"{photo}.{ending}"


class VgpPairs:
    """Do two phrases about one photo mean one entity? Labels are 1 if so, else 0.

    `tokens` are begin, the first phrase, end, the second phrase, end; `references` the two phrases.
    With `look` the batch has the photos, and the set the pairs about photos that are there. The
    marks of begin and end are those of `Vocabulary`: for another tokenizer take the references.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        reader: Vocabulary | None = None,
        look: Look | None = None,
    ) -> None:
        root = Path(root)
        if split not in PHOTOS:
            raise BadInput(f"vgp has train, val and test, not {split!r}.")
        self.name, self.split, self.classes = "vgp", Split(split), ("other", "paraphrase")
        self._path = root / FOLDER / "vgp_pairs.json"
        table = read_pairs(self._path)
        shown = [one for one in table if one[1] == split and (look is None or one[2])]
        self._names = list(dict.fromkeys(one[0] for one in shown))
        place = {photo: number for number, photo in enumerate(self._names)}
        self._pairs = [
            (place[photo], first, second, label)
            for photo, _, _, pairs in shown
            for label, first, second in pairs
        ]
        if not self._pairs:
            raise BadInput(f"{self._path} has no pairs of {split}.")
        train = (one for one in table if one[1] == Split.TRAIN)
        self.reader = reader or words_of(
            phrase for one in train for _, *both in one[3] for phrase in both
        )
        self._photos = _shown(self.name, self.split, root / FOLDER, self._names, look)
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The pairs at these places, each photo once."""
        places = _places(self, indices)
        chosen = [self._pairs[place] for place in places]
        read = [side_by_side(self.reader, first, second) for _, first, second, _ in chosen]
        tokens, mask, spans = pad(
            [ids for _, ids, _, _ in read], [spans for _, _, spans, _ in read], self.reader.padding
        )
        found = Batch(
            ids=tuple(
                f"vgp/{self._names[one[0]]}/{place:06d}"
                for place, one in zip(places, chosen, strict=True)
            ),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(tuple(text for text, _, _, _ in read), spans),
            labels=torch.tensor([label for *_, label in chosen], dtype=torch.long),
            references=tuple((first, second) for _, first, second, _ in chosen),
        )
        if self._photos is None:
            return found
        return _with_photos(found, self._photos, [one[0] for one in chosen])

    def digest(self) -> str:
        """A hash of the file of pairs, the split, and the photos shown."""
        whole = hashlib.sha256(f"vgp {self.split} {len(self)} {digest(self._path)}".encode())
        for path in self.files:
            whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        return whole.hexdigest()


def read_sentence(line: str) -> Sentence:
    """A caption with marks `[/EN#entity/kind words]`, without them; a broken mark is `BadInput`.

    >>> found = read_sentence("[/EN#1/people A man] waves .")
    >>> found.text, found.text[found.phrases[0].start : found.phrases[0].end]
    ('A man waves .', 'A man')
    """
    text, phrases, at = "", [], 0
    for mark in MARK.finditer(line):
        text += line[at : mark.start()]
        kinds = tuple(mark[2].strip("/").split("/"))
        phrases.append(Phrase(len(text), len(text) + len(mark[3]), mark[1], kinds))
        text += mark[3]
        at = mark.end()
    text += line[at:]
    if "[/EN" in text:
        raise BadInput(f"a mark that does not end: {text[text.index('[/EN') :][:40]!r}")
    return Sentence(text, tuple(phrases))


def read_sentences(path: Path) -> list[Sentence]:
    """The captions of one photo."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(read_sentence(line))
        except BadInput as problem:
            raise Damaged(f"{path}: line {number} has {problem}.") from problem
    return found


def read_boxes(path: Path) -> Boxes:
    """The boxes of one photo; entities that fill the scene or are not to be seen have none.

    A file that declares a document type is refused: it could make a few bytes into gigabytes.
    """
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    content = path.read_bytes()
    if len(content) > MOST_BYTES or b"<!" in content:
        raise Damaged(
            f"{path} is no list of boxes: it is too long, or declares things; get it again."
        )
    try:
        top = ElementTree.fromstring(content)
        size = (_whole(top, "size/height"), _whole(top, "size/width"))
        of: dict[str, list[Box]] = {}
        for thing in top.iter("object"):
            for place in thing.iter("bndbox"):
                edges = [_whole(place, edge) for edge in ("xmin", "ymin", "xmax", "ymax")]
                if edges[2] < edges[0] or edges[3] < edges[1] or min(size) < 1:
                    raise ValueError(f"the box {edges}")
                # pixels from the first to the last, counted from 1
                box = (edges[0] - 1.0, edges[1] - 1.0, float(edges[2]), float(edges[3]))
                for name in thing.iter("name"):
                    of.setdefault(str(name.text).strip(), []).append(box)
    except (ElementTree.ParseError, ValueError, TypeError) as problem:
        raise Damaged(f"{path} is no list of boxes: {problem}; get it again.") from problem
    return Boxes(size, {entity: tuple(boxes) for entity, boxes in of.items()})


def read_pairs(path: Path) -> list[tuple[str, str, bool, list[tuple[int, str, str]]]]:
    """Of every photo: its id, its split, whether it is there, and (label, phrase, phrase)."""
    found = []
    for number, entry in enumerate(records(path, None)):
        match entry:
            case {"image": str(photo), "split": str(split), "pos": [*same], "neg": [*other]}:
                pairs: list[tuple[int, str, str]] = []
                for label, pair in [*((1, pair) for pair in same), *((0, pair) for pair in other)]:
                    match pair:
                        case [str(first), str(second)] if first.strip() and second.strip():
                            pairs.append((label, first, second))
                        case _:
                            raise Damaged(f"{path}: entry {number}: {pair!r:.40} is no pair.")
                found.append((photo, split, bool(entry.get("has_image")), pairs))
            case _:
                raise Damaged(f"{path}: entry {number} has no image, split, pos and neg.")
    return found


def _whole(top: ElementTree.Element, name: str) -> int:
    return int(str(top.findtext(name)))


def _linked(
    text: TextGeometry, sentence: Sentence, entities: Sequence[str], most: int
) -> NDArray[np.bool_]:
    """Which boxes each token speaks of: those of the entity whose phrase has most of the token."""
    linked = np.zeros((text.spans.shape[1], most), dtype=bool)
    for phrase in sentence.phrases:
        inside = (text.cover([[(phrase.start, phrase.end)]])[0] > 0.5).numpy()
        boxes = np.zeros(most, dtype=bool)
        boxes[: len(entities)] = [entity == phrase.entity for entity in entities]
        linked |= inside[:, None] & boxes
    return linked


def _shown(
    name: str, split: str, folder: Path, ids: Sequence[str], look: Look | None
) -> PhotoSet | None:
    if look is None:
        return None
    if look.features is not None:
        raise BadInput(f"{name} looks at boxes: give photos, not features of whole ones.")
    return gallery(name, split, folder / "images", [f"{photo}.jpg" for photo in ids], look)


def _with_photos(found: Batch, photos: PhotoSet, places: Sequence[int]) -> Batch:
    chosen, of = np.unique(np.asarray(places, dtype=np.int64), return_inverse=True)
    shown = photos.batch(chosen.tolist())
    return replace(
        found,
        images=shown.images,
        image_of=torch.from_numpy(of.reshape(-1).astype(np.int64)),
        geometry=shown.geometry,
    )


def _places(data: Flickr30kEntities | VgpPairs, indices: Sequence[int]) -> list[int]:
    found = [int(place) for place in indices]
    for place in found:
        if not 0 <= place < len(data):
            raise BadInput(f"{data.name} {data.split} has 0 to {len(data) - 1}, not {place}.")
    return found
