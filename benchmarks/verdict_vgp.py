"""Apply the decision rules in LOG.md to what is kept of grounded supervision.

    python benchmarks/verdict_vgp.py                                        # from benchmarks/vgp-*
    python benchmarks/verdict_vgp.py runs/vgp-scenes benchmarks/vgp-scenes  # keep runs first

Differences are taken item by item and seed by seed; intervals are over seeds and items, where items
that show one scene or photo are drawn together.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import Results, in_points
from torch import Tensor

from overt.measure import bootstrap, two_level
from overt.measure.statistics import Interval
from overt.recipes.vgp.figures import COLUMNS, TABLE_1

HERE = Path(__file__).parent
LOOKED = ("grounding_accuracy", "grounding_accuracy_best", "grounding_mass", "reach", "pointing")
SHOWN = (
    *("identification", "paraphrase", "paraphrase_f1", *LOOKED),
    *("answers", "located_detected", "located_true", "located_all"),
)
TASKS = ("identification", "answers", "located_detected", "located_true")
PLACEBOS = ("direct-shuffled", "direct-random", "direct-uniform")
COMPARED = ("none", "indirect", "direct", "semi-direct")
PAIRS = (  # ways on photos, beside each other
    *(("semi-direct", "none"), ("direct", "semi-direct"), ("indirect", "none")),
    *(("direct", "indirect"), ("chosen-heads", "direct"), ("indirect", "indirect-slip")),
    *(("direct-shuffled", "none"), ("direct-random", "none"), ("direct-uniform", "none")),
)
FEWEST = 3  # seeds of a row on photos that gets a verdict
GOAL, TIMES = 0.8, 2.0
COST = {164: 1.10, 512: 1.05}


@dataclass(frozen=True)
class Kept:
    """The runs of one table: what they reported, and their numbers item by item."""

    results: Results
    arrays: Mapping[str, np.ndarray]

    def seeds(self, *rows: str) -> list[int]:
        """The seeds that all of these rows have."""
        every = [{seed for label, seed in self.results if label == row} for row in rows]
        return sorted(set.intersection(*every))

    def rows(self) -> list[str]:
        """The rows that have a run."""
        return list(dict.fromkeys(label for label, _ in self.results))

    def each(self, row: str, name: str, seeds: Sequence[int]) -> Tensor:
        """A number of every item of a row, a line a seed."""
        found = [self.arrays[f"{row}/seed-{seed}/{name}"] for seed in seeds]
        return torch.from_numpy(np.stack(found).astype("f8"))

    def about(self, name: str) -> list[str]:
        """The scene or photo that each item shows."""
        ids = self.arrays[f"{name}.id" if f"{name}.id" in self.arrays else "id"]
        return [str(one) for one in ids]

    def minus(self, one: str, other: str, name: str) -> Interval | None:
        """The difference of two rows over the seeds that both have; None without any."""
        if one not in self.rows() or other not in self.rows():
            return None
        seeds = self.seeds(one, other)
        if not seeds or f"{one}/seed-{seeds[0]}/{name}" not in self.arrays:
            return None
        far = self.each(one, name, seeds) - self.each(other, name, seeds)
        groups = self.about(name)
        if len(seeds) == 1:
            return bootstrap(far[0], clusters=groups)
        return two_level(far, clusters=groups)

    def mean(self, row: str, name: str) -> float | None:
        """The mean over seeds of what the runs of a row reported."""
        found = [
            one["value"]
            for (label, _), results in self.results.items()
            if label == row and (one := results["ours"].get(name)) is not None
        ]
        return sum(found) / len(found) if found else None


def shown_by(name: str) -> str:
    """The scene or photo of an item, by its id."""
    if "/" in name:  # photo/caption+caption
        return name.partition("/")[0]
    parts = name.split("-")
    number = next(at for at, part in enumerate(parts) if len(part) == 6 and part.isdecimal())
    return parts[number]


# --- keeping and reading


def keep(runs: Path, folder: Path) -> None:
    """Copy the results of finished runs, and the numbers of items, beside what is there."""
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


def read(folder: Path) -> Kept:
    """What is kept in a folder."""
    results = {}
    for path in sorted(folder.glob("*/seed-*/results.json")):
        seed = int(path.parent.name.removeprefix("seed-"))
        results[path.parts[-3], seed] = json.loads(path.read_text())
    with np.load(folder / "samples.npz") as found:
        return Kept(results, {name: found[name] for name in found.files})


# --- the rules


def told(found: Interval | None) -> str:
    """A difference in points of a hundred, or that there is none."""
    return "not run" if found is None else in_points(found)


def above(found: Interval | None) -> bool:
    """Whether a difference is above 0 for sure."""
    return found is not None and found.low > 0


def below(found: Interval | None) -> bool:
    """Whether a difference is below 0 for sure."""
    return found is not None and found.high < 0


def table(kept: Kept) -> str:
    """The means of all rows, in per cent."""
    names = [name for name in SHOWN if any(kept.mean(row, name) is not None for row in kept.rows())]
    lines = [f"| row | seeds | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for row in kept.rows():
        means = [kept.mean(row, name) for name in names]
        cells = ["" if one is None else f"{100 * one:.1f}" for one in means]
        lines.append(f"| {row} | {len(kept.seeds(row))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goal(kept: Kept) -> str:
    """Rule 1."""
    ours, none = (kept.mean(row, "grounding_accuracy") for row in ("direct", "none"))
    if ours is None or none is None:
        return "1 goal: not run"
    reached = ours >= GOAL and ours >= TIMES * none
    verdict = "reached" if reached else "MISSED"
    return f"1 goal: direct {ours:.3f}, none {none:.3f} ({ours / none:.1f} times): {verdict}"


def learned(kept: Kept) -> str:
    """Rule 2."""
    found = {row: kept.minus("direct", row, "grounding_accuracy") for row in PLACEBOS}
    said = ", ".join(f"over {row} {told(one)}" for row, one in found.items())
    sure = "confirmed" if all(map(above, found.values())) else "NOT confirmed"
    return f"2 grounding is learned: {said}: {sure}"


def helps(kept: Kept, name: str) -> str:
    """Rule 3, for one task."""
    plain = kept.minus("direct", "none", name)
    placebos = {row: kept.minus("direct", row, name) for row in PLACEBOS}
    if above(plain) and all(map(above, placebos.values())):
        verdict = "it helps"
    elif above(plain):
        verdict = "the loss helps, the target is not shown to"
    else:
        verdict = "it harms" if below(plain) else "not shown to help"
    over = ", ".join(f"{row} {told(one)}" for row, one in placebos.items())
    return f"3 {name}: over none {told(plain)}; over {over}: {verdict}"


def slipped(kept: Kept, name: str) -> str:
    """Rule 4, for one column."""
    right, slip = (kept.minus(row, "none", name) for row in ("indirect", "indirect-slip"))
    between = kept.minus("indirect", "indirect-slip", name)
    if below(right):
        verdict = "indirect is below none without the slip too"
    elif below(slip):
        verdict = "put down to the slip"
    else:
        verdict = "not seen here"
    return (
        f"4 {name}: indirect minus none {told(right)}, the slip minus none {told(slip)}, "
        f"indirect minus the slip {told(between)}: {verdict}"
    )


def orders(kept: Kept, name: str) -> list[str]:
    """Rule 5, for one column: the six pairs of rows, as the paper has them."""
    at, where = COLUMNS[name]
    found = []
    for number, one in enumerate(COMPARED):
        for other in COMPARED[number + 1 :]:
            high, low = sorted((one, other), key=lambda row: -TABLE_1[row][at])
            gap = TABLE_1[high][at] - TABLE_1[low][at]
            ours = kept.minus(high, low, name)
            verdict = "survives" if above(ours) else "CONTRADICTED" if below(ours) else "undecided"
            found.append(
                f"5 {name} ({where}): {high} > {low} by {gap:.2f}, ours {told(ours)}: {verdict}"
            )
    return found


def chosen(kept: Kept) -> list[str]:
    """Rule 6."""
    found = {name: kept.minus("chosen-heads", "direct", name) for name in TASKS}
    return [
        f"6 chosen heads minus direct, {name}: {told(one)}: "
        + ("not run" if one is None else "worse" if below(one) else "as good or undecided")
        for name, one in found.items()
    ]


def by_words(kept: Kept) -> list[str]:
    """Not a rule: expressions that name a thing by what it is, and by where it lies, apart."""
    from overt.data.scenes.proposals import only_detected
    from overt.data.scenes.referring import ReferringScenes
    from overt.models.vlbert.downstream import fitting
    from overt.recipes.vgp.data import JUDGED

    about = next(iter(kept.results.values()))["settings"]
    size = (JUDGED, about["data.size"], about["data.regions"])
    batch = ReferringScenes("test", about["data.world"], *size, keep=only_detected).batch(
        range(JUDGED)
    )
    assert batch.groups is not None
    places = torch.tensor([group == "place" for group in batch.groups])
    most = float(fitting(batch).any(dim=1).float().mean())
    lines = [f"with detected boxes no more than {100 * most:.1f} can be right"]
    for row in kept.rows():
        found = kept.each(row, "located_true", kept.seeds(row))
        named, placed = found[:, ~places].mean(), found[:, places].mean(dim=1)
        each = ", ".join(f"{100 * one:.0f}" for one in placed.tolist())
        lines.append(f"located_true of {row}: by what it is {100 * float(named):.1f}, by its place "
                     f"{100 * float(placed.mean()):.1f} (seeds {each})")  # fmt: skip
    return lines


def photos(kept: Kept) -> list[str]:
    """Rule 7."""
    lines = []
    for name in LOOKED[:3]:
        rows = [row for row in ("original", "none", "direct-shuffled") if row in kept.rows()]
        found = {row: kept.minus("direct", row, name) for row in rows}
        said = ", ".join(f"over {row} {told(one)}" for row, one in found.items())
        sure = all(above(found.get(row)) for row in ("none", "direct-shuffled"))
        lines.append(f"7 {name}: {said}: {'learned' if sure else 'NOT shown'}")
    return lines


def in_full(kept: Kept) -> list[str]:
    """Photos with the whole network: placebos, ways beside each other, heads, and the slip."""
    lines = []
    for name in ("grounding_accuracy", "identification"):
        plain = kept.minus("direct", "none", name)
        ran = [row for row in PLACEBOS if row in kept.rows() and len(kept.seeds(row)) >= FEWEST]
        over = {row: kept.minus("direct", row, name) for row in ran}
        verdict = "not shown to help"
        if len(kept.seeds("direct", "none")) < FEWEST:
            verdict = "too few seeds"
        elif below(plain):
            verdict = "it harms"
        elif above(plain):
            shown = "direct-shuffled" in over and all(map(above, over.values()))
            verdict = "shown" if shown else "the loss does it, the target is not shown to"
        said = ", ".join(f"{row} {told(one)}" for row, one in over.items())
        lines.append(f"photos, {name}: direct over none {told(plain)}; over {said}: {verdict}")
        for one, other in PAIRS:
            found = kept.minus(one, other, name)
            few = len(kept.seeds(one, other)) < FEWEST
            sure = "above" if above(found) else "below" if below(found) else "undecided"
            lines.append(
                f"  {one} minus {other}, {name}: {told(found)}: {'too few seeds' if few else sure}"
            )
    return lines


def cost(path: Path) -> list[str]:
    """Rule 8: a step on a card, supervised over plain, time and memory; recorded if it was."""
    rows = json.loads(path.read_text())["sections"]["supervision"]["rows"]
    lines = []
    for length, most in COST.items():
        start = f"VL-BERT {length} x "
        named = [row for row in rows if row["what"].startswith(start) and row["value"] is not None]
        times = [row for row in named if row["ours"] == "direct" and row["theirs"] == "plain"]
        times.sort(key=lambda row: "recorded" not in row["what"])
        held = [row for row in named if row["what"].endswith("peak memory, direct")]
        if not times or not held:
            continue
        time, memory = times[0]["value"]["median"], held[0]["value"]["median"]
        lines.append(
            f"8 cost at {length} positions: time {time:.3f}, memory {memory:.3f}, goal {most}: "
            f"{'reached' if max(time, memory) <= most else 'MISSED'}"
        )
    return lines


def main() -> None:
    """Keep runs if asked, then say what the rules say."""
    if len(sys.argv) == 3:
        keep(Path(sys.argv[1]), Path(sys.argv[2]))
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
    if (HERE / "speed" / "h200.json").is_file():
        print(*cost(HERE / "speed" / "h200.json"), sep="\n")


if __name__ == "__main__":
    main()
