"""Conversion of attention maps to and from BertViz, captum and .npz files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from overt import io
from overt.attention import GLOBAL_QUERY, AttentionMap, Form, Kind, Layout, Span
from overt.errors import CorruptFileError
from overt.geometry import Geometry, PixelGeometry, RegionGeometry, TextGeometry
from overt.viz.panel import position_labels, span_positions

VERSION = 1


# BertViz


def to_bertviz(
    attention: AttentionMap,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    row: int = 0,
) -> dict[str, Any]:
    """Return the arguments of BertViz's `head_view` and `model_view`.

    Call `head_view(**to_bertviz(attention))`. If queries and keys differ, they become BertViz's
    decoder and encoder tokens.

    Args:
        attention: attention map of any number of samples.
        queries: names of the queries; default: from the layout.
        keys: names of the keys; default: from the layout.
        row: index of the sample.

    Returns:
        Keyword arguments: one tensor (1, heads, queries, keys) per layer, and the tokens.

    Raises:
        ValueError: if the number of names does not match the map.

    Example:
        >>> from overt.attention import words
        >>> attention = AttentionMap(torch.full((1, 2, 4, 3, 3), 1 / 3), words(3), words(3))
        >>> found = to_bertviz(attention, queries=["a", "red", "ring"], keys=["a", "red", "ring"])
        >>> found["tokens"], [layer.shape for layer in found["attention"]]
        (['a', 'red', 'ring'], [torch.Size([1, 4, 3, 3]), torch.Size([1, 4, 3, 3])])
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).detach()
    tokens = [
        list(queries or position_labels(one.queries)),
        list(keys or position_labels(one.keys)),
    ]
    for names, count in zip(tokens, one.values.shape[-2:], strict=True):
        if len(names) != count:
            raise ValueError(
                f"got {len(names)} tokens for {count} positions: both need the same length"
            )
    layers = [weights.float().cpu() for weights in one.weights.unbind(dim=1)]
    if tokens[0] == tokens[1]:
        return {"attention": layers, "tokens": tokens[0]}
    return {"cross_attention": layers, "decoder_tokens": tokens[0], "encoder_tokens": tokens[1]}


def from_layers(
    layers: Sequence[Float[Tensor, "b h q k"]],
    keys: Layout | None = None,
    queries: Layout | None = None,
    kind: Kind = Kind.PROBABILITY,
) -> AttentionMap:
    """Build a map from per-layer weights, as Hugging Face models return with `output_attentions`.

    Args:
        layers: weights of each layer, all of the same shape.
        keys: layout of the keys; default: numbered positions.
        queries: layout of the queries; default: numbered positions.
        kind: meaning of the weights.

    Returns:
        The attention map of all layers.

    Raises:
        ValueError: if weights are missing, or layers differ in shape.

    Example:
        >>> from_layers([torch.full((1, 2, 3, 3), 1 / 3)] * 4).values.shape
        torch.Size([1, 4, 2, 3, 3])
    """
    if not layers or any(layer is None for layer in layers):
        raise ValueError(
            "no attention weights: a model with a fused kernel returns none; call "
            'model.set_attn_implementation("eager") first, or use overt.watch'
        )
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"all {len(layers)} layers need the same shape, got {sorted(shapes)}")
    q, k = layers[0].shape[-2:]
    plain = [Layout((Span("positions", (n,), slice(0, n)),), n) for n in (q, k)]
    return AttentionMap(
        torch.stack(list(layers), dim=1), keys or plain[1], queries or plain[0], kind=kind
    )


# captum


def to_pixels(attention: AttentionMap, span: str = "image") -> Float[Tensor, "b 1 y x"]:
    """Return the map of one query as captum's image attributions, on the model's canvas.

    Cells are interpolated bilinearly, as by `captum.attr.LayerAttribution.interpolate`.

    Args:
        attention: map with one layer, head and query.
        span: name of the image span; it needs a `PixelGeometry`.

    Returns:
        Attributions of each pixel.

    Raises:
        ValueError: if the map has more than one row, or the span has no geometry.

    Example:
        >>> from overt.attention import grid
        >>> keys = grid(2, 2, geometry=PixelGeometry.identity(1, (4, 4)))
        >>> attention = AttentionMap.from_cells(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), keys)
        >>> to_pixels(attention)[0, 0, 0]  # the first row of pixels
        tensor([1.0000, 0.7500, 0.2500, 0.0000])
    """
    cells = _one_row(attention, span)
    where = attention.keys.find(span)
    if not isinstance(where.geometry, PixelGeometry) or len(where.shape) != 2:
        raise ValueError(f"span {span!r} is not a grid with a PixelGeometry: its canvas is unknown")
    grid = cells.reshape(len(cells), 1, *where.shape)
    return torch.nn.functional.interpolate(grid, where.geometry.canvas, mode="bilinear")


