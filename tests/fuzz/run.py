"""Fuzz the readers with atheris if it is installed, else with random mutations.

python -m tests.fuzz.run [TARGET ...] --seconds 20

Each target has a process and a share of the time. Failing inputs are saved under build/fuzz and
make the exit code 1; the last line is a summary in JSON.
"""

import argparse
import importlib.util
import json
import random
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "fuzz"
DONE = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def fuzz_with_atheris(name: str, seconds: int) -> None:
    """Fuzz one target with atheris, which ends the process itself."""
    import atheris

    with atheris.instrument_imports(include=["overt", "PIL", "zipfile", "tarfile", "json"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = OUTPUT / name / "begin"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(data)
        target(data)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", "-timeout=60", "-seed=1"]
    options += ["-rss_limit_mb=6000", f"-artifact_prefix={OUTPUT / name}/bad-", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


def fuzz_randomly(name: str, seconds: int) -> None:
    """Fuzz one target with random mutations of its seeds."""
    from tests.fuzz.targets import TARGETS, clear
    from tests.trust.hostile import mutate_bytes

    target, rng, count = TARGETS[name], random.Random(1), 0
    seeds = target.seeds()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutate_bytes(rng.choice(seeds), rng)
        try:
            target(data)
        except Exception:
            (OUTPUT / name).mkdir(parents=True, exist_ok=True)
            (OUTPUT / name / f"bad-{count}").write_bytes(data)
            traceback.print_exc()
            sys.exit(1)
        count += 1
    clear()
    print(f"stat::number_of_executed_units: {count}")


def main() -> int:
    """Run the given targets, or all of them, in turn."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=20, help="for all targets together")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {sorted(unknown)[0]}: choose from {', '.join(TARGETS)}")
    atheris = importlib.util.find_spec("atheris") is not None
    if given.one:
        (fuzz_with_atheris if atheris else fuzz_randomly)(given.targets[0], given.seconds)
        return 0
    names = given.targets or list(TARGETS)
    share = max(1, given.seconds // len(names))
    runs: dict[str, int] = {}
    failed: list[str] = []
    for name in names:
        command = [sys.executable, "-m", "tests.fuzz.run", name, "--one", "--seconds", str(share)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = DONE.search(done.stdout + done.stderr)
        runs[name] = int(found[1]) if found else 0
        if done.returncode:
            failed.append(name)
            print(f"{name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        else:
            print(f"{name}: {runs[name]} inputs passed", flush=True)
    method = "atheris" if atheris else "random mutations"
    print(
        json.dumps({"method": method, "seconds": share * len(names), "inputs": runs, "bad": failed})
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
