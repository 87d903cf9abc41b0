"""Learned attention (LTPA): equations by hand, gradients, masks and the classifier."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overt import losses
from overt.attention import AttentionMap, grid
from overt.nn.cnn import ImageFeatures
from overt.nn.learned_attention.attention import (
    CLASSIFIERS,
    INIT_STD,
    SCORES,
    AdditiveCompatibility,
    AttentionClassifier,
    DotCompatibility,
    MeanWithQuery,
    MultiLevelFeatures,
    ParametrisedCompatibility,
    UniformCompatibility,
    additive_relu_score,
    additive_score,
    attend,
    attend_parametrised,
    average_levels,
    bf16_cell_gradient,
    bounded_score,
    concat_levels,
    dot_score,
    grid_shape,
    mask_levels,
    mean_of_probabilities,
    mean_with_query,
    multiply_levels,
    parametrised_score,
    product_of_probabilities,
    resize_mask,
    scale_gradient,
    scaled_dot_score,
    uniform_score,
)

LOCAL = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
QUERY = torch.tensor([[0.5, -1.0]])


def parametrised_with(*weight: float) -> ParametrisedCompatibility:
    made = ParametrisedCompatibility(len(weight))
    made.weight.data = torch.tensor(weight)
    return made


def levels(
    *sides: int, widths: tuple[int, ...] = (6, 8), query: int = 8, samples: int = 3
) -> MultiLevelFeatures:
    """Make random cells of square grids."""
    cells = tuple(
        ImageFeatures(torch.randn(samples, side * side, width), grid(side, side))
        for side, width in zip(sides, widths, strict=True)
    )
    return MultiLevelFeatures(cells, torch.randn(samples, query))


def slow_attention(cells: Tensor, scores: list[float]) -> tuple[list[float], list[float]]:
    """Compute equation 1 and the weighted sum element by element."""
    above = [math.exp(score) for score in scores]
    weights = [one / sum(above) for one in above]
    width = cells.shape[-1]
    return weights, [
        sum(w * float(cell[j]) for w, cell in zip(weights, cells, strict=True))
        for j in range(width)
    ]


# --- one level


def test_t_lt_3_the_parametrised_score_by_hand() -> None:
    score = parametrised_with(1.0, 2.0)
    assert score(LOCAL, QUERY).tolist() == [[-0.5, 0.5, 1.5]]
    summary, attention = attend(LOCAL, QUERY, grid(1, 3), score)
    wanted = torch.tensor([0.090031, 0.244728, 0.665241])
    torch.testing.assert_close(attention.weights.flatten(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(summary, torch.tensor([[0.755272, 0.909969]]), atol=1e-6, rtol=0)


def test_t_lt_3_the_dot_product_by_hand() -> None:
    assert DotCompatibility()(LOCAL, QUERY).tolist() == [[0.5, -1.0, -0.5]]
    assert DotCompatibility(2.0)(LOCAL, QUERY).tolist() == [[1.0, -2.0, -1.0]]
    summary, attention = attend(LOCAL, QUERY, grid(1, 3), DotCompatibility())
    wanted = torch.tensor([0.628532, 0.140244, 0.231224])
    torch.testing.assert_close(attention.weights.flatten(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(summary, torch.tensor([[0.859756, 0.371468]]), atol=1e-6, rtol=0)


def test_the_additive_score_cell_by_cell() -> None:
    score = AdditiveCompatibility(5, activation=torch.relu)
    cells, query = torch.randn(2, 4, 5), torch.randn(2, 5)
    found = score(cells, query).detach()
    u = score.weight.tolist()
    for b in range(2):
        for k in range(4):
            joint = [max(0.0, float(cells[b, k, j] + query[b, j])) for j in range(5)]
            by_hand = sum(x * y for x, y in zip(u, joint, strict=True))
            assert float(found[b, k]) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("make", SCORES.values(), ids=SCORES)
def test_t_lt_1_weights_sum_to_one_and_summary_is_in_the_range_of_the_cells(make: Callable) -> None:
    cells, query = torch.randn(3, 12, 7), torch.randn(3, 7)
    compatibility = make(7)
    summary, attention = attend(cells, query, grid(3, 4), compatibility)
    attention.check()
    assert attention.values.shape == (3, 1, 1, 1, 12)
    assert (summary <= cells.amax(dim=1) + 1e-6).all()
    assert (summary >= cells.amin(dim=1) - 1e-6).all()
    for b in range(3):
        scores = compatibility(cells, query)[b].tolist()
        weights, mean = slow_attention(cells[b], scores)
        assert attention.weights[b].flatten().tolist() == pytest.approx(weights, abs=1e-6)
        assert summary[b].tolist() == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("make", SCORES.values(), ids=SCORES)
def test_t_lt_5_equal_cells_get_equal_attention(make: Callable) -> None:
    cell = torch.randn(2, 1, 6)
    summary, attention = attend(cell.expand(2, 9, 6), torch.randn(2, 6), grid(3, 3), make(6))
    torch.testing.assert_close(attention.weights, torch.full((2, 1, 1, 1, 9), 1 / 9))
    torch.testing.assert_close(summary, cell[:, 0])


def test_t_lt_2_parametrised_attention_does_not_depend_on_the_query() -> None:
    score, cells = parametrised_with(*torch.randn(16).tolist()), torch.randn(4, 20, 16)
    maps = [
        attend(cells, query, grid(4, 5), score)[1].weights
        for query in (torch.zeros(4, 16), torch.randn(4, 16), 5 * torch.randn(4, 16))
    ]
    assert max(float((one - maps[0]).abs().max()) for one in maps) < 1e-6


def test_parametrised_score_treats_no_query_as_zeros() -> None:
    score, cells = parametrised_with(*torch.randn(16).tolist()), torch.randn(4, 20, 16)
    assert torch.equal(score(cells, None), score(cells, torch.zeros(4, 16)))


@pytest.mark.parametrize("make", [dot_score, scaled_dot_score, additive_score])
def test_t_lt_2_other_scores_depend_on_the_query(make: Callable) -> None:
    score, cells = make(16), torch.randn(4, 20, 16)
    assert (
        score.uses_query
        and not parametrised_score(16).uses_query
        and not uniform_score(16).uses_query
    )
    if isinstance(score, AdditiveCompatibility):
        score.weight.data.normal_()
    one, other = (attend(cells, torch.randn(4, 16), grid(4, 5), score)[1] for _ in range(2))
    assert float((one.weights - other.weights).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("make", "learns"), [(parametrised_score, False), (dot_score, True), (additive_score, True)]
)
def test_t_lt_2_query_gets_a_gradient_unless_the_score_is_parametrised(
    make: Callable, learns: bool
) -> None:
    """In double precision the gradient of the parametrised form is zero up to rounding."""
    cells = torch.randn(3, 10, 8, dtype=torch.float64)
    query = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    score = make(8).double()
    for value in score.parameters():
        value.data.normal_()
    summary, _ = attend(cells, query, grid(2, 5), score)
    (summary * torch.randn_like(summary)).sum().backward()
    assert query.grad is not None
    assert (float(query.grad.abs().max()) > 1e-6) is learns
    assert learns or float(query.grad.abs().max()) < 1e-14


def test_t_lt_6_a_bias_changes_nothing() -> None:
    score = parametrised_with(1.0, 2.0)
    _, before = attend(LOCAL, QUERY, grid(1, 3), score)
    score.bias.data += 3
    _, after = attend(LOCAL, QUERY, grid(1, 3), score)
    torch.testing.assert_close(after.weights, before.weights)
    assert float((score(LOCAL, QUERY) - parametrised_with(1.0, 2.0)(LOCAL, QUERY)).min()) == 3


@pytest.mark.parametrize("make", SCORES.values(), ids=SCORES)
def test_scores_are_at_least_float32(make: Callable) -> None:
    cells, query = torch.randn(2, 6, 8), 50 * torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = make(8)(cells.bfloat16(), query.bfloat16())
    assert low.dtype == torch.float32
    assert make(8).double()(cells.double(), query.double()).dtype == torch.float64


def test_bfloat16_parametrised_attention_does_not_depend_on_the_query() -> None:
    """The sum l + g in bfloat16 would depend on it: compare both ways of computing eq. 2."""
    cells, score = torch.randn(8, 64, 32).bfloat16(), parametrised_with(*torch.randn(32).tolist())
    apart, summed = [], []
    for size in (0.0, 50.0):
        query = (size * torch.randn(8, 32)).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            apart.append(score(cells, query).softmax(dim=-1))
            rounded = (cells + query[:, None]) @ score.weight.bfloat16()
            summed.append(rounded.float().softmax(dim=-1))
    assert float((apart[0] - apart[1]).abs().max()) < 1e-4
    assert float((summed[0] - summed[1]).abs().max()) > 0.01


def test_u_is_initialised_with_small_values() -> None:
    """With the published sqrt(2), 512 unit features give nearly all attention to one cell."""
    cells = torch.randn(16, 64, 512).relu()
    query = torch.zeros(16, 512)
    _, small = attend(cells, query, grid(8, 8), ParametrisedCompatibility(512))
    _, published = attend(
        cells, query, grid(8, 8), ParametrisedCompatibility(512, deviation=2**0.5)
    )
    assert INIT_STD == 0.01
    assert float(small.weights.amax(dim=-1).mean()) < 0.05
    assert float(published.weights.amax(dim=-1).mean()) > 0.8


def test_uniform_score_averages_the_cells() -> None:
    cells = torch.randn(2, 12, 5)
    summary, attention = attend(cells, None, grid(3, 4), UniformCompatibility())
    torch.testing.assert_close(summary, cells.mean(dim=1))
    torch.testing.assert_close(attention.weights, torch.full((2, 1, 1, 1, 12), 1 / 12))
    assert not uniform_score(5).takes_query and all(
        SCORES[name](5).takes_query for name in SCORES if name != "uniform"
    )


def test_bounded_score_by_hand_does_not_depend_on_the_query() -> None:
    score = bounded_score(2)
    score.weight.data = torch.tensor([1.0, 2.0])
    found = score(LOCAL, QUERY)[0].tolist()
    one = math.tanh(1.0)
    assert found == pytest.approx([one, 2 * one, 3 * one], abs=1e-6)
    assert torch.equal(score(LOCAL, None), score(LOCAL, 5 * QUERY))
    assert not score.uses_query and float(score(1e4 * LOCAL, None).abs().max()) <= 3


def test_additive_relu_score_by_hand() -> None:
    score = additive_relu_score(2)
    score.weight.data = torch.tensor([1.0, 2.0])
    # l + g = (1.5, -1), (.5, 0), (1.5, 0)
    assert score(LOCAL, QUERY)[0].tolist() == pytest.approx([1.5, 0.5, 1.5])
    assert score.uses_query and float(score(1e4 * LOCAL, QUERY).detach().max()) > 1e3


def test_mean_with_query_adds_the_scaled_query_to_the_mean_of_the_cells() -> None:
    features = replace(levels(4, 2, widths=(8, 8)), query=torch.randn(3, 8))
    made = AttentionClassifier(5, [8, 8], 8, mean_with_query, dropout=0.0).eval()
    summaries, maps = made.attend_levels(features)
    for number, cells in enumerate(features.cells):
        score = made.scores[number]
        assert isinstance(score, MeanWithQuery) and features.query is not None
        wanted = cells.values.mean(dim=1) + features.query * score.weight
        torch.testing.assert_close(summaries[number], made.prepare[number](wanted))
        assert maps[number].weights.unique().numel() == 1


@pytest.mark.parametrize("other", [additive_score, additive_relu_score, bounded_score])
def test_mean_with_query_has_as_many_parameters(other: Callable) -> None:
    counts = [
        sum(one.numel() for one in AttentionClassifier(5, [6, 8], 8, score).parameters())
        for score in (mean_with_query, other, parametrised_score)
    ]
    assert counts[0] == counts[1] == counts[2] - 2  # a bias per level, which changes nothing


def test_scale_gradient_keeps_values_and_gives_the_mean_over_branches() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    halved = scale_gradient(x, 0.5)
    assert torch.equal(halved, x)
    (halved.sin().sum() + (halved**2).sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, ((x.cos() + 2 * x) / 2).detach())
    assert scale_gradient(x, 1.0) is x


# --- the custom gradient of parametrised attention


def attend_by_autograd(cells: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute equations 1 and 2 by PyTorch operations with autograd."""
    score = ParametrisedCompatibility(len(weight))
    del score.weight, score.bias
    score.weight, score.bias = weight, bias
    attention = AttentionMap.from_scores(score(cells, None)[:, None, None, None], grid(3, 4))
    weights = attention.weights[:, 0, 0, 0].to(cells.dtype)
    return torch.einsum("bk,bkd->bd", weights, cells), attention.values[:, 0, 0, 0]


