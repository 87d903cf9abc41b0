"""Apply the decision rules in LOG.md to results of Self Supervision for Attention Networks.

    python results/verdict_ssa.py                            # from results/ssa-*
    python results/verdict_ssa.py runs/ssa-1 results/ssa-1  # import finished runs first

Differences are per item and seed; intervals are over seeds and items, or images if items share
them. Two seeds give numbers only, and three or four a provisional verdict.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import run_results as kept_in
import torch
from archive import unpacked
from run_results import judged, judged_by, over
from torch import Tensor

from overt.metrics.statistics import Interval

HERE = unpacked()
KEPT = (  # item by item
    "accuracy",
    "pointing",
    "mass_inside",
    "rank_correlation",
    "deletion",
    "deletion_overwritten",
)
PRETRAINED = "minilm-"
SIDED = "easyvqa-question-adversarial"
SAME = 0.005  # half a point
BEST = {
    "ssa-1": 0.8491,
    "ssa-2": 0.7112,
    "ssa-2-short": 0.7112,
}  # the paper's best: goal of a baseline
PAPER = {
    "ssa-1": {"none": 81.20, "coral": 81.89, "mse": 82.33, "mmd": 84.80, "adversarial": 84.91},
    "ssa-2": {"none": 69.59, "coral": 69.83, "mse": 69.87, "mmd": 70.80, "adversarial": 71.12},
}
PAPER["ssa-2-short"] = PAPER["ssa-2"]
PLACEBO = {
    "coral": "scattered-coral",
    "mse": "shuffled-mse",
    "mmd": "scattered-mmd",
    "adversarial": "shuffled-adversarial",
    "kl": "shuffled-kl",
    "emd": "shuffled-emd",
}
LOSSES = ("mse", "kl", "emd", "coral", "mmd", "adversarial")
FOUND = ("surrogate_mass_inside", "own_mass_inside", "surrogate_pointing", "own_pointing")
OWN = "own-mse"  # targets without a search
CONTROLS = {
    "trained-on": "time alone",
    "gradcam-mse": "PAAN",
    "shuffled-in-class-mse": "the class is enough",
    "random-mse": "any map does",
    "uniform-mse": "any map does",
}
UNSEEN = (3, 4, 5)  # seeds of scenes for agreement by pointing
WANTED = 3  # required number of losses that raise agreement
ASKED = (range(10, 20), range(20, 30))  # seeds for removal by the mask token
FEWEST = 5  # minimum seeds for a verdict there


@dataclass(frozen=True)
class Kept:
    """Runs of one folder: reported results, and numbers per item."""

    name: str
    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]

    def seeds(self, row: str) -> list[int]:
        """Return the seeds of a row."""
        return sorted(seed for label, seed in self.results if label == row)

    def each(self, row: str, name: str, seeds: list[int]) -> Tensor:
        """Return a number per item, one line per seed."""
        return torch.stack([self.samples[f"{row}/seed-{seed}/{name}"] for seed in seeds])

    def minus(
        self, one: str, other: str, name: str = "accuracy", among: Sequence[int] | None = None
    ) -> tuple[Interval, int] | None:
        """Return the difference of two rows over their common seeds; None for fewer than two.

        `among` restricts the seeds.
        """
        rows = (one, other)
        both = [
            seed
            for seed in self.seeds(one)
            if all(f"{row}/seed-{seed}/{name}" in self.samples for row in rows)
        ]
        seeds = both if among is None else [seed for seed in both if seed in among]
        if len(seeds) < 2:
            return None
        apart = self.each(one, name, seeds) - self.each(other, name, seeds)
        # a question whose answer is not a class has no accuracy
        apart[:, apart.isnan().any(dim=0)] = torch.nan
        return over(apart, self.name), len(seeds)

    def means(self, row: str, name: str) -> list[float]:
        """Return the reported values of a metric for each run of a row."""
        found = [self.results[row, seed]["ours"].get(name) for seed in self.seeds(row)]
        return [one["value"] for one in found if one is not None]


def read(folder: Path) -> Kept:
    """Return the stored results of a folder."""
    return Kept(folder.name, *kept_in.read(folder))


def wanted(name: str, values: Any) -> Any | None:
    """Select the per-item numbers that the rules need."""
    return values if name in KEPT else None


# --- formatting


def points(found: tuple[Interval, int] | None, unit: float = 100.0) -> str:
    """Format a difference in percentage points, with interval, seeds and verdict."""
    return numbers(found, unit) + ("" if found is None else f": {verdict(found[0])}")


def numbers(found: tuple[Interval, int] | None, unit: float = 100.0) -> str:
    """Format the same without a verdict, for comparisons without a rule."""
    if found is None:
        return "not run with two seeds"
    one, seeds = found
    around = f"{unit * one.low:+.2f} to {unit * one.high:+.2f}"
    note = f" ({one.note})" if seeds == 2 else ""
    return f"{unit * one.mean:+.2f} ({around}), {seeds} seeds{note}"


def verdict(found: Interval) -> str:
    """Return confirmed, refuted or undecided, as defined in LOG.md."""
    if found.low > 0:
        return judged(found, "confirmed")
    if found.high < 0 or (found.low > -SAME and found.high < SAME):
        return judged(found, "REFUTED")
    return judged(found, "undecided")


def helps(gain: tuple[Interval, int] | None, beyond: tuple[Interval, int] | None) -> str:
    """Return whether a loss helps: more than none, and more than its placebo."""
    if gain is None or beyond is None:
        return "cannot be said"
    both = gain[0].low > 0 and beyond[0].low > 0
    text = "yes" if both else "no" if gain[0].high <= 0 or beyond[0].high <= 0 else "not shown"
    return judged(min(gain[0], beyond[0], key=lambda one: one.runs), text)


def spread(values: list[float]) -> str:
    """Format a mean with the standard deviation over seeds."""
    if not values:
        return "-"
    middle = f"{np.mean(values):.4f}"
    return middle if len(values) < 2 else f"{middle} ± {np.std(values, ddof=1):.4f}"


# --- the rules


def accuracy_table(kept: Kept) -> None:
    """Apply the rules for tables 1 and 2: baseline, gains, and gains over placebos."""
    none = kept.means("none", "accuracy")
    strong = "yes" if none and np.mean(none) >= BEST[kept.name] else "NO"
    print(f"baseline {spread(none)}, at least the paper's best {BEST[kept.name]}: {strong}")
    means = gains(kept, "")
    if kept.seeds("uniform-mse"):
        broad = kept.minus("uniform-mse", "shuffled-mse")
        print(f"  broad is what helps, uniform-mse over shuffled-mse: {points(broad)}")
    controls(kept, "accuracy")
    if kept.seeds("mean-map-mse"):
        best = kept.minus("mse", "mean-map-mse")
        print(f"  the best map does better than the weighted mean of all: {points(best)}")
    if kept.seeds(f"{PRETRAINED}none"):
        print(f"  {PRETRAINED}none: {spread(kept.means(f'{PRETRAINED}none', 'accuracy'))}")
        gains(kept, PRETRAINED)
    order = {"none": float(np.mean(none)), **{k: float(np.mean(v)) for k, v in means.items() if v}}
    if len(order) == 5:
        print(
            f"  rank correlation with the paper's five rows: {ranks(order, PAPER[kept.name]):+.2f}"
        )


def controls(kept: Kept, name: str) -> None:
    """Print control targets and longer training: each over none, and mse over each."""
    for row, what in CONTROLS.items():
        if kept.seeds(row):
            print(f"  {what}, {row} over none, {name}: {points(kept.minus(row, 'none', name))}")
            print(f"    mse over {row}, {name}: {points(kept.minus('mse', row, name))}")


def gains(kept: Kept, before: str) -> dict[str, list[float]]:
    """Print gains of each loss over none and its placebo; then all other rows of a network."""
    means = {}
    for loss in ("coral", "mse", "mmd", "adversarial"):
        row, placebo = before + loss, before + PLACEBO[loss]
        gain, beyond = kept.minus(row, f"{before}none"), kept.minus(row, placebo)
        means[loss] = kept.means(row, "accuracy")
        print(f"  {row}: {spread(means[loss])}")
        print(f"    over none: {points(gain)}")
        print(f"    over {placebo}: {points(beyond)}")
        print(f"    helps: {helps(gain, beyond)}")
    if kept.seeds(before + OWN):
        adds = kept.minus(f"{before}mse", before + OWN)
        print(f"  the search adds something, {before}mse over {before}{OWN}: {points(adds)}")
        for other in ("none", OWN, PLACEBO["mse"]):  # exploratory: no rule before the runs
            looks = kept.minus(f"{before}mse", before + other, "deletion")
            print(f"    deletion, {before}mse over {before}{other}: {numbers(looks)}")
        rests(kept, before)
    own = {label for label, _ in kept.results if label.startswith(PRETRAINED) is bool(before)}
    for row in sorted(own - {f"{before}none", *(before + loss for loss in means)}):
        accuracy, looks = (spread(kept.means(row, name)) for name in ("accuracy", "entropy"))
        found = numbers(kept.minus(row, f"{before}none"))
        print(f"  {row}: {accuracy}, entropy {looks}, over none {found}")
    return means


def rests(kept: Kept, before: str) -> None:
    """Test whether answers depend more on attended words, when words are overwritten. New seeds.

    Tested twice: the first time a row was missing. Then for losses without pairs: whether the map
    or only its sharpness matters.
    """
    name = "deletion_overwritten"
    for among in ASKED:
        found = {
            other: kept.minus(f"{before}mse", before + other, name, among)
            for other in (OWN, PLACEBO["mse"], "none")
        }
        if not any(found.values()):
            continue
        print(f"    {name}, seeds {among[0]} to {among[-1]} alone")
        for other, one in found.items():
            print(f"      {before}mse over {before}{other}: {enough(one)}")
        both = [found[OWN], found[PLACEBO["mse"]]]
        shown = "cannot be said"
        if all(one is not None and one[1] >= FEWEST for one in both):
            shown = "shown" if all(one is not None and one[0].low > 0 for one in both) else "no"
        print(f"      answers rest more on what is attended to: {shown}")
        for loss in ("coral", "mmd", "adversarial"):  # over none: exploratory
            row, placebo = before + loss, before + PLACEBO[loss]
            beside = kept.minus(row, f"{before}none", name, among)
            print(f"      {row} over {before}none: {numbers(beside)}")
            map_alone = kept.minus(row, placebo, name, among)
            print(f"      the map or its sharpness, {row} over {placebo}: {enough(map_alone)}")


def enough(found: tuple[Interval, int] | None) -> str:
    """Format a difference, with a verdict if it has the seeds required by the rule."""
    return numbers(found) if found is None or found[1] < FEWEST else points(found)


def ranks(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Return Spearman's correlation of two orders of the same rows."""
    order = [np.argsort(np.argsort([one[name] for name in theirs])) for one in (ours, theirs)]
    return float(np.corrcoef(*order)[0, 1])


