import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.attention import (
    POINT,
    AttentionMap,
    Form,
    Kind,
    Layout,
    Span,
    grid,
    regions,
    rollout,
    words,
)
from overt.geometry import PixelGeometry, TextGeometry


def softmax_rows(scores: list[float], seen: list[bool]) -> list[float]:
    """A row without torch: the softmax over what is seen, zeros when nothing is."""
    if not any(seen):
        return [0.0] * len(scores)
    top = max(s for s, there in zip(scores, seen, strict=True) if there)
    parts = [math.exp(s - top) if there else 0.0 for s, there in zip(scores, seen, strict=True)]
    return [part / sum(parts) for part in parts]


def random_map(generator, shape=(3, 2, 2, 4, 5), masked=True) -> AttentionMap:
    b, _, _, q, k = shape
    scores = torch.randn(shape, generator=generator)
    mask = torch.rand(b, q, k, generator=generator) > 0.3 if masked else None
    return AttentionMap.from_scores(scores, words(k), words(q), mask)


# --- making and reading


def test_from_scores_agrees_with_a_softmax_row_by_row(generator):
    scores = 3 * torch.randn(2, 2, 3, 4, 5, generator=generator)
    mask = torch.rand(2, 4, 5, generator=generator) > 0.5
    mask[0, 1] = False
    made = AttentionMap.from_scores(scores, words(5), words(4), mask).check()
    for b in range(2):
        for l in range(2):
            for h in range(3):
                for q in range(4):
                    row = softmax_rows(scores[b, l, h, q].tolist(), mask[b, q].tolist())
                    torch.testing.assert_close(made.weights[b, l, h, q], torch.tensor(row))
    assert made.kind is Kind.PROBABILITY and made.form is Form.LOG
    assert torch.equal(made.rows, mask.any(dim=-1))


def test_a_mask_of_one_row_holds_for_every_query(generator):
    scores = torch.randn(2, 1, 1, 3, 4, generator=generator)
    mask = torch.tensor([[[True, True, False, False]], [[True, False, True, True]]])
    one = AttentionMap.from_scores(scores, words(4), words(3), mask)
    all_rows = AttentionMap.from_scores(scores, words(4), words(3), mask.expand(2, 3, 4))
    assert torch.equal(one.weights, all_rows.weights)
    assert torch.equal(one.visible, mask.expand(2, 3, 4))


def test_without_a_mask_everything_is_visible(generator):
    made = random_map(generator, masked=False)
    assert made.visible.all() and made.visible.shape == (3, 4, 5) and made.rows.all()
    assert len(made) == 3


def test_from_cells_is_five_axes_of_amounts():
    cells = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    made = AttentionMap.from_cells(cells, grid(2, 2), torch.tensor([[True, True, True, False]]))
    assert made.values.shape == made.shape == (1, 1, 1, 1, 4) and made.kind is Kind.AMOUNT
    expected = torch.tensor([0.0, 2 / 3, 1 / 3, 0.0])
    torch.testing.assert_close(made.normalize().weights[0, 0, 0, 0], expected)


def test_plain_and_log_forms_agree_in_value_and_gradient(generator):
    scores = torch.randn(2, 1, 2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 3, 5, generator=generator) > 0.4
    taste = torch.rand(2, 1, 2, 3, 5, generator=generator, dtype=torch.float64)
    gradients = []
    for form in (Form.LOG, Form.PLAIN):
        leaf = scores.clone().requires_grad_()
        values = leaf if form is Form.LOG else leaf.exp()
        made = AttentionMap(values, words(5), words(3), mask, Kind.AMOUNT, form).normalize()
        seen = mask[:, None, None].expand_as(scores)
        loss = (taste * made.weights).sum() + (taste * made.log_weights)[seen].sum()
        loss.backward()
        gradients.append((made.weights.detach(), made.log_weights.detach(), leaf.grad))
    for log_side, plain_side in zip(*gradients, strict=True):
        torch.testing.assert_close(log_side, plain_side)


