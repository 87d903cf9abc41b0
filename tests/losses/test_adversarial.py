"""Adversarial losses: equation, separate gradients, context, values, errors."""

import copy
import math

import pytest
import torch
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.losses.adversarial import Discriminator, discriminator_loss, generator_loss
from tests.losses.maps import random_map, random_target, rows_of


def make_discriminator(keys: int = 5, context: int = 0, **more) -> Discriminator:
    torch.manual_seed(0)
    return Discriminator(keys, context, **more).double()


def slow_logit(net: Discriminator, row: list[float], beside: list[float]) -> float:
    """Compute one row through the layers in eval mode without torch."""
    given = row + [0.0] * (net.keys - len(row)) + beside
    first, second = net.layers[1], net.layers[4]
    hidden = [
        max(0.0, sum(w * x for w, x in zip(weights, given, strict=True)) + bias)
        for weights, bias in zip(first.weight.tolist(), first.bias.tolist(), strict=True)
    ]
    out = zip(second.weight[0].tolist(), hidden, strict=True)
    return sum(w * x for w, x in out) + float(second.bias.detach())


def test_losses_follow_the_equation_row_by_row():
    """Equation 3: -log D(t|x) - log(1 - D(a|x)) for D, -log D(a|x) for the generator."""
    net = make_discriminator(keys=6, context=3).eval()
    attention = random_map(b=3, seed=1)
    target = random_target(attention, seed=2)
    context = torch.randn(3, 3, dtype=torch.float64)
    even = torch.nn.functional.layer_norm(context, (3,)).tolist()
    b, l, h, q, _ = attention.values.shape
    apart, fooled, count = 0.0, 0.0, 0
    for at in range(b):
        for query in range(q):
            seen = attention.visible[at, query]
            goal = target.weights[at, 0, 0, query]
            if not seen.any() or not goal.any():
                continue
            count += 1
            n = int(seen.sum())
            t = slow_logit(net, (goal * 5).tolist(), even[at])  # the target has no mask: 5 keys
            for layer in range(l):
                for head in range(h):
                    row = attention.weights[at, layer, head, query] * n
                    a = slow_logit(net, row.tolist(), even[at])
                    apart += (math.log1p(math.exp(-t)) + math.log1p(math.exp(a))) / (l * h)
                    fooled += math.log1p(math.exp(-a)) / (l * h)
    with torch.no_grad():
        one, other = (
            loss(net, attention, target, context) for loss in (discriminator_loss, generator_loss)
        )
    assert float(one.total) == pytest.approx(apart) and float(other.total) == pytest.approx(fooled)
    assert int(one.count) == int(other.count) == count > 0
    assert not one.batch_level and not other.batch_level


def test_t_ssa_12_each_loss_has_gradients_for_one_player_only():
    net = make_discriminator(keys=4, context=2)
    scores = torch.randn(3, 1, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    context = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(4))
    target = AttentionMap.from_cells(torch.rand(3, 4, dtype=torch.float64), words(4)).normalize()
    discriminator_loss(net, attention, target, context).total.backward()
    assert scores.grad is None and context.grad is None
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
    net.zero_grad(set_to_none=True)
    generator_loss(net, attention, target, context).total.backward()
    assert scores.grad is not None and scores.grad.any()
    assert context.grad is None, "the model must not learn to change the context"
    assert all(p.grad is None for p in net.parameters())
    assert all(p.requires_grad for p in net.parameters())


def test_confident_discriminator_still_gives_gradients():
    """The loss is non-saturating; log(1 - D) is flat here."""
    net = make_discriminator(keys=2, dropout=0.0)
    with torch.no_grad():
        net.layers[4].bias.fill_(-50.0)  # confident that no row is a target
    scores = torch.zeros(1, 1, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(2))
    target = rows_of([1.0, 0.0])
    loss = generator_loss(net, attention, target)
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(50, rel=0.1)
    assert scores.grad.abs().max() > 1e-3


