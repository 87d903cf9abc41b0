"""Prepare captions for VL-BERT: add special tokens, and pair two captions.

`CaptionPairScenes` makes such batches itself. These functions make them from any dataset whose
batches have texts, boxes and a target from words to regions.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import MatchingCaption
from overt.data.scenes.phrase_relations import SEPARATOR
from overt.geometry import RegionGeometry, TextGeometry


def add_special_tokens(batch: Batch, begin: int, end: int) -> Batch:
    """Add a begin and an end token to each text; the target is shifted accordingly.

    For tokenizers without special tokens, such as `Vocabulary`; those of Hugging Face add their
    own.

    Args:
        batch: batch with tokens.
        begin: id of the begin token.
        end: id of the end token.
    """
    tokens, there = _require_tokens(batch)
    n = tokens.shape[1]
    # texts are padded at the end, so the end token goes to index length + 1
    lengths = there.sum(dim=1, keepdim=True)
    places = torch.arange(n + 2, device=tokens.device)
    grown = torch.nn.functional.pad(tokens, (1, 1))
    grown = torch.where(places == 0, begin, torch.where(places == lengths + 1, end, grown))
    # old index of each new position; -1 for special tokens and padding
    source = torch.where((places > 0) & (places <= lengths), places - 1, -1)
    text = None if batch.text is None else _move_spans(batch.text, source, batch.text.texts)
    target = None if batch.target is None else _move_rows(batch.target, source)
    if target is not None:
        target = replace(target, queries=words(n + 2, geometry=text))
    inside = places < lengths + 2
    return replace(
        batch,
        tokens=torch.where(inside, grown, 0),
        token_mask=inside,
        text=text,
        target=target,
    )


def add_mask_token(batch: Batch, mask: int) -> Batch:
    """Add a mask token at the end of each text, where an answer is read (`MaskTokenHead`).

    Call it before `add_special_tokens`. The target must not be over words.

    Args:
        batch: batch with tokens.
        mask: id of the mask token.

    Example:
        >>> from overt.testing import toy_batch
        >>> batch = toy_batch(2)
        >>> batch.token_mask.sum(dim=1).tolist()
        [6, 5]
        >>> add_mask_token(batch, 2).tokens[:, 5:].tolist()[1]  # after the five tokens of a text
        [2, 0]
    """
    tokens, there = _require_tokens(batch)
    lengths = there.sum(dim=1, keepdim=True)
    places = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    grown = torch.nn.functional.pad(tokens, (0, 1))
    grown = torch.where(places == lengths, mask, torch.where(places < lengths, grown, 0))
    text = batch.text
    if text is not None:
        text = TextGeometry(text.texts, torch.nn.functional.pad(text.spans, (0, 0, 0, 1), value=-1))
    return replace(batch, tokens=grown, token_mask=places <= lengths, text=text)


def pair_captions(photo: Batch, first: Batch, second: Batch, describes: Int[Tensor, " b"]) -> Batch:
    """Make `[CLS] c1 [SEP] c2 [SEP]` about the images and boxes of `photo`.

    Words of captions that do not describe the photo lose their target.

    Args:
        photo: batch with images and boxes.
        first: first captions, with special tokens.
        second: second captions, with special tokens.
        describes: which captions describe the photo (`MatchingCaption`); becomes the labels.

    Raises:
        ValueError: the batches have different sizes, or a target names a region the photo lacks.
    """
    (ours, there), (theirs, also) = _require_tokens(first), _require_tokens(second)
    if not len(photo) == len(first) == len(second) == len(describes):
        raise ValueError(
            f"got {len(first)} first and {len(second)} second captions, {len(photo)} photos and "
            f"{len(describes)} labels: all need the same batch size"
        )
    # the second caption loses its begin token, hence one token less
    before, after = there.sum(dim=1, keepdim=True), also.sum(dim=1, keepdim=True) - 1
    length = int((before + after).max())
    places = torch.arange(length, device=ours.device).expand(len(ours), -1)
    inside = places < before + after
    from_first = torch.where(places < before, places, -1)
    from_second = torch.where((places >= before) & inside, places - before + 1, -1)
    tokens = torch.where(
        from_first >= 0,
        # gather needs valid indices everywhere; `where` selects the valid ones
        ours.gather(1, from_first.clamp(0, ours.shape[1] - 1)),
        theirs.gather(1, from_second.clamp(0, theirs.shape[1] - 1)),
    )
    text = None
    if first.text is not None and second.text is not None:
        text = _join_geometry(first.text, second.text, from_first, from_second)
    target = None
    if first.target is not None and second.target is not None and photo.boxes is not None:
        # only captions that describe the photo have a target in it
        one = torch.where((describes != MatchingCaption.SECOND)[:, None], from_first, -1)
        two = torch.where((describes != MatchingCaption.FIRST)[:, None], from_second, -1)
        target = _join_targets(
            _move_rows(first.target, one), _move_rows(second.target, two), photo.boxes, text
        )
    return replace(
        photo,
        ids=tuple(f"{a}+{b}" for a, b in zip(first.ids, second.ids, strict=True)),
        tokens=torch.where(inside, tokens, 0),
        token_mask=inside,
        text=text,
        labels=describes,
        answers=None,
        references=None,
        groups=None,
        target=target,
    )


def _require_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("batch.tokens is None: captions need a batch with tokens")
    return batch.tokens, batch.token_mask


def _move_spans(
    text: TextGeometry, source: Int[Tensor, "b n"], texts: tuple[str, ...]
) -> TextGeometry:
    """Return the character spans of moved tokens; -1 for a token without characters."""
    at = source.clamp(0, text.spans.shape[1] - 1)[..., None].expand(-1, -1, 2)
    return TextGeometry(texts, torch.where(source[..., None] >= 0, text.spans.gather(1, at), -1))


def _join_geometry(
    first: TextGeometry, second: TextGeometry, one: Int[Tensor, "b n"], two: Int[Tensor, "b n"]
) -> TextGeometry:
    texts = tuple(a + SEPARATOR + b for a, b in zip(first.texts, second.texts, strict=True))
    before, after = _move_spans(first, one, texts).spans, _move_spans(second, two, texts).spans
    skip = torch.tensor([len(text) + len(SEPARATOR) for text in first.texts], device=after.device)
    moved = torch.where(after >= 0, after + skip[:, None, None], -1)
    # a token is in at most one of the captions, and the other one has -1
    return TextGeometry(texts, torch.maximum(before, moved))


def _move_rows(target: AttentionMap, source: Int[Tensor, "b n"]) -> AttentionMap:
    """Return a target with moved tokens; -1 for a token without a target."""
    b, l, h, q, k = target.values.shape
    at = source.clamp(0, q - 1)
    there = source >= 0
    wanted = target.weights.gather(3, at[:, None, None, :, None].expand(b, l, h, -1, k))
    seen = target.visible.gather(1, at[..., None].expand(-1, -1, k))
    return replace(
        target,
        values=torch.where(there[:, None, None, :, None], wanted, 0),
        queries=words(source.shape[1]),
        mask=seen & there[..., None],
        form=Form.PLAIN,
    )


def _join_targets(
    one: AttentionMap, two: AttentionMap, boxes: Float[Tensor, "b m 4"], text: TextGeometry | None
) -> AttentionMap:
    """Add two targets of different tokens over the boxes of the photo."""
    m = boxes.shape[1]
    values, masks = [], []
    for target in (one, two):
        # targets may be padded to more regions than the photo has; their weights there must be zero
        if (target.weights[..., m:] != 0).any():
            raise ValueError(
                f"a target of a caption refers to region {m} or beyond, but the photo has {m} "
                "regions: captions and photos do not match"
            )
        more = max(0, m - len(target.keys))
        values.append(torch.nn.functional.pad(target.weights[..., :m], (0, more)))
        masks.append(torch.nn.functional.pad(target.visible[..., :m], (0, more)))
    wanted = values[0] + values[1]
    # words without a target are hidden: a zero row would count as a target
    seen = (masks[0] | masks[1]) & (wanted > 0).any(dim=-1, keepdim=True)[:, 0, 0]
    n = wanted.shape[3]
    keys, queries = regions(m, geometry=RegionGeometry(boxes)), words(n, geometry=text)
    return AttentionMap(wanted, keys, queries, seen, Kind.AMOUNT).normalize()
