"""Attending Self-Attention: pairs of captions of photos from Flickr30k Entities.

The flat file has the phrases of a caption that are linked to a box, and not the words between them:
a caption here is its phrases in order, with commas. Splits are those of the pairs of phrases (Chu,
Otani and Nakashima, "iParaphrasing", COLING 2018). Candidates are all boxes of the photo. Two
phrases of two captions are paraphrases if they refer to the same entity.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.data.batch import Batch
from overt.data.catalog import data_root
from overt.data.flickr30k_entities import FOLDER, read_pairs
from overt.data.global_rng import preserve_global_rng
from overt.data.images import stretch
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import Box, PhotoDataset
from overt.data.referring_expressions import read_sizes
from overt.data.scenes.caption_pairs import MatchingCaption
from overt.data.scenes.view_dataset import grounding_target
from overt.data.vocabulary import BEGIN, END, HubTokenizer, Tokenizer, pad
from overt.data.vqa_dataset import PhotoInput, build_vocabulary, open_photos
from overt.errors import CorruptFileError, UserError
from overt.experiments.inference_spec import BackboneSpec
from overt.experiments.recipe import SPLITS, RunContext
from overt.geometry import PixelGeometry, TextGeometry
from overt.io import digest
from overt.nn.image_backbones.efficientnet import SCALES
from overt.nn.image_backbones.frozen import FrozenBackbone
from overt.nn.vlbert.caption_tokens import add_special_tokens, pair_captions
from overt.nn.vlbert.hard_negatives import nearest_images
from overt.nn.vlbert.regions import pool_boxes
from overt.papers.han.features import frozen_backbone
from overt.papers.vgp.config import VgpInit, VgpModel, VgpPhotos
from overt.papers.vgp.data import CaptionPairs, VgpData, VgpInput
from overt.papers.vgp.flickr8k import PAIRS, SIZES, load_flickr8k
from overt.papers.vgp.in_memory import PORTION, TextsInMemory, cached_texts
from overt.papers.vgp.pretraining import PretrainingTexts

NAME = "flickr30k-pairs"
SEPARATOR = " , "
ANNOTATION = "annotation_test.json"
RELATIONS = 2  # different entity, same entity


@dataclass(frozen=True)
class EntityCaption:
    """The phrases of a caption in order: text, box and entity of each."""

    name: str
    photo: str
    phrases: tuple[tuple[str, Box, str], ...]

    @property
    def text(self) -> str:
        """Return the phrases, joined by commas."""
        return SEPARATOR.join(phrase for phrase, _, _ in self.phrases)

    def spans(self) -> list[tuple[int, int]]:
        """Return the character span of each phrase."""
        found, at = [], 0
        for phrase, _, _ in self.phrases:
            found.append((at, at + len(phrase)))
            at += len(phrase) + len(SEPARATOR)
        return found


def read_captions(path: Path, photos: Sequence[str]) -> dict[str, list[EntityCaption]]:
    """Read the captions of these photos, in the order of the file."""
    found: dict[str, dict[str, list[tuple[int, str, Box, str]]]] = {one: {} for one in photos}
    for number, entry in enumerate(iterate_records(path, None)):
        match entry:
            case {
                "image": str(name),
                "phrase": [*words],
                "box": [left, top, wide, high],
                "entity": str(entity),
                "start": int(start),
            }:
                photo = name.partition("#")[0]
                # Boxes are stored as left, top, width and height.
                box = (float(left), float(top), float(left + wide), float(top + high))
                if photo in found:
                    text = " ".join(map(str, words))
                    found[photo].setdefault(name, []).append((start, text, box, entity))
            case _:
                raise CorruptFileError(
                    f"{path}: entry {number} is not a phrase with a box: download the file again."
                )
    return {
        photo: [
            EntityCaption(name, photo, tuple(one[1:] for one in sorted(some)))
            for name, some in captions.items()
        ]
        for photo, captions in found.items()
    }


def load_entities(
    data: VgpPhotos, model: VgpModel, context: RunContext, device: torch.device
) -> VgpData:
    """Load three splits of pairs of captions, with features of regions computed once."""
    root = data_root(context.data_root)
    folder = root / FOLDER
    files = [digest(folder / name) for name in (ANNOTATION, PAIRS, SIZES)]
    # Loading draws random numbers that the pretrained weights replace: the initial weights of the
    # network, drawn later, must not depend on how often a backbone was loaded.
    with preserve_global_rng():
        backbone = frozen_backbone(data.backbone, device)
    settings = (str(data.size), data.backbone, model.begin.value, str(data.limit))
    hashes = folder_hashes(data, model, backbone)
    key = "/".join([*files, *settings, *hashes])
    made: dict[str, TextsInMemory] = {}

    # The first split that is not cached builds all of them: they share one vocabulary.
    def make(split: str) -> TextsInMemory:
        if not made:
            made.update(all_pairs(data, folder, tokenizer_of(model), backbone, device))
        return made[split]

    def part(split: str) -> TextsInMemory:
        found = cached_texts(NAME, split, key, partial(make, split))
        return replace(found, source=hashlib.sha256(f"{key}/{split}".encode()).hexdigest())

    texts = [part(split) for split in SPLITS]
    train, val, test = (CaptionPairs.on(one, device) for one in texts)
    reader = tokenizer_of(model) or training_vocabulary(folder)

    def captions(reader: Tokenizer) -> PretrainingTexts:
        if reader.mask is None:
            raise UserError("the tokenizer of model.folder has no mask token: set first.epochs=0")
        found = load_flickr8k(data, root, reader, device, hashes)
        return PretrainingTexts(found.to(device), reader.mask, 0)

    return VgpData(
        *(train, val, test),
        relations=RELATIONS,
        vocabulary=1 + max(int(one.tokens.max()) for one in texts),
        inputs=VgpInput(
            reader, (data.size, data.size), BackboneSpec(data.backbone, backbone.weights)
        ),
        captions=None if model.begin is VgpInit.RANDOM else partial(captions, reader),
    )


def folder_hashes(data: VgpPhotos, model: VgpModel, backbone: FrozenBackbone) -> list[str]:
    """Return hashes of the user's backbone and tokenizer, whose names do not identify them."""
    found = [] if data.backbone in SCALES else [backbone.weights]
    if model.folder is not None and model.begin is VgpInit.MINILM:
        # Its tokenizer, in any format; the weights do not change the texts.
        files = sorted(Path(model.folder).iterdir())
        found += [digest(path) for path in files if path.suffix in (".json", ".txt", ".model")]
    return found


def training_vocabulary(folder: Path) -> Tokenizer:
    """Build the vocabulary of the training captions."""
    sizes = read_sizes(folder / SIZES)
    names = [
        name
        for name, split, *_ in read_pairs(folder / PAIRS)
        if split == "train" and f"{name}.jpg" in sizes
    ]
    captions = read_captions(folder / ANNOTATION, names)
    return build_vocabulary([one.text for name in names for one in captions[name]])


def tokenizer_of(model: VgpModel) -> Tokenizer | None:
    """Return the tokenizer of the pretrained encoder; None to use the training words."""
    if model.begin is VgpInit.RANDOM:
        return None
    from overt.papers.vgp.model import encoder_folder

    return HubTokenizer.load(encoder_folder(model))


def all_pairs(
    data: VgpPhotos,
    folder: Path,
    reader: Tokenizer | None,
    backbone: FrozenBackbone,
    device: torch.device,
) -> dict[str, TextsInMemory]:
    """Return the pairs of every split; a caption occurs three times, once per answer."""
    sizes = read_sizes(folder / SIZES)
    table = [one for one in read_pairs(folder / PAIRS) if f"{one[0]}.jpg" in sizes]
    splits = {split: [one[0] for one in table if one[1] == split] for split in SPLITS}
    for split, some in splits.items():
        if len(some) < 2:
            raise UserError(f"{folder} has {len(some)} {split} photos: at least 2 are needed.")
    names = [photo for some in splits.values() for photo in some]
    captions = read_captions(folder / ANNOTATION, names)
    texts = [one.text for photo in splits["train"] for one in captions[photo]]
    reads = reader or build_vocabulary(texts)
    found = {}
    for split, photos in splits.items():
        # Resized without a crop, so that every box stays on the photo.
        look = PhotoInput((data.size, data.size), stretch)
        files = [f"{photo}.jpg" for photo in photos]
        shown = open_photos(f"{FOLDER}-{split}", split, folder / "images", files, look)
        seen = PhotoRegions.of(shown, photos, captions, sizes, backbone, device)
        found[split] = build_pairs(split, photos, captions, reads, seen, data.limit)
    return found


@dataclass(frozen=True, eq=False)
class PhotoRegions:
    """The boxes of each photo in stored pixels, their features, and those of the whole photo."""

    geometry: PixelGeometry
    boxes: Float[Tensor, "i m 4"]
    there: Tensor
    features: Float[Tensor, "i m d"]
    whole: Float[Tensor, "i d"]
    known: tuple[tuple[Box, ...], ...]

    @classmethod
    def of(
        cls,
        shown: PhotoDataset,
        photos: Sequence[str],
        captions: dict[str, list[EntityCaption]],
        sizes: dict[str, tuple[int, int]],
        backbone: FrozenBackbone,
        device: torch.device,
    ) -> "PhotoRegions":
        """Encode every photo once by a frozen CNN; a region is the mean of the cells under it."""
        # Several captions name the same box: keep it once.
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
        features, whole, geometries = [], [], []
        for start in range(0, len(photos), PORTION):
            rows = range(start, min(start + PORTION, len(photos)))
            batch = shown.batch(rows)
            assert batch.images is not None and batch.geometry is not None
            # Boxes are in pixels of the original photo, and the stored photo may be smaller. Sizes
            # are (height, width), corners (x, y).
            drawn = [sizes[f"{photos[row]}.jpg"] for row in rows]
            stored = batch.geometry.size
            scale = stored.flip(-1) / torch.tensor(drawn).flip(-1)
            boxes[rows.start : rows.stop] *= scale.repeat(1, 2)[:, None]
            with torch.no_grad():
                cells = backbone.cells(batch.images.to(device)).cpu().float()
            side = round(cells.shape[1] ** 0.5)
            # From (photos, cells, features) to (photos, features, rows, columns).
            maps = cells.mT.unflatten(2, (side, side))
            features.append(pool_boxes(maps, boxes[rows.start : rows.stop], batch.geometry))
            whole.append(cells.mean(dim=1))
            geometries.append(batch.geometry)
        joined = PixelGeometry.join(geometries)
        return cls(joined, boxes, there, torch.cat(features), torch.cat(whole), known)


