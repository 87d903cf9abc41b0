"""A cache layer with fewer keys than tokens: positions go on, and follow samples."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from overt.nn.token_pruning.pruned_cache_layer import PrunedCacheLayer


def make_layer() -> PrunedCacheLayer:
    """Two samples of a prompt of six tokens, of which three and two were kept."""
    plain = DynamicLayer()
    plain.update(torch.arange(6.0).view(2, 1, 3, 1), torch.zeros(2, 1, 3, 1))
    places = torch.tensor([[0, 2, 5], [1, 5, -1]])
    bias = torch.tensor([[0.0, 0.7, 0.0], [0.0, 0.0, -torch.inf]])
    return PrunedCacheLayer(plain, places, 6, bias)


def test_new_tokens_follow_the_whole_prompt() -> None:
    layer = make_layer()
    assert layer.get_seq_length() == 6
    assert layer.get_mask_sizes(1) == (7, 0)
    assert layer.columns(1).tolist() == [[0, 2, 5, 6], [1, 5, -1, 6]]
    layer.expect(1)
    keys, _ = layer.update(torch.full((2, 1, 1, 1), 9.0), torch.zeros(2, 1, 1, 1))
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert layer.get_seq_length() == 7
    assert layer.columns(2).tolist() == [[0, 2, 5, 6, 7, 8], [1, 5, -1, 6, 7, 8]]
    bias = layer.key_bias(1)
    assert bias is not None and bias.shape == (2, 5) and not bias[:, 3:].any()


def test_tokens_whose_masks_were_not_adapted_raise() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="not pruned"):
        layer.update(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
    assert layer.get_seq_length() == 6


def test_positions_follow_reordered_samples() -> None:
    layer = make_layer()
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.places[:, 0].tolist() == [1, 0] and layer.keys[:, 0, 0, 0].tolist() == [3, 0]
    layer.batch_repeat_interleave(2)
    assert layer.places[:, 0].tolist() == [1, 1, 0, 0]
    layer.batch_select_indices(torch.tensor([3]))
    assert layer.places.tolist() == [[0, 2, 5]] and layer.columns(0).shape == (1, 3)


def test_a_pruned_prompt_is_neither_cropped_nor_replaced() -> None:
    layer = make_layer()
    layer.crop(0)
    with pytest.raises(ValueError, match="crop"):
        layer.crop(-1)
    with pytest.raises(ValueError, match="reuse"):
        layer.reset()
