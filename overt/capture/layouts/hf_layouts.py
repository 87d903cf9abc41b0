"""Layouts of Hugging Face models: words, image cells and extra tokens.

`layouts_of` uses the model, the processed inputs, and the images and texts themselves, and returns
one `Layout` per sequence. Most model families are recognized from their modules, configuration and
inputs; an unknown model is an error that explains how to build the Layout by hand.

Every token is accounted for, or there is an error: no token of an image, video or audio is labelled
as text. If images are placed between words, a short run of the model measures their positions. With
the images or videos, models that no rule fits are measured (`measured_spans`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from overt.attention import Layout, Span
from overt.capture.layouts.image_tokens import (
    BatchImages,
    anyres_spans,
    batch_images,
    batch_videos,
    grid_spans,
    merged_layout,
)
from overt.capture.layouts.influence import cells_agree, media_positions, raise_inside_watch
from overt.capture.layouts.measured_spans import (
    MeasuredSpans,
    mark_spans,
    marked_span,
    measure_spans,
    span_mask,
)
from overt.capture.layouts.media_batch import BatchMedia
from overt.capture.layouts.media_tokens import (
    float_inputs,
    media_error,
    media_inputs,
    media_token_masks,
    reads_no_text,
)
from overt.capture.layouts.patch_grids import (
    cells_span,
    compact_index,
    feature_layout,
    module_at,
    patch_owners,
    patch_spec,
    pixel_owners,
    vision_layout,
)
from overt.capture.layouts.text_tokens import Text, locate_tokens, special_token_mask
from overt.capture.session import innermost_model
from overt.geometry import TextGeometry

VISION = ("vision_model", "model.vision_model", "vision_tower", "model.vision_tower")
VISUAL = (*VISION, "visual", "model.visual")  # of Qwen, where patches come flat
DETR = ("detr", "conditional_detr", "table-transformer")
WINDOWED = ("swin", "swinv2", "swin2sr", "maskformer-swin", "donut-swin")
HAND = (
    "build it by hand: Layout((Span(name, shape, index, geometry), ...), length), where index is a "
    "slice or one row of positions per sample"
)
MEASURE = "pass processor= with images= or videos= to measure where they are, or " + HAND
# Image inputs of the rules, which need no images: each image is one grid of cells.
PLACED = frozenset(
    ("pixel_values", "pixel_mask", "pixel_attention_mask", "image_grid_thw", "image_sizes")
)


def layout_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any = None,
    tokenizer: Any = None,
    images: Sequence[Any] | None = None,
    texts: Sequence[Text] | None = None,
    part: str | None = None,
    videos: Sequence[Any] | None = None,
) -> Layout:
    """Return the layout of a sequence of a Hugging Face model.

    Args:
        model: The model.
        inputs: Its inputs, as returned by the processor.
        processor: As for `layouts_of`.
        tokenizer: As for `layouts_of`.
        images: As for `layouts_of`.
        texts: As for `layouts_of`.
        part: Key of `layouts_of` for a model with several sequences (two encoders, or an encoder
            and a decoder).
        videos: As for `layouts_of`.

    Returns:
        The layout of the sequence.

    Raises:
        ValueError: If `part` is needed or unknown, or as for `layouts_of`.

    Example:
        >>> from transformers import ViTConfig, ViTModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = ViTModel(ViTConfig(**sizes, intermediate_size=16, image_size=32, patch_size=8))
        >>> layout = layout_of(model, {"pixel_values": torch.rand(1, 3, 32, 32)})
        >>> [(span.name, span.shape) for span in layout.spans]
        [('class', (1,)), ('image', (4, 4))]
    """
    found = layouts_of(model, inputs, processor, tokenizer, images, texts, videos)
    if part is None and len(found) == 1:
        return next(iter(found.values()))
    if part not in found:
        raise ValueError(
            f"{type(model).__name__} has the sequences {sorted(found)}: select one of them with "
            f"part=..., got {part!r}"
        )
    return found[part]


def layouts_of(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any = None,
    tokenizer: Any = None,
    images: Sequence[Any] | None = None,
    texts: Sequence[Text] | None = None,
    videos: Sequence[Any] | None = None,
) -> dict[str, Layout]:
    """Return the layouts of all sequences of a Hugging Face model.

    A model that takes texts and images is run up to its language model, once per model and kind of
    inputs, to measure which positions depend on the images and on which of their cells. With
    `images` or `videos`, a model that no rule fits is measured as a whole: which pixels each token
    depends on, through the processor, tiles, merging, pooling and projector.

    Spans of images are "image" (all of the image, also as the thumbnail of tiles), "detail" (tiles
    that form one grid), "image tile 1" and so on (other tiles), "video" of shape (time, rows,
    columns), "newline" (after each row of cells), "separator" (other marks between cells),
    "padding" (tokens of empty tiles), "queries" (tokens of a resampler, which have no place) and
    "global" (tokens of the whole image, such as a class token). Several images of a sample have
    numbers: "image 2", "detail 2". The class token of a text encoder is the span "class" if the
    tokenizer has one; other special tokens are "special".

    Args:
        model: The model.
        inputs: Its inputs, as returned by the processor.
        processor: With `images`, maps each cell to its pixels.
        tokenizer: With `texts`, maps each token to its characters; by default that of `processor`.
        images: The images, or their (height, width), one or a list per sample.
        texts: The tokenized texts, or pairs of texts.
        videos: The videos, as frames or (frames, height, width), one or a list per sample.

    Returns:
        The layouts by the part of the model: "" for a single sequence, else names such as
        "vision", "text", "language", "encoder" and "decoder". "vision" are also the keys of the
        cross-attention of a language model (Mllama) or a Q-Former (BLIP-2) to the image. Without
        images or texts, spans have no geometry.

    Raises:
        ValueError: If a token is neither text nor placed: audio, media without `images` or
            `videos` and a rule, tokens that depend on overlapping or several parts of an image, and
            unknown models.
        TypeError: If the model is not a module, or the inputs are not a mapping.

    Example:
        >>> from transformers import T5Config, T5ForConditionalGeneration
        >>> sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        >>> model = T5ForConditionalGeneration(T5Config(vocab_size=16, **sizes))
        >>> inputs = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
        >>> inputs["decoder_input_ids"] = torch.ones(1, 3, dtype=torch.long)
        >>> {part: len(layout) for part, layout in layouts_of(model, inputs).items()}
        {'encoder': 5, 'decoder': 3}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            'inputs must be a mapping as a processor returns it, such as {"pixel_values": images} '
            f'or {{"input_ids": ids}}, got {type(inputs).__name__}'
        )
    model = innermost_model(model)  # compiled, distributed and PEFT wrappers hide the image encoder
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    tokenizer = tokenizer or getattr(processor, "tokenizer", None)
    batch = None if images is None else batch_images(processor, images)
    clips = None if videos is None else batch_videos(processor, videos)
    words = _TextSpans(tokenizer, texts)
    # An encoder-decoder such as Donut has its image encoder in a sub-configuration.
    encoder = getattr(getattr(getattr(model, "config", None), "encoder", None), "model_type", kind)
    if encoder in WINDOWED:
        raise ValueError(
            f"{encoder} attends inside windows, so one layout does not fit its maps; use "
            "patch_grids.stage_grids for the grid of each stage. For a window, " + HAND
        )
    needed = {"vilt": ("input_ids", "pixel_values"), **dict.fromkeys(DETR, ("pixel_values",))}
    if any(name not in inputs for name in needed.get(kind, ())):
        raise _unknown_model_error(kind, inputs)
    if kind == "vilt":
        return {"": _vilt_layout(model, inputs, batch, words)}
    if kind in DETR:
        return _detr_layouts(model, inputs, batch)
    if "input_ids" in inputs:
        return _text_layouts(model, inputs, batch, clips, words)
    if "pixel_values" in inputs and inputs["pixel_values"].ndim == 4:
        found = _vision_layout(module_at(model, *VISION) or model, inputs, batch)
        decoder = _decoder_layout(inputs, words, len(inputs["pixel_values"]))
        return {"encoder": found, **decoder} if decoder else {"": found}
    if "pixel_values" in inputs and inputs["pixel_values"].ndim == 3:
        raise ValueError(
            f"pixel_values must have the shape (b, 3, y, x), got "
            f"{tuple(inputs['pixel_values'].shape)}: use pixel_values[None] for one image"
        )
    raise _unknown_model_error(kind, inputs)


