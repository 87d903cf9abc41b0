"""`AttentionMap`: construction, normalization, blocks, layouts, fusion, rollout and checks."""

import inspect
import itertools
import math
from dataclasses import replace

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overt.attention import (
    GLOBAL_QUERY,
    AttentionMap,
    Form,
    Kind,
    Layout,
    Span,
    grid,
    regions,
    words,
)
from overt.attribution import rollout
from overt.geometry import PixelGeometry, TextGeometry


def softmax_rows(scores: list[float], seen: list[bool]) -> list[float]:
    """Compute the softmax of a row over visible keys, or zeros if all are hidden."""
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


# --- construction and properties


def test_from_scores_agrees_with_a_softmax_per_row(generator):
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


def test_a_mask_of_one_row_applies_to_every_query(generator):
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


def test_from_cells_makes_amounts_with_five_axes():
    cells = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    made = AttentionMap.from_cells(cells, grid(2, 2), torch.tensor([[True, True, True, False]]))
    assert made.values.shape == made.shape == (1, 1, 1, 1, 4) and made.kind is Kind.AMOUNT
    expected = torch.tensor([0.0, 2 / 3, 1 / 3, 0.0])
    torch.testing.assert_close(made.normalize().weights[0, 0, 0, 0], expected)


def test_plain_and_log_forms_agree_in_value_and_gradient(generator):
    scores = torch.randn(2, 1, 2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 3, 5, generator=generator) > 0.4
    coefficients = torch.rand(2, 1, 2, 3, 5, generator=generator, dtype=torch.float64)
    gradients = []
    for form in (Form.LOG, Form.PLAIN):
        leaf = scores.clone().requires_grad_()
        values = leaf if form is Form.LOG else leaf.exp()
        made = AttentionMap(values, words(5), words(3), mask, Kind.AMOUNT, form).normalize()
        seen = mask[:, None, None].expand_as(scores)
        loss = (coefficients * made.weights).sum() + (coefficients * made.log_weights)[seen].sum()
        loss.backward()
        gradients.append((made.weights.detach(), made.log_weights.detach(), leaf.grad))
    for log_side, plain_side in zip(*gradients, strict=True):
        torch.testing.assert_close(log_side, plain_side)


def test_the_log_weight_of_zero_is_minus_infinity_with_zero_gradient():
    values = torch.tensor([0.0, 0.5, 0.5]).reshape(1, 1, 1, 1, 3).requires_grad_()
    logs = AttentionMap(values, words(3)).log_weights
    assert logs.flatten()[0] == -math.inf
    logs.exp().sum().backward()
    assert torch.equal(values.grad.flatten(), torch.tensor([0.0, 1.0, 1.0]))


# --- normalization


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([1.0, 30.0, 1e4]),
    st.sampled_from([Form.LOG, Form.PLAIN]),
    st.integers(0, 2**31),
)
def test_normalized_rows_are_finite_and_sum_to_one_or_zero(b, q, k, dtype, size, form, seed):
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

    coefficients = torch.rand(made.values.shape, generator=generator).to(dtype)
    shown = mask[:, None, None] & made.log_weights.isfinite()
    ((coefficients * made.weights).sum() + made.log_weights[shown].sum()).backward()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~mask[:, None, None].expand_as(leaf)] == 0).all()


def test_large_equal_scores_give_uniform_weights_in_16_bits():
    """Score minus log-sum would be rounded to the score itself."""
    for dtype in (torch.float16, torch.bfloat16):
        scores = torch.full((1, 1, 1, 1, 4), 1e4, dtype=dtype)
        weights = AttentionMap.from_scores(scores, words(4)).weights
        torch.testing.assert_close(
            weights.float(), torch.full((1, 1, 1, 1, 4), 0.25), atol=2e-3, rtol=0
        )


