"""Eviction from key-value caches of Hugging Face decoders, by scores of captured attention."""

from overt.nn.cache_eviction.eviction import (
    Eviction,
    evict_cache,
    gather_cache,
    prefill,
    score_cache,
)
from overt.nn.cache_eviction.scores import (
    CachedAttention,
    ScoreRule,
    accumulated_attention,
    mean_attention,
    observation_window,
    random_scores,
    recent,
)
from overt.nn.cache_eviction.selection import keep_positions

__all__ = [  # noqa: RUF022 - grouped by use
    # Evict while a model reads its prompt
    "evict_cache",
    "Eviction",
    "prefill",
    # Scores of cached positions
    "CachedAttention",
    "ScoreRule",
    "accumulated_attention",
    "mean_attention",
    "observation_window",
    "recent",
    "random_scores",
    # The steps, for scores of your own
    "score_cache",
    "keep_positions",
    "gather_cache",
]
