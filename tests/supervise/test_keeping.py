"""Against forgetting: torch's own KL, a Fisher information known by hand, and anchors."""

import pytest
import torch
from torch import nn

from overt.models.vlbert.model import answering
from overt.supervise import Taught
from overt.supervise.keeping import Anchor, distillation, drawn, fisher, same_states
from tests.models.vlbert.scenes import batch, net


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
    with pytest.raises(ValueError, match="above 0"):
        distillation(ours, theirs, 0.0)


def test_gradients_of_distillation_keep_their_size():
    ours, theirs = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    sizes = []
    for temperature in (20.0, 40.0):
        (slope,) = torch.autograd.grad(distillation(ours, theirs, temperature).total, ours)
        sizes.append(float(slope.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_states_are_compared_where_something_stands():
    ours, theirs = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    present = torch.tensor([[True, True, False], [True, False, False]])
    loss = same_states(ours, theirs, present)
    slow = sum(
        float((ours[b, k, d] - theirs[b, k, d]) ** 2) / 4
        for b, k in ((0, 0), (0, 1), (1, 0))
        for d in range(4)
    )
    assert float(loss.total) == pytest.approx(slow, rel=1e-5) and int(loss.count) == 3


def test_fisher_of_a_logistic_regression_is_known():
    """Labels drawn from the model: E[(y - p)^2 x^2] = p (1 - p) x^2, here over all labels."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    x = torch.randn(4, 3)
    p = model(x).sigmoid().detach()
    exact = (p * (1 - p) * x.square()).mean(dim=0)

    def both(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        """Every sample with both labels, each as often as the model believes in it."""
        logit = model(given)[:, 0]
        yes, no = nn.functional.logsigmoid(logit), nn.functional.logsigmoid(-logit)
        weights = torch.cat([p[:, 0], 1 - p[:, 0]]).sqrt()  # squared gradients are weighed
        return torch.cat([yes, no]) * weights

    found = fisher(model, [x], both)["weight"][0] * 2  # eight scores of four samples
    torch.testing.assert_close(found, exact)


def test_fisher_of_drawn_labels_comes_near_it():
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    x = torch.randn(3, 2)
    p = model(x).softmax(dim=-1).detach()
    exact = (p[:, :, None] * (1 - p[:, :, None]) * x[:, None].square()).mean(dim=0)
    drawing = torch.Generator().manual_seed(1)

    def score(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return drawn(model(given), drawing)

    found = fisher(model, [x] * 400, score)["weight"]
    torch.testing.assert_close(found, exact, rtol=0.25, atol=0.02)


def test_parameters_that_nothing_depends_on_do_not_matter():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
    model["frozen"] = nn.Linear(1, 1).requires_grad_(False)
    found = fisher(model, [torch.randn(3, 2)], lambda net, x: drawn(net["used"](x)))
    assert found["spare.weight"].count_nonzero() == 0 and found["used.weight"].any()
    assert "frozen.weight" not in found
    with pytest.raises(ValueError, match="no samples"):
        fisher(model, [], lambda net, x: drawn(net["used"](x)))


def test_an_anchor_pulls_back_by_what_matters():
    model = nn.Linear(2, 1, bias=False)
    importance = {"weight": torch.tensor([[4.0, 0.0]])}
    anchor = Anchor(model, importance)
    assert float(anchor(model).total.detach()) == 0
    with torch.no_grad():
        model.weight.add_(torch.tensor([[0.5, 9.0]]))
    loss = anchor(model)
    assert float(loss.total.detach()) == pytest.approx(0.5 * 4 * 0.25) and float(loss.count) == 1
    loss.total.backward()
    assert model.weight.grad.tolist() == [[2.0, 0.0]]
    plain = Anchor(model)
    with torch.no_grad():
        model.weight.sub_(torch.tensor([[1.0, 1.0]]))
    assert float(plain(model).total.detach()) == pytest.approx(1.0)


def test_anchors_lie_in_checkpoints_and_are_no_part_of_the_model():
    model = nn.Linear(2, 1)
    taught = Taught(model, anchor=Anchor(model))
    assert list(taught.parameters()) == list(model.parameters())
    other = Taught(nn.Linear(2, 1), anchor=Anchor(nn.Linear(2, 1)))
    other.load_state_dict(taught.state_dict())
    assert float(other.anchor(other.model).total.detach()) == 0


def test_what_does_not_fit_an_anchor_is_told():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="no parameter 'w'"):
        Anchor(model, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="has shape"):
        Anchor(model, {"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="has lost 'weight'"):
        Anchor(model)(nn.Sequential(nn.Linear(2, 1)))


def test_a_network_that_learns_something_else_stays_near():
    """The anchor of the trunk holds a network with a new head; the head is free."""
    model = net(relations=0).eval()
    given = batch(3)
    matters = fisher(model, [given], lambda model, batch: drawn(model(batch).prediction))
    trunk = {name: one for name, one in matters.items() if not name.startswith("answer.")}
    assert sum(float(one.sum()) for one in trunk.values()) > 0
    other = answering(model, type(model.answer)(12, 5))
    anchor = Anchor(other, trunk)
    assert float(anchor(other).total.detach()) == 0
    with torch.no_grad():
        other.answer.decision.weight.add_(1)
    assert float(anchor(other).total.detach()) == 0
    with torch.no_grad():
        other.encoder.layers[0].inner.weight.add_(1)
    assert float(anchor(other).total.detach()) > 0
