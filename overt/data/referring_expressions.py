"""Referring expressions: RefCOCO, RefCOCO+, RefCOCOg and phrases of Flickr30k.

Kazemzadeh et al. 2014, Yu et al. 2016 (https://github.com/lichengunc/refer), Mao et al. 2016;
Plummer et al. 2015. Two formats are read. *Flat* files
(https://github.com/josiahwang/phraseloceval) are lists of phrases with a box each:
`refcoco/{refcoco_test,refcoco+_testA,...}.json` and `flickr30k_entities/annotation_test.json`. The
*official* release has `instances.json`, as in COCO, and `refs(SPLITTER).p`. That is a pickle, which
can run code and is never read here; if you trust it, write its contents, a list of plain values,
once as `refs(SPLITTER).json` beside it.
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

from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.images import Size
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import Box, check_count
from overt.data.scenes.view_dataset import grounding_target
from overt.data.vocabulary import Tokenizer, read_texts
from overt.data.vqa_dataset import (
    PhotoInput,
    attach_photos,
    build_vocabulary,
    names_and_sizes,
    open_boxed_photos,
)
from overt.errors import CorruptFileError, UserError
from overt.io import digest, read_json

REFCOCO, ENTITIES, COCO = "refcoco", "flickr30k_entities", "coco/train2014"
FLAT = {  # name, split: file, expressions
    ("refcoco", "test"): ("refcoco_test.json", 10_752),
    ("refcoco+", "testA"): ("refcoco+_testA.json", 5_726),
    ("refcoco+", "testB"): ("refcoco+_testB.json", 4_889),
    ("refcocog", "test"): ("refcocog_test.json", 9_602),
}
PHRASES = 14_481


@dataclass(frozen=True)
class ReferringExpression:
    """An expression, its photo, the box of its referent, and the class of the referent."""

    id: str
    photo: str
    text: str
    box: Box
    kind: str


class ReferringExpressions:
    """Referring expressions; an item is one expression.

    `boxes` are the candidates of its photo, `labels` the index of the referent, `groups` the
    classes. `target` has every word attend to the referent. Boxes are in pixels of the photo as
    stored.

    Args:
        name: Name of the dataset.
        split: Name of the split.
        expressions: The expressions.
        candidates: Boxes of each photo.
        sources: Files that were read, for the digest.
        folder: Folder of the photos.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos; None gives text and boxes only.
        sizes: Size (height, width) of each photo in which its boxes were drawn, if not as stored.

    Raises:
        UserError: There are no expressions, or `photo_input` has features.

    Example:
        >>> left, right = (0.0, 0.0, 4.0, 6.0), (4.0, 0.0, 8.0, 6.0)
        >>> said = ReferringExpression("toy/1", "1.jpg", "left dog", left, "dog")
        >>> boxes = {"1.jpg": [right, left]}
        >>> batch = ReferringExpressions("toy", "test", [said], boxes, [], "photos").batch([0])
        >>> batch.labels, batch.target.weights[0, 0, 0]
        (tensor([1]), tensor([[0., 1.], [0., 1.]]))
    """

    def __init__(
        self,
        name: str,
        split: str,
        expressions: Sequence[ReferringExpression],
        candidates: Mapping[str, Sequence[Box]],
        sources: Sequence[Path | str],
        folder: Path | str,
        reader: Tokenizer | None = None,
        photo_input: PhotoInput | None = None,
        sizes: Mapping[str, Size] | None = None,
    ) -> None:
        if not expressions:
            raise UserError(f"{name} {split} has no expressions.")
        self.name, self.split, self.expressions = name, split, tuple(expressions)
        self.reader = reader or build_vocabulary(one.text for one in expressions)
        self._candidates, self._sizes = candidates, sizes or {}
        self._sources = [Path(one) for one in sources]
        self._names = list(dict.fromkeys(one.photo for one in expressions))
        self._place = {photo: number for number, photo in enumerate(self._names)}
        self._photos = open_boxed_photos(name, split, Path(folder), self._names, photo_input)
        self.files = () if self._photos is None else self._photos.files

    def __len__(self) -> int:
        return len(self.expressions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the expressions at `indices`; each photo once."""
        chosen = [self.expressions[place] for place in check_indices(self, indices)]
        tokens, mask, text = read_texts(self.reader, [one.text for one in chosen])
        found = Batch(
            ids=tuple(one.id for one in chosen), tokens=tokens, token_mask=mask, text=text
        )
        scales = torch.ones(len(chosen), 1, 4)
        if self._photos is not None:
            photos = [self._place[one.photo] for one in chosen]
            found = attach_photos(found, self._photos, photos)
            assert found.sample_geometry is not None
            scales = self._scales(chosen, found.sample_geometry.size)
        boxes, there = _stacked([self._candidates[one.photo] for one in chosen])
        boxes = boxes * scales
        labels = [list(self._candidates[one.photo]).index(one.box) for one in chosen]
        linked = np.zeros((*tokens.shape, boxes.shape[1]), dtype=bool)
        for row, label in enumerate(labels):
            linked[row, :, label] = text.spans[row, :, 0] >= 0  # special tokens cover no characters
        return replace(
            found,
            boxes=boxes,
            region_mask=there,
            labels=torch.tensor(labels, dtype=torch.long),
            groups=tuple(one.kind for one in chosen),
            target=grounding_target(list(linked), boxes, text),
        )

    def digest(self) -> str:
        """Return a hash of the files and, with photos, of their names and sizes."""
        about = f"{self.name} {self.split} {len(self)} {self._photos is not None}"
        whole = hashlib.sha256(about.encode())
        for path in self._sources:
            whole.update(digest(path).encode())
        whole.update(names_and_sizes(self.files))
        return whole.hexdigest()

    def _scales(
        self, chosen: Sequence[ReferringExpression], sizes: Tensor
    ) -> Float[Tensor, "b 1 4"]:
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
    reader: Tokenizer | None = None,
    photo_input: PhotoInput | None = None,
    count: int | None = -1,
) -> ReferringExpressions:
    """Open a flat test file of RefCOCO, RefCOCO+ or RefCOCOg.

    Candidates are the objects of the photo that the file refers to, not all objects on it.

    Args:
        root: Data folder, see `data_root`.
        split: `test`, `testA` or `testB`.
        name: `refcoco`, `refcoco+` or `refcocog`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos; None gives text and boxes only.
        count: Expected number of expressions; -1 as published, None accepts any number.

    Returns:
        The expressions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> entry = {"imageName": "1.jpg", "phrase": ["left", "dog"], "box": [0, 0, 4, 6]}
        >>> with TemporaryDirectory() as root:
        ...     path = Path(root, REFCOCO, FLAT["refcoco+", "testA"][0])
        ...     write_json(path, [{**entry, "categories": ["dog"]}])
        ...     batch = refcoco(root, "testA", "refcoco+", count=None).batch([0])
        >>> batch.text.texts, batch.boxes.tolist()
        (('left dog',), [[[0.0, 0.0, 4.0, 6.0]]])
    """
    root = Path(root)
    if (name, split) not in FLAT:
        known = ", ".join(f"{name} {split}" for name, split in FLAT)
        raise UserError(f"There is no flat file of {name} {split}: choose from {known}.")
    file, published = FLAT[(name, split)]
    path = root / REFCOCO / file
    found = read_flat(path, name, lambda entry: str(entry["imageName"]))
    check_count(path, len(found), published if count == -1 else count, "expressions")
    return ReferringExpressions(
        name, split, found, _by_photo(found), [path], root / COCO, reader, photo_input
    )


