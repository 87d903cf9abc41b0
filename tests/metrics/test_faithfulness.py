"""Faithfulness: deletion, insertion, flips and the contrast with random cells."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.metrics import contrast_removal, shuffled_map, uniform_map
from overt.metrics.faithfulness import deletion, flips, insertion, removal_effect
from overt.metrics.top_cells import mass_cells, top_cells
from overt.testing import PlantedCell, toy_batch

# --- a decision by hand


def linear_model(weights: torch.Tensor, values: torch.Tensor):
    """Return a model whose logits are sums over cells."""
    return lambda keep: torch.einsum("bk,bk,kc->bc", keep, values, weights)


def test_removal_effects_match_an_example_by_hand():
    weights = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    decide = linear_model(weights, torch.ones(3, 3))
    cells = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])

    def probability(first: float, second: float) -> float:
        return math.exp(first) / (math.exp(first) + math.exp(second))

    whole = probability(2, 1)
    expected = [whole - probability(0, 1), whole - probability(2, 0), 0.0]
    torch.testing.assert_close(deletion(decide, cells), torch.tensor(expected))
    kept = [probability(2, 0), probability(0, 1), 0.5]
    torch.testing.assert_close(insertion(decide, cells), torch.tensor(kept))
    assert flips(decide, cells).tolist() == [1, 0, 0]


def test_removal_effects_agree_with_a_loop_over_samples(generator):
    weights, values = torch.randn(6, 4, generator=generator), torch.randn(8, 6, generator=generator)
    cells = torch.rand(8, 6, generator=generator) > 0.5
    cells[3] = False
    found = removal_effect(linear_model(weights, values), cells)
    for b in range(8):
        if not cells[b].any():
            assert (
                found.deletion[b].isnan() and found.insertion[b].isnan() and found.flips[b].isnan()
            )
            continue
        logits = [(values[b] * keep) @ weights for keep in (torch.ones(6), ~cells[b], cells[b])]
        whole, without, alone = (one.softmax(dim=-1) for one in logits)
        answer = int(whole.argmax())
        assert float(found.deletion[b]) == pytest.approx(
            float(whole[answer] - without[answer]), abs=1e-5
        )
        assert float(found.insertion[b]) == pytest.approx(float(alone[answer]), abs=1e-5)
        assert float(found.flips[b]) == (int(without.argmax()) != answer)


def test_removal_runs_without_gradient_and_with_half_precision(generator):
    weights = torch.randn(5, 3, generator=generator, requires_grad=True)
    cells = torch.ones(2, 5, dtype=torch.bool)

    def decide(keep: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return (keep @ weights).bfloat16()

    assert not deletion(decide, cells).requires_grad


def test_a_single_class_raises():
    with pytest.raises(ValueError, match="2 classes"):
        deletion(lambda keep: keep[:, :1], torch.ones(2, 5, dtype=torch.bool))


# --- a planted model


@pytest.fixture
def planted():
    batch = toy_batch(24, seed=3)
    images = torch.randn(23, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 4
    batch = replace(batch, images=images)
    model = PlantedCell(gain=6.0).eval()
    features = model.encode(batch)
    return batch, model, lambda keep: model.decide(features, {"image": keep}).prediction


def test_the_true_map_beats_random_cells_and_equals_the_truth(planted, generator):
    batch, model, decide = planted
    truth = model.truth(batch)
    found = contrast_removal(decide, model(batch).attention_to("image"), truth, generator, draws=8)
    assert torch.equal(found.attended.deletion, found.truth.deletion)
    assert (found.beyond_truth == 0).all()
    assert (found.beyond_random >= 0).all() and found.beyond_random.mean() > 0.1
    value = 6.0 * model.encode(batch).values[:, 5, 0]
    expected = torch.sigmoid(2 * value.abs()) - 0.5  # two equal logits remain
    torch.testing.assert_close(found.attended.deletion, expected.detach())
    # a random cell is the planted one in one draw of 16
    assert float(found.random.deletion.mean() / found.attended.deletion.mean()) < 0.2
    assert (found.attended.insertion >= found.random.insertion - 1e-6).all()


def test_a_wrong_map_is_not_better_than_random_cells(planted, generator):
    batch, _, decide = planted
    lie = PlantedCell(shows=9)(batch).attention_to("image")
    truth = PlantedCell().truth(batch)
    found = contrast_removal(decide, lie, truth, generator, partial(top_cells, count=1))
    assert (found.attended.deletion == 0).all() and (found.attended.flips == 0).all()
    assert (found.beyond_random <= 0).all()
    assert found.beyond_truth.max() < 0


def test_a_soft_true_map_beats_its_shuffled_copy(planted, generator):
    """Weight is spread over all cells, most of it on the deciding one."""
    _, _, decide = planted
    scores = torch.rand(24, 1, 1, 1, 16, generator=generator)
    scores[..., 5] += 2
    honest = AttentionMap.from_scores(scores, grid(4, 4))
    for choose in (mass_cells, partial(top_cells, count=4)):
        ours = contrast_removal(decide, honest, None, generator, choose)
        other = contrast_removal(decide, shuffled_map(honest, generator), None, generator, choose)
        assert ours.attended.deletion.mean() > other.attended.deletion.mean()
        assert ours.truth is None
        with pytest.raises(ValueError, match="needs a truth"):
            ours.beyond_truth  # noqa: B018


@pytest.mark.parametrize("choose", [mass_cells, partial(top_cells, count=8)])
def test_a_uniform_map_equals_random_cells(choose, generator):
    """With ties broken in reading order, a uniform map would always or never select the cell."""
    for cell in (0, 15):
        weights = torch.zeros(16, 2)
        weights[cell, 0] = 4.0
        flat = uniform_map(AttentionMap.from_cells(torch.ones(2000, 16), grid(4, 4)))
        found = contrast_removal(
            linear_model(weights, torch.ones(2000, 16)), flat, None, generator, choose
        )
        half = (1 / (1 + math.exp(-4)) - 0.5) / 2  # half of the effect of removing the cell
        assert float(found.attended.deletion.mean()) == pytest.approx(half, abs=0.02)
        assert float(found.beyond_random.mean()) == pytest.approx(0, abs=0.02)


def test_samples_without_ground_truth_give_nan(planted, generator):
    batch, model, decide = planted
    weights = model.truth(batch).weights[:, 0, 0, 0].clone()
    weights[:2] = 0
    truth = AttentionMap.from_cells(weights, grid(4, 4))
    found = contrast_removal(decide, model(batch).attention_to("image"), truth, generator)
    assert found.truth.deletion.isnan().tolist() == [True] * 2 + [False] * 22
    assert not found.attended.deletion.isnan().any()


@pytest.mark.parametrize("broken", [0, 1])
def test_nan_logits_give_nan(broken):
    """The logits are NaN with all cells or without some."""

    def decide(keep: torch.Tensor) -> torch.Tensor:
        wrong = keep.all(dim=-1) if broken == 0 else ~keep.all(dim=-1)
        return torch.where(wrong[:, None], torch.nan, torch.tensor([1.0, 0.0]))

    found = removal_effect(decide, torch.tensor([[True, False, False]]))
    for one in (found.deletion, found.insertion, found.flips):
        assert one.isnan().all()


def test_zero_draws_raise(generator):
    attention = AttentionMap.from_cells(torch.rand(1, 4, generator=generator), grid(2, 2))
    decide = linear_model(torch.rand(4, 2), torch.rand(1, 4))
    with pytest.raises(ValueError, match="draws .* 0"):
        contrast_removal(decide, attention, None, generator, draws=0)
