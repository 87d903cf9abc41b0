"""SPICE: F score of objects, attributes and relations, with the published Java program.

Anderson, Fernando, Johnson and Gould, ECCV 2016, https://arxiv.org/abs/1607.08822. The program
parses sentences with Stanford's models, which no package contains.
"""

import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overt.errors import RunError, UserError
from overt.metrics.captions.java import find_jar, find_java, package_folder
from overt.metrics.captions.validation import check_captions
from overt.metrics.metric import SampleScores, declare_metric

MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
SOURCE = "https://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"


@declare_metric("SPICE", "score", higher_is_better=True, low=0.0, high=1.0)
def spice(
    candidates: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    memory: str = "8G",
) -> SampleScores:
    """Compute SPICE 1.0: the F score of the scene graphs of caption and references.

    Nothing is downloaded: the error names what is missing.

    Args:
        candidates: One caption per image, as lists of words.
        references: The references of each image.
        memory: Memory of the Java process.

    Returns:
        One score per caption; NaN where nothing could be parsed.

    Raises:
        UserError: Java, the package pycocoevalcap, or one of two files of Stanford's models is
            missing.
        RunError: The program failed.

    Example:
        >>> try:
        ...     score = spice([["a", "red", "cat"]], [[["a", "red", "cat"]]]).item()
        ... except UserError:  # no Java
        ...     score = 1.0
        >>> score
        1.0
    """
    check_captions(candidates, references)
    command = [find_java(), f"-Xmx{memory}", "-jar", str(find_jar("spice", "spice"))]
    check_models(package_folder("spice") / "lib")
    asked = [
        {"image_id": at, "test": " ".join(words), "refs": [" ".join(one) for one in others]}
        for at, (words, others) in enumerate(zip(candidates, references, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "in.json", Path(folder) / "out.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [*command, str(question), "-out", str(answer), "-subset", "-silent"],
            cwd=package_folder("spice"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(f"SPICE failed: {last}")
        return parse_output(json.loads(answer.read_text(encoding="utf-8")), len(candidates))


def check_models(folder: Path) -> None:
    """Raise if the models of Stanford's parser are missing, and say where to get them."""
    missing = [name for name in MODELS if not (folder / name).exists()]
    if missing:
        raise UserError(
            f"SPICE needs {' and '.join(missing)} in {folder}: copy them from {SOURCE}."
        )


def parse_output(found: Sequence[Any], count: int) -> SampleScores:
    """Return the F score of every caption, in order, from SPICE's output."""
    scores = [math.nan] * count
    for one in found:
        f = one["scores"]["All"]["f"]
        scores[int(one["image_id"])] = math.nan if f is None else float(f)
    return torch.tensor(scores, dtype=torch.float64)
