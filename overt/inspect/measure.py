"""`overt measure`: compute the scorecard of a model, a run or external maps on a dataset."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import io
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.experiments import run_folder
from overt.experiments.recipe_file import RecipeFile, is_recipe_file, load_object
from overt.inspect.inputs import first_line
from overt.inspect.load_model import is_model, load_model, locate_model
from overt.inspect.load_run import load_run
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.map_methods import ATTENTION, check_methods, method_maps

if TYPE_CHECKING:
    from overt.data.batch import Batch
    from overt.data.dataset import Dataset
    from overt.metrics.scorecard.entry import ScorecardMetric
    from overt.metrics.scorecard.metric_context import MapFunction
    from overt.metrics.scorecard.result import Difference, Scorecard

SIZE = (224, 224)  # of images, for a model that takes any size
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
MAP_FOLDER = "maps"  # subfolder of fixation maps beside photos
PAGE_FILE, COMPARISON_FILE, OTHER_FOLDER = "scorecard.html", "compared.json", "other"
Say = Callable[[str], None]


@dataclass(frozen=True)
class MeasureRequest:
    """Arguments of `overt measure`; None leaves a choice to the scorecard.

    `files` define the recipes of runs that are not of overt.
    """

    model: str
    data: str | None = None
    measures: tuple[str, ...] | None = None
    maps: Path | None = None
    over: str | None = None
    limit: int | None = None
    seed: int = 0
    portion: int = 16
    files: tuple[RecipeFile, ...] = ()
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """A model that takes batches, and the inputs it needs.

    `looks` are further maps; `judged` is the test set of a run; `reader` tokenizes text and `size`
    is the image size. `model` is None for external maps.
    """

    name: str
    model: Any = None
    looks: "dict[str, MapFunction] | None" = None
    judged: "Dataset | None" = None
    reader: Any = None
    size: tuple[int, int] = SIZE
    over: str | None = None


def check_request(request: MeasureRequest, out: Path, compare: str | None = None) -> None:
    """Check the arguments before anything is loaded.

    Raises:
        UserError: if an argument is invalid.
    """
    for path in (request.model, request.data, compare, request.maps):
        if path is not None and "\0" in str(path):
            raise UserError(f"{str(path)!r} contains a NUL character and is not a path.")
    run_folder.check_folder_path(out)
    if out.is_dir() and (out / run_folder.RESULTS).exists():
        raise UserError(f"{out} is a run folder: choose another folder for --out.")
    if run_folder.is_sealed(out):
        raise UserError(f"{out} is a saved model or store: choose another folder for --out.")
    if compare is not None and compare.strip() and not _can_exist(compare):
        raise UserError(f"'{compare}' does not exist: give a run, a model or maps for --compare.")
    check_methods(request.methods)
    _check_output(out, request, compare)
    if not _can_exist(request.model):
        if not is_maps(request.model):
            raise UserError(
                f"'{request.model}' does not exist: give a run, a model, maps, hf:NAME or "
                "timm:NAME."
            )
        raise UserError(
            f"{request.model} does not exist: give an .npz file of maps or a folder of PNGs."
        )
    if request.maps is not None and not request.maps.exists():
        raise UserError(
            f"--maps: {request.maps} does not exist: give an .npz file or a folder of PNGs."
        )
    if not is_run(request.model) and request.data is None:
        raise UserError(
            "Give a dataset after the model; `overt data list` shows the available ones."
        )
    check_dataset_name(request.data)


def check_dataset_name(name: str | None) -> None:
    """Raise unless this is a dataset, a folder of photos, FILE.py:NAME, or the test set of a run.

    Raises:
        UserError: There is no such dataset.
    """
    if name in (None, "test") or is_recipe_file(str(name)) or Path(str(name)).is_dir():
        return
    from overt.data import catalog

    catalog.find_dataset(str(name).partition(":")[0])


def _can_exist(name: str) -> bool:
    return is_model(name) or is_recipe_file(name) or Path(name).exists()


def _check_output(out: Path, request: MeasureRequest, compare: str | None) -> None:
    """Raise if the output folder is one of the inputs."""
    for name in (request.model, request.data, compare, request.maps):
        if name is not None and Path(name).is_dir() and out.resolve() == Path(name).resolve():
            raise UserError(f"{out} is an input: choose another folder for --out.")


def is_run(name: str) -> bool:
    """Return whether this is a run folder."""
    return (Path(name) / run_folder.RESULTS).is_file()


def is_maps(name: str) -> bool:
    """Return whether this is an .npz file, or a folder of PNGs without a model."""
    path = Path(name)
    if path.suffix == ".npz":
        return True
    return path.is_dir() and not is_run(name) and not is_model(name) and any(path.glob("*.png"))


def run_measure(
    request: MeasureRequest,
    compare: str | None,
    out: Path,
    root: Path | None = None,
    device: str = "cpu",
    command: Sequence[str] = (),
    say: Say = lambda line: None,
    line: Callable[[str], Callable[[int, int], None]] | None = None,
) -> "tuple[Scorecard, Scorecard | None]":
    """Compute the scorecard, and that of `compare`; write both and a page to `out`.

    `line` returns a progress callback for a title.
    """
    shown = line or (lambda name: lambda done, total: None)
    if compare is not None:
        _dry_run(replace(request, model=compare, maps=None), root, device)
    card = compute_scorecard(request, out, root, device, say, shown("measuring"))
    other = None
    if compare is not None:
        second = replace(request, model=compare, maps=None, data=request.data)
        other = compute_scorecard(second, out / OTHER_FOLDER, root, device, say, shown("comparing"))
        card.compare(other)  # raises if samples differ, before anything is written
    if os.environ.get("RANK", "0") == "0":
        from overt.metrics.scorecard.result import to_json_values
        from overt.viz.scorecard_page import write_scorecard_page

        if other is not None:
            gaps = [asdict(one) for one in card.compare(other)]
            io.write_json(out / COMPARISON_FILE, [to_json_values(one) for one in gaps])
        write_scorecard_page(out / PAGE_FILE, card, other, shlex.join(command))
    return card, other


def _dry_run(request: MeasureRequest, root: Path | None, device: str) -> None:
    """Load a model and its data once, to find errors before hours of work."""
    opened = open_measured(request.model, root, device, lambda line: None, request.files)
    check_modality(opened, open_dataset(request.data, opened, root))


def compute_scorecard(
    request: MeasureRequest,
    out: Path | None,
    root: Path | None = None,
    device: str = "cpu",
    say: Say = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
) -> "Scorecard":
    """Load the model and the data and compute the scorecard; with `out` it can be resumed."""
    from overt import metrics

    opened = open_measured(request.model, root, device, say, request.files)
    data = open_dataset(request.data, opened, root)
    check_modality(opened, data)
    looks = dict(opened.looks or {})
    if request.maps is not None:
        from overt.metrics.scorecard.external_maps import load_external_maps

        looks["outside"] = load_external_maps(request.maps)
    over = request.over or opened.over
    looks |= method_maps(request.methods, opened.model, over, request.seed)
    if ATTENTION in request.methods:
        _require_attention(opened, data)
    with measuring_errors(opened.name, data.name):
        return metrics.scorecard(
            opened.model,
            data,
            request.measures,
            looks,
            over=over,
            name=opened.name,
            seed=request.seed,
            limit=None if request.limit is None else count_items(data, request.limit),
            portion=request.portion,
            out=out,
            progress=progress,
            announce=lambda judged, seconds: say(_announcement(opened.name, judged, seconds)),
        )


def count_items(data: "Dataset", samples: int) -> int:
    """Count the first items that have `samples` samples together, at least one.

    An item may have several samples, such as an image its questions. They stay together, because
    they are one cluster of the intervals, so the last item may add more samples than requested.
    """
    total = 0
    for item in range(len(data)):
        total += len(data.batch([item]))
        if total >= samples:
            return item + 1
    return len(data)


def _require_attention(opened: MeasuredModel, data: "Dataset") -> None:
    """Raise if the map `attention` was requested and the model has no attention."""
    from overt.metrics.scorecard.metric_context import MetricContext

    batch = data.batch([0])
    first = next(opened.model.parameters(), None)
    batch = batch if first is None else batch.to(first.device)
    with measuring_errors(opened.name, data.name):
        has_attention = bool(MetricContext(opened.model, batch).output.attention)
    if not has_attention:
        raise UserError(
            f"{opened.name} has no attention, which --method {ATTENTION} scores: leave it out."
        )


def _announcement(name: str, judged: str, seconds: float) -> str:
    """Return the evaluated map and the estimated time as a sentence."""
    from overt.viz.results_table import format_duration

    took = f"about {format_duration(seconds)}" if seconds else "everything is cached"
    return f"measuring {name}: {judged}; {took}."


def check_modality(opened: MeasuredModel, data: "Dataset") -> None:
    """Raise if a text model gets images, or an image model gets text."""
    first = data.batch([0]) if len(data) else None
    if first is None:
        return
    if opened.over == "text" and first.tokens is None:
        raise UserError(f"{opened.name} takes text, but {data.name} has none.")
    if opened.over == "image" and first.images is None:
        raise UserError(f"{opened.name} takes images, but {data.name} has none.")


@contextmanager
def measuring_errors(model: str, data: str) -> Iterator[None]:
    """Turn errors of a mismatch of model and data into one line that names both."""
    try:
        yield
    except (UserError, CorruptFileError, RunError, RunInterrupted, MemoryError):
        raise
    except ValueError as error:
        raise UserError(f"{model} cannot be measured on {data}: {_first(error)}.") from error
    except (RuntimeError, IndexError, KeyError, TypeError) as error:
        # By name, because torch may not be imported.
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise RunError(f"{model} failed on {data} ({_first(error)}).") from error


def _first(error: Exception) -> str:
    return (first_line(error) or type(error).__name__)[:300]


def list_metrics() -> list[list[str]]:
    """Return a row per metric: key, description, direction, range, unit, needs, limits."""
    from overt.metrics.scorecard.catalog import available_metrics

    return [_metric_row(entry) for entry in available_metrics()]


def _metric_row(entry: "ScorecardMetric") -> list[str]:
    info = entry.info
    better = "–" if info.direction == "neither" else info.direction
    needs = ", ".join(need.name.lower() for need in entry.needs) or "a map"
    return [entry.key, info.description, better, info.range, info.unit, needs, entry.limitation]


def _format_interval(low: float, high: float) -> str:
    return "(no interval)" if math.isnan(low) else f"[{low:+.3f}, {high:+.3f}]"


def difference_table(gaps: Sequence["Difference"]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a comparison of two models."""
    from overt.viz.results_table import format_p_value

    header = ["measure", "n", "difference [95 %]", "p", "Holm", "FDR", "effect", "first higher", ""]
    lines = [
        [
            one.key,
            str(one.n),
            f"{one.mean:+.3f} {_format_interval(one.low, one.high)}",
            *(format_p_value(p) for p in (one.p, one.holm, one.fdr)),
            f"{one.effect:.2f}",
            f"{one.superiority:.0%}",
            one.verdict,
        ]
        for one in gaps
    ]
    return header, lines