def scenes(kept: Kept) -> None:
    """Print agreement with the truth: before and after, over placebos, truth as target."""
    rows = [row for row in (*LOSSES, OWN, "truth-kl", "truth-mse", "truth-adversarial")
            if kept.seeds(row)]  # fmt: skip
    for row in ("none", *rows):
        values = {name: spread(kept.means(row, name)) for name in KEPT[:4]}
        print(f"  {row}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    for row in rows:
        for name in ("mass_inside", "pointing", "rank_correlation", "accuracy"):
            print(f"    {row} over none, {name}: {points(kept.minus(row, 'none', name))}")
            for other in (PLACEBO.get(row, ""), OWN if row in LOSSES else ""):
                if kept.seeds(other):
                    print(f"    {row} over {other}, {name}: {points(kept.minus(row, other, name))}")
        found = {name: spread(kept.means(row, name)) for name in FOUND if kept.means(row, name)}
        if found:
            print(f"    {row}, targets: " + ", ".join(f"{k} {v}" for k, v in found.items()))
    raised(kept, "mass_inside", None)
    controls(kept, "pointing")
    if kept.name == "ssa-scenes":
        raised(kept, "pointing", UNSEEN)
        raised(kept, "rank_correlation", UNSEEN)
    works = [row for row in rows if row.startswith("truth")]
    held = {row: kept.minus(row, "none", "mass_inside") for row in works}
    up = [row for row, one in held.items() if one is not None and one[0].low > 0]
    print(f"  with the truth as target mass rises for {up} of {works}")
    rivals(kept)
    lighter(kept)


def rivals(kept: Kept) -> None:
    """With the truth as target: test an adversary that sees attended features."""
    one, other = "truth-adversarial-attended", "truth-adversarial-mean"
    if kept.seeds(one):
        for name in ("mass_inside", "pointing"):
            print(f"  {one} over {other}, {name}: {points(kept.minus(one, other, name))}")
            print(f"  {one} over none, {name}: {points(kept.minus(one, 'none', name))}")


def lighter(kept: Kept) -> None:
    """With the truth as target: test an adversary of smaller weight."""
    for row in sorted(label for label in {row for row, _ in kept.results} if "-weight-" in label):
        for name in ("mass_inside", "pointing", "accuracy"):
            print(f"  {row} over none, {name}: {points(kept.minus(row, 'none', name))}")


def raised(kept: Kept, name: str, among: Sequence[int] | None) -> None:
    """Count the losses that raise agreement over none, and over the placebo as well."""
    tried = [row for row in LOSSES if kept.seeds(row)]
    over_none, over_both, runs = [], [], []
    print(f"  by {name}, " + ("all seeds" if among is None else f"seeds {list(among)} alone"))
    for row in tried:
        gain = kept.minus(row, "none", name, among)
        beyond = kept.minus(row, PLACEBO[row], name, among)
        print(f"    {row}: over none {points(gain)}; over the placebo {points(beyond)}")
        runs += [] if gain is None else [gain[0].runs]
        if gain is not None and gain[0].low > 0:
            over_none.append(row)
            over_both += [row] if beyond is not None and beyond[0].low > 0 else []
    shown = judged_by(min(runs, default=0), "shown" if len(over_none) >= WANTED else "not shown")
    print(f"    raised for {over_none} of {len(tried)} losses, {WANTED} are wanted: {shown}")
    print(f"    and over the placebo, so that it teaches where to look: {over_both}")


def people(kept: Kept) -> None:
    """Print Yelp-HAT: rank correlation with human rationales."""
    print(f"  none: {spread(kept.means('yelp-none', 'rank_correlation'))}")
    for row in sorted({label for label, _ in kept.results} - {"yelp-none"}):
        for name in ("rank_correlation", "mass_inside", "accuracy"):
            over = kept.minus(row, "yelp-none", name)
            print(f"  {row} over none, {name}: {points(over)}")
        plain = row.removeprefix("yelp-")
        for other in (PLACEBO.get(plain, ""), OWN if plain in PLACEBO else ""):
            if other and kept.seeds(f"yelp-{other}"):
                beyond = kept.minus(row, f"yelp-{other}", "rank_correlation")
                print(f"  {row} over yelp-{other}, rank_correlation: {points(beyond)}")


def asked(kept: Kept) -> None:
    """Print easy-VQA and DAQUAR: accuracy with the adversary on image, question or both."""
    for name in ("easyvqa", "daquar"):
        if not kept.seeds(f"{name}-none"):
            continue
        print(f"  {name}, none: {spread(kept.means(f'{name}-none', 'accuracy'))}")
        for side in ("image", "question", "both"):
            row, placebo = f"{name}-{side}-adversarial", f"{name}-{side}-shuffled-adversarial"
            print(f"  {name}, {side}: {spread(kept.means(row, 'accuracy'))}")
            print(f"    over none: {points(kept.minus(row, f'{name}-none'))}")
            if kept.seeds(placebo):
                print(f"    its placebo: {spread(kept.means(placebo, 'accuracy'))}")
                print(f"    over its placebo: {points(kept.minus(row, placebo))}")


def two_words(folders: Sequence[str]) -> None:
    """Print the probability of the truth from all words and the best two: figure 6."""
    for folder in folders:
        kept = read(HERE / folder)
        for row in sorted({label for label, _ in kept.results}):
            whole, two = (kept.means(row, f"{name}_score") for name in ("whole_text", "two_words"))
            if whole and row.removeprefix(PRETRAINED) in ("mse", "yelp-mse", SIDED):
                print(f"  {folder} {row}: all {spread(whole)}, two {spread(two)}")


def masks(kept: Kept) -> None:
    """Print the score of a search by number of questions, and the accuracy: figure 7."""
    for row in sorted({label for label, _ in kept.results}):
        names = ("base_score", "best_score", "probes", "search_seconds", "accuracy")
        print(f"  {row}: " + ", ".join(f"{n} {spread(kept.means(row, n))}" for n in names))


def main() -> None:
    """Import the given runs, or apply the rules to stored results."""
    if len(sys.argv) == 3:
        kept_in.keep(
            Path(sys.argv[1]),
            HERE / Path(sys.argv[2]).name,
            lambda name, values: values if name in KEPT else None,
        )
    for name, rule in (
        ("ssa-1", accuracy_table),
        ("ssa-2", accuracy_table),
        ("ssa-2-short", accuracy_table),
        ("ssa-scenes", scenes),
        ("ssa-scenes-small", scenes),
        ("ssa-3", people),
        ("ssa-4", asked),
        ("ssa-masks", masks),
    ):
        if (HERE / name / "samples.npz").is_file():
            print(f"\n{name}")
            rule(read(HERE / name))
        else:
            print(f"\n{name}: no results")
    print("\nonly two words")
    two_words(("ssa-1", "ssa-3", "ssa-4"))


if __name__ == "__main__":
    main()
