import math

import pytest
import torch

from overt.attention import AttentionMap, regions
from overt.measure import js
from overt.supervise.perturb.fusing import (
    Decay,
    Fusion,
    Gate,
    Largest,
    MovingAverage,
    Place,
    added,
    decay,
    enhance,
    gate,
    head_mean,
    largest,
    max_pooling,
    mixed,
    moving_average,
    normalised,
    nothing,
    perturb,
    shared_gate,
    uniform,
)

PLACE = Place(heads=2, groups=2, width=3)


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).view(1, 1, 1, -1)


WEIGHTS, MASK = row(0.5, 0.3, 0.2), row(0.9, 0.1, 0.5)
ENHANCED = enhance(WEIGHTS, MASK)


def close(found: torch.Tensor, *numbers: float) -> None:
    torch.testing.assert_close(found, row(*numbers), atol=1e-6, rtol=0)


def test_a2_1_enhanced_attention():
    close(ENHANCED, 0.552585, 0.737881, 0.329744)
    assert float(ENHANCED.sum()) == pytest.approx(1.620211, abs=1e-6)
    close(normalised(ENHANCED), 0.341058, 0.455423, 0.203519)


def test_a2_2_max_pooling_is_degenerate_unless_renormalised_before():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        weights = torch.rand(2, 3, 4, 5, generator=generator).softmax(-1)
        enhanced = enhance(weights, torch.rand(2, 3, 4, 5, generator=generator))
        assert torch.equal(largest(weights, enhanced), enhanced)
    close(largest(WEIGHTS, normalised(ENHANCED)), 0.5, 0.455423, 0.203519)


def test_a2_3_moving_average():
    found = added(WEIGHTS, ENHANCED)
    close(found, 0.555259, 0.373788, 0.232974)
    assert float(found.sum()) == pytest.approx(1.162021, abs=1e-6)


def test_a2_4_exponential_decay():
    fusion, query = Decay(), torch.zeros(1, 1, 1, 3)
    assert torch.equal(fusion(WEIGHTS, ENHANCED, query), WEIGHTS)
    fusion.elapsed.fill_(1.0)
    close(fusion(WEIGHTS, ENHANCED, query), 0.53324, 0.576794, 0.282014)
    fusion.elapsed.fill_(1e6)
    torch.testing.assert_close(fusion(WEIGHTS, ENHANCED, query), ENHANCED)
    assert "elapsed" in fusion.state_dict()


def test_a2_5_gate():
    assert torch.equal(mixed(WEIGHTS, ENHANCED, 1.0), WEIGHTS)
    assert torch.equal(mixed(WEIGHTS, ENHANCED, 0.0), ENHANCED)
    found = mixed(WEIGHTS, ENHANCED, 0.25)
    close(found, 0.539439, 0.628411, 0.297308)
    assert float(found.sum()) == pytest.approx(1.465158, abs=1e-6)


def test_a2_6_masks_that_are_all_alike_change_nothing():
    for value in (0.0, 0.3, 1.0):
        mask = torch.full_like(WEIGHTS, value)
        torch.testing.assert_close(normalised(enhance(WEIGHTS, mask)), WEIGHTS)
    ones = torch.ones_like(WEIGHTS)
    assert torch.equal(enhance(WEIGHTS, ones), WEIGHTS)
    for average in (uniform, head_mean, nothing):
        assert torch.equal(perturb(WEIGHTS, ones, average), WEIGHTS)


def test_a2_7_perturbed_attention():
    close(perturb(WEIGHTS, torch.zeros_like(MASK)), 1 / 3, 1 / 3, 1 / 3)
    found = perturb(WEIGHTS, MASK, uniform)
    close(found, 0.483333, 0.33, 0.266667)
    assert float(found.sum()) == pytest.approx(1.08, abs=1e-6)
    two = torch.cat([WEIGHTS, row(0.1, 0.1, 0.8)], dim=1)
    mean = perturb(two, MASK.expand_as(two), head_mean)
    close(mean[:, :1], 0.48, 0.21, 0.35)
    torch.testing.assert_close(perturb(WEIGHTS, MASK, head_mean), WEIGHTS)  # one head: a no-op
    close(perturb(WEIGHTS, MASK, nothing), 0.45, 0.03, 0.1)