# --- models


def open_measured(
    name: str, root: Path | None, device: str, say: Say, files: Sequence[RecipeFile] = ()
) -> MeasuredModel:
    """Load a run, a model or external maps."""
    if is_maps(name):
        from overt.metrics.scorecard.external_maps import load_external_maps

        return MeasuredModel(Path(name).stem, looks={Path(name).stem: load_external_maps(name)})
    from overt.train.distributed import processes

    place = processes(device).device
    if is_recipe_file(name):
        return _from_file(name, place)
    if is_run(name) and not _is_external(Path(name), files):
        return from_run(Path(name), root, place, files)
    loaded = load_model(locate_model(name, say), name)
    loaded.model.to(place)
    for note in loaded.notes:
        say(note)
    return from_loaded(loaded)


def _is_external(folder: Path, files: Sequence[RecipeFile]) -> bool:
    """Return whether no recipe of a run is known: only its model can be loaded."""
    from overt.papers.catalog import recipes

    held = run_folder.read_run(folder)
    if held is None or not held.is_finished:
        return False
    name = held.results.get("recipe")
    return name not in recipes() and not any(name in one.recipes() for one in files)


def _from_file(word: str, device: Any) -> MeasuredModel:
    """Return the model of batches that a function of a Python file makes."""
    from torch import nn

    model = load_object(word, "a model")
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{word} must return a torch.nn.Module that takes batches, such as overt.wrap(...), "
            f"got {type(model).__name__}."
        )
    return MeasuredModel(word.rpartition(":")[2], model.to(device).eval())


