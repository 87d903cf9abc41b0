"""What each position of a Hugging Face model's sequences is: words, cells of a photo, extra tokens.

`layouts_of` looks at the model, at what the processor gave it and at the photos and texts
themselves, and answers with one `Layout` a sequence. It knows families by what they do, most of it
read from modules, configuration and inputs; a model it does not know is refused, with the way to
build the Layout by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.positions.embedded import (
    Photos,
    anyres_spans,
    grid_spans,
    merged_layout,
    photos_of,
    tile_spans,
)
from overt.capture.positions.grids import (
    cells_span,
    compact,
    feature_layout,
    module_at,
    patches_of,
    vision_layout,
)
from overt.capture.positions.tokens import Text, locate, special
from overt.geometry import TextGeometry

VISION = ("vision_model", "model.vision_model", "vision_tower", "model.vision_tower")
DETR = ("detr", "conditional_detr", "table-transformer")
WINDOWED = ("swin", "swinv2", "swin2sr", "maskformer-swin", "donut-swin")
HAND = (
    "build it by hand: Layout((Span(name, shape, index, geometry), ...), length), with a slice or "
    "a row of positions a sample as index"
)


def layout_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any = None,
    tokenizer: Any = None,
    images: Sequence[Any] | None = None,
    texts: Sequence[Text] | None = None,
    part: str | None = None,
) -> Layout:
    """What the positions of a model's sequence are, for the `inputs` its processor gave.

    Arguments are those of `layouts_of`; a model with several sequences (two encoders, an encoder
    and a decoder) needs the `part` that is meant.
    """
    found = layouts_of(model, inputs, processor, tokenizer, images, texts)
    if part is None and len(found) == 1:
        return next(iter(found.values()))
    if part not in found:
        raise ValueError(
            f"{type(model).__name__} has the sequences {sorted(found)}; say which with part=..., "
            f"not {part!r}"
        )
    return found[part]


def layouts_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any = None,
    tokenizer: Any = None,
    images: Sequence[Any] | None = None,
    texts: Sequence[Text] | None = None,
) -> dict[str, Layout]:
    """What the positions of each sequence of a model are, by the part of the model it runs in.

    `images` are the photos, or their (height, width), one a sample or a list of several a sample;
    with the `processor` they give each cell its pixels. `texts`, or pairs of texts, are those that
    were tokenised, and with the tokenizer they give each token its characters. What is not given
    is left out: the spans then say what they are and not where.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    photos = None if images is None else photos_of(processor, images)
    words = _Words(tokenizer, texts)
    config = getattr(model, "config", None)
    if kind in WINDOWED:
        raise ValueError(
            f"{kind} attends inside windows, so no one layout fits its maps; "
            "positions.grids.stage_grids gives the grid of each stage. For a window, " + HAND
        )
    if kind == "vilt":
        return {"": _vilt(model, inputs, photos, words)}
    if kind in DETR:
        return _detr(model, inputs, photos)
    if "input_ids" not in inputs and "pixel_values" in inputs:
        tower = module_at(model, *VISION) or model
        if inputs["pixel_values"].ndim == 4:
            return {"": _vision(tower, inputs, photos)}
    elif "pixel_values" not in inputs and "input_ids" in inputs:
        layout = words.layout(inputs["input_ids"], inputs.get("attention_mask"))
        if not getattr(config, "is_encoder_decoder", False):
            return {"": layout}
        return {"encoder": layout, **_decoder(inputs, words)}
    elif "input_ids" in inputs:
        image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if image_token is not None:
            return _embedded(model, int(image_token), inputs, photos, words)
        tower = module_at(model, *VISION)
        if tower is not None and inputs["pixel_values"].ndim == 4:  # two encoders, side by side
            text = words.layout(inputs["input_ids"], inputs.get("attention_mask"))
            return {"vision": _vision(tower, inputs, photos), "text": text}
    raise ValueError(
        f"the layout of {kind} with the inputs {sorted(inputs)} is not known here; {HAND}"
    )


# --- texts


