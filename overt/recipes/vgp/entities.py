"""Pairs of captions of photos: Flickr30k Entities, with what is at hand of it.

The flat file has the phrases of a caption that are tied to a box, and not the words between them:
a caption here is its phrases in their order, with commas. Splits are those of the pairs of phrases
(Chu, Otani and Nakashima, "iParaphrasing", COLING 2018). Candidates are all boxes of the photo.
Two phrases of two captions are a paraphrase where they mean the same entity.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.asked import Look, gallery, words_of
from overt.data.batch import Batch
from overt.data.entities import FOLDER, read_pairs
from overt.data.images import stretch
from overt.data.photos import Box, PhotoSet
from overt.data.phrases import read_sizes
from overt.data.records import records
from overt.data.scenes.pairs import Describes
from overt.data.scenes.views import grounding
from overt.data.sets import root_of
from overt.data.vocabulary import BEGIN, END, HubTokenizer, Reader, pad
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import PixelGeometry, TextGeometry
from overt.models.vlbert.marks import beside, marked
from overt.models.vlbert.negatives import nearest_others
from overt.models.vlbert.regions import box_means
from overt.recipes.building import SPLITS
from overt.recipes.han.features import frozen
from overt.recipes.recipe import Context
from overt.recipes.spoken import Backbone
from overt.recipes.vgp.data import Asked, Pairs, Parts
from overt.recipes.vgp.held import PORTION, HeldTexts, kept
from overt.recipes.vgp.recipe import Begin, Model, Photos

NAME = "flickr30k-pairs"
BETWEEN = " , "
ANNOTATION, PAIRS, SIZES = "annotation_test.json", "vgp_pairs.json", "images.json"
RELATIONS = 2  # another entity, the same


@dataclass(frozen=True)
class Caption:
    """The phrases of a caption in their order: text, box and entity of each."""

    name: str
    photo: str
    phrases: tuple[tuple[str, Box, str], ...]

    @property
    def text(self) -> str:
        """The phrases, with commas between them."""
        return BETWEEN.join(phrase for phrase, _, _ in self.phrases)

    def spans(self) -> list[tuple[int, int]]:
        """The characters of each phrase."""
        found, at = [], 0
        for phrase, _, _ in self.phrases:
            found.append((at, at + len(phrase)))
            at += len(phrase) + len(BETWEEN)
        return found


def read_captions(path: Path, photos: Sequence[str]) -> dict[str, list[Caption]]:
    """The captions of these photos, in the order of the file."""
    found: dict[str, dict[str, list[tuple[int, str, Box, str]]]] = {one: {} for one in photos}
    for number, entry in enumerate(records(path, None)):
        match entry:
            case {
                "image": str(name),
                "phrase": [*said],
                "box": [left, top, wide, high],
                "entity": str(entity),
                "start": int(start),
            }:
                photo = name.partition("#")[0]
                box = (float(left), float(top), float(left + wide), float(top + high))
                if photo in found:
                    text = " ".join(map(str, said))
                    found[photo].setdefault(name, []).append((start, text, box, entity))
            case _:
                raise Damaged(f"{path}: entry {number} is no phrase with a box; get it again.")
    return {
        photo: [
            Caption(name, photo, tuple(one[1:] for one in sorted(some)))
            for name, some in captions.items()
        ]
        for photo, captions in found.items()
    }


def entities(data: Photos, model: Model, context: Context, device: torch.device) -> Parts:
    """Three splits of pairs of captions, with features of regions computed once."""
    root = root_of(context.data_root)
    folder = root / FOLDER
    files = [digest(folder / name) for name in (ANNOTATION, PAIRS, SIZES)]
    key = "/".join([*files, str(data.size), data.backbone, model.begin.value, str(data.limit)])
    made: dict[str, HeldTexts] = {}

    def make(split: str) -> HeldTexts:
        if not made:
            made.update(all_pairs(data, folder, reader_of(model), device))
        return made[split]

    def part(split: str) -> HeldTexts:
        found = kept(NAME, split, key, partial(make, split))
        return replace(found, source=hashlib.sha256(f"{key}/{split}".encode()).hexdigest())

    train, held, test = map(part, SPLITS)
    reader = reader_of(model) or words_in(folder)
    backbone = Backbone(data.backbone, frozen(data.backbone, device).weights)
    return Parts(
        Pairs.on(train, device),
        Pairs.on(held, device),
        Pairs.on(test, device),
        relations=RELATIONS,
        vocabulary=1 + max(int(one.tokens.max()) for one in (train, held, test)),
        asked=Asked(reader, (data.size, data.size), backbone),
    )


def words_in(folder: Path) -> Reader:
    """The words of the captions that are learned from."""
    sizes = read_sizes(folder / SIZES)
    names = [
        name
        for name, split, *_ in read_pairs(folder / PAIRS)
        if split == "train" and f"{name}.jpg" in sizes
    ]
    captions = read_captions(folder / ANNOTATION, names)
    return words_of([one.text for name in names for one in captions[name]])


def reader_of(model: Model) -> Reader | None:
    """The tokenizer of a pretrained encoder; None where words are those of the training part."""
    if model.begin is Begin.RANDOM:
        return None
    from overt.recipes.vgp.building import encoder_folder

    return HubTokenizer.load(encoder_folder(model))


def all_pairs(
    data: Photos, folder: Path, reader: Reader | None, device: torch.device
) -> dict[str, HeldTexts]:
    """The pairs of every split; a caption comes thrice, once for each answer."""
    sizes = read_sizes(folder / SIZES)
    table = [one for one in read_pairs(folder / PAIRS) if f"{one[0]}.jpg" in sizes]
    splits = {split: [one[0] for one in table if one[1] == split] for split in SPLITS}
    for split, some in splits.items():
        if len(some) < 2:
            raise BadInput(f"{folder} has {len(some)} photos of {split}: at least two are needed.")
    names = [photo for some in splits.values() for photo in some]
    captions = read_captions(folder / ANNOTATION, names)
    texts = [one.text for photo in splits["train"] for one in captions[photo]]
    reads = reader or words_of(texts)
    found = {}
    for split, photos in splits.items():
        look = Look((data.size, data.size), stretch)
        files = [f"{photo}.jpg" for photo in photos]
        shown = gallery(f"{FOLDER}-{split}", split, folder / "images", files, look)
        seen = Seen.of(shown, photos, captions, sizes, data.backbone, device)
        found[split] = paired(split, photos, captions, reads, seen, data.limit)
    return found


@dataclass(frozen=True, eq=False)
class Seen:
    """The boxes of each photo on its stored pixels, their features, and those of the whole."""

    geometry: PixelGeometry
    boxes: Float[Tensor, "i m 4"]
    there: Tensor
    features: Float[Tensor, "i m d"]
    whole: Float[Tensor, "i d"]
    known: tuple[tuple[Box, ...], ...]

    @classmethod
    def of(
        cls,
        shown: PhotoSet,
        photos: Sequence[str],
        captions: dict[str, list[Caption]],
        sizes: dict[str, tuple[int, int]],
        backbone: str,
        device: torch.device,
    ) -> "Seen":
        """Every photo once through a frozen CNN; a region is the mean of the cells under it."""
        known = tuple(
            tuple(dict.fromkeys(box for one in captions[photo] for _, box, _ in one.phrases))
            for photo in photos
        )
        most = max([1, *map(len, known)])
        boxes = torch.zeros(len(photos), most, 4)
        there = torch.zeros(len(photos), most, dtype=torch.bool)
        for row, some in enumerate(known):
            boxes[row, : len(some)] = torch.tensor(some).reshape(-1, 4)
            there[row, : len(some)] = True
        net = frozen(backbone, device)
        features, whole, geometries = [], [], []
        for start in range(0, len(photos), PORTION):
            rows = range(start, min(start + PORTION, len(photos)))
            batch = shown.batch(rows)
            assert batch.images is not None and batch.geometry is not None
            drawn = [sizes[f"{photos[row]}.jpg"] for row in rows]
            stored = batch.geometry.size
            scale = stored.flip(-1) / torch.tensor(drawn).flip(-1)
            boxes[rows.start : rows.stop] *= scale.repeat(1, 2)[:, None]
            with torch.no_grad():
                cells = net.cells(batch.images.to(device)).cpu().float()
            side = round(cells.shape[1] ** 0.5)
            maps = cells.mT.unflatten(2, (side, side))
            features.append(box_means(maps, boxes[rows.start : rows.stop], batch.geometry))
            whole.append(cells.mean(dim=1))
            geometries.append(batch.geometry)
        joined = PixelGeometry.join(geometries)
        return cls(joined, boxes, there, torch.cat(features), torch.cat(whole), known)


def paired(
    split: str,
    photos: Sequence[str],
    captions: dict[str, list[Caption]],
    reader: Reader,
    seen: Seen,
    limit: int | None,
) -> HeldTexts:
    """Each caption with another of its photo, and with one of the photo most alike, either way.

    The order of a true and a false caption is both orders, so that nothing is told by it.
    """
    others = nearest_others(seen.whole)[:, 0].tolist()
    wanted: list[tuple[int, Caption, Caption, Describes]] = []
    for row, photo in enumerate(photos):
        own, false = captions[photo], captions[photos[others[row]]]
        for at, one in enumerate(own):
            wrong = false[at % len(false)]
            wanted.append((row, one, own[(at + 1) % len(own)], Describes.BOTH))
            wanted.append((row, one, wrong, Describes.FIRST))
            wanted.append((row, wrong, one, Describes.SECOND))
    wanted = wanted[:limit]
    parts, links, before = [], [], 0
    for start in range(0, len(wanted), PORTION):
        some = wanted[start : start + PORTION]
        parts.append(_beside(some, reader, seen))
        links.append(_links(some, parts[-1], before))
        before += len(some)
    found = HeldTexts.joined(NAME, split, "", parts)
    return replace(
        found,
        picture=torch.tensor([row for row, _, _, _ in wanted]),
        geometry=seen.geometry,
        features=seen.features,
        links=torch.cat(links),
    )


def _beside(
    some: Sequence[tuple[int, Caption, Caption, Describes]], reader: Reader, seen: Seen
) -> Batch:
    rows = torch.tensor([row for row, _, _, _ in some])
    photo = Batch(
        ids=tuple(one.name for _, one, _, _ in some),
        geometry=seen.geometry[rows],
        boxes=seen.boxes[rows],
        region_mask=seen.there[rows],
    )
    first = _read([(row, one) for row, one, _, _ in some], reader, seen)
    second = _read([(row, two) for row, _, two, _ in some], reader, seen)
    describes = torch.tensor([int(kind) for _, _, _, kind in some])
    found = beside(photo, first, second, describes)
    shown = [one.photo if kind is not Describes.SECOND else two.photo for _, one, two, kind in some]
    ids = zip(shown, found.ids, strict=True)
    return replace(found, ids=tuple(f"{photo}/{captions}" for photo, captions in ids))


def _read(some: Sequence[tuple[int, Caption]], reader: Reader, seen: Seen) -> Batch:
    """Captions between their marks, tied to the boxes of their own photo where it is that one."""
    read = [reader.read(one.text) for _, one in some]
    tokens, mask, spans = pad(
        [ids for ids, _ in read], [spans for _, spans in read], reader.padding
    )
    text = TextGeometry(tuple(one.text for _, one in some), spans)
    linked = []
    for at, (row, one) in enumerate(some):
        place = {box: number for number, box in enumerate(seen.known[row])}
        link = torch.zeros(tokens.shape[1], seen.boxes.shape[1], dtype=torch.bool)
        for phrase, (_, box, _) in zip(one.spans(), one.phrases, strict=True):
            if box in place:
                link[_inside(text[at], phrase), place[box]] = True
        linked.append(link.numpy())
    rows = torch.tensor([row for row, _ in some])
    found = Batch(
        ids=tuple(one.name for _, one in some),
        tokens=tokens,
        token_mask=mask,
        text=text,
        target=grounding(linked, seen.boxes[rows], text),
    )
    return found if isinstance(reader, HubTokenizer) else marked(found, BEGIN, END)


def _inside(text: TextGeometry, phrase: tuple[int, int]) -> Tensor:
    """Which tokens belong to a phrase: those that it has most of."""
    return text.cover([[phrase]])[0] > 0.5


def _links(
    some: Sequence[tuple[int, Caption, Caption, Describes]], batch: Batch, before: int
) -> Tensor:
    """Every phrase of the first with every one of the second, where both are of the photo."""
    assert batch.text is not None
    found = []
    for at, (_, one, two, kind) in enumerate(some):
        if kind is not Describes.BOTH:
            continue
        text, skip = batch.text[at], len(batch.text.texts[at]) - len(two.text)
        ours = [_span(text, span) for span in one.spans()]
        theirs = [_span(text, (a + skip, b + skip)) for a, b in two.spans()]
        found += [
            (before + at, *a, *b, int(one.phrases[i][2] == two.phrases[j][2]))
            for i, a in enumerate(ours)
            for j, b in enumerate(theirs)
            if a and b
        ]
    return torch.tensor(found, dtype=torch.long).reshape(len(found), 6)


def _span(text: TextGeometry, phrase: tuple[int, int]) -> tuple[int, ...]:
    inside = _inside(text, phrase).nonzero().flatten().tolist()
    return (inside[0], inside[-1] + 1) if inside else ()