def _unknown_model_error(kind: str, inputs: Mapping[str, Any]) -> ValueError:
    return ValueError(f"no layout rule for {kind} with the inputs {sorted(inputs)}; {HAND}")


def _text_layouts(
    model: nn.Module,
    inputs: Mapping[str, Any],
    batch: BatchImages | None,
    clips: BatchMedia | None,
    words: "_TextSpans",
) -> dict[str, Layout]:
    """Return the layouts of a model with token ids, and images beside or between them."""
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", type(model).__name__))
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    if ids.ndim != 2 or reads_no_text(config):
        raise media_error(kind, ["input_ids"], HAND)
    media = media_inputs(model, inputs)
    if media:
        given = [each for each in (batch, clips) if each is not None]
        try:
            return _ruled_layouts(model, inputs, media, batch, words)
        except ValueError as problem:
            if not given:
                raise
            return _measured_layouts(model, inputs, given, words, problem)
    # Text alone: no id may stand for an image, a video or a sound.
    named = media_token_masks(config, ids, _not_padding(ids, mask))
    if named:
        raise media_error(kind, named, MEASURE)
    if not getattr(config, "is_encoder_decoder", False):
        return {"": words.layout(ids, mask, class_span=True)}
    return {"encoder": words.layout(ids, mask), **_decoder_layout(inputs, words, len(ids))}