def from_run(
    folder: Path, root: Path | None, device: Any, files: Sequence[RecipeFile] = ()
) -> MeasuredModel:
    """Load the model of a finished run and its test set."""
    run = load_run(folder, root, device, files)
    test = run.experiment.test_data
    if test is None:
        raise UserError(f"A run of {run.recipe.name} has no test set for a scorecard.")
    example = run.experiment.example()
    reader = getattr(test, "reader", None)
    reader = reader or getattr(getattr(test, "data", None), "reader", None)
    size = SIZE if example.images is None else _image_size(example.images)
    return MeasuredModel(run.label, run.model.to(device).eval(), None, test, reader, size)


def from_loaded(loaded: LoadedModel) -> MeasuredModel:
    """Prepare a model of `overt look` for batches; models from outside overt are wrapped."""
    name = _short(loaded.name)
    if loaded.spec is not None:
        from overt.data.vocabulary import Vocabulary
        from overt.experiments.inference_spec import ImageInput

        known = loaded.spec
        if known.generates_text or known.image_input is not ImageInput.PIXELS:
            raise UserError(
                f"{name} takes {known.image_input} of images, which named datasets do not have: "
                "give its run to use its own test set."
            )
        reader = None if known.words is None else Vocabulary(known.words)
        return MeasuredModel(name, loaded.model, reader=reader, size=known.pixels or SIZE)
    if hasattr(loaded.model, "levels") and hasattr(loaded.model, "backbone"):  # attached attention
        return MeasuredModel(name, loaded.model)
    if loaded.transform is not None:
        return _from_timm(loaded, name)
    return _from_hub(loaded, name)


