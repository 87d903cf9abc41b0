"""Settings of a pruned model as plain values, for `save_pretrained`."""

from collections.abc import Callable, Mapping
from typing import Any

from overt.errors import UserError
from overt.nn.hard_attention.selection import Rule, rule_config, rule_from_config
from overt.nn.token_pruning.image_token_scores import (
    by_centre,
    by_image_encoder,
    by_last_query,
    make_zipper,
)
from overt.nn.token_pruning.merge import TokenMetric, by_keys, by_states, make_merger
from overt.nn.token_pruning.selection import (
    FuseRest,
    TokenScore,
    by_class_attention,
    by_grid,
    by_presence,
    fuse_tokens,
    make_pruner,
)
from overt.nn.token_pruning.tokens import TokenReducer

PRUNING_FILE = "pruning.json"  # beside the model
# The keys are written to files: they stay when a function is renamed.
SCORES: dict[str, TokenScore] = {
    "by_presence": by_presence,
    "by_class_attention": by_class_attention,
    "by_grid": by_grid,
    "by_centre": by_centre,
    "by_last_query": by_last_query,
    "by_image_encoder": by_image_encoder,
}
FUSIONS: dict[str, FuseRest] = {"fused": fuse_tokens}
METRICS: dict[str, TokenMetric] = {"by_keys": by_keys, "by_states": by_states}


def keep_settings(keep: Rule, score: TokenScore, rest: FuseRest | None) -> dict[str, Any]:
    """Return the plain values of a step that keeps tokens; custom functions raise `UserError`."""
    return {
        "keep": rule_config(keep),
        "score": _saved_name(score, SCORES, "score"),
        "rest": None if rest is None else _saved_name(rest, FUSIONS, "rest"),
    }


def merge_settings(count: int, metric: TokenMetric) -> dict[str, Any]:
    """Return the plain values of a step that merges tokens."""
    return {"merge": count, "metric": _saved_name(metric, METRICS, "metric")}


def zip_settings(keep: Rule, score: TokenScore, context: int) -> dict[str, Any]:
    """Return the plain values of a step that keeps tokens and merges the others into some."""
    return {"keep": rule_config(keep), "score": _saved_name(score, SCORES, "score"), "zip": context}


def reducer_from_settings(settings: Mapping[str, Any]) -> TokenReducer:
    """Build the pruning or merging step from its saved values."""
    if "zip" in settings:
        keep, score = rule_from_config(settings["keep"]), SCORES[settings["score"]]
        return make_zipper(keep, score, int(settings["zip"]))
    if "merge" in settings:
        return make_merger(int(settings["merge"]), METRICS[settings["metric"]])
    rest = settings["rest"]
    return make_pruner(
        rule_from_config(settings["keep"]),
        SCORES[settings["score"]],
        None if rest is None else FUSIONS[rest],
    )


def _saved_name(function: Callable[..., Any], known: Mapping[str, Any], what: str) -> str:
    for name, one in known.items():
        if one is function:
            return name
    raise UserError(
        f"cannot save the custom {what} {getattr(function, '__name__', repr(function))}: expected "
        f"one of {', '.join(known)}; save the wrapped model and prune it again in code."
    )
