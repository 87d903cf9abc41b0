"""Flickr30k Entities: captions with phrases grounded in boxes; and pairs of phrases.

Plummer et al., "Flickr30k Entities", ICCV 2015, https://github.com/BryanPlummer/flickr30k_entities.
`flickr30k_entities/` has `Sentences/ID.txt`, five lines such as `[/EN#1/people A man] waves .`,
`Annotations/ID.xml` with the boxes of each entity, the lists `train.txt`, `val.txt`, `test.txt` of
ids, and the photos `images/ID.jpg`. `vgp_pairs.json` has pairs of phrases about one photo that
mean one entity or two (Chu, Otani and Nakashima, "iParaphrasing", COLING 2018).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray

from overt.data.batch import Batch
from overt.data.dataset import check_indices, digest_files
from overt.data.download import require_file
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import Box, check_count, read_lines
from overt.data.scenes.phrase_relations import encode_pair
from overt.data.scenes.view_dataset import grounding_target
from overt.data.splits import Split, parse_official_split
from overt.data.vocabulary import Tokenizer, Vocabulary, pad_texts, read_texts
from overt.data.vqa_dataset import (
    PhotoInput,
    attach_photos,
    build_vocabulary,
    names_and_sizes,
    open_boxed_photos,
)
from overt.errors import CorruptFileError, UserError
from overt.geometry import TextGeometry

FOLDER = "flickr30k_entities"
PHOTOS = {Split.TRAIN: 29_783, Split.VAL: 1_000, Split.TEST: 1_000}
MARK = re.compile(r"\[/EN#(\d+)((?:/[^\s/\]]+)+) ([^\[\]]+)\]")
MOST_BYTES = 1_000_000  # of the boxes of one photo


@dataclass(frozen=True)
class EntityPhrase:
    """Character range of a phrase in its sentence, its entity, and the types of the entity."""

    start: int
    end: int
    entity: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class EntitySentence:
    """A caption without its markup, and its phrases."""

    text: str
    phrases: tuple[EntityPhrase, ...]


@dataclass(frozen=True)
class EntityBoxes:
    """Size (height, width) of a photo and the boxes of each entity on it."""

    size: tuple[int, int]
    of: dict[str, tuple[Box, ...]]


class Flickr30kEntities:
    """Captions with grounded phrases; an item is one sentence.

    `boxes` are all boxes of the photo. `target` spreads the attention of the words of each phrase
    evenly over the boxes of its entity; words without a box do not count.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos; None gives text and boxes only.
        photos: Expected number of photos per split; None accepts any number.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> box = "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>6</ymax>"
        >>> man = f"<object><name>1</name><bndbox>{box}</bndbox></object>"
        >>> size = "<size><width>8</width><height>6</height></size>"
        >>> boxes = f"<annotation>{size}{man}</annotation>"
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, FOLDER)
        ...     write_text(folder / "train.txt", "36979")
        ...     write_text(folder / "Sentences" / "36979.txt", "[/EN#1/people A man] waves .")
        ...     write_text(folder / "Annotations" / "36979.xml", boxes)
        ...     batch = Flickr30kEntities(root, "train", photos=None).batch([0])
        >>> batch.boxes.tolist(), batch.target.weights.flatten()
        ([[[0.0, 0.0, 4.0, 6.0]]], tensor([1., 1., 0., 0.]))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        reader: Tokenizer | None = None,
        photo_input: PhotoInput | None = None,
        photos: dict[Split, int] | None = PHOTOS,
    ) -> None:
        self.name, self.split = "flickr30k_entities", parse_official_split(FOLDER, split)
        self._folder = Path(root) / FOLDER
        self._ids = ids = read_lines(self._folder / f"{split}.txt")
        wanted = None if photos is None else photos[self.split]
        check_count(self._folder / f"{split}.txt", len(ids), wanted, "photos")
        sentences = self._read_sentences(ids)
        self.sentences = [one for each in sentences for one in each]
        self._photo_of = [row for row, each in enumerate(sentences) for _ in each]
        self._number = [number for each in sentences for number in range(len(each))]
        self._boxes = [read_boxes(self._path("Annotations", photo, "xml")) for photo in ids]
        if reader is None:
            train = self.sentences
            if self.split is not Split.TRAIN:
                every = self._read_sentences(read_lines(self._folder / "train.txt"))
                train = [one for each in every for one in each]
            reader = build_vocabulary(one.text for one in train)
        self.reader = reader
        self._photos = open_boxed_photos(
            *(self.name, self.split, self._folder / "images"), _jpegs(ids), photo_input
        )
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self.sentences)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sentences at `indices`; each photo once."""
        places = check_indices(self, indices)
        chosen = [self.sentences[place] for place in places]
        tokens, mask, text = read_texts(self.reader, [one.text for one in chosen])
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
            found = attach_photos(found, self._photos, photos)
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
        if found.sample_geometry is not None:  # a stored photo may be smaller than the annotated
            stored = found.sample_geometry.size.flip(-1).repeat(1, 2)
            drawn = torch.tensor([one.size for one in boxes]).flip(-1).repeat(1, 2)
            stacked = stacked * (stored / drawn)[:, None]
        return replace(
            found,
            boxes=stacked,
            region_mask=there,
            target=grounding_target(linked, stacked, text),
        )

    def digest(self) -> str:
        """Return a hash of every sentence and box of the split, and of the photos."""
        about = f"flickr30k_entities {self.split} {len(self)}"
        kinds = (("Sentences", "txt"), ("Annotations", "xml"))
        paths = (self._path(kind, photo, end) for photo in self._ids for kind, end in kinds)
        return digest_files(about, paths, names_and_sizes(self.files))

    def _read_sentences(self, photos: Sequence[str]) -> list[list[EntitySentence]]:
        return [read_sentences(self._path("Sentences", photo, "txt")) for photo in photos]

    def _path(self, kind: str, photo: str, ending: str) -> Path:
        if not photo.isdecimal():
            raise CorruptFileError(f"{self._folder}: {photo!r:.40} in a list is not a photo id.")
        return self._folder / kind / f"{photo}.{ending}"


class VgpPairs:
    """Pairs of phrases about one photo; the label is 1 if both mean one entity, else 0.

    `tokens` are begin, the first phrase, end, the second phrase, end, with the special ids of
    `Vocabulary`; for another tokenizer use `references`, the two phrases.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        reader: Vocabulary; None takes the words of `train`.
        photo_input: Canvas of the photos, which keeps only pairs whose photo is present; None gives
            text only.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> pairs = {"pos": [["a man", "a fisherman"]], "neg": [["a man", "a boat"]]}
        >>> with TemporaryDirectory() as root:
        ...     entry = {"image": "1", "split": "train", **pairs}
        ...     write_json(Path(root, FOLDER, "vgp_pairs.json"), [entry])
        ...     batch = VgpPairs(root, "train").batch([0, 1])
        >>> batch.labels.tolist(), batch.references[0]
        ([1, 0], ('a man', 'a fisherman'))
    """

    def __init__(
        self,
        root: Path | str,
        split: str = Split.TRAIN,
        reader: Vocabulary | None = None,
        photo_input: PhotoInput | None = None,
    ) -> None:
        self.name, self.split = "vgp", parse_official_split("vgp", split)
        self.classes = ("other", "paraphrase")
        folder = Path(root) / FOLDER
        self._path = folder / "vgp_pairs.json"
        table = read_pairs(self._path)
        shown = [one for one in table if one[1] == split and (photo_input is None or one[2])]
        self._names = list(dict.fromkeys(one[0] for one in shown))
        place = {photo: number for number, photo in enumerate(self._names)}
        self._pairs = [
            (place[photo], first, second, label)
            for photo, _, _, pairs in shown
            for label, first, second in pairs
        ]
        if not self._pairs:
            raise UserError(f"{self._path} has no pairs of {split}.")
        train = (one for one in table if one[1] == Split.TRAIN)
        self.reader = reader or build_vocabulary(
            phrase for one in train for _, *both in one[3] for phrase in both
        )
        self._photos = open_boxed_photos(
            self.name, self.split, folder / "images", _jpegs(self._names), photo_input
        )
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the pairs at `indices`; each photo once."""
        places = check_indices(self, indices)
        chosen = [self._pairs[place] for place in places]
        read = [encode_pair(self.reader, first, second) for _, first, second, _ in chosen]
        tokens, mask, text = pad_texts(
            [one[0] for one in read], [one[1:3] for one in read], self.reader.padding
        )
        found = Batch(
            ids=tuple(
                f"vgp/{self._names[one[0]]}/{place:06d}"
                for place, one in zip(places, chosen, strict=True)
            ),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([label for *_, label in chosen], dtype=torch.long),
            references=tuple((first, second) for _, first, second, _ in chosen),
        )
        if self._photos is None:
            return found
        return attach_photos(found, self._photos, [one[0] for one in chosen])

    def digest(self) -> str:
        """Return a hash of the pairs file, the split, and the photos."""
        about = f"vgp {self.split} {len(self)} "
        return digest_files(about, [self._path], names_and_sizes(self.files))


