"""Find the encoder layers of a model and adapt their arguments to the remaining tokens."""

from math import isqrt, prod
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.discovery import attention_modules, format_names
from overt.capture.layouts.hf_layouts import WINDOWED
from overt.capture.layouts.patch_grids import PatchSpec, patch_spec

ROTARY_ARGUMENTS = ("position_embeddings", "rope")
MASKED_SCORE = -9e3  # below: masked. Models add -1e4, -1e9 or the lowest number of the dtype
RELATIVE_BIAS = "relative_position_bias_table"


def encoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a Transformer encoder by name: the only list whose items all attend.

    Raises:
        ValueError: no such list was found, or several, or the model is TorchScript.
    """
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind in WINDOWED:
        raise ValueError(
            f"{kind} uses windowed attention, which needs every cell of the grid: token pruning "
            "supports global attention only"
        )
    attending = set(attention_modules(model).values())
    # exactly one attention module per item: encoder-decoder layers have two, and outer lists of
    # stages have many, so neither counts as a list of encoder layers
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and all(len(attending & set(item.modules())) == 1 for item in module)
    }
    if len(lists) != 1:
        _check_not_scripted(model)
        found = f"{len(lists)}: {format_names(list(lists))}" if lists else "0"
        raise ValueError(
            f"expected {type(model).__name__} to have one list of layers with one attention module "
            f"each, found {found}; pass the submodule that has one"
        )
    ((name, layers),) = lists.items()
    # an nn.Sequential may itself be the model: its name is empty then
    return {f"{name}.{at}" if name else str(at): layer for at, layer in layers.named_children()}


def _check_not_scripted(model: nn.Module) -> None:
    """Raise if attention may be inside TorchScript, where hooks cannot reach it."""
    frozen = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    if frozen:
        raise ValueError(
            f"cannot prune tokens of {type(model).__name__}: {format_names(frozen, 3)} is "
            "TorchScript; load the Python model instead"
        )


# --- layouts


def token_layout(model: nn.Module, count: int, canvas: tuple[int, int] | None) -> Layout:
    """Return the layout of `count` tokens: cells of a canvas with extra tokens, or a text.

    Without a canvas the grid is square. The first token of a text is its class token.
    """
    try:
        patches = patch_spec(model)
    except ValueError:  # no patch embedding
        spans = (Span("class", (1,), slice(0, 1)), Span("text", (count - 1,), slice(1, count)))
        return Layout(spans, count)
    cells = count - patches.lead - sum(n for _, n in patches.after)
    # the canvas is unknown if the model has no convolution to read the image size from
    rows, columns = (isqrt(cells),) * 2 if canvas is None else patches.grid(canvas)
    if rows * columns != cells:
        raise ValueError(
            f"{type(model).__name__} has {cells} cells, expected {rows} x {columns}; pass the "
            "layout of its tokens with layout="
        )
    return _image_layout(patches, rows, columns)


def _image_layout(patches: PatchSpec, rows: int, columns: int) -> Layout:
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


# --- arguments of a layer


def index_mask(mask: Tensor, places: Int[Tensor, "b k"], length: int) -> Tensor:
    """Index a mask or position bias over `length` tokens at `places`; returns (b, h, q, k).

    A token without a place (fused from several) has bias zero and sees all keys.
    """
    b, k = places.shape
    # gather needs valid indices: read cell 0 for tokens without a place and overwrite it below
    at, placed = places.clamp_min(0), places >= 0
    neutral = mask.new_ones(()) if mask.dtype == torch.bool else mask.new_zeros(())
    # leading axes are added as in broadcasting: (q, k) and (h, q, k) become (1, h, q, k)
    full = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(b, -1, -1, -1)
    _, h, q, _ = full.shape
    full = full.gather(3, at[:, None, None].expand(b, h, q, k))
    full = torch.where(placed[:, None, None], full, neutral)
    # a padding mask (b, 1, 1, n) has one row for all queries: only its keys are indexed
    if q != length:
        return full
    full = full.gather(2, at[:, None, :, None].expand(b, h, k, k))
    return torch.where(placed[:, None, :, None], full, neutral)


def prune_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Int[Tensor, "b k"], layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention module, indexed at the remaining tokens.

    Masks, position biases and rotary embeddings are indexed; everything else is passed on.
    """

    def changed(name: str, value: Any) -> Any:
        if name in ROTARY_ARGUMENTS:
            return _index_rotary(value, places, layout)
        if not isinstance(value, Tensor) or not _is_mask(value, places, len(layout)):
            return value
        if value.ndim == 2:
            return value.gather(1, places.clamp_min(0))
        return index_mask(value, places, len(layout))

    kept = tuple(changed("", value) for value in args)
    return kept, {name: changed(name, value) for name, value in kwargs.items()}


