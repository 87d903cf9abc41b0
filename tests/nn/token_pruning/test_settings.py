"""Settings of pruning and merging: plain values that are saved and rebuilt."""

from functools import partial

import pytest

from overt.errors import UserError
from overt.nn.hard_attention.selection import keep_top
from overt.nn.token_pruning.merge import by_keys, by_states
from overt.nn.token_pruning.selection import by_grid, by_presence, fuse_tokens
from overt.nn.token_pruning.settings import keep_settings, merge_settings, reducer_from_settings


def test_settings_are_plain_values() -> None:
    kept = keep_settings(partial(keep_top, count=3), by_grid, fuse_tokens)
    assert kept["score"] == "by_grid" and kept["rest"] == "fused"
    assert keep_settings(partial(keep_top, count=3), by_presence, None)["rest"] is None
    assert merge_settings(4, by_keys) == {"merge": 4, "metric": "by_keys"}
    assert callable(reducer_from_settings(kept)) and callable(
        reducer_from_settings(merge_settings(2, by_states))
    )


def test_custom_functions_raise() -> None:
    def by_keys(tokens: object) -> object:  # same name as a built-in metric
        return tokens

    with pytest.raises(UserError, match="by_keys, by_states"):
        merge_settings(1, by_keys)
