"""Apply the decision rule in LOG.md to the rows of the table `ltpa-1` that were run.

python benchmarks/verdict_ltpa.py              # from benchmarks/ltpa-1
python benchmarks/verdict_ltpa.py runs/ltpa-1  # keep finished rows of seed 0, then apply it
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.measure import bootstrap

KEPT = Path(__file__).parent / "ltpa-1"
SAMPLES = KEPT / "samples.npz"
LARGEST_ERROR, ONE_CELL, NO_CHOICE, LARGEST_COST = 0.40, 0.1, 0.99, 1.10
CELLS = {"entropy_8x8": 64, "entropy_16x16": 256, "entropy_32x32": 1024}
PAIR = ("cifar100-att2-concat-pc", "cifar100-att2-mean")


def keep(runs: Path) -> None:
    """Copy the results of finished rows, and collect errors, entropies and validations."""
    arrays: dict[str, Any] = {}
    if SAMPLES.is_file():
        with np.load(SAMPLES) as before:
            arrays |= {name: before[name] for name in before.files}
    for place in sorted(runs.glob("*/seed-0")):
        row = place.parent.name
        kept = KEPT / row / "seed-0" / "results.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes((place / "results.json").read_bytes())
        with np.load(place / "samples.npz") as samples:
            arrays[f"{row}/error"] = samples["error"].astype(bool)
            for name in CELLS.keys() & set(samples.files):
                arrays[f"{row}/{name}"] = samples[name].astype("f2")
        lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
        found = [one["measures"]["accuracy"] for one in lines if one["split"] == "val"]
        arrays[f"{row}/validation"] = np.array(found, "f4")
    np.savez_compressed(SAMPLES, **arrays)


def judged(row: str, results: dict[str, Any]) -> None:
    """Whether a row trained, how far the paper is, and what became of its maps."""
    error = results["ours"]["error"]
    trains = results["status"] == "done" and error["value"] < LARGEST_ERROR
    print(f"{row}: {'trains' if trains else 'does not train'}, {results['epochs']} epochs")
    print(f"  error {error['value']:.4f} [{error['low']:.4f} to {error['high']:.4f}]")
    if "error" in results["paper"]:
        stated = results["paper"]["error"]["value"]
        print(f"  paper {stated:.4f}, difference {error['value'] - stated:+.4f}")
    for name, cells in CELLS.items():
        if name in results["ours"]:
            mean, most = results["ours"][name]["value"], math.log(cells)
            kind = "one cell" if mean <= ONE_CELL else "all cells alike"
            fine = ONE_CELL < mean < NO_CHOICE * most
            print(f"  {name} {mean:.3f} of {most:.3f}: {'no collapse' if fine else kind}")


def main() -> None:
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    for path in sorted(KEPT.glob("*/seed-0/results.json")):
        judged(path.parts[-3], json.loads(path.read_text()))
    with np.load(SAMPLES) as samples:
        ours, control = (torch.from_numpy(samples[f"{row}/error"]).float() for row in PAIR)
    found = bootstrap(ours - control)
    print(f"attention minus control {found.mean:+.4f} [{found.low:+.4f} to {found.high:+.4f}]")
    print("  over test pictures alone; one seed decides nothing")
    cost = json.loads((KEPT / "speed.json").read_text())["ratio"]["att2"]
    print(f"cost of attention {cost:.3f}: {'as' if cost <= LARGEST_COST else 'not as'} wanted")


if __name__ == "__main__":
    main()