def test_a_large_heat_map_is_normalized_in_16_bits():
    """The sum of 300 cells of 255 overflows in float16."""
    heat = AttentionMap.from_cells(torch.full((1, 300), 255.0, dtype=torch.float16), words(300))
    weights = heat.normalize().weights
    assert weights.dtype is torch.float16
    assert float(weights.float().sum()) == pytest.approx(1, abs=1e-2)


def test_a_row_of_zeros_stays_zero():
    made = AttentionMap.from_cells(torch.zeros(2, 3), words(3)).normalize().check()
    assert (made.weights == 0).all()
    logs = AttentionMap(torch.full((1, 1, 1, 1, 3), -math.inf), words(3), form=Form.LOG)
    assert (logs.normalize().weights == 0).all()


def test_amounts_are_not_normalized_implicitly():
    values = torch.tensor([1.0, 3.0]).reshape(1, 1, 1, 1, 2)
    assert torch.equal(AttentionMap(values, words(2), kind=Kind.AMOUNT).weights, values)


# --- blocks of ragged samples

LENGTHS = [(3, 2), (1, 4), (2, 1)]  # words and regions of each sample, packed consecutively


def packed_samples(lengths, generator, form=Form.LOG) -> tuple[AttentionMap, list[torch.Tensor]]:
    """Return samples with regions directly after their words, padded at the end (F9)."""
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
    made, scores = packed_samples(LENGTHS, generator, form)
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
            for one in (block, part):  # padding of the sample
                assert (one.weights[row, :, :, q:] == 0).all()
                assert (one.weights[row, :, :, :, k:] == 0).all()
                assert one.visible[row].sum() == q * k
                assert one.rows[row].sum() == q


def test_blocks_do_not_depend_on_other_samples(generator):
    """Permuting and re-batching samples of other lengths keeps each block (T-VGP-9)."""
    made, _ = packed_samples(LENGTHS, generator)
    part = made.between("text", "regions")
    order = torch.tensor([2, 0, 1])
    moved = made.select(order).between("text", "regions")
    assert torch.equal(moved.weights, part.weights[order])
    alone = made.select(torch.tensor([1])).between("text", "regions")
    assert torch.equal(alone.weights, part.weights[[1]])


def test_blocks_match_the_example_of_the_paper():
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


def test_a_block_has_no_gradient_to_keys_outside(generator):
    """Renormalization cancels the partition function (T-VGP-11)."""
    scores = torch.randn(1, 1, 1, 1, 5, generator=generator, dtype=torch.float64).requires_grad_()
    made = AttentionMap.from_scores(scores, words(2) + regions(3))
    made.between("global", "regions").log_weights[..., 0].sum().backward()
    torch.testing.assert_close(scores.grad[..., :2], torch.zeros(1, 1, 1, 1, 2).double())
    assert scores.grad[..., 2:].abs().min() > 0


def test_a_block_of_slices_without_a_mask_has_no_mask(generator):
    values = torch.rand(2, 1, 1, 5, 5, generator=generator)
    both = words(2) + regions(3)
    made = AttentionMap(values, both, both, kind=Kind.AMOUNT)
    block = made.block("regions", "text")
    assert block.mask is None and block.kind is Kind.AMOUNT
    assert torch.equal(block.weights, values[..., 2:, :2])


def test_spans_can_be_non_contiguous():
    """Rows of an image with a newline token after each, and text between tiles."""
    index = torch.tensor([[0, 1, 3, 4]])
    keys = Layout((Span("image", (2, 2), index), Span("line", (2,), slice(2, 6, 3))), 6)
    made = AttentionMap(torch.arange(6.0).reshape(1, 1, 1, 1, 6), keys, kind=Kind.AMOUNT)
    assert made.block("global", "image").weights.flatten().tolist() == [0, 1, 3, 4]
    assert made.block("global", "line").weights.flatten().tolist() == [2, 5]


def test_layouts_are_concatenated():
    index = torch.tensor([[1, -1], [0, 2]])
    late = Layout((Span("some", (2,), index), Span("every other", (2,), slice(0, 3, 2))), 3)
    both = grid(1, 2) + late
    assert len(both) == 5
    assert both.find("some").index.tolist() == [[3, -1], [2, 4]]
    assert list(range(5))[both.find("every other").index] == [2, 4]
    assert both.only("some").find("some").index == slice(0, 2)


