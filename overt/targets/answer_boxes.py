"""Targets for the attention of answer words in a vision-language model: boxes of the photo.

`answer_box_target` makes a map from words to image tokens, with the geometry of a measured layout
(`overt.capture.layouts_of`). A placebo (`overt.targets.placebos`) replaces its weights.
`answer_inputs` turns the map into tensors of a sample, `collate_answer_targets` pads or packs them
with the sample, and `overt.losses.answer_grounding` compares them with the model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from overt.attention import AttentionMap, Kind, Layout, Span
from overt.geometry import PixelGeometry
from overt.losses.answer_grounding import ANSWER_INPUTS, TARGET, TOKENS, WORDS

Boxes = Sequence[Sequence[float | int]]  # x0 y0 x1 y1 in pixels of the photo


def answer_box_target(
    layout: Layout, words: Mapping[int, Boxes], span: str = "image"
) -> AttentionMap:
    """Return the target of each word: its weight on a cell is the covered share, normalized.

    Cells under several boxes of a word count as at most fully covered. A word whose boxes were
    cropped away has an empty row and is not supervised.

    Args:
        layout: Layout of one sample, the question with its answer.
        words: The boxes of each supervised token, by its position in the sequence. Give the
            same boxes for each token of a word.
        span: Name of the image tokens, such as "image" or "detail".

    Returns:
        A map of one sample, one layer and one head, from words to the cells of the span.

    Raises:
        ValueError: There are no words, the span has no pixels, or a word comes before the image.

    Example:
        >>> from overt.attention import grid
        >>> image = grid(1, 2, geometry=PixelGeometry.identity(1, (10, 20))).spans[0]
        >>> layout = Layout((image, Span("text", (3,), slice(2, 5))), 5)
        >>> answer_box_target(layout, {4: [(10, 0, 20, 10)]}).weights.flatten()
        tensor([0., 1.])
    """
    cells = layout.find(span)
    if not isinstance(cells.geometry, PixelGeometry) or len(cells.geometry) != 1:
        raise ValueError(
            f"expected a span {span!r} of one sample with pixels: measure the layout with "
            "layouts_of(model, inputs, processor=..., images=[photo])"
        )
    if not words:
        raise ValueError("expected at least one word with boxes; leave the sample without a target")
    last = int(_positions(cells).max())
    early = [at for at in words if not last < at < len(layout)]
    if early:
        raise ValueError(
            f"expected words after the image, at positions {last + 1} to {len(layout) - 1}, got "
            f"{early[0]}: other words are not written with the image in view"
        )
    boxes = [torch.tensor([list(map(list, own))]).float() for own in words.values()]
    rows = [cells.geometry.cover_boxes(own, cells.shape).sum(dim=1).clamp_max(1) for own in boxes]
    queries = Layout((Span("words", (len(rows),), slice(0, len(rows))),), len(rows))
    covered = torch.stack(rows, dim=1)[:, None, None]
    return AttentionMap(covered, layout.only(span), queries, kind=Kind.AMOUNT).normalize()


def answer_inputs(
    target: AttentionMap, layout: Layout, words: Mapping[int, Boxes], span: str = "image"
) -> dict[str, Tensor]:
    """Return a target as tensors of its sample; the row of a word is that of the token before it.

    A decoder predicts a token from the position before, so that is where it looks for a word.

    Args:
        target: The target of `answer_box_target`, or a placebo of it.
        layout: The same layout.
        words: The same words.
        span: The same span.

    Returns:
        The tensors `grounded_words` (s), `grounded_tokens` (k) and `grounded_target` (s, k).

    Raises:
        ValueError: The target does not belong to these words and cells.

    Example:
        >>> from overt.attention import grid
        >>> image = grid(1, 2, geometry=PixelGeometry.identity(1, (10, 20))).spans[0]
        >>> layout = Layout((image, Span("text", (3,), slice(2, 5))), 5)
        >>> words = {4: [(10, 0, 20, 10)]}
        >>> answer_inputs(answer_box_target(layout, words), layout, words)["grounded_words"]
        tensor([3])
    """
    at = _positions(layout.find(span))
    expected = (1, 1, 1, len(words), len(at))
    if target.shape != expected:
        raise ValueError(f"expected a target of shape {expected}, got {target.shape}")
    return {
        WORDS: torch.tensor(list(words)) - 1,
        TOKENS: at,
        TARGET: target.weights[0, 0, 0].float(),
    }


def collate_answer_targets(
    items: Sequence[Mapping[str, Any]],
    collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Collate samples and move their targets to where `collate` put their tokens.

    For Trainer: `data_collator=partial(collate_answer_targets, collate=...)`. Samples may be padded
    on either side, or packed one after another in a single row. The tokens of every sample are
    compared with those of the batch, so that a target is never moved to other tokens.

    Args:
        items: The samples, with `input_ids` and, if supervised, the tensors of `answer_inputs`.
        collate: Collator of the samples without targets.

    Returns:
        The batch of `collate` with `grounded_words`, `grounded_tokens` and `grounded_target`.

    Raises:
        ValueError: The tokens of a sample are not found in the batch, as after truncation.

    Example:
        >>> def pad_left(items):
        ...     rows = [item["input_ids"] for item in items]
        ...     longest = max(map(len, rows))
        ...     return {"input_ids": torch.tensor([[0] * (longest - len(r)) + r for r in rows])}
        >>> target = {"grounded_words": torch.tensor([1]), "grounded_tokens": torch.tensor([0])}
        >>> target["grounded_target"] = torch.ones(1, 1)
        >>> items = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], **target}]
        >>> collate_answer_targets(items, pad_left)["grounded_words"].tolist()
        [[-1], [2]]
    """
    plain = [{name: item[name] for name in item if name not in ANSWER_INPUTS} for item in items]
    batch = dict(collate(plain))
    ids = batch["input_ids"]
    places = _sample_places([torch.as_tensor(item["input_ids"]).flatten() for item in items], ids)
    packed: list[list[dict[str, Tensor]]] = [[] for _ in ids]
    for item, (row, start) in zip(items, places, strict=True):
        if WORDS in item:
            found = {name: torch.as_tensor(item[name]) for name in ANSWER_INPUTS}
            packed[row].append(
                {
                    WORDS: found[WORDS] + start,
                    TOKENS: found[TOKENS] + start,
                    TARGET: found[TARGET],
                }
            )
    s = max(1, *(sum(len(one[WORDS]) for one in row) for row in packed))
    k = max(1, *(sum(len(one[TOKENS]) for one in row) for row in packed))
    words = torch.full((len(packed), s), -1)
    tokens = torch.full((len(packed), k), -1)
    target = torch.zeros(len(packed), s, k)
    for at, parts in enumerate(packed):
        word = token = 0
        for one in parts:  # a word of a packed sample has weight on the tokens of its own image
            q, c = one[TARGET].shape
            words[at, word : word + q], tokens[at, token : token + c] = one[WORDS], one[TOKENS]
            target[at, word : word + q, token : token + c] = one[TARGET]
            word, token = word + q, token + c
    return {**batch, WORDS: words, TOKENS: tokens, TARGET: target}