class _Words:
    """The texts of a batch, and who can say which of its tokens are theirs."""

    def __init__(self, tokenizer: Any, texts: Sequence[Text] | None) -> None:
        if texts is not None and tokenizer is None:
            raise ValueError("texts were given without the tokenizer that knows their characters")
        self.tokenizer, self.texts = tokenizer, texts

    def layout(
        self, ids: Int[Tensor, "b n"], mask: Int[Tensor, "b n"] | None, taken: Any = None
    ) -> Layout:
        """The spans of the words of a sequence, beside what is `taken` by images."""
        return Layout(tuple(self.spans(ids, mask, taken)), ids.shape[1])

    def spans(
        self, ids: Int[Tensor, "b n"], mask: Int[Tensor, "b n"] | None, taken: Any = None
    ) -> list[Span]:
        """The spans "text" (and "text 2" of pairs) and "special"; padding belongs to none."""
        ids = ids.cpu()
        real = torch.ones_like(ids).bool() if mask is None else mask.cpu().bool()
        if taken is not None:
            real = real & ~taken
        if self.tokenizer is None:
            return [_tokens("text", real)]
        if self.texts is None:
            extra = special(self.tokenizer, ids) & real
            return [_tokens("text", real & ~extra), *_some("special", extra)]
        found = locate(self.tokenizer, self.texts, ids, None if mask is None else mask.cpu())
        names = ["text", "text 2"][: int(found.sequence.max()) + 1] or ["text"]
        spans = [
            _tokens(name, found.sequence == which, found.geometry(which))
            for which, name in enumerate(names)
        ]
        return [*spans, *_some("special", (found.sequence < 0) & real)]


def _tokens(name: str, which: Bool[Tensor, "b n"], geometry: TextGeometry | None = None) -> Span:
    """The tokens marked in each row, first ones first; the geometry follows them."""
    count = int(which.sum(dim=1).max())
    index = torch.full((len(which), count), -1, dtype=torch.long)
    for row, marked in enumerate(which):
        places = marked.nonzero()[:, 0]
        index[row, : len(places)] = places
    if geometry is not None:
        spans = geometry.spans.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, 2))
        geometry = TextGeometry(geometry.texts, torch.where(index[..., None] >= 0, spans, -1))
    return Span(name, (count,), compact(index), geometry)


def _some(name: str, which: Bool[Tensor, "b n"]) -> list[Span]:
    return [_tokens(name, which)] if which.any() else []


def _decoder(inputs: Mapping[str, Any], words: _Words) -> dict[str, Layout]:
    """The decoder's sequence, where its tokens are given; a target text is not the source text."""
    ids = inputs.get("decoder_input_ids")
    if ids is None:
        return {}
    own = _Words(words.tokenizer, None)
    return {"decoder": own.layout(ids, inputs.get("decoder_attention_mask"))}


# --- photos


def _vision(tower: nn.Module, inputs: Mapping[str, Any], photos: Photos | None) -> Layout:
    height, width = inputs["pixel_values"].shape[-2:]
    geometry = None if photos is None else photos.alone()
    return vision_layout(tower, (height, width), geometry)


def _detr(model: nn.Module, inputs: Mapping[str, Any], photos: Photos | None) -> dict[str, Layout]:
    """The feature map that the encoder reads, and the object queries of the decoder."""
    config: Any = model.config
    height, width = inputs["pixel_values"].shape[-2:]
    stride = 16 if getattr(config, "dilation", False) else 32
    geometry = None if photos is None else photos.alone()
    count = int(config.num_queries)
    queries = Layout((Span("queries", (count,), slice(0, count)),), count)
    return {"encoder": feature_layout((height, width), stride, geometry), "decoder": queries}


