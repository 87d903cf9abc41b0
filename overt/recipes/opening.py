"""A model that somebody else made, opened without running anything that it brings along.

A folder is read as data: JSON, safetensors and the files of a tokenizer. Pickled weights and Python
code are refused in a sentence. A name on the Hub is looked for in the local cache first.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes.spoken import FILE, Spoken

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # no pickle, no code
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OTHERS = ("*.h5", "*.msgpack", "*.onnx", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
_PARTS = {"transformers": ("models.auto.configuration_auto",), "huggingface_hub": ("constants",)}
PICTURES = ("preprocessor_config.json", "processor_config.json")
_KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_ELSEWHERE = re.compile("pretrained.*|checkpoint_path|cache_dir")  # what timm would go and fetch


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and what turns pictures and texts into its inputs.

    `processor` takes both, where the folder says how; `transform` is what timm does to a picture;
    `spoken` is how a network of ours is asked. `notes` are what a reader of any result should know.
    """

    name: str
    model: Any
    processor: Any = None
    tokenizer: Any = None
    image_processor: Any = None
    transform: Callable[[Any], Any] | None = None
    notes: tuple[str, ...] = ()
    spoken: Spoken | None = None


def is_model(name: str) -> bool:
    """Whether this is the name of a model, or a folder that holds one and no run."""
    if name.startswith(("hf:", "timm:")):
        return True
    return (Path(name) / "config.json").is_file() and not (Path(name) / "results.json").exists()


def locate(name: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of MODEL, with whole weights in safetensors; fetched from the Hub if it may be."""
    home, colon, rest = name.partition(":")
    if colon and home in ("hf", "timm"):
        if not _NAME.fullmatch(rest):
            raise BadInput(f"'{rest}' is no name on the Hub; it looks like google/vit-base.")
        return _from_hub(rest if home == "hf" else _timm_repository(rest), say)
    folder = Path(name)
    if (folder / "results.json").is_file() and (folder / "model").is_dir():
        folder = folder / "model"  # that of a finished run
    if not folder.is_dir():
        raise BadInput(
            f"'{name}' is not a folder; name one that holds a config.json and safetensors, or say "
            f"hf:NAME or timm:NAME for a model on the Hub."
        )
    problem = lacking(folder)
    if problem is not None:
        raise BadInput(problem)
    return folder


def lacking(folder: Path) -> str | None:
    """What keeps a folder from being read as a model, in a sentence; None when nothing does."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            return f"{folder} holds an adapter, not a model; merge it into its model and save that."
        runs = sorted(path.parent.name for path in folder.glob("*/results.json"))
        if runs:
            return (
                f"{folder} holds runs and no model; name one of them, such as {folder / runs[0]}."
            )
        return f"{folder} holds no model: it has no config.json."
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = files.read_json(index)
        parts = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(parts, dict):
            return f"{index} does not say which file holds which weights."
        gone = sorted({str(part) for part in parts.values()} - {p.name for p in folder.iterdir()})
        return f"{folder} lacks {gone[0]}, which its index names." if gone else None
    if any(folder.glob("*.safetensors")):
        return None
    for patterns, what in ((_PICKLES, "a pickle, which runs code when it is read"), (_OTHERS, "")):
        found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
        if found:
            more = f", {what}" if what else ""
            return (
                f"{folder} keeps its weights in {found[0]}{more}; save them as safetensors, with "
                "save_pretrained, where you trust the file."
            )
    return f"{folder} has a config.json and no weights: no file ends in .safetensors."


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    """The newest snapshot of a repository: from the cache, else from the Hub unless it is off."""
    hub = _needs("huggingface_hub")
    get = f"`hf download {name}`"
    cache = hub.constants.HF_HUB_CACHE
    missing = f"{name} is not in the cache of Hugging Face models ({cache})"
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not there at all
        pass
    else:
        problem = lacking(folder)
        if problem is None:
            return folder
        missing = f"of {name} the cache holds only a part ({problem.rstrip('.')})"
    if hub.constants.HF_HUB_OFFLINE:
        raise BadInput(
            f"{missing}, and HF_HUB_OFFLINE forbids to ask for it; run {get} where there is a "
            "connection, or name a local folder."
        )
    say(f"downloading {name} ...")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=WANTED, ignore_patterns=["*/*"]))
    except Exception as error:  # no connection, no such name, no right to it: a dozen kinds
        raise BadInput(
            f"{missing}, and the Hub did not give it ({_reason(error)}); run {get} where there is "
            "a connection, or name a local folder."
        ) from error
    problem = lacking(folder)
    if problem is not None:
        raise BadInput(f"{name} cannot be used: {problem}")
    return folder


def _timm_repository(name: str) -> str:
    """The repository of a timm model, whose tag may be left out."""
    timm = _needs("timm")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.partition('.')[0][:12]}*")[:3])
        raise BadInput(f"timm has no model '{name}'" + (f"; near it: {near}." if near else "."))
    known = timm.get_pretrained_cfg(name)
    repository = getattr(known, "hf_hub_id", None)
    if not repository:
        raise BadInput(f"timm knows no weights on the Hub for '{name}'.")
    return str(repository)


