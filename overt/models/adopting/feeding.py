"""How a batch is put to a Hugging Face model, and what its positions then are."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.positions.grids import module_at, vision_layout
from overt.capture.positions.layouts import VISION, layouts_of
from overt.capture.seen import Layouts
from overt.capture.watching import bare
from overt.data.batch import Batch

Predict = Callable[[nn.Module, Any], Tensor]  # how to run a model on a batch


def by_keywords(batch: Any, names: Collection[str]) -> dict[str, Any]:
    """What a batch has under the names that a Hugging Face model gives its inputs.

    Of a `Batch` these are tokens, their mask and images, one a sample; of a mapping, all entries
    that the model names, but for labels: the loss on them is not the model's business here.
    """
    if isinstance(batch, Batch):
        found: dict[str, Any] = {}
        if "pixel_values" in names and batch.images is not None:
            found["pixel_values"] = batch.images[batch.image_index]
        if "input_ids" in names and batch.tokens is not None:
            found["input_ids"] = batch.tokens
            if batch.token_mask is not None:  # a mask of words is none of patches
                found["attention_mask"] = batch.token_mask.long()
    elif isinstance(batch, Mapping):
        found = {name: value for name, value in batch.items() if name != "labels"}
    else:
        raise ValueError(
            f"a batch that is a {type(batch).__name__} needs adopt(model, call=...) to say how it "
            "is put to the model"
        )
    return {name: value for name, value in found.items() if value is not None and name in names}


def prediction_of(output: Any) -> Tensor:
    """The logits of what a model returned, or its pooled output, or the tensor itself."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "logits_per_image", "pooler_output"):
        plain = isinstance(output, Mapping) and not hasattr(output, name)
        found = output.get(name) if plain else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise ValueError(
        f"a {type(output).__name__} has neither logits nor a pooled output; say what is the "
        "prediction with adopt(model, call=lambda model, batch: ...)"
    )


def calling(processor: Any) -> Predict:
    """Run a model by keywords; bytes become what the processor makes of them."""

    def call(model: nn.Module, batch: Any) -> Tensor:
        inputs = _inputs_of(bare(model), batch)
        pixels = inputs.get("pixel_values")
        if isinstance(pixels, Tensor) and not pixels.is_floating_point():
            inputs["pixel_values"] = _normalized(pixels, processor)
        return prediction_of(model(**inputs))

    return call


def _inputs_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    named = inspect.signature(model.forward).parameters
    inputs = by_keywords(batch, named)
    if not inputs:
        raise ValueError(
            f"{type(model).__name__} takes {', '.join(named)}, and the batch has none of them; say "
            "how to run it with adopt(model, call=lambda model, batch: ...)"
        )
    return inputs


def _normalized(pixels: Tensor, processor: Any) -> Tensor:
    processor = getattr(processor, "image_processor", processor)
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or spread is None:
        raise ValueError(
            "the images of the batch are bytes, and nothing says how the model wants them; give "
            "adopt(model, processor=...) or adopt(model, call=...)"
        )
    centre, scale = (
        torch.tensor(one, device=pixels.device)[:, None, None] for one in (mean, spread)
    )
    return (pixels.to(scale.dtype) / 255 - centre) / scale


# --- what the positions are


def automatic(
    model: nn.Module, batch: Any, processor: Any = None, tokenizer: Any = None
) -> Layouts | None:
    """The layout of a Hugging Face model for a batch, as `overt.capture.layouts_of` finds it.

    A mapping may hold the photos or their sizes under "images" and the texts under "texts": with
    the processor and the tokenizer they say which pixels and characters a position stands for. A
    `Batch` says so itself. Encoder and decoder give the pair for the attention between them. None
    for a model of unknown make.
    """
    model = bare(model)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return None
    inputs = _inputs_of(model, batch)
    given = batch if isinstance(batch, Mapping) else {}
    images, texts = given.get("images"), given.get("texts")
    found = layouts_of(model, inputs, processor, tokenizer, images, texts)
    if "decoder" in found and "encoder" in found:
        return found["decoder"], found["encoder"]
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} has the sequences {sorted(found)}; choose one with adopt("
            "model, layout=lambda batch: overt.capture.layout_of(model, batch, part=...))"
        )
    (layout,) = found.values()
    if isinstance(batch, Batch):
        layout = _placed(model, inputs, layout, batch)
    return _with_class(layout, inputs, tokenizer or getattr(processor, "tokenizer", None))


def _placed(model: nn.Module, inputs: Mapping[str, Any], layout: Layout, batch: Batch) -> Layout:
    """The layout with the pixels and characters of our own batch."""
    if "input_ids" not in inputs:
        height, width = inputs["pixel_values"].shape[-2:]
        tower = module_at(model, *VISION) or model
        return vision_layout(tower, (height, width), batch.sample_geometry)
    spans = [_in_place(span, batch) if span.name == "text" else span for span in layout.spans]
    return Layout(tuple(spans), len(layout))


def _in_place(span: Span, batch: Batch) -> Span:
    """The words of a batch, each in its own column, where its characters and targets are."""
    assert batch.tokens is not None
    columns = torch.arange(batch.tokens.shape[1])
    at = columns[span.index].expand(len(batch), -1) if isinstance(span.index, slice) else span.index
    own = torch.zeros(len(batch), len(columns) + 1, dtype=torch.bool)
    own = own.scatter(1, torch.where(at >= 0, at, len(columns)), True)[:, :-1]
    index = torch.where(own, columns, -1)
    return Span(span.name, (len(columns),), index, batch.text)


def _with_class(layout: Layout, inputs: Mapping[str, Any], tokenizer: Any) -> Layout:
    """The layout with the token that a text encoder answers from, where the tokenizer has one."""
    token = getattr(tokenizer, "cls_token_id", None)
    ids = inputs.get("input_ids")
    known = any(span.name == "class" for span in layout.spans)
    if token is None or ids is None or known:
        return layout
    here = ids == token
    first = torch.where(here.any(dim=1), here.int().argmax(dim=1), -1)[:, None]
    return Layout((*layout.spans, Span("class", (1,), first)), len(layout))
