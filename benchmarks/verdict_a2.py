"""Apply the decision rules in LOG.md to what is kept of the attention-aligned captioner.

    python benchmarks/verdict_a2.py                                       # from benchmarks/a2-*
    python benchmarks/verdict_a2.py runs/a2-flickr8k benchmarks/a2-flickr8k  # keep runs first

Differences are of CIDEr-D, picture by picture and seed by seed, in points of a hundred; intervals
are drawn over seeds and pictures. Where words look is compared caption by caption. Rows that are
not there, or have fewer than three seeds in common, are missing and decide nothing.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import kept as kept_in
import numpy as np
import torch
from kept import in_points, over
from torch import Tensor

from overt.measure.statistics import Interval
from overt.recipes.a2.recipe import FUSIONS

HERE = Path(__file__).parent
SETS = ("a2-scenes", "a2-scenes-long", "a2-scenes-short", "a2-flickr8k", "a2-scenes-small")
SWEEPS = ("a2-fig4", "a2-flickr8k-lambda")
CRITICS = {"a2-scenes-critic": "a2-scenes-short", "a2-flickr8k-critic": "a2-flickr8k"}
LEAST = 3  # seeds
SHOWN = ("bleu_4", "meteor", "rouge_l", "cider_d", "greedy_cider_d")
ASKED = ("cider_d", "rouge_l", "greedy_cider_d", "words")
LOOKED = ("mass_inside", "mass_inside_before", "pointing", "pointing_before")
LAYERED = (
    *("tau_gradient", "tau_gradient_masks", "tau_removal", "tau_removal_masks"),
    *("divergence", "mask_mean", "mask_spread"),
)
SWEPT = ("mask_mean", "mask_spread", "cider_d", "val_cider_d", "divergence", "tau_removal_masks")
PLACEBOS = ("gate-random", "gate-shuffled", "gate-free")
BLEU, CIDER = 0.17, 0.45  # what the plain captioner of Flickr8k should reach


@dataclass(frozen=True)
class Kept:
    """The runs of one folder: what they reported, and their numbers picture by picture."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]

    def seeds(self, row: str) -> list[int]:
        """The seeds that a row has."""
        return sorted(seed for label, seed in self.results if label == row)

    def minus(self, one: str, other: str, name: str = "cider_d") -> Interval | None:
        """The difference of two rows over the seeds that both have; None where there is none."""
        return self.apart((one, name), (other, name))

    def apart(
        self, one: tuple[str, str], other: tuple[str, str], beside: "Kept | None" = None
    ) -> Interval | None:
        """The difference of two rows, each by a measure of its own, the other kept `beside`."""
        held = (self, beside or self)
        seeds = [seed for seed in held[0].seeds(one[0]) if seed in held[1].seeds(other[0])]
        keys = [[f"{row}/seed-{seed}/{name}" for seed in seeds] for row, name in (one, other)]
        pairs = list(zip(held, keys, strict=True))
        if len(seeds) < LEAST or not all(key in at.samples for at, many in pairs for key in many):
            return None
        ours, theirs = (torch.stack([at.samples[key] for key in many]) for at, many in pairs)
        there = ~(ours - theirs).isnan().any(dim=0)  # a caption may speak of no region
        return over((ours - theirs)[:, there])

    def mean(self, row: str, name: str) -> float:
        """A measure of a row, its mean over seeds."""
        found = [self.results[row, seed]["ours"][name]["value"] for seed in self.seeds(row)]
        return sum(found) / len(found)


def verdict(found: Interval | None) -> str:
    """Confirmed, refuted or undecided, by the interval; or missing."""
    if found is None:
        return "missing"
    return "confirmed" if found.low > 0 else "refuted" if found.high < 0 else "undecided"