def _sample_places(samples: Sequence[Tensor], ids: Int[Tensor, "b m"]) -> list[tuple[int, int]]:
    """Return the row and first position of every sample in a batch of token ids."""
    length = ids.shape[1]
    if len(ids) == len(samples):
        choices = [[(at, 0), (at, length - len(one))] for at, one in enumerate(samples)]
    elif len(ids) == 1:
        starts = [sum(map(len, samples[:at])) for at in range(len(samples))]
        choices = [[(0, start)] for start in starts]
    else:
        raise ValueError(
            f"expected a row per sample or one packed row, got {len(ids)} rows of {len(samples)} "
            "samples"
        )
    places = []
    for at, (one, near) in enumerate(zip(samples, choices, strict=True)):
        fits = [
            (row, start)
            for row, start in near
            if start >= 0 and torch.equal(ids[row, start : start + len(one)].cpu(), one.cpu())
        ]
        if not fits:
            raise ValueError(
                f"the {len(one)} tokens of sample {at} are not in its row of the batch, so its "
                "target has no place: collate without truncation, and tokenize before"
            )
        places.append(fits[0])
    return places


def _positions(span: Span) -> Int[Tensor, " k"]:
    """Return the positions of a span in a layout of one sample."""
    if isinstance(span.index, slice):
        return torch.arange(span.index.stop)[span.index]
    if len(span.index) != 1:
        raise ValueError(f"expected the layout of one sample, got {len(span.index)}")
    return span.index[0].cpu()
