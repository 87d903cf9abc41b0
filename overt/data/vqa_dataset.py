"""Questions about photos, the common part of VQA datasets.

A photo is opened on demand, once per batch for all its questions. With a feature cache, a batch has
features instead of pixels, and the photos need not exist.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.feature_cache import FeatureCache
from overt.data.images import Resize, Size, crop
from overt.data.photo_dataset import PhotoDataset, PhotoEntry
from overt.data.splits import Split, split_indices
from overt.data.vocabulary import Tokenizer, Vocabulary, read_texts, tokenize
from overt.errors import UserError


@dataclass(frozen=True)
class PhotoInput:
    """How photos enter a batch: as pixels on a canvas, or as cached features.

    Args:
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        features: Cache of photo features, used instead of pixels.

    Example:
        >>> PhotoInput(size=(160, 160)).size
        (160, 160)
    """

    size: Size = (224, 224)
    resize: Resize = crop
    features: FeatureCache | None = None


class PhotoQuestions:
    """Questions of one split, each about one photo, without answers: the base of VQA datasets.

    `photos` are the files below `folder`, each once, and `photo_of` is the photo of each question.
    `ids` are those of the questions; `photo_ids` are the ids in feature caches.
    """

    def __init__(
        self,
        name: str,
        split: str,
        folder: Path,
        photos: Sequence[str],
        photo_of: Int[np.ndarray, " n"],
        texts: Sequence[str],
        ids: Sequence[str],
        reader: Tokenizer,
        photo_input: PhotoInput | None,
    ) -> None:
        self.name, self.split, self.reader = name, split, reader
        self._photo_folder, self._names, self._photo_of = folder, photos, photo_of
        self._texts, self._ids = texts, ids
        photo_input = photo_input or PhotoInput()
        self._features = photo_input.features
        self._photos: PhotoDataset | None = None
        if photo_input.features is None:
            self._photos = self.photos(photo_input)
        else:
            for photo in photos:
                if f"{name}/{photo}" not in photo_input.features:
                    raise UserError(
                        f"{photo_input.features.folder} has no features of {name}/{photo}; "
                        "build the cache over all photos."
                    )

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the photos; empty with features."""
        return () if self._photos is None else self._photos.files

    def photos(self, photo_input: PhotoInput | None = None) -> PhotoDataset:
        """Return the photos of the split, each once, to compute features of."""
        return open_photos(self.name, self.split, self._photo_folder, self._names, photo_input)

    def texts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the questions in words."""
        return tuple(self._texts[place] for place in self.places(indices))

    def photo_ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the name of the photo of each question, as in a feature cache."""
        chosen = self._photo_of[self.places(indices)]
        return tuple(f"{self.name}/{self._names[photo]}" for photo in chosen)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the questions at `indices` with pixels or features; each photo once."""
        places = self.places(indices)
        tokens, mask, text = read_texts(self.reader, self.texts(indices))
        ids = tuple(self._ids[place] for place in places)
        found = Batch(ids=ids, tokens=tokens, token_mask=mask, text=text)
        if self._features is not None:
            return replace(found, features=self._features.get(self.photo_ids(indices)))
        assert self._photos is not None
        return attach_photos(found, self._photos, self._photo_of[places])

    def places(self, indices: Sequence[int]) -> list[int]:
        """Return the indices as integers; raise `UserError` if one is out of range."""
        return check_indices(self, indices, "questions")

    def digest(self) -> str:
        """Return a hash of the contents of every photo, or of the key of the features."""
        if self._features is not None:
            return self._features.digest()
        assert self._photos is not None
        return self._photos.digest()

    def digest_names(self) -> str:
        """Return a hash of the name and the size of every photo, or of the key of the features.

        For datasets of many gigabytes, where reading every byte takes too long.
        """
        if self._features is not None:
            return self._features.digest()
        whole = hashlib.sha256()
        for photo, path in zip(self._names, self.files, strict=True):
            whole.update(f"{photo} {path.stat().st_size}\n".encode())
        return whole.hexdigest()


def open_photos(
    name: str,
    split: str,
    folder: Path,
    photos: Sequence[str],
    photo_input: PhotoInput | None = None,
) -> PhotoDataset:
    """Return the photos as a dataset, each once, to compute features of; ids are `photo_ids`."""
    photo_input = photo_input or PhotoInput()
    entries = [PhotoEntry(photo, 0) for photo in photos]
    return PhotoDataset(
        name, split, folder, entries, ("photo",), photo_input.size, photo_input.resize
    )


def open_boxed_photos(
    name: str, split: str, folder: Path, photos: Sequence[str], photo_input: PhotoInput | None
) -> PhotoDataset | None:
    """Return the photos that boxes are drawn on, or None for text and boxes alone."""
    if photo_input is None:
        return None
    if photo_input.features is not None:
        raise UserError(
            f"{name} needs photos, since it has boxes: give a PhotoInput without features."
        )
    return open_photos(name, split, folder, photos, photo_input)


def attach_photos(
    batch: Batch, photos: PhotoDataset, places: Sequence[int] | Int[np.ndarray, " n"]
) -> Batch:
    """Return the batch with the photo of each sample; a photo that several share is opened once."""
    chosen, of = np.unique(np.asarray(places, dtype=np.int64), return_inverse=True)
    shown = photos.batch(chosen.tolist())
    return replace(
        batch,
        images=shown.images,
        image_of=torch.from_numpy(of.reshape(-1).astype(np.int64)),
        geometry=shown.geometry,
    )


def names_and_sizes(paths: Iterable[Path]) -> bytes:
    """Return the name and the size of each file, for digests of files too large to read."""
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in paths).encode()


def hold_out_photos(split: Split, photo_of: Int[np.ndarray, " n"], validation: int) -> list[int]:
    """Return the questions of train, val or train+val, where val has whole training photos."""
    photos = np.unique(photo_of)
    if split is Split.TRAIN_VAL:
        return list(range(len(photo_of)))
    kept = photos[split_indices(split, len(photos), validation)]
    return np.flatnonzero(np.isin(photo_of, kept)).tolist()


def build_vocabulary(texts: Iterable[str], minimum: int = 1) -> Vocabulary:
    """Build a vocabulary of the words that appear at least `minimum` times."""
    return Vocabulary.build(([word for word, _, _ in tokenize(text)] for text in texts), minimum)


def most_common_answers(answers: Iterable[str], limit: int | None = None) -> tuple[str, ...]:
    """Return the most frequent answers, ties sorted by alphabet: the classes."""
    counts = Counter(answers)
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:limit])


def one_hot(labels: Int[Tensor, " b"], classes: int) -> Float[Tensor, "b c"]:
    """Return one-hot rows; a label of -1, which is not a class, gives a row of zeros."""
    found = torch.zeros(len(labels), classes)
    rows = (labels >= 0).nonzero()[:, 0]
    found[rows, labels[rows]] = 1
    return found
