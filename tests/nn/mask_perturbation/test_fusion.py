"""Fusion of attention with masks: test vectors, score biases, gates."""

import math

import pytest
import torch

from overt.attention import AttentionMap, regions
from overt.metrics import js
from overt.nn.mask_perturbation.fusion import (
    AttentionShape,
    DecayFusion,
    Fusion,
    GateFusion,
    MaxFusion,
    MovingAverageFusion,
    decay,
    enhance,
    fuse_lerp,
    fuse_max,
    fuse_sum,
    gate,
    head_mean,
    max_pooling,
    moving_average,
    normalize_rows,
    perturb,
    shared_gate,
    uniform_average,
    zero_average,
)

SHAPE = AttentionShape(heads=2, groups=2, width=3)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(1, 1, 1, -1)


WEIGHTS, MASK = row(0.5, 0.3, 0.2), row(0.9, 0.1, 0.5)
ENHANCED = enhance(WEIGHTS, MASK)


def assert_row(found: torch.Tensor, *numbers: float) -> None:
    torch.testing.assert_close(found, row(*numbers), atol=1e-6, rtol=0)


def test_a2_1_enhanced_attention():
    assert_row(ENHANCED, 0.552585, 0.737881, 0.329744)
    assert float(ENHANCED.sum()) == pytest.approx(1.620211, abs=1e-6)
    assert_row(normalize_rows(ENHANCED), 0.341058, 0.455423, 0.203519)


def test_a2_2_max_pooling_returns_enhanced_attention_unless_renormalised():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        weights = torch.rand(2, 3, 4, 5, generator=generator).softmax(-1)
        enhanced = enhance(weights, torch.rand(2, 3, 4, 5, generator=generator))
        assert torch.equal(fuse_max(weights, enhanced), enhanced)
    assert_row(fuse_max(WEIGHTS, normalize_rows(ENHANCED)), 0.5, 0.455423, 0.203519)


def test_a2_3_moving_average():
    found = fuse_sum(WEIGHTS, ENHANCED)
    assert_row(found, 0.555259, 0.373788, 0.232974)
    assert float(found.sum()) == pytest.approx(1.162021, abs=1e-6)


def test_a2_4_exponential_decay():
    fusion, query = DecayFusion(), torch.zeros(1, 1, 1, 3)
    assert torch.equal(fusion(WEIGHTS, ENHANCED, query), WEIGHTS)
    fusion.elapsed.fill_(1.0)
    assert_row(fusion(WEIGHTS, ENHANCED, query), 0.53324, 0.576794, 0.282014)
    fusion.elapsed.fill_(1e6)
    torch.testing.assert_close(fusion(WEIGHTS, ENHANCED, query), ENHANCED)
    assert "elapsed" in fusion.state_dict()


def test_a2_5_gate():
    assert torch.equal(fuse_lerp(WEIGHTS, ENHANCED, 1.0), WEIGHTS)
    assert torch.equal(fuse_lerp(WEIGHTS, ENHANCED, 0.0), ENHANCED)
    found = fuse_lerp(WEIGHTS, ENHANCED, 0.25)
    assert_row(found, 0.539439, 0.628411, 0.297308)
    assert float(found.sum()) == pytest.approx(1.465158, abs=1e-6)


def test_a2_6_constant_masks_change_nothing():
    for value in (0.0, 0.3, 1.0):
        mask = torch.full_like(WEIGHTS, value)
        torch.testing.assert_close(normalize_rows(enhance(WEIGHTS, mask)), WEIGHTS)
    ones = torch.ones_like(WEIGHTS)
    assert torch.equal(enhance(WEIGHTS, ones), WEIGHTS)
    for average in (uniform_average, head_mean, zero_average):
        assert torch.equal(perturb(WEIGHTS, ones, average), WEIGHTS)


def test_a2_7_perturbed_attention():
    assert_row(perturb(WEIGHTS, torch.zeros_like(MASK)), 1 / 3, 1 / 3, 1 / 3)
    found = perturb(WEIGHTS, MASK, uniform_average)
    assert_row(found, 0.483333, 0.33, 0.266667)
    assert float(found.sum()) == pytest.approx(1.08, abs=1e-6)
    two = torch.cat([WEIGHTS, row(0.1, 0.1, 0.8)], dim=1)
    mean = perturb(two, MASK.expand_as(two), head_mean)
    assert_row(mean[:, :1], 0.48, 0.21, 0.35)
    torch.testing.assert_close(perturb(WEIGHTS, MASK, head_mean), WEIGHTS)  # one head: a no-op
    assert_row(perturb(WEIGHTS, MASK, zero_average), 0.45, 0.03, 0.1)