def flickr30k_phrases(
    root: Path | str,
    split: str = "test",
    reader: Tokenizer | None = None,
    photo_input: PhotoInput | None = None,
    count: int | None = PHRASES,
) -> ReferringExpressions:
    """Open the phrases of the test split of Flickr30k Entities; several boxes of one are merged.

    Candidates are the boxes of the photo. With `photo_input`, only phrases whose photo is listed in
    `images.json` are kept: 285 of 999 photos in our copy.

    Args:
        root: Data folder, see `data_root`.
        split: `test`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos; None gives text and boxes only.
        count: Expected number of expressions; None accepts any number.

    Returns:
        The phrases.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> entry = {"image": "1#0", "phrase": ["a", "dog"], "box": [0, 0, 4, 6]}
        >>> with TemporaryDirectory() as root:
        ...     path = Path(root, ENTITIES, "annotation_test.json")
        ...     write_json(path, [{**entry, "categories": ["animals"]}])
        ...     batch = flickr30k_phrases(root, count=None).batch([0])
        >>> batch.text.texts, batch.groups
        (('a dog',), ('animals',))
    """
    root = Path(root)
    if split != "test":
        raise UserError(f"The flat file of Flickr30k Entities has only test, not {split!r}.")
    folder = root / ENTITIES
    path = folder / "annotation_test.json"
    found = read_flat(path, "flickr30k", lambda entry: f"{entry['image'].partition('#')[0]}.jpg")
    check_count(path, len(found), count, "expressions")
    if photo_input is None:
        return ReferringExpressions(
            "flickr30k", split, found, _by_photo(found), [path], folder, reader
        )
    sizes = read_sizes(folder / "images.json")
    shown = [one for one in found if one.photo in sizes]
    return ReferringExpressions(
        *("flickr30k", split, shown, _by_photo(shown), [path, folder / "images.json"]),
        *(folder / "images", reader, photo_input, sizes),
    )


