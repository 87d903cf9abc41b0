"""Apply the decision rules in LOG.md to results of the small vision-language model.

    python results/verdict_vlm.py                                     # from results/vlm-*
    python results/verdict_vlm.py runs/vlm-pruning results/vlm-pruning  # import runs first

Differences are per question and seed, in percentage points, with intervals over seeds and questions
clustered by image. Areas under the ROC curve are one number per run: their intervals are over
seeds. Inside of each question Holm's correction is applied; a verdict of three or four seeds is
provisional, fewer give numbers only.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import run_results as kept_in
import torch
from archive import pack, unpacked
from run_results import in_points, judged, over
from torch import Tensor

from overt.metrics import confidence_interval, holm
from overt.metrics.statistics import Interval

HERE = unpacked()
KEPT = ("accuracy", "evidence_kept", "image_tokens", "mass_inside", "pointing")
LEARNED = 0.60  # accuracy that the model has to exceed for anything to be decided
SIGNIFICANT = 0.05
INSIDE = ("last-query", "pyramid", "adaptive", "grid", "centre")  # against `random`
BEFORE = ("image-encoder", "zip", "grid-before", "centre-before")  # against `random-before`
SHOWN = ("accuracy", "evidence_kept", "image_tokens", "prefill", "decode", "cache")
AREAS = ("wrong_by_length", "wrong_by_confidence")


@dataclass(frozen=True)
class Kept:
    """Runs of one table: reported results, and numbers per question."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]
    folder: str

    def seeds(self, row: str) -> list[int]:
        """Return the seeds of a row."""
        return sorted(seed for label, seed in self.results if label == row)

    def common(self, *rows: str) -> list[int]:
        """Return the seeds that all of these rows have."""
        return sorted(set.intersection(*(set(self.seeds(row)) for row in rows)))

    def each(self, row: str, name: str, seeds: Sequence[int]) -> Tensor:
        """Return a number per question, one line per seed; NaN where any seed has none."""
        found = torch.stack([self.samples[f"{row}/seed-{seed}/{name}"] for seed in seeds])
        return found.masked_fill(found.isnan().any(dim=0), torch.nan)

    def minus(self, one: str, other: str, name: str) -> Interval | None:
        """Return the difference of two rows over their common seeds; None without any."""
        seeds = self.common(one, other)
        if not seeds:
            return None
        return over(self.each(one, name, seeds) - self.each(other, name, seeds), self.folder)

    def areas(self, row: str, one: str, other: str) -> Interval | None:
        """Return the difference of two areas under the ROC curve over the seeds of a row.

        None if no run has both: without enough wrong answers there are no areas.
        """
        found = [self.results[row, seed]["ours"] for seed in self.seeds(row)]
        apart = [ours[one]["value"] - ours[other]["value"] for ours in found if one in ours]
        return replace(confidence_interval(apart), runs=len(apart)) if apart else None


def read(folder: Path) -> Kept | None:
    """Return the stored results of a table; None if there are none."""
    if not (folder / "samples.npz").is_file():
        return None
    return Kept(*kept_in.read(folder), folder.name)


def wanted(name: str, values: Any) -> Any | None:
    """Select the per-question numbers that the rules need."""
    return values if name in KEPT else None


# --- verdicts


def verdicts(found: Sequence[Interval | None], words: tuple[str, str, str]) -> list[str]:
    """Return above, below or undecided for each difference of one question, with Holm's correction.

    Args:
        found: The differences; None was not run, and is not counted by the correction.
        words: What to say above 0, below 0, and otherwise.
    """
    above, below, neither = words
    corrected = holm([torch.nan if one is None else one.p for one in found])
    said = []
    for one, p in zip(found, corrected, strict=True):
        if one is None:
            said.append("not run")
            continue
        decided = p < SIGNIFICANT  # false for NaN: one seed has no p-value over seeds
        said.append(judged(one, (above if one.mean > 0 else below) if decided else neither))
    return said


