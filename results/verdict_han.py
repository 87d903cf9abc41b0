"""Apply the decision rules in LOG.md to results of hard attention.

    python results/verdict_han.py                                            # results/han-*
    python results/verdict_han.py runs/sort results/han-sortclevr         # import runs first
    python results/verdict_han.py --alone runs/alone results/han-fig3a       # milliseconds per step
    python results/verdict_han.py --figure runs/sort build/figure3.svg       # draw figure 3

Intervals are over seeds and images if there are several seeds, else over images: questions about
one image are a cluster. A verdict of three or four seeds is provisional. Differences are per
question and seed, for the common seeds of both rows.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import run_results as kept_in
import torch
from archive import pack, unpacked
from run_results import in_points, judged, judged_by, over
from torch import Tensor

from overt.metrics.statistics import Interval
from overt.papers.han.tables import EQUAL_SECONDS

HERE = unpacked()
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
BASELINES = {"rn": "rn", "rn-dropout": "rn"}  # and the row with the same milliseconds per step
OURS, RELATIONAL = "han-rn-fine", "accuracy_relational"
EACH = 20  # questions per image
GUESSED, BEYOND = 0.358, 0.10  # of scenes, by family of question; required gain
MOST_KINDS = 2  # of questions, up to which accuracies are stored for each run
STOPPED = ("first.json", "second.json", "third.json")  # steps of questions, then of pictures
ANSWERED, COVERED, BY_CHANCE = 0.9, 0.99, 0.02  # controls of crowded scenes
RATIO = 0.05  # allowed difference of the ratio that `rn-aligned-seconds` was run with
TIMED = ("rn-santoro", "rn", "rn-aligned-fine")  # what has to be slower, for figure 3a
SHARED = ("rn", "han-rn-fine")  # rows of figure 3a whose first runs are in `han-sortclevr`
COUNTED, FOUND = 0.64, 0.9  # of relational questions, of those about one thing


@dataclass(frozen=True)
class Kept:
    """Runs of one table: reported results, and numbers per question."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]
    curves: Mapping[tuple[str, int], list[dict[str, float]]]
    alone: Mapping[str, float]
    folder: str

    def steps(self, row: str, seed: int, level: float, name: str = "accuracy") -> float | None:
        """Return the steps until a run reached a validation level; None if it never did."""
        curve = self.curves.get((row, seed), [])
        return next((one["step"] for one in curve if one[name] >= level), None)

    def seconds(self, row: str, seed: int, level: float) -> float | None:
        """Return the seconds until a level, on a GPU without other jobs."""
        steps, timed = self.steps(row, seed, level), BASELINES.get(row, row)
        known = steps is not None and timed in self.alone
        return steps * self.alone[timed] / 1000 if steps is not None and known else None

    def kinds(self) -> dict[str, Tensor]:
        """Return which questions are of which kind: the runs of a table share the questions."""
        found: dict[str, Tensor] = {}
        for name, values in self.samples.items():
            kind = name.rpartition("/")[2].removeprefix("accuracy_")
            if "/accuracy_" in name and kind not in found:
                found[kind] = ~values.isnan()
        return found

    def has(self, *rows: str) -> bool:
        """Return whether each of these rows has a run; print missing rows."""
        missing = [row for row in rows if not self.seeds(row)]
        if missing:
            print(f"  not run: {', '.join(missing)}")
        elif not set.intersection(*(set(self.seeds(row)) for row in rows)):
            print("  no seed that all of them have")
            return False
        return not missing

    def seeds(self, row: str) -> list[int]:
        """Return the seeds of a row."""
        return sorted(seed for label, seed in self.results if label == row)

    def each(self, row: str, name: str, seeds: Sequence[int] | None = None) -> Tensor:
        """Return a number per question, one line per seed; NaN where any seed has none."""
        chosen = self.seeds(row) if seeds is None else seeds
        found = torch.stack([self.samples[f"{row}/seed-{seed}/{name}"] for seed in chosen])
        return found.masked_fill(found.isnan().any(dim=0), torch.nan)

    def minus(self, one: str, other: str, name: str) -> Interval:
        """Return the difference of two rows in one number."""
        both = sorted(set(self.seeds(one)) & set(self.seeds(other)))
        return over(self.each(one, name, both) - self.each(other, name, both), self.folder)

    def means(self, row: str, name: str) -> list[float]:
        """Return the mean of a number for each seed."""
        return self.each(row, name).nanmean(dim=1).tolist()


