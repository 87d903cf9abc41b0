"""Grounded supervision: test vectors of the paper, slow references, counted rows, errors."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overt import watch
from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, words
from overt.attribution import rollout
from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import CaptionPairScenes, MatchingCaption
from overt.losses import Loss, classification, cross_entropy
from overt.losses.grounding import (
    BilinearMatcher,
    MLPMatcher,
    PhraseRegionMatcher,
    add_image_region,
    bce_on_log_weights,
    direct_supervision,
    drop_blocks,
    drop_weights,
    find_grounded_rows,
    floored_cross_entropy,
    gather_rows,
    grounded_rows,
    grounding_targets,
    indirect_supervision,
    keep_first_region,
    map_blocks,
    region_choice,
    region_matching,
    regions_to_text,
    rollout_blocks,
    rollout_row_blocks,
    text_to_regions,
    transpose_target,
)
from overt.nn import ClassificationHead, PooledRegionEncoder, VLBert, VLBertSizes, wrap
from tests.losses.stream import Stream, make_target, pack_samples
from tests.nn.tiny import bert

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


def watch_stream(net: Stream, which=(0, 1, 2)):
    some = samples()
    x, there, layout = pack_samples([some[at] for at in which])
    with watch(net, layout=layout) as trace:
        net(x, there)
    n, m = (len(layout.find(name)) for name in ("text", "regions"))
    return trace, make_target([LINKS[at] for at in which], n, m)


def square_map(*layers: list[list[float]]) -> AttentionMap:
    """Make layers of one head over a few words."""
    values = torch.tensor(layers, dtype=torch.float64)[None, :, None]
    k = values.shape[-1]
    return AttentionMap(values, words(k), words(k))


def random_square_map(b=2, l=3, h=2, k=5, hidden=0) -> AttentionMap:
    scores = torch.randn(b, l, h, k, k, dtype=torch.float64)
    mask = (torch.arange(k) < k - hidden).expand(b, 1, k) if hidden else None
    return AttentionMap.from_scores(scores, words(k), words(k), mask)


def slow_direct(weights, links, offsets, lengths):
    """Compute eq. 6 to 8 weight by weight: (token sum, tokens), (region sum, regions)."""
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
    sums = rollout(random_square_map()).weights.sum(dim=-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_t_vgp_2_rollout_of_two_layers_by_hand():
    found = rollout(square_map([[0.5, 0.5], [0.2, 0.8]], [[1.0, 0.0], [0.6, 0.4]])).weights[0, :, 0]
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


def test_t_vgp_4_rollout_of_one_layer_is_half_the_identity():
    one = random_square_map(l=1, h=1)
    half = 0.5 * one.weights + 0.5 * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(rollout(one).weights, half)
    torch.testing.assert_close(rollout(one, residual=False).weights, one.weights)


def test_t_vgp_5_padding_has_zero_rollout():
    found = rollout(random_square_map(hidden=2)).weights[..., :3, :]
    assert (found[..., 3:] == 0).all() and (found[..., :3] > 0).all()


# --- T-VGP-6 to 8: eq. 6 and 7, and the variants of the published code

ROW = [0.1, 0.2, 0.3, 0.05, 0.35]


def mixed_map(row: list[float] | torch.Tensor) -> AttentionMap:
    """Make a map of the first token over two words and three regions."""
    values = torch.as_tensor(row, dtype=torch.float64).view(1, 1, 1, 1, 5)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    return AttentionMap(values, keys, words(1))


def test_t_vgp_6_weights_over_regions_do_not_depend_on_the_text():
    row = torch.tensor(ROW, dtype=torch.float64)
    found = mixed_map(row).between("text", "regions").weights
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    scaled = torch.cat([row[:2], 0.01 * row[2:]])
    torch.testing.assert_close(mixed_map(scaled).between("text", "regions").weights, found)
    other = torch.cat([row[:2].flip(0), row[2:]])
    torch.testing.assert_close(mixed_map(other).between("text", "regions").weights, found)


def test_t_vgp_7_one_row_by_hand():
    target = make_target([{0: [0]}], 1, 3)
    block = map_blocks(mixed_map(ROW))
    rows = find_grounded_rows(target)
    hat = block("text", "regions", rows).weights.flatten().tolist()
    assert hat == pytest.approx([0.428571, 0.071429, 0.5], abs=1e-6)
    assert float(text_to_regions(block, target).total) == pytest.approx(0.847298, abs=1e-6)
    # a softmax over probabilities, also an option of the code, never approaches zero
    plain = mixed_map(ROW).block("text", "regions")
    soft = AttentionMap.from_scores(plain.weights, plain.keys, plain.queries)
    assert float(cross_entropy(soft, target).total) == pytest.approx(1.040302, abs=1e-6)
    tilde = block("text", "text", rows)
    assert tilde.weights.flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    wanted = make_target([{0: [1]}], 1, 2)
    assert float(bce_on_log_weights(tilde, wanted).total) == pytest.approx(0.601986, abs=1e-5)
    masks = [torch.tensor([[[at == 0, at == 1]]]) for at in range(2)]
    each = [float(bce_on_log_weights(replace(tilde, mask=one), wanted).total) for one in masks]
    assert each == pytest.approx([0.287682, 0.916291], abs=1e-5)


def test_t_vgp_8_perfect_attention_has_zero_loss_but_log_two_in_the_code():
    target = make_target([{0: [0]}], 1, 3)
    perfect = map_blocks(mixed_map([0.5, 0.2, 0.3, 0.0, 0.0]))
    assert float(text_to_regions(perfect, target).total) == pytest.approx(0, abs=1e-12)
    floor = text_to_regions(perfect, target, bce_on_log_weights).total
    assert 3 * float(floor) == pytest.approx(math.log(2), abs=1e-5)


def test_bce_on_log_weights_agrees_with_torch():
    attention = random_square_map()
    target = make_target([{0: [1], 3: [0, 4]}, {2: [2]}], 5, 5)
    logits = (attention.weights + 1e-6).log()
    wanted = (target.weights > 0).double().expand_as(logits)
    costs = binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=-1)
    rows = target.rows[:, None, None].expand(costs.shape)
    expected = costs[rows].sum() / 6  # three layers of two heads
    loss = bce_on_log_weights(attention, target)
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == 3


# --- direct supervision of a watched model with fused kernels


def test_direct_supervision_follows_the_equations():
    trace, target = watch_stream(stream())
    found = direct_supervision(trace.log_block, target)
    offsets = [n for n, _ in LENGTHS]
    expected = slow_direct(trace.map().weights.tolist(), LINKS, offsets, LENGTHS)
    for name, (total, count) in zip(("to_regions", "to_text"), expected, strict=True):
        assert float(found[name].total.detach()) == pytest.approx(total, abs=1e-10), name
        assert int(found[name].count) == count


def test_full_maps_and_selected_rows_give_equal_losses():
    trace, target = watch_stream(stream())
    rows, full = (
        direct_supervision(trace.log_block, target),
        direct_supervision(map_blocks(trace.map()), target),
    )
    for name, loss in rows.items():
        torch.testing.assert_close(loss.total, full[name].total, rtol=1e-10, atol=1e-10)


def test_precomputed_rows_give_equal_losses():
    trace, target = watch_stream(stream())
    expected, ready = direct_supervision(trace.log_block, target), grounding_targets(target)
    assert ready.onto_regions.rows.tolist() == find_grounded_rows(target).tolist()
    for found in (
        direct_supervision(trace.log_block, ready),
        {
            "to_regions": text_to_regions(trace.log_block, grounded_rows(target, most=4)),
            "to_text": regions_to_text(
                trace.log_block, grounded_rows(transpose_target(target), most=6)
            ),
        },
    ):
        for name, loss in expected.items():
            torch.testing.assert_close(found[name].total, loss.total, rtol=1e-12, atol=1e-12)
            assert int(found[name].count) == int(loss.count)
    assert grounded_rows(target, most=4).rows.shape == (3, 4)
    with pytest.raises(ValueError, match="3 grounded .* 2"):
        grounded_rows(target, most=2)


class NoSynchronization(TorchDispatchMode):
    """Forbid tensors made on or copied from the CPU, which would synchronize a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, found)):
            known = isinstance(one, torch.Tensor) and (one.ndim or func is torch.ops.aten._to_copy)
            assert not known or one.device.type == "meta", f"{func} is on the CPU"
        return found


