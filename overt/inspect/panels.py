"""Panels of attention: of captured calls, with names of positions, and of a network's maps."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.inspect.inputs import ModelInput, PreparedCall
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap, Layout, Span
    from overt.capture import AttentionTrace, Call
    from overt.viz.panel import Choice, Panel

# the map of calls, or of some rows
MapSource = Callable[["AttentionTrace", "Tensor | None"], "AttentionMap"]

MAX_WEIGHTS = 24_000_000  # per panel
MAX_SEARCHED = 500_000_000  # weights that are searched for sinks
MAPS = {
    "attention": "attention weights",
    "values": "attention weights times the norms of the values",
    "gradient": "gradient times attention, positive part",
    "rollout": "attention rollout through all layers",
    "relevance": "relevance of each input to the answer, through all layers",
    "search": "attention on the masked input with the highest confidence (networks of overt)",
}
ALL_LAYER_MAPS = ("rollout", "relevance")  # combine all layers and heads
GRADIENT_MAPS = ("gradient", "relevance")  # explain an answer of the model


@dataclass(frozen=True)
class ViewOptions:
    """What a view shows first, and its limits; None uses the default.

    A panel with more than `max_weights` weights has only one query. A forward pass of more than
    `max_flops` floating-point operations is rejected. `deletion` compares the maps of written words
    with random cells (`overt.inspect.deletion_check`).
    """

    layer: str | None = None
    head: int | None = None
    query: str | None = None
    method: str = "attention"
    max_weights: int = MAX_WEIGHTS
    max_flops: float = math.inf
    deletion: bool = False


# Positions


def infer_layouts(loaded: LoadedModel, prepared: PreparedCall) -> tuple[dict[str, "Layout"], str]:
    """Return the layout of each sequence, or an empty dict and the reason."""
    from overt.capture.layouts.hf_layouts import layouts_of
    from overt.viz.video_strip import split_frames

    size = (
        None if prepared.model_input.photo is None else tuple(prepared.model_input.photo.shape[:2])
    )
    try:
        if loaded.transform is not None:
            return _timm_layout(loaded, prepared, size), ""
        frames = prepared.model_input.frames
        layouts = layouts_of(
            loaded.model,
            prepared.inputs if prepared.prompt is None else prepared.prompt,
            processor=loaded.processor if frames else loaded.image_processor,
            tokenizer=loaded.tokenizer,
            images=None if size is None else [size],
            texts=None if prepared.text is None else [prepared.text],
            videos=[(len(frames), *frames[0].shape[:2])] if frames else None,
        )
        layouts = {part: split_frames(one) for part, one in layouts.items()}
    except ValueError as problem:
        return {}, str(problem).rstrip(".")
    if prepared.answer is not None and "language" in layouts:
        read = prepared.answer.ids[:-1].tolist()
        layouts["language"] = _with_answer(layouts["language"], read, loaded.tokenizer)
    return layouts, ""


def photos_of(model_input: ModelInput, spans: Sequence["Span"]) -> dict[str, Any]:
    """Return the photo behind each image grid, by the name of its span."""
    from overt.viz.video_strip import is_frame, step_photos

    names = list(dict.fromkeys(span.name for span in spans if is_frame(span)))
    found = {}
    if model_input.frames:
        found = dict(zip(names, step_photos(model_input.frames, max(1, len(names))), strict=False))
    elif model_input.photo is not None:
        found = {span.name: model_input.photo for span in spans}
    return found


def _with_answer(prompt: "Layout", ids: Sequence[int], tokenizer: Any) -> "Layout":
    """Append the tokens of an answer to the layout of its prompt; special tokens have no text."""
    import torch

    from overt.attention import Layout, Span
    from overt.geometry import TextGeometry

    special = set(tokenizer.all_special_ids)
    text, spans = "", []
    for token in ids:
        word = "" if token in special else tokenizer.decode([token]).strip()
        text += " " if text and word else ""
        spans.append((len(text), len(text) + len(word)) if word else (-1, -1))
        text += word
    start, end = len(prompt), len(prompt) + len(ids)
    if not ids:
        return prompt
    geometry = TextGeometry((text,), torch.tensor([spans]))
    return Layout((*prompt.spans, Span("answer", (len(ids),), slice(start, end), geometry)), end)


def _timm_layout(loaded: LoadedModel, prepared: PreparedCall, size: Any) -> dict[str, "Layout"]:
    from overt.capture.layouts.patch_grids import vision_layout
    from overt.capture.layouts.processors import transform_geometry

    assert loaded.transform is not None
    height, width = prepared.inputs["pixel_values"].shape[-2:]
    geometry = transform_geometry(loaded.transform, [size])
    return {"": vision_layout(loaded.model, (height, width), geometry)}


class AxisNames:
    """Layouts and position names of the axes of a call."""

    def __init__(
        self, tokenizer: Any, prepared: PreparedCall, layouts: Mapping[str, "Layout"], model: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.layouts = layouts
        self.inputs = prepared.inputs
        self.model = model
        self._owners = _sequence_owners(model)

    def answering(self, queries: Sequence[str]) -> str | None:
        """Return the query from which a text classifier predicts, its first token; else None."""
        config = getattr(self.model, "config", None)
        classifies = type(self.model).__name__.endswith("ForSequenceClassification")
        if not classifies or getattr(config, "is_encoder_decoder", False):
            return None
        stands = getattr(self.tokenizer, "cls_token", None)
        return "0" if stands is not None and queries and queries[0] == stands else None

    def reads_answer(self, call: "Call") -> bool:
        """Return whether the queries of a call are the prompt and the answer."""
        fits = self._fitting(call, 2)
        return call.shape[0] == 1 and bool(fits) and _match_layout(fits, call, 2) == "language"

    def axis(self, call: "Call", axis: int) -> tuple["Layout", list[str]]:
        """Return the layout and position names of the queries (2) or keys (3) of a call."""
        from overt.attention import GLOBAL_QUERY, Layout, Span

        count = call.shape[axis]
        fits = self._fitting(call, axis)
        if not fits and count == 1:
            return GLOBAL_QUERY, ["global"]
        # Several windows, or a length that no sequence has: positions without names.
        if not fits or call.shape[0] != 1:
            plain = Layout((Span("positions", (count,), slice(0, count)),), count)
            written = "decoder" in call.name and not (call.cross and axis == 3)
            return plain, self._written(count, written)
        part = _match_layout(fits, call, axis)
        return self.layouts[part], self._words(part)

    def _fitting(self, call: "Call", axis: int) -> list[str]:
        """Return the sequences that an axis can be: of its length, and that the module works on.

        The image encoder never works on the words of a vision-language model, nor its decoder on
        patches, whatever their lengths and names.
        """
        return [
            part
            for part, one in self.layouts.items()
            if len(one) == call.shape[axis]
            and (call.cross or part not in self._owners or call.module in self._owners[part])
        ]

    def _written(self, count: int, decodes: bool) -> list[str]:
        """Return the decoder tokens if their number fits; else numbers."""
        ids = self.inputs.get("decoder_input_ids")
        numbers = [str(at) for at in range(count)]
        if not decodes or ids is None or self.tokenizer is None or ids.shape != (1, count):
            return numbers
        return [self._word(*pair) for pair in zip(ids[0].tolist(), numbers, strict=True)]

    def _word(self, token: int, otherwise: str) -> str:
        """Decode a token; an empty one gets another name."""
        return self.tokenizer.decode([token]).strip() or otherwise

    def _words(self, part: str) -> list[str]:
        """Name characters and cells by their layout, and special tokens by the tokenizer."""
        from overt.viz.panel import grid_spans, position_labels, span_positions, text_spans

        layout = self.layouts[part]
        names = list(position_labels(layout))
        ids = self.inputs.get("decoder_input_ids" if part == "decoder" else "input_ids")
        if ids is None or self.tokenizer is None or part == "vision":
            return names
        named = {
            at for span in (*grid_spans(layout), *text_spans(layout)) for at in span_positions(span)
        }
        for at, token in enumerate(ids[0].tolist()):
            if at not in named and at < len(names):
                names[at] = self._word(token, names[at])
        return names


def _sequence_owners(model: Any) -> dict[str, frozenset[Any]]:
    """Return the modules that work on image patches and on the words of a vision-language model.

    Other models, and parts that are not found, have none: names decide.
    """
    from overt.capture.discovery import without_adapter
    from overt.capture.layouts.hf_layouts import VISUAL
    from overt.capture.layouts.patch_grids import module_at

    inner: Any = without_adapter(model)
    tower = module_at(inner, *VISUAL)
    if tower is None:
        return {}
    owners: dict[str, frozenset[Any]] = {"vision": frozenset(tower.modules())}
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    if decoder is not None and tower not in set(decoder.modules()):
        owners["language"] = frozenset(decoder.modules())
    return owners


def _match_layout(parts: Sequence[str], call: "Call", axis: int) -> str:
    """Of the sequences with the length of an axis, return the one that the module works on."""
    if call.cross:  # from decoder to encoder
        order = ("decoder", "text", "language") if axis == 2 else ("encoder", "vision", "text")
        return next((part for part in order if part in parts), parts[0])
    named = [part for part in parts if part and part in call.name]
    return named[-1] if named else parts[0]


# Panels of captured calls


def group_calls(trace: "AttentionTrace") -> Iterator["AttentionTrace"]:
    """Yield calls with the same queries and keys: alike in name, type and size."""
    from overt.capture import AttentionTrace

    found: dict[tuple[Any, ...], list[Call]] = {}
    for call in trace.calls:
        pattern = re.sub(r"\d+", "*", call.name)
        found.setdefault((pattern, call.cross, call.shape, call.step), []).append(call)
    for calls in found.values():
        yield AttentionTrace(calls, trace.layout)


def build_panel(
    group: "AttentionTrace",
    names: AxisNames,
    model_input: ModelInput,
    options: ViewOptions,
    source: MapSource,
) -> tuple["Panel", "Choice"]:
    """Return the panel of a group of calls and its choice."""
    import torch

    from overt.attribution.raw_attention import device_of
    from overt.viz.panel import choose, grid_spans, make_panel

    first = group.calls[0]
    b, h, q, k = first.shape
    queries, query_names = names.axis(first, 2)
    keys, key_names = names.axis(first, 3)
    title = f"{module_pattern(group)}: {_kind(first)}"
    layer = find_layer(group.names, options.layer, title)
    group = group.with_layout((queries, keys))
    through = options.method in ALL_LAYER_MAPS
    size = (1 if through else len(group) * h) * q * k
    about = [f"{len(group)} layers of {h} heads, {q} queries, {k} keys."]
    sinks = layer_sinks(group)
    about.append(describe_sinks(sinks, key_names))
    if b > 1 and options.method in ALL_LAYER_MAPS:
        raise UserError(
            f"{title} has {b} attention windows: {options.method} does not support windows."
        )
    if b > 1:
        about.append(f"It has {b} separate attention windows; this is the first.")
    at = None
    if size > options.max_weights:
        at = _single_query(queries, query_names, options, title)
        query_names = [query_names[at]]
        all_of = "All queries" if through else "All queries of all heads"
        about.append(f"{all_of} would be {size:,} numbers; this panel has one query.")
    if options.method != "attention":
        about.append(f"Shown: {MAPS[options.method]}.")
    try:
        rows = None if at is None else torch.full((b, 1), at, device=device_of(first))
        attention = source(group, rows)
    except ValueError as problem:
        raise UserError(f"{title} has no map '{options.method}': {problem}.") from problem
    photos = photos_of(model_input, [*grid_spans(queries), *grid_spans(keys)])
    shown = make_panel(
        replace(attention, keys=keys).select(torch.tensor([0])),
        title,
        [f"{options.method} through {len(group)} layers"] if through else group.names,
        query_names,
        key_names,
        photos,
        first.causal,
        " ".join(part for part in about if part),
    )
    if not through:
        shown = replace(shown, sinks=sinks)
    query = options.query if at is None else None
    if query is None and at is None and _needs_default_query(shown):
        found = _answer_position(shown) if options.method == "relevance" else None
        query = found or names.answering(query_names) or "mean"
    return shown, choose(shown, layer, options.head, query)


def _needs_default_query(shown: "Panel") -> bool:
    """Return whether the layout does not determine the default query.

    The class token of a text does so only in a model that predicts from it.
    """
    from overt.viz.panel import default_choice, grid_spans

    queries = shown.attention.queries
    named = {span.name for span in queries.spans}
    return default_choice(shown).query is None or (
        {"text", "class"} <= named and not grid_spans(queries)
    )


def _answer_position(shown: "Panel") -> str | None:
    """Return the position from which the answer is computed, if one dominates."""
    import torch

    # The position that gives the answer collects relevance from the others.
    rows = shown.attention.weights[0, 0, 0].clone()
    gained = rows.fill_diagonal_(0).sum(dim=-1) if rows.shape[0] == rows.shape[1] else rows.sum(-1)
    best = int(torch.argmax(gained))
    return str(best) if float(gained[best]) > 0.5 * float(gained.sum()) else None


def _single_query(queries: "Layout", names: Sequence[str], options: ViewOptions, title: str) -> int:
    from overt.viz.panel import default_query, find_position

    if options.query is not None and options.query != "mean":
        return find_position(queries, names, options.query, title)
    return default_query(queries, causal=True) or 0


def compute_map(
    group: "AttentionTrace", rows: "Tensor | None", method: str, model: Any, target: "Tensor | None"
) -> "AttentionMap":
    """Compute the map of this method."""
    import torch

    from overt.attention import Kind
    from overt.attribution import attention_rollout, gradients, value_weighted

    match method:
        case "rollout":
            return attention_rollout.rollout(group, rows)
        case "relevance":
            assert target is not None
            return gradients.relevance(group, target, rows)
        case "gradient":
            assert target is not None
            found = gradients.gradient_attention(group, target, rows)
            return replace(found, values=found.values.clamp_min(0), kind=Kind.AMOUNT)
        case "values":
            return value_weighted.value_norms(
                group, rows, value_weighted.find_output_projection(model)
            )
        case "search":
            raise ValueError("search needs a network of overt")
    if rows is None:
        return group.map()
    b, _, _, k = group.calls[0].shape
    return group.block(rows, torch.arange(k, device=rows.device)[None].expand(b, k))


def answer_score(loaded: LoadedModel, output: Any) -> "Tensor":
    """Return the score of the predicted class or next token."""
    for name in ("logits", "logits_per_image"):
        logits = getattr(output, name, None)
        if logits is not None and logits.requires_grad:
            # The next token of a language model is predicted at the last position.
            last = logits[:, -1] if logits.ndim == 3 else logits
            return last.amax(dim=-1).sum()
    raise UserError(
        f"{loaded.name} ({type(loaded.model).__name__}) has no output scores to "
        "explain: use attention, values or rollout."
    )


def layer_sinks(group: "AttentionTrace") -> tuple[tuple[int, ...], ...]:
    """Return the attention sinks of each layer: keys with high weight in most rows.

    It is empty for windows, for large groups, which are not searched, and for few keys.
    """
    from overt.attribution.sinks import find_sinks

    b, h, q, k = group.calls[0].shape
    if b > 1 or len(group) * h * q * k > MAX_SEARCHED:
        return ()
    try:
        found = find_sinks(group)
    except ValueError:
        return ()
    layers: list[list[int]] = [[] for _ in group.names]
    for sink in found:
        if sink.position >= 0:
            layers[group.names.index(sink.layer)].append(sink.position)
    return tuple(tuple(layer) for layer in layers)


def describe_sinks(sinks: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return a sentence on the sinks that are found in most layers, or an empty string."""
    found = Counter(position for layer in sinks for position in layer)
    if not found:
        return ""
    positions = ", ".join(
        f"{names[at]} (in {count} of {len(sinks)} layers)" for at, count in found.most_common(4)
    )
    return f"Attention sinks (over five times the uniform weight in most rows): {positions}."