# --- fusion, selection, devices


def test_heads_and_layers_are_fused(generator):
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


def test_rows_as_samples_makes_each_row_a_sample(generator):
    geometry = PixelGeometry.identity(3, (4, 6))
    scores = torch.randn(3, 2, 2, 4, 6, generator=generator)
    mask = torch.rand(3, 4, 6, generator=generator) > 0.3
    made = AttentionMap.from_scores(scores, grid(2, 3, geometry=geometry), words(4), mask)
    rows = made.rows_as_samples().check()
    assert rows.values.shape == (48, 1, 1, 1, 6)
    back = rows.weights.reshape(made.weights.shape)
    assert torch.equal(back, made.weights)
    assert torch.equal(rows.visible.reshape(3, 2, 2, 4, 6)[:, 1, 1], made.visible)
    assert len(rows.keys.find("image").geometry) == 48
    assert random_map(generator, masked=False).rows_as_samples().mask is None


def test_select_takes_samples_with_mask_index_and_geometry():
    text = TextGeometry(("a", "b", "c"), torch.zeros(3, 2, 2, dtype=torch.long))
    keys = Layout((Span("text", (2,), torch.tensor([[0, 1], [1, 2], [0, 2]]), text),), 3)
    mask = torch.tensor([[[True, True, False]], [[False, True, True]], [[True, False, True]]])
    made = AttentionMap(
        torch.arange(9.0).reshape(3, 1, 1, 1, 3), keys, GLOBAL_QUERY, mask, Kind.AMOUNT
    )
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


def test_detached_weights_require_no_gradient():
    values = torch.rand(1, 1, 1, 1, 2, requires_grad=True)
    made = AttentionMap(values, words(2), kind=Kind.AMOUNT)
    assert made.weights.requires_grad and not made.detach().weights.requires_grad


def test_a_target_of_one_layer_and_head_broadcasts(generator):
    made = random_map(generator, shape=(2, 3, 4, 5, 6), masked=False)
    target = AttentionMap(torch.rand(2, 1, 1, 5, 6, generator=generator), words(6), words(5))
    difference = made.weights - target.weights
    assert difference.shape == made.values.shape
    torch.testing.assert_close(difference[:, 2, 3], made.weights[:, 2, 3] - target.weights[:, 0, 0])


def test_layers_with_different_grids_are_separate_maps(generator):
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


def test_rollout_of_two_layers_matches_an_example_by_hand():
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
def test_rollout_of_uniform_attention_matches_the_closed_form(n, layers, diagonal):
    """T-VGP-3."""
    made = rollout(self_attention(*[torch.full((n, n), 1 / n)] * layers))
    last = made.weights[0, -1, 0]
    assert last.diagonal().tolist() == pytest.approx([diagonal] * n, abs=1e-6)
    exact = 1 / n + (1 - 1 / n) / 2**layers
    assert float(last[0, 0]) == pytest.approx(exact, rel=1e-5)


def test_rollout_of_the_identity_is_the_identity():
    made = rollout(self_attention(*[torch.eye(4)] * 3))
    assert torch.equal(made.weights[0, :, 0], torch.eye(4).expand(3, 4, 4))


def reference_rollout(layers: torch.Tensor) -> torch.Tensor:
    """Compute rollout of (l h q k) of one sample, entry by entry."""
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