def open_model(folder: Path, name: str = "") -> Subject:
    """The model in a folder that `locate` has found, in eval mode, with its processors."""
    config = files.read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise Damaged(f"{folder / 'config.json'} is not the description of a model.")
    name = name or str(folder)
    if config.get("kind") == "attached":
        from overt.recipes.attached import open_attached

        with quiet(), _opening(folder):
            return open_attached(folder, name)
    if (folder / FILE).is_file():
        from overt.recipes.own import open_spoken

        return open_spoken(folder, name)
    if "model_type" not in config:
        from overt.recipes.ltpa.looking import is_own, open_own

        if is_own(config):
            with _opening(folder):
                return open_own(folder, name, config)
    if "architecture" in config and "model_type" not in config:
        return _open_timm(folder, config, name)
    if "model_type" not in config:
        raise BadInput(
            f"{folder / 'config.json'} names no model_type and no architecture, so it is neither a "
            "Hugging Face nor a timm model; a run whose network cannot be asked is shown by "
            "`overt report`."
        )
    return _open_transformers(folder, config, name)


def _open_transformers(folder: Path, config: dict[str, Any], name: str) -> Subject:
    transformers = _needs("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if config["model_type"] not in known:
        brought = " brings Python code of its own, which is not run, and" if _code(config) else ""
        raise BadInput(
            f"{folder}{brought} is of the type '{config['model_type']}', which transformers "
            f"{transformers.__version__} does not know."
        )
    _refuse_kernels(folder, config)
    with quiet(), _opening(folder):
        settings = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        made, info = _class(transformers, settings).from_pretrained(
            folder,
            config=settings,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        tokenizer = _reader(transformers.AutoTokenizer, folder, TOKENIZERS)
        image_processor = _reader(transformers.AutoImageProcessor, folder, PICTURES)
        processor = None
        if tokenizer is not None and image_processor is not None:
            processor = _reader(transformers.AutoProcessor, folder, PICTURES)
    notes = []
    absent = sorted(info.get("missing_keys") or ())
    if absent:
        notes.append(
            f"{len(absent)} weights are not in the folder and are random, the first of them "
            f"{absent[0]}."
        )
    return Subject(name, made.eval(), processor, tokenizer, image_processor, notes=tuple(notes))


def _refuse_kernels(folder: Path, config: Any) -> None:
    """Refuse settings that name a repository to take attention from: its code would be run."""
    inside = config.values() if isinstance(config, dict) else config
    if isinstance(config, dict):
        for key in _KERNELS:
            named = config.get(key)
            if isinstance(named, str) and not re.fullmatch(r"\w*", named):
                raise BadInput(
                    f"{folder / 'config.json'} takes its attention from '{named[:60]}', whose code "
                    f"is not run; remove {key} from it."
                )
    for one in inside if isinstance(inside, Iterable) and not isinstance(inside, str) else ():
        _refuse_kernels(folder, one)


def _class(transformers: Any, config: Any) -> Any:
    """The class that the weights were saved from, or the bare model of their type."""
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(architecture), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModel


def _reader(auto: Any, folder: Path, patterns: tuple[str, ...]) -> Any:
    """What an Auto class makes of a folder; None when it has none of the files."""
    if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
        return None
    try:
        return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError):  # not of this kind, or a library lacks
        return None


def _open_timm(folder: Path, config: dict[str, Any], name: str) -> Subject:
    made = config.get("model_args") or {}
    if not re.fullmatch(r"[\w.]+", str(config["architecture"])) or not isinstance(made, dict):
        raise BadInput(f"{folder / 'config.json'} names no architecture of timm.")
    elsewhere = sorted(key for key in made if _ELSEWHERE.fullmatch(key))
    if elsewhere:
        raise BadInput(
            f"{folder / 'config.json'} asks for weights from elsewhere ({elsewhere[0]}); those "
            "beside it are taken, and no others: remove it from model_args."
        )
    timm = _needs("timm")
    weights = sorted(folder.glob("*.safetensors"))[0]
    with _opening(folder):
        model = timm.create_model(
            str(config["architecture"]),
            pretrained=False,
            num_classes=int(config.get("num_classes", 1000)),
            pretrained_cfg_overlay=config.get("pretrained_cfg"),
            **made,
        )
        model.load_state_dict(files.read_tensors(weights))
        how = dict(timm.data.resolve_model_data_config(model))
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        if size is not None:  # a model may be made for another size than its weights were
            how["input_size"] = (how["input_size"][0], *size)
        transform = timm.data.create_transform(**how, is_training=False)
    return Subject(name, model.eval(), transform=transform)


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Whatever a library makes of a broken folder is one sentence that names the folder."""
    try:
        yield
    except (BadInput, Damaged, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise Damaged(f"{folder} cannot be opened as a model: {_reason(error)}.") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says of its own accord; what matters is in the notes."""
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


def _needs(package: str) -> Any:
    try:
        for part in _PARTS.get(package, ()):  # what these packages do not import by themselves
            importlib.import_module(f"{package}.{part}")
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a broken torchvision raises the latter
        raise BadInput(
            f"{package} cannot be imported ({_reason(error)}); pip install {package}."
        ) from error


def _code(config: dict[str, Any]) -> bool:
    return "auto_map" in config


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0].strip().rstrip(".") if lines else type(error).__name__)[:200]