def module_pattern(group: "AttentionTrace") -> str:
    """Return the module names as one pattern, with * where they differ."""
    found = set(group.names)
    return found.pop() or "model" if len(found) == 1 else re.sub(r"\d+", "*", group.names[0])


def _kind(call: "Call") -> str:
    if call.cross:
        return "cross-attention"
    return "causal self-attention" if call.causal else "self-attention"


# Panels of maps


def map_panels(
    maps: Mapping[str, "AttentionMap"], model_input: ModelInput, options: ViewOptions
) -> tuple[list["Panel"], list["Choice"]]:
    """Return a panel and choice for each map of a network, by title.

    A map without the chosen layer, head or query is left out, unless no map has it.
    """
    from overt.viz.panel import choose, make_panel, region_spans

    photo = model_input.photo
    photos = {} if photo is None else {"image": photo, "regions": photo}
    panels, choices, refused = [], [], []
    for title, attention in maps.items():
        count, heads = attention.values.shape[1:3]
        name = "layer" if heads > 1 or len(attention.queries) > 1 else "hop"
        layers = [title] if count == 1 else [f"{name} {number}" for number in range(count)]
        boxes = [f"box {at}" for at in range(len(attention.keys))]
        keys = boxes if region_spans(attention.keys) else None
        about = _describe_keys(attention)
        shown = make_panel(attention, title, layers, keys=keys, photos=photos, about=about)
        try:
            layer = find_layer(layers, options.layer, title)
            choices.append(choose(shown, layer, options.head, options.query))
        except UserError as error:
            refused.append(error)
            continue
        panels.append(shown)
    if refused and not panels:
        raise refused[0]
    return panels, choices


