"""`overt measure`: a model, a run or maps of somebody else, a data set, and a scorecard of them."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import files
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.recipes import folder as run_folder
from overt.recipes.opening import Subject, is_model, locate, open_model

if TYPE_CHECKING:
    from overt.data.batch import Batch
    from overt.data.source import Source
    from overt.measure.scorecards.card import Difference, Scorecard
    from overt.measure.scorecards.entries import Entry
    from overt.measure.scorecards.sight import Look

SIZE = (224, 224)  # of pictures, for a model that takes any
PHOTOS = (".jpg", ".jpeg", ".png", ".webp")
MAPS = "maps"  # the folder beside photos with where people looked in them
PAGE, COMPARED, OTHER = "scorecard.html", "compared.json", "other"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What is to be measured, as a person says it; None is left to the scorecard."""

    model: str
    data: str | None = None
    measures: tuple[str, ...] | None = None
    maps: Path | None = None
    over: str | None = None
    limit: int | None = None
    seed: int = 0
    portion: int = 16


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that is asked by batches, and what its samples have to look like.

    `looks` are maps beside those of the model; `judged` is the test set of a run; `reader` reads
    texts and `size` is that of pictures. A model of mere maps is None.
    """

    name: str
    model: Any = None
    looks: "dict[str, Look] | None" = None
    judged: "Source | None" = None
    reader: Any = None
    size: tuple[int, int] = SIZE
    over: str | None = None


def check(wish: Wish, out: Path, compare: str | None = None) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    for path in (wish.model, wish.data, compare, wish.maps):
        if path is not None and "\0" in str(path):
            raise BadInput(f"{str(path)!r} holds a NUL character and cannot be a path.")
    run_folder.usable(out)
    if out.is_dir() and (out / run_folder.RESULTS).exists():
        raise BadInput(f"{out} holds a run; choose another folder for --out.")
    if not is_run(wish.model) and wish.data is None:
        if not is_model(wish.model) and not Path(wish.model).exists():
            raise BadInput(
                f"'{wish.model}' is not a folder or a file; name a run, a model or maps, or say "
                "hf:NAME or timm:NAME."
            )
        raise BadInput("name a data set behind the model; `overt data list` shows those there are.")


def is_run(name: str) -> bool:
    """Whether this is the folder of a run."""
    return (Path(name) / run_folder.RESULTS).is_file()


def is_maps(name: str) -> bool:
    """Whether this is an .npz, or a folder of pictures that holds no model."""
    path = Path(name)
    if path.suffix == ".npz":
        return True
    return path.is_dir() and not is_run(name) and not is_model(name) and any(path.glob("*.png"))


def run(
    wish: Wish,
    compare: str | None,
    out: Path,
    root: Path | None = None,
    device: str = "cpu",
    command: Sequence[str] = (),
    say: Say = lambda line: None,
    line: Callable[[str], Callable[[int, int], None]] | None = None,
) -> "tuple[Scorecard, Scorecard | None]":
    """Measure, and what it is compared with; write everything and a page about it to `out`.

    `line` makes of a name what shows the progress of a piece of work.
    """
    shown = line or (lambda name: lambda done, total: None)
    card = score(wish, out, root, device, say, shown("measuring"))
    other = None
    if compare is not None:
        second = replace(wish, model=compare, maps=None, data=wish.data)
        other = score(second, out / OTHER, root, device, say, shown("comparing"))
        card.compare(other)  # not of the same samples: said before anything is written
    if os.environ.get("RANK", "0") == "0":
        from overt.show.scores import scores_page

        if other is not None:
            gaps = [asdict(one) for one in card.compare(other)]
            files.write_json(out / COMPARED, [_plain(one) for one in gaps])
        scores_page(out / PAGE, card, other, shlex.join(command))
    return card, other


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values for JSON, None for what is no number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def score(
    wish: Wish,
    out: Path | None,
    root: Path | None = None,
    device: str = "cpu",
    say: Say = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> "Scorecard":
    """Open the model and the data, and measure; with `out` all is written and can be gone on."""
    from overt import measure

    opened = opened_model(wish.model, root, device, say)
    data = opened_data(wish.data, opened, root)
    _goes_with(opened, data)
    looks = dict(opened.looks or {})
    if wish.maps is not None:
        from overt.measure.scorecards.outside import outside_maps

        looks["outside"] = outside_maps(wish.maps)
    with _fitting(opened.name, data.name):
        return measure.scorecard(
            opened.model,
            data,
            wish.measures,
            looks,
            over=wish.over or opened.over,
            name=opened.name,
            seed=wish.seed,
            limit=wish.limit,
            portion=wish.portion,
            out=out,
            progress=progress,
        )


def _goes_with(opened: Opened, data: "Source") -> None:
    """Refuse pictures for a model that reads, and texts for one that looks."""
    first = data.batch([0]) if len(data) else None
    if first is None:
        return
    if opened.over == "text" and first.tokens is None:
        raise BadInput(f"{opened.name} reads texts, and {data.name} has none.")
    if opened.over == "image" and first.images is None:
        raise BadInput(f"{opened.name} looks at pictures, and {data.name} has none.")


@contextmanager
def _fitting(model: str, data: str) -> Iterator[None]:
    """What comes of a model and a data set that do not go together is one sentence about both."""
    try:
        yield
    except (BadInput, Damaged, Failed, Stopped, MemoryError):
        raise
    except ValueError as error:
        raise BadInput(f"{model} cannot be measured on {data}: {_first(error)}.") from error
    except (RuntimeError, IndexError, KeyError, TypeError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise Failed(f"{model} could not be run on {data} ({_first(error)}).") from error


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].rstrip(".") if lines else type(error).__name__)[:300]


def listing() -> list[list[str]]:
    """A line for each measure: its key, direction, range, unit, question, needs, limits."""
    from overt.measure.scorecards.catalogue import catalogue

    return [_line(entry) for entry in catalogue()]


def _line(entry: "Entry") -> list[str]:
    low, high = entry.measure.low, entry.measure.high
    arrow = {"higher": "higher", "lower": "lower", "neither": "–"}[entry.direction]
    needs = ", ".join(need.name.lower() for need in entry.needs) or "a map"
    span = f"{low:g} to {high:g}"
    return [entry.key, arrow, span, entry.measure.unit, needs, entry.cannot]


def differences(gaps: Sequence["Difference"]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a comparison of two models."""
    header = ["measure", "n", "difference [95 %]", "p", "Holm", "FDR", "effect", "first higher", ""]
    lines = [
        [
            one.key,
            str(one.n),
            f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]",
            f"{one.p:.4f}",
            f"{one.holm:.4f}",
            f"{one.fdr:.4f}",
            f"{one.effect:.2f}",
            f"{one.superiority:.0%}",
            one.verdict,
        ]
        for one in gaps
    ]
    return header, lines


