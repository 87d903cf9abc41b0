"""Apply the decision rules in LOG.md to what is kept of Self Supervision for Attention Networks.

    python benchmarks/verdict_ssa.py                            # from benchmarks/ssa-*
    python benchmarks/verdict_ssa.py runs/ssa-1 benchmarks/ssa-1  # keep finished runs first

Differences are taken item by item and seed by seed; intervals are drawn over seeds and items.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept as kept_in
import numpy as np
import torch
from torch import Tensor

from overt.measure import two_level
from overt.measure.statistics import Interval

HERE = Path(__file__).parent
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
}  # the paper's best, which a baseline should reach
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
UNSEEN = (3, 4, 5)  # seeds of scenes on which agreement by pointing was asked for
WANTED = 3  # losses that should raise agreement
ASKED = (range(10, 20), range(20, 30))  # seeds on which removal by the mask token was asked for
FEWEST = 5  # seeds of a comparison that gets a verdict there


@dataclass(frozen=True)
class Kept:
    """The runs of one folder: what they reported, and their numbers item by item."""

    name: str
    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]

    def seeds(self, row: str) -> list[int]:
        """The seeds that a row has."""
        return sorted(seed for label, seed in self.results if label == row)

    def each(self, row: str, name: str, seeds: list[int]) -> Tensor:
        """A number of every item of a row, a line a seed."""
        return torch.stack([self.samples[f"{row}/seed-{seed}/{name}"] for seed in seeds])

    def minus(
        self, one: str, other: str, name: str = "accuracy", among: Sequence[int] | None = None
    ) -> tuple[Interval, int] | None:
        """The difference of two rows over the seeds that both have; None for fewer than two.

        `among` names the only seeds that count.
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
        there = ~apart.isnan().any(dim=0)  # a question whose answer is no class has no accuracy
        return two_level(apart[:, there]), len(seeds)

    def means(self, row: str, name: str) -> list[float]:
        """What each run of a row reported of a measure."""
        found = [self.results[row, seed]["ours"].get(name) for seed in self.seeds(row)]
        return [one["value"] for one in found if one is not None]


def read(folder: Path) -> Kept:
    """What is kept in a folder."""
    return Kept(folder.name, *kept_in.read(folder))


def wanted(name: str, values: Any) -> Any | None:
    """What the rules ask of items."""
    return values if name in KEPT else None


# --- words


def said(found: tuple[Interval, int] | None, unit: float = 100.0) -> str:
    """A difference in points of a hundred, with its interval, its seeds and its verdict."""
    return numbers(found, unit) + ("" if found is None else f": {verdict(found[0])}")


def numbers(found: tuple[Interval, int] | None, unit: float = 100.0) -> str:
    """The same without a verdict, for what nothing was claimed of."""
    if found is None:
        return "not run with two seeds"
    one, seeds = found
    around = f"{unit * one.low:+.2f} to {unit * one.high:+.2f}"
    return f"{unit * one.mean:+.2f} ({around}), {seeds} seeds"


def verdict(found: Interval) -> str:
    """Confirmed, refuted or undecided, as LOG.md has it."""
    if found.low > 0:
        return "confirmed"
    if found.high < 0 or (found.low > -SAME and found.high < SAME):
        return "REFUTED"
    return "undecided"


def helps(gain: tuple[Interval, int] | None, beyond: tuple[Interval, int] | None) -> str:
    """Whether a loss helps: more than none, and more than its placebo."""
    if gain is None or beyond is None:
        return "cannot be said"
    both = gain[0].low > 0 and beyond[0].low > 0
    return "yes" if both else "no" if gain[0].high <= 0 or beyond[0].high <= 0 else "not shown"


def spread(values: list[float]) -> str:
    """A mean with the deviation between seeds."""
    if not values:
        return "-"
    middle = f"{np.mean(values):.4f}"
    return middle if len(values) < 2 else f"{middle} ± {np.std(values, ddof=1):.4f}"


# --- the rules