def test_rollout_agrees_with_the_reference_and_ignores_padding(generator):
    """T-VGP-1 and T-VGP-5, samples of several lengths in one batch."""
    lengths, n = [5, 3, 1], 5
    mask = torch.zeros(3, n, n, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :length, :length] = True
    scores = torch.randn(3, 4, 2, n, n, generator=generator)
    made = AttentionMap.from_scores(scores, words(n), words(n), mask)
    rolled = rollout(made).check()
    assert rolled.values.shape == (3, 4, 1, n, n) and rolled.kind is Kind.PROBABILITY
    assert torch.equal(rolled.rows, made.rows), "padded queries stay hidden"
    for row, length in enumerate(lengths):
        inside = reference_rollout(made.weights[row, :, :, :length, :length])
        torch.testing.assert_close(rolled.weights[row, :, :, :length, :length], inside)
        assert (rolled.weights[row, :, :, :, length:] == 0).all()
        assert (rolled.weights[row, :, :, length:] == 0).all()
        torch.testing.assert_close(inside.sum(dim=-1), torch.ones(4, 1, length))


@pytest.mark.parametrize("residual", [True, False])
def test_rollout_hides_keys_that_no_path_reaches(residual, generator):
    n, layers = 6, 3
    causal = torch.ones(n, n).tril().bool()
    window = causal & ~torch.ones(n, n).tril(-2).bool()
    for mask, reach in ((causal, causal), (window, torch.ones(n, n).tril().triu(-layers).bool())):
        scores = torch.randn(1, layers, 1, n, n, generator=generator)
        made = AttentionMap.from_scores(scores, words(n), words(n), mask[None])
        rolled = rollout(made, residual=residual).check()
        assert torch.equal(rolled.visible[0], reach)
        assert torch.equal(rolled.weights[0, -1, 0] > 0, reach)


def test_rollout_with_other_fusions_is_a_probability(generator):
    made = random_map(generator, shape=(2, 3, 4, 5, 5))
    rollout(made, fuse=torch.amax).check()
    assert rollout(random_map(generator, (2, 1, 1, 5, 5), False)).mask is None


# --- bad input


def test_invalid_spans_layouts_and_kinds_raise():
    with pytest.raises(ValueError, match=r"image.*2, 3.* 6 .*5"):
        Span("image", (2, 3), slice(0, 5))
    with pytest.raises(ValueError, match="'image'"):
        Span("image", (2,), slice(0, None))
    with pytest.raises(ValueError, match=r"'audio'.*\['image', 'text'\]"):
        (grid(2, 2) + words(3)).find("audio")
    with pytest.raises(ValueError, match="'image'.*'image'"):
        grid(2, 2) + grid(2, 2)
    with pytest.raises(ValueError, match="'text' .* 4.* 3 "):
        Layout((Span("text", (2,), slice(2, 4)),), 3)
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 1, 1, 2, 3\)"):
        AttentionMap(torch.zeros(1, 1, 1, 2, 3), words(3))
    with pytest.raises(ValueError, match="no logarithm"):
        AttentionMap(torch.zeros(1, 1, 1, 1, 3), words(3), kind=Kind.SIGNED, form=Form.LOG)
    signed = AttentionMap(torch.randn(1, 1, 1, 3, 3), words(3), words(3), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="no logarithm"):
        signed.log_weights  # noqa: B018
    with pytest.raises(ValueError, match="signed"):
        signed.normalize()
    with pytest.raises(ValueError, match="non-negative"):
        rollout(signed)
    with pytest.raises(ValueError, match=r"1 queries.*3 keys"):
        rollout(AttentionMap(torch.zeros(1, 1, 1, 1, 3), words(3)))


def test_a_mask_of_another_shape_raises(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=r"mask .*\(1, 4, 3\)"):
        AttentionMap(torch.zeros(2, 1, 1, 4, 3), words(3), words(4), torch.ones(1, 4, 3).bool())
    with pytest.raises(ValueError, match=r"\(2, 4, 3\), got"):
        AttentionMap(torch.zeros(2, 1, 1, 4, 3), words(3), words(4), torch.ones(2, 1, 1, 4, 3) > 0)


