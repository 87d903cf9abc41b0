"""BertViz pages show the weights captured by `watch`, from eager weights and from our maps."""

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from overt import AttentionMap, watch
from overt.viz import to_bertviz

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed: `make .venv/.apart`")

WORDS = ["[CLS]", "a", "dog", "ran", "home", "[SEP]"]


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        vocab_size=50, initializer_range=0.6,
    )  # fmt: skip
    return transformers.BertModel(config).double().eval()


def run_model(model: nn.Module, **more: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 11)[None], **more)


def drawn_weights(view: Any, **arguments: Any) -> torch.Tensor:
    """Read the weights (l h q k) of a page from its script."""
    page = str(view(html_action="return", **arguments).data)
    found = re.search(r"^\s*(?:const|let|var) params = (\{.*\});? *(?://.*)?$", page, re.MULTILINE)
    assert found, page[-3000:]
    (drawn,) = json.loads(found[1])["attention"]
    return torch.tensor(drawn["attn"], dtype=torch.float64)


@pytest.fixture(scope="module")
def maps(bert: nn.Module) -> AttentionMap:
    with watch(bert) as trace:
        run_model(bert)
    assert {call.route.name for call in trace} == {"SDPA"}, (
        "BertViz does not support fused attention"
    )
    return trace.map()


@pytest.mark.parametrize("name", ["head_view", "model_view"])
def test_a_page_of_eager_weights_equals_captured_fused_weights(
    name: str, bert: nn.Module, maps: AttentionMap
) -> None:
    bert.set_attn_implementation("eager")
    theirs = run_model(bert, output_attentions=True).attentions
    bert.set_attn_implementation("sdpa")
    drawn = drawn_weights(getattr(bertviz, name), attention=theirs, tokens=WORDS)
    torch.testing.assert_close(drawn, maps.weights[0], atol=1e-12, rtol=0)
    assert drawn.max() > 0.5, "a uniform map would not test this"


@pytest.mark.parametrize("name", ["head_view", "model_view"])
def test_a_page_of_our_maps_shows_the_same_weights(name: str, maps: AttentionMap) -> None:
    drawn = drawn_weights(getattr(bertviz, name), **to_bertviz(maps, WORDS, WORDS))
    torch.testing.assert_close(drawn, maps.weights[0], atol=1e-6, rtol=0)