def from_pixels(attributions: Float[Tensor, "b c y x"], keys: Layout) -> AttentionMap:
    """Build a signed map from captum's pixel attributions.

    Each cell has the sum over its pixels and channels, so the total attribution is preserved
    (completeness).

    Args:
        attributions: attributions of each pixel and channel.
        keys: layout with one image grid.

    Returns:
        A map with one layer, head and query.

    Raises:
        ValueError: if the layout is not one grid, or the pixels do not divide evenly into cells.

    Example:
        >>> from overt.attention import grid
        >>> from_pixels(torch.ones(1, 3, 4, 4), grid(2, 2)).weights.flatten()  # 3 times 4 pixels
        tensor([12., 12., 12., 12.])
    """
    spans = [span for span in keys.spans if len(span.shape) == 2]
    if len(spans) != 1 or len(spans[0]) != len(keys):
        raise ValueError(
            "expected a layout of one image grid; overt.grid(rows, columns) builds one"
        )
    rows, columns = spans[0].shape
    b, _, y, x = attributions.shape
    if y % rows or x % columns:
        raise ValueError(f"{y} x {x} pixels cannot be divided into {rows} x {columns} cells")
    cells = attributions.sum(dim=1).reshape(b, rows, y // rows, columns, x // columns).sum((2, 4))
    return AttentionMap(cells.reshape(b, 1, 1, 1, -1), keys, GLOBAL_QUERY, kind=Kind.SIGNED)


def to_tokens(attention: AttentionMap, span: str = "text") -> Float[Tensor, "b n"]:
    """Return the map of one query as captum's token attributions; absent tokens have 0.

    Args:
        attention: map with one layer, head and query.
        span: name of the text span.

    Returns:
        Attributions of each token.

    Raises:
        ValueError: if the map has more than one row.

    Example:
        >>> from overt.attention import words
        >>> to_tokens(AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), words(2)))
        tensor([[0.2500, 0.7500]])
    """
    return _one_row(attention, span)


def from_tokens(attributions: Float[Tensor, "b n"], keys: Layout) -> AttentionMap:
    """Build a signed map from captum's token attributions, summed over features.

    Args:
        attributions: one number per token.
        keys: layout of the tokens.

    Returns:
        A map with one layer, head and query.

    Raises:
        ValueError: if the number of attributions does not match the layout.

    Example:
        >>> from overt.attention import words
        >>> attention = from_tokens(torch.tensor([[0.5, -0.25]]), words(2))
        >>> attention.kind.name, attention.weights.flatten()
        ('SIGNED', tensor([ 0.5000, -0.2500]))
    """
    b, n = attributions.shape
    if n != len(keys):
        raise ValueError(
            f"got {n} attributions for {len(keys)} positions: both need the same length"
        )
    return AttentionMap(attributions.reshape(b, 1, 1, 1, n), keys, GLOBAL_QUERY, kind=Kind.SIGNED)


def _one_row(attention: AttentionMap, span: str) -> Float[Tensor, "b n"]:
    if attention.values.shape[1:4] != (1, 1, 1):
        l, h, q = attention.values.shape[1:4]
        raise ValueError(
            f"expected one row, got {l} layers, {h} heads and {q} queries: "
            "select with layer(), head() or over_heads(), and block()"
        )
    where = attention.keys.find(span)
    weights = attention.weights[:, 0, 0, 0]
    at = torch.tensor(
        [span_positions(where, row) for row in range(len(weights))], device=weights.device
    )
    return torch.where(at >= 0, weights.gather(1, at.clamp_min(0)), 0)


# Files


def save_map(path: Path | str, attention: AttentionMap) -> None:
    """Write a map to an .npz file: weights, mask, layouts and geometry, without gradients.

    `np.load(path)["values"]` reads the weights without overt.

    Args:
        path: file to write.
        attention: map to save.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.attention import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), words(2))
        >>> with TemporaryDirectory() as folder:
        ...     save_map(f"{folder}/map.npz", attention)
        ...     np.load(f"{folder}/map.npz")["values"].ravel()
        array([0.25, 0.75], dtype=float32)
    """
    values = attention.values.detach().cpu()
    # numpy has no bfloat16; float32 contains it exactly, and `dtype` below restores it
    arrays = {"values": (values.float() if values.dtype == torch.bfloat16 else values).numpy()}
    if attention.mask is not None:
        arrays["mask"] = attention.mask.cpu().numpy()
    about = {
        "version": VERSION,
        "kind": attention.kind.value,
        "form": attention.form.value,
        "dtype": str(values.dtype).removeprefix("torch."),
        "queries": _layout_out(attention.queries, "queries", arrays),
        "keys": _layout_out(attention.keys, "keys", arrays),
    }
    # JSON as bytes: an object array would be a pickle, which loading must not run
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    io.write_arrays(Path(path), arrays)


def load_map(path: Path | str) -> AttentionMap:
    """Read a map that `save_map` wrote.

    Args:
        path: file to read.

    Returns:
        The attention map.

    Raises:
        CorruptFileError: if the file does not contain an attention map.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.attention import words
        >>> attention = AttentionMap.from_cells(torch.tensor([[0.25, 0.75]]), words(2))
        >>> with TemporaryDirectory() as folder:
        ...     save_map(f"{folder}/map.npz", attention)
        ...     load_map(f"{folder}/map.npz").keys.spans[0].name
        'text'
    """
    arrays = io.read_arrays(Path(path))
    try:
        about = json.loads(arrays["about"].tobytes())
        if about["version"] != VERSION:
            raise ValueError(f"unsupported version {about['version']}, expected {VERSION}")
        return AttentionMap(
            torch.from_numpy(arrays["values"]).to(getattr(torch, about["dtype"])),
            _layout_in(about["keys"], "keys", arrays),
            _layout_in(about["queries"], "queries", arrays),
            torch.from_numpy(arrays["mask"]) if "mask" in arrays else None,
            Kind(about["kind"]),
            Form(about["form"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CorruptFileError(f"{path} is not an attention map: {problem}.") from problem


def _layout_out(layout: Layout, axis: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    spans = []
    for number, span in enumerate(layout.spans):
        place = f"{axis}.{number}"
        about: dict[str, Any] = {"name": span.name, "shape": list(span.shape)}
        if isinstance(span.index, slice):
            about["index"] = [span.index.start, span.index.stop, span.index.step]
        else:
            arrays[f"{place}.index"] = span.index.cpu().numpy()
        if span.geometry is not None:
            about["geometry"] = _geometry_out(span.geometry, place, arrays)
        spans.append(about)
    return {"length": layout.length, "spans": spans}


def _layout_in(about: Mapping[str, Any], axis: str, arrays: Mapping[str, np.ndarray]) -> Layout:
    spans = []
    for number, one in enumerate(about["spans"]):
        place = f"{axis}.{number}"
        index: slice | Tensor
        if "index" in one:
            index = slice(*one["index"])
        else:
            index = torch.from_numpy(arrays[f"{place}.index"])
        geometry = _geometry_in(one["geometry"], place, arrays) if "geometry" in one else None
        spans.append(Span(one["name"], tuple(one["shape"]), index, geometry))
    return Layout(tuple(spans), about["length"])


def _geometry_out(geometry: Geometry, place: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    match geometry:
        case PixelGeometry():
            for name in ("size", "scale", "offset", "kept"):
                value = getattr(geometry, name)
                if value is not None:
                    arrays[f"{place}.{name}"] = value.cpu().numpy()
            return {"of": "pixels", "canvas": list(geometry.canvas)}
        case TextGeometry():
            arrays[f"{place}.spans"] = geometry.spans.cpu().numpy()
            return {"of": "text", "texts": list(geometry.texts)}
        case RegionGeometry():
            arrays[f"{place}.boxes"] = geometry.boxes.cpu().numpy()
            return {"of": "regions"}


def _geometry_in(
    about: Mapping[str, Any], place: str, arrays: Mapping[str, np.ndarray]
) -> Geometry:
    def read(name: str) -> Tensor:
        return torch.from_numpy(arrays[f"{place}.{name}"])

    match about["of"]:
        case "pixels":
            kept = read("kept") if f"{place}.kept" in arrays else None
            height, width = about["canvas"]
            return PixelGeometry(read("size"), read("scale"), read("offset"), (height, width), kept)
        case "text":
            return TextGeometry(tuple(about["texts"]), read("spans"))
        case "regions":
            return RegionGeometry(read("boxes"))
    raise ValueError(f"unknown geometry {about['of']!r}")