def order(kept: Kept) -> str:
    """Whether gate > decay > max > moving average > none, by the four neighbouring differences."""
    said = []
    for worse, better in pairwise(FUSIONS):
        apart = kept.minus(better, worse)
        said.append(verdict(apart))
        print(f"  {better} over {worse}: {said[-1]}{_shown(apart)}")
    if "refuted" in said:
        return "refuted"
    if set(said) == {"confirmed"}:
        return "confirmed"
    return "undecided" if "missing" not in said else "undecided, with rows missing"


def looks(kept: Kept) -> None:
    """Whether words look at what they speak of more: within a pass, beside `none`, by masks."""
    for name in ("mass_inside", "pointing"):
        for row in (*FUSIONS[1:], *PLACEBOS):
            others = {"before": (row, f"{name}_before"), "none": ("none", name)}
            if row == "gate":
                others |= {placebo: (placebo, name) for placebo in PLACEBOS}
            for what, other in others.items():
                apart = kept.apart((row, name), other)
                if apart is not None:
                    print(f"  {name} of {row} over {what}: {verdict(apart)}{_shown(apart)}")


def by_layer(kept: Kept) -> None:
    """Figures 2, 5 and 6: agreement and divergence by layer, the mean over seeds."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        for name in LAYERED:
            many = [kept.results[row, seed]["groups"].get(name) for seed in kept.seeds(row)]
            if all(many):
                layers = [[one["value"] for one in found.values()] for found in many]
                mean = " ".join(f"{100 * one:.1f}" for one in np.mean(layers, axis=0))
                print(f"  {name} of {row}, by layer: {mean}")


def sweep(folder: Path) -> None:
    """What lambda does to masks and captions: figure 4."""
    print(f"== {folder.name}")
    found = {}
    for path in folder.glob("*/seed-0/results.json"):
        results = json.loads(path.read_text())
        found[results["settings"]["align.penalty"]] = results["ours"]
    for weight in sorted(found):
        numbers = {name: found[weight][name]["value"] for name in SWEPT if name in found[weight]}
        print(f"  {weight}: " + ", ".join(f"{name} {one:.4f}" for name, one in numbers.items()))


def critics(kept: Kept) -> None:
    """What self-critical training added to each row that has it."""
    rows = [row for row in FUSIONS if kept.seeds(f"{row}-critic")]
    if not rows:
        print("  critic: missing, so not shown")
    for row in rows:
        for name in ("cider_d", "greedy_cider_d", "words"):
            apart = kept.minus(f"{row}-critic", row, name)
            scale = " (hundredths)" if name == "words" else ""
            print(f"  critic on {row}, {name}{scale}: {verdict(apart)}{_shown(apart)}")
        if row != "none":
            apart = kept.minus(f"{row}-critic", "none-critic")
            print(f"  critic on {row} over critic on none: {verdict(apart)}{_shown(apart)}")


def judge_critics(folder: Path, beside: Path) -> None:
    """Critics beside the captioners they began at, and beside the critic of `none` of before."""
    print(f"== {folder.name}")
    if not (folder / "samples.npz").is_file():
        print("  nothing is kept: nothing is decided")
        return
    kept, before = Kept(*kept_in.read(folder)), Kept(*kept_in.read(beside))
    told(kept)
    for row in dict.fromkeys(label for label, _ in kept.results):
        if not row.endswith("-critic"):
            apart = kept.apart((row, "cider_d"), (row, "cider_d"), before)
            print(f"  {row} over the same seeds of before: {verdict(apart)}{_shown(apart)}")
            continue
        begun = row.removesuffix("-critic").removesuffix("-beams")
        for name in ("cider_d", "greedy_cider_d", "words"):
            apart = kept.minus(row, begun, name)
            scale = " (hundredths)" if name == "words" else ""
            print(f"  {row} over {begun}, {name}{scale}: {verdict(apart)}{_shown(apart)}")
        apart = kept.apart((row, "cider_d"), ("none-critic", "cider_d"), before)
        print(f"  {row} over the critic on none: {verdict(apart)}{_shown(apart)}")
        clocks = [kept.results[row, seed]["clock"] for seed in kept.seeds(row)]
        shares = " ".join(f"{100 * one['reward'] / one['critic']:.1f}" for one in clocks)
        print(f"  {row}, share of the reward beside other runs, in per cent: {shares}")


def told(kept: Kept) -> None:
    """Means over seeds of the measures of captions, a line a row."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        numbers = {name: kept.mean(row, name) for name in SHOWN}
        shown = ", ".join(f"{name} {100 * one:.1f}" for name, one in numbers.items())
        print(f"  {row}, seeds {kept.seeds(row)}: {shown}")


