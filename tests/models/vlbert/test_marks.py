"""Captions with marks, and two side by side: the same as `CaptionPairScenes` makes itself."""

from dataclasses import replace

import pytest
import torch

from overt.data.scenes.pairs import Describes
from overt.data.vocabulary import BEGIN, END, pad
from overt.geometry import RegionGeometry, TextGeometry
from overt.models.vlbert.marks import beside, marked
from tests.models.vlbert.scenes import pairs
from tests.supervise.stream import truth

COUNT = 9


def caption(which: str, whole):
    """One caption of each pair as a batch of its own, without marks, and its target."""
    data = pairs()
    said = [getattr(data._item(row).pair, which) for row in range(COUNT)]
    read = [data.vocabulary.read(one.text) for one in said]
    tokens, mask, spans = pad([ids for ids, _ in read], [found for _, found in read])
    n, m = tokens.shape[1], whole.boxes.shape[1]
    target = truth([{} for _ in said], n, m)
    values = torch.zeros(COUNT, 1, 1, n, m)
    for row, one in enumerate(said):
        skip = 1 if which == "first" else len(data._item(row).pair.first.words) + 2
        count = len(one.words)
        values[row, :, :, :count] = whole.target.weights[row, :, :, skip : skip + count]
    seen = (values > 0).any(dim=-1, keepdim=True)[:, 0, 0].expand(-1, -1, m)
    return replace(
        whole,
        tokens=tokens,
        token_mask=mask,
        text=TextGeometry(tuple(one.text for one in said), spans),
        target=replace(target, values=values, mask=seen),
    )


def test_two_captions_become_what_scenes_make_of_them():
    whole = pairs().batch(range(COUNT))
    first, second = (marked(caption(which, whole), BEGIN, END) for which in ("first", "second"))
    found = beside(whole, first, second, whole.labels)
    assert torch.equal(found.tokens, whole.tokens)
    assert torch.equal(found.token_mask, whole.token_mask)
    assert found.text.texts == whole.text.texts
    assert torch.equal(found.text.spans, whole.text.spans)
    torch.testing.assert_close(found.target.weights, whole.target.weights)
    assert torch.equal(found.target.rows, whole.target.rows)
    assert torch.equal(found.labels, whole.labels) and len(found.ids) == COUNT
    assert isinstance(found.target.keys.spans[0].geometry, RegionGeometry)


def test_words_of_a_caption_about_another_photo_lose_their_target():
    whole = pairs().batch(range(COUNT))
    both = whole.labels == Describes.BOTH
    first, second = (marked(caption(which, whole), BEGIN, END) for which in ("first", "second"))
    found = beside(whole, first, second, torch.full((COUNT,), int(Describes.FIRST)))
    length = first.token_mask.sum(dim=1)
    rows = found.target.rows[both]
    assert rows.any()
    for row, end in zip(rows, length[both].tolist(), strict=True):
        assert not row[end:].any()


def test_a_photo_may_be_padded_to_fewer_or_more_regions():
    whole = pairs().batch(range(3))
    texts = pairs().batch(range(COUNT))
    first = marked(caption("first", texts), BEGIN, END).select(torch.arange(3))
    wide = replace(
        whole,
        boxes=torch.nn.functional.pad(whole.boxes, (0, 0, 0, 2)),
        region_mask=torch.nn.functional.pad(whole.region_mask, (0, 2)),
    )
    found = beside(wide, first, first, torch.zeros(3, dtype=torch.long))
    assert len(found.target.keys) == 12
    few = replace(whole, boxes=whole.boxes[:, :1], region_mask=whole.region_mask[:, :1])
    with pytest.raises(ValueError, match="captions of other photos"):
        beside(few, first, first, torch.zeros(3, dtype=torch.long))


def test_marks_stand_around_every_text_and_padding_stays():
    whole = pairs().batch(range(COUNT))
    plain = caption("first", whole)
    found = marked(plain, 101, 102)
    for row in range(COUNT):
        count = int(plain.token_mask[row].sum())
        expected = [101, *plain.tokens[row, :count].tolist(), 102]
        assert found.tokens[row, : count + 2].tolist() == expected
        assert (found.tokens[row, count + 2 :] == 0).all()
        assert int(found.token_mask[row].sum()) == count + 2
        assert found.text.tokens(row)[1 : count + 1] == plain.text.tokens(row)[:count]
        torch.testing.assert_close(
            found.target.weights[row, ..., 1 : count + 1, :],
            plain.target.weights[row, ..., :count, :],
        )
    bare = marked(replace(plain, text=None, target=None), 101, 102)
    assert bare.text is None and bare.target is None


def test_what_does_not_fit_is_refused():
    whole = pairs().batch(range(2))
    with pytest.raises(ValueError, match="one of each"):
        beside(whole, whole, whole.select(torch.tensor([0])), whole.labels)
    with pytest.raises(ValueError, match="a batch with tokens"):
        marked(replace(whole, tokens=None), 1, 2)