def _ruled_layouts(
    model: nn.Module,
    inputs: Mapping[str, Any],
    media: Sequence[str],
    batch: BatchImages | None,
    words: "_TextSpans",
) -> dict[str, Layout]:
    """Return the layouts of texts and images by the form of the inputs, and check them."""
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", type(model).__name__))
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    # Anything but images (video, audio, crops of other kinds) has no rule.
    if "pixel_values" not in inputs or not PLACED.issuperset(media):
        raise media_error(kind, set(media) - PLACED or media, MEASURE)
    image_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if image_token is not None:
        return _embedded_layouts(model, int(image_token), inputs, batch, words)
    # No image token: two encoders (CLIP), if the measurement finds no image among the text tokens.
    tower = module_at(model, *VISION)
    if tower is None or inputs["pixel_values"].ndim != 4:
        raise _unknown_model_error(kind, inputs)
    _check_image_positions(model, inputs, torch.zeros_like(ids).bool())  # two separate encoders
    text = words.layout(ids, mask, class_span=True)
    return {"vision": _vision_layout(tower, inputs, batch), "text": text}


def _measured_layouts(
    model: nn.Module,
    inputs: Mapping[str, Any],
    given: Sequence[BatchMedia],
    words: "_TextSpans",
    problem: ValueError,
) -> dict[str, Layout]:
    """Return the layouts of texts with images or videos by measurement.

    `problem` is why no rule fits.
    """
    config: Any = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", type(model).__name__))
    raise_inside_watch()
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    try:
        names = [each.input_name(inputs) for each in given]
        floats = float_inputs(model, inputs)
        if not set(names).issuperset(floats):
            raise media_error(kind, set(floats) - set(names), MEASURE)
        found = [measure_spans(model, inputs, each) for each in given]
        changed = media_positions(model, inputs, names)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as reason:
        raise ValueError(
            f"the images of {kind} cannot be placed by measurement ({reason}), and no rule fits "
            f"({problem})"
        ) from reason
    real = _not_padding(ids, mask)
    spans = [span for one in found if not one.beside for span in one.spans]
    taken = span_mask(spans, *ids.shape)
    queries = torch.zeros_like(taken)
    for one in found:
        queries |= one.queries if not one.beside else False
    wide = (torch.zeros_like(taken) if changed is None else changed) & ~taken & ~queries
    if bool(queries.any()):  # a query that reads nothing but the class token
        queries, wide = queries | wide, torch.zeros_like(wide)
    taken = taken | queries | wide
    # Ids of images that are no cell, and special tokens, may be marks between cells.
    extra = torch.stack(
        [torch.zeros_like(taken), *media_token_masks(config, ids, real & ~taken).values()]
    ).any(dim=0)
    special = extra
    if words.tokenizer is not None:
        special = extra | (special_token_mask(words.tokenizer, ids) & real & ~taken)
    marks = mark_spans(spans, special, ids)
    spans += marks + marked_span("queries", queries) + marked_span("global", wide)
    taken = taken | span_mask(marks, *ids.shape)
    spans += words.spans(ids, mask, taken, extra)
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    parts = {"encoder" if decodes else "language": Layout(tuple(spans), ids.shape[1])}
    keys = next(_key_layouts(model, inputs, given, found), None)
    parts |= {} if keys is None else {"vision": keys}
    return {**parts, **_decoder_layout(inputs, words, len(ids))}


