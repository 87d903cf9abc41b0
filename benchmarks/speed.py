"""How fast overt is: every hot path beside what a user would use instead.

    python benchmarks/speed.py [--device cuda] [--only NAME ...] [--quick] [--rounds N]
                               [--out FILE] [--figures FOLDER] [--commit NAME]

One process. Each section first asserts that the quick way gives the right answer, then ways take
turns. On a CPU the clock is that of the processor, one thread, so that other work on the machine
matters little; on a GPU it is that of the card. The number that counts is the median over rounds,
with its quartiles, of a ratio within a round: a ratio carries over to other machines, a rate does
not. `--quick` is a trial of the program at small sizes, whose numbers mean nothing. Sections can be
measured one after the other into the same file. Figures show how cost grows with size.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks

import sections
from sections.clock import tidy, told
from sections.report import (
    Report,
    Setting,
    commit,
    machine,
    peers,
    plain,
    row_of,
    table,
    tally,
)

Write = Callable[[dict[str, Any], dict[str, str]], None]


def measured(
    names: list[str], setting: Setting, about: dict[str, Any], write: Write
) -> tuple[dict[str, Report], dict[str, str]]:
    """What each section found, and the errors of those that did not come to their end.

    `about` is told of each: the command and the commit. All so far is written after each part of
    them: a machine that is taken away takes little along.
    """
    found: dict[str, Report] = {}
    kept: dict[str, Any] = {}
    broken: dict[str, str] = {}
    for name in names:
        begun = time.perf_counter()
        print(f"{name} ...", end=" ", flush=True)
        now = {**about, "load": round(os.getloadavg()[0], 1), "rounds": setting.rounds}
        now["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        report = Report()

        def save(name: str = name, report: Report = report, now: dict[str, Any] = now) -> None:
            found[name] = without_goals(report) if setting.quick else report
            kept[name] = {**now, **plain(found[name])}
            write(kept, broken)

        report.save = save
        try:
            sections.section(name)(setting, report)
        except Exception as error:  # the others are still worth their time
            traceback.print_exc()
            broken[name] = told(error)
            write(kept, broken)
        else:
            save()
        tidy()  # what is left on a card would be missing in the next section
        print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    return found, broken


def without_goals(report: Report) -> Report:
    """Times at small sizes are held to nothing; errors are."""
    exactly = "largest difference"
    rows = [row if row.unit == exactly else replace(row, goal=None) for row in report.rows]
    return replace(report, rows=rows)


def report_of(
    setting: Setting, kept: dict[str, Any], broken: dict[str, str], before: dict[str, Any]
) -> dict[str, Any]:
    """All that is written down; sections that were not run stay as they were measured before."""
    same = before.get("device") == setting.device and before.get("quick") == setting.quick
    every = {**(before["sections"] if same else {}), **kept}
    found = {name: every[name] for name in sections.NAMES if name in every}
    return {
        "device": setting.device,
        "quick": setting.quick,
        "machine": machine(setting.device),
        "peers": peers(),
        "goals": tally([row_of(row) for one in found.values() for row in one["rows"]]),
        "sections": found,
        "broken": broken,
    }


def drawn(found: dict[str, Report], device: str, folder: Path) -> None:
    """One figure for each curve that was measured."""
    import pages

    folder.mkdir(parents=True, exist_ok=True)
    kept = {"sections": {name: plain(one) for name, one in found.items()}}
    for name, curve in pages.curves(kept, device).items():
        pages.draw(curve, folder / name)
        print(f"drew {folder / name}")


def main(words: list[str]) -> int:
    """Measure, print one table and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(sections.NAMES), metavar="NAME",
                        default=list(sections.NAMES), help=", ".join(sections.NAMES))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes: a trial of the program")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--out",
        type=Path,
        help="write all numbers as JSON to this file; what it has of other sections stays",
    )
    parser.add_argument("--figures", type=Path, help="draw how cost grows, as SVG in this folder")
    parser.add_argument("--commit", help="of what is run, where it is no checkout")
    given = parser.parse_args(words)
    rounds = min(given.rounds, 2) if given.quick else given.rounds
    setting = Setting(given.device, rounds, given.quick)

    before = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}

    def write(kept: dict[str, Any], broken: dict[str, str]) -> None:
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            report = report_of(setting, kept, broken, before)
            whole = given.out.with_suffix(".part")  # a file that is there is a whole one
            whole.write_text(json.dumps(report, indent=1) + "\n")
            whole.replace(given.out)

    shown = [Path(word).name if word.startswith("/") else word for word in words]
    if given.commit is not None:  # it is told beside the command
        shown = [word for word in shown if word not in ("--commit", given.commit)]
    about = {"command": " ".join(["python benchmarks/speed.py", *shown])}
    found, broken = measured(given.only, setting, about | {"commit": commit(given.commit)}, write)
    print("", table({sections.NAMES[name]: one for name, one in found.items()}), "", sep="\n")
    goals = tally([row for one in found.values() for row in one.rows])
    print(", ".join(f"{count} goals {what}" for what, count in goals.items()))
    if given.out is not None:
        print(f"wrote {given.out}")
    if given.figures is not None:
        drawn(found, setting.device, given.figures)
    for name, why in broken.items():
        print(f"{name} did not come to its end: {why}", file=sys.stderr)
    failed = [f"{what} of {name}: {why}" for name, one in found.items()
              for what, why in one.failed.items()]  # fmt: skip
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if broken or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
