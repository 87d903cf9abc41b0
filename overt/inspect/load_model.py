"""Loading models without running code that they bring along.

A folder is read as data: JSON, safetensors and tokenizer files. Pickled weights and Python code are
refused. Hub models are taken from the local cache first.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError, missing_resource
from overt.experiments.inference_spec import FILE
from overt.inspect.attached_view import load_attached
from overt.inspect.inputs import first_line
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.ltpa_networks import is_ltpa_config, load_ltpa
from overt.inspect.predict_answer import load_network
from overt.inspect.small_models import PREFIX, find_small_model

# neither pickles nor code
DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OTHER_WEIGHTS = ("*.h5", "*.msgpack", "*.onnx", "*.gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
_SUBMODULES = {
    "transformers": ("models.auto.configuration_auto",),
    "huggingface_hub": ("constants",),
}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# arguments with which timm would download weights
_REMOTE_WEIGHTS = re.compile("pretrained.*|checkpoint_path|cache_dir")


def is_model(name: str) -> bool:
    """Return whether this is a Hub name, or a folder with a model and no run."""
    if name.startswith(("hf:", "timm:", PREFIX)):
        return True
    return (Path(name) / "config.json").is_file() and not (Path(name) / "results.json").exists()


def locate_model(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of a model with safetensors weights, downloaded from the Hub if allowed.

    Raises:
        UserError: if the model does not exist.
    """
    home, colon, rest = name.partition(":")
    if colon and home in ("hf", "timm"):
        # The name becomes part of a URL and of a path in the cache.
        if not _NAME.fullmatch(rest):
            raise UserError(f"'{rest}' is not a Hub name; expected a name like google/vit-base.")
        return _from_hub(rest if home == "hf" else _timm_repository(rest), say)
    folder = find_small_model(name) if name.startswith(PREFIX) else Path(name)
    if (folder / "results.json").is_file() and (folder / "model").is_dir():
        folder = folder / "model"  # of a finished run
    if not folder.is_dir():
        raise UserError(
            f"'{name}' is not a folder: give a folder with config.json and safetensors, or "
            "hf:NAME or timm:NAME for a model on the Hub, or overt:NAME for an installed one."
        )
    problem = model_folder_problem(folder)
    if problem is not None:
        raise UserError(problem)
    return folder


