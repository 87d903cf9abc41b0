"""Custom datasets of human attention: your own photos with maps, or your own texts with rationales.

    mine = CustomMaps("gaze", photos, lambda photo: [read_map(photo.with_suffix(".png"))])
    metrics.scorecard(model, mine)

Maps come from a function, so that they can be stored in any form: images beside the photos,
arrays, a table of marks. Any other dataset whose batches have a `target` works as well.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.dataset import check_indices
from overt.data.images import Resize, Size, stretch
from overt.data.photo_dataset import ALL, PhotoDataset, PhotoEntry, density_target, people_maps
from overt.data.rationales import RationaleSpans, rationale_attention, rationale_maps
from overt.data.vocabulary import Tokenizer, read_texts
from overt.data.vqa_hat import Fuse, mean_map, read_map, sum_maps
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry

SIZE, CELLS = (224, 224), (14, 14)

HeatMap = Float[Tensor, "y x"]
MapReader = Callable[[Path], Sequence[HeatMap]]  # a photo -> one map per person


def maps_in_folder(folder: Path | str) -> MapReader:
    """Return a map reader for grey images in a folder: NAME.png for a photo NAME, or NAME_1.png,
    ...

    Args:
        folder: Folder of the maps.

    Returns:
        A function from the path of a photo to its maps, one per person.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as folder:
        ...     for person in (1, 2):
        ...         Image.new("L", (8, 6), 255).save(Path(folder, f"dog_{person}.png"))
        ...     [tuple(heat.shape) for heat in maps_in_folder(folder)(Path("photos/dog.jpg"))]
        [(6, 8), (6, 8)]
    """
    folder = Path(folder)

    def read_maps(photo: Path) -> list[HeatMap]:
        named = [folder / f"{photo.stem}.png", *_numbered(folder, photo.stem)]
        return [read_map(path) for path in named if path.is_file()]

    return read_maps


class CustomMaps:
    """Your own photos with human attention maps.

    A map may have any size. It is stretched over the whole photo and transformed like the photo;
    the weight of a cell is the mass inside it. A photo without maps has a target that sees no cell
    and counts nowhere.

    Args:
        name: Name of the dataset.
        photos: Photo files, all in one folder.
        read_maps: Function from a photo to its maps, one per person.
        size: Canvas (height, width) in pixels.
        resize: How a photo is brought to the canvas: `images.crop`, `fit` or `stretch`.
        cells: Grid (rows, columns) of the target.
        fuse: Combines the maps of several people into one.
        labels: Class of each photo by file name; None if there are no classes.

    Raises:
        UserError: There are no photos, they are in several folders, or one has no label.
        CorruptFileError: A map has negative or non-finite weights, or not two axes.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as folder:
        ...     Image.new("RGB", (8, 6)).save(Path(folder, "dog.jpg"))
        ...     photos = [Path(folder, "dog.jpg")]
        ...     data = CustomMaps("gaze", photos, lambda photo: [torch.ones(6, 8)], cells=(2, 2))
        ...     data.batch([0]).target.weights.flatten()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        name: str,
        photos: Sequence[Path | str],
        read_maps: MapReader,
        size: Size = SIZE,
        resize: Resize = stretch,
        cells: Size = CELLS,
        fuse: Fuse = mean_map,
        labels: Mapping[str, int] | None = None,
    ) -> None:
        if not photos:
            raise UserError(f"{name} has no photos.")
        paths = [Path(photo) for photo in photos]
        folders = {photo.parent for photo in paths}
        if len(folders) > 1:
            raise UserError(f"The photos of {name} are in {len(folders)} folders; put them in one.")
        self.name, self.split, self.cells = name, ALL, cells
        self._read_maps, self._fuse, self._labels = read_maps, fuse, labels
        entries = [PhotoEntry(photo.name, _label(labels, photo)) for photo in paths]
        self._photos = PhotoDataset(name, ALL, folders.pop(), entries, ("photo",), size, resize)
        self.files = self._photos.files

    def __len__(self) -> int:
        return len(self._photos)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the photos at `indices`, with the fused maps as target."""
        found = self._photos.batch(indices)
        assert found.geometry is not None
        maps = self._maps(indices, found.geometry)
        fused = self._fuse(maps, maps.sum(dim=-1) > 0)
        labels = found.labels if self._labels is not None else None
        return replace(
            found, labels=labels, target=density_target(fused, self.cells, found.geometry)
        )

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Return the map of each person, one query per person; absent people see no cell."""
        geometry = self._photos.batch(indices).geometry
        assert geometry is not None
        return people_maps(self._maps(indices, geometry), self.cells, geometry)

    def digest(self) -> str:
        """Return a hash of the photos and of all maps."""
        whole = hashlib.sha256(f"{self._fuse.__name__} {self._photos.digest()}".encode())
        for path in self.files:
            for heat in self._read_maps(path):
                whole.update(f"{tuple(heat.shape)}".encode())
                whole.update(heat.float().contiguous().numpy().tobytes())
        return whole.hexdigest()

    def _maps(self, indices: Sequence[int], geometry: PixelGeometry) -> Float[Tensor, "b p k"]:
        photos = [self.files[place] for place in self._photos.places(indices)]
        looked = [self._read_maps(photo) for photo in photos]
        for photo, each in zip(photos, looked, strict=True):
            for person, heat in enumerate(each):
                if heat.ndim != 2 or not bool((heat.isfinite() & (heat >= 0)).all()):
                    raise CorruptFileError(
                        f"{photo}: the map of person {person} needs two axes and finite weights "
                        f">= 0, got {heat.ndim} axes."
                    )
        return sum_maps(looked, self.cells, geometry)


