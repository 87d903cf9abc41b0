"""Check untrusted configs before building a model from them.

A config of a few bytes can describe a model of any size, and can name attention kernels whose code
would be run. `limit_allocations` compares the model under construction with the weights saved
beside the config. It raises before memory for a parameter beyond the limit is allocated, and when
there are too many tensors.
"""

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from overt import io
from overt.errors import CorruptFileError, UserError

SPARE_ELEMENTS = 2**26  # 256 MB of float32: a new head, masks and tables that no file contains
SPARE_TENSORS = 4096
MAX_COPIES = 4  # tied weights are allocated once per use, and some modules twice
MAX_LAYERS = 10_000
MAX_LABELS = 1_000_000
_IMPLEMENTATION_KEY = re.compile(r"_?\w*_implementation(_internal)?")  # of attention, of experts
_LAYER_KEY = re.compile(r"\w*(layers?|blocks?|depths?)|attention_types", re.IGNORECASE)
_LABEL_KEYS = ("num_labels", "num_classes")
MAX_SIDE, MAX_AREA = 2**14, 2**27  # of a processed image, in pixels
MAX_CANVAS = 2**24  # pixels of the canvas that every image is brought to
MAX_SHORTEST_EDGE = 1536  # the longer side may be 100 times as long: data.images.MAX_RATIO
MAX_TILES = 256  # of an image that is cut into tiles
MIN_CROP = 0.1  # share that is cut out: an image is enlarged by its inverse first
_SIZE_KEYS = {
    *("size", "crop_size", "pad_size", "height", "width", "shortest_edge", "longest_edge"),
    *("max_height", "max_width", "input_size", "img_size", "image_size"),
    *("image_grid_pinpoints", "max_image_size", "test_input_size"),
}
_CANVAS_KEYS = _SIZE_KEYS - {"longest_edge", "max_height", "max_width", "max_image_size"}
_DIVISOR_KEY = re.compile(r"\w*(size_divisor|multiple_of|divisibility)")
_TILE_KEY = re.compile(r"(min|max|num)_\w*(tiles|crops|splits)|min_(num_)?patches")
_PATCH_KEY = re.compile(r"max_(num_)?patches")
_CROP_KEY = re.compile(r"\w*crop_(pct|percentage)")
_FACTORIES = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.empty_strided),
        *(torch.rand, torch.randn, torch.randint, torch.arange, torch.linspace, torch.logspace),
    }
)
_COPIES = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.Tensor.new_empty, torch.Tensor.new_zeros),
        *(torch.Tensor.new_ones, torch.Tensor.new_full),
    }
)
_GROWING = {
    "repeat",
    "tile",
    "repeat_interleave",
    "one_hot",
    "pad",
    "interpolate",
    "cartesian_prod",
}


def check_config(path: Path, config: Any) -> None:
    """Raise if a config names kernels from a repository, or too many layers or labels.

    Args:
        path: the config file, for the message.
        config: its values; nested configs are checked too.

    Raises:
        UserError: an attention implementation or a backbone is a name on the Hub, anywhere in the
            config.
        CorruptFileError: more than 10,000 layers or 1,000,000 labels.
    """
    # a work list, not recursion: a deeply nested config would exhaust the stack
    todo: list[Any] = [config]
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            for key, value in one.items():
                if _IMPLEMENTATION_KEY.fullmatch(str(key)):
                    _check_implementation(path, str(key), value)
                if key == "backbone" and isinstance(value, str) and "/" in value:
                    raise UserError(
                        f"{path}: backbone is '{value[:60]}', another model on the Hub; only the "
                        "files of this folder are read: use backbone_config in the config."
                    )
                _check_count(path, str(key), value)
            todo += one.values()
        elif isinstance(one, list | tuple):
            todo += one


def _check_implementation(path: Path, key: str, value: Any) -> None:
    """Raise if an implementation is a repository name: its code would be run."""
    for named in _strings(value):
        if not re.fullmatch(r"\w*", named):
            raise UserError(
                f"{path}: {key} is '{named[:60]}', a repository whose code overt does not run; "
                f"remove {key} from the config."
            )


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a nested value; keys of mappings are left out."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple):
            todo += one


def _check_count(path: Path, key: str, value: Any) -> None:
    if key not in _LABEL_KEYS and not _LAYER_KEY.fullmatch(key):
        return
    most = MAX_LABELS if key in _LABEL_KEYS else MAX_LAYERS
    for one in _numbers(value):
        _require(path, key, one, most)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in nested lists; mappings are left out."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, int | float):
            yield one
        elif isinstance(one, list | tuple):
            todo += one


def _require(path: Path, what: str, value: int | float, most: int) -> None:
    # not `value > most`: NaN fails every comparison and must raise
    if not value <= most:
        raise CorruptFileError(f"{path}: {what} is {value:g}, expected at most {most}.")


def check_processor(path: Path, config: Any) -> None:
    """Raise if the settings of an image processor would produce unreasonably large images.

    Args:
        path: the settings file, for the message.
        config: its values.

    Raises:
        CorruptFileError: a side of more than 16,384 pixels, a canvas of more than 2 ** 24 pixels,
            a shortest edge of more than 1,536 pixels without a longest one, more than 256 tiles,
            or a crop of less than a tenth.
    """
    by_area = isinstance(config, Mapping) and "merge_size" in config  # edges are areas there
    todo: list[tuple[str, Any]] = [("", config)]
    while todo:
        key, one = todo.pop()
        if isinstance(one, Mapping):
            if "height" in one and "width" in one:
                _check_area(path, "height x width", one["height"], one["width"])
            edge = one.get("shortest_edge")
            if isinstance(edge, int | float) and not one.get("longest_edge") and not by_area:
                _require(path, "shortest_edge", edge, MAX_SHORTEST_EDGE)
            _check_tiles(path, one)
            todo += [(str(name), value) for name, value in one.items()]
        elif isinstance(one, list | tuple):
            if key in _CANVAS_KEYS and len(one) >= 2:  # (height, width), after the channels
                _check_area(path, key, one[-2], one[-1])
            for value in one:
                if key in _SIZE_KEYS and isinstance(value, int | float):
                    _require(path, key, value, MAX_SIDE)
                else:
                    todo.append((key, value))
        elif isinstance(one, int | float):
            _check_size(path, key, one, by_area)