def test_a2_11_js_divergence_of_plain_and_aligned_attention():
    def as_map(weights):
        return AttentionMap(weights[None].float().permute(1, 0, 2, 3, 4), regions(3))

    plain, aligned = as_map(WEIGHTS), as_map(normalize_rows(fuse_lerp(WEIGHTS, ENHANCED, 0.25)))
    assert float(js(plain, aligned)) == pytest.approx(0.010758, abs=1e-6)
    assert float(js(aligned, plain)) == pytest.approx(0.010758, abs=1e-6)
    assert float(js(plain, plain)) == pytest.approx(0, abs=1e-7)
    apart = as_map(row(1.0, 0.0, 0.0)), as_map(row(0.0, 1.0, 0.0))
    assert float(js(*apart)) == pytest.approx(math.log(2), abs=1e-6)


def test_a2_13_hidden_keys_get_no_attention():
    weights = row(0.6, 0.4, 0.0)
    visible = torch.tensor([[[True, True, False]]])
    mask = row(0.0, 0.5, 0.0)
    assert_row(perturb(weights, mask, uniform_average, visible), 0.5, 0.45, 0.0)
    for average in (head_mean, zero_average):
        assert perturb(weights, mask, average, visible)[..., 2] == 0
    assert enhance(weights, mask)[..., 2] == 0
    empty = perturb(torch.zeros_like(weights), mask, uniform_average, torch.zeros_like(visible))
    assert not empty.any() and not normalize_rows(empty).any()


@pytest.mark.parametrize(
    ("make", "most"),
    [(max_pooling, 1.0), (moving_average, 0.1452), (decay, 1.0), (gate, 1.0), (shared_gate, 1.0)],
)
def test_every_fusion_equals_a_score_bias_below_one(make, most):
    """Softmax of the scores plus log f(1, exp(1 - m)) is the renormalised fused attention."""
    torch.manual_seed(0)
    fusion = make(SHAPE).double()
    if isinstance(fusion, DecayFusion):
        fusion.elapsed.fill_(2.0)
    scores, query = torch.randn(2, 2, 4, 6).double(), torch.randn(2, 2, 4, 3).double()
    mask = torch.rand(2, 2, 4, 6).double()
    weights = scores.softmax(-1)
    strong = (1 - mask).exp()
    bias = fusion(torch.ones_like(strong), strong, query).log()
    expected = normalize_rows(fusion(weights, enhance(weights, mask), query))
    torch.testing.assert_close((scores + bias).softmax(-1), expected, atol=1e-15, rtol=1e-12)
    assert bool((bias.amax(-1) - bias.amin(-1) < most).all())


def test_gates_are_per_head_or_shared_per_layer():
    torch.manual_seed(0)
    own, common = GateFusion(2, 3), GateFusion(1, 3)
    query = torch.randn(1, 1, 4, 3).expand(1, 2, 4, 3)
    assert not torch.allclose(own.share(query)[:, 0], own.share(query)[:, 1])
    torch.testing.assert_close(common.share(query)[:, 0], common.share(query)[:, 1])
    slow = torch.sigmoid(own.weight[1] @ query[0, 1, 2] + own.bias[1])
    torch.testing.assert_close(own.share(query)[0, 1, 2, 0], slow)


def test_bfloat16_weights_keep_their_dtype_with_a_float32_gate():
    query = torch.randn(1, 2, 4, 3).bfloat16()
    weights = torch.rand(1, 2, 4, 5).bfloat16()
    found = GateFusion(2, 3)(weights, 2 * weights, query)
    assert found.dtype is torch.bfloat16 and bool((found >= weights).all())
    assert perturb(weights, torch.rand(1, 2, 4, 5)).dtype is torch.bfloat16


def test_max_and_moving_average_fusions_equal_their_functions():
    query = torch.zeros(1, 1, 1, 3)
    assert torch.equal(MaxFusion()(WEIGHTS, ENHANCED, query), fuse_max(WEIGHTS, ENHANCED))
    assert torch.equal(
        MovingAverageFusion(0.5)(WEIGHTS, ENHANCED, query), fuse_sum(WEIGHTS, ENHANCED, 0.5)
    )


def test_fusion_without_forward_is_abstract():
    class WithoutForward(Fusion):
        pass

    with pytest.raises(TypeError, match="abstract"):
        WithoutForward()
