"""Panels of what was seen of a model: which calls belong together, and what their positions are."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.asking import Asked, Given
from overt.recipes.opening import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap, Layout
    from overt.capture import Call, Seen
    from overt.show.panel import Choice, Panel

Source = Callable[["Seen", "Tensor | None"], "AttentionMap"]  # the map of calls, or of rows of it

MOST_WEIGHTS = 24_000_000  # of a panel: more are not kept for every head and query
MOST_SEARCHED = 500_000_000  # weights that are gone through, part by part, to find sinks
MAPS = {
    "raw": "the weights themselves",
    "values": "weights times the length of what they carry",
    "gradient": "gradient times attention, what raises the answer",
    "rollout": "how much of each input reaches each position after all layers",
    "relevance": "how much each input matters to the answer, through all layers",
    "search": "attention on the masked input on which a network of overt is surest of its answer",
}
THROUGH = ("rollout", "relevance")  # all layers and heads become one
EXPLAINING = ("gradient", "relevance")  # an answer of the model


@dataclass(frozen=True)
class Wish:
    """What is to be drawn large, as a person says it; None is left to the view.

    A panel of more than `most` weights has one query alone. A pass of more than `work` floating
    point operations is refused before it begins.
    """

    layer: str | None = None
    head: int | None = None
    query: str | None = None
    way: str = "raw"
    most: int = MOST_WEIGHTS
    work: float = math.inf


# What the positions are


def layouts_for(subject: Subject, asked: Asked) -> tuple[dict[str, "Layout"], str]:
    """What the positions of each sequence are; or nothing, and why it is not known."""
    from overt.capture.positions.layouts import layouts_of

    size = None if asked.given.photo is None else tuple(asked.given.photo.shape[:2])
    try:
        if subject.transform is not None:
            return _timm_layout(subject, asked, size), ""
        return layouts_of(
            subject.model,
            asked.inputs,
            processor=subject.image_processor,
            tokenizer=subject.tokenizer,
            images=None if size is None else [size],
            texts=None if asked.text is None else [asked.text],
        ), ""
    except ValueError as problem:
        return {}, str(problem).rstrip(".")


def _timm_layout(subject: Subject, asked: Asked, size: Any) -> dict[str, "Layout"]:
    from overt.capture.positions.grids import vision_layout
    from overt.capture.positions.processors import transform_geometry

    assert subject.transform is not None
    height, width = asked.inputs["pixel_values"].shape[-2:]
    geometry = transform_geometry(subject.transform, [size])
    return {"": vision_layout(subject.model, (height, width), geometry)}


class Names:
    """Which layout an axis of a call has, and what its positions are called."""

    def __init__(
        self, tokenizer: Any, asked: Asked, layouts: Mapping[str, "Layout"], model: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.layouts = layouts
        self.inputs = asked.inputs
        self.model = model

    def answering(self, queries: Sequence[str]) -> str | None:
        """The position that a classifier of texts answers from, its first token; else None."""
        config = getattr(self.model, "config", None)
        classifies = type(self.model).__name__.endswith("ForSequenceClassification")
        if not classifies or getattr(config, "is_encoder_decoder", False):
            return None
        stands = getattr(self.tokenizer, "cls_token", None)
        return "0" if stands is not None and queries and queries[0] == stands else None

    def axis(self, call: "Call", axis: int) -> tuple["Layout", list[str]]:
        """The layout of the queries (2) or keys (3) of a call, and a name for each position."""
        from overt.attention import POINT, Layout, Span

        count = call.shape[axis]
        fits = [part for part, one in self.layouts.items() if len(one) == count]
        if not fits and count == 1:
            return POINT, ["global"]
        if not fits or call.shape[0] != 1:
            plain = Layout((Span("positions", (count,), slice(0, count)),), count)
            written = "decoder" in call.name and not (call.cross and axis == 3)
            return plain, self._written(count, written)
        part = _likeliest(fits, call, axis)
        return self.layouts[part], self._words(part)

    def _written(self, count: int, decodes: bool) -> list[str]:
        """The tokens that a decoder has written so far, where there are as many; else numbers."""
        ids = self.inputs.get("decoder_input_ids")
        numbers = [str(at) for at in range(count)]
        if not decodes or ids is None or self.tokenizer is None or ids.shape != (1, count):
            return numbers
        return [self._word(*pair) for pair in zip(ids[0].tolist(), numbers, strict=True)]

    def _word(self, token: int, otherwise: str) -> str:
        """A token as it is written; one that is written as nothing has another name."""
        return self.tokenizer.decode([token]).strip() or otherwise

    def _words(self, part: str) -> list[str]:
        """Characters and cells by their layout; what stands for itself by the tokenizer."""
        from overt.show.panel import grids, labels, positions, texts

        layout = self.layouts[part]
        names = list(labels(layout))
        ids = self.inputs.get("decoder_input_ids" if part == "decoder" else "input_ids")
        if ids is None or self.tokenizer is None or part == "vision":
            return names
        told = {at for span in (*grids(layout), *texts(layout)) for at in positions(span)}
        for at, token in enumerate(ids[0].tolist()):
            if at not in told and at < len(names):
                names[at] = self._word(token, names[at])
        return names


def _likeliest(parts: Sequence[str], call: "Call", axis: int) -> str:
    """Of the sequences that are as long as an axis, the one that the module works on."""
    if call.cross:  # from what writes to what was there before it
        order = ("decoder", "text", "language") if axis == 2 else ("encoder", "vision", "text")
        return next((part for part in order if part in parts), parts[0])
    named = [part for part in parts if part and part in call.name]
    return named[-1] if named else parts[0]


# Panels


def groups(seen: "Seen") -> Iterator["Seen"]:
    """The calls that look from and at the same things: alike in name, kind and size."""
    from overt.capture import Seen

    found: dict[tuple[Any, ...], list[Call]] = {}
    for call in seen.calls:
        pattern = re.sub(r"\d+", "*", call.name)
        found.setdefault((pattern, call.cross, call.shape, call.step), []).append(call)
    for calls in found.values():
        yield Seen(calls, seen.layout)


def panel_of(
    group: "Seen", names: Names, given: Given, wish: Wish, source: Source
) -> tuple["Panel", "Choice"]:
    """The panel of a group of calls, and what is drawn large of it."""
    import torch

    from overt.capture.derived.maps import device_of
    from overt.show.panel import choose, grids, panel, usual

    first = group.calls[0]
    b, h, q, k = first.shape
    queries, query_names = names.axis(first, 2)
    keys, key_names = names.axis(first, 3)
    title = f"{_pattern(group)}: {_kind(first)}"
    layer = _layer(group, wish.layer, title)
    group = group.within((queries, keys))
    through = wish.way in THROUGH
    size = (1 if through else len(group) * h) * q * k
    about = [f"{len(group)} layers of {h} heads, {q} queries, {k} keys."]
    if len(group) * h * q * k <= MOST_SEARCHED:
        about.append(_sinks(group, key_names))
    if b > 1 and wish.way in THROUGH:
        raise BadInput(f"{title} is in {b} windows, and what passes through them is not followed.")
    if b > 1:
        about.append(f"It attends in {b} windows by themselves; this is the first of them.")
    at = None
    if size > wish.most:
        at = _one_query(queries, query_names, wish, title)
        query_names = [query_names[at]]
        all_of = "All queries" if through else "All queries of all heads"
        about.append(f"{all_of} would be {size:,} numbers; this has one query.")
    if wish.way != "raw":
        about.append(f"Shown: {MAPS[wish.way]}.")
    try:
        rows = None if at is None else torch.full((b, 1), at, device=device_of(first))
        attention = source(group, rows)
    except ValueError as problem:
        raise BadInput(f"{title} has no map '{wish.way}': {problem}.") from problem
    pictures = [] if given.photo is None else [*grids(queries), *grids(keys)]
    photos = {span.name: given.photo for span in pictures}
    shown = panel(
        replace(attention, keys=keys).select(torch.tensor([0])),
        title,
        [f"{wish.way} through {len(group)} layers"] if through else group.names,
        query_names,
        key_names,
        photos,
        first.causal,
        " ".join(part for part in about if part),
    )
    query = wish.query if at is None else None
    if query is None and at is None and usual(shown).query is None:
        found = _answering(shown) if wish.way == "relevance" else None
        query = found or names.answering(query_names)
    return shown, choose(shown, layer, wish.head, query)


def _answering(shown: "Panel") -> str | None:
    """The position that the answer is made from, if it is one: the others keep to themselves."""
    import torch

    rows = shown.attention.weights[0, 0, 0].clone()
    gained = rows.fill_diagonal_(0).sum(dim=-1) if rows.shape[0] == rows.shape[1] else rows.sum(-1)
    best = int(torch.argmax(gained))
    return str(best) if float(gained[best]) > 0.5 * float(gained.sum()) else None


def _one_query(queries: "Layout", names: Sequence[str], wish: Wish, title: str) -> int:
    from overt.show.panel import find, usual_query

    if wish.query is not None and wish.query != "mean":
        return find(queries, names, wish.query, title)
    return usual_query(queries, causal=True) or 0


def derived(
    group: "Seen", rows: "Tensor | None", way: str, model: Any, target: "Tensor | None"
) -> "AttentionMap":
    """The map of this name; here a name becomes code."""
    import torch

    from overt.attention import Kind
    from overt.capture.derived import gradients, rolling, values

    match way:
        case "rollout":
            return rolling.rollout(group, rows)
        case "relevance":
            assert target is not None
            return gradients.relevance(group, target, rows)
        case "gradient":
            assert target is not None
            found = gradients.gradient_attention(group, target, rows)
            return replace(found, values=found.values.clamp_min(0), kind=Kind.AMOUNT)
        case "values":
            return values.value_norms(group, rows, values.projection_in(model))
        case "search":
            raise ValueError("masks are searched for networks of overt alone")
    if rows is None:
        return group.map()
    b, _, _, k = group.calls[0].shape
    return group.block(rows, torch.arange(k, device=rows.device)[None].expand(b, k))


def explained(subject: Subject, output: Any) -> "Tensor":
    """The score of what the model answers: of its class, or of its next word."""
    for name in ("logits", "logits_per_image"):
        logits = getattr(output, name, None)
        if logits is not None and logits.requires_grad:
            last = logits[:, -1] if logits.ndim == 3 else logits
            return last.amax(dim=-1).sum()
    raise BadInput(
        f"{subject.name} ({type(subject.model).__name__}) gives no scores that a map could "
        "explain; ask for raw, values or rollout."
    )


def _sinks(group: "Seen", names: Sequence[str]) -> str:
    """The keys that most queries of a layer look at, whatever they are, in a sentence."""
    from overt.capture.derived.sinks import find_sinks

    try:
        found = find_sinks(group.where(lambda call: call.shape[0] == 1))
    except ValueError:
        return ""
    layers: dict[int, set[str]] = {}
    for sink in found:
        if sink.position >= 0:
            layers.setdefault(sink.position, set()).add(sink.layer)
    if not layers:
        return ""
    listed = sorted(layers, key=lambda at: -len(layers[at]))[:4]
    said = ", ".join(f"{names[at]} (in {len(layers[at])} of {len(group)} layers)" for at in listed)
    return f"Sinks, which take over five times their share in most rows: {said}."


def _layer(group: "Seen", layer: str | None, title: str) -> int | None:
    """The place of a layer in a group, by its number there or by the name of its module."""
    if layer is None:
        return None
    if layer in group.names:
        return group.names.index(layer)
    if layer.lstrip("-").isdigit() and -len(group) <= int(layer) < len(group):
        return int(layer)
    raise BadInput(
        f"{title} has no layer '{layer}'; its {len(group)} layers are 0 to {len(group) - 1}, or "
        f"by name {group.names[0]} to {group.names[-1]}."
    )


def _pattern(group: "Seen") -> str:
    """The names of the modules in one, with * where they differ."""
    found = set(group.names)
    return found.pop() or "model" if len(found) == 1 else re.sub(r"\d+", "*", group.names[0])


def _kind(call: "Call") -> str:
    if call.cross:
        return "cross-attention"
    return "causal self-attention" if call.causal else "self-attention"
