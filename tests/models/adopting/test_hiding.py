"""To remove is to hide: the model answers as if its own mask had hidden those keys."""

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Layout, Span, words
from overt.capture.call import Call, Projected, Route
from overt.capture.edits import Bias
from overt.capture.watching import watch
from overt.models.adopting.adopted import adopt
from overt.models.adopting.hiding import hidden_in, hiding, kept_keys
from overt.testing import toy_batch
from tests.models import tiny


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_hidden_words_are_as_words_that_the_model_was_told_to_leave_out(how: str) -> None:
    """BERT's own attention mask is the other way to hide keys from every query."""
    batch, model = toy_batch(), tiny.adopted_bert(how).eval()
    keep = torch.ones(4, 6)
    keep[0, 2], keep[1, 1:3], keep[3, 0] = 0, 0, 0
    found = model.decide(model.encode(batch), {"text": keep})
    mask = batch.token_mask.long() * keep.long()
    expected = model.model(input_ids=batch.tokens, attention_mask=mask).logits
    torch.testing.assert_close(found.prediction, expected, rtol=1e-4, atol=1e-5)
    looked = found.looking_at("text")
    assert not looked.weights[0, ..., 2].any() and looked.weights[0, ..., 1].all()
    assert not looked.visible[0, 0, 2]


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_without_anything_left_each_query_sees_itself(how: str) -> None:
    """All words gone, padding among the keys: finite on both routes, and no padding is read."""
    batch, model = toy_batch(), tiny.adopted_bert(how)
    found = model.eval().decide(model.encode(batch), {"text": torch.zeros(4, 6)})
    alone = model.model(input_ids=batch.tokens[:, :1])  # the first token has only itself to see
    torch.testing.assert_close(found.prediction, alone.logits, rtol=1e-4, atol=1e-5)
    (found.prediction.sum() + found.looking_at("text").weights.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_share_multiplies_weights_before_they_are_normalised() -> None:
    torch.manual_seed(0)
    attend = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    rows = torch.randn(2, 5, 8)
    share = torch.rand(2, 5)
    edit, met = hiding(share, lambda call: True)
    with watch(attend, edit=edit) as seen:
        attend(rows, rows, rows, need_weights=False)
    _, plain = attend(rows, rows, rows, average_attn_weights=False)
    expected = plain * share[:, None, None]
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(seen.map().weights[:, 0], expected)
    assert met == [""] and isinstance(edit, Bias)


def test_a_causal_query_that_lost_all_it_could_see_sees_itself() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    rows = torch.randn(1, 4, 8, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    kept = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    edit, _ = hiding(kept, lambda call: True)
    with watch(layer, edit=edit) as seen:
        out = layer(rows, src_mask=mask, is_causal=True)
    weights = seen.map().weights[0, 0, 0]
    expected = torch.eye(4)[:3]
    torch.testing.assert_close(weights[:3], expected)
    assert not weights[3, :2].any()
    (gradient,) = torch.autograd.grad(out[0, 2:].square().sum(), rows)
    assert not gradient[0, :2].any()  # what was removed is read by nobody else


def test_with_a_cache_a_query_finds_itself_at_the_end_of_the_keys() -> None:
    edit, _ = hiding(torch.zeros(1, 4), lambda call: True)
    source = Projected(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 4, 8), 1.0)
    added = edit.make(Call("layer", nn.Identity(), source, Route.SDPA, cross=False))
    assert added is not None
    assert (added == 0).nonzero()[:, 2:].tolist() == [[0, 2], [1, 3]]


def test_what_is_removed_is_hidden_in_layers_that_are_not_shown() -> None:
    batch, mask = toy_batch(), {"image": torch.arange(16).remainder(2).expand(4, -1).float()}
    whole, part = tiny.adopted_vit().eval(), tiny.adopted_vit(layers=[0]).eval()
    one, two = (model.decide(model.encode(batch), mask) for model in (whole, part))
    torch.testing.assert_close(one.prediction, two.prediction)


def test_cross_attention_without_keys_takes_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    target, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    layout = (words(3, "objects"), words(5, "image"))
    model = adopt(layer, lambda m, b: m(*b).mean(dim=1), layout)
    found = model.decide(model.encode((target, memory)), {"image": torch.zeros(2, 5)})
    other = model.decide(model.encode((target, memory + 1)), {"image": torch.zeros(2, 5)})
    torch.testing.assert_close(found.prediction, other.prediction)
    assert found.prediction.isfinite().all() and not found.attention[0].weights.any()


class Crossing(nn.Module):
    """Cross-attention written out."""

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return (query @ key.mT).softmax(dim=-1) @ key

    def __init__(self) -> None:
        super().__init__()
        self.cross = self.Attention()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.cross(query, key).mean(dim=1)


def test_written_cross_attention_without_keys_takes_nothing() -> None:
    pair = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    model = adopt(Crossing(), lambda m, b: m(*b), (words(3, "objects"), words(5, "image")))
    found = model.decide(model.encode(pair), {"image": torch.zeros(2, 5)})
    assert not found.prediction.any()


def test_a_decoder_that_looks_at_itself_keeps_its_keys() -> None:
    """Queries and keys are as many; the decoder's own words are another axis than the image's."""
    torch.manual_seed(0)
    layout = words(4, "said"), words(4, "image")
    pair = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    kept = torch.tensor([[1.0, 0.0, 1.0, 0.0]]).expand(2, -1)
    both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).eval()
    edit, met = hiding(kept, hidden_in(layout))
    with watch(both, edit=edit):
        both(*pair)
    assert met == ["encoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    edit, met = hiding(kept, hidden_in(layout))
    with watch(layer, edit=edit) as seen:
        layer(*pair, tgt_mask=mask, tgt_is_causal=True)
    assert met == ["multihead_attn"]
    assert seen.map("self_attn").weights[0, 0, 0, 3].all()
    assert not seen.map("multihead_attn").weights[..., 1].any()


def test_masks_of_spans_become_one_factor_a_key() -> None:
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
    torch.testing.assert_close(kept_keys(layout, mask), expected)
    assert torch.equal(kept_keys(None, {"positions": mask["one"]}), mask["one"])
    with pytest.raises(ValueError, match="a mask of 3 positions over 'one', which has 2"):
        kept_keys(layout, {"one": mask["two"]})
    with pytest.raises(ValueError, match="no span 'image'"):
        kept_keys(layout, {"image": mask["two"]})


def test_the_gradient_of_a_mask_is_what_hiding_a_little_does() -> None:
    """Also of the first key, and whether or not other samples have more words."""
    layout = Layout((Span("text", (3,), torch.tensor([[0, 1, -1], [2, 1, 0]])),), 4)
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    mask = torch.ones(2, 3, requires_grad=True)
    (kept_keys(layout, {"text": mask}) * weights).sum().backward()
    assert mask.grad is not None
    assert mask.grad.tolist() == [[1.0, 2.0, 0.0], [7.0, 6.0, 5.0]]


def test_hiding_what_no_attention_looks_at_is_an_error() -> None:
    model = tiny.adopted_vit(reduce=lambda seen: seen.within(words(17)).map(-1))
    features = model.encode(toy_batch())
    shorter = type(features)(features.batch, words(9))
    with pytest.raises(ValueError, match="hiding them removes nothing"):
        model.decide(shorter, {"text": torch.zeros(4, 9)})


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, 2.0, float("inf")])
def test_a_mask_that_neither_keeps_nor_removes_is_refused(wrong: float) -> None:
    model = tiny.adopted_bert("sdpa").eval()
    keep = torch.ones(4, 6)
    keep[1, 2] = wrong
    with pytest.raises(ValueError, match="the mask over 'text' is 1 to keep and 0 to remove"):
        model.decide(model.encode(toy_batch()), {"text": keep})


def test_a_mask_of_other_samples_or_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    model = tiny.adopted_bert("sdpa").eval()
    features = model.encode(toy_batch())
    with pytest.raises(ValueError, match="a mask of 1 samples for a batch of 4"):
        model.decide(features, {"text": torch.ones(1, 6)})
    with pytest.raises(TypeError, match=r'such as {"image": keep}'):
        model.see(features, model.call, torch.ones(4, 6))  # type: ignore[arg-type]
