"""Benchmark every hot path against the usual alternatives.

    python benchmarks/speed.py [--device cuda] [--only NAME ...] [--quick] [--rounds N]
                               [--out FILE] [--figures FOLDER] [--commit NAME]

All variants run interleaved in one process. Each section first asserts that the fast variant
gives correct results. On a CPU the clock is process CPU time of one thread, so that other work on
the machine matters little; on a GPU it is CUDA events. The reported number is the median over
rounds, with its quartiles, of a ratio within a round: a ratio carries over to other machines, a
rate does not. `--quick` tests the program at small sizes, whose numbers mean nothing. Sections can
be measured one after the other into the same file. Figures show how cost grows with size.
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
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler

import sections
from sections.clock import describe_error, free_memory
from sections.report import (
    Report,
    Setting,
    commit,
    count_goals,
    format_table,
    machine,
    peers,
    row_from_dict,
    to_dict,
)

Write = Callable[[dict[str, Any], dict[str, str]], None]


def run_sections(
    names: list[str], setting: Setting, metadata: dict[str, Any], write: Write
) -> tuple[dict[str, Report], dict[str, str]]:
    """Run the sections; return their reports, and the errors of those that failed.

    `metadata` (command and commit) is stored with each section. Results are written after each part
    of a section, so that an interrupted run keeps them.
    """
    found: dict[str, Report] = {}
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in names:
        start = time.perf_counter()
        print(f"{name} ...", end=" ", flush=True)
        now = {**metadata, "load": round(os.getloadavg()[0], 1), "rounds": setting.rounds}
        now["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        report = Report()

        def save(name: str = name, report: Report = report, now: dict[str, Any] = now) -> None:
            found[name] = without_goals(report) if setting.quick else report
            results[name] = {**now, **to_dict(found[name])}
            write(results, errors)

        report.save = save
        try:
            sections.section(name)(setting, report)
        except Exception as error:  # continue with the other sections
            traceback.print_exc()
            errors[name] = describe_error(error)
            write(results, errors)
        else:
            save()
        free_memory()  # free GPU memory for the next section
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    return found, errors


def without_goals(report: Report) -> Report:
    """Remove goals from timings, which mean nothing at small sizes; keep those of errors."""
    exactly = "largest difference"
    rows = [row if row.unit == exactly else replace(row, goal=None) for row in report.rows]
    return replace(report, rows=rows)


def full_report(
    setting: Setting, results: dict[str, Any], errors: dict[str, str], previous: dict[str, Any]
) -> dict[str, Any]:
    """Return the JSON report; sections that were not run keep their earlier results."""
    same = previous.get("device") == setting.device and previous.get("quick") == setting.quick
    all_sections = {**(previous["sections"] if same else {}), **results}
    found = {name: all_sections[name] for name in sections.NAMES if name in all_sections}
    return {
        "device": setting.device,
        "quick": setting.quick,
        "machine": machine(setting.device),
        "peers": peers(),
        "goals": count_goals([row_from_dict(row) for one in found.values() for row in one["rows"]]),
        "sections": found,
        "errors": errors,
    }


def draw_figures(found: dict[str, Report], device: str, folder: Path) -> None:
    """Draw one figure for each measured curve."""
    import pages

    folder.mkdir(parents=True, exist_ok=True)
    results = {"sections": {name: to_dict(one) for name, one in found.items()}}
    for name, curve in pages.curves(results, device).items():
        pages.draw_curve(curve, folder / name)
        print(f"drew {folder / name}")


def main(argv: list[str]) -> int:
    """Run the sections, print one table and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(sections.NAMES), metavar="NAME",
                        default=list(sections.NAMES), help=", ".join(sections.NAMES))  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the program")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--out",
        type=Path,
        help="write all numbers as JSON to this file; other sections in it are preserved",
    )
    parser.add_argument("--figures", type=Path, help="draw growth curves as SVG into this folder")
    parser.add_argument("--commit", help="measured commit, if this is not a checkout")
    args = parser.parse_args(argv)
    rounds = min(args.rounds, 2) if args.quick else args.rounds
    setting = Setting(args.device, rounds, args.quick)

    previous = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}

    def write(results: dict[str, Any], errors: dict[str, str]) -> None:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            report = full_report(setting, results, errors, previous)
            partial = args.out.with_suffix(
                ".part"
            )  # replaced at once, so that the file is always complete
            partial.write_text(json.dumps(report, indent=1) + "\n")
            partial.replace(args.out)

    shown_args = [Path(word).name if word.startswith("/") else word for word in argv]
    if args.commit is not None:  # stored separately
        shown_args = [word for word in shown_args if word not in ("--commit", args.commit)]
    metadata = {"command": " ".join(["python benchmarks/speed.py", *shown_args])}
    found, errors = run_sections(
        args.only, setting, metadata | {"commit": commit(args.commit)}, write
    )
    print(
        "", format_table({sections.NAMES[name]: one for name, one in found.items()}), "", sep="\n"
    )
    goals = count_goals([row for one in found.values() for row in one.rows])
    print(", ".join(f"{count} goals {label}" for label, count in goals.items()))
    if args.out is not None:
        print(f"wrote {args.out}")
    if args.figures is not None:
        draw_figures(found, setting.device, args.figures)
    for name, reason in errors.items():
        print(f"{name} failed: {reason}", file=sys.stderr)
    failed = [f"{label} of {name}: {reason}" for name, one in found.items()
              for label, reason in one.failed.items()]  # fmt: skip
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if errors or failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
