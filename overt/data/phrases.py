"""Words that mean one thing in a photo: RefCOCO, RefCOCO+, RefCOCOg and phrases of Flickr30k.

Kazemzadeh et al. 2014, Yu et al. 2016 (https://github.com/lichengunc/refer), Mao et al. 2016;
Plummer et al. 2015. Two formats are read. *Flat* files (https://github.com/josiahwang/phraseloceval)
are lists of phrases with a box each: `refcoco/{refcoco_test,refcoco+_testA,...}.json` and
`flickr30k_entities/annotation_test.json`. The *official* release has `instances.json`, as COCO has,
and `refs(SPLITTER).p`. That is a pickle, which can run programs and is never read here; where you
trust it, write what it holds, a list of plain values, once as `refs(SPLITTER).json` beside it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.data.asked import Look, gallery, words_of
from overt.data.batch import Batch
from overt.data.images import Size
from overt.data.photos import Box, PhotoSet
from overt.data.records import records
from overt.data.scenes.views import grounding
from overt.data.vocabulary import Reader, pad
from overt.errors import BadInput, Damaged
from overt.files import digest, read_json
from overt.geometry import TextGeometry

REFCOCO, ENTITIES, COCO = "refcoco", "flickr30k_entities", "coco/train2014"
FLAT = {  # name, split: file, expressions
    ("refcoco", "test"): ("refcoco_test.json", 10_752),
    ("refcoco+", "testA"): ("refcoco+_testA.json", 5_726),
    ("refcoco+", "testB"): ("refcoco+_testB.json", 4_889),
    ("refcocog", "test"): ("refcocog_test.json", 9_602),
}
PHRASES = 14_481


@dataclass(frozen=True)
class Expression:
    """Some words, the photo they are about, the box of what they mean, and its kind."""

    id: str
    photo: str
    text: str
    box: Box
    kind: str


class Expressions:
    """Which box is meant? An item is one expression.

    `boxes` are the candidates of its photo, `labels` the one that is meant, `target` has every word
    look at it, `groups` are the kinds of things. Boxes are in pixels of the photo as it is stored:
    `sizes`, where given, are those that boxes were drawn in, by photo. With `look` the batch has
    the photos, below `folder`; without, words and boxes alone.
    """

    def __init__(
        self,
        name: str,
        split: str,
        expressions: Sequence[Expression],
        candidates: Mapping[str, Sequence[Box]],
        sources: Sequence[Path | str],
        folder: Path | str,
        reader: Reader | None = None,
        look: Look | None = None,
        sizes: Mapping[str, Size] | None = None,
    ) -> None:
        if not expressions:
            raise BadInput(f"{name} {split} has no expression.")
        self.name, self.split, self.expressions = name, split, tuple(expressions)
        self.reader = reader or words_of(one.text for one in expressions)
        self._candidates, self._sizes = candidates, sizes or {}
        self._sources = [Path(one) for one in sources]
        self._names = list(dict.fromkeys(one.photo for one in expressions))
        self._place = {photo: number for number, photo in enumerate(self._names)}
        self._photos: PhotoSet | None = None
        if look is not None:
            if look.features is not None:
                raise BadInput(f"{name} looks at boxes: give photos, not features of whole ones.")
            self._photos = gallery(name, split, Path(folder), self._names, look)
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self.expressions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The expressions at these places, each photo once."""
        chosen = self._chosen(indices)
        read = [self.reader.read(one.text) for one in chosen]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        text = TextGeometry(tuple(one.text for one in chosen), spans)
        found = Batch(
            ids=tuple(one.id for one in chosen), tokens=tokens, token_mask=mask, text=text
        )
        scales = torch.ones(len(chosen), 1, 4)
        if self._photos is not None:
            places, of = np.unique([self._place[one.photo] for one in chosen], return_inverse=True)
            shown = self._photos.batch(places.tolist())
            found = replace(
                found,
                images=shown.images,
                image_of=torch.from_numpy(of.reshape(-1).astype(np.int64)),
                geometry=shown.geometry,
            )
            assert found.sample_geometry is not None
            scales = self._scales(chosen, found.sample_geometry.size)
        boxes, there = _stacked([self._candidates[one.photo] for one in chosen])
        boxes = boxes * scales
        labels = [list(self._candidates[one.photo]).index(one.box) for one in chosen]
        linked = []
        for row, label in enumerate(labels):
            link = np.zeros((len(read[row][0]), boxes.shape[1]), dtype=bool)
            link[[span != (-1, -1) for span in read[row][1]], label] = True
            linked.append(link)
        return replace(
            found,
            boxes=boxes,
            region_mask=there,
            labels=torch.tensor(labels, dtype=torch.long),
            groups=tuple(one.kind for one in chosen),
            target=grounding(linked, boxes, text),
        )

    def digest(self) -> str:
        """A hash of the files of expressions and, where photos are shown, of names and sizes."""
        about = f"{self.name} {self.split} {len(self)} {self._photos is not None}"
        whole = hashlib.sha256(about.encode())
        for path in self._sources:
            whole.update(digest(path).encode())
        for path in self.files:
            whole.update(f"{path.name} {path.stat().st_size}\n".encode())
        return whole.hexdigest()

    def _chosen(self, indices: Sequence[int]) -> list[Expression]:
        places = [int(place) for place in indices]
        for place in places:
            if not 0 <= place < len(self):
                raise BadInput(
                    f"{self.name} {self.split} has expressions 0 to {len(self) - 1}, not {place}."
                )
        return [self.expressions[place] for place in places]

    def _scales(self, chosen: Sequence[Expression], sizes: Tensor) -> Float[Tensor, "b 1 4"]:
        found = []
        for one, (height, width) in zip(chosen, sizes.tolist(), strict=True):
            drawn = self._sizes.get(one.photo, (height, width))
            across, down = width / drawn[1], height / drawn[0]
            found.append([across, down, across, down])
        return torch.tensor(found).reshape(len(chosen), 1, 4)


