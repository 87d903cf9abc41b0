"""What holds for compiled models, run by `test_mode.py` in a process of its own."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from overt.attention import AttentionMap, Kind, regions, words
from overt.attribution.gradients import gradient_attention
from overt.capture import Bias, Route, UncapturedAttentionError, watch
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.losses.grounding import direct_supervision, grounding_targets
from overt.nn import ClassificationHead, PrecomputedRegionEncoder, VLBert, VLBertSizes
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


def check_a_compiled_model_is_seen_with_one_more_graph(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention(), FusedAttention()).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    plain = compiled(x)
    watcher = watch(compiled)
    for turn in range(20):
        with watcher if turn % 2 else watch(compiled) as trace:
            out = compiled(x)
    assert counter.frame_count == 2
    torch.testing.assert_close(out, plain)
    with watch(model) as direct:
        model(x)
    assert trace.names == direct.names == ("layers.0", "layers.1")
    torch.testing.assert_close(trace.map().weights, direct.map().weights)
    mine = torch.autograd.grad(trace.map().weights.square().sum(), model.layers[0].query.weight)
    theirs = torch.autograd.grad(direct.map().weights.square().sum(), model.layers[0].query.weight)
    torch.testing.assert_close(mine, theirs)


def check_calling_a_compiled_model_again_and_again_makes_no_more_graphs(x):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Stack(FusedAttention()).eval(), backend=counter)
    with watch(compiled) as trace:
        for _ in range(12):
            compiled(x)
    assert [call.step for call in trace] == list(range(12))
    assert counter.frame_count <= 3


def check_edits_are_compiled_too(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention(), FusedAttention()).eval()
    compiled = torch.compile(model, backend="aot_eager")
    bias = torch.randn(6)
    for edit in (Bias(lambda call: bias), lambda call, weights: weights.flip(-1)):
        with watch(model, edit=edit):
            expected = model(x)
        with watch(compiled, edit=edit):
            torch.testing.assert_close(compiled(x), expected)


def check_compiled_multi_head_attention_is_seen_and_written_attention_is_refused(x):
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    compiled = torch.compile(model, backend="aot_eager")
    with watch(model) as direct:
        model(x)
    with watch(compiled) as trace:
        compiled(x)
    torch.testing.assert_close(trace.map().weights, direct.map().weights)
    by_hand = torch.compile(Stack(WrittenAttention()).eval(), backend="eager")
    with (
        pytest.raises(UncapturedAttentionError, match=r"torch\.compile"),
        watch(by_hand),
    ):
        by_hand(x)


def check_what_is_not_seen_compiled_is_seen_as_the_refusal_says(x):
    """However it was compiled: around the model, in place, in a part, or with no telling name."""

    class Looking(WrittenAttention):
        """A class whose name does not say that it attends."""

    wrapped = torch.compile(Stack(WrittenAttention()).eval(), backend="eager")
    in_place, in_part = Stack(WrittenAttention()).eval(), Stack(WrittenAttention()).eval()
    in_place.compile(backend="eager")
    in_part.layers[0].compile(backend="eager")
    inside = Stack(WrittenAttention()).eval()
    inside.layers[0] = torch.compile(inside.layers[0], backend="eager")
    nameless = torch.compile(Stack(Looking()).eval(), backend="eager")
    for model in (wrapped, in_place, in_part, inside, nameless):
        torch._dynamo.reset()
        with pytest.raises(UncapturedAttentionError, match="set_stance") as refused, watch(model):
            model(x)
        assert "set_attn_implementation" in str(refused.value)
        with watch(model) as trace, torch.compiler.set_stance("force_eager"):
            out = model(x)
        assert len(trace) == 1
        torch.testing.assert_close(out, model(x))
    torch._dynamo.reset()
    inner = Stack(WrittenAttention()).eval()
    around = torch.compile(inner, backend="eager")
    with (
        pytest.raises(UncapturedAttentionError, match="set_stance"),
        watch(inner),
    ):  # and not what was compiled
        around(x)


class Windowed(nn.Module):
    """FlexAttention whose score function alone hides keys."""

    def forward(self, x):
        return flex_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: torch.where(q - k < 3, s, -torch.inf)
        )


def check_keys_that_a_score_function_hides_are_in_the_mask(x):
    model, x = Windowed(), torch.randn(2, 2, 16, 8)
    with warnings.catch_warnings(), torch.no_grad(), watch(model) as trace:
        warnings.simplefilter("ignore")
        out = model(x)
    found = trace.map()
    at = torch.arange(16)
    assert torch.equal(found.visible, (at[:, None] - at < 3).expand(2, 16, 16))
    torch.testing.assert_close(found.weights[:, 0] @ x, out)


class Flexible(nn.Module):
    """FlexAttention with a learned slope and a causal block mask."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")

    def forward(self, x):
        return flex_attention(
            x,
            x,
            x,
            score_mod=lambda s, b, h, q, k: s + self.slope[h] * (q - k),
            block_mask=self.mask,
        )


