"""Signals of grounding in the attention of generated tokens, per layer and head.

    signals = stream_signals(image, prompt)
    written = capture.generate(model, keys=slice(0, length), reduce=signals, **inputs)
    written.attention.keys                   # one key per signal

Each row is one generated token, as `overt.capture.generate` captures it. The rows must contain
every key of the sequence, prompt and new tokens, with `keys=slice(0, prompt + new tokens)`.

The lookback ratio is that of Chuang, Qiu, Hsieh, Krishna, Kim and Glass, "Lookback Lens: Detecting
and Mitigating Contextual Hallucinations in Large Language Models Using Only Attention Maps", EMNLP
2024, https://arxiv.org/abs/2407.07071. A low number is not evidence of a hallucination, and a high
one is not evidence of grounding: docs/grounding-signals.md says what a signal can claim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout, Span

Signals = Float[Tensor, "b l h q"]  # one number per generated token, layer and head
SIGNALS = ("image share", "sink-corrected share", "image entropy", "lookback ratio")


def image_share_per_head(attention: AttentionMap, image: Bool[Tensor, "b k"]) -> Signals:
    """Compute the share of attention on the image.

    Args:
        attention: Rows over all keys of the sequence.
        image: The keys of the image, per sample.

    Returns:
        The share; NaN for a row without visible keys.

    Raises:
        ValueError: The map is signed, or the mask has another shape.

    Example:
        >>> from overt import words
        >>> rows = AttentionMap.from_cells(torch.tensor([[0.5, 0.2, 0.3]]), words(3))
        >>> image_share_per_head(rows, torch.tensor([[False, True, True]])).flatten()
        tensor([0.5000])
    """
    weights = _checked_weights(attention, image)
    return _undefined((weights * image[:, None, None, None]).sum(dim=-1), attention)


def sink_corrected_share(
    attention: AttentionMap, image: Bool[Tensor, "b k"], sinks: Bool[Tensor, "b k"]
) -> Signals:
    """Compute the share of the image in the attention that is not on sinks.

    A sink takes weight whatever its content, also inside of the image. So its keys count neither as
    image nor as anything else.

    Args:
        attention: Rows over all keys of the sequence.
        image: The keys of the image, per sample.
        sinks: The keys that are sinks, such as those of `find_row_sinks`.

    Returns:
        The share; NaN where all attention is on sinks.

    Raises:
        ValueError: The map is signed, or a mask has another shape.

    Example:
        >>> from overt import words
        >>> rows = AttentionMap.from_cells(torch.tensor([[0.5, 0.2, 0.3]]), words(3))
        >>> image = torch.tensor([[False, True, True]])
        >>> sinks = torch.tensor([[True, False, False]])
        >>> sink_corrected_share(rows, image, sinks).flatten()
        tensor([1.])
    """
    weights = _checked_weights(attention, image, sinks)
    weights = weights * ~sinks[:, None, None, None]
    part = (weights * image[:, None, None, None]).sum(dim=-1)
    total = weights.sum(dim=-1)
    return _undefined(torch.where(total > 0, part / total, torch.nan), attention)


def image_entropy(attention: AttentionMap, image: Bool[Tensor, "b k"]) -> Signals:
    """Compute the entropy of the attention inside the image: 0 for one cell, log n for n cells.

    Args:
        attention: Rows over all keys of the sequence.
        image: The keys of the image, per sample.

    Returns:
        The entropy in nats; NaN where the image gets no attention.

    Raises:
        ValueError: The map is signed, or the mask has another shape.

    Example:
        >>> from overt import words
        >>> rows = AttentionMap.from_cells(torch.tensor([[0.5, 0.25, 0.25]]), words(3))
        >>> image_entropy(rows, torch.tensor([[False, True, True]])).flatten()
        tensor([0.6931])
    """
    weights = _checked_weights(attention, image) * image[:, None, None, None]
    total = weights.sum(dim=-1, keepdim=True)
    share = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)
    found = torch.special.entr(share).sum(dim=-1)
    return _undefined(torch.where(total[..., 0] > 0, found, torch.nan), attention)


def lookback_ratio(attention: AttentionMap, context: Bool[Tensor, "b k"]) -> Signals:
    """Compute the mean weight of a context key over the sum of it and that of a new token's key.

    `A(context) / (A(context) + A(new))`, where `A` is the mean over the visible keys of a group
    (section 2 of the paper). All keys that are not context count as new. The first generated token
    sees no new token, and its ratio is 1.

    Args:
        attention: Rows over all keys of the sequence.
        context: The keys of the context: the prompt, or its image.

    Returns:
        The ratio; NaN where neither group gets attention.

    Raises:
        ValueError: The map is signed, or the mask has another shape.

    Example:
        >>> from overt import words
        >>> rows = AttentionMap.from_cells(torch.tensor([[0.3, 0.3, 0.4]]), words(3))
        >>> lookback_ratio(rows, torch.tensor([[True, True, False]])).flatten()  # 0.3 / (0.3 + 0.4)
        tensor([0.4286])
    """
    weights = _checked_weights(attention, context)
    means = []
    for group in (context, ~context):
        there = attention.visible & group[:, None]
        count = there.sum(dim=-1).clamp_min(1)[:, None, None]
        means.append((weights * there[:, None, None]).sum(dim=-1) / count)
    total = means[0] + means[1]
    return _undefined(torch.where(total > 0, means[0] / total, torch.nan), attention)


def find_row_sinks(
    attention: AttentionMap, ratio: float = 5.0, frequency: float = 0.5
) -> Bool[Tensor, "b k"]:
    """Find the keys that exceed `ratio` times the uniform share in most rows, layers and heads.

    The rule of `overt.attribution.find_sinks`, over the rows of generated tokens and all layers.

    Args:
        attention: Rows over all keys of the sequence.
        ratio: How many times the uniform share a sink must exceed.
        frequency: The share of rows, layers and heads in which it has to do so.

    Returns:
        The sinks of each sample. Rows with at most `ratio` visible keys do not count.

    Raises:
        ValueError: The map is signed, or an argument is out of range.

    Example:
        >>> from overt import words
        >>> cells = torch.tensor([[0.94, *[0.01] * 6]])
        >>> find_row_sinks(AttentionMap.from_cells(cells, words(7))).tolist()
        [[True, False, False, False, False, False, False]]
    """
    if ratio <= 1 or not 0 <= frequency < 1:
        raise ValueError(
            f"ratio must be above 1 and frequency in [0, 1), got {ratio} and {frequency}"
        )
    weights = _checked_weights(attention)
    visible = attention.visible.expand(-1, weights.shape[3], -1)
    seen = visible.sum(dim=-1, keepdim=True)
    counted = seen > ratio
    above = weights > (ratio / seen.clamp_min(1))[:, None, None]
    above = (above & counted[:, None, None]).double().mean(dim=(1, 2)).sum(dim=1)
    return above / counted.sum(dim=1).clamp_min(1) > frequency


def stream_signals(
    image: Bool[Tensor, "_ _"],
    context: Bool[Tensor, "_ _"],
    sinks: Bool[Tensor, "_ _"] | None = None,
) -> Callable[[AttentionMap], AttentionMap]:
    """Return a `reduce` for `overt.capture.generate` that keeps the signals of each token only.

    Its result is a map whose keys are the signals, one span each: "image share", "sink-corrected
    share", "image entropy" and "lookback ratio". It follows beams and sampling as rows do. A signal
    that is not defined for a token is 0.

    Args:
        image: The keys of the image, per sample.
        context: The keys of the prompt, or of the part of it that counts as context.
        sinks: The keys that are sinks, such as the first token; None for no sink.

    Returns:
        The function. Call it in one of your own to see the signals while a text is generated.

    Raises:
        ValueError: The masks have different shapes; when it is called, if the rows have other keys.

    Example:
        >>> from overt import words
        >>> rows = AttentionMap.from_cells(torch.tensor([[0.3, 0.3, 0.4]]), words(3))
        >>> prompt = torch.tensor([[True, True, False]])
        >>> found = stream_signals(image=prompt, context=prompt)(rows)
        >>> round(float(found.block("global", "lookback ratio").weights), 4)
        0.4286
    """
    masks = [image, context, torch.zeros_like(image) if sinks is None else sinks]
    if len({tuple(mask.shape) for mask in masks}) != 1:
        raise ValueError(f"masks need one shape, got {[tuple(mask.shape) for mask in masks]}")
    keys = Layout(
        tuple(Span(name, (1,), slice(at, at + 1)) for at, name in enumerate(SIGNALS)), len(SIGNALS)
    )

    def reduce(row: AttentionMap) -> AttentionMap:
        b = row.values.shape[0]
        if b % len(image):
            raise ValueError(f"the masks have {len(image)} samples, the rows have {b}")
        # Beams of a sample are consecutive.
        each = [
            mask.to(row.values.device).repeat_interleave(b // len(mask), dim=0) for mask in masks
        ]
        found = [
            image_share_per_head(row, each[0]),
            sink_corrected_share(row, each[0], each[2]),
            image_entropy(row, each[0]),
            lookback_ratio(row, each[1]),
        ]
        values = torch.stack(found, dim=-1).nan_to_num(0.0)
        shown = row.rows[:, :, None].expand(-1, -1, len(SIGNALS))
        return replace(row, values=values, keys=keys, mask=shown, kind=Kind.AMOUNT)

    return reduce


def written_words(
    tokenizer: Any, written: Sequence[Sequence[int]]
) -> tuple[list[list[str]], Int[Tensor, "b q"]]:
    """Return the words of generated texts, and the word of each token.

    Words are separated by whitespace in the decoded text. Special tokens and tokens of nothing but
    whitespace have none.

    Args:
        tokenizer: A Hugging Face tokenizer, or a processor that has one.
        written: The generated token ids of each sample.

    Returns:
        The words of each sample, and the number of each token's word, -1 for none.

    Example:
        >>> class Letters:
        ...     all_special_ids = [0]
        ...     def decode(self, ids, **_): return "".join(" abc"[n - 1] for n in ids if n)
        >>> written_words(Letters(), [[2, 3, 1, 4, 0]])
        ([['ab', 'c']], tensor([[ 0,  0, -1,  1, -1]]))
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    special = set(tokenizer.all_special_ids)
    words, numbers = [], torch.full((len(written), max(map(len, written), default=0)), -1)
    for sample, ids in enumerate(written):
        kept = [int(n) for n in ids]
        before = ""
        for at, token in enumerate(kept):
            # Whole prefixes: one token may be a part of a character. If spaces were cleaned up,
            # "do n" would lose a word with the next token, "'t".
            text = tokenizer.decode(
                kept[: at + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if token not in special and text[len(before) :].strip():
                numbers[sample, at] = len(text.split()) - 1
            before = text
        words.append(before.split())
    return words, numbers


def mean_over_written_words(
    signals: Signals, numbers: Int[Tensor, "_ _"]
) -> Float[Tensor, "b l h w"]:
    """Average the signals of the tokens of each word.

    Args:
        signals: One number per token.
        numbers: The word of each token, -1 for none, as of `written_words`.

    Returns:
        One number per word; NaN for a word that a sample does not have. Tokens without a number
        (NaN) do not count.

    Raises:
        ValueError: The tokens of both differ in number.

    Example:
        >>> signals = torch.tensor([0.2, 0.4, 0.9]).reshape(1, 1, 1, 3)
        >>> mean_over_written_words(signals, torch.tensor([[0, 0, 1]])).flatten()
        tensor([0.3000, 0.9000])
    """
    b, _, _, q = signals.shape
    if tuple(numbers.shape) != (b, q):
        raise ValueError(f"numbers must have the shape {(b, q)}, got {tuple(numbers.shape)}")
    count = int(numbers.max()) + 1 if numbers.numel() else 0
    member = numbers[:, None] == torch.arange(count, device=numbers.device)[:, None]
    known = ~signals.isnan()
    each = member[:, None, None].to(signals) * known[..., None, :]
    total = (each * signals.nan_to_num(0.0)[..., None, :]).sum(dim=-1)
    tokens = each.sum(dim=-1)
    return torch.where(tokens > 0, total / tokens.clamp_min(1), torch.nan)


def _checked_weights(
    attention: AttentionMap, *masks: Bool[Tensor, "b k"]
) -> Float[Tensor, "b l h q k"]:
    """Return the weights in at least single precision, after checking the arguments."""
    if attention.kind is Kind.SIGNED:
        raise ValueError("signed weights have no share; take the positive part of the map first")
    b, *_, k = attention.values.shape
    for mask in masks:
        if tuple(mask.shape) != (b, k):
            raise ValueError(f"a mask must have the shape {(b, k)}, got {tuple(mask.shape)}")
    weights = attention.weights
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def _undefined(values: Signals, attention: AttentionMap) -> Signals:
    """Set the rows without visible keys, as after the end of a text, to NaN."""
    return values.masked_fill(~attention.rows[:, None, None], torch.nan)
