"""Scores agree with slow copies computed from the weights that eager models return."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import overt
from overt.capture import block_scores
from overt.nn.cache_eviction import (
    CachedAttention,
    ScoreRule,
    accumulated_attention,
    mean_attention,
    observation_window,
    random_scores,
    recent,
    score_cache,
)
from tests.nn.cache_eviction.decoders import eager_weights, make_decoder, make_prompt

pytest.importorskip("transformers")
WINDOW, KERNEL = 4, 3


def slow_sum(weights: Tensor, real: Tensor, at: int) -> float:
    """H2O: the column sum over real queries."""
    return sum(float(weights[q, at]) for q in range(len(real)) if real[q])


def slow_mean(weights: Tensor, real: Tensor, at: int) -> float:
    return slow_sum(weights, real, at) / (len(real) - at)


def slow_window(weights: Tensor, real: Tensor, at: int, pool: str = "avg") -> float:
    """SnapKV: the last queries, smoothed over neighbours before the window; zero outside."""
    n = len(real)
    if at >= n - WINDOW:
        return float("inf")
    queries = [q for q in range(n - WINDOW, n) if real[q]]
    found = []
    for k in range(at - KERNEL // 2, at + KERNEL // 2 + 1):
        inside = 0 <= k < n - WINDOW
        total = sum(float(weights[q, k]) for q in queries) / len(queries) if inside else 0.0
        found.append(total)
    return max(found) if pool == "max" else sum(found) / KERNEL


def slow_scores(
    slow: Callable[..., float], name: str, prompt: dict[str, Tensor], groups: int
) -> Tensor:
    """The mean over the query heads of a group, one number at a time."""
    mask = prompt["attention_mask"].bool()
    b, n = mask.shape
    layers = eager_weights(name, prompt)
    found = torch.zeros(b, len(layers), groups, n)
    for layer, weights in enumerate(layers):
        size = weights.shape[1] // groups
        for i in range(b):
            for g in range(groups):
                for at in range(n):
                    heads = [weights[i, h] for h in range(g * size, (g + 1) * size)]
                    each = [slow(one, mask[i], at) for one in heads]
                    found[i, layer, g, at] = sum(each) / size
    return found


RULES: dict[str, tuple[ScoreRule, Callable[..., float]]] = {
    "accumulated": (accumulated_attention, slow_sum),
    "mean": (mean_attention, slow_mean),
    "window": (partial(observation_window, window=WINDOW, kernel=KERNEL), slow_window),
    "window, largest": (
        partial(observation_window, window=WINDOW, kernel=KERNEL, pool=F.max_pool1d),
        partial(slow_window, pool="max"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mistral"])
def test_scores_equal_those_of_eager_weights(name: str, rule: str) -> None:
    prompt = make_prompt(padding=(0, 3))
    score, slow = RULES[rule]
    found = score_cache(make_decoder(name), score, **prompt)
    groups = 4 if name == "gpt2" else 2
    assert found.shape == (2, 2, groups, 12)
    expected = slow_scores(slow, name, prompt, groups)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_sample_shorter_than_the_window_counts_its_own_queries_only() -> None:
    prompt = make_prompt(padding=(0, 10))
    score, slow = RULES["window"]
    found = score_cache(make_decoder("llama"), score, **prompt)
    expected = slow_scores(slow, "llama", prompt, groups=2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_padding_does_not_change_the_scores_of_a_sample() -> None:
    model, padded = make_decoder("llama"), make_prompt(padding=(5,))
    alone = {key: value[:, 5:] for key, value in padded.items()}
    for score in (accumulated_attention, mean_attention):
        left, right = (score_cache(model, score, **prompt) for prompt in (padded, alone))
        torch.testing.assert_close(left[..., 5:], right, atol=1e-5, rtol=0)
        assert not left[..., :5].any()


def cached(n: int = 6, b: int = 1, kv_heads: int = 2) -> CachedAttention:
    layer, x = nn.MultiheadAttention(8, 4, batch_first=True), torch.rand(b, n, 8)
    with overt.watch(layer) as trace:
        layer(x, x, x)
    return CachedAttention(trace.calls[0], torch.ones(b, n, dtype=torch.bool), kv_heads)


def test_controls_do_not_read_attention() -> None:
    assert recent(cached()).tolist() == [[[0, 1, 2, 3, 4, 5]] * 2]
    one, other = (random_scores(cached(), torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other) and one.shape == (1, 2, 6)
    assert len(one.unique()) == 12  # each head has its own


@pytest.mark.parametrize("window", [0, 6, 9])
def test_a_window_is_shorter_than_the_prompt(window: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 5.*got {window}"):
        observation_window(cached(), window=window)


@pytest.mark.parametrize("kernel", [0, 2, -1])
def test_a_kernel_is_odd(kernel: int) -> None:
    with pytest.raises(ValueError, match="kernel.*odd"):
        observation_window(cached(), window=2, kernel=kernel)


class _LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


@pytest.mark.parametrize("rule", ["accumulated", "mean", "window"])
def test_no_matrix_of_all_weights_is_made(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_scores.MAX_CHUNK_BYTES, "cpu", 64 * 600 * 4 * 2)
    x = torch.rand(1, 600, 8)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    with overt.watch(layer) as trace, torch.no_grad():
        layer(x, x, x, need_weights=False)
    long = CachedAttention(trace.calls[0], torch.ones(1, 600, dtype=torch.bool), 2)
    with _LargestTensor() as largest:
        RULES[rule][0](long)
    assert 0 < largest.numbers < 600 * 600 / 4
