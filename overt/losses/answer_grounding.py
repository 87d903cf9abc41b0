"""Attention of answer words on image tokens, supervised, in any vision-language model.

The targets are made by `overt.targets.answer_boxes` and travel in the batch as three tensors, so
that they pass through a collator, the Hugging Face Trainer, and processes like any other input.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overt.attention import AttentionMap
from overt.capture.trace import AttentionTrace
from overt.losses.attention_losses import kl
from overt.losses.loss import Loss

# Inputs of a batch: positions of the queries (b s) and of the image tokens (b k), -1 for none, and
# the target of each query over the image tokens (b s k).
WORDS, TOKENS, TARGET = "grounded_words", "grounded_tokens", "grounded_target"
ANSWER_INPUTS = (WORDS, TOKENS, TARGET)


def answer_grounding(
    trace: AttentionTrace,
    inputs: Mapping[str, Any],
    compare: Callable[[AttentionMap, AttentionMap], Loss] = kl,
    heads: Sequence[int] | None = None,
) -> Loss | None:
    """Compare the attention that writes each answer word, over the image tokens, with its target.

    Weights are renormalized over the image tokens that a word may see; only these rows are
    computed. For `overt.train.add_attention_loss` and `overt.wrap`, whose `layers=` chooses layers.

    Args:
        trace: Attention of the model; calls of the image encoder are left out.
        inputs: Inputs of the model with those of `collate_answer_targets`.
        compare: Loss of two maps, such as `kl` or `cross_entropy`.
        heads: Supervised heads of the chosen layers; all by default.

    Returns:
        The loss, one row per supervised word; None if the batch has no targets.

    Raises:
        ValueError: No captured layer reads the sequence, or kinds of layers cannot be told from
            each other by their length.

    Example:
        >>> import overt, torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with overt.watch(layer) as trace:
        ...     _ = layer(torch.zeros(1, 5, 8))  # the same weight everywhere
        >>> answer_grounding(trace, {
        ...     "input_ids": torch.zeros(1, 5),
        ...     "grounded_words": torch.tensor([[4]]),
        ...     "grounded_tokens": torch.tensor([[0, 1]]),
        ...     "grounded_target": torch.tensor([[[1.0, 0.0]]]),
        ... }).item()  # log 2
        0.6931...
    """
    if WORDS not in inputs:
        return None
    decoder = _decoder_calls(trace, tuple(inputs["input_ids"].shape))
    if heads is not None:
        decoder = decoder.heads(heads)
    attention = decoder.log_block(inputs[WORDS], inputs[TOKENS])
    return compare(
        attention,
        AttentionMap(inputs[TARGET][:, None, None], attention.keys, attention.queries),
    )


def _decoder_calls(trace: AttentionTrace, shape: tuple[int, ...]) -> AttentionTrace:
    """Return the calls in which every token of the sequence is a query and a key."""
    b, n = shape
    found = trace.where(lambda call: (call.shape[0], *call.shape[2:]) == (b, n, n))
    kinds = sorted({re.sub(r"\d+", "*", call.name) for call in found})
    if not kinds:
        sizes = sorted({tuple(call.shape) for call in trace})
        raise ValueError(
            f"expected captured layers of {b} samples and {n} tokens, got calls of shapes (b, h, "
            f"q, k) {sizes[:3]}: pass layers= of the decoder"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"{' and '.join(kinds)} both attend between {n} tokens, so it is not known which is "
            "the decoder: pass the names of its layers as layers="
        )
    return AttentionTrace(found.calls)
