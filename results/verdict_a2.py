"""Apply the decision rules in LOG.md to results of the attention-aligned captioner.

    python results/verdict_a2.py                                       # from results/a2-*
    python results/verdict_a2.py runs/a2-flickr8k results/a2-flickr8k  # import runs first

Differences are of CIDEr-D, per image and seed, in percentage points; intervals are over seeds and
images. Attention of words is compared per caption, clustered by image. Rows that are missing, or
have fewer than three seeds in common, decide nothing; a verdict of fewer than five seeds is
provisional.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import run_results as kept_in
import torch
from archive import pack, unpacked
from run_results import in_points, judged, over
from torch import Tensor

from overt.metrics.statistics import Interval
from overt.papers.a2.config import FUSIONS

HERE = unpacked()
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
BLEU, CIDER = 0.17, 0.45  # goals of the plain captioner of Flickr8k


@dataclass(frozen=True)
class Kept:
    """Runs of one folder: reported results, and numbers per image."""

    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, Tensor]
    folder: str

    def seeds(self, row: str) -> list[int]:
        """Return the seeds of a row."""
        return sorted(seed for label, seed in self.results if label == row)

    def minus(self, one: str, other: str, name: str = "cider_d") -> Interval | None:
        """Return the difference of two rows over their common seeds, or None."""
        return self.difference((one, name), (other, name))

    def difference(
        self, one: tuple[str, str], other: tuple[str, str], beside: "Kept | None" = None
    ) -> Interval | None:
        """Return the difference of two rows and metrics; the other may be in `beside`."""
        held = (self, beside or self)
        seeds = [seed for seed in held[0].seeds(one[0]) if seed in held[1].seeds(other[0])]
        keys = [[f"{row}/seed-{seed}/{name}" for seed in seeds] for row, name in (one, other)]
        pairs = list(zip(held, keys, strict=True))
        if len(seeds) < LEAST or not all(key in at.samples for at, many in pairs for key in many):
            return None
        ours, theirs = (torch.stack([at.samples[key] for key in many]) for at, many in pairs)
        difference = ours - theirs
        difference[:, difference.isnan().any(dim=0)] = torch.nan  # a caption may mention no region
        return over(difference, self.folder)

    def mean(self, row: str, name: str) -> float:
        """Return the mean of a metric over the seeds of a row."""
        found = [self.results[row, seed]["ours"][name]["value"] for seed in self.seeds(row)]
        return sum(found) / len(found)


def verdict(found: Interval | None) -> str:
    """Return confirmed, refuted or undecided, by the interval; or missing."""
    if found is None:
        return "missing"
    said = "confirmed" if found.low > 0 else "refuted" if found.high < 0 else "undecided"
    return judged(found, said)


def order(kept: Kept) -> str:
    """Test gate > decay > max > moving average > none by the four adjacent differences."""
    said = []
    for worse, better in pairwise(FUSIONS):
        difference = kept.minus(better, worse)
        said.append(verdict(difference))
        print(f"  {better} over {worse}: {said[-1]}{_shown(difference)}")
    words = {one.partition(" ")[0] for one in said}
    few = " (provisional)" if any("provisional" in one for one in said) else ""
    if "refuted" in words:
        return f"refuted{few}"
    if words == {"confirmed"}:
        return f"confirmed{few}"
    return f"undecided{few}" if "missing" not in words else "undecided, with rows missing"


def compare_attention(kept: Kept) -> None:
    """Compare where words attend: within a pass, with `none`, by masks."""
    for name in ("mass_inside", "pointing"):
        for row in (*FUSIONS[1:], *PLACEBOS):
            others = {"before": (row, f"{name}_before"), "none": ("none", name)}
            if row == "gate":
                others |= {placebo: (placebo, name) for placebo in PLACEBOS}
            for what, other in others.items():
                difference = kept.difference((row, name), other)
                if difference is not None:
                    print(
                        f"  {name} of {row} over {what}: {verdict(difference)}{_shown(difference)}"
                    )


def by_layer(kept: Kept) -> None:
    """Print agreement and divergence by layer, means over seeds: figures 2, 5 and 6."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        for name in LAYERED:
            many = [kept.results[row, seed]["groups"].get(name) for seed in kept.seeds(row)]
            if all(many):
                layers = [[one["value"] for one in found.values()] for found in many]
                mean = " ".join(f"{100 * one:.1f}" for one in np.mean(layers, axis=0))
                print(f"  {name} of {row}, by layer: {mean}")


def sweep(folder: Path) -> None:
    """Print the effect of lambda on masks and captions: figure 4."""
    print(f"== {folder.name}")
    found = {}
    for path in folder.glob("*/seed-0/results.json"):
        results = json.loads(path.read_text())
        found[results["settings"]["align.penalty"]] = results["ours"]
    for weight in sorted(found):
        numbers = {name: found[weight][name]["value"] for name in SWEPT if name in found[weight]}
        print(f"  {weight}: " + ", ".join(f"{name} {one:.4f}" for name, one in numbers.items()))