def test_a2_11_the_divergence_before_and_after():
    def as_map(weights):
        return AttentionMap(weights[None].float().permute(1, 0, 2, 3, 4), regions(3))

    plain, aligned = as_map(WEIGHTS), as_map(normalised(mixed(WEIGHTS, ENHANCED, 0.25)))
    assert float(js(plain, aligned)) == pytest.approx(0.010758, abs=1e-6)
    assert float(js(aligned, plain)) == pytest.approx(0.010758, abs=1e-6)
    assert float(js(plain, plain)) == pytest.approx(0, abs=1e-7)
    apart = as_map(row(1.0, 0.0, 0.0)), as_map(row(0.0, 1.0, 0.0))
    assert float(js(*apart)) == pytest.approx(math.log(2), abs=1e-6)


def test_a2_13_what_is_hidden_gets_nothing():
    weights = row(0.6, 0.4, 0.0)
    visible = torch.tensor([[[True, True, False]]])
    mask = row(0.0, 0.5, 0.0)
    close(perturb(weights, mask, uniform, visible), 0.5, 0.45, 0.0)
    for average in (head_mean, nothing):
        assert perturb(weights, mask, average, visible)[..., 2] == 0
    assert enhance(weights, mask)[..., 2] == 0
    empty = perturb(torch.zeros_like(weights), mask, uniform, torch.zeros_like(visible))
    assert not empty.any() and not normalised(empty).any()


@pytest.mark.parametrize(
    ("make", "most"),
    [(max_pooling, 1.0), (moving_average, 0.1452), (decay, 1.0), (gate, 1.0), (shared_gate, 1.0)],
)
def test_every_fusion_is_a_bias_of_less_than_one(make, most):
    """Softmax of scores with the bias log f(1, exp(1 - m)) is the fused attention, renormalised."""
    torch.manual_seed(0)
    fusion = make(PLACE).double()
    if isinstance(fusion, Decay):
        fusion.elapsed.fill_(2.0)
    scores, query = torch.randn(2, 2, 4, 6).double(), torch.randn(2, 2, 4, 3).double()
    mask = torch.rand(2, 2, 4, 6).double()
    weights = scores.softmax(-1)
    strong = (1 - mask).exp()
    bias = fusion(torch.ones_like(strong), strong, query).log()
    expected = normalised(fusion(weights, enhance(weights, mask), query))
    torch.testing.assert_close((scores + bias).softmax(-1), expected, atol=1e-15, rtol=1e-12)
    assert bool((bias.amax(-1) - bias.amin(-1) < most).all())


def test_gates_are_one_a_head_or_one_a_layer():
    torch.manual_seed(0)
    own, common = Gate(2, 3), Gate(1, 3)
    query = torch.randn(1, 1, 4, 3).expand(1, 2, 4, 3)
    assert not torch.allclose(own.share(query)[:, 0], own.share(query)[:, 1])
    torch.testing.assert_close(common.share(query)[:, 0], common.share(query)[:, 1])
    slow = torch.sigmoid(own.weight[1] @ query[0, 1, 2] + own.bias[1])
    torch.testing.assert_close(own.share(query)[0, 1, 2, 0], slow)


def test_weights_of_half_the_bits_stay_such_beside_a_gate_of_all():
    query = torch.randn(1, 2, 4, 3).bfloat16()
    weights = torch.rand(1, 2, 4, 5).bfloat16()
    found = Gate(2, 3)(weights, 2 * weights, query)
    assert found.dtype is torch.bfloat16 and bool((found >= weights).all())
    assert perturb(weights, torch.rand(1, 2, 4, 5)).dtype is torch.bfloat16


def test_fusions_without_choices_are_what_they_are_called():
    query = torch.zeros(1, 1, 1, 3)
    assert torch.equal(Largest()(WEIGHTS, ENHANCED, query), largest(WEIGHTS, ENHANCED))
    assert torch.equal(MovingAverage(0.5)(WEIGHTS, ENHANCED, query), added(WEIGHTS, ENHANCED, 0.5))


def test_a_fusion_must_say_what_it_makes():
    class Silent(Fusion):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Silent()