def test_the_logarithm_of_nothing_is_minus_infinity_with_gradient_zero():
    values = torch.tensor([0.0, 0.5, 0.5]).reshape(1, 1, 1, 1, 3).requires_grad_()
    logs = AttentionMap(values, words(3)).log_weights
    assert logs.flatten()[0] == -math.inf
    logs.exp().sum().backward()
    assert torch.equal(values.grad.flatten(), torch.tensor([0.0, 1.0, 1.0]))


# --- normalising


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([1.0, 30.0, 1e4]),
    st.sampled_from([Form.LOG, Form.PLAIN]),
    st.integers(0, 2**31),
)
def test_rows_are_finite_and_sum_to_one_or_to_nothing(b, q, k, dtype, size, form, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(b, 1, 2, q, k, generator=generator)
    scores = scores.clamp(-6e4, 6e4).to(dtype)
    mask = torch.rand(b, q, k, generator=generator) > 0.5
    if torch.rand((), generator=generator) > 0.5:
        mask[0] = False
    leaf = (scores if form is Form.LOG else scores.abs()).requires_grad_()
    made = AttentionMap(leaf, words(k), words(q), mask, Kind.AMOUNT, form).normalize().check()
    sums = made.weights.float().sum(dim=-1)
    seen = mask.any(dim=-1)[:, None, None].expand_as(sums)
    tolerance = max(1e-5, 10 * torch.finfo(dtype).eps)
    torch.testing.assert_close(sums[seen], torch.ones_like(sums[seen]), atol=tolerance, rtol=0)
    assert (sums[~seen] == 0).all()
    assert not made.weights.isnan().any() and not made.log_weights.isnan().any()

    again = made.normalize()
    torch.testing.assert_close(again.weights, made.weights, atol=tolerance, rtol=tolerance)

    taste = torch.rand(made.values.shape, generator=generator).to(dtype)
    shown = mask[:, None, None] & made.log_weights.isfinite()
    ((taste * made.weights).sum() + made.log_weights[shown].sum()).backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~mask[:, None, None].expand_as(leaf)] == 0).all()


def test_equal_scores_of_ten_thousand_share_evenly_in_sixteen_bits():
    """The logarithm of their sum beside them would round to the score itself."""
    for dtype in (torch.float16, torch.bfloat16):
        scores = torch.full((1, 1, 1, 1, 4), 1e4, dtype=dtype)
        weights = AttentionMap.from_scores(scores, words(4)).weights
        torch.testing.assert_close(
            weights.float(), torch.full((1, 1, 1, 1, 4), 0.25), atol=2e-3, rtol=0
        )


def test_a_large_heat_map_in_sixteen_bits_keeps_its_mass():
    """300 cells of 255 are more than float16 can count."""
    heat = AttentionMap.from_cells(torch.full((1, 300), 255.0, dtype=torch.float16), words(300))
    weights = heat.normalize().weights
    assert weights.dtype is torch.float16
    assert float(weights.float().sum()) == pytest.approx(1, abs=1e-2)


def test_a_row_of_zeros_stays_zero():
    made = AttentionMap.from_cells(torch.zeros(2, 3), words(3)).normalize().check()
    assert (made.weights == 0).all()
    logs = AttentionMap(torch.full((1, 1, 1, 1, 3), -math.inf), words(3), form=Form.LOG)
    assert (logs.normalize().weights == 0).all()


def test_nothing_normalises_unasked():
    values = torch.tensor([1.0, 3.0]).reshape(1, 1, 1, 1, 2)
    assert torch.equal(AttentionMap(values, words(2), kind=Kind.AMOUNT).weights, values)


# --- blocks of ragged samples

LENGTHS = [(3, 2), (1, 4), (2, 1)]  # words and regions of each sample, packed one after the other