@pytest.mark.parametrize("watched", [False, True])
def test_supervised_step_does_not_synchronize_the_gpu(watched):
    """On the meta device each `.item()` and each boolean mask is an error."""
    torch.manual_seed(0)
    sizes = VLBertSizes(60, 16, 2, 2, 32, positions=64, dropout=0.0)
    model = VLBert(sizes, PooledRegionEncoder([16], [2]), ClassificationHead(16, 3), relations=0)
    batch = CaptionPairScenes("train", seed=0, count=3, size=32).batch(range(3))
    ready = grounding_targets(batch.target).to("meta")
    model, batch = model.to("meta"), batch.to("meta")
    with NoSynchronization():
        features = model.encode(batch)
        if watched:
            with watch(model.encoder, layout=features.layout) as trace:
                output = model.decide(features)
        else:
            output = model.decide(features)
            trace = output.trace
        losses = direct_supervision(trace.log_block, ready, words=features.words)
        task = classification(output.prediction, batch.labels).mean()
        (task + sum(one.mean() for one in losses.values())).backward()
    assert all(one.grad is not None for one in model.encoder.layers[0].parameters())
    rows = find_grounded_rows(batch.target, most=5)
    assert rows.shape == (3, 5)
    with pytest.raises(RuntimeError, match="meta"):
        find_grounded_rows(batch.target)


