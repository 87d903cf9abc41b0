import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.measure import (
    contrast,
    deletion,
    flips,
    insertion,
    mass_cells,
    removed,
    shuffled,
    top_cells,
    uniform,
)
from overt.testing import PlantedCell, toy_batch

# --- a decision by hand


def linear(weights: torch.Tensor, values: torch.Tensor):
    """Logits that add up cell by cell."""
    return lambda keep: torch.einsum("bk,bk,kc->bc", keep, values, weights)


def test_numbers_by_hand():
    weights = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    decide = linear(weights, torch.ones(3, 3))
    cells = torch.tensor([[True, False, False], [False, True, False], [False, False, True]])

    def probability(first: float, second: float) -> float:
        return math.exp(first) / (math.exp(first) + math.exp(second))

    whole = probability(2, 1)
    expected = [whole - probability(0, 1), whole - probability(2, 0), 0.0]
    torch.testing.assert_close(deletion(decide, cells), torch.tensor(expected))
    kept = [probability(2, 0), probability(0, 1), 0.5]
    torch.testing.assert_close(insertion(decide, cells), torch.tensor(kept))
    assert flips(decide, cells).tolist() == [1, 0, 0]


def test_agrees_with_one_sample_at_a_time(generator):
    weights, values = torch.randn(6, 4, generator=generator), torch.randn(8, 6, generator=generator)
    cells = torch.rand(8, 6, generator=generator) > 0.5
    cells[3] = False
    found = removed(linear(weights, values), cells)
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


def test_no_gradient_is_kept_and_logits_may_be_half(generator):
    weights = torch.randn(5, 3, generator=generator, requires_grad=True)
    cells = torch.ones(2, 5, dtype=torch.bool)

    def decide(keep: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return (keep @ weights).bfloat16()

    assert not deletion(decide, cells).requires_grad


def test_one_class_cannot_change():
    with pytest.raises(ValueError, match="two classes"):
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


def test_the_truthful_map_beats_chance_and_equals_the_truth(planted, generator):
    batch, model, decide = planted
    truth = model.truth(batch)
    found = contrast(decide, model(batch).looking_at("image"), truth, generator, draws=8)
    assert torch.equal(found.attended.deletion, found.truth.deletion)
    assert (found.beyond_truth == 0).all()
    assert (found.beyond_random >= 0).all() and found.beyond_random.mean() > 0.1
    value = 6.0 * model.encode(batch).values[:, 5, 0]
    expected = torch.sigmoid(2 * value.abs()) - 0.5  # what is left are two equal logits
    torch.testing.assert_close(found.attended.deletion, expected.detach())
    # a random cell is the planted one in one draw of 16
    assert float(found.random.deletion.mean() / found.attended.deletion.mean()) < 0.2
    assert (found.attended.insertion >= found.random.insertion - 1e-6).all()


def test_a_lying_map_does_no_better_than_chance(planted, generator):
    batch, _, decide = planted
    lie = PlantedCell(shows=9)(batch).looking_at("image")
    truth = PlantedCell().truth(batch)
    found = contrast(decide, lie, truth, generator, partial(top_cells, count=1))
    assert (found.attended.deletion == 0).all() and (found.attended.flips == 0).all()
    assert (found.beyond_random <= 0).all()
    assert found.beyond_truth.max() < 0


def test_a_soft_truthful_map_beats_its_shuffled_copy(planted, generator):
    """Weight is spread over all cells, with most of it on the one that decides."""
    _, _, decide = planted
    scores = torch.rand(24, 1, 1, 1, 16, generator=generator)
    scores[..., 5] += 2
    honest = AttentionMap.from_scores(scores, grid(4, 4))
    for choose in (mass_cells, partial(top_cells, count=4)):
        ours = contrast(decide, honest, None, generator, choose)
        other = contrast(decide, shuffled(honest, generator), None, generator, choose)
        assert ours.attended.deletion.mean() > other.attended.deletion.mean()
        assert ours.truth is None
        with pytest.raises(ValueError, match="no truth"):
            ours.beyond_truth  # noqa: B018


@pytest.mark.parametrize("choose", [mass_cells, partial(top_cells, count=8)])
def test_a_flat_map_does_as_well_as_random_cells(choose, generator):
    """One cell decides. Cut in reading order, a flat map would always hold it, or never."""
    for cell in (0, 15):
        weights = torch.zeros(16, 2)
        weights[cell, 0] = 4.0
        flat = uniform(AttentionMap.from_cells(torch.ones(2000, 16), grid(4, 4)))
        found = contrast(linear(weights, torch.ones(2000, 16)), flat, None, generator, choose)
        half = (1 / (1 + math.exp(-4)) - 0.5) / 2  # of what it does to remove the cell
        assert float(found.attended.deletion.mean()) == pytest.approx(half, abs=0.02)
        assert float(found.beyond_random.mean()) == pytest.approx(0, abs=0.02)


def test_samples_without_a_truth_are_not_counted(planted, generator):
    batch, model, decide = planted
    weights = model.truth(batch).weights[:, 0, 0, 0].clone()
    weights[:2] = 0
    truth = AttentionMap.from_cells(weights, grid(4, 4))
    found = contrast(decide, model(batch).looking_at("image"), truth, generator)
    assert found.truth.deletion.isnan().tolist() == [True] * 2 + [False] * 22
    assert not found.attended.deletion.isnan().any()


@pytest.mark.parametrize("broken", [0, 1])
def test_answers_that_are_no_numbers_have_no_score(broken):
    """The logits are NaN with all cells, or without some."""

    def decide(keep: torch.Tensor) -> torch.Tensor:
        wrong = keep.all(dim=-1) if broken == 0 else ~keep.all(dim=-1)
        return torch.where(wrong[:, None], torch.nan, torch.tensor([1.0, 0.0]))

    found = removed(decide, torch.tensor([[True, False, False]]))
    for one in (found.deletion, found.insertion, found.flips):
        assert one.isnan().all()


def test_random_cells_must_be_drawn(generator):
    attention = AttentionMap.from_cells(torch.rand(1, 4, generator=generator), grid(2, 2))
    decide = linear(torch.rand(4, 2), torch.rand(1, 4))
    with pytest.raises(ValueError, match="0 draws leave no random cells"):
        contrast(decide, attention, None, generator, draws=0)