# --- models


def opened_model(name: str, root: Path | None, device: str, say: Say) -> Opened:
    """What MODEL_OR_RUN names: a run, a model of anybody's, or maps."""
    if is_maps(name):
        from overt.measure.scorecards.outside import outside_maps

        return Opened(Path(name).stem, looks={Path(name).stem: outside_maps(name)})
    from overt.train.processes import processes

    place = processes(device).device
    if is_run(name):
        return from_run(Path(name), root, place)
    subject = open_model(locate(name, say), name)
    subject.model.to(place)
    for note in subject.notes:
        say(note)
    return from_subject(subject)


def from_run(folder: Path, root: Path | None, device: Any) -> Opened:
    """The model of a finished run and the test set that it was judged on."""
    from overt.recipes import find, settings
    from overt.recipes.recipe import Context

    held = run_folder.look(folder)
    weights = folder / "model" / "model.safetensors"
    if held is None or not held.done or not weights.is_file():
        raise BadInput(f"{folder} holds no finished run with a model in it; `overt doctor` it.")
    files.verify(weights.parent)
    results = held.results
    made = find(results["recipe"])
    recipe = settings.restore(made, settings.completed(results["settings"], made))
    experiment = recipe.build(Context(folder, int(results["seed"]), str(device), root))
    if experiment.judged is None:
        raise BadInput(f"a run of {recipe.name} has no test set that a scorecard could stream.")
    model = experiment.model
    model.load_state_dict(files.read_tensors(weights))
    example = experiment.example()
    reader = getattr(experiment.judged, "reader", None)
    reader = reader or getattr(getattr(experiment.judged, "data", None), "reader", None)
    size = SIZE if example.images is None else _sides(example.images)
    title = str(results.get("title") or recipe.name)
    label = f"{title}, seed {results['seed']}"
    asked = (experiment.answers or model).to(device).eval()
    return Opened(label, asked, None, experiment.judged, reader, size)


def from_subject(subject: Subject) -> Opened:
    """A model as `overt look` opens it, asked by batches: ours as it is, any other adopted."""
    from overt.recipes.ltpa.looking import BIRDS, SIDE, own_kinds

    name = _short(subject.name)
    if subject.spoken is not None:
        from overt.data.vocabulary import Vocabulary
        from overt.recipes.spoken import Sees

        known = subject.spoken
        if known.writes or known.sees is not Sees.PIXELS:
            raise BadInput(
                f"{name} looks at {known.sees} of pictures, which no data set that is named here "
                "has; name its run, and it is measured on its own test set where it has one."
            )
        reader = None if known.words is None else Vocabulary(known.words)
        return Opened(name, subject.model, reader=reader, size=known.pixels or SIZE)
    if isinstance(subject.model, own_kinds()):
        sizes = getattr(subject.model, "sizes", None)
        side = BIRDS if sizes is not None and sizes.first_pool > 2 else SIDE
        return Opened(name, subject.model, size=(side, side))
    if hasattr(subject.model, "levels") and hasattr(subject.model, "backbone"):  # attached
        return Opened(name, subject.model)
    if subject.transform is not None:
        return _from_timm(subject, name)
    return _from_hub(subject, name)


def _from_hub(subject: Subject, name: str) -> Opened:
    """A Hugging Face model; one without classes has maps, and no answer that could change."""
    from overt.data.vocabulary import HubTokenizer
    from overt.models import adopt
    from overt.models.adopting.feeding import calling

    inner = calling(subject.image_processor)

    def call(model: Any, batch: "Batch") -> Any:
        found = inner(model, batch)
        if found.ndim == 3:  # a word after each word: that after the last counts
            assert batch.token_mask is not None
            last = batch.token_mask.sum(dim=1) - 1
            found = found[range(len(found)), last.to(found.device)]
        return found

    model = adopt(
        subject.model, call, processor=subject.image_processor, tokenizer=subject.tokenizer
    )
    reader = None
    if subject.tokenizer is not None:
        limit = getattr(subject.model.config, "max_position_embeddings", None)
        most = min(subject.tokenizer.model_max_length, limit or 1 << 20, 1 << 20)
        reader = HubTokenizer(subject.tokenizer, most if most < 1 << 20 else None)
    over = "text" if subject.image_processor is None else "image"
    size = _wanted(subject.image_processor)
    if not _classifies(subject.model):
        look = {"attention of the last layer": _looking(model, over)}
        return Opened(name, None, look, None, reader, size, over)
    return Opened(name, model, None, None, reader, size, over)


def _classifies(model: Any) -> bool:
    """Whether the head of a model gives classes or words; a bare encoder gives a summary."""
    kind = type(model).__name__
    return "For" in kind or "LMHead" in kind


def _looking(model: Any, over: str) -> "Look":
    def look(batch: "Batch") -> Any:
        import torch

        with torch.no_grad():
            found = model(batch).looking_at(over)
        return found.over_heads().over_layers()

    return look


def _from_timm(subject: Subject, name: str) -> Opened:
    """A timm model: adopted where it attends, else as the network of convolutions that it is."""
    import torch

    from overt.capture import Unseen
    from overt.capture.positions.grids import vision_layout
    from overt.data.batch import Batch
    from overt.models import adopt

    said = dict(subject.model.pretrained_cfg)
    channels, height, width = said["input_size"]
    mean, spread = (torch.tensor(said[word]).reshape(channels, 1, 1) for word in ("mean", "std"))

    def call(model: Any, batch: Batch) -> Any:
        assert batch.images is not None
        pixels = batch.images[batch.image_index]
        if not pixels.is_floating_point():
            pixels = (pixels / 255 - mean.to(pixels.device)) / spread.to(pixels.device)
        return model(pixels.to(next(model.parameters()).dtype))

    def layout(batch: Batch) -> Any:
        return vision_layout(subject.model, (height, width), batch.sample_geometry)

    size = (int(height), int(width))
    device = next(subject.model.parameters()).device
    trial = Batch(("trial",), images=torch.zeros(1, 3, *size, dtype=torch.uint8, device=device))
    try:
        model = adopt(subject.model, call, layout)
        with torch.no_grad():
            model(trial)
    except (Unseen, ValueError):
        return Opened(name, plain_network(subject.model, call), size=size)
    return Opened(name, model, size=size, over="image")