def _check_size(path: Path, key: str, value: int | float, by_area: bool) -> None:
    """Raise if one number of an image processor is too large."""
    if by_area and key.endswith("_edge"):
        _require(path, key, value, MAX_CANVAS if key == "shortest_edge" else MAX_AREA)
    elif key in _SIZE_KEYS:
        square = key in _CANVAS_KEYS and key not in ("height", "width")  # or a shorter side
        longest = MAX_SIDE // 2 if key == "longest_edge" else MAX_SIDE
        _require(path, key, value, math.isqrt(MAX_CANVAS) if square else longest)
    elif key == "min_pixels":
        _require(path, key, value, MAX_CANVAS)
    elif _DIVISOR_KEY.fullmatch(key):
        _require(path, key, value, math.isqrt(MAX_CANVAS))
    elif _TILE_KEY.fullmatch(key):
        _require(path, key, value, MAX_TILES)
    elif _CROP_KEY.fullmatch(key) and not value >= MIN_CROP:
        raise CorruptFileError(f"{path}: {key} is {value:g}, expected at least {MIN_CROP}.")


def _check_area(path: Path, what: str, height: Any, width: Any) -> None:
    known = isinstance(height, int | float) and isinstance(width, int | float)
    if known and max(height, width) <= MAX_SIDE:  # else its side is reported
        _require(path, what, height * width, MAX_CANVAS)


def _check_tiles(path: Path, settings: Mapping[Any, Any]) -> None:
    """Raise on too many patches: few where patches are tiles, as "min_patches" shows."""
    tiled = "min_patches" in settings or "crop_to_patches" in settings
    for key, value in settings.items():
        if _PATCH_KEY.fullmatch(str(key)) and isinstance(value, int | float):
            _require(path, str(key), value, MAX_TILES if tiled else 2**16)


def tensor_sizes(folder: Path) -> list[int]:
    """Return the number of elements of each tensor in a folder's safetensors files."""
    paths = sorted(folder.glob("*.safetensors"))
    return [math.prod(shape) for path in paths for shape in io.read_shapes(path).values()]


@contextmanager
def limit_allocations(what: str, saved: list[int]) -> Iterator[None]:
    """Raise `CorruptFileError` if the model built inside this context outgrows its saved weights.

    Args:
        what: the folder or file, for the message.
        saved: number of elements of each saved tensor (see `tensor_sizes`).
    """
    # saved weights bound the model: configs that describe much more are wrong or hostile
    most = MAX_COPIES * sum(saved) + SPARE_ELEMENTS
    tensors = MAX_COPIES * len(saved) + SPARE_TENSORS
    owner, count = threading.get_ident(), 0

    def registered(*args: Any) -> None:
        nonlocal count
        if threading.get_ident() == owner:  # the hook is global to the process
            count += 1
            if count > tensors:
                raise CorruptFileError(
                    f"{what}: the config describes more than {tensors} tensors, but the weights "
                    f"have {len(saved)}."
                )

    hooks = [
        # counts tensors of any size: a million empty layers take time and memory, too
        registration.register_module_parameter_registration_hook(registered),
        registration.register_module_buffer_registration_hook(registered),
    ]
    try:
        with _Allocations(what, sum(saved), most):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many elements a call would allocate; 0 if the call is invalid."""
    # the meta device computes shapes without memory; the other arguments do not go with it
    plain = {key: kwargs[key] for key in kwargs if key not in ("device", "pin_memory", "generator")}
    try:
        return int(func(*args, **plain, device="meta").numel())
    except (RuntimeError, TypeError, ValueError):  # the call itself will raise
        return 0


class _Allocations(TorchFunctionMode):
    """Count the elements of new tensors before their memory is allocated."""

    def __init__(self, what: str, saved: int, most: int) -> None:
        super().__init__()
        self.what, self.saved, self.most, self.allocated = what, saved, most, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and "out" not in kwargs:
            self.allocated += _elements(func, args, kwargs)
            self._check(self.allocated)
        elif func in _COPIES:
            self._check(_elements(func, args, kwargs))
        else:
            self._check_result(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, elements: int) -> None:
        if elements > self.most:
            raise CorruptFileError(
                f"{self.what}: the config describes more than {self.most} parameters, but the "
                f"weights have {self.saved}."
            )

    def _check_result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Check the result of a function of tensors that can be much larger than they are.

        A table of relative positions is the difference of two lists that are broadcast.
        """
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        # tensors on meta have no memory, whatever their size
        given = [one for one in given if one.device.type != "meta"]
        # broadcasting cannot make more elements than the product of all inputs: a cheap upper bound
        grows = len(given) > 1 and math.prod(one.numel() for one in given) > self.most
        if grows or (given and getattr(func, "__name__", "") in _GROWING):
            self._check(_result_elements(func, args, kwargs))


def _result_elements(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Return the elements of the largest result of a function; 0 if they depend on its values."""
    try:
        args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        found = func(*args, **kwargs)
    except Exception:  # not possible without data; the call itself will raise if it is invalid
        return 0
    made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
    # views have a base and allocate nothing
    return max((one.numel() for one in made if one._base is None), default=0)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )
