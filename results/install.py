"""Check `overt.watch` with the installed versions, and write them to results/install.json.

    python results/install.py          # the parity of every model family, one entry per environment
    python results/install.py --tests  # also run the tests of the core
    python results/install.py --oldest build/oldest  # install the oldest versions there, and run it
    python results/install.py --page   # rewrite the table of docs/install.md from the results

Run it in an environment with other versions of torch or transformers; `make test-oldest` makes the
one with the oldest. Each family is a tiny random model (tests/capture/families.py), and the maps
are compared with those that the model itself returns under "eager".
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "install.json"
PAGE = ROOT / "docs" / "install.md"
PACKAGES = "torch transformers tokenizers numpy einops jaxtyping safetensors pillow".split()
TESTS = "capture attribution losses metrics test_attention.py test_geometry.py test_io.py".split()
TESTS = [f"tests/{name}" for name in TESTS]
TOOLS = "pytest beartype hypothesis psutil captum scikit-image accelerate".split()
LARGEST = {"weights": 1e-6, "gradients": 1e-5, "logs": 1e-5}  # as in tests/parity/test_families.py


def oldest_requirements(text: str) -> list[str]:
    """Return the oldest allowed version of each package of the core, of models and of metrics."""
    from packaging.requirements import Requirement

    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["hf"], *extras["measure"], *extras["torchmetrics"]]
    return [
        f"{one.name}=={part.version}"
        for one in map(Requirement, lines)
        for part in one.specifier
        if part.operator == ">="
    ]


def install_oldest(folder: Path) -> Path:
    """Make an environment with the oldest versions and the tools of the tests; return its Python.

    An old torch from the index brings gigabytes of CUDA.
    """
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [str(python), "-m", "pip", "install", "-q"]
    wanted = oldest_requirements((ROOT / "pyproject.toml").read_text())
    subprocess.run([*pip, *wanted, *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def check(family: Any, implementation: str) -> dict[str, Any]:
    """Return the differences of a family under one implementation, or why there are none."""
    from tests.capture import families

    try:
        found = families.parity(family, implementation)
    except Exception as error:  # a model that these versions do not have, or cannot run this way
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    exact = all(getattr(found, name) <= most for name, most in LARGEST.items())
    whole = found.calls == family.calls and found.kinds == {family.kind}
    values = {name: getattr(found, name) for name in LARGEST}
    return {"exact": bool(exact and whole), **values}


def check_all() -> dict[str, Any]:
    """Return versions and the result of every family and implementation."""
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    from tests.capture.families import FAMILIES

    return {
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": platform.system(),
        "families": {
            one.name: {name: check(one, name) for name in one.implementations} for one in FAMILIES
        },
    }


def run_tests() -> dict[str, dict[str, Any]]:
    """Run the fast tests of the core; return by folder how many passed, and which failed."""
    found = {}
    for name in TESTS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            subprocess.run([*command, f"--junitxml={report}", name], cwd=ROOT, check=False)
            cases = list(ElementTree.parse(report).iter("testcase"))
        # compared with None: an element without children is false
        failed = [
            one for one in cases if one.find("failure") is not None or one.find("error") is not None
        ]
        skipped = sum(one.find("skipped") is not None for one in cases)
        found[name] = {
            "passed": len(cases) - len(failed) - skipped,
            "skipped": skipped,
            "failed": sorted(f"{one.get('classname')}::{one.get('name')}" for one in failed),
        }
    return found


def name_of(entry: dict[str, Any]) -> str:
    """Return the name of an environment: system, Python, torch and transformers."""
    named = entry["versions"]
    return (
        f"{entry['system']}, Python {entry['python']}, torch {named['torch']}, "
        f"transformers {named['transformers']}"
    )


def save(entry: dict[str, Any]) -> None:
    """Add an entry to the results, in place of an older one of the same versions."""
    entries = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    entries[name_of(entry)] = entry
    RESULTS.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def cell(found: dict[str, Any]) -> str:
    """Return what the table says of a family: how many of its implementations are exact."""
    exact = [name for name, one in found.items() if one.get("exact")]
    largest = max((found[name]["weights"] for name in exact), default=None)
    if len(exact) == len(found):
        return f"{largest:.0e}"
    missing = ", ".join(name for name in found if name not in exact)
    return f"not {missing}" if largest is None else f"{largest:.0e}; not {missing}"


def table(entries: dict[str, dict[str, Any]]) -> str:
    """Return one line per family, one column per environment."""
    names = list(entries)
    lines = ["| family | " + " | ".join(f"({at})" for at in range(1, len(names) + 1)) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for family in next(iter(entries.values()))["families"]:
        cells = [cell(entries[name]["families"].get(family, {})) for name in names]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    head = [f"({at}) {name}" for at, name in enumerate(names, start=1)]
    return "\n".join(["; ".join(head) + ".", "", *lines])


def tests_table(entries: dict[str, dict[str, Any]]) -> str:
    """Return one line per environment whose tests were run: passed, failed and skipped tests."""
    lines = ["| environment | tests | passed | failed | skipped |", "|---|---|---|---|---|"]
    for name, entry in entries.items():
        for folder, found in entry.get("tests", {}).items():
            counts = f"{found['passed']} | {len(found['failed'])} | {found['skipped']}"
            lines.append(f"| {name} | {folder.removeprefix('tests/')} | {counts} |")
    return "\n".join(lines)


def fill(page: str, entries: dict[str, dict[str, Any]]) -> str:
    """Return the page with new tables between its marks."""
    for name, text in (("parity", table(entries)), ("tests", tests_table(entries))):
        marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page = re.sub(marks, lambda m, t=text: f"{m[1]}{t}\n{m[2]}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    if "--oldest" in sys.argv[1:]:
        other = install_oldest(Path(sys.argv[sys.argv.index("--oldest") + 1]))
        sys.exit(subprocess.run([other, __file__, "--tests"], check=False).returncode)
    if "--page" not in sys.argv[1:]:
        made = check_all()
        if "--tests" in sys.argv[1:]:
            made["tests"] = run_tests()
        save(made)
        print(name_of(made))
        for family, found in made["families"].items():
            for implementation, one in found.items():
                if not one.get("exact"):
                    print(f"{family}, {implementation}: {one.get('error', one)}")
    PAGE.write_text(fill(PAGE.read_text(), json.loads(RESULTS.read_text())))
