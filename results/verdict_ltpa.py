"""Apply the decision rules in LOG.md to results of Learn to Pay Attention.

    python results/verdict_ltpa.py                                     # from results/ltpa-*
    python results/verdict_ltpa.py runs/ltpa-1 results/ltpa-1-short # import finished runs first

With one seed, intervals are over test items (numbers only: no verdict); with several, over seeds
and test items; a verdict of three or four seeds is provisional. Differences are per item and seed.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import run_results as kept_in
import torch
from archive import unpacked
from run_results import in_points, judged, over
from torch import Tensor

from overt.metrics import confidence_interval
from overt.metrics.statistics import Interval

HERE = unpacked()
LONG, SHORT, SCENES = HERE / "ltpa-60-epochs", HERE / "ltpa-1-short", HERE / "ltpa-scenes"
KEPT = ("error", "accuracy", "fooled_", "swapped_", "pointing_", "jaccard_")
ONE_CELL, NO_CHOICE, LARGEST_COST, SAME = 0.1, 0.99, 1.10, 0.005
LARGEST_ERROR = {"cifar10": 0.30, "cifar100": 0.60}
CELLS = {"entropy_8x8": 64, "entropy_16x16": 256, "entropy_32x32": 1024}
PAIR = ("cifar100-att2-concat-pc", "cifar100-att2-mean")
CAM, POINTS, RIGHT = ("vgg-gap", "cam_chosen"), 0.05, 0.5
MUST = (("att2-concat-pc", "joined"), ("att3-concat-pc", "32x32"))
BESIDE = (
    ("att2-concat-pc", "8x8"),
    ("att2-concat-pc", "16x16"),
    ("att3-concat-pc", "8x8"),
    ("att3-concat-pc", "16x16"),
    ("att3-concat-pc", "joined"),
    ("vgg-pan", "joined"),
    ("att2-concat-pc", "gradient"),
    ("att2-mean", "gradient"),
    ("att3-mean", "gradient"),
)
ADDITIVE = "att2-concat-additive"  # not in the paper


@dataclass(frozen=True)
class Kept:
    """Runs of one folder: reported results, and numbers per item."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]

    def each(self, row: str, name: str) -> Tensor:
        """Return a number per item, one line per seed."""
        seeds = sorted(seed for label, seed in self.results if label == row)
        found = [f"{row}/seed-{seed}/{name}" for seed in seeds]
        return torch.stack([self.samples[key] for key in found if key in self.samples])

    def value(self, row: str, name: str, seed: int = 0) -> dict[str, Any] | None:
        """Return a metric of one run, with its interval, or None."""
        found: dict[str, Any] | None = self.results[row, seed]["ours"].get(name)
        return found

    def minus(self, one: tuple[str, str], other: tuple[str, str]) -> Interval:
        """Return the difference of two rows and numbers, for the seeds that both have."""
        ours, theirs = self.each(*one), self.each(*other)
        seeds = min(len(ours), len(theirs))
        return over(ours[:seeds] - theirs[:seeds])


def read(folder: Path) -> Kept:
    """Return the stored results of a folder."""
    return Kept(*kept_in.read(folder))


def wanted(name: str, values: Any) -> Any | None:
    """Select the per-item numbers of the rules; some metrics cover the first items only."""
    if not name.startswith(KEPT) or name.endswith(("centre", "uniform")):
        return None
    return values[: np.flatnonzero(~np.isnan(values))[-1] + 1]


def sign(found: Interval, wanted: int) -> str:
    """Return whether a difference is above 0 (`wanted` 1) or below (-1), by its interval."""
    low, high = sorted((wanted * found.low, wanted * found.high))
    said = "yes" if low > 0 else "NO, the other way round" if high < 0 else "open"
    return judged(found, said)


# --- scenes


