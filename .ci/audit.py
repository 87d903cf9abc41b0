"""Hold what is installed against known weaknesses.

python .ci/audit.py constraints.txt pyproject.toml

First against a list of our own, which needs no network: no pin and no lowest version that we allow
may be older than the first one in which a weakness is mended. Then by pip-audit against all that is
published, where it can be had and reached; else it is said that this was not done.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TOOL = "pip-audit==2.10.1"
PLACE = Path("build") / "audit"

# The first version without the weakness, and what that is. What reads other people's bytes first.
FLOORS = {
    "pillow": ("12.2.0", "CVE-2026-40192: a small FITS file unpacks without end"),
    "torch": ("2.6.0", "CVE-2025-32434: weights_only=True could be made to run code"),
    "transformers": ("4.53.0", "CVE-2025-6051 and others: texts that take for ever to read"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a way out of the sandbox of templates"),
    "starlette": ("0.49.1", "CVE-2025-62727: ranges of files that take for ever"),
    "fastapi": ("0.109.1", "CVE-2024-24762: forms that take for ever to read"),
    "h11": ("0.16.0", "CVE-2025-43859: requests hidden in chunks"),
    "urllib3": ("2.6.0", "CVE-2025-66471: small answers that unpack without end"),
    "requests": ("2.32.4", "CVE-2024-47081: passwords sent to another host"),
    "certifi": ("2024.7.4", "CVE-2024-39689: a root that is trusted no more"),
    "idna": ("3.7", "CVE-2024-3651: names that take for ever to read"),
    "filelock": ("3.20.1", "CVE-2025-68146: a link followed while a lock is taken"),
    "fonttools": ("4.60.2", "CVE-2025-66034: a font that writes files elsewhere"),
    "pyyaml": ("5.4", "CVE-2020-14343: code run by a loader that was called full"),
    "protobuf": ("6.31.1", "CVE-2025-4565: messages nested without end"),
    "tqdm": ("4.66.3", "CVE-2024-34062: arguments of its command line were run"),
    "scikit-learn": ("1.5.0", "CVE-2024-5206: words of the training set kept in a model"),
    "setuptools": ("78.1.1", "CVE-2025-47273: a download that lands anywhere"),
    "virtualenv": ("20.26.6", "CVE-2024-53899: names of folders that are run"),
    "werkzeug": ("3.0.6", "CVE-2024-49767: forms that take all memory"),
}
# Weaknesses that are published and do not touch us: the number, and why.
ACCEPTED: dict[str, str] = {}


def below(pins: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every version, by name, that is older than the list allows."""
    from packaging.version import Version

    for name, (least, why) in FLOORS.items():
        if name in pins and Version(pins[name]) < Version(least):
            yield f"{name} {pins[name]} is older than {least} ({why})"


def pinned(text: str) -> dict[str, str]:
    """Names and versions of a file of constraints."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return dict(line.lower().split("==") for line in lines if "==" in line)  # type: ignore[misc]


def lowest(text: str) -> dict[str, str]:
    """The lowest version of each package that a pyproject.toml lets in."""
    from packaging.requirements import Requirement

    project = tomllib.loads(text)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = {}
    for requirement in (Requirement(line) for group in groups for line in group):
        for part in requirement.specifier:
            if part.operator in (">=", "=="):
                found[requirement.name.lower()] = part.version
    return found


def judged(report: str) -> tuple[list[str], str]:
    """What a report of pip-audit holds against us, and a sentence on what it looked at."""
    try:
        entries = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return [], "SKIPPED: pip-audit gave no report; no list of weaknesses can be reached here"
    looked = [one for one in entries if "skip_reason" not in one]
    if not looked:
        return [], f"SKIPPED: of {len(entries)} packages none is listed by the index of this place"
    wrong = [
        f"{one['name']} {one['version']}: {weak['id']}, mended in {weak['fix_versions']}"
        for one in looked
        for weak in one.get("vulns", [])
        if not {weak["id"], *weak.get("aliases", [])} & set(ACCEPTED)
    ]
    return wrong, f"{len(looked)} of {len(entries)} packages looked at, {len(wrong)} weaknesses"


def published(constraints: Path) -> tuple[list[str], str]:
    """Ask pip-audit, in an environment of its own: its packages are none of ours."""
    python = PLACE / "bin" / "python"
    steps: Sequence[Sequence[str]] = (
        (sys.executable, "-m", "venv", str(PLACE)),
        (str(python), "-m", "pip", "install", "-qq", "--retries", "1", TOOL),
    )
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True, timeout=180)
        asked = [str(python), "-m", "pip_audit", "-r", str(constraints), "--no-deps"]
        asked += ["--disable-pip", "-f", "json", "--progress-spinner", "off"]
        done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as problem:
        return [], f"SKIPPED: {TOOL} cannot be had here ({type(problem).__name__})"
    return judged(done.stdout)


def main() -> int:
    """Print what was found; 1 when something has to be done."""
    constraints, project = map(Path, sys.argv[1:])
    wrong = list(below(pinned(constraints.read_text())))
    wrong += [f"pyproject.toml lets in {one}" for one in below(lowest(project.read_text()))]
    print(f"{len(FLOORS)} known weaknesses: {len(wrong)} versions are too old")
    more, told = published(constraints)
    print(told)
    for line in (*wrong, *more):
        print(f"NOT SAFE: {line}")
    return 1 if wrong or more else 0


if __name__ == "__main__":
    sys.exit(main())
