"""Maps for other tools, and maps of other tools: BertViz, captum, and files of plain arrays."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from overt import files
from overt.attention import POINT, AttentionMap, Form, Kind, Layout, Span
from overt.errors import Damaged
from overt.geometry import Geometry, PixelGeometry, RegionGeometry, TextGeometry
from overt.show.panel import labels, positions

VERSION = 1


# BertViz


def to_bertviz(
    attention: AttentionMap,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    row: int = 0,
) -> dict[str, Any]:
    """The arguments of BertViz's `head_view` and `model_view`: `head_view(**to_bertviz(map))`.

    One sample's weights, a tensor (1, h, q, k) a layer, and what each position is. Where queries
    and keys differ it is cross-attention, from a decoder to an encoder, in BertViz's words.
    """
    one = attention.select(torch.tensor([row], device=attention.values.device)).detach()
    given = [list(queries or labels(one.queries)), list(keys or labels(one.keys))]
    for names, wanted in zip(given, one.values.shape[-2:], strict=True):
        if len(names) != wanted:
            raise ValueError(f"{len(names)} tokens for {wanted} positions")
    layers = [weights.float().cpu() for weights in one.weights.unbind(dim=1)]
    if given[0] == given[1]:
        return {"attention": layers, "tokens": given[0]}
    return {"cross_attention": layers, "decoder_tokens": given[0], "encoder_tokens": given[1]}


def from_layers(
    layers: Sequence[Float[Tensor, "b h q k"]],
    keys: Layout | None = None,
    queries: Layout | None = None,
    kind: Kind = Kind.PROBABILITY,
) -> AttentionMap:
    """A map of what BertViz takes and what Hugging Face models return with `output_attentions`.

    Without layouts, positions are numbered. Layers of different sizes are several maps.
    """
    if not layers or any(layer is None for layer in layers):
        raise ValueError(
            "there are no weights in this: a model on a fused kernel returns none; call "
            'model.set_attn_implementation("eager") first, or read it by overt.watch'
        )
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"{len(layers)} layers of the shapes {sorted(shapes)} do not make one map")
    q, k = layers[0].shape[-2:]
    plain = [Layout((Span("positions", (n,), slice(0, n)),), n) for n in (q, k)]
    return AttentionMap(
        torch.stack(list(layers), dim=1), keys or plain[1], queries or plain[0], kind=kind
    )


# captum


def to_pixels(attention: AttentionMap, span: str = "image") -> Float[Tensor, "b 1 y x"]:
    """The map of one query as captum gives attributions of a picture: on the model's own canvas.

    Cells are drawn out to pixels as `captum.attr.LayerAttribution.interpolate` does it, bilinear.
    The span needs its geometry, which knows the size of the canvas.
    """
    cells = _one_row(attention, span)
    where = attention.keys.find(span)
    if not isinstance(where.geometry, PixelGeometry) or len(where.shape) != 2:
        raise ValueError(f"span {span!r} is no grid with a geometry, so its canvas is not known")
    grid = cells.reshape(len(cells), 1, *where.shape)
    return torch.nn.functional.interpolate(grid, where.geometry.canvas, mode="bilinear")


def from_pixels(attributions: Float[Tensor, "b c y x"], keys: Layout) -> AttentionMap:
    """captum's attributions of pixels as signed amounts on the cells of one grid.

    A cell has the sum of its pixels over all channels, so that no attribution is lost: what adds up
    to the difference of two outputs still does.
    """
    spans = [span for span in keys.spans if len(span.shape) == 2]
    if len(spans) != 1 or len(spans[0]) != len(keys):
        raise ValueError("the layout is not one grid of cells; overt.grid(rows, columns) makes one")
    rows, columns = spans[0].shape
    b, _, y, x = attributions.shape
    if y % rows or x % columns:
        raise ValueError(f"{y} x {x} pixels do not share out evenly to {rows} x {columns} cells")
    cells = attributions.sum(dim=1).reshape(b, rows, y // rows, columns, x // columns).sum((2, 4))
    return AttentionMap(cells.reshape(b, 1, 1, 1, -1), keys, POINT, kind=Kind.SIGNED)


def to_tokens(attention: AttentionMap, span: str = "text") -> Float[Tensor, "b n"]:
    """The map of one query as captum gives attributions of tokens; 0 for a token not there."""
    return _one_row(attention, span)


def from_tokens(attributions: Float[Tensor, "b n"], keys: Layout) -> AttentionMap:
    """captum's attributions of tokens, summed over features, as signed amounts."""
    b, n = attributions.shape
    if n != len(keys):
        raise ValueError(f"{n} attributions for {len(keys)} positions")
    return AttentionMap(attributions.reshape(b, 1, 1, 1, n), keys, POINT, kind=Kind.SIGNED)


def _one_row(attention: AttentionMap, span: str) -> Float[Tensor, "b n"]:
    if attention.values.shape[1:4] != (1, 1, 1):
        l, h, q = attention.values.shape[1:4]
        raise ValueError(
            f"an attribution is one row, and this map has {l} layers, {h} heads and {q} queries; "
            "choose with layer(), head() or over_heads(), and block()"
        )
    where = attention.keys.find(span)
    weights = attention.weights[:, 0, 0, 0]
    at = torch.tensor([positions(where, row) for row in range(len(weights))], device=weights.device)
    return torch.where(at >= 0, weights.gather(1, at.clamp_min(0)), 0)


# Files


def save_map(path: Path | str, attention: AttentionMap) -> None:
    """Write a map as plain arrays (.npz): weights, mask, layouts and geometry; no gradient.

    numpy can read it without overt: `np.load(path)["values"]`.
    """
    values = attention.values.detach().cpu()
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
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    files.write_arrays(Path(path), arrays)


def load_map(path: Path | str) -> AttentionMap:
    """Read what `save_map` wrote; a file that is anything else is `Damaged`."""
    arrays = files.read_arrays(Path(path))
    try:
        about = json.loads(arrays["about"].tobytes())
        if about["version"] != VERSION:
            raise ValueError(f"its version is {about['version']}, and {VERSION} is known")
        return AttentionMap(
            torch.from_numpy(arrays["values"]).to(getattr(torch, about["dtype"])),
            _layout_in(about["keys"], "keys", arrays),
            _layout_in(about["queries"], "queries", arrays),
            torch.from_numpy(arrays["mask"]) if "mask" in arrays else None,
            Kind(about["kind"]),
            Form(about["form"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise Damaged(f"{path} holds no attention map: {problem}.") from problem


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
    raise ValueError(f"a geometry of {about['of']!r} is not known")
