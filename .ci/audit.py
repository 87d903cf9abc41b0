"""Check installed packages for known vulnerabilities and unknown files.

python .ci/audit.py            check; exit code 1 if something is wrong or could not be checked
python .ci/audit.py --write    regenerate .ci/hashes.txt, after a pin has changed

All pinned packages are checked: constraints.txt, and those that the Makefile installs separately.

1. A local list, without a network: no pin, and no minimum version of pyproject.toml, is older than
   the first version in which a vulnerability is fixed.
2. The vulnerabilities that the package index publishes for each pinned version. If fewer than half
   of the versions can be looked up, the check fails; OVERT_AUDIT_OFFLINE=1 accepts it.
3. The SHA-256 of every installed file, as written by `pip install --report`, must be listed in
   .ci/hashes.txt. `pip --require-hashes` cannot be used: it rejects an editable install and any
   file that is not listed, and CPU builds of torch are not on the index.
"""

import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pip._internal.models.index import PyPI

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / ".ci" / "hashes.txt"
REPORTS = ROOT / ".venv" / "reports"  # of `pip install --report`: see the Makefile
APART = [ROOT / ".venv" / name for name in ("timm", "integrations")]  # outside of site-packages
INDEX = PyPI.pypi_url  # default index of pip
PAUSES = (1.0, 4.0)  # seconds before a request is repeated
LEAST = 0.5  # minimum share of versions looked up
WITHOUT_REPORT = {"overt", "pip"}  # this folder, and part of the environment

