"""DeepLift: Captum, completeness, in-place and functional activations, maximum pooling."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.attribution import deep_lift, input_x_gradient


def make_cnn(*, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=inplace), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 2 * 3, 7),
        nn.Softplus(), nn.Linear(7, 4),
    ).double().eval()  # fmt: skip


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 8, 10, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("start", [0.0, 0.4])
def test_deep_lift_agrees_with_captum(start: float, images: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    """Captum's own sum is wrong for two nonlinear modules in a row, so none are here."""
    torch.manual_seed(0)
    net, target = make_cnn(), torch.tensor([1, 3, 0])
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 1), *net[2:])
    net[-3] = nn.Linear(5 * 2, 7)
    net = net.double()
    expected, gap = captum.DeepLift(net).attribute(
        images, torch.full_like(images, start), target, return_convergence_delta=True
    )
    found = deep_lift(net, images, target, baseline=start).check()
    torch.testing.assert_close(found.weights.flatten(1), expected.sum(dim=1).flatten(1))
    torch.testing.assert_close(found.gap, -gap, atol=1e-9, rtol=0)


@pytest.mark.parametrize("inplace", [True, False])
def test_the_map_adds_up_to_the_change_of_the_score(inplace: bool, images: Tensor) -> None:
    net = make_cnn(inplace=inplace)
    found = deep_lift(net, images, 2)
    change = net(images)[:, 2] - net(torch.zeros_like(images))[:, 2]
    torch.testing.assert_close(found.change, change.detach())
    torch.testing.assert_close(found.gap, torch.zeros(3).double(), atol=1e-10, rtol=0)


FUNCTIONS = [
    *(F.relu, torch.relu, Tensor.relu, torch.relu_, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu),
    *(F.gelu, F.silu, F.mish, F.softplus, F.hardswish, F.hardsigmoid, F.hardtanh, F.logsigmoid),
    *(torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh, torch.tanh_, torch.sigmoid_),
    *(nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.SiLU(inplace=True), nn.Tanh()),
]


def name_of(number: int) -> str:
    """Return an id that is the same in every process: a function prints its address."""
    return f"{number}-{getattr(FUNCTIONS[number], '__name__', type(FUNCTIONS[number]).__name__)}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=map(name_of, range(len(FUNCTIONS))))
def test_every_activation_has_the_slope_of_its_differences(function) -> None:
    x = torch.tensor([[0.7, -1.3, 2.0]]).double()
    found = deep_lift(lambda x: function(x * 1.0), x, lambda out: out.sum(dim=1), baseline=0.2)
    start = torch.full_like(x, 0.2)
    torch.testing.assert_close(
        found.weights.flatten(), (function(x.clone()) - function(start)).flatten()
    )


def test_an_alias_of_an_in_place_activation_has_its_slope() -> None:
    def model(x: Tensor) -> Tensor:
        kept = x * 1.0
        F.relu(kept, inplace=True)
        return kept.sum(dim=1)

    x = torch.tensor([[0.7, -1.3, 2.0]])
    found = deep_lift(model, x, lambda out: out, baseline=-1.0)
    torch.testing.assert_close(found.weights.flatten(), torch.tensor([0.7, 0.0, 2.0]))


def test_overlapping_maxima_add_up(images: Tensor) -> None:
    net = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Flatten(), nn.Linear(240, 2))
    found = deep_lift(net.double(), images, 1, baseline=0.1)
    torch.testing.assert_close(found.gap, torch.zeros(3).double(), atol=1e-10, rtol=0)


def test_equal_inputs_have_the_ordinary_gradient() -> None:
    """No position differs from the baseline: slopes are gradients, and the map is zero."""
    net, x = make_cnn(), torch.randn(1, 3, 8, 10).double()
    found = deep_lift(net, x, 1, baseline=x)
    assert not found.values.any() and found.values.isfinite().all()


def test_without_activations_it_is_input_x_gradient(images: Tensor) -> None:
    """Products of inputs have their ordinary gradient, and the gap says what is missing."""
    found = deep_lift(lambda x: x.square().flatten(1), images, 5)
    torch.testing.assert_close(
        found.values, input_x_gradient(lambda x: x.square().flatten(1), images, 5).values
    )
    assert (found.gap.abs() > 1e-3).any()


def test_gates_without_a_row_per_sample_are_ordinary(images: Tensor) -> None:
    gate = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]).double())
    found = deep_lift(lambda x: (x * torch.tanh(gate)[:, None, None]).flatten(1), images, 5)
    torch.testing.assert_close(found.gap, torch.zeros(3).double(), atol=1e-12, rtol=0)


class SamplesLater(nn.Module):
    """Activations of a sequence of words, with the samples on the second axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = F.max_pool2d(self.into(x.transpose(0, 1)).relu()[None], (1, 2))[0]
        return self.out(F.pad(found, (0, 3)).tanh().mean(dim=0))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_samples_may_be_on_any_axis(batch: int) -> None:
    """A first axis of words whose number is even is not samples and their baselines."""
    net, x = SamplesLater().double(), torch.randn(batch, 12, 3).double()
    found = deep_lift(net, x, 1)
    torch.testing.assert_close(found.gap, torch.zeros(batch).double(), atol=1e-12, rtol=0)
    alone = torch.cat([deep_lift(net, one[None], 1).values for one in x])
    torch.testing.assert_close(found.values, alone)
    torch.testing.assert_close(deep_lift(net, x, 1, chunk=1).values, alone)


def test_other_activations_for_the_baseline_raise() -> None:
    def other(x: Tensor) -> Tensor:
        return x.tanh() if x.any() else x.sigmoid()

    with pytest.raises(ValueError, match="other activation"):
        deep_lift(other, torch.ones(1, 2), 0)
    with pytest.raises(ValueError, match="other activation"):
        deep_lift(lambda x: x.tanh() if x.any() else x, torch.ones(1, 2), 0)
    with pytest.raises(ValueError, match="other activation"):
        deep_lift(lambda x: x if x.any() else x.tanh(), torch.ones(1, 2), 0)
