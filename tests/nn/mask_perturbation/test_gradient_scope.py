"""`restrict_gradient`: values and gradients of losses, for the given parameters only."""

import gc
from weakref import ref

import pytest
import torch

from overt.losses.loss import Loss
from overt.nn.mask_perturbation.gradient_scope import restrict_gradient, restricted_by_fit


def two_losses():
    ours, theirs = (torch.nn.Parameter(torch.tensor(one)) for one in ([2.0, 3.0], [5.0, 7.0]))
    product = ours * theirs
    losses = {
        "harm": -1.0 * Loss((product**2).sum(), torch.tensor(2)),
        "penalty": 0.5 * Loss(product.exp().log().sum(), torch.tensor(3)),
    }
    return ours, theirs, losses


@pytest.fixture
def case():
    return two_losses()


def objective(losses):
    return sum(one.mean() for one in losses.values())


def test_restricted_losses_keep_values_and_gradients(case):
    ours, theirs, losses = case
    wanted = torch.autograd.grad(objective(losses), ours, retain_graph=True)[0]
    scoped = restrict_gradient(losses, [ours])
    assert objective(scoped).detach() == objective(losses).detach()
    assert {name: (one.weight, int(one.count)) for name, one in scoped.items()} == {
        "harm": (-1.0, 2),
        "penalty": (0.5, 3),
    }
    (1024.0 * objective(scoped)).backward()  # as a gradient scaler does
    torch.testing.assert_close(ours.grad, 1024.0 * wanted)
    assert theirs.grad is None


def test_restricted_losses_can_be_differentiated_separately_and_twice(case):
    ours, _, losses = case
    scoped = restrict_gradient(losses, [ours])
    for _ in range(2):
        for name, one in scoped.items():
            (found,) = torch.autograd.grad(one.total, ours, retain_graph=True)
            (wanted,) = torch.autograd.grad(losses[name].total, ours, retain_graph=True)
            torch.testing.assert_close(found, wanted)


@pytest.mark.long
def test_graph_is_freed_with_the_last_loss():
    ours, _, losses = two_losses()
    inner = ref(losses["harm"].total)
    scoped = restrict_gradient(losses, [ours])
    del losses
    objective(scoped).backward()
    with pytest.raises(RuntimeError, match="second time"):
        scoped["harm"].total.backward()
    gc.collect()
    del scoped
    assert inner() is None


def test_losses_without_parameters_need_no_gradient(case):
    _, _, losses = case
    assert not any(one.total.requires_grad for one in restrict_gradient(losses, []).values())
    with torch.no_grad():
        plain = {"harm": Loss(torch.tensor(1.0), torch.tensor(1))}
    assert (
        restrict_gradient(plain, []) == plain
        or not restrict_gradient(plain, [])["harm"].total.requires_grad
    )


def test_sharded_parameters_raise_and_restricted_by_fit_returns_losses_unchanged(case):
    ours, _, losses = case
    ours.placements = ("shard",)
    with pytest.raises(ValueError, match=r"sharded .*restricted_by_fit.*mask_parameters"):
        restrict_gradient(losses, [ours])
    assert restricted_by_fit(losses, [ours]) is losses
