"""Where tokens can be taken out of a model: its list of layers, and what each of them is given."""

from math import isqrt, prod
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.places import attention_modules, few
from overt.capture.positions.grids import Patches, patches_of
from overt.capture.positions.layouts import WINDOWED

ROTATIONS = ("position_embeddings", "rope")  # what turns queries and keys by their place
LOW = -9e3  # a score that hides a key: models add -1e4, -1e9 or the lowest number
BIASES = "relative_position_bias_table"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a Transformer encoder by name: the one list whose every item attends."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind in WINDOWED:
        raise ValueError(
            f"{kind} attends inside windows that need every cell of the grid; tokens can be taken "
            "from models that attend over all of them"
        )
    attending = set(attention_modules(model).values())
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and all(len(attending & set(item.modules())) == 1 for item in module)
    }
    if len(lists) != 1:
        found = f"{len(lists)} lists of them: {few(list(lists))}" if lists else "no such list"
        raise ValueError(
            f"{type(model).__name__} should have one list of layers that attend once each, and it "
            f"has {found}; give thin() the part of the model that has one"
        )
    ((name, layers),) = lists.items()
    return {f"{name}.{at}" if name else str(at): layer for at, layer in layers.named_children()}


# --- what the tokens are


def tokens_layout(model: nn.Module, count: int, canvas: tuple[int, int] | None) -> Layout:
    """What `count` tokens of a model are: cells of a canvas with extra tokens, or a text.

    Without a canvas the grid is a square. The first token of a text is its class token.
    """
    try:
        patches = patches_of(model)
    except ValueError:  # no picture is cut here
        spans = (Span("class", (1,), slice(0, 1)), Span("text", (count - 1,), slice(1, count)))
        return Layout(spans, count)
    cells = count - patches.lead - sum(n for _, n in patches.after)
    rows, columns = (isqrt(cells),) * 2 if canvas is None else patches.grid(canvas)
    if rows * columns != cells:
        raise ValueError(
            f"{type(model).__name__} has {cells} cells, which are not {rows} x {columns}; say what "
            "its tokens are with thin(..., layout=...)"
        )
    return _laid_out(patches, rows, columns)


def _laid_out(patches: Patches, rows: int, columns: int) -> Layout:
    spans: list[Span] = []
    at = 0
    shapes: list[tuple[str, tuple[int, ...]]] = [
        *((name, (count,)) for name, count in patches.before),
        ("image", (rows, columns)),
        *((name, (count,)) for name, count in patches.after),
    ]
    for name, shape in shapes:
        size = prod(shape)
        spans.append(Span(name, shape, slice(at, at + size)))
        at += size
    return Layout(tuple(spans), at)


# --- what a layer is given


def at_places(mask: Tensor, places: Int[Tensor, "b k"], length: int) -> Tensor:
    """A mask or position bias over `length` tokens, for those at `places`: (b, h, q, k) again.

    A token without a place, made of many, has bias zero and sees all.
    """
    b, k = places.shape
    at, placed = places.clamp_min(0), places >= 0
    nothing = mask.new_ones(()) if mask.dtype == torch.bool else mask.new_zeros(())
    full = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(b, -1, -1, -1)
    _, h, q, _ = full.shape
    full = full.gather(3, at[:, None, None].expand(b, h, q, k))
    full = torch.where(placed[:, None, None], full, nothing)
    if q != length:
        return full
    full = full.gather(2, at[:, None, :, None].expand(b, h, k, k))
    return torch.where(placed[:, None, :, None], full, nothing)


def thinned_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Int[Tensor, "b k"], layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention module, with masks, biases and rotations for what is left."""

    def changed(name: str, value: Any) -> Any:
        if name in ROTATIONS:
            return _turned(value, places, layout)
        if not isinstance(value, Tensor) or not _is_mask(value, places, len(layout)):
            return value
        if value.ndim == 2:
            return value.gather(1, places.clamp_min(0))
        return at_places(value, places, len(layout))

    kept = tuple(changed("", value) for value in args)
    return kept, {name: changed(name, value) for name, value in kwargs.items()}


def _is_mask(value: Tensor, places: Int[Tensor, "b k"], length: int) -> bool:
    """Whether this is over all tokens: (b, n), or (1 or n, n) behind the axes of batch and heads.

    Hidden states whose features happen to be as many as the tokens are none.
    """
    b, k = places.shape
    if value.ndim < 2 or value.shape[-1] != length:
        return False
    if value.ndim == 2:
        if value.shape[0] == length != b:
            raise NotImplementedError(
                f"a mask of shape {tuple(value.shape)} is the same for all samples, which keep "
                "different tokens; give the model one a sample, of four axes"
            )
        return value.shape[0] == b
    states = value.ndim == 3 and value.shape[1] == k
    return not states and value.shape[-2] in (1, length) and value.shape[0] in (1, b)


def seen_by_masks(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Int[Tensor, "b n"]
) -> Bool[Tensor, "b n"] | None:
    """Which tokens the masks given to a layer leave to be seen; None when there is no mask."""
    found: Tensor | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim == 4:
            if not _is_mask(value, places, places.shape[1]):
                continue
            open_ = value if value.dtype == torch.bool else value > LOW
            open_ = open_.any(dim=1).any(dim=1).expand(len(places), -1)
            found = open_ if found is None else found & open_
    return found


def _turned(value: Any, places: Int[Tensor, "b k"], layout: Layout) -> Any:
    """Rotations of the cells that are left; class tokens and registers, in front, have none."""
    if isinstance(value, tuple):
        return tuple(_turned(one, places, layout) for one in value)
    if not isinstance(value, Tensor):
        return value
    lead = len(layout) - value.shape[-2]
    cells = (places[:, lead:] - lead).clamp_min(0)  # padding is turned, and seen by nobody
    full = value.reshape((1,) * (4 - value.ndim) + tuple(value.shape))
    full = full.expand(len(places), -1, -1, -1)
    return full.gather(2, cells[:, None, :, None].expand(-1, full.shape[1], -1, full.shape[3]))


# --- what comes after the layers

_POOLED = ("avg", "avgmax", "max")  # what timm calls heads that read every token
_AVERAGES = (  # Hugging Face's classifiers that do
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "IJepaForImageClassification",
    "SiglipForImageClassification",
    "Siglip2ForImageClassification",
)


def averages(model: nn.Module) -> str | None:
    """The name of the part of a model that is known to average all tokens, where there is one."""
    for module in model.modules():
        config = getattr(module, "config", None)
        pooled = getattr(module, "global_pool", None)
        if (
            type(module).__name__ in _AVERAGES
            or getattr(config, "use_mean_pooling", False)
            or (isinstance(pooled, str) and pooled in _POOLED)
        ):
            return type(module).__name__
    return None
