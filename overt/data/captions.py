"""Photos with several captions each: Flickr8k in its own format; Flickr8k, Flickr30k and COCO in
the splits of Karpathy and Fei-Fei.

Hodosh, Young and Hockenmaier 2013 (https://hockenmaier.cs.illinois.edu/8k-pictures.html), Young et
al. 2014, Lin et al. 2014; Karpathy and Fei-Fei, "Deep Visual-Semantic Alignments", CVPR 2015,
https://cs.stanford.edu/people/karpathy/deepimagesent/. `flickr8k/` has `Flickr8k.token.txt`
(`PHOTO#NUMBER<tab>caption`), the lists `Flickr_8k.{train,dev,test}Images.txt`, the judgements
`ExpertAnnotations.txt`, and the photos in `Flicker8k_Dataset/`. Karpathy's files are
`captions/dataset_{flickr8k,flickr30k,coco}.json`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from overt.data.batch import Batch
from overt.data.dataset import check_indices, digest_files
from overt.data.json_stream import iterate_records
from overt.data.photo_dataset import PhotoDataset, check_count, read_lines
from overt.data.splits import Split, parse_official_split
from overt.data.vocabulary import ABSENT, BEGIN, END, BpeVocabulary, Vocabulary, pad_texts
from overt.data.vqa_dataset import (
    PhotoInput,
    attach_photos,
    build_vocabulary,
    names_and_sizes,
    open_photos,
)
from overt.errors import CorruptFileError, UserError

FLICKR8K, KARPATHY = "flickr8k", "captions"
LISTS = {Split.TRAIN: "train", Split.VAL: "dev", Split.TEST: "test"}
SIZES = {Split.TRAIN: 6_000, Split.VAL: 1_000, Split.TEST: 1_000}
FOLDERS = {  # folder of the photos of Karpathy's datasets
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
class CaptionedPhoto:
    """A photo, as a path below the folder of its dataset, and its captions."""

    photo: str
    captions: tuple[str, ...]


@dataclass(frozen=True)
class CaptionJudgement:
    """How well a caption fits a photo, by three experts: 1 (not at all) to 4 (no mistake)."""

    photo: str
    caption: str
    scores: tuple[int, int, int]


def each_caption(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return one item per caption, for training."""
    return [(photo, number) for photo, count in enumerate(counts) for number in range(count)]


def each_photo(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return one item per photo with its first caption, for evaluation against all captions."""
    return [(photo, 0) for photo in range(len(counts))]


class Captions:
    """Photos and captions; an item is a caption, or a photo with `items=each_photo`.

    `tokens` are begin, the caption, end; `references` are all captions of the photo.

    Args:
        name: Name of the dataset.
        split: Split.
        captioned: The photos with their captions.
        folder: Folder of the photos.
        sources: Files that the captions were read from, for the digest.
        vocabulary: Words or sub-words.
        items: Items of the dataset: `each_caption` or `each_photo`.
        photo_input: Canvas of the photos or a cache of their features; None gives text only.

    Raises:
        UserError: There are no photos.

    Example:
        >>> dog = CaptionedPhoto("1.jpg", ("A dog runs.", "A brown dog."))
        >>> words = Vocabulary.build([["a", "dog", "runs", "brown", "."]])
        >>> data = Captions("toy", Split.TRAIN, [dog], "photos", [], words)
        >>> len(data), data.batch([1]).ids
        (2, ('toy/1.jpg#1',))
    """

    def __init__(
        self,
        name: str,
        split: Split,
        captioned: Sequence[CaptionedPhoto],
        folder: Path | str,
        sources: Sequence[Path | str],
        vocabulary: Vocabulary | BpeVocabulary,
        items: Items = each_caption,
        photo_input: PhotoInput | None = None,
    ) -> None:
        if not captioned:
            raise UserError(f"{name} {split} has no photos.")
        self.name, self.split, self.reader = name, split, vocabulary
        self.photos, self._sources = tuple(captioned), [Path(one) for one in sources]
        self._items = items([len(one.captions) for one in captioned])
        self._features = None if photo_input is None else photo_input.features
        self._shown: PhotoDataset | None = None
        if photo_input is not None and photo_input.features is None:
            self._shown = open_photos(
                name, split, Path(folder), [one.photo for one in captioned], photo_input
            )
        self.files = () if self._shown is None else self._shown.files

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the items at `indices`; each photo once."""
        chosen = [self._items[place] for place in check_indices(self, indices)]
        texts = [self.photos[photo].captions[number] for photo, number in chosen]
        read = [self.reader.read(text) for text in texts]
        framed = [([BEGIN, *ids, END], [ABSENT, *spans, ABSENT]) for ids, spans in read]
        tokens, mask, text = pad_texts(texts, framed)
        names = [f"{self.name}/{self.photos[photo].photo}" for photo, _ in chosen]
        found = Batch(
            ids=tuple(f"{name}#{item[1]}" for name, item in zip(names, chosen, strict=True)),
            tokens=tokens,
            token_mask=mask,
            text=text,
            references=tuple(self.photos[photo].captions for photo, _ in chosen),
        )
        if self._features is not None:
            return replace(found, features=self._features.get(names))
        if self._shown is None:
            return found
        return attach_photos(found, self._shown, [photo for photo, _ in chosen])

    def digest(self) -> str:
        """Return a hash of the caption files, names and sizes of the photos, and the items."""
        about = f"{self.name} {self.split} {len(self)} {len(self.photos)} {self.reader.size}"
        features = "" if self._features is None else self._features.digest()
        return digest_files(about, self._sources, names_and_sizes(self.files) + features.encode())


def flickr8k(
    root: Path | str,
    split: str = Split.TRAIN,
    items: Items = each_caption,
    photo_input: PhotoInput | None = None,
    vocabulary: Vocabulary | BpeVocabulary | None = None,
    minimum: int = 5,
    sizes: dict[Split, int] | None = SIZES,
) -> Captions:
    """Open Flickr8k in the official split: 6,000 / 1,000 / 1,000 photos with five captions each.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        items: `each_caption` or `each_photo`.
        photo_input: Canvas of the photos or a cache of their features; None gives text only.
        vocabulary: Words or sub-words; None takes the words of the training captions.
        minimum: Count from which a word is in the vocabulary.
        sizes: Expected number of photos per split; None accepts any number.

    Returns:
        The captions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> with TemporaryDirectory() as root:
        ...     write_text(Path(root, FLICKR8K, "Flickr8k.token.txt"), "1.jpg#0\\tA dog runs .")
        ...     write_text(Path(root, FLICKR8K, "Flickr_8k.trainImages.txt"), "1.jpg")
        ...     data = flickr8k(root, minimum=1, sizes=None)
        >>> data.batch([0]).references
        (('A dog runs .',),)
    """
    chosen = parse_official_split("flickr8k", split)
    folder = Path(root) / FLICKR8K
    captions = read_tokens(folder / "Flickr8k.token.txt")
    parts = {
        part: read_lines(folder / f"Flickr_8k.{LISTS[part]}Images.txt")
        for part in {chosen, Split.TRAIN}
    }
    listed = folder / f"Flickr_8k.{LISTS[chosen]}Images.txt"
    check_count(listed, len(parts[chosen]), None if sizes is None else sizes[chosen], "photos")
    for photo in {photo for names in parts.values() for photo in names}:
        if photo not in captions:
            raise CorruptFileError(f"{folder / 'Flickr8k.token.txt'} has no caption of {photo}.")
    words = vocabulary or build_vocabulary(
        (text for photo in parts[Split.TRAIN] for text in captions[photo]), minimum
    )
    found = [CaptionedPhoto(photo, tuple(captions[photo])) for photo in parts[chosen]]
    sources = [folder / "Flickr8k.token.txt", listed]
    photos = folder / "Flicker8k_Dataset"
    return Captions("flickr8k", chosen, found, photos, sources, words, items, photo_input)


def karpathy(
    root: Path | str,
    split: str = Split.TRAIN,
    name: str = "coco",
    items: Items = each_caption,
    photo_input: PhotoInput | None = None,
    vocabulary: Vocabulary | BpeVocabulary | None = None,
    minimum: int = 5,
) -> Captions:
    """Open Flickr8k, Flickr30k or COCO in Karpathy's splits; `train` includes his `restval`.

    COCO: 113,287 / 5,000 / 5,000 photos; Flickr30k: 29,000 / 1,014 / 1,000.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.
        name: `flickr8k`, `flickr30k` or `coco`.
        items: `each_caption` or `each_photo`.
        photo_input: Canvas of the photos or a cache of their features; None gives text only.
        vocabulary: Words or sub-words; None takes the words of the training captions.
        minimum: Count from which a word is in the vocabulary.

    Returns:
        The captions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> sentences = [{"raw": "A dog runs."}, {"raw": "A brown dog."}]
        >>> images = [{"filename": "1.jpg", "split": "restval", "sentences": sentences}]
        >>> with TemporaryDirectory() as root:
        ...     write_json(Path(root, KARPATHY, "dataset_coco.json"), {"images": images})
        ...     data = karpathy(root, "train", minimum=1)
        >>> len(data), data.photos[0].captions
        (2, ('A dog runs.', 'A brown dog.'))
    """
    root = Path(root)
    if name not in FOLDERS:
        raise UserError(f"Unknown dataset {name!r}: choose from {', '.join(FOLDERS)}.")
    chosen = parse_official_split(name, split)
    path = root / KARPATHY / f"dataset_{name}.json"
    found: list[CaptionedPhoto] = []
    train: list[str] = []
    for captioned, part, folder in iterate_karpathy(path):
        if vocabulary is None and part in PARTS[Split.TRAIN]:
            train += captioned.captions
        if part in PARTS[chosen]:
            found.append(replace(captioned, photo=f"{folder}{captioned.photo}"))
    words = vocabulary or build_vocabulary(train, minimum)
    photos = root / FOLDERS[name]
    return Captions(f"{name}-captions", chosen, found, photos, [path], words, items, photo_input)


def flickr30k(root: Path | str, split: str = Split.TRAIN) -> Captions:
    """Open Flickr30k in Karpathy's splits: 29,000 / 1,014 / 1,000 photos with five captions each.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val` or `test`.

    Returns:
        The captions.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> images = [{"filename": "1.jpg", "split": "test", "sentences": [{"raw": "A dog runs."}]}]
        >>> with TemporaryDirectory() as root:
        ...     write_json(Path(root, KARPATHY, "dataset_flickr30k.json"), {"images": images})
        ...     data = flickr30k(root, "test")
        >>> data.batch([0]).ids
        ('flickr30k-captions/1.jpg#0',)
    """
    return karpathy(root, split, "flickr30k")


def iterate_karpathy(path: Path) -> Iterator[tuple[CaptionedPhoto, str, str]]:
    """Yield the photos of a file of Karpathy, with its split and the prefix of its path.

    Args:
        path: The `dataset_*.json` file.

    Yields:
        The photo by its file name, the split (`train`, `restval`, `val` or `test`), and the folder
        with `/`, or an empty string.

    Raises:
        CorruptFileError: An entry has no file name, split or captions.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_json
        >>> image = {"filename": "1.jpg", "split": "val", "sentences": [{"raw": "A dog."}]}
        >>> with TemporaryDirectory() as folder:
        ...     write_json(Path(folder, "dataset_coco.json"), {"images": [image]})
        ...     list(iterate_karpathy(Path(folder, "dataset_coco.json")))
        [(CaptionedPhoto(photo='1.jpg', captions=('A dog.',)), 'val', '')]
    """
    for number, entry in enumerate(iterate_records(path, "images")):
        match entry:
            case {"filename": str(file), "split": str(part), "sentences": [_, *_] as sentences}:
                raw = [one.get("raw") if isinstance(one, dict) else None for one in sentences]
                texts = [text.strip() for text in raw if isinstance(text, str) and text.strip()]
            case _:
                raise CorruptFileError(
                    f"{path}: entry {number} has no filename, split and sentences."
                )
        if len(texts) != len(raw):
            raise CorruptFileError(f"{path}: entry {number} has a sentence with no caption.")
        folder = f"{entry['filepath']}/" if entry.get("filepath") else ""
        yield CaptionedPhoto(file, tuple(texts)), part, folder


def read_tokens(path: Path) -> dict[str, list[str]]:
    """Read the captions of every photo from a file of `PHOTO#NUMBER<tab>caption`, in order."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        name, _, text = line.partition("\t")
        photo, _, place = name.rpartition("#")
        if not photo or not text.strip() or place != str(len(found.setdefault(photo, []))):
            raise CorruptFileError(
                f"{path}: line {number} is not `PHOTO#NUMBER<tab>caption`: {line[:40]!r}."
            )
        found[photo].append(text.strip())
    return found


def read_judgements(root: Path | str) -> list[CaptionJudgement]:
    """Read the 5,822 expert judgements of Flickr8k captions."""
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
                raise ValueError("scores are 1 to 4")
            found.append(CaptionJudgement(photo, captions[about][int(place)], scores))
        except (ValueError, KeyError, IndexError) as problem:
            raise CorruptFileError(
                f"{path}: line {number} is not a judgement ({problem})."
            ) from problem
    return found