def critics(kept: Kept) -> None:
    """Print the gain of self-critical training for each row that has it."""
    rows = [row for row in FUSIONS if kept.seeds(f"{row}-critic")]
    if not rows:
        print("  critic: missing, so not shown")
    for row in rows:
        for name in ("cider_d", "greedy_cider_d", "words"):
            difference = kept.minus(f"{row}-critic", row, name)
            scale = " (hundredths)" if name == "words" else ""
            print(f"  critic on {row}, {name}{scale}: {verdict(difference)}{_shown(difference)}")
        if row != "none":
            difference = kept.minus(f"{row}-critic", "none-critic")
            print(
                f"  critic on {row} over critic on none: {verdict(difference)}{_shown(difference)}"
            )


def judge_critics(folder: Path, beside: Path) -> None:
    """Compare critics with the captioners they started from, and with the critic on `none`."""
    print(f"== {folder.name}")
    if not (folder / "samples.npz").is_file():
        print("  no results: no verdict")
        return
    kept = Kept(*kept_in.read(folder), folder.name)
    before = Kept(*kept_in.read(beside), beside.name)
    print_means(kept)
    for row in dict.fromkeys(label for label, _ in kept.results):
        if not row.endswith("-critic"):
            difference = kept.difference((row, "cider_d"), (row, "cider_d"), before)
            print(
                f"  {row} over the same seeds of before: {verdict(difference)}{_shown(difference)}"
            )
            continue
        begun = row.removesuffix("-critic").removesuffix("-beams")
        for name in ("cider_d", "greedy_cider_d", "words"):
            difference = kept.minus(row, begun, name)
            scale = " (hundredths)" if name == "words" else ""
            print(f"  {row} over {begun}, {name}{scale}: {verdict(difference)}{_shown(difference)}")
        difference = kept.difference((row, "cider_d"), ("none-critic", "cider_d"), before)
        print(f"  {row} over the critic on none: {verdict(difference)}{_shown(difference)}")
        clocks = [kept.results[row, seed]["clock"] for seed in kept.seeds(row)]
        shares = " ".join(f"{100 * one['reward'] / one['critic']:.1f}" for one in clocks)
        print(f"  {row}, share of the reward beside other runs, in per cent: {shares}")


def print_means(kept: Kept) -> None:
    """Print the means over seeds of caption metrics, one row per line."""
    for row in dict.fromkeys(label for label, _ in kept.results):
        numbers = {name: kept.mean(row, name) for name in SHOWN}
        shown = ", ".join(f"{name} {100 * one:.1f}" for name, one in numbers.items())
        print(f"  {row}, seeds {kept.seeds(row)}: {shown}")


def judge(folder: Path) -> None:
    """Apply every rule to one dataset."""
    print(f"== {folder.name}")
    if not (folder / "samples.npz").is_file():
        print("  no results: no verdict")
        return
    kept = Kept(*kept_in.read(folder), folder.name)
    print_means(kept)
    if folder.name == "a2-flickr8k" and kept.seeds("none"):
        bleu, cider = kept.mean("none", "bleu_4"), kept.mean("none", "cider_d")
        met = "reached" if bleu >= BLEU and cider >= CIDER else "NOT reached"
        print(f"  plain baseline: {met}: BLEU-4 {bleu:.3f} of {BLEU}, CIDEr {cider:.3f} of {CIDER}")
    print(f"  order of Table 3: {order(kept)}")
    for row in FUSIONS[1:]:
        difference = kept.minus(row, "none")
        print(f"  {row} helps: {verdict(difference)}{_shown(difference)}")
    for row in PLACEBOS:
        difference = kept.minus("gate", row)
        print(f"  gate over {row}: {verdict(difference)}{_shown(difference)}")
        difference = kept.minus(row, "none")
        print(f"  {row} over none: {verdict(difference)}{_shown(difference)}")
    compare_attention(kept)
    by_layer(kept)
    critics(kept)


def store_attention(runs: Path, folder: Path) -> None:
    """Store the attention of the words of each caption."""
    with np.load(folder / "samples.npz") as before:
        arrays = {name: before[name] for name in before.files}
    for path in sorted(runs.glob("*/seed-*/elsewhere.npz")):
        if json.loads((path.parent / "results.json").read_text())["status"] == "done":
            with np.load(path) as found:
                for name in set(LOOKED) & set(found.files):
                    key = f"{path.parent.parent.name}/{path.parent.name}/{name}"
                    arrays[key] = found[name].astype("f2")
    np.savez_compressed(folder / "samples.npz", **arrays)


def store_frequent_captions(runs: Path, folder: Path) -> None:
    """Store the number of distinct captions of each run, and the most frequent ones."""
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
    """Import runs if two folders are given; then apply the rules to stored results."""
    if len(sys.argv) == 3:
        runs, folder = Path(sys.argv[1]), HERE / Path(sys.argv[2]).name
        kept_in.keep(runs, folder, lambda name, values: values if name in ASKED else None)
        store_attention(runs, folder)
        if folder.name in CRITICS:
            store_frequent_captions(runs, folder)
        pack(folder)
    for name in SETS:
        judge(HERE / name)
    for name, beside in CRITICS.items():
        judge_critics(HERE / name, HERE / beside)
    for name in SWEEPS:
        sweep(HERE / name)


if __name__ == "__main__":
    main()
