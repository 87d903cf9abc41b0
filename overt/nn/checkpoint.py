"""Save and load models: config.json with plain values and a safetensors file with the weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from overt import io
from overt.errors import CorruptFileError, RunError, UserError, missing_resource
from overt.nn.config_checks import check_config, limit_allocations


@runtime_checkable
class HasConfig(Protocol):
    """Protocol of a module that can return its constructor values."""

    def config(self) -> dict[str, Any]:
        """Return the JSON values from which the same module can be built."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


ModelT = TypeVar("ModelT", bound=nn.Module)


def save(
    model: HasConfig, folder: Path | str, extra_files: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write `config.json` and `model.safetensors` atomically.

    Args:
        model: module with `config` and `state_dict`.
        folder: target folder; an existing one is replaced.
        extra_files: further JSON files by name, such as the settings of a processor.
    """
    # clone: safetensors rejects tensors that share memory, such as tied weights
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    with io.atomic_folder(Path(folder)) as temporary:
        for name, values in {**(extra_files or {}), "config.json": model.config()}.items():
            io.write_json(temporary / name, values)
        io.write_tensors(temporary / "model.safetensors", weights)


def load(build: Callable[[dict[str, Any]], ModelT], folder: Path | str) -> ModelT:
    """Build a model from `config.json` and load its weights, in eval mode.

    The folder is verified first, and no code in it is run. Weights keep their saved dtype.

    Args:
        build: builds the model from the config.
        folder: folder written by `save`.

    Raises:
        UserError: the folder has no saved model.
        CorruptFileError: config or weights do not fit the model.
        RunError: not enough memory.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() and not (folder / io.MANIFEST).exists():
        raise UserError(f"{folder} is not a saved model: config.json is missing")
    # checksums first: nothing of a damaged or changed folder is used
    io.verify(folder)
    config = io.read_json(folder / "config.json")
    check_config(folder / "config.json", config)
    weights = io.read_tensors(folder / "model.safetensors")
    formats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    try:
        with limit_allocations("its config.json", [tensor.numel() for tensor in weights.values()]):
            model = build(config)
        # a model saved in 16 bits is built in float32: convert before loading, so that nothing is
        # rounded
        if len(formats) == 1:
            model.to(formats.pop())
        model.load_state_dict(weights)
    except UserError:
        raise
    except CorruptFileError as error:
        raise CorruptFileError(f"{folder} is not a model of this kind: {error}") from error
    except Exception as error:  # whatever a constructor makes of values that are not its own
        if lacked := missing_resource(error):
            raise RunError(f"{folder} could not be loaded: {lacked}.") from error
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise CorruptFileError(f"{folder} is not a model of this kind: {why}") from error
    return model.eval()