def _from_hub(loaded: LoadedModel, name: str) -> MeasuredModel:
    """Wrap a Hugging Face model; an encoder without a head has maps but no predictions."""
    from overt.data.vocabulary import HubTokenizer
    from overt.nn import wrap
    from overt.nn.wrappers.hf_inputs import make_predict

    inner = make_predict(loaded.image_processor)

    def call(model: Any, batch: "Batch") -> Any:
        found = inner(model, batch)
        if found.ndim == 3:  # next-token logits: take those after the last token
            assert batch.token_mask is not None
            last = batch.token_mask.sum(dim=1) - 1
            found = found[range(len(found)), last.to(found.device)]
        return found

    model = wrap(loaded.model, call, processor=loaded.image_processor, tokenizer=loaded.tokenizer)
    reader = None
    if loaded.tokenizer is not None:
        limit = getattr(loaded.model.config, "max_position_embeddings", None)
        most = min(loaded.tokenizer.model_max_length, limit or 1 << 20, 1 << 20)
        reader = HubTokenizer(loaded.tokenizer, most if most < 1 << 20 else None)
    over = "text" if loaded.image_processor is None else "image"
    size = _processor_size(loaded.image_processor)
    if not _classifies(loaded.model):
        look = {"attention of the last layer": _attention_function(model, over)}
        return MeasuredModel(name, None, look, None, reader, size, over)
    return MeasuredModel(name, model, None, None, reader, size, over)


