import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.models.output import Output


def even(keys) -> AttentionMap:
    return AttentionMap.from_cells(torch.ones(2, len(keys)), keys).normalize()


def test_maps_are_found_by_what_they_look_at():
    image, text = even(grid(2, 2)), even(words(3))
    output = Output(torch.zeros(2, 4), (image, text))
    assert output.looking_at("image") is image
    assert output.looking_at("text") is text


def test_a_map_over_several_spans_is_found_by_each():
    both = even(grid(2, 2) + words(3))
    output = Output(torch.zeros(2, 4), (both,))
    assert output.looking_at("image") is both and output.looking_at("text") is both


def test_an_unknown_name_is_answered_with_those_there_are():
    output = Output(torch.zeros(2, 4), (even(grid(2, 2)), even(words(3))))
    with pytest.raises(ValueError, match=r"'audio'; this model attends to \['image', 'text'\]"):
        output.looking_at("audio")
    with pytest.raises(ValueError, match="attends to nothing"):
        Output(torch.zeros(2, 4)).looking_at("image")


def test_outputs_do_not_share_their_extras():
    one, two = Output(torch.zeros(1, 2)), Output(torch.zeros(1, 2))
    assert dict(one.extras) == {} and one.extras is not two.extras