def read(folder: Path) -> Kept | None:
    """Return the stored results of a table; None if there are none."""
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
    return Kept(*kept_in.read(folder), curves, alone, folder.name)


def wanted(name: str, values: Any) -> Any | None:
    """Select the per-question numbers that the rules need."""
    return values if name.startswith(KEPT) else None


def remove_redundant(folder: Path) -> None:
    """Remove redundant arrays.

    With many kinds of question, one run is enough to define the kind of each question.
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


def share_runs(source: Path, place: Path, rows: Sequence[str]) -> None:
    """Copy those runs of these rows that a folder lacks from the folder `source`."""
    lacking = [
        path
        for row in rows
        for path in sorted(source.glob(f"{row}/seed-*"))
        if not (place / row / path.name).exists()
    ]
    with np.load(source / "samples.npz") as theirs, np.load(place / "samples.npz") as ours:
        arrays = {name: ours[name] for name in ours.files}
        for path in lacking:
            key = f"{path.parent.name}/{path.name}"
            shutil.copytree(path, place / key)
            arrays |= {name: theirs[name] for name in theirs.files if name.startswith(f"{key}/")}
    np.savez_compressed(place / "samples.npz", **arrays)


def time_alone(runs: Path, place: Path) -> None:
    """Write the milliseconds per step of rows that were run alone, `training` by steps."""
    found = {
        path.parts[-3]: json.loads(path.read_text())
        for path in sorted(runs.glob("*/seed-*/results.json"))
    }
    times = {row: 1000 * one["clock"]["training"] / one["steps"] for row, one in found.items()}
    note = "Milliseconds per step of training, each row alone on the GPU."
    place.mkdir(exist_ok=True)
    text = json.dumps({"note": note, "milliseconds": times}, indent=1)
    (place / "alone.json").write_text(f"{text}\n")


# --- verdicts


def decided(found: Interval) -> str:
    """Return confirmed, refuted or open."""
    said = "confirmed" if found.low > 0 else "refuted" if found.high < 0 else "open"
    return judged(found, said)


def listed(values: Sequence[float]) -> str:
    """Format a number per seed."""
    return " ".join(f"{value:.3f}" for value in values)


def difference(kept: Kept, one: str, other: str, name: str, what: str) -> None:
    """Print one difference and its verdict."""
    print(f"{what}: {one} minus {other}, {name}")
    if kept.has(one, other):
        found = kept.minus(one, other, name)
        print(f"  {in_points(found)}: {decided(found)}")


def beyond(found: Interval, bound: float) -> str:
    """Return confirmed above a bound, refuted below it, else open."""
    said = "confirmed" if found.low > bound else "refuted" if found.high < bound else "open"
    return judged(found, said)


def compare(kept: Kept, one: str, other: str, name: str, what: str, bound: float) -> None:
    """Print one difference and whether it is above a bound."""
    print(f"{what}: {one} minus {other}, {name}, above {100 * bound:g} points")
    if kept.has(one, other):
        found = kept.minus(one, other, name)
        print(f"  {in_points(found)}: {beyond(found, bound)}")


def no_worse(kept: Kept, one: str, other: str, name: str, what: str) -> None:
    """Print whether a row is at most one point below another."""
    print(f"{what}: {one} minus {other}, {name}")
    if kept.has(one, other):
        found = kept.minus(one, other, name)
        shown = judged(found, "yes" if found.low > -POINT else "not shown")
        print(f"  {in_points(found)}: {shown}")


def overview(kept: Kept) -> None:
    """Print every row: accuracy by seed and kind, kept cells, coverage and operations."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        runs = [one for (label, _), one in kept.results.items() if label == row]
        cells, work = _mean(runs, "cells_kept"), _mean(runs, "flops")
        line = f"{row}: accuracy {listed(kept.means(row, 'accuracy'))}, {cells:.1f} cells"
        print(f"{line}, {work / 1e6:.2f} million operations")
        kinds = [name for name in runs[0]["ours"] if name.startswith("accuracy_")]
        also = [*kinds, *(name for name in AGREEMENT if name in runs[0]["ours"])]
        print("  " + ", ".join(f"{name} {_mean(runs, name):.3f}" for name in also))