def accuracy_table(kept: Kept) -> None:
    """Tables 1 and 2: a strong baseline, gains, and gains over placebos."""
    none = kept.means("none", "accuracy")
    strong = "yes" if none and np.mean(none) >= BEST[kept.name] else "NO"
    print(f"baseline {spread(none)}, at least the paper's best {BEST[kept.name]}: {strong}")
    means = gains(kept, "")
    if kept.seeds("uniform-mse"):
        broad = kept.minus("uniform-mse", "shuffled-mse")
        print(f"  broad is what helps, uniform-mse over shuffled-mse: {said(broad)}")
    controls(kept, "accuracy")
    if kept.seeds("mean-map-mse"):
        best = kept.minus("mse", "mean-map-mse")
        print(f"  the best map does better than the weighted mean of all: {said(best)}")
    if kept.seeds(f"{PRETRAINED}none"):
        print(f"  {PRETRAINED}none: {spread(kept.means(f'{PRETRAINED}none', 'accuracy'))}")
        gains(kept, PRETRAINED)
    order = {"none": float(np.mean(none)), **{k: float(np.mean(v)) for k, v in means.items() if v}}
    if len(order) == 5:
        print(
            f"  rank correlation with the paper's five rows: {ranks(order, PAPER[kept.name]):+.2f}"
        )


def controls(kept: Kept, name: str) -> None:
    """Other targets and none at all, as long: each over none, and the right targets over each."""
    for row, what in CONTROLS.items():
        if kept.seeds(row):
            print(f"  {what}, {row} over none, {name}: {said(kept.minus(row, 'none', name))}")
            print(f"    mse over {row}, {name}: {said(kept.minus('mse', row, name))}")


def gains(kept: Kept, before: str) -> dict[str, list[float]]:
    """What each loss gains over none and over its placebo; then all other rows of a network."""
    means = {}
    for loss in ("coral", "mse", "mmd", "adversarial"):
        row, placebo = before + loss, before + PLACEBO[loss]
        gain, beyond = kept.minus(row, f"{before}none"), kept.minus(row, placebo)
        means[loss] = kept.means(row, "accuracy")
        print(f"  {row}: {spread(means[loss])}")
        print(f"    over none: {said(gain)}")
        print(f"    over {placebo}: {said(beyond)}")
        print(f"    helps: {helps(gain, beyond)}")
    if kept.seeds(before + OWN):
        adds = kept.minus(f"{before}mse", before + OWN)
        print(f"  the search adds something, {before}mse over {before}{OWN}: {said(adds)}")
        for other in ("none", OWN, PLACEBO["mse"]):  # found in the runs, and no rule before them
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
    """Do answers rest more on what is attended to, when the words are written over? New seeds.

    Asked twice: the first time a row was missing. Then of losses that see no pairs, whether it is
    the map or only how sharp it is.
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
        for loss in ("coral", "mmd", "adversarial"):  # over none: no rule before them
            row, placebo = before + loss, before + PLACEBO[loss]
            beside = kept.minus(row, f"{before}none", name, among)
            print(f"      {row} over {before}none: {numbers(beside)}")
            map_alone = kept.minus(row, placebo, name, among)
            print(f"      the map or its sharpness, {row} over {placebo}: {enough(map_alone)}")


def enough(found: tuple[Interval, int] | None) -> str:
    """A difference, with a verdict where it has the seeds that the rule asks for."""
    return numbers(found) if found is None or found[1] < FEWEST else said(found)


def ranks(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """Spearman's correlation of two orders of the same rows."""
    order = [np.argsort(np.argsort([one[name] for name in theirs])) for one in (ours, theirs)]
    return float(np.corrcoef(*order)[0, 1])