def scenes() -> None:
    """Compare the pointing of attention and other maps with class activation."""
    kept = read(SCENES)
    print("== scenes, 1,000 test items; differences to the class activations of vgg-gap, in points")
    print(f"class activations: {shown(kept, *CAM)}")
    for row, name in (*MUST, *BESIDE):
        apart = kept.minus((row, f"pointing_{name}"), (CAM[0], f"pointing_{CAM[1]}"))
        shape = kept.minus((row, f"jaccard_{name}"), (CAM[0], f"jaccard_{CAM[1]}"))
        print(f"{row}, {name}: {shown(kept, row, name)}")
        print(f"  pointing {in_points(apart)}, Jaccard {in_points(shape)}")
        if (row, name) in MUST:
            right = float(kept.each(row, "accuracy").mean())
            verdict = "shown for sure" if apart.low > POINTS else "shown"
            met = apart.mean >= POINTS and right >= RIGHT
            text = judged(apart, verdict if met else "NOT shown")
            print(f"  accuracy {right:.3f}; must show: {text}")

    print("beyond the paper, an additive score:")
    for name in ("8x8", "16x16", "joined", "gradient"):
        print(f"{ADDITIVE}, {name}: {shown(kept, ADDITIVE, name)}")
        apart = kept.minus((ADDITIVE, f"pointing_{name}"), (CAM[0], f"pointing_{CAM[1]}"))
        shape = kept.minus((ADDITIVE, f"jaccard_{name}"), (CAM[0], f"jaccard_{CAM[1]}"))
        print(f"  pointing {in_points(apart)}, Jaccard {in_points(shape)}")
        if name == "8x8":
            verdict = "shown for sure" if shape.low > POINTS else "shown"
            text = judged(shape, verdict if shape.mean >= POINTS else "NOT shown")
            print(f"  Jaccard: {text}")


def shown(kept: Kept, row: str, name: str) -> str:
    """Format pointing and Jaccard of a map, with the seeds of pointing."""
    pointing, shape = kept.each(row, f"pointing_{name}"), kept.each(row, f"jaccard_{name}")
    seeds = ", ".join(f"{one:.3f}" for one in pointing.nanmean(dim=1).tolist())
    return f"pointing {pointing.nanmean():.3f} ({seeds}), Jaccard {shape.nanmean():.3f}"


# --- the table


def row_by_row(kept: Kept, largest: Mapping[str, float]) -> None:
    """Print whether each run trained, the number of the paper, and its maps."""
    for (row, seed), results in kept.results.items():
        error = confidence_interval(kept.samples[f"{row}/seed-{seed}/error"], share=True)
        fine = results["status"] == "done" and error.mean < largest[row.split("-")[0]]
        line = f"{row}, seed {seed}: {'trains' if fine else 'does NOT train'}, "
        line += f"error {100 * error.mean:.2f}"
        line += f" ({100 * error.low:.2f} to {100 * error.high:.2f})"
        if "error" in results["paper"]:
            line += f", paper {100 * results['paper']['error']['value']:.2f}"
        print(line + maps(results["ours"]))


def maps(ours: Mapping[str, Any]) -> str:
    """Format the entropy of each level."""
    line = ""
    for name, cells in CELLS.items():
        if name in ours:
            mean, most = ours[name]["value"], math.log(cells)
            kind = "one cell" if mean <= ONE_CELL else "all alike"
            kind = "" if ONE_CELL < mean < NO_CHOICE * most else f", {kind}"
            line += f"; {name.removeprefix('entropy_')} {mean:.2f} of {most:.2f}{kind}"
    return line


def claims(kept: Kept) -> None:
    """Test the claims of the paper's table with one seed: two rows of one dataset each."""
    asked = [(row, "vgg", -1) for row in ATTENTION]
    asked += [("att-pc", "att-dp", -1), ("att2-concat-pc", "att2-concat-dp", -1)]
    asked += [("att2-indep-pc", "att2-indep-dp", -1), ("att2-concat-pc", "att2-indep-pc", -1)]
    asked += [("att2-concat-dp", "att2-indep-dp", -1), ("rn164-att2", "resnet-164", 1)]
    asked += [("att2-concat-pc", "att2-mean", -1), ("att3-concat-pc", "att3-mean", -1)]
    for data in LARGEST_ERROR:
        more = 1 if data == "cifar10" else -1
        for one, other, wanted in [*asked, ("att3-concat-pc", "att2-concat-pc", more)]:
            names = [f"{data}-{one}", f"{data}-{other}"]
            if all((name, 0) in kept.results for name in names):
                ours, theirs = (kept.each(name, "error")[:1] for name in names)
                apart = over(ours - theirs)
                word = "below" if wanted < 0 else "above"
                print(f"{data}: {one} {word} {other}: {sign(apart, wanted)}, {in_points(apart)}")
        both = [
            (100 * results["ours"]["error"]["value"], 100 * results["paper"]["error"]["value"])
            for (row, seed), results in kept.results.items()
            if seed == 0 and row.startswith(f"{data}-") and "error" in results["paper"]
        ]
        if len(both) > 2:
            alike = spearman(np.array(both).T)
            print(f"{data}: rank correlation with the paper {alike:.2f}, {len(both)} rows")


def spearman(pairs: np.ndarray) -> float:
    """Return the rank correlation of two lines of numbers without ties."""
    ranks = pairs.argsort(axis=1).argsort(axis=1)
    return float(np.corrcoef(ranks[0], ranks[1]).flat[1])


