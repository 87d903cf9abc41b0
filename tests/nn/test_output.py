"""`Output`: attention maps by span name, extras."""

import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.nn.output import Output


def even(keys) -> AttentionMap:
    return AttentionMap.from_cells(torch.ones(2, len(keys)), keys).normalize()


def test_attention_to_returns_the_map_of_a_span():
    image, text = even(grid(2, 2)), even(words(3))
    output = Output(torch.zeros(2, 4), (image, text))
    assert output.attention_to("image") is image
    assert output.attention_to("text") is text


def test_map_over_several_spans_is_returned_for_each():
    both = even(grid(2, 2) + words(3))
    output = Output(torch.zeros(2, 4), (both,))
    assert output.attention_to("image") is both and output.attention_to("text") is both


def test_unknown_span_raises_with_the_known_ones():
    output = Output(torch.zeros(2, 4), (even(grid(2, 2)), even(words(3))))
    with pytest.raises(ValueError, match=r"'audio'.*\['image', 'text'\]"):
        output.attention_to("audio")
    with pytest.raises(ValueError, match="no spans"):
        Output(torch.zeros(2, 4)).attention_to("image")


def test_outputs_do_not_share_their_extras():
    one, two = Output(torch.zeros(1, 2)), Output(torch.zeros(1, 2))
    assert dict(one.extras) == {} and one.extras is not two.extras