def _key_layouts(
    model: nn.Module,
    inputs: Mapping[str, Any],
    given: Sequence[BatchMedia],
    found: Sequence[MeasuredSpans],
) -> Iterator[Layout]:
    """Yield the layout of the image that a language model or a resampler attends to."""
    tower = module_at(model, *VISION)
    for media, one in zip(given, found, strict=True):
        if one.beside:
            yield Layout(one.spans, one.length)
        elif (
            bool(one.queries.any())
            and isinstance(media, BatchImages)
            and all(len(row) == 1 for row in media.rows)
            and tower is not None
            and inputs[media.input_name(inputs)].ndim == 4
        ):
            yield _vision_layout(tower, inputs, media)


def _not_padding(ids: Int[Tensor, "b n"], mask: Int[Tensor, "b n"] | None) -> Bool[Tensor, "b n"]:
    """Return which tokens are not padding."""
    return torch.ones_like(ids).bool() if mask is None else mask.cpu().bool()


# --- measurements, once per model and kind of inputs

_MEASURED: WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = WeakKeyDictionary()


def _check_image_positions(
    model: nn.Module,
    inputs: Mapping[str, Any],
    taken: Bool[Tensor, "b n"],
    owner: Int[Tensor, "..."] | None = None,
) -> None:
    """Raise if the positions that depend on images are not those of the image tokens `taken`.

    With the `owner` token of each pixel, the cells are compared as well.
    """
    # Depends on the model and on which inputs it gets, not on their values.
    known = _MEASURED.setdefault(model, set())
    seen = (*sorted(inputs), f"{inputs['pixel_values'].ndim} axes")
    if seen in known:
        return
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise_inside_watch()
    try:
        found = media_positions(model, inputs, media_inputs(model, inputs))
        tower = module_at(model, *VISUAL)
        apart = owner is None or (
            tower is not None and cells_agree(model, inputs, tower, taken, owner)
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as problem:
        raise ValueError(
            f"{kind} does not run on these inputs, so the positions of its images cannot be "
            f"measured ({problem}); pass all outputs of the processor, or {HAND}"
        ) from problem
    if found is None:
        raise ValueError(
            f"the positions of {kind} cannot be measured: no stack of layers has one vector per "
            f"input id; {HAND}"
        )
    if bool((found & ~taken).any()):
        raise media_error(kind, [f"{int((found & ~taken).sum())} positions"], HAND)
    if not apart:
        raise ValueError(
            f"{kind} resamples or mixes its image tokens, so a token does not correspond to one "
            f"cell of the image; {HAND}"
        )
    known.add(seen)


# --- texts


class _TextSpans:
    """Spans of the words of a batch, from its texts and tokenizer."""

    def __init__(self, tokenizer: Any, texts: Sequence[Text] | None) -> None:
        if texts is not None and tokenizer is None:
            raise ValueError("texts need the tokenizer: pass tokenizer= or processor=")
        self.tokenizer, self.texts = tokenizer, texts

    def layout(
        self, ids: Int[Tensor, "b n"], mask: Int[Tensor, "b n"] | None, class_span: bool = False
    ) -> Layout:
        """Return the layout of a text sequence; `class_span` if the class token has a span."""
        ids = ids.cpu()
        first = torch.zeros_like(ids).bool()
        token = getattr(self.tokenizer, "cls_token_id", None)
        if class_span and token is not None:
            here = (ids == token) & _not_padding(ids, mask)
            first = here & (here.cumsum(dim=1) == 1)
        spans = self.spans(ids, mask, first)
        return Layout((*spans, *_optional_span("class", first)), ids.shape[1])

    def spans(
        self,
        ids: Int[Tensor, "b n"],
        mask: Int[Tensor, "b n"] | None,
        taken: Bool[Tensor, "b n"] | None = None,
        extra: Bool[Tensor, "b n"] | None = None,
    ) -> list[Span]:
        """Return the spans "text" (and "text 2" for pairs) and "special"; none for padding.

        Positions `taken` belong to other spans; positions `extra` are special in any case.
        """
        ids = ids.cpu()
        real = _not_padding(ids, mask)
        # Each real token is in one span: another one (`taken`), a text, or "special".
        real = real if taken is None else real & ~taken
        extra = torch.zeros_like(real) if extra is None else extra & real
        if self.texts is None:
            if self.tokenizer is not None:
                extra = extra | (special_token_mask(self.tokenizer, ids) & real)
            return [_token_span("text", real & ~extra), *_optional_span("special", extra)]
        found = locate_tokens(self.tokenizer, self.texts, ids, None if mask is None else mask.cpu())
        # Ids that the tokenizer did not make of the texts are special, unless they are `taken`.
        names = ["text", "text 2"][: int(found.sequence.max()) + 1] or ["text"]
        sequence = found.sequence.masked_fill(~real | extra, -1)
        spans = [
            _token_span(name, sequence == which, found.geometry(which))
            for which, name in enumerate(names)
        ]
        return [*spans, *_optional_span("special", (sequence < 0) & real)]


def _token_span(
    name: str, which: Bool[Tensor, "b n"], geometry: TextGeometry | None = None
) -> Span:
    """Return a span of the tokens marked in each row, with their geometry."""
    count = int(which.sum(dim=1).max())
    index = torch.full((len(which), count), -1, dtype=torch.long)
    for row, tokens in enumerate(which):
        places = tokens.nonzero()[:, 0]
        index[row, : len(places)] = places
    if geometry is not None:
        spans = geometry.spans.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, 2))
        geometry = TextGeometry(geometry.texts, torch.where(index[..., None] >= 0, spans, -1))
    return Span(name, (count,), compact_index(index), geometry)