def refer(
    root: Path | str,
    split: str = "train",
    name: str = "refcoco",
    splitter: str = "unc",
    reader: Tokenizer | None = None,
    photo_input: PhotoInput | None = None,
) -> ReferringExpressions:
    """Open the official release: `refcoco/NAME/instances.json` and
    `refcoco/NAME/refs(SPLITTER).json`.

    Candidates are all objects that COCO has on the photo. The second file is made from the pickle
    of the release, see the head of this module.

    Args:
        root: Data folder, see `data_root`.
        split: Split of the release, such as `train`, `val` or `testA`.
        name: `refcoco`, `refcoco+` or `refcocog`.
        splitter: `unc`, `google` or `umd`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        photo_input: Canvas of the photos; None gives text and boxes only.

    Returns:
        The expressions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> sentences = [{"sent_id": 5, "sent": "left dog"}]
        >>> objects = {
        ...     "images": [{"id": 7, "file_name": "7.jpg"}],
        ...     "categories": [{"id": 18, "name": "dog"}],
        ...     "annotations": [{"id": 9, "image_id": 7, "category_id": 18, "bbox": [0, 0, 4, 6]}],
        ... }
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, REFCOCO, "refcoco")
        ...     write_json(folder / "instances.json", objects)
        ...     said = {"split": "train", "ann_id": 9, "sentences": sentences}
        ...     write_json(folder / "refs(unc).json", [said])
        ...     batch = refer(root, "train").batch([0])
        >>> batch.ids, batch.groups
        (('refcoco/5',), ('dog',))
    """
    root = Path(root)
    folder = root / REFCOCO / name
    refs, instances = folder / f"refs({splitter}).json", folder / "instances.json"
    if not refs.is_file() and refs.with_suffix(".p").is_file():
        raise UserError(
            f"{refs.with_suffix('.p')} is a pickle, which can run code and is never read: convert "
            f"it to {refs.name} first (see overt.data.referring_expressions)."
        )
    photos, boxes, kinds = read_instances(instances)
    found, splits = [], set()
    for number, entry in enumerate(iterate_records(refs, None)):
        match entry:
            case {"split": str(part), "ann_id": int(thing), "sentences": [*said]}:
                splits.add(part)
                if part == split:
                    found += _referred(refs, number, said, thing, photos, boxes, kinds, name)
            case _:
                raise CorruptFileError(
                    f"{refs}: entry {number} has no split, ann_id and sentences."
                )
    if not found:
        raise UserError(f"{refs} has no split {split!r}; it has {', '.join(sorted(splits))}.")
    candidates: dict[str, list[Box]] = {}
    for photo, box in boxes.values():
        candidates.setdefault(photos[photo], []).append(box)
    return ReferringExpressions(
        name, split, found, candidates, [refs, instances], root / COCO, reader, photo_input
    )


