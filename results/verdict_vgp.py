"""Apply the decision rules in LOG.md to results of grounded supervision.

    python results/verdict_vgp.py                                        # from results/vgp-*
    python results/verdict_vgp.py runs/vgp-scenes results/vgp-scenes  # import runs first

Differences are per item and seed; intervals are over seeds and items, clustered by scene or photo.
A verdict of three or four seeds is provisional; fewer give numbers only.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archive import pack, unpacked
from run_results import Results, in_points, judged, judged_by
from torch import Tensor

from overt.metrics import two_level_interval
from overt.metrics.statistics import Interval
from overt.papers.vgp.published import COLUMNS, TABLE_1

HERE = unpacked()
LOOKED = ("grounding_accuracy", "grounding_accuracy_best", "grounding_mass", "reach", "pointing")
SHOWN = (
    *("identification", "paraphrase", "paraphrase_f1", *LOOKED),
    *("answers", "located_detected", "located_true", "located_all"),
)
TASKS = ("identification", "answers", "located_detected", "located_true")
PLACEBOS = ("direct-shuffled", "direct-random", "direct-uniform")
COMPARED = ("none", "indirect", "direct", "semi-direct")
PAIRS = (  # compared variants on photos
    *(("semi-direct", "none"), ("direct", "semi-direct"), ("indirect", "none")),
    *(("direct", "indirect"), ("chosen-heads", "direct"), ("indirect", "indirect-slip")),
    *(("direct-shuffled", "none"), ("direct-random", "none"), ("direct-uniform", "none")),
)
FEWEST = 3  # minimum seeds for a verdict on photos
GOAL, TIMES = 0.8, 2.0
LATER = ("located_true", "located_detected", "answers")  # of the fine-tuned network
FROM_PRETRAINED = (  # compared variants that start from one pretrained network
    *(("direct", "none"), ("direct", "direct-shuffled"), ("semi-direct", "direct")),
    *(("indirect", "none"), ("indirect-bilinear", "indirect"), ("indirect-bilinear", "none")),
    *(("chosen-heads", "direct"), ("learned-heads", "direct")),
    *(("direct-distil", "direct"), ("direct-ewc", "direct")),
)
CHANCE = {"answers": 0.28125, "identification": 1 / 3}  # exact on scenes, whatever the words say
COST = {164: 1.10, 512: 1.05}


@dataclass(frozen=True)
class Kept:
    """Runs of one table: reported results, and numbers per item."""

    results: Results
    arrays: Mapping[str, np.ndarray]

    def seeds(self, *rows: str) -> list[int]:
        """Return the common seeds of these rows."""
        every = [{seed for label, seed in self.results if label == row} for row in rows]
        return sorted(set.intersection(*every))

    def rows(self) -> list[str]:
        """Return the rows that have a run."""
        return list(dict.fromkeys(label for label, _ in self.results))

    def each(self, row: str, name: str, seeds: Sequence[int]) -> Tensor:
        """Return a number per item, one line per seed."""
        found = [self.arrays[f"{row}/seed-{seed}/{name}"] for seed in seeds]
        return torch.from_numpy(np.stack(found).astype("f8"))

    def about(self, name: str) -> list[str]:
        """Return the scene or photo of each item."""
        ids = self.arrays[f"{name}.id" if f"{name}.id" in self.arrays else "id"]
        return [str(one) for one in ids]

    def minus(self, one: str, other: str, name: str) -> Interval | None:
        """Return the difference of two rows over their common seeds; None without any."""
        if one not in self.rows() or other not in self.rows():
            return None
        seeds = self.seeds(one, other)
        if not seeds or f"{one}/seed-{seeds[0]}/{name}" not in self.arrays:
            return None
        far = self.each(one, name, seeds) - self.each(other, name, seeds)
        groups = self.about(name)
        return two_level_interval(far, clusters=groups)

    def mean(self, row: str, name: str) -> float | None:
        """Return the mean over seeds of a reported number."""
        found = [
            one["value"]
            for (label, _), results in self.results.items()
            if label == row and (one := results["ours"].get(name)) is not None
        ]
        return sum(found) / len(found) if found else None


def shown_by(name: str) -> str:
    """Return the scene or photo of an item, from its id."""
    if "/" in name:  # photo/caption+caption
        return name.partition("/")[0]
    parts = name.split("-")
    number = next(at for at, part in enumerate(parts) if len(part) == 6 and part.isdecimal())
    return parts[number]


# --- keeping and reading


def keep(runs: Path, folder: Path) -> None:
    """Copy the results of finished runs and the per-item numbers; preserve existing content."""
    arrays: dict[str, Any] = {}
    if (folder / "samples.npz").is_file():
        with np.load(folder / "samples.npz") as before:
            arrays |= {name: before[name] for name in before.files}
    for place in sorted(path.parent for path in runs.glob("*/seed-*/samples.npz")):
        text = (place / "results.json").read_text()
        if json.loads(text)["status"] != "done":
            continue
        key = f"{place.parent.name}/{place.name}"
        (folder / key).mkdir(parents=True, exist_ok=True)
        (folder / key / "results.json").write_text(text)
        for file in ("samples.npz", "elsewhere.npz"):
            if not (place / file).is_file():
                continue
            with np.load(place / file) as found:
                for name in found.files:
                    if name == "id" or name.endswith(".id"):
                        arrays[name] = np.array([shown_by(str(one)) for one in found[name]])
                    elif name in SHOWN:
                        arrays[f"{key}/{name}"] = found[name].astype("f2")
    np.savez_compressed(folder / "samples.npz", **arrays)
    pack(folder)


def read(folder: Path) -> Kept:
    """Return the stored results of a folder."""
    results = {}
    for path in sorted(folder.glob("*/seed-*/results.json")):
        seed = int(path.parent.name.removeprefix("seed-"))
        results[path.parts[-3], seed] = json.loads(path.read_text())
    with np.load(folder / "samples.npz") as found:
        return Kept(results, {name: found[name] for name in found.files})


# --- the rules


def points(found: Interval | None) -> str:
    """Format a difference in percentage points, or "not run"."""
    return "not run" if found is None else in_points(found)


def fewest(found: Iterable[Interval | None], verdict: str) -> str:
    """Return a verdict, limited by the difference with the fewest seeds."""
    known = [one for one in found if one is not None]
    return judged(min(known, key=lambda one: one.runs), verdict) if known else "not run"


def above(found: Interval | None) -> bool:
    """Return whether an interval is above 0."""
    return found is not None and found.low > 0


def below(found: Interval | None) -> bool:
    """Return whether an interval is below 0."""
    return found is not None and found.high < 0


def table(kept: Kept) -> str:
    """Return a table of the means of all rows, in percent."""
    names = [name for name in SHOWN if any(kept.mean(row, name) is not None for row in kept.rows())]
    lines = [f"| row | seeds | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in kept.rows():
        means = [kept.mean(row, name) for name in names]
        cells = ["" if one is None else f"{100 * one:.1f}" for one in means]
        lines.append(f"| {row} | {len(kept.seeds(row))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goal(kept: Kept) -> str:
    """Apply rule 1."""
    ours, none = (kept.mean(row, "grounding_accuracy") for row in ("direct", "none"))
    if ours is None or none is None:
        return "1 goal: not run"
    reached = ours >= GOAL and ours >= TIMES * none
    seeds = min(len(kept.seeds(row)) for row in ("direct", "none"))
    verdict = judged_by(seeds, "reached" if reached else "MISSED")
    return f"1 goal: direct {ours:.3f}, none {none:.3f} ({ours / none:.1f} times): {verdict}"


def learned(kept: Kept) -> str:
    """Apply rule 2."""
    found = {row: kept.minus("direct", row, "grounding_accuracy") for row in PLACEBOS}
    text = ", ".join(f"over {row} {points(one)}" for row, one in found.items())
    sure = "confirmed" if all(map(above, found.values())) else "NOT confirmed"
    return f"2 grounding is learned: {text}: {fewest(found.values(), sure)}"


def helps(kept: Kept, name: str) -> str:
    """Apply rule 3 to one task."""
    plain = kept.minus("direct", "none", name)
    placebos = {row: kept.minus("direct", row, name) for row in PLACEBOS}
    if above(plain) and all(map(above, placebos.values())):
        verdict = "it helps"
    elif above(plain):
        verdict = "the loss helps, the target is not shown to"
    else:
        verdict = "it harms" if below(plain) else "not shown to help"
    over = ", ".join(f"{row} {points(one)}" for row, one in placebos.items())
    verdict = fewest([plain, *placebos.values()], verdict)
    return f"3 {name}: over none {points(plain)}; over {over}: {verdict}"


def slipped(kept: Kept, name: str) -> str:
    """Apply rule 4 to one column."""
    right, slip = (kept.minus(row, "none", name) for row in ("indirect", "indirect-slip"))
    between = kept.minus("indirect", "indirect-slip", name)
    if below(right):
        verdict = "indirect is below none without the slip too"
    elif below(slip):
        verdict = "put down to the slip"
    else:
        verdict = "not seen here"
    return (
        f"4 {name}: indirect minus none {points(right)}, the slip minus none {points(slip)}, "
        f"indirect minus the slip {points(between)}: {fewest([right, slip], verdict)}"
    )


def orders(kept: Kept, name: str) -> list[str]:
    """Apply rule 5 to one column: the six pairs of rows, in the order of the paper."""
    at, where = COLUMNS[name]
    found = []
    for number, one in enumerate(COMPARED):
        for other in COMPARED[number + 1 :]:
            high, low = sorted((one, other), key=lambda row: -TABLE_1[row][at])
            gap = TABLE_1[high][at] - TABLE_1[low][at]
            ours = kept.minus(high, low, name)
            verdict = "survives" if above(ours) else "CONTRADICTED" if below(ours) else "undecided"
            verdict = fewest([ours], verdict)
            found.append(
                f"5 {name} ({where}): {high} > {low} by {gap:.2f}, ours {points(ours)}: {verdict}"
            )
    return found


def chosen(kept: Kept) -> list[str]:
    """Apply rule 6."""
    found = {name: kept.minus("chosen-heads", "direct", name) for name in TASKS}
    return [
        f"6 chosen heads minus direct, {name}: {points(one)}: "
        + fewest([one], "worse" if below(one) else "as good or undecided")
        for name, one in found.items()
    ]


def by_words(kept: Kept) -> list[str]:
    """Print expressions that name a thing and those that give its place separately; no rule."""
    from overt.data.scenes.proposals import only_detected
    from overt.data.scenes.referring_expressions import ReferringScenes
    from overt.nn.vlbert.downstream import matching_candidates
    from overt.papers.vgp.data import TEST_SCENES

    about = next(iter(kept.results.values()))["settings"]
    size = (TEST_SCENES, about["data.size"], about["data.regions"])
    batch = ReferringScenes("test", about["data.world"], *size, keep=only_detected).batch(
        range(TEST_SCENES)
    )
    assert batch.groups is not None
    places = torch.tensor([group == "place" for group in batch.groups])
    most = float(matching_candidates(batch).any(dim=1).float().mean())
    lines = [f"with detected boxes no more than {100 * most:.1f} can be right"]
    for row in kept.rows():
        found = kept.each(row, "located_true", kept.seeds(row))
        named, placed = found[:, ~places].mean(), found[:, places].mean(dim=1)
        each = ", ".join(f"{100 * one:.0f}" for one in placed.tolist())
        lines.append(f"located_true of {row}: by what it is {100 * float(named):.1f}, by its place "
                     f"{100 * float(placed.mean()):.1f} (seeds {each})")  # fmt: skip
    return lines


def photos(kept: Kept) -> list[str]:
    """Apply rule 7."""
    lines = []
    for name in LOOKED[:3]:
        rows = [row for row in ("original", "none", "direct-shuffled") if row in kept.rows()]
        found = {row: kept.minus("direct", row, name) for row in rows}
        text = ", ".join(f"over {row} {points(one)}" for row, one in found.items())
        sure = all(above(found.get(row)) for row in ("none", "direct-shuffled"))
        lines.append(
            f"7 {name}: {text}: {fewest(found.values(), 'learned' if sure else 'NOT shown')}"
        )
    return lines


def in_full(kept: Kept) -> list[str]:
    """Compare variants on photos with the whole network: placebos, heads, and the slip."""
    lines = []
    for name in ("grounding_accuracy", "identification"):
        plain = kept.minus("direct", "none", name)
        ran = [row for row in PLACEBOS if row in kept.rows() and len(kept.seeds(row)) >= FEWEST]
        over = {row: kept.minus("direct", row, name) for row in ran}
        verdict = "not shown to help"
        if below(plain):
            verdict = "it harms"
        elif above(plain):
            shown = "direct-shuffled" in over and all(map(above, over.values()))
            verdict = "shown" if shown else "the loss does it, the target is not shown to"
        text = ", ".join(f"{row} {points(one)}" for row, one in over.items())
        verdict = fewest([plain, *over.values()], verdict)
        lines.append(f"photos, {name}: direct over none {points(plain)}; over {text}: {verdict}")
        for one, other in PAIRS:
            found = kept.minus(one, other, name)
            sure = "above" if above(found) else "below" if below(found) else "undecided"
            lines.append(f"  {one} minus {other}, {name}: {points(found)}: {fewest([found], sure)}")
    return lines


def pretrained(kept: Kept) -> list[str]:
    """Apply the rules for rows that start from one pretrained network."""
    lines = []
    for name, row in (("answers", "original"), ("identification", "none")):
        seeds = kept.seeds(row) if row in kept.rows() else []
        if seeds and f"{row}/seed-{seeds[0]}/{name}" in kept.arrays:
            found = two_level_interval(
                kept.each(row, name, seeds) - CHANCE[name], clusters=kept.about(name)
            )
            verdict = "learned" if above(found) else "NOT learned: this column decides nothing"
            lines.append(
                f"1 {name} of {row} over chance {points(found)}: {fewest([found], verdict)}"
            )
    others = [row for row in kept.rows() if row != "original"]
    for name in (*LATER, "grounding_accuracy"):
        for row in others:
            found = kept.minus(row, "original", name)
            if found is not None:
                verdict = "forgets" if below(found) else "gains" if above(found) else "undecided"
                lines.append(
                    f"2 {row} minus original, {name}: {points(found)}: {fewest([found], verdict)}"
                )
    for name in ("grounding_accuracy", "grounding_accuracy_best", "identification", *LATER):
        for one, other in FROM_PRETRAINED:
            found = kept.minus(one, other, name)
            if found is not None:
                verdict = "above" if above(found) else "below" if below(found) else "undecided"
                lines.append(
                    f"3 {one} minus {other}, {name}: {points(found)}: {fewest([found], verdict)}"
                )
    if kept.minus("direct", "none", "located_true") is not None:
        lines += [line for name in COLUMNS for line in orders(kept, name)]
    return lines


def cost(path: Path) -> list[str]:
    """Apply rule 8: time and memory of a supervised step on a GPU, in a CUDA graph if measured."""
    rows = json.loads(path.read_text())["sections"]["supervision"]["rows"]
    lines = []
    for length, most in COST.items():
        start = f"VL-BERT {length} x "
        named = [row for row in rows if row["label"].startswith(start) and row["value"] is not None]
        times = [row for row in named if row["ours"] == "direct" and row["theirs"] == "plain"]
        times.sort(key=lambda row: "CUDA graph" not in row["label"])
        held = [row for row in named if row["label"].endswith("peak memory, direct")]
        if not times or not held:
            continue
        time, memory = times[0]["value"]["median"], held[0]["value"]["median"]
        lines.append(
            f"8 cost at {length} positions: time {time:.3f}, memory {memory:.3f}, goal {most}: "
            f"{'reached' if max(time, memory) <= most else 'MISSED'}"
        )
    return lines


def main() -> None:
    """Import runs if given, then apply the rules."""
    if len(sys.argv) == 3:
        keep(Path(sys.argv[1]), HERE / Path(sys.argv[2]).name)
    scenes = HERE / "vgp-scenes"
    if (scenes / "samples.npz").is_file():
        kept = read(scenes)
        print(table(kept), goal(kept), learned(kept), sep="\n")
        print(*(helps(kept, name) for name in TASKS), sep="\n")
        print(*(slipped(kept, name) for name in COLUMNS), sep="\n")
        print(*(line for name in COLUMNS for line in orders(kept, name)), sep="\n")
        print(*chosen(kept), *by_words(kept), sep="\n")
    for name in ("vgp-entities", "vgp-entities-small"):
        if (HERE / name / "samples.npz").is_file():
            kept = read(HERE / name)
            print(name, table(kept), *photos(kept), sep="\n")
            if name == "vgp-entities":
                print(*in_full(kept), sep="\n")
    for name in ("vgp-scenes-pretrained", "vgp-entities-pretrained"):
        if (HERE / name / "samples.npz").is_file():
            kept = read(HERE / name)
            print(name, table(kept), *pretrained(kept), sep="\n")
    print(*cost(Path(__file__).parent / "speed" / "h200.json"), sep="\n")


if __name__ == "__main__":
    main()
