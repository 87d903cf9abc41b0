"""Apply the decision rules in LOG.md to what is kept of hard attention.

    python benchmarks/verdict_han.py                                            # benchmarks/han-*
    python benchmarks/verdict_han.py runs/sort benchmarks/han-sortclevr         # keep runs first
    python benchmarks/verdict_han.py --figure runs/sort build/figure3.svg       # draw figure 3

Intervals are over seeds and questions where there are several seeds, else over questions.
Differences are taken question by question and seed by seed, in the seeds that both rows have.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept as kept_in
import numpy as np
import torch
from kept import in_points, over
from torch import Tensor

from overt.measure.statistics import Interval

HERE = Path(__file__).parent
AGREEMENT = ("covered", "beyond_chance", "mass_inside", "deletion")
KEPT = ("accuracy", "covered", "beyond_chance", "cells_kept")
STRONG, POINT, MISSED, COLLAPSE = 0.94, 0.01, 0.9, 2.0
LEARNED = ("gumbel-sum-16", "straight-through-sum-16", "soft-to-hard-sum-16")
BETWEEN = (
    ("han-sum-32", "han-sum-16"),
    ("han-sum-32", "sum"),
    ("han-pairwise-32", "han-pairwise-16"),
    ("han-pairwise-32", "pairwise"),
)
LEVELS = (0.8, 0.9)
FIGURE_3 = ("rn", "rn-dropout", "han-rn-fine", "han-rn", "st-rn")
BASELINES = {"rn": "rn", "rn-dropout": "rn"}  # and the row whose milliseconds a step they have
OURS, RELATIONAL = "han-rn-fine", "accuracy_relational"
EACH = 20  # questions of a picture
GUESSED, BEYOND = 0.358, 0.10  # of scenes by the family of the question; what has to be learned
MOST_KINDS = 2  # of questions, up to which their accuracies are kept run by run
STOPPED = ("first.json", "second.json", "third.json")  # steps of questions, then of pictures
COUNTED, FOUND = 0.64, 0.9  # of relational questions, of those about one thing


@dataclass(frozen=True)
class Kept:
    """The runs of one table: what they reported, and their numbers question by question."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]
    curves: Mapping[tuple[str, int], list[dict[str, float]]]
    alone: Mapping[str, float]

    def steps(self, row: str, seed: int, level: float, name: str = "accuracy") -> float | None:
        """After how many steps a run first had that much of validation; None if it never did."""
        curve = self.curves.get((row, seed), [])
        return next((one["step"] for one in curve if one[name] >= level), None)

    def seconds(self, row: str, seed: int, level: float) -> float | None:
        """The steps to a level in seconds of a card that has nothing else to do."""
        steps, timed = self.steps(row, seed, level), BASELINES.get(row, row)
        known = steps is not None and timed in self.alone
        return steps * self.alone[timed] / 1000 if steps is not None and known else None

    def kinds(self) -> dict[str, Tensor]:
        """Which questions are of which kind: the runs of a table were all asked the same."""
        found: dict[str, Tensor] = {}
        for name, values in self.samples.items():
            kind = name.rpartition("/")[2].removeprefix("accuracy_")
            if "/accuracy_" in name and kind not in found:
                found[kind] = ~values.isnan()
        return found

    def has(self, *rows: str) -> bool:
        """Whether there is a run of each of these rows; those that are missing are named."""
        missing = [row for row in rows if not self.seeds(row)]
        if missing:
            print(f"  not run: {', '.join(missing)}")
        elif not set.intersection(*(set(self.seeds(row)) for row in rows)):
            print("  no seed that all of them have")
            return False
        return not missing

    def seeds(self, row: str) -> list[int]:
        """The seeds of a row."""
        return sorted(seed for label, seed in self.results if label == row)

    def each(self, row: str, name: str, seeds: Sequence[int] | None = None) -> Tensor:
        """A number of every question of a row, a line a seed; questions without it are left out."""
        chosen = self.seeds(row) if seeds is None else seeds
        found = torch.stack([self.samples[f"{row}/seed-{seed}/{name}"] for seed in chosen])
        return found[:, ~found.isnan().any(dim=0)]

    def minus(self, one: str, other: str, name: str) -> Interval:
        """The difference of two rows in one number."""
        both = sorted(set(self.seeds(one)) & set(self.seeds(other)))
        return over(self.each(one, name, both) - self.each(other, name, both))

    def means(self, row: str, name: str) -> list[float]:
        """The number of a row, seed by seed."""
        return self.each(row, name).mean(dim=1).tolist()