def answers(kept: Kept, row: str) -> bool:
    """Print whether the model answers, the condition of every other rule, and return it."""
    print(f"a model that answers: accuracy of {row} above {LEARNED:.0%}")
    seeds = kept.seeds(row)
    if not seeds:
        print("  not run")
        return False
    found = over(kept.each(row, "accuracy", seeds), kept.folder)
    learned = found.low > LEARNED
    print(f"  {in_points(found)}: {judged(found, 'yes' if learned else 'NO')}")
    return learned


def pruning(kept: Kept) -> None:
    """Apply the rules for fewer image tokens: does attention choose better than chance?"""
    if not answers(kept, "all-tokens"):
        print("so nothing below is decided")
        return
    pairs = [(row, "random") for row in INSIDE] + [(row, "random-before") for row in BEFORE]
    found = [kept.minus(one, other, "accuracy") for one, other in pairs]
    print("does pruning by attention beat random? accuracy")
    said = verdicts(found, ("better", "worse", "no difference shown"))
    for (one, other), interval, verdict in zip(pairs, found, said, strict=True):
        print(f"  {one} minus {other}: {verdict}{shown(interval)}")
    print("beside it: evidence kept, no verdict")
    for one, other in pairs:
        print(f"  {one} minus {other}:{shown(kept.minus(one, other, 'evidence_kept'))}")


def boxes(kept: Kept) -> None:
    """Apply the rules for supervision by boxes, and for signals of wrong answers."""
    if not answers(kept, "unsupervised"):
        print("so nothing below is decided")
        return
    names = ("mass_inside", "accuracy")
    found = [kept.minus("boxes", "placebo", name) for name in names]
    print("does box supervision raise grounding and accuracy over a placebo?")
    said = verdicts(found, ("yes", "no, it is lower", "open"))
    for name, interval, verdict in zip(names, found, said, strict=True):
        print(f"  {name}, boxes minus placebo: {verdict}{shown(interval)}")
    both = all(one.startswith("yes") for one in said)
    print(f"  for both: {'yes' if both else 'not shown'}{few(found)}")
    for name in names:
        interval = kept.minus("placebo", "unsupervised", name)
        print(f"  beside it, {name}, placebo minus unsupervised:{shown(interval)}")
    print("do signals predict wrong answers? area under the ROC curve, of unsupervised")
    areas = [kept.areas("unsupervised", "wrong_by_both", other) for other in AREAS]
    for other, interval, verdict in zip(
        AREAS, areas, verdicts(areas, ("yes", "no, it is lower", "open")), strict=True
    ):
        print(f"  wrong_by_both minus {other}: {verdict}{shown(interval)}")


def shown(found: Interval | None) -> str:
    """Format a difference, with its number of seeds."""
    return "" if found is None else f" {in_points(found)}, {found.runs} seeds"


def few(found: Sequence[Interval | None]) -> str:
    """Return the note that a verdict over several differences needs more seeds, if it does."""
    known = [one for one in found if one is not None]
    if not known:
        return ""
    note = judged(min(known, key=lambda one: one.runs), "")
    return f" ({note.strip(' ()')})" if note else ""


def overview(kept: Kept) -> None:
    """Print the reported numbers of every row, means over seeds."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        runs = [kept.results[row, seed]["ours"] for seed in kept.seeds(row)]
        texts = [
            f"{name} {sum(one[name]['value'] for one in runs) / len(runs):.4g}"
            for name in SHOWN
            if all(name in one for one in runs)
        ]
        print(f"{row}: {len(runs)} seeds, {', '.join(texts)}")


TABLES = {"vlm-pruning": pruning, "vlm-boxes": boxes}


def main(words: Sequence[str]) -> None:
    """Import the given runs, then apply the rules to stored results."""
    match words:
        case [runs, folder]:
            place = HERE / Path(folder).name
            kept_in.keep(Path(runs), place, wanted)
            pack(place)
    for name, judge in TABLES.items():
        kept = read(HERE / name)
        print(f"\n== {name}" if kept else f"\n== {name}: no results")
        if kept is not None:
            overview(kept)
            judge(kept)


if __name__ == "__main__":
    main(sys.argv[1:])