ATTENTION = (
    *("att-dp", "att2-indep-dp", "att2-concat-dp", "att-pc"),
    *("att2-indep-pc", "att2-concat-pc", "att3-concat-pc"),
)


def pair(kept: Kept) -> None:
    """Compare attention with average pooling at the same levels."""
    ours, control = (kept.each(row, "error") for row in PAIR)
    apart = kept.minus((PAIR[0], "error"), (PAIR[1], "error"))
    each = ", ".join(f"{100 * one:+.2f}" for one in (ours - control).mean(dim=1).tolist())
    print(f"attention {in_points(over(ours))}, control {in_points(over(control))}")
    print(f"attention minus control {in_points(apart)}, by seed {each}")
    print(f"  {len(ours)} seeds: {judged(apart, decided(apart))}")


def decided(apart: Interval) -> str:
    """Return the verdict on the pair."""
    if apart.high < 0:
        return "confirmed at this length"
    none = max(abs(apart.low), abs(apart.high)) < SAME
    return "refuted at this length" if apart.low > 0 or none else "undecided at this power"


# --- the other claims


def attacks(kept: Kept) -> None:
    """Print whether attention is fooled less often, by attack strength."""
    for data in LARGEST_ERROR:
        for other in ("vgg", "att2-mean"):
            for strength in (1, 2, 4, 8, 16):
                name = f"fooled_fgsm_{strength}"
                ours = kept.each(f"{data}-att2-concat-pc", name)[:1]
                theirs = kept.each(f"{data}-{other}", name)[:1]
                apart, shares = over(ours - theirs), f"{ours.mean():.3f} {theirs.mean():.3f}"
                print(f"{data}: att2-concat-pc fooled less than {other} at {strength}: ", end="")
                print(f"{sign(apart, -1)}, {shares}, {in_points(apart)}")


def features(kept: Kept) -> None:
    """Print whether features of attention transfer better; the items are not paired."""
    for row, other in (
        ("att2-concat-pc", "vgg"),
        ("att3-concat-pc", "vgg"),
        ("att2-concat-pc", "att2-mean"),
        ("att3-concat-pc", "att3-mean"),
    ):
        for name in ("transfer_cifar10", "transfer_scenes"):
            ours, theirs = (kept.value(f"cifar100-{one}", name) for one in (row, other))
            assert ours is not None and theirs is not None
            middle = ours["value"] - theirs["value"]
            half = math.hypot(ours["high"] - ours["low"], theirs["high"] - theirs["low"]) / 2
            apart = Interval(middle, middle - half, middle + half, ours["n"])
            print(f"{name}: {row} above {other}: {sign(apart, 1)}, ", end="")
            print(f"{ours['value']:.3f} {theirs['value']:.3f}, {in_points(apart)}")


def queries(kept: Kept) -> None:
    """Print the effect of the query of an image of another class."""
    for (row, seed), results in kept.results.items():
        moved = {name: one for name, one in results["ours"].items() if name.startswith("moved_un")}
        if moved and seed == 0:
            shares = ", ".join(f"{name[13:]} {one['value']:.4f}" for name, one in moved.items())
            changed = results["ours"]["swapped_unlike"]["value"]
            print(f"{row}: moved {shares}; predictions changed {changed:.4f}")


def cost() -> None:
    """Print the training cost of attention."""
    for name, one in json.loads((SHORT / "speed.json").read_text())["rows"].items():
        if "ratio" in one:
            fine = "as" if one["ratio"] <= LARGEST_COST else "NOT as"
            print(f"{name}: {one['ratio']:.3f} times the seconds of its control, {fine} wanted")


def main() -> None:
    if len(sys.argv) == 3:
        kept_in.keep(Path(sys.argv[1]), HERE / Path(sys.argv[2]).name, wanted)
    scenes()
    print("\n== CIFAR, 60 epochs, one seed")
    long = read(LONG)
    row_by_row(long, {"cifar100": 0.40})
    pair(long)
    print("\n== CIFAR, 6 epochs")
    short = read(SHORT)
    row_by_row(short, LARGEST_ERROR)
    print("\n== the deciding pair, 6 epochs")
    pair(short)
    for title, asked in (
        ("what the paper's table says, one seed", claims),
        ("attacks, first 1,000 test pictures, one seed", attacks),
        ("features of CIFAR-100 networks, one seed, intervals side by side", features),
        ("queries of other classes", queries),
    ):
        print(f"\n== {title}")
        asked(short)
    print("\n== cost")
    cost()


if __name__ == "__main__":
    main()
