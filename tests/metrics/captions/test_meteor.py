"""METEOR: agreement with the published program, examples by hand and bad input."""

import subprocess
from importlib import import_module

import numpy as np
import pytest
import torch

from overt.errors import RunError, UserError
from overt.metrics.captions import java as programs
from overt.metrics.captions.meteor import (
    ALPHA,
    BETA,
    DELTA,
    FUNCTION_WORDS,
    GAMMA,
    light_stem,
    meteor,
    meteor_java,
    no_stem,
)
from tests.metrics.captions.examples import random_captions

module = import_module(
    "overt.metrics.captions.meteor"
)  # the package exports a function of this name


def run_meteor_java(candidates, references, folder):
    """Run the published program with the module "exact" and our list of function words."""
    try:
        program = programs.find_jar("meteor", "meteor")
        java = programs.find_java()
    except UserError as problem:
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


def test_exact_matches_agree_with_the_published_program(tmp_path):
    candidates, references = random_captions(60)
    references = [(texts * 3)[:3] for texts in references]
    whole, each = run_meteor_java(candidates, references, tmp_path)
    found = meteor(candidates, references, stem=no_stem)
    np.testing.assert_allclose(found.each().numpy(), each, rtol=0, atol=1e-9)
    assert found.corpus() == pytest.approx(whole, abs=1e-9)


def test_score_matches_an_example_by_hand():
    """ "a dog runs" against "a cat runs": two of three words, in two chunks, "a" counting less."""
    found = float(meteor([["a", "dog", "runs"]], [[["a", "cat", "runs"]]]).each()[0])
    share = (1 - DELTA + DELTA) / (1 - DELTA + 2 * DELTA)
    assert found == pytest.approx(share * (1 - GAMMA))
    assert 0 < ALPHA < 1 and BETA > 0


def test_a_caption_equal_to_a_reference_scores_one():
    assert meteor([["a", "dog"]], [[["x"], ["a", "dog"]]]).each().tolist() == [1]


def test_a_stem_counts_less_than_the_word():
    references = [[["dog", "running"]]]
    same, stems = (meteor([["dog", word]], references).each()[0] for word in ("running", "runs"))
    assert 0.5 < stems < same


def test_alignment_has_the_fewest_chunks():
    words = "a man and a dog".split()
    other = "a dog and a man".split()
    assert meteor([words], [[other]]).rows[0, -1] == 3


@pytest.mark.parametrize(
    ("word", "stem"),
    [("boxes", "box"), ("beaches", "beach"), ("glasses", "glass"), ("bus", "bus"), ("red", "red")],
)
def test_light_stem_removes_endings(word, stem):
    assert light_stem(word) == stem


def test_scores_of_selected_rows_equal_scores_of_these_captions():
    candidates, references = random_captions(12)
    found, rows = meteor(candidates, references), torch.tensor([2, 2, 9])
    again = meteor([candidates[at] for at in rows], [references[at] for at in rows])
    assert found.select(rows).corpus() == again.corpus() and len(found.select(rows)) == 3


def test_no_common_words_and_empty_captions_score_zero():
    assert meteor([["x"], []], [[["y"]], [["y"]]]).each().tolist() == [0, 0]


FAKE = """#!/usr/bin/env python3
import sys
requests = open(sys.argv[0] + ".requests", "w")
for line in sys.stdin:
    print(line, end="", file=requests, flush=True)
    answer = "0.25 0.5 0.4" if line.startswith("EVAL") else "1,2"
    print(answer.replace(" ", chr(10)).replace(",", " "), flush=True)
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Replace Java by a script that answers as METEOR does."""
    script = tmp_path / "java"
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setattr(module, "find_java", lambda: str(script))
    monkeypatch.setattr(module, "find_jar", lambda folder, name: tmp_path / "meteor.jar")
    return script


def test_published_program_gets_its_input_format(program):
    whole, each = meteor_java([["a"], ["b", "|||"]], [[["c"], ["d"]], [["e"]]])
    assert whole == 0.4 and each.tolist() == [0.25, 0.5]
    assert program.with_suffix(".requests").read_text().splitlines() == [
        "SCORE ||| c ||| d ||| a",
        "SCORE ||| e ||| b",
        "EVAL ||| 1 2 ||| 1 2",
    ]


def test_a_program_that_exits_early_raises(program):
    program.write_text("#!/bin/sh\nread line\n")
    with pytest.raises(RunError, match="ended early"):
        meteor_java([["a"]], [[["b"]]])


def test_different_counts_and_missing_references_raise():
    for score in (meteor, meteor_java):
        with pytest.raises(ValueError, match="1 and 0"):
            score([["a"]], [])
    with pytest.raises(ValueError, match="one reference"):
        meteor([["a"]], [[]])