def packed(lengths, generator, form=Form.LOG) -> tuple[AttentionMap, list[torch.Tensor]]:
    """Samples whose regions follow their own words, in a batch padded at the end (F9)."""
    total = max(n + m for n, m in lengths)
    text, image = max(n for n, _ in lengths), max(m for _, m in lengths)
    word_at = torch.full((len(lengths), text), -1)
    region_at = torch.full((len(lengths), image), -1)
    mask = torch.zeros(len(lengths), total, total, dtype=torch.bool)
    scores = torch.randn(len(lengths), 2, 3, total, total, generator=generator)
    for row, (n, m) in enumerate(lengths):
        word_at[row, :n] = torch.arange(n)
        region_at[row, :m] = torch.arange(n, n + m)
        mask[row, : n + m, : n + m] = True
    layout = Layout((Span("text", (text,), word_at), Span("regions", (image,), region_at)), total)
    made = AttentionMap.from_scores(scores, layout, layout, mask)
    if form is Form.PLAIN:
        made = replace(made, values=made.weights, form=Form.PLAIN)
    return made, [scores[row, :, :, : n + m, : n + m] for row, (n, m) in enumerate(lengths)]


@pytest.mark.parametrize("form", list(Form))
def test_blocks_agree_with_a_loop_over_samples(form, generator):
    made, scores = packed(LENGTHS, generator, form)
    for query, key in (("text", "regions"), ("regions", "text"), ("text", "text")):
        block, part = made.block(query, key).check(), made.between(query, key).check()
        assert block.kind is Kind.SUBPROBABILITY and part.kind is Kind.PROBABILITY
        assert [span.name for span in part.keys.spans] == [key]
        assert len(part.queries) == {"text": 3, "regions": 4}[query]
        for row, (n, m) in enumerate(LENGTHS):
            at = {"text": slice(0, n), "regions": slice(n, n + m)}
            whole = scores[row].softmax(dim=-1)[:, :, at[query], at[key]]
            q, k = whole.shape[-2:]
            torch.testing.assert_close(block.weights[row, :, :, :q, :k], whole)
            torch.testing.assert_close(
                part.weights[row, :, :, :q, :k], whole / whole.sum(dim=-1, keepdim=True)
            )
            for one in (block, part):  # what a sample does not have
                assert (one.weights[row, :, :, q:] == 0).all()
                assert (one.weights[row, :, :, :, k:] == 0).all()
                assert one.visible[row].sum() == q * k
                assert one.rows[row].sum() == q


def test_other_samples_in_the_batch_change_nothing(generator):
    """Permuting and re-batching samples of other lengths leaves each one's block (T-VGP-9)."""
    made, _ = packed(LENGTHS, generator)
    part = made.between("text", "regions")
    order = torch.tensor([2, 0, 1])
    moved = made.select(order).between("text", "regions")
    assert torch.equal(moved.weights, part.weights[order])
    alone = made.select(torch.tensor([1])).between("text", "regions")
    assert torch.equal(alone.weights, part.weights[[1]])


def test_the_row_of_the_paper():
    """T-VGP-7, and T-VGP-6: scaling the regions of a row changes nothing."""
    row = torch.tensor([0.1, 0.2, 0.3, 0.05, 0.35])
    keys = words(2) + regions(3)
    for scale in (1.0, 0.01):
        values = row * torch.tensor([1, 1, scale, scale, scale])
        made = AttentionMap(values.reshape(1, 1, 1, 1, 5), keys, kind=Kind.SUBPROBABILITY)
        to_regions = made.between("global", "regions").weights.flatten()
        expected = torch.tensor([0.428571, 0.071429, 0.5])
        torch.testing.assert_close(to_regions, expected, atol=1e-6, rtol=0)
        assert -float(to_regions[0].log()) == pytest.approx(0.847298, abs=1e-6)
        to_words = made.between("global", "text").weights.flatten()
        torch.testing.assert_close(to_words, torch.tensor([1 / 3, 2 / 3]))


