"""Captions as VL-BERT reads them: with their marks, and two of them side by side.

`CaptionPairScenes` makes such batches itself. These functions make them of any data set whose
batches have texts, boxes and a target from words to regions.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, regions, words
from overt.data.batch import Batch
from overt.data.scenes.pairs import Describes
from overt.data.scenes.relations import BETWEEN
from overt.geometry import RegionGeometry, TextGeometry


def marked(batch: Batch, begin: int, end: int) -> Batch:
    """Each text between a mark of its beginning and one of its end; the target moves along.

    For readers that set no marks, as `Vocabulary` does not. Those of Hugging Face set their own.
    """
    tokens, there = _texts(batch)
    n = tokens.shape[1]
    lengths = there.sum(dim=1, keepdim=True)
    places = torch.arange(n + 2, device=tokens.device)
    grown = torch.nn.functional.pad(tokens, (1, 1))
    grown = torch.where(places == 0, begin, torch.where(places == lengths + 1, end, grown))
    source = torch.where((places > 0) & (places <= lengths), places - 1, -1)
    text = None if batch.text is None else _spans(batch.text, source, batch.text.texts)
    target = None if batch.target is None else _rows(batch.target, source)
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


def beside(photo: Batch, first: Batch, second: Batch, describes: Int[Tensor, " b"]) -> Batch:
    """`[CLS] c1 [SEP] c2 [SEP]` about the images and boxes of `photo`; labels are `describes`.

    The two batches have marked texts, and `describes` says which of each pair are about the photo
    (`Describes`). Words of the others lose their target: they speak of another image.
    """
    (ours, there), (theirs, also) = _texts(first), _texts(second)
    if not len(photo) == len(first) == len(second) == len(describes):
        raise ValueError(
            f"{len(first)} first and {len(second)} second captions of {len(photo)} photos, with "
            f"{len(describes)} labels; there must be one of each"
        )
    before, after = there.sum(dim=1, keepdim=True), also.sum(dim=1, keepdim=True) - 1
    length = int((before + after).max())
    places = torch.arange(length, device=ours.device).expand(len(ours), -1)
    inside = places < before + after
    from_first = torch.where(places < before, places, -1)
    from_second = torch.where((places >= before) & inside, places - before + 1, -1)
    tokens = torch.where(
        from_first >= 0,
        ours.gather(1, from_first.clamp(0, ours.shape[1] - 1)),
        theirs.gather(1, from_second.clamp(0, theirs.shape[1] - 1)),
    )
    text = None
    if first.text is not None and second.text is not None:
        text = _joined(first.text, second.text, from_first, from_second)
    target = None
    if first.target is not None and second.target is not None and photo.boxes is not None:
        one = torch.where((describes != Describes.SECOND)[:, None], from_first, -1)
        two = torch.where((describes != Describes.FIRST)[:, None], from_second, -1)
        target = _sum(_rows(first.target, one), _rows(second.target, two), photo.boxes, text)
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


def _texts(batch: Batch) -> tuple[Tensor, Tensor]:
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("captions need a batch with tokens")
    return batch.tokens, batch.token_mask


def _spans(text: TextGeometry, source: Int[Tensor, "b n"], texts: tuple[str, ...]) -> TextGeometry:
    """The characters of tokens that stand elsewhere now; -1 is a token that covers none."""
    at = source.clamp(0, text.spans.shape[1] - 1)[..., None].expand(-1, -1, 2)
    return TextGeometry(texts, torch.where(source[..., None] >= 0, text.spans.gather(1, at), -1))


def _joined(
    first: TextGeometry, second: TextGeometry, one: Int[Tensor, "b n"], two: Int[Tensor, "b n"]
) -> TextGeometry:
    texts = tuple(a + BETWEEN + b for a, b in zip(first.texts, second.texts, strict=True))
    before, after = _spans(first, one, texts).spans, _spans(second, two, texts).spans
    skip = torch.tensor([len(text) + len(BETWEEN) for text in first.texts], device=after.device)
    moved = torch.where(after >= 0, after + skip[:, None, None], -1)
    return TextGeometry(texts, torch.maximum(before, moved))


def _rows(target: AttentionMap, source: Int[Tensor, "b n"]) -> AttentionMap:
    """A target whose tokens stand elsewhere now; -1 is a token without one."""
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


def _sum(
    one: AttentionMap, two: AttentionMap, boxes: Float[Tensor, "b m 4"], text: TextGeometry | None
) -> AttentionMap:
    """Two targets of different tokens over the boxes of the photo; padding may differ in length."""
    m = boxes.shape[1]
    values, masks = [], []
    for target in (one, two):
        if (target.weights[..., m:] != 0).any():
            raise ValueError(
                f"a caption that describes its photo speaks of region {m} or beyond, and the photo "
                f"has {m}: are these captions of other photos?"
            )
        more = max(0, m - len(target.keys))
        values.append(torch.nn.functional.pad(target.weights[..., :m], (0, more)))
        masks.append(torch.nn.functional.pad(target.visible[..., :m], (0, more)))
    wanted = values[0] + values[1]
    seen = (masks[0] | masks[1]) & (wanted > 0).any(dim=-1, keepdim=True)[:, 0, 0]
    n = wanted.shape[3]
    keys, queries = regions(m, geometry=RegionGeometry(boxes)), words(n, geometry=text)
    return AttentionMap(wanted, keys, queries, seen, Kind.AMOUNT).normalize()
