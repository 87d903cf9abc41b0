"""A supervised block next to a fused kernel saves little additional memory."""

import pytest
import torch

from overt.attention import Layout, Span
from overt.capture import watch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LENGTH, LAYERS = 1024, 12
LAYOUT = Layout(
    (Span("text", (64,), slice(0, 64)), Span("image", (960,), slice(64, LENGTH))), LENGTH
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=100,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertModel(config, add_pooling_layer=False).train()


def count_saved_bytes(loss):
    """Count the bytes saved for the backward pass, each storage once."""
    kept, tensors = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    value.backward()
    return sum(kept.values())


@pytest.mark.long
def test_a_supervised_row_block_saves_at_most_5_percent_more(model):
    tokens = torch.arange(LENGTH)[None] % 100
    rows = torch.arange(8)[None]

    def plain():
        return model(tokens)[0].square().mean()

    def supervised():
        with watch(model, layout=LAYOUT) as trace:
            out = model(tokens)[0].square().mean()
        return out - trace.log_block("text", "image", rows=rows).log_weights.mean()

    def eager():
        model.set_attn_implementation("eager")
        out = model(tokens, output_attentions=True)
        model.set_attn_implementation("sdpa")
        blocks = [one[:, :, :8, 64:] for one in out.attentions]
        logs = [(one / one.sum(-1, keepdim=True)).log().mean() for one in blocks]
        return out[0].square().mean() - torch.stack(logs).mean()

    base = count_saved_bytes(plain)
    ours, theirs = count_saved_bytes(supervised) / base, count_saved_bytes(eager) / base
    print(f"saved bytes relative to the plain model: rows {ours:.3f}, eager weights {theirs:.2f}")
    assert ours <= 1.05
    assert theirs > 2.5