def _is_mask(value: Tensor, places: Int[Tensor, "b k"], length: int) -> bool:
    """Return whether a tensor is a mask over all tokens: (b, n), or (..., 1 or n, n).

    Hidden states with as many features as there are tokens are not masks.
    """
    b, k = places.shape
    if value.ndim < 2 or value.shape[-1] != length:
        return False
    if value.ndim == 2:
        # a square mask as in nn.TransformerEncoder(mask=...): one index per sample cannot apply to
        # it
        if value.shape[0] == length != b:
            raise NotImplementedError(
                f"a mask of shape {tuple(value.shape)} is shared by all samples, which keep "
                "different tokens; pass a mask with four axes, one per sample"
            )
        return value.shape[0] == b
    # (b, k, n) may be hidden states whose width happens to be n
    states = value.ndim == 3 and value.shape[1] == k
    return not states and value.shape[-2] in (1, length) and value.shape[0] in (1, b)


def visible_tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Int[Tensor, "b n"]
) -> Bool[Tensor, "b n"] | None:
    """Return which tokens the masks of a layer leave visible; None without a mask."""
    found: Tensor | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim == 4:
            if not _is_mask(value, places, places.shape[1]):
                continue
            open_ = value if value.dtype == torch.bool else value > MASKED_SCORE
            # a token is visible if some query of some head sees it: (b, h, q, n) to (b, n)
            open_ = open_.any(dim=1).any(dim=1).expand(len(places), -1)
            found = open_ if found is None else found & open_
    return found


def _index_rotary(value: Any, places: Int[Tensor, "b k"], layout: Layout) -> Any:
    """Index rotary embeddings at the remaining cells; leading special tokens have none."""
    if isinstance(value, tuple):
        return tuple(_index_rotary(one, places, layout) for one in value)
    if not isinstance(value, Tensor):
        return value
    # rotary tables cover the patches only, so class and register tokens are skipped
    lead = len(layout) - value.shape[-2]
    cells = (places[:, lead:] - lead).clamp_min(0)  # padding gets any rotation: it is masked
    full = value.reshape((1,) * (4 - value.ndim) + tuple(value.shape))
    full = full.expand(len(places), -1, -1, -1)
    return full.gather(2, cells[:, None, :, None].expand(-1, full.shape[1], -1, full.shape[3]))


# --- the head after the layers

_TIMM_POOLS = ("avg", "avgmax", "max")  # timm heads that read every token
_HF_MEAN_POOLED = (  # Hugging Face classifiers that do
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "IJepaForImageClassification",
    "SiglipForImageClassification",
    "Siglip2ForImageClassification",
)


def find_mean_pooling(model: nn.Module) -> str | None:
    """Return the class name of a module that is known to average all tokens, or None."""
    for module in model.modules():
        config = getattr(module, "config", None)
        pooled = getattr(module, "global_pool", None)
        if (
            type(module).__name__ in _HF_MEAN_POOLED
            or getattr(config, "use_mean_pooling", False)
            or (isinstance(pooled, str) and pooled in _TIMM_POOLS)
        ):
            return type(module).__name__
    return None