def plain_network(network: Any, call: Callable[[Any, "Batch"], Any]) -> Any:
    """A network that attends to nothing as a model of batches: a prediction without maps."""
    from torch import nn

    from overt.models.output import Output

    class Plain(nn.Module):
        """A network of somebody else, asked by batches."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, batch: "Batch") -> Output:
            return Output(call(self.network, batch))

    return Plain().eval()


def _wanted(processor: Any) -> tuple[int, int]:
    """The size of pictures that an image processor makes."""
    for said in (getattr(processor, "crop_size", None), getattr(processor, "size", None)):
        asked = dict(said) if said else {}
        if {"height", "width"} <= asked.keys():
            return int(asked["height"]), int(asked["width"])
        if "shortest_edge" in asked:
            return int(asked["shortest_edge"]), int(asked["shortest_edge"])
    return SIZE


def _sides(images: Any) -> tuple[int, int]:
    return int(images.shape[-2]), int(images.shape[-1])


def _short(name: str) -> str:
    """The end of a path; `model` is what many folders of models are called."""
    parts = [part for part in name.split("/") if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1]


# --- data


def opened_data(name: str | None, opened: Opened, root: Path | None) -> "Source":
    """The data set of this name, or `name:split`, or a folder of photos, as the model wants it."""
    if name is None or name == "test":
        if opened.judged is None:
            raise BadInput("only a run has a test set of its own; name a data set.")
        return opened.judged
    if Path(name).is_dir():
        return photos_in(Path(name), opened.size)
    return named_data(name, opened, root)


def photos_in(folder: Path, size: tuple[int, int]) -> "Source":
    """The photos of a folder; where people looked in them is in its folder `maps`, if there is one.

    A map is called as its photo, and ends in .png.
    """
    from overt.data.own import OwnMaps, pictures_in

    photos = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTOS)
    if not photos:
        raise BadInput(f"{folder} holds no photos: nothing in it ends in {', '.join(PHOTOS)}.")
    maps = folder / MAPS
    found = OwnMaps(folder.name, photos, pictures_in(maps), size)
    return found if maps.is_dir() else Untold(found)


class Untold:
    """A data set whose truth nobody knows."""

    def __init__(self, data: "Source") -> None:
        self.data, self.name, self.split = data, data.name, data.split

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> "Batch":
        """The samples, without a target."""
        return replace(self.data.batch(indices), target=None)

    def digest(self) -> str:
        """The hash of what is shown."""
        return self.data.digest()


def named_data(name: str, opened: Opened, root: Path | None) -> "Source":
    """A data set by its name; here a name becomes code."""
    from overt import data
    from overt.data import sets

    word, _, split = name.partition(":")
    sets.find(word)
    if word not in sets.PROGRAMS:
        _present(word, root)
    where, size, reader = root or Path(), opened.size, opened.reader
    match word:
        case "osie":
            return data.Osie(where, split or "all", size)
        case "yelp_hat":
            return data.YelpHat(where, split or "all", reader=reader)
        case "eraser":
            return data.Eraser(where, split or "test", reader=reader)
        case "trec6":
            return data.Trec(where, split or "test", reader=reader)
        case "cub":
            return data.Cub(where, split or "test", size)
        case "discovery":
            return data.ObjectDiscovery(where, split or "all", size)
        case "cifar10":
            return Enlarged(data.Cifar10(where, split or "test"), size)
        case "cifar100":
            return Enlarged(data.Cifar100(where, split or "test"), size)
        case "svhn":
            return Enlarged(data.Svhn(where, split or "test"), size)
        case "stl10":
            return Enlarged(data.Stl10(where, split or "test"), size)
        case "scenes":
            return data.Scenes(split or "test", sets.SCENES_SEED, sets.SCENES["test"])
    return _of_people(word, split, size, where)


def _of_people(word: str, split: str, size: tuple[int, int], where: Path) -> "Source":
    """Sets of things with boxes and masks."""
    from overt.data import coco, pets, voc

    match word:
        case "coco":
            return coco.coco_objects(where, split or "val", size=size)
        case "voc":
            return voc.voc_boxes(where, split or "test", size=size)
        case "pets":
            return pets.oxford_pets(where, split or "test", size=size)
        case _:
            pass
    raise BadInput(
        f"{word} is measured by the runs that read it: name the folder of one instead of a model, "
        "or a folder of photos as data."
    )


def _present(name: str, root: Path | None) -> None:
    from overt.data import sets

    if root is None:
        raise BadInput(f"name the folder that holds {name} with --data or OVERT_DATA.")
    if name not in sets.present(root):
        raise BadInput(f"the data set {name} is not found in {root}. {sets.find(name).how}")


class Enlarged:
    """Small pictures of one size, brought to the size that a model wants."""

    def __init__(self, data: "Source", size: tuple[int, int]) -> None:
        self.data, self.size = data, size
        self.name, self.split = data.name, data.split

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> "Batch":
        """The samples, smoothly enlarged; nothing is done to pictures of the right size."""
        from torch.nn.functional import interpolate

        found = self.data.batch(indices)
        if found.images is None or _sides(found.images) == self.size:
            return found
        large = interpolate(found.images.float(), self.size, mode="bilinear", antialias=True)
        geometry = None if found.geometry is None else found.geometry.resize(self.size)
        images = large.round().clamp(0, 255).to(found.images.dtype)
        return replace(found, images=images, geometry=geometry)

    def digest(self) -> str:
        """The hash of the pictures as they were, and of the size."""
        return f"{self.data.digest()}-{self.size[0]}x{self.size[1]}"