def _vilt(model: Any, inputs: Mapping[str, Any], photos: Photos | None, words: _Words) -> Layout:
    """Text, then a class token, then the patches in the order in which ViLT draws them.

    ViLT shuffles patches at random in every forward pass. The order given here is that of the next
    one, from the present state of the random generator, which is left as it is; nothing else may
    draw in between, so a model in training, whose dropout draws first, is refused.
    """
    if model.training:
        raise ValueError("ViLT in training draws its patches after dropout; call model.eval()")
    embeddings = module_at(model, "vilt.embeddings", "embeddings")
    pixels = inputs["pixel_values"]
    mask = inputs.get("pixel_mask")
    mask = torch.ones_like(pixels[:, 0]).long() if mask is None else mask
    with torch.random.fork_rng(), torch.no_grad():
        _, real, (drawn, grid) = embeddings.visual_embed(
            pixels, mask, max_image_length=model.config.max_image_length
        )
    ids = inputs["input_ids"]
    length = ids.shape[1]
    places = torch.full((len(ids), *(int(n) for n in grid)), -1, dtype=torch.long)
    for sample, (cells, there) in enumerate(zip(drawn.tolist(), real[:, 1:].tolist(), strict=True)):
        for at, ((row, column), kept) in enumerate(zip(cells, there, strict=True)):
            if kept:
                places[sample, row, column] = length + 1 + at
    patch = patches_of(embeddings.patch_embeddings).patch
    used = (places.shape[1] * patch[0], places.shape[2] * patch[1])
    geometry = None if photos is None else photos.alone()
    if geometry is not None and geometry.canvas != used:
        raise ValueError(f"ViLT was given {used} pixels, the geometry leads to {geometry.canvas}")
    spans = words.spans(ids, inputs.get("attention_mask"))
    spans.append(Span("class", (1,), slice(length, length + 1)))
    spans.append(cells_span("image", list(places), geometry))
    return Layout(tuple(spans), length + 1 + drawn.shape[1])


# --- image tokens inside text


def _embedded(
    model: Any, image_token: int, inputs: Mapping[str, Any], photos: Photos | None, words: _Words
) -> dict[str, Layout]:
    """A language model that reads image tokens between words, and its image encoder."""
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    taken = ids == image_token
    parts: dict[str, Layout] = {}
    tower = module_at(model, *VISION)
    pixels = inputs["pixel_values"]
    if "image_grid_thw" in inputs:
        vision = model.config.vision_config
        merge = int(vision.spatial_merge_size)
        grids = [(int(h), int(w)) for _, h, w in inputs["image_grid_thw"].tolist()]
        cell = (int(vision.patch_size) * merge,) * 2
        spans = grid_spans(taken, [(h // merge, w // merge) for h, w in grids], cell, photos)
        if not hasattr(vision, "window_size"):  # Qwen2.5-VL sorts its patches by windows
            parts["vision"] = merged_layout(grids, merge, photos)
    elif "image_sizes" in inputs and pixels.ndim == 5 and tower is not None:
        spans = anyres_spans(model, taken, inputs, photos, patches_of(tower))
    elif tower is not None and pixels.ndim == 4:
        patches = patches_of(tower)
        canvas = (pixels.shape[-2], pixels.shape[-1])
        grids = [patches.grid(canvas)] * len(pixels)
        whole = getattr(model.config, "vision_feature_select_strategy", "default") == "full"
        spans = grid_spans(taken, grids, patches.patch, photos, patches.lead if whole else 0)
        geometry = None if photos is None else photos.tiles.geometries[0]  # a row a photo
        parts["vision"] = vision_layout(tower, canvas, geometry)
    elif tower is not None and pixels.ndim == 5 and hasattr(model.config, "scale_factor"):
        patches, merge = patches_of(tower), int(model.config.scale_factor)
        rows, columns = patches.grid((pixels.shape[-2], pixels.shape[-1]))
        cell = (patches.patch[0] * merge, patches.patch[1] * merge)
        spans = tile_spans(taken, (rows // merge, columns // merge), cell, photos)
    else:
        raise ValueError(
            f"how {model.config.model_type} puts photos among its words is not known here; {HAND}"
        )
    spans += words.spans(ids, mask, taken)
    return {"language": Layout(tuple(spans), ids.shape[1]), **parts}
