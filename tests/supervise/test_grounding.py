"""Grounded supervision: test vectors of the paper's arithmetic, slow copies, rows that count."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overt import watch
from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, rollout, words
from overt.data.batch import Batch
from overt.data.scenes.pairs import CaptionPairScenes, Describes
from overt.models import Classify, PooledRegions, VLBert, VLSizes, adopt
from overt.supervise import Loss, classification, cross_entropy
from overt.supervise.grounding import (
    Matcher,
    aim,
    aims,
    bce_log,
    choice,
    direct,
    grounded,
    indirect,
    matching,
    narrowed,
    only_first,
    picked,
    rolled,
    rolled_rows,
    to_regions,
    to_text,
    turned,
    with_image,
    within,
)
from tests.models.tiny import bert
from tests.supervise.stream import Stream, packed, truth

LENGTHS = [(5, 4), (8, 2), (3, 6)]
LINKS = [{1: [0], 2: [0], 4: [1, 3]}, {0: [1]}, {}]


def samples(kind=torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 8, generator=drawn).to(kind), torch.randn(m, 8, generator=drawn).to(kind))
        for n, m in LENGTHS
    ]


def stream(dropout=0.0) -> Stream:
    torch.manual_seed(0)
    return Stream(dropout=dropout).double()


def seen_of(net: Stream, which=(0, 1, 2)):
    some = samples()
    x, there, layout = packed([some[at] for at in which])
    with watch(net, layout=layout) as seen:
        net(x, there)
    n, m = (len(layout.find(name)) for name in ("text", "regions"))
    return seen, truth([LINKS[at] for at in which], n, m)


def square(*layers: list[list[float]]) -> AttentionMap:
    """Layers of one head over a few words."""
    values = torch.tensor(layers, dtype=torch.float64)[None, :, None]
    k = values.shape[-1]
    return AttentionMap(values, words(k), words(k))


def random_square(b=2, l=3, h=2, k=5, hidden=0) -> AttentionMap:
    scores = torch.randn(b, l, h, k, k, dtype=torch.float64)
    mask = (torch.arange(k) < k - hidden).expand(b, 1, k) if hidden else None
    return AttentionMap.from_scores(scores, words(k), words(k), mask)


def slow_direct(weights, links, offsets, lengths):
    """Eq. 6 to 8, one weight at a time: (sum over tokens, tokens), (sum over regions, regions)."""
    b, l, h = len(weights), len(weights[0]), len(weights[0][0])
    forth, back, tokens, boxes = 0.0, 0.0, 0, 0
    for at in range(b):
        spoken: dict[int, list[int]] = {}
        for token, found in links[at].items():
            tokens += 1
            for box in found:
                spoken.setdefault(box, []).append(token)
            for layer in range(l):
                for head in range(h):
                    row = weights[at][layer][head][token]
                    inside = [row[offsets[at] + box] for box in range(lengths[at][1])]
                    costs = [-math.log(inside[box] / sum(inside)) for box in found]
                    forth += sum(costs) / len(costs) / (l * h)
        for box, found in spoken.items():
            boxes += 1
            for layer in range(l):
                for head in range(h):
                    row = weights[at][layer][head][offsets[at] + box]
                    inside = [row[token] for token in range(lengths[at][0])]
                    costs = [-math.log(inside[token] / sum(inside)) for token in found]
                    back += sum(costs) / len(costs) / (l * h)
    return (forth, tokens), (back, boxes)


# --- T-VGP-1 to 5: rollout


def test_t_vgp_1_rows_of_the_rollout_sum_to_one():
    sums = rollout(random_square()).weights.sum(dim=-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_t_vgp_2_rollout_of_two_layers_by_hand():
    found = rollout(square([[0.5, 0.5], [0.2, 0.8]], [[1.0, 0.0], [0.6, 0.4]])).weights[0, :, 0]
    first, second = [[0.75, 0.25], [0.1, 0.9]], [[0.75, 0.25], [0.295, 0.705]]
    torch.testing.assert_close(found, torch.tensor([first, second], dtype=torch.float64))


@pytest.mark.parametrize(("n", "layers", "own"), [(3, 12, 0.333496), (50, 6, 0.0353125)])
def test_t_vgp_3_rollout_of_identity_and_of_uniform_attention(n, layers, own):
    same = torch.eye(n, dtype=torch.float64).expand(1, layers, 1, n, n)
    identity = rollout(AttentionMap(same, words(n), words(n))).weights
    torch.testing.assert_close(identity, same)
    even = torch.full((1, layers, 1, n, n), 1 / n, dtype=torch.float64)
    found = rollout(AttentionMap(even, words(n), words(n))).weights[0, -1, 0]
    assert float(found[0, 0]) == pytest.approx(own, abs=1e-6)
    assert float(found[0, 0]) == pytest.approx(1 / n + (1 - 1 / n) / 2**layers, abs=1e-12)


def test_t_vgp_4_the_first_layer_is_half_itself():
    one = random_square(l=1, h=1)
    half = 0.5 * one.weights + 0.5 * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(rollout(one).weights, half)
    torch.testing.assert_close(rollout(one, residual=False).weights, one.weights)


def test_t_vgp_5_padding_gets_nothing_of_the_rollout():
    found = rollout(random_square(hidden=2)).weights[..., :3, :]
    assert (found[..., 3:] == 0).all() and (found[..., :3] > 0).all()


# --- T-VGP-6 to 8: eq. 6 and 7, and what the code does in their place

ROW = [0.1, 0.2, 0.3, 0.05, 0.35]


def mixed(row: list[float] | torch.Tensor) -> AttentionMap:
    """One token (the first) that looks at two words and three regions."""
    values = torch.as_tensor(row, dtype=torch.float64).view(1, 1, 1, 1, 5)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    return AttentionMap(values, keys, words(1))


def test_t_vgp_6_weights_over_regions_sum_to_one_whatever_the_text_gets():
    row = torch.tensor(ROW, dtype=torch.float64)
    found = mixed(row).between("text", "regions").weights
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    scaled = torch.cat([row[:2], 0.01 * row[2:]])
    torch.testing.assert_close(mixed(scaled).between("text", "regions").weights, found)
    other = torch.cat([row[:2].flip(0), row[2:]])
    torch.testing.assert_close(mixed(other).between("text", "regions").weights, found)


def test_t_vgp_7_one_row_by_hand():
    target = truth([{0: [0]}], 1, 3)
    block = within(mixed(ROW))
    rows = grounded(target)
    hat = block("text", "regions", rows).weights.flatten().tolist()
    assert hat == pytest.approx([0.428571, 0.071429, 0.5], abs=1e-6)
    assert float(to_regions(block, target).total) == pytest.approx(0.847298, abs=1e-6)
    # a softmax over probabilities, which the code offers too, can never come near zero
    plain = mixed(ROW).block("text", "regions")
    soft = AttentionMap.from_scores(plain.weights, plain.keys, plain.queries)
    assert float(cross_entropy(soft, target).total) == pytest.approx(1.040302, abs=1e-6)
    tilde = block("text", "text", rows)
    assert tilde.weights.flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    wanted = truth([{0: [1]}], 1, 2)
    assert float(bce_log(tilde, wanted).total) == pytest.approx(0.601986, abs=1e-5)
    each = [float(bce_log(replace(tilde, mask=torch.tensor([[[at == 0, at == 1]]])), wanted).total)
            for at in range(2)]  # fmt: skip
    assert each == pytest.approx([0.287682, 0.916291], abs=1e-5)


def test_t_vgp_8_perfect_attention_costs_nothing_but_the_code_asks_for_log_two():
    target = truth([{0: [0]}], 1, 3)
    perfect = within(mixed([0.5, 0.2, 0.3, 0.0, 0.0]))
    assert float(to_regions(perfect, target).total) == pytest.approx(0, abs=1e-12)
    floor = to_regions(perfect, target, bce_log).total
    assert 3 * float(floor) == pytest.approx(math.log(2), abs=1e-5)


def test_bce_log_agrees_with_torch():
    attention = random_square()
    target = truth([{0: [1], 3: [0, 4]}, {2: [2]}], 5, 5)
    logits = (attention.weights + 1e-6).log()
    wanted = (target.weights > 0).double().expand_as(logits)
    costs = binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=-1)
    rows = target.rows[:, None, None].expand(costs.shape)
    expected = costs[rows].sum() / 6  # three layers of two heads
    loss = bce_log(attention, target)
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == 3


# --- direct, on a watched model with fused kernels


def test_direct_agrees_with_the_equations():
    seen, target = seen_of(stream())
    found = direct(seen.log_block, target)
    offsets = [n for n, _ in LENGTHS]
    expected = slow_direct(seen.map().weights.tolist(), LINKS, offsets, LENGTHS)
    for name, (total, count) in zip(("to_regions", "to_text"), expected, strict=True):
        assert float(found[name].total.detach()) == pytest.approx(total, abs=1e-10), name
        assert int(found[name].count) == count


def test_a_map_in_full_gives_the_same_as_the_rows_alone():
    seen, target = seen_of(stream())
    rows, full = direct(seen.log_block, target), direct(within(seen.map()), target)
    for name, loss in rows.items():
        torch.testing.assert_close(loss.total, full[name].total, rtol=1e-10, atol=1e-10)


def test_rows_found_before_give_the_same_losses():
    seen, target = seen_of(stream())
    expected, ready = direct(seen.log_block, target), aims(target)
    assert ready.onto_regions.rows.tolist() == grounded(target).tolist()
    for found in (
        direct(seen.log_block, ready),
        {
            "to_regions": to_regions(seen.log_block, aim(target, most=4)),
            "to_text": to_text(seen.log_block, aim(turned(target), most=6)),
        },
    ):
        for name, loss in expected.items():
            torch.testing.assert_close(found[name].total, loss.total, rtol=1e-12, atol=1e-12)
            assert int(found[name].count) == int(loss.count)
    assert aim(target, most=4).rows.shape == (3, 4)
    with pytest.raises(ValueError, match="3 grounded rows, more than 2"):
        aim(target, most=2)


class NoWaiting(TorchDispatchMode):
    """Lets nothing be made on the CPU, or brought from it: that would be waited for on a card."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, found)):
            known = isinstance(one, torch.Tensor) and (one.ndim or func is torch.ops.aten._to_copy)
            assert not known or one.device.type == "meta", f"{func} is on the CPU"
        return found


