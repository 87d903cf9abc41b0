"""BERT encoder: layers compared with Hugging Face, attention compared with `watch`."""

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from overt import watch
from overt.capture.trace import AttentionTrace
from overt.errors import CorruptFileError, UserError
from overt.nn.vlbert.encoder import BertEncoder, layer_weights, read_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=40, initializer_range=0.3,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("bert")
    BertModel(config).save_pretrained(where, safe_serialization=True)
    return where


def make(folder: Path) -> tuple[BertEncoder, BertModel]:
    config, weights = read_bert(folder)
    ours = BertEncoder(2, 12, 3, 20, 0.1, config["layer_norm_eps"])
    ours.load_state_dict(layer_weights(weights, 2))
    theirs = BertModel.from_pretrained(folder, local_files_only=True)
    return ours.eval(), theirs.eval()


def test_states_and_attention_equal_those_of_bert(folder):
    ours, theirs = make(folder)
    theirs.set_attn_implementation("eager")
    x, present = torch.randn(2, 7, 12), torch.arange(7) < torch.tensor([[7], [5]])
    states, calls = ours(x, present)
    bias = torch.where(present, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    expected, weights = x, []
    for layer in theirs.encoder.layer:
        found = layer.attention(expected, bias, output_attentions=True)
        weights.append(found[1])
        expected = layer.output(layer.intermediate(found[0]), found[0])
    torch.testing.assert_close(states[present], expected[present], atol=1e-5, rtol=1e-5)
    found = AttentionTrace(calls).map().weights
    torch.testing.assert_close(found, torch.stack(weights, dim=1), atol=1e-6, rtol=1e-5)


def test_returned_calls_equal_those_of_watch(folder):
    ours, _ = make(folder)
    x, present = torch.randn(2, 7, 12), torch.arange(7) < torch.tensor([[7], [5]])
    with watch(ours) as trace:
        _, calls = ours(x, present)
    assert [call.name for call in calls] == list(trace.names)
    torch.testing.assert_close(AttentionTrace(calls).map().weights, trace.map().weights)
    assert torch.equal(AttentionTrace(calls).map().visible, trace.map().visible)


def test_key_weights_scale_attention_and_zero_hides_keys(folder):
    ours, _ = make(folder)
    x, present = torch.randn(1, 4, 12), torch.ones(1, 4, dtype=torch.bool)
    first = ours(x, present)[1][0].weights()
    kept = torch.tensor([[1.0, 0.5, 0.0, 1.0]])
    states, calls = ours(x, present, kept)
    expected = first * kept
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(calls[0].weights(), expected)
    same, _ = ours(x, present, torch.ones(1, 4))
    torch.testing.assert_close(same, ours(x, present)[0])
    assert not torch.allclose(states, same)


def test_returned_attention_is_before_dropout(folder):
    ours, _ = make(folder)
    x, present = torch.randn(1, 6, 12), torch.ones(1, 6, dtype=torch.bool)
    quiet = ours(x, present)[1][0].weights()
    ours.train()
    torch.testing.assert_close(ours(x, present)[1][0].weights(), quiet)


def test_checkpoint_with_a_prefix_is_read(folder, tmp_path):
    from overt import io

    config, weights = read_bert(folder)
    io.write_json(tmp_path / "config.json", config)
    prefixed = {f"bert.{name}": value for name, value in weights.items()}
    io.write_tensors(tmp_path / "model.safetensors", prefixed)
    again = read_bert(tmp_path)[1]
    assert again.keys() == weights.keys()


def test_models_other_than_bert_raise(folder, tmp_path):
    with pytest.raises(UserError, match=r"config.*missing"):
        read_bert(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "relu"}, "gelu.*absolute"),
        ({"position_embedding_type": "relative_key"}, "gelu.*absolute"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            read_bert(tmp_path)
    _, weights = read_bert(folder)
    with pytest.raises(CorruptFileError, match=r"encoder\.layer\.2"):
        layer_weights(weights, 3)
    with pytest.raises(ValueError, match="not divisible"):
        BertEncoder(1, 10, 3, 8, 0.0, 1e-12)
