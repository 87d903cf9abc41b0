"""Special tokens and caption pairs, compared with `CaptionPairScenes`."""

from dataclasses import replace

import pytest
import torch

from overt.data.scenes.caption_pairs import MatchingCaption
from overt.data.vocabulary import BEGIN, END, MASK, pad
from overt.geometry import RegionGeometry, TextGeometry
from overt.nn.vlbert.caption_tokens import add_mask_token, add_special_tokens, pair_captions
from tests.losses.stream import make_target
from tests.nn.vlbert.scenes import pairs

COUNT = 9


def caption(which: str, whole):
    """Make a batch of one caption of each pair, without special tokens, and its target."""
    data = pairs()
    captions = [getattr(data._item(row).pair, which) for row in range(COUNT)]
    read = [data.vocabulary.read(one.text) for one in captions]
    tokens, mask, spans = pad([ids for ids, _ in read], [found for _, found in read])
    n, m = tokens.shape[1], whole.boxes.shape[1]
    target = make_target([{} for _ in captions], n, m)
    values = torch.zeros(COUNT, 1, 1, n, m)
    for row, one in enumerate(captions):
        skip = 1 if which == "first" else len(data._item(row).pair.first.words) + 2
        count = len(one.words)
        values[row, :, :, :count] = whole.target.weights[row, :, :, skip : skip + count]
    seen = (values > 0).any(dim=-1, keepdim=True)[:, 0, 0].expand(-1, -1, m)
    return replace(
        whole,
        tokens=tokens,
        token_mask=mask,
        text=TextGeometry(tuple(one.text for one in captions), spans),
        target=replace(target, values=values, mask=seen),
    )


def test_pair_captions_agrees_with_caption_pair_scenes():
    whole = pairs().batch(range(COUNT))
    first, second = (
        add_special_tokens(caption(which, whole), BEGIN, END) for which in ("first", "second")
    )
    found = pair_captions(whole, first, second, whole.labels)
    assert torch.equal(found.tokens, whole.tokens)
    assert torch.equal(found.token_mask, whole.token_mask)
    assert found.text.texts == whole.text.texts
    assert torch.equal(found.text.spans, whole.text.spans)
    torch.testing.assert_close(found.target.weights, whole.target.weights)
    assert torch.equal(found.target.rows, whole.target.rows)
    assert torch.equal(found.labels, whole.labels) and len(found.ids) == COUNT
    assert isinstance(found.target.keys.spans[0].geometry, RegionGeometry)


def test_a_mask_token_follows_each_text():
    own = replace(caption("first", pairs().batch(range(COUNT))), target=None)
    found = add_special_tokens(add_mask_token(own, MASK), BEGIN, END)
    plain = add_special_tokens(own, BEGIN, END)
    for row, length in enumerate(own.token_mask.sum(dim=1).tolist()):
        ids = found.tokens[row, : length + 3].tolist()
        assert ids == [*plain.tokens[row, : length + 1].tolist(), MASK, END]
        assert int(found.token_mask[row].sum()) == length + 3
        assert found.text.spans[row, length + 1].tolist() == [-1, -1]


def test_words_of_a_mismatched_caption_have_no_target():
    whole = pairs().batch(range(COUNT))
    both = whole.labels == MatchingCaption.BOTH
    first, second = (
        add_special_tokens(caption(which, whole), BEGIN, END) for which in ("first", "second")
    )
    found = pair_captions(whole, first, second, torch.full((COUNT,), int(MatchingCaption.FIRST)))
    length = first.token_mask.sum(dim=1)
    rows = found.target.rows[both]
    assert rows.any()
    for row, end in zip(rows, length[both].tolist(), strict=True):
        assert not row[end:].any()


def test_photo_may_be_padded_to_more_but_not_fewer_regions():
    whole = pairs().batch(range(3))
    texts = pairs().batch(range(COUNT))
    first = add_special_tokens(caption("first", texts), BEGIN, END).select(torch.arange(3))
    wide = replace(
        whole,
        boxes=torch.nn.functional.pad(whole.boxes, (0, 0, 0, 2)),
        region_mask=torch.nn.functional.pad(whole.region_mask, (0, 2)),
    )
    found = pair_captions(wide, first, first, torch.zeros(3, dtype=torch.long))
    assert len(found.target.keys) == 12
    few = replace(whole, boxes=whole.boxes[:, :1], region_mask=whole.region_mask[:, :1])
    with pytest.raises(ValueError, match=r"region \d+"):
        pair_captions(few, first, first, torch.zeros(3, dtype=torch.long))


def test_special_tokens_enclose_each_text_before_the_padding():
    whole = pairs().batch(range(COUNT))
    plain = caption("first", whole)
    found = add_special_tokens(plain, 101, 102)
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
    bare = add_special_tokens(replace(plain, text=None, target=None), 101, 102)
    assert bare.text is None and bare.target is None


def test_mismatched_batches_raise():
    whole = pairs().batch(range(2))
    with pytest.raises(ValueError, match="batch size"):
        pair_captions(whole, whole, whole.select(torch.tensor([0])), whole.labels)
    with pytest.raises(ValueError, match="tokens"):
        add_special_tokens(replace(whole, tokens=None), 1, 2)
