"""Write the tables of claims into the pages of the papers and into README.md.

    python results/claims.py          # write them, from the archives of this folder
    python results/claims.py --print  # print them

Each claim of `claim_list.py` is a difference of two rows, with the interval of docs/intervals.md:
over seeds and test items, paired by both; of numbers that a run reports once, over seeds. It is
*confirmed* if the interval is on the claimed side, *refuted* if it is on the other side (or within
the bounds that a rule names), else *undecided*. Five seeds give a verdict, three or four a
provisional one, fewer numbers only.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archive import unpacked
from claim_list import CLAIMS, HEADLINES, Claim
from run_results import PROVISIONAL, judged, pictures
from torch import Tensor

from overt.experiments.table import FOR_A_VERDICT
from overt.metrics import confidence_interval, two_level_interval
from overt.metrics.statistics import Interval
from overt.metrics.student_t import quantile

ROOT = Path(__file__).resolve().parents[1]
MOST_SEEDS = 100
HEAD = "| claim | verdict | effect, points (95 %) | in the paper | inside? | seeds | command |"
PAPERS = {  # name, where it is in the library
    "ltpa": (
        "Learn to Pay Attention",
        "`nn.learned_attention`, [attach to any backbone](docs/attach.md)",
    ),
    "ssa": ("Self Supervision for Attention Networks", "`targets.surrogate`, `losses`"),
    "han": (
        "Bootstrapping Hard Attention",
        "`nn.hard_attention`, [token pruning](docs/tokens.md)",
    ),
    "vgp": ("Grounded supervision of Transformers", "`losses.grounding`"),
    "a2": ("Attention-Aligned Transformer", "`nn.mask_perturbation`"),
}


@dataclass(frozen=True)
class Archive:
    """Runs of one archive: reported results by row and seed, and numbers per item."""

    name: str
    results: Mapping[tuple[str, int], dict[str, Any]]
    samples: Mapping[str, np.ndarray]

    def seeds(self, row: str) -> set[int]:
        """Return the seeds of a row."""
        return {seed for label, seed in self.results if label == row}

    def items(self, row: str, metric: str, seed: int) -> Tensor | None:
        """Return the numbers of a run by item, None if they were not stored."""
        values = self.samples.get(f"{row}/seed-{seed}/{metric}")
        return None if values is None else torch.from_numpy(values.astype("f8"))

    def clusters(self, metric: str, count: int) -> list[str] | None:
        """Return the image of each item."""
        for name in (f"{metric}.id", "id"):
            if name in self.samples and len(self.samples[name]) == count:
                return [str(one) for one in self.samples[name]]
        return pictures(self.name, count)


@cache
def read(name: str) -> Archive:
    """Return the runs of an archive."""
    folder = unpacked() / name
    if not (folder / "samples.npz").is_file():
        return Archive(name, {}, {})
    results = {
        (path.parts[-3], int(path.parent.name.removeprefix("seed-"))): json.loads(path.read_text())
        for path in sorted(folder.glob("*/seed-*/results.json"))
    }
    with np.load(folder / "samples.npz") as found:
        return Archive(name, results, {key: found[key] for key in found.files})


@dataclass(frozen=True)
class Finding:
    """The effect of a claim, the differences behind it, and what the runs cost."""

    claim: Claim
    effect: Interval
    by_seed: tuple[float, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        """Return confirmed, refuted or undecided, as the number of seeds allows."""
        if not self.by_seed:
            return "not run"
        if self.claim.unfit:
            return "undecided (not comparable)"
        low, high = sorted((self.claim.sign * self.effect.low, self.claim.sign * self.effect.high))
        nothing = -self.claim.same < low and high < self.claim.same
        text = "confirmed" if low > self.claim.above else "undecided"
        least = self.claim.above if self.claim.least is None else self.claim.least
        refuted = text != "confirmed" and (high < least or nothing)
        return judged(self.effect, "refuted" if refuted else text)

    @property
    def open(self) -> bool:
        """Return whether the claim needs more runs: undecided, or with fewer than five seeds."""
        return self.verdict not in ("confirmed", "refuted")

    @property
    def inside(self) -> str:
        """Return whether the interval over seeds contains the effect of the paper."""
        if self.claim.paper is None or self.effect.runs < PROVISIONAL:
            return ""
        return "yes" if self.effect.low <= self.claim.paper <= self.effect.high else "**no**"

    def seeds_needed(self) -> int | None:
        """Estimate how many seeds decide the claim; None beyond `MOST_SEEDS`.

        The noise between seeds and items is assumed unchanged, and the effect to be that of the
        paper, unless the interval excludes it: then ours.
        """
        if len(self.by_seed) < 2 or math.isnan(self.effect.error):
            return FOR_A_VERDICT
        between = statistics.variance(self.by_seed)
        of_items = max(0.0, self.effect.error**2 - between / len(self.by_seed))
        assumed = self.claim.paper if self.inside == "yes" else None
        if assumed is None or "undecided" not in self.verdict:
            assumed = self.effect.mean
        distance = abs(self.claim.sign * assumed - self.claim.above)
        for seeds in range(FOR_A_VERDICT, MOST_SEEDS + 1):
            if quantile(0.95, seeds - 1.0) * math.sqrt(between / seeds + of_items) < distance:
                return seeds
        return None


def values(claim: Claim, at: Archive, row: str, seed: int) -> Tensor:
    """Return the metric of a run in points: by item, or one number if only that was stored.

    A row may name its own metric after a space.
    """
    label, _, metric = row.partition(" ")
    name = metric or claim.metric
    found = at.items(label, name, seed)
    if found is not None:
        return 100 * found
    results = at.results[label, seed]
    if name.startswith("spread of "):
        return torch.tensor([100 * spread(results["groups"], name)])
    return torch.tensor([100 * results["ours"][name]["value"]])


def spread(groups: Mapping[str, Any], name: str) -> float:
    """Return the standard deviation of a metric over the heads of a layer, or over layers.

    Layers count from the second on: in the first, a word's state does not contain its phrase.
    """
    metric, _, over = name.removeprefix("spread of ").partition(" over ")
    layers: dict[str, list[float]] = {}
    for place, one in groups[metric].items():
        layers.setdefault(place.partition(" head ")[0], []).append(one["value"])
    if over == "heads":
        return statistics.fmean(statistics.stdev(heads) for heads in layers.values())
    return statistics.stdev([statistics.fmean(heads) for heads in layers.values()][1:])


def find(claim: Claim) -> Finding:
    """Compute the effect of a claim."""
    ours, theirs = read(claim.folder), read(claim.beside or claim.folder)
    one, other = (row.partition(" ")[0] for row in (claim.one, claim.other))
    seeds = sorted(ours.seeds(one) & theirs.seeds(other))
    seeds = [seed for seed in seeds if not claim.seeds or seed in claim.seeds]
    if not seeds:
        return Finding(claim, Interval(math.nan, math.nan, math.nan, 0, runs=0), (), math.nan)
    apart = torch.stack(
        [values(claim, ours, claim.one, n) - values(claim, theirs, claim.other, n) for n in seeds]
    )
    apart[:, apart.isnan().any(dim=0)] = torch.nan  # an item without a number in some run
    seconds = statistics.fmean(
        ours.results[one, n]["seconds"] + theirs.results[other, n]["seconds"] for n in seeds
    )
    by_seed = tuple(apart.nanmean(dim=1).tolist())
    if apart.shape[1] == 1:
        effect = replace(confidence_interval(by_seed), runs=len(seeds))
    else:
        effect = two_level_interval(apart, clusters=ours.clusters(claim.metric, apart.shape[1]))
    return Finding(claim, effect, by_seed, seconds)


@cache
def findings(paper: str) -> tuple[Finding, ...]:
    """Return the findings of a paper."""
    return tuple(find(claim) for claim in CLAIMS[paper])


# --- pages


def signed(number: float) -> str:
    """Format points with a sign and two decimals."""
    return f"{number:+.2f}".replace("-", "−")


def shown(finding: Finding) -> str:
    """Format an effect with its interval."""
    one = finding.effect
    if not finding.by_seed:
        return ""
    ends = "" if math.isnan(one.low) else f" ({signed(one.low)} to {signed(one.high)})"
    return f"{signed(one.mean)}{ends}"


def published(claim: Claim) -> str:
    """Format the effect of the paper."""
    if claim.paper is None:
        return ""
    return signed(claim.paper) + (f" ({claim.measured})" if claim.measured else "")


def emphasized(verdict: str) -> str:
    """Set a final verdict in bold."""
    return f"**{verdict}**" if verdict in ("confirmed", "refuted") else verdict


def claims_table(paper: str) -> str:
    """Return the table of claims of a paper, without planned runs."""
    lines = [HEAD, "|---" * 7 + "|"]
    for one in (found for found in findings(paper) if found.by_seed):
        cells = [one.claim.text, emphasized(one.verdict), shown(one), published(one.claim)]
        cells += [one.inside, str(one.effect.runs), f"`{one.claim.command}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def open_table(paper: str) -> str:
    """Return the table of what is not decided, with the seeds and hours it would take."""
    lines = ["| not decided | why | seeds needed | minutes |", "|---|---|---|---|"]
    for one in findings(paper):
        if not one.open:
            continue
        needed = one.seeds_needed()
        seeds, minutes = "", ""
        if one.claim.unfit:
            why = one.claim.unfit
        elif not one.by_seed:
            why, seeds = f"not run: `{one.claim.command}`", str(FOR_A_VERDICT)
        elif needed is None:
            why = f"more than {MOST_SEEDS} seeds, or more test items"
            why += ": an effect as small as ours" if one.inside != "yes" else ""
        else:
            runs = one.effect.runs
            why = "undecided" if "undecided" in one.verdict else f"{runs} of {FOR_A_VERDICT} seeds"
            seeds, minutes = str(needed), f"{max(0, needed - runs) * one.seconds / 60:.0f}"
        lines.append(f"| {one.claim.text} | {why} | {seeds} | {minutes} |")
    return "\n".join(lines)


def sentence(finding: Finding) -> str:
    """Format a claim, its verdict and its effect in one cell."""
    text = f"{emphasized(finding.verdict)}: {finding.claim.text}, {shown(finding)}"
    text += f", {finding.effect.runs} seed{'s' * (finding.effect.runs > 1)}"
    if finding.claim.paper is not None:
        where = {"yes": "inside", "": ""}.get(finding.inside, "outside")
        text += f"; paper {published(finding.claim)}, {where}".rstrip(", ")
    return text


def overview() -> str:
    """Return the table of README.md: a finding of each paper, and what is not shown."""
    lines = ["| paper | in the library | finding, points (95 %) | not shown |", "|---" * 4 + "|"]
    for paper, (name, where) in PAPERS.items():
        cells = [f"[{name}](overt/papers/{paper}/README.md)", where]
        cells += [sentence(findings(paper)[place]) for place in HEADLINES[paper]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: str, mark: str, text: str) -> str:
    """Return a page with new text between its marks."""
    return re.sub(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)",
        lambda found: f"{found[1]}{text}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )


def pages() -> dict[Path, str]:
    """Return every page with new tables."""
    places = {ROOT / "README.md": fill((ROOT / "README.md").read_text(), "claims", overview())}
    for paper in PAPERS:
        place = ROOT / "overt" / "papers" / paper / "README.md"
        page = fill(place.read_text(), "claims", claims_table(paper))
        places[place] = fill(page, "open", open_table(paper))
    return places


def main() -> None:
    if sys.argv[1:] == ["--print"]:
        for paper in PAPERS:
            print(paper, claims_table(paper), open_table(paper), sep="\n")
        print(overview())
        return
    for place, page in pages().items():
        place.write_text(page)


if __name__ == "__main__":
    main()
