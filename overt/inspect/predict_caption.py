"""Caption an image, and map each word to the image."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.inspect.collate import keep_masks, make_batch, text_reader
from overt.inspect.inputs import ModelInput, model_errors
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap
    from overt.data.batch import Batch
    from overt.nn.captioning.captioner import Memory

MAPS = {
    "attention": "attention of each word, in every layer and head",
    "gradient": "gradient of the probability of each word with respect to each part of the image",
}
TITLE = "from words to the image"


@dataclass(frozen=True, eq=False)
class CaptionResult:
    """Caption if generated, its probability, maps by title, and notes."""

    text: str | None
    chance: float
    maps: dict[str, "AttentionMap"]
    notes: tuple[str, ...] = ()


def caption_image(loaded: LoadedModel, model_input: ModelInput, method: str) -> CaptionResult:
    """Caption an image, or align a given caption, and return the map of each word.

    Removed parts of the image are hidden from the decoder; the encoder has already mixed them.
    """
    with model_errors(loaded.name):
        return _caption_batch(loaded, make_batch(loaded, model_input), model_input, method)


def _caption_batch(
    loaded: LoadedModel, batch: "Batch", model_input: ModelInput, method: str
) -> CaptionResult:
    import torch

    from overt.data.vocabulary import BEGIN, END, UNKNOWN
    from overt.metrics import word_alignment
    from overt.nn.captioning.decoding import DecodingRules, greedy

    known, model = loaded.spec, loaded.model
    assert known is not None and known.longest is not None
    reader: Any = text_reader(known)
    with torch.no_grad():
        # Without the text: a given caption is decoded below.
        memory = model.encode(replace(batch, tokens=None, token_mask=None, text=None))
        memory = memory.without(
            keep_masks({memory.layout.spans[0].name: memory.layout}, model_input)
        )
        if memory.present is not None and not bool(memory.present.any()):
            raise UserError("Every part of the image was removed: keep at least one.")
        if model_input.text is None:
            ids = greedy(
                model, batch, DecodingRules(max_length=known.longest), features=memory
            ).ids()[0]
            text, spans = _join_words(reader.decode(ids))
        else:
            ids, spans = reader.read(model_input.text)
            text = model_input.text
    if not ids:
        raise UserError("The generated caption is empty: try another image.")
    # The begin token predicts the first word, and the last word the end token.
    tokens = torch.tensor([[BEGIN, *ids]], device=memory.states.device)
    targets = torch.tensor([[*ids, END]], device=memory.states.device)

    def log_probabilities(states: "Tensor") -> "Tensor":
        logits, _ = _decode_with_attention(model, replace(memory, states=states), tokens)
        return logits.float().log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]

    with torch.no_grad():
        chance = float(log_probabilities(memory.states).sum().exp())
        attention = _word_rows(_decode_with_attention(model, memory, tokens)[1], text, spans)
    notes = []
    if model_input.text is not None:
        strange = [text[a:b] for (a, b), one in zip(spans, ids, strict=True) if one == UNKNOWN]
        notes = [f"Not in its vocabulary: {', '.join(dict.fromkeys(strange))}."] if strange else []
        notes.append(f"The probability of this caption is {chance:.2g}.")
    if method == "gradient":
        once = attention.over_layers().over_heads()
        # The end token has no row.
        count = len(ids)
        attention = word_alignment.region_gradients(
            lambda states: log_probabilities(states)[:, :count], memory.states, once
        )
    written = model_input.text is None
    return CaptionResult(text if written else None, chance, {TITLE: attention}, tuple(notes))


def _decode_with_attention(
    model: Any, memory: "Memory", tokens: "Tensor"
) -> tuple["Tensor", "AttentionMap"]:
    """Return the logits after every token and the attention, aligned if the model aligns it."""
    from overt.attention import words
    from overt.papers.a2.model import AlignedCaptioner

    if not isinstance(model, AlignedCaptioner):
        output = model.decode_captions(memory, tokens)
        return output.logits, output.attention
    with model.aligned() as trace:
        output = model.captioner.decode_captions(memory, tokens)
    return output.logits, trace.after((words(tokens.shape[1]), memory.layout))


def _word_rows(
    attention: "AttentionMap", text: str, spans: list[tuple[int, int]]
) -> "AttentionMap":
    """Keep the rows that predict words, named by them; drop the end token."""
    import torch

    from overt.attention import words
    from overt.geometry import TextGeometry

    count = len(spans)
    geometry = TextGeometry((text,), torch.tensor([spans]))
    mask = attention.mask
    return replace(
        attention,
        values=attention.values[:, :, :, :count],
        queries=words(count, geometry=geometry),
        mask=mask if mask is None or mask.shape[1] == 1 else mask[:, :count],
    )


def _join_words(words: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words with spaces, and return their character spans.

    >>> _join_words(["a", "dog"])
    ('a dog', [(0, 1), (2, 5)])
    """
    spans, at = [], 0
    for word in words:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    return " ".join(words), spans


def caption_answers(found: CaptionResult) -> list[tuple[str, float]]:
    """Return the generated caption with its probability; empty for a given caption."""
    if found.text is None:
        return []
    return [(found.text, found.chance if math.isfinite(found.chance) else math.nan)]
