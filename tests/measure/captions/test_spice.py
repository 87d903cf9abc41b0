import json
import math
from importlib import import_module

import pytest

from overt.errors import BadInput, Failed
from overt.measure.captions.spice import MODELS, needs_models, read_answer, spice

module = import_module("overt.measure.captions.spice")  # which a function of its name hides

FAKE = """#!/usr/bin/env python3
import json, sys
asked = json.load(open(sys.argv[4]))
assert [one["test"] for one in asked] == ["a dog", "x"], asked
scores = [{"image_id": one["image_id"], "scores": {"All": {"f": 0.5 if "dog" in one["test"]
          else None}}} for one in asked]
json.dump(scores[::-1], open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""


def test_missing_models_are_named_with_where_to_get_them(tmp_path):
    (tmp_path / MODELS[0]).touch()
    with pytest.raises(BadInput, match=r"3\.6\.0-models\.jar in .*: take them out of https://nlp"):
        needs_models(tmp_path)
    (tmp_path / MODELS[1]).touch()
    needs_models(tmp_path)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with the files of SPICE, and in the place of Java a script."""
    (tmp_path / "lib").mkdir()
    for name in (*(f"lib/{model}" for model in MODELS), "spice-1.0.jar"):
        (tmp_path / name).touch()
    script = tmp_path / "java"
    script.write_text(FAKE)
    script.chmod(0o755)
    monkeypatch.setattr(module, "java", lambda: str(script))
    monkeypatch.setattr(module, "package", lambda folder: tmp_path)
    monkeypatch.setattr(module, "jar", lambda folder, name: tmp_path / "spice-1.0.jar")
    return script


def test_the_program_is_asked_and_its_answer_put_in_order(program):
    found = spice([["a", "dog"], ["x"]], [[["a", "cat"]], [["y"]]]).tolist()
    assert found[0] == 0.5 and math.isnan(found[1])


def test_a_failure_of_the_program_is_told(program):
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 3\n")
    with pytest.raises(Failed, match="SPICE failed: out of memory"):
        spice([["a"]], [[["a"]]])


def test_answers_are_read_by_id():
    answer = json.loads('[{"image_id": 1, "scores": {"All": {"f": 0.25}}}]')
    found = read_answer(answer, 2).tolist()
    assert math.isnan(found[0]) and found[1] == 0.25


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 candidates for 0"):
        spice([["a"]], [])