def refcoco(
    root: Path | str,
    split: str = "testA",
    name: str = "refcoco+",
    reader: Reader | None = None,
    look: Look | None = None,
    count: int | None = -1,
) -> Expressions:
    """A flat test file of RefCOCO, RefCOCO+ or RefCOCOg.

    Candidates are the things of the photo that the file refers to, which are not all that are on
    it. `count` is how many expressions there should be: -1 as published, None any number.
    """
    root = Path(root)
    if (name, split) not in FLAT:
        known = ", ".join(f"{name} {split}" for name, split in FLAT)
        raise BadInput(f"There is no flat file of {name} {split}; there are {known}.")
    file, published = FLAT[(name, split)]
    path = root / REFCOCO / file
    found = read_flat(path, name, lambda entry: str(entry["imageName"]))
    _counted(path, len(found), published if count == -1 else count)
    return Expressions(name, split, found, _by_photo(found), [path], root / COCO, reader, look)


def flickr30k_phrases(
    root: Path | str,
    split: str = "test",
    reader: Reader | None = None,
    look: Look | None = None,
    count: int | None = PHRASES,
) -> Expressions:
    """The phrases of the test split of Flickr30k Entities, several boxes of one merged into one.

    With `look`, only those whose photo `images.json` lists: 285 of 999 photos in our copy.
    Candidates are the boxes of the photo.
    """
    root = Path(root)
    if split != "test":
        raise BadInput(f"The flat file of Flickr30k Entities has test alone, not {split!r}.")
    folder = root / ENTITIES
    path = folder / "annotation_test.json"
    found = read_flat(path, "flickr30k", lambda entry: f"{entry['image'].partition('#')[0]}.jpg")
    _counted(path, len(found), count)
    if look is None:
        return Expressions("flickr30k", split, found, _by_photo(found), [path], folder, reader)
    sizes = read_sizes(folder / "images.json")
    shown = [one for one in found if one.photo in sizes]
    return Expressions(
        *("flickr30k", split, shown, _by_photo(shown), [path, folder / "images.json"]),
        *(folder / "images", reader, look, sizes),
    )


def refer(
    root: Path | str,
    split: str = "train",
    name: str = "refcoco",
    splitter: str = "unc",
    reader: Reader | None = None,
    look: Look | None = None,
) -> Expressions:
    """The official release: `refcoco/NAME/instances.json` and `refcoco/NAME/refs(SPLITTER).json`.

    Candidates are all things that COCO has on the photo. The second file is made from the pickle of
    the release, as this module's page says.
    """
    root = Path(root)
    folder = root / REFCOCO / name
    refs, instances = folder / f"refs({splitter}).json", folder / "instances.json"
    if not refs.is_file() and refs.with_suffix(".p").is_file():
        raise BadInput(
            f"{refs.with_suffix('.p')} is a pickle, which can run programs and is never read: turn "
            f"it into {refs.name} first (see overt.data.phrases)."
        )
    photos, boxes, kinds = read_instances(instances)
    found, splits = [], set()
    for number, entry in enumerate(records(refs, None)):
        match entry:
            case {"split": str(part), "ann_id": int(thing), "sentences": [*said]}:
                splits.add(part)
                if part == split:
                    found += _referred(refs, number, said, thing, photos, boxes, kinds, name)
            case _:
                raise Damaged(f"{refs}: entry {number} has no split, ann_id and sentences.")
    if not found:
        raise BadInput(f"{refs} has no split {split!r}; it has {', '.join(sorted(splits))}.")
    candidates: dict[str, list[Box]] = {}
    for photo, box in boxes.values():
        candidates.setdefault(photos[photo], []).append(box)
    return Expressions(name, split, found, candidates, [refs, instances], root / COCO, reader, look)


