"""Models on disk: a config.json of plain values and a safetensors file of weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from overt import files
from overt.errors import BadInput, Damaged


@runtime_checkable
class Configured(Protocol):
    """A module that can say with which values it was made."""

    def config(self) -> dict[str, Any]:
        """Plain JSON values from which the same module can be built again."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


Model = TypeVar("Model", bound=nn.Module)


def save(
    model: Configured, folder: Path | str, beside: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`, whole or not at all.

    `beside` are other files of plain values, by name, such as the settings of a processor.
    """
    weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    with files.writing(Path(folder)) as temporary:
        for name, values in {**(beside or {}), "config.json": model.config()}.items():
            files.write_json(temporary / name, values)
        files.write_tensors(temporary / "model.safetensors", weights)


def load(build: Callable[[dict[str, Any]], Model], folder: Path | str) -> Model:
    """Build a model from `config.json` and give it the weights beside it, in eval mode.

    The folder is verified first, and no code in it is ever run. Weights keep the number format
    that they were saved in.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() and not (folder / files.MANIFEST).exists():
        raise BadInput(f"{folder} holds no saved model: config.json is missing")
    files.verify(folder)
    config = files.read_json(folder / "config.json")
    weights = files.read_tensors(folder / "model.safetensors")
    formats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    try:
        model = build(config)
        if len(formats) == 1:
            model.to(formats.pop())
        model.load_state_dict(weights)
    except BadInput:
        raise
    except Exception as error:  # whatever a constructor makes of values that are not its own
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise Damaged(f"{folder} is not a model of this kind: {why}") from error
    return model.eval()