class CustomRationales:
    """Your own texts with human rationales, as ranges of characters.

    A token counts if at least half of it is marked. The target is the share of people who marked
    each token, normalised; where nothing is marked it sees no token.

    Args:
        name: Name of the dataset.
        texts: The texts.
        marked: `marked[i][p]` are the ranges (first character, end) that person p marked in text i.
        reader: Tokenizer.
        labels: Class of each text; None if there are no classes.

    Raises:
        UserError: The lists have different lengths.

    Example:
        >>> from overt.data import Vocabulary
        >>> reader = Vocabulary.build([["a", "great", "film"]])
        >>> data = CustomRationales("reviews", ["A great film"], [[[(2, 7)], [(2, 12)]]], reader)
        >>> data.batch([0]).target.weights.flatten()  # both marked "great", one "film"
        tensor([0.0000, 0.6667, 0.3333])
    """

    def __init__(
        self,
        name: str,
        texts: Sequence[str],
        marked: RationaleSpans,
        reader: Tokenizer,
        labels: Sequence[int] | None = None,
    ) -> None:
        for what, given in (("marks", marked), ("labels", labels)):
            if given is not None and len(given) != len(texts):
                raise UserError(f"{name} has {len(texts)} texts but {len(given)} {what}.")
        self.name, self.split, self.reader = name, ALL, reader
        self._texts, self._marked, self._labels = texts, marked, labels

    def __len__(self) -> int:
        return len(self._texts)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the texts at `indices`, with the rationales as target."""
        places = check_indices(self, indices, "texts")
        tokens, mask, text = read_texts(self.reader, [self._texts[place] for place in places])
        maps, there = rationale_maps([self._marked[place] for place in places], text, mask)
        fused = maps.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)
        seen = mask & (fused.sum(dim=-1, keepdim=True) > 0)
        labels = self._labels
        return Batch(
            ids=tuple(f"{self.name}/{place:06d}" for place in places),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=None if labels is None else torch.tensor([labels[place] for place in places]),
            target=AttentionMap.from_cells(
                fused, words(tokens.shape[1], geometry=text), seen
            ).normalize(),
        )

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """Return the rationale of each person: 1 or 0 per token, one query per person."""
        places = check_indices(self, indices, "texts")
        _, mask, text = read_texts(self.reader, [self._texts[place] for place in places])
        marked = [self._marked[place] for place in places]
        return rationale_attention(*rationale_maps(marked, text, mask), text, mask)

    def digest(self) -> str:
        """Return a hash of the texts and the rationales."""
        about = [
            (text, [[tuple(one) for one in person] for person in people])
            for text, people in zip(self._texts, self._marked, strict=True)
        ]
        return hashlib.sha256(f"{about} {self._labels}".encode()).hexdigest()


def _numbered(folder: Path, stem: str) -> list[Path]:
    found = [path for path in folder.glob("*.png") if path.stem.rpartition("_")[0] == stem]
    numbers = [path for path in found if path.stem.rpartition("_")[2].isdecimal()]
    return sorted(numbers, key=lambda path: int(path.stem.rpartition("_")[2]))


def _label(labels: Mapping[str, int] | None, photo: Path) -> int:
    if labels is None:
        return 0
    if photo.name not in labels:
        raise UserError(f"{photo.name} has no label; give a label for every photo or labels=None.")
    return labels[photo.name]