def test_a_block_sends_no_gradient_to_keys_outside_of_it(generator):
    """Renormalising cancels the partition function (T-VGP-11)."""
    scores = torch.randn(1, 1, 1, 1, 5, generator=generator, dtype=torch.float64).requires_grad_()
    made = AttentionMap.from_scores(scores, words(2) + regions(3))
    made.between("global", "regions").log_weights[..., 0].sum().backward()
    torch.testing.assert_close(scores.grad[..., :2], torch.zeros(1, 1, 1, 1, 2).double())
    assert scores.grad[..., 2:].abs().min() > 0


def test_a_block_of_slices_without_a_mask_needs_none(generator):
    values = torch.rand(2, 1, 1, 5, 5, generator=generator)
    both = words(2) + regions(3)
    made = AttentionMap(values, both, both, kind=Kind.AMOUNT)
    block = made.block("regions", "text")
    assert block.mask is None and block.kind is Kind.AMOUNT
    assert torch.equal(block.weights, values[..., 2:, :2])


def test_spans_need_not_be_contiguous():
    """Rows of an image with a newline token after each, and text between tiles."""
    index = torch.tensor([[0, 1, 3, 4]])
    keys = Layout((Span("image", (2, 2), index), Span("line", (2,), slice(2, 6, 3))), 6)
    made = AttentionMap(torch.arange(6.0).reshape(1, 1, 1, 1, 6), keys, kind=Kind.AMOUNT)
    assert made.block("global", "image").weights.flatten().tolist() == [0, 1, 3, 4]
    assert made.block("global", "line").weights.flatten().tolist() == [2, 5]


def test_layouts_follow_one_another():
    index = torch.tensor([[1, -1], [0, 2]])
    late = Layout((Span("some", (2,), index), Span("every other", (2,), slice(0, 3, 2))), 3)
    both = grid(1, 2) + late
    assert len(both) == 5
    assert both.find("some").index.tolist() == [[3, -1], [2, 4]]
    assert list(range(5))[both.find("every other").index] == [2, 4]
    assert both.alone("some").find("some").index == slice(0, 2)


# --- fusing, choosing, moving


def test_fused_heads_and_layers(generator):
    made = random_map(generator)
    plain = made.weights
    mean = made.over_heads().check()
    assert torch.equal(mean.weights, plain.mean(dim=2, keepdim=True))
    assert mean.kind is Kind.PROBABILITY
    largest = made.over_heads(torch.amax).check()
    assert largest.kind is Kind.AMOUNT
    assert torch.equal(largest.weights, plain.amax(dim=2, keepdim=True))
    both = made.over_layers().over_heads().check()
    torch.testing.assert_close(both.weights, plain.mean(dim=(1, 2), keepdim=True))
    assert torch.equal(made.layer(1).weights, plain[:, 1:2])
    assert torch.equal(made.head(0).weights, plain[:, :, :1])


def test_each_row_becomes_a_sample(generator):
    geometry = PixelGeometry.identity(3, (4, 6))
    scores = torch.randn(3, 2, 2, 4, 6, generator=generator)
    mask = torch.rand(3, 4, 6, generator=generator) > 0.3
    made = AttentionMap.from_scores(scores, grid(2, 3, geometry=geometry), words(4), mask)
    rows = made.each_row().check()
    assert rows.values.shape == (48, 1, 1, 1, 6)
    back = rows.weights.reshape(made.weights.shape)
    assert torch.equal(back, made.weights)
    assert torch.equal(rows.visible.reshape(3, 2, 2, 4, 6)[:, 1, 1], made.visible)
    assert len(rows.keys.find("image").geometry) == 48
    assert random_map(generator, masked=False).each_row().mask is None


def test_select_takes_the_samples_with_all_that_is_theirs():
    text = TextGeometry(("a", "b", "c"), torch.zeros(3, 2, 2, dtype=torch.long))
    keys = Layout((Span("text", (2,), torch.tensor([[0, 1], [1, 2], [0, 2]]), text),), 3)
    mask = torch.tensor([[[True, True, False]], [[False, True, True]], [[True, False, True]]])
    made = AttentionMap(torch.arange(9.0).reshape(3, 1, 1, 1, 3), keys, POINT, mask, Kind.AMOUNT)
    chosen = made.select(torch.tensor([2, 2, 0]))
    assert chosen.values[:, 0, 0, 0, 0].tolist() == [6, 6, 0]
    assert torch.equal(chosen.mask, mask[[2, 2, 0]])
    span = chosen.keys.find("text")
    assert span.index.tolist() == [[0, 2], [0, 2], [0, 1]] and span.geometry.texts == (
        "c",
        "c",
        "a",
    )
    assert chosen.to("cpu").block("global", "text").weights.flatten().tolist() == [6, 8, 6, 8, 0, 1]


