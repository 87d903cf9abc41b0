"""The count by hand is PyTorch's count, and falls as tokens go."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from overt.models.hard.selection import Rule, keep_all, keep_share
from overt.models.thinning.cost import encoder_flops, layer_flops, matching_flops
from overt.models.thinning.merging import by_states
from overt.models.thinning.thinned import merge, thin
from tests.models.thinning.encoders import SMALL, inputs, vit

WIDTH, INNER = SMALL["hidden_size"], SMALL["intermediate_size"]


def test_a_layer_worked_out_by_hand() -> None:
    # 3 tokens of 2 numbers: 4 x 3x2x2 for the projections, 2 x 3x3x2 for attention, 2 x 3x2x5
    assert layer_flops(3, 2, 5) == 2 * (48 + 36 + 60)
    assert encoder_flops([3, 3], 2, 5) == 2 * layer_flops(3, 2, 5)


def counted(model: nn.Module, given: dict[str, Tensor]) -> int:
    """PyTorch's own count of one forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**given)
    return counter.get_total_flops()


@pytest.mark.parametrize("keep", [keep_all, partial(keep_share, share=0.5)])
def test_what_pytorch_counts_falls_by_what_is_predicted(keep: Rule) -> None:
    model, given = vit("eager"), inputs("ViT", 1)  # written out, so that every product is counted
    full = counted(model, given)
    with thin(model, (1, 3), keep) as thinned:
        less = counted(model, given)
    whole = encoder_flops([37] * 4, WIDTH, INNER)
    assert full - less == whole - encoder_flops(thinned.lengths, WIDTH, INNER)
    assert less < full or keep is keep_all


def test_merging_pays_for_its_matching() -> None:
    model, given = vit("eager"), inputs("ViT", 1)
    full = counted(model, given)
    with merge(model, 5, metric=by_states) as thinned:
        less = counted(model, given)
    assert thinned.lengths == [37, 32, 27, 22]
    spent = sum(matching_flops(n, WIDTH) for n in (37, 32, 27))
    whole = encoder_flops([37] * 4, WIDTH, INNER)
    assert full - less == whole - encoder_flops(thinned.lengths, WIDTH, INNER) - spent


def test_a_batch_costs_what_its_samples_cost() -> None:
    model = vit("eager")
    with thin(model, (1,), partial(keep_share, share=0.25)) as thinned:
        one, four = counted(model, inputs("ViT", 1)), counted(model, inputs("ViT", 4))
    assert four == 4 * one
    assert thinned.lengths == [37, 10, 10, 10]
