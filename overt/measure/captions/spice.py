"""SPICE: do a caption and its references speak of the same things, attributes and relations?

Anderson, Fernando, Johnson and Gould, ECCV 2016, https://arxiv.org/abs/1607.08822. The program is
in Java and parses sentences with models of Stanford's, which no package brings along.
"""

import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overt.errors import BadInput, Failed
from overt.measure.captions.java import jar, java, package
from overt.measure.measured import Measured, measured

MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
SOURCE = "https://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"


@measured("SPICE", "score", higher_is_better=True, low=0.0, high=1.0)
def spice(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    memory: str = "8G",
) -> Measured:
    """F of what is said, by SPICE 1.0; NaN where nothing could be parsed.

    Needs Java, the package pycocoevalcap, and two files of Stanford's that have to be fetched by
    hand; whatever is missing is named. Nothing is downloaded here.
    """
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    command = [java(), f"-Xmx{memory}", "-jar", str(jar("spice", "spice"))]
    needs_models(package("spice") / "lib")
    asked = [
        {"image_id": at, "test": " ".join(words), "refs": [" ".join(one) for one in others]}
        for at, (words, others) in enumerate(zip(candidates, references, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "in.json", Path(folder) / "out.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [*command, str(question), "-out", str(answer), "-subset", "-silent"],
            cwd=package("spice"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Failed(f"SPICE failed: {last}")
        return read_answer(json.loads(answer.read_text(encoding="utf-8")), len(candidates))


def needs_models(folder: Path) -> None:
    """Raise where the models of Stanford's parser are missing, and say where to get them."""
    missing = [name for name in MODELS if not (folder / name).exists()]
    if missing:
        raise BadInput(
            f"SPICE needs {' and '.join(missing)} in {folder}: take them out of {SOURCE}."
        )


def read_answer(found: Sequence[Any], count: int) -> Measured:
    """The F of every caption, in their order, out of what SPICE wrote."""
    scores = [math.nan] * count
    for one in found:
        f = one["scores"]["All"]["f"]
        scores[int(one["image_id"])] = math.nan if f is None else float(f)
    return torch.tensor(scores, dtype=torch.float64)
