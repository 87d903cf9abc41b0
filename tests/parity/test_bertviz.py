"""The pages of BertViz hold the numbers that `watch` has seen, from either side of the bridge."""

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from overt import AttentionMap, watch
from overt.show import to_bertviz

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


def run(model: nn.Module, **more: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 11)[None], **more)


def shown(view: Any, **arguments: Any) -> torch.Tensor:
    """The weights (l h q k) that a page draws, read out of its script."""
    page = str(view(html_action="return", **arguments).data)
    found = re.search(r"^\s*(?:const|let|var) params = (\{.*\});? *(?://.*)?$", page, re.MULTILINE)
    assert found, page[-3000:]
    (drawn,) = json.loads(found[1])["attention"]
    return torch.tensor(drawn["attn"], dtype=torch.float64)


@pytest.fixture(scope="module")
def maps(bert: nn.Module) -> AttentionMap:
    with watch(bert) as seen:
        run(bert)
    assert {call.route.name for call in seen} == {"SDPA"}, "what BertViz cannot look into"
    return seen.map()


@pytest.mark.parametrize("name", ["head_view", "model_view"])
def test_a_page_from_eager_weights_draws_what_was_seen_of_the_fused_model(
    name: str, bert: nn.Module, maps: AttentionMap
) -> None:
    bert.set_attn_implementation("eager")
    theirs = run(bert, output_attentions=True).attentions
    bert.set_attn_implementation("sdpa")
    drawn = shown(getattr(bertviz, name), attention=theirs, tokens=WORDS)
    torch.testing.assert_close(drawn, maps.weights[0], atol=1e-12, rtol=0)
    assert drawn.max() > 0.5, "an even map would show nothing"


@pytest.mark.parametrize("name", ["head_view", "model_view"])
def test_a_page_from_our_maps_draws_the_same(name: str, maps: AttentionMap) -> None:
    drawn = shown(getattr(bertviz, name), **to_bertviz(maps, WORDS, WORDS))
    torch.testing.assert_close(drawn, maps.weights[0], atol=1e-6, rtol=0)