def _classifies(model: Any) -> bool:
    """Return whether a model has a head; a bare encoder returns embeddings."""
    kind = type(model).__name__
    return "For" in kind or "LMHead" in kind


def _attention_function(model: Any, over: str) -> "MapFunction":
    def look(batch: "Batch") -> Any:
        import torch

        with torch.no_grad():
            found = model(batch).attention_to(over)
        return found.over_heads().over_layers()

    return look


def _from_timm(loaded: LoadedModel, name: str) -> MeasuredModel:
    """Wrap a timm model, with attention if it has any."""
    import torch

    from overt.capture import UncapturedAttentionError
    from overt.capture.layouts.patch_grids import vision_layout
    from overt.data.batch import Batch
    from overt.nn import wrap

    config = dict(loaded.model.pretrained_cfg)
    channels, height, width = config["input_size"]
    mean, spread = (torch.tensor(config[word]).reshape(channels, 1, 1) for word in ("mean", "std"))

    def call(model: Any, batch: Batch) -> Any:
        assert batch.images is not None
        pixels = batch.images[batch.image_index]
        if not pixels.is_floating_point():
            pixels = (pixels / 255 - mean.to(pixels.device)) / spread.to(pixels.device)
        return model(pixels.to(next(model.parameters()).dtype))

    def layout(batch: Batch) -> Any:
        return vision_layout(loaded.model, (height, width), batch.sample_geometry)

    size = (int(height), int(width))
    device = next(loaded.model.parameters()).device
    # Only a forward pass shows whether the attention can be captured.
    trial = Batch(("trial",), images=torch.zeros(1, 3, *size, dtype=torch.uint8, device=device))
    try:
        model = wrap(loaded.model, call, layout)
        with torch.no_grad():
            model(trial)
    except (UncapturedAttentionError, ValueError):
        return MeasuredModel(name, without_attention(loaded.model, call), size=size)
    return MeasuredModel(name, model, size=size, over="image")


