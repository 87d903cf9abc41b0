import pytest
import torch

from overt.supervise.loss import Loss


def test_the_mean_is_the_sum_over_the_rows():
    loss = Loss(torch.tensor(6.0), torch.tensor(4))
    assert float(loss.mean()) == 1.5


def test_no_rows_are_no_loss_and_a_zero_gradient():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = Loss(weight * 0, torch.tensor(0))
    loss.mean().backward()
    assert float(loss.mean().detach()) == 0 and float(weight.grad) == 0


def test_a_weight_counts_the_loss_more_and_leaves_the_rows():
    loss = Loss(torch.tensor(6.0), torch.tensor(4), batch_level=True)
    for heavier in (0.5 * loss, loss * 0.5):
        assert heavier.weight == 0.5 and heavier.batch_level
        assert heavier.total is loss.total and heavier.count is loss.count
        assert float(heavier.mean()) == 0.75
    assert (2.0 * (0.5 * loss)).weight == 1.0


def test_a_mean_of_means_would_be_wrong():
    """Why a loss is not divided early: two parts of unequal rows."""
    parts = [Loss(torch.tensor(8.0), torch.tensor(2)), Loss(torch.tensor(1.0), torch.tensor(8))]
    together = sum(float(p.total) for p in parts) / sum(int(p.count) for p in parts)
    assert together == pytest.approx(0.9)
    assert sum(float(p.mean()) for p in parts) / 2 == pytest.approx(2.0625)
