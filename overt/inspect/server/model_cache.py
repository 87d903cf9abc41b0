"""Models of the server, loaded on first use, with a limit on how many stay in memory."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import CorruptFileError, RunError, UserError
from overt.experiments import inference_spec
from overt.experiments.inference_spec import FILE
from overt.experiments.recipe_file import RecipeFile
from overt.inspect import predict_answer
from overt.inspect.collate import PAIRED_NETWORK
from overt.inspect.load_model import PROCESSOR_FILES, TOKENIZER_FILES, load_model, locate_model
from overt.inspect.load_run import is_custom_run, load_custom_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import select_device
from overt.inspect.panels import MAPS
from overt.inspect.small_models import NAMES, PREFIX, boxes_of, find_small_model

DEMO_FOLDER = Path("runs") / "demo"
MAX_LOADED = 4  # models in memory
MAX_EXAMPLES = 12  # of a run's gallery


@dataclass(frozen=True)
class ServedModel:
    """A model by its displayed name, with its folder."""

    name: str
    folder: Path
    run: Path | None = None


class ModelCache:
    """Models by name; the least recently used is dropped if too many are loaded."""

    def __init__(
        self,
        offered: Sequence[ServedModel],
        device: str = "cpu",
        files: Sequence[RecipeFile] = (),
        root: Path | None = None,
    ) -> None:
        self.offered = {one.name: one for one in offered}
        self.device, self.files, self.root = device, files, root
        self._open: OrderedDict[str, LoadedModel] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """Names of all models, in the order of the command line."""
        return list(self.offered)

    def find(self, name: str) -> ServedModel:
        """Return the model of this name, or raise with the available names."""
        if name not in self.offered:
            raise UserError(f"unknown model '{name[:60]}': choose one of {self._names()}.")
        return self.offered[name]

    def load(self, name: str) -> LoadedModel:
        """Return the model, loaded on first use."""
        offered = self.find(name)
        if name not in self._open:
            if self._is_custom(offered):
                loaded = load_custom_model(
                    offered.run or offered.folder, name, self.files, self.root
                )
            else:
                loaded = load_model(offered.folder, name)
            loaded.model.to(select_device(self.device))
            self._open[name] = loaded
            while len(self._open) > MAX_LOADED:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def describe(self, name: str) -> dict[str, Any]:
        """Return what a model takes and which maps it has, without loading a model of overt."""
        offered = self.find(name)
        examples = offered.run is not None and (offered.run / "gallery").is_dir()
        known = self._spec(offered)
        able = model_capabilities(offered.folder) if known is None else spec_capabilities(known)
        return {"name": name, "examples": examples, **able}

    def _is_custom(self, offered: ServedModel) -> bool:
        run = offered.run
        return bool(self.files) and run is not None and is_custom_run(run, self.files)

    def _spec(self, offered: ServedModel) -> inference_spec.InferenceSpec | None:
        """Return the inference specification of a model; None for models from outside overt."""
        if self._is_custom(offered):
            return self.load(offered.name).spec
        saved = (offered.folder / FILE).is_file()
        return inference_spec.read_spec(offered.folder) if saved else None

    def describe_all(self) -> list[dict[str, Any]]:
        """Describe every model; one that cannot be read has only its name and `problem`."""
        found: list[dict[str, Any]] = []
        for name in self.names:
            try:
                found.append(self.describe(name))
            except (UserError, CorruptFileError, RunError, OSError) as error:
                found.append({"name": name, "problem": _as_unicode(" ".join(str(error).split()))})
        return found

    def examples(self, name: str) -> list[dict[str, Any]]:
        """Return a few samples of a model's run: text, image and truth; empty without a run."""
        from overt.viz.browse_page import EmbeddedPhotos
        from overt.viz.gallery_sample import load_gallery

        offered = self.find(name)
        if offered.run is None or not (offered.run / "gallery").is_dir():
            return []
        found, photos = [], EmbeddedPhotos(lossless=True)
        known = self._spec(offered)
        writes = known is not None and known.generates_text  # its text is output, not input
        samples = load_gallery(offered.run / "gallery")
        step = max(1, len(samples) // MAX_EXAMPLES)
        for sample in samples[::step][:MAX_EXAMPLES]:
            picture = None if sample.image is None else photos.add(sample.image)
            found.append(
                {
                    "text": None if writes else sample.text or None,
                    "truth": sample.truth if known and sample.truth in known.answers else None,
                    "picture": None if picture is None else photos.addresses[picture],
                    "boxes": boxes_of(sample),
                }
            )
        return found

    def _names(self) -> str:
        return ", ".join(self.names[:8]) + (", ..." if len(self.offered) > 8 else "")


def model_capabilities(folder: Path) -> dict[str, Any]:
    """Return the inputs and maps of the model in a folder, without loading it.

    For models from outside overt they follow from tokenizer and processor files.
    """
    if (folder / FILE).is_file():
        return spec_capabilities(inference_spec.read_spec(folder))
    config = io.read_json(folder / "config.json")
    kind = config if isinstance(config, dict) else {}
    # `search` needs a network of overt.
    maps = {name: about for name, about in MAPS.items() if name != "search"}
    if kind.get("kind") == "attached":
        maps = {"attention": MAPS["attention"]}
    elif "model_type" in kind:
        patterns = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
        reads = any(path.is_file() for path in patterns)
        looks = any((folder / name).is_file() for name in PROCESSOR_FILES)
        return {"maps": maps, "reads": reads, "looks": looks}
    elif "architecture" not in kind:  # of overt, without a specification; others are of timm
        maps = predict_answer.MAPS
    return {"maps": maps, "reads": False, "looks": True}


def spec_capabilities(known: inference_spec.InferenceSpec) -> dict[str, Any]:
    """Return the inputs and maps of a network with an inference specification."""
    return {
        "maps": predict_answer.available_maps(known),
        "reads": known.takes_text,
        "looks": known.pixels is not None,
        "boxed": known.uses_boxes,
        "writes": known.generates_text,
        **_text_field(known),
    }


def _text_field(known: inference_spec.InferenceSpec) -> dict[str, str]:
    """Return label and placeholder of the text field."""
    if known.generates_text:
        return {"wants": "Caption (empty: the model writes one)", "hint": ""}
    if known.network == PAIRED_NETWORK:
        return {"wants": "One or two captions, one per line", "hint": "a red circle"}
    if known.pixels is None:
        return {"wants": "Text", "hint": ""}
    return {"wants": "Question", "hint": "What is left of the red circle?"}


def find_models(names: Sequence[str], files: Sequence[RecipeFile] = ()) -> list[ServedModel]:
    """Return the models of a command line: runs, folders of runs, or models of `overt look`.

    Without names they are the models of the demo if it has been run, and else the installed ones.
    `files` define the recipes of runs that are
    not of overt.
    """
    if not names:
        names = [str(DEMO_FOLDER)] if DEMO_FOLDER.is_dir() else [PREFIX + one for one in NAMES]
    found: dict[str, ServedModel] = {}
    for name in names:
        for one in _find_models(name, files):
            found.setdefault(one.name, one)
    return list(found.values())


def _find_models(name: str, files: Sequence[RecipeFile]) -> list[ServedModel]:
    """Return the models of one command line name: a model, a run, or a folder of runs."""
    if name.startswith(PREFIX):
        run = find_small_model(name)
        return [ServedModel(run.name, run / "model", run)]
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        runs = [folder] if (folder / "results.json").is_file() else sorted(folder.iterdir())
        served = (run for run in runs if _is_served(run) or _is_served_from(run, files))
        found = sorted(served, key=_has_no_attention)
        if found:
            # A path such as `.` has no name of its own.
            whole = folder.resolve()
            return [
                ServedModel(
                    _as_unicode(whole.name if run == folder else run.name), run / "model", run
                )
                for run in found
            ]
        for run in runs:
            if (run / "results.json").is_file() and (run / "model" / FILE).is_file():
                inference_spec.read_values(run / "model")  # raises with the reason
        if any((run / "results.json").is_file() for run in runs):
            raise UserError(
                f"No run in {name} has a network that can be served: runs of your own recipe need "
                "its Python file, --recipe FILE.py:NAME, because code is never read from a folder; "
                "runs of an earlier version of overt lack an inference specification: run them "
                "again."
            )
    located = locate_model(name)
    return [ServedModel(_as_unicode(name.rstrip("/")), located, None)]


def _as_unicode(text: str) -> str:
    """Return a text with bytes of file names that are not UTF-8 escaped: JSON cannot have them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _has_no_attention(run: Path) -> bool:
    """Return whether a run has no attention, or is damaged; such a run is listed last."""
    try:
        config = io.read_json(run / "model" / "config.json")
    except (CorruptFileError, OSError):
        return True
    attend = config.get("attend") if isinstance(config, dict) else None
    return isinstance(attend, dict) and attend.get("kind") in ("blind", "mean")


def _is_served_from(run: Path, files: Sequence[RecipeFile]) -> bool:
    """Return whether a folder is an intact run of a recipe that one of the files defines."""
    try:
        return bool(files) and is_custom_run(run, files)
    except CorruptFileError:
        return False


def _is_served(run: Path) -> bool:
    """Return whether a folder is a finished run with a model that can be served.

    A damaged one is listed as well: `ModelCache.describe_all` states the problem.
    """
    model = run / "model"
    if not (run / "results.json").is_file() or not (model / "config.json").is_file():
        return False
    try:
        if (model / FILE).is_file():
            return bool(inference_spec.read_values(model))
        config = io.read_json(model / "config.json")
    except UserError:
        return False
    except (CorruptFileError, OSError):
        return True
    return isinstance(config, dict) and "model_type" in config
