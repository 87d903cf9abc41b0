"""`Loss`: mean, weight, empty losses."""

import pytest
import torch

from overt.losses.loss import Loss


def test_mean_divides_total_by_count():
    loss = Loss(torch.tensor(6.0), torch.tensor(4))
    assert float(loss.mean()) == 1.5


def test_loss_without_rows_is_zero_with_a_zero_gradient():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = Loss(weight * 0, torch.tensor(0))
    loss.mean().backward()
    assert float(loss.mean().detach()) == 0 and float(weight.grad) == 0


def test_weight_scales_the_mean_only():
    loss = Loss(torch.tensor(6.0), torch.tensor(4), batch_level=True)
    for heavier in (0.5 * loss, loss * 0.5):
        assert heavier.weight == 0.5 and heavier.batch_level
        assert heavier.total is loss.total and heavier.count is loss.count
        assert float(heavier.mean()) == 0.75
    assert (2.0 * (0.5 * loss)).weight == 1.0


def test_mean_of_parts_differs_from_mean_of_means():
    """Losses are divided late because parts have unequal numbers of rows."""
    parts = [Loss(torch.tensor(8.0), torch.tensor(2)), Loss(torch.tensor(1.0), torch.tensor(8))]
    together = sum(float(p.total) for p in parts) / sum(int(p.count) for p in parts)
    assert together == pytest.approx(0.9)
    assert sum(float(p.mean()) for p in parts) / 2 == pytest.approx(2.0625)


def test_losses_and_tensors_add_to_the_sum_of_means():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = 0.5 * Loss(weight * 6, torch.tensor(3))
    for total in (torch.tensor(1.0) + loss, loss + torch.tensor(1.0), 1 + loss, loss + 1.0):
        assert isinstance(total, torch.Tensor) and total.item() == 3.0
    assert (loss + loss).item() == sum([loss, loss]).item() == 4.0
    (torch.tensor(1.0) + loss).backward()
    assert float(weight.grad) == 1.0


def test_division_scales_the_mean_only():
    loss = Loss(torch.tensor(6.0), torch.tensor(3)) / 4.0
    assert loss.item() == 0.5 and float(loss.total) == 6.0


def test_backward_and_item_use_the_weighted_mean():
    weight = torch.tensor(2.0, requires_grad=True)
    loss = 0.5 * Loss(weight * 6, torch.tensor(3))
    assert loss.item() == 2.0 and isinstance(loss.item(), float)
    loss.backward()
    assert float(weight.grad) == 1.0