@pytest.mark.parametrize("watched", [False, True])
def test_a_supervised_step_waits_for_nothing(watched):
    """On a device that has no values to tell, every `.item()`, mask and look at one is an error."""
    torch.manual_seed(0)
    sizes = VLSizes(60, 16, 2, 2, 32, positions=64, dropout=0.0)
    model = VLBert(sizes, PooledRegions([16], [2]), Classify(16, 3), relations=0)
    batch = CaptionPairScenes("train", seed=0, count=3, size=32).batch(range(3))
    ready = aims(batch.target).to("meta")
    model, batch = model.to("meta"), batch.to("meta")
    with NoWaiting():
        features = model.encode(batch)
        if watched:
            with watch(model.encoder, layout=features.layout) as seen:
                output = model.decide(features)
        else:
            output = model.decide(features)
            seen = output.seen
        losses = direct(seen.log_block, ready, words=features.words)
        task = classification(output.prediction, batch.labels).mean()
        (task + sum(one.mean() for one in losses.values())).backward()
    assert all(one.grad is not None for one in model.encoder.layers[0].parameters())
    rows = grounded(batch.target, most=5)
    assert rows.shape == (3, 5)
    with pytest.raises(RuntimeError, match="meta"):
        grounded(batch.target)


def test_supervision_is_on_weights_before_dropout():
    quiet, loud = stream(), stream(dropout=0.9).train()
    quiet.layers, loud.layers = quiet.layers[:1], loud.layers[:1]
    totals = [
        float(direct(seen.log_block, target)["to_regions"].total.detach())
        for seen, target in (seen_of(quiet), seen_of(loud))
    ]
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)