def read_flat(
    path: Path, name: str, photo: Callable[[dict[str, Any]], str]
) -> list[ReferringExpression]:
    """Read and check the expressions of a flat file."""
    found = []
    for number, entry in enumerate(iterate_records(path, None)):
        try:
            text = " ".join(map(str, entry["phrase"]))
            kinds = [*entry["categories"], ""]
            box = _box(entry["box"])
            found.append(
                ReferringExpression(f"{name}/{number:05d}", photo(entry), text, box, str(kinds[0]))
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise CorruptFileError(
                f"{path}: entry {number} is not a phrase with a box ({problem!r:.50})."
            ) from problem
        if not text.strip():
            raise CorruptFileError(f"{path}: entry {number} has no words; download it again.")
    return found


def read_instances(
    path: Path,
) -> tuple[dict[int, str], dict[int, tuple[int, Box]], dict[int, str]]:
    """Read a COCO file: the photos, the (photo, box) and the class of each object."""
    photos: dict[int, str] = {}
    boxes: dict[int, tuple[int, Box]] = {}
    kinds: dict[int, str] = {}
    try:
        names = {entry["id"]: str(entry["name"]) for entry in iterate_records(path, "categories")}
        for entry in iterate_records(path, "images"):
            photos[entry["id"]] = str(entry["file_name"])
        for entry in iterate_records(path, "annotations"):
            boxes[entry["id"]] = (entry["image_id"], _box(entry["bbox"]))
            kinds[entry["id"]] = names[entry["category_id"]]
            if entry["image_id"] not in photos:
                raise ValueError(
                    f"object {entry['id']} is on photo {entry['image_id']}, which is not listed"
                )
    except UserError:  # a missing file is not a corrupt one
        raise
    except (KeyError, TypeError, ValueError) as problem:
        raise CorruptFileError(
            f"{path} is not a list of objects on photos: {problem!r:.60}."
        ) from problem
    return photos, boxes, kinds


def read_sizes(path: Path) -> dict[str, Size]:
    """Read the (height, width) in which boxes were drawn, by the file of the photo."""
    table = read_json(path)
    try:
        return {
            f"{photo}.jpg": (int(about["original_size"][1]), int(about["original_size"][0]))
            for photo, about in table.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise CorruptFileError(
            f"{path} does not have the size of every photo: {problem!r:.50}."
        ) from problem


def _referred(
    refs: Path,
    number: int,
    said: Sequence[Any],
    thing: int,
    photos: Mapping[int, str],
    boxes: Mapping[int, tuple[int, Box]],
    kinds: Mapping[int, str],
    name: str,
) -> list[ReferringExpression]:
    """Return the sentences of one reference as expressions."""
    if thing not in boxes:
        raise CorruptFileError(
            f"{refs}: entry {number} refers to object {thing}, which does not exist."
        )
    photo, box = boxes[thing]
    try:
        return [
            ReferringExpression(
                f"{name}/{one['sent_id']}", photos[photo], one["sent"], box, kinds[thing]
            )
            for one in said
        ]
    except (KeyError, TypeError) as problem:
        raise CorruptFileError(f"{refs}: entry {number} has a sentence without words.") from problem


def _box(numbers: Sequence[Any]) -> Box:
    """Return (left, top, right, bottom) from (left, top, width, height)."""
    left, top, width, height = (float(number) for number in numbers)
    if not (width > 0 and height > 0 and left + width < 1e6 and top + height < 1e6):
        raise ValueError(f"a box of {width} x {height}")
    return (left, top, left + width, top + height)


def _by_photo(expressions: Sequence[ReferringExpression]) -> dict[str, list[Box]]:
    """Return the distinct boxes of each photo, in the order of their first expression."""
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
