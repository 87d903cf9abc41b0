"""Distillation and elastic weight consolidation: torch's KL, Fisher information by hand."""

import pytest
import torch
from torch import nn

from overt.losses import SupervisedModel
from overt.losses.forgetting import (
    ElasticWeightConsolidation,
    distillation,
    feature_distillation,
    fisher_diagonal,
    sampled_log_likelihood,
)
from overt.nn.vlbert.model import with_head
from tests.nn.vlbert.scenes import batch, net


def test_distillation_agrees_with_torch():
    ours, theirs = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for temperature in (1.0, 3.0):
        loss = distillation(ours, theirs, temperature)
        expected = nn.functional.kl_div(
            (ours / temperature).log_softmax(-1),
            (theirs / temperature).softmax(-1),
            reduction="sum",
        )
        torch.testing.assert_close(loss.total, temperature**2 * expected)
        assert float(loss.count) == 5
    loss.total.backward()
    assert theirs.grad is None and ours.grad.any()
    assert float(distillation(ours, ours).total.detach()) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match=r"temperature .* 0\.0"):
        distillation(ours, theirs, 0.0)


def test_distillation_gradient_size_does_not_depend_on_temperature():
    ours, theirs = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    sizes = []
    for temperature in (20.0, 40.0):
        (slope,) = torch.autograd.grad(distillation(ours, theirs, temperature).total, ours)
        sizes.append(float(slope.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_feature_distillation_ignores_padding():
    ours, theirs = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    present = torch.tensor([[True, True, False], [True, False, False]])
    loss = feature_distillation(ours, theirs, present)
    slow = sum(
        float((ours[b, k, d] - theirs[b, k, d]) ** 2) / 4
        for b, k in ((0, 0), (0, 1), (1, 0))
        for d in range(4)
    )
    assert float(loss.total) == pytest.approx(slow, rel=1e-5) and int(loss.count) == 3


def test_fisher_of_a_logistic_regression_by_hand():
    """E[(y - p)^2 x^2] = p (1 - p) x^2 for labels of the model, here over all labels."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    x = torch.randn(4, 3)
    p = model(x).sigmoid().detach()
    exact = (p * (1 - p) * x.square()).mean(dim=0)

    def both(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        """Score each sample with both labels, weighted by their probability."""
        logit = model(given)[:, 0]
        yes, no = nn.functional.logsigmoid(logit), nn.functional.logsigmoid(-logit)
        weights = torch.cat([p[:, 0], 1 - p[:, 0]]).sqrt()  # gradients are squared
        return torch.cat([yes, no]) * weights

    found = fisher_diagonal(model, [x], both)["weight"][0] * 2  # eight scores for four samples
    torch.testing.assert_close(found, exact)


def test_fisher_of_sampled_labels_approaches_the_exact_one():
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    x = torch.randn(3, 2)
    p = model(x).softmax(dim=-1).detach()
    exact = (p[:, :, None] * (1 - p[:, :, None]) * x[:, None].square()).mean(dim=0)
    drawing = torch.Generator().manual_seed(1)

    def score(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return sampled_log_likelihood(model(given), drawing)

    found = fisher_diagonal(model, [x] * 400, score)["weight"]
    torch.testing.assert_close(found, exact, rtol=0.25, atol=0.02)


def test_fisher_of_unused_parameters_is_zero():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
    model["frozen"] = nn.Linear(1, 1).requires_grad_(False)
    found = fisher_diagonal(
        model, [torch.randn(3, 2)], lambda net, x: sampled_log_likelihood(net["used"](x))
    )
    assert found["spare.weight"].count_nonzero() == 0 and found["used.weight"].any()
    assert "frozen.weight" not in found
    with pytest.raises(ValueError, match="no samples"):
        fisher_diagonal(model, [], lambda net, x: sampled_log_likelihood(net["used"](x)))


def test_ewc_penalty_is_weighted_by_importance():
    model = nn.Linear(2, 1, bias=False)
    importance = {"weight": torch.tensor([[4.0, 0.0]])}
    anchor = ElasticWeightConsolidation(model, importance)
    assert float(anchor(model).total.detach()) == 0
    with torch.no_grad():
        model.weight.add_(torch.tensor([[0.5, 9.0]]))
    loss = anchor(model)
    assert float(loss.total.detach()) == pytest.approx(0.5 * 4 * 0.25) and float(loss.count) == 1
    loss.total.backward()
    assert model.weight.grad.tolist() == [[2.0, 0.0]]
    plain = ElasticWeightConsolidation(model)
    with torch.no_grad():
        model.weight.sub_(torch.tensor([[1.0, 1.0]]))
    assert float(plain(model).total.detach()) == pytest.approx(1.0)


def test_ewc_state_is_in_checkpoints_but_not_in_parameters():
    model = nn.Linear(2, 1)
    taught = SupervisedModel(model, anchor=ElasticWeightConsolidation(model))
    assert list(taught.parameters()) == list(model.parameters())
    other = SupervisedModel(nn.Linear(2, 1), anchor=ElasticWeightConsolidation(nn.Linear(2, 1)))
    other.load_state_dict(taught.state_dict())
    assert float(other.anchor(other.model).total.detach()) == 0


def test_mismatched_ewc_importance_raises():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="'w'"):
        ElasticWeightConsolidation(model, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"weight.*\(2,\).*\(1, 2\)"):
        ElasticWeightConsolidation(model, {"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="'weight'"):
        ElasticWeightConsolidation(model)(nn.Sequential(nn.Linear(2, 1)))


def test_ewc_of_the_trunk_leaves_a_new_head_free():
    """The penalty applies to the trunk of a network with a new head, not to the head."""
    model = net(relations=0).eval()
    given = batch(3)
    matters = fisher_diagonal(
        model, [given], lambda model, batch: sampled_log_likelihood(model(batch).prediction)
    )
    trunk = {name: one for name, one in matters.items() if not name.startswith("answer.")}
    assert sum(float(one.sum()) for one in trunk.values()) > 0
    other = with_head(model, type(model.answer)(12, 5))
    anchor = ElasticWeightConsolidation(other, trunk)
    assert float(anchor(other).total.detach()) == 0
    with torch.no_grad():
        other.answer.decision.weight.add_(1)
    assert float(anchor(other).total.detach()) == 0
    with torch.no_grad():
        other.encoder.layers[0].inner.weight.add_(1)
    assert float(anchor(other).total.detach()) > 0


@pytest.fixture
def without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of shapes at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.usefixtures("without_shape_checks")
def test_teachers_of_another_shape_raise():
    """One row of a teacher would broadcast to all samples."""
    with pytest.raises(ValueError, match=r"3, 4.*1, 4"):
        distillation(torch.rand(3, 4), torch.rand(1, 4))
    states = torch.rand(2, 5, 4)
    for teacher, present in ((states[:1], torch.ones(2, 5)), (states, torch.ones(2, 4))):
        with pytest.raises(ValueError, match=r"2, 5, 4"):
            feature_distillation(states, teacher, present.bool())


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_are_not_positive_and_finite_raise(temperature):
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
        distillation(torch.rand(3, 4), torch.rand(3, 4), temperature)
