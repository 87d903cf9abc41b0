"""Apply the decision rule in LOG.md to the table `scenes`.

    python results/verdict_scenes.py              # from the numbers in results/scenes
    python results/verdict_scenes.py runs/scenes  # import those of a finished table, then apply it

Differences are on the same questions; each row has its own seeds. Questions of one round share
words (each with every answer in turn), so each interval is given twice: over seeds and scenes,
whose four questions are a cluster, which is the rule, and over seeds and rounds. With three seeds
every verdict is provisional.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archive import pack, unpacked
from run_results import judged

from overt.data.scenes.balanced_questions import ROUND, generate_scene
from overt.data.scenes.questions import ALL_FAMILIES, chance_accuracy, matching_things
from overt.metrics import two_level_difference, two_level_interval
from overt.metrics.statistics import Interval

KEPT = unpacked() / "scenes" / "samples.npz"
ROWS = (
    "question-only",
    "no-attention",
    "soft-attention",
    "truth-supervised",
    "soft-held-out",
    "truth-held-out",
)
WORLD, SEEDS, QUESTIONS = 1, 3, 4
HELD_OUT = "relate"


def keep(runs: Path) -> None:
    """Collect the numbers of the rule from the samples of every run: one row per seed."""
    arrays: dict[str, Any] = {}
    for row in ROWS:
        found = [np.load(runs / row / f"seed-{seed}" / "samples.npz") for seed in range(SEEDS)]
        for run in found:
            for name in ("id", "group", "truth"):
                assert (run[name] == arrays.setdefault(name, run[name])).all(), row
        arrays[f"{row}/prediction"] = np.stack([run["prediction"] for run in found])
        if "deletion" in found[0]:
            arrays[f"{row}/deletion"] = np.stack([run["deletion"] for run in found]).astype("f2")
    np.savez_compressed(KEPT, **arrays)
    pack(KEPT.parent)


class Numbers:
    """Stored numbers as [seed, question], and means over the questions of each round."""

    def __init__(self) -> None:
        with np.load(KEPT) as arrays:
            self.arrays = dict(arrays)
        self.groups = self.arrays["group"]

    def of(self, row: str, measure: str = "accuracy", family: str = "") -> torch.Tensor:
        if measure == "accuracy":
            found = self.arrays[f"{row}/prediction"] == self.arrays["truth"]
        else:
            found = self.arrays[f"{row}/{measure}"]
        values = torch.from_numpy(found.astype(np.float32))
        return values[:, torch.from_numpy(self.groups == family)] if family else values

    def scenes(self, family: str = "") -> list[str]:
        """Return the scene of each question."""
        ids = self.arrays["id"] if not family else self.arrays["id"][self.groups == family]
        return [str(one).rpartition("-")[0] for one in ids]

    def rounds(self, row: str, measure: str) -> torch.Tensor:
        return self.of(row, measure).unflatten(1, (-1, ROUND * QUESTIONS)).nanmean(dim=-1)

    def difference(self, first: str, second: str, measure: str = "accuracy") -> Interval:
        """Return first minus second over questions; print the interval over rounds too."""
        found = two_level_difference(
            self.of(first, measure), self.of(second, measure), clusters=self.scenes()
        )
        wide = two_level_difference(self.rounds(first, measure), self.rounds(second, measure))
        what = f"{first} minus {second}, {measure}:"
        print(f"{what} {format_interval(found)}; over rounds {wide.low:.3f} to {wide.high:.3f}")
        return found


def over(numbers: Numbers, row: str, measure: str = "accuracy", family: str = "") -> Interval:
    """Return the mean of a row over seeds and scenes."""
    return two_level_interval(numbers.of(row, measure, family), clusters=numbers.scenes(family))


def format_interval(one: Interval) -> str:
    return f"{one.mean:.3f} [{one.low:.3f} to {one.high:.3f}]"


def helps(gain: Interval) -> str:
    """Apply the rule for soft attention against none."""
    if gain.mean >= 0.08 and gain.low > 0:
        return judged(gain, "confirmed")
    return judged(gain, "refuted" if gain.high < 0.08 else "undecided")


def fair(numbers: Numbers) -> str:
    """Check the dataset: words give nothing away, averages fail, attention learns all families."""
    blind = max(
        float(numbers.of("question-only", family=family).mean(dim=1).max())
        - chance_accuracy(family)
        for family in ALL_FAMILIES
    )
    none = float(numbers.of("no-attention").mean())
    low = min(
        over(numbers, "soft-attention", family=family).low - chance_accuracy(family)
        for family in ALL_FAMILIES
    )
    print(f"question-only over chance, any seed and family, at most {blind:.4f}")
    print(f"no attention {none:.3f}")
    print(f"soft attention: lower end of a family over its chance, at least {low:.3f}")
    known = blind <= 0.05 and none <= 0.75
    verdict = "refuted" if not known else "confirmed" if low > 0 else "undecided"
    return judged(over(numbers, "soft-attention"), verdict)


def anchor_instead(numbers: Numbers, row: str) -> float:
    """Return how often the color of the anchor is answered instead of the related one."""
    wrong = []
    for column in np.flatnonzero(numbers.groups == "relate").tolist():
        index, place = divmod(column, QUESTIONS)
        scene, questions = generate_scene("test", WORLD, index)
        (anchor,) = matching_things(questions[place].program.sides[1], scene.things)
        given = numbers.arrays[f"{row}/prediction"][:, column]
        wrong.append((given == scene.things[anchor].color) & (given != questions[place].answer))
    return float(np.mean(wrong))


def by_family(numbers: Numbers) -> None:
    """Print the accuracy of every family and row, with intervals over seeds and questions."""
    print("\n| family | n | chance |", " | ".join(ROWS), "|")
    print("|---|---|---|" + "---|" * len(ROWS))
    for family in ALL_FAMILIES:
        cells = [format_interval(over(numbers, row, family=family)) for row in ROWS]
        count = int((numbers.groups == family).sum())
        print(f"| {family} | {count} | {chance_accuracy(family):.3f} |", " | ".join(cells), "|")


def main() -> None:
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    numbers = Numbers()
    gain = numbers.difference("soft-attention", "no-attention")
    print(f"attention helps: {helps(gain)}\n")
    print(f"the world is fair: {fair(numbers)}\n")
    for one in ("truth-supervised", "soft-attention"):
        print(f"{one}, deletion: {format_interval(over(numbers, one, 'deletion'))}")
    for measure in ("accuracy", "deletion"):
        numbers.difference("truth-supervised", "soft-attention", measure)
    taught, soft = (numbers.of(row, family=HELD_OUT) for row in ("truth-held-out", "soft-held-out"))
    apart = two_level_difference(taught, soft, clusters=numbers.scenes(HELD_OUT))
    print(f"{HELD_OUT} held out, taught minus not: {format_interval(apart)}")
    for row in ("truth-held-out", "soft-held-out"):
        print(f"{row}: the color of the anchor instead, {anchor_instead(numbers, row):.3f}")
    by_family(numbers)


if __name__ == "__main__":
    main()