def test_detached_weights_have_no_history():
    values = torch.rand(1, 1, 1, 1, 2, requires_grad=True)
    made = AttentionMap(values, words(2), kind=Kind.AMOUNT)
    assert made.weights.requires_grad and not made.detach().weights.requires_grad


def test_a_target_of_one_layer_and_head_broadcasts(generator):
    made = random_map(generator, shape=(2, 3, 4, 5, 6), masked=False)
    target = AttentionMap(torch.rand(2, 1, 1, 5, 6, generator=generator), words(6), words(5))
    difference = made.weights - target.weights
    assert difference.shape == made.values.shape
    torch.testing.assert_close(difference[:, 2, 3], made.weights[:, 2, 3] - target.weights[:, 0, 0])


def test_layers_with_other_grids_are_several_maps(generator):
    maps = tuple(
        AttentionMap.from_scores(torch.randn(2, 1, 1, 1, s * s, generator=generator), grid(s, s))
        for s in (8, 4)
    )
    assert [len(one.check().keys) for one in maps] == [64, 16]
    assert [one.keys.find("image").shape for one in maps] == [(8, 8), (4, 4)]


# --- rollout


def self_attention(*layers, mask=None) -> AttentionMap:
    values = torch.stack([torch.as_tensor(layer).float() for layer in layers])[None, :, None]
    n = values.shape[-1]
    return AttentionMap(values, words(n), words(n), mask)


def test_rollout_of_two_layers_by_hand():
    """T-VGP-2 and, for the first layer, T-VGP-4."""
    made = self_attention([[0.5, 0.5], [0.2, 0.8]], [[1.0, 0.0], [0.6, 0.4]])
    first, second = rollout(made).check().weights[0, :, 0]
    torch.testing.assert_close(first, torch.tensor([[0.75, 0.25], [0.1, 0.9]]))
    torch.testing.assert_close(second, torch.tensor([[0.75, 0.25], [0.295, 0.705]]))
    alone = rollout(made.layer(0), residual=False)
    assert torch.equal(alone.weights, made.weights[:, :1])
    product = rollout(made, residual=False).weights[0, 1, 0]
    torch.testing.assert_close(product, made.weights[0, 1, 0] @ made.weights[0, 0, 0])


@pytest.mark.parametrize(("n", "layers", "diagonal"), [(3, 12, 0.333496), (50, 6, 0.0353125)])
def test_rollout_of_uniform_attention(n, layers, diagonal):
    """T-VGP-3."""
    made = rollout(self_attention(*[torch.full((n, n), 1 / n)] * layers))
    last = made.weights[0, -1, 0]
    assert last.diagonal().tolist() == pytest.approx([diagonal] * n, abs=1e-6)
    exact = 1 / n + (1 - 1 / n) / 2**layers
    assert float(last[0, 0]) == pytest.approx(exact, rel=1e-5)


def test_rollout_of_the_identity_is_the_identity():
    made = rollout(self_attention(*[torch.eye(4)] * 3))
    assert torch.equal(made.weights[0, :, 0], torch.eye(4).expand(3, 4, 4))