def parametrised_inputs(
    kind: torch.dtype = torch.float64, wide: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    """Make cells, u and its bias."""
    drawn = torch.Generator().manual_seed(0)
    precise = torch.promote_types(kind, torch.float32)
    cells, u = (torch.randn(shape, generator=drawn) for shape in ((3, 12, wide), (wide,)))
    given = cells.to(kind), u.to(precise), torch.tensor(0.3, dtype=precise)
    return tuple(one.requires_grad_() for one in given)  # type: ignore[return-value]


LOSS_WEIGHTS = {"the mean": (1.0, 0.0), "the map": (0.0, 1.0), "both": (1.0, 0.7)}


def gradients_of(way: Callable, given: tuple[Tensor, ...], shares: tuple[float, float]) -> list:
    """Compute gradients of a loss on the mean, on the map, or on both."""
    found = way(*given)
    parts = [
        share * (one.float() if one.dtype == torch.bfloat16 else one).sin().sum()
        for share, one in zip(shares, found, strict=True)
        if share
    ]
    return [one.detach() for one in torch.autograd.grad(torch.stack(parts).sum(), given)]


@pytest.mark.parametrize("shares", LOSS_WEIGHTS.values(), ids=LOSS_WEIGHTS)
def test_custom_gradient_agrees_with_autograd(shares: tuple[float, float]) -> None:
    given = parametrised_inputs()
    for one, other in zip(attend_parametrised(*given), attend_by_autograd(*given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-14, rtol=0)
    ours, theirs = (
        gradients_of(way, given, shares) for way in (attend_parametrised, attend_by_autograd)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-14, rtol=0)


def test_custom_gradient_passes_gradcheck_and_gradgradcheck() -> None:
    assert torch.autograd.gradcheck(attend_parametrised, parametrised_inputs())
    assert torch.autograd.gradgradcheck(attend_parametrised, parametrised_inputs())


@pytest.mark.parametrize("shares", LOSS_WEIGHTS.values(), ids=LOSS_WEIGHTS)
def test_bfloat16_gradient_error_is_at_most_that_of_autograd(
    shares: tuple[float, float],
) -> None:
    rough = parametrised_inputs(torch.bfloat16)
    exact = tuple(one.detach().double().requires_grad_() for one in rough)
    truth = gradients_of(attend_by_autograd, exact, shares)
    with torch.autocast("cpu", torch.bfloat16):
        found = [
            gradients_of(way, rough, shares) for way in (attend_parametrised, attend_by_autograd)
        ]
        assert [one.dtype for one in found[0]] == [torch.bfloat16, torch.float32, torch.float32]
    for wanted, one, other in zip(truth[:2], *(each[:2] for each in found), strict=True):
        ours, theirs = ((slope.double() - wanted).abs().mean() for slope in (one, other))
        assert ours <= 1.2 * theirs


def test_bfloat16_second_gradient_reaches_the_cells() -> None:
    seconds = []
    for way in (attend_parametrised, attend_by_autograd):
        given = parametrised_inputs(torch.bfloat16)
        slope = torch.autograd.grad(way(*given)[1].sin().sum(), given[1], create_graph=True)[0]
        seconds.append(torch.autograd.grad(slope.square().sum(), given[0])[0].float())
    assert float(seconds[0].abs().max()) > 0.1
    torch.testing.assert_close(*seconds, atol=0.05, rtol=0.05)


def test_bf16_cell_gradient_is_rounded_once() -> None:
    drawn = torch.Generator().manual_seed(0)
    of_scores, shares = (torch.randn(3, 40, generator=drawn) for _ in range(2))
    weight, of_summary = torch.randn(64, generator=drawn), torch.randn(3, 64, generator=drawn)
    of_summary = of_summary.bfloat16()
    parts = ((of_scores, weight.expand(3, -1)), (shares, of_summary))
    truth = sum(torch.einsum("bk,bd->bkd", one.double(), two.double()) for one, two in parts)
    found = bf16_cell_gradient(of_scores, weight, shares, of_summary)
    assert found.dtype == torch.bfloat16
    ours, least = ((one.double() - truth).abs().mean() for one in (found, truth.bfloat16()))
    assert ours <= 1.001 * least
    large = bf16_cell_gradient(1e30 * of_scores, weight, 1e30 * shares, of_summary)
    torch.testing.assert_close(large.double(), 1e30 * truth, rtol=0.02, atol=1e28)


class PassCounter(TorchDispatchMode):
    """Count operations whose result is as large as all cells, and all operations."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.many, self.passes = large, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.many += 1
            self.passes += isinstance(made, Tensor) and made.numel() >= self.large
        return made


def test_custom_gradient_makes_fewer_passes_over_the_cells() -> None:
    counted = []
    for way in (attend_parametrised, attend_by_autograd):
        given = parametrised_inputs(torch.bfloat16, wide=64)
        with PassCounter(given[0].numel()) as passes:
            way(*given)[0].float().sum().backward()
        counted.append((passes.passes, passes.many))
    (ours, all_ours), (theirs, all_theirs) = counted
    assert (ours, theirs) == (2, 5)
    assert all_ours < all_theirs


# --- masks


def test_mask_is_resized_to_other_grids() -> None:
    keep = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    fine, same, coarse = resize_mask(keep, [(4, 4), (2, 2), (1, 1)])
    rows = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert fine.reshape(4, 4).tolist() == rows
    assert torch.equal(same, keep) and coarse.tolist() == [[0.5]]
    assert resize_mask(fine, [(4, 4), (2, 2)])[1].tolist() == keep.tolist()
    # at other ratios a cell counts by the area that is covered
    wide = resize_mask(torch.tensor([[1.0, 0.0, 0.0]]), [(1, 3), (1, 2), (1, 4)])
    torch.testing.assert_close(wide[1], torch.tensor([[2 / 3, 0.0]]))
    torch.testing.assert_close(wide[2], torch.tensor([[1.0, 1 / 3, 0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"5 .*4 x 4.*2 x 2"):
        resize_mask(torch.ones(1, 5), [(4, 4), (2, 2)])


def test_masked_cells_are_zero_at_every_level() -> None:
    cells = levels(4, 2).cells
    assert [one is cell.values for one, cell in zip(mask_levels(cells, None), cells, strict=True)]
    keep = torch.tensor([[1, 1, 0, 1]] * 3)
    fine, coarse = mask_levels(cells, {"image": keep})
    assert coarse[:, 2].abs().max() == 0 and torch.equal(coarse[:, 0], cells[1].values[:, 0])
    assert fine[:, [8, 9, 12, 13]].abs().max() == 0
    assert torch.equal(fine[:, 3], cells[0].values[:, 3])
    assert torch.equal(mask_levels(cells, {"text": keep})[0], cells[0].values)


# --- the classifier


def classifier(decision: Callable = concat_levels, **options: object) -> AttentionClassifier:
    torch.manual_seed(1)
    return AttentionClassifier(5, [6, 8], 8, decision=decision, **options).eval()  # type: ignore[arg-type]


def test_t_lt_7_one_level_gives_equal_predictions_for_every_decision() -> None:
    features = levels(3, widths=(8,))
    found = []
    for decision in CLASSIFIERS.values():
        torch.manual_seed(1)
        net = AttentionClassifier(5, [8], 8, decision=decision).eval()
        found.append(net(features).prediction.softmax(dim=-1))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_t_lt_8_average_decision_is_the_mean_of_probabilities() -> None:
    net, features = classifier(average_levels), levels(4, 2)
    found = net(features).prediction.exp()
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(3))
    summaries, _ = net.attend_levels(features)
    each = [
        linear(one).softmax(dim=-1)
        for linear, one in zip(net.decision.linear, summaries, strict=True)
    ]
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    labels = torch.tensor([0, 3, 4])
    loss = losses.classification(net(features).prediction, labels).total
    by_hand = -sum(math.log(float(each[0][b, y] + each[1][b, y]) / 2) for b, y in enumerate(labels))
    assert float(loss) == pytest.approx(by_hand, rel=1e-5)


def test_t_lt_8_product_decision_may_rank_classes_differently() -> None:
    one = torch.tensor([[0.98, 0.01, 0.01]]).log()
    other = torch.tensor([[0.002, 0.5, 0.498]]).log()
    mean, times = mean_of_probabilities([one, other]), product_of_probabilities([one, other])
    torch.testing.assert_close(mean.exp(), torch.tensor([[0.491, 0.255, 0.254]]))
    torch.testing.assert_close(times.exp(), torch.tensor([[0.00196, 0.005, 0.00498]]))
    assert mean.argmax() == 0 and times.argmax() == 1
    assert float(times.exp().sum()) < 1  # as in the code: not a distribution until it is normalised
    assert isinstance(multiply_levels(3, [4]), nn.Module)


def test_query_is_projected_once_per_width() -> None:
    net = AttentionClassifier(5, [6, 6, 8], 8, score=dot_score).eval()
    assert list(net.project) == ["6"]
    calls: list[int] = []
    net.project["6"].register_forward_hook(lambda *_: calls.append(1))
    output = net(levels(4, 2, 1, widths=(6, 6, 8)))
    assert calls == [1] and [len(one.keys) for one in output.attention] == [16, 4, 1]


def test_uniform_score_has_no_query_projection() -> None:
    net = classifier(score=uniform_score)
    assert not net.takes_query and not len(net.project)
    features = levels(4, 2)
    plain = net(replace(features, query=None))
    torch.testing.assert_close(net(features).prediction, plain.prediction)


@pytest.mark.parametrize("sides", [(4, 2), (7, 5), (1, 1)])
def test_any_grid_size_works(sides: tuple[int, int]) -> None:
    output = classifier()(levels(*sides))
    assert [grid_shape(one.keys) for one in output.attention] == [(side, side) for side in sides]
    assert output.prediction.shape == (3, 5)


def test_prediction_depends_on_attended_cells_only() -> None:
    """Cells with weight 0 do not matter."""
    net = classifier(score=parametrised_score)
    for score in net.scores:
        score.weight.data.zero_()
        score.weight.data[0] = 1e4
    features = levels(4, 2)
    for cells in features.cells:
        cells.values[:, :, 0] = 0.0
        cells.values[:, 1, 0] = 1.0
    before = net(features).prediction
    for cells in features.cells:
        cells.values[:, 2:, 1:] += 7
    torch.testing.assert_close(net(features).prediction, before)


# --- the optimizer of the paper


def test_t_lt_9_the_published_learning_rate_assumes_dampened_momentum() -> None:
    """Torch7 dampens momentum by default: its rate of 1 converges to .1 here."""

    def steps(gradients: list[float], **options: float) -> list[float]:
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], momentum=0.9, **options)
        places = [0.0]
        for gradient in gradients:
            weight.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
            places.append(float(weight))
        return places

    gradients = [1.0, 2.0, -1.0, 0.5]
    assert steps(gradients, lr=1.0, dampening=0.9)[-1] == pytest.approx(-3.841)
    assert steps(gradients, lr=0.1)[-1] == pytest.approx(-0.7459)
    for options in ({"lr": 1.0, "dampening": 0.9}, {"lr": 0.1}):
        *_, before, after = steps([1.0] * 400, **options)
        assert before - after == pytest.approx(1.0)
