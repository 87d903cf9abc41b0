"""A layer with evicted positions counts all tokens and keeps the chosen keys of each head."""

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache

from overt.nn.cache_eviction import gather_cache
from overt.nn.cache_eviction.evicted_layer import EvictedLayer


@pytest.fixture
def positions() -> Tensor:
    return torch.tensor([[[0, 3, 5], [1, 2, 4]], [[2, 3, 4], [0, 1, 5]]])


@pytest.fixture
def cache(positions: Tensor) -> DynamicCache:
    torch.manual_seed(0)
    made = DynamicCache()
    for layer in range(2):
        made.update(torch.rand(2, 2, 6, 4), torch.rand(2, 2, 6, 3), layer)
    return made


def test_gathered_keys_and_values_equal_those_of_a_loop(
    cache: DynamicCache, positions: Tensor
) -> None:
    before = copy.deepcopy(cache)
    gather_cache(cache, {1: positions})
    assert torch.equal(cache.layers[0].keys, before.layers[0].keys)
    for i in range(2):
        for g in range(2):
            for n, at in enumerate(positions[i, g].tolist()):
                for kind in ("keys", "values"):
                    kept = getattr(cache.layers[1], kind)[i, g, n]
                    assert torch.equal(kept, getattr(before.layers[1], kind)[i, g, at])


def test_tokens_are_counted_and_masks_cover_what_is_kept(
    cache: DynamicCache, positions: Tensor
) -> None:
    gather_cache(cache, {0: positions, 1: positions})
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(2, 0) == (5, 3)  # three kept keys stand for positions 3 to 5
    keys, values = cache.update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 3), 0)
    assert keys.shape[2] == values.shape[2] == 4
    assert cache.get_seq_length() == 7
    assert cache.get_mask_sizes(1, 0) == (5, 3)


def test_beams_copies_and_resets(cache: DynamicCache, positions: Tensor) -> None:
    gather_cache(cache, {0: positions, 1: positions})
    kept = cache.layers[0].keys.clone()
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(other.layers[0].keys, kept[[1, 1]])
    assert other.get_seq_length() == 6
    other.batch_repeat_interleave(2)
    assert other.layers[0].keys.shape[0] == 4
    other.reset()
    assert other.get_seq_length() == 0 and other.get_mask_sizes(3, 0) == (3, 0)
    other.update(torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 3), 0)
    assert other.get_seq_length() == 5 and other.get_mask_sizes(1, 0) == (6, 0)
    assert torch.equal(cache.layers[0].keys, kept)


def test_evicted_tokens_cannot_be_cropped(cache: DynamicCache, positions: Tensor) -> None:
    gather_cache(cache, {0: positions})
    layer = cache.layers[0]
    assert isinstance(layer, EvictedLayer)
    layer.crop(0)
    with pytest.raises(ValueError, match="cannot crop"):
        layer.crop(-1)


def test_only_plain_layers_with_matching_sizes_are_gathered(
    cache: DynamicCache, positions: Tensor
) -> None:
    with pytest.raises(ValueError, match=r"2 heads.*\(1, 2\)"):
        gather_cache(cache, {0: positions[:1]})
    with pytest.raises(ValueError, match="0 to 5.* layer 0"):
        gather_cache(cache, {0: positions + 1})
    gather_cache(cache, {0: positions})
    with pytest.raises(ValueError, match="got EvictedLayer"):
        gather_cache(cache, {0: positions})