def judge(folder: Path) -> None:
    """Every rule on one set."""
    print(f"== {folder.name}")
    if not (folder / "samples.npz").is_file():
        print("  nothing is kept: nothing is decided")
        return
    kept = Kept(*kept_in.read(folder))
    told(kept)
    if folder.name == "a2-flickr8k" and kept.seeds("none"):
        bleu, cider = kept.mean("none", "bleu_4"), kept.mean("none", "cider_d")
        met = "reached" if bleu >= BLEU and cider >= CIDER else "NOT reached"
        print(f"  plain baseline: {met}: BLEU-4 {bleu:.3f} of {BLEU}, CIDEr {cider:.3f} of {CIDER}")
    print(f"  order of Table 3: {order(kept)}")
    for row in FUSIONS[1:]:
        apart = kept.minus(row, "none")
        print(f"  {row} helps: {verdict(apart)}{_shown(apart)}")
    for row in PLACEBOS:
        apart = kept.minus("gate", row)
        print(f"  gate over {row}: {verdict(apart)}{_shown(apart)}")
        apart = kept.minus(row, "none")
        print(f"  {row} over none: {verdict(apart)}{_shown(apart)}")
    looks(kept)
    by_layer(kept)
    critics(kept)


def looked(runs: Path, folder: Path) -> None:
    """Keep beside the rest where the words of each caption looked."""
    with np.load(folder / "samples.npz") as before:
        arrays = {name: before[name] for name in before.files}
    for path in sorted(runs.glob("*/seed-*/elsewhere.npz")):
        if json.loads((path.parent / "results.json").read_text())["status"] == "done":
            with np.load(path) as found:
                for name in set(LOOKED) & set(found.files):
                    key = f"{path.parent.parent.name}/{path.parent.name}/{name}"
                    arrays[key] = found[name].astype("f2")
    np.savez_compressed(folder / "samples.npz", **arrays)


def said(runs: Path, folder: Path) -> None:
    """Keep how many different captions each run wrote, and the ones it wrote most often."""
    found: dict[str, Any] = {}
    for path in sorted(runs.glob("*/seed-*/samples.npz")):
        if json.loads((path.parent / "results.json").read_text())["status"] != "done":
            continue
        with np.load(path) as samples:
            texts = {"beams": samples["prediction"], "greedy": samples["greedy_prediction"]}
            found[f"{path.parent.parent.name}/{path.parent.name}"] = {
                way: {"different": len(set(many.tolist())), "often": _often(many.tolist())}
                for way, many in texts.items()
            }
    (folder / "said.json").write_text(json.dumps(found, indent=1) + "\n")


def _often(texts: list[str]) -> dict[str, int]:
    return dict(Counter(texts).most_common(3))


def _shown(found: Interval | None) -> str:
    return "" if found is None else f", {in_points(found)}"


def main() -> None:
    """Keep runs where two folders are named; then judge what is kept."""
    if len(sys.argv) == 3:
        runs, folder = map(Path, sys.argv[1:])
        kept_in.keep(runs, folder, lambda name, values: values if name in ASKED else None)
        looked(runs, folder)
        if folder.name in CRITICS:
            said(runs, folder)
    for name in SETS:
        judge(HERE / name)
    for name, beside in CRITICS.items():
        judge_critics(HERE / name, HERE / beside)
    for name in SWEEPS:
        sweep(HERE / name)


if __name__ == "__main__":
    main()
