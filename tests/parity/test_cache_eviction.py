"""Scores of cached positions equal those of kvpress, from eager weights and from its own queries.

kvpress imports datasets and training libraries that its scores do not use, and patches the
attention of transformers. So its modules are loaded without its `__init__`, and only their scores
are called.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.nn.cache_eviction import mean_attention, observation_window, recent, score_cache
from overt.nn.cache_eviction.selection import keep_positions
from tests.nn.cache_eviction.decoders import eager_weights, make_decoder, make_prompt

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SPEC = importlib.util.find_spec("kvpress")
if SPEC is None:
    pytest.skip("kvpress is not installed: `make .venv/.apart`", allow_module_level=True)

MODELS = ["llama", "qwen2", "mistral without windows"]


@pytest.fixture(scope="module")
def presses() -> Iterator[ModuleType]:
    """The modules of kvpress by name, without the imports of the package itself."""
    before = {name for name in sys.modules if name.partition(".")[0] == "kvpress"}
    package = ModuleType("kvpress")
    package.__path__ = list(SPEC.submodule_search_locations or ())  # type: ignore[union-attr]
    if not before:
        sys.modules["kvpress"] = package
    found = ModuleType("presses")
    for name in ("observed_attention", "snapkv", "streaming_llm"):
        setattr(found, name, importlib.import_module(f"kvpress.presses.{name}_press"))
    yield found
    for name in list(sys.modules):
        if name.partition(".")[0] == "kvpress" and name not in before:
            del sys.modules[name]


def their_scores(press: Any, name: str, prompt: dict[str, Tensor], eager: bool) -> Tensor:
    """The scores (b l g k) of a press, from eager weights or from the inputs of the layers."""
    model = make_decoder(name)
    taken: list[tuple[nn.Module, dict[str, Any]]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: taken.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        # without a config, so that layers with a sliding window keep all keys, as kvpress expects
        cache = model(**prompt, past_key_values=transformers.DynamicCache()).past_key_values
    for hook in hooks:
        hook.remove()
    weights = eager_weights(name, prompt) if eager else [None] * len(taken)
    found = []
    for (module, kwargs), layer, attention in zip(taken, cache.layers, weights, strict=True):
        hidden = kwargs["hidden_states"]
        with torch.no_grad():
            scores = press.score(module, hidden, layer.keys, layer.values, attention, kwargs)
        found.append(scores)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", [*MODELS, "mistral"])
def test_mean_attention_equals_observed_attention(name: str, presses: Any) -> None:
    prompt = make_prompt(padding=(0, 0))
    ours = score_cache(make_decoder(name), mean_attention, **prompt)
    press = presses.observed_attention.ObservedAttentionPress()
    theirs = their_scores(press, name, prompt, eager=True)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (3, 1), (1, 3), (9, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_observation_window_equals_snapkv(
    name: str, window: int, kernel: int, eager: bool, presses: Any
) -> None:
    prompt = make_prompt(padding=(0, 0))
    rule = partial(observation_window, window=window, kernel=kernel)
    ours = score_cache(make_decoder(name), rule, **prompt)
    press = presses.snapkv.SnapKVPress(window_size=window, kernel_size=kernel)
    theirs = their_scores(press, name, prompt, eager)
    assert ours[..., -window:].isposinf().all()  # theirs exceed all others
    assert theirs[..., -window:].min() > theirs[..., :-window].max()
    torch.testing.assert_close(ours[..., :-window], theirs[..., :-window], atol=1e-6, rtol=1e-5)


def test_kept_positions_equal_those_of_streaming_llm(presses: Any) -> None:
    prompt = make_prompt(padding=(0, 0))
    press = presses.streaming_llm.StreamingLLMPress(compression_ratio=0.5, n_sink=2)
    theirs = their_scores(press, "llama", prompt, eager=False)
    scores = score_cache(make_decoder("llama"), recent, **prompt)
    everything = prompt["attention_mask"].bool()
    for layer in range(2):
        ours = keep_positions(scores[:, layer], everything, keep=6, first=2)
        kept = theirs[:, layer].nonzero()[:, -1].view(2, 2, 6)
        assert torch.equal(ours, kept)