def find_layer(names: Sequence[str], layer: str | None, title: str) -> int | None:
    """Return the index of a layer by its name or number; None if no layer is given.

    >>> find_layer(["conv3", "conv4"], "-1", "VGG"), find_layer(["conv3", "conv4"], "conv3", "VGG")
    (1, 0)
    """
    from overt.viz.panel import parse_integer

    if not layer:
        return None
    if layer in names:
        return names.index(layer)
    count, number = len(names), parse_integer(layer)
    if number is not None and -count <= number < count:
        return number % count
    listed = ", ".join(names) if count <= 4 else f"{names[0]} to {names[-1]}"
    raise UserError(
        f"{title} has no layer '{layer}'; its {count} layers are 0 to {count - 1}, or by name "
        f"{listed}."
    )


def _describe_keys(attention: "AttentionMap") -> str:
    """Describe the keys; for hard attention, how many were kept."""
    from overt.viz.panel import is_hard_attention

    span = attention.keys.spans[0]
    if len(span.shape) != 2:
        return f"{len(span)} {'boxes' if span.name == 'regions' else 'words'}."
    rows, columns = span.shape
    if is_hard_attention(attention):
        kept = int(attention.weights.sum())
        return f"{kept} of {rows} x {columns} cells are kept; the others are dropped."
    return f"{rows} x {columns} cells."