def test_finding_10_a_dropped_target_costs_13_8_without_a_gradient():
    scores = torch.zeros(1, 1, 1, 400, 2, requires_grad=True)
    attention = AttentionMap.from_scores(scores, words(2), words(400))
    target = make_target([{key: [0] for key in range(400)}], 400, 2)
    dropped = drop_weights(attention, 0.25)
    costs = floored_cross_entropy(dropped, target)
    gone = dropped.weights[0, 0, 0, :, 0] == 0
    assert 60 < int(gone.sum()) < 140
    alone = ~gone & (dropped.weights[0, 0, 0, :, 1] == 0)  # a target beside a dropped region
    expected = 13.8155 * int(gone.sum()) + math.log(2) * int((~gone & ~alone).sum())
    assert float(costs.total.detach()) == pytest.approx(expected, rel=1e-4)
    costs.total.backward()
    assert (scores.grad[0, 0, 0, gone] == 0).all() and (scores.grad != 0).any()


def test_dropped_blocks_without_dropout_are_the_blocks():
    trace, target = watch_stream(stream())
    plain, same = (
        direct_supervision(block, target, floored_cross_entropy)["to_regions"].total
        for block in (trace.log_block, drop_blocks(trace.log_block, 0.0))
    )
    torch.testing.assert_close(plain, same)
    exact = direct_supervision(trace.log_block, target)["to_regions"].total
    torch.testing.assert_close(plain, exact, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"1\.5"):
        drop_weights(trace.map(), 1.5)


def test_supervision_is_on_weights_before_dropout():
    quiet, loud = stream(), stream(dropout=0.9).train()
    quiet.layers, loud.layers = quiet.layers[:1], loud.layers[:1]
    totals = [
        float(direct_supervision(trace.log_block, target)["to_regions"].total.detach())
        for trace, target in (watch_stream(quiet), watch_stream(loud))
    ]
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)


@pytest.mark.parametrize("way", ["direct", "rollout", "last rollout"])
def test_t_vgp_9_loss_of_a_sample_does_not_depend_on_the_batch(way):
    """Texts and regions have unequal lengths; positions must not depend on the longest one."""

    def found(which):
        trace, target = watch_stream(stream(), which)
        block = {"direct": lambda: trace.log_block, "rollout": lambda: rollout_blocks(trace.map()),
                 "last rollout": lambda: rollout_row_blocks(trace)}[way]()  # fmt: skip
        losses = direct_supervision(block, target)
        return [float(losses[name].total.detach()) for name in ("to_regions", "to_text")]

    alone = [found((at,)) for at in range(3)]
    for which in ((0, 1, 2), (2, 0, 1), (1, 0)):
        together = [sum(alone[at][side] for at in which) for side in range(2)]
        assert found(which) == pytest.approx(together, abs=1e-9)


