"""Masking keys in wrapped models: equal to the model's own attention mask."""

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Layout, Span, words
from overt.capture.call import Call, QKCall, Route
from overt.capture.edits import Bias
from overt.capture.session import watch
from overt.nn.wrappers.key_masking import call_filter, key_weights, mask_keys
from overt.nn.wrappers.wrapped_model import wrap
from overt.testing import toy_batch
from tests.nn import tiny


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_hidden_words_equal_words_in_the_attention_mask(how: str) -> None:
    """Compare with BERT's own attention mask."""
    batch, model = toy_batch(), tiny.wrapped_bert(how).eval()
    keep = torch.ones(4, 6)
    keep[0, 2], keep[1, 1:3], keep[3, 0] = 0, 0, 0
    found = model.decide(model.encode(batch), {"text": keep})
    mask = batch.token_mask.long() * keep.long()
    expected = model.model(input_ids=batch.tokens, attention_mask=mask).logits
    torch.testing.assert_close(found.prediction, expected, rtol=1e-4, atol=1e-5)
    looked = found.attention_to("text")
    assert not looked.weights[0, ..., 2].any() and looked.weights[0, ..., 1].all()
    assert not looked.visible[0, 0, 2]


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_queries_attend_to_themselves_when_all_keys_are_hidden(how: str) -> None:
    """All words are hidden and padding remains: results are finite and ignore the padding."""
    batch, model = toy_batch(), tiny.wrapped_bert(how)
    found = model.eval().decide(model.encode(batch), {"text": torch.zeros(4, 6)})
    alone = model.model(input_ids=batch.tokens[:, :1])  # the first token attends to itself only
    torch.testing.assert_close(found.prediction, alone.logits, rtol=1e-4, atol=1e-5)
    (found.prediction.sum() + found.attention_to("text").weights.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_fractional_mask_multiplies_weights_before_normalisation() -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    rows = torch.randn(2, 5, 8)
    share = torch.rand(2, 5)
    edit, met = mask_keys(share, lambda call: True)
    with watch(attend, edit=edit) as trace:
        attend(rows, rows, rows, need_weights=False)
    _, plain = attend(rows, rows, rows, average_attn_weights=False)
    expected = plain * share[:, None, None]
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(trace.map().weights[:, 0], expected)
    assert met == [""] and isinstance(edit, Bias)


def test_causal_query_without_visible_keys_attends_to_itself() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    rows = torch.randn(1, 4, 8, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    kept = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    edit, _ = mask_keys(kept, lambda call: True)
    with watch(layer, edit=edit) as trace:
        out = layer(rows, src_mask=mask, is_causal=True)
    weights = trace.map().weights[0, 0, 0]
    expected = torch.eye(4)[:3]
    torch.testing.assert_close(weights[:3], expected)
    assert not weights[3, :2].any()
    (gradient,) = torch.autograd.grad(out[0, 2:].square().sum(), rows)
    assert not gradient[0, :2].any()  # no other position depends on removed keys


def test_queries_with_a_cache_are_at_the_end_of_the_keys() -> None:
    edit, _ = mask_keys(torch.zeros(1, 4), lambda call: True)
    source = QKCall(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 4, 8), 1.0)
    added = edit.make(Call("layer", nn.Identity(), source, Route.SDPA, cross=False))
    assert added is not None
    assert (added == 0).nonzero()[:, 2:].tolist() == [[0, 2], [1, 3]]


def test_masked_keys_are_hidden_in_all_layers() -> None:
    batch, mask = toy_batch(), {"image": torch.arange(16).remainder(2).expand(4, -1).float()}
    whole, part = tiny.wrapped_vit().eval(), tiny.wrapped_vit(layers=[0]).eval()
    one, two = (model.decide(model.encode(batch), mask) for model in (whole, part))
    torch.testing.assert_close(one.prediction, two.prediction)


def test_cross_attention_with_all_keys_hidden_returns_zeros() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    target, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    layout = (words(3, "objects"), words(5, "image"))
    model = wrap(layer, lambda m, b: m(*b).mean(dim=1), layout)
    found = model.decide(model.encode((target, memory)), {"image": torch.zeros(2, 5)})
    other = model.decide(model.encode((target, memory + 1)), {"image": torch.zeros(2, 5)})
    torch.testing.assert_close(found.prediction, other.prediction)
    assert found.prediction.isfinite().all() and not found.attention[0].weights.any()


class ExplicitCrossAttention(nn.Module):
    """Cross-attention as explicit softmax."""

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return (query @ key.mT).softmax(dim=-1) @ key

    def __init__(self) -> None:
        super().__init__()
        self.cross = self.Attention()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.cross(query, key).mean(dim=1)


def test_explicit_cross_attention_with_all_keys_hidden_returns_zeros() -> None:
    pair = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    model = wrap(
        ExplicitCrossAttention(), lambda m, b: m(*b), (words(3, "objects"), words(5, "image"))
    )
    found = model.decide(model.encode(pair), {"image": torch.zeros(2, 5)})
    assert not found.prediction.any()


def test_decoder_self_attention_keeps_its_keys() -> None:
    """Queries and keys are equally many, but decoder words are a different axis than the image."""
    torch.manual_seed(0)
    layout = words(4, "caption"), words(4, "image")
    pair = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    kept = torch.tensor([[1.0, 0.0, 1.0, 0.0]]).expand(2, -1)
    both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).eval()
    edit, met = mask_keys(kept, call_filter(layout))
    with watch(both, edit=edit):
        both(*pair)
    assert met == ["encoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    edit, met = mask_keys(kept, call_filter(layout))
    with watch(layer, edit=edit) as trace:
        layer(*pair, tgt_mask=mask, tgt_is_causal=True)
    assert met == ["multihead_attn"]
    assert trace.map("self_attn").weights[0, 0, 0, 3].all()
    assert not trace.map("multihead_attn").weights[..., 1].any()


def test_masks_of_spans_become_one_factor_per_key() -> None:
    spans = (
        Span("one", (2,), slice(0, 2)),
        Span("two", (3,), torch.tensor([[1, 3, -1], [4, 2, 0]])),
    )
    layout = Layout(spans, 5)
    mask = {
        "one": torch.tensor([[1.0, 0.5], [1.0, 0.0]]),
        "two": torch.tensor([[0.7, 0.2, 0.0]] * 2),
    }
    expected = torch.tensor([[1.0, 0.5, 1.0, 0.2, 1.0], [0.0, 0.0, 0.2, 1.0, 0.7]])
    torch.testing.assert_close(key_weights(layout, mask), expected)
    assert torch.equal(key_weights(None, {"positions": mask["one"]}), mask["one"])
    with pytest.raises(ValueError, match=r"'one' has 3 .* 2"):
        key_weights(layout, {"one": mask["two"]})
    with pytest.raises(ValueError, match="no span 'image'"):
        key_weights(layout, {"image": mask["two"]})


def test_gradient_reaches_every_element_of_a_span_mask() -> None:
    """Including the first key, and for samples with fewer words than others."""
    layout = Layout((Span("text", (3,), torch.tensor([[0, 1, -1], [2, 1, 0]])),), 4)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    mask = torch.ones(2, 3, requires_grad=True)
    (key_weights(layout, {"text": mask}) * weights).sum().backward()
    assert mask.grad is not None
    assert mask.grad.tolist() == [[1.0, 2.0, 0.0], [7.0, 6.0, 5.0]]


def test_mask_without_effect_raises() -> None:
    model = tiny.wrapped_vit(reduce=lambda seen: seen.with_layout(words(17)).map(-1))
    features = model.encode(toy_batch())
    shorter = type(features)(features.batch, words(9))
    with pytest.raises(ValueError, match="no effect"):
        model.decide(shorter, {"text": torch.zeros(4, 9)})


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, 2.0, float("inf")])
def test_mask_values_outside_0_to_1_raise(wrong: float) -> None:
    model = tiny.wrapped_bert("sdpa").eval()
    keep = torch.ones(4, 6)
    keep[1, 2] = wrong
    with pytest.raises(ValueError, match=r"'text' .* 0 to 1"):
        model.decide(model.encode(toy_batch()), {"text": keep})


def test_mask_of_another_batch_size_or_type_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    model = tiny.wrapped_bert("sdpa").eval()
    features = model.encode(toy_batch())
    with pytest.raises(ValueError, match=r"1 samples.* 4"):
        model.decide(features, {"text": torch.ones(1, 6)})
    with pytest.raises(TypeError, match="got Tensor"):
        model.run_traced(features, model.call, torch.ones(4, 6))  # type: ignore[arg-type]