def test_check_raises_for_invalid_maps():
    def made(values, mask=None, kind=Kind.PROBABILITY) -> AttentionMap:
        rows = torch.tensor(values).reshape(1, 1, 1, 1, -1)
        seen = None if mask is None else torch.tensor(mask).reshape(1, 1, -1)
        return AttentionMap(rows, words(rows.shape[-1]), GLOBAL_QUERY, seen, kind)

    good = made([0.25, 0.75])
    assert good.check() is good
    made([0.0, 0.0]).check()  # an empty row
    made([0.25, 0.5], kind=Kind.SUBPROBABILITY).check()
    made([3.0, 0.0], kind=Kind.AMOUNT).check()
    made([-3.0, 1.0], kind=Kind.SIGNED).check()
    with pytest.raises(ValueError, match=r"1 weights.*finite"):
        made([math.nan, 0.5]).check()
    with pytest.raises(ValueError, match=r"1 weights.*finite"):
        made([math.inf, 0.5], [True, False], Kind.AMOUNT).check()
    with pytest.raises(ValueError, match=r"negative.* -0\.5"):
        made([-0.5, 1.5]).check()
    with pytest.raises(ValueError, match=r"1 .* masked .* 0\.5"):
        made([0.5, 0.5], [True, False]).check()
    with pytest.raises(ValueError, match=r"1 .* masked .* 0\.5"):
        made([0.5, -0.5], [True, False], Kind.SIGNED).check()
    with pytest.raises(ValueError, match=r"1 prob.* 0\.75"):
        made([0.25, 0.5]).check()
    with pytest.raises(ValueError, match=r"subprobability.*sum"):
        made([0.75, 0.5], kind=Kind.SUBPROBABILITY).check()
    made([0.25, 0.5]).check(tolerance=0.3)


def test_strings_become_kinds_and_forms():
    check = inspect.unwrap(AttentionMap.__post_init__)  # without the runtime type checks of tests
    made = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    object.__setattr__(made, "kind", "amount")
    object.__setattr__(made, "form", "log")
    check(made)
    assert made.kind is Kind.AMOUNT and made.form is Form.LOG
    object.__setattr__(made, "kind", "heat")
    with pytest.raises(ValueError, match="kind.*'amount'.*'heat'"):
        check(made)


def test_kinds_compare_with_strings():
    made = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    assert made.kind == "probability" and made.form == "plain" and made.kind != "signed"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long])
def test_masks_and_counts_are_normalized_as_floats(dtype):
    """Integer division would give zeros, that is an empty target."""
    cells = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1]]).to(dtype)
    found = AttentionMap.from_cells(cells, grid(2, 2)).normalize()
    third = 1 / 3
    expected = torch.tensor([[third, 0, third, third], [0, 0, 0, 1]])
    torch.testing.assert_close(found.weights.flatten(1), expected)


