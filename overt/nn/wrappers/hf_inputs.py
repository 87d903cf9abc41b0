"""Build the inputs of a Hugging Face model from a batch, and the layout of its positions."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.layouts.hf_layouts import VISION, layouts_of
from overt.capture.layouts.patch_grids import module_at, vision_layout
from overt.capture.session import unwrap_model
from overt.capture.trace import Layouts
from overt.data.batch import Batch

Predict = Callable[[nn.Module, Any], Tensor]  # runs a model on a batch


def inputs_by_name(batch: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the batch entries that the model accepts, by argument name.

    From a `Batch`: tokens, their mask, and one image per sample. From a mapping: all accepted
    entries except `labels`, because the model's own loss is not used here. A tensor is the first
    argument.
    """
    if isinstance(batch, Batch):
        inputs: dict[str, Any] = {}
        # only named arguments of `forward` are passed: models raise for unknown ones
        if "pixel_values" in names and batch.images is not None:
            inputs["pixel_values"] = batch.images[batch.image_index]
        if "input_ids" in names and batch.tokens is not None:
            inputs["input_ids"] = batch.tokens
            if batch.token_mask is not None:  # a mask over words does not apply to patches
                inputs["attention_mask"] = batch.token_mask.long()
    elif isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
    elif isinstance(batch, Tensor) and names:
        inputs = {next(iter(names)): batch}
    else:
        raise ValueError(
            f"expected a Batch, a mapping or a tensor, got {type(batch).__name__}; pass "
            "wrap(model, call=lambda model, batch: ...) for other batches"
        )
    return {name: value for name, value in inputs.items() if value is not None and name in names}


def extract_prediction(output: Any) -> Tensor:
    """Return the logits or the pooled output of a model's output, or the tensor itself."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "logits_per_image", "pooler_output"):
        plain = isinstance(output, Mapping) and not hasattr(output, name)
        found = output.get(name) if plain else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise ValueError(
        f"{type(output).__name__} has neither logits nor pooler_output; choose the prediction "
        "with wrap(model, call=lambda model, batch: ...)"
    )


def make_predict(processor: Any) -> Predict:
    """Return a function that runs a model on named inputs; uint8 images are normalised first."""

    def call(model: nn.Module, batch: Any) -> Tensor:
        inputs = _inputs_of(unwrap_model(model), batch)
        pixels = inputs.get("pixel_values")
        # floating-point images are taken as normalised already
        if isinstance(pixels, Tensor) and not pixels.is_floating_point():
            inputs["pixel_values"] = _normalized(pixels, processor)
        return extract_prediction(model(**inputs))

    return call


def _inputs_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    inputs = inputs_by_name(batch, accepted)
    if not inputs:
        raise ValueError(
            f"{type(model).__name__} takes {', '.join(accepted)}, but the batch has none of them; "
            "run it with wrap(model, call=lambda model, batch: ...)"
        )
    return inputs


def _normalized(pixels: Tensor, processor: Any) -> Tensor:
    processor = getattr(processor, "image_processor", processor)
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or spread is None:
        raise ValueError(
            "batch.images is uint8 and the normalisation of the model is unknown; pass "
            "wrap(model, processor=...) or wrap(model, call=...)"
        )
    centre, scale = (
        torch.tensor(one, device=pixels.device)[:, None, None] for one in (mean, spread)
    )
    return (pixels.to(scale.dtype) / 255 - centre) / scale


# --- layouts


def infer_layout(
    model: nn.Module, batch: Any, processor: Any = None, tokenizer: Any = None
) -> Layouts | None:
    """Infer the layout of a Hugging Face model for a batch, with `overt.capture.layouts_of`.

    A mapping may contain the images or their sizes as "images" and the texts as "texts". Together
    with the processor and the tokenizer they map positions to pixels and characters; a `Batch` has
    this geometry itself. An encoder-decoder returns the pair for its cross-attention. Returns None
    for a model that is not from Hugging Face.
    """
    model = unwrap_model(model)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return None
    inputs = _inputs_of(model, batch)
    mapping = batch if isinstance(batch, Mapping) else {}
    images, texts = mapping.get("images"), mapping.get("texts")
    layouts = layouts_of(model, inputs, processor, tokenizer, images, texts)
    # queries are in the decoder, keys in the encoder
    if "decoder" in layouts and "encoder" in layouts:
        return layouts["decoder"], layouts["encoder"]
    if len(layouts) > 1:
        raise ValueError(
            f"{type(model).__name__} has several sequences, {sorted(layouts)}; choose one with "
            "wrap(model, layout=lambda batch: overt.capture.layout_of(model, batch, part=...))"
        )
    (layout,) = layouts.values()
    return _with_geometry(model, inputs, layout, batch) if isinstance(batch, Batch) else layout


def _with_geometry(
    model: nn.Module, inputs: Mapping[str, Any], layout: Layout, batch: Batch
) -> Layout:
    """Return the layout with the pixels and characters of the batch."""
    if "input_ids" not in inputs:
        height, width = inputs["pixel_values"].shape[-2:]
        tower = module_at(model, *VISION) or model
        return vision_layout(tower, (height, width), batch.sample_geometry)
    spans = [
        _with_text_geometry(span, batch) if span.name == "text" else span for span in layout.spans
    ]
    return Layout(tuple(spans), len(layout))


def _with_text_geometry(span: Span, batch: Batch) -> Span:
    """Return the span with one column per token of the batch, to match its text and targets."""
    assert batch.tokens is not None
    columns = torch.arange(batch.tokens.shape[1])
    # one column per token of the batch, so that targets over tokens line up; -1 where the model has
    # no word, such as special tokens
    at = columns[span.index].expand(len(batch), -1) if isinstance(span.index, slice) else span.index
    own = torch.zeros(len(batch), len(columns) + 1, dtype=torch.bool)
    own = own.scatter(1, torch.where(at >= 0, at, len(columns)), True)[:, :-1]
    index = torch.where(own, columns, -1)
    return Span(span.name, (len(columns),), index, batch.text)
