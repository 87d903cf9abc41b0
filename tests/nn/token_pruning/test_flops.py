"""FLOPs of encoders: compared with PyTorch's counter, and lower with fewer tokens."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from overt.nn.hard_attention.selection import Rule, keep_all, keep_share
from overt.nn.token_pruning.flops import encoder_flops, layer_flops, matching_flops
from overt.nn.token_pruning.merge import by_states
from overt.nn.token_pruning.pruned_model import merge_tokens, prune_tokens
from tests.nn.token_pruning.encoders import SMALL, inputs, vit

WIDTH, INNER = SMALL["hidden_size"], SMALL["intermediate_size"]


def test_layer_flops_by_hand() -> None:
    # 3 tokens of 2 numbers: 4 x 3x2x2 for the projections, 2 x 3x3x2 for attention, 2 x 3x2x5
    assert layer_flops(3, 2, 5) == 2 * (48 + 36 + 60)
    assert encoder_flops([3, 3], 2, 5) == 2 * layer_flops(3, 2, 5)


def count_flops(model: nn.Module, given: dict[str, Tensor]) -> int:
    """Count one forward pass with PyTorch's counter."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**given)
    return counter.get_total_flops()


@pytest.mark.parametrize("keep", [keep_all, partial(keep_share, share=0.5)])
def test_pruning_saves_the_predicted_flops(keep: Rule) -> None:
    model, given = (
        vit("eager"),
        inputs("ViT", 1),
    )  # eager, so that every product is counted
    full = count_flops(model, given)
    with prune_tokens(model, (1, 3), keep) as thinned:
        less = count_flops(model, given)
    whole = encoder_flops([37] * 4, WIDTH, INNER)
    assert full - less == whole - encoder_flops(thinned.lengths, WIDTH, INNER)
    assert less < full or keep is keep_all


def test_merging_flops_include_the_matching() -> None:
    model, given = vit("eager"), inputs("ViT", 1)
    full = count_flops(model, given)
    with merge_tokens(model, 5, metric=by_states) as thinned:
        less = count_flops(model, given)
    assert thinned.lengths == [37, 32, 27, 22]
    spent = sum(matching_flops(n, WIDTH) for n in (37, 32, 27))
    whole = encoder_flops([37] * 4, WIDTH, INNER)
    assert full - less == whole - encoder_flops(thinned.lengths, WIDTH, INNER) - spent


def test_flops_of_a_batch_are_the_sum_over_samples() -> None:
    model = vit("eager")
    with prune_tokens(model, (1,), partial(keep_share, share=0.25)) as thinned:
        one, four = count_flops(model, inputs("ViT", 1)), count_flops(model, inputs("ViT", 4))
    assert four == 4 * one
    assert thinned.lengths == [37, 10, 10, 10]