def scenes(kept: Kept) -> None:
    """Agreement with the truth: before and after, over placebos, and with the truth as target."""
    rows = [row for row in (*LOSSES, OWN, "truth-kl", "truth-mse", "truth-adversarial")
            if kept.seeds(row)]  # fmt: skip
    for row in ("none", *rows):
        values = {name: spread(kept.means(row, name)) for name in KEPT[:4]}
        print(f"  {row}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    for row in rows:
        for name in ("mass_inside", "pointing", "rank_correlation", "accuracy"):
            print(f"    {row} over none, {name}: {said(kept.minus(row, 'none', name))}")
            for other in (PLACEBO.get(row, ""), OWN if row in LOSSES else ""):
                if kept.seeds(other):
                    print(f"    {row} over {other}, {name}: {said(kept.minus(row, other, name))}")
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
    """With the truth as target: does a rival that sees what a map takes teach where to look?"""
    one, other = "truth-adversarial-attended", "truth-adversarial-mean"
    if kept.seeds(one):
        for name in ("mass_inside", "pointing"):
            print(f"  {one} over {other}, {name}: {said(kept.minus(one, other, name))}")
            print(f"  {one} over none, {name}: {said(kept.minus(one, 'none', name))}")


def lighter(kept: Kept) -> None:
    """With the truth as target: does an adversary of less weight teach where to look?"""
    for row in sorted(label for label in {row for row, _ in kept.results} if "-weight-" in label):
        for name in ("mass_inside", "pointing", "accuracy"):
            print(f"  {row} over none, {name}: {said(kept.minus(row, 'none', name))}")


def raised(kept: Kept, name: str, among: Sequence[int] | None) -> None:
    """How many losses raise a measure of agreement over none, and over the placebo as well."""
    tried = [row for row in LOSSES if kept.seeds(row)]
    over_none, over_both = [], []
    print(f"  by {name}, " + ("all seeds" if among is None else f"seeds {list(among)} alone"))
    for row in tried:
        gain = kept.minus(row, "none", name, among)
        beyond = kept.minus(row, PLACEBO[row], name, among)
        print(f"    {row}: over none {said(gain)}; over the placebo {said(beyond)}")
        if gain is not None and gain[0].low > 0:
            over_none.append(row)
            over_both += [row] if beyond is not None and beyond[0].low > 0 else []
    shown = "shown" if len(over_none) >= WANTED else "not shown"
    print(f"    raised for {over_none} of {len(tried)} losses, {WANTED} are wanted: {shown}")
    print(f"    and over the placebo, so that it teaches where to look: {over_both}")


def people(kept: Kept) -> None:
    """Yelp-HAT: rank correlation with what people marked."""
    print(f"  none: {spread(kept.means('yelp-none', 'rank_correlation'))}")
    for row in sorted({label for label, _ in kept.results} - {"yelp-none"}):
        for name in ("rank_correlation", "mass_inside", "accuracy"):
            over = kept.minus(row, "yelp-none", name)
            print(f"  {row} over none, {name}: {said(over)}")
        plain = row.removeprefix("yelp-")
        for other in (PLACEBO.get(plain, ""), OWN if plain in PLACEBO else ""):
            if other and kept.seeds(f"yelp-{other}"):
                beyond = kept.minus(row, f"yelp-{other}", "rank_correlation")
                print(f"  {row} over yelp-{other}, rank_correlation: {said(beyond)}")


def asked(kept: Kept) -> None:
    """easy-VQA and DAQUAR: accuracy with image, question or both taught by the adversary."""
    for name in ("easyvqa", "daquar"):
        if not kept.seeds(f"{name}-none"):
            continue
        print(f"  {name}, none: {spread(kept.means(f'{name}-none', 'accuracy'))}")
        for side in ("image", "question", "both"):
            row, placebo = f"{name}-{side}-adversarial", f"{name}-{side}-shuffled-adversarial"
            print(f"  {name}, {side}: {spread(kept.means(row, 'accuracy'))}")
            print(f"    over none: {said(kept.minus(row, f'{name}-none'))}")
            if kept.seeds(placebo):
                print(f"    its placebo: {spread(kept.means(placebo, 'accuracy'))}")
                print(f"    over its placebo: {said(kept.minus(row, placebo))}")


def two_words(folders: Sequence[str]) -> None:
    """Figure 6: how sure a network is of the truth from all words, and from its best two."""
    for folder in folders:
        kept = read(HERE / folder)
        for row in sorted({label for label, _ in kept.results}):
            whole, two = (kept.means(row, f"{name}_score") for name in ("whole_text", "two_words"))
            if whole and row.removeprefix(PRETRAINED) in ("mse", "yelp-mse", SIDED):
                print(f"  {folder} {row}: all {spread(whole)}, two {spread(two)}")


def masks(kept: Kept) -> None:
    """Figure 7: the score that a search reaches, for how many questions, and accuracy after it."""
    for row in sorted({label for label, _ in kept.results}):
        names = ("base_score", "best_score", "probes", "search_seconds", "accuracy")
        print(f"  {row}: " + ", ".join(f"{n} {spread(kept.means(row, n))}" for n in names))


def main() -> None:
    """Keep what is named, or apply the rules to all that is kept."""
    if len(sys.argv) == 3:
        kept_in.keep(
            Path(sys.argv[1]),
            Path(sys.argv[2]),
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
            print(f"\n{name}: nothing is kept")
    print("\nonly two words")
    two_words(("ssa-1", "ssa-3", "ssa-4"))


if __name__ == "__main__":
    main()