def test_t_vgp_11_gradient_stays_within_the_regions():
    scores = torch.randn(1, 2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    whole = AttentionMap.from_scores(scores, keys, keys)
    text_to_regions(map_blocks(whole), make_target([{0: [0], 1: [2]}], 2, 3)).total.backward()
    outside = scores.grad[..., :2]
    assert outside.abs().max() < 1e-15 and (scores.grad[..., :2, 2:] != 0).any()
    assert (scores.grad[..., 2:, :] == 0).all()
    net = stream()
    net.layers = net.layers[:1]
    x, there, layout = pack_samples(samples()[:1])
    with watch(net, layout=layout) as trace:
        net(x.requires_grad_(), there)
    text_to_regions(trace.log_block, make_target(LINKS[:1], 5, 4)).total.backward()
    kept = [1, 2, 4, *range(5, 9)]  # the rows, and the keys in R; other tokens get no gradient
    rest = [at for at in range(9) if at not in kept]
    assert (x.grad[0, rest] == 0).all() and (x.grad[0, kept] != 0).any(dim=-1).all()


def test_t_vgp_11_does_not_hold_for_rollout():
    scores = torch.randn(1, 2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    keys = Layout((Span("text", (2,), slice(0, 2)), Span("regions", (3,), slice(2, 5))), 5)
    block = rollout_blocks(AttentionMap.from_scores(scores, keys, keys))
    text_to_regions(block, make_target([{0: [0]}], 2, 3)).total.backward()
    assert scores.grad[..., :2].abs().max() > 1e-3


@pytest.mark.parametrize("way", ["direct", "code", "rollout", "last rollout"])
def test_t_vgp_13_empty_targets_give_zero_loss_and_finite_gradients(way):
    net = stream()
    some = samples()
    x, there, layout = pack_samples(some)
    with watch(net, layout=layout) as trace:
        out = net(x, there)
    blocks = {
        "rollout": lambda: rollout_blocks(trace.map()),
        "last rollout": lambda: rollout_row_blocks(trace),
    }
    block = blocks.get(way, lambda: trace.log_block)()
    compare = bce_on_log_weights if way == "code" else cross_entropy
    losses = direct_supervision(block, make_target([{}, {}, {}], 8, 6), onto_text=compare)
    total = losses["to_regions"].total + losses["to_text"].total
    assert float(total.detach()) == 0 and all(int(one.count) == 0 for one in losses.values())
    (total + 0 * out.sum()).backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in net.parameters())


def test_training_moves_attention_to_the_regions():
    net = stream()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    costs = []
    for _ in range(40):
        trace, target = watch_stream(net)
        losses = direct_supervision(trace.log_block, target)
        total = sum(one.mean() for one in losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        costs.append(float(total.detach()))
    assert costs[-1] < 0.25 * costs[0]


# --- semi-direct supervision


def slow_rollout(weights):
    """Compute rollout up to each layer element by element."""
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


def test_semi_direct_supervision_follows_the_equations_on_a_slow_rollout():
    trace, target = watch_stream(stream(), (0,))
    found = direct_supervision(rollout_blocks(trace.map()), target)
    weights = [slow_rollout(trace.map().weights[0].tolist())]
    expected = slow_direct(weights, LINKS, [5], LENGTHS)
    for name, (total, count) in zip(("to_regions", "to_text"), expected, strict=True):
        assert float(found[name].total.detach()) == pytest.approx(total, abs=1e-10), name
        assert int(found[name].count) == count


def test_rollout_of_selected_rows_equals_the_last_layer_of_full_rollout():
    net = stream()
    trace, target = watch_stream(net)
    some = direct_supervision(rollout_row_blocks(trace), target)
    last = rollout(trace.map()).layer(-1)
    whole = direct_supervision(map_blocks(last), target)
    for name, loss in some.items():
        torch.testing.assert_close(loss.total, whole[name].total)
    one, two = (
        torch.autograd.grad(losses["to_text"].total, list(net.parameters()), retain_graph=True)
        for losses in (some, whole)
    )
    for ours, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_slice_spans_and_index_spans_give_equal_losses():
    some = samples()[:1]
    x, there, layout = pack_samples(some)
    net, target = stream(), make_target(LINKS[:1], 5, 4)
    sliced = Layout((Span("text", (5,), slice(0, 5)), Span("regions", (4,), slice(5, 9))), 9)
    totals = []
    for one in (layout, sliced):
        with watch(net, layout=one) as trace:
            net(x, there)
        totals.append(
            float(direct_supervision(rollout_row_blocks(trace), target)["to_text"].total.detach())
        )
    assert totals[0] == pytest.approx(totals[1], abs=1e-12)


# --- indirect supervision


def slow_indirect(match, phrases, regions, wanted, present):
    """Compute eq. 5 pair by pair."""
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


def test_indirect_supervision_follows_equation_5():
    match = PhraseRegionMatcher(4).double()
    torch.nn.init.normal_(match.judge.bias)
    phrases, regions = torch.randn(5, 4).double(), torch.randn(5, 6, 4).double()
    wanted, present = torch.rand(5, 6) < 0.3, torch.rand(5, 6) < 0.7
    present[2] = False
    loss = indirect_supervision(match, phrases, regions, wanted, present)
    total, count = slow_indirect(match, phrases, regions, wanted, present)
    assert float(loss.total.detach()) == pytest.approx(total) and int(loss.count) == count == 4


def test_linear_matcher_ranks_regions_equally_for_every_phrase():
    """Eq. 5 is linear in phrase and region, so the ranking does not depend on the phrase."""
    match = PhraseRegionMatcher(4).double()
    regions = torch.randn(6, 4).double().expand(5, 6, 4)
    logits = match(torch.randn(5, 4).double(), regions)
    assert (logits.argsort(dim=1) == logits.argsort(dim=1)[:1]).all()
    torch.testing.assert_close(logits - logits[:1], (logits - logits[:1])[:, :1].expand(5, 6))


MATCHERS = [PhraseRegionMatcher, BilinearMatcher, MLPMatcher]


def train_matcher(kind, steps=150):
    """Train a matcher on four phrases of one caption, each of which means one region."""
    match = kind(8)
    phrases, regions = torch.randn(4, 8), torch.randn(4, 8).expand(4, 4, 8)
    wanted, present = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    optimizer = torch.optim.Adam(match.parameters(), lr=0.05)
    for _ in range(steps):
        loss = indirect_supervision(match, phrases, regions, wanted, present)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    return match(phrases, regions).detach(), float(loss.mean().detach())


def test_linear_matcher_ranks_regions_equally_for_every_phrase_after_training():
    """No training helps: every region is meant once, so all logits become equal."""
    logits, loss = train_matcher(PhraseRegionMatcher)
    assert (logits.argsort(dim=1) == logits.argsort(dim=1)[:1]).all()
    # the entropy of one region of four is the least possible loss
    assert loss >= 0.25 * math.log(4) + 0.75 * math.log(4 / 3) - 1e-6


@pytest.mark.parametrize("kind", [BilinearMatcher, MLPMatcher])
def test_other_matchers_learn_which_phrase_means_which_region(kind):
    logits, loss = train_matcher(kind)
    assert (logits.argmax(dim=1) == torch.arange(4)).all() and loss < 0.1


def test_matchers_agree_with_one_pair_at_a_time():
    phrases, regions = torch.randn(3, 4), torch.randn(3, 5, 4)
    bilinear, layers = BilinearMatcher(4), MLPMatcher(4)
    slow = torch.nn.functional.bilinear
    for p, m in ((0, 0), (2, 4), (1, 3)):
        e, x = phrases[p], regions[p, m]
        one = slow(e[None], x[None], bilinear.judge.weight, bilinear.judge.bias)
        torch.testing.assert_close(bilinear(phrases, regions)[p, m], one[0, 0])
        inner = torch.nn.functional.gelu(layers.inner(torch.cat([e, x])))
        torch.testing.assert_close(layers(phrases, regions)[p, m], layers.judge(inner)[0])


@pytest.mark.parametrize("kind", MATCHERS)
def test_matchers_start_with_logits_of_size_one(kind):
    match = kind(64)
    logits = match(torch.randn(200, 64), torch.randn(200, 5, 64))
    assert 0.2 < float(logits.detach().std()) < 2 and logits.shape == (200, 5)


def test_indirect_supervision_without_phrases_is_zero_with_a_finite_gradient():
    match = PhraseRegionMatcher(4)
    nothing = torch.zeros(0, 3, dtype=torch.bool)
    loss = indirect_supervision(match, torch.zeros(0, 4), torch.zeros(0, 3, 4), nothing, nothing)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and int(loss.count) == 0
    assert all((p.grad == 0).all() for p in match.parameters())


def test_matcher_has_xavier_initialisation():
    torch.manual_seed(0)
    match = PhraseRegionMatcher(200).requires_grad_(False)
    assert float(match.judge.weight.abs().max()) <= math.sqrt(6 / 401)
    assert float(match.judge.weight.std()) == pytest.approx(math.sqrt(2 / 401), rel=0.1)
    assert (match.judge.bias == 0).all()


# --- choice of a region


def slow_choice(logits, wanted, present):
    """Compute the loss of each choice region by region with Python numbers."""
    total, count = 0.0, 0
    for row, right, there in zip(logits.tolist(), wanted.tolist(), present.tolist(), strict=True):
        fine = [at for at, one in enumerate(right) if one and there[at]]
        if fine:
            sum_of = sum(math.exp(row[at]) for at in range(len(row)) if there[at])
            total -= sum(row[at] - math.log(sum_of) for at in fine) / len(fine)
            count += 1
    return total, count


def test_region_choice_agrees_with_the_slow_reference():
    logits = torch.randn(6, 5, dtype=torch.float64).requires_grad_()
    wanted, present = torch.rand(6, 5) < 0.5, torch.rand(6, 5) < 0.7
    wanted[1], present[2] = False, False
    wanted[3] = present[3] = torch.tensor([True, False, True, True, False])
    loss = region_choice(logits, wanted, present)
    total, count = slow_choice(logits, wanted, present)
    assert float(loss.total.detach()) == pytest.approx(total) and int(loss.count) == count
    loss.total.backward()
    assert logits.grad.isfinite().all() and not logits.grad[[1, 2]].any()
    assert not logits.grad[~present].any()


def test_region_choice_of_one_region_equals_classification():
    logits = torch.randn(4, 5)
    labels = torch.tensor([2, 0, 4, 1])
    wanted = torch.nn.functional.one_hot(labels, 5).bool()
    found = region_choice(logits, wanted, torch.ones(4, 5, dtype=torch.bool))
    torch.testing.assert_close(found.total, classification(logits, labels).total)


def test_region_matching_is_the_mean_of_binary_losses():
    logits, wanted, present = torch.randn(4, 5), torch.rand(4, 5) < 0.4, torch.rand(4, 5) < 0.7
    present[0], present[1] = True, False
    found = region_matching(logits, wanted, present)
    rows = [
        binary_cross_entropy_with_logits(logits[row][there], wanted[row][there].float())
        for row, there in enumerate(present)
        if there.any()
    ]
    torch.testing.assert_close(found.total, torch.stack(rows).sum())
    assert int(found.count) == len(rows) == 3


# --- targets


def test_find_grounded_rows_returns_rows_in_order_then_padding():
    target = make_target([{4: [0], 1: [1]}, {}, {2: [0, 1]}], 5, 2)
    assert find_grounded_rows(target).tolist() == [[1, 4], [-1, -1], [2, -1]]
    assert find_grounded_rows(make_target([{}, {}], 5, 2)).tolist() == [[-1], [-1]]


def test_transposed_target_is_uniform_over_the_tokens_of_a_region():
    found = transpose_target(make_target([{0: [0], 1: [0, 2], 4: [2]}], 5, 3))
    even = [[0.5, 0.5, 0, 0, 0], [0] * 5, [0, 0.5, 0, 0, 0.5]]
    assert found.weights[0, 0, 0].tolist() == even
    assert [span.name for span in found.queries.spans] == ["regions"]
    assert find_grounded_rows(found).tolist() == [[0, 2]]


def test_token_target_is_uniform_over_regions_or_the_first_region():
    target = make_target([{1: [0, 3]}], 2, 4)
    assert target.weights[0, 0, 0, 1].tolist() == [0.5, 0, 0, 0.5]
    first = keep_first_region(target)
    assert first.weights[0, 0, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert find_grounded_rows(first).tolist() == [[1]]


def test_add_image_region_prepends_a_key_with_zero_weight():
    target = make_target([{1: [0, 3]}, {}], 2, 4)
    found = add_image_region(target)
    assert found.weights[0, 0, 0].tolist() == [[0] * 5, [0, 0.5, 0, 0, 0.5]]
    assert torch.equal(found.rows, target.rows) and found.check() is found
    assert add_image_region(replace(target, mask=None)).mask is None
    logs = replace(target, values=target.log_weights, form=Form.LOG)
    assert torch.equal(add_image_region(logs).weights, found.weights)


def test_restricting_keys_renormalises_the_weights():
    trace, target = watch_stream(stream(), (0,))
    image = torch.tensor([[False, True, True, True]])  # the first box is that of the whole image
    block = trace.log_block("text", "regions", find_grounded_rows(target))
    weights = trace.block("text", "regions", find_grounded_rows(target)).weights * image
    expected = weights / weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(block.restrict_keys(image).weights, expected)
    some = make_target([{2: [1], 4: [3]}], 5, 4)
    picked_rows = text_to_regions(trace.log_block, some, among=image)
    whole = trace.map().between("text", "regions").weights[0, :, :, [2, 4]]
    costs = [-(whole[:, :, at, box] / whole[:, :, at, 1:].sum(-1)).log().mean()
             for at, box in ((0, 1), (1, 3))]  # fmt: skip
    torch.testing.assert_close(picked_rows.total, sum(costs))
    tokens = torch.tensor([[True, True, True, False, True]])
    assert float(regions_to_text(trace.log_block, some, among=tokens).total.detach()) < float(
        regions_to_text(trace.log_block, some).total.detach()
    )


def test_gather_rows_keeps_log_weights_and_hides_absent_rows():
    attention = random_square_map()
    rows = torch.tensor([[3, -1], [0, 1]])
    found = gather_rows(attention, rows)
    torch.testing.assert_close(found.weights[0, :, :, 0], attention.weights[0, :, :, 3])
    assert (found.weights[0, :, :, 1] == 0).all() and not found.rows[0, 1]
    torch.testing.assert_close(found.weights[1], attention.weights[1][:, :, :2])
    plain = replace(attention, values=attention.weights, form=Form.PLAIN)
    torch.testing.assert_close(gather_rows(plain, rows).weights, found.weights)


def test_target_of_another_size_raises():
    trace, _ = watch_stream(stream(), (0,))
    with pytest.raises(ValueError, match="9.*'regions'.*4"):
        direct_supervision(trace.log_block, make_target([{1: [0]}], 5, 9))


def test_captions_of_other_images_have_no_grounded_rows():
    """Q-VGP-11 and Q-VGP-3: mismatched captions and phrases without a region have no row."""
    data = CaptionPairScenes("train", 0, 12, size=32)
    batch = data.batch(range(12))
    rows = find_grounded_rows(batch.target)
    ends = [(batch.tokens[at] == 4).nonzero()[:, 0].tolist() for at in range(12)]
    for at in range(12):
        found = rows[at][rows[at] >= 0]
        first = bool((found < ends[at][0]).any())
        second = bool((found > ends[at][0]).any())
        match MatchingCaption(int(batch.labels[at])):
            case MatchingCaption.FIRST:
                assert not second
            case MatchingCaption.SECOND:
                assert not first
    text = [span for span in batch.target.queries.spans if span.name == "text"]
    assert len(text) == 1 and len(text[0]) == batch.tokens.shape[1]


def test_grounding_losses_support_weight_and_mean():
    trace, target = watch_stream(stream())
    found = 0.5 * direct_supervision(trace.log_block, target)["to_regions"]
    assert isinstance(found, Loss) and found.weight == 0.5
    assert float(found.mean().detach()) == pytest.approx(0.5 * float(found.total.detach()) / 4)


def test_grid_cells_may_be_the_regions():
    keys = grid(2, 2, "regions")
    weights = torch.full((1, 1, 1, 1, 4), 0.25, dtype=torch.float64)
    attention = AttentionMap(weights, keys, words(1), kind=Kind.PROBABILITY)
    assert float(
        text_to_regions(map_blocks(attention), make_target([{0: [2]}], 1, 4)).total
    ) == math.log(4)


def test_wrapped_model_is_supervised_inside_its_forward_pass():
    """A third-party BERT with fused kernels, in which some tokens are words and others regions."""
    tokens = torch.randint(1, 12, (3, 9))
    there = torch.arange(9) < torch.tensor([[9], [7], [8]])
    given = Batch(ids=("a", "b", "c"), tokens=tokens, token_mask=there)
    boxes = torch.tensor([[5, 6, 7, 8], [4, 5, 6, -1], [5, 6, 7, -1]])
    spans = (Span("text", (5,), slice(0, 5)), Span("regions", (4,), boxes))
    target = make_target([{1: [0], 2: [3]}, {}, {3: [1, 2]}], 5, 4)
    target = replace(target, values=target.values.float())
    adopted = wrap(
        bert(),
        layout=Layout(spans, 9),
        reduce=lambda trace: trace.log_block("text", "regions"),
        loss=lambda trace, batch: text_to_regions(trace.log_block, target),
    )
    output = adopted(given)
    full = cross_entropy(output.attention_to("regions"), target)
    torch.testing.assert_close(output.loss.total, full.total)
    assert int(output.loss.count) == 3
    output.loss.total.backward()
    query = adopted.model.bert.encoder.layer[0].attention.self.query.weight
    assert query.grad.any() and adopted.model.config._attn_implementation == "sdpa"
