"""What was seen: maps, blocks, losses and folds, each held to the oracle."""

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.attribution import rollout
from overt.capture import watch
from overt.capture.call import Call, QKCall, Route
from overt.capture.trace import AttentionTrace
from tests.capture.toys import FusedAttention, Stack, WrittenAttention, oracle

LAYOUT = Layout((Span("text", (3,), slice(0, 3)), Span("image", (2, 2), slice(3, 7))), 8)


def run(*layers, mask=None, layout=LAYOUT, n=8, **more):
    torch.manual_seed(0)
    model = Stack(*(layers or (FusedAttention(), FusedAttention(groups=2)))).double()
    x = torch.randn(2, n, 16, dtype=torch.float64)
    with watch(model, layout=layout, **more) as trace:
        out = model(x, mask)
    return model, x, trace, out


def expected(model, x, mask=None):
    """The maps of all layers by the oracle, each layer fed what the model fed it."""
    maps = []
    for layer in model.layers:
        maps.append(oracle(layer, x, mask))
        x = (x + layer(x, mask)).detach()
    return torch.stack(maps, dim=1)


def test_maps_are_exact():
    model, x, trace, _ = run()
    found = trace.map()
    torch.testing.assert_close(found.weights, expected(model, x), rtol=0, atol=1e-12)
    assert found.check().kind is Kind.PROBABILITY
    torch.testing.assert_close(trace.map("layers.1").weights[:, 0], found.weights[:, 1])
    assert [one.weights.shape[1] for one in trace.maps()] == [1, 1]


def test_masks_travel_with_the_map():
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 6:] = False
    model, x, trace, _ = run(mask=mask)
    found = trace.map().check()
    torch.testing.assert_close(found.weights, expected(model, x, mask), rtol=0, atol=1e-12)
    assert found.visible[1, 0].tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize("attention", [FusedAttention, WrittenAttention])
def test_a_block_is_cut_from_the_map(attention):
    _, _, trace, _ = run(attention(), attention())
    whole = trace.map()
    block = trace.block("text", "image")
    torch.testing.assert_close(block.weights, whole.weights[..., :3, 3:7], rtol=0, atol=1e-12)
    assert block.kind is Kind.SUBPROBABILITY and block.form is Form.LOG
    assert block.keys.find("image").shape == (2, 2)
    torch.testing.assert_close(trace.log_block("text", "image").weights, block.normalize().weights)
    torch.testing.assert_close(block.normalize().weights, whole.between("text", "image").weights)


def test_rows_are_counted_within_the_query_and_may_be_absent():
    _, _, trace, _ = run()
    rows = torch.tensor([[2, 0], [1, -1]])
    block = trace.log_block("text", "image", rows=rows)
    full = trace.map().between("text", "image").weights
    torch.testing.assert_close(block.weights[0], full[0][..., [2, 0], :])
    torch.testing.assert_close(block.weights[1, ..., :1, :], full[1][..., [1], :])
    assert not block.weights[1, ..., 1, :].any()
    assert block.rows.tolist() == [[True, True], [True, False]]
    with pytest.raises(ValueError, match=r"row 3 .* 3"):
        trace.block("text", "image", rows=torch.tensor([[3], [0]]))


def test_positions_of_each_sample_need_no_layout():
    _, _, trace, _ = run(layout=None)
    query, key = torch.tensor([[0, 5], [7, -1]]), torch.tensor([[1, 2, 3], [4, 6, -1]])
    block = trace.block(query, key)
    whole = trace.map().weights
    torch.testing.assert_close(block.weights[0], whole[0][..., [0, 5], :][..., [1, 2, 3]])
    torch.testing.assert_close(block.weights[1, ..., 0, :2], whole[1][..., 7, :][..., [4, 6]])
    assert not block.weights[1, ..., 2].any()
    assert block.visible[1].tolist() == [[True, True, False], [False] * 3]
    with pytest.raises(ValueError, match="'text' .*layout="):
        trace.block("text", key)


def test_spans_at_different_places_in_each_sample():
    layout = Layout((Span("text", (2,), torch.tensor([[0, 1], [5, -1]])),), 8)
    _, _, trace, _ = run(layout=layout)
    rows = torch.tensor([[1], [0]])
    block = trace.block("text", "text", rows=rows)
    whole = trace.map().block("text", "text").weights
    torch.testing.assert_close(block.weights[0], whole[0][..., [1], :])
    torch.testing.assert_close(block.weights[1], whole[1][..., [0], :])


