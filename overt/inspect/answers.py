"""Answers of a model with their probabilities: classes, captions, next tokens or text."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from overt.inspect.inputs import GENERATIVE_SUFFIXES, PreparedCall
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

MAX_ANSWERS = 5
Answer = tuple[str, float]  # name and probability; NaN if unknown


def top_classes(logits: "Tensor", name: Callable[[int], str]) -> list[Answer]:
    """Return the most probable classes, most probable first; none if a logit is NaN."""
    chances = logits.detach().float().softmax(dim=-1)
    if bool(chances.isnan().any()):
        return []
    best = chances.topk(min(MAX_ANSWERS, len(chances)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(name(at), chance) for at, chance in pairs]


def model_answers(loaded: LoadedModel, output: Any, prepared: PreparedCall) -> list[Answer]:
    """Return the answers of a Hugging Face or timm model, most probable first.

    Generated text has probability NaN. A language model answers with next tokens, an image-text
    matching model with the given captions. A model without answers or with NaN logits gives none.
    """
    if prepared.captions:
        return sorted(prepared.captions, key=lambda one: -one[1])[:MAX_ANSWERS]
    if prepared.generated is not None:
        return [(prepared.generated, math.nan)]
    logits = getattr(output, "logits", None)
    if logits is not None and logits.ndim == 3 and is_language_model(loaded):
        return top_classes(
            logits[0, -1], lambda at: f"next: “{loaded.tokenizer.decode([at]).strip()}”"
        )
    labels = getattr(getattr(loaded.model, "config", None), "id2label", None) or {}
    if logits is None or logits.ndim != 2 or logits.shape[1] != len(labels):
        return []
    return top_classes(logits[0], lambda at: str(labels.get(at, at)))


def is_language_model(loaded: LoadedModel) -> bool:
    """Return whether the model predicts the next token."""
    kind = type(loaded.model).__name__
    return loaded.tokenizer is not None and kind.endswith(GENERATIVE_SUFFIXES)


def answer_note(answers: Sequence[Answer], writes: bool = False) -> str:
    """Return a sentence with the first answer, or an empty string."""
    if not answers:
        return ""
    name, chance = answers[0]
    if writes or math.isnan(chance):
        return f"It writes: {name}" if name.strip() else "It writes an empty text."
    return f"It answers {name} ({chance:.0%})."


def similarity_note(output: Any, prepared: PreparedCall) -> str:
    """Return a note on the cosine similarity of an image and its only caption, if available."""
    picture, text = (getattr(output, name, None) for name in ("image_embeds", "text_embeds"))
    if prepared.captions or picture is None or text is None or picture.shape != text.shape:
        return ""
    cosine = float((picture.detach() * text.detach()).sum() / (picture.norm() * text.norm()))
    return (
        f"Cosine similarity of image and text: {cosine:.2f}. Give several captions, one per line, "
        "to see which fits best."
    )