def _optional_span(name: str, which: Bool[Tensor, "b n"]) -> list[Span]:
    return [_token_span(name, which)] if which.any() else []


def _decoder_layout(
    inputs: Mapping[str, Any], words: _TextSpans, samples: int
) -> dict[str, Layout]:
    """The layout of the decoder, if its tokens are given; `texts` are those of the encoder."""
    ids = inputs.get("decoder_input_ids")
    if ids is None:
        return {}
    if ids.ndim != 2 or len(ids) != samples:  # audio codes, in several rows
        raise ValueError(
            f"decoder_input_ids must be {samples} rows of text tokens, got {tuple(ids.shape)}; "
            f"{HAND}"
        )
    own = _TextSpans(words.tokenizer, None)
    return {"decoder": own.layout(ids, inputs.get("decoder_attention_mask"))}


# --- images


def _vision_layout(
    tower: nn.Module, inputs: Mapping[str, Any], batch: BatchImages | None
) -> Layout:
    height, width = inputs["pixel_values"].shape[-2:]
    geometry = None if batch is None else batch.single_geometry()
    return vision_layout(tower, (height, width), geometry)


def _detr_layouts(
    model: nn.Module, inputs: Mapping[str, Any], batch: BatchImages | None
) -> dict[str, Layout]:
    """Layouts of the feature map in the encoder and the object queries of the decoder."""
    config: Any = model.config
    height, width = inputs["pixel_values"].shape[-2:]
    stride = 16 if getattr(config, "dilation", False) else 32
    geometry = None if batch is None else batch.single_geometry()
    count = int(config.num_queries)
    queries = Layout((Span("queries", (count,), slice(0, count)),), count)
    return {"encoder": feature_layout((height, width), stride, geometry), "decoder": queries}


