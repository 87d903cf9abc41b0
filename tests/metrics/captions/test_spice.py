"""SPICE: required files, calls of the Java program and its output."""

import json
import math
from importlib import import_module

import pytest

from overt.errors import RunError, UserError
from overt.metrics.captions.spice import MODELS, check_models, parse_output, spice

module = import_module(
    "overt.metrics.captions.spice"
)  # the package exports a function of this name

FAKE = """#!/usr/bin/env python3
import json, sys
requests = json.load(open(sys.argv[4]))
assert [one["test"] for one in requests] == ["a dog", "x"], requests
scores = [{"image_id": one["image_id"], "scores": {"All": {"f": 0.5 if "dog" in one["test"]
          else None}}} for one in requests]
json.dump(scores[::-1], open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""


def test_missing_models_raise_with_their_names_and_address(tmp_path):
    (tmp_path / MODELS[0]).touch()
    with pytest.raises(UserError, match=r"models\.jar.*//nlp"):
        check_models(tmp_path)
    (tmp_path / MODELS[1]).touch()
    check_models(tmp_path)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Make a folder with the files of SPICE and replace Java by a script."""
    (tmp_path / "lib").mkdir()
    for name in (*(f"lib/{model}" for model in MODELS), "spice-1.0.jar"):
        (tmp_path / name).touch()
    script = tmp_path / "java"
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setattr(module, "find_java", lambda: str(script))
    monkeypatch.setattr(module, "package_folder", lambda folder: tmp_path)
    monkeypatch.setattr(module, "find_jar", lambda folder, name: tmp_path / "spice-1.0.jar")
    return script


def test_scores_of_the_program_are_sorted_by_caption(program):
    found = spice([["a", "dog"], ["x"]], [[["a", "cat"]], [["y"]]]).tolist()
    assert found[0] == 0.5 and math.isnan(found[1])


def test_a_failing_program_raises_with_its_error_output(program):
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 3\n")
    with pytest.raises(RunError, match="out of memory"):
        spice([["a"]], [[["a"]]])


def test_output_is_matched_by_image_id():
    answer = json.loads('[{"image_id": 1, "scores": {"All": {"f": 0.25}}}]')
    found = parse_output(answer, 2).tolist()
    assert math.isnan(found[0]) and found[1] == 0.25


def test_different_counts_raise():
    with pytest.raises(ValueError, match="1 and 0"):
        spice([["a"]], [])