# First version without the vulnerability, and its description. Parsers of untrusted data first.
FLOORS = {
    "pillow": ("12.2.0", "CVE-2026-40192: a small FITS file unpacks without end"),
    "torch": ("2.6.0", "CVE-2025-32434: weights_only=True could be made to run code"),
    "transformers": ("4.53.0", "CVE-2025-6051 and others: texts that take for ever to read"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a way out of the sandbox of templates"),
    "starlette": ("0.49.1", "CVE-2025-62727: ranges of files that take for ever"),
    "fastapi": ("0.132.0", "JSON without a Content-Type was read: cross-site requests"),
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
# Published vulnerabilities that do not apply: number and reason.
ACCEPTED: dict[str, str] = {}

Fetch = Callable[[str], Any]


# --- versions


def canonical(name: str) -> str:
    """Return a name in the spelling of the index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def below(pins: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for every version that is older than the list allows."""
    from packaging.version import Version

    for name, (least, why) in FLOORS.items():
        if name in pins and Version(pins[name]) < Version(least):
            yield f"{name} {pins[name]} is older than {least} ({why})"


def pinned(text: str) -> dict[str, str]:
    """Return names and versions of a constraints file or a Makefile."""
    lines = "\n".join(line.partition("#")[0] for line in text.splitlines())
    found = re.findall(r"(?<![\w.-])([A-Za-z0-9][\w.-]*)==([0-9][\w.!+]*)", lines)
    return {canonical(name): version for name, version in found}


def lowest(text: str) -> dict[str, str]:
    """Return the minimum version of each package in a pyproject.toml."""
    from packaging.requirements import Requirement

    project = tomllib.loads(text)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = {}
    for requirement in (Requirement(line) for group in groups for line in group):
        for part in requirement.specifier:
            if part.operator in (">=", "=="):
                found[canonical(requirement.name)] = part.version
    return found


def everything() -> dict[str, str]:
    """Return every pinned package: of the lock file and of the Makefile."""
    texts = [(ROOT / name).read_text() for name in ("Makefile", "constraints.txt")]
    return {name: version for text in texts for name, version in pinned(text).items()}


# --- published vulnerabilities


def fetch(path: str) -> Any:
    """Return the JSON at a path of the index, None if the page does not exist.

    Raises:
        OSError: The index did not respond, after repeated requests.
    """
    request = Request(f"{INDEX}/{path}", headers={"User-Agent": "overt-audit"})
    for pause in (*PAUSES, None):
        try:
            with urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except HTTPError as problem:
            if problem.code in (404, 410):
                return None
            error: Exception = problem
        except (OSError, ValueError) as problem:
            error = problem
        if pause is not None:
            time.sleep(pause)
    raise OSError(f"{INDEX} does not respond: {error}")


def weaknesses(name: str, version: str, get: Fetch) -> list[dict[str, Any]] | None:
    """Return the published vulnerabilities of a version; None if they cannot be looked up.

    The page of a version lists them. The page of a package lists those of its newest version: a
    mirror of the index may have only these pages.
    """
    page = get(f"{name}/{version}/json")
    if page is None:
        page = get(f"{name}/json")
        if page is None or page["info"]["version"] != version:
            return None
    return [one for one in page["vulnerabilities"] if not one.get("withdrawn")]


def published(pins: Mapping[str, str], get: Fetch = fetch) -> tuple[list[str], list[str], str]:
    """Look up the vulnerabilities of all pins.

    Returns:
        Sentences on vulnerable versions, packages that could not be looked up, and a summary.
    """
    if not pins:
        return [], [], "no package is pinned"
    try:
        get(f"{next(iter(pins))}/json")  # detect an unreachable index once
        with ThreadPoolExecutor(8) as pool:
            found = dict(
                zip(pins, pool.map(lambda n: weaknesses(n, pins[n], get), pins), strict=True)
            )
    except (OSError, KeyError, TypeError) as problem:
        return [], list(pins), f"{problem}"
    missing = [f"{name} {pins[name]}" for name, listed in found.items() if listed is None]
    wrong = {
        f"{name} {pins[name]}: {weak['id']} ({', '.join(weak.get('aliases', []))}), fixed in "
        f"{', '.join(weak.get('fixed_in') or ['no version'])}"
        for name, listed in found.items()
        for weak in listed or []
        if not {weak["id"], *weak.get("aliases", [])} & set(ACCEPTED)
    }
    looked = len(pins) - len(missing)
    return sorted(wrong), missing, f"{looked} of {len(pins)} versions looked up"


def enough(pins: Mapping[str, str], missing: Iterable[str]) -> bool:
    """Return whether enough versions were looked up."""
    return len(pins) > 0 and len(list(missing)) <= (1 - LEAST) * len(pins)


# --- files


def listed(text: str) -> dict[str, set[str]]:
    """Return the SHA-256 of the files of each `name==version` of a file of requirements."""
    found: dict[str, set[str]] = {}
    now = ""
    for word in text.replace("\\\n", " ").split():
        if "==" in word and not word.startswith("--"):
            name, version = word.split("==")
            now = f"{canonical(name)}=={version}"
            found[now] = set()
        elif word.startswith("--hash=sha256:"):
            found[now].add(word.removeprefix("--hash=sha256:"))
    return found


def reported(folder: Path) -> dict[tuple[str, str], str]:
    """Return the SHA-256 of every file that pip installed, by name and version."""
    found = {}
    for path in sorted(folder.glob("*")):
        text = path.read_text()
        for item in json.loads(text)["install"] if text else []:
            archive = item["download_info"].get("archive_info", {})
            digest = archive.get("hashes", {}).get("sha256")
            digest = digest or archive.get("hash", "").removeprefix("sha256=")
            name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
            found[name, version] = digest
    return found


def compared(
    there: Iterable[tuple[str, str]],
    reports: Mapping[tuple[str, str], str],
    known: Mapping[str, set[str]],
) -> tuple[list[str], list[str]]:
    """Compare the installed packages with the list of files.

    Args:
        there: Names and versions of the installed packages.
        reports: Installed SHA-256, from `reported`.
        known: Accepted SHA-256, from `listed`.

    Returns:
        Sentences on errors, and on local builds that no index lists.
    """
    wrong, local = [], []
    for name, version in sorted(set(there)):
        right = known.get(f"{name}=={version.partition('+')[0]}")
        if name in WITHOUT_REPORT:
            continue
        if right is None:
            wrong.append(f"{name} {version} is installed but not pinned in .ci/hashes.txt")
        elif (name, version) not in reports:
            wrong.append(f"{name} {version} was installed without a report; install it again")
        elif reports[name, version] not in right:
            text = f"{name} {version} has the SHA-256 {reports[name, version] or 'of nothing'}"
            if "+" in version:  # torch 2.13.0+cpu: a build that is not on the index
                local.append(f"{text}: a local build, not in .ci/hashes.txt")
            else:
                wrong.append(f"{text}, which is not in .ci/hashes.txt")
    return wrong, local


def installed() -> Iterator[tuple[str, str]]:
    """Yield the name and version of every distribution of this environment."""
    paths = [*sys.path, *(str(folder) for folder in APART if folder.is_dir())]
    for one in metadata.distributions(path=paths):
        yield canonical(one.metadata["Name"]), one.version


def fitting(file: str) -> bool:
    """Return whether a file supports one of our systems: CPython 3.11 to 3.14, POSIX."""
    if not file.endswith(".whl"):
        return True
    python, abi, platform = file.removesuffix(".whl").rsplit("-", 3)[1:]
    return (
        any(word in platform for word in ("any", "manylinux", "macosx"))
        and not abi.endswith("t")
        and (abi == "abi3" or re.search(r"py3|cp31[1-4]", python) is not None)
    )


def lock(pins: Mapping[str, str], get: Fetch = fetch) -> str:
    """Return new contents of .ci/hashes.txt: all matching files of all pins, and manual entries."""
    old = listed(HASHES.read_text()) if HASHES.is_file() else {}
    lines = [
        "# SHA-256 of every file of every pinned version that fits CPython 3.11 to 3.14 on Linux",
        "# or macOS, written by `python .ci/audit.py --write`. Manual entries are preserved: the",
        "# CPU build of torch, which is not on the index.",
    ]
    for name, version in sorted(pins.items()):
        page = get(f"{name}/json")
        files = [] if page is None else page["releases"].get(version, [])
        right = {one["digests"]["sha256"] for one in files if fitting(one["filename"])}
        right |= old.get(f"{name}=={version}", set())
        lines.append(
            " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{x}" for x in sorted(right))])
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the findings; return 1 if action is needed."""
    pins = everything()
    if "--write" in sys.argv[1:]:
        HASHES.write_text(lock(pins))
        print(f"wrote {HASHES}")
        return 0
    wrong = list(below(pins))
    allowed = lowest((ROOT / "pyproject.toml").read_text())
    wrong += [f"pyproject.toml lets in {one}" for one in below(allowed)]
    print(f"{len(FLOORS)} known vulnerabilities: {len(wrong)} versions are too old")

    more, missing, summary = published(pins)
    print(f"{summary}, {len(more)} vulnerabilities")
    if missing:
        print(f"not looked up: {', '.join(missing[:20])}{', ...' if len(missing) > 20 else ''}")
    wrong += more
    if not enough(pins, missing) and os.environ.get("OVERT_AUDIT_OFFLINE") != "1":
        wrong.append(
            f"vulnerabilities could not be looked up at {INDEX} for most packages; connect this "
            "machine, or accept it with OVERT_AUDIT_OFFLINE=1"
        )

    there = list(installed())
    files, local = compared(there, reported(REPORTS), listed(HASHES.read_text()))
    print(f"{len(there)} installed packages: {len(files)} files are not those of .ci/hashes.txt")
    for line in local:
        print(f"note: {line}")
    for line in (*wrong, *files):
        print(f"NOT SAFE: {line}")
    return 1 if wrong or files else 0


if __name__ == "__main__":
    sys.exit(main())