def slow_rollout(layers: torch.Tensor) -> torch.Tensor:
    """(l h q k) of one sample, entry by entry."""
    count, _, n, _ = layers.shape
    mixed = []
    for layer in layers.tolist():
        mean = [[sum(h[q][k] for h in layer) / len(layer) for k in range(n)] for q in range(n)]
        rows = [[mean[q][k] + (q == k) for k in range(n)] for q in range(n)]
        mixed.append([[value / sum(row) for value in row] for row in rows])
    reached = [mixed[0]]
    for layer in mixed[1:]:
        before = reached[-1]
        reached.append(
            [
                [sum(layer[q][j] * before[j][k] for j in range(n)) for k in range(n)]
                for q in range(n)
            ]
        )
    return torch.tensor(reached).reshape(count, 1, n, n)


def test_rollout_agrees_with_the_slow_copy_and_keeps_padding_out(generator):
    """T-VGP-1 and T-VGP-5, samples of several lengths in one batch."""
    lengths, n = [5, 3, 1], 5
    mask = torch.zeros(3, n, n, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :length, :length] = True
    scores = torch.randn(3, 4, 2, n, n, generator=generator)
    made = AttentionMap.from_scores(scores, words(n), words(n), mask)
    rolled = rollout(made).check()
    assert rolled.values.shape == (3, 4, 1, n, n) and rolled.kind is Kind.PROBABILITY
    assert torch.equal(rolled.rows, made.rows), "padded queries still do not count"
    for row, length in enumerate(lengths):
        inside = slow_rollout(made.weights[row, :, :, :length, :length])
        torch.testing.assert_close(rolled.weights[row, :, :, :length, :length], inside)
        assert (rolled.weights[row, :, :, :, length:] == 0).all()
        assert (rolled.weights[row, :, :, length:] == 0).all()
        torch.testing.assert_close(inside.sum(dim=-1), torch.ones(4, 1, length))


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_hides_what_no_path_reaches(residual, generator):
    n, layers = 6, 3
    causal = torch.ones(n, n).tril().bool()
    window = causal & ~torch.ones(n, n).tril(-2).bool()
    for mask, reach in ((causal, causal), (window, torch.ones(n, n).tril().triu(-layers).bool())):
        scores = torch.randn(1, layers, 1, n, n, generator=generator)
        made = AttentionMap.from_scores(scores, words(n), words(n), mask[None])
        rolled = rollout(made, residual=residual).check()
        assert torch.equal(rolled.visible[0], reach)
        assert torch.equal(rolled.weights[0, -1, 0] > 0, reach)


def test_rollout_with_other_fusions_is_still_a_probability(generator):
    made = random_map(generator, shape=(2, 3, 4, 5, 5))
    rollout(made, fuse=torch.amax).check()
    assert rollout(random_map(generator, (2, 1, 1, 5, 5), False)).mask is None


# --- what is refused


def test_refusals_name_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"span 'image' of shape \(2, 3\) needs 6 positions, got 5"
    ):
        Span("image", (2, 3), slice(0, 5))
    with pytest.raises(ValueError, match="does not say where it stops"):
        Span("image", (2,), slice(0, None))
    with pytest.raises(ValueError, match=r"no span 'audio'; this axis has \['image', 'text'\]"):
        (grid(2, 2) + words(3)).find("audio")
    with pytest.raises(ValueError, match="same name"):
        grid(2, 2) + grid(2, 2)
    with pytest.raises(ValueError, match="stops at 4, beyond the 3 positions"):
        Layout((Span("text", (2,), slice(2, 4)),), 3)
    with pytest.raises(ValueError, match=r"are not \(b, l, h, q, k\) with \(q, k\) = \(1, 3\)"):
        AttentionMap(torch.zeros(1, 1, 1, 2, 3), words(3))
    with pytest.raises(ValueError, match="no logarithm"):
        AttentionMap(torch.zeros(1, 1, 1, 1, 3), words(3), kind=Kind.SIGNED, form=Form.LOG)
    signed = AttentionMap(torch.randn(1, 1, 1, 3, 3), words(3), words(3), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="no logarithm"):
        signed.log_weights  # noqa: B018
    with pytest.raises(ValueError, match="signed weights do not normalise"):
        signed.normalize()
    with pytest.raises(ValueError, match="signed weights are none"):
        rollout(signed)
    with pytest.raises(ValueError, match="1 queries, 3 keys"):
        rollout(AttentionMap(torch.zeros(1, 1, 1, 1, 3), words(3)))


