"""Asking a captioner: what it says of a picture, and where each of its words comes from."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.asking import Asked, Given, run
from overt.recipes.feeding import batch_of, reader_of
from overt.recipes.opening import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap
    from overt.models.captioning.captioner import Memory

MAPS = {
    "raw": "what each word looked at, in every layer and head",
    "gradient": "how much the chance of each word hangs on each part of the picture",
}
TITLE = "from words to the picture"


@dataclass(frozen=True, eq=False)
class Described:
    """What a captioner says, if it was asked to, the chance of it, its maps by title, and notes."""

    text: str | None
    chance: float
    maps: dict[str, "AttentionMap"]
    notes: tuple[str, ...] = ()


def describe(subject: Subject, given: Given, way: str) -> Described:
    """What a captioner says of a picture, or, of a text that is given, where its words come from.

    What is removed of the picture is hidden from the words; what parts of a picture have told each
    other before that stays.
    """
    batch = batch_of(subject, given)
    found = run(
        subject.name,
        Asked(
            {"batch": batch}, lambda inputs: _described(subject, inputs["batch"], given, way), given
        ),
    )
    assert isinstance(found, Described)
    return found


def _described(subject: Subject, batch: Any, given: Given, way: str) -> Described:
    import torch

    from overt.data.vocabulary import BEGIN, END, UNKNOWN
    from overt.measure import wording
    from overt.models.captioning.decoding import Rules, greedy
    from overt.recipes.own import kept

    known, model = subject.spoken, subject.model
    assert known is not None and known.longest is not None
    reader: Any = reader_of(known)
    with torch.no_grad():
        memory = model.encode(replace(batch, tokens=None, token_mask=None, text=None))
        memory = memory.without(kept({memory.layout.spans[0].name: memory.layout}, given))
        if memory.present is not None and not bool(memory.present.any()):
            raise BadInput("every part of the picture was removed; leave one.")
        if given.text is None:
            ids = greedy(model, batch, Rules(longest=known.longest), features=memory).ids()[0]
            text, spans = _joined(reader.decode(ids))
        else:
            ids, spans = reader.read(given.text)
            text = given.text
    if not ids:
        raise BadInput("the captioner says nothing of this picture; give it another.")
    tokens = torch.tensor([[BEGIN, *ids]], device=memory.states.device)
    told = torch.tensor([[*ids, END]], device=memory.states.device)

    def tell(states: "Tensor") -> "Tensor":
        logits, _ = _written(model, replace(memory, states=states), tokens)
        return logits.float().log_softmax(dim=-1).gather(-1, told[..., None])[..., 0]

    with torch.no_grad():
        chance = float(tell(memory.states).sum().exp())
        attention = _of_words(_written(model, memory, tokens)[1], text, spans)
    notes = []
    if given.text is not None:
        strange = [text[a:b] for (a, b), one in zip(spans, ids, strict=True) if one == UNKNOWN]
        notes = [f"It does not know {', '.join(dict.fromkeys(strange))}."] if strange else []
        notes.append(f"The captioner gives this caption a chance of {chance:.2g}.")
    if way == "gradient":
        once = attention.over_layers().over_heads()
        count = len(ids)
        attention = wording.region_gradients(
            lambda states: tell(states)[:, :count], memory.states, once
        )
    written = given.text is None
    return Described(text if written else None, chance, {TITLE: attention}, tuple(notes))


def _written(model: Any, memory: "Memory", tokens: "Tensor") -> tuple["Tensor", "AttentionMap"]:
    """Logits after every token, and the attention behind them, aligned where the model is."""
    from overt.attention import words
    from overt.recipes.a2.networks import AlignedCaptioner

    if not isinstance(model, AlignedCaptioner):
        told = model.write(memory, tokens)
        return told.logits, told.attention
    with model.aligned() as seen:
        told = model.captioner.write(memory, tokens)
    return told.logits, seen.after((words(tokens.shape[1]), memory.layout))


def _of_words(attention: "AttentionMap", text: str, spans: list[tuple[int, int]]) -> "AttentionMap":
    """The rows that wrote words, each named by its word; the end of a caption is none."""
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


def _joined(words: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """Words with spaces between, and the characters of each.

    >>> _joined(["a", "dog"])
    ('a dog', [(0, 1), (2, 5)])
    """
    spans, at = [], 0
    for word in words:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    return " ".join(words), spans


def answers(found: Described) -> list[tuple[str, float]]:
    """The caption as the one answer, with its probability; a caption that was given is none."""
    if found.text is None:
        return []
    return [(found.text, found.chance if math.isfinite(found.chance) else math.nan)]