def check_flex_attention_asks_its_score_function_again(x):
    model, x = Flexible(), torch.randn(2, 2, 16, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain = model(x)
        with watch(model) as trace:
            out = model(x)
        with (
            pytest.raises(NotImplementedError, match="FlexAttention"),
            watch(model, edit=lambda call, weights: weights),
        ):
            model(x)
        with watch(model, each=lambda call: call.route) as taken:
            model(x)
    assert torch.equal(out, plain) and trace.calls[0].route is Route.FLEX
    assert taken.results == [Route.FLEX]
    torch.testing.assert_close(trace.map().weights[:, 0] @ x, out)
    rows = torch.tensor([[9, 3]] * 2)
    block = trace.block(rows, torch.arange(4).repeat(2, 1))
    torch.testing.assert_close(block.weights, trace.map().weights[..., [9, 3], :4])
    assert trace.calls[0].causal


def check_a_supervised_step_compiles_as_one_graph(x):
    torch._dynamo.reset()
    sizes = VLBertSizes(9, 16, 2, 2, 16, positions=32, dropout=0.0)
    model = VLBert(sizes, PrecomputedRegionEncoder(4), ClassificationHead(16, 3)).double().eval()
    wanted = torch.zeros(2, 1, 1, 6, 5, dtype=torch.float64)
    wanted[0, ..., 1, 2] = wanted[0, ..., 4, 0] = wanted[1, ..., 2, 3] = 1
    tokens = torch.randint(5, 9, (2, 6))
    batch = Batch(
        ids=("a", "b"),
        tokens=tokens,
        token_mask=tokens > 0,
        geometry=PixelGeometry.identity(2, (8, 8)),
        boxes=torch.tensor([0.0, 0, 4, 4]).expand(2, 5, 4),
        features=torch.randn(2, 5, 4, dtype=torch.float64),
        region_mask=torch.tensor([[True] * 5, [True] * 4 + [False]]),
        target=AttentionMap(wanted, regions(5), words(6), kind=Kind.AMOUNT),
    )
    ready, counter = grounding_targets(batch.target), CompileCounterWithBackend("aot_eager")

    def step():
        output = model(batch)
        losses = direct_supervision(output.trace.log_block, ready, words=output.features.words)
        return output.prediction.square().sum() + sum(one.mean() for one in losses.values())

    found = []
    for run in (step, torch.compile(step, backend=counter, fullgraph=True)):
        model.zero_grad()
        run().backward()
        found.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert counter.frame_count == 1
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def check_a_compiled_model_learns_from_what_is_seen_in_one_graph(x):
    torch._dynamo.reset()
    model = FusedAttention().double()
    x, counter = x.double(), CompileCounterWithBackend("aot_eager")
    some = torch.tensor([[0, 2]] * len(x))
    compiled, found = torch.compile(model, backend=counter, fullgraph=True), []
    asked = torch.amp.is_autocast_available
    torch.amp.is_autocast_available = None  # PyTorch 2.11 breaks a graph at this question
    try:
        for run in (model, compiled):
            model.zero_grad()
            with watch(model) as trace:
                out = run(x)
            rows = trace.log_block(some, some).weights
            (out.square().sum() - rows.sum()).backward()
            found.append([one.grad.clone() for one in model.parameters()])
    finally:
        torch.amp.is_autocast_available = asked
    assert counter.frame_count == 1
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def check_values_of_a_compiled_model_are_there_and_their_gradient_is_refused(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch(model) as direct:
        model(x)
    with watch(compiled) as trace:
        out = compiled(x)
    one, other = trace.calls[0], direct.calls[0]
    torch.testing.assert_close(one.value, other.value)
    torch.testing.assert_close(one.output, other.output)
    assert trace.calls[0].value is one.value
    for given in (one.value, one.output):
        with pytest.raises(RuntimeError, match="without gradient"):
            (out.sum() + given.sum()).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"torch\.compile"):
            torch.autograd.grad(given.sum(), list(model.parameters()), allow_unused=True)
    model.zero_grad()
    (out.sum() + one.value.detach().sum() + one.weights().square().sum()).backward()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with watch(model) as direct:
        out = model(x)
    (out.sum() + direct.calls[0].weights().square().sum()).backward()
    for made, wanted in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(made, wanted.grad)


def check_a_compiled_model_whose_queries_do_not_learn_keeps_the_gradient_of_its_values(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention())
    model.layers[0].query.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch(compiled) as trace:
        compiled(x)
    trace.calls[0].value.square().sum().backward()
    assert model.layers[0].value.weight.grad.any()


def check_values_refuse_a_gradient_however_they_are_looked_at_first(x):
    for quiet in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        compiled = torch.compile(Stack(FusedAttention()), backend="aot_eager")
        with watch(compiled) as trace:
            compiled(x)
            with quiet():
                assert len(trace) == 1
        with pytest.raises(RuntimeError, match="without gradient"):
            trace.calls[0].value.sum().backward()


def check_values_that_learn_nothing_are_as_they_are(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention())
    model.layers[0].value.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for run in (model, compiled):
        model.zero_grad()
        with watch(run) as trace:
            run(x)
        call = trace.calls[0]
        assert not call.value.requires_grad
        (call.weights() @ call.value).square().sum().backward(retain_graph=True)
        found.append(model.layers[0].query.weight.grad.clone())
        refused = pytest.raises(RuntimeError, match="without gradient")
        with refused if run is compiled else nullcontext():
            call.output.sum().backward()
    torch.testing.assert_close(*found)


def check_functional_gradients_go_through_a_compiled_model_that_is_watched(x):
    torch._dynamo.reset()
    model = Stack(FusedAttention())
    compiled = torch.compile(model, backend="eager")
    weights = dict(model.named_parameters())

    def loss(weights, run):
        with watch(run) as trace:
            out = torch.func.functional_call(run, weights, (x,))
        return out.square().sum() + trace.calls[0].weights().square().sum()

    ours = torch.func.grad(lambda given: loss(given, model))(weights)
    named = {f"_orig_mod.{name}": one for name, one in weights.items()}
    theirs = torch.func.grad(lambda given: loss(given, compiled))(named)
    for name, one in ours.items():
        torch.testing.assert_close(theirs[f"_orig_mod.{name}"], one)


def check_gradients_ask_for_a_model_that_is_not_compiled(x):
    torch._dynamo.reset()
    model = torch.compile(Stack(FusedAttention()), backend="aot_eager")
    with watch(model) as trace:
        target = model(x).sum()
    with pytest.raises(ValueError, match=r"torch\.compile"):
        gradient_attention(trace, target)


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            torch.manual_seed(1)
            check(torch.randn(2, 6, 16))
            print(name)
