"""Questions about photos: what sets of visual questions are read into.

A photo is opened when a batch asks for it, once however many of its questions do. Where features of
the photos were cached, the batch has them in place of pixels and no photo need be there at all.
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
from overt.data.features import FeatureCache
from overt.data.images import How, Size, crop
from overt.data.photos import Entry, PhotoSet
from overt.data.splits import Split, rows_of
from overt.data.vocabulary import Reader, Vocabulary, pad, tokenize
from overt.errors import BadInput
from overt.geometry import TextGeometry


@dataclass(frozen=True)
class Look:
    """How photos come to a batch: their canvas and the way to it, or a cache of their features."""

    size: Size = (224, 224)
    how: How = crop
    features: FeatureCache | None = None


class Asked:
    """The questions of one split, each about one photo.

    `photos` are the files below `folder`, each once, and `photo_of` says which of them a question
    is about. Ids are those of the questions; `photo_ids` are those that features go by.
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
        reader: Reader,
        look: Look,
    ) -> None:
        self.name, self.split, self.reader = name, split, reader
        self._names, self._photo_of, self._texts, self._ids = photos, photo_of, texts, ids
        self._features = look.features
        self.photos: PhotoSet | None = None
        if look.features is None:
            self.photos = _opened(name, split, folder, photos, look)
        else:
            for photo in photos:
                if f"{name}/{photo}" not in look.features:
                    raise BadInput(
                        f"{look.features.folder} has no features of {name}/{photo}; build the "
                        "cache over all photos."
                    )

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def files(self) -> tuple[Path, ...]:
        """The photos, where they are read from files."""
        return () if self.photos is None else self.photos.files

    def texts(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The questions in words."""
        return tuple(self._texts[place] for place in self.places(indices))

    def photo_ids(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The name of the photo of each question, as in a cache of features."""
        chosen = self._photo_of[self.places(indices)]
        return tuple(f"{self.name}/{self._names[photo]}" for photo in chosen)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The questions at these places with pixels or features, and without answers."""
        places = self.places(indices)
        read = [self.reader.read(self._texts[place]) for place in places]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        found = Batch(
            ids=tuple(self._ids[place] for place in places),
            tokens=tokens,
            token_mask=mask,
            text=TextGeometry(self.texts(indices), spans),
        )
        if self._features is not None:
            return replace(found, features=self._features.get(self.photo_ids(indices)))
        assert self.photos is not None
        chosen, of = np.unique(self._photo_of[places], return_inverse=True)
        shown = self.photos.batch(chosen.tolist())
        return replace(
            found,
            images=shown.images,
            image_of=torch.from_numpy(of.reshape(-1).astype(np.int64)),
            geometry=shown.geometry,
        )

    def places(self, indices: Sequence[int]) -> list[int]:
        """The indices as numbers, when all of them are in the split."""
        found = [int(place) for place in indices]
        for place in found:
            if not 0 <= place < len(self):
                raise BadInput(
                    f"{self.name} {self.split} has questions 0 to {len(self) - 1}, not {place}."
                )
        return found

    def digest_photos(self) -> str:
        """A hash of the contents of every photo, or of what the features are."""
        if self._features is not None:
            return self._features.digest()
        assert self.photos is not None
        return self.photos.digest()

    def digest_names(self) -> str:
        """A hash of the name and the size of every photo, or of what the features are.

        For sets of many gigabytes, where reading every byte takes longer than training a step.
        """
        if self._features is not None:
            return self._features.digest()
        whole = hashlib.sha256()
        for photo, path in zip(self._names, self.files, strict=True):
            whole.update(f"{photo} {path.stat().st_size}\n".encode())
        return whole.hexdigest()


def gallery(
    name: str, split: str, folder: Path, photos: Sequence[str], look: Look | None = None
) -> PhotoSet:
    """The photos by themselves, each once, to compute features of: their ids are `photo_ids`."""
    return _opened(name, split, folder, photos, look or Look())


def hold_out(split: Split, photo_of: Int[np.ndarray, " n"], validation: int) -> list[int]:
    """The questions of train, val or train+val, where val has whole photos of the training part."""
    photos = np.unique(photo_of)
    if split is Split.TRAIN_VAL:
        return list(range(len(photo_of)))
    kept = photos[rows_of(split, len(photos), validation)]
    return np.flatnonzero(np.isin(photo_of, kept)).tolist()


def words_of(texts: Iterable[str], minimum: int = 1) -> Vocabulary:
    """The words of questions that appear at least `minimum` times."""
    return Vocabulary.build(([word for word, _, _ in tokenize(text)] for text in texts), minimum)


def most_common(answers: Iterable[str], limit: int | None = None) -> tuple[str, ...]:
    """The answers given most often, the frequent first and equals by alphabet: the classes."""
    counts = Counter(answers)
    return tuple(sorted(counts, key=lambda answer: (-counts[answer], answer))[:limit])


def one_hot(labels: Int[Tensor, " b"], classes: int) -> Float[Tensor, "b c"]:
    """1 for the class of each sample; a label of -1, an answer that is no class, scores nothing."""
    found = torch.zeros(len(labels), classes)
    rows = (labels >= 0).nonzero()[:, 0]
    found[rows, labels[rows]] = 1
    return found


def _opened(name: str, split: str, folder: Path, photos: Sequence[str], look: Look) -> PhotoSet:
    entries = [Entry(photo, 0) for photo in photos]
    return PhotoSet(name, split, folder, entries, ("photo",), look.size, look.how)