@pytest.mark.parametrize("few", [True, False])
def test_log_blocks_and_their_gradients_are_those_of_the_map(few):
    """Both ways of stacking: one product for all layers, and one a layer."""
    keys = torch.tensor([[2, 3]] * 2) if few else torch.arange(8).repeat(2, 1)
    model, _, trace, _ = run(FusedAttention(), FusedAttention(), FusedAttention())
    rows = torch.tensor([[0, 4], [1, 2]])
    parameters = [layer.query.weight for layer in model.layers[:2]]
    block = trace.log_block(rows, keys)
    target = torch.rand(2, 1, 1, 2, keys.shape[1], dtype=torch.float64)
    found = torch.autograd.grad((target * block.log_weights).sum(), parameters, retain_graph=True)
    whole = trace.map().weights
    part = torch.stack([whole[s][..., rows[s], :][..., keys[s]] for s in range(2)])
    part = part / part.sum(-1, keepdim=True)
    torch.testing.assert_close(block.weights, part, rtol=0, atol=1e-12)
    slow = torch.autograd.grad((target * part.log()).sum(), parameters)
    for mine, theirs in zip(found, slow, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_padding_is_hidden_in_a_log_block():
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = False
    _, _, trace, _ = run(mask=mask)
    block = trace.log_block("text", "image").check()
    assert not block.weights[1, ..., 2:].any()
    torch.testing.assert_close(block.weights.sum(-1), torch.ones_like(block.weights[..., 0]))


def test_folding_keeps_one_map_at_a_time():
    _, _, trace, _ = run()
    total = trace.reduce(lambda total, one: total + one.weights.sum(dim=2), 0)
    torch.testing.assert_close(total, trace.map().weights.sum(dim=2).sum(dim=1, keepdim=True))


def test_calls_are_chosen_by_step_name_and_head():
    model, x, *_ = run()
    with watch(model) as trace:
        model(x)
        model(x[:, :5])
    assert len(trace) == 4 and [call.step for call in trace] == [0, 0, 1, 1]
    assert trace.at(-1).map().weights.shape == (2, 2, 4, 5, 5)
    assert trace.where(lambda call: call.name == "layers.0").at(0).names == ("layers.0",)
    torch.testing.assert_close(
        trace.at(0).heads([2]).map().weights, trace.at(0).map().weights[:, :, [2]]
    )
    for layer in (-1, "layers.1"):
        torch.testing.assert_close(
            trace.at(0).layer(layer).map().weights, trace.at(0).map().weights[:, [1]]
        )
    with pytest.raises(ValueError, match="different shapes"):
        trace.map()
    with pytest.raises(ValueError, match="called 2 times"):
        trace.map("layers.0")
    with pytest.raises(ValueError, match=r"step 2 .* 2"):
        trace.at(2)
    with pytest.raises(ValueError, match="no calls"):
        trace.where(lambda call: False).block(torch.zeros(2, 1).long(), torch.zeros(2, 1).long())


def test_a_layout_that_does_not_fit_is_said():
    _, _, trace, _ = run(n=6)
    with pytest.raises(ValueError, match=r"8 .*layers\.0 has 6"):
        trace.block("text", "image")
    assert (
        trace.with_layout(Layout((Span("all", (6,), slice(0, 6)),), 6)).block("all", "all")
        is not None
    )
    with pytest.raises(ValueError, match="layer 9"):
        trace.map(9)
    with pytest.raises(ValueError, match="'nobody'"):
        trace.map("nobody")


def test_a_pair_of_layouts_is_queries_and_keys():
    model = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    image, text = LAYOUT, Layout((Span("words", (5,), slice(0, 5)),), 5)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 8, 16)
    with watch(model, layout=(text, image)) as trace:
        model(x, y, y, need_weights=False)
    assert trace.block("words", "image").weights.shape == (2, 1, 4, 5, 4)
    assert isinstance(trace.map(), AttentionMap) and trace.calls[0].cross


def test_seen_grows_while_the_model_is_watched():
    model, x, *_ = run()
    with watch(model) as trace:
        assert len(trace) == 0
        model(x)
        assert len(trace) == 2
    assert len(trace) == 2


def near(width):
    """A mask function of FlexAttention: so many positions to either side."""
    return lambda b, h, q, k: (q - k).abs() <= width


def test_mask_functions_that_differ_are_joined():
    x, places = torch.randn(1, 1, 5, 4), torch.arange(5)[None]
    calls = [
        Call("one", torch.nn.Identity(), QKCall(x, x, 0.5, mask_mod=near(width)), Route.FLEX, False)
        for width in (1, 3)
    ]
    trace = AttentionTrace(calls)
    block = trace.block(places, places)
    torch.testing.assert_close(block.weights.sum(dim=-1), torch.ones(1, 2, 1, 5))
    assert torch.equal(trace.map().mask[0], (places - places.mT).abs() <= 3)


def masks() -> dict[str, torch.Tensor | None]:
    """Ways to hide keys from all, from some heads, from some queries, and from one query all."""
    generator = torch.Generator().manual_seed(1)
    padding = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    padding[1, ..., 4:6] = False
    rows = torch.rand(2, 1, 8, 8, generator=generator) < 0.6
    rows[0, :, 2, 3:7] = False  # sees nothing of the image
    heads = torch.rand(2, 4, 8, 8, generator=generator) < 0.6
    heads[..., 7] = True
    bias = torch.randn(2, 1, 8, 8, generator=generator, dtype=torch.float64)
    return {"none": None, "padding": padding, "queries": rows, "heads": heads, "bias": bias}