def model_folder_problem(folder: Path) -> str | None:
    """Return why a folder cannot be loaded as a model, or None."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return f"{folder} has an adapter, not a model: merge it into its model and save that."
        runs = sorted(path.parent.name for path in folder.glob("*/results.json"))
        if runs:
            return f"{folder} has runs, not a model: give one of them, such as {folder / runs[0]}."
        return f"{folder} is not a model folder: it has no config.json."
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = io.read_json(index)
        parts = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(parts, dict):
            return f"{index} has no weight_map."
        gone = sorted({str(part) for part in parts.values()} - {p.name for p in folder.iterdir()})
        return f"{folder} lacks {gone[0]}, which its index lists." if gone else None
    if any(folder.glob("*.safetensors")):
        return None
    for patterns, what in (
        (_PICKLES, "a pickle, which can run code when loaded"),
        (_OTHER_WEIGHTS, ""),
    ):
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        if found:
            more = f", {what}" if what else ""
            return (
                f"{folder} has its weights in {found[0]}{more}: if you trust the file, convert "
                "it to safetensors with save_pretrained."
            )
    return f"{folder} has a config.json but no .safetensors file."


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    """Return the newest snapshot of a repository: from the cache, else from the Hub."""
    hub = _import_package("huggingface_hub")
    get = f"`hf download {name}`"
    cache = hub.constants.HF_HUB_CACHE
    missing = f"{name} is not in the cache of Hugging Face models ({cache})"
    # The cache first: no request is sent, and the weights stay the same.
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache
        pass
    else:
        problem = model_folder_problem(folder)
        if problem is None:
            return folder
        missing = f"{name} is incomplete in the cache ({problem.rstrip('.')})"
    if hub.constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{missing}, and HF_HUB_OFFLINE is set: run {get} with a connection, or give a "
            "local folder."
        )
    say(f"downloading {name} ...")
    try:
        # Weights and processors are at the top; subfolders have exports for other libraries.
        folder = Path(
            hub.snapshot_download(name, allow_patterns=DOWNLOAD_PATTERNS, ignore_patterns=["*/*"])
        )
    except Exception as error:  # no connection, unknown name, no access: many exception types
        raise UserError(
            f"{missing}, and the download failed ({_reason(error)}): run {get} with a connection, "
            "or give a local folder."
        ) from error
    problem = model_folder_problem(folder)
    if problem is not None:
        raise UserError(f"{name} cannot be used: {problem}")
    return folder


def _timm_repository(name: str) -> str:
    """Return the Hub repository of a timm model; the tag may be left out."""
    timm = _import_package("timm")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.partition('.')[0][:12]}*")[:3])
        raise UserError(f"timm has no model '{name}'" + (f"; similar: {near}." if near else "."))
    known = timm.get_pretrained_cfg(name)
    repository = getattr(known, "hf_hub_id", None)
    if not repository:
        raise UserError(f"timm has no Hub weights for '{name}'.")
    return str(repository)


def load_model(folder: Path, name: str = "") -> LoadedModel:
    """Load the model in a folder of `locate_model`, in eval mode, with its processors."""
    config = io.read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise CorruptFileError(f"{folder / 'config.json'} is not a JSON object.")
    name = name or str(folder)
    if config.get("kind") == "attached":
        with quiet_transformers(), _loading_errors(folder):
            return load_attached(folder, name)
    if (folder / FILE).is_file():
        return load_network(folder, name)
    if "model_type" not in config and is_ltpa_config(config):
        with _loading_errors(folder):
            return load_ltpa(folder, name, config)
    if config.get("kind") == "wrapped":
        with quiet_transformers(), _loading_errors(folder):
            return _load_wrapped(folder, config, name)
    if "architecture" in config and "model_type" not in config:
        return _load_timm(folder, config, name)
    if "model_type" not in config:
        raise UserError(
            f"{folder / 'config.json'} has neither model_type nor architecture: it is not a "
            "Hugging Face or timm model; `overt report` shows runs that cannot be queried."
        )
    return _load_transformers(folder, config, name)


def _load_transformers(folder: Path, config: dict[str, Any], name: str) -> LoadedModel:
    transformers = _import_package("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    # Only types that transformers itself implements: `auto_map` refers to Python code in the
    # folder.
    if not isinstance(config["model_type"], str) or config["model_type"] not in known:
        own_code = "auto_map" in config
        brought = " needs its own Python code, which is not run, and" if own_code else ""
        named = str(config["model_type"])[:60]
        raise UserError(
            f"{folder}{brought} has model_type '{named}', which transformers "
            f"{transformers.__version__} does not support."
        )
    from overt.nn.config_checks import (
        check_config,
        check_processor,
        limit_allocations,
        tensor_sizes,
    )

    # A config may request layers of any size: check its numbers, and limit the allocations of the
    # build to what the weights in the folder need.
    check_config(folder / "config.json", config)
    for path in (folder / one for one in PROCESSOR_FILES):
        if path.is_file():
            check_processor(path, io.read_json(path))
    with (
        quiet_transformers(),
        _loading_errors(folder),
        limit_allocations(str(folder), tensor_sizes(folder)),
    ):
        settings = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        made, info = _model_class(transformers, settings).from_pretrained(
            folder,
            config=settings,
            # Never a pickle, even if there is one beside it.
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = _load_processor(transformers.AutoTokenizer, folder, TOKENIZER_FILES)
        image_processor = _load_processor(transformers.AutoImageProcessor, folder, PROCESSOR_FILES)
        processor = None
        if tokenizer is not None and image_processor is not None:
            processor = _load_processor(transformers.AutoProcessor, folder, PROCESSOR_FILES)
    notes = []
    absent = sorted(info.get("missing_keys") or ())
    if absent:
        notes.append(
            f"{len(absent)} weights are missing and randomly initialized, the first is {absent[0]}."
        )
    return LoadedModel(name, made.eval(), processor, tokenizer, image_processor, notes=tuple(notes))


def _model_class(transformers: Any, config: Any) -> Any:
    """Return the class of the saved architecture, or AutoModel."""
    for architecture in getattr(config, "architectures", None) or ():
        # The name comes from the config: only a model class may be called.
        found = getattr(transformers, str(architecture), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModel


def _load_processor(auto: Any, folder: Path, patterns: tuple[str, ...]) -> Any:
    """Load a tokenizer or processor with an Auto class; None if the folder has no files for it."""
    if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
        return None
    try:
        return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError):  # another type, or a missing library
        return None


def _load_wrapped(folder: Path, config: dict[str, Any], name: str) -> LoadedModel:
    """Load a model that `wrap` saved, if it is a timm model, which can be rebuilt."""
    from overt.nn.inner_checkpoint import load_saved_model

    described = config.get("model")
    library = described.get("library") if isinstance(described, dict) else None
    if library != "timm":
        raise UserError(
            f"{folder} has a model that only its own code can build: name the Python file of its "
            "recipe, with --recipe FILE.py:NAME (code is never read from a folder), or open it in "
            "Python with WrappedModel.from_pretrained(folder, model=...)."
        )
    timm = _import_package("timm")
    model = load_saved_model(folder).eval()
    how = timm.data.resolve_model_data_config(model)
    return LoadedModel(name, model, transform=timm.data.create_transform(**how, is_training=False))


def _load_timm(folder: Path, config: dict[str, Any], name: str) -> LoadedModel:
    made = config.get("model_args") or {}
    if not re.fullmatch(r"[\w.]+", str(config["architecture"])) or not isinstance(made, dict):
        raise UserError(f"{folder / 'config.json'} has no valid timm architecture.")
    elsewhere = sorted(key for key in made if _REMOTE_WEIGHTS.fullmatch(key))
    if elsewhere:
        raise UserError(
            f"{folder / 'config.json'} refers to other weights ({elsewhere[0]}): remove it from "
            "model_args; only the weights in the folder are loaded."
        )
    timm = _import_package("timm")
    weights = sorted(folder.glob("*.safetensors"))[0]
    from overt.nn.config_checks import (
        check_config,
        check_processor,
        limit_allocations,
        tensor_sizes,
    )

    check_config(folder / "config.json", config)
    check_processor(folder / "config.json", config)
    with _loading_errors(folder):
        with limit_allocations(str(folder), tensor_sizes(folder)):
            model = timm.create_model(
                str(config["architecture"]),
                pretrained=False,
                num_classes=int(config.get("num_classes", 1000)),
                pretrained_cfg_overlay=config.get("pretrained_cfg"),
                **made,
            )
        model.load_state_dict(io.read_tensors(weights))
        how = dict(timm.data.resolve_model_data_config(model))
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if size is not None:  # the input size may differ from the pretrained one
            how["input_size"] = (how["input_size"][0], *size)
        transform = timm.data.create_transform(**how, is_training=False)
    return LoadedModel(name, model.eval(), transform=transform)


@contextmanager
def _loading_errors(folder: Path) -> Iterator[None]:
    """Turn any error of a library into one line that names the folder."""
    try:
        yield
    except (UserError, CorruptFileError, RunError, RunInterrupted, MemoryError):
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a Rust panic in a tokenizer is a BaseException
        if lacked := missing_resource(error):
            raise RunError(f"{folder} could not be loaded: {lacked}.") from error
        raise CorruptFileError(
            f"{folder} cannot be loaded as a model: {_reason(error)}."
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the logging and progress bars of transformers."""
    if "transformers" not in sys.modules:
        yield
        return
    logging = importlib.import_module("transformers.utils.logging")
    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


def _import_package(package: str) -> Any:
    try:
        for part in _SUBMODULES.get(package, ()):  # not imported by the packages themselves
            importlib.import_module(f"{package}.{part}")
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a broken torchvision raises RuntimeError
        raise UserError(
            f"{package} cannot be imported ({_reason(error)}); pip install {package}."
        ) from error


def _reason(error: BaseException) -> str:
    return (first_line(error) or type(error).__name__)[:200]