def read(folder: Path) -> Kept | None:
    """What is kept of a table; None where nothing is."""
    if not (folder / "samples.npz").is_file():
        return None
    curves = {
        (path.parts[-3], int(path.parent.name.removeprefix("seed-"))): json.loads(path.read_text())[
            "rows"
        ]
        for path in folder.glob("*/seed-*/clock.json")
    }
    timed = folder / "alone.json"
    alone = json.loads(timed.read_text())["milliseconds"] if timed.is_file() else {}
    return Kept(*kept_in.read(folder), curves, alone)


def wanted(name: str, values: Any) -> Any | None:
    """What the rules ask of questions."""
    return values if name.startswith(KEPT) else None


def thinned(folder: Path) -> None:
    """Leave out of what is kept whatever another array of it tells.

    Where there are many kinds of question, one run says which is of which kind.
    """
    with np.load(folder / "samples.npz") as found:
        arrays = {name: found[name] for name in found.files}
    runs: dict[str, list[str]] = {}
    for name in arrays:
        run, _, what = name.rpartition("/")
        if what.startswith("accuracy_"):
            runs.setdefault(run, []).append(name)
    for run in list(runs)[1:]:
        if len(runs[run]) > MOST_KINDS:
            for name in runs[run]:
                del arrays[name]
    np.savez_compressed(folder / "samples.npz", **arrays)


# --- words


def decided(found: Interval) -> str:
    """Confirmed, refuted or open."""
    return "confirmed" if found.low > 0 else "refuted" if found.high < 0 else "open"


def listed(values: Sequence[float]) -> str:
    """A number seed by seed."""
    return " ".join(f"{value:.3f}" for value in values)


def difference(kept: Kept, one: str, other: str, name: str, what: str) -> None:
    """One difference and what it decides."""
    print(f"{what}: {one} minus {other}, {name}")
    if kept.has(one, other):
        found = kept.minus(one, other, name)
        print(f"  {in_points(found)}: {decided(found)}")


def no_worse(kept: Kept, one: str, other: str, name: str, what: str) -> None:
    """Whether a row is at most one point behind another."""
    print(f"{what}: {one} minus {other}, {name}")
    if kept.has(one, other):
        found = kept.minus(one, other, name)
        print(f"  {in_points(found)}: {'yes' if found.low > -POINT else 'not shown'}")