@pytest.mark.parametrize("name", masks())
def test_layers_that_are_alike_give_the_blocks_of_their_maps(name):
    """One function multiplies them all, whatever hides keys; a row of nothing is zero."""
    _, _, trace, out = run(FusedAttention(), FusedAttention(), mask=masks()[name])
    rows = torch.tensor([[2, 0, -1], [1, 1, 2]])
    found = trace.log_block("text", "image", rows)
    wanted = trace.block("text", "image", rows).normalize()
    assert found.form is Form.LOG and found.kind is Kind.PROBABILITY
    assert found.rows.tolist() == wanted.rows.tolist() and not found.rows[0, 2]
    torch.testing.assert_close(found.weights, wanted.weights, rtol=0, atol=1e-12)
    slopes = []
    for one in (found, wanted):
        kept = torch.where(one.rows[:, None, None, :, None], one.weights, 0)
        loss = kept.square().sum() + 0 * out.sum()
        queries = [call.source.query for call in trace.calls]
        slopes.append(torch.autograd.grad(loss, queries, retain_graph=True))
    for mine, theirs in zip(*slopes, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_what_was_seen_is_shown_by_kind_of_call_without_a_number_of_it():
    _, _, trace, _ = run(FusedAttention(), FusedAttention(), WrittenAttention())
    by_hand = "self-attention, b=2 h=4 q=8 k=8, captured via"
    assert repr(trace) == (
        "AttentionTrace(3 calls)\n"
        f"  2 of layers.*: {by_hand} scaled_dot_product_attention\n"
        f"  1 of layers.*: {by_hand} softmax written out"
    )
    assert repr(trace.calls[0]) == f"Call(layers.0: {by_hand} scaled_dot_product_attention)"
    assert repr(AttentionTrace([])) == "AttentionTrace(0 calls)"


@pytest.mark.parametrize("given", [0, [0], torch.tensor([0])])
def test_positions_that_are_no_rows_of_numbers_are_refused(given, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    _, _, trace, _ = run()
    for ask in (lambda: trace.block(given, "image"), lambda: rollout(trace, rows=given)):
        with pytest.raises(TypeError, match=r"positions \(b, n\)"):
            ask()


def test_positions_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    _, _, trace, _ = run()
    first = torch.tensor([[0], [1]])
    for ask in (trace.block, trace.log_block):
        with pytest.raises(ValueError, match=r"position 8 .* 8"):
            ask(first, first + 7)
        with pytest.raises(ValueError, match=r"1 samples.* 2"):
            ask(first[:1], "image")
        with pytest.raises(TypeError, match=r"int.*torch.float32"):
            ask(first.float(), "image")


def test_self_and_cross_attention_of_one_size_are_no_one_map():
    """An encoder and a decoder may read as many tokens; their keys are still others."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x, y = torch.randn(2, 2, 5, 16)
    with watch(layer) as trace:
        layer(x, y)
    for ask in (trace.map, lambda: trace.block(*torch.zeros(2, 2, 1).long())):
        with pytest.raises(ValueError, match=r"keys .*where\("):
            ask()
    for cross in (True, False):
        assert trace.where(lambda call, cross=cross: call.cross is cross).map().shape[1] == 1


class HeadLoopAttention(nn.Module):
    """Attention that computes one head after the other."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        parts = [part.split(4, dim=-1) for part in self.project(x).chunk(3, dim=-1)]
        heads = [
            nn.functional.scaled_dot_product_attention(*one) for one in zip(*parts, strict=True)
        ]
        return torch.cat(heads, dim=-1)


def test_heads_in_a_loop_are_not_stacked_as_layers():
    model = nn.Sequential(HeadLoopAttention(), HeadLoopAttention())
    with watch(model) as trace:
        model(torch.randn(2, 5, 8))
    row, keys = torch.zeros(2, 1, dtype=torch.long), torch.arange(5).expand(2, 5)
    for read in (trace.map, lambda: trace.block(row, keys), lambda: trace.log_block(row, keys)):
        with pytest.raises(ValueError, match="2 times"):
            read()
    assert [one.shape for one in trace.maps()] == 4 * [(2, 1, 1, 5, 5)]
    first = trace.where(lambda call: call is trace.calls[0] or call is trace.calls[2])
    assert first.map().shape == (2, 2, 1, 5, 5)


def test_a_module_that_runs_twice_is_two_layers():
    layer = FusedAttention()
    model = Stack(layer, layer)
    with watch(model, layout=LAYOUT) as trace:
        model(torch.randn(2, 8, 16), None)
    assert trace.map().shape[1] == 2