def read_sentence(line: str) -> EntitySentence:
    """Parse a caption with markup `[/EN#entity/type words]`; raise `UserError` if it is malformed.

    >>> found = read_sentence("[/EN#1/people A man] waves .")
    >>> found.text, found.text[found.phrases[0].start : found.phrases[0].end]
    ('A man waves .', 'A man')
    """
    text, phrases, at = "", [], 0
    for mark in MARK.finditer(line):
        text += line[at : mark.start()]
        kinds = tuple(mark[2].strip("/").split("/"))
        phrases.append(EntityPhrase(len(text), len(text) + len(mark[3]), mark[1], kinds))
        text += mark[3]
        at = mark.end()
    text += line[at:]
    if "[/EN" in text:
        raise UserError(f"unterminated markup: {text[text.index('[/EN') :][:40]!r}")
    return EntitySentence(text, tuple(phrases))


def read_sentences(path: Path) -> list[EntitySentence]:
    """Read the captions of one photo."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(read_sentence(line))
        except UserError as problem:
            raise CorruptFileError(f"{path}: line {number} has {problem}.") from problem
    return found


def read_boxes(path: Path) -> EntityBoxes:
    """Read the boxes of one photo; entities that fill the scene or are not visible have none.

    A file with a document type declaration is rejected: a few bytes could expand to gigabytes.
    """
    require_file(path)
    content = path.read_bytes()
    if len(content) > MOST_BYTES or b"<!" in content:
        raise CorruptFileError(
            f"{path} is not a list of boxes: too long, or with declarations; download it again."
        )
    try:
        top = ElementTree.fromstring(content)
        size = (_whole(top, "size/height"), _whole(top, "size/width"))
        of: dict[str, list[Box]] = {}
        for thing in top.iter("object"):
            for place in thing.iter("bndbox"):
                edges = [_whole(place, edge) for edge in ("xmin", "ymin", "xmax", "ymax")]
                inverted = edges[2] < edges[0] or edges[3] < edges[1] or min(size) < 1
                outside = edges[0] > size[1] or edges[1] > size[0] or min(edges[2:]) < 1
                if inverted or outside:
                    raise ValueError(f"the box {edges} on a photo of {size[1]} x {size[0]} pixels")
                # the file counts pixels from 1 and includes the last one
                box = (edges[0] - 1.0, edges[1] - 1.0, float(edges[2]), float(edges[3]))
                for name in thing.iter("name"):
                    of.setdefault(str(name.text).strip(), []).append(box)
    except (ElementTree.ParseError, ValueError, TypeError) as problem:
        raise CorruptFileError(
            f"{path} is not a list of boxes: {problem}; download it again."
        ) from problem
    return EntityBoxes(size, {entity: tuple(boxes) for entity, boxes in of.items()})


def read_pairs(path: Path) -> list[tuple[str, str, bool, list[tuple[int, str, str]]]]:
    """Read for every photo: id, split, whether it is present, and (label, phrase, phrase)."""
    found = []
    for number, entry in enumerate(iterate_records(path, None)):
        match entry:
            case {"image": str(photo), "split": str(split), "pos": [*same], "neg": [*other]}:
                pairs: list[tuple[int, str, str]] = []
                for label, pair in [*((1, pair) for pair in same), *((0, pair) for pair in other)]:
                    match pair:
                        case [str(first), str(second)] if first.strip() and second.strip():
                            pairs.append((label, first, second))
                        case _:
                            raise CorruptFileError(
                                f"{path}: entry {number}: {pair!r:.40} is not a pair."
                            )
                found.append((photo, split, bool(entry.get("has_image")), pairs))
            case _:
                raise CorruptFileError(f"{path}: entry {number} has no image, split, pos and neg.")
    return found


def _whole(top: ElementTree.Element, name: str) -> int:
    return int(str(top.findtext(name)))


def _linked(
    text: TextGeometry, sentence: EntitySentence, entities: Sequence[str], most: int
) -> NDArray[np.bool_]:
    """Return the boxes of each token: those of the entity whose phrase covers most of the token."""
    linked = np.zeros((text.spans.shape[1], most), dtype=bool)
    for phrase in sentence.phrases:
        inside = (text.cover([[(phrase.start, phrase.end)]])[0] > 0.5).numpy()
        boxes = np.zeros(most, dtype=bool)
        boxes[: len(entities)] = [entity == phrase.entity for entity in entities]
        linked |= inside[:, None] & boxes
    return linked


def _jpegs(ids: Sequence[str]) -> list[str]:
    return [f"{photo}.jpg" for photo in ids]
