"""Fail if a test was skipped although its requirement is available.

python .ci/skips.py DATA REPORT.xml...   (reports as written by `pytest --junitxml`)
"""

import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDERS = {  # name of a dataset in skip reasons -> its folder
    "cifar10": "cifar-10-batches-bin",
    "cifar100": "cifar-100-binary",
    "trec6": "trec",
    "daquar": "daquar",
    "flickr8k": "flickr8k",
    "flickr30k_entities": "flickr30k_entities",
    "osie": "osie",
    "refcoco": "refcoco",
    "yelp_hat": "yelp_hat",
}


def present(data: Path) -> dict[str, str]:
    """Return the words that do not justify a skip on this machine, with the reason."""
    found = {}
    for name, folder in FOLDERS.items():
        if (data / folder).is_dir() and any((data / folder).iterdir()):
            found[name] = found[folder] = f"{data / folder} is there"
    if data.is_dir():
        found["OVERT_DATA is not set"] = "OVERT_DATA is set"
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser:
        found["chromium"] = f"{browser} is there"
    return found


def skipped(report: Path) -> list[tuple[str, str]]:
    """Return the name and reason of every skipped test; expected failures are not skips."""
    tests = []
    for case in ET.parse(report).iter("testcase"):
        for skip in case.iter("skipped"):
            if skip.get("type") != "pytest.xfail":
                name = f"{case.get('classname')}::{case.get('name')}"
                tests.append((name, skip.get("message") or ""))
    return tests


def unexcused(
    tests: Sequence[tuple[str, str]], there: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return the skipped tests whose requirement is available, with that requirement."""
    wrong = []
    for test, reason in tests:
        for word, why in there.items():
            if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", reason, re.IGNORECASE):
                wrong.append((test, reason, why))
                break
    return wrong


def main() -> int:
    """Print every skipped test; return 1 if one is not justified."""
    data, *reports = map(Path, sys.argv[1:])
    tests = [test for report in reports for test in skipped(report)]
    for name, reason in tests:
        print(f"skipped: {name}: {reason}")
    wrong = unexcused(tests, present(data))
    for name, reason, why in wrong:
        print(f"NOT EXCUSED: {name} skipped because {reason!r}, but {why}")
    print(f"{len(tests)} skipped, {len(wrong)} without excuse")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
