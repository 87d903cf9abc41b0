"""Answer of a vision-language model, word by word: generation, probabilities, and maps of words.

The model generates an answer, and then runs once on the prompt and the answer. Token n of the
answer is predicted at the position before it, and the attention of that position is its row.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.inspect.answers import is_language_model
from overt.inspect.inputs import (
    MAX_NEW_TOKENS,
    ModelInput,
    PreparedCall,
    WrittenAnswer,
    model_errors,
    prepare_call,
)
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.panels import (
    ALL_LAYER_MAPS,
    GRADIENT_MAPS,
    MAPS,
    AxisNames,
    ViewOptions,
    compute_map,
    describe_sinks,
    find_layer,
    layer_sinks,
    module_pattern,
    photos_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap, Layout
    from overt.capture import AttentionTrace
    from overt.viz.panel import Choice, Panel

# settings of a model that name the tokens of images and videos
MEDIA_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


# The answer


def prepare_written_call(
    loaded: LoadedModel,
    model_input: ModelInput,
    max_flops: float = math.inf,
    answer: WrittenAnswer | None = None,
) -> PreparedCall:
    """Prepare a call; a vision-language model first generates an answer, which is appended.

    Args:
        loaded: The model.
        model_input: Its input.
        max_flops: As for `prepare_call`.
        answer: The answer to append; None generates one.
    """
    prepared = prepare_call(loaded, model_input, max_flops)
    if not _writes_answers(loaded, prepared):
        return prepared
    written = answer or generate_answer(loaded, prepared.inputs)
    if not written.words:
        return replace(prepared, generated="")
    return replace(
        prepared,
        inputs=append_tokens(prepared.inputs, written.ids[:-1]),
        prompt=prepared.inputs,
        generated=written.text,
        answer=written,
    )


def _writes_answers(loaded: LoadedModel, prepared: PreparedCall) -> bool:
    """Return whether a decoder with image tokens reads an image and a text."""
    given = prepared.model_input
    looks = given.photo is not None or bool(given.frames)
    if not looks or given.text is None or prepared.generated is not None:
        return False
    return (
        is_language_model(loaded)
        and bool(_media_tokens(loaded.model))
        and loaded.model.can_generate()
    )


def _media_tokens(model: Any) -> list[int]:
    """Return the ids of the tokens of images and videos."""
    known = [getattr(model.config, name, None) for name in MEDIA_TOKENS]
    return [token for token in known if isinstance(token, int)]


def generate_answer(loaded: LoadedModel, prompt: Mapping[str, Any]) -> WrittenAnswer:
    """Generate the most probable answer, greedily; tokens of images and videos are excluded."""
    import torch

    from overt.metrics.generation_signals import written_words

    model, ids = loaded.model, prompt["input_ids"]
    takes = inspect.signature(model.forward).parameters
    with torch.no_grad(), model_errors(loaded.name):
        written = model.generate(
            **{name: value for name, value in prompt.items() if name in takes},
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            suppress_tokens=_media_tokens(model),
        )
    # Some models return the prompt before the new tokens, some do not.
    start = ids.shape[1] if torch.equal(written[:, : ids.shape[1]], ids) else 0
    new = written[0, start:]
    (words,), numbers = written_words(loaded.tokenizer, [new.tolist()])
    return WrittenAnswer(new, tuple(words), numbers[0])


def append_tokens(prompt: Mapping[str, Any], ids: "Tensor") -> dict[str, Any]:
    """Append text tokens to `input_ids` and to the inputs that describe each token."""
    import torch

    grown = dict(prompt)
    count, length = len(ids), prompt["input_ids"].shape[1]
    grown["input_ids"] = torch.cat([prompt["input_ids"], ids[None]], dim=1)
    for name, value in prompt.items():
        if name == "input_ids" or value.shape[:2] != (1, length):
            continue
        if name == "attention_mask":
            more = torch.ones_like(value[:, :1])
        elif name == "cross_attention_mask":  # a new token sees the same images as the last one
            more = value[:, -1:]
        elif name in ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask"):
            more = torch.zeros_like(value[:, :1])  # text
        else:
            continue
        grown[name] = torch.cat([value, more.repeat_interleave(count, dim=1)], dim=1)
    return grown


def token_scores(output: Any, answer: WrittenAnswer) -> "Tensor":
    """Return the log-probability of each token of the answer."""
    count = len(answer.ids)
    log_probabilities = output.logits[0, -count:].float().log_softmax(dim=-1)
    return log_probabilities.gather(-1, answer.ids[:, None].to(log_probabilities.device))[:, 0]


def word_probabilities(scores: "Tensor", answer: WrittenAnswer) -> tuple[float, ...]:
    """Return the probability of each word: the product over its tokens."""
    return tuple(
        float(scores.detach()[(answer.word_of_token == word).to(scores.device)].sum().exp())
        for word in range(len(answer.words))
    )


def score_words(loaded: LoadedModel, prepared: PreparedCall) -> tuple[float, ...]:
    """Run the model on the prompt and the answer; return the probability of each word."""
    import torch

    assert prepared.answer is not None
    with torch.no_grad(), model_errors(loaded.name):
        scores = token_scores(prepared.call(prepared.inputs), prepared.answer)
    return word_probabilities(scores, prepared.answer)


# Maps of words


def build_answer_panel(
    group: "AttentionTrace",
    names: AxisNames,
    prepared: PreparedCall,
    options: ViewOptions,
    model: Any,
    scores: "Tensor",
) -> tuple["Panel", "Choice"]:
    """Return the panel of a group of calls with a row per word of the answer, and its choice."""
    import torch

    from overt.viz.panel import choose, grid_spans, make_panel

    answer = prepared.answer
    assert answer is not None
    first = group.calls[0]
    keys, key_names = names.axis(first, 3)
    title = "the answer, word by word" + (": cross-attention" if first.cross else "")
    through = options.method in ALL_LAYER_MAPS
    layer = None if through else find_layer(group.names, options.layer, title)
    sinks = layer_sinks(group)
    size = f"{len(group)} layers of {first.shape[1]} heads, {len(keys)} keys"
    about = [
        f"{module_pattern(group)}: {size}.",
        describe_sinks(sinks, key_names),
        "" if options.method == "attention" else f"Shown: {MAPS[options.method]}, of each word.",
    ]
    attention = word_map(group.with_layout((names.axis(first, 2)[0], keys)), answer, options.method,
                         model, scores)  # fmt: skip
    if attention.values.numel() > options.max_weights:
        attention = attention.over_heads()
        about.append("All heads would be too many numbers: this is their mean.")
    shown = make_panel(
        replace(attention, keys=keys).select(torch.tensor([0])),
        title,
        [f"{options.method} through {len(group)} layers"] if through else group.names,
        answer.words,
        key_names,
        photos_of(prepared.model_input, grid_spans(keys)),
        about=" ".join(part for part in about if part),
    )
    shown = replace(shown, chances=word_probabilities(scores, answer))
    if not through:
        shown = replace(shown, sinks=sinks)
    head = None if shown.heads == 1 else options.head
    try:
        return shown, choose(shown, layer, head, options.query or "mean")
    except UserError:  # a query of another panel
        return shown, choose(shown, layer, head, "mean")


def word_map(
    group: "AttentionTrace",
    answer: WrittenAnswer,
    method: str,
    model: Any,
    scores: "Tensor",
) -> "AttentionMap":
    """Compute the map of each word: the mean over its tokens; gradients are those of the word."""
    import torch

    from overt.attribution.raw_attention import device_of

    # The position before token n predicts it.
    last = group.calls[0].shape[2]
    rows = torch.arange(last - len(answer.ids), last, device=device_of(group.calls[0]))
    tokens = [
        (answer.word_of_token == word).nonzero()[:, 0].to(rows.device)
        for word in range(len(answer.words))
    ]
    if method in GRADIENT_MAPS:
        parts = [
            compute_map(group, rows[at][None], method, model, scores[at.to(scores.device)].sum())
            for at in tokens
        ]
        return _stack_words([_word_mean(part, range(len(part.queries))) for part in parts], answer)
    whole = compute_map(group, rows[None], method, model, None)
    return _stack_words([_word_mean(whole, at.tolist()) for at in tokens], answer)


def _word_mean(attention: "AttentionMap", at: Sequence[int]) -> tuple["AttentionMap", Any, Any]:
    """Return a map with the mean of its rows and their mask."""
    rows = list(at)
    mask = attention.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, rows].any(dim=1, keepdim=True)
    return attention, attention.weights[:, :, :, rows].mean(dim=3, keepdim=True), mask


def _stack_words(parts: Sequence[tuple[Any, Any, Any]], answer: WrittenAnswer) -> "AttentionMap":
    import torch

    from overt.attention import Form

    first, _, mask = parts[0]
    masks = None if mask is None else torch.cat([one[2] for one in parts], dim=1)
    values = torch.cat([one[1] for one in parts], dim=3)
    queries = answer_layout(answer)
    return replace(first, values=values, queries=queries, mask=masks, form=Form.PLAIN)


def answer_layout(answer: WrittenAnswer) -> "Layout":
    """Return the layout of the words of an answer, with their characters."""
    import torch

    from overt.attention import words
    from overt.geometry import TextGeometry

    spans, start = [], 0
    for word in answer.words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    geometry = TextGeometry((answer.text,), torch.tensor([spans]))
    return words(len(spans), geometry=geometry)