def read_flat(path: Path, name: str, photo: Callable[[dict[str, Any]], str]) -> list[Expression]:
    """The expressions of a flat file, checked one by one."""
    found = []
    for number, entry in enumerate(records(path, None)):
        try:
            text = " ".join(map(str, entry["phrase"]))
            kinds = [*entry["categories"], ""]
            box = _box(entry["box"])
            found.append(Expression(f"{name}/{number:05d}", photo(entry), text, box, str(kinds[0])))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise Damaged(
                f"{path}: entry {number} is no phrase with a box ({problem!r:.50}); get it again."
            ) from problem
        if not text.strip():
            raise Damaged(f"{path}: entry {number} has no words; get it again.")
    return found


def read_instances(
    path: Path,
) -> tuple[dict[int, str], dict[int, tuple[int, Box]], dict[int, str]]:
    """Of a COCO file: the photos, the (photo, box) of each thing, and the kind of each thing."""
    photos: dict[int, str] = {}
    boxes: dict[int, tuple[int, Box]] = {}
    kinds: dict[int, str] = {}
    try:
        names = {entry["id"]: str(entry["name"]) for entry in records(path, "categories")}
        for entry in records(path, "images"):
            photos[entry["id"]] = str(entry["file_name"])
        for entry in records(path, "annotations"):
            boxes[entry["id"]] = (entry["image_id"], _box(entry["bbox"]))
            kinds[entry["id"]] = names[entry["category_id"]]
            if entry["image_id"] not in photos:
                raise ValueError(f"thing {entry['id']} is on photo {entry['image_id']}")
    except BadInput:  # a file that is missing is not damaged
        raise
    except (KeyError, TypeError, ValueError) as problem:
        raise Damaged(f"{path} is no list of things on photos: {problem!r:.60}.") from problem
    return photos, boxes, kinds


def read_sizes(path: Path) -> dict[str, Size]:
    """The (height, width) that boxes were drawn in, by the file of the photo."""
    table = read_json(path)
    try:
        return {
            f"{photo}.jpg": (int(about["original_size"][1]), int(about["original_size"][0]))
            for photo, about in table.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise Damaged(f"{path} does not say how large photos were: {problem!r:.50}.") from problem


def _referred(
    refs: Path,
    number: int,
    said: Sequence[Any],
    thing: int,
    photos: Mapping[int, str],
    boxes: Mapping[int, tuple[int, Box]],
    kinds: Mapping[int, str],
    name: str,
) -> list[Expression]:
    """The sentences of one reference as expressions."""
    if thing not in boxes:
        raise Damaged(f"{refs}: entry {number} refers to thing {thing}, which is not there.")
    photo, box = boxes[thing]
    try:
        return [
            Expression(f"{name}/{one['sent_id']}", photos[photo], one["sent"], box, kinds[thing])
            for one in said
        ]
    except (KeyError, TypeError) as problem:
        raise Damaged(f"{refs}: entry {number} has a sentence without words.") from problem


def _box(numbers: Sequence[Any]) -> Box:
    """Left, top, right, bottom, of left, top, width, height."""
    left, top, width, height = (float(number) for number in numbers)
    if not (width > 0 and height > 0 and left + width < 1e6 and top + height < 1e6):
        raise ValueError(f"a box of {width} x {height}")
    return (left, top, left + width, top + height)


def _by_photo(expressions: Sequence[Expression]) -> dict[str, list[Box]]:
    """The different boxes of each photo, in the order in which they are first spoken of."""
    found: dict[str, list[Box]] = {}
    for one in expressions:
        boxes = found.setdefault(one.photo, [])
        if one.box not in boxes:
            boxes.append(one.box)
    return found


def _stacked(
    boxes: Sequence[Sequence[Box]],
) -> tuple[Float[Tensor, "b m 4"], Bool[Tensor, "b m"]]:
    most = max([1, *map(len, boxes)])
    found, there = torch.zeros(len(boxes), most, 4), torch.zeros(len(boxes), most).bool()
    for row, some in enumerate(boxes):
        found[row, : len(some)] = torch.tensor(some).reshape(-1, 4)
        there[row, : len(some)] = True
    return found, there


def _counted(path: Path, have: int, wanted: int | None) -> None:
    if wanted is not None and have != wanted:
        raise Damaged(f"{path} has {have} expressions, not {wanted}; get it again.")