def _mean(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of a number over the seeds of a row."""
    return statistics.fmean(run["ours"][name]["value"] for run in runs)


# --- the tables


def sort_of_clevr(kept: Kept) -> None:
    """Apply the rules for long rows of Sort-of-CLEVR: a quarter of fine cells, all coarse."""
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
    """Apply the rules for the short rows of Sort-of-CLEVR."""
    for other in ("random-rn", "blind-rn"):
        difference(kept, "han-rn", other, RELATIONAL, "the rule is worth something")
        difference(kept, "han-rn", other, "covered", "beside it")
    print("figure 3b: straight-through")
    if kept.has("st-rn", "han-rn"):
        spread = [
            max(one) - min(one) for one in (kept.means(r, RELATIONAL) for r in ("st-rn", "han-rn"))
        ]
        gap = kept.minus("st-rn", "han-rn", RELATIONAL)
        loose = spread[0] > 2 * spread[1] or gap.high < 0
        print(f"  seeds apart {spread[0]:.3f} against {spread[1]:.3f}; {in_points(gap)}")
        print(f"  {judged(gap, 'unstable' if loose else 'not unstable here')}")
    difference(kept, "adahan-rn", "han-rn", RELATIONAL, "as many as a question needs")
    collapse(kept, "adahan-rn")
    difference(kept, "han-sum", "san2-pos", "accuracy", "beside it, hard and soft end to end")


def sort_of_clevr_fine(kept: Kept) -> None:
    """Apply the rule for short rows on fine cells: does the selection use the question?"""
    difference(kept, OURS, "blind-rn", RELATIONAL, "it listens")
    difference(kept, OURS, "random-rn", RELATIONAL, "the rule is worth something")
    for other in ("blind-rn", "random-rn"):
        difference(kept, OURS, other, "accuracy_non_relational", "beside it")
        difference(kept, OURS, other, "covered", "beside it")


def figure_3a(kept: Kept) -> None:
    """Apply the rules of 2026-11-19 for figure 3a, its controls and its bounds."""
    strong = is_strong(kept)
    print(f"the ratio of {EQUAL_SECONDS:.2f}: milliseconds of han-rn over those of rn-aligned")
    if {"han-rn", "rn-aligned"} <= set(kept.alone):
        ratio = kept.alone["han-rn"] / kept.alone["rn-aligned"]
        fits = abs(ratio - EQUAL_SECONDS) <= RATIO
        print(f"  {ratio:.2f}: {'as expected' if fits else 'NO, rn-aligned-seconds has another'}")
    else:
        print("  not measured")
    for one, other in (("han-rn", "rn-aligned"), ("han-rn-fine", "rn-aligned-fine")):
        compare(kept, one, other, RELATIONAL, "the selection is free", -POINT)
    difference(kept, "han-rn", "rn-aligned-seconds", RELATIONAL, "accuracy at equal seconds")
    for one in ("han-rn", "han-rn-fine"):
        better_cells(kept, one.replace("han", "oracle", 1), one)
    difference(kept, "han-rn", "blind-rn", RELATIONAL, "it depends on the question")
    difference(kept, "han-rn", "random-rn", RELATIONAL, "better than chance")
    print(f"figure 3a: {OURS} is earlier at both levels, and rn-santoro is strong enough")
    print(f"  {earlier(kept, strong)}")


def is_strong(kept: Kept) -> bool:
    """Print whether the published relation network reaches its level, and return it."""
    print(f"the level: rn-santoro, {RELATIONAL}, {STRONG:.0%} or more")
    if not kept.has("rn-santoro"):
        return False
    each = kept.means("rn-santoro", RELATIONAL)
    strong = statistics.fmean(each) >= STRONG
    verdict = judged_by(len(each), "strong enough" if strong else "NOT strong enough")
    print(f"  {listed(each)}, mean {statistics.fmean(each):.3f}: {verdict}")
    return strong


def better_cells(kept: Kept, oracle: str, row: str) -> None:
    """Print whether the evidence itself would be better cells than those of the largest norm."""
    print(f"better cells would help: {oracle} minus {row}, {RELATIONAL}, above 0")
    if kept.has(oracle, row):
        found = kept.minus(oracle, row, RELATIONAL)
        said = "refuted" if found.high < POINT else "open"
        shown = judged(found, "confirmed" if found.low > 0 else said)
        print(f"  {in_points(found)}: {shown}")


def earlier(kept: Kept, strong: bool) -> str:
    """Return the verdict on figure 3a: confirmed, refuted or open.

    Confirmed if ours reaches both levels before every other row in every seed; refuted if some row
    reaches both before ours in every seed. A row that never reaches a level is later than one that
    does.
    """
    if not kept.has(OURS, *TIMED):
        return "not run"
    missing = [row for row in (OURS, *TIMED) if BASELINES.get(row, row) not in kept.alone]
    if missing:
        return f"open: no milliseconds per step of {', '.join(missing)}"
    seeds = sorted(set.intersection(*(set(kept.seeds(row)) for row in (OURS, *TIMED))))
    times = {
        row: [[kept.seconds(row, seed, level) for level in LEVELS] for seed in seeds]
        for row in (OURS, *TIMED)
    }
    for row, each in times.items():
        texts = ["/".join("never" if s is None else f"{s:.0f}" for s in one) for one in each]
        print(f"  {row}: {', '.join(texts)} s")
    if not strong:
        return "open: rn-santoro is not strong enough"
    pairs = {row: list(zip(times[OURS], times[row], strict=True)) for row in TIMED}
    if all(_before(ours, theirs) for each in pairs.values() for ours, theirs in each):
        return judged_by(len(seeds), "confirmed")
    if any(all(_before(theirs, ours) for ours, theirs in each) for each in pairs.values()):
        return judged_by(len(seeds), "refuted")
    return judged_by(len(seeds), "open")


def _before(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Return whether one run reached every level, and each before the other run did."""
    return all(
        ours is not None and (theirs is None or ours < theirs)
        for ours, theirs in zip(one, other, strict=True)
    )


def crowded(kept: Kept) -> None:
    """Apply the rules of 2026-11-19 for crowded scenes: only the question tells what to keep."""
    if not controls_hold(kept):
        print("so nothing below is decided")
        return
    for row in ("han-sum-9", "han-pairwise-9"):
        print(f"the selection uses the question: {row}, beyond_chance, above 0")
        if kept.has(row):
            found = over(kept.each(row, "beyond_chance"), kept.folder)
            nothing = found.low > -BY_CHANCE and found.high < BY_CHANCE
            said = "confirmed" if found.low > 0 else "refuted" if nothing else "open"
            print(f"  {in_points(found)}: {judged(found, said)}")
    difference(kept, "han-sum-9", "blind-sum-9", "accuracy", "useful")
    for other in ("oracle-sum-9", "san2-pos"):
        compare(kept, "han-sum-9", other, "accuracy", "as good as", -POINT)
    for row in ("straight-through-sum-9", "gumbel-sum-9"):
        difference(kept, row, "han-sum-9", "covered", "a learned selection uses it more")


def controls_hold(kept: Kept) -> bool:
    """Print whether the networks have learned and the positive controls hold, and return both."""
    checks = [("oracle-sum-9", "accuracy", ANSWERED), ("oracle-sum-9", "covered", COVERED)]
    print("learned, and positive controls")
    if not kept.has("oracle-sum-9", "blind-sum-9", "random-sum-9"):
        return False
    held = []
    for row, name, least in checks:
        mean = statistics.fmean(kept.means(row, name))
        held.append(mean >= least)
        print(f"  {row}, {name} {mean:.3f}, at least {least}: {'yes' if held[-1] else 'NO'}")
    for row in ("blind-sum-9", "random-sum-9"):
        mean = statistics.fmean(kept.means(row, "beyond_chance"))
        held.append(abs(mean) <= BY_CHANCE)
        print(f"  {row}, beyond_chance {mean:+.3f}: {'yes' if held[-1] else 'NO'}")
    return all(held)


def sooner(kept: Kept, other: str, level: float) -> None:
    """Compare which of two rows first reaches a level, in steps and seconds: figure 3a."""
    print(f"figure 3a, {other}: {level:.0%} of validation, steps and seconds alone on the GPU")
    if not kept.has(other, OURS):
        return
    ahead = []
    for seed in sorted(set(kept.seeds(other)) & set(kept.seeds(OURS))):
        steps = [kept.steps(row, seed, level) for row in (other, OURS)]
        times = [kept.seconds(row, seed, level) for row in (other, OURS)]
        text = ", ".join("never" if one is None else f"{one:.1f}" for one in times)
        print(f"  seed {seed}: {other}, {OURS} {steps} steps, {text} s")
        theirs, ours = times
        never = theirs is None and ours is not None  # then ours was first
        both = theirs is not None and ours is not None and ours < theirs
        ahead.append(None if theirs is None and ours is None else never or both)
    print(f"  {'not decided' if None in ahead else 'yes' if all(ahead) else 'NO'}")


def collapse(kept: Kept, row: str) -> None:
    """Print whether an adaptive row keeps almost no cells."""
    if kept.has(row):
        cells = kept.means(row, "cells_kept")
        fallen = statistics.fmean(cells) < COLLAPSE
        print(f"  cells kept {listed(cells)}: {'collapse' if fallen else 'no collapse'}")


def common_rules(kept: Kept, name: str = "accuracy") -> None:
    """Apply the common rules of scenes, easy-VQA and DAQUAR."""
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
    """Print differences by kind of question, without verdicts: there are too many."""
    for other in ("blind-sum-16", "random-sum-16", "sum"):
        if not kept.has("han-sum-16", other):
            continue
        seeds = sorted(set(kept.seeds("han-sum-16")) & set(kept.seeds(other)))
        ours, theirs = (kept.each(row, "accuracy", seeds) for row in ("han-sum-16", other))
        for kind, of in kept.kinds().items():
            text = in_points(over((ours - theirs).masked_fill(~of, torch.nan), kept.folder))
            print(f"  {kind}: han-sum-16 minus {other} {text}, no verdict")


def scenes(kept: Kept) -> None:
    """Apply the rules for scenes."""
    print("the networks have learned: sum or san2-pos at least .10 above guessing by family")
    for row in ("sum", "san2-pos"):
        if kept.has(row):
            mean = statistics.fmean(kept.means(row, "accuracy"))
            print(f"  {row} {mean:.3f}: {'yes' if mean >= GUESSED + BEYOND else 'no'}")
    print("finds what decides: han-sum-16, beyond_chance")
    if kept.has("han-sum-16"):
        found = over(kept.each("han-sum-16", "beyond_chance"), kept.folder)
        print(f"  {in_points(found)}: {decided(found)}")
    for other in ("blind-sum-16", "random-sum-16"):
        difference(kept, "han-sum-16", other, "covered", "finds what decides")
    common_rules(kept)
    families(kept)


def daquar(kept: Kept) -> None:
    """Apply the rules for DAQUAR."""
    difference(kept, "sum", "random-sum-16", "accuracy", "says something about choosing")
    common_rules(kept)
    difference(kept, "simple-han", "simple-san", "accuracy", "end to end")


TABLES = {
    "han-sortclevr": sort_of_clevr,
    "han-sortclevr-short": sort_of_clevr_short,
    "han-sortclevr-short-fine": sort_of_clevr_fine,
    "han-fig3a": figure_3a,
    "han-crowded": crowded,
    "han-scenes": scenes,
    "han-scenes-long": scenes,
    "han-scenes-short": scenes,
    "han-easyvqa": common_rules,
    "han-daquar": daquar,
}


def stopped(folder: Path) -> None:
    """Print the state of stopped runs, and the number of questions until they made progress."""
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
    """Return after how many million questions validation first reached a level."""
    steps = [row[0] for row in rows if row[column] >= level]
    return f"after {steps[0] * asked / 1e6:.2f} million" if steps else "never"


def figure(runs: Path, out: Path) -> None:
    """Draw validation accuracy against seconds of training, one line per run: figure 3.

    If measured, seconds are steps times the milliseconds per step of a run alone on the GPU.
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
    """Import or draw the given runs, or apply the rules to stored results."""
    match words:
        case ["--figure", runs, out]:
            figure(Path(runs), Path(out))
            return
        case ["--alone", runs, folder]:
            place = HERE / Path(folder).name
            time_alone(Path(runs), place)
            pack(place)
        case [runs, folder]:
            timed = "sortclevr" in folder or "fig3a" in folder  # figure 3 is of these
            files = ("results.json", "clock.json") if timed else ("results.json",)
            place = HERE / Path(folder).name
            kept_in.keep(Path(runs), place, wanted, files)
            if place.name == "han-fig3a":
                share_runs(HERE / "han-sortclevr", place, SHARED)
            remove_redundant(place)
            pack(place)
    for name, judge in TABLES.items():
        kept = read(HERE / name)
        print(f"\n== {name}" if kept else f"\n== {name}: no results")
        if kept is not None:
            overview(kept)
            judge(kept)
    stopped(HERE / "han-sortclevr-stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
