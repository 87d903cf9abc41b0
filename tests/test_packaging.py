"""What is shipped is whole, and what is declared is what is used."""

import ast
import functools
import importlib.metadata as metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = ROOT / "overt"
MADE = {"__pycache__"}

# Extras nobody installs together with the pinned torch: see the comment at each.
UNPINNED = {"timm"}  # brings torchvision, whose registry build wants CUDA


def declared(extra: str | None = None) -> set[str]:
    """The distributions of the core, or of one extra with the extras it names."""
    if extra is None:
        return {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    found = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "overt":
            found |= {name for other in requirement.extras for name in declared(other)}
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """A distribution and everything that comes with it on this machine."""
    for extra in ("", *sorted(extras)):
        if (canonicalize_name(name), extra) in seen:
            continue
        seen.add((canonicalize_name(name), extra))
        yield canonicalize_name(name)
        for requirement in map(Requirement, metadata.requires(name) or []):
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": extra}):
                yield from closure(requirement.name, frozenset(requirement.extras), seen)


def test_constraints_pin_what_dev_brings_and_nothing_else() -> None:
    needed = set(closure("overt", frozenset({"dev"}), set())) - {"overt"}
    # Another Python, or torch with CUDA, brings more; on the pinned set they are equal.
    assert set(pins()) == {name for name in needed if not name.startswith(("nvidia", "triton"))}


def test_the_installed_versions_are_the_pinned_ones() -> None:
    there = {name: metadata.version(name).partition("+")[0] for name in pins()}
    assert there == pins()


def test_pins_are_inside_the_open_ranges() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name not in UNPINNED | {"overt"}:
            assert requirement.specifier.contains(pins()[name]), requirement


# --- imports --------------------------------------------------------------------------------


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each foreign top-level package a file imports, and whether at the top of the file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.split(".", maxsplit=1)[0]
            if top not in sys.stdlib_module_names and top != "overt":
                yield top, node in tree.body


def foreign() -> list[tuple[Path, str, bool]]:
    """Every import of another package; what is at the top of `serve`, a room apart, is not."""
    apart = PACKAGE / "serve"  # imported by the command of this name alone, which needs its extra
    return [
        (path, top, at_top and apart not in path.parents)
        for path in sorted(PACKAGE.rglob("*.py"))
        for top, at_top in imports(path)
    ]


providers = functools.cache(metadata.packages_distributions)  # reads every installed file list


def distributions(top: str) -> set[str]:
    names = providers().get(top, [top])
    return {canonicalize_name(name) for name in names}


def test_every_import_is_declared() -> None:
    extras = {name for e in PROJECT["optional-dependencies"] if e != "dev" for name in declared(e)}
    # Packages that are read when the user has them, guarded, and belong to no extra.
    guests = {"torchvision", "triton"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {top}"
        for path, top, at_top in foreign()
        if top not in guests
        and not distributions(top) & (declared() | (set() if at_top else extras))
    ]
    assert wrong == []


def test_every_core_dependency_is_used() -> None:
    used = {name for _, top, _ in foreign() for name in distributions(top)}
    assert declared() - used == set()


def test_slow_packages_are_imported_inside_functions() -> None:
    slow = {"scipy", "matplotlib", "transformers", "skimage", "sklearn", "ot", "tensorboard"}
    slow |= {"torchmetrics", "numba", "timm", "fastapi", "uvicorn"}
    assert [(str(path), top) for path, top, at_top in foreign() if at_top and top in slow] == []


# --- the wheel ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(PACKAGE, copy / "overt", ignore=shutil.ignore_patterns(*MADE))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(out), str(copy)], check=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    ours = [p for p in PACKAGE.rglob("*") if p.is_file() and not MADE & set(p.parts)]
    wanted = {p.relative_to(ROOT).as_posix() for p in ours}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wanted - names == set()
    assert {name for name in names if not name.startswith("overt-")} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)  # our own archive
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import overt; print(overt.__file__);"
        "sys.argv[0] = 'overt'; from overt.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, said = done.stdout.strip().split("\n")
    assert Path(where).is_relative_to(tmp_path)
    assert PROJECT["version"] in said


def test_the_version_is_written_once() -> None:
    assert metadata.version("overt") == PROJECT["version"]
    pattern = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']""")
    assert [p for p in PACKAGE.rglob("*.py") if pattern.search(p.read_text())] == []
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{PROJECT['version']}]" in changes or "[Unreleased]" in changes


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """`make` with a Python that is too old says so before anything is made."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", f"PYTHON={old}", ".venv/.made"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr and not (tmp_path / ".venv").exists()


def test_every_make_target_says_what_it_does() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in "demo test test-long lint bench docs clean help".split():
        assert re.search(rf"^{target} +\S+", done.stdout, re.MULTILINE), target


# --- citation -------------------------------------------------------------------------------


def test_the_citation_names_the_five_papers_each_with_its_page() -> None:
    """As version 1.2.0 of the Citation File Format wants it."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == PROJECT["license"]
    papers = cited["references"]
    assert [Path(paper["notes"]).stem for paper in papers] == ["ltpa", "ssa", "han", "vgp", "a2"]
    for paper in papers:
        page = (ROOT / paper["notes"]).read_text()
        families = [author["family-names"] for author in paper["authors"]]
        assert str(paper["year"]) in page and families[0] in page and families[-1] in page