def without_attention(network: Any, call: Callable[[Any, "Batch"], Any]) -> Any:
    """Wrap a network without attention as a model of batches."""
    from torch import nn

    from overt.nn.output import Output

    class Plain(nn.Module):
        """A network that takes batches."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, batch: "Batch") -> Output:
            return Output(call(self.network, batch))

    return Plain().eval()


def _processor_size(processor: Any) -> tuple[int, int]:
    """Return the image size of an image processor."""
    # `size` may be that of a resize before the crop.
    for value in (getattr(processor, "crop_size", None), getattr(processor, "size", None)):
        size = dict(value) if value else {}
        if {"height", "width"} <= size.keys():
            return int(size["height"]), int(size["width"])
        if "shortest_edge" in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
    return SIZE


def _image_size(images: Any) -> tuple[int, int]:
    return int(images.shape[-2]), int(images.shape[-1])


def _short(name: str) -> str:
    """Return the end of a path, or its parent if the end is `model`."""
    parts = [part for part in name.split("/") if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1]


# --- data


def open_dataset(name: str | None, opened: MeasuredModel, root: Path | None) -> "Dataset":
    """Return a dataset by name, of photos in a folder, of FILE.py:NAME, or of a run."""
    if name is None or name == "test":
        if opened.judged is None:
            raise UserError("Only a run has its own test set: give a dataset.")
        return opened.judged
    if is_recipe_file(name):
        from overt.data.dataset import Dataset

        found = load_object(name, "a dataset")
        if not isinstance(found, Dataset):
            raise UserError(
                f"{name} must return a dataset with name, split, batch and digest, got "
                f"{type(found).__name__}."
            )
        return found
    if Path(name).is_dir():
        return photo_folder(Path(name), opened.size)
    return named_dataset(name, opened, root)


def photo_folder(folder: Path, size: tuple[int, int]) -> "Dataset":
    """Return the photos of a folder, with fixation maps from its subfolder `maps` if present.

    A map has the name of its photo with the suffix .png.
    """
    from overt.data.custom import CustomMaps, maps_in_folder

    photos = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTO_SUFFIXES)
    if not photos:
        raise UserError(f"{folder} has no photos: no file ends in {', '.join(PHOTO_SUFFIXES)}.")
    maps = folder / MAP_FOLDER
    found = CustomMaps(folder.name, photos, maps_in_folder(maps), size)
    return found if maps.is_dir() else WithoutTarget(found)


class WithoutTarget:
    """A dataset without ground truth."""

    def __init__(self, data: "Dataset") -> None:
        self.data, self.name, self.split = data, data.name, data.split

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> "Batch":
        """Return the samples without target."""
        return replace(self.data.batch(indices), target=None)

    def digest(self) -> str:
        """Return the hash of the inputs."""
        return self.data.digest()


def named_dataset(name: str, opened: MeasuredModel, root: Path | None) -> "Dataset":
    """Return a dataset by name."""
    from overt import data
    from overt.data import catalog

    word, _, split = name.partition(":")
    catalog.find_dataset(word)
    if word not in catalog.WITHOUT_FOLDER:
        _require_dataset(word, root)
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
            return ResizedImages(data.Cifar10(where, split or "test"), size)
        case "cifar100":
            return ResizedImages(data.Cifar100(where, split or "test"), size)
        case "svhn":
            return ResizedImages(data.Svhn(where, split or "test"), size)
        case "stl10":
            return ResizedImages(data.Stl10(where, split or "test"), size)
        case "scenes":
            return data.Scenes(split or "test", catalog.SCENES_SEED, catalog.DEMO_SCENES["test"])
    return _object_dataset(word, split, size, where)


def _object_dataset(word: str, split: str, size: tuple[int, int], where: Path) -> "Dataset":
    """Return a dataset with boxes or masks of objects."""
    from overt.data import coco, pets, voc

    match word:
        case "coco":
            return coco.coco_objects(where, split or "val", size=size)
        case "voc":
            return voc.voc_boxes(where, split or "test", size=size)
        case "pets":
            return pets.oxford_pets(where, split or "test", size=size)
    raise UserError(
        f"{word} can only be used with a run that was trained on it: give a run folder instead "
        "of a model, or a folder of photos as data."
    )


def _require_dataset(name: str, root: Path | None) -> None:
    from overt.data import catalog

    if root is None:
        raise UserError(f"Give the folder of {name} with --data or OVERT_DATA.")
    if name not in catalog.available_datasets(root):
        raise UserError(
            f"The dataset {name} is not in {root}. {catalog.find_dataset(name).instructions}"
        )


class ResizedImages:
    """Images of one size, resized to that of a model."""

    def __init__(self, data: "Dataset", size: tuple[int, int]) -> None:
        self.data, self.size = data, size
        self.name, self.split = data.name, data.split

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int]) -> "Batch":
        """Return the samples, resized bilinearly if needed."""
        from torch.nn.functional import interpolate

        found = self.data.batch(indices)
        if found.images is None or _image_size(found.images) == self.size:
            return found
        large = interpolate(found.images.float(), self.size, mode="bilinear", antialias=True)
        geometry = None if found.geometry is None else found.geometry.resize(self.size)
        images = large.round().clamp(0, 255).to(found.images.dtype)
        return replace(found, images=images, geometry=geometry)

    def digest(self) -> str:
        """Return the hash of the original images and the size."""
        return f"{self.data.digest()}-{self.size[0]}x{self.size[1]}"