@pytest.mark.parametrize("way", ["direct", "rolled", "last rollout"])
def test_t_vgp_9_batches_do_not_change_a_samples_loss(way):
    """Text and regions of unequal lengths: no position may come from the longest of a batch."""

    def found(which):
        seen, target = seen_of(stream(), which)
        block = {"direct": lambda: seen.log_block, "rolled": lambda: rolled(seen.map()),
                 "last rollout": lambda: rolled_rows(seen)}[way]()  # fmt: skip
        losses = direct(block, target)
        return [float(losses[name].total.detach()) for name in ("to_regions", "to_text")]

    alone = [found((at,)) for at in range(3)]
    for which in ((0, 1, 2), (2, 0, 1), (1, 0)):
        together = [sum(alone[at][side] for at in which) for side in range(2)]
        assert found(which) == pytest.approx(together, abs=1e-9)


def test_t_vgp_11_no_gradient_leaves_the_regions():
    scores = torch.randn(1, 2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    whole = AttentionMap.from_scores(scores, keys, keys)
    to_regions(within(whole), truth([{0: [0], 1: [2]}], 2, 3)).total.backward()
    outside = scores.grad[..., :2]
    assert outside.abs().max() < 1e-15 and (scores.grad[..., :2, 2:] != 0).any()
    assert (scores.grad[..., 2:, :] == 0).all()
    net = stream()
    net.layers = net.layers[:1]
    x, there, layout = packed(samples()[:1])
    with watch(net, layout=layout) as seen:
        net(x.requires_grad_(), there)
    to_regions(seen.log_block, truth(LINKS[:1], 5, 4)).total.backward()
    kept = [1, 2, 4, *range(5, 9)]  # the rows, and the keys in R; no other token is touched at all
    rest = [at for at in range(9) if at not in kept]
    assert (x.grad[0, rest] == 0).all() and (x.grad[0, kept] != 0).any(dim=-1).all()


def test_t_vgp_11_does_not_hold_for_rollout():
    scores = torch.randn(1, 2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    block = rolled(AttentionMap.from_scores(scores, keys, keys))
    to_regions(block, truth([{0: [0]}], 2, 3)).total.backward()
    assert scores.grad[..., :2].abs().max() > 1e-3


@pytest.mark.parametrize("way", ["direct", "code", "rolled", "last rollout"])
def test_t_vgp_13_nothing_grounded_costs_nothing_and_has_a_finite_gradient(way):
    net = stream()
    some = samples()
    x, there, layout = packed(some)
    with watch(net, layout=layout) as seen:
        out = net(x, there)
    blocks = {"rolled": lambda: rolled(seen.map()), "last rollout": lambda: rolled_rows(seen)}
    block = blocks.get(way, lambda: seen.log_block)()
    compare = bce_log if way == "code" else cross_entropy
    losses = direct(block, truth([{}, {}, {}], 8, 6), onto_text=compare)
    total = losses["to_regions"].total + losses["to_text"].total
    assert float(total.detach()) == 0 and all(int(one.count) == 0 for one in losses.values())
    (total + 0 * out.sum()).backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in net.parameters())


def test_learning_moves_attention_to_the_regions():
    net = stream()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    costs = []
    for _ in range(40):
        seen, target = seen_of(net)
        losses = direct(seen.log_block, target)
        total = sum(one.mean() for one in losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        costs.append(float(total.detach()))
    assert costs[-1] < 0.25 * costs[0]


# --- semi-direct


def slow_rolled(weights):
    """Rollout up to each layer, one number at a time."""
    l, h, k = len(weights), len(weights[0]), len(weights[0][0])
    layers = []
    for layer in weights:
        mean = [[sum(layer[a][i][j] for a in range(h)) / h for j in range(k)] for i in range(k)]
        mixed = [[mean[i][j] + (i == j) for j in range(k)] for i in range(k)]
        step = [[one / sum(row) for one in row] for row in mixed]
        if layers:
            before = layers[-1]
            step = [[sum(step[i][n] * before[n][j] for n in range(k)) for j in range(k)]
                    for i in range(k)]  # fmt: skip
        layers.append(step)
    assert len(layers) == l
    return [[layer] for layer in layers]


def test_semi_direct_agrees_with_the_equations_on_a_slow_rollout():
    seen, target = seen_of(stream(), (0,))
    found = direct(rolled(seen.map()), target)
    weights = [slow_rolled(seen.map().weights[0].tolist())]
    expected = slow_direct(weights, LINKS, [5], LENGTHS)
    for name, (total, count) in zip(("to_regions", "to_text"), expected, strict=True):
        assert float(found[name].total.detach()) == pytest.approx(total, abs=1e-10), name
        assert int(found[name].count) == count


def test_the_last_rollout_of_some_rows_is_the_last_layer_of_all():
    net = stream()
    seen, target = seen_of(net)
    some = direct(rolled_rows(seen), target)
    last = rollout(seen.map()).layer(-1)
    whole = direct(within(last), target)
    for name, loss in some.items():
        torch.testing.assert_close(loss.total, whole[name].total)
    one, two = (
        torch.autograd.grad(losses["to_text"].total, list(net.parameters()), retain_graph=True)
        for losses in (some, whole)
    )
    for ours, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_spans_that_are_slices_and_spans_that_are_lists_are_one():
    some = samples()[:1]
    x, there, layout = packed(some)
    net, target = stream(), truth(LINKS[:1], 5, 4)
    sliced = Layout((Span("text", (5,), slice(0, 5)), Span("regions", (4,), slice(5, 9))), 9)
    totals = []
    for one in (layout, sliced):
        with watch(net, layout=one) as seen:
            net(x, there)
        totals.append(float(direct(rolled_rows(seen), target)["to_text"].total.detach()))
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)


# --- indirect


def slow_indirect(match, phrases, regions, wanted, present):
    """Eq. 5, pair by pair."""
    weight, bias = match.judge.weight[0].tolist(), float(match.judge.bias.detach())
    total, count = 0.0, 0
    for at, phrase in enumerate(phrases.tolist()):
        costs = []
        for box, region in enumerate(regions[at].tolist()):
            if not present[at, box]:
                continue
            logit = sum(w * v for w, v in zip(weight, phrase + region, strict=True)) + bias
            right = 1 / (1 + math.exp(-logit))
            costs.append(-math.log(right if wanted[at, box] else 1 - right))
        if costs:
            total, count = total + sum(costs) / len(costs), count + 1
    return total, count


def test_indirect_agrees_with_equation_5():
    match = Matcher(4).double()
    torch.nn.init.normal_(match.judge.bias)
    phrases, regions = torch.randn(5, 4).double(), torch.randn(5, 6, 4).double()
    wanted, present = torch.rand(5, 6) < 0.3, torch.rand(5, 6) < 0.7
    present[2] = False
    loss = indirect(match, phrases, regions, wanted, present)
    total, count = slow_indirect(match, phrases, regions, wanted, present)
    assert float(loss.total.detach()) == pytest.approx(total) and int(loss.count) == count == 4


def test_indirect_without_phrases_is_zero_with_a_finite_gradient():
    match = Matcher(4)
    nothing = torch.zeros(0, 3, dtype=torch.bool)
    loss = indirect(match, torch.zeros(0, 4), torch.zeros(0, 3, 4), nothing, nothing)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((p.grad == 0).all() for p in match.parameters())


def test_a_matcher_starts_as_xavier_has_it():
    torch.manual_seed(0)
    match = Matcher(200).requires_grad_(False)
    assert float(match.judge.weight.abs().max()) <= math.sqrt(6 / 401)
    assert float(match.judge.weight.std()) == pytest.approx(math.sqrt(2 / 401), rel=0.1)
    assert (match.judge.bias == 0).all()


# --- which region is meant


def slow_choice(logits, wanted, present):
    """The cost of each choice, region by region, with plain numbers."""
    total, count = 0.0, 0
    for row, right, there in zip(logits.tolist(), wanted.tolist(), present.tolist(), strict=True):
        fine = [at for at, one in enumerate(right) if one and there[at]]
        if fine:
            sum_of = sum(math.exp(row[at]) for at in range(len(row)) if there[at])
            total -= sum(row[at] - math.log(sum_of) for at in fine) / len(fine)
            count += 1
    return total, count


def test_a_choice_agrees_with_plain_numbers_and_counts_what_can_be_chosen():
    logits = torch.randn(6, 5, dtype=torch.float64).requires_grad_()
    wanted, present = torch.rand(6, 5) < 0.5, torch.rand(6, 5) < 0.7
    wanted[1], present[2] = False, False
    wanted[3] = present[3] = torch.tensor([True, False, True, True, False])
    loss = choice(logits, wanted, present)
    total, count = slow_choice(logits, wanted, present)
    assert float(loss.total.detach()) == pytest.approx(total) and int(loss.count) == count
    loss.total.backward()
    assert logits.grad.isfinite().all() and not logits.grad[[1, 2]].any()
    assert not logits.grad[~present].any()


def test_a_choice_of_one_is_classification():
    logits = torch.randn(4, 5)
    labels = torch.tensor([2, 0, 4, 1])
    wanted = torch.nn.functional.one_hot(labels, 5).bool()
    found = choice(logits, wanted, torch.ones(4, 5, dtype=torch.bool))
    torch.testing.assert_close(found.total, classification(logits, labels).total)


def test_matching_is_the_mean_of_each_region_by_itself():
    logits, wanted, present = torch.randn(4, 5), torch.rand(4, 5) < 0.4, torch.rand(4, 5) < 0.7
    present[0], present[1] = True, False
    found = matching(logits, wanted, present)
    rows = [
        binary_cross_entropy_with_logits(logits[row][there], wanted[row][there].float())
        for row, there in enumerate(present)
        if there.any()
    ]
    torch.testing.assert_close(found.total, torch.stack(rows).sum())
    assert int(found.count) == len(rows) == 3


# --- targets


def test_rows_with_a_target_come_first_and_in_order():
    target = truth([{4: [0], 1: [1]}, {}, {2: [0, 1]}], 5, 2)
    assert grounded(target).tolist() == [[1, 4], [-1, -1], [2, -1]]
    assert grounded(truth([{}, {}], 5, 2)).tolist() == [[-1], [-1]]


def test_a_region_looks_evenly_at_all_tokens_that_speak_of_it():
    found = turned(truth([{0: [0], 1: [0, 2], 4: [2]}], 5, 3))
    even = [[0.5, 0.5, 0, 0, 0], [0] * 5, [0, 0.5, 0, 0, 0.5]]
    assert found.weights[0, 0, 0].tolist() == even
    assert [span.name for span in found.queries.spans] == ["regions"]
    assert grounded(found).tolist() == [[0, 2]]


def test_several_boxes_share_a_token_and_the_code_takes_the_first():
    target = truth([{1: [0, 3]}], 2, 4)
    assert target.weights[0, 0, 0, 1].tolist() == [0.5, 0, 0, 0.5]
    first = only_first(target)
    assert first.weights[0, 0, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert grounded(first).tolist() == [[1]]


def test_the_whole_image_is_one_key_more_of_which_nothing_speaks():
    target = truth([{1: [0, 3]}, {}], 2, 4)
    found = with_image(target)
    assert found.weights[0, 0, 0].tolist() == [[0] * 5, [0, 0.5, 0, 0, 0.5]]
    assert torch.equal(found.rows, target.rows) and found.check() is found
    assert with_image(replace(target, mask=None)).mask is None
    logs = replace(target, values=target.log_weights, form=Form.LOG)
    assert torch.equal(with_image(logs).weights, found.weights)


def test_fewer_keys_are_a_matter_of_renormalising():
    seen, target = seen_of(stream(), (0,))
    image = torch.tensor([[False, True, True, True]])  # the first box is that of the whole image
    block = seen.log_block("text", "regions", grounded(target))
    weights = seen.block("text", "regions", grounded(target)).weights * image
    expected = weights / weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(narrowed(block, image).weights, expected)
    some = truth([{2: [1], 4: [3]}], 5, 4)
    picked_rows = to_regions(seen.log_block, some, among=image)
    whole = seen.map().between("text", "regions").weights[0, :, :, [2, 4]]
    costs = [-(whole[:, :, at, box] / whole[:, :, at, 1:].sum(-1)).log().mean()
             for at, box in ((0, 1), (1, 3))]  # fmt: skip
    torch.testing.assert_close(picked_rows.total, sum(costs))
    tokens = torch.tensor([[True, True, True, False, True]])
    assert float(to_text(seen.log_block, some, among=tokens).total.detach()) < float(
        to_text(seen.log_block, some).total.detach()
    )


def test_picking_keeps_logarithms_and_hides_what_is_not_there():
    attention = random_square()
    rows = torch.tensor([[3, -1], [0, 1]])
    found = picked(attention, rows)
    torch.testing.assert_close(found.weights[0, :, :, 0], attention.weights[0, :, :, 3])
    assert (found.weights[0, :, :, 1] == 0).all() and not found.rows[0, 1]
    torch.testing.assert_close(found.weights[1], attention.weights[1][:, :, :2])
    plain = replace(attention, values=attention.weights, form=Form.PLAIN)
    torch.testing.assert_close(picked(plain, rows).weights, found.weights)


def test_a_target_of_another_size_is_refused():
    seen, _ = seen_of(stream(), (0,))
    with pytest.raises(ValueError, match="the target has 9 keys, and 'regions' of the model 4"):
        direct(seen.log_block, truth([{1: [0]}], 5, 9))


def test_captions_that_do_not_describe_the_image_are_not_grounded():
    """Q-VGP-11 and Q-VGP-3: wrong captions and phrases without a region have no row."""
    data = CaptionPairScenes("train", 0, 12, size=32)
    batch = data.batch(range(12))
    rows = grounded(batch.target)
    ends = [(batch.tokens[at] == 4).nonzero()[:, 0].tolist() for at in range(12)]
    for at in range(12):
        found = rows[at][rows[at] >= 0]
        first = bool((found < ends[at][0]).any())
        second = bool((found > ends[at][0]).any())
        match Describes(int(batch.labels[at])):
            case Describes.FIRST:
                assert not second
            case Describes.SECOND:
                assert not first
    text = [span for span in batch.target.queries.spans if span.name == "text"]
    assert len(text) == 1 and len(text[0]) == batch.tokens.shape[1]


def test_losses_can_be_weighed_and_divided_as_all_others():
    seen, target = seen_of(stream())
    found = 0.5 * direct(seen.log_block, target)["to_regions"]
    assert isinstance(found, Loss) and found.weight == 0.5
    assert float(found.mean().detach()) == pytest.approx(0.5 * float(found.total.detach()) / 4)


def test_cells_of_a_grid_are_keys_like_any_other():
    keys = grid(2, 2, "regions")
    weights = torch.full((1, 1, 1, 1, 4), 0.25, dtype=torch.float64)
    attention = AttentionMap(weights, keys, words(1), kind=Kind.PROBABILITY)
    assert float(to_regions(within(attention), truth([{0: [2]}], 1, 4)).total) == math.log(4)


def test_any_adopted_model_is_supervised_inside_its_forward_pass():
    """A BERT of somebody else: some tokens stand for words, others for regions, kernels fused."""
    tokens = torch.randint(1, 12, (3, 9))
    there = torch.arange(9) < torch.tensor([[9], [7], [8]])
    given = Batch(ids=("a", "b", "c"), tokens=tokens, token_mask=there)
    boxes = torch.tensor([[5, 6, 7, 8], [4, 5, 6, -1], [5, 6, 7, -1]])
    spans = (Span("text", (5,), slice(0, 5)), Span("regions", (4,), boxes))
    target = truth([{1: [0], 2: [3]}, {}, {3: [1, 2]}], 5, 4)
    target = replace(target, values=target.values.float())
    adopted = adopt(
        bert(),
        layout=Layout(spans, 9),
        reduce=lambda seen: seen.log_block("text", "regions"),
        loss=lambda seen, batch: to_regions(seen.log_block, target),
    )
    output = adopted(given)
    full = cross_entropy(output.looking_at("regions"), target)
    torch.testing.assert_close(output.loss.total, full.total)
    assert int(output.loss.count) == 3
    output.loss.total.backward()
    query = adopted.model.bert.encoder.layer[0].attention.self.query.weight
    assert query.grad.any() and adopted.model.config._attn_implementation == "sdpa"
