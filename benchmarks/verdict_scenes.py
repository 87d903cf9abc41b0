"""Apply the decision rule in LOG.md to the table `scenes`.

    python benchmarks/verdict_scenes.py              # from the numbers kept in benchmarks/scenes
    python benchmarks/verdict_scenes.py runs/scenes  # keep those of a finished table, then apply it

Differences are paired over questions and seeds. Questions of one round share words (each has every
answer in turn), so each interval is given twice: over seeds and questions, which is the rule, and
over seeds and rounds.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.scenes.posing import ROUND, pose
from overt.data.scenes.questions import ALL, chance, fitting_things
from overt.measure import two_level, two_level_difference
from overt.measure.statistics import Interval

KEPT = Path(__file__).parent / "scenes" / "samples.npz"
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
    """Collect what the rule needs from the samples of every run: one row a seed."""
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


class Numbers:
    """The kept numbers as [seed, question], and means over the questions of each round."""

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

    def rounds(self, row: str, measure: str) -> torch.Tensor:
        return self.of(row, measure).unflatten(1, (-1, ROUND * QUESTIONS)).nanmean(dim=-1)

    def difference(self, first: str, second: str, measure: str = "accuracy") -> Interval:
        """First minus second over questions; the interval over rounds is printed beside it."""
        found = two_level_difference(self.of(first, measure), self.of(second, measure))
        wide = two_level_difference(self.rounds(first, measure), self.rounds(second, measure))
        what = f"{first} minus {second}, {measure}:"
        print(f"{what} {said(found)}; over rounds {wide.low:.3f} to {wide.high:.3f}")
        return found


def said(one: Interval) -> str:
    return f"{one.mean:.3f} [{one.low:.3f} to {one.high:.3f}]"


def helps(gain: Interval) -> str:
    """The rule for soft attention against none, in its own words."""
    if gain.mean >= 0.08 and gain.low > 0:
        return "confirmed"
    return "refuted" if gain.high < 0.08 else "undecided"


def fair(numbers: Numbers) -> str:
    """Whether the world is: words give nothing away, averages do not do, attention learns all."""
    blind = max(
        float(numbers.of("question-only", family=family).mean(dim=1).max()) - chance(family)
        for family in ALL
    )
    none = float(numbers.of("no-attention").mean())
    low = min(
        two_level(numbers.of("soft-attention", family=family)).low - chance(family)
        for family in ALL
    )
    print(f"question-only over chance, any seed and family, at most {blind:.4f}")
    print(f"no attention {none:.3f}")
    print(f"soft attention: lower end of a family over its chance, at least {low:.3f}")
    return "confirmed" if blind <= 0.05 and none <= 0.75 and low > 0 else "refuted"


def anchor_instead(numbers: Numbers, row: str) -> float:
    """How often the color of the anchor is given for that of the thing related to it."""
    wrong = []
    for column in np.flatnonzero(numbers.groups == "relate").tolist():
        index, place = divmod(column, QUESTIONS)
        scene, questions = pose("test", WORLD, index)
        (anchor,) = fitting_things(questions[place].program.sides[1], scene.things)
        given = numbers.arrays[f"{row}/prediction"][:, column]
        wrong.append((given == scene.things[anchor].color) & (given != questions[place].answer))
    return float(np.mean(wrong))


def by_family(numbers: Numbers) -> None:
    """Accuracy of every family and row, with the interval over seeds and questions."""
    print("\n| family | n | chance |", " | ".join(ROWS), "|")
    print("|---|---|---|" + "---|" * len(ROWS))
    for family in ALL:
        cells = [said(two_level(numbers.of(row, family=family))) for row in ROWS]
        count = int((numbers.groups == family).sum())
        print(f"| {family} | {count} | {chance(family):.3f} |", " | ".join(cells), "|")


def main() -> None:
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    numbers = Numbers()
    gain = numbers.difference("soft-attention", "no-attention")
    print(f"attention helps: {helps(gain)}\n")
    print(f"the world is fair: {fair(numbers)}\n")
    for one in ("truth-supervised", "soft-attention"):
        print(f"{one}, deletion: {said(two_level(numbers.of(one, 'deletion')))}")
    for measure in ("accuracy", "deletion"):
        numbers.difference("truth-supervised", "soft-attention", measure)
    taught, soft = (numbers.of(row, family=HELD_OUT) for row in ("truth-held-out", "soft-held-out"))
    print(f"{HELD_OUT} held out, taught minus not: {said(two_level_difference(taught, soft))}")
    for row in ("truth-held-out", "soft-held-out"):
        print(f"{row}: the color of the anchor instead, {anchor_instead(numbers, row):.3f}")
    by_family(numbers)


if __name__ == "__main__":
    main()
