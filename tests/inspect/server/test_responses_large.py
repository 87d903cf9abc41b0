"""Responses for long texts: one query at a time, within bounded memory."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest

from overt.errors import UserError
from overt.inspect.server import request_schema
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_schema import InspectRequest
from overt.inspect.server.responses import build_response
from tests.experiments import foreign

GIB = 2**30
TOKENS, LAYERS, HEADS = 5_000, 12, 12
PROGRAM = """
import resource, sys, torch
from overt.inspect.server.request_schema import InspectRequest
from overt.inspect.server.responses import build_response, view_png
from overt.inspect.server.model_cache import ModelCache, find_models

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
cache = ModelCache(find_models([sys.argv[1]]))
[name] = cache.names
text = "a " * int(sys.argv[2])
small = InspectRequest(model=name, text="a the")
build_response(cache.load(name), name, small), view_png(cache.load(name), small)  # imports all
before = peak()
request = InspectRequest(model=name, text=text, map=sys.argv[3])
found = build_response(cache.load(name), name, request)
[panel] = found["view"]["panels"]
print(peak() - before, len(panel["queries"]["names"]), len(panel["keys"]["names"]), panel["heads"])
"""


def write_long_gpt2(folder: Path) -> Path:
    """Write a language model of twelve layers and heads with thousands of positions."""
    transformers = foreign.transformers
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=TOKENS, n_embd=HEADS, n_layer=LAYERS, n_head=HEADS
    )
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(folder)
    words = foreign.tokenizer(framed=False)
    words.model_max_length = TOKENS
    words.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_a_text_of_thousands_of_words_needs_less_than_a_gigabyte(tmp_path: Path):
    folder = write_long_gpt2(tmp_path / "long")
    total = 4 * LAYERS * HEADS * TOKENS**2  # bytes, if all weights were materialized
    assert total > 13 * GIB
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder), str(TOKENS), "attention"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    more, queries, keys, heads = map(int, done.stdout.split())
    assert (queries, keys, heads) == (1, TOKENS, HEADS)
    assert more < GIB


@pytest.mark.long
@pytest.mark.parametrize("way", ["attention", "values", "gradient", "rollout", "relevance"])
def test_one_query_of_a_large_map_equals_that_row_of_the_full_map(
    tmp_path: Path, monkeypatch, way: str
):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)["gpt2"])]))
    [name] = cache.names
    request = InspectRequest(model=name, text="the small red ball lies on the grassland", map=way)
    full = _weights(build_response(cache.load(name), name, request))
    monkeypatch.setattr(request_schema, "MAX_WEIGHTS", 20)
    found = build_response(cache.load(name), name, request)
    [panel] = found["view"]["panels"]
    assert len(panel["queries"]["names"]) == 1 and "one query" in panel["about"]
    assert _weights(found)[:, :, 0] == pytest.approx(full[:, :, -1], abs=2e-3)


def _weights(found: dict):
    import base64

    import numpy as np

    [panel] = found["view"]["panels"]
    values = np.frombuffer(base64.b64decode(panel["weights"]), "<f2").astype(np.float64)
    shape = len(panel["layers"]), panel["heads"]
    return values.reshape(*shape, len(panel["queries"]["names"]), len(panel["keys"]["names"]))


@pytest.mark.parametrize("kind", ["gpt2", "t5", "clip"])
def test_a_text_over_the_flop_limit_is_rejected_without_a_forward_pass(
    tmp_path: Path, monkeypatch, kind: str
):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)[kind])]))
    [name] = cache.names
    loaded = cache.load(name)
    monkeypatch.setattr(request_schema, "MAX_FLOPS", 1e3)
    monkeypatch.setattr(loaded.model, "forward", _fail_if_called(loaded.model.forward))
    with pytest.raises(UserError, match=r"\d tokens.*shorten"):
        build_response(loaded, name, InspectRequest(model=name, text="the small red ball"))


def _fail_if_called(forward: Callable[..., object]) -> Callable[..., object]:
    @wraps(forward)  # keep its signature
    def fail(*given: object, **named: object) -> None:
        raise AssertionError("the model was run")

    return fail