def test_gradients_agree_with_finite_differences():
    net = make_discriminator(keys=3, context=2).eval()
    target = AttentionMap.from_cells(torch.rand(2, 3, dtype=torch.float64), words(3)).normalize()
    context = torch.randn(2, 2, dtype=torch.float64)

    def loss(scores: Tensor) -> Tensor:
        attention = AttentionMap.from_scores(scores, words(3))
        return generator_loss(net, attention, target, context).total

    scores = torch.randn(2, 1, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (scores,))


def test_padding_and_hidden_keys_do_not_change_the_logit():
    net = make_discriminator(keys=6).eval()
    short = rows_of([0.7, 0.2, 0.1])
    padded = AttentionMap.from_cells(
        torch.tensor([[0.7, 0.2, 0.1, 0.0, 9.0]]),
        words(5),
        torch.tensor([[True, True, True, False, False]]),
    )
    torch.testing.assert_close(net(short), net(padded))
    assert not torch.allclose(net(short), net(rows_of([0.1, 0.2, 0.7])))


def test_rows_without_a_target_do_not_count():
    net = make_discriminator(keys=3)
    attention = rows_of([0.2, 0.3, 0.5], [0.1, 0.1, 0.8])
    target = rows_of([0.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    for loss in (discriminator_loss, generator_loss):
        assert int(loss(net, attention, target).count) == 1
        none = loss(net, attention, rows_of([0.0] * 3, [0.0] * 3))
        assert float(none.total.detach()) == 0 and int(none.count) == 0


def test_permuted_targets_change_the_loss_only_with_a_context():
    """Like CORAL and MMD it cannot supervise single samples without a context."""
    maps = random_map(b=4, l=1, h=1, q=1, masked=False, seed=3)
    target = random_target(random_map(b=4, l=1, h=1, q=1, masked=False, seed=4), seed=5)
    target = AttentionMap(target.values + 0.1, target.keys).normalize()
    order = torch.tensor([2, 0, 3, 1])
    context = torch.randn(4, 2, dtype=torch.float64)
    alone, given = make_discriminator().eval(), make_discriminator(context=2).eval()
    one, other = (discriminator_loss(alone, maps, t).total for t in (target, target.select(order)))
    torch.testing.assert_close(one, other)
    one, other = (
        discriminator_loss(given, maps, t, context).total for t in (target, target.select(order))
    )
    assert (one - other).abs() > 1e-4


def test_adversarial_training_moves_each_map_to_its_target():
    """One free map per sample, with a target that depends on the context."""
    torch.manual_seed(0)
    context = torch.eye(4).repeat(4, 1)
    wanted = torch.eye(4).repeat(4, 1) * 0.7 + 0.075
    target = AttentionMap.from_cells(wanted, words(4))
    table = torch.zeros(4, 4, requires_grad=True)
    net = Discriminator(4, context=4, hidden=32, dropout=0.0)
    ours = torch.optim.Adam([table], 0.02)
    theirs = torch.optim.Adam(net.parameters(), 0.01, betas=(0.5, 0.999))

    def look() -> AttentionMap:
        return AttentionMap.from_scores((context @ table)[:, None, None, None], words(4))

    for _ in range(150):
        attention = look()
        theirs.zero_grad()
        discriminator_loss(net, attention, target, context).mean().backward()
        theirs.step()
        ours.zero_grad()
        generator_loss(net, attention, target, context).mean().backward()
        ours.step()
    found = look().weights[:, 0, 0, 0].detach()
    assert (found.argmax(dim=-1) == wanted.argmax(dim=-1)).all()


def test_attended_values_are_the_weighted_sum_of_normalised_values():
    net = make_discriminator(keys=4, context=2, values=3).eval()
    row = AttentionMap.from_cells(torch.rand(2, 4, dtype=torch.float64), words(4)).normalize()
    context = torch.randn(2, 2, dtype=torch.float64)
    values = torch.randn(2, 4, 3, dtype=torch.float64)
    found = net(row, context, values)[:, 0, 0, 0].tolist()
    for at in range(2):
        weights = row.weights[at, 0, 0, 0]
        each = [torch.nn.functional.layer_norm(one, (3,)) for one in values[at]]
        taken = sum(w * one for w, one in zip(weights, each, strict=True))
        beside = [*torch.nn.functional.layer_norm(context[at], (2,)).tolist(), *taken.tolist()]
        assert found[at] == pytest.approx(slow_logit(net, (weights * 4).tolist(), beside))


def test_values_get_no_gradient():
    net = make_discriminator(keys=4, values=3)
    scores = torch.randn(3, 1, 1, 1, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(4))
    target = AttentionMap.from_cells(torch.rand(3, 4, dtype=torch.float64), words(4)).normalize()
    for loss in (discriminator_loss, generator_loss):
        loss(net, attention, target, values=values).total.backward()
    assert values.grad is None and scores.grad is not None and scores.grad.any()


@pytest.mark.parametrize("sees", ["mean", "attended"])
def test_only_a_discriminator_with_attended_values_moves_attention_to_the_target(sees: str) -> None:
    """Each sample has one key A and one key B among others, so the mean is constant.

    The model attends to B at first and should attend to A. A discriminator that gets only the mean
    does not distinguish sharp maps on A and B.
    """
    drawn = torch.Generator().manual_seed(0)
    kinds = torch.tensor([0, 1, 2, 2, 2, 2])
    order = torch.stack([torch.randperm(6, generator=drawn) for _ in range(64)])
    values = torch.eye(3)[kinds[order]]
    target = AttentionMap.from_cells(values[..., 0] * 0.94 + 0.01, words(6))
    preference = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    torch.manual_seed(0)
    attended = {"values": values} if sees == "attended" else {}
    net = Discriminator(6, 3, hidden=32, dropout=0.0, values=3 if attended else 0)
    ours = torch.optim.Adam([preference], 0.05)
    theirs = torch.optim.Adam(net.parameters(), 0.01, betas=(0.5, 0.999))

    def look() -> AttentionMap:
        return AttentionMap.from_scores((values @ preference)[:, None, None, None], words(6))

    for _ in range(150):
        attention = look()
        theirs.zero_grad()
        discriminator_loss(net, attention, target, values.mean(dim=1), **attended).mean().backward()
        theirs.step()
        ours.zero_grad()
        generator_loss(net, attention, target, values.mean(dim=1), **attended).mean().backward()
        ours.step()
    on_a = float((look().weights[:, 0, 0, 0] * values[..., 0]).sum(dim=-1).mean().detach())
    assert on_a > 0.8 if sees == "attended" else on_a < 0.3


def test_half_precision_gives_a_float32_loss():
    net = Discriminator(3).to(torch.bfloat16)
    loss = discriminator_loss(net, rows_of([0.2, 0.3, 0.5]), rows_of([1.0, 0.0, 0.0]))
    assert loss.total.dtype == torch.float32 and loss.total.isfinite()


def test_state_dict_restores_the_discriminator():
    net, other = make_discriminator(keys=4, context=2).eval(), Discriminator(4, 2).double().eval()
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    context = torch.randn(1, 2, dtype=torch.float64)
    row = AttentionMap.from_cells(torch.rand(1, 4, dtype=torch.float64), words(4))
    assert torch.equal(net(row, context), other(row, context))


def test_maps_contexts_and_values_of_another_size_raise():
    with pytest.raises(ValueError, match="3 keys.* 2;.*keys=3"):
        Discriminator(2)(rows_of([0.2, 0.3, 0.5]))
    with pytest.raises(ValueError, match="context has 0 .* 4"):
        Discriminator(3, context=4)(rows_of([0.2, 0.3, 0.5]))
    with pytest.raises(ValueError, match="context has 2 .* 0"):
        Discriminator(3)(rows_of([0.2, 0.3, 0.5]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="values have 0 .* 4"):
        Discriminator(3, values=4)(rows_of([0.2, 0.3, 0.5]))
