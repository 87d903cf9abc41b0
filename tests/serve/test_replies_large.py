"""A text whose weights in all heads would fill memory: answered by one query, block by block."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest

from overt.errors import BadInput
from overt.serve import questions
from overt.serve.questions import Question
from overt.serve.replies import reply
from overt.serve.shelf import Shelf, offer
from tests.recipes import foreign

GIB = 2**30
TOKENS, LAYERS, HEADS = 5_000, 12, 12
ASK = """
import resource, sys, torch
from overt.serve.questions import Question
from overt.serve.replies import picture, reply
from overt.serve.shelf import Shelf, offer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
shelf = Shelf(offer([sys.argv[1]]))
[name] = shelf.names
text = "a " * int(sys.argv[2])
small = Question(model=name, text="a the")
reply(shelf.subject(name), name, small), picture(shelf.subject(name), small)  # all is imported
before = peak()
asked = Question(model=name, text=text, map=sys.argv[3])
found = reply(shelf.subject(name), name, asked)
[panel] = found["view"]["panels"]
print(peak() - before, len(panel["queries"]["names"]), len(panel["keys"]["names"]), panel["heads"])
"""


def long_reader(folder: Path) -> Path:
    """A language model of twelve layers and heads that reads thousands of tokens."""
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
def test_a_text_of_thousands_of_words_is_answered_block_by_block(tmp_path: Path):
    folder = long_reader(tmp_path / "long")
    whole = 4 * LAYERS * HEADS * TOKENS**2  # bytes, if every weight were made
    assert whole > 13 * GIB
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ASK, str(folder), str(TOKENS), "raw"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    more, queries, keys, heads = map(int, done.stdout.split())
    assert (queries, keys, heads) == (1, TOKENS, HEADS)
    assert more < GIB


@pytest.mark.parametrize("way", ["raw", "values", "gradient", "rollout", "relevance"])
def test_one_query_of_a_large_map_is_the_row_of_the_whole(tmp_path: Path, monkeypatch, way: str):
    shelf = Shelf(offer([str(foreign.Shelf(tmp_path)["gpt2"])]))
    [name] = shelf.names
    asked = Question(model=name, text="the small red ball lies on the grassland", map=way)
    whole = _weights(reply(shelf.subject(name), name, asked))
    monkeypatch.setattr(questions, "MOST_WEIGHTS", 20)
    found = reply(shelf.subject(name), name, asked)
    [panel] = found["view"]["panels"]
    assert len(panel["queries"]["names"]) == 1 and "one query" in panel["about"]
    assert _weights(found)[:, :, 0] == pytest.approx(whole[:, :, -1], abs=2e-3)


def _weights(found: dict):
    import base64

    import numpy as np

    [panel] = found["view"]["panels"]
    values = np.frombuffer(base64.b64decode(panel["weights"]), "<f2").astype(np.float64)
    shape = len(panel["layers"]), panel["heads"]
    return values.reshape(*shape, len(panel["queries"]["names"]), len(panel["keys"]["names"]))


@pytest.mark.parametrize("kind", ["gpt2", "t5", "clip"])
def test_a_text_that_would_take_too_long_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch, kind: str
):
    shelf = Shelf(offer([str(foreign.Shelf(tmp_path)[kind])]))
    [name] = shelf.names
    subject = shelf.subject(name)
    monkeypatch.setattr(questions, "MOST_WORK", 1e3)
    monkeypatch.setattr(subject.model, "forward", _never(subject.model.forward))
    with pytest.raises(BadInput, match=r"operations to read [\d,]+ tokens.*shorten the text"):
        reply(subject, name, Question(model=name, text="the small red ball"))


def _never(forward: Callable[..., object]) -> Callable[..., object]:
    @wraps(forward)  # what it takes is still to be seen
    def refused(*given: object, **named: object) -> None:
        raise AssertionError("the model was run")

    return refused
