"""Apply the decision rule in LOG.md to the table `baselines`.

    python results/verdict_baselines.py                 # from results/baselines
    python results/verdict_baselines.py runs/baselines  # import its finished rows, then apply it

Intervals are over seeds and test samples, or images if questions share them; with three seeds every
verdict is provisional. If OVERT_DATA contains easy-VQA, the accuracy of its question words alone is
compared with the runs.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archive import pack, unpacked
from run_results import judged, over

from overt.data import EasyVqa
from overt.data.catalog import available_datasets, data_root
from overt.data.easy_vqa import SHAPES, question_family
from overt.metrics.statistics import Interval

KEPT = unpacked() / "baselines"
SEEDS = 3


@dataclass(frozen=True)
class Rule:
    """Rule of a row: goal, expected range, and largest difference between seeds."""

    figure: float
    expected: tuple[float, float]
    spread: float


RULES = {
    "cifar10": Rule(0.6959, (0.80, 0.90), 0.03),
    "cifar100": Rule(0.45, (0.50, 0.65), 0.03),
    "trec": Rule(0.8120, (0.83, 0.90), 0.05),
    "easyvqa": Rule(0.98, (0.99, 1.00), 0.01),
}


def keep(runs: Path) -> None:
    """Copy the results of every run, and collect accuracy and deletion.

    Rows that are not in `runs` are preserved.
    """
    arrays: dict[str, Any] = {}
    if (KEPT / "samples.npz").is_file():
        with np.load(KEPT / "samples.npz") as before:
            arrays |= {name: before[name] for name in before.files}
    for row in RULES:
        found = []
        for seed in range(SEEDS):
            place = runs / row / f"seed-{seed}"
            if not (place / "samples.npz").is_file():
                continue
            found.append(np.load(place / "samples.npz"))
            kept = KEPT / row / f"seed-{seed}" / "results.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes((place / "results.json").read_bytes())
        if not found:
            continue
        for run in found:
            assert (run["id"] == found[0]["id"]).all(), row
        arrays[f"{row}/accuracy"] = np.stack([run["accuracy"] for run in found]).astype(bool)
        if "deletion" in found[0]:
            arrays[f"{row}/deletion"] = np.stack([run["deletion"] for run in found]).astype("f2")
    np.savez_compressed(KEPT / "samples.npz", **arrays)
    pack(KEPT)


def format_interval(one: Interval) -> str:
    return f"{one.mean:.4f} [{one.low:.4f} to {one.high:.4f}]"


def reached(found: Interval, figure: float) -> str:
    """Return whether a goal without an interval is reached."""
    if found.low > figure:
        return judged(found, "reached")
    return judged(found, "not reached" if found.high < figure else "undecided")


def seconds(row: str) -> str:
    """Return the training seconds of each seed."""
    paths = sorted((KEPT / row).glob("seed-*/results.json"))
    return ", ".join(f"{json.loads(path.read_text())['seconds']:.0f}" for path in paths)


def by_words(right: torch.Tensor) -> None:
    """Print easy-VQA by question: the most frequent answer for its words, and every seed."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for words, answer in questions_and_answers("train"):
        counts[words][answer] += 1
    parts = defaultdict(list)
    for place, (words, answer) in enumerate(questions_and_answers("test")):
        about = "shape" if any(shape in words for shape in SHAPES) else "colour"
        kind = question_family(answer)
        guess = counts[words].most_common(1)[0][0] if words in counts else ""
        row = [float(guess == answer), *right[:, place].tolist()]
        parts[f"{kind}, {about}" if kind == "yes or no" else kind].append(row)
        parts["all"].append(row)
    print(
        "\n| easy-VQA | n | from words alone |", " | ".join(f"seed {s}" for s in range(SEEDS)), "|"
    )
    for kind, rows in sorted(parts.items()):
        means = " | ".join(f"{share:.3f}" for share in np.mean(rows, axis=0))
        print(f"| {kind} | {len(rows)} | {means} |")


def questions_and_answers(split: str) -> list[tuple[str, str]]:
    """Return the questions and answers of a split, in order."""
    data = EasyVqa(None, split)
    found: list[tuple[str, str]] = []
    for start in range(0, len(data), 500):
        batch = data.batch(range(start, min(start + 500, len(data))))
        assert batch.text is not None and batch.labels is not None
        answers = [data.classes[label] for label in batch.labels.tolist()]
        found += zip(batch.text.texts, answers, strict=True)
    return found


def main() -> None:
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    with np.load(KEPT / "samples.npz") as kept:
        numbers = {name: torch.from_numpy(kept[name].astype(np.float32)) for name in kept.files}
    for row, rule in RULES.items():
        right = numbers.get(f"{row}/accuracy")
        if right is None:
            print(f"{row}: not run")
            continue
        found, seeds = over(right), right.mean(dim=1)
        low, high = rule.expected
        apart = float(seeds.max() - seeds.min())
        print(
            f"{row}: accuracy {format_interval(found)}, {rule.figure} {reached(found, rule.figure)}"
        )
        print(f"  seeds {', '.join(f'{seed:.4f}' for seed in seeds.tolist())}")
        print(f"  apart by {apart:.4f}: {'as allowed' if apart <= rule.spread else 'too far'}")
        print(f"  {'as' if low <= found.mean <= high else 'not as'} expected ({low} to {high})")
        print(f"  seconds of training: {seconds(row)}")
        if f"{row}/deletion" in numbers:
            deletion = over(numbers[f"{row}/deletion"])
            shown = judged(deletion, "used" if deletion.low > 0 else "not shown")
            print(f"  deletion {format_interval(deletion)}: {shown}")
    if (
        "easyvqa/accuracy" in numbers
        and os.environ.get("OVERT_DATA")
        and "easyvqa" in available_datasets(data_root())
    ):
        by_words(numbers["easyvqa/accuracy"])


if __name__ == "__main__":
    main()
