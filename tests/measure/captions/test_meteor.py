import subprocess
from importlib import import_module

import numpy as np
import pytest
import torch

from overt.errors import BadInput, Failed
from overt.measure.captions import java as programs
from overt.measure.captions.meteor import (
    ALPHA,
    BETA,
    DELTA,
    FUNCTION_WORDS,
    GAMMA,
    as_it_is,
    light_stem,
    meteor,
    meteor_java,
)
from tests.measure.captions.examples import many

module = import_module("overt.measure.captions.meteor")  # which a function of its name hides


def exact_by_java(candidates, references, folder):
    """The published program with the module "exact" and our list of function words."""
    try:
        program = programs.jar("meteor", "meteor")
        java = programs.java()
    except BadInput as problem:
        pytest.skip(str(problem))
    count = len(references[0])
    texts = {
        "words": sorted(FUNCTION_WORDS),
        "ours": [" ".join(words) for words in candidates],
        "theirs": [" ".join(words) for texts in references for words in texts],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    command = [java, "-jar", str(program), str(folder / "ours"), str(folder / "theirs")]
    command += ["-l", "en", "-r", str(count), "-m", "exact", "-s", str(folder / "words")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = found.splitlines()
    each = [float(line.split()[-1]) for line in lines if line.startswith("Segment")]
    return float(lines[-1].split()[-1]) if lines[-1] else float(lines[-2].split()[-1]), each


def test_words_alone_agree_with_the_published_program(tmp_path):
    candidates, references = many(60)
    references = [(texts * 3)[:3] for texts in references]
    whole, each = exact_by_java(candidates, references, tmp_path)
    found = meteor(candidates, references, stem=as_it_is)
    np.testing.assert_allclose(found.each().numpy(), each, rtol=0, atol=1e-9)
    assert found.corpus() == pytest.approx(whole, abs=1e-9)


def test_by_hand():
    """ "a dog runs" against "a cat runs": two of three words, in two chunks, "a" counting less."""
    found = float(meteor([["a", "dog", "runs"]], [[["a", "cat", "runs"]]]).each()[0])
    share = (1 - DELTA + DELTA) / (1 - DELTA + 2 * DELTA)
    assert found == pytest.approx(share * (1 - GAMMA))
    assert 0 < ALPHA < 1 and BETA > 0


def test_a_caption_that_is_a_reference_is_worth_one():
    assert meteor([["a", "dog"]], [[["x"], ["a", "dog"]]]).each().tolist() == [1]


def test_a_stem_counts_less_than_the_word():
    references = [[["dog", "running"]]]
    same, stems = (meteor([["dog", word]], references).each()[0] for word in ("running", "runs"))
    assert 0.5 < stems < same


def test_words_are_aligned_in_as_few_runs_as_can_be():
    words = "a man and a dog".split()
    other = "a dog and a man".split()
    assert meteor([words], [[other]]).rows[0, -1] == 3


@pytest.mark.parametrize(
    ("word", "stem"),
    [("boxes", "box"), ("beaches", "beach"), ("glasses", "glass"), ("bus", "bus"), ("red", "red")],
)
def test_endings_are_taken_off(word, stem):
    assert light_stem(word) == stem


def test_rows_can_be_drawn_again():
    candidates, references = many(12)
    found, rows = meteor(candidates, references), torch.tensor([2, 2, 9])
    again = meteor([candidates[at] for at in rows], [references[at] for at in rows])
    assert found.select(rows).corpus() == again.corpus() and len(found.select(rows)) == 3


def test_nothing_in_common_and_nothing_at_all_are_zero():
    assert meteor([["x"], []], [[["y"]], [["y"]]]).each().tolist() == [0, 0]


FAKE = """#!/usr/bin/env python3
import sys
asked = open(sys.argv[0] + ".asked", "w")
for line in sys.stdin:
    print(line, end="", file=asked, flush=True)
    answer = "0.25 0.5 0.4" if line.startswith("EVAL") else "1,2"
    print(answer.replace(" ", chr(10)).replace(",", " "), flush=True)
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """In the place of Java a script that answers as METEOR does."""
    script = tmp_path / "java"
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setattr(module, "java", lambda: str(script))
    monkeypatch.setattr(module, "jar", lambda folder, name: tmp_path / "meteor.jar")
    return script


def test_the_published_program_is_asked_as_it_wants_to_be(program):
    whole, each = meteor_java([["a"], ["b", "|||"]], [[["c"], ["d"]], [["e"]]])
    assert whole == 0.4 and each.tolist() == [0.25, 0.5]
    assert program.with_suffix(".asked").read_text().splitlines() == [
        "SCORE ||| c ||| d ||| a",
        "SCORE ||| e ||| b",
        "EVAL ||| 1 2 ||| 1 2",
    ]


def test_a_program_that_ends_is_told(program):
    program.write_text("#!/bin/sh\nread line\n")
    with pytest.raises(Failed, match="ended early"):
        meteor_java([["a"]], [[["b"]]])


def test_what_does_not_fit_is_refused():
    for score in (meteor, meteor_java):
        with pytest.raises(ValueError, match="1 candidates for 0"):
            score([["a"]], [])
    with pytest.raises(ValueError, match="at least one reference"):
        meteor([["a"]], [[]])
