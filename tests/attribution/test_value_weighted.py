"""Value-weighted attention: norms, output projections, value zeroing."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Kind, words
from overt.attribution import rollout
from overt.attribution.value_weighted import (
    find_output_projection,
    output_projection,
    summed_value_norms,
    value_norms,
    value_zeroing,
)
from overt.capture.session import watch
from tests.capture.encoder import Block, Encoder, inputs, padding, seen_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def slow_vectors(model: Encoder, x: Tensor) -> Tensor:
    """Compute alpha_ij f(x_j) of the first block per head and pair (Kobayashi, eq. 4)."""
    block = model.blocks[0]
    model.written()(x)
    weights = block.attention.kept.detach()
    b, h, n, _ = weights.shape
    value = block.attention.v(block.first(x)).detach()
    d = x.shape[-1] // h
    groups = block.attention.groups
    matrix = block.attention.out_proj.weight.detach()
    found = torch.zeros(b, h, n, n, x.shape[-1]).double()
    for s in range(b):
        for head in range(h):
            group = head // (h // groups)
            for j in range(n):
                sent = (
                    matrix[:, head * d : (head + 1) * d] @ value[s, j, group * d : (group + 1) * d]
                )
                for i in range(n):
                    found[s, head, i, j] = weights[s, head, i, j] * sent
    return found


@pytest.mark.parametrize("groups", [4, 2])
def test_value_norms_agree_with_the_slow_reference(groups: int) -> None:
    model, x = Encoder(groups=groups), inputs()
    seen, _ = seen_of(model, x)
    each, summed = value_norms(seen).check(), summed_value_norms(seen).check()
    vectors = slow_vectors(model, x)
    torch.testing.assert_close(each.values[:, 0], vectors.norm(dim=-1), **EXACT)
    torch.testing.assert_close(
        summed.values[:, 0, 0], vectors.sum(dim=1).norm(dim=-1), rtol=1e-9, atol=1e-12
    )
    assert each.kind is Kind.AMOUNT and each.values.shape == (2, 3, 4, 7, 7)
    assert summed.values.shape == (2, 3, 1, 7, 7)


def test_value_norms_support_rows_masks_and_gradients() -> None:
    model = Encoder()
    seen, _ = seen_of(model, inputs(), padding())
    rows = torch.tensor([[6, 2], [1, -1]])
    for make in (value_norms, summed_value_norms):
        whole, found = make(seen).check(), make(seen, rows).check()
        torch.testing.assert_close(found.values[0], whole.values[0][..., [6, 2], :], **EXACT)
        assert not found.values[1][..., 1, :].any()
        assert not found.visible[1, 0, :2].any()
        (gradient,) = torch.autograd.grad(
            found.values.sum(), model.blocks[1].attention.v.weight, retain_graph=True
        )
        assert gradient.isfinite().all() and gradient.any()


def test_value_norms_without_a_projection_warn() -> None:
    trace, _ = seen_of(Encoder(), inputs())
    with pytest.warns(UserWarning, match=r"'blocks.0.attention'.*norms"):
        found = value_norms(trace, project=lambda call: None)
    norms = trace.calls[0].value.norm(dim=-1)
    torch.testing.assert_close(found.values[:, 0], trace.calls[0].weights() * norms[:, :, None])
    with pytest.raises(ValueError, match=r"heads.*summed"):
        summed_value_norms(trace, project=lambda call: None)
    with pytest.raises(ValueError, match=r"\(2, 3\).* 4 heads"):
        value_norms(trace, project=lambda call: torch.ones(2, 3).double())


@pytest.mark.parametrize(("groups", "heads"), [(4, [0]), (2, [0, 3])])
def test_selected_heads_raise(groups: int, heads: list[int]) -> None:
    """Two heads of shared value groups would count as two groups."""
    seen, _ = seen_of(Encoder(groups=groups), inputs())
    with pytest.raises(ValueError, match=r"blocks\.0"):
        value_norms(seen.heads(heads))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "distilbert"])
def test_output_projection_is_found_in_common_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    made = {
        "bert": lambda: transformers.BertModel(
            transformers.BertConfig(vocab_size=9, intermediate_size=8, **small)
        ),
        "gpt2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=9, n_embd=12, n_layer=2, n_head=3)
        ),
        "llama": lambda: transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=9, intermediate_size=8, num_key_value_heads=1, head_dim=4, **small
            )
        ),
        "vit": lambda: transformers.ViTModel(
            transformers.ViTConfig(image_size=4, patch_size=2, intermediate_size=8, **small)
        ),
        "distilbert": lambda: transformers.DistilBertModel(
            transformers.DistilBertConfig(vocab_size=9, dim=12, hidden_dim=8, n_layers=2, n_heads=3)
        ),
    }
    model = made[name]().eval()
    given = torch.rand(1, 3, 4, 4) if name == "vit" else torch.tensor([[1, 2, 3, 4]])
    with watch(model) as trace:
        model(given)
    wanted = {
        "bert": "encoder.layer.0.attention.output.dense",
        "gpt2": "h.0.attn.c_proj",
        "llama": "layers.0.self_attn.o_proj",
        "distilbert": "transformer.layer.0.attention.out_lin",
    }
    found = find_output_projection(model)(trace.calls[0])
    assert found is not None and found.shape == (12, 12)
    if name in wanted:
        weight = model.get_submodule(wanted[name]).weight
        torch.testing.assert_close(found, weight.mT if name == "gpt2" else weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value_norms(trace, project=find_output_projection(model)).check()
    if name in wanted:
        assert (output_projection(trace.calls[0]) is None) == (name == "bert")


def slow_zeroing(block: Block, x: Tensor, allowed: Tensor | None) -> Tensor:
    """Set the values to zero position by position with a hook on the value layer."""
    whole = block(x, allowed)
    found = torch.zeros(x.shape[0], x.shape[1], x.shape[1]).double()
    for j in range(x.shape[1]):

        def zero(module: nn.Module, given: object, output: Tensor, j: int = j) -> Tensor:
            output = output.clone()
            output[:, j] = 0
            return output

        handle = block.attention.v.register_forward_hook(zero)
        without = block(x, allowed)
        handle.remove()
        for s in range(x.shape[0]):
            for i in range(x.shape[1]):
                one, other = whole[s, i], without[s, i]
                found[s, i, j] = 1 - one @ other / (one.norm() * other.norm())
    return found


@pytest.mark.parametrize("kind", ["plain", "grouped", "causal", "masked", "written"])
def test_value_zeroing_agrees_with_hooks_on_the_values(kind: str) -> None:
    model = Encoder(groups=2 if kind == "grouped" else 4, causal=kind == "causal")
    if kind == "written":
        model.written()
    x, allowed = inputs(), padding() if kind == "masked" else None
    with torch.no_grad():
        found = value_zeroing(lambda: model(x, allowed), model.blocks[1]).check()
        inner = model.blocks[0](x, allowed)
        expected = slow_zeroing(model.blocks[1], inner, allowed)
    torch.testing.assert_close(found.values[:, 0, 0], expected, rtol=1e-9, atol=1e-14)
    assert found.kind is Kind.AMOUNT and found.normalize().check().kind is Kind.PROBABILITY
    assert not model.blocks[1]._forward_hooks and not model.blocks[1].attention._forward_hooks


@pytest.mark.newer("transformers>=5")
def test_value_zeroing_of_a_hugging_face_decoder() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=12,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    model = transformers.LlamaModel(config).double().eval()
    ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
    block = model.layers[-1]
    whole: list[Tensor] = []
    handle = block.register_forward_hook(lambda m, i, out: whole.append(out))
    with torch.no_grad():
        found = value_zeroing(lambda: model(ids, use_cache=False), block).check()
        whole.clear()
        model(ids, use_cache=False)
        for j in range(5):
            at = torch.tensor([j])
            zero = block.self_attn.v_proj.register_forward_hook(
                lambda m, i, out, at=at: out.index_fill(1, at, 0.0)
            )
            model(ids, use_cache=False)
            zero.remove()
    handle.remove()
    full, *others = whole
    expected = [1 - torch.cosine_similarity(full, one, dim=-1) for one in others]
    torch.testing.assert_close(found.values[:, 0, 0], torch.stack(expected, dim=-1))
    with pytest.raises(ValueError, match="use_cache=False"):
        value_zeroing(lambda: model(ids), block)


def test_rollout_of_value_zeroing_maps() -> None:
    model, x = Encoder(), inputs()
    layout = words(7)
    with torch.no_grad():
        layers = [
            value_zeroing(lambda: model(x), block, layout=layout).normalize()
            for block in model.blocks
        ]
    stacked = AttentionMap(torch.cat([one.values for one in layers], dim=1), layout, layout)
    assert rollout(stacked, residual=False).values.shape == (2, 3, 1, 7, 7)


def test_value_zeroing_has_a_gradient() -> None:
    model, x = Encoder(layers=1), inputs(n=3)
    found = value_zeroing(lambda: model(x), model.blocks[0])
    found.values.sum().backward()
    assert model.blocks[0].attention.v.weight.grad.any()


def test_unsupported_blocks_raise() -> None:
    model, x = Encoder(), inputs()
    with pytest.raises(ValueError, match="ran 0 times"):
        value_zeroing(lambda: None, model.blocks[0])
    with pytest.raises(ValueError, match="ran 2 times"):
        value_zeroing(lambda: (model(x), model(x)), model.blocks[0])
    with pytest.raises(ValueError, match=r"\(b, n, d\)"):
        value_zeroing(lambda: model(x), model.head)

    class Noisy(Block):
        def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
            return super().forward(x, allowed) + torch.randn_like(x)

    noisy = Noisy(16, 4, 4, False).double()
    with pytest.raises(ValueError, match=r"Noisy.*model\.eval"):
        value_zeroing(lambda: noisy(x), noisy)
    twice = nn.Sequential(*model.blocks[:2])
    with pytest.raises(ValueError, match="has 2 self"):
        value_zeroing(lambda: twice(x), twice)
    assert not model.blocks[0]._forward_hooks


def test_reordered_heads_raise() -> None:
    model = Encoder()
    with watch(model) as trace:
        model(inputs())
    order = list(range(trace.calls[0].shape[1]))[::-1]
    with pytest.raises(ValueError, match=r"blocks\.0"):
        value_norms(trace.heads(order))