def test_a_mask_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=r"neither \(2, 1, 3\) nor \(2, 4, 3\)"):
        AttentionMap(torch.zeros(2, 1, 1, 4, 3), words(3), words(4), torch.ones(1, 4, 3).bool())


def test_check_finds_broken_maps():
    def made(values, mask=None, kind=Kind.PROBABILITY) -> AttentionMap:
        rows = torch.tensor(values).reshape(1, 1, 1, 1, -1)
        seen = None if mask is None else torch.tensor(mask).reshape(1, 1, -1)
        return AttentionMap(rows, words(rows.shape[-1]), POINT, seen, kind)

    good = made([0.25, 0.75])
    assert good.check() is good
    made([0.0, 0.0]).check()  # a row without weight
    made([0.25, 0.5], kind=Kind.SUBPROBABILITY).check()
    made([3.0, 0.0], kind=Kind.AMOUNT).check()
    made([-3.0, 1.0], kind=Kind.SIGNED).check()
    with pytest.raises(ValueError, match="1 weights are not finite"):
        made([math.nan, 0.5]).check()
    with pytest.raises(ValueError, match="1 weights are not finite"):
        made([math.inf, 0.5], [True, False], Kind.AMOUNT).check()
    with pytest.raises(ValueError, match=r"below zero: -0\.5"):
        made([-0.5, 1.5]).check()
    with pytest.raises(
        ValueError, match=r"1 weights on keys that their query may not see, up to 0\.5"
    ):
        made([0.5, 0.5], [True, False]).check()
    with pytest.raises(ValueError, match="may not see"):
        made([0.5, -0.5], [True, False], Kind.SIGNED).check()
    with pytest.raises(ValueError, match=r"1 probability rows sum to \[0\.75\]"):
        made([0.25, 0.5]).check()
    with pytest.raises(ValueError, match="subprobability rows sum to"):
        made([0.75, 0.5], kind=Kind.SUBPROBABILITY).check()
    made([0.25, 0.5]).check(tolerance=0.3)


def test_a_kind_is_a_kind_and_not_its_name():
    check = inspect.unwrap(AttentionMap.__post_init__)  # without the checks that only tests have
    made = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    with pytest.raises(ValueError, match="of a Kind and in a Form, not 'amount', <Form"):
        check(SimpleNamespace(**{**vars(made), "kind": "amount"}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long])
def test_masks_and_counts_become_numbers_before_they_are_divided(dtype):
    """Whole numbers divided and made whole again are zero: a target that asks for nothing."""
    cells = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1]]).to(dtype)
    found = AttentionMap.from_cells(cells, grid(2, 2)).normalize()
    third = 1 / 3
    expected = torch.tensor([[third, 0, third, third], [0, 0, 0, 1]])
    torch.testing.assert_close(found.weights.flatten(1), expected)


def test_values_that_are_no_floating_point_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    whole = torch.ones(1, 1, 1, 1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"floating point, not torch.int64; say .float\(\)"):
        AttentionMap(whole, grid(2, 2))
    with pytest.raises(ValueError, match="a tensor of floating point, not float64"):
        AttentionMap(whole.double().numpy(), grid(2, 2))
    with pytest.raises(ValueError, match=r"are \(3, 2, 2\); flatten\(1\)"):
        AttentionMap.from_cells(torch.ones(3, 2, 2), grid(2, 2))


def test_what_is_not_there_is_answered_with_what_is():
    one = AttentionMap(torch.rand(1, 2, 3, 1, 4), grid(2, 2))
    with pytest.raises(IndexError, match="layers 0 to 1, not 2"):
        one.layer(2)
    with pytest.raises(IndexError, match="heads 0 to 2, not -4"):
        one.head(-4)
    assert torch.equal(one.head(-1).values, one.values[:, :, 2:])
    with pytest.raises(ValueError, match="fewer than no cells"):
        grid(-1, 4)
