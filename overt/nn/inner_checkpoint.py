"""Save and load the model inside a wrapper (`wrap`, `prune_tokens`).

A Hugging Face model is saved with its own library, so other tools can open the folder. Any other
model is saved as weights and a config.json that describes how to build it, which works for models
of timm and overt. A custom module must be passed in again when loading.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from overt import io
from overt.errors import CorruptFileError, RunError, UserError, missing_resource
from overt.nn.backbone_attention.backbones import build_model, describe_model
from overt.nn.config_checks import check_config, limit_allocations, tensor_sizes

KIND = "wrapped"  # identifies the folder in config.json
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_inner_model(
    model: nn.Module,
    folder: Path | str,
    preprocessors: Collection[Any] = (),
    extra_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a model into a folder atomically.

    Args:
        model: the model inside a wrapper.
        folder: target folder; an existing one is replaced.
        preprocessors: its processor and tokenizer; written if they have `save_pretrained`.
        extra_files: further JSON files, by name.
    """
    with io.atomic_folder(Path(folder)) as temporary, quiet_transformers():
        if _is_transformers(model):
            model.save_pretrained(temporary, safe_serialization=True)  # type: ignore[operator]
        else:
            weights = {n: one.detach().cpu().clone() for n, one in model.state_dict().items()}
            io.write_json(temporary / CONFIG, {"kind": KIND, "model": describe_model(model)})
            io.write_tensors(temporary / WEIGHTS, weights)
        for one in preprocessors:
            if hasattr(one, "save_pretrained"):
                one.save_pretrained(temporary)
        for name, values in (extra_files or {}).items():
            io.write_json(temporary / name, values)


def load_inner_weights(model: nn.Module, folder: Path | str) -> None:
    """Load the weights of a folder written by `save_inner_model` into a model.

    Raises:
        UserError: the folder has the weights of a different model.
    """
    folder = Path(folder)
    io.verify(folder)
    weights = io.read_tensors(folder / WEIGHTS)
    own = model.state_dict()
    # safetensors saves tied weights under one name: another name with the same memory is not
    # missing
    there = {own[name].data_ptr() for name in weights if name in own}
    absent = [name for name in own if name not in weights and own[name].data_ptr() not in there]
    if _is_transformers(model) and (absent or not own.keys() >= weights.keys()):
        check_config(folder / CONFIG, io.read_json(folder / CONFIG))
        with (
            quiet_transformers(),
            limit_allocations(str(folder), tensor_sizes(folder)),
        ):  # some names differ on disk
            found: Any = type(model)
            weights = found.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            ).state_dict()
        absent = [name for name in own if name not in weights]
    strange = [name for name in weights if name not in own]
    if absent or strange:
        raise UserError(
            f"{folder} does not have the weights of a {type(model).__name__}: "
            f"{(absent or strange)[0]} is {'missing' if absent else 'unexpected'}."
        )
    try:
        model.load_state_dict(weights, strict=False)  # tied weights are saved once
    except RuntimeError as error:
        if lacked := missing_resource(error):
            raise RunError(f"{folder} could not be loaded: {lacked}.") from error
        why = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"{folder} has the weights of a different model: {why}") from error


def load_saved_model(folder: Path | str) -> nn.Module:
    """Build the model of a folder written by `save_inner_model`, with its weights.

    No code of the folder is run.

    Raises:
        UserError: the model is a custom class that only the caller can build.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a saved model: config.json is missing")
    io.verify(folder)
    config = io.read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CorruptFileError(f"{folder / CONFIG} does not describe a model.")
    check_config(folder / CONFIG, config)
    described = config.get("model")
    if config.get("kind") == KIND and isinstance(described, dict):
        with limit_allocations(str(folder), tensor_sizes(folder)):
            model = build_model(described)
        load_inner_weights(model, folder)
        return model
    import transformers

    # the class is looked up in transformers itself: code in the folder is not run
    for name in config.get("architectures") or ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            with quiet_transformers(), limit_allocations(str(folder), tensor_sizes(folder)):
                made: nn.Module = kind.from_pretrained(
                    folder, local_files_only=True, use_safetensors=True
                )
            return made
    raise UserError(f"{folder} does not name a known model class; pass the module with model=...")


def _is_transformers(model: nn.Module) -> bool:
    """Return whether the class itself, not only a base class, is defined in transformers."""
    return type(model).__module__.split(".")[0] == "transformers" and hasattr(model, "config")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers, if it is installed."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