def build_pairs(
    split: str,
    photos: Sequence[str],
    captions: dict[str, list[EntityCaption]],
    reader: Tokenizer,
    seen: PhotoRegions,
    limit: int | None,
) -> TextsInMemory:
    """Pair each caption with another of its photo, and with one of the most similar photo.

    A true and a false caption occur in both orders, so that the order carries no information.
    """
    # False captions are those of the most similar photo: hard negatives.
    others = nearest_images(seen.whole)[:, 0].tolist()
    wanted: list[tuple[int, EntityCaption, EntityCaption, MatchingCaption]] = []
    for row, photo in enumerate(photos):
        own, false = captions[photo], captions[photos[others[row]]]
        for at, one in enumerate(own):
            wrong = false[at % len(false)]
            wanted.append((row, one, own[(at + 1) % len(own)], MatchingCaption.BOTH))
            wanted.append((row, one, wrong, MatchingCaption.FIRST))
            wanted.append((row, wrong, one, MatchingCaption.SECOND))
    wanted = wanted[:limit]
    parts, links, before = [], [], 0
    for start in range(0, len(wanted), PORTION):
        some = wanted[start : start + PORTION]
        parts.append(_pair_batch(some, reader, seen))
        links.append(_links(some, parts[-1], before))
        before += len(some)
    found = TextsInMemory.joined(NAME, split, "", parts)
    # The joined batches have a geometry per sample. Photos are shared, so store one per photo.
    return replace(
        found,
        picture=torch.tensor([row for row, _, _, _ in wanted]),
        geometry=seen.geometry,
        features=seen.features,
        links=torch.cat(links),
    )


def _pair_batch(
    some: Sequence[tuple[int, EntityCaption, EntityCaption, MatchingCaption]],
    reader: Tokenizer,
    seen: PhotoRegions,
) -> Batch:
    rows = torch.tensor([row for row, _, _, _ in some])
    photo = Batch(
        ids=tuple(one.name for _, one, _, _ in some),
        geometry=seen.geometry[rows],
        boxes=seen.boxes[rows],
        region_mask=seen.there[rows],
    )
    first = _caption_batch([(row, one) for row, one, _, _ in some], reader, seen)
    second = _caption_batch([(row, two) for row, _, two, _ in some], reader, seen)
    describes = torch.tensor([int(kind) for _, _, _, kind in some])
    found = pair_captions(photo, first, second, describes)
    shown = [
        one.photo if kind is not MatchingCaption.SECOND else two.photo for _, one, two, kind in some
    ]
    ids = zip(shown, found.ids, strict=True)
    return replace(found, ids=tuple(f"{photo}/{captions}" for photo, captions in ids))


def _caption_batch(
    some: Sequence[tuple[int, EntityCaption]], reader: Tokenizer, seen: PhotoRegions
) -> Batch:
    """Tokenize captions and link them to the boxes of their own photo."""
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
                link[_tokens_inside(text[at], phrase), place[box]] = True
        linked.append(link.numpy())
    rows = torch.tensor([row for row, _ in some])
    found = Batch(
        ids=tuple(one.name for _, one in some),
        tokens=tokens,
        token_mask=mask,
        text=text,
        target=grounding_target(linked, seen.boxes[rows], text),
    )
    return found if isinstance(reader, HubTokenizer) else add_special_tokens(found, BEGIN, END)


def _tokens_inside(text: TextGeometry, phrase: tuple[int, int]) -> Tensor:
    """Return the tokens of a phrase: those that it mostly covers."""
    return text.cover([[phrase]])[0] > 0.5


def _links(
    some: Sequence[tuple[int, EntityCaption, EntityCaption, MatchingCaption]],
    batch: Batch,
    before: int,
) -> Tensor:
    """Pair the phrases of the first caption with those of the second, if both are of the photo."""
    assert batch.text is not None
    found = []
    for at, (_, one, two, kind) in enumerate(some):
        if kind is not MatchingCaption.BOTH:
            continue
        # The second caption is the end of the joined text.
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
    inside = _tokens_inside(text, phrase).nonzero().flatten().tolist()
    return (inside[0], inside[-1] + 1) if inside else ()
