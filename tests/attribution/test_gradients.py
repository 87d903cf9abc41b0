"""Attention gradients and relevance: parity with eager attention, rows, dtypes, errors."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overt.attention import Kind, words
from overt.attribution.gradients import attention_gradients, gradient_attention, relevance
from overt.capture.session import watch
from tests.capture.encoder import Encoder, inputs, padding, seen_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MODELS = {
    "plain": Encoder,
    "causal": lambda: Encoder(causal=True),
    "grouped": lambda: Encoder(groups=2),
}


def eager_gradients(
    model: Encoder, x: Tensor, allowed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute weights and their gradients by autograd on eager attention."""
    model.written()(x, allowed)[:, 1].sum().backward()
    maps = model.maps()
    model.zero_grad()
    return [one.detach() for one in maps], [one.grad for one in maps]


def slow_relevance(weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Compute Chefer et al. 2021, equations 5 and 6, from the first layer on."""
    b, _, n, _ = weights[0].shape
    found = torch.eye(n).double().expand(b, n, n)
    for layer, gradient in zip(weights, gradients, strict=True):
        found = found + (gradient * layer).clamp(min=0).mean(dim=1) @ found
    return found


@pytest.mark.parametrize(
    ("name", "masked"),
    [("plain", False), ("plain", True), ("causal", False), ("grouped", False), ("grouped", True)],
)
def test_gradients_equal_those_of_eager_attention(name: str, masked: bool) -> None:
    model, x = MODELS[name](), inputs()
    allowed = padding() if masked else None
    seen, scores = seen_of(model, x, allowed)
    found = attention_gradients(seen, scores[:, 1])
    product = gradient_attention(seen, scores[:, 1]).check()
    relevant = relevance(seen, scores[:, 1], chunk=3).check()
    assert all(one.grad is None for one in model.parameters())
    weights, gradients = eager_gradients(model, x, allowed)
    for one, layer, gradient in zip(found, weights, gradients, strict=True):
        seeing = layer > 0  # a masked weight has no gradient in eager attention with a mask of -inf
        torch.testing.assert_close(one() * seeing, gradient * seeing, **EXACT)
    expected = torch.stack([w * g for w, g in zip(weights, gradients, strict=True)], dim=1)
    torch.testing.assert_close(product.values, expected, **EXACT)
    torch.testing.assert_close(
        relevant.values[:, 0, 0], slow_relevance(weights, gradients), **EXACT
    )
    assert (product.kind, relevant.kind) == (Kind.SIGNED, Kind.AMOUNT)


@pytest.mark.parametrize("name", MODELS)
def test_selected_rows_equal_full_rows(name: str) -> None:
    seen, scores = seen_of(MODELS[name](), inputs())
    rows = torch.tensor([[6, 2], [1, -1]])
    for make in (gradient_attention, relevance):
        whole = make(seen, scores[:, 0])
        found = make(seen, scores[:, 0], rows).check()
        torch.testing.assert_close(found.values[0], whole.values[0][..., [6, 2], :], **EXACT)
        torch.testing.assert_close(found.values[1][..., 0, :], whole.values[1][..., 1, :], **EXACT)
        assert not found.values[1][..., 1, :].any() and not found.rows[1, 1]


def test_rows_may_be_given_by_span_name() -> None:
    seen, scores = seen_of(Encoder(), inputs())
    named = seen.with_layout(words(6, "text") + words(1, "class"))
    found = relevance(named, scores[:, 2], "class")
    torch.testing.assert_close(
        found.values, relevance(seen, scores[:, 2]).values[..., 6:, :], **EXACT
    )
    assert found.block("class", "text").values.shape == (2, 1, 1, 1, 6)


@pytest.mark.parametrize("written", [False, True])
def test_result_has_a_gradient_with_create_graph(written: bool) -> None:
    model, x = Encoder(layers=2), inputs(n=4)
    if written:
        model.written()

    def value() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            seen, scores = seen_of(model, x)
            found = relevance(seen, scores[:, 1], create_graph=True)
            return found.values.square().sum()

    weight = model.blocks[0].attention.v.weight
    (gradient,) = torch.autograd.grad(value(), weight)
    with torch.no_grad():
        step = 1e-6
        weight[2, 3] += step
    above = value().detach()
    with torch.no_grad():
        weight[2, 3] -= 2 * step
    below = value().detach()
    torch.testing.assert_close(gradient[2, 3], (above - below) / (2 * step), rtol=1e-5, atol=1e-7)


def test_result_has_no_gradient_without_create_graph() -> None:
    seen, scores = seen_of(Encoder(), inputs())
    assert not relevance(seen, scores[:, 1]).values.requires_grad
    assert not gradient_attention(seen, scores[:, 1]).values.requires_grad
    scores.sum().backward()  # the graph still exists


def test_autocast_does_not_change_the_result() -> None:
    seen, scores = seen_of(Encoder().float(), inputs().float())
    for make in (relevance, gradient_attention):
        expected = make(seen, scores[:, 1]).values
        with torch.autocast("cpu", torch.bfloat16):
            found = make(seen, scores[:, 1]).values
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("written", [False, True])
def test_half_precision_is_multiplied_in_float32(written: bool) -> None:
    model = Encoder().bfloat16()
    seen, scores = seen_of(model.written() if written else model, inputs().bfloat16())
    for make in (relevance, gradient_attention):
        found = make(seen, scores[:, 1]).check()
        assert found.values.dtype == torch.float32


class Multi(nn.Module):
    """`nn.MultiheadAttention`, fused or with `need_weights=True`."""

    def __init__(self, need: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.need = need

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need)[0].sin().sum(dim=(1, 2))


def test_multihead_attention_with_and_without_weights_agrees() -> None:
    found = []
    x = inputs(n=5, width=8).requires_grad_()
    torch.manual_seed(0)
    model = Multi(need=False).double()
    for need in (False, True):
        model.need = need
        with watch(model) as trace:
            scores = model(x)
        found.append(gradient_attention(trace, scores).values)
    torch.testing.assert_close(*found, **EXACT)
    assert found[0].abs().max() > 1e-4


@pytest.mark.parametrize("way", ["sdpa", "eager", "overt"])
def test_relevance_of_a_hugging_face_decoder_with_grouped_heads(way: str) -> None:
    transformers = pytest.importorskip("transformers")
    from overt.capture import hf_interface

    hf_interface.register_interface()
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.randint(0, 20, (2, 6))
    out = model(ids, output_attentions=True, use_cache=False)
    for layer in out.attentions:
        layer.retain_grad()
    out.logits[:, -1, 3].sum().backward()
    weights = [layer.detach() for layer in out.attentions]
    gradients = [layer.grad for layer in out.attentions]
    model.set_attn_implementation(way)
    with watch(model) as trace:
        logits = model(ids, use_cache=False).logits
    found = relevance(trace, logits[:, -1, 3])
    expected = slow_relevance(weights, gradients)
    torch.testing.assert_close(found.values[:, 0, 0].double(), expected, rtol=1e-6, atol=1e-7)


def test_trace_without_a_gradient_raises() -> None:
    model, x = Encoder(), inputs()
    with torch.no_grad():
        seen, scores = seen_of(model, x)
    with pytest.raises(ValueError, match="no_grad"):
        relevance(seen, scores[:, 0])
    with pytest.raises(ValueError, match=r"without.*gradient"):
        relevance(seen, model(x).sum())


def test_target_of_another_forward_pass_and_selected_heads_raise() -> None:
    model, x = Encoder(), inputs()
    seen, scores = seen_of(model, x)
    with pytest.raises(ValueError, match=r"blocks\.0"):
        relevance(seen, model(x).sum())
    with pytest.raises(ValueError, match=r"heads \[0\]"):
        relevance(seen.heads([0]), scores[:, 0])


class Windows(nn.Module):
    """Windowed attention with windows after the heads: (b, h, w, n, d)."""

    num_heads = 2

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, value)


def test_windowed_attention_has_gradients_per_window() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 5, 4, requires_grad=True)
    value, wanted = torch.randn(2, 2, 2, 3, 5, 4)
    model = Windows()
    with watch(model) as trace:
        target = (model(x, value) * wanted).sum()
    expected = (wanted @ value.mT).movedim(1, 2).flatten(0, 1)
    torch.testing.assert_close(attention_gradients(trace, target)[0](), expected)


class InPlaceKeys(nn.Module):
    """Attention whose keys are modified in place, as by some rotary embeddings."""

    def forward(self, x: Tensor) -> Tensor:
        key = x.clone()
        key[..., :2] *= 2
        return nn.functional.scaled_dot_product_attention(x, key, x)


def test_keys_modified_in_place_keep_the_gradient() -> None:
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    model = InPlaceKeys()
    with watch(model) as trace:
        target = model(x).sum()
    expected = x.detach().sum(dim=-1)[:, :, None].expand(2, 2, 5, 5)
    torch.testing.assert_close(attention_gradients(trace, target)[0](), expected)


def test_reordered_heads_raise() -> None:
    model = Encoder()
    with watch(model) as trace:
        target = model(inputs()).sum()
    order = list(range(trace.calls[0].shape[1]))[::-1]
    with pytest.raises(ValueError, match=r"heads \["):
        attention_gradients(trace.heads(order), target)


def test_target_with_several_scores_per_sample_raises() -> None:
    """The gradient of the sum over classes explains no class."""
    seen, scores = seen_of(Encoder(), inputs())
    for ask in (relevance, gradient_attention):
        with pytest.raises(ValueError, match=r"one score .*\(2, "):
            ask(seen, scores)