def test_values_that_are_not_floating_point_raise(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    whole = torch.ones(1, 1, 1, 1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        AttentionMap(whole, grid(2, 2))
    with pytest.raises(ValueError, match="float64|ndarray"):
        AttentionMap(whole.double().numpy(), grid(2, 2))
    with pytest.raises(ValueError, match=r"b, k.*\(3, 2, 2\)"):
        AttentionMap.from_cells(torch.ones(3, 2, 2), grid(2, 2))


def test_layers_and_heads_out_of_range_raise():
    one = AttentionMap(torch.rand(1, 2, 3, 1, 4), grid(2, 2))
    with pytest.raises(IndexError, match="layer index 2"):
        one.layer(2)
    with pytest.raises(IndexError, match="head index -4"):
        one.head(-4)
    assert torch.equal(one.head(-1).values, one.values[:, :, 2:])
    with pytest.raises(ValueError, match="'image'.*-1.*4"):
        grid(-1, 4)


def test_coverage_is_kept_by_operations_on_a_target():
    """Coverage is kept by operations that keep the keys; another shape raises."""
    shares = torch.tensor([[0.2, 0.6, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = AttentionMap.from_coverage(shares, grid(2, 2))
    assert found.weights[0].flatten().tolist() == pytest.approx([0.25, 0.75, 0, 0])
    assert not found.weights[1].any()
    for same in (found, found.normalize(), found.detach(), found.to("cpu"), found.over_heads()):
        assert torch.equal(same.coverage, shares[:, None])
    assert torch.equal(found.select(torch.tensor([1, 0])).coverage, shares[[1, 0], None])
    with pytest.raises((ValueError, TypeError)):  # shapes are also checked by annotation here
        replace(found, coverage=shares[:, None].expand(2, 3, 4))


# --- maps of plain tensors


@pytest.mark.parametrize("axes", ["b h q k", "k b q", "l b k h q", "k", "q k"])
def test_from_weights_puts_named_axes_in_order(axes):
    sizes = dict(zip("blhqk", (2, 3, 4, 5, 6), strict=True))
    names = axes.split()
    weights = torch.rand([sizes[name] for name in names])
    weights = weights / weights.sum(names.index("k"), keepdim=True)
    made = AttentionMap.from_weights(weights, axes)
    assert made.values.shape == tuple(sizes[n] if n in names else 1 for n in "blhqk")
    for index in itertools.product(*map(range, made.values.shape)):
        place = dict(zip("blhqk", index, strict=True))
        assert made.values[index] == weights[tuple(place[name] for name in names)]


def test_from_weights_keeps_layouts_and_kind():
    cells = grid(2, 2)
    made = AttentionMap.from_weights(torch.ones(1, 4), "b k", cells, kind="amount")
    assert made.kind is Kind.AMOUNT and made.keys is cells
    square = AttentionMap.from_weights(torch.eye(4), "q k", grid(2, 2))
    assert square.queries is square.keys
    assert AttentionMap.from_weights(torch.tensor([0, 1]), "k").values.dtype == torch.float32


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((2, 4), "b q k", "3 axes.* 2"),
        ((2, 4), "b b", "different letters.*'b b'"),
        ((2, 4), "b q", "and k"),
        ((2, 4), "bk", "different letters.*'bk'"),
        ((2, 4), "b k", "sum"),
    ],
)
def test_from_weights_refuses_other_axes_and_other_kinds(shape, axes, message):
    with pytest.raises(ValueError, match=message):
        AttentionMap.from_weights(torch.ones(shape), axes)


def test_the_class_token_has_aliases():
    layout = words(1, "class") + grid(2, 2)
    for name in ("cls", "CLS", "[CLS]", "class", "Class"):
        assert layout.find(name) is layout.spans[0]
    both = words(1, "class") + words(2, "CLS")
    assert both.find("CLS") is both.spans[1]  # a span of that name comes first


def test_spans_of_positions_without_names_are_refused_with_the_remedy():
    unnamed = AttentionMap.from_weights(torch.full((1, 3, 3), 1 / 3), "b q k")
    with pytest.raises(ValueError, match="'CLS'.*layout_of"):
        unnamed.between("CLS", "image")


def test_rows_with_other_sums_are_refused_with_the_remedy():
    swapped = torch.tensor([[0.75, 0.5], [0.25, 0.5]])  # columns sum to one
    with pytest.raises(ValueError, match=r"1\.25, 0\.75.* 1 "):
        AttentionMap.from_weights(swapped, "q k")
    assert AttentionMap.from_weights(swapped, "k q").weights[0, 0, 0, 0].tolist() == [0.75, 0.25]
    with pytest.raises(ValueError, match="expected at most 1"):
        AttentionMap.from_weights(swapped, "q k", kind="subprobability")


def test_positive_drops_negative_weights():
    signed = AttentionMap(torch.tensor([[[[[-1.0, 2.0, 2.0]]]]]), words(3), kind=Kind.SIGNED)
    assert signed.positive().kind is Kind.AMOUNT
    assert signed.positive().normalize().weights.flatten().tolist() == [0.0, 0.5, 0.5]


def test_sample_keeps_one():
    made = AttentionMap.from_cells(torch.eye(3), words(3))
    assert made.sample(1).values.flatten().tolist() == [0.0, 1.0, 0.0]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"sample index {index}.*3"):
            made.sample(index)