def _vilt_layout(
    model: Any, inputs: Mapping[str, Any], batch: BatchImages | None, words: _TextSpans
) -> Layout:
    """Text, a class token, then the patches in the random order of the next forward pass.

    ViLT shuffles patches in every forward pass. The order returned here is that of the next one,
    from the current state of the random generator, which is not changed. No other random numbers
    may be drawn before, so a model in training mode, with dropout, is an error.
    """
    if model.training:
        raise ValueError("ViLT shuffles its patches after dropout; call model.eval() first")
    embeddings = module_at(model, "vilt.embeddings", "embeddings")
    pixels = inputs["pixel_values"]
    mask = inputs.get("pixel_mask")
    mask = torch.ones_like(pixels[:, 0]).long() if mask is None else mask
    # The same draw as in the next forward pass; afterwards the generator is where it was.
    with torch.random.fork_rng(), torch.no_grad():
        _, real, (drawn, grid) = embeddings.visual_embed(
            pixels, mask, max_image_length=model.config.max_image_length
        )
    ids = inputs["input_ids"]
    length = ids.shape[1]
    places = torch.full((len(ids), *(int(n) for n in grid)), -1, dtype=torch.long)
    # Position 0 of `real` is the class token; patches follow in the order in which they were drawn.
    for sample, (cells, there) in enumerate(zip(drawn.tolist(), real[:, 1:].tolist(), strict=True)):
        for at, ((row, column), kept) in enumerate(zip(cells, there, strict=True)):
            if kept:
                places[sample, row, column] = length + 1 + at
    patch = patch_spec(embeddings.patch_embeddings).patch
    # Cells cover whole patches only.
    used = (places.shape[1] * patch[0], places.shape[2] * patch[1])
    geometry = None if batch is None else batch.single_geometry()
    if geometry is not None and geometry.canvas != used:
        raise ValueError(f"ViLT has inputs of {used} pixels, the geometry has {geometry.canvas}")
    spans = words.spans(ids, inputs.get("attention_mask"))
    spans.append(Span("class", (1,), slice(length, length + 1)))
    spans.append(cells_span("image", list(places), geometry))
    return Layout(tuple(spans), length + 1 + drawn.shape[1])


# --- image tokens inside text


def _embedded_layouts(
    model: Any,
    image_token: int,
    inputs: Mapping[str, Any],
    batch: BatchImages | None,
    words: _TextSpans,
) -> dict[str, Layout]:
    """Layouts of a language model with image tokens between words, and of its image encoder."""
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    real = _not_padding(ids, mask)
    taken = (ids == image_token) & real
    parts: dict[str, Layout] = {}
    owner: Tensor | None = None
    tower = module_at(model, *VISION)
    pixels = inputs["pixel_values"]
    # How many cells each image has, and which pixels a cell covers, by the form of the inputs:
    # patches in one sequence (Qwen), an image and its tiles (LLaVA-NeXT), one canvas (LLaVA).
    if "image_grid_thw" in inputs:
        vision = model.config.vision_config
        merge = int(vision.spatial_merge_size)
        grids = [(int(h), int(w)) for _, h, w in inputs["image_grid_thw"].tolist()]
        cell = (int(vision.patch_size) * merge,) * 2
        merged = [(h // merge, w // merge) for h, w in grids]
        spans = grid_spans(taken, merged, cell, batch)
        owner = patch_owners(grids, merge)[:, None]
        # The image encoder has one position per patch, the language model one per merge x merge
        # patches.
        if not hasattr(vision, "window_size"):  # Qwen2.5-VL sorts its patches by windows
            parts["vision"] = merged_layout(grids, merge, batch)
    elif "image_sizes" in inputs and pixels.ndim == 5 and tower is not None:
        spans = anyres_spans(model, taken, inputs, batch, patch_spec(tower))
    elif tower is not None and pixels.ndim == 4:
        patches = patch_spec(tower)
        canvas = (pixels.shape[-2], pixels.shape[-1])
        grids = [patches.grid(canvas)] * len(pixels)
        whole = getattr(model.config, "vision_feature_select_strategy", "default") == "full"
        lead = patches.lead if whole else 0
        spans = grid_spans(taken, grids, patches.patch, batch, lead)
        owner = pixel_owners(canvas, len(pixels), grids[0], patches.patch, lead)[:, None]
        geometry = None if batch is None else batch.tiles.geometries[0]  # one row per image
        parts["vision"] = vision_layout(tower, canvas, geometry)
    else:
        raise ValueError(
            f"no layout rule for the image tokens of {model.config.model_type}; {MEASURE}"
        )
    _check_image_positions(model, inputs, taken, owner)
    others = media_token_masks(
        model.config, ids, real & ~taken
    )  # such as start and end of an image
    extra = torch.stack([torch.zeros_like(taken), *others.values()]).any(dim=0)
    spans += words.spans(ids, mask, taken, extra)
    return {"language": Layout(tuple(spans), ids.shape[1]), **parts}