def overview(kept: Kept) -> None:
    """Every row: accuracy by seed and by kind, cells kept and what they found, operations."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        runs = [one for (label, _), one in kept.results.items() if label == row]
        cells, work = _mean(runs, "cells_kept"), _mean(runs, "flops")
        line = f"{row}: accuracy {listed(kept.means(row, 'accuracy'))}, {cells:.1f} cells"
        print(f"{line}, {work / 1e6:.2f} million operations")
        kinds = [name for name in runs[0]["ours"] if name.startswith("accuracy_")]
        also = [*kinds, *(name for name in AGREEMENT if name in runs[0]["ours"])]
        print("  " + ", ".join(f"{name} {_mean(runs, name):.3f}" for name in also))


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """A number of a row, over its seeds."""
    return statistics.fmean(run["ours"][name]["value"] for run in runs)


# --- the tables


def sort_of_clevr(kept: Kept) -> None:
    """The rules for the long rows of Sort-of-CLEVR: a quarter of fine cells against all coarse."""
    strong = []
    for row, what in (
        *((one, "strong enough a baseline") for one in BASELINES),
        (OURS, "must show"),
    ):
        print(f"{what}: {row}, {RELATIONAL}")
        if kept.has(row):
            each = kept.means(row, RELATIONAL)
            enough = statistics.fmean(each) >= STRONG
            strong += [row] if enough and row in BASELINES else []
            print(
                f"  {listed(each)}, mean {statistics.fmean(each):.3f}: {'yes' if enough else 'NO'}"
            )
    if kept.has(OURS) and statistics.fmean(kept.means(OURS, RELATIONAL)) < STRONG:
        found = statistics.fmean(
            run["groups"]["covered"]["relational"]["value"]
            for (row, _), run in kept.results.items()
            if row == OURS
        )
        missed = "cells are missed" if found < MISSED else "not cells that are missed"
        print(f"  the reason: covered {found:.3f}, {missed}")
    for row in BASELINES:
        difference(kept, OURS, row, RELATIONAL, "beside it")
        for level in LEVELS:
            sooner(kept, row, level)
    print(f"so what compares with RN is {'decided' if strong else 'undecided: none is strong'}")


def sort_of_clevr_short(kept: Kept) -> None:
    """The rules for the short rows of Sort-of-CLEVR."""
    for other in ("random-rn", "blind-rn"):
        difference(kept, "han-rn", other, RELATIONAL, "the rule is worth something")
        difference(kept, "han-rn", other, "covered", "beside it")
    print("figure 3b: straight-through")
    if kept.has("st-rn", "han-rn"):
        spread = [
            max(one) - min(one) for one in (kept.means(r, RELATIONAL) for r in ("st-rn", "han-rn"))
        ]
        apart = kept.minus("st-rn", "han-rn", RELATIONAL)
        loose = spread[0] > 2 * spread[1] or apart.high < 0
        print(f"  seeds apart {spread[0]:.3f} against {spread[1]:.3f}; {in_points(apart)}")
        print(f"  {'unstable' if loose else 'not unstable here'}")
    difference(kept, "adahan-rn", "han-rn", RELATIONAL, "as many as a question needs")
    collapse(kept, "adahan-rn")
    difference(kept, "han-sum", "san2-pos", "accuracy", "beside it, hard and soft end to end")


def sort_of_clevr_fine(kept: Kept) -> None:
    """The rule for short rows on fine cells: does the choice listen?"""
    difference(kept, OURS, "blind-rn", RELATIONAL, "it listens")
    difference(kept, OURS, "random-rn", RELATIONAL, "the rule is worth something")
    for other in ("blind-rn", "random-rn"):
        difference(kept, OURS, other, "accuracy_non_relational", "beside it")
        difference(kept, OURS, other, "covered", "beside it")


def sooner(kept: Kept, other: str, level: float) -> None:
    """Figure 3a: which of two rows is first at a level, by steps and by the seconds they take."""
    print(f"figure 3a, {other}: {level:.0%} of validation, steps and seconds alone on the card")
    if not kept.has(other, OURS):
        return
    ahead = []
    for seed in sorted(set(kept.seeds(other)) & set(kept.seeds(OURS))):
        steps = [kept.steps(row, seed, level) for row in (other, OURS)]
        times = [kept.seconds(row, seed, level) for row in (other, OURS)]
        told = ", ".join("never" if one is None else f"{one:.1f}" for one in times)
        print(f"  seed {seed}: {other}, {OURS} {steps} steps, {told} s")
        theirs, ours = times
        never = theirs is None and ours is not None  # then ours was the sooner one
        both = theirs is not None and ours is not None and ours < theirs
        ahead.append(None if theirs is None and ours is None else never or both)
    print(f"  {'not decided' if None in ahead else 'yes' if all(ahead) else 'NO'}")


def collapse(kept: Kept, row: str) -> None:
    """Whether an adaptive row has come to keep next to nothing."""
    if kept.has(row):
        cells = kept.means(row, "cells_kept")
        fallen = statistics.fmean(cells) < COLLAPSE
        print(f"  cells kept {listed(cells)}: {'collapse' if fallen else 'no collapse'}")


def choosing(kept: Kept, name: str = "accuracy") -> None:
    """The rules that scenes, easy-VQA and DAQUAR share."""
    no_worse(kept, "han-sum-16", "sum", name, "a few are enough")
    no_worse(kept, "han-pairwise-16", "pairwise", name, "a few are enough")
    for ours, other in BETWEEN:
        difference(kept, ours, other, name, "beside it, 32 cells")
    no_worse(kept, "han-pairwise-48", "san2-pos", name, "at least as good as soft")
    difference(kept, "han-pairwise-48", "san2-pos", name, "better than soft")
    for row in ("adahan-pairwise", "adahan-sum"):
        other = row.replace("adahan", "han") + "-48"
        difference(kept, row, other, name, "as many as a question needs")
        collapse(kept, row)
    for other in ("adahan-sum", "han-sum-48"):
        difference(kept, "adahan-warm-sum", other, name, "beside it, a temperature of 4")
    collapse(kept, "adahan-warm-sum")
    for k in (16, 32, 48):
        difference(kept, f"han-sum-{k}", f"han-sum-{k}-depth0", name, "layers before the sum")
    for other in ("random-sum-16", "blind-sum-16"):
        difference(kept, "han-sum-16", other, name, "the rule is worth something")
    for row in LEARNED:
        difference(kept, row, "han-sum-16", name, "learned choices")
    difference(kept, "san2", "san1", name, "two hops")
    difference(kept, "han-sum-16", "san2-pos", name, "beside it, hard and soft")


def families(kept: Kept) -> None:
    """Differences by kind of question, which decide nothing: there are too many."""
    for other in ("blind-sum-16", "random-sum-16", "sum"):
        if not kept.has("han-sum-16", other):
            continue
        seeds = sorted(set(kept.seeds("han-sum-16")) & set(kept.seeds(other)))
        ours, theirs = (kept.each(row, "accuracy", seeds) for row in ("han-sum-16", other))
        for kind, of in kept.kinds().items():
            told = in_points(over((ours - theirs)[:, of]))
            print(f"  {kind}: han-sum-16 minus {other} {told}, no verdict")


def scenes(kept: Kept) -> None:
    """The rules for scenes."""
    print("the networks have learned: sum or san2-pos at least .10 above guessing by family")
    for row in ("sum", "san2-pos"):
        if kept.has(row):
            mean = statistics.fmean(kept.means(row, "accuracy"))
            print(f"  {row} {mean:.3f}: {'yes' if mean >= GUESSED + BEYOND else 'no'}")
    print("finds what decides: han-sum-16, beyond_chance")
    if kept.has("han-sum-16"):
        found = over(kept.each("han-sum-16", "beyond_chance"))
        print(f"  {in_points(found)}: {decided(found)}")
    for other in ("blind-sum-16", "random-sum-16"):
        difference(kept, "han-sum-16", other, "covered", "finds what decides")
    choosing(kept)
    families(kept)


def daquar(kept: Kept) -> None:
    """The rules for DAQUAR."""
    difference(kept, "sum", "random-sum-16", "accuracy", "says something about choosing")
    choosing(kept)
    difference(kept, "simple-han", "simple-san", "accuracy", "end to end")


TABLES = {
    "han-sortclevr": sort_of_clevr,
    "han-sortclevr-short": sort_of_clevr_short,
    "han-sortclevr-short-fine": sort_of_clevr_fine,
    "han-scenes": scenes,
    "han-scenes-long": scenes,
    "han-scenes-short": scenes,
    "han-easyvqa": choosing,
    "han-daquar": daquar,
}


def stopped(folder: Path) -> None:
    """Runs that were stopped: where they stood, and after how many questions they got anywhere."""
    for path in [one for name in STOPPED if (one := folder / name).is_file()]:
        found = json.loads(path.read_text())
        each = 1 if path.name == STOPPED[0] else EACH
        print(f"\n== {folder.name}/{path.name}: {found['note']}")
        for name, run in sorted(found["runs"].items()):
            last = run["validation"][-1]
            asked = each * run["batch"]
            counts = _first(run["validation"], 3, COUNTED, asked)
            finds = _first(run["validation"], 2, FOUND, asked)
            print(
                f"{name}: step {last[0]}, one thing {last[2]:.3f}, relational {last[3]:.3f}; "
                f"counts {counts}, finds by colour {finds}"
            )


def _first(rows: Sequence[Sequence[float]], column: int, level: float, asked: int) -> str:
    """After how many million questions a validation first had that much."""
    steps = [row[0] for row in rows if row[column] >= level]
    return f"after {steps[0] * asked / 1e6:.2f} million" if steps else "never"


def figure(runs: Path, out: Path) -> None:
    """Validation accuracy against seconds of training, a line a run, as figure 3.

    Seconds are steps times milliseconds a step alone on the card, where these were measured.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    timed = runs / "alone.json"
    alone = json.loads(timed.read_text())["milliseconds"] if timed.is_file() else {}
    drawn, axes = pyplot.subplots(figsize=(6, 4))
    for number, row in enumerate(FIGURE_3):
        for path in sorted(runs.glob(f"{row}/seed-*/clock.json")):
            rows = json.loads(path.read_text())["rows"]
            label = row if path.parent.name == "seed-0" else None
            right, steps = ([one[name] for one in rows] for name in ("accuracy", "step"))
            seconds = [one["seconds"] for one in rows]
            if BASELINES.get(row, row) in alone:
                seconds = [step * alone[BASELINES.get(row, row)] / 1000 for step in steps]
            axes.plot(seconds, right, color=f"C{number}", label=label)
    axes.set(xlabel="seconds of training", ylabel="validation accuracy")
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(out, bbox_inches="tight")


def main(words: Sequence[str]) -> None:
    """Keep or draw what is named, or judge all that is kept."""
    match words:
        case ["--figure", runs, out]:
            figure(Path(runs), Path(out))
            return
        case [runs, folder]:
            timed = "sortclevr" in folder  # figure 3 is of these
            files = ("results.json", "clock.json") if timed else ("results.json",)
            kept_in.keep(Path(runs), Path(folder), wanted, files)
            thinned(Path(folder))
    for name, judge in TABLES.items():
        kept = read(HERE / name)
        print(f"\n== {name}" if kept else f"\n== {name}: nothing is kept")
        if kept is not None:
            overview(kept)
            judge(kept)
    stopped(HERE / "han-sortclevr-stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
